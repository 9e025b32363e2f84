"""Products of operands rounded to int8 or fp8, for training; gradients pass straight through the rounding.

One scale serves all entries that a sum runs over: a token's, an output's of the weight; in the product with the
transposed weight, an input's. No scale spans tokens, so that a document's gradient depends on its own tokens alone.
A weight gradient is the sum over tokens, each with a scale of its own: a float product of rounded operands.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxghost.config.validate import INT8_TERMS

# The code of the largest value. 127.5 for int8 would put it on a tie, which the last bit of its scale decides.
_FORMS = {"int8": (jnp.int8, 127.0), "e4m3": (jnp.float8_e4m3fn, 448.0), "e5m2": (jnp.float8_e5m2, 57344.0)}
PRODUCT = "rounded_product"  # by this name a remat policy keeps a product in place of its wider sums


@dataclasses.dataclass(frozen=True)
class Rounded:
  """The `precision` of products of rounded operands. kind: int8 | fp8. plain: the precision of float products.

  cotangent: the first operand is a cotangent, which fp8 holds in e5m2 and other operands in e4m3.
  """

  kind: str
  plain: Any = None
  cotangent: bool = False

  @property
  def back(self) -> "Rounded":
    return dataclasses.replace(self, cotangent=True)

  def codes(self, x, axes: tuple[int, ...], cotangent: bool = False):
    """(codes, scales in float32 or wider with length 1 along `axes`); x is about codes * scales."""
    dtype, bound = _FORMS["int8" if self.kind == "int8" else "e5m2" if cotangent else "e4m3"]
    return _codes(x, axes, dtype, bound)

  def rounded(self, x, axes: tuple[int, ...], cotangent: bool = False):
    """codes * scales, in x's dtype."""
    codes, scale = self.codes(x, axes, cotangent)
    return (codes.astype(scale.dtype) * scale).astype(x.dtype)

  def dot(self, x, w, dims, out_dtype=None):
    """As `lax.dot_general` without batch axes, of the rounded operands: sums of int8 are exact, in int32."""
    (of_x, of_w), _ = dims
    (a, a_scale), (b, b_scale) = self.codes(x, of_x, self.cotangent), self.codes(w, of_w)
    y = lax.dot_general(a, b, dims, preferred_element_type=self.sum_type(a_scale.dtype, x, of_x))
    of_rows = x.ndim - len(of_x)  # axes of the result
    a_scale = jnp.expand_dims(a_scale.squeeze(of_x), tuple(range(of_rows, y.ndim)))
    b_scale = jnp.expand_dims(b_scale.squeeze(of_w), tuple(range(of_rows)))
    return checkpoint_name((y.astype(a_scale.dtype) * a_scale * b_scale).astype(out_dtype or x.dtype), PRODUCT)

  def sum_type(self, wide, x, axes: tuple[int, ...]):
    """The dtype of sums along `axes`. Raises ValueError where they may exceed it."""
    length = math.prod(x.shape[axis] for axis in axes)
    if self.kind == "int8" and length > INT8_TERMS:
      use = "use num_vocab_tiling with vocab_tiling_axis=vocab, or quantization=fp8"
      raise ValueError(f"a sum of {length} int8 products may exceed int32, which holds {INT8_TERMS}; {use}")
    return jnp.int32 if self.kind == "int8" else wide


def _codes(x, axes, dtype, bound: float):
  wide = jnp.promote_types(x.dtype, jnp.float32)

  @jax.custom_jvp
  def run(x):
    scale = jnp.maximum(jnp.abs(x).max(axes, keepdims=True) / bound, jnp.finfo(wide).tiny)
    share = x / scale
    return jnp.clip(jnp.round(share) if dtype == jnp.int8 else share, -bound, bound).astype(dtype), scale

  @run.defjvp
  def _tangent(primals, tangents):
    raise ValueError("quantised products have no derivative beside the straight-through gradient; use quantization=''")

  return run(x.astype(wide))


def back(precision):
  """The precision of products whose first operand is a cotangent."""
  return precision.back if isinstance(precision, Rounded) else precision


def plain(precision):
  """The precision of float products."""
  return precision.plain if isinstance(precision, Rounded) else precision


def operands(precision, x, g, inputs: int = 1, outputs: int = 1):
  """The operands of a weight gradient and of its scores: x [..., *I] and the cotangent g [..., *O], rounded or as they
  are."""
  if not isinstance(precision, Rounded):
    return x, g
  axes = lambda a, count: tuple(range(a.ndim - count, a.ndim))  # noqa: E731
  return precision.rounded(x, axes(x, inputs)), precision.rounded(g, axes(g, outputs), True)
