"""Windows made ahead of their use: in a thread, or in Grain's worker processes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from maxghost.data.windows import Window, Windows


class ThreadFeed:
  """The windows of one lane in order, from any place; the next one is begun when `look_ahead` is called."""

  def __init__(self, windows: Windows, lane: int, pool: ThreadPoolExecutor):
    self._windows, self._lane, self._pool = windows, lane, pool
    self._ahead: tuple[tuple[int, int], Future] | None = None

  def get(self, epoch: int, window: int) -> Window:
    ahead, self._ahead = self._ahead, None
    if ahead is not None and ahead[0] == (epoch, window):
      return ahead[1].result()
    return self._windows.make(self._lane, epoch, window)

  def look_ahead(self, epoch: int, window: int) -> None:
    if self._ahead is None:
      self._ahead = ((epoch, window), self._pool.submit(self._windows.make, self._lane, epoch, window))


class _LaneWindows:
  """A lane's windows from (epoch, window) on as a random-access source for Grain: element i is the i-th from there."""

  def __init__(self, windows: Windows, lane: int, epoch: int, window: int):
    self._windows, self._lane = windows, lane
    self._first = epoch * windows.num_windows(lane) + window

  def __len__(self) -> int:
    return 1 << 40

  def __getitem__(self, index: int) -> Window:
    return self._windows.make(self._lane, *divmod(self._first + int(index), self._windows.num_windows(self._lane)))

  def __repr__(self) -> str:
    return f"LaneWindows(lane={self._lane}, first={self._first})"


class WorkerFeed:
  """The windows of one lane, made by `num_workers` processes that stay a window each ahead."""

  def __init__(self, windows: Windows, lane: int, num_workers: int):
    self._windows, self._lane, self._num_workers = windows, lane, num_workers
    self._iterator: Iterator[Window] | None = None
    self._following: tuple[int, int] | None = None

  def get(self, epoch: int, window: int) -> Window:
    if self._iterator is None or self._following != (epoch, window):
      self._iterator = self._start(epoch, window)
    per_epoch = self._windows.num_windows(self._lane)
    self._following = (epoch, window + 1) if window + 1 < per_epoch else (epoch + 1, 0)
    return Window(*next(self._iterator))

  def look_ahead(self, epoch: int, window: int) -> None:
    """The workers are ahead already."""

  def _start(self, epoch: int, window: int) -> Iterator[Window]:
    import grain  # it imports JAX, which the rest of this package does without
    from absl import flags

    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()  # Grain reads its own absl flags; here they have their defaults
    dataset = grain.MapDataset.source(_LaneWindows(self._windows, self._lane, epoch, window))
    one_at_a_time = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    options = grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=1)
    return iter(dataset.to_iter_dataset(one_at_a_time).mp_prefetch(options))
