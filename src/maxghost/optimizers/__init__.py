"""Optimizers: update rules (one per file, listed in `config.plugins`), learning rate and clipping."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxghost.config import ConfigError, OptimizerConfig, plugins
from maxghost.optimizers.account import check_account
from maxghost.optimizers.adamw import AdamState, AdamW
from maxghost.optimizers.base import Elementwise, Identity, Matrix, Parameter, Response, RuleState, UpdateRule, by_label
from maxghost.optimizers.muon import Muon
from maxghost.optimizers.sgd import Sgd
from maxghost.optimizers.step_size import clip, factor_of, factor_without, global_norm, learning_rate_schedule, scaled

__all__ = [
  "AdamState", "AdamW", "Elementwise", "Identity", "Matrix", "Muon", "Parameter", "Response", "RuleState", "Sgd",
  "UpdateRule", "by_label", "check_account", "clip", "create", "direction_rule", "factor_of", "factor_without",
  "global_norm", "learning_rate_schedule", "make_optimizer", "reach", "register", "scaled",
]  # fmt: skip


def register(rule: type[UpdateRule]) -> type[UpdateRule]:
  """Registers a rule as opt_type=<rule.name>, and its direction as a ghost_direction; usable as a decorator.

  Raises ValueError as `plugins.register`, and for a direction that is already taken.
  """
  asked, name = getattr(rule, "direction", None), getattr(rule, "name", None)
  taken = {other.direction: f"that of opt_type={of}" for of, other in plugins.OPTIMIZERS.items() if of != name}
  taken |= dict.fromkeys(("auto", "second_order", *plugins.OF_STEP), "one of every optimizer")
  if asked is not None and asked in taken:
    raise ValueError(f"ghost_direction={asked} is already {taken[asked]}; give it another name")
  plugins.register("opt_type", rule, UpdateRule, plugins.Optimizer)
  return rule


def create(cfg: OptimizerConfig) -> UpdateRule:
  """The configured rule. Raises ConfigError if `from_config` gives something else, such as the parent of its class."""
  kind = plugins.OPTIMIZERS[cfg.opt_type].load()
  if isinstance(rule := kind.from_config(cfg), kind):
    return rule
  wanted = f"a {kind.__name__}" if isinstance(rule, UpdateRule) else "an UpdateRule"
  raise ConfigError(f"opt_type={cfg.opt_type}: from_config gives a {type(rule).__name__}, not {wanted}")


def direction_rule(cfg: OptimizerConfig, direction: str) -> UpdateRule:
  """The rule whose response forms a ghost_direction other than 'second_order'.

  Raises ValueError for an unknown direction, and for 'auto' with an optimizer without a direction.
  """
  own = create(cfg)
  if problem := plugins.direction_problem(direction, own.name):
    raise ValueError(problem)
  if direction in ("auto", own.direction):
    return own
  if direction == "sgd":
    return Sgd()
  if direction in plugins.OF_STEP:
    return getattr(own, direction)()  # which the rule offers: otherwise there was a problem
  for optimizer in plugins.OPTIMIZERS.values():
    if optimizer.direction == direction:
      return optimizer.load().from_config(cfg)
  raise ValueError(f"ghost_direction={direction}: use one of {', '.join(plugins.directions())}")


def reach(cfg: OptimizerConfig, direction: str, steps: int) -> np.ndarray | None:
  """`UpdateRule.reach` of the rule of a direction (see `direction_rule`) in a run of `steps` steps; None: unknown."""
  rates_S = np.asarray(learning_rate_schedule(cfg, steps)(jnp.arange(steps)), np.float64)
  return direction_rule(cfg, direction).reach(np.broadcast_to(rates_S, steps))


def make_optimizer(cfg: OptimizerConfig, steps: int, params: nnx.State | None = None) -> optax.GradientTransformation:
  """The optax transformation of the configured rule and schedule for a run of `steps` steps.

  params: of the model, those to train; rules need them whose transformation depends on `Matrix`. Raises ConfigError as
  `UpdateRule.of_params`.
  """
  rule = create(cfg) if params is None else create(cfg).of_params(params)
  return rule.transformation(learning_rate_schedule(cfg, steps))
