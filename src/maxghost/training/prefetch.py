"""Prepares the next batches and sends them to the devices while the step runs."""

import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_AHEAD = 2


class Fetched(NamedTuple):
  """One training batch: the host's Batch, its arrays on the devices, and the data position after it."""

  batch: Any
  arrays: Any
  position: dict


class Batches:
  """The batches of a dataset, prepared by the objective."""

  def __init__(self, dataset, prepare: Callable[[Any], Any]):
    self._dataset, self._prepare = dataset, prepare

  def __next__(self):
    return self._prepare(next(self._dataset.train))

  def state(self) -> dict:
    """The position of the training batches."""
    return self._dataset.train.state()

  def validation_batch(self, index: int, num_rows: int, domain: str | None = None):
    return self._prepare(self._dataset.validation_batch(index, num_rows, domain))


class Prefetcher:
  """Draws batches from a resumable iterator in a background thread, `NUM_AHEAD` at most.

  The iterator is ahead of the training, so each batch carries the position after it for checkpoints. `put` sends a
  batch's arrays to the devices. `next` raises an error of the iterator after the batches before it. `num_batches`: the
  number of batches to draw.
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
    """Stops the thread; the iterator's position is then undefined."""
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
    except BaseException as error:  # raised in the main thread
      self._queue.put(error)
