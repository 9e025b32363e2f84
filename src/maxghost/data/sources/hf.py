"""Hugging Face `datasets` folders on disk (extra `hf`): memory-mapped Arrow tables with random access to rows."""

import functools
import os
from pathlib import Path
from typing import Any

from maxghost.config import ConfigError
from maxghost.config.schema import DataConfig
from maxghost.data.hashing import text_hash
from maxghost.data.sources.base import CorruptError, check_known, import_package, join_columns
from maxghost.data.sources.files import fingerprint, labelled
from maxghost.data.sources.records import RecordSource, Shard


def load(cfg: DataConfig) -> RecordSource:
  """Documents of `domain=folder` datasets; without `domain=` the domain is the folder's name. Raises ConfigError.

  A folder was written by `save_to_disk`, or holds Parquet, JSON or text files as `datasets.load_dataset` reads them.
  """
  pairs = labelled("dataset_files", cfg.dataset_files, cfg.dataset_domains, lambda path: Path(path).name, "hf")
  return RecordSource([_shard(domain, os.path.expanduser(path), cfg) for domain, path in pairs])


def _shard(domain: str, path: str, cfg: DataConfig) -> Shard:
  """The rows of one dataset. Is pickled by the paths of its files."""
  table, columns = _open(path, cfg.train_split), cfg.train_data_columns
  check_known("train_data_columns", columns, tuple(table.column_names), f"dataset_files={path}")
  files = sorted({entry["filename"] for entry in table.cache_files})
  prints = f"{text_hash(*map(fingerprint, files)):016x}"
  read = functools.partial(_texts, table.select_columns(list(columns)), path, columns)
  return Shard(domain, f"{Path(path).name}/{cfg.train_split}", prints, len(table), read)


def _texts(table, path: str, columns: tuple[str, ...], rows: list[int], sizes: list[int]) -> list[bytes]:
  try:
    found = table[rows]
  except (OSError, ValueError) as error:  # what Arrow raises
    raise CorruptError(f"{path}, rows {rows[0]} to {rows[-1]}: {error}") from error
  return [
    join_columns(f"{path}, row {row}", {column: found[column][n] for column in columns}, columns)
    for n, row in enumerate(rows)
  ]


def _open(path: str, split: str) -> Any:
  datasets = import_package("datasets", "dataset_type=hf", "hf")
  if not os.path.isdir(path):
    raise ConfigError(f"dataset_files={path} is no folder; give one written by save_to_disk, or one of data files")
  saved = any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))
  try:
    table = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
  except Exception as error:  # the library raises many kinds
    raise ConfigError(f"dataset_files={path} cannot be read: {type(error).__name__}: {error}") from error
  if isinstance(table, datasets.DatasetDict):
    if split not in table:
      raise ConfigError(f"train_split={split} is no split of dataset_files={path}; it has {', '.join(map(str, table))}")
    table = table[split]
  return table
