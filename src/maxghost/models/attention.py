"""Grouped-query causal self-attention with MaxText's parameter names.

B batch, T positions, D embed dim, H query heads, K key/value heads, h head width.
"""

import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import ModelConfig
from maxghost.models import attention_ops
from maxghost.models.layers import HIDDEN, KEYS, QUERIES, linear, rms_norm
from maxghost.models.rotary import Rotary
from maxghost.parallel import constrain


class SelfAttention(nnx.Module):
  """Maps x_BTD to [B, T, D]. window: number of positions a token sees, itself included; None: all earlier ones.

  With attention_sink, the Param `sinks` [H] adds one logit without a value to each head's softmax.
  """

  def __init__(self, cfg: ModelConfig, *, window: int | None = None, rngs: nnx.Rngs):
    embed, heads, kv_heads, width = cfg.base_emb_dim, cfg.base_num_query_heads, cfg.base_num_kv_heads, cfg.head_dim
    inwards = {"rngs": rngs, "std": embed**-0.5, "use_bias": cfg.attention_bias}
    self.query = linear(cfg, embed, (heads, width), ("embed", "q_heads", "kv"), **inwards)
    self.key = linear(cfg, embed, (kv_heads, width), ("embed", "kv_heads", "kv"), **inwards)
    self.value = linear(cfg, embed, (kv_heads, width), ("embed", "kv_heads", "kv"), **inwards)
    std = (heads * width * 2 * cfg.base_num_decoder_layers) ** -0.5
    outwards = {"rngs": rngs, "std": std, "use_bias": cfg.attention_bias, "in_axes": 2}
    self.out = linear(cfg, (heads, width), embed, ("heads", "kv", "embed"), **outwards)
    self.has_qk_norm, self.has_sinks = cfg.use_qk_norm, cfg.attention_sink
    if self.has_qk_norm:
      self.query_norm = rms_norm(cfg, width, rngs=rngs)
      self.key_norm = rms_norm(cfg, width, rngs=rngs)
    if self.has_sinks:
      self.sinks = nnx.Param(jnp.zeros(heads, jnp.dtype(cfg.weight_dtype)), axes=("q_heads",))
    self.rotary = Rotary(cfg)
    self.kernel, self.window, self.soft_cap = cfg.attention, window, cfg.attn_logits_soft_cap or None

  def __call__(self, x_BTD, positions_BT, segment_ids_BT, cache=None):
    """cache: the keys and values of the positions before x, from `kv_cache`, during generation."""
    heads = self.project(x_BTD, positions_BT)
    more = {} if cache is None else {"cache": cache}
    return constrain(self.out(self.attend(*heads, segment_ids_BT, **more)), HIDDEN)

  def project(self, x_BTD, positions_BT):
    """(q_BTHh, k_BTKh, v_BTKh), normalized and rotated."""
    q_BTHh, k_BTKh = self.query(x_BTD), self.key(x_BTD)
    if self.has_qk_norm:
      q_BTHh, k_BTKh = self.query_norm(q_BTHh), self.key_norm(k_BTKh)
    q_BTHh, k_BTKh = self.rotary(q_BTHh, positions_BT), self.rotary(k_BTKh, positions_BT)
    v_BTKh = constrain(self.value(x_BTD), KEYS, "values")
    return constrain(q_BTHh, QUERIES, "queries"), constrain(k_BTKh, KEYS, "keys"), v_BTKh

  @property
  def options(self) -> dict:
    """The arguments of `attention_ops.attend` that depend on the layer alone."""
    return {"kernel": self.kernel, "window": self.window, "soft_cap": self.soft_cap}

  def attend(self, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, cache=None):
    """Output of the heads, [B, T, H, h]; the only method that uses `sinks`."""
    sinks_H = self.sinks[...] if self.has_sinks else None
    attend = attention_ops.attend if cache is None else cache.attend
    o_BTHh = attend(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, sinks_H=sinks_H, **self.options)
    return constrain(o_BTHh, QUERIES, "attention output")
