"""Registers objectives under their config name, and creates the objective of a run."""

import importlib

from maxghost.config import Config, plugins
from maxghost.objectives.base import Objective


def register(objective: type[Objective]) -> type[Objective]:
  """Registers an objective as objective=<objective.name>; usable as a decorator.

  Raises ValueError for a name that is already taken.
  """
  facts = plugins.Objective(objective, objective.schedules, objective.rows_per_unit)
  plugins.register("objective", objective.name, facts)
  return objective


def create(cfg: Config | None = None) -> Objective:
  """The objective of a run without dropout; None: that of the default configuration."""
  cfg = cfg or Config()
  target = plugins.OBJECTIVES[cfg.optimizer.objective].target
  if isinstance(target, str):
    module, _, attribute = target.partition(":")
    target = getattr(importlib.import_module(module), attribute)
  return target.of(cfg)
