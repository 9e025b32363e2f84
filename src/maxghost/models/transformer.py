"""The decoder-only transformer: embedding, layers, output head.

B batch, T positions, D embed dim, V vocabulary, L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import ModelConfig
from maxghost.models import kv_cache, moe, stack
from maxghost.models.decoder_layer import DecoderLayer, LayerCycle
from maxghost.models.layers import HIDDEN, linear, norm
from maxghost.parallel import constrain


class Decoder(nnx.Module):
  """Learned positions if there are any, layers, final norm and (unless tied) the output projection."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    cycle = cfg.inhomogeneous_layer_cycle_interval
    self.num_layers = cfg.base_num_decoder_layers // cycle if cfg.scan_layers else cfg.base_num_decoder_layers
    self.remat_policy = cfg.remat_policy
    self.segment_lengths = cfg.stacked_segments
    if cfg.scan_layers:
      make_layer = DecoderLayer if cycle == 1 else LayerCycle
      self.layers = stack.create(lambda r: make_layer(cfg, rngs=r), self.num_layers, rngs)
    else:
      for i in range(self.num_layers):
        setattr(self, f"layers_{i}", DecoderLayer(cfg, i % cycle, rngs=rngs))
    self.scan_layers = cfg.scan_layers
    self.decoder_norm = norm(cfg, rngs=rngs)
    self.has_positions = cfg.trainable_position_size > 0
    if self.has_positions:
      self.position_embedder = embedding(cfg, cfg.trainable_position_size, (None, "embed"), std=0.02, rngs=rngs)
    if not cfg.logits_via_embedding:
      std = cfg.base_emb_dim**-0.5
      self.logits_dense = linear(cfg, cfg.base_emb_dim, cfg.vocab_size, ("embed", "vocab"), rngs=rngs, std=std)

  def __call__(self, carry, positions_BT, segment_ids_BT, dropout_key=None):
    """What the last layer returns for what the first one sees: x_BTD, or (x_BTD, routing) with experts."""
    if self.scan_layers:
      return stack.run(
        self.layers,
        carry,
        (positions_BT, segment_ids_BT),
        num_layers=self.num_layers,
        remat_policy=self.remat_policy,
        dropout_key=dropout_key,
        segment_lengths=self.segment_lengths,
      )
    for i in range(self.num_layers):
      graphdef, state = nnx.split(getattr(self, f"layers_{i}"))
      apply = stack.remat(
        lambda x, s, p, g, k, graphdef=graphdef: nnx.merge(graphdef, s)(x, p, g, k), self.remat_policy
      )
      key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
      carry = apply(carry, state, positions_BT, segment_ids_BT, key)
    return carry

  def cached(self, carry, positions_BT, segment_ids_BT, open_cache, kept=None):
    """As __call__, each layer with its cache; returns also what the caches have to keep. See `kv_cache`.

    open_cache: from a layer's part of `kept` (None at the first call) to its cache.
    """
    if self.scan_layers:
      return kv_cache.run_stacked(self.layers, carry, (positions_BT, segment_ids_BT), open_cache, kept)
    entries = []
    for i in range(self.num_layers):
      cache = open_cache(None if kept is None else kept[i])
      carry = getattr(self, f"layers_{i}")(carry, positions_BT, segment_ids_BT, cache=cache)
      entries.append(cache.entries)
    return carry, entries


def embedding(cfg: ModelConfig, num_rows: int, axes, *, std: float, rngs: nnx.Rngs) -> nnx.Embed:
  return nnx.Embed(
    num_rows,
    cfg.base_emb_dim,
    dtype=jnp.dtype(cfg.dtype),
    param_dtype=jnp.dtype(cfg.weight_dtype),
    embedding_init=nnx.initializers.normal(std),
    rngs=rngs,
    embedding_metadata={"axes": axes},
  )


class Transformer(nnx.Module):
  """Tokens to logits.

  `model(tokens_BT, positions_BT=None, segment_ids_BT=None, dropout_key=None)` -> float32 logits [B, T, V] (float64
  when the compute dtype is). positions default to 0..T-1; segment ids of equal value attend to each other; dropout
  acts only when a key is given.
  """

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    std = 1.0 if not cfg.logits_via_embedding else cfg.base_emb_dim**-0.5
    self.token_embedder = embedding(cfg, cfg.vocab_size, ("vocab", "embed"), std=std, rngs=rngs)
    self.decoder = Decoder(cfg, rngs=rngs)
    self.tied = cfg.logits_via_embedding
    self.num_experts, self.dtype = cfg.num_experts, jnp.dtype(cfg.dtype)
    self.logits_soft_cap = None

  def __call__(self, tokens_BT, positions=None, segment_ids=None, dropout_key=None):
    return self.logits(self.hidden(tokens_BT, positions, segment_ids, dropout_key))

  def hidden(self, tokens_BT, positions_BT=None, segment_ids_BT=None, dropout_key=None):
    """What the last layer returns: hidden states before the final norm [B, T, D], or (those, routing); see `moe`."""
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    return self.decoder(self.embed(tokens_BT, positions_BT), positions_BT, segment_ids_BT, dropout_key)

  def embed(self, tokens_BT, positions_BT):
    """What the first layer sees: x_BTD, or (x_BTD, routing) in a model with experts."""
    x_BTD = self.token_embedder(tokens_BT)
    if self.decoder.has_positions:
      x_BTD = x_BTD + self.decoder.position_embedder(positions_BT)
    x_BTD = constrain(x_BTD, HIDDEN)
    if self.num_experts == 1:
      return x_BTD
    return x_BTD, moe.no_routing(self.num_experts, tokens_BT.shape, self.dtype)

  def logits(self, hidden):
    """Final norm and output projection of what `hidden` returns -> float32 [B, T, V]."""
    x_BTD = self.head_input(hidden[0] if isinstance(hidden, tuple) else hidden)
    logits_BTV = self.token_embedder.attend(x_BTD) if self.tied else self.decoder.logits_dense(x_BTD)
    logits_BTV = constrain(logits_BTV, ("activation_batch", "activation_length", "activation_vocab"), "logits")
    return logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))

  def head_input(self, hidden_BTD):
    """What the output projection sees. [B, T, D]."""
    return self.decoder.decoder_norm(hidden_BTD)

  def output_layer(self) -> tuple[nnx.Module, str]:
    """The layer whose `attend` or call is the output projection, and the name of its table."""
    return (self.token_embedder, "embedding") if self.tied else (self.decoder.logits_dense, "kernel")
