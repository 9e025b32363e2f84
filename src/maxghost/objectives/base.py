"""The interface of objectives: the loss of each token, and how tokens form scored examples.

The batch loss is sum(losses * weights) / sum(weights) over all tokens. A *slot* is one segment of one row; a *unit* is
a scored example (a document, a pair, a rollout), which may own several slots.

B rows, T positions, S slots of a row.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from maxghost.config import Config, ConfigError, plugins
from maxghost.data.types import Batch

BATCH_ARRAYS = tuple(f"{kind}{part}" for kind in ("inputs", "targets") for part in ("", "_position", "_segmentation"))


@dataclasses.dataclass(frozen=True, eq=False)
class Objective(abc.ABC):
  """A loss function `objective(model, batch) -> (losses [B, T], weights [B, T])` with its properties.

  Subclasses define the losses; every other method has a default. To add one, subclass, set the class variables and call
  `objectives.register` (a built-in one has those of its line in `config.plugins.OBJECTIVES` instead).

  name: its name in the config's `objective` and the score log. schedules: values of ghost_schedule that can score it.
  rows_per_unit: number of adjacent rows that form a unit and stay together; 1 where rows are independent.
  records: what a document of its runs is: "text", or "conversations" or "pairs" of them.
  parts: names of these rows, where the score log has the contribution of each apart; () where it has not.
  reference: the frozen second model that the loss may read: "start", the model that the run begins with (with adapters
    that is "base", the model without them); "teacher", another model; "" none.
  perplexity: whether the loss is nats per token, so that its exponential is a perplexity. validated_by: the objective
  of validation sets that name none; "" for this one. samples: whether rows are answers that the model samples in
  training. maxima: names of metrics that are maxima over the batch, not means.
  """

  name: ClassVar[str] = "custom"
  schedules: ClassVar[tuple[str, ...]] = ("two_pass", "concat")
  rows_per_unit: ClassVar[int] = 1
  records: ClassVar[str] = "text"
  parts: ClassVar[tuple[str, ...]] = ()
  reference: ClassVar[str] = ""
  perplexity: ClassVar[bool] = True
  validated_by: ClassVar[str] = ""
  samples: ClassVar[bool] = False
  maxima: ClassVar[tuple[str, ...]] = ()

  def __init_subclass__(cls, **options: Any):
    super().__init_subclass__(**options)
    plugins.describe("objective", cls)

  @classmethod
  def of(cls, cfg: Config) -> Self:
    """The objective of the training steps of a config, without dropout."""
    return cls()

  @abc.abstractmethod
  def __call__(self, model, batch) -> tuple[Any, Any]:
    """Returns (losses, weights): the loss and the weight of each token (or example)."""

  def measured(self, model, batch) -> tuple[Any, Any, dict]:
    """Returns (losses, weights, metrics); metrics: {name: float array}, weighted means over the batch.

    A name with a slash, such as rewards/chosen, is that of a scalar in metrics.jsonl.
    """
    return *self(model, batch), {}

  def reported(self, loss, metrics: dict) -> dict:
    """The metrics that a step reports beside its loss, from those of the whole batch."""
    return metrics

  def training(self, dropout_key: jax.Array | None) -> Self:
    """The objective of one training step."""
    return self

  def of_micro_batch(self, index) -> Self:
    """The objective of one of a step's micro-batches, which has dropout masks of its own."""
    return self

  def validation(self) -> Self:
    """The objective of validation sets, against which training examples are scored: no dropout, no balance loss."""
    return self

  def evaluation(self) -> Self:
    """The objective of evaluations: `validation` without regularisers."""
    return self.validation()

  def batch_spec(self, num_rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays of a batch; rows are the first axis."""
    return {name: jax.ShapeDtypeStruct((num_rows, length), np.int32) for name in BATCH_ARRAYS}

  def prepare(self, batch: Batch) -> Batch:
    """Adds to the host's batch its units and the arrays of `batch_spec` that the data does not provide."""
    return batch

  def prepared(self, batch: Batch) -> Batch:
    """`prepare`. Raises ConfigError if it returns nothing."""
    if (found := self.prepare(batch)) is None:
      raise ConfigError(f"objective={self.name}: prepare returns None, not a Batch")
    return found

  def from_reference(self, reference, batch) -> Any:
    """The batch with what the loss reads of a frozen second model, once per step on the device, before any gradient.

    The loss may call the trained model once only, and nothing of the second model is differentiated.
    """
    return batch

  def units(self, batch) -> tuple[jax.Array, jax.Array]:
    """(slot in which each position is used, slot whose target it predicts), int32[B, T]; 1, 2, ... in a row, 0: none.

    Scores by position of use are summed by the first. Losses, and scores by position of the loss, are summed by the
    second; targets without weight do not count.
    """
    return batch["inputs_segmentation"], batch["targets_segmentation"]

  def shares(self, batch, weights_BS):
    """Each slot's share of the batch loss, [B, S]; 0 for an empty slot. A unit's share is the sum over its slots.

    weights_BS: the loss weight of each slot; by default, shares are proportional to it.
    """
    return weights_BS / jnp.maximum(weights_BS.sum(), jnp.finfo(weights_BS.dtype).tiny)


class StagedLoss(Objective):
  """An objective in stages, for models with stacked layers, as schedule 'reverse_scan' needs it.

  Calling the objective must equal `embed`, then the layers in order, each called as
  layer(x, *layer_inputs(batch), layer_key(index)), then `head`. x is an array or a pytree of arrays.
  layers_path: path of the stacked layers in the model.
  """

  schedules = plugins.SCHEDULES
  layers_path: tuple = ("decoder", "layers")

  @abc.abstractmethod
  def embed(self, model, batch) -> Any:
    """The input of the first layer."""

  @abc.abstractmethod
  def layer_inputs(self, batch) -> tuple:
    """Arrays that every layer gets after x."""

  def layer_key(self, index) -> Any:
    """The last argument of layer `index`."""
    return None

  @property
  def passes_embedded(self) -> bool:
    """Whether the head reads the output of `embed` too, which `joined` then adds to its input."""
    return False

  def joined(self, embedded, x) -> Any:
    """The head's input, from the outputs of `embed` and of the last layer."""
    return x

  @abc.abstractmethod
  def head(self, model, x, batch) -> tuple[Any, Any]:
    """(losses, weights) from the output x of the last layer."""

  def metrics(self, x, batch) -> dict:
    """Metrics from the output x of the last layer."""
    return {}

  def measured_head(self, model, x, batch) -> tuple[Any, Any, dict]:
    """`measured`, from the output x of the last layer."""
    return *self.head(model, x, batch), self.metrics(x, batch)


@dataclasses.dataclass(frozen=True)
class PlainLoss(Objective):
  """The objective of a plain function `loss_fn(model, batch) -> (losses, weights)`, or losses alone: all weights 1.

  Raises ValueError for anything but losses [n] or [n, T] of the batch's n rows, and weights of the same shape.
  """

  loss_fn: Callable

  def __call__(self, model, batch):
    # A copy, since the function may change a dict in place.
    found, rows = self.loss_fn(model, jax.tree.map(lambda x: x, batch)), jax.tree.leaves(batch)[0].shape[0]
    found = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    shapes = [jnp.shape(x) for x in found]
    if len(shapes) > 2 or len(set(shapes)) != 1 or len(shapes[0]) not in (1, 2) or shapes[0][0] != rows:
      said = f"the loss function returns the shapes {', '.join(map(str, shapes)) or 'none'} for a batch of {rows} rows"
      wanted = f"return (losses, weights), or losses alone, each of shape ({rows},) or ({rows}, positions)"
      raise ValueError(f"{said}: {wanted}")
    return found if len(found) == 2 else (found[0], jnp.ones_like(found[0]))


def as_objective(loss_fn: Callable) -> Objective:
  """Wraps a function that is not an Objective in a `PlainLoss`."""
  return loss_fn if isinstance(loss_fn, Objective) else PlainLoss(loss_fn)


def refuse_loss(model: nnx.Module, objective: Objective, batch, wrt: Any = nnx.Param) -> None:
  """Raises ConfigError for a loss that depends on random numbers which the model draws (a score does not change it),
  and for weights that depend on the parameters `wrt`, as then the batch loss has parts that are of no example."""
  graphdef, counts, params, rest = nnx.split(model, nnx.RngCount, wrt, ...)

  def run(scale, counts, params, rest, batch):
    measured = lambda params: objective(nnx.merge(graphdef, counts, params, rest, copy=True), batch)  # noqa: E731
    return measured(params), jax.grad(lambda params: jnp.sum(scale * measured(params)[1]))(params)

  jaxpr = jax.make_jaxpr(run)(1.0, counts, params, rest, batch).jaxpr
  scale, *reads = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
  if any(reads[: len(jax.tree.leaves(counts))]):
    raise ConfigError("dropout in training mode would draw the same numbers in every step: call model.eval() first")
  if scale:
    raise ConfigError("weights depend on the model's parameters: return jax.lax.stop_gradient(weights)")
