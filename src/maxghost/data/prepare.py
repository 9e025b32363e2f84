"""Writes a prepared corpus: several processes tokenize a source, part by part.

A part is a range of the source's documents and becomes one ArrayRecord shard. Its columns and its manifest (counts and
the shard's SHA-256) are written last, by renaming. So after an interrupt the parts with a manifest are kept and the
others are written again. When all parts are complete, their columns are joined into the index.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.config import ConfigError
from maxghost.config.files import write_text, write_whole
from maxghost.config.schema import DataConfig
from maxghost.data.hashing import content_hashes, text_hash
from maxghost.data.packing import token_dtype
from maxghost.data.prepared import BLOCK_COLUMNS, COLUMNS, DOCUMENT_COLUMNS, INDEX_FILE, INDEX_VERSION, PATH_COLUMNS
from maxghost.data.sources.base import Source, read_or_skip
from maxghost.data.split import scan
from maxghost.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer

PART_BYTES = 64 << 20  # text of a part
BLOCK_TOKENS = 1 << 15  # tokens of a block, unless one document has more
_READ_BYTES = 4 << 20  # text read and tokenized together
_BPE_BYTES = 100 << 20  # text that a BPE is trained on
_JOB_FILE = "job.json"
_SHARD_OPTIONS = "group_size:1,uncompressed"  # random access; decompressing would cost more than reading


@dataclasses.dataclass(frozen=True)
class Job:
  """What the processes share. Must be the same when an interrupted run is resumed."""

  folder: str
  part_documents: int
  num_documents: int
  on_corrupt: str
  tokenizer_type: str
  tokenizer_path: str

  @property
  def num_parts(self) -> int:
    return -(-self.num_documents // self.part_documents)


def prepare(
  source: Source,
  cfg: DataConfig,
  folder: str,
  *,
  num_workers: int = 1,
  part_bytes: int = PART_BYTES,
  progress: Callable[[dict], None] = lambda manifest: None,
) -> dict:
  """Tokenizes a source into a folder.

  Args:
    source: the documents.
    cfg: states the tokenizer and what to do with corrupt documents.
    folder: to write; parts that are complete already are kept.
    num_workers: processes.
    part_bytes: approximate text of a part.
    progress: called with the manifest of each complete part.

  Returns:
    The JSON part of the index.

  Raises:
    ConfigError: the folder holds another corpus, or a document is corrupt and on_corrupt is "error".
  """
  tokenizer = load_tokenizer(cfg.tokenizer_type, cfg.tokenizer_path)
  mean = max(1, source.num_bytes // len(source))
  job = Job(folder, max(1, part_bytes // mean), len(source), cfg.on_corrupt, cfg.tokenizer_type, cfg.tokenizer_path)
  _claim(job, source, tokenizer)
  todo = []
  for part in range(job.num_parts):
    manifest = read_manifest(folder, part)
    if manifest is None:
      todo.append(part)
    else:
      progress(manifest)
  if num_workers == 1:
    for part in todo:
      progress(_write_part(job, part, source, tokenizer))
  elif todo:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(todo)), context, _start_worker, (job, source)) as pool:
      futures = [pool.submit(_work, part) for part in todo]
      try:
        for future in as_completed(futures):
          progress(future.result())
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
  return _join(job, source, tokenizer)


def read_manifest(folder: str, part: int) -> dict | None:
  """A part's manifest if the part is complete, that is, its files exist and the shard has its full size; else None."""
  base = Path(folder) / "parts" / f"{part:05d}"
  try:
    manifest = json.loads(base.with_suffix(".json").read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  shard = Path(folder) / "shards" / manifest["name"]
  whole = shard.is_file() and shard.stat().st_size == manifest["size"] and base.with_suffix(".npz").is_file()
  return manifest if whole else None


def verify(folder: str) -> list[str]:
  """Compares the checksum of every shard; returns a line for each damaged one.

  The manifests of damaged shards are deleted, so that `prepare` writes these again.
  """
  meta = json.loads((Path(folder) / INDEX_FILE).read_text(encoding="utf-8"))
  problems = []
  for part, shard in enumerate(meta["shards"]):
    path = Path(folder) / "shards" / shard["name"]
    found = _sha256(path) if path.is_file() else "missing"
    if found != shard["sha256"]:
      problems.append(f"{path}: checksum {found[:16]}, written as {shard['sha256'][:16]}; prepare again to redo it")
      (Path(folder) / "parts" / f"{part:05d}.json").unlink(missing_ok=True)
  return problems


def _claim(job: Job, source: Source, tokenizer: Tokenizer) -> None:
  """Claims the folder for this job. Raises ConfigError when it holds another one."""
  folder = Path(job.folder)
  mine = {
    "source": source.fingerprint,
    "tokenizer": tokenizer.fingerprint,
    "part_documents": job.part_documents,
    "num_documents": job.num_documents,
    "on_corrupt": job.on_corrupt,
    "version": INDEX_VERSION,
    "files": source.files,
  }
  file = folder / _JOB_FILE
  if file.is_file():
    other = json.loads(file.read_text(encoding="utf-8"))
    if other != mine:
      then, now = other["files"], mine["files"]
      changed = [name for name in {*then, *now} if then.get(name) != now.get(name)]
      what = ", ".join(sorted(changed)[:5]) or ", ".join(key for key in mine if mine[key] != other.get(key))
      raise ConfigError(f"{folder} holds a corpus prepared from other data or settings ({what}); give another folder")
    return
  try:
    if folder.is_dir() and any(folder.iterdir()) and [entry.name for entry in folder.iterdir()] != ["tokenizer.json"]:
      raise ConfigError(f"{folder} is not empty and holds no prepared corpus; give another folder")
    for name in ("shards", "parts", "index"):
      (folder / name).mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(mine, indent=1))
  except OSError as error:
    raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error


