"""Sizes of a run's objects on one device: the abstract train state, its batches, and the parts of its twin.

B rows, T positions, K validation sets.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config import Config
from maxghost.ghost.attach import ScoredParam, Twin, attach
from maxghost.ghost.engine import direction_spec
from maxghost.parallel.shardings import AXES, HOST, Layout, num_parts, slash_path, use
from maxghost.training import devices
from maxghost.training.memory.table import Tensor
from maxghost.training.scoring import excluded

EXPERTS = "exp"  # the logical axis that numbers experts
PARAMETERS, OTHER = "parameters", "other state"


@dataclasses.dataclass(frozen=True)
class Held:
  """One Variable of the train state.

  row: of the table. whole: its shape. shape: of the part on this device. gathered: number of elements when a layer uses
  it, gathered along the mesh axes that split the batch.
  """

  row: str
  label: str
  axes: tuple[str | None, ...]
  whole: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: str
  on_host: bool
  gathered: int

  @property
  def stacked(self) -> bool:
    """Whether it has a leading layer axis."""
    return self.axes[:1] == ("layers",)

  @property
  def elements(self) -> int:
    return math.prod(self.shape)


class PlacedState:
  """A train state on the devices of a layout. split: its (graphdef, abstract state)."""

  def __init__(self, layout: Layout, split: tuple[nnx.GraphDef, nnx.State]):
    self.layout, self._graphdef, self._abstract = layout, split[0], layout.abstract(split[1])
    length_axes = next((axes for name, axes in layout.rules.rows if name == "activation_length"), ())
    batch_axes = {*layout.rules.batch_axes, *layout.rules.active(length_axes)}
    self.variables = [self._held(path, v, batch_axes) for path, v in nnx.to_flat_state(self._abstract)]
    self._twins: dict[tuple, Twin] = {}

  def _held(self, path: tuple, variable: nnx.Variable, batch_axes: set[str]) -> Held:
    leaf, axes = variable.get_value(), tuple(variable.get_metadata().get(AXES) or ())
    shape, rules = leaf.sharding.shard_shape(leaf.shape), self.layout.rules
    split: tuple[tuple[str, ...], ...] = rules.assign(axes, leaf.shape, slash_path(path)) if axes else ()
    over = [axis for name, found in zip(axes, split, strict=True) if name != EXPERTS for axis in found]
    gathered = math.prod(shape) * rules.parts([axis for axis in over if axis in batch_axes])
    host = getattr(leaf.sharding, "memory_kind", None) == HOST
    row = {"model": PARAMETERS, "optimizer": "optimizer"}.get(path[0], OTHER) if shape else OTHER
    return Held(row, slash_path(path[1:]), axes, leaf.shape, shape, str(leaf.dtype), host, gathered)

  def twin(self, cfg: Config) -> Twin:
    """The probed twin for one example. Raises ValueError as `attach`."""
    model = nnx.merge(self._graphdef, self._abstract).model
    spec = direction_spec(cfg, cfg.ghost.ghost_direction, cfg.ghost.ghost_rank)
    key = (spec, excluded(cfg, model), len(cfg.data.validation_sets))
    if key not in self._twins:
      self._twins[key] = attach(model, num_examples=1, num_sets=key[2], spec=spec, exclude=key[1])
    return self._twins[key]


class Device:
  """Sizes on one device of a run with this train state."""

  def __init__(self, cfg: Config, placed: PlacedState):
    self.cfg, self.layout, self.variables = cfg, placed.layout, placed.variables
    self.params = {v.label: v for v in self.variables if v.row == PARAMETERS}
    layered = any(v.stacked for v in self.params.values()) or not cfg.model.scan_layers
    self.num_layers = cfg.model.base_num_decoder_layers if layered else 0
    self.num_sets = len(cfg.val_sets)
    self.rows = self._local_rows(cfg.data.per_device_batch_size * self.layout.num_devices)
    self.val_rows = self._local_rows(cfg.ghost.ghost_val_batch_size) if self.num_sets else 0
    self.length = self.part(cfg.data.max_target_length, "activation_length")
    self.scored = placed.twin(cfg).scored if self.num_sets else ()

  def part(self, size: int, axis: str) -> int:
    """Size of an activation's dimension on this device. axis: its logical name."""
    with use(self.layout):
      return -(-size // num_parts(axis))

  def _local_rows(self, num_rows: int) -> int:
    return self.layout.rows(num_rows).shard_shape((num_rows,))[0]

  def elements(self, stacked: bool | None = None) -> int:
    """Elements of the parameters in the stack, outside it, or (None) of all."""
    return sum(v.elements for v in self.params.values() if stacked is None or stacked == v.stacked)

  @property
  def layer(self) -> int:
    """Elements of the parameters of one layer."""
    return self.elements(True) // self.cfg.model.base_num_decoder_layers

  @property
  def output_table(self) -> Held | None:
    """The weight of the logits: the projection, or else the tied embedding."""
    tables = [v for v in self.params.values() if "vocab" in v.axes and len(v.axes) == 2]
    return max(tables, key=lambda v: v.axes[-1] == "vocab", default=None)

  def resident(self) -> dict[str, list[Tensor]]:
    """{row of the table: arrays} in device memory between steps."""
    rows: dict[str, list[Tensor]] = {PARAMETERS: [], "optimizer": [], OTHER: [], "batch and validation rows": []}
    for v in self.variables:
      if not v.on_host:
        rows[v.row].append(Tensor(v.shape, v.dtype, v.label))
    batch = devices.batch_shapes(self.cfg, devices.rows_per_step(self.cfg, self.layout.num_devices), self.layout)
    val_batch = devices.batch_shapes(self.cfg, self.cfg.ghost.ghost_val_batch_size, self.layout)
    for count, arrays in (1, batch), (self.num_sets, val_batch):
      local = [Tensor(x.sharding.shard_shape(x.shape), str(x.dtype), name, count) for name, x in arrays.items()]
      rows["batch and validation rows"] += local
    return rows

  @property
  def host_bytes(self) -> int:
    """Bytes of the state and of the gradients of streamed weights in host memory."""
    held = [v for v in self.variables if v.on_host]
    return sum(v.elements * jnp.dtype(v.dtype).itemsize * (2 if v.row == PARAMETERS else 1) for v in held)

  def factors(self, param: ScoredParam) -> int:
    """Elements of a parameter's factors on this device; 0 for a whole direction."""
    shapes = param.part_shapes(self.num_sets)
    size, specs = 0, []
    with use(dataclasses.replace(self.layout, record=lambda *entry: specs.append(entry[-1]))):
      for name in set(shapes).intersection(("left", "right")):
        param.placed_factor(name, jax.ShapeDtypeStruct(shapes[name], jnp.float32))
        size += math.prod(self.layout.sharding(specs.pop()).shard_shape(shapes[name]) if specs else shapes[name])
    return size
