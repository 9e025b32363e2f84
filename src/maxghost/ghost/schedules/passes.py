"""The passes that schedules consist of.

A loss function is `loss_fn(model, batch) -> (losses, weights)`: float arrays [n] or [n, T], the loss of each example
(or position) in nats and its weight. The batch loss is sum(losses * weights) / sum(weights).

K validation sets, n examples, T positions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.attach import Twin
from maxghost.ghost.schedules.base import Problem, TrainPass, Update, Validation
from maxghost.objectives import as_objective
from maxghost.optimizers import RuleState, UpdateRule
from maxghost.optimizers.base import by_label
from maxghost.parallel import constrain_state
from maxghost.parallel.shardings import slash_path


def mean_loss(losses, weights):
  """Weighted mean in float32 or wider; 0 for a batch without weight."""
  wide = jnp.promote_types(losses.dtype, jnp.float32)
  weights = weights.astype(wide)
  return jnp.sum(losses.astype(wide) * weights) / jnp.maximum(jnp.sum(weights), jnp.finfo(wide).tiny)


def validation_mean(losses, weights):
  """`mean_loss`, but NaN with gradient 0 for a batch without weight."""
  return jnp.where(jnp.sum(weights) > 0, mean_loss(losses, weights), jnp.nan)


def like(state: nnx.State, labelled: dict) -> nnx.State:
  """A State of the same paths with the arrays of {label: array}."""
  return nnx.from_flat_state([(path, v.replace(labelled[slash_path(path)])) for path, v in nnx.to_flat_state(state)])


def respond(rule: UpdateRule, state: RuleState, parameters: dict, grads: dict, directions: dict) -> dict:
  """{label: P_tᵀ G} of whole directions, for a known whole gradient."""
  scalars = rule.scalars(state.count, state.clip_factor)
  return {
    label: rule.response(parameters[label], grads[label], state.of(label), scalars).transpose(direction)
    for label, direction in directions.items()
  }


def validation_gradients(graphdef, params, rest, loss_fn: Callable, batches: tuple):
  """(losses [K], one gradient State per validation set): gradients of the mean loss of each validation batch."""

  def loss(params, batch):
    return validation_mean(*loss_fn(nnx.merge(graphdef, params, rest), batch))

  with jax.named_scope("ghost_validation"):
    return _for_each_set(lambda batch: jax.value_and_grad(loss)(params, batch), batches)


def validation(problem: Problem) -> Validation:
  """The validation gradients of this step, known or new."""
  known = problem.validation
  if isinstance(known, Validation):
    return known
  batches = problem.val_batches

  def fresh() -> Validation:
    return Validation(*validation_gradients(*problem.model, problem.val_loss, batches))

  if known is None:
    return fresh()
  stored = known.leaves

  def renewed():
    found = fresh()
    return found.losses, [g.astype(s.dtype) for g, s in zip(jax.tree.leaves(found.gradients), stored, strict=True)]

  def stale():
    return jnp.full((len(batches),), jnp.nan, stored[0].dtype), stored

  losses, leaves = jax.lax.cond(known.refresh, renewed, stale)
  tree = jax.tree.structure([problem.model.params] * len(batches))
  return Validation(losses, jax.tree.unflatten(tree, leaves))


def responded(problem: Problem, update: Update, grads: dict, gradients: list[dict]) -> list[dict]:
  """P_tᵀ G of whole gradients {label: G}, by the problem's rule."""
  if problem.rule.identity or update.state is None:
    return gradients
  return [respond(problem.rule, update.state, problem.parameters, grads, g) for g in gradients]


def whole_directions(problem: Problem, gradients: list, training_gradient: nnx.State) -> tuple[list, list]:
  """([G], [u]) of the validation sets: States G, with second_order those of `curved`, and dicts {label: u}, 0 for
  parameters that are not scored."""
  update = problem.update(training_gradient)
  if problem.second_order:
    gradients = curved(problem, gradients, update)
  labelled = [by_label(g) for g in gradients]
  scored = [{label: g[label] for label in problem.scored} for g in labelled]
  made = responded(problem, update, by_label(training_gradient), scored)
  return gradients, [
    {k: jnp.zeros_like(g) for k, g in whole.items()} | u for whole, u in zip(labelled, made, strict=True)
  ]


def curved(problem: Problem, gradients: list, update: Update) -> list:
  """`second_order_gradients` of the update."""
  return second_order_gradients(*problem.model, problem.val_loss, problem.val_batches, gradients, update.delta)


