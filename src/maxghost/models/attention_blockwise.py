"""Attention with memory linear in the number of positions, in plain JAX: an online softmax over blocks of keys.

B batch, T positions, K key/value heads, G query heads per key/value head, h head width, N blocks of c positions.
Source: Rabe and Staats, arXiv:2112.05682; the backward pass from the saved log-sum-exp: Dao, arXiv:2307.08691.
Only blocks on or below the diagonal and inside the window are computed.
"""

import jax.numpy as jnp
from jax import lax

from maxghost.models import autodiff

BLOCK = 512


def attend(q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, sinks_BKGT, shape, block: int | None = None):
  """As `attention.attend`, on grouped heads; returns [B, K, G, T, width of v] in q's dtype.

  shape: `attention.Shape`. block: positions in a block of queries or keys, 512 by default.
  """
  length = q_BKGTh.shape[3]
  block = min(block or BLOCK, length)
  if segment_ids_BT is None:
    segment_ids_BT = jnp.zeros((q_BKGTh.shape[0], length), jnp.int32)
  # Padding comes after every query, so no query sees it; its own results are cut off.
  padding = -length % block
  q, k, v = (_pad(x, x.ndim - 2, padding) for x in (q_BKGTh, k_BKTh, v_BKTh))
  segments = _pad(segment_ids_BT, 1, padding)
  sinks = None if sinks_BKGT is None else _pad(sinks_BKGT, 3, padding)
  return _attend(shape, block, q, k, v, segments, sinks)[:, :, :, :length]


def _pad(x, axis: int, amount: int):
  widths = [(0, amount if i == axis % x.ndim else 0) for i in range(x.ndim)]
  return jnp.pad(x, widths) if amount else x


def _cut(x, index, block: int, axis: int):
  """Block number `index` of x along an axis."""
  return lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _mask(shape, block: int, segments, i, j):
  """[B, 1, 1, c, c]: which queries of block i see which keys of block j."""
  places = jnp.arange(block)
  mask = shape.mask(i * block + places, j * block + places, _cut(segments, i, block, 1), _cut(segments, j, block, 1))
  return mask[:, None, None]


def _forward(shape, block, q, k, v, segments, sinks):
  """(out, (the arguments, out, log-sum-exp of the scores and the sink [B, K, G, T] in float32 or wider))."""
  wide, rows = jnp.promote_types(q.dtype, jnp.float32), (*q.shape[:3], block)
  lowest = jnp.asarray(-0.7 * jnp.finfo(wide).max, wide)

  def query_block(_, i):
    q_i = _cut(q, i, block, 3)

    def key_block(j, carry):
      highest, total, out = carry
      mask = _mask(shape, block, segments, i, j)
      scores = jnp.where(mask, shape.scores(q_i, _cut(k, j, block, 2)), lowest)
      new_highest = jnp.maximum(highest, scores.max(-1))
      weights = jnp.where(mask, jnp.exp(scores - new_highest[..., None]), 0)
      keep = jnp.exp(highest - new_highest)
      weights_v = weights.astype(v.dtype), _cut(v, j, block, 2)
      product = jnp.einsum("bkgts,bksh->bkgth", *weights_v, preferred_element_type=wide)
      return new_highest, total * keep + weights.sum(-1), out * keep[..., None] + product

    if sinks is None:
      start = jnp.full(rows, lowest), jnp.zeros(rows, wide)
    else:
      start = _cut(sinks, i, block, 3).astype(wide), jnp.ones(rows, wide)
    init = (*start, jnp.zeros((*rows, v.shape[-1]), wide))
    first = 0 if shape.window is None else jnp.maximum(i * block - shape.window + 1, 0) // block
    highest, total, out = lax.fori_loop(first, i + 1, key_block, init)
    return None, ((out / total[..., None]).astype(q.dtype), highest + jnp.log(total))

  _, (out_N, log_sum_N) = lax.scan(query_block, None, jnp.arange(q.shape[3] // block))
  out, log_sum = _unblock(out_N, 3), _unblock(log_sum_N, 3)
  return out, (q, k, v, segments, sinks, out, log_sum)


def _unblock(x_N, axis: int):
  """[N, ..., c, ...] with c at `axis` of the rest -> [..., N c, ...]."""
  x = jnp.moveaxis(x_N, 0, axis)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _backward(shape, block, residuals, g):
  q, k, v, segments, sinks, out, log_sum = residuals
  wide, num_blocks = log_sum.dtype, q.shape[3] // block
  # The derivative of the softmax subtracts <g, out> of a query from every score of its row.
  row = jnp.einsum("bkgth,bkgth->bkgt", g, out, preferred_element_type=wide)

  def key_block(dq, j):
    k_j, v_j = _cut(k, j, block, 2), _cut(v, j, block, 2)

    def query_block(i, carry):
      dq, dk_j, dv_j = carry
      q_i, g_i = _cut(q, i, block, 3), _cut(g, i, block, 3)
      scores, mask = shape.scores(q_i, k_j), _mask(shape, block, segments, i, j)
      weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0) - _cut(log_sum, i, block, 3)[..., None]), 0)
      dv_j += jnp.einsum("bkgts,bkgth->bksh", weights.astype(g.dtype), g_i, preferred_element_type=wide)
      d_weights = jnp.einsum("bkgth,bksh->bkgts", g_i, v_j, preferred_element_type=wide)
      d_scores = weights * (d_weights - _cut(row, i, block, 3)[..., None])
      if shape.soft_cap is not None:
        d_scores = d_scores * (1 - jnp.square(scores / shape.soft_cap))
      d_scores = (d_scores * jnp.asarray(shape.scale, wide)).astype(q.dtype)
      dk_j += jnp.einsum("bkgts,bkgth->bksh", d_scores, q_i, preferred_element_type=wide)
      dq_i = jnp.einsum("bkgts,bksh->bkgth", d_scores, k_j, preferred_element_type=wide)
      dq = lax.dynamic_update_slice_in_dim(dq, _cut(dq, i, block, 3) + dq_i, i * block, 3)
      return dq, dk_j, dv_j

    zeros = jnp.zeros(k_j.shape, wide), jnp.zeros(v_j.shape, wide)
    last = num_blocks - 1  # the last block of queries that see a key of this one
    if shape.window is not None:
      last = jnp.minimum((j * block + block - 1 + shape.window - 1) // block, last)
    dq, dk_j, dv_j = lax.fori_loop(j, last + 1, query_block, (dq, *zeros))
    return dq, (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

  dq, (dk_N, dv_N) = lax.scan(key_block, jnp.zeros(q.shape, wide), jnp.arange(num_blocks))
  d_sinks = None if sinks is None else (-jnp.exp(sinks.astype(wide) - log_sum) * row).astype(sinks.dtype)
  return dq.astype(q.dtype), _unblock(dk_N, 2), _unblock(dv_N, 2), autodiff.no_cotangent(segments), d_sinks


_attend = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0, 1))
