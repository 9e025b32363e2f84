"""Objectives: the loss that a run minimises, and how its tokens form scored examples."""

from maxghost.objectives.base import Objective, PlainLoss, StagedLoss, as_objective
from maxghost.objectives.cross_entropy import token_losses
from maxghost.objectives.next_token import LanguageModelLoss
from maxghost.objectives.registry import create, register
from maxghost.objectives.tiled import tiled_losses

__all__ = [
  "LanguageModelLoss",
  "Objective",
  "PlainLoss",
  "StagedLoss",
  "as_objective",
  "create",
  "register",
  "tiled_losses",
  "token_losses",
]
