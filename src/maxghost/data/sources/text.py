"""Text files: .txt (one document), .jsonl (a document per line), both also .gz or .zst, and .parquet (per row).

Documents are read from the files by offset; compressed files have no random access and are unpacked into memory. An
id's offset is the byte where the line begins (in the unpacked file), or the row number in Parquet.
"""

import functools
import gzip
import io
import json
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from maxghost.config import ConfigError
from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources import files as corpus_files
from maxghost.data.sources import parquet
from maxghost.data.sources.base import CorruptError, Source, check_columns, join_columns, too_low_cap, utf8
from maxghost.data.sources.files import CorpusFile
from maxghost.data.types import DocumentId

_MEMORY_LIMIT = 2 << 30  # bytes of unpacked text held at a time
_OPEN_FILES = 128
_OPEN_PARQUET = 8  # each keeps its last row group
TXT, JSONL, PARQUET = "txt", "jsonl", "parquet"
_ENDINGS = {".txt": TXT, ".md": TXT, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_PACKED = (".gz", ".zst")


class TextSource(Source):
  """Documents of text files, by number. Made by `load`; is pickled without its open files."""

  def __init__(
    self,
    files: list[CorpusFile],
    columns: tuple[str, ...],
    *,
    domain_bytes: int = 0,
    on_corrupt: str = "error",
    whole: bool = True,
  ):
    """Indexes the files. Raises ConfigError.

    whole: all compressed files must fit into memory together, since training reads them in random order. False: only
    those read last are kept, which is enough for `prepare`.
    """
    self.domains = tuple(dict.fromkeys(file.domain for file in files))
    self._files, self._columns, self._whole = files, columns, whole
    self._kinds = [_kind(file.path) for file in files]
    self.files = corpus_files.fingerprints(files)
    parts = (*columns, str(domain_bytes), *(part for item in sorted(self.files.items()) for part in item))
    self.fingerprint = f"{text_hash(*parts):016x}"
    self._open()
    indexed = [self._index_or_skip(number, on_corrupt) for number in range(len(files))]
    counts = [len(offsets) for offsets, _ in indexed]
    self._file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    self._offset = np.concatenate([offsets for offsets, _ in indexed])
    self._size = np.concatenate([sizes for _, sizes in indexed])
    place = {domain: number for number, domain in enumerate(self.domains)}
    self._file_domain = np.array([place[file.domain] for file in files], np.int64)
    self._file_hash = np.array([text_hash(file.domain, file.name) for file in files], np.uint64)
    if domain_bytes:
      self._cap(domain_bytes)
    self.num_bytes = int(self._size.sum())
    self._check_columns()

  def _open(self) -> None:
    self._lock = threading.RLock()
    self._unpacked: OrderedDict[int, bytes] = OrderedDict()
    self._opened = functools.lru_cache(_OPEN_FILES)(_opened)  # a file that drops out is closed with its last reference
    self._parquet = functools.lru_cache(_OPEN_PARQUET)(parquet.ParquetText)

  def __getstate__(self) -> dict:
    kept = dict(self.__dict__)
    for name in ("_lock", "_opened", "_unpacked", "_parquet"):
      del kept[name]
    return kept

  def __setstate__(self, state: dict) -> None:
    self.__dict__.update(state)
    self._open()

  def __len__(self) -> int:
    return len(self._file)

  def document_id(self, index: int) -> DocumentId:
    file = self._files[self._file[index]]
    return DocumentId(file.domain, file.name, int(self._offset[index]))

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    return self._file_domain[self._file[indices]]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    return combine(self._file_hash[self._file[indices]], self._offset[indices])

  def sizes(self, indices: np.ndarray) -> np.ndarray | None:
    """Known for .txt; the other formats store the text inside lines and rows."""
    return self._size[indices] if all(kind == TXT for kind in self._kinds) else None

  def texts(self, indices: np.ndarray) -> list[bytes]:
    out: list[bytes] = [b""] * len(indices)
    numbers, offsets, sizes = (x[indices].tolist() for x in (self._file, self._offset, self._size))
    places = sorted(range(len(numbers)), key=lambda place: (numbers[place], offsets[place]))
    for place in places:  # in the order of the files, so that a Parquet row group is unpacked once
      out[place] = self._text(numbers[place], offsets[place], sizes[place])
    return out

  def _text(self, number: int, offset: int, size: int) -> bytes:
    kind = self._kinds[number]
    if kind == PARQUET:
      return self._row(number, offset)
    raw = self._bytes(number, offset, size)
    path = self._files[number].path
    return utf8(path, offset, raw) if kind == TXT else self._field(f"{path} at byte {offset}", raw)

  def _bytes(self, number: int, offset: int, size: int) -> bytes:
    file = self._files[number]
    if file.path.endswith(_PACKED):
      return self._unpack(number)[offset : offset + size]
    opened = self._opened(file.path)  # this reference keeps it open
    raw = os.pread(opened.fileno(), size, offset)
    if len(raw) < size:
      raise CorruptError(f"{file.path} ends at byte {offset + len(raw)}, inside the document at byte {offset}")
    return raw

  def _field(self, where: str, line: bytes) -> bytes:
    """The text of a line of JSON."""
    try:
      record = json.loads(line)
    except (ValueError, UnicodeDecodeError) as error:
      raise CorruptError(f"{where}: not a line of JSON ({error})") from error
    return join_columns(where, record if isinstance(record, dict) else {}, self._columns)

  def _row(self, number: int, row: int) -> bytes:
    """The text of a Parquet row."""
    path = self._files[number].path
    with self._lock:
      values = self._parquet(path, self._columns).row(row)
    return join_columns(f"{path}, row {row}", values, self._columns)

  def _unpack(self, number: int) -> bytes:
    with self._lock:
      if number not in self._unpacked:
        raw = _unpacked(self._files[number].path)
        held = sum(map(len, self._unpacked.values())) + len(raw)
        if self._whole and held > _MEMORY_LIMIT:
          raise ConfigError(
            f"dataset_files hold more than {_MEMORY_LIMIT >> 20} MiB of compressed text, which is read from "
            "memory; unpack the files, or tokenize them once with: python -m maxghost.data prepare"
          )
        while self._unpacked and held > _MEMORY_LIMIT:
          held -= len(self._unpacked.popitem(last=False)[1])
        self._unpacked[number] = raw
      return self._unpacked[number]

  def _index_or_skip(self, number: int, on_corrupt: str) -> tuple[np.ndarray, np.ndarray]:
    try:
      return self._index(number)
    except CorruptError as error:
      if on_corrupt == "error":
        raise ConfigError(f"{error}; repair or remove it, or use on_corrupt=skip") from error
      self.notes = (*self.notes, f"left out: {error}")
      return np.zeros(0, np.int64), np.zeros(0, np.int64)

  def _index(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes of a file's documents (int64): in bytes, or row numbers and the mean size for Parquet."""
    path, kind = self._files[number].path, self._kinds[number]
    if kind == PARQUET:
      opened = parquet.ParquetText(path, self._columns)
      return np.arange(opened.num_rows, dtype=np.int64), np.full(opened.num_rows, opened.mean_bytes, np.int64)
    packed = path.endswith(_PACKED)
    size = len(self._unpack(number)) if packed else os.path.getsize(path)
    if kind == TXT:
      return np.zeros(1, np.int64), np.array([size], np.int64)
    if packed:
      return _lines(self._unpack(number))
    if not size:
      return np.zeros(0, np.int64), np.zeros(0, np.int64)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
      return _lines(mapped)

  def _cap(self, domain_bytes: int) -> None:
    """Keeps each domain's first documents, up to `domain_bytes` bytes together."""
    if PARQUET in self._kinds:
      raise ConfigError(
        f"dataset_domain_bytes={domain_bytes} does not work with Parquet, which does not tell the size of a row; "
        "use 0, or fewer files"
      )
    keep = np.zeros(len(self._file), bool)
    for number, domain in enumerate(self.domains):
      here = np.flatnonzero(self._file_domain[self._file] == number)
      keep[here] = np.cumsum(self._size[here]) <= domain_bytes
      if len(here) and not keep[here[0]]:
        raise too_low_cap(domain_bytes, domain, int(self._size[here[0]]))
    self._file, self._offset, self._size = self._file[keep], self._offset[keep], self._size[keep]

  def _check_columns(self) -> None:
    """Raises ConfigError for a domain without documents, and when the first record of a file lacks a column."""
    present = set(self.domain_numbers(np.arange(len(self))).tolist())
    for number, domain in enumerate(self.domains):
      if number not in present:
        paths = [file.path for file in self._files if file.domain == domain]
        raise ConfigError(f"domain '{domain}' has no documents: {', '.join(paths[:3])} hold none")
    firsts = np.searchsorted(self._file, np.arange(len(self._files)))
    for number, first in enumerate(firsts.tolist()):
      if first < len(self) and self._file[first] == number and self._kinds[number] == JSONL:
        try:
          record = json.loads(self._bytes(number, int(self._offset[first]), int(self._size[first])))
        except ValueError:
          continue  # reported with its place when it is read
        names = tuple(record) if isinstance(record, dict) else ()
        check_columns(self._files[number].path, names, self._columns)


def load(
  patterns: Sequence[str],
  columns: tuple[str, ...],
  domains: tuple[str, ...] = (),
  *,
  key: str = "dataset_files",
  **options,
) -> TextSource:
  """Documents of the files that `domain=glob` patterns match. options: of `TextSource`. Raises ConfigError.

  columns: text columns of JSON lines and Parquet; several are joined by line ends.
  """
  return TextSource(corpus_files.expand(key, patterns, domains, "text"), columns, **options)


def _kind(path: str) -> str:
  plain = path
  for ending in _PACKED:
    plain = plain.removesuffix(ending)
  kind = _ENDINGS.get(os.path.splitext(plain)[1].lower())
  if kind is None or (kind == PARQUET and plain != path):
    known = ", ".join(_ENDINGS)
    raise ConfigError(f"{path}: not a kind of file that can be read; known are {known}, and .gz or .zst of text")
  return kind


def _opened(path: str) -> io.FileIO:
  try:
    return open(path, "rb", buffering=0)
  except OSError as error:
    raise CorruptError(f"{path} cannot be read: {error.strerror}") from error


def _unpacked(path: str) -> bytes:
  try:
    if path.endswith(".gz"):
      with gzip.open(path, "rb") as file:
        return file.read()
    return _zstd(path)
  except (OSError, EOFError, ValueError) as error:
    raise CorruptError(f"{path} cannot be unpacked: {error}") from error


def _zstd(path: str) -> bytes:
  try:
    import pyarrow
  except ImportError:
    raise ConfigError(f"{path} needs the package pyarrow; install it with: pip install 'maxghost[data]'") from None
  with pyarrow.OSFile(path, "rb") as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
    return stream.read()


def _lines(raw) -> tuple[np.ndarray, np.ndarray]:
  """Offsets and sizes of the lines that are not blank (int64 each); `raw` supports the buffer protocol."""
  ends, chunk = [], 1 << 26
  view = memoryview(raw)
  for first in range(0, len(view), chunk):
    part = np.frombuffer(view[first : first + chunk], np.uint8)
    ends.append(np.flatnonzero(part == ord("\n")) + first)
    del part
  stops = np.concatenate([*ends, [len(view)]]).astype(np.int64)
  view.release()
  starts = np.concatenate(([0], stops[:-1] + 1))
  sizes = np.maximum(stops - starts, 0)
  kept = np.ones(len(starts), bool)
  for line in np.flatnonzero(sizes < 3).tolist():
    kept[line] = bool(bytes(raw[starts[line] : starts[line] + sizes[line]]).strip())
  return starts[kept], sizes[kept]
