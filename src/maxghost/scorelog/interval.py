"""The steps of one score file while they are collected in memory.

K validation sets, N rows, M modules, L layers, D domains.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from maxghost.config import did_you_mean
from maxghost.scorelog import format as fmt
from maxghost.scorelog.shard import Shard

REQUIRED = ("tokens", "loss", "dot", "contribution")
OPTIONAL = ("share", "chunk", "epoch")


class Interval:
  """Steps whose final file is not written yet.

  before: steps and rows of the log before them, None where unknown. `replaced`: the file of an early flush, if any.
  """

  def __init__(self, num_sets: int, ledger: Sequence[str] = fmt.LEDGER, before: tuple[int, int] | None = (0, 0)):
    self._num_sets, self._ledger, self.before = num_sets, ledger, before
    self.steps: list[np.ndarray] = []
    self.rows: list[np.ndarray] = []
    self.domains: dict[str, int] = {}
    self.paths: dict[str, int] = {}
    self.modules: list[fmt.Modules] = []
    self.replaced: Path | None = None

  @property
  def first_step(self) -> int:
    return int(self.steps[0]["step"][0])

  @property
  def last_step(self) -> int:
    return int(self.steps[-1]["step"][-1])

  @property
  def counts(self) -> tuple[int, int]:
    """How many steps and rows."""
    return sum(map(len, self.steps)), sum(map(len, self.rows))

  def add(self, record: Mapping[str, Any], rows: Mapping, documents: Sequence, modules: Mapping | None) -> int:
    """Checks and adds one step; returns its number of rows."""
    number, step = int(record["step"]), self._step(record)
    row = self._rows(number, rows, documents, step["tokens"][0])
    if modules is not None:
      self.modules.append(self._modules(number, modules))
    self.steps.append(step)
    self.rows.append(row)
    return len(row)

  def _step(self, record: Mapping[str, Any]) -> np.ndarray:
    step = fmt.unmeasured_steps([int(record["step"])], self._num_sets, self._ledger)
    names = step.dtype.names or ()
    for name, value in record.items():
      if name not in names:
        raise ValueError(f"unknown step column {name!r}{did_you_mean(name, names)}")
      if name != "step":
        step[name][0] = np.asarray(value, np.float64)
    return step

  def _rows(self, step: int, rows: Mapping, documents: Sequence, step_tokens: float) -> np.ndarray:
    num_rows = len(documents)
    array = np.zeros((num_rows,), fmt.row_dtype(self._num_sets))
    array["step"] = step
    if num_rows and (missing := set(REQUIRED) - set(rows)):
      raise ValueError(f"score rows lack the columns {', '.join(sorted(missing))}")
    for name in rows:
      if name not in (*REQUIRED, *OPTIONAL):
        raise ValueError(f"unknown score column {name!r}{did_you_mean(name, array.dtype.names or ())}")
      value = np.asarray(rows[name])
      expected = array[name].shape
      if value.shape != expected and not (value.shape == (num_rows,) and expected == (num_rows, 1)):
        raise ValueError(f"score column {name!r} has shape {value.shape}, expected {expected} for {num_rows} documents")
      array[name] = value.reshape(expected)
    if "share" not in rows:
      total = step_tokens if np.isfinite(step_tokens) else array["tokens"].sum()
      array["share"] = array["tokens"] / max(total, 1)
    for i, (domain, path, offset) in enumerate(documents):
      array["domain"][i] = self.domains.setdefault(str(domain), len(self.domains))
      array["path"][i] = self.paths.setdefault(str(path), len(self.paths))
      array["offset"][i] = offset
    return array

  def _modules(self, step: int, modules: Mapping) -> fmt.Modules:
    names, domains = tuple(modules["names"]), tuple(modules["domains"])
    value_MLDK = np.asarray(modules["contribution"], np.float32)
    if value_MLDK.ndim == 3 and self._num_sets == 1:
      value_MLDK = value_MLDK[..., None]
    num_layers = value_MLDK.shape[1] if value_MLDK.ndim == 4 else 0
    expected = (len(names), num_layers, len(domains), self._num_sets)
    if value_MLDK.shape != expected:
      raise ValueError(f"module contributions have shape {value_MLDK.shape}, expected [M, layers, D, K] = {expected}")
    found = fmt.Modules(names, domains, np.array([step]), value_MLDK[None])
    if self.modules and found.layout != self.modules[0].layout:
      raise ValueError("the names of modules and domains must not change inside a run")
    return found

  def copy(self) -> Self:
    """A frozen view for the writing thread: lists are copied, arrays are shared (they never change)."""
    other = copy.copy(self)
    vars(other).update({n: v.copy() for n, v in vars(self).items() if isinstance(v, (list, dict))})
    return other

  def contents(self) -> tuple[list[str], list[str], np.ndarray, fmt.Modules | None, np.ndarray]:
    """The arguments of `shard.write_shard` after path and header."""
    steps, rows = np.concatenate(self.steps), np.concatenate(self.rows)
    return list(self.domains), list(self.paths), steps, fmt.Modules.joined(self.modules), rows

  @classmethod
  def load(cls, shard: Shard, last_step: int, ledger: Sequence[str] = fmt.LEDGER) -> Self:
    """The steps of a file up to `last_step`."""
    interval = cls(len(shard.val_sets), ledger, shard.before)
    steps, rows, modules = fmt.with_ledger(shard.steps, len(shard.val_sets), ledger), shard.rows(), shard.modules
    interval.steps, interval.rows = [steps[steps["step"] <= last_step]], [rows[rows["step"] <= last_step]]
    interval.domains = {str(name): i for i, name in enumerate(shard.domains)}
    interval.paths = {str(name): i for i, name in enumerate(shard.paths)}
    if modules is not None:
      kept = modules.steps <= last_step
      values = modules.contribution_SMLDK[kept]
      interval.modules = [fmt.Modules(modules.names, modules.domains, modules.steps[kept], values)]
    interval.replaced = shard.path
    return interval
