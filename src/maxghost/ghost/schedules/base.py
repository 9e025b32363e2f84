"""One scored step as a value: `Problem` holds the inputs of its passes, `Scored` their results.

K validation sets, n examples, T positions. A State has the parameters' paths; a label is such a path joined by slashes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxghost.ghost.attach import Twin
from maxghost.optimizers import Parameter, RuleState, Sgd, UpdateRule

Losses = Callable | tuple[Callable, ...]


class Model(NamedTuple):
  """A split model. params: the differentiated Variables. rest: all others."""

  graphdef: nnx.GraphDef
  params: nnx.State
  rest: nnx.State

  def merge(self, params: nnx.State) -> nnx.Module:
    """The model with other parameters."""
    return nnx.merge(self.graphdef, params, self.rest, copy=True)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Execution settings, on which scores do not depend.

  num_micro: micro-batches of the training batch. segment_lengths (schedule reverse_scan): as in `segments.scan`.
  remat_policy (reverse_scan): none | minimal | full, what is kept of a layer's forward pass; with segments, a segment's
    layers are recomputed instead.
  carries_on_host (reverse_scan): keeps the validation rows' segment inputs and cotangents in pinned host memory.
  gradients_on_host (two_pass, with factors of directions that are known before the training pass): keeps the validation
    gradients in pinned host memory from then on.
  in_turn (schedule two_pass): starts the training pass only when the direction exists, so that the activations of both
    passes do not exist at the same time.
  """

  num_micro: int = 1
  segment_lengths: tuple[int, ...] = ()
  remat_policy: str = "full"
  carries_on_host: bool = False
  gradients_on_host: bool = False
  in_turn: bool = False


@dataclasses.dataclass(frozen=True)
class Validation:
  """losses: [K], NaN if the gradients are from an earlier step. gradients: K States."""

  losses: jax.Array
  gradients: list


@dataclasses.dataclass(frozen=True)
class Stored:
  """Validation gradients of an earlier step. leaves: of the K States, in order. refresh: bool scalar, renew them."""

  leaves: list
  refresh: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Secant:
  """An earlier validation gradient G' of the same rows, for an estimate of the curvature: the gradient in the middle of
  this step is taken to be G + weight (G - G').

  earlier: K dicts {label: G'}. weight: the distance (sum of learning rates) from G to the middle of the step, over that
  from G' to G; 0: unknown. own: 1; 0 for new validation rows, where earlier holds G' - G of the previous rows.
  """

  earlier: list[dict]
  weight: Any
  own: Any = 1


@dataclasses.dataclass(frozen=True)
class Problem:
  """One scored step.

  schedule: a name in `schedules.SCHEDULES`. loss: `loss(model, batch) -> (losses, weights)` of the training rows.
  val_losses, val_batches: one for each validation set. twin: None for schedules without scoring rules. parameters: by
    label. scored: labels of the scored ones.
  rule: forms directions from the whole training gradient, in schedules without scoring rules and for a twin whose
    directions are `early`. Otherwise the twin's own rule does.
  state: the optimizer's before the step, with an assumed clipping factor; None if no rule reads it.
  update: training gradient -> (state with this step's clipping factor, State of the step's update delta for directions
    P_tᵀ (G + 1/2 H delta), or None). validation: known G, if any. secant: what to add to them; None: nothing. account:
    the trainer's rule, for the ledger; None: no ledger.
  """

  schedule: str
  model: Model
  loss: Callable
  val_losses: tuple[Any, ...]
  batch: Any
  val_batches: tuple
  twin: Twin | None
  parameters: dict[str, Parameter]
  scored: tuple[str, ...]
  rule: UpdateRule = dataclasses.field(default_factory=Sgd)
  state: RuleState | None = None
  update: Callable[[nnx.State], tuple[RuleState | None, nnx.State | None]] = lambda grads: (None, None)
  validation: Validation | Stored | None = None
  secant: Secant | None = None
  account: UpdateRule | None = None
  settings: Settings = Settings()


def of_each_set(loss_fn: Losses, batches: tuple) -> tuple[Any, ...]:
  """One loss function for each set; a single one is that of all."""
  return loss_fn if isinstance(loss_fn, tuple) else (loss_fn,) * len(batches)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainPass:
  """Results of one training pass.

  scores: {label: [*stack, K, n(, T)]}, the additive form w_i <grad l_i, u>. facts: {label: [*stack, K, 2]} if
  directions are formed in the backward pass, else {}; see `directions.form`. metrics: see `Objective.measured`.
  """

  loss: jax.Array
  losses: jax.Array
  weights: jax.Array
  grads: nnx.State
  scores: dict
  facts: dict
  metrics: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scored:
  """Results of `schedules.score`.

  additive: [K, n(, T)], scores summed over parameters; forward mode credits the position of the loss, the others the
    position where a parameter was used.
  captured: {label: [*stack, K]}, share of |u|^2 held by rank-r factors.
  validation: the whole validation gradients, for reuse; None if they never exist at once.
  gradients: K dicts {label: G, with its curvature}, for `ledger.sums` once this step's clipping factor is known.
  sums: `ledger.sums`, if the schedule computes them, with the assumed clipping factor. If the actual factor differs,
    the columns with P_t, and so the total, deviate accordingly. Without gradients and sums there is no ledger.
  parts: as `directions.direction_parts`. used: <g, u> [K]; None: `ledger.used` of the parts. secant: the problem's.
  own: {label: [*stack, 1, n(, T)]}, the scores along the batch gradient itself (`DirectionSpec.own`), if asked.
  """

  passed: TrainPass
  val_loss: jax.Array
  additive: jax.Array
  captured: dict
  validation: Validation | None = None
  gradients: list[dict] | None = None
  sums: dict | None = None
  parts: dict = dataclasses.field(default_factory=dict)
  used: jax.Array | None = None
  secant: Secant | None = None
  own: dict = dataclasses.field(default_factory=dict)
