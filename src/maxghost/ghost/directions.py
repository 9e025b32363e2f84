"""The direction of each scored parameter: its parts, and its formation where the weight gradient is known.

K validation sets, r rank; a parameter has any shape, its matrix view is [I, O]. `G` is the validation gradient, `u` the
direction in use.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import low_rank
from maxghost.models.pipeline import RowVariable
from maxghost.optimizers import Parameter, RuleState, Sgd, UpdateRule
from maxghost.optimizers.base import each_layer
from maxghost.parallel.shardings import constrain, constrain_factor


class GhostProbe(RowVariable):
  """Zeros of shape [*stack, K, n] or [*stack, K, n, T], float32 or wider. Its gradient IS the score.

  stack: the layer axes of a stacked module; K validation sets; n examples; T positions. Only the probed twin has
  probes and directions, never the user's model, the optimizer state, a checkpoint or a parameter count.
  """


class GhostDirection(nnx.Variable):
  """A direction [*stack, K, *parameter] against which gradients are scored, or an array from which it is formed."""


def part_name(name: str, part: str) -> str:
  """Attribute of the twin that holds a part of parameter `name`'s direction, or its probe."""
  return f"ghost_{name}_{part}"


@dataclasses.dataclass(frozen=True)
class DirectionSpec:
  """Static description of a twin's directions: u = P_tᵀ G, with P_t the response of `rule` to this step's gradient.

  P_t is formed inside the backward pass of each op, without the learning rate and the outer clipping factor; with
  `early` before that pass, from the gradient of an earlier one. For `Sgd` P_t = 1, so u = G is known before.
  rank > 0: matrices large enough to gain are scored along rank-r factors of u (`low_rank`), the others exactly.
  must_gain: whether a model without such a matrix is refused.
  own: whether gradients are scored along this step's weight gradient too, as one more set after the K.
  """

  rule: UpdateRule = dataclasses.field(default_factory=Sgd)
  rank: int = 0
  must_gain: bool = True
  own: bool = False
  early: bool = False

  def __post_init__(self):
    if isinstance(self.rank, bool) or not hasattr(self.rank, "__index__") or self.rank < 0:
      raise ValueError(f"ghost_rank={self.rank!r}: use 0 (exact) or a positive whole number")

  @property
  def in_backward(self) -> bool:
    """Whether u needs the weight gradient, and so is formed in the backward pass."""
    return not self.early and (self.own or not self.rule.identity)


@dataclasses.dataclass(frozen=True)
class ScoredParam:
  """One scored parameter, and how its direction is stored and formed.

  path: of the Param. shape: of one unstacked layer. axes: logical axes with those of the stack; None if the Param has
  none.
  """

  path: tuple
  stack_shape: tuple[int, ...]
  shape: tuple[int, ...]
  parameter: Parameter
  spec: DirectionSpec
  axes: tuple[str, ...] | None = None

  @property
  def label(self) -> str:
    return self.parameter.label

  @property
  def name(self) -> str:
    return self.path[-1]

  @property
  def low_rank(self) -> bool:
    """Whether the direction has factors."""
    view = self.parameter
    return bool(view.rows) and low_rank.gains(self.spec.rank, *view.matrix_shape(self.shape))

  @functools.cached_property
  def parts(self) -> tuple[str, ...]:
    """Names of the arrays that form the direction, in order."""
    return tuple(self.part_shapes(1))

  def part_shapes(self, num_sets: int) -> dict[str, tuple[int, ...]]:
    """Shape of each part of the direction."""
    stack, rule = self.stack_shape, self.spec.rule
    num_sets += self.spec.own and self.spec.early
    gradient = {"gradient": (*stack, num_sets, *self.shape)}
    if self.spec.in_backward:
      kept = rule.state_shapes(jax.ShapeDtypeStruct(self.shape, jnp.float32))
      read = {name: (*stack, *kept[name].shape) for name in rule.reads(self.parameter)}
      return gradient | read | {"scalars": (*stack, *jax.eval_shape(rule.scalars, 0, 1.0).shape)}
    if not self.low_rank:
      return gradient
    inputs, outputs = self.parameter.matrix_shape(self.shape)
    sets, rank = (*stack, num_sets, *self.shape[: self.parameter.groups]), self.spec.rank
    return {"left": (*sets, inputs, rank), "right": (*sets, rank, outputs)}

  def part_path(self, part: str) -> tuple:
    return (*self.path[:-1], part_name(self.name, part))

  def inside(self, prefix: tuple) -> "ScoredParam":
    """The parameter of one layer, with the same label. prefix: path of the stacked layers."""
    axes = None if self.axes is None else self.axes[len(self.stack_shape) :]
    return dataclasses.replace(self, path=self.path[len(prefix) :], stack_shape=(), axes=axes)

  def placed(self, direction):
    """Shards a whole direction [*stack, K, *parameter] as its parameter."""
    if self.axes is None:
      return direction
    depth = len(self.stack_shape)
    return constrain(direction, (*self.axes[:depth], None, *self.axes[depth:]), f"direction of {self.label}")

  def placed_factor(self, part: str, factor):
    """Shards a factor along its groups, and along I or O; other parts stay.

    factor: the part 'left' [*stack, K, *groups, I, r] or 'right' [*stack, K, *groups, r, O] of a direction.
    """
    if self.axes is None or part not in ("left", "right"):
      return factor
    depth, parameter = len(self.stack_shape), self.parameter
    inputs = depth + parameter.groups
    dim, place = (factor.ndim - 2, inputs) if part == "left" else (factor.ndim - 1, inputs + parameter.rows)
    places = {depth + 1 + i: depth + i for i in range(parameter.groups)} | {dim: place}
    shape = (*self.stack_shape, *self.shape)
    return constrain_factor(factor, dim, places, self.axes, shape, f"direction of {self.label}, {part}")


