"""Fills a maxghost train state, or a model's parameters, from a checkpoint of any layout.

Each array is read, stacked or unstacked as the model needs, put on its devices, and freed on the host before the next
one. Moments are matched by name (`mu`, `nu`, `trace`), so the number of optimizer stages may differ.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxghost.checkpoint import layouts_store
from maxghost.checkpoint.layouts import MAXGHOST, NNX, Checkpoint, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader, ParamTree, Ref, leaf_text, whole
from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, TreePath
from maxghost.config.values import slash_path
from maxghost.interop.convert import read_block
from maxghost.interop.convert_plan import TargetLeaf
from maxghost.interop.huggingface import open_tree
from maxghost.interop.linen_scaling import change_leaf

_HOLD_BYTES = 1 << 30
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Taken:
  """A leaf of `wanted` that `take` makes of the array in host memory, which is then freed; it may give several."""

  shape: tuple[int, ...]
  dtype: Any
  take: Callable[[np.ndarray], Any]


def load_tree(path: str | os.PathLike, wanted: Mapping[str, Any], **options: Any) -> dict:
  """Arrays of the checkpoint `path` in the nested dict `wanted`; all of `open_load` in one call."""
  return open_load(path, wanted, **options)()


def open_load(path: str | os.PathLike | Checkpoint, wanted: Mapping[str, Any], *, head_dim: int | None = None,
              rope_pairs: bool = False, widen: bool = False,
              say: Callable[[str], None] = print) -> Callable[[], dict]:  # fmt: skip
  """Pairs the arrays of the checkpoint `path` with the leaves of `wanted`; reads headers only.

  Leaves that other programs' checkpoints lack (loop state, random keys) keep the array that `wanted` has there and are
  named by `say`. Where `wanted` has no array, `clip_factor` is 1 and the others are left out.

  path: the checkpoint folder, or a Hugging Face model folder; or one that was read. wanted: {"model": {...}[,
  "optimizer": {...}][, ...]}, with leaves that have shape and dtype (jax.ShapeDtypeStruct, `Taken`); one without a
  sharding is read as a numpy array. head_dim: rescales query weights in MaxText's convention (see `linen_scaling`);
  None = never. rope_pairs: reorders such query and key heads. widen: whether a parameter may have a narrower float
  dtype, whose values the wanted one holds exactly. say: receives each message for the user. Returns a function that
  reads the arrays and returns them nested as in `wanted`. Raises LayoutError, which names every parameter and moment
  that is missing or has another shape or dtype.
  """
  source = path if isinstance(path, Checkpoint) else read_checkpoint(open_tree(path))
  path = source.raw.origin
  model = layouts_store.tree_from_memory(wanted, "the model")
  target = read_checkpoint(model, ReadOptions(layout=MAXGHOST, scan_axis=0))
  found, ours, theirs = _Matcher(widen), target.trees(), source.trees()
  found.match(target.params, source.params)
  unused = [leaf_text(leaf) for leaf, ref in source.params.leaves.items() if ref not in found.used]
  for name in ("aux", "loop_state"):
    found.match(ours[name], theirs[name], optional=True)
  if "optimizer" in wanted:
    for place, tree in target.moments.items():
      # That of the same place; else the only one of the same name.
      named = [other for at, other in source.moments.items() if at[-1:] == place[-1:]]
      moment = source.moments.get(place) or (named[0] if len(named) == 1 else ParamTree())
      found.match(tree, moment, f"opt_state/{slash_path(place)}/")
    found.match(ours["opt_state"], _counts(target, source), "opt_state/")
    found.match(ours["step"], theirs["step"], "step", cast=True)
  if text := layouts_store.misfit(path, found.missing, unused, found.unlike):
    raise LayoutError(text)
  unread = [slash_path(place) for place, tree in source.moments.items() if not found.used >= {*tree.leaves.values()}]
  if unread and "optimizer" in wanted:
    say(f"not read from {path}, as the optimizer here keeps no such state: opt_state/{', opt_state/'.join(unread)}")
  if head_dim is not None and not source.values_from and source.layout == NNX:
    raise LayoutError(f"{path}: nothing tells whether MaxText or maxghost scaled the query weights; pass head_dim=None")

  def read_all() -> dict:
    import jax

    from maxghost.parallel import distributed

    reader, digest = LayerReader(_HOLD_BYTES), distributed.Digest()
    arrays: dict[TreePath, Any] = {}
    for leaf in found.leaves:
      like, of_maxtext = _look_up(wanted, leaf.path), source.values_from == "maxtext"
      index = _own_block(leaf.shape, like, whole_heads=of_maxtext)
      block = read_block(reader, leaf, index)
      for sample in [block] if index is None else (read_block(reader, leaf, at) for at in _samples(leaf.shape)):
        digest.add(sample)
      if of_maxtext:
        block = change_leaf(leaf.path, block, head_dim, rope_pairs, MAXGHOST)
      arrays[leaf.path] = _put(block, leaf.key_impl, like, leaf.shape, index)
    digest.check(str(path))
    kept, left_out = {}, []
    for leaf in found.fresh:
      like = _look_up(wanted, leaf)
      if not isinstance(like, jax.ShapeDtypeStruct):
        kept[leaf] = like
      elif leaf == ("clip_factor",):
        kept[leaf] = _put(np.ones(like.shape, like.dtype), None, like)
      else:
        left_out.append(leaf)
    for what, leaves in (("kept at its initial value", kept), ("left out", left_out)):
      if leaves:
        say(f"not in {path}, {what}: {', '.join(map(slash_path, leaves))}")
    return layouts_store.nested({tuple(map(str, leaf)): value for leaf, value in (arrays | kept).items()})

  return read_all


@dataclass
class _Matcher:
  """Pairs arrays of the model with layers of the source: `leaves`; `fresh` are those that it lacks."""

  widen: bool
  leaves: list[TargetLeaf] = field(default_factory=list)
  fresh: list[TreePath] = field(default_factory=list)
  missing: list[str] = field(default_factory=list)
  unlike: list[str] = field(default_factory=list)
  used: set[Ref] = field(default_factory=set)

  def match(self, target: ParamTree, source: ParamTree, prefix="", *, optional=False, cast=False) -> None:
    """optional: whether the source may lack arrays. cast: whether it may have any other dtype."""
    arrays: dict[StoredArray, list] = {}
    for leaf, ref in target.leaves.items():
      arrays.setdefault(ref.array, []).append((ref.index or 0, leaf, ref))
    for array, layers in arrays.items():
      layers.sort(key=lambda layer: layer[0])
      if absent := [leaf for _, leaf, _ in layers if leaf not in source.leaves]:
        self.fresh += [array.path] if optional else []
        self.missing += [] if optional else [f"{prefix}{leaf_text(leaf)}" for leaf in absent]
        continue
      for _, leaf, ref in layers:
        part = source.leaves[leaf]
        floats = part.dtype.name in _FLOATS and ref.dtype.name in _FLOATS
        widens = self.widen and floats and part.dtype.itemsize < ref.dtype.itemsize
        if part.shape != ref.shape or not (cast or widens or part.dtype == ref.dtype):
          there, here = (f"{side.dtype}{list(side.shape)}" for side in (part, ref))
          self.unlike.append(f"{prefix}{leaf_text(leaf)} is {there} there and {here} in the model")
      parts = tuple(source.leaves[leaf] for _, leaf, _ in layers)
      self.used.update(parts)
      first = layers[0][2]
      dtype = array.dtype.name if (cast or self.widen) and not array.key_impl else ""
      self.leaves.append(TargetLeaf(array.path, parts, None if first.index is None else first.axis, dtype))


def _counts(target: Checkpoint, source: Checkpoint) -> ParamTree:
  """The state of the same place for each of the target's; else that of the same name, where all of it are equal."""
  found = {}
  for path in target.opt_leaves:
    named = [array for other, array in source.opt_leaves.items() if other[-1] == path[-1]]
    equal = len({array.read(None).tobytes() for array in named}) == 1
    found[path] = source.opt_leaves.get(path, named[0] if equal else None)
  return whole(found)


