"""Moves 1/sqrt(head_dim) of attention out of MaxText's query weights, and back in; puts heads in another order.

MaxText's llama2, mistral, mixtral, gemma and gemma2 blocks compute softmax(q k) and keep the factor in the query
weights; maxghost computes softmax(q k / sqrt(h)), h being the head width. The two functions are equal when the query
weights are multiplied by s = sqrt(h), first moments divided by s and second moments by h. This is exact where s is a
power of two; otherwise each direction rounds once. docs/checkpoints.md says how training differs.
With rope_type=llama3.1 MaxText rotates neighbouring numbers of a head against each other, maxghost its two halves. The
functions are equal when the numbers of query and key heads are reordered.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from maxghost.checkpoint.layouts import NNX, NNX_OLD, RECORD, Checkpoint, read_checkpoint, without_value
from maxghost.checkpoint.layouts_store import AnyPath, LayoutError, RawTree, StoredArray, TreePath, full_path
from maxghost.config import ModelConfig
from maxghost.config.arguments import Parser
from maxghost.config.families import FAMILIES
from maxghost.config.values import guarded, slash_path
from maxghost.interop.convert import written
from maxghost.interop.convert_plan import Target, make_plan
from maxghost.interop.huggingface import open_tree

MAXGHOST, MAXTEXT = "maxghost", "maxtext"
# Which power of the gradient a moment holds, by the name optax gives it; a weight holds power 0.
_POWERS = {"mu": 1, "trace": 1, "m": 1, "nu": 2, "v": 2, "v_row": 2, "v_col": 2}
_ROTATED = re.compile(r"(^|/)(query|key)(_norm)?/(kernel|bias|scale)(/value)?$")  # their last axis is a head


def is_query(path: TreePath) -> bool:
  return without_value(path)[-2:] in (("query", "kernel"), ("query", "bias"))


def unscaled(checkpoint: Checkpoint, model: ModelConfig) -> Checkpoint:
  """The checkpoint with MaxText's heads changed into those of maxghost as they are read. Raises LayoutError."""
  raw, (head_dim, rope_pairs) = checkpoint.raw, head_changes(checkpoint, model)
  if not (head_dim or rope_pairs):
    return checkpoint
  record = {**raw.custom_metadata.get(RECORD, {}), "values_from": MAXGHOST}
  metadata = raw.step_metadata | {"custom_metadata": raw.custom_metadata | {RECORD: record}}
  changed = _changed_tree(dataclasses.replace(raw, step_metadata=metadata), head_dim, rope_pairs, MAXGHOST)
  return read_checkpoint(changed)


def head_changes(checkpoint: Checkpoint, model: ModelConfig) -> tuple[int | None, bool]:
  """(head_dim to rescale queries with, or None; whether heads are reordered) to get a checkpoint's parameters as
  maxghost has them. Raises LayoutError where this is not known."""
  scales = FAMILIES[model.decoder_block].maxtext_scales_queries
  if checkpoint.values_from != MAXTEXT:
    return None, False
  if scales is None:
    unknown = f"how MaxText scales query weights is not known for decoder_block={model.decoder_block}"
    raise LayoutError(f"{checkpoint.raw.origin} is a checkpoint of MaxText; {unknown}")
  return model.head_dim if scales else None, model.rope_type == "llama3.1"


def _changed_tree(raw: RawTree, head_dim: int | None, rope_pairs: bool, to: str) -> RawTree:
  """The tree with its heads in the convention of `to`, changed as they are read."""

  def changed(path: TreePath, node: StoredArray, index: tuple[slice, ...] | None) -> np.ndarray:
    if without_value(path)[-1] == "scale":  # [h, L] where layers are stacked
      return change_leaf(path, node.read(None).T, head_dim, rope_pairs, to).T[index or ()]
    heads = node.read(index and (*index[:-1], slice(None)))
    return change_leaf(path, heads, head_dim, rope_pairs, to)[..., index[-1] if index else slice(None)]

  nodes = dict(raw.nodes)
  for path, node in raw.arrays().items():
    if _ROTATED.search(slash_path(path)):
      nodes[path] = dataclasses.replace(node, read=functools.partial(changed, path, node))
  return dataclasses.replace(raw, nodes=nodes)