def factors(directions: Sequence[tuple[ScoredParam, Any]]) -> dict[str, tuple]:
  """`low_rank.factor` of directions [*stack, K, *parameter]: {label: (left, right, captured [*stack, K])}."""

  def one_layer(param: ScoredParam, u):
    return low_rank.factor(param.parameter.matrices(u, 1), param.spec.rank, param.label, param.parameter.groups)

  # With groups layer by layer: sums over the mesh hold a whole side of each matrix, of all experts.
  by_layer = [(param, u) for param, u in directions if param.parameter.groups]
  found = {p.label: each_layer(functools.partial(one_layer, p), len(p.stack_shape), u) for p, u in by_layer}
  plain = [(param, u, len(param.stack_shape)) for param, u in directions if not param.parameter.groups]
  sets_first = [param.parameter.matrices(jnp.moveaxis(u, axis, 0), axis + 1) for param, u, axis in plain]
  factored = low_rank.factor_all((u, p.spec.rank, p.label) for u, (p, _, _) in zip(sets_first, plain, strict=True))
  for (param, _, axis), parts in zip(plain, factored, strict=True):
    found[param.label] = tuple(jnp.moveaxis(x, 0, axis) for x in parts)
  return found


def factors_for(param: ScoredParam, u_K, weight_gradient, weighting) -> tuple:
  """`low_rank.factor_for` of one layer's u [K, *parameter], for g [*parameter]. weighting: of the `Response`."""
  view = param.parameter
  g, u_K = view.matrices(weight_gradient, 0), view.matrices(u_K, 1)
  size = jnp.ones_like(g) if weighting is None else view.matrices(weighting, 0)
  weights = low_rank.rank_one_root(1 / jnp.square(size))
  return low_rank.factor_for(g, weights, u_K, param.spec.rank, param.label, view.groups)


