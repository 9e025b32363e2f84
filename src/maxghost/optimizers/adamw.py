"""AdamW: Loshchilov and Hutter, arXiv:1711.05101."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from maxghost.config.schema import OptimizerConfig
from maxghost.optimizers.base import Elementwise, Parameter, Response, RuleState, UpdateRule


@dataclasses.dataclass(frozen=True)
class AdamW(UpdateRule):
  """AdamW with decay on every parameter.

  P_t = (1 - b1) / [(1 - b1^t) (sqrt(v_t / (1 - b2^t)) + eps)], entry by entry, with
  v_t = b2 v_{t-1} + (1 - b2) (clip_factor g)^2, which contains *this* step's gradient g.
  """

  name = "adamw"
  direction = "adam"
  columns = ("momentum", "weight_decay")
  state_keys: ClassVar = {"first_moment": "mu", "second_moment": "nu"}
  num_scalars = 3
  by_segment = True
  elementwise = True

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  mu_dtype: str = "float32"

  @classmethod
  def from_config(cls, cfg: OptimizerConfig) -> "AdamW":
    return cls(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, cfg.adam_weight_decay, cfg.mu_dtype)

  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    mu_dtype, decay = jnp.dtype(self.mu_dtype), self.weight_decay
    return optax.adamw(learning_rate, self.b1, self.b2, self.eps, mu_dtype=mu_dtype, weight_decay=decay)

  def reads(self, parameter: Parameter) -> tuple[str, ...]:
    return ("second_moment",)

  def scalars(self, count, clip_factor):
    """[clip_factor, 1 - b1^t, 1 - b2^t] of step t = count + 1."""
    t = jnp.asarray(count + 1, float)  # float: float32, or float64 under jax_enable_x64
    b1, b2 = jnp.asarray(self.b1, t.dtype), jnp.asarray(self.b2, t.dtype)
    return jnp.stack([jnp.asarray(clip_factor, t.dtype), 1 - b1**t, 1 - b2**t])

  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Elementwise:
    """P_t in float32 or wider."""
    g = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    clip_factor, correction1, correction2 = (scalars[i].astype(g.dtype) for i in range(3))
    v = self.b2 * arrays["second_moment"].astype(g.dtype) + (1 - self.b2) * jnp.square(clip_factor * g)
    return Elementwise((1 - self.b1) / (correction1 * (jnp.sqrt(v / correction2) + self.eps)))

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    momentum = self.b1 / (1 - self.b1) * response.weighting() * arrays["first_moment"]
    return {"momentum": momentum, "weight_decay": value}

  def column_scales(self, learning_rate, clip_factor) -> dict:
    return {"momentum": learning_rate, "weight_decay": learning_rate * self.weight_decay}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdamState:
  """The optimizer state that direction 'adam' needs, before a step.

  second_moments: {path: array}. count: steps taken. clip_factor: the one assumed for this step.
  """

  second_moments: dict[str, Any]
  count: Any
  clip_factor: Any = 1.0

  @classmethod
  def from_optax(cls, optimizer, *, count=None, clip_factor=1.0) -> "AdamState":
    """Reads an `nnx.Optimizer` made with `optax.adamw` or `optax.adam`, or their optax state."""
    state = AdamW().read(optimizer, count=count, clip_factor=clip_factor)
    return cls(state.arrays["second_moment"], state.count, state.clip_factor)

  def rule_state(self) -> RuleState:
    return RuleState({"second_moment": self.second_moments}, self.count, self.clip_factor)
