"""What a parameter's direction is made of, and how it is formed where the weight gradient is at hand.

K validation sets; a parameter has any shape. `G` is the validation gradient, `u` the direction in use.
"""

import dataclasses

import jax
import jax.numpy as jnp

KINDS = ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class DirectionSpec:
  """Static description of every direction of a twin.

  kind 'sgd': u = G. kind 'adam': u = P_t G with the optimizer's state held fixed, where
  P_t = (1 - b1) / [(1 - b1^t) (sqrt(v_t / (1 - b2^t)) + eps)] and v_t = b2 v_{t-1} + (1 - b2) (kappa g)^2 holds *this*
  step's gradient g: it is formed inside the backward pass of each op. kappa, the clipping factor, multiplies afterwards;
  inside v_t it is the `kappa` of `AdamScalars`.
  """

  kind: str = "sgd"
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"ghost_direction={self.kind}: use one of {', '.join(KINDS)}")

  @property
  def parts(self) -> tuple[str, ...]:
    """Names of the arrays a direction consists of, in order."""
    return ("gradient",) if self.kind == "sgd" else ("gradient", "second_moment", "scalars")


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
    return cls(jnp.asarray(kappa, t.dtype), 1 - jnp.asarray(spec.b1, t.dtype) ** t, 1 - jnp.asarray(spec.b2, t.dtype) ** t)

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


def form(spec: DirectionSpec, parts: tuple, weight_gradient):
  """u [K, *parameter] from its parts and this step's weight gradient [*parameter]."""
  if spec.kind == "sgd":
    return parts[0]
  gradient, second_moment, scalars = parts
  return preconditioner(spec, second_moment, scalars, weight_gradient)[None] * gradient
