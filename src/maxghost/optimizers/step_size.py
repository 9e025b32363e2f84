"""How far a step goes: the learning rate, and clipping by the global norm.

Clipping is outside the optax chain, because scores are multiplied by clip_factor too.
"""

import jax
import jax.numpy as jnp
import optax

from maxghost.config.schema import OptimizerConfig


def learning_rate_schedule(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate of step 0..steps-1, with MaxText's values. Warm-up rises linearly from exactly 0.

  cosine: decays to learning_rate_final_fraction at the last step. wsd: constant, then decays linearly to the same value
  over the last wsd_decay_steps_fraction of the steps (Hu et al., arXiv:2404.06395). constant: no decay.
  """
  peak, final = cfg.learning_rate, cfg.learning_rate * cfg.learning_rate_final_fraction
  warmup = int(steps * cfg.warmup_steps_fraction)
  rest = max(steps - warmup, 1)
  if cfg.lr_schedule_type == "cosine" and rest > 1:
    after = optax.cosine_decay_schedule(peak, rest - 1, cfg.learning_rate_final_fraction)
  elif cfg.lr_schedule_type == "wsd":
    decay = int(steps * cfg.wsd_decay_steps_fraction)
    down = optax.linear_schedule(peak, final, decay - 1) if decay > 1 else optax.constant_schedule(final)
    after = optax.join_schedules([optax.constant_schedule(peak), down], [rest - decay])
  else:  # constant, or cosine with only the last step after the warm-up
    after = optax.constant_schedule(peak if cfg.lr_schedule_type == "constant" else final)
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def global_norm(tree):
  """The root of the sum of all squares, in float32 or wider."""
  return optax.tree_utils.tree_norm(jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree))


def clip(grads, threshold: float):
  """Returns (global norm, clip_factor, grads * clip_factor); threshold 0 leaves grads unchanged."""
  # The barrier keeps the sum of squares from fusing with the computation of the gradients. Otherwise its order, and so
  # the last bit of the factor, would depend on whether the step is scored.
  grads = jax.lax.optimization_barrier(grads)
  norm = global_norm(grads)
  clip_factor = factor_of(norm, threshold)
  return norm, clip_factor, jax.tree.map(lambda g: scaled(g, clip_factor, threshold), grads)


def factor_of(norm, threshold: float):
  """clip_factor = min(1, threshold / norm); 1 for threshold 0."""
  if threshold == 0:
    return jnp.ones_like(norm)
  return jnp.minimum(1.0, threshold / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def factor_without(share, norm, threshold: float):
  """(c_i, q_i): what clipping does to the batch gradient g without an example's part g_i of it.

  share: <g, g_i> / |g|². norm: |g|. c_i = min(1, threshold / |g (1 - share)|), the clipping factor where g - g_i is
  as long as its part along g. q_i = (c - c_i) / share with c the factor of g, also at share 0, where it is finite.
  The clipped gradient loses c g - c_i (g - g_i) = c_i g_i + q_i share g with the example.
  """
  whole, factor = factor_of(norm, threshold), factor_of(norm * jnp.abs(1 - share), threshold)
  # Clipped with and without the example, and g not turned round: c_i = c / (1 - share), so q_i = -c_i.
  both = (whole < 1) & (factor < 1) & (share < 1)
  return factor, jnp.where(both, -factor, (whole - factor) / jnp.where(share == 0, 1, share))


def scaled(gradient, clip_factor, threshold: float):
  """One array of the gradient times the clipping factor; unchanged for threshold 0."""
  return gradient * clip_factor.astype(gradient.dtype) if threshold else gradient
