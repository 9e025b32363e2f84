"""Next-token prediction on a MaxText-style batch, of whole texts or of the completions of conversations.

B batch, T positions, D embed dim, C predictions at each position.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config, ConfigError
from maxghost.models.layers import Hidden
from maxghost.objectives.base import StagedLoss
from maxghost.objectives.cross_entropy import mean_cotangent, token_losses
from maxghost.objectives.tiled import Head


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModelLoss(StagedLoss):
  """Cross-entropy of the next token in nats, with z-loss and, in a model with experts, the load-balancing loss.

  A token whose targets_segmentation is not 0 has the weight `targets_weights`, or 1 in a batch without weights.
  dropout_key: None turns dropout off. load_balance_loss_weight: factor of each token's share of the load-balancing
  loss, which is added to the token's loss. num_tiles > 1: computes the logits by tiles of the tokens or of the
  vocabulary (`tile_axis`). mtp_weight: of the losses of further tokens (`_of_further`).
  """

  maxima = ("max_logits_LH",)
  z_loss_multiplier: float = 0.0
  dropout_key: jax.Array | None = None
  load_balance_loss_weight: float = 0.0
  num_tiles: int = 1
  tile_axis: str = "tokens"
  mtp_weight: float = 0.0

  @classmethod
  def of(cls, cfg: Config) -> Self:
    model = cfg.model
    tiles = model.num_vocab_tiling, model.vocab_tiling_axis
    mtp_weight = model.mtp_loss_scaling_factor if model.mtp_num_layers else 0.0
    return cls(model.z_loss_multiplier, None, model.load_balance_loss_weight, *tiles, mtp_weight)

  def __init_subclass__(cls, **options):
    super().__init_subclass__(**options)
    if (unread := vars(cls).keys() & {"__call__", "head"}) and not vars(cls).keys() & {"measured", "measured_head"}:
      raise TypeError(f"{cls.__name__} defines {min(unread)}, which no step reads; define measured_head in its place")

  def __call__(self, model, batch):
    return self.measured(model, batch)[:2]

  def measured(self, model, batch):
    embedded = self.embed(model, batch)
    x = model.decoder(embedded, *self.layer_inputs(batch), self.dropout_key)
    return self.measured_head(model, self.joined(embedded, x) if self.passes_embedded else x, batch)

  def metrics(self, x: Hidden, batch) -> dict:
    """Means over layers and weighted tokens for a model with experts; the largest attention logits with use_qk_clip.

    moe_lb_loss: without its weight. router_entropy: nats. expert_load_E: tokens that chose each, over all weights.
    """
    peaks = {} if x.peaks_BLH is None else {"max_logits_LH": x.peaks_BLH.max(0)}
    if (routing := x.routing) is None:
      return peaks
    weights_BT = self.weights(batch).astype(routing["entropy_BT"].dtype)
    share_BT = self.shares(batch, weights_BT)
    return peaks | {
      "moe_lb_loss": jnp.sum(routing["load_balance_BT"] * share_BT),
      "router_entropy": jnp.sum(routing["entropy_BT"] * share_BT),
      "expert_load_E": routing["chosen_BE"].sum(0) / jnp.maximum(weights_BT.sum(), 1e-9),  # micro-batches add up
    }

  def reported(self, loss, metrics: dict) -> dict:
    """Adds lm_loss, the loss of the next token alone, where the loss has more terms."""
    more = {"moe_lb_loss": self.load_balance_loss_weight, "mtp_loss": self.mtp_weight}
    terms = [weight * metrics[name] for name, weight in more.items() if name in metrics]
    return metrics | {"lm_loss": loss - sum(terms)} if terms else metrics

  def training(self, dropout_key) -> Self:
    return dataclasses.replace(self, dropout_key=dropout_key)

  def of_micro_batch(self, index) -> Self:
    return self.training(self.layer_key(index))

  def validation(self) -> Self:
    return dataclasses.replace(self, dropout_key=None, load_balance_loss_weight=0.0, mtp_weight=0.0)

  def evaluation(self) -> Self:
    return dataclasses.replace(self.validation(), z_loss_multiplier=0.0)

  def weights(self, batch):
    """The loss weight of each token, bool or float[B, T]; 0 for prompts and padding."""
    counts_BT = batch["targets_segmentation"] != 0
    return jnp.where(counts_BT, batch["targets_weights"], 0) if "targets_weights" in batch else counts_BT

  def embed(self, model, batch):
    return model.embed(batch["inputs"], batch["inputs_position"])

  def layer_inputs(self, batch):
    return batch["inputs_position"], batch["inputs_segmentation"]

  def layer_key(self, index):
    return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, index)

  @property
  def passes_embedded(self):
    return self.mtp_weight > 0

  def joined(self, embedded: Hidden, x: Hidden):
    return dataclasses.replace(x, embedded_BTD=embedded.x_BTD)

  def head(self, model, x: Hidden, batch):
    return self.measured_head(model, x, batch)[:2]

  def measured_head(self, model, x: Hidden, batch):
    weights_BT, found = self.weights(batch), {}
    if weights_BT is None:
      raise ConfigError(f"objective={self.name}: weights returns None, not an array [B, T]")
    if self.mtp_weight:
      losses_BT, x, found = self._of_further(model, x, batch, weights_BT)
    else:
      expected_BT = mean_cotangent(weights_BT, x.x_BTD.dtype)
      losses_BT = self.cross_entropy(model, x, batch["targets"], expected_BT)
    losses_BT = self.balanced(x, losses_BT)
    return losses_BT, weights_BT.astype(losses_BT.dtype), self.metrics(x, batch) | found

  def _of_further(self, model, x: Hidden, batch, weights_BT) -> tuple[Any, Hidden, dict]:
    """Multi-token prediction: a token is predicted by the model, and by modules from further back.

    With weight lambda and M modules, token j has the loss l_j + lambda / M sum_k l_jk, where l_jk is the cross-entropy
    of module k, k positions before the position that the model predicts j from. Terms across the start of a document
    are 0. Source: DeepSeek-V3, arXiv:2412.19437, equations 24 and 25.

    Returns (losses [B, T], x with what the routers of the modules add, {"mtp_loss": weighted mean over tokens and
    modules}). x: of `Transformer.hidden`. weights_BT: of the tokens. C is 1 + M.
    """
    segments_BT, block = batch["inputs_segmentation"], model.mtp_block
    depths = range(1, block.num_layers + 1)
    keys = [self.layer_key(model.decoder.num_layers + depth - 1) for depth in depths]
    outputs = block(dataclasses.replace(x, peaks_BLH=None), batch["inputs_position"], segments_BT, keys)
    g_BT = mean_cotangent(weights_BT, x.x_BTD.dtype)
    place_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    # Whether position i and the one k further are of one segment.
    within = [(k, (place_BT < place_BT.shape[1] - k) & (segments_BT == jnp.roll(segments_BT, -k, 1))) for k in depths]
    g_further_BT = g_BT * self.mtp_weight / len(depths)
    expected = [g_BT, *(jnp.where(same_BT, jnp.roll(g_further_BT, -k, 1), 0) for k, same_BT in within)]
    targets_BTC = jnp.stack([jnp.roll(batch["targets"], -k, 1) for k in (0, *depths)], 2)
    # One use of the output head for all predictions: each position then has one cotangent of the projection.
    together = dataclasses.replace(x, x_BTD=jnp.stack([x.x_BTD, *(output.x_BTD for output in outputs)], 2))
    losses_BTC = self.cross_entropy(model, together, targets_BTC, jnp.stack(expected, 2))
    further = [jnp.roll(jnp.where(same_BT, losses_BTC[..., k], 0), k, 1) for k, same_BT in within]
    further_BT = jnp.asarray(sum(further)) / len(depths)
    weights_BT = weights_BT.astype(further_BT.dtype)
    mean = jnp.sum(further_BT * weights_BT) / jnp.maximum(weights_BT.sum(), jnp.finfo(weights_BT.dtype).tiny)
    routed = dataclasses.replace(x, routing=outputs[-1].routing)
    return losses_BTC[..., 0] + self.mtp_weight * further_BT, routed, {"mtp_loss": mean}

  def cross_entropy(self, model, x: Hidden, targets_BT, expected_BT=None):
    """Of each token, [B, T] in nats, by tiles if there are any. expected_BT: as in `tiled_losses`."""
    if self.num_tiles == 1:
      return token_losses(model.logits(x), targets_BT, self.z_loss_multiplier)
    tiles = Head(self.num_tiles, self.tile_axis, z_loss=self.z_loss_multiplier)
    return model.head.losses(x, targets_BT, expected_BT, tiles)

  def balanced(self, x: Hidden, losses_BT):
    """The losses with each token's share of the load-balancing loss."""
    if not self.load_balance_loss_weight or x.routing is None:
      return losses_BT
    return losses_BT + self.load_balance_loss_weight * x.routing["load_balance_BT"]


class FineTuning(LanguageModelLoss):
  """Supervised fine-tuning: cross-entropy of the tokens that the data gives a weight; the data gives prompts none."""

  def batch_spec(self, num_rows, length):
    shape = jax.ShapeDtypeStruct((num_rows, length), np.float32)
    return super().batch_spec(num_rows, length) | {"targets_weights": shape}
