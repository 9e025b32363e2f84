"""Schedule 'per_example' (engine 'perexample'): one gradient per example, without scoring rules, for tiny models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.ghost.schedules.base import Model, Problem, Scored
from maxghost.ghost.schedules.passes import train_pass, validation, whole_directions, wide_weights
from maxghost.optimizers import by_label


def run(problem: Problem) -> Scored:
  passed = train_pass(problem.model, problem.loss, problem.batch)
  found = validation(problem)
  _, directions, _ = whole_directions(problem, found.gradients, passed.grads)
  gradients = gradients_of(problem.model, problem.loss, problem.batch)
  products = jax.vmap(lambda g, u: (g * u).reshape(-1).sum(), (0, None))  # [examples]
  scores = {label: jnp.stack([products(gradients[label], u[label]) for u in directions]) for label in problem.scored}
  total: Any = sum(scores.values())
  return Scored(dataclasses.replace(passed, scores=scores), found.losses, total, {}, found)


def gradients_of(model: Model, loss_fn: Callable, batch) -> dict:
  """{label: [n, *parameter]}: the gradient of each example's share of the batch loss, in float32 or wider."""

  def loss(params, example):
    losses, weights = loss_fn(model.merge(params), jax.tree.map(lambda x: x[None], example))
    weights = wide_weights(losses, weights)
    return jnp.sum(losses * weights), weights.sum()

  grads, weight = jax.vmap(jax.grad(loss, has_aux=True), (None, 0))(model.params, batch)
  total = jnp.maximum(weight.sum(), jnp.finfo(weight.dtype).tiny)
  return {label: g / total for label, g in by_label(grads).items()}
