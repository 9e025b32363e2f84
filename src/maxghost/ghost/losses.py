"""The loss that the engine uses for the project's own models.

B batch, T positions.
"""

from maxghost.losses import token_losses


def language_model_loss(model, batch, z_loss_multiplier: float = 0.0, dropout_key=None):
  """(losses [B, T], weights [B, T]) of next-token prediction on a MaxText-style batch.

  A token counts where targets_segmentation != 0.
  """
  logits_BTV = model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], dropout_key)
  losses_BT = token_losses(logits_BTV, batch["targets"], z_loss_multiplier)
  return losses_BT, (batch["targets_segmentation"] != 0).astype(losses_BT.dtype)