def direction_parts(
  scored: Sequence[ScoredParam], gradients: list[dict], state: RuleState | None = None, scalars=None, suited: Any = ()
):
  """({label: parts}, {label: captured [*stack, K]}) from K dicts {label: G}.

  Directions with a rank are factored here, unless they are formed in the backward pass, which needs the optimizer's
  state. scalars: of the rule and this state, if they are known already. suited: {label: (g, weighting)} of an earlier
  pass, for factors like those of the backward pass.
  """
  parts, to_factor, factored = {}, [], {}
  for param in scored:
    rule, axis = param.spec.rule, len(param.stack_shape)
    if state is not None and scalars is None:
      scalars = rule.scalars(state.count, state.clip_factor)
    # The sets are stacked first: often they are slices of one array, which then need not be copied.
    stacked = param.placed(jnp.moveaxis(jnp.stack([g[param.label] for g in gradients]), 0, axis))
    if param.spec.in_backward:
      assert state is not None and scalars is not None
      kept = (state.arrays[name][param.label] for name in rule.reads(param.parameter))
      parts[param.label] = (stacked, *kept, jnp.broadcast_to(scalars, (*param.stack_shape, *scalars.shape)))
    elif param.low_rank and param.label in suited:
      function = functools.partial(factors_for, param)
      factored[param.label] = each_layer(function, len(param.stack_shape), stacked, *suited[param.label])
    elif param.low_rank:
      to_factor.append((param, stacked))
    else:
      parts[param.label] = (stacked,)
  factored |= factors(to_factor)
  parts |= {label: (left, right) for label, (left, right, _) in factored.items()}
  return parts, {label: captured for label, (_, _, captured) in factored.items()}


def direction_state(scored: Sequence[ScoredParam], parts: dict) -> nnx.State:
  """The GhostDirection State from {label: tuple of arrays}, in the order of `ScoredParam.parts`."""
  pairs = ((p.part_path(name), x) for p in scored for name, x in zip(p.parts, parts[p.label], strict=True))
  return nnx.from_flat_state({path: GhostDirection(x) for path, x in pairs})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Direction:
  """u of one parameter: `full` [K, *parameter], or factors left [K, *groups, I, r] and right [K, *groups, r, O]."""

  full: Any  # an array, or None with factors; for arrays on a mesh also their PartitionSpecs
  left: Any = None
  right: Any = None


def form(param: ScoredParam, parts: Sequence, weight_gradient) -> tuple[Direction, jax.Array | None]:
  """Returns (u, facts) from the parts of one layer and this step's weight gradient g [*parameter].

  facts [K, 2], for a direction formed in the backward pass, else None: the share of |u|² that its factors capture (1
  without factors), in the norm weighted by the gradient's spread, and <g, u>. The factors suit products with gradients
  like g. With `own`, u has K + 1 rows, of which the last is g.
  """
  if not param.spec.in_backward:
    return (Direction(None, *parts) if param.low_rank else Direction(parts[0])), None
  (gradient, *arrays, scalars), rule, view = parts, param.spec.rule, param.parameter
  response = rule.response(view, weight_gradient, dict(zip(rule.reads(view), arrays, strict=True)), scalars)
  u_K = response.transpose(gradient)
  if param.spec.own:
    u_K = jnp.concatenate([u_K, weight_gradient[None].astype(u_K.dtype)])
  if not param.low_rank:
    direction, captured = Direction(u_K), jnp.ones(u_K.shape[0], u_K.dtype)
  else:
    left, right, captured = factors_for(param, u_K, weight_gradient, response.weighting())
    direction = Direction(None, left, right)
  return direction, jnp.stack([captured, along(param, direction, weight_gradient)], axis=-1)


def along(param: ScoredParam, direction: Direction, weight_gradient):
  """<g, u> of each set, [K], in float32 or wider."""
  g = weight_gradient.astype(jnp.promote_types(weight_gradient.dtype, jnp.float32))
  if direction.full is not None:
    return jnp.sum(g[None] * direction.full, axis=tuple(range(1, direction.full.ndim)))
  g_IO = param.parameter.matrices(g, 0)
  left_g = jnp.einsum("k...ir,...io->k...ro", direction.left, g_IO, precision=jax.lax.Precision.HIGHEST)
  return jnp.sum(left_g * direction.right, axis=tuple(range(1, left_g.ndim)))


def products(param: ScoredParam, gradient, parts: Sequence):
  """`along` of each layer, [*stack, K]; with groups one by one, as a device needs the factors of all its experts."""
  run: Callable = lambda arrays: along(param, form(param, arrays[1:], None)[0], arrays[0])  # noqa: E731
  for _ in param.stack_shape:
    run = functools.partial(jax.lax.map, run) if param.parameter.groups else jax.vmap(run)
  return run((gradient, *parts))
