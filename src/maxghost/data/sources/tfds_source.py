"""TensorFlow Datasets on disk, read through `tfds.data_source` (ArrayRecord): TensorFlow is not imported."""

import functools
import os
from typing import Any

from maxghost.config import ConfigError
from maxghost.config.schema import DataConfig
from maxghost.data.hashing import text_hash
from maxghost.data.sources.base import CorruptError, check_known, join_columns
from maxghost.data.sources.files import fingerprint, labelled
from maxghost.data.sources.records import Opened, RecordSource, Shard


def load(cfg: DataConfig) -> RecordSource:
  """Documents of prepared TFDS datasets. Raises ConfigError.

  dataset_files: `domain=dataset/config:version`; without `domain=` the domain is the dataset's name.
  """
  names, domains = cfg.dataset_files, cfg.dataset_domains
  pairs = labelled("dataset_files", names, domains, lambda name: name.split("/")[0].split(":")[0], "tfds")
  opened = Opened(_open, None)
  return RecordSource([_shard(domain, name, opened, cfg) for domain, name in pairs])


def _shard(domain: str, dataset: str, opened: Opened, cfg: DataConfig) -> Shard:
  source, split = opened.get(dataset, cfg), cfg.train_split
  files = sorted({str(one.filename) for one in source.dataset_info.splits[split].file_instructions})
  name = f"{source.dataset_info.full_name}/{split}"
  prints = f"{text_hash(*map(fingerprint, files)):016x}"
  return Shard(domain, name, prints, len(source), functools.partial(_texts, opened, dataset, cfg, name))


def _texts(
  opened: Opened, dataset: str, cfg: DataConfig, name: str, records: list[int], sizes: list[int]
) -> list[bytes]:
  source = opened.get(dataset, cfg)  # each worker process opens it again
  try:
    found = source.__getitems__(records)
  except RuntimeError:
    for record in records:  # find the corrupt one
      try:
        source[record]
      except RuntimeError as error:
        raise CorruptError(f"{name} in {cfg.dataset_path}, record {record}: {error}") from error
    raise
  columns = cfg.train_data_columns
  return [join_columns(f"{name}, record {n}", one, columns) for n, one in zip(records, found, strict=True)]


def _open(dataset: str, cfg: DataConfig):
  import tensorflow_datasets as tfds

  try:
    builder: Any = tfds.builder(dataset, data_dir=os.path.expanduser(cfg.dataset_path) or None)
  except Exception as error:  # DatasetNotFoundError, and ValueError for malformed names
    raise ConfigError(_unknown(dataset, cfg.dataset_path, error)) from error
  if not builder.is_prepared():
    raise ConfigError(
      f"dataset_files={dataset} is not prepared in {builder.data_path}; prepare it with: "
      f"tfds build {dataset} --file_format=array_record"
    )
  check_known("train_data_columns", cfg.train_data_columns, tuple(builder.info.features), f"dataset_files={dataset}")
  if cfg.train_split not in builder.info.splits:
    raise ConfigError(
      f"train_split={cfg.train_split} is no split of dataset_files={dataset}; it has {', '.join(builder.info.splits)}"
    )
  try:
    return builder.as_data_source(split=cfg.train_split)
  except NotImplementedError as error:
    raise ConfigError(
      f"dataset_files={dataset} was prepared without random access ({builder.info.file_format}); "
      "convert it with: tfds convert_format --out_file_format=array_record"
    ) from error


def _unknown(name: str, data_dir: str, error: Exception) -> str:
  folder = data_dir or "~/tensorflow_datasets"
  path = os.path.expanduser(folder)
  present = sorted(os.listdir(path)) if os.path.isdir(path) else []
  has = f"it holds {', '.join(present[:10])}" if present else "it holds none"
  return f"dataset_files={name} is not found in dataset_path={folder} ({type(error).__name__}); {has}"
