"""`GhostEngine`: per-example scores of any nnx model, and the pieces the train step is made of.

K validation sets, n examples, T positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import Config
from maxghost.ghost import schedules, usage
from maxghost.ghost.attach import Twin, attach, split
from maxghost.ghost.directions import AdamScalars, DirectionSpec
from maxghost.ghost.losses import language_model_loss

SCHEDULES = ("two_pass",)


@dataclasses.dataclass(frozen=True)
class GhostResult:
  """Scores of one batch.

  dot: f32[n], <grad l_i, u> with l_i the weighted mean loss of example i (u = the gradient of the validation loss for
    direction 'sgd'); with several validation sets f32[K, n]. An example without weight has 0.
  per_param: {path: [*stack, n]} (or [*stack, K, n]); the sum over paths and layers is dot.
  additive: f32[n] or [K, n]: w_i * dot_i, w_i the example's share of the batch's weight; adds up over examples.
  per_position: like additive with a trailing position axis, or None.
  grads: State of the gradient of the batch loss, same paths as nnx.Param. loss, val_loss: nats.
  """

  dot: jax.Array
  additive: jax.Array
  per_param: dict
  per_position: jax.Array | None
  grads: nnx.State
  loss: jax.Array
  val_loss: jax.Array


@dataclasses.dataclass(frozen=True)
class AdamState:
  """Optimizer state of the step before: second moments {path: array}, steps taken, and the clipping factor assumed."""

  second_moments: dict
  count: Any
  kappa: Any = 1.0


class GhostEngine:
  """Scores training examples by the dot product of their gradient with a validation direction.

  GhostEngine(cfg), or GhostEngine(schedule="two_pass", direction="sgd", exclude=(), per_position=False).
  Raises ValueError for an unknown schedule or direction, and what `attach` raises for the model.
  """

  def __init__(self, cfg: Config | None = None, *, schedule=None, direction=None, exclude=None, per_position=False):
    cfg = cfg or Config()
    self.schedule = schedule or cfg.ghost.ghost_schedule
    if self.schedule not in SCHEDULES:
      raise ValueError(f"schedule={self.schedule}: use one of {', '.join(SCHEDULES)}")
    self.spec = direction_spec(cfg, direction or "sgd")
    self.exclude = tuple(cfg.ghost.ghost_exclude if exclude is None else exclude)
    self.per_position = per_position
    self.z_loss_multiplier = cfg.model.z_loss_multiplier
    self._compiled: dict = {}

  def score(self, model, train_batch, val_batch, *, loss_fn: Callable | None = None, adam: AdamState | None = None):
    """Scores every example of `train_batch` against the gradient of the mean loss over `val_batch`.

    train_batch, val_batch: pytrees of arrays with the example axis first; a list or tuple of val batches gives K sets.
    loss_fn(model, batch) -> (losses, weights), each [n] or [n, T]; default: next-token cross-entropy on MaxText-style
    batches. adam: required by direction 'adam'. Returns GhostResult. The model is not changed.
    """
    loss_fn = loss_fn or self._default_loss
    many = isinstance(val_batch, (list, tuple))
    val_batches = tuple(val_batch) if many else (val_batch,)
    if (adam is None) == (self.spec.kind == "adam"):
      raise ValueError("direction 'adam' needs adam=AdamState(...), and only it does")
    graphdef, _, _ = nnx.split(model, nnx.Param, ...)
    params, rest = split(model)
    key = (graphdef, loss_fn, _shapes(train_batch), _shapes(val_batches))
    if key not in self._compiled:
      twin = prepare_twin(self, model, train_batch, loss_fn, num_sets=len(val_batches))
      self._compiled[key] = jax.jit(lambda *args: self._run(twin, graphdef, loss_fn, *args))
    moments = None if adam is None else (adam.second_moments, adam.count, adam.kappa)
    result = self._compiled[key](params, rest, train_batch, val_batches, moments)
    return _squeeze(result) if not many else result

  def _default_loss(self, model, batch):
    return language_model_loss(model, batch, self.z_loss_multiplier)

  def _run(self, twin: Twin, graphdef, loss_fn, params, rest, train_batch, val_batches, moments) -> GhostResult:
    val_loss, gradients = schedules.validation_gradients(graphdef, params, rest, loss_fn, val_batches)
    gradients = schedules.stack_sets(twin, [schedules.by_label(g) for g in gradients])
    directions = direction_state(twin, gradients, moments)
    out = schedules.train_pass(twin, params, rest, loss_fn, train_batch, directions)
    per_param = {k: v.sum(-1) if self.per_position else v for k, v in out.scores.items()}
    additive = total(twin, per_param)
    weights = out.weights.reshape(out.weights.shape[0], -1).sum(-1)
    share = weights / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)
    per_share = jnp.where(share > 0, 1 / jnp.where(share > 0, share, 1), 0)
    return GhostResult(
      dot=additive * per_share,
      additive=additive,
      per_param={k: v * per_share for k, v in per_param.items()},
      per_position=total(twin, out.scores) if self.per_position else None,
      grads=out.grads,
      loss=out.loss,
      val_loss=val_loss,
    )


jax.tree_util.register_dataclass(GhostResult)


def direction_spec(cfg: Config, direction: str) -> DirectionSpec:
  """The direction named by `ghost_direction` with the optimizer's constants; 'auto' follows opt_type."""
  if direction == "auto":
    direction = "adam" if cfg.optimizer.opt_type == "adamw" else "sgd"
  return DirectionSpec(direction, cfg.optimizer.adam_b1, cfg.optimizer.adam_b2, cfg.optimizer.adam_eps)


