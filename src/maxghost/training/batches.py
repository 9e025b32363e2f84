"""The batches of a run: training batches are prefetched, validation batches depend on the step alone."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from maxghost.config.schema import GhostConfig

NUM_AHEAD = 2


class Fetched(NamedTuple):
  """One training batch: the host's Batch, its arrays on the devices, and the data position after it. metrics, record:
  on the answers that the step sampled (`rollouts`); empty for a step that sampled none."""

  batch: Any
  arrays: Any
  position: dict
  metrics: dict = {}  # noqa: RUF012 - never changed
  record: dict | None = None


class Prefetcher:
  """Draws `num_batches` batches from a resumable iterator in a background thread, NUM_AHEAD + 1 of them ahead. Since
  the iterator is ahead of the training, each batch carries the position after it, for checkpoints. put: sends a batch's
  arrays to the devices. prepare: `Objective.prepare`. An error of the iterator is raised by `next` after the batches
  before it."""

  def __init__(self, iterator, put: Callable[[dict], Any], num_batches: int, prepare: Callable = lambda batch: batch):
    self._iterator, self._put, self._num_left, self._prepare = iterator, put, num_batches, prepare
    self._pool = ThreadPoolExecutor(1, "prefetch")
    self._ahead: deque[Future[Fetched]] = deque()
    self._fill()

  def __next__(self) -> Fetched:
    fetched = self._ahead.popleft().result()
    self._fill()
    return fetched

  def close(self) -> None:
    """Stops the thread; the iterator's position is then undefined."""
    self._pool.shutdown(cancel_futures=True)

  def _fill(self) -> None:
    while self._num_left and len(self._ahead) <= NUM_AHEAD:
      self._ahead.append(self._pool.submit(self._draw))
      self._num_left -= 1

  def _draw(self) -> Fetched:
    batch = self._prepare(next(self._iterator))
    return Fetched(batch, self._put(batch.arrays), self._iterator.state())


def validation_index(ghost: GhostConfig, step: Any) -> Any:
  """The index of a step's validation rows; steps with the same index use the same rows. step: int or traced integer."""
  refresh = ghost.ghost_val_refresh_steps
  return (step - step % max(ghost.ghost_every, ghost.ghost_val_every)) // refresh if refresh else step * 0


class ValidationRows:
  """The validation batches of every step, one per named set. They have no state to save.

  A *fresh* step (every `ghost_val_every` steps) computes the validation loss and gradient, against which the next steps
  score. New rows are drawn every `ghost_val_refresh_steps` steps, at the next fresh step.
  draw: a function of (index, number of rows, name of the set: the first) that returns the host's Batch. sets: names of
  the validation sets; empty without scoring. put: sends a dict of host arrays to the devices.
  """

  def __init__(self, ghost: GhostConfig, draw: Callable, sets: Iterable[str], put: Callable[[dict], Any]):
    self._sets, self._ghost, self.draw, self._put = tuple(sets), ghost, draw, put
    # A fresh step opens an account of the loss, which is closed after this many steps.
    self._every, self._length = (ghost.ghost_every, 1) if ghost.ghost_every > 1 else (ghost.ghost_val_every,) * 2
    self._held: tuple[int, tuple] = (-1, ())
    self.first = 0  # no account is open before this step

  def is_fresh(self, step: int) -> bool:
    return bool(self._sets) and step % self._every == 0

  def closes(self, step: int) -> bool:
    """Whether the validation loss before this step closes the account of an earlier step."""
    return bool(self._sets) and step > self.first and (step - self._length) % self._every == 0

  def has_open_account(self, num_steps: int) -> bool:
    return bool(self._sets) and (num_steps - 1) % self._every < self._length

  def batches(self, step: int) -> tuple:
    """The batches of the last fresh step up to this one; empty without sets."""
    index = validation_index(self._ghost, step)
    if self._held[0] != index:
      drawn = (self.draw(index, self._ghost.ghost_val_batch_size, name) for name in self._sets)
      self._held = (index, tuple(self._put(batch.arrays) for batch in drawn))
    return self._held[1]

  def replaces(self, step: int) -> bool:
    """Whether the closing loss must be measured separately: the step computes none, or one on other rows."""
    before, here = (validation_index(self._ghost, number) for number in (step - 1, step))
    return self.closes(step) and (not self.is_fresh(step) or before != here)

  def account_steps(self, step: int) -> int:
    """Steps from the last fresh step before `step` up to it, over which the drop of the loss is measured."""
    return 1 + (step - 1) % self._every
