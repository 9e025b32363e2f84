"""Low-rank adapters of frozen dense layers (LoRA).

A dense layer y = x W becomes y = x W + scale (drop(x) a) b, with W frozen. Source: Hu et al., arXiv:2106.09685;
initial values and scale as in PEFT: a uniform in +-1/sqrt(d), b zero, scale alpha / r or (rsLoRA) alpha / sqrt(r).

d inputs of the dense layer, over all of its input axes *I; *O output axes; r rank; *stack axes of stacked layers.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import AdapterConfig
from maxghost.models import dense, layers


class Lora(nnx.Module):
  """scale (x a) b for x [..., *I], with Params a [d, r] and b [r, *O]; the child `lora` of a dense layer.

  kernel: of the dense layer, [*stack, *I, *O]. in_axes, out_axes: numbers of axes in I and in O. The Params have the
  kernel's dtype, but at least float32; products have the dtype of the layer.
  """

  def __init__(self, cfg: AdapterConfig, kernel: nnx.Param, in_axes: int, out_axes: int, layer: Any, key):
    self.a, self.b = params(cfg, key, kernel, in_axes, out_axes)
    self.scale, self.in_axes, self.out_axes = scale(cfg), in_axes, out_axes
    self.dtype, self.precision = layer.dtype, layer.precision

  def __call__(self, x):
    x, a, b = self.cast(x, self.a[...], self.b[...])
    return product(product(x, a, self.precision) * jnp.asarray(self.scale, x.dtype), b, self.precision)

  def cast(self, x, *matrices):
    """x [..., d], and the matrices, in the dtype of the products."""
    dtype = self.dtype or jnp.result_type(x, *matrices)
    x = x.reshape(*x.shape[: x.ndim - self.in_axes], -1)
    return x.astype(dtype), *(matrix.astype(dtype) for matrix in matrices)


def params(cfg: AdapterConfig, key, kernel: nnx.Param, in_axes: int, out_axes: int):
  """The Params (a [*stack, d, r], b [*stack, r, *O]) for a kernel [*stack, *I, *O]."""
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


def scale(cfg: AdapterConfig) -> float:
  """What an adapter's product is multiplied with."""
  return cfg.lora_alpha / (cfg.lora_rank**0.5 if cfg.lora_use_rslora else cfg.lora_rank)


def product(x, w, precision=None):
  """x [..., I] w [I, *O] -> [..., *O]."""
  return dense.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision)


# Frozen dense layers with an adapter. They have one base each, so that a layer can become one of them.


class AdaptedLinear(nnx.Linear):
  """`nnx.Linear` with an adapter."""

  lora: Lora
  lora_dropout: float

  def __call__(self, x):
    return super().__call__(x) + self.lora(dropped(x, self.lora_dropout))


class AdaptedLinearGeneral(nnx.LinearGeneral):
  """`nnx.LinearGeneral` over trailing axes with an adapter."""

  lora: Lora
  lora_dropout: float

  def __call__(self, x):
    return super().__call__(x) + self.lora(dropped(x, self.lora_dropout))


class AdaptedEinsum(nnx.Einsum):
  """`nnx.Einsum` with an adapter. lora_order: see `einsum_order`."""

  lora: Lora
  lora_dropout: float
  lora_order: tuple[tuple[int, ...], tuple[int, ...]]

  def __call__(self, x):
    before, after = self.lora_order
    return super().__call__(x) + self.lora(dropped(x, self.lora_dropout).transpose(before)).transpose(after)


def einsum_order(einsum_str: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
  """(order of x with its contracted axes last, order of [*rest, *O] as the output has it, number of contracted axes).

  The kernel's contracted axes come first, in their order. Raises ValueError for another kernel, or one with axes that
  are shared by input and output (a matrix for each of them).
  """
  inputs, _, out = einsum_str.replace(" ", "").partition("->")
  x, kernel = inputs.split(",")
  contracted = [letter for letter in kernel if letter in x and letter not in out]
  outputs = [letter for letter in kernel if letter not in x]
  if "." in einsum_str or kernel != "".join([*contracted, *outputs]) or not contracted or not outputs:
    needed = "its kernel must have the contracted axes first, then those of the output alone"
    raise ValueError(f"Einsum '{einsum_str}' takes no adapter: {needed}")
  rest = [letter for letter in x if letter not in contracted]
  before = tuple(x.index(letter) for letter in [*rest, *contracted])
  return before, tuple([*rest, *outputs].index(letter) for letter in out), len(contracted)


def dropped(x, rate: float):
  """x with a share `rate` of zeros, and the rest scaled up, where the layer that runs has a dropout key."""
  keys = layers.adapter_keys.get()
  if not rate or keys is None:
    return x
  keep = jax.random.bernoulli(next(keys), 1 - rate, x.shape)
  return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def key_of(seed: int, label: str):
  """The random key of an adapter's initial values. label: path of its layer."""
  return jax.random.fold_in(jax.random.key(seed), zlib.crc32(label.encode()))
