"""`GhostEngineManager`: the engine behind the method names of GhostSuite's manager, for hand-written loops.

Nothing here mutates the model: `prepare_gradients` is one pure call of the engine, the other methods keep its results.
"""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from maxghost.ghost.engine import GhostEngine, GhostResult
from maxghost.optimizers import AdamState, RuleState


class GhostEngineManager:
  """Scores around a training loop that reads:

    manager.attach_train_batch(batch, ids)
    batch = manager.prepare_forward_input()
    grads = manager.prepare_gradients()
    optimizer.update(model, grads)
    manager.aggregate_and_log(step)
    manager.clear_gradients()
    if manager.should_save_metrics(step): manager.save_metrics(step)

  and, around an evaluation, detach_for_evaluation() and reattach_after_evaluation(); cleanup() at the end.
  engine: a GhostEngine; val_batch as GhostEngine.score; output_dir: where save_metrics writes; save_every: steps per
  file. Raises ValueError when the methods are called out of order or while detached.
  """

  def __init__(
    self,
    engine: GhostEngine,
    model: nnx.Module,
    val_batch,
    *,
    output_dir: str | os.PathLike,
    loss_fn: Callable | None = None,
    save_every: int = 100,
  ):
    if save_every < 1:
      raise ValueError(f"save_every={save_every}: use 1 or more")
    self.engine, self.model, self.val_batch, self.loss_fn = engine, model, val_batch, loss_fn
    self.output_dir, self.save_every = Path(output_dir), save_every
    self._batch, self._ids, self._result = None, None, None
    self._attached = True
    self._log: list[dict] = []

  def attach_train_batch(self, batch, ids=None) -> None:
    """The batch that the next step trains on. ids: one per example, kept in the log; default 0..n-1."""
    self._need(self._attached, "attach_train_batch", "reattach_after_evaluation() comes first")
    count = jax.tree.leaves(batch)[0].shape[0]
    ids = np.arange(count) if ids is None else np.asarray(ids)
    if len(ids) != count:
      raise ValueError(f"{len(ids)} ids for {count} examples: give one id per example")
    self._batch, self._ids = batch, ids

  def prepare_forward_input(self):
    """The attached batch: unlike a hook-based engine, nothing has to be appended to it."""
    self._need(self._batch is not None, "prepare_forward_input", "attach_train_batch(batch) comes first")
    return self._batch

  def prepare_gradients(self, state: RuleState | AdamState | None = None, delta: nnx.State | None = None) -> nnx.State:
    """Scores the attached batch and returns the gradient of its loss, for `optimizer.update(model, grads)`."""
    self._need(self._batch is not None, "prepare_gradients", "attach_train_batch(batch) comes first")
    self._result = self.engine.score(
      self.model, self._batch, self.val_batch, loss_fn=self.loss_fn, state=state, delta=delta
    )
    return self._result.grads

  @property
  def result(self) -> GhostResult:
    """The scores of the last `prepare_gradients`."""
    self._need(self._result is not None, "result", "prepare_gradients() comes first")
    return self._result

  def aggregate_and_log(self, step: int) -> np.ndarray:
    """Adds the step's scores to the log and returns them: <grad l_i, u>, f32[n] (or [K, n])."""
    result = self.result
    dot = np.asarray(result.dot)
    if self._log and self._log[0]["dot"].shape != dot.shape:
      raise ValueError(
        f"step {step} has scores {dot.shape}, the steps before {self._log[0]['dot'].shape}, and one file holds one "
        f"shape: save_metrics(step) before the batch changes size"
      )
    self._log.append(
      {"step": step, "ids": self._ids, "dot": dot, "loss": float(result.loss), "val_loss": np.asarray(result.val_loss)}
    )
    return dot

  def clear_gradients(self) -> None:
    """Forgets the batch and its result; the log stays."""
    self._batch, self._ids, self._result = None, None, None

  def should_save_metrics(self, step: int) -> bool:
    return bool(self._log) and (step + 1) % self.save_every == 0

  def save_metrics(self, step: int) -> Path:
    """Writes the log to dot_prod_log_iter_<step>.npz (step, ids, dot, loss, val_loss; one row per logged step) and
    empties it. The file appears whole or not at all."""
    self._need(bool(self._log), "save_metrics", "aggregate_and_log(step) comes first")
    self.output_dir.mkdir(parents=True, exist_ok=True)
    path = self.output_dir / f"dot_prod_log_iter_{step}.npz"
    columns = {name: np.stack([np.asarray(row[name]) for row in self._log]) for name in self._log[0]}
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
      np.savez(file, **columns)
    temporary.replace(path)
    self._log.clear()
    return path

  def detach_for_evaluation(self) -> None:
    """Marks that batches now are not training batches; attaching one is refused until `reattach_after_evaluation`."""
    self._attached = False

  def reattach_after_evaluation(self) -> None:
    self._attached = True

  def cleanup(self) -> None:
    """Saves what is still in the log and forgets the batch."""
    if self._log:
      self.save_metrics(self._log[-1]["step"])
    self.clear_gradients()

  @staticmethod
  def _need(condition: bool, method: str, fix: str) -> None:
    if not condition:
      raise ValueError(f"{method} called out of order: {fix}")
