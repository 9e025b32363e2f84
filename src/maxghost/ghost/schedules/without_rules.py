"""Schedules without scoring rules: 'forward_mode' (engine 'jvp') and 'per_example' (engine 'perexample').

K validation sets, n examples, T positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.schedules.base import Model, Problem, Scored
from maxghost.ghost.schedules.passes import accumulated, like, mean_loss, train_pass, validation, whole_directions
from maxghost.models import autodiff
from maxghost.optimizers import by_label


def forward_mode(problem: Problem) -> Scored:
  """The training gradient, the exact direction of this very step, then one forward-mode pass."""
  model = problem.model
  passed = accumulated(model, problem.loss, problem.batch, problem.settings.num_micro)
  found = validation(problem)
  gradients, directions = whole_directions(problem, found.gradients, passed.grads)
  grads = by_label(passed.grads)
  sets = [jvp_scores(model, problem.loss, problem.batch, like(model.params, u)) for u in directions]
  used = [sum(jnp.sum(grads[label] * v) for label, v in u.items()) for u in directions]
  return Scored(passed, found.losses, jnp.stack(sets), {}, found, gradients=gradients, used=jnp.stack(used))


def jvp_scores(model: Model, loss_fn: Callable, batch, direction: nnx.State):
  """<grad of (weight share times loss), u> of every example or position, in losses' shape, by one forward-mode pass.

  Works for any model that supports `jax.jvp`. Scores are per loss token, not per position of use, without detail per
  parameter. Costs about two forward passes.
  """

  def weighted(params):
    losses, weights = loss_fn(model.merge(params), batch)
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    weights = weights.astype(wide)
    return losses.astype(wide) * weights / jnp.maximum(weights.sum(), jnp.finfo(wide).tiny)

  with autodiff.forward_mode():
    return jax.jvp(weighted, (model.params,), (direction,))[1]


def per_example(problem: Problem) -> Scored:
  """One gradient per example, for tiny models."""
  passed = train_pass(problem.model, problem.loss, problem.batch)
  found = validation(problem)
  _, directions = whole_directions(problem, found.gradients, passed.grads)
  gradients = per_example_gradients(problem.model, problem.loss, problem.batch)

  def products(label: str):  # [K, n]
    g = gradients[label]
    return jnp.stack([(g * u[label][None]).reshape(g.shape[0], -1).sum(-1) for u in directions])

  scores = {label: products(label) for label in problem.scored}
  total: Any = sum(scores.values())
  return Scored(dataclasses.replace(passed, scores=scores), found.losses, total, {}, found)


def per_example_gradients(model: Model, loss_fn: Callable, batch) -> dict:
  """{label: [n, *parameter]}: the gradient of each example's share of the batch loss."""

  def loss(params, example):
    losses, weights = loss_fn(model.merge(params), jax.tree.map(lambda x: x[None], example))
    return mean_loss(losses, weights), weights.sum()

  grads, weight = jax.vmap(jax.grad(loss, has_aux=True), (None, 0))(model.params, batch)
  total = jnp.maximum(weight.sum(), jnp.finfo(weight.dtype).tiny)
  return {
    label: g * (weight / total).reshape(-1, *([1] * (g.ndim - 1))).astype(g.dtype)
    for label, g in by_label(grads).items()
  }
