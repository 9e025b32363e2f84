"""Fills a maxghost train state, or a model's parameters, from a checkpoint of any layout.

The wanted tree gives the arrays and their shardings. Each array is read, stacked or unstacked as the model needs, put
on its devices, and freed on the host before the next one. Moments are matched by name (`mu`, `nu`, `trace`), so the
number of optimizer stages may differ.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts import MAXGHOST, NNX, Checkpoint, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader, ParamTree, Path, Ref, leaf_text
from maxghost.checkpoint.layouts_store import (
  LayoutError,
  StoredArray,
  TreePath,
  is_typed_key,
  listed,
  misfit,
  nested,
  tree_from_memory,
)
from maxghost.config.values import slash_path
from maxghost.interop.convert import read_block, with_key_type
from maxghost.interop.convert_plan import TargetLeaf
from maxghost.interop.huggingface import open_tree
from maxghost.interop.linen_scaling import is_query, rescale_leaf

_HOLD_BYTES = 1 << 30
_WIDER = {
  ("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float64"), ("float16", "float64"),
  ("float32", "float64"),
}  # fmt: skip


def load_tree(path: str | os.PathLike, wanted: Mapping[str, Any], **options: Any) -> dict:
  """Arrays of the checkpoint `path` in the nested dict `wanted`; all of `open_load` in one call."""
  return open_load(path, wanted, **options)()


def open_load(
  path: str | os.PathLike,
  wanted: Mapping[str, Any],
  *,
  head_dim: int | None = None,
  widen: bool = False,
  read: ReadOptions | None = None,
  say: Callable[[str], None] = print,
) -> Callable[[], dict]:
  """Pairs the arrays of the checkpoint `path` with the leaves of `wanted`; reads headers only.

  Leaves that other programs' checkpoints lack (loop state, random keys) keep the array that `wanted` has there and are
  named by `say`. Where `wanted` has no array, `clip_factor` is 1 and the others are left out.

  Args:
    path: The checkpoint folder, or a Hugging Face model folder.
    wanted: {"model": {...}[, "optimizer": {...}][, ...]}, with leaves that have shape and dtype
      (jax.ShapeDtypeStruct). A leaf without a sharding is read as a numpy array.
    head_dim: Rescales query weights in MaxText's convention (see `linen_scaling`); None = never.
    widen: Whether a parameter may have a narrower float dtype, whose values the wanted one holds exactly.
    read: How to read the checkpoint.
    say: Receives each message for the user.

  Returns:
    A function that reads the arrays and returns them nested as in `wanted`.

  Raises:
    LayoutError: It names every parameter and moment that is missing or has another shape or dtype.
  """
  source = read_checkpoint(open_tree(path), read or ReadOptions(keep_unknown=True))
  target = read_checkpoint(tree_from_memory(wanted, "the model"), ReadOptions(layout=MAXGHOST, scan_axis=0))
  found = _Matcher(source, target, widen)
  found.match(with_optimizer="optimizer" in wanted)
  found.check(str(path))
  rescale = head_dim is not None and source.values_from == "maxtext"
  if head_dim is not None and not source.values_from and source.layout == NNX:
    raise LayoutError(f"{path}: nothing tells whether MaxText or maxghost scaled the query weights; pass head_dim=None")

  def read_all() -> dict:
    reader = LayerReader(_HOLD_BYTES)
    arrays: dict[TreePath, Any] = {}
    for leaf in found.leaves:
      block = read_block(reader, leaf)
      if rescale and head_dim is not None and is_query(leaf.path):
        block = rescale_leaf(leaf.path, block, head_dim, MAXGHOST)
      arrays[tuple(map(str, leaf.path))] = _place(block, leaf, _look_up(wanted, leaf.path))
    kept = {leaf: _initial(leaf, _look_up(wanted, leaf)) for leaf in found.fresh}
    arrays |= {tuple(map(str, leaf)): value for leaf, value in kept.items() if value is not None}
    for what, names in (
      ("kept at its initial value", [slash_path(leaf) for leaf, value in kept.items() if value is not None]),
      ("left out", [slash_path(leaf) for leaf, value in kept.items() if value is None]),
    ):
      if names:
        say(f"not in {path}, {what}: {', '.join(names)}")
    return nested(arrays)

  return read_all


class _Matcher:
  """Pairs every array of the target with parts of the source."""

  def __init__(self, source: Checkpoint, target: Checkpoint, widen: bool):
    self._source, self._target, self._widen = source, target, widen
    self.leaves: list[TargetLeaf] = []
    self.fresh: list[TreePath] = []
    self._problems: list[str] = []
    self._used: set[tuple[int, int | None]] = set()

  def match(self, *, with_optimizer: bool) -> None:
    self._match_tree(self._target.params, self._source.params, "")
    self._match_tree(self._target.aux, self._source.aux, "", optional=True)
    for key, nodes in self._target.loop_state.items():
      held = self._source.loop_state.get(key, {})
      for path, node in nodes.items():
        assert isinstance(node, StoredArray), "the model's own loop state holds arrays alone"
        other = held.get(path)
        if isinstance(other, StoredArray) and other.shape == node.shape and other.dtype == node.dtype:
          self.leaves.append(TargetLeaf(node.path, (Ref(other),)))
        else:
          self.fresh.append(node.path)
    if not with_optimizer:
      return
    for place, tree in self._target.moments.items():
      self._match_tree(tree, self._source_moment(place), f"opt_state/{slash_path(place)}/")
    for path, array in self._target.opt_leaves.items():
      self._match_count(path, array)
    self._match_step()

  def check(self, origin: str) -> None:
    held = self._source.params.leaves
    unused = [leaf_text(leaf) for leaf, ref in held.items() if (id(ref.array), ref.index) not in self._used]
    if unused:
      self._problems.append(f"has {listed(unused)}, unknown to the model")
    if self._problems:
      raise LayoutError(misfit(origin, self._problems))

  def _match_tree(self, target: ParamTree, source: ParamTree | None, prefix: str, *, optional: bool = False) -> None:
    wanted: dict[int, list] = {}
    for leaf, ref in target.leaves.items():
      wanted.setdefault(id(ref.array), []).append((leaf, ref))
    missing = []
    for pairs in wanted.values():
      pairs.sort(key=lambda pair: -1 if pair[1].index is None else pair[1].index)
      parts = [source.leaves.get(leaf) if source else None for leaf, _ in pairs]
      first = pairs[0][1]
      found = [part for part in parts if part is not None]
      if len(found) < len(parts):
        missing += [leaf_text(leaf) for (leaf, _), part in zip(pairs, parts, strict=True) if part is None]
        self.fresh += [first.array.path] if optional else []
        continue
      for (leaf, ref), part in zip(pairs, found, strict=True):
        if part.shape != ref.shape or not (part.dtype == ref.dtype or self._widens(part, ref)):
          self._problems.append(f"{prefix}{leaf_text(leaf)} is {_kind(part)} there and {_kind(ref)} in the model")
        self._used.add((id(part.array), part.index))
      axis = None if first.index is None else first.axis
      cast = first.dtype.name if self._widen and not first.array.key_impl else ""
      self.leaves.append(TargetLeaf(first.array.path, tuple(found), axis, cast))
    if missing and not optional:
      self._problems.append(f"misses {prefix}{listed(missing)}")

  def _widens(self, part: Ref, ref: Ref) -> bool:
    """Whether the wanted dtype holds every value of the stored one."""
    return self._widen and (part.dtype.name, ref.dtype.name) in _WIDER

  def _source_moment(self, place: Path) -> ParamTree | None:
    """The moment tree of the same place; else the only one of the same name."""
    moments = self._source.moments
    if place in moments:
      return moments[place]
    named = [tree for other, tree in moments.items() if other[-1:] == place[-1:]]
    return named[0] if len(named) == 1 else None

  def _match_count(self, path: Path, array: StoredArray) -> None:
    held = self._source.opt_leaves
    same_name = [other for other_path, other in held.items() if other_path[-1] == path[-1]]
    chosen = held.get(path)
    if chosen is None and same_name and len({other.read(None).tobytes() for other in same_name}) == 1:
      chosen = same_name[0]
    if chosen is None:
      self._problems.append(f"misses opt_state/{slash_path(path)}")
    elif chosen.shape != array.shape or chosen.dtype != array.dtype:
      self._problems.append(f"opt_state/{slash_path(path)} is {_kind(chosen)} there and {_kind(array)} in the model")
    else:
      self.leaves.append(TargetLeaf(array.path, (Ref(chosen),)))

  def _match_step(self) -> None:
    step, stored = self._target.step, self._source.step
    if step is not None and stored is None:
      self._problems.append("misses step")
    elif step is not None and stored is not None:
      self.leaves.append(TargetLeaf(step.path, (Ref(stored),), cast=step.dtype.name))


def _kind(array: StoredArray | Ref) -> str:
  return f"{array.dtype}{list(array.shape)}"


def _initial(path: TreePath, wanted: Any) -> Any:
  """The value of what the checkpoint does not have; None where only its shape is known."""
  import jax

  if not isinstance(wanted, jax.ShapeDtypeStruct):
    return wanted
  return _place(np.ones(wanted.shape, wanted.dtype), None, wanted) if slash_path(path) == "clip_factor" else None


def _look_up(tree: Any, path: TreePath) -> Any:
  for key in path:
    tree = tree[key] if key in tree else tree[int(key)]
  return tree


def _place(block: np.ndarray, leaf: TargetLeaf | None, wanted: Any) -> Any:
  value = with_key_type(block, leaf.key_impl) if leaf and is_typed_key(wanted) else block
  sharding = getattr(wanted, "sharding", None)
  if sharding is None:
    return value
  import jax

  return jax.device_put(value, sharding)
