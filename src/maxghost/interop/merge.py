"""Merges LoRA adapters into the matrices of a model of any layout, as they are read; the base stays as it is."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np

from maxghost.checkpoint.layouts import ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader
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
  held = read_checkpoint(open_tree(place.tree), ReadOptions(keep_unknown=True)).params.leaves
  for (leaf, layer), ref in held.items():
    if re.search(r"(/lora/|_lora_)[ab]$", name := "/".join(leaf)):
      found[name, layer] = {None: reader.part(ref, tuple(slice(0, size) for size in ref.shape))}
  settings = Settings(given.lora_rank, given.lora_alpha, given.lora_dropout)
  return settings, peft.stack(found, model, place.tree)


def merged_array(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
  """w [*lead, *I, *O] + scale a b, with a [*lead, I, r], b [*lead, r, *O]: in float32 or wider, rounded once."""
  wide = np.promote_types(np.promote_types(w.dtype, a.dtype), np.float32)
  product = a.astype(wide) @ b.astype(wide).reshape(*b.shape[: a.ndim - 1], -1)
  return (w.astype(wide) + wide.type(scale) * product.reshape(w.shape)).astype(w.dtype)


def merged(base: RawTree, model: ModelConfig, settings: Settings, arrays: Arrays) -> RawTree:
  """The model with the adapter merged into its matrices as they are read; `base` keeps its own.

  Raises LayoutError where an adapter has no matrix in the model, or one of another shape.
  """
  found, problems, checkpoint = peft.unstack(arrays, model), [], read_checkpoint(base, ReadOptions(keep_unknown=True))
  if checkpoint.values_from == "maxtext" and FAMILIES[model.decoder_block].maxtext_scales_queries is not False:
    raise LayoutError(
      f"{base.origin} holds query weights as MaxText wants them; rescale first: maxghost checkpoint rescale"
    )
  adapted: dict[StoredArray, tuple[int, dict]] = {}  # the layer axis, and (a, b) of each layer
  for (path, layer), ref in checkpoint.params.leaves.items():
    a, b = (found.pop((peft.adapter_path("/".join(path), part), layer), None) for part in "ab")
    if a is None or b is None:
      continue
    lead, outputs = a.shape[:-2], b.shape[a.ndim - 1 :]
    shape = (*lead, math.prod(ref.shape[len(lead) : -len(outputs)]), *ref.shape[-len(outputs) :])
    if shape != (*lead, a.shape[-2], *outputs):
      problems.append(f"{ref.where()} is {[*ref.shape]}, its adapter {[*a.shape]} times {[*b.shape]}")
    adapted.setdefault(ref.array, (ref.axis, {}))[1][ref.index] = a, b
  problems += [f"{base.origin} has no matrix for {path}, layer {layer}" for path, layer in found]
  if problems:
    raise LayoutError(*problems[:8])
  return dataclasses.replace(base, nodes={
    path: _merged_node(x, *adapted[x], settings.scale) if x in adapted else x for path, x in base.nodes.items()
  })  # fmt: skip


def _merged_node(array: StoredArray, axis: int, parts: dict, scale: float) -> StoredArray:
  def one(w: np.ndarray, layer: int | None) -> np.ndarray:
    return merged_array(w, parts[layer][0], parts[layer][1], scale) if layer in parts else w

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    index = tuple(slice(0, size) for size in array.shape) if index is None else index
    if None in parts:
      return one(array.read(None), None)[index]
    whole, out = [slice(0, size) for size in array.shape], []
    for layer in range(*index[axis].indices(array.shape[axis])):  # one in memory at a time
      whole[axis] = slice(layer, layer + 1)
      out.append(one(array.read(tuple(whole)).squeeze(axis), layer)[index[:axis] + index[axis + 1 :]])
    return np.stack(out, axis)

  return dataclasses.replace(array, read=read)
