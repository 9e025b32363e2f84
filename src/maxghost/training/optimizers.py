"""The optimizer and its learning-rate schedule, from optax.

Clipping is not part of the chain: the step needs the clipping factor, which scores are multiplied by.
"""

import jax
import jax.numpy as jnp
import optax

from maxghost.config.schema import OptimizerConfig
from maxghost.ghost.directions import DirectionSpec


def learning_rate_schedule(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate of step 0..steps-1. Warm-up rises linearly from exactly 0.

  cosine: to learning_rate_final_fraction at the last step. wsd: constant, then linear decay over the last
  wsd_decay_steps_fraction of the steps, to the same value at the last step (Hu et al., arXiv:2404.06395). constant: no
  decay. The same values as MaxText's.
  """
  peak, final = cfg.learning_rate, cfg.learning_rate * cfg.learning_rate_final_fraction
  warmup = int(steps * cfg.warmup_steps_fraction)
  rest = max(steps - warmup, 1)
  if cfg.lr_schedule_type == "cosine":
    after = optax.cosine_decay_schedule(peak, max(rest - 1, 1), cfg.learning_rate_final_fraction)
  elif cfg.lr_schedule_type == "wsd":
    decay = max(int(steps * cfg.wsd_decay_steps_fraction), 1)
    after = optax.join_schedules(
      [optax.constant_schedule(peak), optax.linear_schedule(peak, final, max(decay - 1, 1))], [rest - decay]
    )
  else:
    after = optax.constant_schedule(peak)
  if warmup == 0:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(cfg: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """AdamW (decay on every parameter) or SGD. AdamW: Loshchilov and Hutter, arXiv:1711.05101."""
  schedule = learning_rate_schedule(cfg, steps)
  if cfg.opt_type == "sgd":
    return optax.sgd(schedule)
  return optax.adamw(
    schedule,
    b1=cfg.adam_b1,
    b2=cfg.adam_b2,
    eps=cfg.adam_eps,
    weight_decay=cfg.adam_weight_decay,
    mu_dtype=jnp.dtype(cfg.mu_dtype),
  )


def optimizer_spec(cfg: OptimizerConfig) -> DirectionSpec:
  """The optimizer's own preconditioner, as the ledger needs it."""
  kind = "adam" if cfg.opt_type == "adamw" else "sgd"
  return DirectionSpec(kind, cfg.adam_b1, cfg.adam_b2, cfg.adam_eps)


def clip(grads, threshold: float):
  """(global norm, factor, grads * factor) with factor = min(1, threshold / norm); threshold 0 leaves grads alone."""
  # The barrier keeps the sum of squares from fusing with what made the gradients: its order, and with it the last bit
  # of the factor, would depend on whether the step also scores.
  grads = jax.lax.optimization_barrier(grads)
  norm = optax.tree_utils.tree_norm(grads)
  factor = clip_factor(norm, threshold)
  return norm, factor, jax.tree.map(lambda g: scaled(g, factor, threshold), grads)


def clip_factor(norm, threshold: float):
  """min(1, threshold / norm); 1 for threshold 0."""
  if threshold == 0:
    return jnp.ones_like(norm)
  return jnp.minimum(1.0, threshold / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def scaled(gradient, factor, threshold: float):
  """One array of the gradient times the clipping factor; untouched for threshold 0."""
  return gradient * factor.astype(gradient.dtype) if threshold else gradient
