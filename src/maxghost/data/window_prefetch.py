"""Windows prefetched in a thread or in Grain's worker processes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from maxghost.data.windows import Window, Windows


class ThreadFeed:
  """The windows of one lane; `look_ahead` starts making one in the thread pool."""

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


class WorkerFeed:
  """The windows of one lane, made by `num_workers` processes that each prefetch one window."""

  def __init__(self, windows: Windows, lane: int, num_workers: int):
    self._windows, self._lane, self._num_workers = windows, lane, num_workers
    self._iterator: Iterator[Window] | None = None
    self._following: tuple[int, int] | None = None

  def get(self, epoch: int, window: int) -> Window:
    if self._iterator is None or self._following != (epoch, window):
      self._iterator = self._start(epoch, window)
    self._following = self._windows.after(self._lane, epoch, window)
    return Window(*next(self._iterator))

  def look_ahead(self, epoch: int, window: int) -> None:
    """Does nothing: the workers prefetch by themselves."""

  def _start(self, epoch: int, window: int) -> Iterator[Window]:
    import grain  # imports JAX, which nothing else in this package needs
    from absl import flags

    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()  # Grain reads its absl flags, which keep their defaults
    windows, lane = self._windows, self._lane
    per_epoch = windows.num_windows(lane)
    numbers = grain.MapDataset.range(epoch * per_epoch + window, 1 << 40)
    dataset = numbers.map(lambda number: windows.make(lane, *divmod(int(number), per_epoch)))
    one_at_a_time = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    options = grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=1)
    return iter(dataset.to_iter_dataset(one_at_a_time).mp_prefetch(options))
