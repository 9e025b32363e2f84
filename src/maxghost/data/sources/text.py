"""Text files: .txt (one document), .jsonl (a document per line), both also .gz or .zst, and .parquet (per row).

Documents are read from the files by offset; compressed files have no random access and are unpacked into memory. An
id's offset is the byte where the line begins (in the unpacked file), or the row number in Parquet.
"""

import contextlib
import functools
import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxghost.config import ConfigError, DataConfig
from maxghost.config.values import import_package
from maxghost.data.hashing import text_hash
from maxghost.data.sources import base
from maxghost.data.sources.files import CorpusFile
from maxghost.data.sources.records import Opened, RecordSource, Shard

_MEMORY_LIMIT = 2 << 30  # bytes of unpacked text held at a time
_OPEN_FILES = 128
_OPEN_PARQUET = 8  # each keeps its last row group
_FIELD_GROUPS = 8  # row groups of a file whose fields stay in memory, as documents are scored in random order
_LINES_BYTES = 1 << 26  # searched for line ends at a time
TXT, JSONL, PARQUET = "txt", "jsonl", "parquet"
_ENDINGS = {".txt": TXT, ".md": TXT, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_PACKED = (".gz", ".zst")


def load(files: Sequence[CorpusFile], cfg: DataConfig, *, cap: int = 0, whole: bool = True, own=False) -> RecordSource:
  """The documents of text files, given by domain. Raises ConfigError for one that cannot be read as `cfg` says.

  cap: each domain's first documents are taken, up to this many bytes together; 0 = all. whole: compressed files must
  fit into memory together, since training reads them in random order; False: only the one read last is kept. own: the
  field `domain` of a record is its domain, in place of its file's; `dataset_domains` chooses among these.
  """
  kinds = [_kind(file.path, cfg.train_data_columns) for file in files]
  if cap and PARQUET in kinds:
    said = "does not work with Parquet, which does not tell the size of a row; use 0, or fewer files"
    raise ConfigError(f"dataset_domain_bytes={cap} {said}")
  plain, packed = Opened(_open, _OPEN_FILES), Opened(_open, None if whole else 1)
  tables = tuple(Opened(functools.partial(_Parquet, num), _OPEN_PARQUET) for num in (1, _FIELD_GROUPS))
  shards, offsets, sizes, notes, known = [], [], [], [], []
  used, unpacked = {}, 0  # bytes by domain
  for file, kind in zip(files, kinds, strict=True):
    is_packed = file.path.endswith(_PACKED)
    opened: Any = packed if is_packed else plain
    index, read, of = _index_text, _read_text, kind
    if kind == PARQUET:
      opened, index, read, of = tables, _index_rows, _read_rows, cfg.train_data_columns
    try:
      offset, size = index(opened, file.path, kind, cfg.train_data_columns)
    except base.CorruptError as error:
      notes.append(base.left_out(error, cfg.on_corrupt))
      offset = size = np.zeros(0, np.int64)
    unpacked += int(size.sum()) if is_packed else 0
    if whole and unpacked > _MEMORY_LIMIT:
      said = f"dataset_files hold more than {_MEMORY_LIMIT >> 20} MiB of compressed text, which is read from memory"
      raise ConfigError(f"{said}; unpack the files, or tokenize them once with: python -m maxghost.data prepare")
    read, place = functools.partial(read, opened, file.path, of), functools.partial(_place, opened, file.path, kind)
    for domain, here in _by_domain(file.domain, read if own else None, offset, size).items():
      if not domain.isprintable():
        first = int(offset[here[0]]) if len(here) else 0
        raise ConfigError(f"{place(first)}: the domain {domain!r} holds control characters")
      known.append(domain)
      if own and cfg.dataset_domains and domain not in cfg.dataset_domains:
        continue
      if cap and len(here):
        ends = used.get(domain, 0) + np.cumsum(size[here])
        if domain not in used and ends[0] > cap:
          raise base.too_low_cap(cap, domain, int(ends[0]))
        used[domain] = int(ends[-1])
        here = here[: np.searchsorted(ends, cap, side="right")]
      shards.append(Shard(domain, file.name, file.fingerprint, len(here), read, place, kind == TXT))
      offsets.append(offset[here])
      sizes.append(size[here])
  base.check_known("dataset_domains", cfg.dataset_domains if own else (), known, "the data")
  source = RecordSource(shards, cfg, notes, (np.concatenate(offsets), np.concatenate(sizes)))
  of_cap = f"{cap} by record" if cap and own else str(cap)  # once it was of the files' domains, which gave other rows
  parts = (*cfg.train_data_columns, of_cap, *itertools.chain(*sorted(source.files.items())))
  source.fingerprint = f"{text_hash(*parts):016x}"
  return source


def _by_domain(label: str, read: Callable | None, offsets: np.ndarray, sizes: np.ndarray) -> dict[str, np.ndarray]:
  """{domain: numbers of its documents}. The field `domain` of a record names the domain; without one it is `label`."""
  if read is None or not len(offsets):
    return {label: np.arange(len(offsets))}
  found: dict[str, list[int]] = {}
  for number, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
    own = None
    with contextlib.suppress(base.CorruptError):  # reported when it is read
      own = next(iter(read([offset], [size], ("domain",)))).get("domain")
    found.setdefault(own if own and isinstance(own, str) else label, []).append(number)
  return {domain: np.array(numbers) for domain, numbers in found.items()}


def _place(opened: Opened, path: str, kind: str, offset: int) -> str:
  if kind == PARQUET:
    return f"{path}, row {offset}"
  parts = (_bytes(opened, path, n, min(_LINES_BYTES, offset - n)) for n in range(0, offset, _LINES_BYTES))
  line = 1 + sum(part.count(b"\n") for part in parts)
  return f"{path} at byte {offset}, line {line}"


def _kind(path: str, columns: Sequence[str]) -> str:
  plain = path.removesuffix(".gz").removesuffix(".zst")
  kind = _ENDINGS.get(os.path.splitext(plain)[1].lower())
  if kind is None or (kind == PARQUET and plain != path):
    known = ", ".join(_ENDINGS)
    raise ConfigError(f"{path}: not a kind of file that can be read; known are {known}, and .gz or .zst of text")
  if kind == TXT and isinstance(columns, base.Kept):
    raise ConfigError(f"{path} is plain text, but the objective reads records; give .jsonl or .parquet files")
  return kind


class _File(io.FileIO):
  """A file that is closed with its last reference: `Opened` may forget one that a thread still reads."""

  def __del__(self):
    self.close()


def _open(path: str) -> _File | bytes:
  """A file, or the text in a compressed one."""
  pyarrow = import_package("pyarrow", path) if path.endswith(".zst") else None
  try:
    if not path.endswith(_PACKED):
      return _File(path)
    if pyarrow is None:
      with gzip.open(path, "rb") as file:
        return file.read()
    with pyarrow.OSFile(os.fsencode(path)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
      return stream.read()
  except (OSError, EOFError, ValueError, zlib.error) as error:
    raise base.CorruptError(f"{path} cannot be read: {error}") from error


def _index_text(opened: Opened, path: str, kind: str, columns: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
  """Offset and size of a file of text, or of each line of JSON that is not blank. Raises ConfigError."""
  if path.endswith(_PACKED):
    view = np.frombuffer(opened.get(path), np.uint8)
  else:
    view = np.memmap(path, np.uint8, "r").view(np.ndarray) if os.path.getsize(path) else np.empty(0, np.uint8)
  if kind == TXT:
    return np.zeros(1, np.int64), np.array([len(view)], np.int64)
  parts = range(0, len(view), _LINES_BYTES)
  ends = [np.flatnonzero(view[first : first + _LINES_BYTES] == ord("\n")) + first for first in parts]
  stops = np.concatenate([*ends, [len(view)]]).astype(np.int64)
  starts = np.concatenate(([0], stops[:-1] + 1))
  kept = (sizes := np.maximum(stops - starts, 0)) > 0
  for line in np.flatnonzero(kept)[view[starts[kept]] <= ord(" ")].tolist():  # begins with white space: perhaps blank
    kept[line] = bool(view[starts[line] : stops[line]].tobytes().strip())
  starts, sizes = starts[kept], sizes[kept]
  if len(starts):
    try:
      record = json.loads(view[starts[0] : starts[0] + sizes[0]].tobytes())
    except (ValueError, RecursionError):  # named when it is read
      return starts, sizes
    if not isinstance(record, dict):
      raise ConfigError(f"{_place(opened, path, kind, starts[0])}: no JSON object; write one per line")
    base.columns_of(columns, tuple(record), path)
  return starts, sizes


def _read_text(opened: Opened, path: str, kind: str, offsets: list, sizes: list, _: tuple) -> Iterator[Any]:
  """Texts, or objects of lines of JSON; empty ones where a line holds none."""
  for offset, size in zip(offsets, sizes, strict=True):
    raw = _bytes(opened, path, offset, size)
    if kind == TXT:
      yield base.utf8(path, offset, raw)
      continue
    try:
      record = json.loads(raw)
    except (ValueError, RecursionError) as error:
      where = functools.partial(_place, opened, path, JSONL, offset)
      raise base.CorruptError(f"not a line of JSON ({error})", where) from error
    yield record if isinstance(record, dict) else {}


def _bytes(opened: Opened, path: str, offset: int, size: int) -> bytes:
  file = opened.get(path)  # this reference keeps it open
  raw = file[offset : offset + size] if isinstance(file, bytes) else b""
  while len(raw) < size and not isinstance(file, bytes):  # one call gives at most 2 GiB
    if not (more := os.pread(file.fileno(), size - len(raw), offset + len(raw))):
      break
    raw += more
  if len(raw) < size:
    raise base.CorruptError(f"{path} ends at byte {offset + len(raw)}, inside the document at byte {offset}")
  return raw


class _Parquet:
  """A Parquet file, read by row groups. Keeps the `num_groups` read last, so read neighbouring rows together."""

  def __init__(self, num_groups: int, path: str):
    pyarrow, parquet = (import_package(name, path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
      self.file = parquet.ParquetFile(pyarrow.OSFile(os.fsencode(path)))  # a text would have to be UTF-8
      self.names = tuple(self.file.schema_arrow.names)
    except Exception as error:  # pyarrow raises OSError, ArrowInvalid and more
      raise base.CorruptError(f"{path} is no readable Parquet file: {error}") from error
    self.groups = [self.file.metadata.row_group(n) for n in range(self.file.metadata.num_row_groups)]
    self._path, self._ends = path, np.cumsum([group.num_rows for group in self.groups], dtype=np.int64)
    self._columns = functools.lru_cache(num_groups)(self._read)

  def row(self, number: int, names: tuple[str, ...]) -> dict[str, Any]:
    """{column: value, None for one that is not in `names`}. Raises CorruptError."""
    first, columns = self._columns(int(np.searchsorted(self._ends, number, side="right")), names)
    try:
      values = {name: base.without_nulls(column[number - first].as_py()) for name, column in columns.items()}
    except (IndexError, UnicodeDecodeError) as error:
      raise base.CorruptError(f"{self._path}, row {number}: {error}") from error
    return dict.fromkeys(self.names) | values

  def _read(self, group: int, names: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    """The number of a group's first row, and its columns among `names`."""
    first = int(self._ends[group - 1]) if group else 0
    try:
      table = self.file.read_row_group(group, columns=[name for name in self.names if name in names])
    except Exception as error:  # as above
      raise base.CorruptError(f"{self._path}, row group {group} (rows from {first}): {error}") from error
    return first, dict(zip(table.column_names, table.columns, strict=True))


def _index_rows(tables: tuple, path: str, _: str, columns: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
  """Row numbers, and the mean size of the columns in a row, from the file's footer. Raises ConfigError for a column."""
  parquet = tables[0].get(path)
  columns, rows = base.columns_of(columns, parquet.names, path), parquet.file.metadata.num_rows
  read = [n for n, one in enumerate(parquet.file.schema) if {one.path, one.path.split(".")[0]} & {*columns}]
  total = sum(group.column(number).total_uncompressed_size for group in parquet.groups for number in read)
  return np.arange(rows, dtype=np.int64), np.full(rows, max(1, total // max(1, rows)), np.int64)


def _read_rows(tables: tuple, path: str, columns: tuple, offsets: list, _: list, names: tuple) -> list[dict]:
  """tables: two caches of open files, for the texts' `columns`, which are read in order, and for other fields."""
  opened = tables[names != columns]
  with opened.lock:
    parquet = opened.get(path)
    return [parquet.row(number, names) for number in offsets]
