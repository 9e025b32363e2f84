"""`GhostEngineManager`: the engine with the method names of GhostSuite's manager, for hand-written loops."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxghost.ghost.engine import GhostEngine, GhostResult, check_batches
from maxghost.optimizers import AdamState, RuleState
from maxghost.scorelog import Writer
from maxghost.scorelog.format import parse_shard_name, shard_name


class GhostEngineManager:
  """Scores around a training loop, in the order of the example in docs/engine.md.

  Around an evaluation, call detach_for_evaluation() and reattach_after_evaluation(); at the end cleanup(). A loop that
  restarts at step s keeps the steps before s and replaces the others. Methods raise ValueError when they are called out
  of order or while detached.

  val_batch: as in GhostEngine.score. output_dir: of the score log, for all commands (`maxghost scores OUTPUT_DIR`).
  save_every: steps per file. val_sets: names of the validation sets.
  """

  def __init__(self, engine: GhostEngine, model: nnx.Module, val_batch, *, output_dir: str | os.PathLike,
               loss_fn: Callable | None = None, save_every: int = 100, val_sets: Sequence[str] = ()):  # fmt: skip
    if not isinstance(save_every, (int, np.integer)) or save_every < 1:
      raise ValueError(f"save_every={save_every!r}: use 1 or more")
    self.engine, self.model, self.val_batch, self.loss_fn = engine, model, val_batch, loss_fn
    self.output_dir, self.save_every = Path(output_dir), save_every
    count = len(val_batch) if isinstance(val_batch, list) else 1
    names = tuple(val_sets) or (("validation",) if count == 1 else tuple(f"validation {k}" for k in range(count)))
    if len(names) != count or len(set(names)) < count:
      raise ValueError(f"val_sets={list(names)}: {len(set(names))} names for {count} validation batches")
    direction = "second_order" if engine.spec.early else str(engine.spec.rule.direction)
    self._writer = Writer(output_dir, names, period=save_every, objective="custom", direction=direction)
    self._writer.folder = self.output_dir
    self._attached, self._started = True, False
    self._unsaved: int | None = None  # last step logged since save_metrics was called
    self.clear_gradients()

  def attach_train_batch(self, batch, ids: Any = None) -> None:
    """Sets the batch of the next step.

    ids: one per example, by which the log sums: numbers, texts or (domain, path, offset); None: each one is separate.
    """
    _need(self._attached, "attach_train_batch", "reattach_after_evaluation() comes first")
    check_batches(batch)
    count = jax.tree.leaves(batch)[0].shape[0]
    # Of JAX, an array holds arrays; a column of pandas is indexed by labels of its own.
    in_order = np.atleast_1d(ids) if hasattr(ids, "__array__") or np.isscalar(ids) else ids
    if isinstance(ids, (set, frozenset, dict)):
      raise ValueError(f"ids is a {type(ids).__name__}, which has no order: give a list with one id per example")
    ids = [None] * count if ids is None else [*in_order]
    if len(ids) != count:
      raise ValueError(f"{len(ids)} ids for {count} examples: give one id per example")
    self._batch, self._ids, self._result = batch, [_document(own) for own in ids], None

  def prepare_forward_input(self):
    """Returns the attached batch; unlike in a hook-based engine, nothing has to be appended to it."""
    return _need(self._batch, "prepare_forward_input", "attach_train_batch(batch) comes first")

  def prepare_gradients(self, state: RuleState | AdamState | None = None, delta: nnx.State | None = None) -> nnx.State:
    """Scores the attached batch and returns the gradient of its loss, for `optimizer.update(model, grads)`."""
    batch = _need(self._batch, "prepare_gradients", "attach_train_batch(batch) comes first")
    self._result = self.engine.score(self.model, batch, self.val_batch, loss_fn=self.loss_fn, state=state, delta=delta)
    return self._result.grads

  @property
  def result(self) -> GhostResult:
    """The scores of the last `prepare_gradients`."""
    return _need(self._result, "result", "prepare_gradients() comes first")

  def aggregate_and_log(self, step: int, learning_rate: float = 1.0) -> np.ndarray:
    """Adds the step's scores to the log and returns them: <grad l_i, u>, f32[n] (or [K, n]).

    learning_rate: of the step, for contributions in nats; 1.0 gives nats per unit of learning rate.
    """
    result = self.result
    if np.ndim(step) or not hasattr(step, "__index__") or step < 0:
      raise ValueError(f"step={step!r}: give the number of the step, 0 or more")
    if np.ndim(learning_rate) or not hasattr(learning_rate, "__float__"):
      raise ValueError(f"learning_rate={learning_rate!r}: give one number, that of the step")
    if not self._started:
      self._started = True
      if any(name[0] >= step for path in self.output_dir.glob("*") if (name := parse_shard_name(path.name))):
        print(f"maxghost: {self.output_dir}: scores from step {step} on are replaced", file=sys.stderr)
      self._writer.restore({"step": step - 1} if step else None)
    dot_NK, additive_NK = (np.atleast_2d(np.asarray(values)).T for values in (result.dot, result.additive))
    count = len(dot_NK)
    rows = {
      "tokens": np.ones(count),  # only the loss function knows the tokens
      "share": np.asarray(result.share),
      "loss": np.full(count, np.nan),
      "dot": dot_NK,
      "contribution": learning_rate * additive_NK,
    }
    record = {"step": step, "learning_rate": learning_rate, "tokens": count, "loss": float(result.loss)}
    record |= {"val_loss": np.asarray(result.val_loss), "predicted_examples": rows["contribution"].sum(0)}
    self._writer.append(record, rows, [own or ("train", f"step {step}", i) for i, own in enumerate(self._ids)])
    self._unsaved = step
    return np.asarray(result.dot)

  def clear_gradients(self) -> None:
    """Forgets the batch and its result; the log stays."""
    self._batch, self._ids, self._result = None, [], None

  def should_save_metrics(self, step: int) -> bool:
    return self._unsaved is not None and (step + 1) % self.save_every == 0

  def save_metrics(self, step: int) -> Path:
    """Writes the log to dot_prod_log_iter_<step>.npz; one of fewer than `save_every` steps is replaced later."""
    _need(self._unsaved == step, "save_metrics", f"aggregate_and_log({step}) comes first")
    self._writer.flush()
    self._unsaved = None
    return self.output_dir / shard_name(step, 0)

  def detach_for_evaluation(self) -> None:
    """Refuses training batches until `reattach_after_evaluation`."""
    self._attached = False

  def reattach_after_evaluation(self) -> None:
    self._attached = True

  def cleanup(self) -> None:
    """Writes the rest of the log and forgets the batch."""
    self._writer.close()
    self._unsaved = None
    self.clear_gradients()


def _need(found, method: str, fix: str) -> Any:
  """Returns `found`; raises ValueError if there is nothing."""
  if found is None or found is False:
    raise ValueError(f"{method} called out of order: {fix}")
  return found


def _document(own) -> tuple[str, str, int] | None:
  """An id of the user as one of the log; None: its index in its step."""
  if isinstance(own, (list, tuple, np.ndarray)):
    try:
      domain, path, offset = own
      return str(domain), str(path), int(np.int64(int(offset)))
    except (TypeError, ValueError, OverflowError):
      raise ValueError(f"ids: {own!r} is no (domain, path, offset)") from None
  if isinstance(own, (int, np.integer)) and -(2**63) <= own < 2**63:  # the log's
    return "train", "ids", int(own)
  return None if own is None else ("train", str(own), 0)
