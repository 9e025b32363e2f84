"""The steps of one score file while they are gathered in memory.

K validation sets, N rows, M modules, L layers, D domains.
"""

from pathlib import Path

import numpy as np

from maxghost.config import did_you_mean
from maxghost.scorelog import format as fmt


class Interval:
  """Steps not yet written for good; `replaced` is the file that an early flush left for them."""

  def __init__(self, num_sets: int):
    self._num_sets = num_sets
    self.steps: list[np.ndarray] = []
    self.rows: list[np.ndarray] = []
    self.domains: dict[str, int] = {}
    self.paths: dict[str, int] = {}
    self.module_names: tuple[str, ...] = ()
    self.module_domains: tuple[str, ...] = ()
    self.module_steps: list[int] = []
    self.module_values: list[np.ndarray] = []
    self.replaced: Path | None = None

  @property
  def first_step(self) -> int:
    return int(self.steps[0]["step"][0])

  @property
  def last_step(self) -> int:
    return int(self.steps[-1]["step"][-1])

  def add(self, step_record: dict, rows: dict, documents: list, modules: dict | None) -> int:
    """Checks and adds one step; returns its number of rows."""
    step, row = self._step(step_record), self._rows(int(step_record["step"]), rows, documents)
    if modules is not None:
      self._add_modules(int(step_record["step"]), modules)
    self.steps.append(step)
    self.rows.append(row)
    return len(row)

  def _step(self, record: dict) -> np.ndarray:
    step = fmt.unmeasured_steps([int(record["step"])], self._num_sets)
    for name, value in record.items():
      if name not in step.dtype.names:
        raise ValueError(f"unknown step column {name!r}{did_you_mean(name, step.dtype.names)}")
      if name != "step":
        step[name][0] = np.asarray(value, np.float64)
    return step

  def _rows(self, step: int, rows: dict, documents: list) -> np.ndarray:
    num_rows = len(documents)
    array = np.zeros((num_rows,), fmt.row_dtype(self._num_sets))
    array["step"] = step
    given = set(rows)
    if num_rows and (missing := {"tokens", "loss", "dot", "contribution"} - given):
      raise ValueError(f"score rows lack the columns {', '.join(sorted(missing))}")
    for name in given:
      if name not in ("tokens", "loss", "dot", "contribution", "chunk", "epoch"):
        raise ValueError(f"unknown score column {name!r}{did_you_mean(name, array.dtype.names)}")
      value = np.asarray(rows[name])
      expected = array[name].shape
      if value.shape != expected and not (value.shape == (num_rows,) and expected == (num_rows, 1)):
        raise ValueError(f"score column {name!r} has shape {value.shape}, expected {expected} for {num_rows} documents")
      array[name] = value.reshape(expected)
    for i, (domain, path, offset) in enumerate(documents):
      array["domain"][i] = self.domains.setdefault(str(domain), len(self.domains))
      array["path"][i] = self.paths.setdefault(str(path), len(self.paths))
      array["offset"][i] = offset
    return array

  def _add_modules(self, step: int, modules: dict):
    names, domains = tuple(modules["names"]), tuple(modules["domains"])
    value_MLDK = np.asarray(modules["contribution"], np.float32)
    if value_MLDK.ndim == 3 and self._num_sets == 1:
      value_MLDK = value_MLDK[..., None]
    num_layers = value_MLDK.shape[1] if value_MLDK.ndim == 4 else 0
    expected = (len(names), num_layers, len(domains), self._num_sets)
    if value_MLDK.shape != expected:
      raise ValueError(f"module contributions have shape {value_MLDK.shape}, expected [M, layers, D, K] = {expected}")
    if self.module_steps and (names, domains) != (self.module_names, self.module_domains):
      raise ValueError("the names of modules and domains must not change inside a run")
    self.module_names, self.module_domains = names, domains
    self.module_steps.append(step)
    self.module_values.append(value_MLDK)

  def copy(self) -> "Interval":
    """A frozen view for the writing thread: lists are copied, arrays are shared (they never change)."""
    other = Interval(self._num_sets)
    for name, value in vars(self).items():
      setattr(other, name, value.copy() if isinstance(value, (list, dict)) else value)
    return other

  def tables(self) -> tuple[list[str], list[str]]:
    return list(self.domains), list(self.paths)

  def step_array(self) -> np.ndarray:
    return np.concatenate(self.steps)

  def row_array(self) -> np.ndarray:
    return np.concatenate(self.rows)

  def modules(self) -> fmt.Modules | None:
    if not self.module_steps:
      return None
    values = np.stack(self.module_values)
    return fmt.Modules(self.module_names, self.module_domains, np.array(self.module_steps), values)

  @classmethod
  def load(cls, shard: fmt.Shard, last_step: int) -> "Interval":
    """The steps of a file up to `last_step`."""
    interval = cls(len(shard.val_sets))
    steps, rows, modules = shard.steps, shard.rows(), shard.modules
    interval.steps, interval.rows = [steps[steps["step"] <= last_step]], [rows[rows["step"] <= last_step]]
    interval.domains = {str(name): i for i, name in enumerate(shard.domains)}
    interval.paths = {str(name): i for i, name in enumerate(shard.paths)}
    if modules is not None:
      interval.module_names, interval.module_domains = modules.names, modules.domains
      keep = [i for i, step in enumerate(modules.steps) if step <= last_step]
      interval.module_steps = [int(modules.steps[i]) for i in keep]
      interval.module_values = [modules.contribution_SMLDK[i] for i in keep]
    interval.replaced = shard.path
    return interval
