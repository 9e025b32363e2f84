"""The training iterator: batches from lanes, a position to save and restore, one shard per process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from maxghost.config import ConfigError
from maxghost.data import packing
from maxghost.data.order import RowMixture
from maxghost.data.types import Batch
from maxghost.data.window_prefetch import ThreadFeed, WorkerFeed
from maxghost.data.windows import Windows

_STATE_VERSION = 1
_EMPTY_WINDOWS = 1000  # consecutive ones that can still happen by chance


class Cursor:
  """A place in one lane of one stream; it goes on through windows and epochs without end."""

  def __init__(self, stream: Windows, lane: int, feed: ThreadFeed | WorkerFeed, count: Callable[[dict], None]):
    """count: called with the counts of each window that is begun."""
    self._stream, self._lane, self._feed, self._count = stream, lane, feed, count
    self._rows: packing.Rows | None = None
    self.place = (0, 0, 0)  # epoch, window, next row in it

  def seek(self, place: tuple[int, int, int]) -> None:
    self.place, self._rows = place, None

  def take(self, count: int) -> list[tuple[packing.Rows, int, int]]:
    """The next `count` rows, each as (rows, number of the row, epoch)."""
    out: list[tuple[packing.Rows, int, int]] = []
    while len(out) < count:
      rows, (epoch, window, row) = self._next_rows()
      stop = min(row + count - len(out), len(rows))
      out.extend((rows, number, epoch) for number in range(row, stop))
      self.place = (epoch, window, stop)
      if 2 * stop >= len(rows):
        self._feed.look_ahead(*self._stream.after(self._lane, epoch, window))
    return out

  def _next_rows(self) -> tuple[packing.Rows, tuple[int, int, int]]:
    """The rows of the window that holds the next row, and that row's place. Windows without rows are skipped."""
    empty = 0
    while True:
      epoch, window, row = self.place
      if self._rows is None:
        made = self._feed.get(epoch, window)
        self._rows = made.rows
        if not row:
          self._count(made.counts)
      if row < len(self._rows):
        return self._rows, self.place
      empty += not len(self._rows)
      self._rows, self.place = None, (*self._stream.after(self._lane, epoch, window), 0)
      # A lane of few documents may get no training document in some epochs, but not in all of them.
      if empty > 2 * self._stream.num_windows(self._lane) + _EMPTY_WINDOWS:
        raise ConfigError(
          f"there is nothing to train on in {self._stream.name or 'the data'}: every document is held out for "
          "validation, empty or left out; use a smaller ghost_val_fraction or more data"
        )


class Lane:
  """An endless sequence of rows, from one stream or from several by a mixture."""

  def __init__(self, number: int, cursors: list[Cursor]):
    self._number = number
    self.cursors = cursors
    self.num_rows = 0

  def take(self, count: int, mixture: RowMixture | None) -> list[tuple[packing.Rows, int, int]]:
    """The next `count` rows."""
    if mixture is None:
      out = self.cursors[0].take(count)
    else:
      streams = mixture.domains(self._number, self.num_rows, count).tolist()
      out = [self.cursors[stream].take(1)[0] for stream in streams]
    self.num_rows += count
    return out


@dataclass(frozen=True)
class Identity:
  """What a saved position depends on: a digest of data and settings, and one of each file unless there are many."""

  fingerprint: str
  files: dict[str, str]