def direction_state(twin: Twin, gradients: dict, moments) -> nnx.State:
  """The twin's directions. moments: (second moments, count, kappa) for kind 'adam', else None."""
  if twin.spec.kind == "sgd":
    return twin.direction_state(gradients)
  second_moments, count, kappa = moments
  scalars = AdamScalars.at(twin.spec, count, kappa).stacked()
  return twin.direction_state(gradients, second_moments, scalars)


def prepare_twin(engine: GhostEngine, model, train_batch, loss_fn, *, num_sets: int) -> Twin:
  """The probed twin for batches of this shape; one abstract trace tells which tables are used twice."""
  leading = jax.tree.leaves(train_batch)[0].shape
  arguments = {
    "num_examples": leading[0],
    "num_positions": leading[1] if engine.per_position else None,
    "num_sets": num_sets,
    "spec": engine.spec,
    "exclude": engine.exclude,
  }
  twin = attach(model, **arguments)
  if engine.spec.kind != "adam":
    return twin
  params, rest = split(model)
  templates = {p.label: dict(nnx.to_flat_state(params))[p.path] for p in twin.scored}

  def trace(params, rest, batch):
    gradients = {
      p.label: jnp.zeros((*p.stack_shape, num_sets, *templates[p.label].shape[len(p.stack_shape) :])) for p in twin.scored
    }
    moments = {label: jnp.zeros(v.shape) for label, v in templates.items()}
    directions = direction_state(twin, gradients, (moments, 0, 1.0))
    return loss_fn(twin.merge(params, twin.zero_probes(), directions, rest), batch)

  with usage.record() as used:
    jax.eval_shape(trace, params, rest, train_batch)
  linked = tuple(
    (path, used[path, "attend"][0]) for path, method in used if method == "__call__" and (path, "attend") in used
  )
  return attach(model, **arguments, linked=linked) if linked else twin


def total(twin: Twin, scores: dict):
  """Sum over parameters and layers: [K, n(, T)] from {label: [*stack, K, n(, T)]}."""
  return sum(scores[p.label].sum(tuple(range(len(p.stack_shape)))) for p in twin.scored)


def _shapes(batch):
  leaves, tree = jax.tree.flatten(batch)
  return tree, tuple((x.shape, jnp.result_type(x)) for x in leaves)


def _squeeze(result: GhostResult) -> GhostResult:
  """Drops the validation-set axis of a result with one set."""
  axis = {label: v.ndim - 2 for label, v in result.per_param.items()}
  return dataclasses.replace(
    result,
    dot=result.dot[0],
    additive=result.additive[0],
    per_param={label: v.squeeze(axis[label]) for label, v in result.per_param.items()},
    per_position=None if result.per_position is None else result.per_position[0],
    val_loss=result.val_loss[0],
  )
