"""Losses of the trainer."""

from maxghost.losses.cross_entropy import token_losses
from maxghost.losses.tiled import tiled_losses

__all__ = ["tiled_losses", "token_losses"]
