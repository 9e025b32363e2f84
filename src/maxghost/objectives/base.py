"""What a run minimises, as trainer and ghost engine see it: a loss of each token, and how tokens make up examples.

The batch loss is sum(losses * weights) / sum(weights) over all tokens. A *slot* is one segment of one row; a *unit* is
a scored example (a document, a pair, a rollout), which may own several slots.

B rows, T positions, S slots of a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config, plugins
from maxghost.data.types import Batch

BATCH_ARRAYS = tuple(f"{kind}{part}" for kind in ("inputs", "targets") for part in ("", "_position", "_segmentation"))


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """A loss function `objective(model, batch) -> (losses [B, T], weights [B, T])` and the facts a run needs about it.

  Subclasses say the losses; every other method has a default. To add one, subclass, and give it a line in
  `config.plugins.OBJECTIVES` (or call `objectives.register`).

  name: what the config's `objective` and the score log call it. schedules: values of ghost_schedule that can score it.
  rows_per_unit: adjacent rows that make up a unit and stay together; 1 where each row stands alone.
  """

  name: ClassVar[str] = "custom"
  schedules: ClassVar[tuple[str, ...]] = ("two_pass", "concat")
  rows_per_unit: ClassVar[int] = 1

  @classmethod
  def of(cls, cfg: Config) -> Self:
    """The objective of the training steps that a config asks for, without dropout."""
    return cls()

  def __call__(self, model, batch) -> tuple[Any, Any]:
    """(losses, weights): the loss of each token (or example) and the weight with which it counts."""
    raise NotImplementedError

  def measured(self, model, batch) -> tuple[Any, Any, dict]:
    """(losses, weights, metrics); metrics: {name: float array}, means over the batch's weight."""
    return *self(model, batch), {}

  def reported(self, loss, metrics: dict) -> dict:
    """What a step reports beside its loss, from the metrics of the whole batch."""
    return metrics

  def training(self, dropout_key: jax.Array | None) -> Self:
    """The objective of one training step."""
    return self

  def validation(self) -> Self:
    """What a validation set measures and what scores are taken against: no dropout, no balance loss."""
    return self

  def evaluation(self) -> Self:
    """What an evaluation reports: as `validation`, without regularisers of the loss."""
    return self.validation()

  # The batch and its units.

  def batch_spec(self, num_rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch, each with the rows first."""
    return {name: jax.ShapeDtypeStruct((num_rows, length), np.int32) for name in BATCH_ARRAYS}

  def prepare(self, batch: Batch) -> Batch:
    """The host's batch with the arrays that `batch_spec` names beyond those of the data, and with its units."""
    return batch

  def units(self, batch) -> tuple[jax.Array, jax.Array]:
    """(slot in which each position is used, slot whose target it predicts), int32[B, T]; 1, 2, ... in a row, 0 none.

    A score by position of use is summed by the first, losses and what is scored by position of the loss by the second;
    targets without weight do not count.
    """
    return batch["inputs_segmentation"], batch["targets_segmentation"]

  def shares(self, batch, weights_BS):
    """[B, S]: each slot's share of the batch loss, to be added up over the slots of a unit; 0 for an empty slot.

    weights_BS: the loss weights of each slot. Default: these over the whole batch's.
    """
    return weights_BS / jnp.maximum(weights_BS.sum(), jnp.finfo(weights_BS.dtype).tiny)


class StagedLoss(Objective):
  """An objective of a model with stacked layers that schedule 'reverse_scan' can take apart.

  layers_path: where the model holds its stacked layers. Calling the objective must be the same as `embed`, the layers
  in order, each called as layer(x, *layer_inputs(batch), layer_key(index)), and `head`. What flows through the layers
  is an array or a pytree of arrays.
  """

  schedules = plugins.SCHEDULES
  layers_path: tuple = ("decoder", "layers")

  def embed(self, model, batch) -> Any:
    """What the first layer sees."""
    raise NotImplementedError

  def layer_inputs(self, batch) -> tuple:
    """Arrays that every layer gets after x."""
    raise NotImplementedError

  def layer_key(self, index) -> Any:
    """The last argument of layer `index`."""
    return None

  def head(self, model, x, batch) -> tuple[Any, Any]:
    """(losses, weights) from what the last layer returns."""
    raise NotImplementedError

  def metrics(self, x, batch) -> dict:
    """The metrics of `measured`, from what the last layer returns."""
    return {}


@dataclasses.dataclass(frozen=True)
class PlainLoss(Objective):
  """A function `loss_fn(model, batch) -> (losses, weights)` of a foreign model: one call without stages."""

  loss_fn: Callable

  def __call__(self, model, batch):
    return self.loss_fn(model, batch)


def as_objective(loss_fn: Callable) -> Objective:
  """An Objective as it is, any other function as a `PlainLoss`."""
  return loss_fn if isinstance(loss_fn, Objective) else PlainLoss(loss_fn)
