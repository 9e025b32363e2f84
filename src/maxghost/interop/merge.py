"""Merges LoRA adapters into the matrices of a model of any layout, as they are read; the base stays as it is."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np

from maxghost.checkpoint.layouts import ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader, Ref, leaf_text
from maxghost.checkpoint.layouts_store import LayoutError, RawTree, StoredArray, full_path
from maxghost.config import ModelConfig
from maxghost.config.families import FAMILIES
from maxghost.interop import model_path, peft
from maxghost.interop.huggingface import open_tree
from maxghost.interop.peft import Arrays, Settings


def open_adapter(path: str | Path, model: ModelConfig) -> tuple[Settings, dict[str, np.ndarray]]:
  """As `peft.load_adapter`, from a folder of PEFT or from a run or checkpoint with adapters. Raises ConfigError."""
  if (full_path(path) / peft.CONFIG).is_file():
    return peft.load_adapter(path, model)
  place = model_path.find(path)
  if place.config is None or not place.config.adapter.lora_rank:
    raise LayoutError(f"{path} holds no adapter: it is neither a folder of PEFT nor a run with lora_rank above 0")
  given, reader, found = place.config.adapter, LayerReader(1 << 30), {}
  for (leaf, layer), ref in read_checkpoint(
    open_tree(place.tree), ReadOptions(keep_unknown=True)
  ).params.leaves.items():
    if re.search(r"(/lora/|_lora_)[ab]$", name := "/".join(leaf)):
      found[name, layer] = {None: reader.part(ref, tuple(slice(0, size) for size in ref.shape))}
  settings = Settings(given.lora_rank, given.lora_alpha, given.lora_dropout, given.lora_use_rslora)
  return settings, peft.stack(found, model, place.tree)


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
  found, problems, checkpoint = peft.unstack(arrays, model), [], read_checkpoint(base, ReadOptions(keep_unknown=True))
  if checkpoint.values_from == "maxtext" and FAMILIES[model.decoder_block].maxtext_scales_queries is not False:
    raise LayoutError(
      f"{base.origin} holds query weights as MaxText wants them; rescale first: maxghost checkpoint rescale"
    )
  adapted: dict[StoredArray, dict[int | None, tuple[Ref, np.ndarray, np.ndarray]]] = {}
  for (path, layer), ref in checkpoint.params.leaves.items():
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
