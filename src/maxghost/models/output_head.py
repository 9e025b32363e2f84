"""The output head: final norm, projection and soft cap; gives whole logits, or losses computed by tiles of logits.

B batch, T positions, D embed dim, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxghost.models import dense
from maxghost.models.layers import Hidden
from maxghost.parallel.shardings import constrain


class TiedTable(nnx.Embed):
  """A token embedding [V, D] that is also the output projection."""

  precision: Any = None

  def attend(self, query):
    if self.precision is None:
      return super().attend(query)
    return dense.tied(self.precision, query.astype(self.dtype), self.embedding[...].astype(self.dtype))

  def losses(self, tiles: Callable, x_BTD, targets_BT, expected_BT):
    """The loss of each position, [B, T], by tiles of `attend`."""
    return tiles(x_BTD, self.embedding[...], targets_BT, expected_BT)


class OutputProjection(nnx.LinearGeneral):
  """A projection [D, V] without bias."""

  def losses(self, tiles: Callable, x_BTD, targets_BT, expected_BT):
    """The loss of each position, [B, T], by tiles of the logits."""
    return tiles(x_BTD, self.kernel[...], targets_BT, expected_BT)


class OutputHead(nnx.Module):
  """Norm, projection and soft cap of a model, built from its own layers on demand, without parameter paths of its own.

  norm: None for hidden states that are already normalized. soft_cap: a logit y becomes soft_cap * tanh(y / soft_cap); 0
  or None: no cap. Hidden states may have an axis of several predictions, [B, T, C, D]; so have the results then.
  """

  def __init__(self, norm: nnx.Module | None, projection: TiedTable | OutputProjection, soft_cap: float | None = None):
    self.norm, self.projection, self.soft_cap = norm, projection, soft_cap or None

  def logits(self, hidden: Hidden):
    """float32 or wider [B, T, V]."""
    x_BTD, projection = self._normed(hidden), self.projection
    logits_BTV = projection.attend(x_BTD) if isinstance(projection, TiedTable) else projection(x_BTD)
    names = "activation_batch", "activation_length", *[None] * (logits_BTV.ndim - 3), "activation_vocab"
    logits_BTV = constrain(logits_BTV, names, "logits")
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return logits_BTV if self.soft_cap is None else self.soft_cap * jnp.tanh(logits_BTV / self.soft_cap)

  def losses(self, hidden: Hidden, targets_BT, expected_BT, tiling):
    """The loss of each position, [B, T], as of whole `logits`, by tiles (`objectives.tiled.Head`)."""
    own = {"tied": isinstance(self.projection, TiedTable), "dtype": jnp.dtype(self.projection.dtype)}
    own |= {"precision": self.projection.precision, "soft_cap": self.soft_cap}
    return self.projection.losses(dataclasses.replace(tiling, **own), self._normed(hidden), targets_BT, expected_BT)

  def _normed(self, hidden: Hidden):
    return hidden.x_BTD if self.norm is None else self.norm(hidden.x_BTD)
