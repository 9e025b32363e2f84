"""Shardings from logical axes: of a train state, of batches, and of activations inside a model.

A model names the axes of its activations with `constrain(x, axes)`; the layout of the surrounding `use(layout)` at
tracing time maps them to mesh axes. Without a layout, or on one device, `constrain` returns x unchanged.
"""

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from maxghost.config import ConfigError, ParallelConfig, did_you_mean
from maxghost.config.values import slash_path
from maxghost.parallel import mesh as meshes
from maxghost.parallel.axis_rules import APART, BATCH, DEFAULT_RULES, FACTOR, AxisRules, make_rules
from maxghost.parallel.stages import AXIS as STAGE
from maxghost.parallel.stages import Stages

AXES = "axes"  # metadata of a Variable: its logical axes
HOST = "pinned_host"
# An option for programs of several CPU devices of a process. Collectives hold a thread until all their devices have
# come: of several that XLA's default order starts at once, some wait forever. With one device in each of several
# processes, this order lets collectives of two loops meet instead, and gloo ends the processes.
IN_ORDER: dict[str, Any] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

_current: contextvars.ContextVar = contextvars.ContextVar("maxghost_layout", default=None)
_target: contextvars.ContextVar = contextvars.ContextVar("maxghost_target_platform", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
  """How the arrays of a run are placed: a mesh and the axis rules.

  mesh: of devices, or abstract for tracing only. split_moments: whether the optimizer's state is also split over mesh
  axis data (ZeRO-1). record: called with (label, axes, shape, dtype name, spec) of every activation instead of
  constraining it. abstract_platform: the platform that an abstract mesh stands for. stages: of a pipeline.
  """

  mesh: Any
  rules: AxisRules
  split_moments: bool = False
  record: Callable | None = None
  abstract_platform: str = ""
  stages: Stages | None = None

  @classmethod
  def of(cls, cfg: ParallelConfig, devices: Sequence | None = None) -> "Layout":
    """The layout of a configuration over these devices (default: all). Raises ConfigError."""
    mesh = meshes.make_mesh(cfg, jax.devices() if devices is None else devices)
    rules = make_rules(cfg.logical_axis_rules, cfg.override_logical_axis_rules, dict(mesh.shape))
    return cls(mesh, rules, cfg.shard_optimizer_over_data, stages=Stages.of(cfg, mesh.shape[STAGE]))

  def inside(self, axis: str) -> "Layout":
    """The layout of one part of the mesh along `axis`, inside a shard_map over it."""
    rules = dataclasses.replace(self.rules, sizes={**self.rules.sizes, axis: 1})
    inner = {"mesh": jax.sharding.get_abstract_mesh(), "abstract_platform": self.platform, "stages": None}
    return dataclasses.replace(self, rules=rules, **inner)

  @property
  def num_devices(self) -> int:
    return math.prod(self.rules.sizes.values())

  @property
  def platform(self) -> str:
    """Platform that is compiled for: cpu, gpu, tpu."""
    return self.abstract_platform or self.mesh.devices.flat[0].platform

  def sharding(self, spec: PartitionSpec) -> Sharding:
    return NamedSharding(self.mesh, spec) if self.num_devices > 1 else SingleDeviceSharding(self.mesh.devices.flat[0])

  def spec(self, axes: Sequence[str | None], shape: Sequence[int], label: str) -> PartitionSpec:
    """The PartitionSpec of a tensor. Raises ConfigError, see `AxisRules.assign`."""
    return partition_spec(self.rules.assign(axes, shape, label))

  def constrain(self, x, axes: Sequence[str | None], spec: PartitionSpec, label: str):
    """x, split as `spec` says, or recorded."""
    if self.record is None:
      return jax.lax.with_sharding_constraint(x, self.sharding(spec))
    if any(axes):
      self.record(label, tuple(axes), x.shape, str(x.dtype), spec)
    return x

  def rows(self, num_rows: int, apart: bool = False) -> Sharding:
    """The sharding of batch arrays [B, ...]. apart: of rows that slices which train apart share out (DiLoCo)."""
    own = (APART,) if apart and self.apart > 1 else ()
    axes = self.rules.leading(self.rules.batch_axes, num_rows // self.apart if own else num_rows)
    return self.sharding(partition_spec(((*own, *axes),)))

  @property
  def apart(self) -> int:
    """Number of slices that train apart; 1 without DiLoCo."""
    return self.rules.sizes.get(APART, 1)

  @property
  def together(self) -> "Layout":
    """The layout of what all slices do together: rows are split over all of them."""
    if self.apart == 1:
      return self
    rows = tuple((name, (APART, *axes) if name == BATCH else axes) for name, axes in self.rules.rows)
    return dataclasses.replace(self, rules=dataclasses.replace(self.rules, rows=rows))

  @property
  def row_parts(self) -> int:
    """Number of parts that a batch is split into."""
    return self.rules.parts(self.rules.batch_axes)

  def variable_spec(self, path: tuple, variable: nnx.Variable, moments: bool = False) -> PartitionSpec:
    """A Variable's PartitionSpec by its logical axes, replicated without. moments: as part of the optimizer's state."""
    axes = variable.get_metadata().get(AXES)
    shape, label = variable.get_value().shape, slash_path(path)
    if axes is None:
      return PartitionSpec()
    parts = self.rules.assign(axes, shape, label)
    if self.split_moments and (moments or isinstance(variable, nnx.OptState)):
      parts = self._over_data(parts, shape)
    return partition_spec(parts)

  def _over_data(self, parts: tuple, shape: Sequence[int]) -> tuple:
    """The same with mesh axis data on the largest dimension that it divides; unchanged if it divides none."""
    size = self.rules.sizes.get("data", 1)
    fits = [i for i, n in enumerate(shape) if n % (self.rules.parts(parts[i]) * size) == 0]
    if size == 1 or not fits or any("data" in axes for axes in parts):
      return parts
    best = max(fits, key=lambda i: shape[i] // self.rules.parts(parts[i]))
    return tuple((*axes, "data") if i == best else axes for i, axes in enumerate(parts))

  def shardings(self, state: nnx.State) -> nnx.State:
    """The State with each leaf replaced by its sharding. Raises ConfigError naming the leaf."""
    return map_state(state, self._variable_sharding)

  def abstract(self, state: nnx.State) -> nnx.State:
    """The State as `jax.ShapeDtypeStruct`s with shardings; a leaf in host memory stays there."""

    def leaf(path, variable):
      value = variable.get_value()
      return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self._variable_sharding(path, variable))

    return map_state(state, leaf)

  def _variable_sharding(self, path: tuple, variable: nnx.Variable) -> Sharding:
    spec, kind = self.variable_spec(path, variable), getattr(variable.get_value().sharding, "memory_kind", None)
    return NamedSharding(self.mesh, spec, memory_kind=kind) if kind == HOST else self.sharding(spec)

  def put(self, arrays: dict[str, np.ndarray], num_rows: int | None = None) -> dict[str, jax.Array]:
    """Batch arrays of `num_rows` rows over all processes, from the rows of this one; None: every process has all."""
    if self.num_devices == 1:
      return jax.device_put(arrays, self.mesh.devices.flat[0])
    apart = num_rows is not None
    num_rows = num_rows or len(next(iter(arrays.values())))
    shapes = {name: (num_rows, *x.shape[1:]) for name, x in arrays.items()}
    return jax.make_array_from_process_local_data(self.rows(num_rows, apart), arrays, shapes)


def local_block(shape: Sequence[int], sharding: Sharding) -> tuple[slice, ...]:
  """The smallest block of an array of this shape that has the parts of all devices of this process."""
  parts: Any = sharding.addressable_devices_indices_map(tuple(shape)).values()
  sides = [[s.indices(size)[:2] for s in side] for size, side in zip(shape, zip(*parts, strict=True), strict=True)]
  return tuple(slice(min(start for start, _ in side), max(stop for _, stop in side)) for side in sides)


def spread(value: np.ndarray | jax.Array, sharding: Sharding, shape: Sequence[int] = (), start: Sequence[int] = ()):
  """An array of which each process gives its parts of `value`, which all have whole; or of a `local_block` of an array
  of this shape, which begins at `start` in each dimension. `jax.device_put` compares the values first, and for that
  puts the whole array of every process on every device."""
  if sharding.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
    return jax.device_put(value, sharding)
  own = np.asarray(value)
  shape, start = tuple(shape or own.shape), start or [0] * own.ndim

  def part(index: Any) -> np.ndarray:
    sides = (s.indices(size) for s, size in zip(index, shape, strict=True))
    return own[tuple(slice(i - first, j - first) for (i, j, _), first in zip(sides, start, strict=True))]

  return jax.make_array_from_callback(shape, sharding, part)


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
  """Sets the variable inside a `with` block."""
  token = variable.set(value)
  try:
    yield
  finally:
    variable.reset(token)


use = functools.partial(setting, _current)  # a layout, or None: the current one, which `constrain` uses
current: Callable[[], Layout | None] = _current.get  # the layout that a function is traced for
# Chooses kernels for 'cpu', 'gpu' or 'tpu', to compile ahead of time on a machine without the device.
tracing_for = functools.partial(setting, _target)


def ordered_collectives(arrays: Iterable[Any]) -> dict[str, Any]:
  """XLA's option for a program whose arguments are `arrays`: as `in_order`."""
  return in_order({device for x in arrays if isinstance(x, jax.Array) for device in x.devices()})


def in_order(devices: Iterable[Any]) -> dict[str, Any]:
  """`IN_ORDER` for a program of these devices, if several of them are CPU devices of this process."""
  own = [device for device in devices if device.platform == "cpu" and device.process_index == jax.process_index()]
  return IN_ORDER if len(own) > 1 else {}


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': the platform traced for, by default that of the current layout, or JAX's default."""
  layout = current()
  return _target.get() or (jax.default_backend() if layout is None else layout.platform)


def across_devices() -> Layout | None:
  """The current layout, if it has several devices."""
  layout = current()
  return None if layout is None or layout.num_devices == 1 else layout


def split_over(axes: Sequence[str | None], i: int) -> tuple[str, ...]:
  """The mesh axes of several devices that split dimension i of a tensor with these logical axes."""
  return () if (layout := across_devices()) is None else layout.rules.assign(axes, [0] * len(axes), "a tensor")[i]


def mapped(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
  """`jax.shard_map` over all mesh axes that are not those of a shard_map around it."""
  free = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
  specs: Any = {"in_specs": in_specs, "out_specs": out_specs}
  return jax.shard_map(function, mesh=mesh, axis_names=free, check_vma=False, **specs)


def constrain(x, axes: Sequence[str | None], label: str = "an activation"):
  """x, split over the mesh by its logical axes. axes: one name for each dimension, None = not split."""
  if (layout := across_devices()) is None:
    return x
  return layout.constrain(x, axes, layout.spec(axes, x.shape, label), label)


def constrain_factor(x, dim: int, places: Mapping[int, int], axes: Sequence[str | None], shape: Sequence[int],
                     label: str):  # fmt: skip
  """x, a factor of a tensor's matrix view, split like that tensor.

  places: {dimension of x: the tensor's} of common dimensions, which are split alike; `dim` of x, one of them, further
  over the mesh axes of FACTOR's rule as far as they divide it. axes, shape, label: of the tensor.
  """
  if (layout := across_devices()) is None:
    return x
  layout.rules.check((FACTOR,), label)
  assigned = layout.rules.assign(axes, shape, label)
  split = {i: assigned[there] for i, there in places.items()}
  spent = {axis for found in split.values() for axis in found}
  further = [axis for axis in layout.rules.active(layout.rules.first(FACTOR)) if axis not in spent]
  split[dim] = layout.rules.leading((*split[dim], *further), x.shape[dim])
  spec = partition_spec([split.get(i, ()) for i in range(x.ndim)])
  named = {i: axes[there] for i, there in places.items()} | {dim: FACTOR}
  return layout.constrain(x, [named.get(i) for i in range(x.ndim)], spec, label)


def constrain_state(state: nnx.State, moments: bool = False) -> nnx.State:
  """A State with each leaf split by its logical axes, if any. moments: like the optimizer's, over data too."""
  if (layout := across_devices()) is None or layout.record is not None:
    return state

  def leaf(path, variable):
    value = variable.get_value()
    if AXES not in variable.get_metadata():
      return value
    sharding = layout.sharding(layout.variable_spec(path, variable, moments))
    if getattr(jax.typeof(value), "memory_space", None) == jax.memory.Space.Host:
      sharding = sharding.with_memory_kind(HOST)
    return jax.lax.with_sharding_constraint(value, sharding)

  return map_state(state, leaf)


@dataclasses.dataclass(frozen=True, slots=True)
class OwnRows:
  """The rows of this process: part `shard` of `num_shards` equal parts of the batch.

  writes: whether this process records the results of these rows; other processes may hold the same rows.
  """

  num_shards: int = 1
  shard: int = 0
  writes: bool = True


def own_rows(sharding: Sharding, num_rows: int, process: int) -> OwnRows:
  """The part of a process under the sharding of batch arrays [B, ...]. Raises ConfigError for partial overlaps."""
  held: dict[int, set[tuple[int, int]]] = {}
  for device, index in sharding.devices_indices_map((num_rows,)).items():
    start, stop, _ = index[0].indices(num_rows)
    held.setdefault(device.process_index, set()).add((start, stop))
  parts = sorted({frozenset(blocks) for blocks in held.values()}, key=min)
  sizes = {sum(stop - start for start, stop in blocks) for blocks in parts}
  if len(sizes) > 1 or sizes.pop() * len(parts) != num_rows:
    what = f"{len(held)} processes hold parts of the {num_rows} rows that overlap: give each process whole copies of"
    way = "with a product of data, fsdp and expert parallelism that is a multiple of the processes or divides them"
    raise ConfigError(f"{what} rows, {way}")
  mine = frozenset(held[process])
  return OwnRows(len(parts), parts.index(mine), min(p for p, blocks in held.items() if blocks == mine) == process)


def partition_spec(parts: Sequence[tuple[str, ...]]) -> PartitionSpec:
  """The PartitionSpec from the mesh axes of each dimension, without trailing dimensions that are not split."""
  entries = [axes[0] if len(axes) == 1 else (axes or None) for axes in parts]
  while entries and entries[-1] is None:
    entries.pop()
  return PartitionSpec(*entries)


def check_rules(abstract: nnx.State, layout: Layout) -> None:
  """Raises ConfigError for a rule that names an unknown mesh axis, or a logical axis that this model does not have.

  abstract: a train state. The axes of activations are known only when they are traced, so an axis activation_* is
  accepted unless it resembles a known one.
  """
  layout.rules.check()
  states = [v.get_metadata().get(AXES) or () for _, v in nnx.to_flat_state(abstract)]
  known = {name for name, _ in DEFAULT_RULES}.union(*states) - {None}
  for name in layout.rules.names:
    foreign = name.startswith("activation_") and not difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if name not in known and not foreign:
      own = ", ".join(sorted({axis for axes in states for axis in axes if axis}))
      said = f"logical_axis_rules: no tensor has axis '{name}'{did_you_mean(name, sorted(known))}"
      raise ConfigError(f"{said}; the axes of this model's weights are {own}")


def parameters(state: nnx.State) -> Iterator[tuple[tuple, nnx.Variable, int]]:
  """(path, Variable, how many parameters) of a model, adapters too. A quantised matrix (`adapters.quantized`) counts by
  its codes, two of which are in a uint8."""
  for path, variable in nnx.to_flat_state(state):
    if isinstance(variable, nnx.Param) or str(path[-1]).endswith("codes"):  # wi_0_codes of experts
      leaf = variable.get_value()
      yield path, variable, leaf.size * (2 if leaf.dtype == np.uint8 else 1)


def check_spread(abstract: nnx.State, layout: Layout, tolerance: float) -> str:
  """Returns a line that compares a device's share of the parameters with an even split over the weights' mesh axes.

  abstract: a train state with shardings. Raises ConfigError, naming the largest parameter that is not split, if the
  excess is above `tolerance`.
  """
  total = held = 0
  whole: list[tuple[int, str]] = []
  axes: set[str] = set()
  for path, variable, size in parameters(abstract):
    leaf = variable.get_value()
    own = size * math.prod(leaf.sharding.shard_shape(leaf.shape)) // leaf.size
    total, held = total + size, held + own
    if own == size:
      whole.append((size, slash_path(path)))
    for name, row in layout.rules.rows:
      if name in (variable.get_metadata().get(AXES) or ()):
        axes.update(layout.rules.active(row))
  parts, share = layout.rules.parts([*axes]), f"a device holds {held / total:.2%} of the parameters"
  if (excess := held * parts / total - 1) > tolerance:
    size, label = max(whole, default=(0, "none"))
    said = f"sharding_tolerance={tolerance:g}: {share}, {excess:.1%} more than an even split over "
    said += f"{', '.join(sorted(axes))} (1/{parts}); the largest parameter kept whole is {label} ({size:,})"
    fix = f"add a row for its axes to logical_axis_rules, or set sharding_tolerance={math.ceil(excess * 100) / 100:g}"
    raise ConfigError(f"{said}: {fix}")
  return f"{share}, an even split is {1 / parts:.2%}"


def map_state(state: nnx.State, leaf: Callable[[tuple, nnx.Variable], Any]) -> nnx.State:
  """A State of the same paths with the values leaf(path, Variable)."""
  return nnx.from_flat_state([(path, v.replace(leaf(path, v))) for path, v in nnx.to_flat_state(state)])
