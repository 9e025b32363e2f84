"""`Checkpoint`, the canonical form of a checkpoint, and how each layout (see docs/checkpoints.md) is read into it."""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maxghost.checkpoint import layouts_layers
from maxghost.checkpoint.layouts_layers import LeafId, ParamTree, Path, Ref, leaf_text, split_layers, whole
from maxghost.checkpoint.layouts_store import Empty, LayoutError, RawTree, StoredArray, Text
from maxghost.config.values import did_you_mean, slash_path

LINEN, NNX, NNX_OLD, MAXGHOST, PARAMS = "linen", "nnx", "nnx_old", "maxghost", "params"
LAYOUTS = (LINEN, NNX, NNX_OLD, MAXGHOST, PARAMS)
RECORD = "maxghost"  # key of our record in a checkpoint's custom metadata
_PREFIXES = ("base", "model_params")
_MODEL_KEYS = ("decoder", "encoder", "token_embedder", "vision_encoder", "audio_encoder", "shared_embedding")
# Adafactor keeps rows and columns of a parameter: its path, not its shape.
_FACTORED = (("v_row",), ("v_col",), ("v",))
# Parts of a quantised matrix (`adapters.quantized.NAMES`) beside its codes; those of experts are wi_0_sizes.
_OF_CODES = re.compile("(sizes|size_scales|size_means|steps|scales)$")
_IN_MODEL = {("model",): "params", ("optimizer", "opt_state"): "opt_state", ("optimizer", "step"): "step"}
_PLACES: dict[str, dict[Path, str]] = {
  LINEN: {("params", "params"): "params", ("opt_state",): "opt_state", ("step",): "step", ("nnx_aux", "model"): "aux"},
  NNX: _IN_MODEL,
  MAXGHOST: _IN_MODEL,
  NNX_OLD: {("params",): "params", ("opt_state",): "opt_state", ("step",): "step"},
  PARAMS: {("step",): "step", (): "params"},
}
_NOT_PARAMS = ("opt_state", "optimizer", "optimizer_state", "inner_state", "outer_opt_state", "iter")


@dataclass(frozen=True)
class ReadOptions:
  """How to read a tree, as far as the tree itself does not say it.

  layout: one of LAYOUTS; '' = detect. scan_axis: the dimension of stacked layers; None = as recorded, else the layout's
  default. containers: more names of layer containers. wrapped: whether leaves lie under `value`; None = detect. keep,
  drop: unknown keys to keep and to leave out.
  """

  layout: str = ""
  scan_axis: int | None = None
  containers: tuple[str, ...] = ()
  wrapped: bool | None = None
  keep: tuple[str, ...] = ()
  drop: tuple[str, ...] = ()


@dataclass
class Checkpoint:
  """What a checkpoint holds, whatever its layout. Paths are text without layer indices.

  moments: by place below opt_state (('0', 'mu')), each with the paths of `params`. factored: moment trees whose shapes
  are not the parameters'. opt_leaves, opt_empties: the rest of opt_state. aux: random keys, counts, batch statistics;
  aux_plain: those that are not random. kept: keys of no layout. loop_state: what a maxghost trainer saves besides.
  """

  raw: RawTree
  layout: str
  scan_axis: int
  wrapped: bool
  params: ParamTree = field(default_factory=ParamTree)
  moments: dict[Path, ParamTree] = field(default_factory=dict)
  factored: set[Path] = field(default_factory=set)
  opt_leaves: dict[Path, StoredArray] = field(default_factory=dict)
  opt_empties: dict[Path, str] = field(default_factory=dict)
  step: StoredArray | None = None
  aux: ParamTree = field(default_factory=ParamTree)
  aux_plain: list[Path] = field(default_factory=list)
  kept: dict[Path, StoredArray | Empty] = field(default_factory=dict)
  loop_state: dict[Path, StoredArray | Empty] = field(default_factory=dict)
  dropped: list[str] = field(default_factory=list)

  @property
  def values_from(self) -> str:
    """'maxtext' or 'maxghost': the convention of the query weights (see `linen_scaling`); '' where it is unknown."""
    return record_of(self.raw).get("values_from") or {LINEN: "maxtext", MAXGHOST: "maxghost"}.get(self.layout, "")

  def odd_moments(self) -> dict[Path, str]:
    """Moment trees whose layers have another form than the parameters'; MaxText can restore no such checkpoint."""
    odd = {}
    for place, tree in self.moments.items():
      for path, container in tree.containers.items():
        form = self.params.containers[path].form
        if container.form != form:
          odd[place] = f"{slash_path(path)} {container.form} in opt_state/{slash_path(place)}, {form} in the parameters"
    return odd

  def trees(self) -> dict[str, ParamTree]:
    """All arrays: params, aux, each opt_state/0/mu, and what is in no tree: opt_state, step, kept, loop_state."""
    single = {"opt_state": self.opt_leaves, "step": {(): self.step}, "kept": self.kept, "loop_state": self.loop_state}
    moments = {f"opt_state/{slash_path(place)}": tree for place, tree in self.moments.items()}
    return {"params": self.params, **moments} | {name: whole(x) for name, x in single.items()} | {"aux": self.aux}

  def with_params(self, leaves: dict[LeafId, Ref]) -> "Checkpoint":
    """The same with other parameters, in the same containers."""
    return replace(self, params=replace(self.params, leaves=leaves))

  def num_params(self) -> int:
    """How many the model has: of a quantised matrix (`adapters.quantized`) its codes, two of which are in a uint8."""
    leaves, total = self.params.leaves, 0
    for (path, layer), ref in leaves.items():
      *module, name = path
      codes = _OF_CODES.sub("codes", name)
      if codes == name or ((*module, codes), layer) not in leaves:
        total += math.prod(ref.shape) * (2 if name.endswith("codes") and ref.dtype == "uint8" else 1)
    return total


