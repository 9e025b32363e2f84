"""What a train step needs on one device, before anything is compiled, and what to do where it is too much.

`step.estimate` adds up; `table` holds the result; `device` reads sizes off the abstract objects of the run;
`activations` and `directions` are closed forms of what only the compiled step holds; `verdict` and `report` put it into
words.
"""

from maxghost.training.memory.step import estimate
from maxghost.training.memory.table import MemoryEstimate, Tensor

__all__ = ["MemoryEstimate", "Tensor", "estimate"]
