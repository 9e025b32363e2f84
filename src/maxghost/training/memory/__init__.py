"""Estimates the memory of a train step on one device before it is compiled, and suggests settings if it is too much.

`step.estimate` computes the estimate from the run's abstract objects (`device`) and closed forms for the arrays that
exist only in the compiled step. `table` holds it; `verdict` and `report` print it.
"""

from maxghost.training.memory.step import estimate
from maxghost.training.memory.table import MemoryEstimate, Tensor

__all__ = ["MemoryEstimate", "Tensor", "estimate"]
