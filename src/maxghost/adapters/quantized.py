"""Frozen matrices of a model in few bits: NF4 with double quantisation, or int8, dequantised inside the product.

A matrix [d, p] is cut into blocks of t inputs of one output, each with its largest size m; t is 64, or the largest
smaller power of two that divides d. int8: the nearest multiple of m / 127. NF4 (Dettmers et al., arXiv:2305.14314): the
nearest of 16 quantiles of the normal distribution, times m; two codes in a byte. m itself is kept as its mean over the
matrix plus a multiple of s / 127 in 8 bits, s the largest difference in a block of gcd(256, p) outputs.

*stack layer axes; d inputs over all input axes; *O output axes; p outputs in all. E experts, R rows of tokens.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.adapters.lora import adapted
from maxghost.config.values import ConfigError
from maxghost.models import autodiff, dense
from maxghost.models.moe import RoutedMoe, find_split

# Source: bitsandbytes, function create_normal_map; QLoRA, appendix E.
LEVELS = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
  -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_STEPS = 127  # of an 8-bit code on each side of zero
_TILE, _BLOCK = 64, 256  # inputs in a block, and sizes of blocks with one scale
NAMES = {"int8": ("codes", "sizes"), "nf4": ("codes", "sizes", "size_scales", "size_means")}


class Frozen(nnx.Variable):
  """A part of a quantised matrix."""


def quantize(kernel, qtype: str, depth: int, in_axes: int) -> dict[str, Any]:
  """The parts of a kernel [*stack, *I, *O] by name (`NAMES`); floats are float32, or the kernel's float64.

  codes: int8 [*stack, d, *O], or uint8 [*stack, d / 2, *O] for nf4. sizes: m, [*stack, d / t, p]; int8 for nf4, with
  size_scales [*stack, d / t, blocks] and size_means [*stack, 1, 1].
  """
  tile = math.gcd(_TILE, math.prod(kernel.shape[depth : depth + in_axes]))
  stack, outputs = kernel.shape[:depth], kernel.shape[depth + in_axes :]
  wide = jnp.promote_types(kernel.dtype, jnp.float32)
  blocks = kernel.astype(wide).reshape(*stack, -1, tile, math.prod(outputs))
  sizes = jnp.abs(blocks).max(-2)
  share = blocks / jnp.where(sizes == 0, 1, sizes)[..., None, :]
  if qtype == "int8":
    return {"codes": jnp.round(share * _STEPS).astype(jnp.int8).reshape(*stack, -1, *outputs), "sizes": sizes}
  index = jnp.zeros(share.shape, jnp.uint8)
  for below, above in itertools.pairwise(LEVELS):
    index = index + (share > jnp.asarray((below + above) / 2, wide)).astype(jnp.uint8)
  pairs = index.reshape(*stack, -1, 2, math.prod(outputs))
  mean = sizes.mean((-2, -1), keepdims=True)
  rest = (sizes - mean).reshape(*sizes.shape[:-1], -1, math.gcd(_BLOCK, sizes.shape[-1]))
  scale = jnp.abs(rest).max(-1)
  rest = jnp.round(rest / jnp.where(scale == 0, 1, scale)[..., None] * _STEPS).astype(jnp.int8).reshape(sizes.shape)
  codes = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*stack, -1, *outputs)
  return {"codes": codes, "sizes": rest, "size_scales": scale, "size_means": mean}


def dequantize(parts: dict[str, Any], qtype: str, dtype, depth: int = 0):
  """The matrix [*stack, d, *O] of its parts, computed in float32 (float64 for that dtype)."""
  codes, sizes, wide = parts["codes"], parts["sizes"], jnp.promote_types(dtype, jnp.float32)
  stack, outputs = codes.shape[:depth], codes.shape[depth + 1 :]
  codes = codes.reshape(*stack, codes.shape[depth], -1)
  if qtype == "nf4":
    scale = parts["size_scales"].astype(wide)[..., None]
    rest = sizes.astype(wide).reshape(*scale.shape[:-1], -1) * scale / _STEPS
    sizes = parts["size_means"].astype(wide) + rest.reshape(sizes.shape)
    share = _levels(jnp.stack([codes & 15, codes >> 4], -2), wide)
  else:
    sizes, share = sizes.astype(wide), codes.astype(wide) / _STEPS
  blocks = share.reshape(*sizes.shape[:-1], -1, sizes.shape[-1]) * sizes[..., None, :]
  return blocks.reshape(*stack, -1, *outputs).astype(dtype)


def _levels(index, dtype):
  """LEVELS[index], by selections: a table would be read one entry at a time."""
  found = [jnp.asarray(level, dtype) for level in LEVELS]
  for bit in range(4):
    high = (index >> bit) & 1 == 1
    found = [jnp.where(high, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
  return found[0]


def _forward(qtype, precision, x, parts):
  return dense.contract(x, dequantize(parts, qtype, x.dtype), 1, precision), (jnp.zeros((), x.dtype), parts)


def _backward(qtype, precision, kept, g):
  return dense.contract_transposed(g, dequantize(kept[1], qtype, kept[0].dtype), 1, precision), None


# x [..., d] times the matrix of the parts. The backward pass keeps the parts, not the matrix.
product = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0, 1))


class QuantizedLinearGeneral(nnx.LinearGeneral):
  """`nnx.LinearGeneral` over trailing axes whose kernel is in few bits; it has no Param `kernel`."""

  qtype: str

  def __call__(self, x):
    dtype, parts = self.dtype or x.dtype, {name: getattr(self, name)[...] for name in NAMES[self.qtype]}
    x = x.reshape(*x.shape[: x.ndim - len(self.in_features)], -1)
    y = product(self.qtype, self.precision, x.astype(dtype), parts)
    if self.bias is None:
      return y
    return y + jnp.expand_dims(self.bias[...].astype(dtype), tuple(range(y.ndim - len(self.out_features))))


class QuantizedMoe(RoutedMoe):
  """`RoutedMoe` whose matrices are in few bits: Variables such as `wi_0_codes` [E, d, p] in place of Params."""

  qtype: str

  def matrix(self, params, name):
    if name in params:  # of an adapter
      return super().matrix(params, name)
    parts = {part: params[f"{name}_{part}"] for part in NAMES[self.qtype]}
    return dequantize(parts, self.qtype, self.dtype, 1)

  def experts(self, x_BTD, index_BTk, weight_BTk):
    split = find_split(self, x_BTD.shape)
    if split is not None and split.width:
      raise ConfigError(
        f"lora_weight_qtype={self.qtype} keeps the blocks of experts whole, but the mesh divides their width over "
        f"{', '.join(split.width)}; use lora_weight_qtype=bfloat16, or ici_expert_parallelism"
      )
    return super().experts(x_BTD, index_BTk, weight_BTk)

  def _product(self, params, name, x_RI, rows):
    plain = super()._product  # the backward pass keeps the parts, not the matrix
    return jax.checkpoint(lambda params, x_RI: plain(params, name, x_RI, rows))(params, x_RI)


def quantize_layer(layer: Any, label: str, qtype: str) -> None:
  """Puts the parts in place of a dense layer's kernel. Raises ConfigError for another layer, or odd inputs."""
  plain, has_adapter = nnx.LinearGeneral, hasattr(layer, "lora")
  if type(layer) is not (adapted(plain) if has_adapter else plain):
    raise ConfigError(f"lora_weight_qtype={qtype} holds nnx.LinearGeneral layers, not {label}")
  _replace(layer, "kernel", label, qtype, len(layer.in_features), len(layer.out_features))
  object.__setattr__(layer, "__class__", adapted(QuantizedLinearGeneral) if has_adapter else QuantizedLinearGeneral)


