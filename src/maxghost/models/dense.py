"""The dot product behind every dense layer, of I inputs and O outputs, with a backward pass that transposes nothing."""

import jax.numpy as jnp
from jax import lax

from maxghost.models import autodiff, rounding


def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
  """`lax.dot_general` for a dense layer: the trailing axes of lhs against the leading axes of rhs.

  lhs [..., *I], rhs [*I, *O] -> [..., *O]. The backward pass forms the weight gradient directly as [*I, *O]; JAX's own
  forms [*O, *I] and transposes it, which costs more than the product on CPU. Raises ValueError for other contractions.
  """
  count = _num_contracted(lhs, dimension_numbers)
  if out_sharding is not None:
    return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)
  return _dense(count, precision, preferred_element_type, lhs, rhs)


def frozen_dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
  """As `dot_general` for a constant rhs: the backward pass does not need lhs, and the gradient of rhs is zero."""
  assert out_sharding is None, "a frozen dense layer takes no out_sharding"
  return _frozen(_num_contracted(lhs, dimension_numbers), precision, preferred_element_type, lhs, rhs)


def _num_contracted(lhs, dimension_numbers) -> int:
  """Number of contracted axes. Raises ValueError unless they are the last ones of lhs and the first ones of rhs."""
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  count = len(rhs_contract)
  trailing = tuple(range(lhs.ndim - count, lhs.ndim))
  if tuple(lhs_contract) != trailing or tuple(rhs_contract) != tuple(range(count)) or lhs_batch or rhs_batch:
    raise ValueError(f"dense dot_general contracts trailing with leading axes; got {dimension_numbers}")
  return count


def contract(x, w, count, precision=None, out_dtype=None):
  """x[..., *I] and w[*I, *O] -> [..., *O] with `count` axes in I."""
  dims = ((tuple(range(x.ndim - count, x.ndim)), tuple(range(count))), ((), ()))
  return _dot(x, w, dims, precision, out_dtype)


def contract_transposed(g, w, count, precision=None, out_dtype=None):
  """g[..., *O] and w[*I, *O] -> [..., *I]: the product with the transposed weight, without transposing it."""
  outputs = w.ndim - count
  dims = ((tuple(range(g.ndim - outputs, g.ndim)), tuple(range(count, w.ndim))), ((), ()))
  return _dot(g, w, dims, precision, out_dtype)


def _dot(x, w, dims, precision, out_dtype):
  if isinstance(precision, rounding.Rounded):
    return precision.dot(x, w, dims, out_dtype)
  return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=out_dtype)


def outer_sum(x, g, count, outputs, precision=None, out_dtype=None):
  """Sum over the leading axes of the outer products: x[..., *I], g[..., *O] -> [*I, *O], the weight gradient."""
  leading = tuple(range(x.ndim - count))
  if leading != tuple(range(g.ndim - outputs)):
    raise ValueError(f"inputs {x.shape} and cotangents {g.shape} disagree in their leading axes")
  return lax.dot_general(x, g, ((leading, leading), ((), ())), precision=precision, preferred_element_type=out_dtype)


def _forward(count, precision, out_dtype, x, w):
  return contract(x, w, count, precision, out_dtype), (x, w)


def _backward(count, precision, out_dtype, residuals, g):
  (x, w), outputs = residuals, residuals[1].ndim - count
  used = rounding.operands(precision, x, g, count, outputs)
  dw = outer_sum(*used, count, outputs, rounding.plain(precision), w.dtype)
  g, dw = autodiff.barrier(g, dw)
  return contract_transposed(g, w, count, rounding.back(precision), x.dtype), dw


def _tied_backward(precision, residuals, g):
  x, w = residuals
  x_used, g_used = rounding.operands(precision, x, g)
  dw = outer_sum(g_used, x_used, 1, 1, rounding.plain(precision), w.dtype)
  return contract(g, w, 1, rounding.back(precision), x.dtype), dw


# tied(precision, x, w): x [..., D] times the transpose of a table w [V, D].
tied = autodiff.with_backward(
  lambda precision, x, w: (contract_transposed(x, w, 1, precision), (x, w)), _tied_backward, nondiff_argnums=(0,)
)


_dense = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0, 1, 2))
_frozen = autodiff.with_backward(
  lambda count, precision, dtype, x, w: (contract(x, w, count, precision, dtype), (jnp.zeros((), x.dtype), w)),
  lambda count, precision, _, kept, g: (contract_transposed(g, kept[1], count, precision, kept[0].dtype), None),
  nondiff_argnums=(0, 1, 2),
)