def second_order_gradients(graphdef, params, rest, loss_fn: Callable, batches: tuple, gradients: list, delta) -> list:
  """G + 1/2 H_val delta for each validation set, by one Hessian-vector product (forward over reverse).

  gradients: the G's. delta: State of the step's parameter update. In place of G, these make a step's contributions the
  Shapley values of the validation loss's quadratic model (`docs/ghost.md`).
  """

  def loss(params, batch):
    return mean_loss(*loss_fn(nnx.merge(graphdef, params, rest), batch))

  def curvature(batch):
    return jnp.zeros(()), jax.jvp(lambda p: jax.grad(loss)(p, batch), (params,), (delta,))[1]

  _, along = _for_each_set(curvature, batches)
  return [
    constrain_state(jax.tree.map(lambda g, c: g + 0.5 * c, gradient, curved))
    for gradient, curved in zip(gradients, along, strict=True)
  ]


def _for_each_set(function: Callable, batches: tuple):
  """(stacked first results, list of second results) of function(batch) -> (scalar, State).

  Sets of one shape run as one mapped pass, whose products with the weights include all rows at once; K small passes
  would use the device less well.
  """
  shapes = [jax.tree.map(jnp.shape, batch) for batch in batches]
  if len(batches) == 1 or any(shape != shapes[0] for shape in shapes):
    pairs = [function(batch) for batch in batches]
    return jnp.stack([value for value, _ in pairs]), [constrain_state(state) for _, state in pairs]
  values, states = jax.vmap(function)(jax.tree.map(lambda *x: jnp.stack(x), *batches))
  return values, [constrain_state(jax.tree.map(lambda x, k=k: x[k], states)) for k in range(len(batches))]


def direction_parts(twin: Twin, gradients: list[dict], state: RuleState | None = None):
  """({label: parts}, {label: captured [*stack, K]}) for `Twin.direction_state` from K dicts {label: gradient}.

  Directions with a rank are factored here, unless they are formed in the backward pass, which needs `state`.
  """
  parts, captured = {}, {}
  rule = twin.spec.rule
  scalars = None if state is None else rule.scalars(state.count, state.clip_factor)
  for param in twin.scored:
    axis = len(param.stack_shape)
    # The sets are stacked first: often they are slices of one array, which then need not be copied.
    stacked = param.placed(jnp.moveaxis(jnp.stack([g[param.label] for g in gradients]), 0, axis))
    if state is not None and scalars is not None and twin.spec.in_backward:
      kept = state.of(param.label)
      spread = jnp.broadcast_to(scalars, (*param.stack_shape, *scalars.shape))
      parts[param.label] = (stacked, *(kept[name] for name in rule.reads(param.spec.parameter)), spread)
    elif param.spec.low_rank:
      left, right, captured[param.label] = _factors(param, stacked)
      parts[param.label] = (left, right)
    else:
      parts[param.label] = (stacked,)
  return parts, captured


def _factors(param, stacked):
  """(left, right, captured [*stack, K]) of one parameter's directions [*stack, K, *parameter]."""
  axis = len(param.stack_shape)
  if param.spec.parameter.groups:
    # Layer by layer: sums over the mesh hold a whole side of each matrix, of all experts at once.
    run = functools.partial(param.spec.factor, batch_axes=1)
    for _ in param.stack_shape:
      run = functools.partial(jax.lax.map, run)
    return run(stacked)
  return tuple(jnp.moveaxis(x, 0, axis) for x in param.spec.factor(jnp.moveaxis(stacked, axis, 0), axis + 1))


def captured(twin: Twin, factored: dict, facts: dict) -> dict:
  """{label: captured [*stack, K]}, from `direction_parts` or from the facts of the backward pass."""
  if twin.spec.in_backward and twin.spec.rank:
    return {p.label: facts[p.label][..., 0] for p in twin.scored if p.spec.low_rank}
  return factored


def total(twin: Twin, scores: dict) -> Any:
  """Sum over parameters and layers: [K, n(, T)] from {label: [*stack, K, n(, T)]}."""
  return sum(scores[p.label].sum(tuple(range(len(p.stack_shape)))) for p in twin.scored)


def train_pass(twin: Twin, params, rest, loss_fn: Callable, batch, directions: nnx.State) -> TrainPass:
  """The training gradient of the batch; its backward pass scores every example against `directions`."""

  def loss(params, probes):
    losses, weights, metrics = as_objective(loss_fn).measured(twin.merge(params, probes, directions, rest), batch)
    return mean_loss(losses, weights), (losses, weights, metrics)

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (value, (losses, weights, metrics)), (grads, probe_grads) = value_and_grad(params, twin.zero_probes())
  facts = twin.scores_by_label(probe_grads, "facts")
  grads = constrain_state(grads)
  return TrainPass(value, losses, weights, grads, twin.scores_by_label(probe_grads), facts, metrics)


def plain_pass(graphdef, params, rest, loss_fn: Callable, batch) -> TrainPass:
  """The training gradient of the batch, without scores."""

  def loss(params):
    losses, weights, metrics = as_objective(loss_fn).measured(nnx.merge(graphdef, params, rest), batch)
    return mean_loss(losses, weights), (losses, weights, metrics)

  (value, (losses, weights, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return TrainPass(value, losses, weights, constrain_state(grads), {}, {}, metrics)
