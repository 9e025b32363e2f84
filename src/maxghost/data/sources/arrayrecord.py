"""ArrayRecord files: random access to records, and the documents in them.

A record is a tf.train.Example or a JSON object with text columns, or the text itself; the first readable record of a
file that is not empty decides, and a note says it.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from maxghost.config import DataConfig
from maxghost.data.sources.base import CorruptError, columns_of, left_out, read_all, utf8
from maxghost.data.sources.files import CorpusFile
from maxghost.data.sources.records import RECORD, Opened, RecordSource, Shard

OPEN_FILES = 64
TEXT, JSON, EXAMPLE = "plain text", "JSON objects", "tf.train.Example"


def load(files: Sequence[CorpusFile], cfg: DataConfig) -> RecordSource:
  readers, shards, notes, formats = Opened(open_reader, OPEN_FILES), [], [], {}
  for file in files:
    count, kind = 0, TEXT
    try:
      count = readers.get(file.path).num_records()
      kind = _format(readers, file.path, count, cfg.train_data_columns)
      formats[f"{file.domain}: records of its ArrayRecord files are read as {kind}"] = None
    except CorruptError as error:
      notes.append(left_out(error, cfg.on_corrupt))
    read, place = functools.partial(_read, readers, file.path, kind), functools.partial(RECORD, file.path)
    shards.append(Shard(file.domain, file.name, file.fingerprint, count, read, place, kind == TEXT))
  return RecordSource(shards, cfg, [*notes, *formats])


def read_records(readers: Opened, path: str, records: Sequence[int]) -> list[bytes]:
  """Records of a file. Raises CorruptError naming the file and the record."""
  with readers.lock:
    return read_all(readers.get(path).read, list(records), RuntimeError, path)


def open_reader(path: str):
  """A reader. The library reads a truncated file as an empty one; here it raises CorruptError."""
  from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # compiled

  # Nothing is read ahead, since records are read in random order.
  reader = array_record_module.ArrayRecordReader(os.fsencode(path), options="readahead_buffer_size:0")
  if not reader.ok():
    reason = "it cannot be opened"
    try:
      reader.read([0])
    except (RuntimeError, IndexError) as error:
      reason = str(error)
    raise CorruptError(f"{path} is no whole ArrayRecord file: {reason}")
  return reader


def _read(readers: Opened, path: str, kind: str, records: list[int], _: list, __: tuple) -> Iterator[Any]:
  found = zip([RECORD(path, number) for number in records], read_records(readers, path, records), strict=True)
  return (_parsed(place, kind, raw) for place, raw in found)


def _parsed(place: str, kind: str, raw: bytes) -> Any:
  if kind == TEXT:
    return utf8(place, 0, raw)
  try:
    return json.loads(raw) if kind == JSON else _parse_example(raw)
  except (ValueError, RecursionError) as error:
    raise CorruptError(f"{place}: its file holds {kind}, and this is none ({error})") from error


def _format(readers: Opened, path: str, count: int, columns: tuple[str, ...]) -> str:
  assumed = TEXT
  for record in range(min(8, count)):
    try:
      (raw,) = read_records(readers, path, [record])
    except CorruptError:
      continue
    if not raw:  # empty text, or an example without features
      continue
    kind, parse = (JSON, json.loads) if raw[:1] == b"{" else (EXAMPLE, _parse_example)
    try:
      names = tuple(name for name, value in parse(raw).items() if kind == JSON or isinstance(value, bytes))
    except (ValueError, RecursionError) as error:
      if kind == EXAMPLE or isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return TEXT
      assumed = JSON  # nested too deeply, or a number of too many digits: reported when it is read
      continue
    columns_of(columns, names, path)
    return kind
  return assumed


def _parse_example(raw: bytes) -> dict[str, bytes | int | float]:
  """The features of a serialized tf.train.Example that hold one value. Raises ValueError when it is none."""
  from google.protobuf.message import DecodeError
  from tensorflow_datasets.proto import tf_example_pb2  # the message alone; TensorFlow is not imported

  example: Any = tf_example_pb2
  try:
    features = example.Example.FromString(raw).features.feature
  except DecodeError as error:
    raise ValueError(str(error)) from error
  if not features:
    raise ValueError("it has no features")
  lists = {name: getattr(one, one.WhichOneof("kind") or "bytes_list").value for name, one in features.items()}
  return {name: values[0] for name, values in lists.items() if len(values) == 1}
