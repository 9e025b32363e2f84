"""The training iterator: batches from lanes, a position to save and restore, one shard per process."""

import bisect
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from maxghost.config.values import ConfigError, listed
from maxghost.data import packing
from maxghost.data.hashing import changed_keys, text_hash
from maxghost.data.types import Batch
from maxghost.data.windows import Windows, row_domains

_STATE_VERSION = 1
_EMPTY_EPOCHS = 20  # per lane: one of few documents may get none to train on in some epochs, by chance


class Cursor:
  """A position in a lane of a stream, which has no end. workers: make the next window ahead: a pool of threads, or the
  number of Grain's processes. counts: the counts of each window are added to these when the window is begun."""

  def __init__(self, stream: Windows, lane: int, workers: ThreadPoolExecutor | int, counts: Counter[str]):
    self._stream, self._lane, self._workers, self._counts = stream, lane, workers, counts
    self.seek((0, 0, 0))

  def seek(self, place: tuple[int, int, int]) -> None:
    """place: epoch, window, next row in it."""
    self.place = place
    self._rows: packing.Rows | None = None
    self._ahead: Future | None = None
    self._windows: Iterator | None = None

  def take(self) -> tuple[packing.Rows, int, int]:
    """The next row, as (rows, number of the row, epoch)."""
    rows, (epoch, window, row) = self._next_rows()
    self.place = (epoch, window, row + 1)
    if 2 * (row + 1) >= len(rows) and self._ahead is None and not isinstance(self._workers, int):
      self._ahead = self._workers.submit(self._stream.make, self._lane, *self._stream.after(self._lane, epoch, window))
    return rows, row, epoch

  def _next_rows(self) -> tuple[packing.Rows, tuple[int, int, int]]:
    """The rows of the window that holds the next row, and that row's place. Windows without rows are skipped."""
    empty = 0
    while True:
      epoch, window, row = self.place
      if self._rows is None:
        self._rows, counts = self._make(epoch, window)
        if not row:
          self._counts.update(counts)
      if row < len(self._rows):
        return self._rows, self.place
      empty += not len(self._rows)
      self._rows, self.place = None, (*self._stream.after(self._lane, epoch, window), 0)
      if empty > (2 + _EMPTY_EPOCHS * self._stream.num_lanes) * self._stream.num_windows(self._lane):
        said = f"there is nothing to train on in {self._stream.name or 'the data'}: every document is held out for"
        raise ConfigError(f"{said} validation, empty or left out; use a smaller ghost_val_fraction or more data")

  def _make(self, epoch: int, window: int) -> tuple[packing.Rows, dict[str, int]]:
    if isinstance(self._workers, int):
      if self._windows is None:
        self._windows = self._stream.from_workers(self._lane, epoch, window, self._workers)
      return next(self._windows)
    ahead, self._ahead = self._ahead, None
    return ahead.result() if ahead else self._stream.make(self._lane, epoch, window)


