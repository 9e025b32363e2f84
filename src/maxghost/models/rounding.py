"""Products of operands rounded to int8 or fp8, for training; gradients pass straight through the rounding.

One scale serves all entries that a sum runs over: a token's, an output's of the weight; in the product with the
transposed weight, an input's. No scale spans tokens, so that a document's gradient depends on its own tokens alone.
A weight gradient is the sum over tokens, each with a scale of its own: a float product of rounded operands.

Stochastic rounding of cotangents takes one of the two neighbours of a number, such that the mean is the number. Its
draw is a hash of the signs and exponents of the token's cotangent, without a key or a counter: the same wherever and
whenever the cotangent is formed (recomputed, on another mesh, after a restart), and another one after every update.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxghost.config.validate import INT8_TERMS

# The code of the largest value. 127.5 for int8 would put it on a tie, which the last bit of its scale decides.
_FORMS = {"int8": (jnp.int8, 127.0), "e4m3": (jnp.float8_e4m3fn, 448.0), "e5m2": (jnp.float8_e5m2, 57344.0)}
PRODUCT = "rounded_product"  # by this name a remat policy keeps a product in place of its wider sums


@dataclasses.dataclass(frozen=True)
class Rounded:
  """The `precision` of products of rounded operands. kind: int8 | fp8. plain: the precision of float products.

  cotangent: the first operand is a cotangent, which fp8 holds in e5m2 and other operands in e4m3. stochastic: how
  cotangents are rounded. inputs, outputs: inside `jax.shard_map`, the mesh axes that divide the weight's inputs or
  outputs, of which there is one axis then.
  """

  kind: str
  plain: Any = None
  cotangent: bool = False
  stochastic: bool = False
  inputs: tuple[str, ...] = ()
  outputs: tuple[str, ...] = ()

  @property
  def divided(self) -> tuple[str, ...]:
    """The mesh axes that divide the sums of a product."""
    return self.outputs if self.cotangent else self.inputs

  def codes(self, x, axes: tuple[int, ...], cotangent: bool = False, divided: tuple[str, ...] = ()):
    """(codes, scales in float32 or wider with length 1 along `axes`, which the mesh axes `divided` divide); x is about
    codes * scales."""
    dtype, bound = _FORMS["int8" if self.kind == "int8" else "e5m2" if cotangent else "e4m3"]
    wide, stochastic = jnp.promote_types(x.dtype, jnp.float32), cotangent and self.stochastic

    @jax.custom_jvp
    def run(x):
      largest = jnp.abs(x).max(axes, keepdims=True)
      least = jnp.finfo(wide).tiny * (2.0**32 if stochastic else 1)  # XLA makes x / scale / step x / (scale * step)
      scale = jnp.maximum((lax.pmax(largest, divided) if divided else largest) / bound, least)
      share = x / scale
      if stochastic:
        share = _drawn(share, axes, dtype, bound, divided)
      elif dtype == jnp.int8:
        share = jnp.round(share)
      return jnp.clip(share, -bound, bound).astype(dtype), scale

    @run.defjvp
    def _tangent(primals, tangents):
      has = "quantised products have no derivative beside the straight-through gradient"
      raise ValueError(f"{has}; use quantization=''")

    return run(x.astype(wide))

  def rounded(self, x, axes: tuple[int, ...], cotangent: bool = False, divided: tuple[str, ...] = ()):
    """codes * scales, in x's dtype."""
    codes, scale = self.codes(x, axes, cotangent, divided)
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


def _drawn(share, axes, dtype, bound: float, divided):
  """Each number rounded to a neighbour below or above among those of `dtype`, with its own mean."""
  number = jnp.zeros(share.shape, jnp.uint32)
  for axis in axes:
    number = number * np.uint32(share.shape[axis]) + lax.broadcasted_iota(jnp.uint32, share.shape, axis)
  if divided:
    number += lax.axis_index(divided).astype(jnp.uint32) * np.uint32(share.shape[axes[-1]])
  facts, kind = jnp.finfo(share.dtype), jnp.dtype(f"int{share.dtype.itemsize * 8}")
  exponent = lax.bitcast_convert_type(jnp.maximum(jnp.abs(share), 2.0**-20), kind) >> facts.nmant
  # Another order of a sum changes the last bits of a cotangent; exponents up to 2**-16 of the largest hardly change.
  octave = jnp.maximum(exponent - (facts.maxexp + math.frexp(bound)[1] - 18), 0)
  feature = 2 * octave + ((octave > 0) & (share > 0))
  key = _mixed(number + 1)
  seed = (feature.astype(jnp.uint32) * (key | 1)).sum(axes, keepdims=True, dtype=jnp.uint32)
  seed = lax.psum(seed, divided) if divided else seed
  uniform = (_mixed(key ^ _mixed(seed)) >> 8).astype(share.dtype) * 2.0**-24  # [0, 1)
  if dtype == jnp.int8:
    return jnp.floor(share + uniform)
  own = jnp.finfo(dtype)  # numbers below the least normal one have its steps
  step = jnp.maximum(lax.bitcast_convert_type(exponent << facts.nmant, share.dtype), float(own.tiny)) * 2.0**-own.nmant
  return jnp.floor(share / step + uniform) * step


def _mixed(x):
  """A permutation of uint32 in which every input bit changes about half of the output bits: the end of MurmurHash3."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def back(precision):
  """The precision of products whose first operand is a cotangent."""
  return dataclasses.replace(precision, cotangent=True) if isinstance(precision, Rounded) else precision


def plain(precision):
  """The precision of float products."""
  return precision.plain if isinstance(precision, Rounded) else precision


def operands(precision, x, g, inputs: int = 1, outputs: int = 1):
  """The operands, rounded or not, of a weight gradient and its scores: x [..., *I] and the cotangent g [..., *O]."""
  if not isinstance(precision, Rounded):
    return x, g
  axes = lambda a, count: tuple(range(a.ndim - count, a.ndim))  # noqa: E731
  x = precision.rounded(x, axes(x, inputs), divided=precision.inputs)
  return x, precision.rounded(g, axes(g, outputs), True, precision.outputs)
