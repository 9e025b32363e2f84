"""Plans a conversion: the arrays of the target layout, and which layers of the source go into each.

Parameters, moments and random keys go through one transform, so they all get the same form. Only the step is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts import LINEN, MAXGHOST, NNX, PARAMS, RECORD, Checkpoint
from maxghost.checkpoint.layouts_layers import (
  INTEGER,
  SCANNED,
  UNSCANNED,
  Container,
  ParamTree,
  Path,
  Ref,
  container_of,
  is_standard_name,
)
from maxghost.checkpoint.layouts_store import Empty, LayoutError, StoredArray, TreePath
from maxghost.config.values import slash_path

KEEP = "keep"
# The linen layout with the optimizer state as MaxText's NNX runs write and read it.
MAXTEXT_NNX = "maxtext_nnx"
TARGETS = (LINEN, MAXTEXT_NNX, NNX, MAXGHOST, PARAMS)
_LINEN_LIKE = (LINEN, MAXTEXT_NNX)


@dataclass(frozen=True)
class Target:
  """What to write.

  Attributes:
    layers: keep, scanned, unscanned or integer.
    scan_axis, wrapped: None = the layout's own.
    layer_period: Layers per stacked block where unscanned layers are stacked; 0 = as recorded, else 1.
  """

  layout: str
  layers: str = KEEP
  scan_axis: int | None = None
  layer_period: int = 0
  wrapped: bool | None = None
  params_only: bool = False
  drop_rngs: bool = False


@dataclass(frozen=True, eq=False)
class TargetLeaf:
  """One array to write: its parts, stacked along `axis`, or its only part where `axis` is None."""

  path: TreePath
  parts: tuple[Ref, ...]
  axis: int | None = None
  cast: str = ""

  @property
  def shape(self) -> tuple[int, ...]:
    shape = self.parts[0].shape
    return shape if self.axis is None else (*shape[: self.axis], len(self.parts), *shape[self.axis :])

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(self.cast) if self.cast else self.parts[0].dtype

  @property
  def key_impl(self) -> str | None:
    return self.parts[0].array.key_impl

  @property
  def nbytes(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

  def source_text(self) -> str:
    first, last = self.parts[0].where(), self.parts[-1].where()
    return first if first == last else f"{first} ... {last}"


@dataclass
class Plan:
  leaves: list[TargetLeaf] = field(default_factory=list)
  empties: list[tuple[TreePath, Empty]] = field(default_factory=list)
  notes: list[str] = field(default_factory=list)
  custom_metadata: dict[str, Any] = field(default_factory=dict)


def make_plan(checkpoint: Checkpoint, target: Target) -> Plan:
  """The plan of a conversion. Raises LayoutError, naming the leaf, where the target layout cannot hold it."""
  plan, scan_axis = Plan(), _target_axis(checkpoint, target)
  params_only = target.params_only or target.layout == PARAMS
  wrapped = target.layout == PARAMS if target.wrapped is None else target.wrapped
  end: TreePath = ("value",) if wrapped else ()
  if wrapped and target.layout in _LINEN_LIKE:
    raise LayoutError("the linen layout has no `value` level; leave out --target_wrapped")
  containers: list[Container] = []
  root = {PARAMS: ()}.get(target.layout, ("params", "params") if target.layout in _LINEN_LIKE else ("model",))
  restack = _Restack(checkpoint, target, scan_axis)
  for path, parts, axis in restack.leaves(checkpoint.params, containers):
    plan.leaves.append(TargetLeaf((*root, *path, *end), parts, axis))
  if params_only:
    _note_left_out(checkpoint, plan)
  else:
    _plan_opt_state(checkpoint, target, plan, restack, end)
    plan.notes += [f"repaired: {text}" for text in checkpoint.odd_moments().values()]
    if checkpoint.step is not None:
      plan.leaves.append(_step_leaf(checkpoint.step, target.layout, end))
  aux = [] if params_only else _plan_aux(checkpoint, target, plan, restack, end)
  same = target.layout == MAXGHOST and not params_only
  if checkpoint.loop_state and not same:
    plan.notes.append(f"left out, as only a maxghost run knows it: {', '.join(checkpoint.loop_state)}")
  for key, nodes in (checkpoint.kept | (checkpoint.loop_state if same else {})).items():
    for path, node in nodes.items():
      if isinstance(node, Empty):
        plan.empties.append((path, node))
      else:
        plan.leaves.append(TargetLeaf(path, (Ref(node),)))
    plan.notes.append(f"kept as it is: {key} ({len(nodes)} leaves)")
  if checkpoint.dropped:
    plan.notes.append(f"dropped: {len(checkpoint.dropped)} leaves, the first {checkpoint.dropped[0]}")
  plan.custom_metadata = _metadata(checkpoint, target, scan_axis, containers, aux, params_only)
  order: dict[int, int] = {}
  for leaf in plan.leaves:
    for ref in leaf.parts:
      order.setdefault(id(ref.array), len(order))
  plan.leaves.sort(key=lambda leaf: order[id(leaf.parts[0].array)])
  return plan


def _target_axis(checkpoint: Checkpoint, target: Target) -> int:
  if target.layout == MAXGHOST:
    if target.scan_axis not in (None, 0):
      raise LayoutError(f"target_scan_axis={target.scan_axis}: maxghost stacks layers on dimension 0")
    return 0
  if target.scan_axis is not None:
    if target.scan_axis < 0:
      raise LayoutError(f"target_scan_axis={target.scan_axis}: must be 0 or more")
    return target.scan_axis
  return 1 if checkpoint.layout == MAXGHOST else checkpoint.scan_axis


class _Restack:
  """Turns a ParamTree into the arrays of the target's layer form."""

  def __init__(self, checkpoint: Checkpoint, target: Target, scan_axis: int):
    self._target = target
    self._scan_axis = scan_axis
    record = checkpoint.custom_metadata.get(RECORD) or {}
    self._periods = {tuple(path.split("/")): about for path, about in (record.get("blocks") or {}).items()}

  def leaves(
    self,
    tree: ParamTree,
    written: list[Container] | None = None,
    *,
    axis: int | None = None,
    like: Mapping[Path, Container] | None = None,
  ) -> Iterator[tuple[TreePath, tuple[Ref, ...], int | None]]:
    """(path, parts, stacking axis) of every array.

    written: receives the containers as they come out. like: containers whose form is kept; None = the tree's own.
    """
    like = like or tree.containers
    axis = self._scan_axis if axis is None else axis
    inside: dict[Path, dict[Path, dict[int, Ref]]] = {path: {} for path in tree.containers}
    for (path, layer), ref in tree.leaves.items():
      container = container_of(path, tree.containers)
      if container is None:
        yield path, (ref,), None
      elif layer is None:
        self._check_opaque(tree.containers[container], path, axis)
        yield path, (ref,), None
      else:
        inside[container].setdefault(path[len(container) :], {})[layer] = ref
    for path in tree.containers:
      out = self._form(like[path], axis)
      if written is not None:
        written.append(out)
      if out.form == SCANNED:
        yield from _stack(out, inside[path])
        continue
      for rest, layers in inside[path].items():
        for layer, ref in sorted(layers.items()):
          yield (*_layer_path(out, layer), *rest), (ref,), None

  @staticmethod
  def as_stored(tree: ParamTree) -> Iterator[tuple[TreePath, tuple[Ref, ...], int | None]]:
    """The arrays of `tree` in their own layer form."""
    done = set()
    for (path, layer), ref in tree.leaves.items():
      container = container_of(path, tree.containers)
      place = path
      if container and layer is not None:
        place = (*_layer_path(tree.containers[container], layer), *path[len(container) :])
      if place not in done:
        done.add(place)
        yield place, (Ref(ref.array),), None

  def empties(self, tree: ParamTree) -> Iterator[TreePath]:
    """Places of `tree` that hold None, in the target's form."""
    done = set()
    for path, layer in sorted(tree.empties, key=str):
      container = container_of(path, tree.containers)
      if container is None or layer is None:
        yield path
        continue
      out, rest = self._form(tree.containers[container], self._scan_axis), path[len(container) :]
      place = (*_layer_path(out, layer), *rest)
      if place not in done:
        done.add(place)
        yield place

  def _form(self, about: Container, axis: int) -> Container:
    form = about.form if self._target.layers == KEEP else self._target.layers
    if form == INTEGER and self._target.layout in _LINEN_LIKE:
      if self._target.layers == INTEGER:
        raise LayoutError("the linen layout has no integer-keyed layers; use --layers unscanned")
      form = UNSCANNED
    period, block_name = about.period, about.block_name
    if form == SCANNED and about.form != SCANNED:
      period, block_name = self._periods.get(about.path, (self._target.layer_period or 1, ""))
      period = self._target.layer_period or period
      block_name = block_name or (about.path[-1] if period > 1 else "")
    if form == SCANNED and about.num_layers % period:
      raise LayoutError(f"{slash_path(about.path)}: {about.num_layers} layers are no multiple of layer_period={period}")
    return Container(about.path, form, about.num_layers, period, block_name, axis)

  def _check_opaque(self, about: Container, path: Path, axis: int) -> None:
    if self._form(about, axis).form != about.form or about.scan_axis != axis:
      raise LayoutError(
        f"leaf {slash_path(path)} has no layer axis of its own and cannot be restacked; use --layers keep and the "
        "source's scan axis (or leave it out: --drop_rngs for random state, --params_only for optimizer state)"
      )


