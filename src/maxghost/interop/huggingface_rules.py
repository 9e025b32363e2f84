"""Which tensor of a Hugging Face model is which parameter here: a family's table, read in both directions."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxghost.config import ModelConfig
from maxghost.config.families import FAMILIES, TensorRule
from maxghost.interop.model_keys import expert_width


@dataclass(frozen=True)
class Rule:
  """A line of the table with the sizes of one model."""

  rule: TensorRule
  sizes: dict[str, int]

  @property
  def paths(self) -> tuple[str, ...]:
    return self.rule.paths

  @property
  def per_expert(self) -> bool:
    return "{expert}" in self.rule.name

  @property
  def param_shape(self) -> tuple[int, ...]:
    """Shape of each of `paths` in one layer."""
    return self._shape(self.rule.lead + self.rule.inputs + self.rule.outputs)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of one tensor."""
    lead = () if self.per_expert else self._shape(self.rule.lead)
    columns = math.prod(self._shape(self.rule.outputs)) * len(self.paths)
    if not self.rule.inputs:
      return (*lead, columns)
    rows = math.prod(self._shape(self.rule.inputs))
    return (*lead, columns, rows) if self.rule.transpose else (*lead, rows, columns)

  def _shape(self, letters: str) -> tuple[int, ...]:
    return tuple(self.sizes[letter] for letter in letters)

  def to_param(self, values: np.ndarray, which: int) -> np.ndarray:
    """From a tensor (or a slice of its lead axis) to paths[which] of the same lead, without copying where possible."""
    if self.rule.transpose:
      values = values.swapaxes(-1, -2)
    count = len(self.paths)
    if self.rule.interleaved:
      values = values[..., which::count]
    elif count > 1:
      width = values.shape[-1] // count
      values = values[..., which * width : (which + 1) * width]
    lead = values.shape[: values.ndim - (2 if self.rule.inputs else 1)]
    return values.reshape(*lead, *self._shape(self.rule.inputs + self.rule.outputs))

  def to_tensor(self, params: list[np.ndarray]) -> np.ndarray:
    """The other way round: `params` are all of `paths`, with their lead axes unless the tensor is of one expert."""
    num_lead = 0 if self.per_expert else len(self.rule.lead)
    flat = []
    for values in params:
      rows = math.prod(values.shape[num_lead : num_lead + len(self.rule.inputs)])
      shape = (*values.shape[:num_lead], rows, -1) if self.rule.inputs else (*values.shape[:num_lead], -1)
      flat.append(values.reshape(shape))
    if self.rule.interleaved:
      joined = np.stack(flat, axis=-1).reshape(*flat[0].shape[:-1], -1)
    else:
      joined = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
    return np.ascontiguousarray(joined.swapaxes(-1, -2) if self.rule.transpose else joined)


class Table:
  """The table of a model's family: its tensors, and what their names may look like."""

  def __init__(self, model: ModelConfig):
    family = FAMILIES[model.decoder_block]
    self.prefix = family.huggingface.prefix
    self._ignored = family.huggingface.ignored
    self._num_layers = model.base_num_decoder_layers
    sizes = {
      "V": model.vocab_size, "P": model.trainable_position_size, "D": model.base_emb_dim,
      "H": model.base_num_query_heads, "K": model.base_num_kv_heads, "h": model.head_dim, "F": model.base_mlp_dim,
      "E": model.num_experts, "M": expert_width(model),
    }  # fmt: skip
    self._rules = [Rule(rule, sizes) for rule in family.tensors() if _exists(rule.when, model)]
    self.embedding = next(rule.rule.name for rule in self._rules if rule.paths == ("token_embedder/embedding",))

  def is_ignored(self, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in self._ignored)

  def tensors(self) -> Iterator[tuple[Rule, int | None, int | None, str]]:
    """(rule, layer, expert, name) of every tensor; all layers of a rule together, as stacked checkpoints hold them."""
    for rule in self._rules:
      for layer in range(self._num_layers) if "{layer}" in rule.rule.name else (None,):
        for expert in range(rule.sizes[rule.rule.lead]) if rule.per_expert else (None,):
          yield rule, layer, expert, rule.rule.name.format(layer=layer, expert=expert)


def _exists(when: str, model: ModelConfig) -> bool:
  return not when or bool(getattr(model, when.removeprefix("!"))) != when.startswith("!")
