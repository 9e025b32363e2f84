"""One pre-norm transformer layer, or a cycle of different ones, with MaxText's parameter names.

B batch, T positions, D embed dim, F feed-forward width.
Each Param carries `axes`, its logical axis names, and `matrix`, how many of its last axes are rows and columns of a
matrix, () where they form none; nothing here mentions a mesh or an optimizer.
"""

import jax
from flax import nnx

from maxghost.config.families import FAMILIES
from maxghost.config.schema import ModelConfig
from maxghost.models import autodiff
from maxghost.models.attention import SelfAttention
from maxghost.models.layers import FEED_FORWARD, HIDDEN, Hidden, gated, keys_for_adapters, linear, norm
from maxghost.models.moe import RoutedMoe
from maxghost.parallel.shardings import constrain


class GatedMlp(nnx.Module):
  """wo(act_0(wi_0 x) * act_1(wi_1 x) ...). A single branch is called wi. Source: Shazeer, arXiv:2002.05202."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    embed, width, bias = cfg.base_emb_dim, cfg.base_mlp_dim, cfg.mlp_bias
    self.activations, self.limit = cfg.mlp_activations, cfg.mlp_activations_limit
    for name in self.branches:
      setattr(self, name, linear(cfg, embed, width, ("embed", "mlp"), rngs=rngs, std=embed**-0.5, use_bias=bias))
    out_std = (width * 2 * cfg.base_num_decoder_layers) ** -0.5
    self.wo = linear(cfg, width, embed, ("mlp", "embed"), rngs=rngs, std=out_std, use_bias=bias)

  @property
  def branches(self) -> list[str]:
    return ["wi"] if len(self.activations) == 1 else [f"wi_{i}" for i in range(len(self.activations))]

  def __call__(self, x_BTD):
    branches = autodiff.join_cotangents([getattr(self, name)(x_BTD) for name in self.branches])
    h_BTF = constrain(gated(branches, self.activations, self.limit), FEED_FORWARD, "feed-forward")
    return constrain(self.wo(h_BTF), HIDDEN)


class DecoderLayer(nnx.Module):
  """x + attention(norm x), then x + mlp(norm x). index: of the layer in its cycle."""

  def __init__(self, cfg: ModelConfig, index: int = 0, *, rngs: nnx.Rngs):
    self.routed = cfg.num_experts > 1
    family = FAMILIES[cfg.decoder_block]
    self.attention_name, self.norm_names = family.attention, family.norms
    self.mlp_name = family.experts if self.routed else family.mlp
    kind = cfg.attention_type[index % len(cfg.attention_type)]
    window = cfg.sliding_window_size if kind == "local_sliding" else None
    setattr(self, self.norm_names[0], norm(cfg, rngs=rngs))
    setattr(self, self.attention_name, SelfAttention(cfg, window=window, rngs=rngs))
    setattr(self, self.norm_names[1], norm(cfg, rngs=rngs))
    setattr(self, self.mlp_name, RoutedMoe(cfg, rngs=rngs) if self.routed else GatedMlp(cfg, rngs=rngs))
    self.dropout = nnx.Dropout(cfg.dropout_rate)

  @property
  def attention(self) -> SelfAttention:
    return getattr(self, self.attention_name)

  @property
  def feed_forward(self) -> nnx.Module:
    return getattr(self, self.mlp_name)

  def norm(self, index: int, x_BTD):
    """The norm before attention (0) or before the feed-forward layer (1)."""
    return getattr(self, self.norm_names[index])(autodiff.split_residual(x_BTD))

  def __call__(self, hidden: Hidden, positions_BT, segment_ids_BT, dropout_key=None, cache=None) -> Hidden:
    x_BTD, routing, peaks_BLH = hidden.x_BTD, hidden.routing, hidden.peaks_BLH
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    with keys_for_adapters(dropout_key):
      y_BTD, peaks_BLH = self.attention(self.norm(0, x_BTD), positions_BT, segment_ids_BT, peaks_BLH, cache)
      x_BTD = x_BTD + self._drop(y_BTD, keys[0])
      y_BTD = self.norm(1, x_BTD)
      if self.routed:
        y_BTD, routing = self.feed_forward(y_BTD, segment_ids_BT, routing)
      else:
        y_BTD = self.feed_forward(y_BTD)
    return Hidden(x_BTD + self._drop(y_BTD, keys[1]), routing, peaks_BLH)

  def _drop(self, x_BTD, key):
    return x_BTD if key is None else self.dropout(x_BTD, deterministic=False, rngs=key)


class LayerCycle(nnx.Module):
  """Different layers, `layers_0` ... `layers_(k-1)`, run in order; the unit that a stack repeats."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.num_layers = cfg.inhomogeneous_layer_cycle_interval
    for i in range(self.num_layers):
      setattr(self, f"layers_{i}", DecoderLayer(cfg, i, rngs=rngs))

  def __call__(self, hidden: Hidden, positions_BT, segment_ids_BT, dropout_key=None, cache=None) -> Hidden:
    for i in range(self.num_layers):
      key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
      hidden = getattr(self, f"layers_{i}")(hidden, positions_BT, segment_ids_BT, key, cache)
    return hidden
