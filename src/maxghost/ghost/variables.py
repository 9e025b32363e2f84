"""The two Variable types of the ghost engine, and where a twin holds them.

Both live in the probed twin only: never in the model a user holds, in optimizer state, in a checkpoint or in a
parameter count (filter `nnx.Param`).
"""

from flax import nnx


class GhostProbe(nnx.Variable):
  """Zeros of shape [*stack, K, n] or [*stack, K, n, T], float32 or wider. Its gradient IS the score.

  stack: the layer axes of a stacked module; K validation sets; n examples; T positions.
  """


class GhostDirection(nnx.Variable):
  """What a parameter's gradient is scored against: [*stack, K, *parameter] or what such a direction is made from."""


def part_name(name: str, part: str) -> str:
  """Attribute of the twin that holds a part of parameter `name`'s direction, or its probe."""
  return f"ghost_{name}_{part}"
