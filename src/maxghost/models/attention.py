"""Attention: causal, within a document, grouped-query, with sliding window, soft cap and sinks; and its layer.

B batch, T query positions, S key positions, D embed dim, H query heads, K key/value heads, G = H / K, h head width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config import ConfigError, ModelConfig
from maxghost.models import attention_blockwise, attention_flash, attention_ring, autodiff
from maxghost.models.layers import HIDDEN, KEYS, QUERIES, RING_KEYS, linear, norm, precision
from maxghost.models.rotary import Rotary
from maxghost.models.rounding import plain
from maxghost.parallel import shardings

KERNELS = ("autoselected", "dot_product", "blockwise", "flash")
SHORT = 1024  # up to this many positions all scores fit in memory, and computing them at once is fastest
_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static settings of an attention: scale of the scores, window, soft cap, precision; see `attend`."""

  scale: float
  window: int | None = None
  soft_cap: float | None = None
  precision: str | None = None

  def product(self, axes: str, x, y, dtype=None):
    return jnp.einsum(axes, x, y, precision=self.precision, preferred_element_type=dtype)

  def scores(self, q_BKGTh, k_BKSh):
    """Scaled and capped scores [B, K, G, T, S] in float32 or wider."""
    wide = jnp.promote_types(q_BKGTh.dtype, jnp.float32)
    scores = self.product("bkgth,bksh->bkgts", q_BKGTh, k_BKSh, wide) * jnp.asarray(self.scale, wide)
    return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

  def mask(self, positions_T, positions_S, segment_ids_BT=None, segment_ids_BS=None):
    """True where a query may see a key: bool [B or 1, T, S]."""
    distance_1TS = positions_T[None, :, None] - positions_S[None, None]
    mask = distance_1TS >= 0
    if self.window is not None:
      mask = mask & (distance_1TS < self.window)
    if segment_ids_BT is None or segment_ids_BS is None:
      return mask
    return mask & (segment_ids_BT[:, :, None] == segment_ids_BS[:, None, :])


def attend(q_BTHh, k_BSKh, v_BSKh, segment_ids_BT=None, *, kernel: str, window: int | None = None, sinks_H=None,
           soft_cap: float | None = None, scale: float | None = None, precision: str | None = None):  # fmt: skip
  """Softmax attention of each position over itself and the earlier positions of its own document; S = T.

  Args:
    segment_ids_BT: int32; positions with equal ids may attend to each other. None: one document per row.
    kernel: 'dot_product' (all scores at once); 'blockwise' (memory linear in T, on every backend; up to 1,024 positions
      run as four blocks that see only the keys up to their end; a ring of devices if a mesh splits the positions);
      'flash' (TPU: JAX's splash kernel; GPU: cuDNN; blockwise in forward mode); or 'autoselected' (`resolve_kernel`).
    window: a position sees itself and the window - 1 positions before it.
    sinks_H: a logit per head that enters the softmax without a value: [H], or [B, T, H] for a gradient per position.
    soft_cap: a score s becomes soft_cap * tanh(s / soft_cap). scale: of the scores, by default (width of q) ** -0.5.
    precision: of the products, except in kernel flash.

  Returns [B, T, H, width of v] in q's dtype; the softmax runs in float32 or wider. Raises ConfigError for an unknown
  kernel, or for what the kernel does not support.
  """
  _check(q_BTHh, k_BSKh, v_BSKh, window, soft_cap)
  num_positions = q_BTHh.shape[1]
  kernel = resolve_kernel(kernel, num_positions)
  shape = Shape(q_BTHh.shape[-1] ** -0.5 if scale is None else float(scale), window, soft_cap, precision)
  if kernel == "flash" and not autodiff.in_forward_mode():
    return attention_flash.attend(q_BTHh, k_BSKh, v_BSKh, segment_ids_BT, sinks_H, shape, shardings.platform())
  if in_ring(kernel, num_positions):
    return _around(q_BTHh, k_BSKh, v_BSKh, segment_ids_BT, sinks_H, shape)
  q_BKGTh, k_BKSh, v_BKSh, sinks_BKGT = _grouped(q_BTHh, k_BSKh, v_BSKh, sinks_H)
  operands = k_BKSh, v_BKSh, segment_ids_BT, sinks_BKGT, shape
  if kernel == "flash" or (kernel == "blockwise" and num_positions > SHORT):
    out_BKGTh = attention_blockwise.attend(q_BKGTh, *operands)
  else:
    step = -(-num_positions // _BLOCKS) if kernel == "blockwise" else num_positions
    starts = [*range(0, num_positions, step)]
    queries = jnp.split(q_BKGTh, starts[1:], axis=3)  # its derivative joins the parts; that of slices adds padded ones
    blocks = [_causal_block(q, *operands, start) for q, start in zip(queries, starts, strict=True)]
    out_BKGTh = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=3)
  return _ungrouped(out_BKGTh)


