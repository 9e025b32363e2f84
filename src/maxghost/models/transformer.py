"""The decoder-only transformer: embedding, layers, output head.

B batch, T positions, D embed dim, V vocabulary, L layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import Config, ModelConfig
from maxghost.models import moe, stack
from maxghost.models.decoder_layer import DecoderLayer, LayerCycle
from maxghost.models.layers import HIDDEN, Hidden, dtypes, linear, norm, precision
from maxghost.models.multi_token import MultiTokenBlock
from maxghost.models.output_head import OutputHead, OutputProjection, TiedTable
from maxghost.parallel.shardings import constrain


class Decoder(nnx.Module):
  """Learned positions (optional), layers, final norm and, unless tied, the output projection."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    cycle = cfg.inhomogeneous_layer_cycle_interval
    self.num_layers = cfg.base_num_decoder_layers // cycle if cfg.scan_layers else cfg.base_num_decoder_layers
    self.scan_layers, self.remat_policy, self.segment_lengths = cfg.scan_layers, cfg.remat_policy, cfg.stacked_segments
    if cfg.scan_layers:
      make_layer = DecoderLayer if cycle == 1 else LayerCycle
      self.layers = stack.create(lambda r: make_layer(cfg, rngs=r), self.num_layers, rngs)
    else:
      for i in range(self.num_layers):
        setattr(self, f"layers_{i}", DecoderLayer(cfg, i % cycle, rngs=rngs))
    self.decoder_norm, self.quantize_kvcache = norm(cfg, rngs=rngs), cfg.quantize_kvcache
    self.has_positions = cfg.trainable_position_size > 0
    if self.has_positions:
      self.position_embedder = embedding(cfg, cfg.trainable_position_size, (None, "embed"), std=0.02, rngs=rngs)
    if not cfg.logits_via_embedding:
      options = {"std": cfg.base_emb_dim**-0.5, "layer_type": OutputProjection, "matrix": ()}
      self.logits_dense = linear(cfg, cfg.base_emb_dim, cfg.vocab_size, ("embed", "vocab"), rngs=rngs, **options)

  def __call__(self, hidden: Hidden, positions_BT, segment_ids_BT, dropout_key=None) -> Hidden:
    """Runs the input of the first layer through all layers."""
    if self.scan_layers:
      options: Any = {"remat_policy": self.remat_policy, "segment_lengths": self.segment_lengths}
      return stack.run(self.layers, hidden, (positions_BT, segment_ids_BT), dropout_key=dropout_key, **options)
    for i in range(self.num_layers):
      key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
      arguments = hidden, positions_BT, segment_ids_BT, key
      hidden = stack.run_once(getattr(self, f"layers_{i}"), self.remat_policy, *arguments)
    return hidden


def embedding(cfg: ModelConfig, num_rows: int, axes, *, std: float, rngs: nnx.Rngs, layer_type=nnx.Embed) -> nnx.Embed:
  options = {"embedding_init": nnx.initializers.normal(std), "embedding_metadata": {"axes": axes, "matrix": ()}}
  return layer_type(num_rows, cfg.base_emb_dim, rngs=rngs, **dtypes(cfg), **options)


class Transformer(nnx.Module):
  """`model(tokens_BT, positions=None, segment_ids=None, dropout_key=None)` -> logits [B, T, V], float32 or wider.

  positions default to 0..T-1; positions with equal segment ids attend to each other; dropout acts only when a key is
  given. mtp_block: the modules of multi-token prediction, which only the loss calls, or None.
  """

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.tied = cfg.logits_via_embedding
    std, kind = (cfg.base_emb_dim**-0.5, TiedTable) if self.tied else (1.0, nnx.Embed)
    self.token_embedder: Any = embedding(cfg, cfg.vocab_size, ("vocab", "embed"), std=std, rngs=rngs, layer_type=kind)
    self.token_embedder.precision = precision(cfg)  # of a tied table
    self.decoder = Decoder(cfg, rngs=rngs)
    self.num_experts, self.dtype = cfg.num_experts, jnp.dtype(cfg.dtype)
    self.soft_cap = cfg.final_logits_soft_cap
    self.mtp_block = MultiTokenBlock(cfg, rngs=rngs) if cfg.mtp_num_layers else None
    self.peaks = (cfg.base_num_decoder_layers, cfg.base_num_query_heads) if cfg.use_qk_clip else None

  @property
  def head(self) -> OutputHead:
    """The output head, built from this model's own layers."""
    projection: Any = self.token_embedder if self.tied else self.decoder.logits_dense
    return OutputHead(self.decoder.decoder_norm, projection, self.soft_cap)

  def __call__(self, tokens_BT, positions=None, segment_ids=None, dropout_key=None):
    return self.logits(self.hidden(tokens_BT, positions, segment_ids, dropout_key))

  def hidden(self, tokens_BT, positions_BT=None, segment_ids_BT=None, dropout_key=None) -> Hidden:
    """Output of the last layer, before the final norm."""
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    embedded = self.embed(tokens_BT, positions_BT)
    hidden = self.decoder(embedded, positions_BT, segment_ids_BT, dropout_key)
    return hidden if self.mtp_block is None else dataclasses.replace(hidden, embedded_BTD=embedded.x_BTD)

  def embed(self, tokens_BT, positions_BT) -> Hidden:
    """Input of the first layer."""
    x_BTD = self.token_embedder(tokens_BT)
    if self.decoder.has_positions:
      x_BTD = x_BTD + self.decoder.position_embedder(positions_BT)
    x_BTD = constrain(x_BTD, HIDDEN)
    routing = moe.no_routing(self.num_experts, tokens_BT.shape, self.dtype) if self.num_experts > 1 else None
    peaks_BLH = None
    if self.peaks:
      peaks_BLH = jnp.zeros((tokens_BT.shape[0], *self.peaks), jnp.promote_types(self.dtype, jnp.float32))
      peaks_BLH = constrain(peaks_BLH, ("activation_batch", None, "activation_heads"))
    return Hidden(x_BTD, routing, peaks_BLH)

  def logits(self, hidden: Hidden):
    """As `OutputHead.logits`."""
    return self.head.logits(hidden)


def create(cfg: Config | ModelConfig, *, rngs: nnx.Rngs) -> Transformer:
  """A model with fresh weights. Its `nnx.Param` paths are MaxText's; each carries `axes` and `matrix`."""
  return Transformer(cfg.model if isinstance(cfg, Config) else cfg, rngs=rngs)


def create_abstract(cfg: Config | ModelConfig) -> Transformer:
  """The same model with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""
  return nnx.eval_shape(lambda: create(cfg, rngs=nnx.Rngs(0)))