class TrainIterator(Iterator[Batch]):
  """Batches of one shard of the global batch, whose rows come from the lanes in order, the same number from each.

  counts: documents, bytes, tokens, rows, and the empty, copied and corrupt documents, over the windows that it began.
  mixture_domains: the domains whose shares can be changed; empty where the data is not a mixture by weights.
  """

  def __init__(self, streams: list[Windows], weights: Sequence[float] | None, identity: dict, *, rows_per_lane: int,
               rows: tuple[int, int], num_workers: int):  # fmt: skip
    """weights: shares of the streams; None for a single one. identity: what a saved position depends on, `fingerprint`
    and `files`. rows: first row of the global batch that this process reads, and the one after its last. num_workers:
    processes that make windows ahead; 0: a thread."""
    self._streams, self._identity = streams, {"version": _STATE_VERSION, **identity}
    self._per_lane, self._rows = rows_per_lane, rows
    self.counts: Counter[str] = Counter()
    workers = num_workers or ThreadPoolExecutor(1, thread_name_prefix="maxghost-data")
    lanes = range(rows[0] // rows_per_lane, -(-rows[1] // rows_per_lane))
    self._lanes = {lane: [Cursor(stream, lane, workers, self.counts) for stream in streams] for lane in lanes}
    self._batches = self._first_batch = 0
    self._weights, self._changes = weights, ()
    self.mixture_domains = () if weights is None else tuple(stream.name for stream in streams)

  def schedule_mixture(self, changes: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    """Sets the shares of the domains: [(b, {domain: share})], each from batch b of the run on, in order of b.

    A later call may extend the list. `state()` does not contain it: the caller passes it again after `restore`. Raises
    ConfigError where dataset_mixture has no shares, ValueError for a change at a batch that was drawn already.
    """
    if self._weights is None:
      raise ConfigError("the shares of the domains can only be changed with shares in dataset_mixture")
    made = tuple((batch, tuple(shares[name] for name in self.mixture_domains)) for batch, shares in changes)
    known = frozenset(self._changes)
    late = [change[0] for change in made if change[0] < self._batches and change not in known]
    if late and self._batches > self._first_batch:
      raise ValueError(f"the mixture cannot change at batch {late[0]}: {self._batches} batches were drawn already")
    self._changes = made

  def __next__(self) -> Batch:
    due = bisect.bisect(self._changes, self._batches, key=operator.itemgetter(0))
    weights = self._changes[due - 1][1] if due else self._weights or [1.0]
    pieces, units, per_lane = [], self._streams[0].units, self._per_lane
    for lane, cursors in self._lanes.items():
      domains = row_domains(weights, self._streams[0].seed, lane, self._batches * per_lane, per_lane)
      taken = [cursors[domain].take() for domain in domains.tolist()]
      first, stop = (row - lane * per_lane for row in self._rows)
      pieces.extend(taken[max(first, 0) : stop])
    self._batches += 1
    return packing.fill(pieces, units.layout, units.tokenizer.pad_id)

  def depend_on(self, name: str, digest: str) -> None:
    """Makes saved positions depend on another file of the run too, with this checksum."""
    fingerprint = f"{text_hash(self._identity['fingerprint'], digest):016x}"
    self._identity |= {"fingerprint": fingerprint, "files": {**self._identity["files"], name: digest}}

  @property
  def packing_efficiency(self) -> float:
    """Share of the positions that hold a token, over the windows read so far."""
    return self.counts["tokens"] / max(1, self.counts["rows"] * self._streams[0].units.layout.row_length)

  def describe(self, said: str = "Data read, in whole windows and ahead of training") -> str:
    """One line: what this process has read, of which a run may have used a part, and how well it was packed."""
    met = self.counts
    left_out = ", ".join(f"{name} {met[name]:,}" for name in ("copies", "corrupt", "empty") if met[name])
    line = f"{said}: {met['documents']:,} documents, {met['tokens']:,} tokens in {met['rows']:,} rows of "
    line += f"{self._streams[0].units.layout.row_length}, filled to {self.packing_efficiency:.1%}"
    line += f"; left out: {left_out}" if left_out else ""
    return line + (f"; cut off by the length of a row: {met['cut']:,}" if met["cut"] else "")

  def state(self) -> dict:
    """The position after the last batch, as JSON values."""
    lanes, names = {}, [stream.name for stream in self._streams]
    for lane, cursors in self._lanes.items():
      places = {name: list(cursor.place) for name, cursor in zip(names, cursors, strict=True)}
      lanes[str(lane)] = {"rows": self._batches * self._per_lane, "streams": places}
    return {**self._identity, "batches": self._batches, "lanes": lanes}

  def restore(self, state: dict) -> None:
    """Continues from a `state()` of the same data and settings, saved with any number of shards. Raises ConfigError
    where the data changed (naming the files), or the state lacks a lane of this process."""
    if state.get("version") != _STATE_VERSION:
      raise ConfigError(f"data position has version {state.get('version')}, but this program reads {_STATE_VERSION}")
    if state["fingerprint"] != self._identity["fingerprint"]:
      changed = changed_keys(state["files"], self._identity["files"])
      prints = f"fingerprint {state['fingerprint']} then, {self._identity['fingerprint']} now"
      why = f"changed: {listed(changed, 5)}" if changed else prints
      said = f"the data or its settings changed since the position was saved ({why})"
      raise ConfigError(f"{said}; restore them, or start a new run with another run_name")
    if lost := [lane for lane in self._lanes if str(lane) not in state["lanes"]]:
      fix = "join the positions of all processes with data.merge_states"
      raise ConfigError(f"the saved data position has no lanes {lost}; {fix}")
    for lane, cursors in self._lanes.items():
      for stream, cursor in zip(self._streams, cursors, strict=True):
        epoch, window, row = state["lanes"][str(lane)]["streams"][stream.name]
        cursor.seek((epoch, window, row))
    self._batches = self._first_batch = state["batches"]


def merge_states(states: list[dict]) -> dict:
  """Joins the positions that all processes of a run saved at the same step. Any number of processes can restore it."""
  merged = {**states[0], "lanes": {}}
  for state in states:
    if {**state, "lanes": {}} != {**merged, "lanes": {}}:
      raise ConfigError("data positions of different steps or of different data cannot be joined")
    merged["lanes"].update(state["lanes"])
  return merged