def _layer_path(container: Container, layer: int) -> Path:
  *parent, name = container.path
  if container.form == SCANNED:
    block = (f"{container.block_name}_{layer % container.period}",) if container.block_name else ()
    return (*container.path, *block)
  if container.form == UNSCANNED:
    return (*parent, f"{name}_{layer}")
  return (*container.path, str(layer))


def _stack(container: Container, inside: dict[Path, dict[int, Ref]]) -> Iterator[tuple]:
  """The stacked arrays of one container, after checking that its layers are alike."""
  indices = sorted({layer for layers in inside.values() for layer in layers})
  if indices != list(range(len(indices))):
    parent = slash_path(container.path[:-1]) or slash_path(container.path)
    raise LayoutError(
      f"layer indices under {parent} are not contiguous: {', '.join(map(str, indices))}; use --layers unscanned"
    )
  for rest, layers in inside.items():
    for offset in range(container.period):
      wanted = indices[offset :: container.period]
      present = [i for i in wanted if i in layers]
      if not present:
        continue
      parts = tuple(layers[i] for i in present)
      _check_alike(container, rest, wanted, present, parts)
      axis = min(container.scan_axis, len(parts[0].shape))
      path = (*_layer_path(container, offset), *rest)
      if _is_whole(parts, axis):
        yield path, (Ref(parts[0].array),), None
      else:
        yield path, parts, axis