def _look_up(tree: Any, path: TreePath) -> Any:
  for key in path:
    tree = tree[key] if key in tree else tree[int(key)]
  return tree


def _own_block(shape: tuple[int, ...], wanted: Any, *, whole_heads: bool) -> tuple[slice, ...] | None:
  """What this process reads of an array of this shape: what its devices hold of it, or None for all.

  whole_heads: whether heads, of the last axis, may be reordered.
  """
  from maxghost.parallel.shardings import local_block

  sharding = getattr(wanted, "sharding", None)
  if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
    return None
  block = local_block(shape, sharding)
  return (*block[:-1], slice(0, shape[-1])) if whole_heads else block


def _samples(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
  """The first, middle and last entry of an array along its leading axis, as blocks."""
  places = dict.fromkeys((0, shape[0] // 2, shape[0] - 1))
  return [(slice(i, i + 1), *(slice(0, size) for size in shape[1:])) for i in places]


def _put(block: np.ndarray, key_impl: str | None, wanted: Any, shape: tuple = (), index: Any = None) -> Any:
  """wanted: what `block` becomes: of an array of this shape, the part at `index`, or all."""
  import jax

  from maxghost.parallel.shardings import spread

  if isinstance(wanted, Taken):
    return wanted.take(block)
  sharding = getattr(wanted, "sharding", None)
  value = block if sharding is None else spread(block, sharding, shape, [s.start for s in index or ()])
  is_key = key_impl and layouts_store.is_typed_key(wanted)
  return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=key_impl) if is_key else value
