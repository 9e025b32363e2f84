"""Tables of documents that a library opens: Hugging Face `datasets` folders and prepared TensorFlow Datasets.

Both give random access to rows; the latter are read through `tfds.data_source` (ArrayRecord), without TensorFlow.
"""

import functools
import os
from pathlib import Path
from typing import Any

from maxghost.config import ConfigError
from maxghost.config.schema import DataConfig
from maxghost.data.hashing import text_hash
from maxghost.data.sources.base import check_known, import_package, join_columns, read_all
from maxghost.data.sources.files import fingerprint, labelled
from maxghost.data.sources.records import Opened, RecordSource, Shard


def load(cfg: DataConfig) -> RecordSource:
  """Documents of `domain=folder` (hf) or `domain=dataset/config:version` (tfds). Raises ConfigError.

  Without `domain=` the domain is the folder's or the dataset's name. A folder of hf was written by `save_to_disk`, or
  holds Parquet, JSON or text files as `datasets.load_dataset` reads them.
  """
  kind, shards = cfg.dataset_type, []
  opened = Opened(_open_hf if kind == "hf" else _open_tfds, None)
  names = {"hf": lambda path: Path(path).name, "tfds": lambda name: name.split("/")[0].split(":")[0]}
  for domain, path in labelled("dataset_files", cfg.dataset_files, cfg.dataset_domains, names[kind], kind):
    table, name, files = opened.get(path, cfg)
    prints = f"{text_hash(*map(fingerprint, sorted(files))):016x}"
    shards.append(Shard(domain, name, prints, len(table), functools.partial(_texts, opened, path, cfg)))
  return RecordSource(shards)


def _texts(opened: Opened, path: str, cfg: DataConfig, rows: list[int], sizes: list[int]) -> list[bytes]:
  table, _, _ = opened.get(path, cfg)  # each worker process opens it again
  errors = (RuntimeError, OSError, ValueError)  # what ArrayRecord and Arrow raise
  found = read_all(table.__getitems__, rows, errors, path)
  return [join_columns(f"{path}, record {n}", one, cfg.train_data_columns) for n, one in zip(rows, found, strict=True)]


def _open_hf(path: str, cfg: DataConfig) -> tuple[Any, str, set[str]]:
  """The table, its name in the ids, and its files."""
  datasets = import_package("datasets", "dataset_type=hf", "hf")
  folder, split = Path(path).expanduser(), cfg.train_split
  if not folder.is_dir():
    raise ConfigError(f"dataset_files={path} is no folder; give one written by save_to_disk, or one of data files")
  saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
  try:
    table = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder))
  except Exception as error:  # the library raises many kinds
    raise ConfigError(f"dataset_files={path} cannot be read: {type(error).__name__}: {error}") from error
  if isinstance(table, datasets.DatasetDict):
    _check_split(path, split, table)
    table = table[split]
  check_known("train_data_columns", cfg.train_data_columns, table.column_names, f"dataset_files={path}")
  files = {entry["filename"] for entry in table.cache_files}
  return table.select_columns(list(cfg.train_data_columns)), f"{folder.name}/{split}", files


def _open_tfds(dataset: str, cfg: DataConfig) -> tuple[Any, str, set[str]]:
  """As `_open_hf`."""
  import tensorflow_datasets as tfds

  folder, split = cfg.dataset_path or "~/tensorflow_datasets", cfg.train_split
  try:
    builder: Any = tfds.builder(dataset, data_dir=os.path.expanduser(cfg.dataset_path) or None)
  except Exception as error:  # DatasetNotFoundError, and ValueError for malformed names
    path = os.path.expanduser(folder)
    present = sorted(os.listdir(path)) if os.path.isdir(path) else []
    raise ConfigError(
      f"dataset_files={dataset} is not found in dataset_path={folder} ({type(error).__name__}); it holds "
      f"{', '.join(present[:10]) or 'none'}"
    ) from error
  if not builder.is_prepared():
    raise ConfigError(
      f"dataset_files={dataset} is not prepared in {builder.data_path}; prepare it with: "
      f"tfds build {dataset} --file_format=array_record"
    )
  check_known("train_data_columns", cfg.train_data_columns, builder.info.features, f"dataset_files={dataset}")
  _check_split(dataset, split, builder.info.splits)
  try:
    source = builder.as_data_source(split=split)
  except NotImplementedError as error:
    raise ConfigError(
      f"dataset_files={dataset} was prepared without random access ({builder.info.file_format}); "
      "convert it with: tfds convert_format --out_file_format=array_record"
    ) from error
  files = {str(one.filename) for one in source.dataset_info.splits[split].file_instructions}
  return source, f"{source.dataset_info.full_name}/{split}", files


def _check_split(name: str, split: str, splits) -> None:
  if split not in splits:
    raise ConfigError(f"train_split={split} is no split of dataset_files={name}; it has {', '.join(map(str, splits))}")
