"""One scored step as a value: `Problem`, all that its passes need, and `Scored`, all that they yield.

K validation sets, n examples, T positions. A State has the parameters' paths; a label is such a path joined by slashes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxghost.ghost.attach import Twin
from maxghost.optimizers import Parameter, RuleState, Sgd, UpdateRule


class Model(NamedTuple):
  """A split model. params: what is differentiated; rest: every other Variable."""

  graphdef: nnx.GraphDef
  params: nnx.State
  rest: nnx.State


@dataclasses.dataclass(frozen=True)
class Settings:
  """How the passes run; scores do not depend on it.

  num_micro: micro-batches of the training batch. For schedule reverse_scan: segment_lengths, as `segments.scan`;
  remat_policy: none | minimal | full, what of a layer's forward pass is kept for the walk back (with segments a
  segment's layers are recomputed instead); carries_on_host: the segment inputs of the validation rows, and their
  cotangents between segments, wait in pinned host memory. For schedule two_pass: in_turn, nothing of the training pass
  begins before the direction exists, so that the activations of the two passes do not lie beside each other.
  """

  num_micro: int = 1
  segment_lengths: tuple[int, ...] = ()
  remat_policy: str = "full"
  carries_on_host: bool = False
  in_turn: bool = False


@dataclasses.dataclass(frozen=True)
class Validation:
  """losses: [K], NaN where the gradients are those of an earlier step. gradients: K States."""

  losses: jax.Array
  gradients: list


@dataclasses.dataclass(frozen=True)
class Stored:
  """Validation gradients of an earlier step. leaves: of the K States, in order; refresh: bool scalar, take new ones."""

  leaves: list
  refresh: jax.Array


@dataclasses.dataclass(frozen=True)
class Update:
  """What a step's own training gradient decides. state: as Problem's, with this step's clipping factor. delta: State of
  the parameters' update; None where it is not asked for."""

  state: RuleState | None
  delta: nnx.State | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
  """One scored step.

  schedule: a name in `schedules.SCHEDULES`. loss, val_loss: `loss(model, batch) -> (losses, weights)` of the training
  and of the validation rows. val_batches: one for each validation set. twin: None where no rules are needed.
  parameters: by label; scored: labels of those that are scored. rule: whose response makes directions where the whole
  training gradient is known: in schedules without rules, and with second_order, whose directions are
  P_tᵀ (G + 1/2 H delta); otherwise the twin's own does. state: the optimizer's before the step, with a clipping factor
  that is assumed; None where no rule reads it. update: training gradient -> `Update`. validation: what is known of the
  validation gradients; None: nothing. account: the trainer's rule, whose ledger is kept; None: no ledger.
  """

  schedule: str
  model: Model
  loss: Callable
  val_loss: Callable
  batch: Any
  val_batches: tuple
  twin: Twin | None
  parameters: dict[str, Parameter]
  scored: tuple[str, ...]
  rule: UpdateRule = dataclasses.field(default_factory=Sgd)
  state: RuleState | None = None
  second_order: bool = False
  update: Callable[[nnx.State], Update] = lambda grads: Update(None)
  validation: Validation | Stored | None = None
  account: UpdateRule | None = None
  settings: Settings = Settings()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainPass:
  """What one training pass yields.

  scores: {label: [*stack, K, n(, T)]}, the additive form w_i <grad l_i, u>. facts: {label: [*stack, K, 2]} where
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
  """What `schedules.score` returns.

  additive: [K, n(, T)], scores summed over parameters; forward mode credits the position of the loss, the others the
  position where a parameter was used. captured: {label: [*stack, K]}, share of |u|^2 held by rank-r factors.
  validation: the whole validation gradients, to be used again; None where they never exist at once.
  Of the ledger: gradients, K dicts {label: G}, from which `ledger.sums` is made when this step's clipping factor is
  known, or the sums, where the schedule has made them (where the factor assumed is another one, the columns that hold
  P_t differ, and their sum misses -<G, Delta> by as much); both None: no ledger. parts: as `passes.direction_parts`.
  used: <g, u> [K]; None: `ledger.used` of the parts.
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
