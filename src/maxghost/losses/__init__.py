"""Losses of the trainer."""

from maxghost.losses.cross_entropy import token_losses

__all__ = ["token_losses"]
