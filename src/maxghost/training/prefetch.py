"""The next batch is made and sent to the devices while the step runs."""

import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_AHEAD = 2


class Fetched(NamedTuple):
  """One training batch: the host's Batch, its arrays on the devices, and the data position right after it."""

  batch: Any
  arrays: Any
  position: dict


class Batches:
  """The batches of a dataset with what the objective's `prepare` adds to them."""

  def __init__(self, dataset, prepare: Callable[[Any], Any]):
    self._dataset, self._prepare = dataset, prepare

  def __next__(self):
    return self._prepare(next(self._dataset.train))

  def state(self) -> dict:
    """The position of the training batches."""
    return self._dataset.train.state()

  def validation_batch(self, index: int, num_rows: int, domain: str | None = None):
    """As `Dataset.validation_batch`."""
    return self._prepare(self._dataset.validation_batch(index, num_rows, domain))


class Prefetcher:
  """Draws batches from a resumable iterator in a background thread, `NUM_AHEAD` at most.

  The iterator runs ahead of the training, so its own position is of no use for a checkpoint: each batch carries the
  position behind itself. `put` sends a batch's arrays to the devices. An error of the iterator is raised by `next`,
  after the batches that came before it. `num_batches` bounds what is drawn.
  """

  def __init__(self, iterator, put: Callable[[dict], Any], num_batches: int):
    self._iterator = iterator
    self._put = put
    self._num_batches = num_batches
    self._queue: queue.Queue = queue.Queue(NUM_AHEAD)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
    self._thread.start()

  def __next__(self) -> Fetched:
    item = self._queue.get()
    if isinstance(item, BaseException):
      raise item
    return item

  def close(self) -> None:
    """Stops the thread; the iterator's position is then somewhere ahead and must not be used."""
    self._stop.set()
    while self._thread.is_alive():
      try:
        self._queue.get_nowait()
      except queue.Empty:
        self._thread.join(timeout=0.05)

  def _work(self) -> None:
    try:
      for _ in range(self._num_batches):
        if self._stop.is_set():
          return
        batch = next(self._iterator)
        self._queue.put(Fetched(batch, self._put(batch.arrays), self._iterator.state()))
    except BaseException as error:  # whatever it is belongs to the main thread
      self._queue.put(error)
