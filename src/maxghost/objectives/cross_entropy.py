"""Next-token cross-entropy with z-loss, exact token weighting, and no one-hot array.

B batch, T positions, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.models import autodiff


def token_losses(logits_BTV, targets_BT, z_loss_multiplier: float = 0.0) -> Any:
  """Cross-entropy of each position in nats, plus z_loss_multiplier * logsumexp**2. Returns [B, T] in logits' dtype.

  z-loss: Chowdhery et al., arXiv:2204.02311, section 5. The backward pass is written by hand: it fuses into one pass,
  while the transpose of a gather is a scatter, which is slow on every backend.
  """
  if autodiff.in_forward_mode():
    return _forward(logits_BTV, targets_BT, z_loss_multiplier)[0]
  return _token_losses(logits_BTV, targets_BT, z_loss_multiplier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _token_losses(logits_BTV, targets_BT, z_loss_multiplier):
  return _forward(logits_BTV, targets_BT, z_loss_multiplier)[0]


def _forward(logits_BTV, targets_BT, z_loss_multiplier):
  # In float32 or wider: rounding a logsumexp of 12 to bfloat16 changes a probability by 3 percent.
  lse_BT = jax.nn.logsumexp(logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32)), axis=-1)
  label_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
  loss_BT = lse_BT - label_BT
  if z_loss_multiplier:
    loss_BT = loss_BT + z_loss_multiplier * lse_BT**2
  return loss_BT.astype(logits_BTV.dtype), lse_BT


def _token_losses_fwd(logits_BTV, targets_BT, z_loss_multiplier):
  loss_BT, lse_BT = _forward(logits_BTV, targets_BT, z_loss_multiplier)
  return loss_BT, (logits_BTV, targets_BT, lse_BT)


def _token_losses_bwd(z_loss_multiplier, residuals, g_BT):
  logits_BTV, targets_BT, lse_BT = residuals
  softmax_BTV = jnp.exp(logits_BTV - lse_BT[..., None])
  weight_BT = g_BT * (1.0 + 2.0 * z_loss_multiplier * lse_BT) if z_loss_multiplier else g_BT
  is_target_BTV = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, logits_BTV.ndim - 1) == targets_BT[..., None]
  d_logits_BTV = softmax_BTV * weight_BT[..., None] - jnp.where(is_target_BTV, g_BT[..., None], 0)
  return d_logits_BTV.astype(logits_BTV.dtype), autodiff.no_cotangent(targets_BT)


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)
