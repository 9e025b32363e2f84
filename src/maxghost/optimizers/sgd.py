"""Stochastic gradient descent without momentum: theta - learning_rate * clipped gradient."""

import dataclasses

import numpy as np
import optax

from maxghost.config.schema import OptimizerConfig
from maxghost.optimizers.base import Identity, Parameter, UpdateRule


@dataclasses.dataclass(frozen=True)
class Sgd(UpdateRule):
  """P_t = 1, without state. Its direction is the plain validation gradient, which runs of any optimizer may use.

  Its ledger has AdamW's columns, so that runs can be compared; both are 0.
  """

  name = "sgd"
  direction = "sgd"
  columns = ("momentum", "weight_decay")
  by_segment = True
  elementwise = True
  identity = True

  @classmethod
  def from_config(cls, cfg: OptimizerConfig) -> "Sgd":
    return cls()

  def path(self) -> "Sgd":
    return self

  def reach(self, rates_S: np.ndarray, parameter: Parameter | None = None) -> np.ndarray:
    return rates_S

  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.sgd(learning_rate)

  def response(self, parameter: Parameter, gradient, arrays: dict, scalars) -> Identity:
    return Identity()

  def column_scales(self, learning_rate, clip_factor) -> dict:
    return {"momentum": learning_rate, "weight_decay": learning_rate}