class TrainIterator(Iterator[Batch]):
  """Batches of one shard of the global batch.

  The rows of a global batch come from the lanes in order, the same number from each. Concatenated, the shards' batches
  are the batch of a single process. `counts` sums what was read so far (documents, bytes, tokens, rows, empty, copies,
  corrupt) over the windows that this process began.
  """

  def __init__(
    self,
    streams: list[Windows],
    mixture: RowMixture | None,
    layout: packing.Layout,
    *,
    pad_id: int,
    rows_per_lane: int,
    rows: tuple[int, int],
    identity: Identity,
    make_feed: Callable[[Windows, int], ThreadFeed | WorkerFeed],
  ):
    """rows: first row of the global batch that this process reads, and the one after its last."""
    self._layout, self._pad_id, self._identity = layout, pad_id, identity
    self._names = [stream.name for stream in streams]
    self._per_lane = rows_per_lane
    self.counts: dict[str, int] = {}
    low, high = rows
    self._lanes: dict[int, Lane] = {}
    self._slices: dict[int, tuple[int, int]] = {}
    for number in range(low // self._per_lane, -(-high // self._per_lane)):
      cursors = [Cursor(stream, number, make_feed(stream, number), self._add_counts) for stream in streams]
      self._lanes[number] = Lane(number, cursors)
      begin = number * self._per_lane
      self._slices[number] = (max(low - begin, 0), min(high - begin, self._per_lane))
    self._batches = self._first_batch = 0
    self._mixture, self._changes = mixture, ()

  @property
  def mixture_domains(self) -> tuple[str, ...]:
    """The domains whose shares of the rows can be changed; empty where the data is not a mixture by weights."""
    return () if self._mixture is None else tuple(self._names)

  def schedule_mixture(self, changes: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    """Sets the shares of the domains: [(b, {domain: share})], each from batch b of the run on.

    The list holds all changes of the run in order of b; a later call may extend it. `state()` does not contain it: the
    caller saves the changes and passes them again after `restore`.

    Raises:
      ConfigError: dataset_mixture has no shares.
      ValueError: a change at a batch that was drawn already.
    """
    if self._mixture is None:
      raise ConfigError("the shares of the domains can only be changed with shares in dataset_mixture")
    made = tuple((batch, tuple(shares[name] for name in self._names)) for batch, shares in changes)
    late = [batch for batch, shares in made if batch < self._batches and (batch, shares) not in self._changes]
    if late and self._batches > self._first_batch:
      raise ValueError(f"the mixture cannot change at batch {late[0]}: {self._batches} batches were drawn already")
    self._changes = made

  def _current_mixture(self) -> RowMixture | None:
    due = [shares for batch, shares in self._changes if batch <= self._batches]
    return self._mixture.with_weights(due[-1]) if due and self._mixture is not None else self._mixture

  def _add_counts(self, counts: dict[str, int]) -> None:
    for name, value in counts.items():
      self.counts[name] = self.counts.get(name, 0) + value

  def __next__(self) -> Batch:
    pieces, mixture = [], self._current_mixture()
    for number, lane in self._lanes.items():
      first, stop = self._slices[number]
      pieces.extend(lane.take(self._per_lane, mixture)[first:stop])
    self._batches += 1
    return packing.fill(pieces, self._layout, self._pad_id)

  @property
  def packing_efficiency(self) -> float:
    """Share of the positions that hold a token, over the windows read so far."""
    return self.counts.get("tokens", 0) / max(1, self.counts.get("rows", 0) * self._layout.row_length)

  def describe(self) -> str:
    """One line: what this process has read and how well it was packed."""
    met = {name: self.counts.get(name, 0) for name in ("documents", "tokens", "copies", "corrupt", "empty")}
    left_out = ", ".join(f"{met[name]:,} {name}" for name in ("copies", "corrupt", "empty") if met[name])
    line = f"Data read: {met['documents']:,} documents, {met['tokens']:,} tokens; rows filled to "
    return line + f"{self.packing_efficiency:.1%}" + (f"; left out: {left_out}" if left_out else "")

  def state(self) -> dict:
    """The position after the last batch, as JSON values."""
    lanes = {
      str(number): {
        "rows": lane.num_rows,
        "streams": {name: list(cursor.place) for name, cursor in zip(self._names, lane.cursors, strict=True)},
      }
      for number, lane in self._lanes.items()
    }
    return {
      "version": _STATE_VERSION,
      "fingerprint": self._identity.fingerprint,
      "files": self._identity.files,
      "batches": self._batches,
      "lanes": lanes,
    }

  def restore(self, state: dict) -> None:
    """Continues from a `state()` of the same data and settings, saved with any number of shards.

    Raises:
      ConfigError: the data changed (the message names the files), or the state lacks a lane of this process.
    """
    self._check(state)
    for number, lane in self._lanes.items():
      saved = state["lanes"][str(number)]
      lane.num_rows = saved["rows"]
      for name, cursor in zip(self._names, lane.cursors, strict=True):
        epoch, window, row = saved["streams"][name]
        cursor.seek((epoch, window, row))
    self._batches = self._first_batch = state["batches"]

  def _check(self, state: dict) -> None:
    if state.get("version") != _STATE_VERSION:
      raise ConfigError(f"data position has version {state.get('version')}, but this program reads {_STATE_VERSION}")
    if state["fingerprint"] != self._identity.fingerprint:
      then, now = state["files"], self._identity.files
      changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
      named = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
      what = (
        f"changed: {named}"
        if changed
        else (f"fingerprint {state['fingerprint']} then, {self._identity.fingerprint} now")
      )
      raise ConfigError(
        f"the data or its settings changed since the position was saved ({what}); restore them, or start a new run "
        "with another run_name"
      )
    missing = [number for number in self._lanes if str(number) not in state["lanes"]]
    if missing:
      raise ConfigError(
        f"the saved data position has no lanes {missing}; join the positions of all processes with data.merge_states"
      )


def merge_states(states: list[dict]) -> dict:
  """Joins the positions that all processes of a run saved at the same step. Any number of processes can restore it."""
  merged = {**states[0], "lanes": {}}
  for state in states:
    if {**state, "lanes": {}} != {**merged, "lanes": {}}:
      raise ConfigError("data positions of different steps or of different data cannot be joined")
    merged["lanes"].update(state["lanes"])
  return merged
