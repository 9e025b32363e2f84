"""ArrayRecord files: random access to records, and the documents in them."""

import functools
import json
import threading
from collections.abc import Sequence

from maxghost.config import ConfigError
from maxghost.data.sources import files as corpus_files
from maxghost.data.sources.base import CorruptError, check_columns, join_columns, utf8
from maxghost.data.sources.files import CorpusFile
from maxghost.data.sources.records import RecordSource

_OPEN_FILES = 64
_NO_READ_AHEAD = "readahead_buffer_size:0"  # records are read in random order
TEXT, JSON, EXAMPLE = "plain text", "JSON objects", "tf.train.Example"


class Readers:
  """Reads records of ArrayRecord files by path; the files used last stay open. Is pickled without its open files.

  The library reads a truncated file as an empty one; here it raises CorruptError.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._reader = functools.lru_cache(_OPEN_FILES)(_reader)

  def __reduce__(self):
    return Readers, ()

  def count(self, path: str) -> int:
    """Number of records of a file. Raises CorruptError for a truncated file or one of another kind."""
    with self._lock:
      return self._reader(path).num_records()

  def read(self, path: str, records: Sequence[int]) -> list[bytes]:
    """Records of a file. Raises CorruptError naming the file and the record."""
    with self._lock:
      reader = self._reader(path)
      try:
        return reader.read(list(records))
      except RuntimeError:
        for record in records:  # find the corrupt one
          try:
            reader.read([record])
          except RuntimeError as error:
            raise CorruptError(f"{path}, record {record}: {error}") from error
        raise


def _reader(path: str):
  from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # compiled

  reader = array_record_module.ArrayRecordReader(path, options=_NO_READ_AHEAD)
  if not reader.ok():
    reason = "it cannot be opened"
    try:
      reader.read([0])
    except (RuntimeError, IndexError) as error:
      reason = str(error)
    raise CorruptError(f"{path} is no whole ArrayRecord file: {reason}")
  return reader


class ArrayRecordShard:
  """A document per record: a tf.train.Example or a JSON object with text columns, or the text itself.

  The first readable record decides the format; `notes` states it.
  """

  def __init__(self, file: CorpusFile, columns: tuple[str, ...], readers: Readers, fingerprint: str):
    self.domain, self.name, self.fingerprint = file.domain, file.name, fingerprint
    self._path, self._columns, self._readers = file.path, columns, readers
    self._count = readers.count(file.path)
    self._format = self._detect_format()
    self.notes = (f"{file.domain}: records of its ArrayRecord files are read as {self._format}",)

  def __len__(self) -> int:
    return self._count

  def texts(self, records: Sequence[int]) -> list[bytes]:
    raw = self._readers.read(self._path, records)
    return [self._text(record, one) for record, one in zip(records, raw, strict=True)]

  def _text(self, record: int, raw: bytes) -> bytes:
    where = f"{self._path}, record {record}"
    if self._format == TEXT:
      return utf8(where, 0, raw)
    try:
      values = json.loads(raw) if self._format == JSON else parse_example(raw)
    except ValueError as error:
      raise CorruptError(f"{where}: not {self._format} as the file's first record is ({error})") from error
    return join_columns(where, values if isinstance(values, dict) else {}, self._columns)

  def _detect_format(self) -> str:
    for record in range(min(8, self._count)):
      try:
        (raw,) = self._readers.read(self._path, [record])
      except CorruptError:
        continue
      if raw[:1] == b"{":
        try:
          check_columns(self._path, tuple(json.loads(raw)), self._columns)
          return JSON
        except json.JSONDecodeError:
          return TEXT
      try:
        names = tuple(parse_example(raw))
      except ValueError:
        return TEXT
      check_columns(self._path, names, self._columns)
      return EXAMPLE
    return TEXT


def load(files: Sequence[CorpusFile], columns: tuple[str, ...], *, on_corrupt: str = "error") -> RecordSource:
  """Documents of ArrayRecord files. Raises ConfigError."""
  readers, parts, notes = Readers(), [], []
  prints = corpus_files.fingerprints(files)
  for file in files:
    try:
      parts.append(ArrayRecordShard(file, columns, readers, prints[f"{file.domain}/{file.name}"]))
    except CorruptError as error:
      if on_corrupt == "error":
        raise ConfigError(f"{error}; repair or remove it, or use on_corrupt=skip") from error
      notes.append(f"left out: {error}")
  for domain in dict.fromkeys(file.domain for file in files):
    if not any(part.domain == domain for part in parts):
      raise ConfigError(f"domain '{domain}' has no documents: none of its files can be read")
  return RecordSource(parts, tuple(notes))


@functools.cache
def _example_class():
  from tensorflow_datasets.proto import tf_example_pb2  # the message alone; TensorFlow is not imported

  return tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]  # made when imported


def parse_example(raw: bytes) -> dict[str, bytes]:
  """The bytes features of a serialized tf.train.Example that hold one value. Raises ValueError when it is none."""
  from google.protobuf.message import DecodeError

  try:
    example = _example_class().FromString(raw)
  except DecodeError as error:
    raise ValueError(str(error)) from error
  features = example.features.feature
  if not features:
    raise ValueError("it has no features")
  return {name: one.bytes_list.value[0] for name, one in features.items() if len(one.bytes_list.value) == 1}