def _around(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks_H, shape: Shape):
  """`attend` where a mesh splits the positions: every device on its own, with the keys that come by."""
  layout: Any = shardings.current()
  axes = shardings.split_over(QUERIES, 1)
  size = layout.rules.parts(axes)
  ring = attention_ring.Ring.of(axes, size, q_BTHh.shape[1] // size, shape.window)

  def run(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks_H):
    q_BKGTh, k_BKTh, v_BKTh, sinks_BKGT = _grouped(q_BTHh, k_BTKh, v_BTKh, sinks_H)
    return _ungrouped(attention_ring.attend(ring, shape, q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, sinks_BKGT))

  return attention_flash.on_devices(run, layout, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks_H)


def in_ring(kernel: str, num_positions: int) -> bool:
  """Whether the keys go around a ring of devices, which have a part of the positions each."""
  return resolve_kernel(kernel, num_positions) == "blockwise" and bool(shardings.split_over(QUERIES, 1))


def resolve_kernel(kernel: str, num_positions: int) -> str:
  """Resolves 'autoselected': blockwise on CPU and for more than 1,024 positions, else dot_product."""
  if kernel not in KERNELS:
    raise ConfigError(f"attention={kernel}: use dot_product, blockwise, flash or autoselected")
  if kernel != "autoselected":
    return kernel
  if num_positions > SHORT or (shardings.platform() == "cpu" and not shardings.split_over(QUERIES, 1)):
    return "blockwise"
  return "dot_product"  # keys of short rows are gathered: a ring would send many small messages


def largest_logits(q_BTHh, k_BSKh, segment_ids_BT=None, window: int | None = None, precision: str | None = None):
  """The largest scaled score of each row and query head over what `attend` may see, without gradient: [B, H].

  Computed beside the kernels, some of which never hold scores. Positions of segment 0 are padding and do not count; a
  row of padding has 0. Float32 or wider.
  """
  q_BKGTh = jax.lax.stop_gradient(group_heads(q_BTHh, k_BSKh.shape[2]))
  k_BKSh = jax.lax.stop_gradient(k_BSKh.swapaxes(1, 2))
  shape, num_positions = Shape(q_BTHh.shape[-1] ** -0.5, window, precision=precision), q_BTHh.shape[1]
  positions_S = jnp.arange(num_positions)

  def of(q_BKGTh, positions_T, own_BT):
    mask_BTS = shape.mask(positions_T, positions_S, own_BT, segment_ids_BT)
    if own_BT is not None:
      mask_BTS = mask_BTS & (own_BT != 0)[..., None]
    return jnp.where(mask_BTS[:, None, None], shape.scores(q_BKGTh, k_BKSh), -jnp.inf).max((-2, -1))

  if num_positions <= SHORT or shardings.split_over(QUERIES, 1):
    largest_BKG = of(q_BKGTh, positions_S, segment_ids_BT)
  else:  # one query at a time

    def query(args):
      q_BKGh, position, own_B = args
      return of(q_BKGh[..., None, :], position[None], None if own_B is None else own_B[:, None])

    queries = (jnp.moveaxis(q_BKGTh, 3, 0), positions_S, None if segment_ids_BT is None else segment_ids_BT.T)
    largest_BKG = jax.lax.map(query, queries, batch_size=SHORT // 4).max(0)
  largest_BH = largest_BKG.reshape(q_BTHh.shape[0], q_BTHh.shape[2])
  return jnp.where(jnp.isfinite(largest_BH), largest_BH, 0)


def _check(q_BTHh, k_BSKh, v_BSKh, window, soft_cap) -> None:
  if q_BTHh.shape[1] != k_BSKh.shape[1] or k_BSKh.shape[:3] != v_BSKh.shape[:3]:
    raise ValueError(f"positions differ: queries {q_BTHh.shape}, keys {k_BSKh.shape}, values {v_BSKh.shape}")
  if q_BTHh.shape[2] % k_BSKh.shape[2]:
    raise ValueError(f"{q_BTHh.shape[2]} query heads are no multiple of {k_BSKh.shape[2]} key/value heads")
  if window is not None and window < 1:
    raise ValueError(f"window={window}: a position sees at least itself; use 1 or more, or None for no window")
  if soft_cap is not None and soft_cap <= 0:
    raise ValueError(f"soft_cap={soft_cap}: use a positive number, or None for no cap")


def group_heads(q_BTHh, num_kv_heads: int):
  """[B, T, H, h] -> [B, K, G, T, h]."""
  batch, positions, heads, width = q_BTHh.shape
  return q_BTHh.reshape(batch, positions, num_kv_heads, heads // num_kv_heads, width).transpose(0, 2, 3, 1, 4)


def _grouped(q_BTHh, k_BTKh, v_BTKh, sinks):
  """(q [B, K, G, T, h], k and v [B, K, T, h], sinks [H] or [B, T, H], or None, as [B, K, G, T], float32 or wider)."""
  if sinks is not None:
    sinks = jnp.broadcast_to(sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32)), q_BTHh.shape[:3])
    sinks = group_heads(sinks[..., None], k_BTKh.shape[2])[..., 0]
  return group_heads(q_BTHh, k_BTKh.shape[2]), k_BTKh.swapaxes(1, 2), v_BTKh.swapaxes(1, 2), sinks


def _ungrouped(x_BKGTh):
  """[B, K, G, T, h] -> [B, T, H, h]."""
  batch, kv_heads, groups, positions, width = x_BKGTh.shape
  return x_BKGTh.transpose(0, 3, 1, 2, 4).reshape(batch, positions, kv_heads * groups, width)


def _causal_block(q_BKGTh, k_BKSh, v_BKSh, segment_ids_BT, sinks_BKGT, shape: Shape, start: int):
  """Attention of queries, the first at position `start`, over the keys that any of them may see."""
  end = start + q_BKGTh.shape[3]
  first = 0 if shape.window is None else max(0, start - shape.window + 1)
  scores = shape.scores(q_BKGTh, k_BKSh[:, :, first:end])
  segments = (None, None) if segment_ids_BT is None else (segment_ids_BT[:, start:end], segment_ids_BT[:, first:end])
  mask_BTS = shape.mask(jnp.arange(start, end), jnp.arange(first, end), *segments)
  # Finite, so that no gradient of a masked score is NaN. A position always sees itself.
  scores = jnp.where(mask_BTS[:, None, None], scores, jnp.asarray(-0.7 * jnp.finfo(scores.dtype).max, scores.dtype))
  if sinks_BKGT is None:
    weights = jax.nn.softmax(scores, axis=-1)
  else:
    log_sum = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), sinks_BKGT[..., start:end])
    weights = jnp.exp(scores - log_sum[..., None])
  return shape.product("bkgts,bksh->bkgth", weights.astype(q_BKGTh.dtype), v_BKSh[:, :, first:end])


