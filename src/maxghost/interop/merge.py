"""Merges LoRA adapters into the matrices of a model of any layout, as they are read; the base stays as it is."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from maxghost.checkpoint.layouts import ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import Ref, leaf_text
from maxghost.checkpoint.layouts_store import LayoutError, RawTree, StoredArray, full_path
from maxghost.config import ModelConfig
from maxghost.interop import peft
from maxghost.interop.peft import Arrays, Settings


def open_adapter(path: str | Path, model: ModelConfig) -> tuple[Settings, dict[str, np.ndarray]]:
  """As `peft.load_adapter`. Raises ConfigError."""
  if (full_path(path) / peft.CONFIG).is_file():
    return peft.load_adapter(path, model)
  raise LayoutError(f"{path} holds no adapter: it is no folder of PEFT, which has {peft.CONFIG}")


def merged_array(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
  """w + scale a b, summed in float32 or wider and rounded once to the dtype of w.

  w [*lead, *I, *O], a [*lead, *I, r] and b [*lead, r, *O]. The sum over r runs in order, entry by entry, so that a
  block has the bits that it has in the whole.
  """
  outputs, lead = w.ndim - a.ndim + 1, b.ndim - 1 - (w.ndim - a.ndim + 1)
  wide = np.promote_types(np.promote_types(w.dtype, a.dtype), np.float32)
  left = a.astype(wide).reshape(*a.shape[:-1], *[1] * outputs, a.shape[-1])
  right = np.moveaxis(b.astype(wide), lead, -1)
  right = right.reshape(*b.shape[:lead], *[1] * (a.ndim - 1 - lead), *right.shape[lead:])
  delta = np.zeros(w.shape, wide)
  for i in range(a.shape[-1]):
    delta += left[..., i] * right[..., i]
  return (w.astype(wide) + wide.type(scale) * delta).astype(w.dtype)


def merged(base: RawTree, model: ModelConfig, settings: Settings, arrays: Arrays) -> RawTree:
  """The model with the adapter merged into its matrices as they are read; `base` keeps its own.

  Raises LayoutError where an adapter has no matrix in the model, or one of another shape.
  """
  found, problems = peft.unstack(arrays, model), []
  adapted: dict[StoredArray, dict[int | None, tuple[Ref, np.ndarray, np.ndarray]]] = {}
  for (path, layer), ref in read_checkpoint(base, ReadOptions(keep_unknown=True)).params.leaves.items():
    a, b = (found.pop((peft.adapter_path("/".join(path), part), layer), None) for part in "ab")
    if a is None or b is None:
      continue
    lead, split = a.ndim - 2, len(ref.shape) - b.ndim + a.ndim - 1
    inner = ref.shape[lead:split]
    if (ref.shape[:lead], math.prod(inner), ref.shape[split:]) != (a.shape[:lead], a.shape[-2], b.shape[lead + 1 :]):
      problems.append(f"{ref.where()} is {[*ref.shape]}, its adapter {[*a.shape]} times {[*b.shape]}")
      continue
    adapted.setdefault(ref.array, {})[ref.index] = (ref, a.reshape(*a.shape[:lead], *inner, a.shape[-1]), b)
  problems += [f"{base.origin} has no matrix for {leaf_text(((path,), layer))}" for path, layer in found]
  if problems:
    raise LayoutError(*problems[:8])
  nodes = {path: _merged_node(x, adapted[x], settings.scale) if x in adapted else x for path, x in base.nodes.items()}
  return dataclasses.replace(base, nodes=nodes)


def _merged_node(array: StoredArray, parts: dict, scale: float) -> StoredArray:
  """parts: {layer on the array's layer axis, or None for an array without: (its Ref, a, b)}."""
  axis = next(iter(parts.values()))[0].axis

  def one(block: np.ndarray, index: tuple[slice, ...], layer: int | None) -> np.ndarray:
    if layer not in parts:
      return block
    _, a, b = parts[layer]
    inputs = a.ndim - 1
    lead = b.ndim - 1 - (block.ndim - inputs)
    return merged_array(block, a[index[:inputs]], b[(*index[:lead], slice(None), *index[inputs:])], scale)

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    index = tuple(slice(0, size) for size in array.shape) if index is None else index
    block = array.read(index)
    if None in parts:
      return one(block, index, None)
    inner, layers = index[:axis] + index[axis + 1 :], range(*index[axis].indices(array.shape[axis]))
    return np.stack([one(np.take(block, n, axis), inner, layer) for n, layer in enumerate(layers)], axis)

  return dataclasses.replace(array, read=read)
