"""Products of rows, sorted by group, with their group's matrix; the work does not depend on the number of groups.

R rows, G groups, I inputs, O outputs. `sizes_G`: rows of each group, in order; they add up to R.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxghost.models import autodiff, rounding

# Rows of one product on CPU. More rows make a product faster; fewer waste less of each group's last product.
_BLOCK, _OUTER_BLOCK = 64, 128


def grouped_matmul(x_RI, w_GIO, sizes_G, precision=None):
  """y_RO: each row times the matrix of its group. Dtype of x.

  On CPU, where XLA multiplies every row with every matrix, one product per block of rows (`_blocks`); elsewhere
  `jax.lax.ragged_dot`. Both gradients are grouped products too. Under `autodiff.forward_mode` plain `ragged_dot`.
  """
  if autodiff.in_forward_mode() and not isinstance(precision, rounding.Rounded):
    return lax.ragged_dot(x_RI, w_GIO, sizes_G, precision)
  return _grouped(precision, x_RI, w_GIO, sizes_G)


def _forward(precision, x_RI, w_GIO, sizes_G):
  return product(x_RI, w_GIO, sizes_G, precision), (x_RI, w_GIO, sizes_G)


def _backward(precision, residuals, g_RO):
  x_RI, w_GIO, sizes_G = residuals
  dx_RI = product(g_RO, w_GIO, sizes_G, rounding.back(precision), contract=2).astype(x_RI.dtype)
  dw_GIO = outer_sums(*rounding.operands(precision, x_RI, g_RO), sizes_G, rounding.plain(precision))
  return dx_RI, dw_GIO.astype(w_GIO.dtype), autodiff.no_cotangent(sizes_G)


_grouped = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0,))


def product(x_R, w_GIO, sizes_G, precision=None, dtype=None, *, contract: int = 1):
  """As `grouped_matmul`, without its backward pass; contract=2: times the transposed matrices. dtype: of the result."""
  if isinstance(precision, rounding.Rounded):
    x, x_scale = precision.codes(x_R, (1,), precision.cotangent, precision.divided)
    w, w_scale_G = precision.codes(w_GIO, (contract,), divided=precision.divided)
    y = product(x, w, sizes_G, None, precision.sum_type(x_scale.dtype, x_R, (1,)), contract=contract)
    scale_R = jnp.repeat(w_scale_G.squeeze(contract), sizes_G, axis=0, total_repeat_length=x_R.shape[0])
    scaled = (y.astype(x_scale.dtype) * x_scale * scale_R).astype(dtype or x_R.dtype)
    return checkpoint_name(scaled, rounding.PRODUCT)
  turned = lambda w: w if contract == 1 else w.swapaxes(1, 2)  # noqa: E731
  ragged = lambda x, w, sizes: lax.ragged_dot(x, turned(w), sizes, precision, dtype)  # noqa: E731
  blocks = functools.partial(_blocks, contract=contract, precision=precision, dtype=dtype)
  return _choose(blocks, ragged, (x_R, w_GIO, sizes_G))


def outer_sums(x_RI, g_RO, sizes_G, precision=None):
  """w_GIO: for each group the sum over its rows of the outer products of x and g, in float32 or wider."""
  wide = jnp.promote_types(x_RI.dtype, jnp.float32)
  rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
  ragged = functools.partial(
    lax.ragged_dot_general, ragged_dot_dimension_numbers=rows, precision=precision, preferred_element_type=wide
  )
  return _choose(functools.partial(_outer_blocks, precision=precision), ragged, (x_RI, g_RO, sizes_G))


def _choose(on_cpu, elsewhere, arguments):
  """Chooses a product of two arrays by the platform that the program is compiled for.

  `jax.vmap` becomes a loop: `ragged_dot` has no batching rule, and batched blocks would be gathers. The derivative of
  the bilinear product is given, because `jax.jvp` through a mapped `custom_vmap` does not terminate.
  """

  @jax.custom_batching.sequential_vmap
  def run(a, b, sizes_G):
    return lax.platform_dependent(a, b, sizes_G, cpu=on_cpu, default=elsewhere)

  bilinear = jax.custom_jvp(run)

  @bilinear.defjvp
  def tangent(primals, tangents):
    (a, b, sizes_G), (da, db, _) = primals, tangents
    return bilinear(a, b, sizes_G), bilinear(da, b, sizes_G) + bilinear(a, db, sizes_G)

  return bilinear(*arguments)


def _in_blocks(most: int, *arrays):
  """(rows of a block, the arrays [R, ...] with a block of padding)."""
  block = min(most, 8 * math.ceil(arrays[0].shape[0] / 8))
  return block, *(jnp.pad(x, ((0, block), (0, 0))) for x in arrays)


def _blocks(x_R, w_G, sizes_G, *, contract: int, precision, dtype):
  """By blocks of a group's rows; the last one's surplus is overwritten, or padding. contract: the axis of w, 1 or 2."""
  (block, padded), starts_G = _in_blocks(_BLOCK, x_R), jnp.cumsum(sizes_G) - sizes_G

  def group(e, out):
    w = lax.dynamic_index_in_dim(w_G, e, keepdims=False)

    def one(j, out):
      start = starts_G[e] + j * block
      x = lax.dynamic_slice_in_dim(padded, start, block)
      y = lax.dot_general(x, w, (((1,), (contract - 1,)), ((), ())), precision=precision, preferred_element_type=dtype)
      return lax.dynamic_update_slice_in_dim(out, y.astype(out.dtype), start, 0)

    return lax.fori_loop(0, -(-sizes_G[e] // block), one, out)

  out = jnp.zeros((padded.shape[0], w_G.shape[3 - contract]), dtype or x_R.dtype)
  return lax.fori_loop(0, w_G.shape[0], group, out)[: x_R.shape[0]]


def _outer_blocks(x_RI, g_RO, sizes_G, *, precision):
  (block, *padded), starts_G = _in_blocks(_OUTER_BLOCK, x_RI, g_RO), jnp.cumsum(sizes_G) - sizes_G
  wide = jnp.promote_types(x_RI.dtype, jnp.float32)

  def group(e, sums):
    def one(j, total):
      start = starts_G[e] + j * block
      x, g = (lax.dynamic_slice_in_dim(a, start, block) for a in padded)
      g = jnp.where(jnp.arange(block)[:, None] < sizes_G[e] - j * block, g, 0)
      return total + lax.dot_general(x, g, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=wide)

    total = lax.fori_loop(0, -(-sizes_G[e] // block), one, jnp.zeros(sums.shape[1:], wide))
    return lax.dynamic_update_index_in_dim(sums, total, e, 0)

  shape = (sizes_G.shape[0], x_RI.shape[1], g_RO.shape[1])
  return lax.fori_loop(0, shape[0], group, jnp.zeros(shape, wide))
