"""Conditions on score rows such as `domain=code,step>=100,path~asyncio/*`; all must hold.

K validation sets, N rows.
"""

import fnmatch
import operator
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from maxghost.config.values import ConfigError, did_you_mean, printable
from maxghost.scorelog.format import ROW_COLUMNS, TEXTS, row_dtype
from maxghost.scorelog.reader import ScoreLog

_OPERATORS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
              ">=": operator.ge}  # fmt: skip
_TEXT_OPERATORS = ("=", "!=", "~", "!~")
_CONDITION = re.compile(r"""\s*(\w+)\s*(!=|<=|>=|!~|==|=|<|>|~)\s*("[^"]*"|'[^']*'|[^,]*)\s*(?:,|$)""")


def refuse_unknown(said: str, name: str, known: Iterable[str], more: str = "") -> None:
  """Raises ConfigError with `said` and the nearest of the known names, or all of them and `more`, if it is none."""
  if name not in known:
    raise ConfigError(printable(said + (did_you_mean(name, known) or f"; there are {', '.join(known)}{more}")))


class Condition(NamedTuple):
  """`column operator value`; value: a number, or a string for domain, path and fields of documents."""

  column: str
  operator: str
  value: str | float | int

  def holds(self, values) -> np.ndarray:
    """bool per value of the column."""
    if "~" not in self.operator:
      with np.errstate(over="ignore"):  # the columns are float32, which has no number like 1e39
        return _OPERATORS[self.operator](np.asarray(values), self.value)
    pattern = str(self.value).replace("[", "[[]")  # a bracket is one, as in the names of files
    matches = np.array([fnmatch.fnmatchcase(str(name), pattern) for name in values], bool)
    return ~matches if self.operator == "!~" else matches


class Where:
  """Parsed conditions; an empty text selects every row. Raises ConfigError.

  set_index: validation set of `dot` and `contribution`. fields: of the log's documents.
  """

  def __init__(self, text: str = "", set_index: int = 0, fields: tuple[str, ...] = ()):
    self.conditions = tuple(_conditions(text, fields))
    self._set_index, self._text_columns = set_index, (*TEXTS, *fields)
    self._shard = None
    self._tables: dict[str, np.ndarray] = {}

  def __call__(self, shard, rows: np.ndarray) -> np.ndarray:
    """bool[N]; strings are compared once per entry of the file's tables, not per row."""
    if shard is not self._shard:
      texts = {condition.column for condition in self.conditions}.intersection(self._text_columns)
      self._shard, self._tables = shard, {name: self.holds(name, shard.texts(name)) for name in texts}
    keep = np.ones(len(rows), bool)
    for column in {condition.column for condition in self.conditions}:
      values = rows[column][:, self._set_index] if rows[column].ndim == 2 else rows[column]
      keep &= self._tables[column][values] if column in self._text_columns else self.holds(column, values)
    return keep

  def hints(self, log: ScoreLog) -> str:
    """`; did you mean 'code'?` for each name that no row has."""
    wanted = [c for c in self.conditions if c.column in self._text_columns and c.operator == "="]
    known = {c.column: {str(text) for shard in log.shards for text in shard.texts(c.column)} for c in wanted}
    return "".join(did_you_mean(str(c.value), known[c.column]) for c in wanted if c.value not in known[c.column])

  def holds(self, column: str, values) -> np.ndarray:
    """bool per value of a column: whether the conditions on it hold."""
    each = (condition.holds(values) for condition in self.conditions if condition.column == column)
    return np.logical_and.reduce([np.ones(len(values), bool), *each])


def _conditions(text: str, fields: tuple[str, ...]) -> Iterator[Condition]:
  at = 0
  while text[at:].strip():
    if not (found := _CONDITION.match(text, at)):
      said = f"--where: cannot read {text[at:].strip()!r}; write column=value with commas between, for example"
      raise ConfigError(f"{said} domain=code,step>=100 (quotes around a value with a comma)")
    at, column, sign, value = found.end(), found[1], found[2].replace("==", "="), found[3].strip()
    refuse_unknown(f"--where: unknown column {column!r}", column, (*ROW_COLUMNS, *fields))
    value = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    wrong, is_text = f"--where: {column}{sign}{value}: ", column in (*TEXTS, *fields)
    if sign not in (known := _TEXT_OPERATORS if is_text else _OPERATORS):
      said = f"{wrong}a {'text' if is_text else 'number'} takes {', '.join(known)}"
      raise ConfigError(said + " (~ is a glob pattern)" * is_text)
    kind, words = (int, "a whole number") if row_dtype(1, fields=fields)[column].kind == "i" else (float, "a number")
    try:
      yield Condition(column, sign, value if is_text else kind(value))
    except ValueError:
      raise ConfigError(f"{wrong}{value!r} is not {words}") from None
