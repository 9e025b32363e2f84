"""Objectives by the name that the config's `objective` gives them, and the one place that makes a run's."""

import importlib

from maxghost.config import Config, plugins
from maxghost.objectives.base import Objective


def register(objective: type[Objective]) -> type[Objective]:
  """Makes an objective known as objective=<objective.name>; usable as a decorator.

  Raises ValueError for a name that another one has taken.
  """
  facts = plugins.Objective(objective, objective.schedules, objective.rows_per_unit)
  plugins.register("objective", objective.name, facts)
  return objective


def create(cfg: Config | None = None) -> Objective:
  """The objective of the training steps of a run, without dropout; None = that of the default configuration.

  Its `training`, `validation` and `evaluation` are what steps, validation sets and evaluations measure.
  """
  cfg = cfg or Config()
  target = plugins.OBJECTIVES[cfg.optimizer.objective].target
  if isinstance(target, str):
    module, _, attribute = target.partition(":")
    target = getattr(importlib.import_module(module), attribute)
  return target.of(cfg)