def _is_whole(parts: tuple[Ref, ...], axis: int) -> bool:
  """Whether the parts are the layers of one stored array, in order and stacked on `axis` already."""
  whole = parts[0].array
  in_order = all(ref.array is whole and ref.axis == axis and ref.index == i for i, ref in enumerate(parts))
  return in_order and whole.shape[axis] == len(parts)


def _check_alike(
  container: Container, rest: Path, wanted: list[int], present: list[int], parts: tuple[Ref, ...]
) -> None:
  name, advice = container.path[-1], "use --layers unscanned"
  if missing := [i for i in wanted if i not in present]:
    raise LayoutError(
      f"leaf {slash_path(rest)} exists in layers {', '.join(map(str, present))} but not in "
      f"{', '.join(map(str, missing))} (of {slash_path(container.path)}); {advice}"
    )
  for layer, ref in zip(present, parts, strict=True):
    for what, first, this in (
      ("shape", _shape_text(parts[0].shape), _shape_text(ref.shape)),
      ("dtype", parts[0].dtype.name, ref.dtype.name),
      ("key type", parts[0].array.key_impl, ref.array.key_impl),
    ):
      if first != this:
        raise LayoutError(
          f"cannot stack {slash_path(container.path)}_*: leaf {slash_path(rest)} has {what} {first} in "
          f"{name}_{present[0]} but {this} in {name}_{layer}; {advice}"
        )


