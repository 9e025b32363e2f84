"""The collectives of a compiled program, read from its HLO text.

Those in a loop are counted once per iteration, if the text gives the number of iterations. The TPU compiler repeats a
collective in every computation that overlaps it; equal channels identify it, but for those of a shard_map, which have
one channel: these differ in their shape, operation, pairs of devices or place. Bytes are those of the whole array that
a group of devices exchanges, on one device: the result of an all-gather, the operand of a reduce-scatter.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPERATION = re.compile(r"(?<=[\s)}])([a-z][a-z0-9-]*)\(")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_SAME = re.compile(r'(source_target_pairs=\{\{[\d,{} ]*\}|op_name="[^"]*")')
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_CONSTANT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
  """A collective along mesh `axes`, run `count` times a step. shape: of the exchanged array, the first of several."""

  kind: str
  axes: tuple[str, ...]
  shape: str
  num_bytes: int
  count: int


def read(hlo: str, mesh_shape: Mapping[str, int], slice_axes: tuple[str, ...] = ()) -> list[Collective]:
  """The collectives of a compiled program's text.

  mesh_shape: in the order of the mesh. slice_axes: those between slices, which the TPU compiler crosses by transfers of
  the hosts.
  """
  computations, entry = _split(hlo)
  times = collections.Counter()
  for name, i, runs in _in_order(computations, entry):
    times[name, i] += runs
  found: dict[Any, Collective] = {}
  seen: collections.Counter = collections.Counter()
  for (name, i), runs in times.items():
    line = computations[name][i]
    collective = _between_slices(line, runs, slice_axes) or _collective(line, name, runs, mesh_shape)
    if collective is None or not runs:
      continue
    key: Any = (name, i)
    if channel := _CHANNEL.search(line):
      alike = dataclasses.replace(collective, count=0), channel[1], *_SAME.findall(line)
      key, seen[name, alike] = (*alike, seen[name, alike]), seen[name, alike] + 1
    if key not in found or found[key].count < collective.count:
      found[key] = collective
  return list(found.values())


def table(found: list[Collective]) -> list[str]:
  """Lines of kind, mesh axes, runs per step and total bytes; the largest first."""
  counts, sizes = collections.Counter(), collections.Counter()
  for one in found:
    counts[one.kind, one.axes] += one.count
    sizes[one.kind, one.axes] += one.count * one.num_bytes
  return [
    f"{kind:<19} over {' x '.join(axes) or 'no axis':<18} {counts[kind, axes]:>7,} times {size / 1e6:>14,.1f} MB"
    for (kind, axes), size in sizes.most_common()
  ]


def first_between_processes(hlo: str, mesh: Any) -> str:
  """The collective of a program that first needs a device of another process, for a message; empty: none does."""
  process = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  spanning = {axis for i, axis in enumerate(mesh.axis_names) if (process != process.take([0], axis=i)).any()}
  computations, entry = _split(hlo)
  in_order = (_collective(computations[name][i], name, 1, mesh.shape) for name, i, _ in _in_order(computations, entry))
  first = next((one for one in in_order if one and spanning.intersection(one.axes)), None)
  return f"{first.kind} of {first.shape} over {' x '.join(first.axes)}" if first else ""


def _in_order(computations: dict[str, list[str]], name: str, runs: int = 1) -> Iterator[tuple[str, int, int]]:
  """(computation, number of the instruction, how often it runs) of all that `runs` runs of a computation execute."""
  for i, line in enumerate(computations.get(name, ())):
    yield name, i, runs
    called = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
      called += [branch.strip().lstrip("%") for branch in branches.split(",")]
    for other in called:
      yield from _in_order(computations, other, runs * (_trips(line, computations) if " while(" in line else 1))


def _split(hlo: str) -> tuple[dict[str, list[str]], str]:
  """({computation: its instructions, without their names}, name of the entry computation)."""
  computations: dict[str, list[str]] = {}
  entry, current = "", None
  for line in hlo.splitlines():
    line = _COMMENT.sub("", line)
    if line.endswith("{") and not line.startswith(" ") and (found := _COMPUTATION.match(line)):
      current = computations.setdefault(found[2], [])
      entry = found[2] if found[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and " = " in line:
      current.append(" " + line.partition(" = ")[2])
  return computations, entry


def _trips(line: str, computations: dict[str, list[str]]) -> int:
  """Iterations of a loop: the compiler's note, else the only constant in its condition, else 1."""
  if found := _TRIPS.search(line):
    return int(found[1])
  waiting, numbers = _CONDITION.findall(line), set()
  while waiting:
    for inner in computations.get(waiting.pop(), ()):
      numbers.update(map(int, _CONSTANT.findall(inner)))
      waiting += _CALLED.findall(inner)
  return numbers.pop() if len(numbers) == 1 else 1


