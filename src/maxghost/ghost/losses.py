"""Losses the engine understands in stages, and the one of the project's own models.

B batch, T positions, D embed dim.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.schema import ModelConfig
from maxghost.ghost import tiled_head
from maxghost.losses import token_losses


class StagedLoss(Protocol):
  """A loss function `loss(model, batch) -> (losses, weights)` that schedule 'reverse_scan' can take apart.

  layers_path: where the model holds its stacked layers. embed(model, batch) -> x. layer_inputs(batch) -> arrays that
  every layer gets after x. layer_key(index) -> the last argument of every layer. head(model, x, batch) -> (losses,
  weights). Calling it must be the same as embed, the layers in order, head.
  """

  layers_path: tuple

  def __call__(self, model, batch) -> tuple: ...

  def embed(self, model, batch) -> Any: ...

  def layer_inputs(self, batch) -> tuple: ...

  def layer_key(self, index) -> Any: ...

  def head(self, model, x, batch) -> tuple: ...


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModelLoss:
  """(losses [B, T], weights [B, T]) of next-token prediction on a MaxText-style batch; a `StagedLoss`.

  A token counts where targets_segmentation != 0. dropout_key: None turns dropout off. load_balance_loss_weight: in a
  model with experts, each token's loss holds its own share of the load-balancing loss times this; 0 leaves it out.
  num_tiles > 1: the logits exist a tile at a time, of the tokens or of the vocabulary (`tile_axis`); the model then
  needs what `tiled_head` asks of it.
  """

  z_loss_multiplier: float = 0.0
  dropout_key: jax.Array | None = None
  load_balance_loss_weight: float = 0.0
  layers_path: tuple = ("decoder", "layers")
  num_tiles: int = 1
  tile_axis: str = "tokens"

  @classmethod
  def of(cls, cfg: ModelConfig, dropout_key=None, *, z_loss=True, load_balance=False) -> "LanguageModelLoss":
    """The loss that a config asks for; z_loss: False leaves the z-loss out; load_balance: True for training."""
    return cls(
      cfg.z_loss_multiplier if z_loss else 0.0,
      dropout_key,
      cfg.load_balance_loss_weight if load_balance else 0.0,
      num_tiles=cfg.num_vocab_tiling,
      tile_axis=cfg.vocab_tiling_axis,
    )

  def __call__(self, model, batch):
    return self.measured(model, batch)[:2]

  def measured(self, model, batch):
    """(losses, weights, metrics); see `hidden_metrics`."""
    hidden = model.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], self.dropout_key)
    return *self.head(model, hidden, batch), self.hidden_metrics(hidden, batch)

  def hidden_metrics(self, hidden, batch) -> dict:
    """Of a model with experts, means over layers and counting tokens: moe_lb_loss, the load-balancing loss without its
    weight; router_entropy, nats; expert_load_E, each expert's share of the tokens' choices. Else empty."""
    if not isinstance(hidden, tuple):
      return {}
    _, routing = hidden
    counts_BT = (batch["targets_segmentation"] != 0).astype(routing["entropy_BT"].dtype)
    share_BT = counts_BT / jnp.maximum(counts_BT.sum(), 1)
    return {
      "moe_lb_loss": jnp.sum(routing["load_balance_BT"] * share_BT),
      "router_entropy": jnp.sum(routing["entropy_BT"] * share_BT),
      "expert_load_E": routing["load_E"],
    }

  def embed(self, model, batch):
    return model.embed(batch["inputs"], batch["inputs_position"])

  def layer_inputs(self, batch):
    return batch["inputs_position"], batch["inputs_segmentation"]

  def layer_key(self, index):
    return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, index)

  def head(self, model, hidden, batch):
    hidden_BTD, routing = hidden if isinstance(hidden, tuple) else (hidden, None)
    targets_BT, counts_BT = batch["targets"], batch["targets_segmentation"] != 0
    if self.num_tiles > 1:
      losses_BT = tiled_head.head_losses(
        model, hidden_BTD, targets_BT, counts_BT.astype(float), num_tiles=self.num_tiles, axis=self.tile_axis,
        z_loss=self.z_loss_multiplier,
      )  # fmt: skip
    else:
      losses_BT = token_losses(model.logits(hidden_BTD), targets_BT, self.z_loss_multiplier)
    if self.load_balance_loss_weight and routing is not None:
      losses_BT = losses_BT + self.load_balance_loss_weight * routing["load_balance_BT"]
    return losses_BT, counts_BT.astype(losses_BT.dtype)


def language_model_loss(model, batch, z_loss_multiplier: float = 0.0, dropout_key=None):
  """`LanguageModelLoss` as a plain function."""
  return LanguageModelLoss(z_loss_multiplier, dropout_key)(model, batch)


def submodule(model: nnx.Module, path: tuple) -> nnx.Module:
  """The module at `path`; ValueError naming the path if there is none."""
  node = model
  for name in path:
    if not hasattr(node, str(name)):
      raise ValueError(f"the model has no stacked layers at {'/'.join(map(str, path))}; set scan_layers=true")
    node = getattr(node, str(name))
  return node
