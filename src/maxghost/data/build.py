"""Builds the dataset from the data section of the configuration, with every check possible before training."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from maxghost.config import ConfigError, DataConfig, plugins
from maxghost.config.values import MOST, divisors
from maxghost.data import sources
from maxghost.data.conversations import ConversationUnits, PairUnits, Rendering
from maxghost.data.dataset import MANY_DOCUMENTS, POOL_DOCUMENTS, Dataset
from maxghost.data.duplicates import read_ids
from maxghost.data.hashing import content_hashes, text_hash
from maxghost.data.packing import FIRST_FIT, Layout
from maxghost.data.prepared import PreparedSource, PreparedUnits, is_prepared
from maxghost.data.reader import TrainIterator
from maxghost.data.sources import text
from maxghost.data.sources.base import COLUMNS, Kept, Source, check_known, read_or_skip
from maxghost.data.sources.files import expand
from maxghost.data.split import Split, scan
from maxghost.data.tokenizers import ByteTokenizer, Tokenizer, check_specials, load_tokenizer
from maxghost.data.windows import Order, Units, Windows

_MOST_FILES_IN_A_STATE = 1000


def load_dataset(cfg: DataConfig, seed: int = 0, num_shards: int = 1, shard: int = 0, *, batch_size: int | None = None,
                 vocab_size: int | None = None, records: str = "text") -> Dataset:  # fmt: skip
  """The dataset of the data section of a configuration. Raises ConfigError.

  seed: of the document order and the split. num_shards: equal parts of the global batch. shard: the one that this
  process reads. batch_size: rows of the global batch; default per_device_batch_size for each shard. vocab_size: of the
  model; the tokenizer's must not be larger. records: what a document is (`config.plugins.Objective.records`).
  """
  source, tokenizer = open_all(cfg, seed, vocab_size, records)
  return make_dataset(source, cfg, seed, num_shards, shard, batch_size=batch_size, tokenizer=tokenizer, records=records)


def open_all(cfg: DataConfig, seed: int, vocab_size: int | None = None, records="text") -> tuple[Source, Tokenizer]:
  """The source (tokenized if `dataset_files` names a prepared folder) and the tokenizer. Raises ConfigError."""
  cfg = kept(cfg, records)
  tokenizer = load_tokenizer(cfg.tokenizer_type, cfg.tokenizer_path)
  if vocab_size is not None and tokenizer.vocab_size > vocab_size:
    said = f"vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} ids of"
    raise ConfigError(f"{said} tokenizer_type={cfg.tokenizer_type}; use vocab_size={tokenizer.vocab_size} or more")
  files = cfg.dataset_files if cfg.dataset_type == "grain" else ()
  if labelled := [item for item in files if "=" in item and is_prepared(item.partition("=")[2])]:
    said = f"dataset_files has {labelled[0]}, a prepared corpus, which has domains of its own"
    raise ConfigError(f"{said}; write dataset_files=[{labelled[0].partition('=')[2]}]")
  if (folder := next(filter(is_prepared, files), None)) is None:
    return sources.open_source(cfg, seed), tokenizer
  if records != "text":
    raise ConfigError(f"dataset_files has {folder}, a prepared corpus of plain text, but the objective reads {records}")
  if len(cfg.dataset_files) > 1:
    raise ConfigError(f"dataset_files has {folder}, a prepared corpus, which goes alone; prepare all as one")
  sources.check_keys(cfg)
  return PreparedSource(folder, tokenizer, cfg.dataset_domains, cfg.document_fields), tokenizer


def make_dataset(source: Source, cfg: DataConfig, seed: int = 0, num_shards: int = 1, shard: int = 0, *,
                 batch_size: int | None = None, tokenizer: Tokenizer | None = None, records: str = "text",
                 answer_length: int = 0) -> Dataset:  # fmt: skip
  """Like `load_dataset`, for any `Source`, such as a `DocumentList`. answer_length: of `ConversationUnits`."""
  tokenizer = tokenizer or ByteTokenizer()
  strategy = FIRST_FIT if cfg.packing == "none" else cfg.packing
  layout = Layout(cfg.max_target_length, cfg.max_segments, strategy, cfg.add_bos, cfg.add_eos)
  batch_size = cfg.per_device_batch_size * num_shards if batch_size is None else batch_size
  batch_size //= 2 if records == "pairs" else 1  # rows of the data, each of which makes two of a batch
  if batch_size % num_shards:
    raise ConfigError(f"a global batch of {batch_size} rows does not divide over {num_shards} shards; use a multiple")
  if batch_size % cfg.dataset_shards:
    said = f"dataset_shards={cfg.dataset_shards} does not divide the global batch of {batch_size} rows"
    raise ConfigError(f"{said}; use one of {', '.join(map(str, divisors(batch_size)))}")
  if (size := source.num_bytes) < cfg.max_target_length and not isinstance(source, PreparedSource):
    # Parquet's footer counts a text once that many rows have.
    size = sum(len(one) for one in read_or_skip(source.texts, np.arange(len(source))) if one)
  if size < cfg.max_target_length:
    said = f"max_target_length={cfg.max_target_length} is longer than all the text, {size} bytes"
    raise ConfigError(f"{said}; use a shorter row or more data")
  parts = _parts(source, cfg, seed, tokenizer, layout, records)
  parts[0] = dataclasses.replace(parts[0], answer_length=answer_length) if answer_length else parts[0]
  streams, weights = _streams(cfg, parts[0], seed)
  identity, per_lane = _identity(cfg, seed, batch_size, parts), batch_size // cfg.dataset_shards
  rows = (shard * batch_size // num_shards, (shard + 1) * batch_size // num_shards)
  options = {"rows_per_lane": per_lane, "rows": rows, "num_workers": cfg.grain_worker_count}
  train = TrainIterator(streams, weights, identity, **options)
  dataset = Dataset(parts, train, next(iter(cfg.validation_sets.values())), seed)
  if cfg.ghost_val_copies == "error" and dataset.copies:
    raise ConfigError(f"ghost_val_copies=error: {dataset.notes()[-1]}")
  return dataset


def units_of(cfg: DataConfig, tokenizer: Tokenizer, records: str) -> Callable[..., Units]:
  """The units of documents of this kind, by (source, split, tokenizer, ...). Raises ConfigError."""
  if records == "conversations":
    return functools.partial(ConversationUnits, rendering=Rendering.of(cfg, tokenizer))
  if records == "pairs":
    rendering = dataclasses.replace(Rendering.of(cfg, tokenizer), completion_only=True)
    return functools.partial(PairUnits, rendering=rendering, has_reference=cfg.has_reference)
  check_specials(tokenizer, cfg.add_bos, cfg.add_eos)
  return Units


def kept(cfg: DataConfig, records: str) -> DataConfig:
  """The settings by which sources read documents of this kind: their columns as JSON. Raises ConfigError."""
  if records == "text":
    return cfg
  asked, known = cfg.train_data_columns, COLUMNS[records]
  if asked != ("text",):
    check_known("train_data_columns", asked, known, f"the objective, which reads {records},")
  usual = not {*asked} - {"text", *plugins.REFERENCE_COLUMNS}  # log-probabilities alone: beside the usual ones
  return dataclasses.replace(cfg, train_data_columns=Kept(known if usual else asked))


def _parts(source: Source, cfg: DataConfig, seed: int, tokenizer: Tokenizer, layout: Layout, records) -> list[Units]:
  """The training source and any held-out files of `ghost_val_sets`, each with its split and the held-out texts."""
  held_out = tuple(dict.fromkeys(cfg.validation_sets.values()))
  listed = {key: getattr(cfg, key) for key in ("dataset_exclude_file", "dataset_include_file")}
  excluded, included = (_listed(key, path, source) if path else None for key, path in listed.items())
  splits = [(source, Split(source, held_out, cfg.ghost_val_fraction, seed, excluded, included), records)]
  for kind, given in cfg.validation_files(records).items():
    plain = cfg if kind == records else dataclasses.replace(cfg, train_data_columns=DataConfig().train_data_columns)
    read = text.load(expand("ghost_val_sets", given), dataclasses.replace(kept(plain, kind), document_fields=()))
    if both := [domain for domain in read.domains if domain in source.domains]:
      said = f"ghost_val_sets has the name '{both[0]}', which is a domain of the training data"
      raise ConfigError(f"{said}; name it otherwise")
    splits.append((read, Split(read, read.domains, 1.0, seed), kind))
  domains = [domain for one, *_ in splits for domain in one.domains]
  if not cfg.ghost_val_sets and not set(held_out) & set(domains):
    said = "ghost_val_sets is not given"
    raise ConfigError(f"{said}; name the domain that documents are held out of: {', '.join(domains)}")
  check_known("ghost_val_sets", held_out, domains, "the data")
  hashes, sizes = [], set()
  for one, split, _ in splits:
    for domain in (domain for domain in one.domains if domain in held_out):
      pool = split.pool(domain, POOL_DOCUMENTS)
      if not len(pool) and cfg.ghost_val_fraction > 0:
        said = f"ghost_val_fraction={cfg.ghost_val_fraction} of the documents of validation domain '{domain}' is none"
        raise ConfigError(f"{said}: the validation set is empty; use a larger share or a domain with more documents")
      if isinstance(one, PreparedSource):
        hashes.append(one.content_hashes(pool))
        sizes.update(one.sizes(pool).tolist())
      else:
        found = [text for text in read_or_skip(one.texts, pool, cfg.on_corrupt) if text]
        hashes.append(content_hashes(found))
        sizes.update(map(len, found))
  if all(splits[0][1].left_out(indices).all() for indices in scan(len(source))):
    more = ", or list more in dataset_include_file" if cfg.dataset_include_file else ""
    said = "there is nothing to train on: every document is held out for validation or excluded"
    raise ConfigError(f"{said}; use a smaller ghost_val_fraction or more data{more}")
  contents = (np.unique(np.concatenate(hashes)), frozenset(sizes), cfg.ghost_val_copies if sizes else "keep")
  parts = []
  for one, split, kind in splits:
    make = PreparedUnits if isinstance(one, PreparedSource) else units_of(cfg, tokenizer, kind)
    own = layout if kind == "text" else dataclasses.replace(layout, strategy=FIRST_FIT)  # records are never split
    parts.append(make(one, split, tokenizer, own, cfg.on_corrupt, *contents))
  return parts


def _listed(key: str, path: str, source: Source) -> np.ndarray:
  """Hashes of the ids in the file of a key; a note says how many of them no document has. Raises ConfigError."""
  said = f"{key}={path}"
  hashes, unknown, asked = read_ids(path, source, key)
  if key == "dataset_exclude_file" and len(source) > MANY_DOCUMENTS:
    return hashes
  there = np.zeros(len(hashes), bool)
  for indices in scan(len(source)):
    there |= np.isin(hashes, source.id_hashes(indices))
  lost = unknown + int((~there).sum())
  if not there.any() and key == "dataset_include_file":
    raise ConfigError(f"{said}: none of its {lost:,} ids is that of a document of the data")
  if lost:
    note = f"{said}: {lost:,} of its {asked:,} ids are those of no document of the data"
    source.notes = (*(old for old in source.notes if old != note), note)
  return hashes


def _streams(cfg: DataConfig, units: Units, seed: int) -> tuple[list[Windows], list[float] | None]:
  """The streams that rows come from, and their shares of the rows (None for a single one)."""
  domains = units.source.domains
  weights, size, lanes = parse_weights(cfg, domains), cfg.shuffle_window_bytes, cfg.dataset_shards

  def windows(order: Order, window_bytes: int, name: str = "") -> Windows:
    if len(order) < lanes:
      said = f"dataset_shards={lanes} is more than the {len(order)} documents (or prepared blocks) of"
      raise ConfigError(f"{said} {f'domain {name!r}' if name else 'an epoch'}; use fewer, or more data")
    return Windows(units, order, name=name, seed=seed, num_lanes=lanes, window_bytes=window_bytes)

  if cfg.mixture == "proportional":
    return [windows(Order([units.all_units()], seed), size)], None
  parts, streams = [units.units_of(number) for number in range(len(domains))], []
  if cfg.mixture == "epochs":
    for name, part in zip(domains, parts, strict=True):
      if (times := weights[name]) and not round(len(part) * times):
        raise ConfigError(f"dataset_mixture: {name}={times:g}x is none of {len(part):,} documents; use more, or 0x")
    return [windows(Order(parts, seed, [weights[domain] for domain in domains]), size)], None
  for domain, part in zip(domains, parts, strict=True):
    if weights[domain] > 0:
      streams.append(windows(Order([part], seed), max(1 << 18, int(size * weights[domain])), domain))
  return streams, [weights[stream.name] for stream in streams]


def parse_weights(cfg: DataConfig, domains: tuple[str, ...]) -> dict[str, float]:
  """dataset_mixture as {domain: number}; checks names, numbers, and for shares the sum."""
  weights = {}
  for item in cfg.dataset_mixture:
    name, number = (part.strip() for part in item.partition("=")[::2])
    if name in weights:
      raise ConfigError(f"dataset_mixture names '{name}' twice; give it one number")
    try:
      weights[name] = float(number.removesuffix("x"))
    except ValueError:
      said = f"dataset_mixture has '{item}'"
      raise ConfigError(f"{said}, which is not of the form domain=share (0.25) or domain=times (2x)") from None
    check_known("dataset_mixture", [name], domains, "the data")
    if not 0 <= weights[name] <= MOST:
      raise ConfigError(f"dataset_mixture has '{item}'; shares and times are numbers from 0 to {MOST:,}")
  if cfg.mixture == "proportional":
    return weights
  if missing := [domain for domain in domains if domain not in weights]:
    said = f"dataset_mixture needs a number for each domain, but has none for {', '.join(missing)}"
    raise ConfigError(f"{said}; add {missing[0]}=..., or leave the domain out with dataset_domains")
  total = sum(weights.values())
  if cfg.mixture == "weights" and abs(total - 1) > 1e-6:
    fixed = ",".join(f"{name}={value / total:.6g}" for name, value in weights.items()) if total else "a=0.5,b=0.5"
    raise ConfigError(f"dataset_mixture sums to {total:g}, but shares sum to 1; use for example [{fixed}]")
  if total <= 0:
    raise ConfigError("dataset_mixture is all 0: nothing to train on")
  return weights


def _identity(cfg: DataConfig, seed: int, batch_size: int, parts: list[Units]) -> dict:
  """What a saved position depends on: the data, the tokenizer, and the settings that determine the rows."""
  layout = parts[0].layout
  rows = (seed, batch_size, cfg.dataset_shards, cfg.max_target_length, layout.max_segments, cfg.packing != "none")
  windows = (layout.strategy, cfg.add_bos, cfg.add_eos, cfg.shuffle_window_bytes)
  held_out = (sorted(set(cfg.validation_sets.values())), cfg.ghost_val_fraction, cfg.ghost_val_copies)
  mixture = (cfg.mixture, tuple(text.removesuffix("x") for text in cfg.dataset_mixture))
  sources = (parts[0].tokenizer.fingerprint, *(part.source.fingerprint for part in parts))
  excluded, included = parts[0].split.excluded.tolist(), parts[0].split.included
  made_by = dict.fromkeys(text for part in parts for text in part.settings)
  settings = (*rows, *windows, *held_out, *mixture, cfg.on_corrupt, *sources, *excluded, *made_by)
  settings += () if included is None else ("include", *included.tolist())
  files = {name: value for part in parts for name, value in part.source.files.items()}
  kept = files if len(files) <= _MOST_FILES_IN_A_STATE else {}
  return {"fingerprint": f"{text_hash(*map(repr, settings)):016x}", "files": kept}
