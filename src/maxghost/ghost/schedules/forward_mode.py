"""Engine 'jvp': forward mode, which needs no rules. n examples, T positions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.models import autodiff


def jvp_scores(graphdef, params, rest, loss_fn: Callable, batch, direction):
  """<grad of (weight share times loss), u> of every example or position, in losses' shape, by one forward-mode pass.

  direction: State u. Any model that `jax.jvp` passes through; per loss token, not per position of use, and without
  detail per parameter. Cost: about one forward pass more than the forward pass.
  """

  def weighted(params):
    losses, weights = loss_fn(nnx.merge(graphdef, params, rest), batch)
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    weights = weights.astype(wide)
    return losses.astype(wide) * weights / jnp.maximum(weights.sum(), jnp.finfo(wide).tiny)

  with autodiff.forward_mode():
    _, tangents = jax.jvp(weighted, (params,), (direction,))
  return tangents
