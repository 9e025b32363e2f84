"""Objectives: the loss that a run minimises, and how its tokens form scored examples."""

from maxghost.config import Config, ConfigError, plugins
from maxghost.objectives.base import Objective, PlainLoss, StagedLoss, as_objective
from maxghost.objectives.cross_entropy import token_losses
from maxghost.objectives.next_token import FineTuning, LanguageModelLoss
from maxghost.objectives.tiled import tiled_losses

__all__ = [
  "FineTuning", "LanguageModelLoss", "Objective", "PlainLoss", "StagedLoss", "as_objective", "create", "of_validation",
  "register", "tiled_losses", "token_losses",
]  # fmt: skip


def register(objective: type[Objective]) -> type[Objective]:
  """Registers an objective as objective=<objective.name>; usable as a decorator.

  Raises ValueError as `plugins.register`.
  """
  plugins.register("objective", objective, Objective, plugins.Objective)
  return objective


def create(cfg: Config | None = None, name: str = "") -> Objective:
  """The objective of a run, or the one of another name, without dropout; None: that of the default configuration.

  Raises ConfigError if `of` gives something else.
  """
  cfg = cfg or Config()
  if isinstance(made := plugins.OBJECTIVES[name := name or cfg.optimizer.objective].load().of(cfg), Objective):
    return made
  raise ConfigError(f"objective={name}: of gives a {type(made).__name__}, not an Objective")


def of_validation(cfg: Config) -> Objective | tuple[Objective, ...]:
  """The objective of the validation sets; a tuple with one for each where they have different ones."""
  made = {name: create(cfg, name).validation() for name in cfg.val_objectives or (cfg.optimizer.objective,)}
  return tuple(made[name] for name in cfg.val_objectives) if len(made) > 1 else next(iter(made.values()))