def _between_slices(line: str, times: int, slice_axes: tuple[str, ...]) -> Collective | None:
  """The sending half of a transfer between slices, which names the collective it belongs to."""
  found = _MEGASCALE.search(line)
  if found is None or " send(" not in line:
    return None
  dtype, dims = _SHAPE.findall(line)[0]
  return Collective(found[1].lower().replace("_", "-"), slice_axes, f"{dtype}[{dims}]", _bytes(dtype, dims), times)


def _collective(line: str, computation: str, times: int, mesh_shape) -> Collective | None:
  operation = _OPERATION.search(line)
  kind = operation[1].removesuffix("-start") if operation else ""
  if operation is None or kind not in KINDS:
    return None
  groups = _groups(line, math.prod(mesh_shape.values()))
  shapes = [(_bytes(dtype, dims), f"{dtype}[{dims}]") for dtype, dims in _SHAPE.findall(line[: operation.start()])]
  if not shapes or groups.shape[-1] == 1:  # a group of one device exchanges nothing
    return None
  size, shape = max(shapes) if operation[1].endswith("-start") else (sum(s for s, _ in shapes), shapes[0][1])
  if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"  # how the TPU compiler writes it: an all-reduce of which each device keeps its part
  elif kind == "reduce-scatter" and not operation[1].endswith("-start"):
    size *= groups.shape[1]
  return Collective(kind, _axes(groups, mesh_shape), shape, size, times)


def _bytes(dtype: str, dims: str) -> int:
  digits = re.search(r"\d+", dtype)
  bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
  return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def _groups(line: str, num_devices: int) -> np.ndarray:
  """Device numbers, one group per row (for permutations, pairs); all devices in one group if the text names none."""
  if found := _IOTA.search(line):
    return _iota(found[2], found[3]).reshape([int(n) for n in found[1].split(",")])
  if found := _MESH.search(line):
    return _mesh_groups(*found.groups())
  if found := _LISTED.search(line):
    groups = [[int(n) for n in part.split(",") if n] for part in re.findall(r"\{([\d, ]*)\}", found[1])]
    return np.array([group for group in groups if len(group) == len(groups[0])])
  return np.arange(num_devices)[None]


def _iota(dims: str, order: str | None) -> np.ndarray:
  """Device numbers in an array of shape `dims`, its axes then in this `order`."""
  shape = [int(n) for n in dims.split(",")]
  numbers = np.arange(math.prod(shape)).reshape(shape)
  return numbers.transpose([int(n) for n in order.split(",")]) if order else numbers


def _mesh_groups(axes: str, dims: str | None, order: str | None, listed: str | None, varied: str) -> np.ndarray:
  """Groups given by the compiler's own mesh: 'name'=size, an optional device order, and the axes along which a group
  runs, or parts 'name':(before)size of axes."""
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  count = math.prod(sizes.values())
  numbers = np.array([int(n) for n in listed.split(",")]) if listed else _iota(dims or str(count), order)
  cuts = {}
  for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", varied):
    before, size = (int(before), int(size)) if size else (1, sizes[name])
    cuts.setdefault(name, []).append((before, size))
  shape, moving = [], []
  for name, size in sizes.items():
    done = 1
    for before, part in sorted(cuts.get(name, [])):
      shape += [before // done, part]
      moving.append(len(shape) - 1)
      done = before * part
    shape.append(size // done)
  numbers = numbers.reshape(shape)
  still = [axis for axis in range(len(shape)) if axis not in moving]
  return numbers.transpose([*still, *moving]).reshape(-1, math.prod(shape[axis] for axis in moving))


def _axes(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes along which the devices of a group differ."""
  if groups.size == 0:
    return ()
  places = np.stack(np.unravel_index(groups, tuple(mesh_shape.values())))  # [axes, groups, members]
  return tuple(axis for axis, moves in zip(mesh_shape, (places != places[:, :, :1]).any((1, 2)), strict=True) if moves)