def record_of(raw: RawTree) -> dict[str, Any]:
  """What this program recorded in the checkpoint's metadata."""
  return raw.custom_metadata.get(RECORD) or {}


def read_checkpoint(raw: RawTree, options: ReadOptions | None = None, *, strict: bool = False) -> Checkpoint:
  """Reads any layout. Only headers are touched. Raises LayoutError naming the leaf or key.

  strict: whether unknown keys that no option names are refused. Otherwise they are kept, without text leaves.
  """
  options = options or ReadOptions()
  nodes: dict = {tuple(map(str, path)): node for path, node in raw.nodes.items()}
  tops = _tops(nodes)
  # A level `base/` (RL) or `model_params/` (Tunix), which holds everything but a step, is removed.
  prefix = "" if {"params", "model"}.intersection(tops) else next((p for p in _PREFIXES if p in tops), "")
  if prefix:
    nodes = {path[1:] if path[0] == prefix else path: node for path, node in nodes.items() if path != (prefix,)}
  layout = options.layout or _detect(nodes, raw, prefix)
  sections, extra = _sections(nodes, layout, raw.origin)
  wrapped = _unwrap_sections(sections, layout, options)
  aux, aux_plain = _take_aux(sections, record_of(raw))
  names = (*options.containers, *record_of(raw).get("containers", ()))
  stacked = raw.custom_metadata.get("scan_layers") is not False
  found = layouts_layers.find_containers(sections["params"], names, stacked)
  scan_axis = _scan_axis(sections["params"], found, layout, raw, options)
  params = split_layers(sections["params"], found, scan_axis)
  if not params.leaves:
    raise LayoutError(f"{raw.origin} holds no parameters")
  checkpoint = Checkpoint(raw, layout, scan_axis, wrapped, params, step=sections["step"].get(()), aux_plain=aux_plain)
  if layout == MAXGHOST:
    checkpoint.loop_state, extra = extra, {}
  _read_unknown(checkpoint, extra, options, strict)
  forms = layouts_layers.find_containers(aux, (*names, *map(slash_path, found)), stacked)
  try:
    checkpoint.aux = split_layers(aux, forms, 0, like=params.containers)
  except LayoutError:  # a leaf that is not one per layer: moved as it is
    checkpoint.aux = split_layers(aux, forms, 0, opaque=True)
  _read_opt_state(checkpoint, sections["opt_state"])
  return checkpoint


def _tops(nodes: Iterable[Path]) -> list[str]:
  return list(dict.fromkeys(path[0] for path in nodes if path))


def _detect(nodes: dict, raw: RawTree, prefix: str) -> str:
  tops = _tops(nodes)
  if (recorded := record_of(raw).get("layout")) in LAYOUTS:
    return recorded
  if "params" in tops and not prefix:
    return LINEN if any(path[:2] == ("params", "params") for path in nodes) else NNX_OLD
  if "model" in tops and not prefix:
    return MAXGHOST if raw.folder is not None and (raw.folder.step / "positions").is_dir() else NNX
  if prefix or any(top in _MODEL_KEYS for top in tops):
    return PARAMS
  keys = ", ".join(sorted(tops)) or "none"
  raise LayoutError(f"{raw.origin}: cannot tell the layout; keys: {keys}; pass --from {'|'.join(LAYOUTS)}")


