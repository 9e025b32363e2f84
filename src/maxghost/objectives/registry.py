"""Objectives by the name that the config's `objective` gives them, and the one place that makes a run's."""

from collections.abc import Callable

from maxghost.config import Config
from maxghost.objectives.base import Objective
from maxghost.objectives.next_token import LanguageModelLoss

_OBJECTIVES: dict[str, type[Objective]] = {"next_token": LanguageModelLoss}


def register(name: str) -> Callable[[type[Objective]], type[Objective]]:
  """`@objectives.register("my_loss") class MyLoss(Objective): ...` makes `objective=my_loss` a choice."""

  def add(cls: type[Objective]) -> type[Objective]:
    _OBJECTIVES[name] = cls
    return cls

  return add


def create(cfg: Config | None = None) -> Objective:
  """The objective of the training steps of a run, without dropout; None = that of the default configuration.

  Its `training`, `validation` and `evaluation` are what steps, validation sets and evaluations measure.
  """
  cfg = cfg or Config()
  return LanguageModelLoss.of(cfg)
