"""Attention with memory linear in the number of positions, in plain JAX: an online softmax over blocks of keys.

B batch, T positions, K key/value heads, G query heads per key/value head, h head width, N blocks of c positions.
Source: Rabe and Staats, arXiv:2112.05682; the backward pass from the saved log-sum-exp: Dao, arXiv:2307.08691.
Only blocks on or below the diagonal and inside the window are computed.
"""

from collections.abc import Callable

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
  return jnp.pad(x, [(0, amount if i == axis % x.ndim else 0) for i in range(x.ndim)]) if amount else x


def _cut(x, index, block: int, axis: int):
  """Block number `index` of x along an axis."""
  return lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _mask(shape, block: int, segments, at, i, j):
  """[B, 1, 1, c, c]: which queries of block i see which keys of block j. segments, at: see `over_keys`."""
  places, (of_q, of_k), (at_q, at_k) = jnp.arange(block), segments, at
  positions = at_q + i * block + places, at_k + j * block + places
  return shape.mask(*positions, _cut(of_q, i, block, 1), _cut(of_k, j, block, 1))[:, None, None]


def over_keys(shape, block: int, q, k, v, segments: tuple, at: tuple, start: Callable, finish: Callable):
  """An online softmax of queries [B, K, G, T, h] over keys [B, K, S, h], of which only visible blocks are read.

  Args:
    block: c, which divides T and S. segments: ids [B, T] of the queries, and [B, S] of the keys.
    at: the positions of the first query and of the first key in their row.
    start: number of a block of queries -> (largest score, sum of weights [B, K, G, c], sum of weighted values) so far.
    finish: the same three with these keys -> a pytree of results.

  Returns the results of each block, with a leading axis for the blocks.
  """
  wide, offset, num_keys = jnp.promote_types(q.dtype, jnp.float32), at[0] - at[1], k.shape[2] // block

  def query_block(_, i):
    q_i = _cut(q, i, block, 3)

    def key_block(j, carry):
      highest, total, out = carry
      mask = _mask(shape, block, segments, at, i, j)
      scores = jnp.where(mask, shape.scores(q_i, _cut(k, j, block, 2)), lowest(wide))
      new_highest = jnp.maximum(highest, scores.max(-1))
      weights = jnp.where(mask, jnp.exp(scores - new_highest[..., None]), 0)
      keep = jnp.exp(highest - new_highest)
      product = shape.product("bkgts,bksh->bkgth", weights.astype(v.dtype), _cut(v, j, block, 2), wide)
      return new_highest, total * keep + weights.sum(-1), out * keep[..., None] + product

    first, last = 0, jnp.clip(i + offset // block, -1, num_keys - 1)
    if shape.window is not None:
      first = jnp.maximum(offset + i * block - shape.window + 1, 0) // block
    return None, finish(*lax.fori_loop(first, last + 1, key_block, start(i)))

  return lax.scan(query_block, None, jnp.arange(q.shape[3] // block))[1]


def before_keys(sinks, rows: tuple[int, ...], width: int, wide):
  """What `over_keys` starts from: three arrays of these rows, of which a sink (or None) is the first score."""
  start = (jnp.full(rows, lowest(wide)), jnp.zeros(rows, wide))
  if sinks is not None:
    start = sinks.astype(wide), jnp.ones(rows, wide)
  return *start, jnp.zeros((*rows, width), wide)


def lowest(dtype):
  """In place of the score of a key that is not seen. Finite, so that differences of two are 0."""
  return jnp.asarray(-0.7 * jnp.finfo(dtype).max, dtype)


def _forward(shape, block, q, k, v, segments, sinks):
  """(out, (the arguments, out, log-sum-exp of the scores and the sink [B, K, G, T] in float32 or wider))."""
  wide, rows = jnp.promote_types(q.dtype, jnp.float32), (*q.shape[:3], block)

  def start(i):
    return before_keys(None if sinks is None else _cut(sinks, i, block, 3), rows, v.shape[-1], wide)

  def finish(highest, total, out):
    return (out / total[..., None]).astype(q.dtype), highest + jnp.log(total)

  found_N = over_keys(shape, block, q, k, v, (segments, segments), (0, 0), start, finish)
  out, log_sum = (unblock(x, 3) for x in found_N)
  return out, (q, k, v, segments, sinks, out, log_sum)


def unblock(x_N, axis: int):
  """[N, ..., c, ...] with c at `axis` of the rest -> [..., N c, ...]."""
  x = jnp.moveaxis(x_N, 0, axis)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def back_over_queries(shape, block: int, of_queries: tuple, k, v, segments: tuple, at: tuple, dq, finish: Callable):
  """The backward pass of these keys: (dq with their part, finish(dk, dv) of each block of keys, stacked).

  of_queries: q; of each query the log-sum-exp of its scores over all keys it sees, and <g, out>, both [B, K, G, T]; g,
  the cotangent of the output. dq, dk, dv: in float32 or wider. Others: see `over_keys`.
  """
  q, log_sum, row, g = of_queries
  wide, offset, num_queries = log_sum.dtype, at[1] - at[0], q.shape[3] // block

  def key_block(dq, j):
    k_j, v_j = _cut(k, j, block, 2), _cut(v, j, block, 2)

    def query_block(i, carry):
      dq, dk_j, dv_j = carry
      q_i, g_i = _cut(q, i, block, 3), _cut(g, i, block, 3)
      scores, mask = shape.scores(q_i, k_j), _mask(shape, block, segments, at, i, j)
      weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0) - _cut(log_sum, i, block, 3)[..., None]), 0)
      dv_j += shape.product("bkgts,bkgth->bksh", weights.astype(g.dtype), g_i, wide)
      d_weights = shape.product("bkgth,bksh->bkgts", g_i, v_j, wide)
      d_scores = weights * (d_weights - _cut(row, i, block, 3)[..., None])
      if shape.soft_cap is not None:
        d_scores = d_scores * (1 - jnp.square(scores / shape.soft_cap))
      d_scores = (d_scores * jnp.asarray(shape.scale, wide)).astype(q.dtype)
      dk_j += shape.product("bkgts,bkgth->bksh", d_scores, q_i, wide)
      dq_i = shape.product("bkgts,bksh->bkgth", d_scores, k_j, wide)
      dq = lax.dynamic_update_slice_in_dim(dq, _cut(dq, i, block, 3) + dq_i, i * block, 3)
      return dq, dk_j, dv_j

    zeros = jnp.zeros(k_j.shape, wide), jnp.zeros(v_j.shape, wide)
    first, last = jnp.clip(j + offset // block, 0, num_queries), num_queries - 1
    if shape.window is not None:  # the last block of queries that see a key of this one
      last = jnp.minimum((offset + j * block + block - 1 + shape.window - 1) // block, last)
    dq, dk_j, dv_j = lax.fori_loop(first, last + 1, query_block, (dq, *zeros))
    return dq, finish(dk_j, dv_j)

  return lax.scan(key_block, dq, jnp.arange(k.shape[2] // block))


def cotangent_rows(out, g, log_sum, sinks):
  """(<g, out> of each query, which the softmax's derivative subtracts from every score of its row; d_sinks or None)."""
  row = jnp.einsum("...h,...h->...", g, out, precision="highest", preferred_element_type=log_sum.dtype)
  return row, None if sinks is None else (-jnp.exp(sinks.astype(row.dtype) - log_sum) * row).astype(sinks.dtype)


def _backward(shape, block, residuals, g):
  q, k, v, segments, sinks, out, log_sum = residuals
  row, d_sinks = cotangent_rows(out, g, log_sum, sinks)
  of_queries, dq = (q, log_sum, row, g), jnp.zeros(q.shape, log_sum.dtype)
  finish = lambda dk, dv: (dk.astype(k.dtype), dv.astype(v.dtype))  # noqa: E731
  dq, found_N = back_over_queries(shape, block, of_queries, k, v, (segments, segments), (0, 0), dq, finish)
  dk, dv = (unblock(x, 2) for x in found_N)
  return dq.astype(q.dtype), dk, dv, autodiff.no_cotangent(segments), d_sinks


_attend = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0, 1))
