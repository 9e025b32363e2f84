"""Estimates the memory of a train step on one device before it is compiled, and suggests settings if it is too much.

`step.estimate` computes the estimate, and `table` holds it. `device` reads sizes from the run's abstract objects;
`activations` and `directions` are closed forms for arrays that exist only in the compiled step. `verdict` and `report`
print the result.
"""

from maxghost.training.memory.step import estimate
from maxghost.training.memory.table import MemoryEstimate, Tensor

__all__ = ["MemoryEstimate", "Tensor", "estimate"]
