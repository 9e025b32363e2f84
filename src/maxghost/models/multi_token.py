"""Multi-token prediction: modules after the last layer, of which the k-th predicts the token k positions further.

Embedding, final norm and output projection are those of the model. Source: DeepSeek-V3, arXiv:2412.19437, section 2.2;
names of parameters and the order of the concatenation are MaxText's.

B batch, T positions, D embed dim.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import ModelConfig
from maxghost.models import moe, pipeline, stack
from maxghost.models.decoder_layer import DecoderLayer
from maxghost.models.layers import HIDDEN, Hidden, linear, norm
from maxghost.parallel.shardings import constrain


class MultiTokenLayer(nnx.Module):
  """The k-th module: layer(projection [norm(embedding of the token k ahead), norm(hidden states of module k - 1)])."""

  def __init__(self, cfg: ModelConfig, depth: int, *, rngs: nnx.Rngs):
    embed, prefix = cfg.base_emb_dim, f"mtp_{depth}"
    self.names = tuple(f"{prefix}_{n}" for n in ("embedding_norm", "hidden_state_norm", "projection"))
    self.layer_name, last = f"{prefix}_transformer_layer", cfg.inhomogeneous_layer_cycle_interval - 1
    projection = linear(cfg, 2 * embed, embed, (None, "embed"), rngs=rngs, std=(2 * embed) ** -0.5)
    for name, module in zip(self.names, (norm(cfg, rngs=rngs), norm(cfg, rngs=rngs), projection), strict=True):
      setattr(self, name, module)
    setattr(self, self.layer_name, DecoderLayer(cfg, last, rngs=rngs))

  def __call__(self, hidden: Hidden, ahead_BTD, positions_BT, segment_ids_BT, dropout_key=None) -> Hidden:
    embedding_norm, hidden_norm, projection = (getattr(self, name) for name in self.names)
    both: Any = [embedding_norm(ahead_BTD), hidden_norm(hidden.x_BTD)]
    hidden = dataclasses.replace(hidden, x_BTD=constrain(projection(jnp.concatenate(both, -1)), HIDDEN))
    return getattr(self, self.layer_name)(hidden, positions_BT, segment_ids_BT, dropout_key)


class MultiTokenBlock(nnx.Module):
  """`mtp_layer_1`, `mtp_layer_2`, ...: one module for each further token."""

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.num_layers, self.remat_policy = cfg.mtp_num_layers, cfg.remat_policy
    for depth in range(1, self.num_layers + 1):
      setattr(self, f"mtp_layer_{depth}", MultiTokenLayer(cfg, depth, rngs=rngs))

  def __call__(self, hidden: Hidden, positions_BT, segment_ids_BT, dropout_keys: list) -> list[Hidden]:
    """The output of each module. hidden: of the last layer, with `embedded_BTD`.

    Where the further token lies in another segment the output means nothing, and no meaningful output depends on it.
    """
    outputs, embedded_BTD = [], hidden.embedded_BTD
    with moe.counted_by(pipeline.micro_batches(segment_ids_BT.shape[0])):  # as the layers before them on stages
      for depth, key in enumerate(dropout_keys, 1):
        module, ahead_BTD = getattr(self, f"mtp_layer_{depth}"), jnp.roll(embedded_BTD, -depth, axis=1)
        hidden = stack.run_once(module, self.remat_policy, hidden, ahead_BTD, positions_BT, segment_ids_BT, key)
        outputs.append(hidden)
    return outputs
