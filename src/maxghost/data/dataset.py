"""From the data section of the configuration to a dataset: documents, training batches, validation batches."""

import functools
from dataclasses import dataclass

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.config.schema import DataConfig
from maxghost.data import packing
from maxghost.data.hashing import text_hash
from maxghost.data.reader import TrainIterator
from maxghost.data.sources import stdlib, synthetic
from maxghost.data.sources.base import Source
from maxghost.data.split import Split
from maxghost.data.tokenizers import ByteTokenizer, Tokenizer
from maxghost.data.types import Batch, Document, DocumentId
from maxghost.data.windows import Layout, Windows, pack_documents

_VALIDATION = text_hash("validation order")
_POOL_DOCUMENTS = 4096  # of a validation domain; further ones are held out too, and not read


@dataclass(frozen=True, slots=True)
class DomainSummary:
  """Documents and text bytes of a domain, and how many of them are held out for validation."""

  domain: str
  documents: int
  bytes: int
  held_out: int
  held_out_bytes: int


class Dataset:
  """Documents, split, packed and batched. Made by `load_dataset`.

  train: the iterator of training batches (`next`, `state`, `restore`).
  """

  def __init__(self, source: Source, tokenizer: Tokenizer, layout: Layout, split: Split, windows: Windows,
               val_domain: str, train: TrainIterator, seed: int):
    self.source, self.tokenizer, self.layout = source, tokenizer, layout
    self.train = train
    self.val_domain = val_domain
    self._split, self._windows, self._seed = split, windows, seed

  @property
  def fingerprint(self) -> str:
    return self.source.fingerprint

  @property
  def max_segments(self) -> int:
    """S: segments that a row can hold; the same for every batch of a run."""
    return self.layout.max_segments

  def document(self, index: int) -> Document:
    return self.source[int(index)]

  def document_id(self, index: int) -> DocumentId:
    """(domain, path, offset) of a document."""
    return self.source.document_id(int(index))

  @functools.cached_property
  def num_train_documents(self) -> int:
    return len(self.source) - sum(entry.held_out for entry in self.summary())

  @functools.cache  # noqa: B019 - one dataset per run
  def summary(self) -> tuple[DomainSummary, ...]:
    """What each domain holds, in the order of the source's domains."""
    indices = np.arange(len(self.source))
    numbers = self.source.domain_numbers(indices)
    out = self._split.held_out(indices)
    sizes = np.array([len(self.source[int(index)].text) for index in indices], np.int64)
    return tuple(
      DomainSummary(
        domain,
        int((numbers == number).sum()),
        int(sizes[numbers == number].sum()),
        int(((numbers == number) & out).sum()),
        int(sizes[(numbers == number) & out].sum()),
      )
      for number, domain in enumerate(self.source.domains)
    )

  def validation_batch(self, index: int, num_rows: int, domain: str | None = None) -> Batch:
    """Rows [index, index + 1) * num_rows of the held-out documents of a domain, packed; starts over at their end.

    domain: default the `ghost_val_domain`. A function of its arguments and the configuration alone.
    Raises ConfigError when the domain has no held-out documents.
    """
    rows = self._validation_rows(self.val_domain if domain is None else domain)
    wanted = (index * num_rows + np.arange(num_rows)) % len(rows)
    cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
    parts = []
    for run in np.split(wanted, cuts):
      filled = packing.fill(
        rows, int(run[0]), int(run[-1]) + 1, self.layout.row_length, self.layout.max_segments, self.tokenizer.pad_id
      )
      parts.append(Batch(*filled, np.full(len(run), (index * num_rows) // len(rows), np.int64)))
    return packing.join(parts)

  @property
  def num_validation_rows(self) -> int:
    """Packed rows of the validation domain; `validation_batch` repeats after them."""
    return len(self._validation_rows(self.val_domain))

  @functools.cache  # noqa: B019 - one dataset per run
  def _validation_rows(self, domain: str) -> packing.Rows:
    if domain not in self.source.domains:
      hint = did_you_mean(domain, self.source.domains) or f"; the data has {', '.join(self.source.domains)}"
      raise ConfigError(f"validation domain '{domain}' is not a domain of the data{hint}")
    pool = self._split.pool(domain, _POOL_DOCUMENTS)
    rows = pack_documents(self.source, pool, self.tokenizer, self.layout, (_VALIDATION, self._seed))
    if not len(rows):
      raise ConfigError(
        f"validation domain '{domain}' has no held-out documents; ghost_val_domain={self.val_domain} has"
      )
    return rows


def load_dataset(cfg: DataConfig, seed: int = 0, num_shards: int = 1, shard: int = 0, *, batch_size: int | None = None,
                 vocab_size: int | None = None) -> Dataset:
  """The dataset of a configuration.

  seed: of the document order and the split. batch_size: rows of the global batch (default: per_device_batch_size for
  each shard); this process reads the rows of `shard` out of `num_shards`. vocab_size: the model's; checked against the
  tokenizer's. Raises ConfigError for what the data cannot give.
  """
  tokenizer = ByteTokenizer()
  if vocab_size is not None and tokenizer.vocab_size > vocab_size:
    raise ConfigError(
      f"vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} ids of tokenizer_type={cfg.tokenizer_type}; "
      f"use vocab_size={tokenizer.vocab_size} or more"
    )
  source = _open(cfg, seed)
  layout = Layout(cfg.max_target_length, _max_segments(cfg), cfg.packing, cfg.add_bos, cfg.add_eos)
  split = Split(source, (cfg.ghost_val_domain,), cfg.ghost_val_fraction, seed)
  batch_size = cfg.per_device_batch_size * num_shards if batch_size is None else batch_size
  _check_shards(cfg, len(source), batch_size, num_shards)
  pool = split.pool(cfg.ghost_val_domain, _POOL_DOCUMENTS)
  _check_validation(cfg, len(pool))
  if source.num_bytes < cfg.max_target_length:
    raise ConfigError(
      f"max_target_length={cfg.max_target_length} is longer than all the text, {source.num_bytes} bytes; "
      "use a shorter row or more data"
    )
  windows = Windows(
    source, split, tokenizer, layout, seed=seed, num_lanes=cfg.dataset_shards, window_bytes=cfg.shuffle_window_bytes,
    held_out_texts=[source[int(index)].text for index in pool],
  )
  train = TrainIterator(
    windows, layout, pad_id=tokenizer.pad_id, batch_size=batch_size, num_shards=num_shards, shard=shard,
    fingerprint=_position_fingerprint(cfg, seed, batch_size, source.fingerprint),
  )
  return Dataset(source, tokenizer, layout, split, windows, cfg.ghost_val_domain, train, seed)


def _open(cfg: DataConfig, seed: int) -> Source:
  if cfg.dataset_type == "synthetic":
    return synthetic.load(cfg.dataset_domains, cfg.dataset_domain_bytes, seed)
  return stdlib.load(cfg.dataset_domains, cfg.dataset_domain_bytes)


def _max_segments(cfg: DataConfig) -> int:
  if not cfg.packing:
    return 1
  if cfg.max_segments_per_seq > 0:
    return cfg.max_segments_per_seq
  return max(1, min(32, cfg.max_target_length // 32))


def _check_shards(cfg: DataConfig, num_documents: int, batch_size: int, num_shards: int) -> None:
  lanes = cfg.dataset_shards
  if batch_size % num_shards:
    raise ConfigError(f"a global batch of {batch_size} rows does not divide over num_shards={num_shards}; use a multiple")
  if batch_size % lanes:
    raise ConfigError(
      f"dataset_shards={lanes} does not divide the global batch of {batch_size} rows; "
      f"use one of {', '.join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)}"
    )
  if num_documents < lanes:
    raise ConfigError(f"dataset_shards={lanes} is more than the {num_documents} documents of the data; use fewer")


def _check_validation(cfg: DataConfig, num_held_out: int) -> None:
  if not num_held_out and cfg.ghost_val_fraction > 0:
    raise ConfigError(
      f"ghost_val_fraction={cfg.ghost_val_fraction} of the documents of ghost_val_domain={cfg.ghost_val_domain} is "
      "none: the validation set is empty; use a larger share or a domain with more documents"
    )


def _position_fingerprint(cfg: DataConfig, seed: int, batch_size: int, source_fingerprint: str) -> str:
  """Changes with everything a saved position depends on."""
  settings = (
    seed, batch_size, cfg.dataset_shards, cfg.max_target_length, _max_segments(cfg), cfg.packing, cfg.add_bos,
    cfg.add_eos, cfg.shuffle_window_bytes, cfg.ghost_val_domain, cfg.ghost_val_fraction, cfg.tokenizer_type,
  )
  return f"{text_hash(source_fingerprint, *map(repr, settings)):016x}"