class SelfAttention(nnx.Module):
  """Maps x_BTD to [B, T, D]. window and the Param `sinks` [H], with attention_sink: as in `attend`."""

  def __init__(self, cfg: ModelConfig, *, window: int | None = None, rngs: nnx.Rngs):
    embed, heads, kv_heads, width = cfg.base_emb_dim, cfg.base_num_query_heads, cfg.base_num_kv_heads, cfg.head_dim
    options = {"rngs": rngs, "use_bias": cfg.attention_bias}
    std, out_std = embed**-0.5, (heads * width * 2 * cfg.base_num_decoder_layers) ** -0.5
    self.query = linear(cfg, embed, (heads, width), ("embed", "q_heads", "kv"), std=std, **options)
    self.key = linear(cfg, embed, (kv_heads, width), ("embed", "kv_heads", "kv"), std=std, **options)
    self.value = linear(cfg, embed, (kv_heads, width), ("embed", "kv_heads", "kv"), std=std, **options)
    self.out = linear(cfg, (heads, width), embed, ("heads", "kv", "embed"), std=out_std, in_axes=2, **options)
    self.has_qk_norm, self.has_sinks = cfg.use_qk_norm, cfg.attention_sink
    if self.has_qk_norm:
      self.query_norm, self.key_norm = norm(cfg, width, rngs=rngs), norm(cfg, width, rngs=rngs)
    if self.has_sinks:
      self.sinks = nnx.Param(jnp.zeros(heads, jnp.dtype(cfg.weight_dtype)), axes=("q_heads",), matrix=())
    self.rotary = Rotary(cfg)
    self.kernel, self.window, self.soft_cap = cfg.attention, window, cfg.attn_logits_soft_cap or None
    self.precision = plain(precision(cfg))

  def __call__(self, x_BTD, positions_BT, segment_ids_BT, peaks_BLH=None, cache=None):
    """(output, peaks_BLH with this layer's, see `Hidden`). cache: of earlier positions, from `serving.kv_cache`."""
    q_BTHh, k_BTKh, v_BTKh = self.project(x_BTD, positions_BT)
    more = {} if cache is None else {"cache": cache}
    if peaks_BLH is not None and cache is None:
      peaks_BH = largest_logits(q_BTHh, k_BTKh, segment_ids_BT, self.window, self.precision)
      peaks_BLH = jnp.concatenate([peaks_BLH[:, 1:], peaks_BH[:, None]], axis=1)
    return shardings.constrain(self.out(self.attend(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, **more)), HIDDEN), peaks_BLH

  def project(self, x_BTD, positions_BT):
    """(q_BTHh, k_BTKh, v_BTKh), normalized and rotated."""
    q_BTHh, k_BTKh = self.query(x_BTD), self.key(x_BTD)
    if self.has_qk_norm:
      q_BTHh, k_BTKh = self.query_norm(q_BTHh), self.key_norm(k_BTKh)
    q_BTHh, k_BTKh = self.rotary(q_BTHh, positions_BT), self.rotary(k_BTKh, positions_BT)
    axes = RING_KEYS if in_ring(self.kernel, x_BTD.shape[1]) else KEYS
    v_BTKh = shardings.constrain(self.value(x_BTD), axes, "values")
    return shardings.constrain(q_BTHh, QUERIES, "queries"), shardings.constrain(k_BTKh, axes, "keys"), v_BTKh

  @property
  def options(self) -> dict:
    """The arguments of `attend` that depend on the layer alone."""
    return {"kernel": self.kernel, "window": self.window, "soft_cap": self.soft_cap, "precision": self.precision}

  def attend(self, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, cache=None):
    """Output of the heads, [B, T, H, h]; the only method that uses `sinks`."""
    sinks_H = self.sinks[...] if self.has_sinks else None
    run = attend if cache is None else cache.attend
    o_BTHh = run(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks_H=sinks_H, **self.options)
    return shardings.constrain(o_BTHh, QUERIES, "attention output")
