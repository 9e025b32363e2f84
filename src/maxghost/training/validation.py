"""The validation rows of each step, a function of the step alone, so that there is no state to save."""

from collections.abc import Callable, Mapping
from typing import Any

from maxghost.config.schema import GhostConfig


class ValidationRows:
  """The validation batches of every step, one per named set; the devices hold those of one step at most.

  A *fresh* step (every `ghost_val_every` steps) computes the validation loss and gradient, against which the next steps
  score. New rows are drawn every `ghost_val_refresh_steps` steps, at the next fresh step.
  sets: {name: domain}, empty without ghost. put: sends a dict of host arrays to the devices.
  """

  def __init__(self, ghost: GhostConfig, dataset, sets: Mapping[str, str], put: Callable[[dict], Any]):
    self.names = tuple(sets)
    self._domains = tuple(sets.values())
    self._score_every, self._refresh = ghost.ghost_every, ghost.ghost_val_refresh_steps
    self._num_rows = ghost.ghost_val_batch_size
    self._every = ghost.ghost_every if ghost.ghost_every > 1 else ghost.ghost_val_every
    self._dataset, self._put = dataset, put
    self._held: tuple[int, tuple] = (-1, ())

  def is_fresh(self, step: int) -> bool:
    return bool(self.names) and step % self._every == 0

  def is_scored(self, step: int) -> bool:
    """Whether the step scores its documents (every `ghost_every` steps)."""
    return bool(self.names) and step % self._score_every == 0

  def closes(self, step: int) -> bool:
    """Whether the validation loss before this step closes the account of an earlier step: at the next fresh step, or,
    if only some steps are scored, right after a scored one."""
    return step > 0 and (self.is_fresh(step) if self._score_every == 1 else self.is_scored(step - 1))

  def has_open_account(self, num_steps: int) -> bool:
    """Whether an account is still open after this many steps."""
    return self._score_every == 1 or self.is_scored(num_steps - 1)

  def batches(self, step: int) -> tuple:
    """The batches of the last fresh step up to this one; empty without sets."""
    if not self.names:
      return ()
    index = self._index(step)
    if self._held[0] != index:
      batches = [self._dataset.validation_batch(index, self._num_rows, domain) for domain in self._domains]
      self._held = (index, tuple(self._put(batch.arrays) for batch in batches))
    return self._held[1]

  def replaces(self, step: int) -> bool:
    """Whether the closing loss must be measured separately: this step computes none, or on other rows."""
    return self.closes(step) and (not self.is_fresh(step) or self._index(step) != self._index(step - 1))

  def account_steps(self, step: int) -> int:
    """Steps from the last fresh step before `step` up to it, over which the drop of the loss is measured."""
    return step - self._fresh_before(step - 1) if self._score_every == 1 else 1

  def _fresh_before(self, step: int) -> int:
    return step - step % self._every

  def _index(self, step: int) -> int:
    return self._fresh_before(step) // self._refresh if self._refresh else 0
