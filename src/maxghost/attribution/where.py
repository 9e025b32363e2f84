"""Conditions on score rows such as `domain=code,step>=100,path~asyncio/*`; all must hold.

K validation sets, N rows.
"""

import dataclasses
import fnmatch
import operator
import re

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.scorelog.format import ROW_COLUMNS, row_dtype

_NUMERIC = {
  "=": operator.eq,
  "!=": operator.ne,
  "<": operator.lt,
  "<=": operator.le,
  ">": operator.gt,
  ">=": operator.ge,
}
_TEXT_COLUMNS = ("domain", "path")
_INTEGER_COLUMNS = tuple(name for name in ROW_COLUMNS if row_dtype(1)[name].kind == "i" and name not in _TEXT_COLUMNS)
_TEXT_OPERATORS = ("=", "!=", "~", "!~")
_CONDITION = re.compile(r"""\s*(\w+)\s*(!=|<=|>=|!~|==|=|<|>|~)\s*("[^"]*"|'[^']*'|[^,]*)\s*(?:,|$)""")


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
  """`column operator value`; value: a number, or a string for domain and path."""

  column: str
  operator: str
  value: str | float | int


class Where:
  """Parsed conditions; an empty text selects every row.

  set_index: validation set of `dot` and `contribution`. Raises ConfigError for an unknown column, an operator that the
  column does not have, or a value that is not a number.
  """

  def __init__(self, text: str = "", set_index: int = 0):
    self.text = text
    self.conditions = tuple(_parse(text))
    self._set_index = set_index
    self._shard = None
    self._tables: list[tuple[str, np.ndarray]] = []

  @property
  def columns(self) -> frozenset[str]:
    return frozenset(condition.column for condition in self.conditions)

  def __call__(self, shard, rows: np.ndarray) -> np.ndarray:
    """bool[N]; strings are compared once per entry of the file's tables, not per row."""
    if shard is not self._shard:
      self._shard = shard
      texts = [condition for condition in self.conditions if condition.column in _TEXT_COLUMNS]
      self._tables = [(c.column, _match_texts(c, getattr(shard, f"{c.column}s"))) for c in texts]
    keep = np.ones(len(rows), bool)
    for column, matches in self._tables:
      keep &= matches[rows[column]]
    for condition in self.conditions:
      if condition.column not in _TEXT_COLUMNS:
        values = rows[condition.column]
        values = values[:, self._set_index] if values.ndim == 2 else values
        keep &= _NUMERIC[condition.operator](values, condition.value)
    return keep

  def steps(self, step: np.ndarray) -> np.ndarray:
    """bool per step: whether the conditions on `step` hold."""
    keep = np.ones(len(step), bool)
    for condition in self.conditions:
      if condition.column == "step":
        keep &= _NUMERIC[condition.operator](step, condition.value)
    return keep

  def names(self, column: str, names) -> np.ndarray:
    """bool per name: whether the conditions on a text column hold."""
    keep = np.ones(len(names), bool)
    for condition in self.conditions:
      if condition.column == column:
        keep &= _match_texts(condition, names)
    return keep


def _match_texts(condition: Condition, names) -> np.ndarray:
  value = str(condition.value)
  if condition.operator in ("~", "!~"):
    matches = re.compile(fnmatch.translate(value)).match
    found = np.array([matches(str(name)) is not None for name in names], bool)
  else:
    found = np.array([str(name) == value for name in names], bool)
  return ~found if condition.operator.startswith("!") else found


def _parse(text: str):
  at = 0
  while text[at:].strip():
    found = _CONDITION.match(text, at)
    if not found:
      raise ConfigError(
        f"--where: cannot read {text[at:].strip()!r}; write column=value with commas between, for example "
        "domain=code,step>=100 (quotes around a value with a comma)"
      )
    yield _condition(found[1], "=" if found[2] == "==" else found[2], found[3].strip())
    at = found.end()


def _condition(column: str, sign: str, value: str) -> Condition:
  if column not in ROW_COLUMNS:
    hint = did_you_mean(column, ROW_COLUMNS) or f"; there are {', '.join(ROW_COLUMNS)}"
    raise ConfigError(f"--where: unknown column {column!r}{hint}")
  if value[:1] in ("'", '"'):
    value = value[1:-1]
  if column in _TEXT_COLUMNS:
    if sign not in _TEXT_OPERATORS:
      raise ConfigError(
        f"--where: {column}{sign}{value}: a text takes {', '.join(_TEXT_OPERATORS)} (~ is a glob pattern)"
      )
    return Condition(column, sign, value)
  if sign not in _NUMERIC:
    raise ConfigError(f"--where: {column}{sign}{value}: a number takes {', '.join(_NUMERIC)}")
  kind = int if column in _INTEGER_COLUMNS else float
  try:
    return Condition(column, sign, kind(value))
  except ValueError:
    expected = "a whole number" if kind is int else "a number"
    raise ConfigError(f"--where: {column}{sign}{value}: {value!r} is not {expected}") from None
