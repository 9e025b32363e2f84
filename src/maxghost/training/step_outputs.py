"""The placement of a step's outputs, sharded as the rows they belong to, and their transfer to the host.

B rows; the other letters as in `Scorer.outputs`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from maxghost.parallel import shardings
from maxghost.parallel.axis_rules import BATCH

# The row axis of outputs that have one; of param_contribution, that of every entry.
ROW_AXIS: dict[str, int] = dict.fromkeys(("token_contribution_KBT", "param_contribution"), 1)
ROW_AXIS |= dict.fromkeys(("score_dot_BSK", "contribution_BSK", "share_BS", "tokens_BS", "loss_BS", "chosen_B"), 0)


def placed(out: Mapping[str, Any]) -> dict[str, Any]:
  """Shards the outputs of rows as the rows, inside a step; all others are whole on every device."""

  def place(x, axis: int | None):
    names = [None] * x.ndim
    if axis is not None:
      names[axis] = BATCH
    return shardings.constrain(x, names, "an output of the step")

  return _each(place, out)


def to_host(out: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Waits for host copies. Outputs of rows contain only the rows of this process, in their order."""
  if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(out)):
    return jax.device_get(dict(out))
  return _each(_local, out)


def _each(function: Callable, out: Mapping[str, Any]) -> dict[str, Any]:
  """function(array, its row axis or None) of every output."""
  return {
    name: jax.tree.map(functools.partial(function, axis=ROW_AXIS.get(name)), value) for name, value in out.items()
  }


def whole(x: jax.Array) -> np.ndarray:
  """Waits for the host copy of an array that is whole on every device."""
  return np.asarray(x.addressable_data(0)) if not getattr(x, "is_fully_addressable", True) else jax.device_get(x)


def _local(x: jax.Array, axis: int | None) -> np.ndarray:
  if axis is None or x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  pieces = {shard.index[axis].start or 0: shard.data for shard in x.addressable_shards}
  return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)], axis)
