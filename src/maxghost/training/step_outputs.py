"""Where a step's outputs lie, and how they come to the host: what belongs to rows stays with the rows.

B rows; the other letters as in `scoring.outputs`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from maxghost.parallel import shardings
from maxghost.parallel.axis_rules import BATCH

# Outputs with an axis of rows, and which axis that is; of param_contribution, every entry.
ROW_AXIS = {
  "score_dot_BSK": 0,
  "contribution_BSK": 0,
  "share_BS": 0,
  "tokens_BS": 0,
  "loss_BS": 0,
  "chosen_B": 0,
  "token_contribution_KBT": 1,
  "param_contribution": 1,
}


def placed(out: Mapping[str, Any]) -> dict[str, Any]:
  """Inside a step: rows' outputs split over the devices as the rows are, all others whole on every device."""

  def place(x, axis: int | None):
    names = [None] * x.ndim
    if axis is not None:
      names[axis] = BATCH
    return shardings.constrain(x, names, "an output of the step")

  return _each(place, out)


def to_host(out: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Host copies; waits until they are there. Of rows' outputs only the rows of this process, in their order."""
  if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(out)):
    return jax.device_get(dict(out))
  return _each(_local, out)


def _each(function: Callable, out: Mapping[str, Any]) -> dict[str, Any]:
  """function(array, its axis of rows or None) of every output."""
  return {
    name: jax.tree.map(functools.partial(function, axis=ROW_AXIS.get(name)), value) for name, value in out.items()
  }


def whole(x: jax.Array) -> np.ndarray:
  """The host copy of an array that lies whole on every device; waits until it is there."""
  return np.asarray(x.addressable_data(0)) if not getattr(x, "is_fully_addressable", True) else jax.device_get(x)


def _local(x: jax.Array, axis: int | None) -> np.ndarray:
  if axis is None or x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  pieces = {shard.index[axis].start or 0: shard.data for shard in x.addressable_shards}
  return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)], axis)
