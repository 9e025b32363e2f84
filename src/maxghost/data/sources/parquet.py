"""Rows of a Parquet file at random, through its row groups."""

from collections.abc import Sequence

import numpy as np

from maxghost.config import ConfigError
from maxghost.data.sources.base import CorruptError, check_columns


class ParquetText:
  """Some columns of a Parquet file by row. Keeps the row group read last, so read neighbouring rows together.

  Attributes:
    num_rows: rows of the file.
    mean_bytes: mean size of a row's columns, from the file's footer.
  """

  def __init__(self, path: str, columns: Sequence[str]):
    """Raises CorruptError for an unreadable file, ConfigError for a missing column."""
    try:
      import pyarrow.parquet
    except ImportError:
      raise ConfigError(f"{path} needs the package pyarrow; install it with: pip install 'maxghost[data]'") from None
    try:
      self._file = pyarrow.parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises OSError, ArrowInvalid and more
      raise CorruptError(f"{path} is no readable Parquet file: {error}") from error
    self._path, self._columns = path, list(columns)
    check_columns(path, tuple(self._file.schema_arrow.names), columns)
    groups = [self._file.metadata.row_group(number) for number in range(self._file.metadata.num_row_groups)]
    self._ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
    self.num_rows = int(self._ends[-1]) if groups else 0
    total = 0
    for group in groups:
      chunks = [group.column(number) for number in range(group.num_columns)]
      total += sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    self.mean_bytes = max(1, total // max(1, self.num_rows))
    self._group, self._values = -1, []

  def row(self, number: int) -> dict:
    """{column: value} of a row. Raises CorruptError."""
    group = int(np.searchsorted(self._ends, number, side="right"))
    first = int(self._ends[group - 1]) if group else 0
    if group != self._group:
      try:
        self._values = self._file.read_row_group(group, columns=self._columns).to_pylist()
      except Exception as error:  # as above
        self._group = -1
        raise CorruptError(f"{self._path}, row group {group} (rows from {first}): {error}") from error
      self._group = group
    return self._values[number - first]
