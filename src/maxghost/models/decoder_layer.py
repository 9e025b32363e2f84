"""One pre-norm transformer layer of plain nnx modules with MaxText's parameter names.

B batch, T positions, D embed dim, H query heads, K key/value heads, h head width, F feed-forward width.
Each Param carries `axes`, its logical axis names; nothing here mentions a mesh.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import ModelConfig
from maxghost.models import attention_ops, autodiff, dense, rotary
from maxghost.parallel import constrain

# Logical axes of activations: hidden states, the heads of queries, of keys and values, and the feed-forward width.
HIDDEN = ("activation_batch", "activation_length", "activation_embed")
QUERIES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
KEYS = ("activation_batch", "activation_kv_length", "activation_kv_heads", "activation_kv")
FEED_FORWARD = ("activation_batch", "activation_length", "activation_mlp")

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "linear": lambda x: x}


def linear(cfg: ModelConfig, in_features, out_features, axes, *, rngs: nnx.Rngs, std: float, in_axes=1) -> nnx.Module:
  """A bias-free dense layer over the trailing `in_axes` axes, normal weights of deviation `std`, logical `axes`."""
  return nnx.LinearGeneral(
    in_features,
    out_features,
    axis=tuple(range(-in_axes, 0)),
    use_bias=False,
    dtype=jnp.dtype(cfg.dtype),
    param_dtype=jnp.dtype(cfg.weight_dtype),
    kernel_init=nnx.initializers.normal(std),
    precision=precision(cfg),
    dot_general=dense.dot_general,
    rngs=rngs,
    kernel_metadata={"axes": axes},
  )


def precision(cfg: ModelConfig):
  return None if cfg.matmul_precision == "default" else cfg.matmul_precision


def rms_norm(cfg: ModelConfig, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
  return nnx.RMSNorm(
    cfg.base_emb_dim,
    epsilon=cfg.normalization_layer_epsilon,
    dtype=jnp.dtype(cfg.dtype),
    param_dtype=jnp.dtype(cfg.weight_dtype),
    rngs=rngs,
    scale_metadata={"axes": ("norm",)},
  )


class SelfAttention(nnx.Module):
  """Grouped-query causal self-attention with rotary positions. x_BTD -> [B, T, D]."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    embed, heads, kv_heads, width = cfg.base_emb_dim, cfg.base_num_query_heads, cfg.base_num_kv_heads, cfg.head_dim
    std = embed**-0.5
    self.query = linear(cfg, embed, (heads, width), ("embed", "q_heads", "kv"), rngs=rngs, std=std)
    self.key = linear(cfg, embed, (kv_heads, width), ("embed", "kv_heads", "kv"), rngs=rngs, std=std)
    self.value = linear(cfg, embed, (kv_heads, width), ("embed", "kv_heads", "kv"), rngs=rngs, std=std)
    out_std = (heads * width * 2 * cfg.base_num_decoder_layers) ** -0.5
    self.out = linear(cfg, (heads, width), embed, ("heads", "kv", "embed"), rngs=rngs, std=out_std, in_axes=2)
    self.max_timescale = cfg.rope_max_timescale
    self.kernel = cfg.attention

  def __call__(self, x_BTD, positions_BT, segment_ids_BT):
    q_BTHh = constrain(rotary.rotate(self.query(x_BTD), positions_BT, self.max_timescale), QUERIES, "queries")
    k_BTKh = constrain(rotary.rotate(self.key(x_BTD), positions_BT, self.max_timescale), KEYS, "keys")
    v_BTKh = constrain(self.value(x_BTD), KEYS, "values")
    o_BTHh = attention_ops.attend(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, kernel=self.kernel)
    return constrain(self.out(constrain(o_BTHh, QUERIES, "attention output")), HIDDEN)


class GatedMlp(nnx.Module):
  """wo(act_0(wi_0 x) * act_1(wi_1 x) ...). x_BTD -> [B, T, D]. Source: Shazeer, arXiv:2002.05202."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    embed, width = cfg.base_emb_dim, cfg.base_mlp_dim
    for i in range(len(cfg.mlp_activations)):
      setattr(self, f"wi_{i}", linear(cfg, embed, width, ("embed", "mlp"), rngs=rngs, std=embed**-0.5))
    out_std = (width * 2 * cfg.base_num_decoder_layers) ** -0.5
    self.wo = linear(cfg, width, embed, ("mlp", "embed"), rngs=rngs, std=out_std)
    self.activations = cfg.mlp_activations

  def __call__(self, x_BTD):
    h_BTF = None
    for i, name in enumerate(self.activations):
      branch_BTF = _ACTIVATIONS[name](getattr(self, f"wi_{i}")(x_BTD))
      h_BTF = branch_BTF if h_BTF is None else h_BTF * branch_BTF
    return constrain(self.wo(constrain(h_BTF, FEED_FORWARD, "feed-forward")), HIDDEN)


class DecoderLayer(nnx.Module):
  """x + attention(norm x), then x + mlp(norm x). x_BTD -> [B, T, D]."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.pre_self_attention_layer_norm = rms_norm(cfg, rngs=rngs)
    self.self_attention = SelfAttention(cfg, rngs=rngs)
    self.post_self_attention_layer_norm = rms_norm(cfg, rngs=rngs)
    self.mlp = GatedMlp(cfg, rngs=rngs)
    self.dropout = nnx.Dropout(cfg.dropout_rate)

  def __call__(self, x_BTD, positions_BT, segment_ids_BT, dropout_key=None):
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    y_BTD = self.self_attention(
      self.pre_self_attention_layer_norm(autodiff.branch(x_BTD)), positions_BT, segment_ids_BT
    )
    x_BTD = x_BTD + self._drop(y_BTD, keys[0])
    y_BTD = self.mlp(self.post_self_attention_layer_norm(autodiff.branch(x_BTD)))
    return x_BTD + self._drop(y_BTD, keys[1])

  def _drop(self, x_BTD, key):
    return x_BTD if key is None else self.dropout(x_BTD, deterministic=False, rngs=key)
