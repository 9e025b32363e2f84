"""Low-rank adapters of frozen dense layers: y = x W becomes y = x W + s (drop(x) a) b (Hu et al., arXiv:2106.09685).

As in PEFT, a begins uniform in +-1/sqrt(d) and b zero; the scale s is alpha / r.

d inputs of the dense layer, over all of its input axes *I; *O output axes; r rank; *stack axes of stacked layers.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import AdapterConfig
from maxghost.models import dense, layers


class Lora(nnx.Module):
  """scale (x a) b for x [..., *I], with Params a [d, r] and b [r, *O]; the child `lora` of a dense layer, which
  drops out a share `dropout` of x and transposes x and the product by `order`, see `einsum_order`."""

  def __init__(self, cfg: AdapterConfig, in_axes: int, out_axes: int, order: tuple, layer: Any, key):
    self.a, self.b = params(cfg, key, layer.kernel, in_axes, out_axes)
    self.scale, self.in_axes, self.out_axes = cfg.scale, in_axes, out_axes
    self.dropout, self.order = cfg.lora_dropout, order
    self.dtype, self.precision = layer.dtype, layer.precision

  def __call__(self, x):
    x, a, b = self.cast(x, self.a[...], self.b[...])
    return self._product(self._product(x, a) * jnp.asarray(self.scale, x.dtype), b)

  def cast(self, x, *matrices):
    """x [..., d], and the matrices, in the dtype of the products."""
    dtype = self.dtype or jnp.result_type(x, *matrices)
    x = x.reshape(*x.shape[: x.ndim - self.in_axes], -1)
    return x.astype(dtype), *(matrix.astype(dtype) for matrix in matrices)

  def _product(self, x, w):
    return dense.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), self.precision)


def params(cfg: AdapterConfig, key, kernel: nnx.Param, in_axes: int, out_axes: int):
  """The Params (a [*stack, d, r], b [*stack, r, *O]) for a kernel [*stack, *I, *O]; of its dtype, or float32."""
  depth, axes = kernel.ndim - in_axes - out_axes, kernel.get_metadata().get("axes")
  stack, outputs = kernel.shape[:depth], kernel.shape[depth + in_axes :]
  num_inputs = math.prod(kernel.shape[depth : depth + in_axes])
  dtype, bound = jnp.promote_types(kernel.dtype, jnp.float32), num_inputs**-0.5
  a = nnx.LoRAParam(jax.random.uniform(key, (*stack, num_inputs, cfg.lora_rank), dtype, -bound, bound))
  b = nnx.LoRAParam(jnp.zeros((*stack, cfg.lora_rank, *outputs), dtype))
  a.set_metadata(matrix=(1, 1))
  b.set_metadata(matrix=(1, out_axes))
  if axes is not None:
    a.set_metadata(axes=(*axes[:depth], axes[depth], None))
    b.set_metadata(axes=(*axes[:depth], None, *axes[depth + in_axes :]))
  return a, b


@functools.cache
def adapted(layer_type: type) -> type:
  """The class of such a layer with an adapter."""

  def call(self, x):
    z, (before, after) = dropped(x, self.lora.dropout), self.lora.order
    y = self.lora(z.transpose(before) if before else z)
    return layer_type.__call__(self, x) + (y.transpose(after) if after else y)

  return type(f"Adapted{layer_type.__name__}", (layer_type,), {"__call__": call})


def einsum_order(einsum_str: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
  """(order of x with its contracted axes last, order of [*rest, *O] as the output has it, number of contracted axes).

  Raises ValueError for a kernel with other axes than the contracted ones and then those of the output alone.
  """
  x, kernel, out = einsum_str.replace(" ", "").replace("->", ",").split(",")
  contracted = [letter for letter in kernel if letter in x and letter not in out]
  outputs = [letter for letter in kernel if letter not in x]
  rest = [letter for letter in x if letter not in contracted]
  ordered = contracted and outputs and [*kernel] == [*contracted, *outputs]
  if "." in einsum_str or not ordered or {*rest, *outputs} != {*out}:
    needed = "its kernel must have the contracted axes first, then those of the output alone"
    raise ValueError(f"Einsum '{einsum_str}' takes no adapter: {needed}")
  before = tuple(x.index(letter) for letter in [*rest, *contracted])
  return before, tuple([*rest, *outputs].index(letter) for letter in out), len(contracted)


def dropped(x, rate: float):
  """x with a share `rate` of zeros, and the rest scaled up, where the layer that runs has a dropout key."""
  keys = layers.adapter_keys.get()
  if not rate or keys is None:
    return x
  return jnp.where(jax.random.bernoulli(next(keys), 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))
