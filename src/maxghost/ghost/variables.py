"""The two Variable types of the ghost engine, and their attribute names in a twin.

Only the probed twin has them, never the user's model, the optimizer state, a checkpoint or a parameter count (filter
`nnx.Param`).
"""

from flax import nnx


class GhostProbe(nnx.Variable):
  """Zeros of shape [*stack, K, n] or [*stack, K, n, T], float32 or wider. Its gradient IS the score.

  stack: the layer axes of a stacked module; K validation sets; n examples; T positions.
  """


class GhostDirection(nnx.Variable):
  """A direction [*stack, K, *parameter] against which gradients are scored, or an array from which it is formed."""


def part_name(name: str, part: str) -> str:
  """Attribute of the twin that holds a part of parameter `name`'s direction, or its probe."""
  return f"ghost_{name}_{part}"