def quantize_experts(module: RoutedMoe, name: str, label: str, qtype: str) -> None:
  """Puts the parts in place of one of the experts' matrices. Raises ConfigError as `quantize_layer`."""
  if not module.sparse:
    raise ConfigError(f"lora_weight_qtype={qtype} of {label} goes with sparse_matmul=true, not false")
  _replace(module, name, label, qtype, 1, 1, f"{name}_")
  object.__setattr__(module, "__class__", QuantizedMoe)


def _replace(layer: Any, name: str, label: str, qtype: str, in_axes: int, out_axes: int, prefix: str = "") -> None:
  """Puts the parts of a Param in its place, each under `prefix` and its own name."""
  kernel = getattr(layer, name)
  depth, axes = kernel.ndim - in_axes - out_axes, kernel.get_metadata().get("axes")
  if (inputs := math.prod(kernel.shape[depth : depth + in_axes])) % 2:
    raise ConfigError(f"lora_weight_qtype={qtype}: {label} has {inputs} inputs, of which no two make a pair")
  for part, x in quantize(kernel[...], qtype, depth, in_axes).items():
    setattr(layer, prefix + part, variable := Frozen(x))
    if axes is not None:
      whole = (*axes[: depth + 1], *axes[depth + in_axes :])
      variable.set_metadata(axes=whole if part == "codes" else (*axes[:depth], None, None))
  delattr(layer, name)
  layer.qtype = qtype
