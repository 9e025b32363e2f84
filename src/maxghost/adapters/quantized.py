"""Frozen matrices of a model in few bits: NF4 with double quantisation, int8 or int4, dequantised inside the product.

A matrix [d, p] is cut into blocks of t inputs of one output, each with its largest size m; t is 64, or the largest
smaller power of two that divides d. int8: the nearest multiple of m / 127. NF4 (Dettmers et al., arXiv:2305.14314): the
nearest of 16 quantiles of the normal distribution, times m; two codes in a byte. m itself is kept as its mean over the
matrix plus a multiple of s / 127 in 8 bits, s the largest difference in a block of gcd(256, p) outputs.
int4: (code - z) q for codes 0 to 15; t is 8. The step q is s 2^(-k/8), s the largest of an output, and the zero z is
(12 + 4 j) / 6; k and j below 16 lie in one byte. Pairs near the block's range are tried, for the least square error.

*stack layer axes; d inputs over all input axes; *O output axes; p outputs in all. E experts, R rows of tokens.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.adapters.lora import adapted
from maxghost.config.values import ConfigError
from maxghost.models import autodiff, dense
from maxghost.models.moe import RoutedMoe, find_split
from maxghost.models.output_head import OutputProjection, TiedTable
from maxghost.parallel.shardings import constrain, slash_path

# Source: bitsandbytes, function create_normal_map; QLoRA, appendix E.
LEVELS = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
  -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_STEPS = 127  # of an 8-bit code on each side of zero
_TILE, _BLOCK = 64, 256  # inputs in a block, and sizes of blocks with one scale
_TILE4, _LEAST_ZERO, _ZERO_STEP = 8, 12, 4  # int4: inputs in a block; zeros, in sixths: a third are codes
_TRIED = tuple(itertools.product(range(-5, 2), (-1, 0, 1)))  # steps and zeros beside those of the block's range
NAMES: dict[str, tuple[str, ...]] = {
  "int8": ("codes", "sizes"), "table": ("codes", "sizes"), "int4": ("codes", "steps", "scales"),
  "nf4": ("codes", "sizes", "size_scales", "size_means"),
}  # fmt: skip
# Values of `quantization`: the matrices of layers, and those of the vocabulary (output head; tables have a size a row).
WEIGHTS = {"int8w": ("int8", "int8"), "int4w": ("int4", "int8")}


class Frozen(nnx.Variable):
  """A part of a quantised matrix."""


def quantize(kernel, qtype: str, depth: int, in_axes: int, what: str = "a matrix") -> dict[str, Any]:
  """The parts of a kernel [*stack, *I, *O] by name (`NAMES`); floats are float32, or the kernel's float64.

  codes: int8 [*stack, d, *O], or uint8 [*stack, d / 2, *O] for nf4 and int4. sizes: m, [*stack, d / t, p]; int8 for
  nf4, with size_scales [*stack, d / t, blocks] and size_means [*stack, 1, 1]. steps: k + 16 j, uint8 [*stack, d / t,
  p], with scales: s, bfloat16 [*stack, 1, p]. Form `table`: of rows [V, D], sizes [V, 1].
  """
  wide = jnp.promote_types(kernel.dtype, jnp.float32)
  if qtype == "table":
    sizes = jnp.abs(kernel.astype(wide)).max(-1, keepdims=True)
    codes = jnp.round(kernel.astype(wide) / jnp.where(sizes == 0, 1, sizes) * _STEPS)
    return {"codes": codes.astype(jnp.int8), "sizes": sizes}
  if (inputs := math.prod(kernel.shape[depth : depth + in_axes])) % 2:
    raise ConfigError(f"{what} has {inputs} inputs, of which no two make a pair, as {qtype} holds them")
  tile = math.gcd(_TILE4 if qtype == "int4" else _TILE, inputs)
  stack, outputs = kernel.shape[:depth], kernel.shape[depth + in_axes :]
  blocks = kernel.astype(wide).reshape(*stack, -1, tile, math.prod(outputs))
  if qtype == "int4":
    scales, steps, index = _int4(blocks)
    return {"codes": _packed(index.astype(jnp.uint8), stack, outputs), "steps": steps, "scales": scales}
  sizes = jnp.abs(blocks).max(-2)
  share = blocks / jnp.where(sizes == 0, 1, sizes)[..., None, :]
  if qtype == "int8":
    return {"codes": jnp.round(share * _STEPS).astype(jnp.int8).reshape(*stack, -1, *outputs), "sizes": sizes}
  index = sum((share > jnp.asarray((a + b) / 2, wide)).astype(jnp.uint8) for a, b in itertools.pairwise(LEVELS))
  sizes = constrain(sizes, (None,) * sizes.ndim)  # whole on every device: a sum of parts would be rounded otherwise
  mean = sizes.mean((-2, -1), keepdims=True)
  rest = (sizes - mean).reshape(*sizes.shape[:-1], -1, math.gcd(_BLOCK, sizes.shape[-1]))
  scale = jnp.abs(rest).max(-1)
  rest = jnp.round(rest / jnp.where(scale == 0, 1, scale)[..., None] * _STEPS).astype(jnp.int8).reshape(sizes.shape)
  return {"codes": _packed(index, stack, outputs), "sizes": rest, "size_scales": scale, "size_means": mean}


def quantize_layers(kernel: np.ndarray, qtype: str, depth: int, in_axes: int) -> dict[str, np.ndarray]:
  """`quantize` of a kernel in host memory: the device holds one layer of a stack at a time, in float32."""
  run = functools.partial(_quantize, qtype=qtype, depth=max(depth - 1, 0), in_axes=in_axes)
  parts = [jax.device_get(run(layer)) for layer in (kernel if depth else [kernel])]
  return {name: np.stack([one[name] for one in parts]) if depth else x for name, x in parts[0].items()}


_quantize = jax.jit(quantize, static_argnames=("qtype", "depth", "in_axes"))


def _int4(blocks):
  """(scales, steps, codes 0 to 15) of blocks [..., blocks, t, p]: of the steps tried, those of least square error."""
  low, high = blocks.min(-2, keepdims=True), blocks.max(-2, keepdims=True)
  longest = (_LEAST_ZERO + 15 * _ZERO_STEP) / 6  # codes below the largest zero; there are more above the least one
  whole = jnp.maximum((high - low) / 15, jnp.maximum(high, -low) / longest)  # a step that clips nothing
  scales = whole.max(-3, keepdims=True).astype(jnp.bfloat16)
  own = jnp.floor(8 * jnp.log2(scales.astype(blocks.dtype) / jnp.maximum(whole, jnp.finfo(blocks.dtype).tiny)))

  def coded(tried):
    k = jnp.clip(own + tried[0], 0, 15).astype(jnp.uint8)
    step = scales.astype(blocks.dtype) * _fraction(k, blocks.dtype)
    step = jnp.where(step == 0, 1, step)
    j = jnp.round((45 - 3 * (low + high) / step - _LEAST_ZERO) / _ZERO_STEP) + tried[1]
    j = jnp.clip(j, 0, 15).astype(jnp.uint8)
    share, zero = blocks / step, (_LEAST_ZERO + _ZERO_STEP * j.astype(blocks.dtype)) / 6
    index = jnp.clip(jnp.round(share + zero), 0, 15)
    return k | (j << 4), index, jnp.square((index - zero - share) * step).sum(-2, keepdims=True)

  def better(best, tried):
    steps, _, error = coded(tried)
    return jax.tree.map(lambda a, b: jnp.where(error < best[-1], a, b), (steps, *tried, error), best), None

  none = jnp.zeros_like(low)
  start = none.astype(jnp.uint8), none, none, none + jnp.inf
  (_, *best, _), _ = jax.lax.scan(better, start, tuple(jnp.asarray(_TRIED, blocks.dtype).T))
  steps, index, _ = coded(best)
  return scales.squeeze(-2), steps.squeeze(-2), index


def _fraction(k, dtype):
  """2^(-k/8) for k below 16."""
  return math.prod(jnp.where((k >> i) & 1 == 1, jnp.asarray(2.0 ** -(2**i / 8), dtype), 1) for i in range(4))


def _packed(index, stack, outputs):
  """Codes below 16, two of adjacent inputs in a byte: [*stack, d / 2, *O]."""
  pairs = index.reshape(*stack, -1, 2, math.prod(outputs))
  return (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*stack, -1, *outputs)


def dequantize(parts: dict[str, Any], qtype: str, dtype, depth: int = 0):
  """The matrix [*stack, d, *O] of its parts, computed in float32 (float64 for that dtype)."""
  codes, sizes = parts["codes"], parts["scales" if qtype == "int4" else "sizes"]
  wide = jnp.promote_types(dtype, jnp.float32)
  if qtype == "table":
    return (codes.astype(wide) * (sizes.astype(wide) / _STEPS)).astype(dtype)
  stack, outputs = codes.shape[:depth], codes.shape[depth + 1 :]
  codes = codes.reshape(*stack, codes.shape[depth], -1)
  if qtype == "nf4":
    scale = parts["size_scales"].astype(wide)[..., None]
    rest = sizes.astype(wide).reshape(*scale.shape[:-1], -1) * scale / _STEPS
    sizes = parts["size_means"].astype(wide) + rest.reshape(sizes.shape)
    share = _levels(jnp.stack([codes & 15, codes >> 4], -2), wide)
  elif qtype == "int4":
    steps, sixths = parts["steps"], 6 * jnp.stack([codes & 15, codes >> 4], -2).astype(wide)
    zeros = _LEAST_ZERO + _ZERO_STEP * (steps >> 4).astype(wide)
    share = sixths.reshape(*steps.shape[:-1], -1, steps.shape[-1]) - zeros[..., None, :]
    sizes = sizes.astype(wide) * _fraction(steps & 15, wide) / 6
  else:
    sizes, share = sizes.astype(wide), codes.astype(wide) / _STEPS
  blocks = share.reshape(*sizes.shape[:-1], -1, sizes.shape[-1]) * sizes[..., None, :]
  return blocks.reshape(*stack, -1, *outputs).astype(dtype)


def _levels(index, dtype):
  """LEVELS[index], by selections: a table would be read one entry at a time."""
  found = [jnp.asarray(level, dtype) for level in LEVELS]
  for bit in range(4):
    found = [jnp.where((index >> bit) & 1 == 1, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
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


class QuantizedTable(TiedTable):
  """A table of int8 rows: codes [V, D], and a size for each row [V, 1]; it has no Param `embedding`."""

  qtype: str

  def __call__(self, inputs):
    parts = {name: jnp.take(getattr(self, name)[...], inputs, axis=0) for name in NAMES["table"]}
    return dequantize(parts, "table", self.dtype)

  def attend(self, query):
    parts: Any = self
    codes, sizes = parts.codes[...].astype(self.dtype), parts.sizes[...][:, 0]
    y = dense.contract_transposed(query.astype(self.dtype), codes, 1, None, sizes.dtype)
    return (y * jnp.expand_dims(sizes / _STEPS, tuple(range(y.ndim - 1)))).astype(self.dtype)


class QuantizedMoe(RoutedMoe):
  """`RoutedMoe` whose matrices are in few bits: Variables such as `wi_0_codes` [E, d, p] in place of Params."""

  qtype: str

  def matrix(self, params, name):
    if name in params:  # of an adapter
      return super().matrix(params, name)
    return dequantize({part: params[f"{name}_{part}"] for part in NAMES[self.qtype]}, self.qtype, self.dtype, 1)

  def experts(self, x_BTD, index_BTk, weight_BTk):
    if width := find_split(self, x_BTD.shape).width:
      said = f"{self.qtype} keeps the blocks of experts whole, but the mesh divides their width over"
      fix = "use ici_expert_parallelism, or lora_weight_qtype=bfloat16"
      raise ConfigError(f"{said} {', '.join(width)}; {fix}")
    return super().experts(x_BTD, index_BTk, weight_BTk)

  def _product(self, params, name, x_RI, rows):
    plain = super()._product  # the backward pass keeps the parts, not the matrix
    return jax.checkpoint(lambda params, x_RI: plain(params, name, x_RI, rows))(params, x_RI)


def quantize_layer(layer: Any, name: str, label: str, qtype: str) -> None:
  """Puts the parts in place of a dense layer's kernel, or of the experts' matrix `name`. Raises ConfigError for another
  layer, experts without sparse_matmul, or odd inputs."""
  made = adapted if hasattr(layer, "lora") else lambda kind: kind
  if name and not layer.sparse:
    raise ConfigError(f"lora_weight_qtype={qtype} of {label} goes with sparse_matmul=true, not false")
  if not name and type(layer) is not made(nnx.LinearGeneral):
    raise ConfigError(f"lora_weight_qtype={qtype} holds nnx.LinearGeneral layers, not {label}")
  kind = QuantizedMoe if name else made(QuantizedLinearGeneral)
  _replace(layer, name or "kernel", f"lora_weight_qtype={qtype}: {label}", qtype, kind)


def modules(model: Any) -> list[tuple[str, nnx.Module, bool]]:
  """(path, module, whether it is the router of experts) of each module."""
  found = [(slash_path(path), node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
  routers = {id(node.gate) for _, node in found if isinstance(node, RoutedMoe)}
  return [(label, node, id(node) in routers) for label, node in found]


def places(model: Any, quantization: str) -> dict[str, tuple[Any, str, str]]:
  """{label: (module, name, form)} of the Params that `quantization`, int8w or int4w, holds in few bits: those of dense
  layers, experts and vocabulary, but not of routers."""
  (layers, vocabulary), found = WEIGHTS[quantization], {}
  for label, node, is_router in modules(model):
    if isinstance(node, RoutedMoe):
      found |= {f"{label}/{name}": (node, name, layers) for name in (*node.branches, "wo")}
    elif isinstance(node, nnx.LinearGeneral) and not is_router:
      found[f"{label}/kernel"] = node, "kernel", vocabulary if isinstance(node, OutputProjection) else layers
    elif isinstance(node, nnx.Embed) and label == "token_embedder":
      found[f"{label}/embedding"] = node, "embedding", "table"
  return found


def narrow(model: Any, quantization: str) -> Any:
  """Puts the parts in place of all Params of `places`, and returns the model. Raises ConfigError for odd inputs."""
  for label, (module, name, form) in places(model, quantization).items():
    kind = QuantizedMoe if isinstance(module, RoutedMoe) else QuantizedLinearGeneral
    _replace(module, name, f"quantization={quantization}: {label}", form, QuantizedTable if form == "table" else kind)
  return model


def matrix_axes(module: Any) -> tuple[int, int]:
  """Axes of inputs and of outputs of a module's matrices; further ones number stacked layers or experts."""
  return (len(module.in_features), len(module.out_features)) if isinstance(module, nnx.LinearGeneral) else (1, 1)


def _replace(layer: Any, name: str, what: str, qtype: str, kind: type) -> None:
  """Puts the parts of a Param in its place, each under its own name; of experts behind that of the matrix."""
  kernel, (in_axes, out_axes) = getattr(layer, name), matrix_axes(layer)
  depth, axes = kernel.ndim - in_axes - out_axes, kernel.get_metadata().get("axes")
  for part, x in quantize(kernel[...], qtype, depth, in_axes, what).items():
    setattr(layer, f"{name}_{part}" if kind is QuantizedMoe else part, variable := Frozen(x))
    if axes is not None:
      whole = (*axes[: depth + 1], *axes[depth + in_axes :])
      variable.set_metadata(axes=whole if part == "codes" else (*axes[:depth], None, None))
  delattr(layer, name)
  layer.qtype = qtype
  object.__setattr__(layer, "__class__", kind)
