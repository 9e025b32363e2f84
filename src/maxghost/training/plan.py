"""A run on its devices before anything is traced: the shapes, shardings and sizes of its train step.

K validation sets.
"""

import dataclasses
import functools

import jax
from flax import nnx

from maxghost.config import Config
from maxghost.parallel import distributed
from maxghost.parallel.mesh import describe
from maxghost.parallel.shardings import Layout, OwnRows, check_rules, check_spread, own_rows
from maxghost.training import devices, resume, state
from maxghost.training.flops import StepFlops, step_flops
from maxghost.training.memory import MemoryEstimate, estimate


@dataclasses.dataclass(frozen=True)
class Plan:
  """state: the abstract train state, with shardings. spread: a line on a device's share of the parameters."""

  cfg: Config
  layout: Layout
  graphdef: nnx.GraphDef
  state: nnx.State
  spread: str

  @classmethod
  def of(cls, cfg: Config, layout: Layout) -> "Plan":
    """Plans without allocating. Raises ConfigError for a mesh or axis rules that do not fit the run."""
    devices.check_layout(cfg, layout)
    graphdef, abstract = state.abstract_split(cfg)
    abstract = layout.abstract(abstract)
    check_rules(abstract, layout)
    return cls(cfg, layout, graphdef, abstract, check_spread(abstract, layout, cfg.parallel.sharding_tolerance))

  @property
  def rows(self) -> int:
    """Rows of a step over all devices and micro-batches."""
    return devices.rows_per_step(self.cfg, self.layout.num_devices)

  @property
  def own(self) -> OwnRows:
    """The part of the batch that this process reads and records."""
    alone = distributed.count() == 1
    return OwnRows() if alone else own_rows(self.layout.rows(self.rows), self.rows, distributed.index())

  @property
  def arguments(self) -> tuple:
    """(state, batch, validation batches): the abstract arguments of the train step."""
    val_batch = devices.batch_shapes(self.cfg, self.cfg.ghost.ghost_val_batch_size, self.layout)
    return self.state, devices.batch_shapes(self.cfg, self.rows, self.layout), (val_batch,) * len(self.cfg.val_sets)

  @property
  def wanted(self) -> dict:
    """The tree of a train state with shapes, dtypes and shardings in place of arrays."""
    return resume.to_tree(resume.abstract_arrays(self.state))

  @property
  def num_params(self) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(self.state["model"]))

  @functools.cached_property
  def flops(self) -> StepFlops:
    """Over all devices."""
    return step_flops(self.cfg.model, self.rows, self.cfg.data.max_target_length)

  @functools.cached_property
  def memory(self) -> MemoryEstimate:
    """The estimate per device. Raises ConfigError for a model that cannot be scored."""
    return estimate(self.cfg, self.layout, (self.graphdef, self.state))

  @property
  def mesh(self) -> str:
    processes = f" of {distributed.count()} processes" if distributed.count() > 1 else ""
    return describe(self.layout.mesh) + processes

  def lines(self) -> list[str]:
    """Lines on mesh, batch, validation rows, model and FLOPs."""
    lines = [f"mesh: {self.mesh}; {self.spread}"] if self.layout.num_devices > 1 else []
    lines += [self._batch_line(), *self._validation_lines()]
    return [
      *lines,
      f"number parameters: {self.num_params / 1e9:.3f} billion ({self.num_params:,})",
      self.flops.describe(),
    ]

  def _batch_line(self) -> str:
    """The batch of a step over all devices, with all factors."""
    cfg, rows = self.cfg, self.rows
    accumulated, length, steps = cfg.optimizer.gradient_accumulation_steps, cfg.data.max_target_length, cfg.run.steps
    micro = f" in {accumulated} micro-batches" if accumulated > 1 else ""
    factors = [f"per_device_batch_size {cfg.data.per_device_batch_size}"]
    factors += [f"{self.layout.num_devices} devices"] if self.layout.num_devices > 1 else []
    factors += [f"gradient_accumulation_steps {accumulated}"] if accumulated > 1 else []
    made = f" ({' x '.join(factors)})" if len(factors) > 1 else ""
    tokens = rows * length
    return (
      f"batch: {rows} rows{micro}{made} of {length} tokens = {tokens:,} tokens per step; {steps} steps = "
      f"{tokens * steps:,} tokens"
    )

  def _validation_lines(self) -> list[str]:
    """The placement of the validation rows; none without ghost or on one group of devices."""
    layout, rows = self.layout, self.cfg.ghost.ghost_val_batch_size
    if not self.cfg.val_sets or layout.row_parts == 1:
      return []
    parts = layout.rules.parts(layout.rules.leading(layout.rules.batch_axes, rows))
    if parts == layout.row_parts:
      return [f"validation: {rows} rows over {parts} devices"]
    return [
      f"validation: {rows} rows, each computed by {layout.row_parts // parts} groups of devices alike; a "
      f"ghost_val_batch_size that {layout.row_parts} divides would be spread over all"
    ]
