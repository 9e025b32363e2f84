"""The training iterator: batches from lanes, a position to save and restore, shards for several processes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from maxghost.config import ConfigError
from maxghost.data import packing
from maxghost.data.types import Batch
from maxghost.data.windows import Layout, Windows

_STATE_VERSION = 1


class Lane:
  """One stream of rows without end: window after window, epoch after epoch. Prepares the next window ahead of time."""

  def __init__(self, windows: Windows, number: int, pool: ThreadPoolExecutor):
    self._windows, self._number, self._pool = windows, number, pool
    self._rows: packing.Rows | None = None
    self._ahead: tuple[tuple[int, int], Future] | None = None
    self.position = (0, 0, 0)  # epoch, window, next row in it

  def seek(self, position: tuple[int, int, int]) -> None:
    self.position, self._rows, self._ahead = position, None, None

  def take(self, count: int) -> list[tuple[packing.Rows, int, int, int]]:
    """The next `count` rows as pieces (rows, first, stop, epoch)."""
    pieces = []
    while count:
      epoch, window, row = self.position
      rows = self._window(epoch, window)
      if row >= len(rows):
        self._rows, self.position = None, (*self._after(epoch, window), 0)
        continue
      stop = min(row + count, len(rows))
      pieces.append((rows, row, stop, epoch))
      count -= stop - row
      self.position = (epoch, window, stop)
      if self._ahead is None and 2 * stop >= len(rows):
        following = self._after(epoch, window)
        self._ahead = (following, self._pool.submit(self._windows.make, self._number, *following))
    return pieces

  def _after(self, epoch: int, window: int) -> tuple[int, int]:
    return (epoch, window + 1) if window + 1 < self._windows.num_windows(self._number) else (epoch + 1, 0)

  def _window(self, epoch: int, window: int) -> packing.Rows:
    if self._rows is None:
      ahead, self._ahead = self._ahead, None
      if ahead is not None and ahead[0] == (epoch, window):
        self._rows = ahead[1].result()
      else:
        self._rows = self._windows.make(self._number, epoch, window)
    return self._rows


class TrainIterator(Iterator[Batch]):
  """Batches of one shard of the global batch.

  The rows of a global batch come from the lanes in order, the same number from each; shard s holds rows
  [s, s + 1) * batch_size / num_shards. So the shards' batches laid end to end are the batch of a single process.
  """

  def __init__(self, windows: Windows, layout: Layout, *, pad_id: int, batch_size: int, num_shards: int, shard: int,
               fingerprint: str):
    self._windows, self._layout, self._pad_id, self._fingerprint = windows, layout, pad_id, fingerprint
    self._per_lane = batch_size // windows.num_lanes
    low, high = shard * batch_size // num_shards, (shard + 1) * batch_size // num_shards
    pool = ThreadPoolExecutor(1, thread_name_prefix="maxghost-data")
    self._lanes: dict[int, Lane] = {}
    self._slices: dict[int, tuple[int, int]] = {}
    for number in range(low // self._per_lane, -(-high // self._per_lane)):
      self._lanes[number] = Lane(windows, number, pool)
      begin = number * self._per_lane
      self._slices[number] = (max(low - begin, 0), min(high - begin, self._per_lane))
    self._batches = 0

  def __next__(self) -> Batch:
    parts = []
    for number, lane in self._lanes.items():
      first, stop = self._slices[number]
      lane.take(first)
      parts.extend(self._batch(*piece) for piece in lane.take(stop - first))
      lane.take(self._per_lane - stop)
    self._batches += 1
    return packing.join(parts)

  def _batch(self, rows: packing.Rows, first: int, stop: int, epoch: int) -> Batch:
    layout = self._layout
    filled = packing.fill(rows, first, stop, layout.row_length, layout.max_segments, self._pad_id)
    return Batch(*filled, np.full(stop - first, epoch, np.int64))

  def state(self) -> dict:
    """The position after the last batch, as JSON can hold it."""
    lanes = {str(number): list(lane.position) for number, lane in self._lanes.items()}
    return {"version": _STATE_VERSION, "fingerprint": self._fingerprint, "batches": self._batches, "lanes": lanes}

  def restore(self, state: dict) -> None:
    """Continues from a `state()` of the same data and settings, at any number of shards that it holds the lanes of.

    Raises ConfigError when the data changed or a lane is missing.
    """
    if state.get("version") != _STATE_VERSION:
      raise ConfigError(f"data position has version {state.get('version')}, this program reads {_STATE_VERSION}")
    if state["fingerprint"] != self._fingerprint:
      raise ConfigError(
        f"the data changed since the position was saved (fingerprint {state['fingerprint']} then, {self._fingerprint} "
        "now); restore the old files and data settings, or start a new run with another run_name"
      )
    missing = [number for number in self._lanes if str(number) not in state["lanes"]]
    if missing:
      raise ConfigError(
        f"the saved data position has no lanes {missing}; join the positions of all processes with data.merge_states"
      )
    for number, lane in self._lanes.items():
      epoch, window, row = state["lanes"][str(number)]
      lane.seek((epoch, window, row))
    self._batches = state["batches"]


def merge_states(states: list[dict]) -> dict:
  """One state of the positions that the processes of a run saved at the same step; restores at any number of them."""
  merged = {**states[0], "lanes": {}}
  for state in states:
    if {**state, "lanes": {}} != {**merged, "lanes": {}}:
      raise ConfigError("data positions of different steps or data cannot be joined")
    merged["lanes"].update(state["lanes"])
  return merged
