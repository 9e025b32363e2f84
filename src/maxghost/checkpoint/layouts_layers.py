"""Layer containers: layers stacked in one array, as siblings `layers_0, layers_1`, or keyed by integers.

A parameter tree of any form becomes a `ParamTree`: for every path without layer index and every layer, a `Ref` to that
layer's array. L layers; a stacked leaf has L on dimension min(scan axis, rank of one layer's leaf).
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from maxghost.checkpoint.layouts_store import Empty, LayoutError, StoredArray, nested
from maxghost.config.values import slash_path

Path = tuple[str, ...]
LeafId = tuple[Path, int | None]

SCANNED, UNSCANNED, INTEGER = "scanned", "unscanned", "integer"
_INDEXED = re.compile(r"(.+)_(\d+)")
# Plural on purpose: `mtp_layer_1` and Linen's automatic `MoeBlock_0` are modules of their own, not layers of a stack.
STANDARD_NAME = re.compile(r"(?:[a-z0-9_]+_)?(?:layers|blocks)(?:_outside_pipeline)?")
# Arrays below are stacked by pipeline stage as well as by layer, and are never taken apart.
_OPAQUE = "pipeline_module"


@dataclass(frozen=True)
class Container:
  """path: that of the layers, without index. period: different layers per stacked block (`layers/layers_0`, ...)."""

  path: Path
  form: str
  num_layers: int
  period: int = 1
  block_name: str = ""
  scan_axis: int = 0

  def layer_path(self, layer: int) -> Path:
    if self.form == SCANNED:
      return (*self.path, f"{self.block_name}_{layer % self.period}") if self.block_name else self.path
    return (*self.path[:-1], f"{self.path[-1]}_{layer}") if self.form == UNSCANNED else (*self.path, str(layer))


@dataclass(frozen=True)
class Ref:
  """One layer of a stored array (`index` on dimension `axis`), or all of it (index None)."""

  array: StoredArray
  axis: int = 0
  index: int | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    shape = self.array.shape
    return shape if self.index is None else shape[: self.axis] + shape[self.axis + 1 :]

  @property
  def dtype(self) -> np.dtype:
    return self.array.dtype

  def where(self) -> str:
    return slash_path(self.array.path) + ("" if self.index is None else f"[layer {self.index}]")

  def read(self, index: tuple[slice, ...] | None = None, stored: Callable | None = None) -> np.ndarray:
    """A block of it; None reads all. stored: reads a block of the array, in place of `array.read`."""
    read = stored or self.array.read
    if self.index is None:
      return read(index)
    index = index or tuple(slice(0, size) for size in self.shape)
    layer = slice(self.index, self.index + 1)
    return np.squeeze(read((*index[: self.axis], layer, *index[self.axis :])), axis=self.axis)


class LayerReader:
  """Reads layers of stored arrays. Holds the last array of up to `hold_bytes`; reads larger arrays block by block."""

  def __init__(self, hold_bytes: int):
    self._hold_bytes = hold_bytes
    self._held: dict[StoredArray, np.ndarray] = {}

  def part(self, ref: Ref, index: tuple[slice, ...] | None = None) -> np.ndarray:
    """The block `index` of the layer that `ref` points to; None gives all of it."""
    return ref.read(index, functools.partial(self._array, ref.array))

  def _array(self, array: StoredArray, index: tuple[slice, ...] | None) -> np.ndarray:
    if index is None or all(s.start == 0 and s.stop == size for s, size in zip(index, array.shape, strict=True)):
      self._held.clear()
      return array.read(None)
    if array.nbytes > self._hold_bytes >= array.chunk_nbytes:
      return array.read(index)
    if array not in self._held:
      self._held.clear()  # frees the array before the next is read
      self._held[array] = array.read(None)
    return self._held[array][index]


def blocks_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
  """The blocks of an array cut into chunks, in order; none for an empty array."""
  starts = (range(0, size, max(step, 1)) for size, step in zip(shape, chunk, strict=True))
  for corner in itertools.product(*starts):
    yield tuple(slice(i, min(i + step, size)) for i, step, size in zip(corner, chunk, shape, strict=True))


def chunk_of(shape: tuple[int, ...], itemsize: int, block_bytes: int) -> tuple[int, ...]:
  """The largest block of at most `block_bytes` that halving the longest dimension gives."""
  chunk = list(shape)
  while math.prod(chunk) * itemsize > block_bytes and max(chunk) > 1:
    longest = chunk.index(max(chunk))
    chunk[longest] = -(-chunk[longest] // 2)
  return tuple(chunk)


@dataclass
class ParamTree:
  """Leaves by (path without layer index, layer or None). empties: the places that an optimizer left out."""

  leaves: dict[LeafId, Ref] = field(default_factory=dict)
  containers: dict[Path, Container] = field(default_factory=dict)
  empties: set[LeafId] = field(default_factory=set)

  def add(self, leaf: LeafId, node: StoredArray | Empty, axis: int = 0, index: int | None = None) -> None:
    """axis, index: as in `Ref`, where the node is an array."""
    if isinstance(node, Empty):
      self.empties.add(leaf)
    else:
      self.leaves[leaf] = Ref(node, axis if index is None else min(axis, len(node.shape) - 1), index)


def whole(nodes: Mapping[Path, object]) -> ParamTree:
  """The arrays among these, as leaves that are in no layer."""
  return ParamTree({(path, None): Ref(node) for path, node in nodes.items() if isinstance(node, StoredArray)})


def container_of(path: Path, containers: Iterable[Path]) -> Path | None:
  """The container that `path` (without layer index) lies in."""
  return next((c for c in containers if path[: len(c)] == c and len(path) > len(c)), None)


def leaf_text(leaf: LeafId) -> str:
  path, layer = leaf
  return slash_path(path) if layer is None else f"{slash_path(path)} of layer {layer}"


def find_containers(nodes: Mapping[Path, object], names: Iterable[str] = (), stacked: bool = True) -> dict[Path, str]:
  """{container path: form} of the outermost layer containers of a tree by path.

  names: containers known beforehand, by last name ('tower') or path ('decoder/tower'). stacked: whether a container
  without index (`layers`) holds stacked arrays.
  """

  def is_known(prefix: Path, name: str) -> bool:
    return bool(STANDARD_NAME.fullmatch(name)) or name in names or slash_path((*prefix, name)) in names

  def walk(prefix: Path, tree: dict) -> dict[Path, str]:
    found: dict[Path, str] = {}
    groups: dict[str, dict[str, dict]] = {}
    for name, child in tree.items():
      if match := _INDEXED.fullmatch(name):
        groups.setdefault(match[1], {})[name] = child
    for base, members in groups.items():
      modules = all(isinstance(child, dict) for child in members.values())
      if modules and (is_known(prefix, base) or _look_like_layers(base, members)):
        found[(*prefix, base)] = UNSCANNED
        tree = {name: child for name, child in tree.items() if name not in members}
    for name, child in tree.items():
      here = (*prefix, name)
      if not isinstance(child, dict) or name == _OPAQUE:
        continue
      if all(key.isdigit() for key in child):
        found[here] = INTEGER
      elif stacked and is_known(prefix, name):
        found[here] = SCANNED
      else:
        found |= walk(here, child)
    return found

  return walk((), nested({path: node for path, node in nodes.items() if path and not isinstance(node, Empty)}))


def _look_like_layers(base: str, members: dict[str, dict]) -> bool:
  """Whether these are equal modules of several sub-modules each, numbered from 0; `wi_0`, `wi_1` are not."""
  if not base[0].islower() or len(members) < 2 or set(members) != {f"{base}_{i}" for i in range(len(members))}:
    return False
  if any(sum(isinstance(child, dict) for child in member.values()) < 2 for member in members.values()):
    return False

  def shapes(tree: dict) -> dict:
    return {name: shapes(child) if isinstance(child, dict) else child.shape for name, child in tree.items()}

  first, *others = map(shapes, members.values())
  return all(other == first for other in others)


def split_layers(nodes: Mapping[Path, StoredArray | Empty], found: Mapping[Path, str], scan_axis: int, *,
                 like: Mapping[Path, Container] | None = None, opaque: bool = False) -> ParamTree:  # fmt: skip
  """Turns the arrays of one tree into a ParamTree.

  found: containers and their forms. like: the parameters' containers, which give L if a moment tree has no array in a
  container. opaque: leave stacked arrays whole. Raises LayoutError if the leaves of a container differ in L.
  """
  tree = ParamTree()
  stacked: dict[Path, list[tuple[Path, StoredArray | Empty]]] = {path: [] for path in found}
  for path, node in nodes.items():
    container, form, layer, rest = position(path, found)
    if container is None:
      tree.add((path, None), node)
    elif form == SCANNED:
      stacked[container].append((rest, node))
    else:
      tree.add(((*container, *rest), layer), node)
  for container, form in found.items():
    members = stacked[container]
    if form != SCANNED:
      layers = {layer for path, layer in (*tree.leaves, *tree.empties) if path[: len(container)] == container}
      tree.containers[container] = Container(container, form, len(layers))
    elif opaque:
      for rest, node in members:
        tree.add(((*container, *rest), None), node)
      tree.containers[container] = Container(container, SCANNED, 0, scan_axis=scan_axis)
    else:
      arrays = {rest: node for rest, node in members if isinstance(node, StoredArray)}
      hint = (like or {}).get(container)
      num_stacked = _num_stacked(container, arrays, scan_axis) or (hint.num_layers // hint.period if hint else 0)
      # A stacked block may hold P different layers, layers_0 ... layers_{P-1}.
      names = {rest[0] for rest, _ in members}
      base = min((match[1] for name in names if (match := _INDEXED.fullmatch(name))), default="")
      unlike = STANDARD_NAME.fullmatch(base) and names == {f"{base}_{i}" for i in range(len(names))}
      block_name, period = (base, len(names)) if unlike else ("", 1)
      tree.containers[container] = Container(container, SCANNED, num_stacked * period, period, block_name, scan_axis)
      for rest, node in members:
        offset, below = (int(rest[0].rpartition("_")[2]), rest[1:]) if block_name else (0, rest)
        for i in range(num_stacked):
          tree.add(((*container, *below), i * period + offset), node, scan_axis, i)
  return tree


def position(path: Path, forms: Mapping[Path, str]) -> tuple[Path | None, str, int | None, Path]:
  """(container, form, layer or None if stacked, path below) of a leaf. forms: {container: form}, '' for any form."""
  for container, known in forms.items():
    depth = len(container)
    if len(path) <= depth or path[: depth - 1] != container[:-1]:
      continue
    name, below = path[depth - 1], path[depth:]
    match = _INDEXED.fullmatch(name)
    if match and match[1] == container[-1] and known in ("", UNSCANNED):
      return container, UNSCANNED, int(match[2]), below
    if name == container[-1] and below[0].isdigit() and known in ("", INTEGER):
      return container, INTEGER, int(below[0]), below[1:]
    if name == container[-1] and known in ("", SCANNED):
      return container, SCANNED, None, below
  return None, "", None, path


def _num_stacked(container: Path, arrays: Mapping[Path, StoredArray], scan_axis: int) -> int:
  """L of a stacked container: the size of most leaves on the scan axis. Raises LayoutError if others differ."""
  where, sizes = slash_path(container), {}
  for rest, array in arrays.items():
    if not array.shape:
      raise LayoutError(f"leaf {where}/{slash_path(rest)} is a scalar, but {where} stacks its layers")
    sizes[rest] = array.shape[min(scan_axis, len(array.shape) - 1)]
  usual = max(sizes.values(), key=[*sizes.values()].count, default=0)
  if wrong := {rest: size for rest, size in sizes.items() if size != usual}:
    rest, more = next(iter(wrong)), f" ({len(wrong)} of {len(sizes)} leaves differ)" if len(wrong) > 1 else ""
    said = f"leaf {where}/{slash_path(rest)} has size {wrong[rest]} on scan axis {scan_axis}, expected L={usual}{more}"
    raise LayoutError(f"{said}; give the right axis with --scan_axis")
  return usual


def without_layer(path: Path, containers: Mapping[Path, Container]) -> Path:
  """`path` without its layer index, whatever its form."""
  container, form, _, below = position(path, dict.fromkeys(containers, ""))
  if container is None:
    return path
  if form == SCANNED and containers[container].block_name and len(below) > 1 and _INDEXED.fullmatch(below[0]):
    below = below[1:]
  return (*container, *below)
