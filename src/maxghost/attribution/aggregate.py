"""Sums over the score log in bounded memory: accumulators take the rows block by block.

K validation sets, G groups, D domains, B bins of consecutive steps, C summed columns.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from maxghost.attribution.statistics import block_edges, exposure_half_width
from maxghost.scorelog.format import TEXTS, Modules
from maxghost.scorelog.reader import ScoreLog

GROUPINGS = {"domain": ("domain",), "source": ("domain", "path"), "document": ("domain", "path", "offset"),
             "step": ("step",)}  # fmt: skip
COLUMNS = ("exposures", "tokens", "share", "loss_tokens", "contribution")  # the last one per validation set
NUM_PASSES = 6
MERGE_ROWS = 1 << 20  # partial sums are merged beyond this many


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
  """Sums per group, sorted by key.

  keys: the columns that name a group, int64 [G] or texts. exposures: number of rows. share: sum of the shares of the
  batch losses. loss: mean nats per token, NaN without tokens. contribution_GK: nats, with their 95 % half_width_GK.
  in_all_GK: as `ScoreLog.in_all`, NaN where unknown.
  """

  keys: dict[str, np.ndarray]
  exposures: np.ndarray
  tokens: np.ndarray
  share: np.ndarray
  loss: np.ndarray
  contribution_GK: np.ndarray
  half_width_GK: np.ndarray
  in_all_GK: np.ndarray

  def __len__(self) -> int:
    return len(self.exposures)

  def document_ids(self) -> list[tuple[str, str, int]]:
    """(domain, path, offset) of each group, for groups by document."""
    return list(zip(*(self.keys[name].tolist() for name in GROUPINGS["document"]), strict=True))

  def take(self, index) -> "Groups":
    """The groups at `index`, in that order."""
    keys = {name: values[index] for name, values in self.keys.items()}
    return Groups(keys, *(getattr(self, field.name)[index] for field in dataclasses.fields(self)[1:]))


def scan(log: ScoreLog, accumulators: Sequence, where: Callable | None = None, scaling: tuple | None = None) -> list:
  """Streams all rows once through the accumulators' `add(shard, rows)`; returns a sentence on those left out, if any.

  where: (shard, rows) -> bool[N], the selected rows. scaling: (steps [S], factors [S, K]) of the contributions.
  """
  num_left_out = 0
  for shard, rows in log.blocks():
    finite = np.isfinite(rows["contribution"]).all(-1)
    if not finite.all():
      num_left_out += np.count_nonzero(~finite)
      rows = rows[finite]
    if where is not None:
      rows = rows[where(shard, rows)]
    if scaling is not None:
      steps, factor_SK = scaling
      rows = rows.copy()
      for name in ("contribution", "dot"):
        rows[name] *= factor_SK[np.searchsorted(steps, rows["step"])]
    for accumulator in accumulators:
      accumulator.add(shard, rows)
  return [f"{num_left_out} rows with a non-finite contribution were left out"] if num_left_out else []


class GroupSums:
  """Accumulator for one grouping of GROUPINGS or a field. Memory grows with the number of groups, not of rows."""

  def __init__(self, log: ScoreLog, by: str):
    self._log, self._columns = log, GROUPINGS.get(by, (by,))
    self._texts: dict[str, dict[str, int]] = {name: {} for name in self._columns if name in (*TEXTS, *log.fields)}
    self._shard, self._numbers, self._num_fresh = None, {}, 0  # partial sums that are not merged yet
    self._parts: list[tuple[np.ndarray, np.ndarray]] = []

  def add(self, shard, rows: np.ndarray):
    if shard is not self._shard:
      self._shard = shard
      for name, known in self._texts.items():
        numbers = [known.setdefault(str(text), len(known)) for text in shard.texts(name)]
        self._numbers[name] = np.array(numbers, np.int64)
    if not len(rows):
      return
    keys = [self._numbers[name][rows[name]] if name in self._texts else rows[name] for name in self._columns]
    self._parts.append(_reduce(np.stack(keys), np.column_stack([_values(rows), self._log.in_all(rows)])))
    self._num_fresh += len(self._parts[-1][1])
    if self._num_fresh > max(MERGE_ROWS, len(self._parts[0][1])):  # sooner would take quadratic time
      self._parts, self._num_fresh = [self._merged()], 0

  def _merged(self) -> tuple[np.ndarray, np.ndarray]:
    keys, sums = zip(*self._parts, strict=True)
    return _reduce(np.concatenate(keys, 1), np.concatenate(sums))

  def result(self) -> Groups:
    """Sorted by key: domain, then path, then offset; or step; or a field."""
    none = np.zeros((len(self._columns), 0), np.int64), np.zeros((0, 4 + 3 * len(self._log.val_sets)))
    key_CG, sums = self._merged() if self._parts else none
    keys = dict(zip(self._columns, key_CG, strict=True))
    ranks = dict(keys)
    for name, known in self._texts.items():
      table, rank = np.unique(np.array([*known], np.str_), return_inverse=True)
      ranks[name] = rank[keys[name]]  # so that sorting compares no texts
      keys[name] = table.astype(object)[ranks[name]]
    exposures, tokens = sums[:, :2].T.astype(np.int64)
    loss = sums[:, 3] / np.where(tokens > 0, tokens, np.nan)
    total_GK, square_GK, in_all_GK = np.split(sums[:, 4:], 3, axis=1)
    half_width_GK = exposure_half_width(exposures[:, None], total_GK, square_GK)
    groups = Groups(keys, exposures, tokens, sums[:, 2], loss, total_GK, half_width_GK, in_all_GK)
    return groups.take(np.lexsort([ranks[name] for name in reversed(self._columns)]))


class TimeSums:
  """Accumulator of the columns C over passes E through the data, domains D and bins B of steps: sums_CEDB.

  The last pass also counts later ones. edges: B + 1 ascending steps; the inner ones begin the bins after the first.
  """

  def __init__(self, log: ScoreLog, edges: np.ndarray):
    self.domains, self.edges = log.domains, edges
    self.sums_CEDB = np.zeros((len(COLUMNS) - 1 + len(log.val_sets), NUM_PASSES, len(self.domains), len(edges) - 1))

  def add(self, shard, rows: np.ndarray):
    domain = np.searchsorted(np.array(self.domains, np.str_), shard.texts("domain"))[rows["domain"]]
    epoch, step = np.clip(rows["epoch"], 0, NUM_PASSES - 1), np.searchsorted(self.edges[1:-1], rows["step"], "right")
    cell = np.ravel_multi_index((epoch, domain, step), self.sums_CEDB.shape[1:])
    for total, values in zip(self.sums_CEDB, _values(rows).T, strict=False):
      total += np.bincount(cell, values, total.size).reshape(total.shape)

  def sums_DB(self, column: str, k: int = 0) -> np.ndarray:
    """Sums of one of COLUMNS over the passes. k: the validation set of a contribution."""
    return self.sums_CEDB[COLUMNS.index(column) + k].sum(0)


def layer_rows(modules: Modules, value_XML: np.ndarray) -> tuple[list[str], np.ndarray]:
  """(names, values [X, R]): an entry per layer of the stack or its cycles, then one per module with layer 0 only."""
  inside = np.any(np.isfinite(modules.contribution_SMLDK[:, :, 1:]), axis=(0, 2, 3, 4))
  place_M = np.array([int((re.findall(r"/layers_(\d+)/", name) or [0])[0]) for name in modules.names])
  cycle, depth = 1 + place_M[inside].max(initial=0), value_XML.shape[2] if inside.any() else 0
  of_places = [np.nansum(value_XML[:, inside & (place_M == place)], 1)[:, :depth] for place in range(cycle)]
  value_XL = np.stack(of_places, 2).reshape(len(value_XML), depth * cycle)
  names = [f"layer {layer}" for layer in range(value_XL.shape[1])]
  names += [name for name, stacked in zip(modules.names, inside, strict=True) if not stacked]
  return names, np.concatenate([value_XL, value_XML[:, ~inside, 0]], 1)


def scored_steps(log: ScoreLog) -> np.ndarray:
  """The steps that were scored, not only measured after another; all where the log does not tell."""
  predicted = np.isfinite(log.steps["predicted_examples"]).any(-1)
  scored = predicted if predicted.any() else np.isfinite(log.steps["loss"])
  return log.steps["step"][scored if scored.any() else ~scored]


def step_edges(steps: np.ndarray, num_bins: int) -> np.ndarray:
  """Edges of at most `num_bins` bins with about equally many of the given (sorted) steps each."""
  if not len(steps):
    return np.array([0, 1], np.int64)
  return np.append(steps[block_edges(len(steps), num_bins)[:-1]], steps[-1] + 1)


def _values(rows: np.ndarray) -> np.ndarray:
  """[N, C + K] in float64: COLUMNS (1, tokens, share, loss * tokens, contributions), then squared contributions."""
  contribution, tokens = (rows[name].astype(np.float64) for name in ("contribution", "tokens"))
  loss_tokens = np.where(tokens > 0, rows["loss"] * tokens, 0.0)
  return np.column_stack([np.ones(len(rows)), tokens, rows["share"], loss_tokens, contribution, contribution**2])


def _reduce(key_CN: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(keys [C, G], sums [G, ...]) with one entry per distinct key."""
  order = np.lexsort(key_CN[::-1])
  key_CN = key_CN[:, order]
  starts = np.flatnonzero(np.append(True, np.diff(key_CN).any(0)))
  return key_CN[:, starts], np.add.reduceat(values[order], starts, axis=0)
