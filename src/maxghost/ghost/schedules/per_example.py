"""Engine 'perexample': one gradient per example, for tiny models. No rules. K validation sets, n examples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.schedules.base import Problem, Scored
from maxghost.ghost.schedules.passes import by_label, mean_loss, plain_pass, validation, whole_directions


def run(problem: Problem) -> Scored:
  graphdef, params, rest = problem.model
  passed = plain_pass(graphdef, params, rest, problem.loss, problem.batch)
  found = validation(problem)
  _, directions = whole_directions(problem, found.gradients, passed.grads)
  gradients = per_example_gradients(graphdef, params, rest, problem.loss, problem.batch)
  sets = [_products(gradients, u) for u in directions]
  scores = {label: jnp.stack([s[label] for s in sets]) for label in problem.scored}
  total: Any = sum(scores.values())
  return Scored(dataclasses.replace(passed, scores=scores), found.losses, total, {}, found)


def per_example_gradients(graphdef, params, rest, loss_fn: Callable, batch) -> dict:
  """{label: [n, *parameter]}: the gradient of each example's share of the batch loss."""

  def loss(params, example):
    losses, weights = loss_fn(nnx.merge(graphdef, params, rest), jax.tree.map(lambda x: x[None], example))
    return mean_loss(losses, weights), weights.sum()

  grads, weight = jax.vmap(jax.grad(loss, has_aux=True), (None, 0))(params, batch)
  total = jnp.maximum(weight.sum(), jnp.finfo(weight.dtype).tiny)
  return {
    label: g * (weight / total).reshape(-1, *([1] * (g.ndim - 1))).astype(g.dtype)
    for label, g in by_label(grads).items()
  }


def _products(gradients: dict, direction: dict) -> dict:
  """{label: [n]} of gradients {label: [n, *parameter]} with one direction."""
  return {label: (g * direction[label][None]).reshape(g.shape[0], -1).sum(-1) for label, g in gradients.items()}
