"""Hugging Face `datasets` folders on disk (extra `hf`): memory-mapped Arrow tables with random access to rows."""

import os
from collections.abc import Sequence
from pathlib import Path

from maxghost.config import ConfigError
from maxghost.data.hashing import text_hash
from maxghost.data.sources import files as corpus_files
from maxghost.data.sources.base import CorruptError, check_columns, join_columns
from maxghost.data.sources.records import RecordSource


class HfShard:
  """The rows of one dataset. Is pickled by the paths of its files."""

  notes = ()

  def __init__(self, domain: str, path: str, split: str, columns: tuple[str, ...]):
    table = _open(path, split)
    check_columns(f"dataset_files={path}", tuple(table.column_names), columns)
    self.domain, self.name, self._path, self._columns = domain, f"{Path(path).name}/{split}", path, columns
    self._table = table.select_columns(list(columns))
    shards = sorted({entry["filename"] for entry in table.cache_files})
    self.fingerprint = f"{text_hash(*map(corpus_files.fingerprint, shards)):016x}"

  def __len__(self) -> int:
    return len(self._table)

  def texts(self, records: Sequence[int]) -> list[bytes]:
    try:
      found = self._table[list(records)]
    except (OSError, ValueError) as error:  # what Arrow raises
      raise CorruptError(f"{self._path}, rows {records[0]} to {records[-1]}: {error}") from error
    rows = ({column: found[column][n] for column in self._columns} for n in range(len(records)))
    return [
      join_columns(f"{self._path}, row {record}", row, self._columns) for record, row in zip(records, rows, strict=True)
    ]


def load(paths: Sequence[str], split: str, columns: tuple[str, ...], domains: tuple[str, ...] = ()) -> RecordSource:
  """Documents of `domain=folder` datasets; without `domain=` the domain is the folder's name. Raises ConfigError.

  A folder was written by `save_to_disk`, or holds Parquet, JSON or text files as `datasets.load_dataset` reads them.
  """
  pairs = corpus_files.labelled("dataset_files", paths, domains, lambda path: Path(path).name, "hf")
  return RecordSource([HfShard(domain, os.path.expanduser(path), split, columns) for domain, path in pairs])


def _open(path: str, split: str):
  try:
    import datasets
  except ImportError:
    line = "dataset_type=hf needs the package datasets; install it with: pip install 'maxghost[hf]'"
    raise ConfigError(line) from None
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
