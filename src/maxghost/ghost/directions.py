"""What a parameter's direction is made of, and how it is formed where the weight gradient is at hand.

K validation sets, r rank; a parameter has any shape, its matrix view is [I, O]. `G` is the validation gradient, `u` the
direction in use.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from maxghost.ghost import low_rank

KINDS = ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class DirectionSpec:
  """Static description of every direction of a twin.

  kind 'sgd': u = G. kind 'adam': u = P_t G with the optimizer's state held fixed, where
  P_t = (1 - b1) / [(1 - b1^t) (sqrt(v_t / (1 - b2^t)) + eps)] and v_t = b2 v_{t-1} + (1 - b2) (kappa g)^2 holds *this*
  step's gradient g: it is formed inside the backward pass of each op. kappa, the clipping factor, multiplies
  afterwards; inside v_t it is the `kappa` of `AdamScalars`.
  rank > 0: matrices large enough to gain are scored along rank-r factors of u (`low_rank`), the others exactly.
  """

  kind: str = "sgd"
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  rank: int = 0

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"ghost_direction={self.kind}: use one of {', '.join(KINDS)}")
    if self.rank < 0:
      raise ValueError(f"ghost_rank={self.rank}: use 0 (exact) or a positive rank")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """How one parameter's direction is held and formed.

  rows: axes of the rows of its matrix view (0: no matrix view). groups: axes before those that number matrices of their
  own (experts), with factors of their own.
  """

  label: str
  direction: DirectionSpec
  rows: int
  low_rank: bool
  groups: int = 0

  @property
  def parts(self) -> tuple[str, ...]:
    """Names of the arrays that make the direction, in order."""
    if self.direction.kind == "adam":
      return ("gradient", "second_moment", "scalars")
    return ("left", "right") if self.low_rank else ("gradient",)

  def part_shapes(self, stack: tuple[int, ...], num_sets: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shape of each part. shape: the unstacked parameter's."""
    inputs, outputs = matrix_shape(shape, self.rows, self.groups)
    sets = (num_sets, *shape[: self.groups])
    shapes = {
      "gradient": (*stack, num_sets, *shape),
      "second_moment": (*stack, *shape),
      "scalars": (*stack, 3),
      "left": (*stack, *sets, inputs, self.direction.rank),
      "right": (*stack, *sets, self.direction.rank, outputs),
    }
    return {name: shapes[name] for name in self.parts}

  def matrices(self, u, batch_axes: int):
    """[*batch, *groups, I, O] view of u [*batch, *parameter]."""
    batch = u.shape[: batch_axes + self.groups]
    return u.reshape(*batch, *matrix_shape(u.shape[batch_axes:], self.rows, self.groups))

  def factor(self, u, batch_axes: int, weights=None):
    """`low_rank.factor` of u [*batch, *parameter]: left, right, and captured [*batch]."""
    return low_rank.factor(self.matrices(u, batch_axes), self.direction.rank, self.label, weights, self.groups)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Direction:
  """u for one parameter: `full` [K, *parameter], or factors left [K, *groups, I, r] and right [K, *groups, r, O] (full
  is None)."""

  full: jax.Array | None
  left: jax.Array | None = None
  right: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdamScalars:
  """Scalars of step t = count + 1. kappa: the clipping factor assumed inside v_t."""

  kappa: jax.Array
  correction1: jax.Array  # 1 - b1^t
  correction2: jax.Array  # 1 - b2^t

  @classmethod
  def at(cls, spec: DirectionSpec, count, kappa):
    """count: optimizer steps already taken (int); kappa: float scalar."""
    t = jnp.asarray(count + 1, float)  # float: float32, or float64 under jax_enable_x64
    b1, b2 = jnp.asarray(spec.b1, t.dtype), jnp.asarray(spec.b2, t.dtype)
    return cls(jnp.asarray(kappa, t.dtype), 1 - b1**t, 1 - b2**t)

  def stacked(self):
    return jnp.stack([self.kappa, self.correction1, self.correction2])


def preconditioner(spec: DirectionSpec, second_moment, scalars, weight_gradient):
  """P_t of `DirectionSpec`, without the outer clipping factor. second_moment: v_{t-1}; all shaped like the parameter.

  scalars: [kappa, 1 - b1^t, 1 - b2^t]. Returns float32 or wider.
  """
  g = weight_gradient.astype(jnp.promote_types(weight_gradient.dtype, jnp.float32))
  kappa, correction1, correction2 = (scalars[i].astype(g.dtype) for i in range(3))
  v = spec.b2 * second_moment.astype(g.dtype) + (1 - spec.b2) * jnp.square(kappa * g)
  return (1 - spec.b1) / (correction1 * (jnp.sqrt(v / correction2) + spec.eps))


def form(param: ParamSpec, parts: tuple, weight_gradient) -> tuple[Direction, jax.Array | None]:
  """(u, facts) from the parts and this step's weight gradient g [*parameter].

  facts [K, 2], for kind 'adam' only: the share of |u|² that its factors capture (1 without factors), in the
  norm that the gradient's spread weights, and <g, u>.
  """
  if param.direction.kind == "sgd":
    return (Direction(None, *parts) if param.low_rank else Direction(parts[0])), None
  gradient, second_moment, scalars = parts
  step = preconditioner(param.direction, second_moment, scalars, weight_gradient)
  u_K = step[None] * gradient
  if not param.low_rank:
    direction, captured = Direction(u_K), jnp.ones(u_K.shape[0], u_K.dtype)
  else:
    weights = low_rank.rank_one_root(1 / jnp.square(param.matrices(step, 0)))
    left, right, captured = param.factor(u_K, 1, weights)
    direction = Direction(None, left, right)
  return direction, jnp.stack([captured, along(param, direction, weight_gradient)], axis=-1)


def along(param: ParamSpec, direction: Direction, weight_gradient):
  """<g, u> for every set, [K], in float32 or wider."""
  g = weight_gradient.astype(jnp.promote_types(weight_gradient.dtype, jnp.float32))
  if direction.full is not None:
    return jnp.sum(g[None] * direction.full, axis=tuple(range(1, direction.full.ndim)))
  g_IO = param.matrices(g, 0)
  left_g = jnp.einsum("k...ir,...io->k...ro", direction.left, g_IO, precision=jax.lax.Precision.HIGHEST)
  return jnp.sum(left_g * direction.right, axis=tuple(range(1, left_g.ndim)))


def matrix_shape(shape: tuple[int, ...], rows: int, groups: int = 0) -> tuple[int, int]:
  """(I, O) of the matrix view of one group of a parameter."""
  inputs = groups + rows
  return math.prod(shape[groups:inputs]), math.prod(shape[inputs:])
