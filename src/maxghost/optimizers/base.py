"""The interface of optimizers, for trainer and scores: `UpdateRule`, its `RuleState` and its `Response`.

K validation sets; a parameter has any shape and may be stacked over layers: [*stack, *parameter].
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxghost.config import ConfigError, OptimizerConfig, plugins
from maxghost.config.values import first_line
from maxghost.parallel.shardings import slash_path


@dataclasses.dataclass(frozen=True)
class Matrix:
  """What the metadata `matrix` of a Param says: which of its axes form a matrix whose update is that of a linear map.

  rows, columns: numbers of its last axes that are its inputs and its outputs; the axes before them number separate
  matrices (layers, experts). Both 0 (`matrix=()`): no matrix, such as a table of embeddings, a head, a bias, a scale.
  axes: logical axes of one unstacked layer, if the Param has them. stacked: number of layer axes before these.
  """

  rows: int = 0
  columns: int = 0
  axes: tuple[str | None, ...] | None = None
  stacked: int = 0

  @classmethod
  def of(cls, variable: nnx.Variable) -> "Matrix | None":
    """None: the Param says nothing."""
    metadata = variable.get_metadata()
    label, axes = metadata.get("matrix"), metadata.get("axes")
    if not label:
      return None if label is None else cls()
    rows, columns = label
    if axes is None or len(axes) != variable.ndim:
      return cls(rows, columns)
    stacked = next((i for i, name in enumerate(axes) if name != "layers"), len(axes))
    return cls(rows, columns, tuple(axes[stacked:]), stacked)

  def __bool__(self) -> bool:
    return self.rows > 0

  def view(self, x):
    """[..., I, O] of x [..., *rows, *columns]."""
    first, last = x.ndim - self.rows - self.columns, x.ndim - self.columns
    return x.reshape(*x.shape[:first], math.prod(x.shape[first:last]), math.prod(x.shape[last:]))


@dataclasses.dataclass(frozen=True)
class Parameter:
  """A parameter and its matrix view, as defined by the scoring rule of its layer.

  label: its slash-joined path. rows: number of axes that form the rows of the matrix (0: no matrix view). groups:
  number of axes before these that number separate matrices (experts). matrix: what the Param says of itself.
  """

  label: str
  rows: int = 0
  groups: int = 0
  matrix: Matrix | None = None

  def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """(I, O) of one group. shape: of the unstacked parameter."""
    inputs = self.groups + self.rows
    return math.prod(shape[self.groups : inputs]), math.prod(shape[inputs:])

  def matrices(self, x, lead: int):
    """[*lead, *groups, I, O] view of x [*lead, *parameter]. lead: number of leading axes."""
    return x.reshape(*x.shape[: lead + self.groups], *self.matrix_shape(x.shape[lead:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuleState:
  """The optimizer's state before a step, as read by an `UpdateRule`.

  arrays: {name: {label: array [*stack, *parameter]}}, with the names of `UpdateRule.state_keys`. count: steps taken
  (int). clip_factor: the factor of gradient clipping in this step, or the one assumed for it. last_rate: learning rate
  of the step before; None: unknown.
  """

  arrays: dict[str, dict[str, Any]]
  count: Any
  clip_factor: Any = 1.0
  last_rate: Any = None

  def of(self, label: str) -> dict[str, Any]:
    """{name: array} of one parameter, without names that have no array for it."""
    return {name: arrays[label] for name, arrays in self.arrays.items() if label in arrays}


class Response(abc.ABC):
  """The linear operator P_t of one parameter: the response of this step's update to its gradient.

  With the state held fixed, the step moves the parameter by -learning_rate * clip_factor * P_t g, plus terms that do
  not depend on this step's gradient (momentum, decay).
  """

  @abc.abstractmethod
  def apply(self, x):
    """P_t x, for x [*lead, *parameter] with any number of leading axes."""

  def transpose(self, x):
    """P_tᵀ x, along which gradients are scored: <G, P_t g> = <P_tᵀ G, g>. Raises ConfigError if it is not linear."""
    try:
      return jax.linear_transpose(self.apply, x)(x)[0]
    except (TypeError, AssertionError, NotImplementedError) as error:  # of JAX
      said = f"{type(self).__name__}.apply is not linear, or changes the shape"
      raise ConfigError(f"{said}: {first_line(error)}") from error

  def whole(self, gradient):
    """P_t g of the very gradient that formed the response; exact also where `apply` is a quadrature."""
    return self.apply(gradient)

  def weighting(self) -> Any:
    """The elementwise size of P_t, [*parameter], by which approximations weight errors; None: 1 everywhere."""
    return None


@dataclasses.dataclass(frozen=True)
class Identity(Response):
  """P_t = 1."""

  def apply(self, x):
    return x


@dataclasses.dataclass(frozen=True)
class Elementwise(Response):
  """P_t multiplies elementwise by factor [*parameter]. size: its weighting, for a factor that is not positive. resting:
  of the response of a whole step, that step without a gradient, over the learning rate."""

  factor: Any
  size: Any = None
  resting: Any = None

  def apply(self, x):
    return jnp.expand_dims(self.factor, tuple(range(x.ndim - self.factor.ndim))) * x

  transpose = apply

  def weighting(self) -> Any:
    return self.factor if self.size is None else self.size


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
  """An optimizer: its optax transformation, and the response of its update to a gradient.

  A rule is static: a frozen, hashable dataclass of constants, without arrays. To add one, subclass, write the abstract
  methods, and set the class variables and call `optimizers.register` (a built-in rule has those of its line in
  `config.plugins.OPTIMIZERS` instead). Arrays may have leading stack axes in every method.

  name: its opt_type. direction: the ghost_direction of its response, which `auto` selects; None: it has none.
  columns: names of its own ledger columns, in order. state_keys: {name: field of the optax state} of the arrays kept
  for each parameter between steps. by_segment: whether layers are updated independently, so that host memory can hand
  over one segment at a time. elementwise: whether P_t is elementwise. schedules: values of ghost_schedule that can
  score it. offers: those of `plugins.OF_STEP` that it defines.
  """

  name: ClassVar[str]
  direction: ClassVar[str | None] = None
  columns: ClassVar[tuple[str, ...]] = ()
  state_keys: ClassVar[Mapping[str, str]] = {}
  by_segment: ClassVar[bool] = False
  elementwise: ClassVar[bool] = False
  offers: ClassVar[tuple[str, ...]] = ()
  schedules: ClassVar[tuple[str, ...]] = plugins.SCHEDULES
  identity: ClassVar[bool] = False  # P_t = 1, so that a direction does not depend on the gradient

  def __init_subclass__(cls, **options: Any):
    super().__init_subclass__(**options)
    plugins.describe("opt_type", cls)
    cls.offers = tuple(name for name in plugins.OF_STEP if getattr(cls, name) is not getattr(UpdateRule, name))

  @classmethod
  @abc.abstractmethod
  def from_config(cls, cfg: OptimizerConfig) -> Self:
    """The rule of a configuration."""

  def of_params(self, params: nnx.State) -> "UpdateRule":
    """The rule for these Params, if `transformation` depends on their `Matrix`. Raises ConfigError for a wrong one."""
    return self

  @abc.abstractmethod
  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """The optax transformation, without clipping, which comes before it."""

  @abc.abstractmethod
  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Response:
    """P_t of one parameter. arrays: {name: array} for the names of `reads`. scalars: as `scalars` returns them.

    gradient: of this step, [*lead, *parameter], before clipping.
    """

  def path(self) -> "UpdateRule | None":
    """The rule whose P_t g is the whole difference that the batch gradient g makes to the step, D(g) - D(0).

    D is the step as a function of the gradient, with its response averaged over the gradients x g, x from 0 to 1
    (Aumann and Shapley): the credit is linear in each example's gradient and adds up to the batch's. None: not offered.
    """
    return None

  def marginal(self) -> "UpdateRule | None":
    """The rule whose P_t is the derivative D'(g) at the batch gradient: what the step loses with a small example.

    Credits do not add up to the step. None: not offered.
    """
    return None

  def reach(self, rates_S: np.ndarray, parameter: Parameter | None = None) -> np.ndarray | None:
    """The learning rate that a gradient of each step amounts to in all, with what momentum does with it later, [S].

    Over `rates_S`, the learning rate of every step of the run, it is the factor from what a gradient does in its own
    step to what it does until the run ends, if P_t stays as it is and decay is left out. parameter: None for all.
    None: unknown, or parameters differ.
    """
    return None

  def reads(self, parameter: Parameter) -> tuple[str, ...]:
    """Names of the state arrays that the parameter's response needs, in order."""
    return ()

  def scalars(self, count, clip_factor):
    """What P_t derives from the steps already taken (count) and the clipping factor: float[n]."""
    return jnp.asarray(clip_factor, float)[None]

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    """{column: array} for `columns`; a missing column is 0.

    A column's part of the predicted drop is the array's inner product with the validation gradient, times
    `column_scales`. value, gradient: of the parameter, [*lead, *parameter]. arrays: its whole optimizer state.
    """
    return {}

  def column_scales(self, learning_rate, clip_factor) -> dict:
    """{column: factor of its inner product} for each of `columns`; by default the learning rate."""
    return dict.fromkeys(self.columns, learning_rate)

  def last_update(self, value, arrays: dict[str, Any], state: RuleState) -> Any:
    """The update of the step before, which led to the parameter's value, [*lead, *parameter]; by default unknown.

    arrays: its optimizer state, which that step left behind; state: also count and last_rate.
    """
    return None

  def read(self, optimizer, *, count=None, clip_factor: Any = 1.0) -> RuleState:
    """Reads an `nnx.Optimizer`, or an optax state. Raises ValueError for one without the rule's arrays or a count."""
    if isinstance(optimizer, nnx.Optimizer):
      optimizer, count = optimizer.opt_state, optimizer.step[...] if count is None else count
    arrays = {}
    for name, key in self.state_keys.items():
      trees = optax.tree_utils.tree_get_all_with_path(optimizer, key)
      found = [of_label for _, tree in trees for of_label in by_label(tree).items()]
      if not trees:  # a tree may be empty, such as that of Muon's AdamW where all parameters are matrices
        raise ValueError(f"the optimizer's state has no '{key}', which opt_type={self.name} keeps: give its own state")
      if len(arrays.setdefault(name, dict(found))) < len(found):
        raise ValueError(f"the optimizer's state has several '{key}' of a parameter: opt_type={self.name} keeps one")
    counts = optax.tree_utils.tree_get_all_with_path(optimizer, "count") if count is None else [((), count)]
    if not counts:
      raise ValueError("the optimizer's state has no step count: give count=")
    return RuleState(arrays, counts[0][1], clip_factor)

  def state_shapes(self, parameter: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """{name: shape and dtype} of the arrays kept for a parameter."""
    state = jax.eval_shape(self.transformation(optax.constant_schedule(0.0)).init, {"": parameter})
    kept = {name: optax.tree_utils.tree_get(state, key) for name, key in self.state_keys.items()}
    if missing := [self.state_keys[name] for name, tree in kept.items() if tree is None]:
      raise ConfigError(f"opt_type={self.name}: state_keys names '{missing[0]}', which no state of its step has")
    return {name: tree[""] for name, tree in kept.items()}


def widened(given: optax.GradientTransformation) -> optax.GradientTransformation:
  """`given`, computed in the dtype of the gradient, or in float32: optax would round products with narrow moments."""

  def update(updates, state, params=None):
    wide = functools.reduce(jnp.promote_types, (x.dtype for x in jax.tree.leaves(updates)), jnp.float32)
    widen = lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    moved, after = given.update(*(jax.tree.map(widen, tree) for tree in (updates, state, params)))
    return moved, optax.tree.cast_like(after, state)

  return optax.GradientTransformation(given.init, update)


def to_come(values_S: np.ndarray, factor: float) -> np.ndarray:
  """[S]: the sum over k >= 0 of factor^k values_{t+k}."""
  return np.array([*itertools.accumulate(reversed(values_S), lambda later, value: value + factor * later)])[::-1]


def each_layer(function: Callable, depth: int, *arrays):
  """function(*arrays) of each layer of the first `depth` axes, one by one: a mesh then gathers one layer at a time."""
  run: Callable = lambda arrays: function(*arrays)  # noqa: E731
  for _ in range(depth):
    run = functools.partial(jax.lax.map, run)
  return run(arrays)


def by_label(tree) -> dict[str, Any]:
  """{slash-joined path: array} of a State, or of any tree of arrays."""
  if isinstance(tree, nnx.State):
    return {slash_path(path): v[...] for path, v in nnx.to_flat_state(tree) if jax.tree.leaves(v)}  # others: MaskedNode
  flat = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
