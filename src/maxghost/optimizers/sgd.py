"""Stochastic gradient descent, plain and with momentum (Polyak 1964)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import optax

from maxghost.config.schema import OptimizerConfig
from maxghost.optimizers.base import Identity, Parameter, Response, RuleState, UpdateRule, to_come, widened


@dataclasses.dataclass(frozen=True)
class Sgd(UpdateRule):
  """theta - learning_rate * clipped gradient: P_t = 1, without state. Runs of any optimizer may use its direction.

  Its ledger has AdamW's columns, so that runs can be compared; without momentum both are 0.
  """

  identity = True

  @classmethod
  def from_config(cls, cfg: OptimizerConfig) -> "Sgd":
    return MomentumSgd(cfg.sgd_momentum) if cfg.sgd_momentum else Sgd()

  def path(self) -> "Sgd":
    return self

  marginal = path

  def reach(self, rates_S: np.ndarray, parameter: Parameter | None = None) -> np.ndarray:
    return rates_S

  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.sgd(learning_rate)

  def response(self, parameter: Parameter, gradient, arrays: dict, scalars) -> Identity:
    return Identity()


@dataclasses.dataclass(frozen=True)
class MomentumSgd(Sgd):
  """m = momentum * m + clipped gradient; theta - learning_rate * m, so that P_t = 1 here too."""

  state_keys: ClassVar = {"trace": "trace"}

  momentum: float

  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return widened(optax.sgd(learning_rate, momentum=self.momentum))

  def reach(self, rates_S: np.ndarray, parameter: Parameter | None = None) -> np.ndarray:
    """The sum over k >= 0 of momentum^k rate_{t+k}."""
    return to_come(rates_S, self.momentum)

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    return {"momentum": jnp.asarray(self.momentum, float) * arrays["trace"]}

  def last_update(self, value, arrays: dict[str, Any], state: RuleState) -> Any:
    return -jnp.asarray(state.last_rate, float) * arrays["trace"]
