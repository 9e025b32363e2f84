"""How validation and training share a step.

A loss function is `loss_fn(model, batch) -> (losses, weights)`: float arrays [n] or [n, T], the loss of each example
(or position) in nats and the weight with which it counts. The batch loss is sum(losses * weights) / sum(weights).

K validation sets, n examples, T positions.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.attach import Twin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainPass:
  """What one scored training pass yields. scores: {label: [*stack, K, n(, T)]}, the additive form w_i <grad l_i, u>."""

  loss: jax.Array
  losses: jax.Array
  weights: jax.Array
  grads: nnx.State
  scores: dict


def mean_loss(losses, weights):
  """Weighted mean in float32 or wider; 0 for a batch without weight."""
  wide = jnp.promote_types(losses.dtype, jnp.float32)
  weights = weights.astype(wide)
  return jnp.sum(losses.astype(wide) * weights) / jnp.maximum(jnp.sum(weights), jnp.finfo(wide).tiny)


def validation_gradients(graphdef, params, rest, loss_fn: Callable, batches: tuple):
  """(losses [K], one gradient State per validation set): gradients of the mean loss of each validation batch."""

  def loss(params, batch):
    return mean_loss(*loss_fn(nnx.merge(graphdef, params, rest), batch))

  pairs = [jax.value_and_grad(loss)(params, batch) for batch in batches]
  return jnp.stack([value for value, _ in pairs]), [grads for _, grads in pairs]


def by_label(state: nnx.State) -> dict:
  """{slash-joined path: array} of a State."""
  return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}


def stack_sets(twin: Twin, gradients: list[dict]) -> dict:
  """{label: [*stack, K, *parameter]} for the scored parameters from K dicts {label: [*stack, *parameter]}."""
  return {
    p.label: jnp.stack([g[p.label] for g in gradients], axis=len(p.stack_shape)) for p in twin.scored
  }


def train_pass(twin: Twin, params, rest, loss_fn: Callable, batch, directions: nnx.State) -> TrainPass:
  """The training gradient of the batch, with every example scored against `directions` on the way back."""

  def loss(params, probes):
    losses, weights = loss_fn(twin.merge(params, probes, directions, rest), batch)
    return mean_loss(losses, weights), (losses, weights)

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (value, (losses, weights)), (grads, probe_grads) = value_and_grad(params, twin.zero_probes())
  return TrainPass(value, losses, weights, grads, twin.scores_by_label(probe_grads))


def plain_pass(graphdef, params, rest, loss_fn: Callable, batch):
  """(loss, losses, weights, grads) of a step without scores."""

  def loss(params):
    losses, weights = loss_fn(nnx.merge(graphdef, params, rest), batch)
    return mean_loss(losses, weights), (losses, weights)

  (value, (losses, weights)), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return value, losses, weights, grads
