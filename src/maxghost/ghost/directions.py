"""The parts of a parameter's direction, and its formation where the weight gradient is known.

K validation sets, r rank; a parameter has any shape, its matrix view is [I, O]. `G` is the validation gradient, `u` the
direction in use.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.ghost import low_rank
from maxghost.optimizers import Parameter, Sgd, UpdateRule


@dataclasses.dataclass(frozen=True)
class DirectionSpec:
  """Static description of a twin's directions: u = P_tᵀ G, with P_t the response of `rule` to this step's gradient.

  P_t is formed inside the backward pass of each op, without the learning rate and the outer clipping factor. For `Sgd`
  P_t = 1, so u = G is known before.
  rank > 0: matrices large enough to gain are scored along rank-r factors of u (`low_rank`), the others exactly.
  """

  rule: UpdateRule = dataclasses.field(default_factory=Sgd)
  rank: int = 0

  def __post_init__(self):
    if self.rank < 0:
      raise ValueError(f"ghost_rank={self.rank}: use 0 (exact) or a positive rank")

  @property
  def in_backward(self) -> bool:
    """Whether u needs the weight gradient, and so is formed in the backward pass."""
    return not self.rule.identity


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """How one parameter's direction is stored and formed."""

  parameter: Parameter
  direction: DirectionSpec
  low_rank: bool

  @property
  def label(self) -> str:
    return self.parameter.label

  @property
  def parts(self) -> tuple[str, ...]:
    """Names of the arrays that form the direction, in order."""
    if self.direction.in_backward:
      return ("gradient", *self.direction.rule.reads(self.parameter), "scalars")
    return ("left", "right") if self.low_rank else ("gradient",)

  def part_shapes(self, stack: tuple[int, ...], num_sets: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shape of each part. shape: of the unstacked parameter."""
    gradient = {"gradient": (*stack, num_sets, *shape)}
    if self.direction.in_backward:
      rule = self.direction.rule
      kept = rule.state_shapes(jax.ShapeDtypeStruct(shape, jnp.float32))
      read = {name: (*stack, *kept[name].shape) for name in rule.reads(self.parameter)}
      return gradient | read | {"scalars": (*stack, rule.num_scalars)}
    if not self.low_rank:
      return gradient
    inputs, outputs = self.parameter.matrix_shape(shape)
    sets, rank = (*stack, num_sets, *shape[: self.parameter.groups]), self.direction.rank
    return {"left": (*sets, inputs, rank), "right": (*sets, rank, outputs)}

  def factor(self, u, batch_axes: int):
    """`low_rank.factor` of u [*batch, *parameter]: left, right, and captured [*batch]."""
    u = self.parameter.matrices(u, batch_axes)
    return low_rank.factor(u, self.direction.rank, self.label, self.parameter.groups)

  def factor_for(self, weight_gradient, weighting, u_K):
    """`low_rank.factor_for` of u_K [K, *parameter] and g [*parameter]; weighting: of the `optimizers.Response`."""
    g, u_K = self.parameter.matrices(weight_gradient, 0), self.parameter.matrices(u_K, 1)
    if weighting is None:
      weights = (jnp.ones(g.shape[:-1], u_K.dtype), jnp.ones((*g.shape[:-2], g.shape[-1]), u_K.dtype))
    else:
      weights = low_rank.rank_one_root(1 / jnp.square(self.parameter.matrices(weighting, 0)))
    return low_rank.factor_for(g, weights, u_K, self.direction.rank, self.label, self.parameter.groups)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Direction:
  """u of one parameter: `full` [K, *parameter], or factors left [K, *groups, I, r] and right [K, *groups, r, O]."""

  full: Any  # an array, or None with factors; for arrays on a mesh also their PartitionSpecs
  left: Any = None
  right: Any = None


def form(param: ParamSpec, parts: Sequence, weight_gradient) -> tuple[Direction, jax.Array | None]:
  """Returns (u, facts) from the parts and this step's weight gradient g [*parameter].

  facts [K, 2], for a direction formed in the backward pass, else None: the share of |u|² that its factors capture (1
  without factors), in the norm weighted by the gradient's spread, and <g, u>. The factors suit products with gradients
  like g.
  """
  if not param.direction.in_backward:
    return (Direction(None, *parts) if param.low_rank else Direction(parts[0])), None
  gradient, *arrays, scalars = parts
  rule = param.direction.rule
  arrays = dict(zip(rule.reads(param.parameter), arrays, strict=True))
  response = rule.response(param.parameter, weight_gradient, arrays, scalars)
  u_K = response.transpose(gradient)
  if not param.low_rank:
    direction, captured = Direction(u_K), jnp.ones(u_K.shape[0], u_K.dtype)
  else:
    left, right, captured = param.factor_for(weight_gradient, response.weighting(), u_K)
    direction = Direction(None, left, right)
  return direction, jnp.stack([captured, along(param, direction, weight_gradient)], axis=-1)


def along(param: ParamSpec, direction: Direction, weight_gradient):
  """<g, u> of each set, [K], in float32 or wider."""
  g = weight_gradient.astype(jnp.promote_types(weight_gradient.dtype, jnp.float32))
  if direction.full is not None:
    return jnp.sum(g[None] * direction.full, axis=tuple(range(1, direction.full.ndim)))
  g_IO = param.parameter.matrices(g, 0)
  left_g = jnp.einsum("k...ir,...io->k...ro", direction.left, g_IO, precision=jax.lax.Precision.HIGHEST)
  return jnp.sum(left_g * direction.right, axis=tuple(range(1, left_g.ndim)))
