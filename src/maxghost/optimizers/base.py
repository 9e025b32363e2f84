"""What an optimizer is to the trainer and to the scores: `UpdateRule`, its `RuleState` and its `Response`.

K validation sets; a parameter has any shape and may be stacked over layers: [*stack, *parameter].
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxghost.config import plugins
from maxghost.config.schema import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Parameter:
  """Which parameter a rule is asked about.

  label: its slash-joined path. rows: axes that make the rows of its matrix view (0: it has none), as its layer's rule
  says. groups: axes before those that number matrices of their own (experts).
  """

  label: str
  rows: int = 0
  groups: int = 0

  def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """(I, O) of one group. shape: the unstacked parameter's."""
    inputs = self.groups + self.rows
    return math.prod(shape[self.groups : inputs]), math.prod(shape[inputs:])

  def matrices(self, x, lead: int):
    """[*lead, *groups, I, O] view of x [*lead, *parameter], lead: its number of leading axes."""
    return x.reshape(*x.shape[: lead + self.groups], *self.matrix_shape(x.shape[lead:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuleState:
  """The optimizer's state before a step, as an `UpdateRule` reads it.

  arrays: {name: {label: array [*stack, *parameter]}}, the names those of `UpdateRule.state_keys`. count: steps that the
  optimizer has taken (int). clip_factor: what gradient clipping multiplies this step's gradient by, or is assumed to.
  """

  arrays: dict[str, dict[str, Any]]
  count: Any
  clip_factor: Any = 1.0

  def of(self, label: str) -> dict[str, Any]:
    """{name: array} of one parameter; names without an array for it are left out."""
    return {name: arrays[label] for name, arrays in self.arrays.items() if label in arrays}


class Response(abc.ABC):
  """The linear operator P_t of one parameter: how this very step's update responds to its gradient.

  With the state held fixed the step moves the parameter by -learning_rate * clip_factor * P_t g, plus what does not
  come from this step's gradient (momentum, decay).
  """

  @abc.abstractmethod
  def apply(self, x):
    """P_t x. x [*lead, *parameter], with any number of axes in front of those of the gradient."""

  def transpose(self, x):
    """P_tᵀ x, the direction along which gradients are scored: <G, P_t g> = <P_tᵀ G, g>."""
    (out,) = jax.linear_transpose(self.apply, x)(x)
    return out

  def weighting(self) -> Any:
    """The size of P_t entry by entry [*parameter], where there is one; None = 1 everywhere. Approximations weigh
    errors by it (`low_rank.rank_one_root`); exact scores do not read it."""
    return None


@dataclasses.dataclass(frozen=True)
class Identity(Response):
  """P_t = 1."""

  def apply(self, x):
    return x

  def transpose(self, x):
    return x


@dataclasses.dataclass(frozen=True)
class Elementwise(Response):
  """P_t multiplies entry by entry. factor: [*parameter]."""

  factor: Any

  def apply(self, x):
    return jnp.expand_dims(self.factor, tuple(range(x.ndim - self.factor.ndim))) * x

  def transpose(self, x):
    return self.apply(x)

  def weighting(self) -> Any:
    return self.factor


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
  """An optimizer: its optax transformation, and how this step's update responds to a gradient.

  A rule is static: a frozen dataclass of its constants, hashable, without arrays. To add one, subclass, set the class
  variables, write the abstract methods and give it a line in `config.plugins.OPTIMIZERS` (or call
  `optimizers.register`). Arrays may carry leading stack axes in every method, `response` included.

  name: its opt_type. direction: the ghost_direction that scores through it, which `auto` means; None: it offers none.
  columns: names of the ledger's columns beside those of every rule, in order. state_keys: {name: field of the optax
  state that holds it}, what the rule keeps for each parameter between steps. num_scalars: length of `scalars`.
  by_segment: whether the update of some layers needs nothing of the others, so that host memory can hand it one
  segment at a time. elementwise: whether P_t is. schedules: values of ghost_schedule that can score it.
  """

  name: ClassVar[str]
  direction: ClassVar[str | None] = None
  columns: ClassVar[tuple[str, ...]] = ()
  state_keys: ClassVar[Mapping[str, str]] = {}
  num_scalars: ClassVar[int] = 1
  by_segment: ClassVar[bool] = False
  elementwise: ClassVar[bool] = False
  schedules: ClassVar[tuple[str, ...]] = plugins.SCHEDULES
  identity: ClassVar[bool] = False  # P_t = 1: a direction is then known before the gradient, and may be factored early

  @classmethod
  @abc.abstractmethod
  def from_config(cls, cfg: OptimizerConfig) -> Self:
    """The rule with the constants of the configuration."""

  @abc.abstractmethod
  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """The optax transformation; clipping comes before it and is not part of it."""

  @abc.abstractmethod
  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Response:
    """P_t of one parameter.

    Args:
      parameter: which one, and its matrix view.
      gradient: this step's gradient [*lead, *parameter], before clipping.
      arrays: {name: array} of the names that `reads` gives.
      scalars: what `scalars` gives, [num_scalars].
    """

  def reads(self, parameter: Parameter) -> tuple[str, ...]:
    """Names of the state arrays that this parameter's response needs, in order."""
    return ()

  def scalars(self, count, clip_factor):
    """What P_t takes from the step's number and clipping factor, as one float array [num_scalars].

    Args:
      count: optimizer steps already taken (int).
      clip_factor: float scalar.
    """
    return jnp.asarray(clip_factor, float)[None]

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    """{column: array} of each of `columns`: the array whose inner product with the validation gradient, times
    `column_scales`, is the part of the predicted drop that the column holds. A column left out is 0 here.

    value, gradient: the parameter and its gradient [*lead, *parameter]. arrays: all it has of the state.
    """
    return {}

  def column_scales(self, learning_rate, clip_factor) -> dict:
    """{column: factor of its inner product} for each of `columns`."""
    return {}

  def read(self, optimizer, *, count=None, clip_factor: Any = 1.0) -> RuleState:
    """The state of an `nnx.Optimizer`, or of an optax state with its count.

    Raises ValueError for a state that does not hold what this rule keeps.
    """
    if isinstance(optimizer, nnx.Optimizer):
      optimizer, count = optimizer.opt_state, optimizer.step[...] if count is None else count
    arrays = {}
    for name, key in self.state_keys.items():
      tree = optax.tree_utils.tree_get(optimizer, key)
      if tree is None:
        raise ValueError(f"the optimizer's state has no '{key}', which opt_type={self.name} keeps: give its own state")
      arrays[name] = by_label(tree)
    if count is None:
      counts = optax.tree_utils.tree_get_all_with_path(optimizer, "count")
      if not counts:
        raise ValueError("the optimizer's state has no step count: give count=")
      count = counts[0][1]
    return RuleState(arrays, count, clip_factor)

  def state_shapes(self, parameter: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape and dtype} of the arrays that the optimizer keeps for a parameter of this shape and dtype."""
    state = jax.eval_shape(self.transformation(optax.constant_schedule(0.0)).init, {"": parameter})
    return {name: optax.tree_utils.tree_get(state, key)[""] for name, key in self.state_keys.items()}

  def state_bytes(self, parameter: jax.ShapeDtypeStruct) -> int:
    """Bytes of what is kept for a parameter of this shape and dtype."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.state_shapes(parameter).values())


def by_label(tree) -> dict[str, Any]:
  """{slash-joined path: array} of a State, or of any tree of arrays."""
  if isinstance(tree, nnx.State):
    return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(tree)}
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
