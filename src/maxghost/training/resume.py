"""The position of a run after a number of steps: the contents of a checkpoint besides its arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from maxghost.data import merge_states
from maxghost.parallel import distributed


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
  """The run after `completed_steps` steps. All parts belong to the same moment, although batches are read ahead.

  data: position of the training iterator after the last trained batch; None at the start.
  metrics_bytes: length of metrics.jsonl. metrics_crc: its CRC-32, None in a checkpoint of an earlier version.
  pending: the record of the last step, which waits for the validation loss after it; None at the start.
  open_loss: the last measured validation loss, [K], which opens the account of the following steps.
  scores: position of the score log, or a list with one for each of several processes; None without a log.
  reweighting: state of the domains' shares, None if they are constant. rows: of each step over all devices, 0: unknown.
  """

  completed_steps: int = 0
  data: dict | None = None
  metrics_bytes: int = 0
  metrics_crc: int | None = None
  pending: dict[str, Any] | None = None
  open_loss: list[float] | None = None
  scores: dict | list | None = None
  reweighting: dict | None = None
  rows: int = 0

  def scores_of(self, process: int) -> dict | None:
    """The position of one process's score log; only its step, if other processes wrote it before."""
    if isinstance(self.scores, list):
      if process < len(self.scores) and self.scores[process] is not None:
        return self.scores[process]
      steps = [one["step"] for one in self.scores if one is not None]
      return {"step": max(steps)} if steps else None
    if self.scores is not None and process > 0:
      return {"step": self.scores["step"]}
    return self.scores

  def of_all_processes(self) -> "Position":
    """The position for a checkpoint, with those of every process's data and score log."""
    if distributed.count() == 1:
      return self
    said = distributed.gather({"data": self.data, "scores": self.scores})
    return dataclasses.replace(
      self, data=merge_states([one["data"] for one in said]), scores=[one["scores"] for one in said]
    )

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Position":
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


def to_tree(state: nnx.State) -> dict:
  """A train state as a plain nested dict of arrays with text keys: {"model": {...}, "optimizer": {...}, ...}.

  Empty branches (optax's stateless transformations) are left out.
  """
  return unflatten_dict({tuple(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)})


def from_tree(tree: Mapping, like: nnx.State) -> nnx.State:
  """The inverse of `to_tree`: `like` (which may be abstract) with the arrays of a tree of the same paths."""
  arrays = flatten_dict(tree)
  return nnx.from_flat_state([(path, v.replace(arrays[tuple(map(str, path))])) for path, v in nnx.to_flat_state(like)])


def abstract_arrays(state: nnx.State) -> nnx.State:
  """The state with shapes, dtypes and shardings in place of arrays; abstract leaves go to the first device."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or place)

  return jax.tree.map(abstract, state)
