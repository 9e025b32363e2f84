"""What flows through the layers of a model.

B batch, T positions, D embed dim.
"""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
  """Hidden states and, in a model with experts, the routing so far (`moe.no_routing`); None in a dense one."""

  x_BTD: Any
  routing: dict[str, Any] | None = None
