"""Attention kernels that come with JAX: splash attention on TPU, cuDNN on GPU.

B batch, T positions, H query heads, K key/value heads, h head width.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from maxghost.config.values import ConfigError
from maxghost.models import attention_blockwise, autodiff
from maxghost.models.layers import QUERIES
from maxghost.parallel import shardings

_LANES = 128
_MAX_BLOCK = 512


def attend(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks, shape, platform: str):
  """As `attention.attend`; raises ConfigError, with a setting that works, for what the kernel does not support."""
  kernel = {"tpu": splash, "gpu": cudnn, "cuda": cudnn, "rocm": cudnn}.get(platform)
  if kernel is None:
    raise ConfigError(f"attention=flash has no kernel on {platform}, only on tpu and gpu; use attention=blockwise")
  return kernel(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks, shape)


def splash(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks, shape, *, interpret: bool = False):
  """JAX's splash kernel, padded to a multiple of 128 positions. interpret: run as plain operations, on any backend.

  With sinks [B, T, H] the backward pass runs the forward kernel again for the log-sum-exp of each position.
  """
  if q_BTHh.dtype == jnp.float64:
    raise ConfigError("attention=flash has no float64 on tpu; use attention=blockwise, or dtype=float32 or bfloat16")
  if sinks is not None:
    sinks = jnp.asarray(sinks, jnp.promote_types(sinks.dtype, jnp.float32))
  run = functools.partial(_splash_whole, shape, interpret)
  if (layout := shardings.across_devices()) is None:
    return run(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks)
  if shardings.split_over(QUERIES, 1):
    needs = "attention=flash needs the positions of a row on one device, but the mesh splits them"
    raise ConfigError(f"{needs}; use attention=blockwise, or ici_context_parallelism=1")
  # A Pallas kernel is opaque to the partitioner: each device runs it on its own rows and heads.
  return on_devices(run, layout, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks)


def on_devices(run, layout: shardings.Layout, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks):
  """run(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks) of each device on its part of all, with the keys of its heads,
  whatever the rules say of `activation_kv_heads`: devices that share the queries of a key get copies of it."""
  *axes, _ = layout.rules.assign(QUERIES, q_BTHh.shape, "queries")
  parts, kv_heads = layout.rules.parts(axes[2]), k_BTKh.shape[2]
  k_BTKh, v_BTKh = (jnp.repeat(x, parts // math.gcd(parts, kv_heads), axis=2) for x in (k_BTKh, v_BTKh))
  by_head = axes[-1 if sinks is None else -sinks.ndim :]
  heads, rows, by_head = map(shardings.partition_spec, (axes, axes[:2], by_head))
  mapped = shardings.mapped(run, layout.mesh, (heads, heads, heads, rows, by_head), heads)
  return mapped(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks)


def _splash_whole(shape, interpret: bool, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks):
  """The kernel on the rows and heads of one device."""
  length = q_BTHh.shape[1]
  padding = -length % _LANES
  q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q_BTHh, k_BTKh, v_BTKh))
  q, k, v = (x.swapaxes(1, 2) for x in (q * jnp.asarray(shape.scale, q.dtype), k, v))
  segments = None if segment_ids_BT is None else jnp.pad(segment_ids_BT, ((0, 0), (0, padding)))
  run = _splash
  if sinks is not None and sinks.ndim > 1:
    run, sinks = _splash_with_sinks, jnp.pad(sinks, ((0, 0), (0, padding), (0, 0)), mode="edge")
  return run(shape, interpret, q, k, v, segments, sinks).swapaxes(1, 2)[:, :length]


def _splash(shape, interpret: bool, q_BHTh, k_BKTh, v_BKTh, segments_BT, sinks_H, save_residuals: bool = False) -> Any:
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  _, heads, length, _ = q_BHTh.shape
  square = length, length
  mask = lib.CausalMask(square) if shape.window is None else lib.LocalMask(square, (shape.window - 1, 0), 0)
  block = next(size for size in (_MAX_BLOCK, 256, _LANES) if length % size == 0)
  # Unfused, because the fused backward kernel holds one dq for every block of keys.
  sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
  kernel = lib.make_splash_mha(
    lib.MultiHeadMask([mask] * heads), block_sizes=lib.BlockSizes(**dict.fromkeys(sizes, block)), head_shards=1,
    q_seq_shards=1, attn_logits_soft_cap=shape.soft_cap, save_residuals=save_residuals, interpret=interpret,
  )  # fmt: skip

  def one(q, k, v, segments):
    return kernel(q, k, v, None if segments is None else lib.SegmentIds(segments, segments), sinks_H)

  return jax.vmap(one, (0, 0, 0, None if segments_BT is None else 0))(q_BHTh, k_BKTh, v_BKTh, segments_BT)


def _forward(shape, interpret, q, k, v, segments, sinks_BTH):
  # The kernel takes one sink per head: all positions of a head hold the same value, only their gradients differ.
  out, (log_sum_BHT,) = _splash(shape, interpret, q, k, v, segments, sinks_BTH[0, 0], save_residuals=True)
  return out, (q, k, v, segments, sinks_BTH, out, log_sum_BHT)


def _backward(shape, interpret, residuals, g):
  q, k, v, segments, sinks_BTH, out, log_sum_BHT = residuals
  _, pull = jax.vjp(lambda q, k, v: _splash(shape, interpret, q, k, v, segments, sinks_BTH[0, 0]), q, k, v)
  d_sinks_BHT: Any = attention_blockwise.cotangent_rows(out, g, log_sum_BHT, sinks_BTH.swapaxes(1, 2))[1]
  d_segments = None if segments is None else autodiff.no_cotangent(segments)
  return *pull(g), d_segments, d_sinks_BHT.swapaxes(1, 2)


_splash_with_sinks = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0, 1))


def cudnn(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks, shape, *, implementation: Literal["cudnn", "xla"] = "cudnn"):
  """cuDNN's fused kernel through `jax.nn.dot_product_attention`; implementation 'xla' computes the same without it.

  Segment ids become a mask of B T^2 elements, so memory for packed rows is quadratic in T.
  """
  if (dtype := q_BTHh.dtype) not in (jnp.bfloat16, jnp.float16):
    fix = "use dtype=bfloat16, or attention=blockwise"
    raise ConfigError(f"attention=flash computes in bfloat16 on gpu, not {dtype}; {fix}")
  length, width = q_BTHh.shape[1], q_BTHh.shape[-1]
  if width % 8 or width > 256:
    said = f"attention=flash on gpu needs a head_dim that is a multiple of 8 and at most 256; head_dim={width}"
    raise ConfigError(f"{said}: use head_dim={min(256, max(8, 8 * round(width / 8)))}, or attention=blockwise")
  for name, value in (("soft cap", shape.soft_cap), ("sinks", sinks)):
    if value is not None:
      raise ConfigError(f"attention=flash has no {name} on gpu; use attention=blockwise")
  options: Any = {"scale": shape.scale, "is_causal": True, "implementation": implementation}
  if segment_ids_BT is not None:
    if length % 2:
      said = f"attention=flash on gpu needs an even number of positions for packed rows; max_target_length={length}"
      raise ConfigError(f"{said}: use max_target_length={length + 1}, or attention=blockwise")
    options["mask"] = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
  if shape.window is not None:
    options["local_window_size"] = (shape.window - 1, 0)
  try:
    return jax.nn.dot_product_attention(q_BTHh, k_BTKh, v_BTKh, **options)
  except (NotImplementedError, RuntimeError) as error:  # what this GPU or its cuDNN cannot do
    raise ConfigError(f"attention=flash: {error}; use attention=blockwise") from error