_worker: dict = {}


def _start_worker(job: Job, source: Source) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C and ends the others
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes run in parallel already
  _worker.update(job=job, source=source, tokenizer=load_tokenizer(job.tokenizer_type, job.tokenizer_path))


def _work(part: int) -> dict:
  return _write_part(_worker["job"], part, _worker["source"], _worker["tokenizer"])


def _write_part(job: Job, part: int, source: Source, tokenizer: Tokenizer) -> dict:
  """Writes a part's shard, columns and manifest; returns the manifest."""
  from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # compiled

  base = Path(job.folder) / "parts" / f"{part:05d}"
  shard = Path(job.folder) / "shards" / f"part-{part:05d}-of-{job.num_parts:05d}.array_record"
  scratch = shard.with_suffix(".tmp")
  columns = {name: [] for name in (*DOCUMENT_COLUMNS, *BLOCK_COLUMNS) if name != "token_end"}
  lengths: list[int] = []
  paths: dict[tuple[str, str], int] = {}
  counts = dict.fromkeys(("empty", "corrupt"), 0)
  writer = array_record_module.ArrayRecordWriter(str(scratch), _SHARD_OPTIONS)
  block = _Block(writer, tokenizer, columns)
  for indices, texts in _read(job, part, source):
    kept = [(index, text) for index, text in zip(indices.tolist(), texts, strict=True) if text]
    counts["corrupt"] += sum(text is None for text in texts)
    counts["empty"] += sum(text == b"" for text in texts)
    if not kept:
      continue
    numbers, texts = np.array([index for index, _ in kept]), [text for _, text in kept]
    columns["id_hash"].append(source.id_hashes(numbers))
    columns["content_hash"].append(content_hashes(texts))
    columns["num_bytes"].append(np.array([len(text) for text in texts]))
    ids = [source.document_id(index) for index, _ in kept]
    columns["offset"].append(np.array([one.offset for one in ids]))
    columns["path"].append(np.array([paths.setdefault((one.domain, one.path), len(paths)) for one in ids]))
    tabled = tokenizer.byte_table is not None
    encoded = [(one, None) for one in tokenizer.encode(texts)] if tabled else tokenizer.encode_bytes(texts)
    for domain, (tokens, sizes) in zip(source.domain_numbers(numbers).tolist(), encoded, strict=True):
      block.add(domain, tokens, sizes)
      lengths.append(len(tokens))
  block.close()
  writer.close()
  arrays: dict[str, Any] = {
    name: np.concatenate(values) if values else np.empty(0, np.int64) for name, values in columns.items()
  }
  arrays["length"] = np.array(lengths, np.int64)
  with write_whole(base.with_suffix(".npz")) as file:
    np.savez(file, **arrays, paths=np.array(json.dumps(list(paths))))
  os.replace(scratch, shard)
  manifest = {
    "name": shard.name,
    "sha256": _sha256(shard),
    "size": shard.stat().st_size,
    "blocks": block.count,
    "documents": len(lengths),
    "tokens": sum(lengths),
    "bytes": int(arrays["num_bytes"].sum()),
    **counts,
  }
  write_text(base.with_suffix(".json"), json.dumps(manifest))
  return manifest


