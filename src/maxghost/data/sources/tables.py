"""Tables of documents that a library opens: Hugging Face `datasets` and prepared TensorFlow Datasets.

The latter are read through `tfds.data_source` (ArrayRecord), without TensorFlow.
"""

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.config import ConfigError, DataConfig
from maxghost.config.values import import_package
from maxghost.data.hashing import text_hash
from maxghost.data.sources import base
from maxghost.data.sources.files import fingerprint, labelled
from maxghost.data.sources.records import RECORD, Opened, RecordSource, Shard

_ERRORS = (RuntimeError, OSError, ValueError)  # what ArrayRecord and Arrow raise
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def load(cfg: DataConfig) -> RecordSource:
  """Documents of `domain=folder or name` (hf) or `domain=dataset/config:version` (tfds). Raises ConfigError.

  Without `domain=` the domain is the folder's or the dataset's name. A folder of hf was written by `save_to_disk`, or
  holds Parquet, JSON or text files; anything else is `owner/name:config` on the Hugging Face hub.
  """
  kind, shards = cfg.dataset_type, []
  opened = Opened(_open_hf if kind == "hf" else _open_tfds, None)
  names = {"hf": _name, "tfds": lambda name: name.split("/")[0].split(":")[0]}
  for domain, path in labelled("dataset_files", cfg.dataset_files, cfg.dataset_domains, names[kind], kind):
    table, name, files = opened.get(path, cfg)
    read, place = functools.partial(_read, opened, path, cfg), functools.partial(RECORD, path)
    shard = Shard(domain, name, "", len(table), read, place)
    texts = lambda rows, shard=shard: shard.texts(rows.tolist(), [], cfg.train_data_columns)  # noqa: E731
    seen: Any = [*map(fingerprint, sorted(files))] or base.read_or_skip(texts, np.arange(len(table)), cfg.on_corrupt)
    shards.append(dataclasses.replace(shard, fingerprint=f"{text_hash(*(one or b'' for one in seen)):016x}"))
  return RecordSource(shards, cfg)


def _name(path: str) -> str:
  """A folder's name, or that of a dataset on the hub without owner and configuration."""
  return Path(path).name if Path(path).expanduser().is_dir() else Path(path).name.partition(":")[0]


def _read(opened: Opened, path: str, cfg: DataConfig, rows: list[int], _: list, __: tuple) -> list[dict[str, Any]]:
  return base.read_all(opened.get(path, cfg)[0].__getitems__, rows, _ERRORS, path)  # each worker process opens it again


def _open_hf(path: str, cfg: DataConfig) -> tuple[Any, str, set[str]]:
  """The table, without a format that it was saved with, its name in the ids, and its files."""
  datasets = import_package("datasets", "dataset_type=hf", "hf")
  folder, split, cap = Path(path).expanduser(), cfg.train_split, cfg.dataset_domain_bytes
  if not folder.is_dir() and not _HUB_NAME.fullmatch(path):
    raise ConfigError(f"dataset_files={path} is no folder, and no name of a dataset such as owner/name:config")
  arguments = [str(folder)] if folder.is_dir() else path.split(":")
  saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
  try:
    table = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(*arguments, streaming=cap > 0)
  except Exception as error:  # the library raises many kinds
    hub = "" if folder.is_dir() else " (there is no such folder; on the hub)"
    said = f"{type(error).__name__}: {error.__cause__ or error}"  # the library hides a broken line behind its own error
    raise ConfigError(f"dataset_files={path} cannot be read{hub}: {said}") from error
  splits = {str(table.split or "train"): table, "train": table} if not isinstance(table, dict) else table
  base.check_known("train_split", [split], splits, f"dataset_files={path}")
  table = splits[split]
  if cap > 0:

    def size(numbered: tuple[int, dict[str, Any]]) -> int:
      where, row, columns = functools.partial(RECORD, path, numbered[0]), numbered[1], cfg.train_data_columns
      base.columns_of(columns, row, f"dataset_files={path}")
      text = base.read_or_skip(lambda _: [base.join_columns(where, row, columns)], np.arange(1), cfg.on_corrupt)
      return len(text[0] or b"")

    table = datasets.Dataset.from_list([row for _, row in base.take(enumerate(table), cap, path, size)])
  found = base.columns_of(cfg.train_data_columns, table.column_names, f"dataset_files={path}")
  fields = [name for name in base.wanted_fields(cfg.document_fields).values() if name in table.column_names]
  table = table.select_columns([*dict.fromkeys([*found, *fields])]).with_transform(base.without_nulls)
  return table, f"{_name(path)}/{split}", {entry["filename"] for entry in table.cache_files}


def _open_tfds(dataset: str, cfg: DataConfig) -> tuple[Any, str, set[str]]:
  import tensorflow_datasets as tfds

  folder, split = cfg.dataset_path or "~/tensorflow_datasets", cfg.train_split
  try:
    builder: Any = tfds.builder(dataset, data_dir=os.path.expanduser(cfg.dataset_path) or None)
  except Exception as error:  # DatasetNotFoundError, and ValueError for malformed names
    present = sorted(os.listdir(path)) if os.path.isdir(path := os.path.expanduser(folder)) else []
    said = f"dataset_files={dataset} is not found in dataset_path={folder} ({type(error).__name__})"
    raise ConfigError(f"{said}; it holds {', '.join(present[:10]) or 'none'}") from error
  if not builder.is_prepared():
    said = f"dataset_files={dataset} is not prepared in {builder.data_path}"
    raise ConfigError(f"{said}; prepare it with: tfds build {dataset} --file_format=array_record")
  base.columns_of(cfg.train_data_columns, builder.info.features, f"dataset_files={dataset}")
  base.check_known("train_split", [split], builder.info.splits, f"dataset_files={dataset}")
  try:
    source = builder.as_data_source(split=split)
  except NotImplementedError as error:
    said = f"dataset_files={dataset} was prepared without random access ({builder.info.file_format})"
    raise ConfigError(f"{said}; convert it with: tfds convert_format --out_file_format=array_record") from error
  files = {str(one.filename) for one in source.dataset_info.splits[split].file_instructions}
  return source, f"{source.dataset_info.full_name}/{split}", files
