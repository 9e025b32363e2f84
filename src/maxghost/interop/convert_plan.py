"""Plans a conversion: the arrays of the target layout, and which layers of the source go into each."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from maxghost.checkpoint import layouts_layers
from maxghost.checkpoint.layouts import LINEN, MAXGHOST, NNX, PARAMS, RECORD, Checkpoint, record_of, without_value
from maxghost.checkpoint.layouts_layers import Container, LeafId, ParamTree, Path, Ref, container_of
from maxghost.checkpoint.layouts_store import Empty, LayoutError, StoredArray, TreePath
from maxghost.config import ModelConfig
from maxghost.config.values import slash_path

KEEP = "keep"
# The linen layout with the optimizer state as MaxText's NNX runs write and read it.
MAXTEXT_NNX = "maxtext_nnx"
TARGETS = (LINEN, MAXTEXT_NNX, NNX, MAXGHOST, PARAMS)

_Placed = tuple[TreePath, tuple[Ref, ...], int | None]  # path, parts and stacking axis of an array


@dataclass(frozen=True)
class Target:
  layout: str
  layers: str = KEEP  # keep, scanned, unscanned or integer
  scan_axis: int | None = None  # None = the layout's own
  layer_period: int = 0  # layers per stacked block where unscanned layers are stacked; 0 = as recorded, else 1
  wrapped: bool | None = None  # None = the layout's own
  params_only: bool = False
  drop_rngs: bool = False

  @classmethod
  def of(cls, model: ModelConfig) -> "Target":
    """The parameters of a model, in the form in which maxghost trains it."""
    layers = layouts_layers.SCANNED if model.scan_layers else layouts_layers.UNSCANNED
    return cls(MAXGHOST, layers=layers, layer_period=model.inhomogeneous_layer_cycle_interval, params_only=True)

  @property
  def is_linen(self) -> bool:
    return self.layout in (LINEN, MAXTEXT_NNX)

  @property
  def bare(self) -> bool:
    return self.params_only or self.layout == PARAMS


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
    return math.prod(self.shape) * self.dtype.itemsize

  def text(self) -> str:
    first, last = self.parts[0].where(), self.parts[-1].where()
    source = first if first == last else f"{first} ... {last}"
    return f"{source} -> {slash_path(self.path)}  {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass
class Plan:
  leaves: list[TargetLeaf] = field(default_factory=list)
  empties: list[tuple[TreePath, Empty]] = field(default_factory=list)
  notes: list[str] = field(default_factory=list)
  custom_metadata: dict[str, Any] = field(default_factory=dict)


def make_plan(checkpoint: Checkpoint, target: Target) -> Plan:
  """The plan of a conversion. Raises LayoutError, naming the leaf, where the target layout cannot hold it."""
  plan, scan_axis = Plan(), _target_axis(checkpoint, target)
  wrapped = target.layout == PARAMS if target.wrapped is None else target.wrapped
  if wrapped and target.is_linen:
    raise LayoutError("the linen layout has no `value` level; leave out --target_wrapped")
  end: TreePath = ("value",) if wrapped else ()
  forms = _forms(checkpoint.params, checkpoint, target, scan_axis)
  roots = {LINEN: ("params", "params"), MAXTEXT_NNX: ("params", "params"), PARAMS: ()}
  root = roots.get(target.layout, ("model",))
  plan.leaves += [TargetLeaf((*root, *at, *end), refs, axis) for at, refs, axis in _restacked(checkpoint.params, forms)]
  aux = []
  if target.bare:
    parts = [f"opt_state/{slash_path(path)}" for path in (*checkpoint.moments, *checkpoint.opt_leaves)]
    parts += ["step"] if checkpoint.step is not None else []
    parts += ["random state"] if checkpoint.aux.leaves else []
    if parts:
      plan.notes.append(f"parameters only; left out: {', '.join(parts)}")
  else:
    _plan_opt_state(checkpoint, target, plan, forms, end)
    plan.notes += [f"repaired: {text}" for text in checkpoint.odd_moments().values()]
    if checkpoint.step is not None:
      plan.leaves.append(_step_leaf(checkpoint.step, target, end))
    aux = _plan_aux(checkpoint, target, plan, end)
  kept = checkpoint.kept
  if target.layout == MAXGHOST and not target.bare:
    kept = kept | checkpoint.loop_state
  elif checkpoint.loop_state:
    names = dict.fromkeys(path[0] for path in checkpoint.loop_state)
    plan.notes.append(f"left out, as only a maxghost run knows it: {', '.join(names)}")
  plan.empties += [(path, node) for path, node in kept.items() if isinstance(node, Empty)]
  plan.leaves += [TargetLeaf(path, (Ref(node),)) for path, node in kept.items() if isinstance(node, StoredArray)]
  plan.notes += [f"kept as it is: {key} ({n} leaves)" for key, n in Counter(path[0] for path in kept).items()]
  if checkpoint.dropped:
    plan.notes.append(f"dropped: {len(checkpoint.dropped)} leaves, the first {checkpoint.dropped[0]}")
  plan.custom_metadata = _metadata(checkpoint, target, scan_axis, [*forms.values()], aux)
  return plan


def _target_axis(checkpoint: Checkpoint, target: Target) -> int:
  given, ours = target.scan_axis, target.layout == MAXGHOST
  if given is None:
    return 0 if ours else 1 if checkpoint.layout == MAXGHOST else checkpoint.scan_axis
  if ours and given:
    raise LayoutError(f"target_scan_axis={given}: maxghost stacks layers on dimension 0")
  if given < 0:
    raise LayoutError(f"target_scan_axis={given}: must be 0 or more")
  return given


def _forms(tree: ParamTree, checkpoint: Checkpoint, target: Target, axis: int) -> dict[Path, Container]:
  blocks = record_of(checkpoint.raw).get("blocks") or {}
  forms = {}
  for path, about in tree.containers.items():
    form = about.form if target.layers == KEEP else target.layers
    if form == layouts_layers.INTEGER and target.is_linen:
      if target.layers == layouts_layers.INTEGER:
        raise LayoutError("the linen layout has no integer-keyed layers; use --layers unscanned")
      form = layouts_layers.UNSCANNED
    period, block_name = about.period, about.block_name
    if form == layouts_layers.SCANNED and about.form != layouts_layers.SCANNED:
      recorded, block_name = blocks.get(slash_path(path), (1, ""))
      period = target.layer_period or recorded
      block_name = block_name or (path[-1] if period > 1 else "")
    if form == layouts_layers.SCANNED and about.num_layers % period:
      raise LayoutError(f"{slash_path(path)}: {about.num_layers} layers are no multiple of layer_period={period}")
    forms[path] = replace(about, form=form, period=period, block_name=block_name, scan_axis=axis)
  return forms


def _place(leaf: LeafId, forms: Mapping[Path, Container]) -> tuple[TreePath, Container | None]:
  """(where a leaf goes, the container it is stacked in)."""
  path, layer = leaf
  container = container_of(path, forms)
  if container is None or layer is None:
    return path, None
  about = forms[container]
  return (*about.layer_path(layer), *path[len(container) :]), about if about.form == layouts_layers.SCANNED else None


def _restacked(tree: ParamTree, forms: Mapping[Path, Container]) -> Iterator[_Placed]:
  stacks: dict[TreePath, tuple[Container, dict[int, Ref]]] = {}
  for leaf, ref in tree.leaves.items():
    path, layer = leaf
    place, stack = _place(leaf, forms)
    if stack and layer is not None:
      stacks.setdefault(place, (stack, {}))[1][layer] = ref
      continue
    if layer is None and (container := container_of(path, tree.containers)):
      stored, wanted = tree.containers[container], forms[container]
      if (stored.form, stored.scan_axis) != (wanted.form, wanted.scan_axis):
        way = "or leave it out: --drop_rngs for random state, --params_only for optimizer state"
        said = f"leaf {slash_path(path)} has no layer axis of its own and cannot be restacked"
        raise LayoutError(f"{said}; use --layers keep and the source's scan axis ({way})")
    yield place, (ref,), None
  indices: dict[Path, set[int]] = {}
  for stack, layers in stacks.values():
    indices.setdefault(stack.path, set()).update(layers)
  for path, layers in indices.items():
    if layers != set(range(len(layers))):
      said = f"layer indices under {slash_path(path[:-1] or path)} are not contiguous"
      raise LayoutError(f"{said}: {', '.join(map(str, sorted(layers)))}; use --layers unscanned")
  for place, (stack, layers) in stacks.items():
    _check_alike(stack, place, layers, len(indices[stack.path]))
    parts = tuple(layers[i] for i in sorted(layers))
    axis, whole = min(stack.scan_axis, len(parts[0].shape)), parts[0].array
    in_order = all(ref.array is whole and (ref.axis, ref.index) == (axis, i) for i, ref in enumerate(parts))
    if in_order and whole.shape[axis] == len(parts):
      yield place, (Ref(whole),), None
    else:
      yield place, parts, axis


def _check_alike(stack: Container, place: TreePath, layers: Mapping[int, Ref], num_layers: int) -> None:
  """layers: what is stacked at `place`. num_layers: of the container."""
  first = min(layers)
  where, leaf = slash_path(stack.path), slash_path(place[len(stack.layer_path(0)) :])
  if missing := [i for i in range(first % stack.period, num_layers, stack.period) if i not in layers]:
    said = f"leaf {leaf} exists in layers {', '.join(map(str, sorted(layers)))} but not in"
    raise LayoutError(f"{said} {', '.join(map(str, missing))} (of {where}); use --layers unscanned")
  for layer, ref in sorted(layers.items()):
    own, name = layers[first], stack.path[-1]
    told = [(f"({','.join(map(str, x.shape))})", x.dtype.name, x.array.key_impl) for x in (own, ref)]
    for what, a, b in zip(("shape", "dtype", "key type"), *told, strict=True):
      if a != b:
        said = f"cannot stack {where}_*: leaf {leaf} has {what} {a} in {name}_{first} but {b} in {name}_{layer}"
        raise LayoutError(f"{said}; use --layers unscanned (hf import: --no-scan_layers), quantize: scan_layers=false")


def _plan_opt_state(checkpoint: Checkpoint, target: Target, plan: Plan, forms: Mapping, end: TreePath) -> None:
  linen, as_nnx_runs = target.is_linen, target.layout == MAXTEXT_NNX
  root: TreePath = ("opt_state",) if linen else ("optimizer", "opt_state")
  places = [*checkpoint.moments, *checkpoint.opt_leaves, *checkpoint.opt_empties]
  levels: dict[Path, set[str]] = {}  # the keys of each level of opt_state
  for place in places if linen else ():
    for depth, name in enumerate(place[:1] if as_nnx_runs else place):  # MaxText's NNX runs leave inner chains as dicts
      levels.setdefault(place[:depth], set()).add(name)
  # In the Linen layout, a level whose keys are all integers is a list.
  lists = {prefix: names for prefix, names in levels.items() if all(name.isdigit() for name in names)}

  def path_of(place: Path) -> TreePath:
    return (*root, *(int(name) if place[:depth] in lists else name for depth, name in enumerate(place)))

  for place, tree in checkpoint.moments.items():
    # MaxText's NNX runs put the Linen level `params` only below mu and nu of a chain entry.
    has_level = linen and not (as_nnx_runs and (place[-1] not in ("mu", "nu") or len(place) > 2))
    above = (*path_of(place), *(("params",) if has_level else ()))
    placed = _restacked(tree, {path: forms[path] for path in tree.containers})
    plan.leaves += [TargetLeaf((*above, *path, *end), parts, axis) for path, parts, axis in placed]
    if linen and place not in checkpoint.factored:
      # What an optimizer leaves out (optax.masked) is None in the Linen layout and absent in the NNX one.
      absent = tree.empties | (set(checkpoint.params.leaves) - set(tree.leaves))
      masked = dict.fromkeys(_place(leaf, forms)[0] for leaf in sorted(absent, key=str))
      plan.empties += [((*above, *path), Empty()) for path in masked]
  plan.leaves += [TargetLeaf((*path_of(path), *end), (Ref(x),)) for path, x in checkpoint.opt_leaves.items()]
  if linen:
    known = {path: kind for path, kind in checkpoint.opt_empties.items() if not (as_nnx_runs and len(path) > 1)}
    for prefix, names in lists.items():  # nothing fills these entries
      holes = (str(i) for i in range(max(map(int, names))) if str(i) not in names)
      known = {(*prefix, name): "None" for name in holes} | known
    plan.empties += [(path_of(path), Empty(kind)) for path, kind in known.items()]


def _step_leaf(step: StoredArray, target: Target, end: TreePath) -> TargetLeaf:
  """int32 in Linen, uint32 in NNX. Raises LayoutError where the number does not fit both."""
  if step.shape or step.dtype.kind not in "iu":
    raise LayoutError(f"step is {step.dtype}{list(step.shape)}, not one integer")
  if not 0 <= (value := int(step.read(None))) < 2**31:
    raise LayoutError(f"step={value}: only 0 to {2**31 - 1} can be moved")
  path, dtype = (("step",), "int32") if target.is_linen else (("optimizer", "step", *end), "uint32")
  return TargetLeaf(path, (Ref(step),), cast=dtype)


def _plan_aux(checkpoint: Checkpoint, target: Target, plan: Plan, end: TreePath) -> list[TreePath]:
  """Random keys and counts keep their layer axis, 0. Returns the paths of what else is no parameter."""
  tree = checkpoint.aux
  if target.drop_rngs:
    if arrays := {id(ref.array) for ref in tree.leaves.values()}:
      plan.notes.append(f"dropped {len(arrays)} random-state leaves (--drop_rngs)")
    return []
  root = ("nnx_aux", "model") if target.is_linen else ("model",)
  try:
    leaves = list(_restacked(tree, _forms(tree, checkpoint, target, 0)))
  except LayoutError as error:
    # An nnx model that shares one Rngs between layers saves it with the first of them only.
    plan.notes.append(f"random state keeps its own layer form ({error.problems[0].split('; ')[0]})")
    leaves = list(_restacked(tree, tree.containers))
  plan.leaves += [TargetLeaf((*root, *path, *end), parts, axis) for path, parts, axis in leaves]

  stored = {path: without_value(parts[0].array.path) for path, parts, _ in leaves}
  return [path for path, own in stored.items() if any(own[k:] in checkpoint.aux_plain for k in range(len(own)))]


def _metadata(checkpoint: Checkpoint, target: Target, axis: int, containers: list[Container], aux: list) -> dict:
  """Custom metadata: the source's, MaxText's scan_layers, and what the target layout cannot say itself."""
  metadata = {key: value for key, value in checkpoint.raw.custom_metadata.items() if key != RECORD}
  if containers:
    metadata["scan_layers"] = any(c.form == layouts_layers.SCANNED for c in containers)
  if "param_scan_axis" in metadata:
    metadata["param_scan_axis"] = axis
  empties = {} if target.is_linen or target.bare else checkpoint.opt_empties
  record = {
    "values_from": checkpoint.values_from,
    "containers": [slash_path(c.path) for c in containers if not layouts_layers.STANDARD_NAME.fullmatch(c.path[-1])],
    "blocks": {slash_path(c.path): [c.period, c.block_name] for c in containers if c.block_name},
    "opt_empties": [[list(path), kind] for path, kind in empties.items()],
    "aux": [list(path) for path in aux],
  }
  record = {name: value for name, value in record.items() if value}
  return metadata | {RECORD: {"layout": LINEN if target.is_linen else target.layout, "param_scan_axis": axis, **record}}
