"""Merges LoRA adapters into the matrices of a model of any layout, as they are read; the base stays as it is."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxghost.checkpoint.layouts import Checkpoint, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader, Ref
from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, full_path
from maxghost.config import ConfigError, ModelConfig
from maxghost.config.values import naming
from maxghost.interop import model_path, peft
from maxghost.interop.huggingface import open_tree
from maxghost.interop.huggingface_config import differing


def open_adapter(path: str | Path, model: ModelConfig) -> tuple[peft.Settings, dict[str, np.ndarray]]:
  """As `peft.load_adapter`, from a folder of PEFT or from a run or checkpoint with adapters. Raises ConfigError."""
  if (file := full_path(path) / peft.CONFIG).is_file():
    try:
      return peft.load_adapter(path, model)
    except ConfigError:
      raise
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, re.error) as error:
      raise LayoutError(f"{file}: an entry is of another type than PEFT writes ({error})") from error
  place = model_path.find(path)
  if place.config is None or not place.config.adapter.lora_rank:
    raise LayoutError(f"{path} holds no adapter: it is neither a folder of PEFT nor a run with lora_rank above 0")
  if unlike := differing(place.config.model, model):
    raise LayoutError(f"the base is another model than {path}: they differ in {', '.join(unlike)}")
  given, reader, found = place.config.adapter, LayerReader(1 << 30), {}
  for (leaf, layer), ref in read_checkpoint(open_tree(place.tree)).params.leaves.items():
    if re.search(r"(/lora/|_lora_)[ab]$", name := "/".join(leaf)):
      found[name, layer] = {None: reader.part(ref)}
  settings = peft.Settings(given.lora_rank, given.lora_alpha, given.lora_dropout, base_qtype=given.lora_weight_qtype)
  return settings, peft.stack(found, model, place.tree)


def merged_array(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, held: Callable = np.asarray) -> np.ndarray:
  """held(w) [*lead, *I, *O] + scale a b, with a [*lead, I, r], b [*lead, r, *O]; in float32 or wider, rounded once.
  The factors are copied in row-major order, so that the bits do not depend on how they lie in memory."""
  wide = np.result_type(*(np.promote_types(x.dtype, np.float32) for x in (w, a)))  # those of 16 bits have no common one
  product = a.astype(wide, order="C") @ b.astype(wide, order="C").reshape(*b.shape[: a.ndim - 1], -1)
  return (held(w.astype(wide)) + wide.type(scale) * product.reshape(w.shape)).astype(w.dtype)


def open_merged(base: Checkpoint, model: ModelConfig, adapter: str | Path, say: Callable[[str], None]) -> Checkpoint:
  """`merged` with the adapter at this path; says what it is merged into. Raises ConfigError."""
  with naming("adapter", adapter):
    settings, arrays = open_adapter(adapter, model)
  held = f"the matrices that {settings.base_qtype} makes of " if settings.base_qtype else ""
  say(f"merging the adapters of {adapter} into {held}{base.raw.origin}")
  return merged(base, model, settings, arrays)


def merged(base: Checkpoint, model: ModelConfig, settings: peft.Settings, arrays: peft.Arrays) -> Checkpoint:
  """The model with the adapter merged into its matrices as they are read. Raises LayoutError for one that misfits.

  base: with heads as maxghost has them, see `linen_scaling.unscaled`.
  """
  found, problems, leaves = peft.unstack(arrays, model), [], {}
  held = _held_in_few_bits(model, settings.base_qtype) if settings.base_qtype else {}
  for (path, layer), ref in base.params.leaves.items():
    label = "/".join(path)
    a, b = (found.pop((peft.adapter_path(label, part), layer), None) for part in "ab")
    change = held.get(label, np.asarray)
    if a is not None and b is not None:
      lead, outputs = a.shape[:-2], b.shape[a.ndim - 1 :]
      shape = (*lead, math.prod(ref.shape[len(lead) : -len(outputs)]), *ref.shape[-len(outputs) :])
      if shape != (*lead, a.shape[-2], *outputs):
        problems.append(f"{ref.where()} is {[*ref.shape]}, its adapter {[*a.shape]} times {[*b.shape]}")
      change = functools.partial(merged_array, a=a, b=b, scale=settings.scale, held=change)
    leaves[path, layer] = ref if change is np.asarray else _changed(ref, change)
  problems += [f"{base.raw.origin} has no matrix for {path}, layer {layer}" for path, layer in found]
  if problems:
    raise LayoutError(*problems[:8])
  return base.with_params(leaves)


def _changed(ref: Ref, change: Callable[[np.ndarray], np.ndarray]) -> Ref:
  """A layer that is changed when it is read."""
  return Ref(StoredArray(ref.array.path, ref.shape, ref.dtype, lambda index=None: change(ref.read())[index or ...]))


def _held_in_few_bits(model: ModelConfig, qtype: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
  """{path without layer: what lora_weight_qtype makes of such a matrix}: the model that was trained. Imports JAX."""
  from maxghost import models
  from maxghost.adapters.attach import places
  from maxghost.adapters.quantized import dequantize, matrix_axes, quantize

  def restored(in_axes: int, out_axes: int, w: np.ndarray) -> np.ndarray:
    if qtype == "bfloat16":
      return w.astype(qtype).astype(w.dtype)
    depth, wide = w.ndim - in_axes - out_axes, w.astype(np.promote_types(w.dtype, np.float32))
    whole = dequantize(quantize(wide, qtype, depth, in_axes), qtype, wide.dtype, depth)
    return np.asarray(whole).reshape(w.shape).astype(w.dtype)

  found = {}
  for label, (module, name, by_default) in places(models.create_abstract(model)).items():
    if by_default or name:
      path = re.sub(r"^decoder/layers(/layers)?_\d+/", "decoder/layers/", label if name else f"{label}/kernel")
      found[path] = functools.partial(restored, *matrix_axes(module))
  return found
