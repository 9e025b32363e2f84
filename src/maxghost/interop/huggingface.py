"""Hugging Face model folders as a checkpoint layout: read into the same tree as the other layouts, and written.

A folder is read as a tree of parameters with unscanned layers. Tensors are read one at a time, when they are needed.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.checkpoint import layouts_store
from maxghost.checkpoint.layouts import PARAMS, RECORD, Checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader, Ref, leaf_text
from maxghost.checkpoint.layouts_store import LayoutError, Location, RawTree, StoredArray, TreePath
from maxghost.config import Config, ModelConfig, replace
from maxghost.config import load as load_config
from maxghost.config.families import FAMILIES, TensorRule
from maxghost.config.values import listed
from maxghost.interop import huggingface_config
from maxghost.interop.safetensors_files import open_tensors

CONFIG_JSON = "config.json"
_HEAD = "lm_head.weight"
_MOST_NAMES = 8


@dataclass(frozen=True)
class Rule(TensorRule):
  """A line of the table with the sizes of one model."""

  sizes: Mapping[str, int] = field(default_factory=dict)

  @property
  def per_expert(self) -> bool:
    return "{expert}" in self.name

  @property
  def param_shape(self) -> tuple[int, ...]:
    """Of each of `paths` in one layer."""
    return self._shape(self.lead + self.inputs + self.outputs)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    lead = () if self.per_expert else self._shape(self.lead)
    columns = math.prod(self._shape(self.outputs)) * len(self.paths)
    rows = (math.prod(self._shape(self.inputs)),) if self.inputs else ()
    return (*lead, columns, *rows) if self.transpose else (*lead, *rows, columns)

  def _shape(self, letters: str) -> tuple[int, ...]:
    return tuple(self.sizes[letter] for letter in letters)

  def to_param(self, values: np.ndarray, which: int) -> np.ndarray:
    """paths[which] from a tensor, or from a slice of its lead axis; a view where possible."""
    values = values.swapaxes(-1, -2) if self.transpose else values
    count, width = len(self.paths), values.shape[-1] // len(self.paths)
    chosen = slice(which, None, count) if self.interleaved else slice(which * width, (which + 1) * width)
    lead = values.shape[: values.ndim - (2 if self.inputs else 1)]
    return values[..., chosen].reshape(*lead, *self._shape(self.inputs + self.outputs))

  def to_tensor(self, params: list[np.ndarray]) -> np.ndarray:
    """A tensor from the parameters of all `paths`, with their lead axes unless the tensor is of one expert."""
    num_lead = 0 if self.per_expert else len(self.lead)
    rows = (math.prod(self._shape(self.inputs)),) if self.inputs else ()
    flat = [values.reshape(*values.shape[:num_lead], *rows, -1) for values in params]
    if self.interleaved:
      joined = np.stack(flat, axis=-1).reshape(*flat[0].shape[:-1], -1)
    else:
      joined = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
    return np.ascontiguousarray(joined.swapaxes(-1, -2) if self.transpose else joined)


def table(model: ModelConfig) -> Iterator[tuple[Rule, int | None, int | None, str]]:
  """(rule, layer, expert, name) of every tensor; all layers of a rule together, as stacked checkpoints hold them."""
  sizes = {
    "V": model.vocab_size, "P": model.trainable_position_size, "D": model.base_emb_dim,
    "H": model.base_num_query_heads, "K": model.base_num_kv_heads, "h": model.head_dim, "F": model.base_mlp_dim,
    "E": model.num_experts, "M": model.feed_forward_width,
  }  # fmt: skip
  for shared in FAMILIES[model.decoder_block].tensors():
    when, negated = shared.when.removeprefix("!"), shared.when.startswith("!")
    if when and bool(getattr(model, when)) == negated:
      continue
    rule = Rule(**dataclasses.asdict(shared), sizes=sizes)
    for layer in range(model.base_num_decoder_layers) if "{layer}" in rule.name else (None,):
      for expert in range(sizes[rule.lead]) if rule.per_expert else (None,):
        yield rule, layer, expert, rule.name.format(layer=layer, expert=expert)


def configuration(content: Mapping[str, Any], origin: str, tensors: Mapping[str, StoredArray] | None = None) -> Config:
  """The configuration of a config.json named `origin`, with the dtype of its tensors. Raises ConfigError."""
  keys = huggingface_config.keys_of(content, origin)
  if tensors:
    ignored = FAMILIES[keys["decoder_block"]].huggingface.ignored
    held = {x.dtype.name for name, x in tensors.items() if not re.fullmatch(ignored, name)}
    keys["weight_dtype"] = huggingface_config.weight_dtype(held, origin)
  # The tokenizer is looked at elsewhere; bytes, the default, would want a vocabulary of their size.
  return replace(load_config(), tokenizer_type="huggingface", **keys)


def is_huggingface(folder: Path) -> bool:
  return (folder / CONFIG_JSON).is_file() and not (folder / layouts_store.TREE_METADATA).is_file()


def open_tree(path: str | os.PathLike) -> RawTree:
  """Opens a checkpoint folder, or a Hugging Face model folder; reads metadata and headers only. Raises LayoutError."""
  folder = layouts_store.full_path(path)
  return open_folder(folder) if is_huggingface(folder) else layouts_store.open_tree(path)


def model_config(folder: Path, tensors: Mapping[str, StoredArray] | None = None) -> Config:
  return configuration(layouts_store.read_json(folder / CONFIG_JSON), str(folder / CONFIG_JSON), tensors)


def open_folder(path: Path) -> RawTree:
  """The parameters of a Hugging Face folder, see `tree_of`; only headers are read."""
  return tree_of(open_tensors(path), model_config(path).model, path)


def tree_of(tensors: dict[str, StoredArray], model: ModelConfig, origin: Path) -> RawTree:
  """The parameters of tensors by name, from the file or folder `origin`. Raises LayoutError with those that misfit."""
  theirs = FAMILIES[model.decoder_block].huggingface
  known = tensors
  if not any(name.startswith(theirs.prefix) for name in tensors):  # a file of the bare model leaves the first level out
    known = {name if name == _HEAD else theirs.prefix + name: tensor for name, tensor in tensors.items()}
  parts: dict[TreePath, tuple[Rule, int, list[StoredArray]]] = {}
  missing, wrong, used, embedding = [], [], set(), None
  for rule, layer, _, name in table(model):
    used.add(name)
    if (tensor := known.get(name)) is None:
      missing.append(name)
      continue
    if tensor.shape != (made := rule.tensor_shape):
      wrong.append(f"{origin}: {tensor.name} is {list(tensor.shape)}, {CONFIG_JSON} makes it {list(made)}")
    if rule.paths == ("token_embedder/embedding",):
      embedding = tensor
    for which, param in enumerate(rule.paths):
      path = tuple(param.replace("decoder/layers/", f"decoder/layers_{layer}/").split("/"))
      parts.setdefault(path, (rule, which, []))[2].append(tensor)
  unknown = [name for name in known if name not in used and not re.fullmatch(theirs.ignored, name)]
  if _HEAD in unknown and model.logits_via_embedding and embedding:
    both = known[_HEAD], embedding
    if len({(x.shape, x.dtype) for x in both}) == 1 and len({x.read(None).tobytes() for x in both}) == 1:
      unknown.remove(_HEAD)
  found = {"lacks": missing, "has unknown": [known[name].name for name in unknown]}
  problems = [f"{origin} {what} {listed(x, _MOST_NAMES)}" for what, x in found.items() if x]
  if problems or wrong:
    raise LayoutError(*problems, *wrong[:_MOST_NAMES])
  nodes: dict[TreePath, Any] = {path: _stored(path, *part) for path, part in parts.items()}
  metadata = {"scan_layers": False, RECORD: {"layout": PARAMS, "values_from": "maxghost"}}
  return RawTree(nodes, str(origin), {"custom_metadata": metadata}, None, Location(item=origin, step=origin))


def _stored(path: TreePath, rule: Rule, which: int, tensors: list[StoredArray]) -> StoredArray:
  """One parameter as an array; its tensors are opened when it is read."""
  if len(dtypes := sorted({tensor.dtype.name for tensor in tensors})) > 1:
    raise LayoutError(f"{tensors[0].name} and the other experts' tensors differ in dtype: {', '.join(dtypes)}")

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    if rule.per_expert:
      chosen = tensors[index[0] if index else slice(None)]
      values = np.stack([rule.to_param(tensor.read(None), which) for tensor in chosen])
    else:
      values = rule.to_param(tensors[0].read(index[:1] if index and rule.lead else None), which)
    if index is None:
      return np.ascontiguousarray(values)
    return values[(slice(None), *index[1:])] if rule.lead else values[index]

  read_whole = tensors[0].nbytes // (tensors[0].shape[0] if rule.lead and not rule.per_expert else 1)
  return StoredArray(path, rule.param_shape, tensors[0].dtype, read, chunk_nbytes=read_whole)


def planned_tensors(checkpoint: Checkpoint, model: ModelConfig, hold_bytes: int = 1 << 30) -> list[StoredArray]:
  """The tensors to write for the parameters of a checkpoint, whatever its layout, made when they are written.

  hold_bytes: host memory for stacked arrays whose layers are read in turn; larger arrays are read in parts. Raises
  LayoutError where parameters are missing, unknown to the architecture, or of another shape than in `model`.
  """
  leaves, origin = checkpoint.params.leaves, checkpoint.raw.origin

  @functools.lru_cache(maxsize=1)
  def readers(paths: tuple[str, ...]) -> list[LayerReader]:
    # One for each parameter of a tensor, kept from layer to layer: the layers of a stacked array come in turn.
    return [LayerReader(hold_bytes // len(paths)) for _ in paths]

  def planned(name: str, rule: Rule, refs: list[Ref], expert: int | None) -> StoredArray:
    def part(reader: LayerReader, ref: Ref) -> np.ndarray:
      if expert is None:
        return reader.part(ref)
      return reader.part(ref, (slice(expert, expert + 1), *(slice(0, size) for size in ref.shape[1:])))[0]

    def make(_=None) -> np.ndarray:
      return rule.to_tensor([part(*pair) for pair in zip(readers(rule.paths), refs, strict=True)])

    return StoredArray((name,), rule.tensor_shape, refs[0].dtype, make)

  tensors, used, problems = [], set(), []
  for rule, layer, expert, name in table(model):
    ids = [(tuple(param.split("/")), layer) for param in rule.paths]
    used.update(ids)
    for leaf in ids:
      if leaf not in leaves:
        problems.append(f"{origin} lacks {leaf_text(leaf)}")
      elif leaves[leaf].shape != rule.param_shape:
        there, here = list(leaves[leaf].shape), list(rule.param_shape)
        problems.append(f"{origin}: {leaf_text(leaf)} is {there}, the configuration makes it {here}")
    if not problems:
      tensors.append(planned(name, rule, [leaves[leaf] for leaf in ids], expert))
  problems += [f"{origin}: {leaf_text(leaf)} is unknown to the model" for leaf in leaves if leaf not in used]
  if problems:
    raise LayoutError(*dict.fromkeys(problems[:_MOST_NAMES]))
  return tensors