def _sections(nodes: dict, layout: str, origin: str) -> tuple[dict[str, dict], dict]:
  """({section: {path below it: node}}, {full path: node} of all that is in no section)."""
  sections: dict[str, dict] = {"params": {}, "opt_state": {}, "step": {}, "aux": {}}
  extra = {}
  for path, node in nodes.items():
    place = next((p for p in _PLACES[layout] if path[: len(p)] == p), None)
    if place is None or (layout == PARAMS and path[0] in _NOT_PARAMS):
      if not isinstance(node, Empty):
        extra[path] = node
      continue
    if isinstance(node, Text):
      raise LayoutError(f"leaf {slash_path(path)} is text, which cannot be moved")
    sections[_PLACES[layout][place]][path[len(place) :]] = node
  for name in ("params", "aux"):
    sections[name].pop((), None)  # an empty container
  if not any(isinstance(node, StoredArray) for node in sections["params"].values()):
    raise LayoutError(f"{origin}: no parameters where the {layout} layout has them; keys: {', '.join(_tops(nodes))}")
  return sections, extra


def _read_unknown(checkpoint: Checkpoint, extra: dict, options: ReadOptions, strict: bool) -> None:
  """Splits keys unknown to the layout into those that the user keeps and drops; refuses all others by name."""
  known = set()
  for path, node in extra.items():
    names = {slash_path(path[:depth]) for depth in range(1, len(path) + 1)}
    known |= names
    if names.intersection(options.drop) or (not strict and isinstance(node, Text)):
      checkpoint.dropped.append(slash_path(path))
    elif not strict or names.intersection(options.keep):
      if isinstance(node, Text):
        raise LayoutError(f"leaf {slash_path(path)} is text, which cannot be moved; pass --drop {path[0]}")
      checkpoint.kept[path] = node
    else:
      inside = path[0] in ("params", "optimizer", "nnx_aux") and len(path) > 1
      name = slash_path(path[:2] if inside else path[:1])
      raise LayoutError(f"unknown {'' if inside else 'top-level '}key '{name}'; pass --keep {name} or --drop {name}")
  for name in (*options.keep, *options.drop):
    if name not in known:
      raise LayoutError(f"--keep or --drop {name}: the checkpoint has no such extra key{did_you_mean(name, known)}")


def _unwrap_sections(sections: dict[str, dict], layout: str, options: ReadOptions) -> bool:
  """Removes the level `value` from each section whose leaves all have it. Returns whether the parameters had it."""
  if layout == LINEN:
    return False
  params, moments = sections["params"], sections["opt_state"]
  # If a path that ends in `value` occurs in both parameters and moments, `value` is the name of a parameter.
  in_moments = {path[k:] for path in moments for k in range(len(path))}
  wrapped_moments = _is_wrapped(moments, lambda path: any(path[k:] in params for k in range(len(path))), options)
  wrapped_params = _is_wrapped(params, lambda path: path in in_moments and not wrapped_moments, options)
  for name, wrapped in (("params", wrapped_params), ("opt_state", wrapped_moments), ("step", True)):
    if wrapped:
      sections[name] = {without_value(path): node for path, node in sections[name].items()}
  return wrapped_params


def _is_wrapped(nodes: Mapping[Path, Any], is_name: Callable[[Path], bool], options: ReadOptions) -> bool:
  """Whether all leaves lie under `value`. is_name: whether a path that ends in `value` is known as a parameter's."""
  leaves = [path for path, node in nodes.items() if isinstance(node, StoredArray) and path]
  under = [path for path in leaves if path[-1] == "value" and len(path) > 1]
  if options.wrapped is not None or not under:
    return bool(options.wrapped) and bool(under)
  if len(under) == len(leaves):
    return True
  others = [path for path in leaves if path[-1] != "value"]
  parents = {path[:-1] for path in others}
  if all(path[:-1] in parents or is_name(path) for path in under):
    return False
  unlike = f"{slash_path(under[0])} is under 'value', {slash_path(others[0])} is not"
  way = "pass --wrapped yes, or --wrapped no where 'value' is a parameter's name"
  raise LayoutError(f"some leaves wrapped, some not: {unlike}; {way}")


def without_value(path: Sequence[Any]) -> Path:
  """A path as text, without the level `value` that wraps a leaf."""
  names = tuple(map(str, path))
  return names[:-1] if names[-1:] == ("value",) else names


def _take_aux(sections: dict[str, dict], record: dict) -> tuple[dict, list[Path]]:
  """Moves what is not a parameter out of the model: random keys and their counts, found by type, and recorded paths."""
  model, aux = sections["params"], dict(sections["aux"])
  moved = _random_leaves(model) | {tuple(path) for path in record.get("aux", ())}
  aux |= {path: model.pop(path) for path in [*model] if path in moved}
  known_random = _random_leaves(aux)
  return aux, [path for path in aux if path not in known_random]


