"""Rotary position embedding.

B batch, T positions, H heads, h head width.
Source: Su et al., arXiv:2104.09864; the two halves of a head are rotated against each other (GPT-NeoX layout).
"""

import jax.numpy as jnp


def rotate(x_BTHh, positions_BT, max_timescale: float):
  """Rotates each head by its position. x_BTHh: any float dtype, kept; angles are formed in float32 or wider.

  h must be even. Position p turns pair i by p / max_timescale**(2 i / h) radians.
  """
  half = x_BTHh.shape[-1] // 2
  angle_dtype = jnp.promote_types(x_BTHh.dtype, jnp.float32)
  exponent_i = jnp.arange(half, dtype=angle_dtype) / half
  inverse_timescale_i = jnp.asarray(max_timescale, angle_dtype) ** -exponent_i
  angle_BT1i = positions_BT[:, :, None, None].astype(angle_dtype) * inverse_timescale_i[None, None, None, :]
  sin, cos = jnp.sin(angle_BT1i), jnp.cos(angle_BT1i)
  first, second = x_BTHh[..., :half].astype(angle_dtype), x_BTHh[..., half:].astype(angle_dtype)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTHh.dtype)
