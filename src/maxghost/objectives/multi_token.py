"""The losses of multi-token prediction: a token is predicted by the model, and by modules from further back.

With weight lambda and D modules, token j has the loss l_j + lambda / D sum_k l_jk, where l_jk is the cross-entropy of
module k, k positions before the position that the model predicts j from. Terms across the start of a document are 0.
Source: DeepSeek-V3, arXiv:2412.19437, equations 24 and 25.

B batch, T positions, C = 1 + D predictions at each position.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.models.layers import Hidden
from maxghost.objectives.cross_entropy import mean_cotangent


def combined(objective: Any, model, x: Hidden, batch, weights_BT) -> tuple[Any, Hidden, dict]:
  """(losses [B, T], x with what the routers of the modules add, {"mtp_loss": weighted mean over tokens and modules}).

  objective: a `LanguageModelLoss` with mtp_weight. x: of `Transformer.hidden`. weights_BT: of the tokens.
  """
  segments_BT, block = batch["inputs_segmentation"], model.mtp_block
  depths = range(1, block.num_layers + 1)
  keys = [objective.layer_key(model.decoder.num_layers + depth - 1) for depth in depths]
  outputs = block(dataclasses.replace(x, peaks_BLH=None), batch["inputs_position"], segments_BT, keys)
  place_BT, g_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1), mean_cotangent(weights_BT, x.x_BTD.dtype)
  # Whether position i and the one k further are of one segment.
  within = [(k, (place_BT < place_BT.shape[1] - k) & (segments_BT == jnp.roll(segments_BT, -k, 1))) for k in depths]
  g_further_BT = g_BT * objective.mtp_weight / len(depths)
  expected = [g_BT, *(jnp.where(same_BT, jnp.roll(g_further_BT, -k, 1), 0) for k, same_BT in within)]
  targets_BTC = jnp.stack([jnp.roll(batch["targets"], -k, 1) for k in (0, *depths)], 2)
  # One use of the output head for all predictions: each position then has one cotangent of the projection.
  together = dataclasses.replace(x, x_BTD=jnp.stack([x.x_BTD, *(output.x_BTD for output in outputs)], 2))
  losses_BTC = objective.cross_entropy(model, together, targets_BTC, jnp.stack(expected, 2))
  further = [jnp.roll(jnp.where(same_BT, losses_BTC[..., k], 0), k, 1) for k, same_BT in within]
  further_BT = jnp.asarray(sum(further)) / len(depths)
  weights_BT = weights_BT.astype(further_BT.dtype)
  mean = jnp.sum(further_BT * weights_BT) / jnp.maximum(weights_BT.sum(), jnp.finfo(weights_BT.dtype).tiny)
  routed = dataclasses.replace(x, routing=outputs[-1].routing)
  return losses_BTC[..., 0] + objective.mtp_weight * further_BT, routed, {"mtp_loss": mean}
