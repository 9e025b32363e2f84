"""Estimates the memory of a train step on one device before it is compiled, and suggests settings if it is too much.

`step.estimate` computes the estimate from the run's abstract objects (`device`) and closed forms for the arrays that
exist only in the compiled step. `report` prints it.
"""

from maxghost.training.memory.report import MemoryEstimate, Tensor
from maxghost.training.memory.step import estimate

__all__ = ["MemoryEstimate", "Tensor", "estimate"]