def _read(job: Job, part: int, source: Source) -> Iterator[tuple[np.ndarray, list[bytes | None]]]:
  """A part's documents, a few megabytes at a time."""
  step = max(1, _READ_BYTES // max(1, source.num_bytes // len(source)))
  stop = min((part + 1) * job.part_documents, job.num_documents)
  for first in range(part * job.part_documents, stop, step):
    indices = np.arange(first, min(first + step, stop))
    yield indices, read_or_skip(source.texts, indices, job.on_corrupt)


class _Block:
  """Collects documents of one domain and writes them as a record when there are enough tokens."""

  def __init__(self, writer, tokenizer: Tokenizer, columns: dict[str, list]):
    self._writer, self._columns = writer, columns
    self._dtype = token_dtype(tokenizer.vocab_size)
    self._tokens: list[np.ndarray] = []
    self._sizes: list[np.ndarray] = []
    self._size, self._domain, self._documents = 0, -1, 0
    self.count = 0

  def add(self, domain: int, tokens: np.ndarray, sizes: np.ndarray | None) -> None:
    if self._tokens and (domain != self._domain or self._size >= BLOCK_TOKENS):
      self.close()
    if not self._tokens:
      self._columns["block_first"].append(np.array([self._documents]))
      self._columns["block_domain"].append(np.array([domain]))
      self._domain = domain
    self._tokens.append(tokens)
    if sizes is not None:
      self._sizes.append(sizes)
    self._size += len(tokens)
    self._documents += 1

  def close(self) -> None:
    if not self._tokens:
      return
    raw = np.concatenate(self._tokens).astype(self._dtype).tobytes()
    if self._sizes:
      raw += np.concatenate(self._sizes).astype(np.uint32).tobytes()
    self._writer.write(raw)
    self._tokens, self._sizes, self._size = [], [], 0
    self.count += 1


def _join(job: Job, source: Source, tokenizer: Tokenizer) -> dict:
  """Joins the parts' columns into the index and writes its JSON last."""
  folder = Path(job.folder)
  manifests = [manifest for part in range(job.num_parts) if (manifest := read_manifest(job.folder, part)) is not None]
  assert len(manifests) == job.num_parts, "all parts are complete before they are joined"
  num_documents, num_blocks = (sum(manifest[key] for manifest in manifests) for key in ("documents", "blocks"))
  if not num_documents:
    raise ConfigError("there is nothing to prepare: every document is empty or corrupt")
  sizes = dict.fromkeys(DOCUMENT_COLUMNS, num_documents) | dict.fromkeys(BLOCK_COLUMNS, num_blocks)
  columns = {
    name: np.lib.format.open_memmap(folder / "index" / f"{name}.npy", "w+", COLUMNS[name], (size,))
    for name, size in sizes.items()
  }
  paths = _Paths(source.domains)
  documents = blocks = tokens = 0
  totals = np.zeros((2, len(source.domains)), np.int64)  # documents, bytes
  for part in range(job.num_parts):
    with np.load(folder / "parts" / f"{part:05d}.npz") as loaded:
      new = {name: loaded[name] for name in loaded.files}
    if not len(new["path"]):
      continue
    numbers, domains = paths.add(json.loads(str(new.pop("paths"))))
    place = domains[new["path"]]
    totals[0] += np.bincount(place, minlength=len(source.domains))
    totals[1] += np.bincount(place, new["num_bytes"], len(source.domains)).astype(np.int64)
    new["path"] = numbers[new["path"]]
    new["token_end"] = tokens + np.cumsum(new.pop("length"))
    new["block_first"] = new["block_first"] + documents
    for name, values in new.items():
      start = blocks if name in BLOCK_COLUMNS else documents
      columns[name][start : start + len(values)] = values
    documents, blocks = documents + len(new["path"]), blocks + len(new["block_first"])
    tokens = int(new["token_end"][-1])
  for column in columns.values():
    column.flush()
  paths.save(folder / "index")
  meta = {
    "version": INDEX_VERSION,
    "fingerprint": f"{text_hash(*(m['sha256'] for m in manifests)):016x}",
    "tokenizer": _copy_tokenizer(job, tokenizer),
    "domains": list(source.domains),
    "domain_documents": dict(zip(source.domains, totals[0].tolist(), strict=True)),
    "domain_bytes": dict(zip(source.domains, totals[1].tolist(), strict=True)),
    "tokens": tokens,
    "empty": sum(m["empty"] for m in manifests),
    "corrupt": sum(m["corrupt"] for m in manifests),
    "shards": [{key: m[key] for key in ("name", "sha256", "size", "blocks")} for m in manifests],
  }
  write_text(folder / INDEX_FILE, json.dumps(meta, indent=1))
  return meta


class _Paths:
  """The table of paths, in flat arrays, since there may be one path per document."""

  def __init__(self, domains: tuple[str, ...]):
    self._domains = domains
    self._names, self._ends, self._numbers = bytearray(), array("q"), array("H")
    self._last: tuple[str, str] | None = None

  def add(self, pairs: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Adds a part's (domain, path) pairs; returns the number in the table and the domain of each (int64)."""
    numbers, domains = [], []
    for domain, path in pairs:
      domains.append(self._domains.index(domain))
      if (domain, path) != self._last:  # a file shared by two parts is the last of one and the first of the next
        self._last = (domain, path)
        self._names += path.encode("utf-8")
        self._ends.append(len(self._names))
        self._numbers.append(domains[-1])
      numbers.append(len(self._ends) - 1)
    return np.array(numbers, np.int64), np.array(domains, np.int64)

  def save(self, folder: Path) -> None:
    (folder / "paths.bin").write_bytes(self._names)
    np.save(folder / "path_end.npy", np.array(self._ends, PATH_COLUMNS["path_end"]))
    np.save(folder / "path_domain.npy", np.array(self._numbers, PATH_COLUMNS["path_domain"]))


def _copy_tokenizer(job: Job, tokenizer: Tokenizer) -> dict:
  """The tokenizer's entry in the index; copies its file into the folder."""
  path, copied = job.tokenizer_path, False
  if isinstance(tokenizer, FileTokenizer) and tokenizer.path.is_file():
    target = Path(job.folder) / tokenizer.path.name
    if not target.exists():
      shutil.copyfile(tokenizer.path, target)
    path, copied = str(target.name), True
  return {
    "type": job.tokenizer_type,
    "path": path,
    "copied": copied,
    "fingerprint": tokenizer.fingerprint,
    "vocab_size": tokenizer.vocab_size,
  }


def train_bpe(source: Source, vocab_size: int, path: str) -> None:
  """Trains a byte-level BPE of `vocab_size` ids on documents spread over the source and writes its tokenizer.json.

  The tokens <|bos|>, <|eos|> and <|pad|> have the first ids. Raises ConfigError when the package `tokenizers` is
  missing or vocab_size is below the 259 ids of bytes and specials.
  """
  try:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers
  except ImportError:
    line = "training a BPE needs the package tokenizers; install it with: pip install 'maxghost[data]'"
    raise ConfigError(line) from None
  if vocab_size < 259:
    raise ConfigError(f"--train_bpe {vocab_size} is below the 259 ids of bytes and specials; use 259 or more")
  inner = Inner(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
    show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  stride = max(1, source.num_bytes // _BPE_BYTES)

  def texts() -> Iterator[str]:
    for indices in scan(len(source)):
      for some in np.array_split(indices[::stride], max(1, len(indices) // stride // 256)):
        yield from (text.decode("utf-8") for text in read_or_skip(source.texts, some) if text)

  inner.train_from_iterator(texts(), trainer)
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  write_text(Path(path), inner.to_str(pretty=False))


def _sha256(path: Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