def _random_leaves(nodes: Mapping[Path, Any]) -> set[Path]:
  """Paths of random keys (`key`, by type or as uint32 words) and of the `count` beside each."""
  arrays = {path: node for path, node in nodes.items() if isinstance(node, StoredArray)}
  found = {path for path, node in arrays.items() if node.key_impl}
  for path, node in arrays.items():
    count = arrays.get(beside := (*path[:-1], "count"))
    if path[-1] == "key" and count is not None and count.dtype == node.dtype == "uint32":
      found |= {path, beside} if node.shape[:-1] == count.shape and node.shape[-1:] in ((2,), (4,)) else set()
  return found


def _scan_axis(nodes: dict, found: dict[Path, str], layout: str, raw: RawTree, options: ReadOptions) -> int:
  """--scan_axis, else the recorded axis, else the layout's: 0 for maxghost, 1 for MaxText. A bare NNX tree without a
  record may come from either: 1, or 0 if its shapes rule 1 out."""
  recorded = (about.get("param_scan_axis") for about in (record_of(raw), raw.custom_metadata))
  for value in (value for value in (options.scan_axis, *recorded) if value is not None):
    if int(value) < 0:
      raise LayoutError(f"scan_axis={value}: must be 0 or more")
    return int(value)
  if layout == MAXGHOST:
    return 0
  for axis in (1, 0) if layout == NNX else ():
    with contextlib.suppress(LayoutError):
      split_layers(nodes, found, axis)
      return axis
  return 1


def _read_opt_state(checkpoint: Checkpoint, nodes: dict) -> None:
  """Finds the parameter-shaped trees in opt_state by structure; all other leaves are counts and the like."""
  params = checkpoint.params
  known, rest = {path for path, _ in params.leaves}, {}
  groups: dict[Path, dict[Path, StoredArray | Empty]] = {}
  for path, node in nodes.items():
    if split := _moment_split(path, known, params):
      groups.setdefault(split[0], {})[split[1]] = node
    else:
      rest[path] = node
  for place, group in groups.items():
    # A count beside mu, where a parameter is called `count`, only looks like a tree of moments.
    inner = any(other != place and other[: len(place)] == place for other in groups)
    if inner and {layouts_layers.without_layer(path, params.containers) for path in group} != known:
      rest |= {(*place, *path): node for path, node in group.items()}
    else:
      _read_moments(checkpoint, place, group)
  _check_siblings(checkpoint)
  checkpoint.opt_leaves = {path: node for path, node in rest.items() if isinstance(node, StoredArray)}
  recorded = {tuple(path): kind for path, kind in record_of(checkpoint.raw).get("opt_empties", ())}
  checkpoint.opt_empties = recorded | {path: node.kind for path, node in rest.items() if isinstance(node, Empty)}


def _moment_split(path: Path, known: set[Path], params: ParamTree) -> tuple[Path, Path] | None:
  """(place of the moment, path of the parameter) in a path below opt_state; the longest parameter wins."""
  for k in range(len(path)):
    for start in (k + 1, k) if path[k] == "params" else (k,):
      if start < len(path) and layouts_layers.without_layer(path[start:], params.containers) in known:
        return path[:k], path[start:]
  return None


def _read_moments(checkpoint: Checkpoint, place: Path, group: dict) -> None:
  params = checkpoint.params
  positions = (layouts_layers.position(path, dict.fromkeys(params.containers, "")) for path in group)
  found = {container: form for container, form, *_ in positions if container is not None}
  try:
    tree = split_layers(group, found, checkpoint.scan_axis, like=params.containers)
    for leaf, ref in tree.leaves.items():
      if leaf not in params.leaves:
        raise LayoutError(f"leaf {leaf_text(leaf)} has no parameter")
      if ref.shape != params.leaves[leaf].shape:
        raise LayoutError(f"leaf {leaf_text(leaf)} has shape {ref.shape}, its parameter {params.leaves[leaf].shape}")
  except LayoutError as error:
    if place[-1:] not in _FACTORED:
      raise LayoutError(f"opt_state/{slash_path(place)}: {error}") from error
    tree = split_layers(group, found, checkpoint.scan_axis, opaque=True)
    checkpoint.factored.add(place)
  checkpoint.moments[place] = tree


def _check_siblings(checkpoint: Checkpoint) -> None:
  """Raises LayoutError if mu and nu of an optimizer hold different leaves: the checkpoint is incomplete."""
  whole = {place: tree for place, tree in checkpoint.moments.items() if place not in checkpoint.factored}
  for place, tree in whole.items():
    siblings = {leaf for other, its in whole.items() if other[:-1] == place[:-1] for leaf in its.leaves}
    if missing := sorted(siblings - set(tree.leaves) - tree.empties, key=str):
      raise LayoutError(f"leaf {leaf_text(missing[0])} is missing from opt_state/{slash_path(place)}")
