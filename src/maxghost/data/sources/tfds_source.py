"""TensorFlow Datasets on disk, read through `tfds.data_source` (ArrayRecord): TensorFlow is not imported."""

import os
from collections.abc import Sequence
from typing import Any

from maxghost.config import ConfigError
from maxghost.data.hashing import text_hash
from maxghost.data.sources import files as corpus_files
from maxghost.data.sources.base import CorruptError, check_columns, join_columns
from maxghost.data.sources.records import RecordSource


class TfdsShard:
  """One split of one dataset. Each worker process opens it again."""

  notes = ()

  def __init__(self, domain: str, dataset: str, data_dir: str, split: str, columns: tuple[str, ...]):
    self.domain, self._dataset, self._data_dir, self._split, self._columns = domain, dataset, data_dir, split, columns
    self._source = None
    source = self._open()
    self._count = len(source)
    self.name = f"{source.dataset_info.full_name}/{split}"
    shards = sorted({str(one.filename) for one in source.dataset_info.splits[split].file_instructions})
    self.fingerprint = f"{text_hash(*map(corpus_files.fingerprint, shards)):016x}"

  def __getstate__(self) -> dict:
    return {**self.__dict__, "_source": None}

  def __len__(self) -> int:
    return self._count

  def texts(self, records: Sequence[int]) -> list[bytes]:
    source = self._open()
    try:
      found = source.__getitems__(list(records))
    except RuntimeError:  # find the corrupt one
      found = [self._one(source, record) for record in records]
    return [
      join_columns(f"{self.name}, record {record}", one, self._columns)
      for record, one in zip(records, found, strict=True)
    ]

  def _one(self, source, record: int) -> dict:
    try:
      return source[record]
    except RuntimeError as error:
      raise CorruptError(f"{self.name} in {self._data_dir}, record {record}: {error}") from error

  def _open(self):
    if self._source is not None:
      return self._source
    import tensorflow_datasets as tfds

    data_dir = self._data_dir or None
    try:
      builder: Any = tfds.builder(self._dataset, data_dir=data_dir)
    except Exception as error:  # DatasetNotFoundError, and ValueError for malformed names
      raise ConfigError(_unknown(self._dataset, self._data_dir, error)) from error
    if not builder.is_prepared():
      raise ConfigError(
        f"dataset_files={self._dataset} is not prepared in {builder.data_path}; prepare it with: "
        f"tfds build {self._dataset} --file_format=array_record"
      )
    check_columns(f"dataset_files={self._dataset}", tuple(builder.info.features), self._columns)
    if self._split not in builder.info.splits:
      raise ConfigError(
        f"train_split={self._split} is no split of dataset_files={self._dataset}; "
        f"it has {', '.join(builder.info.splits)}"
      )
    try:
      self._source = builder.as_data_source(split=self._split)
    except NotImplementedError as error:
      raise ConfigError(
        f"dataset_files={self._dataset} was prepared without random access ({builder.info.file_format}); "
        "convert it with: tfds convert_format --out_file_format=array_record"
      ) from error
    return self._source


def load(
  names: Sequence[str], data_dir: str, split: str, columns: tuple[str, ...], domains: tuple[str, ...] = ()
) -> RecordSource:
  """Documents of prepared TFDS datasets. Raises ConfigError.

  names: `domain=dataset/config:version`; without `domain=` the domain is the dataset's name.
  """
  pairs = corpus_files.labelled("dataset_files", names, domains, lambda name: name.split("/")[0].split(":")[0], "tfds")
  return RecordSource([TfdsShard(domain, name, os.path.expanduser(data_dir), split, columns) for domain, name in pairs])


def _unknown(name: str, data_dir: str, error: Exception) -> str:
  folder = data_dir or "~/tensorflow_datasets"
  path = os.path.expanduser(folder)
  present = sorted(os.listdir(path)) if os.path.isdir(path) else []
  has = f"it holds {', '.join(present[:10])}" if present else "it holds none"
  return f"dataset_files={name} is not found in dataset_path={folder} ({type(error).__name__}); {has}"
