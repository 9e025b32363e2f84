"""Cross-entropy of the next token from whole logits, with z-loss and no one-hot array.

B batch, T positions, V vocabulary. z-loss: Chowdhery et al., arXiv:2204.02311, section 5.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxghost.models import autodiff


def token_losses(logits_BTV, targets_BT, z_loss_multiplier: float = 0.0) -> Any:
  """Cross-entropy of each position in nats, plus z_loss_multiplier * logsumexp**2. Returns [B, T] in logits' dtype.

  The backward pass, by hand, fuses into one pass; the transpose of a gather is a scatter, which is slow everywhere.
  """
  return _token_losses(logits_BTV, targets_BT, z_loss_multiplier)


def _token_losses_fwd(logits_BTV, targets_BT, z_loss):
  # In float32 or wider: rounding a logsumexp of 12 to bfloat16 changes a probability by 3 percent.
  log_sum_BT = jax.nn.logsumexp(logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32)), axis=-1)
  losses_BT = loss_of(log_sum_BT, label_of(logits_BTV, targets_BT), z_loss)
  return losses_BT.astype(logits_BTV.dtype), (logits_BTV, targets_BT, log_sum_BT)


def _token_losses_bwd(z_loss, residuals, g_BT):
  logits_BTV, targets_BT, log_sum_BT = residuals
  d_logits_BTV = d_logits_of(logits_BTV, targets_BT, log_sum_BT, g_BT, z_loss)
  return d_logits_BTV.astype(logits_BTV.dtype), autodiff.no_cotangent(targets_BT)


_token_losses = autodiff.with_backward(_token_losses_fwd, _token_losses_bwd, nondiff_argnums=(2,))


def mean_cotangent(weights_BT, dtype):
  """What the weighted mean of losses sends back to each of them, to the bit. dtype: of the hidden states."""
  wide_BT = weights_BT.astype(jnp.promote_types(dtype, jnp.float32))
  return wide_BT * (1 / jnp.maximum(wide_BT.sum(), jnp.finfo(wide_BT.dtype).tiny))


def label_of(logits, targets):
  return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def log1mexp(x) -> Any:
  """log(1 - exp(x)) for x <= 0, that of the next smaller number for 0."""
  return jax.nn.log1mexp(jnp.maximum(-x, jnp.finfo(x.dtype).eps))


def loss_of(log_sum, label, z_loss: float):
  return log_sum - label + z_loss * log_sum**2 if z_loss else log_sum - label


def d_logits_of(logits, targets, log_sum, g, z_loss: float):
  """Cotangent of the logits for that of the losses, g. targets: index of the label in `logits`; -1: none."""
  softmax = jnp.exp(logits - log_sum[..., None])
  weight = g * (1 + 2 * z_loss * log_sum) if z_loss else g
  is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
  return softmax * weight[..., None] - jnp.where(is_target, g[..., None], 0)