def _shape_text(shape: tuple[int, ...]) -> str:
  return "(" + ",".join(map(str, shape)) + ")"


def _plan_opt_state(checkpoint: Checkpoint, target: Target, plan: Plan, restack: _Restack, end: TreePath) -> None:
  if not checkpoint.has_opt_state:
    return
  linen = target.layout in _LINEN_LIKE
  as_nnx_runs = target.layout == MAXTEXT_NNX
  root: TreePath = ("opt_state",) if linen else ("optimizer", "opt_state")
  places = [*checkpoint.moments, *checkpoint.opt_leaves, *checkpoint.opt_empties]
  lists = _Lists(places if linen else [], only_top=as_nnx_runs)
  for place, tree in checkpoint.moments.items():
    # MaxText's NNX runs put the Linen level `params` only below mu and nu of a chain entry.
    has_level = linen and not (as_nnx_runs and (place[-1] not in ("mu", "nu") or len(place) > 2))
    level: TreePath = ("params",) if has_level else ()
    for path, parts, axis in restack.leaves(tree, like=checkpoint.params.containers):
      plan.leaves.append(TargetLeaf((*root, *lists.path(place), *level, *path, *end), parts, axis))
    if linen and place not in checkpoint.factored:
      # What an optimizer leaves out (optax.masked) is None in the Linen layout and absent in the NNX one.
      absent = set(checkpoint.params.leaves) - set(tree.leaves)
      masked = ParamTree(containers=checkpoint.params.containers, empties=absent | tree.empties)
      plan.empties += [((*root, *lists.path(place), *level, *path), Empty()) for path in restack.empties(masked)]
  for path, array in checkpoint.opt_leaves.items():
    plan.leaves.append(TargetLeaf((*root, *lists.path(path), *end), (Ref(array),)))
  if linen:
    known = {path: kind for path, kind in checkpoint.opt_empties.items() if not (as_nnx_runs and len(path) > 1)}
    known |= {path: "None" for path in lists.holes() if path not in known}
    plan.empties += [((*root, *lists.path(path)), Empty(kind)) for path, kind in known.items()]


class _Lists:
  """Which levels of opt_state are lists in the Linen layout: those whose keys are all integers.

  only_top: only the outermost may be one; MaxText's NNX runs leave inner chains as dicts.
  """

  def __init__(self, places: list[Path], *, only_top: bool):
    self._only_top = only_top
    self._children: dict[Path, set[str]] = {}
    for place in places:
      for depth, name in enumerate(place):
        self._children.setdefault(place[:depth], set()).add(name)

  def _is_list(self, prefix: Path) -> bool:
    if self._only_top and prefix:
      return False
    return all(name.isdigit() for name in self._children.get(prefix, {""}))

  def path(self, place: Path) -> TreePath:
    return tuple(int(name) if self._is_list(place[:depth]) else name for depth, name in enumerate(place))

  def holes(self) -> list[Path]:
    """Entries below the highest index of a list that nothing fills."""
    found = []
    for prefix, names in self._children.items():
      if self._is_list(prefix):
        found += [(*prefix, str(i)) for i in range(max(map(int, names))) if str(i) not in names]
    return found


