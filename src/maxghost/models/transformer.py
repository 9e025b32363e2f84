"""The decoder-only transformer: embedding, layers, output head.

B batch, T positions, D embed dim, V vocabulary, L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import ModelConfig
from maxghost.models import stack
from maxghost.models.decoder_layer import HIDDEN, DecoderLayer, linear, rms_norm
from maxghost.parallel import constrain


class Decoder(nnx.Module):
  """Layers, final norm and (unless tied) the output projection."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.num_layers = cfg.base_num_decoder_layers
    self.remat_policy = cfg.remat_policy
    self.segment_lengths = cfg.segments
    if cfg.scan_layers:
      self.layers = stack.create(lambda r: DecoderLayer(cfg, rngs=r), self.num_layers, rngs)
    else:
      for i in range(self.num_layers):
        setattr(self, f"layers_{i}", DecoderLayer(cfg, rngs=rngs))
    self.scan_layers = cfg.scan_layers
    self.decoder_norm = rms_norm(cfg, rngs=rngs)
    if not cfg.logits_via_embedding:
      std = cfg.base_emb_dim**-0.5
      self.logits_dense = linear(cfg, cfg.base_emb_dim, cfg.vocab_size, ("embed", "vocab"), rngs=rngs, std=std)

  def __call__(self, x_BTD, positions_BT, segment_ids_BT, dropout_key=None):
    """Hidden states after the last layer, before the final norm. [B, T, D]."""
    if self.scan_layers:
      return stack.run(
        self.layers,
        x_BTD,
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
      x_BTD = apply(x_BTD, state, positions_BT, segment_ids_BT, key)
    return x_BTD


class Transformer(nnx.Module):
  """Tokens to logits.

  `model(tokens_BT, positions_BT=None, segment_ids_BT=None, dropout_key=None)` -> float32 logits [B, T, V] (float64
  when the compute dtype is). positions default to 0..T-1; segment ids of equal value attend to each other; dropout
  acts only when a key is given.
  """

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.token_embedder = nnx.Embed(
      cfg.vocab_size,
      cfg.base_emb_dim,
      dtype=jnp.dtype(cfg.dtype),
      param_dtype=jnp.dtype(cfg.weight_dtype),
      embedding_init=nnx.initializers.normal(1.0 if not cfg.logits_via_embedding else cfg.base_emb_dim**-0.5),
      rngs=rngs,
      embedding_metadata={"axes": ("vocab", "embed")},
    )
    self.decoder = Decoder(cfg, rngs=rngs)
    self.tied = cfg.logits_via_embedding
    self.logits_soft_cap = None

  def __call__(self, tokens_BT, positions=None, segment_ids=None, dropout_key=None):
    return self.logits(self.hidden(tokens_BT, positions, segment_ids, dropout_key))

  def hidden(self, tokens_BT, positions_BT=None, segment_ids_BT=None, dropout_key=None):
    """Hidden states after the last layer, before the final norm. [B, T, D]."""
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    return self.decoder(self.embed(tokens_BT, positions_BT), positions_BT, segment_ids_BT, dropout_key)

  def embed(self, tokens_BT, positions_BT):
    """What the first layer sees. [B, T, D]."""
    return constrain(self.token_embedder(tokens_BT), HIDDEN)

  def logits(self, hidden_BTD):
    """Final norm and output projection. [B, T, D] -> float32 [B, T, V]."""
    x_BTD = self.head_input(hidden_BTD)
    logits_BTV = self.token_embedder.attend(x_BTD) if self.tied else self.decoder.logits_dense(x_BTD)
    logits_BTV = constrain(logits_BTV, ("activation_batch", "activation_length", "activation_vocab"), "logits")
    return logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))

  def head_input(self, hidden_BTD):
    """What the output projection sees. [B, T, D]."""
    return self.decoder.decoder_norm(hidden_BTD)

  def output_layer(self) -> tuple[nnx.Module, str]:
    """The layer whose `attend` or call is the output projection, and the name of its table."""
    return (self.token_embedder, "embedding") if self.tied else (self.decoder.logits_dense, "kernel")
