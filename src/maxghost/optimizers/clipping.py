"""Clipping by the global norm, outside the optax chain, because scores are multiplied by clip_factor too."""

import jax
import jax.numpy as jnp
import optax


def clip(grads, threshold: float):
  """Returns (global norm, clip_factor, grads * clip_factor); threshold 0 leaves grads unchanged."""
  # The barrier keeps the sum of squares from fusing with the computation of the gradients. Otherwise its order, and so
  # the last bit of the factor, would depend on whether the step is scored.
  grads = jax.lax.optimization_barrier(grads)
  norm = optax.tree_utils.tree_norm(grads)
  clip_factor = factor_of(norm, threshold)
  return norm, clip_factor, jax.tree.map(lambda g: scaled(g, clip_factor, threshold), grads)


def factor_of(norm, threshold: float):
  """clip_factor = min(1, threshold / norm); 1 for threshold 0."""
  if threshold == 0:
    return jnp.ones_like(norm)
  return jnp.minimum(1.0, threshold / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def scaled(gradient, clip_factor, threshold: float):
  """One array of the gradient times the clipping factor; unchanged for threshold 0."""
  return gradient * clip_factor.astype(gradient.dtype) if threshold else gradient