def _step_leaf(step: StoredArray, layout: str, end: TreePath) -> TargetLeaf:
  """int32 in Linen, uint32 in NNX. Raises LayoutError where the number does not fit both."""
  if step.shape or step.dtype.kind not in "iu":
    raise LayoutError(f"step is {step.dtype}{list(step.shape)}, not one integer")
  value = int(step.read(None))
  if not 0 <= value <= 2**31 - 1:
    raise LayoutError(f"step={value}: only 0 to {2**31 - 1} can be moved")
  if layout in _LINEN_LIKE:
    return TargetLeaf(("step",), (Ref(step),), cast="int32")
  return TargetLeaf(("optimizer", "step", *end), (Ref(step),), cast="uint32")


def _plan_aux(checkpoint: Checkpoint, target: Target, plan: Plan, restack: _Restack, end: TreePath) -> list[TreePath]:
  """Random keys and counts keep their layer axis, 0. Returns the paths of what else is no parameter."""
  if target.drop_rngs:
    if checkpoint.aux.leaves:
      arrays = {id(ref.array) for ref in checkpoint.aux.leaves.values()}
      plan.notes.append(f"dropped {len(arrays)} random-state leaves (--drop_rngs)")
    return []
  root = ("nnx_aux", "model") if target.layout in _LINEN_LIKE else ("model",)
  plain = set(checkpoint.aux_plain)
  others = []
  try:
    leaves = list(restack.leaves(checkpoint.aux, axis=0))
  except LayoutError as error:
    # An nnx model that shares one Rngs between layers saves it with the first of them only.
    plan.notes.append(f"random state keeps its own layer form ({error.problems[0].split('; ')[0]})")
    leaves = list(restack.as_stored(checkpoint.aux))
  for path, parts, axis in leaves:
    plan.leaves.append(TargetLeaf((*root, *path, *end), parts, axis))
    if _is_plain(parts[0].array, plain):
      others.append(path)
  return others


def _is_plain(array: StoredArray, plain: set[Path]) -> bool:
  names = tuple(map(str, array.path))
  names = names[:-1] if names[-1:] == ("value",) else names
  return any(names[k:] in plain for k in range(len(names)))


def _note_left_out(checkpoint: Checkpoint, plan: Plan) -> None:
  parts = [f"opt_state/{slash_path(place)}" for place in checkpoint.moments]
  parts += [f"opt_state/{slash_path(path)}" for path in checkpoint.opt_leaves]
  parts += ["step"] if checkpoint.step is not None else []
  parts += ["random state"] if checkpoint.aux.leaves else []
  if parts:
    plan.notes.append(f"parameters only; left out: {', '.join(parts)}")


def _metadata(
  checkpoint: Checkpoint, target: Target, axis: int, containers: list[Container], aux: list, bare: bool
) -> dict:
  """Custom metadata: the source's, MaxText's scan_layers, and what the target layout cannot say itself."""
  metadata = {key: value for key, value in checkpoint.custom_metadata.items() if key != RECORD}
  if containers:
    metadata["scan_layers"] = any(c.form == SCANNED for c in containers)
  if "param_scan_axis" in metadata:
    metadata["param_scan_axis"] = axis
  layout = LINEN if target.layout == MAXTEXT_NNX else target.layout
  record: dict[str, Any] = {"layout": layout, "param_scan_axis": axis}
  if checkpoint.values_from:
    record["values_from"] = checkpoint.values_from
  if names := [slash_path(c.path) for c in containers if not is_standard_name(c.path[-1])]:
    record["containers"] = names
  if blocks := {slash_path(c.path): [c.period, c.block_name] for c in containers if c.block_name}:
    record["blocks"] = blocks
  if checkpoint.opt_empties and target.layout not in _LINEN_LIKE and not bare:
    record["opt_empties"] = [[list(path), kind] for path, kind in checkpoint.opt_empties.items()]
  if aux:
    record["aux"] = [list(path) for path in aux]
  return metadata | {RECORD: record}
