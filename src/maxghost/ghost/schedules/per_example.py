"""Engine 'perexample': one gradient per example, which needs no rules. n examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.schedules.passes import by_label, mean_loss


def per_example_gradients(graphdef, params, rest, loss_fn: Callable, batch) -> dict:
  """{label: [n, *parameter]}: the gradient of each example's share of the batch loss; n times the parameters' size."""

  def loss(params, example):
    losses, weights = loss_fn(nnx.merge(graphdef, params, rest), jax.tree.map(lambda x: x[None], example))
    return mean_loss(losses, weights), weights.sum()

  grads, weight = jax.vmap(jax.grad(loss, has_aux=True), (None, 0))(params, batch)
  total = jnp.maximum(weight.sum(), jnp.finfo(weight.dtype).tiny)
  return {
    label: g * (weight / total).reshape(-1, *([1] * (g.ndim - 1))).astype(g.dtype)
    for label, g in by_label(grads).items()
  }


def per_example_scores(graphdef, params, rest, loss_fn: Callable, batch, direction, stacks: dict) -> dict:
  """{label: [*stack, n]} additive scores from materialised per-example gradients. stacks: {label: stack shape}."""
  gradients, u = per_example_gradients(graphdef, params, rest, loss_fn, batch), by_label(direction)
  scores = {}
  for label, stack in stacks.items():
    g = gradients[label]
    product = (g * u[label][None]).reshape(g.shape[0], *stack, -1).sum(-1)
    scores[label] = jnp.moveaxis(product, 0, -1)
  return scores
