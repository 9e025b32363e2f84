"""Gradient accumulation: one scored pass per micro-batch, weighted exactly.

M micro-batches; micro-batch m holds rows m, m + M, m + 2 M, ... of the batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxghost.ghost.schedules.base import Model, TrainPass
from maxghost.ghost.schedules.passes import plain_pass
from maxghost.parallel import constrain_state


def accumulated(run: Callable, batch, num_micro: int, stacks: dict) -> TrainPass:
  """Runs `run(micro_batch) -> TrainPass` on all micro-batches; returns the pass of the whole batch.

  Each micro-batch's mean is weighted by its share of the batch's weight, so that uneven and empty ones count exactly.
  Gradients are summed in float32 or wider; scores are in the batch's row order. Directions formed in the backward pass
  use each micro-batch's own gradient. stacks: {label: stack shape} of the scored parameters.
  """
  if num_micro == 1:
    return run(batch)
  micro = jax.tree.map(lambda x: x.reshape(x.shape[0] // num_micro, num_micro, *x.shape[1:]).swapaxes(0, 1), batch)

  def body(carry, micro_batch):
    total, grads, means = carry
    out = run(micro_batch)
    weight = out.weights.sum()
    grads = constrain_state(jax.tree.map(lambda a, g: a + weight * g.astype(a.dtype), grads, out.grads))
    means = jax.tree.map(lambda a, f: a + weight * f, means, (out.facts, out.metrics))
    scores = jax.tree.map(lambda s: weight * s, out.scores)
    return (total + weight, grads, means), (out.loss * weight, out.losses, out.weights, scores)

  shapes = jax.eval_shape(run, jax.tree.map(lambda x: x[0], micro))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes.grads)
  means = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes.facts, shapes.metrics))
  init = (jnp.zeros((), shapes.weights.dtype), zeros, means)
  (total, grads, means), (loss, losses, weights, scores) = jax.lax.scan(body, init, micro)
  inverse = 1 / jnp.maximum(total, jnp.finfo(total.dtype).tiny)
  facts, metrics = jax.tree.map(lambda f: f * inverse, means)
  return TrainPass(
    loss=loss.sum() * inverse,
    losses=_rows(losses, 0),
    weights=_rows(weights, 0),
    grads=jax.tree.map(lambda g, s: (g * inverse).astype(s.dtype), grads, shapes.grads),
    scores={label: _rows(s, len(stacks[label]) + 1) * inverse for label, s in scores.items()},
    facts=facts,
    metrics=metrics,
  )


def accumulated_plain(model: Model, loss: Callable, batch, num_micro: int) -> TrainPass:
  """The training gradient of the batch without scores."""
  return accumulated(lambda rows: plain_pass(*model, loss, rows), batch, num_micro, {})


def _rows(x, axis: int):
  """[M, ..., rows per micro-batch, ...] with the rows at `axis` of the rest -> the batch's row order."""
  x = jnp.moveaxis(x, 0, axis + 1)
  return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