def rescale_leaf(path: TreePath, array: np.ndarray, head_dim: int, to: str) -> np.ndarray:
  """One query leaf, or a block of it, rescaled in float64 and rounded once to its own dtype."""
  power = next((_POWERS[name] for name in map(str, path) if name in _POWERS), None) if "opt_state" in path else 0
  if power is None:
    what = "it is not known how this state scales with gradients"
    raise LayoutError(f"leaf {slash_path(path)}: {what}; known: {', '.join(_POWERS)}")
  factor = float(head_dim) if power == 2 else math.sqrt(head_dim)
  grows = (power == 0) == (to == MAXGHOST)  # a weight on the way to maxghost, or a moment on the way back
  wide = array.astype(np.float64)
  return (wide * factor if grows else wide / factor).astype(array.dtype)


def change_leaf(path: TreePath, array: np.ndarray, head_dim: int | None, rope_pairs: bool, to: str) -> np.ndarray:
  """A leaf, or a block of whole heads, in the convention of `to`; the same array if it is not of queries or keys."""
  array = rescale_leaf(path, array, head_dim, to) if head_dim and is_query(path) else array
  if not (rope_pairs and _ROTATED.search(slash_path(path))):
    return array
  halves = (-1, 2) if to == MAXGHOST else (2, array.shape[-1] // 2)
  return array.reshape(*array.shape[:-1], *halves).swapaxes(-1, -2).reshape(array.shape)


def rescale_checkpoint(
  source: AnyPath, target_path: AnyPath, head_dim: int, to: str, *, rope_pairs: bool = False, say: Callable = print
) -> None:
  """Writes the checkpoint `source`, in its own layout, with rescaled query leaves; all others are copied bit by bit.

  rope_pairs: whether MaxText rotates neighbouring numbers (rope_type=llama3.1), so that heads are reordered too.
  """
  if to not in (MAXGHOST, MAXTEXT):
    raise LayoutError(f"to={to}: use {MAXGHOST} or {MAXTEXT}")
  checkpoint = read_checkpoint(_changed_tree(open_tree(source), head_dim, rope_pairs, to))
  if checkpoint.values_from == to:
    raise LayoutError(f"{source} already holds query weights as {to} wants them; nothing to rescale")
  out = full_path(target_path)
  layout = NNX if checkpoint.layout == NNX_OLD else checkpoint.layout
  plan = make_plan(checkpoint, Target(layout, wrapped=checkpoint.wrapped or None))
  if not (queries := [leaf for leaf in plan.leaves if is_query(leaf.path)]):
    raise LayoutError(f"{source} holds no query projection (.../query/kernel)")
  for (path, _), ref in checkpoint.params.leaves.items():
    if is_query(path) and ref.shape[-1:] != (head_dim,):
      raise LayoutError(f"head_dim={head_dim}, but the last dimension of {slash_path(path)} is {ref.shape[-1]}")
  plan.custom_metadata[RECORD]["values_from"] = to
  with written(checkpoint, plan, out, rngs=True):
    pass
  order = ", heads reordered" if rope_pairs else ""
  say(f"written {out}: {len(queries)} query leaves rescaled by sqrt({head_dim}){order} as {to} wants, the rest copied")


@guarded("rescale")
def main(argv: Sequence[str] | None = None) -> int:
  about = "Moves the attention factor 1/sqrt(head_dim) into or out of the query weights."
  parser = Parser(prog="maxghost checkpoint rescale", description=about)
  for name, kind in (("--source_path", str), ("--target_path", str), ("--head_dim", int)):
    parser.add_argument(name, type=kind, required=True)
  parser.add_argument("--to", choices=(MAXGHOST, MAXTEXT), required=True)
  parser.add_argument("--rope_pairs", action="store_true", help="of rope_type=llama3.1: also reorder heads")
  options = vars(parser.parse(argv))
  rescale_checkpoint(options.pop("source_path"), **options)
  return 0
