"""Layer containers: layers stacked in one array, as siblings `layers_0, layers_1`, or keyed by integers.

A parameter tree of any form becomes a `ParamTree`: for every path without layer index and every layer, a `Ref` to that
layer's array. Comparing, stacking and unstacking are then the same for all forms.
L layers; a stacked leaf has L on dimension min(scan axis, rank of one layer's leaf).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from maxghost.checkpoint.layouts_store import Empty, LayoutError, StoredArray, nested
from maxghost.config.values import slash_path

Path = tuple[str, ...]
LeafId = tuple[Path, int | None]

SCANNED, UNSCANNED, INTEGER = "scanned", "unscanned", "integer"
_INDEXED = re.compile(r"(.+)_(\d+)")
# Plural on purpose: `mtp_layer_1` and Linen's automatic `MoeBlock_0` are modules of their own, not layers of a stack.
_CONTAINER_NAME = re.compile(r"(?:[a-z0-9_]+_)?(?:layers|blocks)(?:_outside_pipeline)?")
# Stacked by pipeline stage as well as by layer: moved as they are, never taken apart.
_OPAQUE = "pipeline_module"


@dataclass(frozen=True)
class Container:
  """path: where the layers are, without index. period: unlike layers per stacked block (`layers/layers_0`, ...)."""

  path: Path
  form: str
  num_layers: int
  period: int = 1
  block_name: str = ""
  scan_axis: int = 0


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


class LayerReader:
  """Reads layers of stored arrays. The last array stays in memory, because its layers and blocks are read in turn.

  hold_bytes: larger arrays are read block by block instead, unless one chunk of them is larger still.
  """

  def __init__(self, hold_bytes: int):
    self._hold_bytes = hold_bytes
    self._held: tuple[StoredArray | None, np.ndarray | None] = (None, None)

  def part(self, ref: Ref, index: tuple[slice, ...]) -> np.ndarray:
    """The block `index` of the layer that `ref` points to."""
    if ref.index is None:
      return self._array(ref.array, index)
    index = (*index[: ref.axis], slice(ref.index, ref.index + 1), *index[ref.axis :])
    return np.squeeze(self._array(ref.array, index), axis=ref.axis)

  def _array(self, array: StoredArray, index: tuple[slice, ...]) -> np.ndarray:
    if all(s.start == 0 and s.stop == size for s, size in zip(index, array.shape, strict=True)):
      self._held = (None, None)
      return array.read(None)
    if array.nbytes > self._hold_bytes >= array.chunk_nbytes:
      return array.read(index)
    if self._held[0] is not array:
      self._held = (None, None)  # freed before the next one is read
      self._held = (array, array.read(None))
    held = self._held[1]
    assert held is not None
    return held[index]


def blocks_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
  """The blocks of an array cut into chunks, in order; none for an empty array."""
  counts = [-(-size // step) if size else 0 for size, step in zip(shape, chunk, strict=True)]
  for position in np.ndindex(*counts):
    yield tuple(
      slice(i * step, min((i + 1) * step, size)) for i, step, size in zip(position, chunk, shape, strict=True)
    )


def chunk_of(shape: tuple[int, ...], itemsize: int, block_bytes: int) -> tuple[int, ...]:
  """The largest block of at most `block_bytes` that halving the longest dimension gives."""
  chunk = list(shape)
  while math.prod(chunk) * itemsize > block_bytes and max(chunk) > 1:
    longest = chunk.index(max(chunk))
    chunk[longest] = -(-chunk[longest] // 2)
  return tuple(chunk)


@dataclass
class ParamTree:
  """Leaves by (path without layer index, layer or None); `empties` are the places an optimizer left out."""

  leaves: dict[LeafId, Ref] = field(default_factory=dict)
  containers: dict[Path, Container] = field(default_factory=dict)
  empties: set[LeafId] = field(default_factory=set)

  def add(self, leaf: LeafId, node: StoredArray | Empty, axis: int = 0, index: int | None = None) -> None:
    """axis, index: as in `Ref`, where the node is an array."""
    if isinstance(node, Empty):
      self.empties.add(leaf)
    else:
      self.leaves[leaf] = Ref(node, axis if index is None else min(axis, len(node.shape) - 1), index)


def container_of(path: Path, containers: Iterable[Path]) -> Path | None:
  """The container that `path` (without layer index) lies in."""
  return next((c for c in containers if path[: len(c)] == c and len(path) > len(c)), None)


def is_standard_name(name: str) -> bool:
  """Whether a container of this name is recognised without being told."""
  return _CONTAINER_NAME.fullmatch(name) is not None


def leaf_text(leaf: LeafId) -> str:
  path, layer = leaf
  return slash_path(path) if layer is None else f"{slash_path(path)} of layer {layer}"


class ContainerFinder:
  """Decides which parts of a tree are layers.

  names: containers known beforehand, by last name ('tower') or path ('decoder/tower'); given by the user or recorded in
  the checkpoint. stacked: whether an un-indexed container (`layers`) holds stacked arrays.
  """

  def __init__(self, names: Iterable[str] = (), *, stacked: bool = True):
    self._names = frozenset(names)
    self._stacked = stacked

  def find(self, nodes: Mapping[Path, object]) -> dict[Path, str]:
    """{container path: form} over the outermost containers of `nodes`."""
    return self._walk((), nested({path: node for path, node in nodes.items() if path and not isinstance(node, Empty)}))

  def _walk(self, prefix: Path, tree: dict) -> dict[Path, str]:
    found: dict[Path, str] = {}
    indexed = self._indexed_children(prefix, tree)
    for base, members in indexed.items():
      found[(*prefix, base)] = UNSCANNED
      tree = {name: child for name, child in tree.items() if name not in members}
    for name, child in tree.items():
      here = (*prefix, name)
      if not isinstance(child, dict) or name == _OPAQUE:
        continue
      if all(key.isdigit() for key in child):
        found[here] = INTEGER
      elif self._stacked and self._known(prefix, name):
        found[here] = SCANNED
      else:
        found |= self._walk(here, child)
    return found

  def _indexed_children(self, prefix: Path, tree: dict) -> dict[str, dict[str, dict]]:
    groups: dict[str, dict[str, dict]] = {}
    for name, child in tree.items():
      if match := _INDEXED.fullmatch(name):
        groups.setdefault(match[1], {})[name] = child
    return {
      base: members
      for base, members in groups.items()
      if all(isinstance(child, dict) for child in members.values())
      and (self._known(prefix, base) or _look_like_layers(base, members))
    }

  def _known(self, prefix: Path, name: str) -> bool:
    return is_standard_name(name) or name in self._names or slash_path((*prefix, name)) in self._names


def _look_like_layers(base: str, members: dict[str, dict]) -> bool:
  """Equal modules of several sub-modules each, numbered from 0: layers, whatever their name; `wi_0`, `wi_1` are not."""
  if not base[0].islower() or len(members) < 2 or set(members) != {f"{base}_{i}" for i in range(len(members))}:
    return False
  if any(sum(isinstance(child, dict) for child in member.values()) < 2 for member in members.values()):
    return False
  shapes = [_shapes(member) for member in members.values()]
  return all(shape == shapes[0] for shape in shapes)


def _shapes(tree: dict) -> dict:
  return {name: _shapes(child) if isinstance(child, dict) else child.shape for name, child in tree.items()}


def split_layers(
  nodes: Mapping[Path, StoredArray | Empty],
  found: Mapping[Path, str],
  scan_axis: int,
  *,
  like: Mapping[Path, Container] | None = None,
  opaque: bool = False,
) -> ParamTree:
  """Turns the arrays of one tree into a ParamTree.

  found: containers and their forms, from `ContainerFinder.find` or `forms_in`. like: the parameters' containers, which
  tell L where a moment tree has no array in one. opaque: leave stacked arrays whole.
  Raises LayoutError where a stacked leaf has another number of layers than the rest of its container.
  """
  tree = ParamTree()
  stacked: dict[Path, list[tuple[Path, StoredArray | Empty]]] = {}
  for path, node in nodes.items():
    container, layer, rest = _position(path, found)
    if container is None:
      tree.add((path, None), node)
    elif layer is None:
      stacked.setdefault(container, []).append((rest, node))
    else:
      tree.add(((*container, *rest), layer), node)
  for container, form in found.items():
    if form == SCANNED:
      hint = (like or {}).get(container)
      num_stacked = hint.num_layers // hint.period if hint else 0
      _split_stacked(tree, container, stacked.get(container, []), scan_axis, num_stacked, opaque)
    else:
      layers = {leaf[1] for leaf in (*tree.leaves, *tree.empties) if leaf[0][: len(container)] == container}
      tree.containers[container] = Container(container, form, len(layers))
  return tree


def _form_of(path: Path, container: Path) -> str:
  """The form of the container where `path` lies in it, else ''."""
  depth = len(container)
  if len(path) <= depth or path[: depth - 1] != container[:-1]:
    return ""
  if path[depth - 1] == container[-1]:
    return INTEGER if path[depth].isdigit() else SCANNED
  match = _INDEXED.fullmatch(path[depth - 1])
  return UNSCANNED if match and match[1] == container[-1] else ""


def _position(path: Path, found: Mapping[Path, str]) -> tuple[Path | None, int | None, Path]:
  """(container, layer, path below the layer); the layer is None in a stacked container."""
  for container, form in found.items():
    depth, here = len(container), _form_of(path, container)
    if here == form == UNSCANNED:
      return container, int(path[depth - 1].rpartition("_")[2]), path[depth:]
    if form == INTEGER and here in (INTEGER, SCANNED):
      return container, int(path[depth]), path[depth + 1 :]
    if form == SCANNED and here in (INTEGER, SCANNED):
      return container, None, path[depth:]
  return None, None, path


def _split_stacked(
  tree: ParamTree, container: Path, members: list, scan_axis: int, num_stacked: int, opaque: bool
) -> None:
  if opaque:
    for rest, node in members:
      tree.add(((*container, *rest), None), node)
    tree.containers[container] = Container(container, SCANNED, 0, scan_axis=scan_axis)
    return
  arrays = [(rest, node) for rest, node in members if isinstance(node, StoredArray)]
  num_stacked = _num_stacked(container, arrays, scan_axis) or num_stacked
  block_name, period = _block({rest[0] for rest, _ in members})
  tree.containers[container] = Container(container, SCANNED, num_stacked * period, period, block_name, scan_axis)
  for rest, node in members:
    match = _INDEXED.fullmatch(rest[0]) if block_name else None
    offset, tail = (int(match[2]), rest[1:]) if match else (0, rest)
    for i in range(num_stacked):
      tree.add(((*container, *tail), i * period + offset), node, scan_axis, i)


def _block(names: set[str]) -> tuple[str, int]:
  """('layers', P) where a stacked block holds the P unlike layers layers_0 ... layers_{P-1}, else ('', 1)."""
  matches = [match for name in names if (match := _INDEXED.fullmatch(name))]
  if not matches or len(matches) < len(names):
    return "", 1
  bases, indices = {match[1] for match in matches}, {int(match[2]) for match in matches}
  if len(bases) > 1 or indices != set(range(len(names))) or not _CONTAINER_NAME.fullmatch(min(bases)):
    return "", 1
  return min(bases), len(names)


def _num_stacked(container: Path, arrays: list[tuple[Path, StoredArray]], scan_axis: int) -> int:
  """L of a stacked container: the size most leaves have on the scan axis. All must have it."""
  sizes = {}
  for rest, array in arrays:
    if not array.shape:
      raise LayoutError(
        f"leaf {slash_path((*container, *rest))} is a scalar, but {slash_path(container)} stacks its layers"
      )
    sizes[rest] = array.shape[min(scan_axis, len(array.shape) - 1)]
  if not sizes:
    return 0
  expected = Counter(sizes.values()).most_common(1)[0][0]
  wrong = [(rest, size) for rest, size in sizes.items() if size != expected]
  if wrong:
    rest, size = wrong[0]
    raise LayoutError(
      f"leaf {slash_path((*container, *rest))} has size {size} on scan axis {scan_axis}, expected L={expected}"
      + (f" ({len(wrong)} of {len(sizes)} leaves differ)" if len(wrong) > 1 else "")
      + "; give the right axis with --scan_axis"
    )
  return expected


def forms_in(paths: Iterable[Path], known: Iterable[Path]) -> dict[Path, str]:
  """The form of each known container among `paths`; a container without a path is left out."""
  found = ((container, filter(None, (_form_of(path, container) for path in paths))) for container in known)
  return {container: form for container, forms in found if (form := next(forms, ""))}


def without_layer(path: Path, containers: Mapping[Path, Container]) -> Path:
  """`path` without its layer index, whatever its form."""
  for container, about in containers.items():
    if form := _form_of(path, container):
      rest = _position(path, {container: form})[2]
      if form == SCANNED and about.block_name and len(rest) > 1 and _INDEXED.fullmatch(rest[0]):
        rest = rest[1:]
      return (*container, *rest)
  return path
