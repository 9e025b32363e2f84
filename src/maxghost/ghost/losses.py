"""Losses the engine understands in stages, and the one of the project's own models.

B batch, T positions, D embed dim.
"""

import dataclasses
from typing import Any, Protocol

import jax
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

  A token counts where targets_segmentation != 0. dropout_key: None turns dropout off. num_tiles > 1: the logits exist a
  tile at a time, of the tokens or of the vocabulary (`tile_axis`); the model then needs what `tiled_head` asks of it.
  """

  z_loss_multiplier: float = 0.0
  dropout_key: jax.Array | None = None
  layers_path: tuple = ("decoder", "layers")
  num_tiles: int = 1
  tile_axis: str = "tokens"

  @classmethod
  def of(cls, cfg: ModelConfig, dropout_key=None, *, z_loss: bool = True) -> "LanguageModelLoss":
    """The loss that a config asks for; z_loss: False leaves the z-loss out."""
    return cls(
      cfg.z_loss_multiplier if z_loss else 0.0,
      dropout_key,
      num_tiles=cfg.num_vocab_tiling,
      tile_axis=cfg.vocab_tiling_axis,
    )

  def __call__(self, model, batch):
    hidden = model.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], self.dropout_key)
    return self.head(model, hidden, batch)

  def embed(self, model, batch):
    return model.embed(batch["inputs"], batch["inputs_position"])

  def layer_inputs(self, batch):
    return batch["inputs_position"], batch["inputs_segmentation"]

  def layer_key(self, index):
    return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, index)

  def head(self, model, hidden_BTD, batch):
    targets_BT, counts_BT = batch["targets"], batch["targets_segmentation"] != 0
    if self.num_tiles > 1:
      losses_BT = tiled_head.head_losses(
        model, hidden_BTD, targets_BT, counts_BT.astype(float), num_tiles=self.num_tiles, axis=self.tile_axis,
        z_loss=self.z_loss_multiplier,
      )  # fmt: skip
    else:
      losses_BT = token_losses(model.logits(hidden_BTD), targets_BT, self.z_loss_multiplier)
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
