"""The ghost engine: exact per-example scores from one backward pass, for any flax.nnx model."""

from maxghost.ghost.attach import Twin, attach, split
from maxghost.ghost.directions import DirectionSpec, GhostDirection, GhostProbe
from maxghost.ghost.engine import GhostEngine, GhostResult
from maxghost.ghost.manager import GhostEngineManager
from maxghost.ghost.rules import Call, Rule, rule
from maxghost.objectives import LanguageModelLoss, StagedLoss
from maxghost.optimizers import AdamState, RuleState

__all__ = [
  "AdamState", "Call", "DirectionSpec", "GhostDirection", "GhostEngine", "GhostEngineManager", "GhostProbe",
  "GhostResult", "LanguageModelLoss", "Rule", "RuleState", "StagedLoss", "Twin", "attach", "rule", "split",
]  # fmt: skip
