"""The passes that schedules consist of.

K validation sets, n examples, T positions. A loss function is called as an `objectives.Objective`; that of validation
batches may be a tuple with one for each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config import ConfigError
from maxghost.ghost.attach import Twin
from maxghost.ghost.schedules.base import Losses, Model, Problem, Scored, Secant, TrainPass, Validation, of_each_set
from maxghost.models import pipeline
from maxghost.objectives import as_objective
from maxghost.optimizers import by_label
from maxghost.parallel.shardings import constrain_state, map_state, slash_path


def wide_weights(losses, weights):
  """The weights, flags or numbers of any kind, in float32 or the wider type of the losses. Raises ConfigError."""
  if losses.shape != weights.shape or not jnp.issubdtype(losses.dtype, jnp.floating):
    said = f"losses of type {losses.dtype} and shape {losses.shape}, and weights of shape {weights.shape}"
    raise ConfigError(f"{said}: return real losses, and a weight for each")
  return weights.astype(jnp.promote_types(losses.dtype, jnp.float32))


def mean_loss(losses, weights):
  """Weighted mean in float32 or wider; 0 for a batch without weight."""
  weights = wide_weights(losses, weights)
  total = jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)
  return jnp.sum(losses.astype(weights.dtype) * weights) / total


def validation_mean(losses, weights):
  """`mean_loss`, but NaN with gradient 0 for a batch without weight."""
  return jnp.where(jnp.sum(weights) > 0, mean_loss(losses, weights), jnp.nan)


def like(state: nnx.State, labelled: dict) -> nnx.State:
  """A State of the same paths and dtypes with the arrays of {label: array}."""
  return map_state(state, lambda path, v: labelled[slash_path(path)].astype(v.get_value().dtype))


def validation_losses(model: nnx.Module, loss_fn: Losses, batches: tuple):
  """[K]: the mean loss of each validation batch."""
  pairs = zip(of_each_set(loss_fn, batches), batches, strict=True)
  return jnp.stack([validation_mean(*loss(model, batch)) for loss, batch in pairs])


def validation_gradients(model: Model, loss_fn: Losses, batches: tuple):
  """(losses [K], one gradient State per validation set): gradients of the mean loss of each validation batch."""

  def function(loss_fn, batch):
    return jax.value_and_grad(lambda params: validation_mean(*loss_fn(model.merge(params), batch)))(model.params)

  with jax.named_scope("ghost_validation"):
    return _for_each_set(function, of_each_set(loss_fn, batches), batches)


def validation(problem: Problem) -> Validation:
  """The validation gradients of this step, known or new."""
  known, rows = problem.validation, (problem.model, problem.val_losses, problem.val_batches)
  if isinstance(known, Validation):
    return known
  if known is None:
    return Validation(*validation_gradients(*rows))
  stored, num_sets = known.leaves, len(problem.val_batches)

  def renewed():
    losses, gradients = validation_gradients(*rows)
    return losses.astype(float), [g.astype(s.dtype) for g, s in zip(jax.tree.leaves(gradients), stored, strict=True)]

  stale = lambda: (jnp.full((num_sets,), jnp.nan, float), stored)  # noqa: E731
  losses, leaves = jax.lax.cond(known.refresh, renewed, stale)
  return Validation(losses, jax.tree.unflatten(jax.tree.structure([problem.model.params] * num_sets), leaves))


def whole_directions(problem: Problem, gradients: list, training_gradient: nnx.State) -> tuple[list, list, dict]:
  """([G], [u], {label: (g, weighting)}) from States G, by the problem's rule: dicts {label: array} of each set.

  u = P_tᵀ G, and 0 for parameters that are not scored. G is that of `second_order_gradients` or `extrapolated`. The
  last are for `direction_parts`; empty where P_t = 1.
  """
  rule, grads, (state, delta) = problem.rule, by_label(training_gradient), problem.update(training_gradient)
  if delta is not None:
    gradients = second_order_gradients(problem.model, problem.val_losses, problem.val_batches, gradients, delta)
  labelled = extrapolated(problem.secant, [by_label(g) for g in gradients])
  responses = {}
  if not rule.identity and state is not None:
    scalars, views = rule.scalars(state.count, state.clip_factor), problem.parameters
    responses = {name: rule.response(views[name], grads[name], state.of(name), scalars) for name in problem.scored}

  def direction(label: str, gradient):
    if label not in problem.scored:
      return jnp.zeros_like(gradient)
    return responses[label].transpose(gradient) if responses else gradient

  directions = [{label: direction(label, g) for label, g in whole.items()} for whole in labelled]
  return labelled, directions, {label: (grads[label], one.weighting()) for label, one in responses.items()}


def extrapolated(secant: Secant | None, gradients: list[dict]) -> list[dict]:
  """K dicts {label: G + weight (own G - G')}, in place of G; G itself without a secant.

  gradients: K dicts {label: G}, of all or of some of the labels.
  """
  if secant is None:
    return gradients

  def curved(gradient, earlier):
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    own = jnp.asarray(secant.own, wide) * gradient.astype(wide)
    turn = secant.weight.astype(wide) * (own - earlier.astype(wide))
    return gradient + jnp.where(secant.weight == 0, 0, turn).astype(gradient.dtype)  # G' may be anything

  pairs = zip(gradients, secant.earlier, strict=True)
  return [{label: curved(g, earlier[label]) for label, g in of_set.items()} for of_set, earlier in pairs]


def second_order_gradients(model: Model, loss_fn: Losses, batches: tuple, gradients: list, delta) -> list:
  """G + 1/2 H_val delta for each validation set, by one Hessian-vector product (forward over reverse).

  gradients: the G's. delta: State of the step's parameter update. In place of G, these make a step's contributions the
  Shapley values of the validation loss's quadratic model (`docs/ghost.md`).
  """

  def curvature(loss_fn, batch):
    gradient = jax.grad(lambda params: mean_loss(*loss_fn(model.merge(params), batch)))
    return jnp.zeros(()), jax.jvp(gradient, (model.params,), (delta,))[1]

  _, along = _for_each_set(curvature, of_each_set(loss_fn, batches), batches)
  return [constrain_state(jax.tree.map(lambda g, c: g + 0.5 * c, *pair)) for pair in zip(gradients, along, strict=True)]


def _for_each_set(function: Callable, losses: tuple[Callable, ...], batches: tuple):
  """(stacked first, list of second results) of function(loss, batch); sets of one loss and shape in one mapped pass."""
  kinds = [(loss_fn, jax.tree.map(jnp.shape, batch)) for loss_fn, batch in zip(losses, batches, strict=True)]
  if len(batches) == 1 or any(kind != kinds[0] for kind in kinds):
    pairs = [function(*pair) for pair in zip(losses, batches, strict=True)]
    return jnp.stack([value for value, _ in pairs]), [constrain_state(state) for _, state in pairs]
  values, states = jax.vmap(lambda batch: function(losses[0], batch))(jax.tree.map(lambda *x: jnp.stack(x), *batches))
  return values, [constrain_state(jax.tree.map(lambda x, k=k: x[k], states)) for k in range(len(batches))]


def scored_by_rules(twin: Twin, passed: TrainPass, val_loss, factored: dict, **rest) -> Scored:
  """The results of a pass of the twin. factored: {label: captured [*stack, K]}, unless `passed.facts` contain it. With
  `DirectionSpec.own`, the twin's arrays have K + 1 sets."""
  num, own, places = twin.num_sets, {}, {p.label: len(p.stack_shape) for p in twin.scored}

  def cut(found: dict, start: int, stop: int) -> dict:
    return {label: jax.lax.slice_in_dim(x, start, stop, axis=places[label]) for label, x in found.items()}

  if twin.spec.own:
    own, factored = cut(passed.scores, num, num + 1), cut(factored, 0, num)
    passed = dataclasses.replace(passed, scores=cut(passed.scores, 0, num), facts=cut(passed.facts, 0, num))
  if twin.spec.in_backward and twin.spec.rank:
    factored = {p.label: passed.facts[p.label][..., 0] for p in twin.scored if p.low_rank}
  return Scored(passed, val_loss, total(twin, passed.scores), factored, own=own, **rest)


def total(twin: Twin, scores: dict) -> Any:
  """Sum over parameters and layers: [K, n(, T)] from {label: [*stack, K, n(, T)]}."""
  return sum(scores[p.label].sum(tuple(range(len(p.stack_shape)))) for p in twin.scored)


def train_pass(model: Model, loss_fn: Callable, batch, twin: Twin | None = None, directions: Any = None) -> TrainPass:
  """The training gradient of the batch. With a twin, the backward pass scores every example against `directions`; where
  these are `early`, an earlier pass formed the gradient, and this one forms none."""
  params, rest, only_scores = model.params, model.rest, twin is not None and twin.spec.early

  def loss(params, probes):
    built = model.merge(params) if twin is None else twin.merge(params, probes, directions, rest)
    with pipeline.whole_rows(twin is not None and twin.spec.in_backward):
      losses, weights, metrics = as_objective(loss_fn).measured(built, batch)
    return mean_loss(losses, weights), (losses, wide_weights(losses, weights), metrics)

  probes = None if twin is None else twin.zero_probes()
  value_and_grad = jax.value_and_grad(loss, argnums=(1,) if only_scores else (0, 1), has_aux=True)
  (value, (losses, weights, metrics)), (*grads, probe_grads) = value_and_grad(params, probes)
  scores, facts = ({}, {}) if twin is None else twin.scores(probe_grads)
  gradient = nnx.State({}) if only_scores else constrain_state(grads[0])
  return TrainPass(value, losses, weights, gradient, scores, facts, metrics)


class MicroBatches(NamedTuple):
  """How a batch is cut. num: M; micro-batch m holds units m, m + M, m + 2 M, ... together: adjacent rows of a unit."""

  num: int
  together: int

  def cut(self, batch):
    """[rows, ...] -> [M, rows per micro-batch, ...] in every leaf."""
    units = lambda x: x.reshape(-1, self.num, self.together, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
    return jax.tree.map(lambda x: units(x).reshape(self.num, -1, *x.shape[1:]), batch)

  def joined(self, x, axis: int = 0):
    """[M, ..., rows per micro-batch, ...] with the rows at `axis` of the rest -> the batch's row order."""
    before, rest = x.shape[1 : axis + 1], x.shape[axis + 2 :]
    x = jnp.moveaxis(x.reshape(self.num, *before, -1, self.together, *rest), 0, axis + 1)
    return x.reshape(*before, -1, *rest)


def accumulated(model: Model, loss_fn, batch, num_micro, twin: Twin | None = None, directions: Any = None) -> TrainPass:
  """`train_pass` in micro-batches, weighted exactly. num_micro: M of `MicroBatches`.

  Each micro-batch's mean is weighted by its share of the batch's weight, so that uneven and empty ones count exactly.
  Gradients are summed in float32 or wider; scores are in the batch's row order. With several micro-batches, directions
  are known before.
  """
  objective, run = as_objective(loss_fn), functools.partial(train_pass, model, twin=twin, directions=directions)
  if num_micro == 1:
    return run(objective, batch)
  maxima, parts = objective.maxima, MicroBatches(num_micro, objective.rows_per_unit)
  numbered, rows_of = (jnp.arange(num_micro), parts.cut(batch)), parts.joined

  def body(carry, one):
    (total, grads), (index, rows) = carry, one
    out = run(objective.of_micro_batch(index), rows)
    weight = out.weights.sum()
    grads = constrain_state(jax.tree.map(lambda a, g: a + weight * g.astype(a.dtype), grads, out.grads))
    metrics = {name: x if name in maxima else weight * x for name, x in out.metrics.items()}
    scores = jax.tree.map(lambda s: weight * s, out.scores)
    return (total + weight, grads), (out.loss * weight, out.losses, out.weights, scores, metrics)

  shapes = jax.eval_shape(functools.partial(run, objective), jax.tree.map(lambda x: x[0], numbered[1]))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, shapes.weights.dtype)), shapes.grads)
  init = jnp.zeros((), shapes.weights.dtype), zeros
  (total, grads), (loss, losses, weights, scores, metrics) = jax.lax.scan(body, init, numbered)
  inverse = 1 / jnp.maximum(total, jnp.finfo(total.dtype).tiny)
  return TrainPass(
    loss=loss.sum() * inverse, losses=rows_of(losses), weights=rows_of(weights),
    grads=jax.tree.map(lambda g, s: (g * inverse).astype(s.dtype), grads, shapes.grads),
    scores={p.label: rows_of(scores[p.label], len(p.stack_shape) + 1) * inverse for p in (twin.scored if twin else ())},
    facts={}, metrics={name: x.max(0) if name in maxima else x.sum(0) * inverse for name, x in metrics.items()},
  )  # fmt: skip
