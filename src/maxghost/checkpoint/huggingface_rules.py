"""Which tensor of a Hugging Face model is which parameter here: one table per architecture, read in both directions.

Letters of the shapes: V vocabulary, P rows of a position table, D embed dim, H query heads, K key/value heads, h head
width, F feed-forward width, E experts, M width of one expert. A parameter is lead + inputs + outputs; the tensor has
the inputs as one axis and the outputs as one axis, in the order that `transpose` says.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

LAYERS = ("decoder", "layers")


@dataclass(frozen=True)
class Rule:
  """name: the tensor's, with {layer} and {expert}. paths: the parameters it holds, without their layer index; several
  lie side by side along the outputs, or in turn (`interleaved`). inputs, outputs, lead: letters of their shape.
  transpose: stored as [out, in], as torch's linear layers are. {expert} in the name: one tensor for each of `lead`.
  """

  name: str
  paths: tuple[str, ...]
  outputs: str
  inputs: str = ""
  lead: str = ""
  transpose: bool = False
  interleaved: bool = False

  @property
  def per_expert(self) -> bool:
    return "{expert}" in self.name

  def param_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of each of `paths` in one layer."""
    return tuple(sizes[letter] for letter in self.lead + self.inputs + self.outputs)

  def tensor_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one tensor."""
    lead = () if self.per_expert else tuple(sizes[letter] for letter in self.lead)
    columns = math.prod(sizes[letter] for letter in self.outputs) * len(self.paths)
    if not self.inputs:
      return (*lead, columns)
    rows = math.prod(sizes[letter] for letter in self.inputs)
    return (*lead, columns, rows) if self.transpose else (*lead, rows, columns)

  def to_param(self, values: np.ndarray, which: int, sizes: Mapping[str, int]) -> np.ndarray:
    """From a tensor (or a slice of its lead axis) to paths[which] of the same lead, without copying where possible."""
    if self.transpose:
      values = values.swapaxes(-1, -2)
    count = len(self.paths)
    if self.interleaved:
      values = values[..., which::count]
    elif count > 1:
      width = values.shape[-1] // count
      values = values[..., which * width : (which + 1) * width]
    lead = values.shape[: values.ndim - (2 if self.inputs else 1)]
    return values.reshape(*lead, *(sizes[letter] for letter in self.inputs + self.outputs))

  def to_tensor(self, params: list[np.ndarray]) -> np.ndarray:
    """The other way round: `params` are all of `paths`, with their lead axes unless the tensor is of one expert."""
    num_lead = 0 if self.per_expert else len(self.lead)
    flat = []
    for values in params:
      rows = math.prod(values.shape[num_lead : num_lead + len(self.inputs)])
      shape = (*values.shape[:num_lead], rows, -1) if self.inputs else (*values.shape[:num_lead], -1)
      flat.append(values.reshape(shape))
    if self.interleaved:
      joined = np.stack(flat, axis=-1).reshape(*flat[0].shape[:-1], -1)
    else:
      joined = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
    return np.ascontiguousarray(joined.swapaxes(-1, -2) if self.transpose else joined)


def linear(name: str, path: str, inputs: str, outputs: str, lead: str = "") -> Rule:
  """A weight of torch.nn.Linear, [out, in]."""
  return Rule(f"{name}.weight", (f"{path}/kernel",), outputs, inputs, lead, transpose=True)


def linear_with_bias(name: str, path: str, inputs: str, outputs: str) -> tuple[Rule, Rule]:
  return linear(name, path, inputs, outputs), Rule(f"{name}.bias", (f"{path}/bias",), outputs)


def norm(name: str, path: str, width: str = "D") -> Rule:
  return Rule(f"{name}.weight", (f"{path}/scale",), width)


_LAYER, _OURS = "model.layers.{layer}", "decoder/layers"


def _projections(bias: bool) -> list[Rule]:
  rules = []
  for name, path, inputs, outputs in (
    ("q_proj", "query", "D", "Hh"), ("k_proj", "key", "D", "Kh"), ("v_proj", "value", "D", "Kh"),
    ("o_proj", "out", "Hh", "D"),
  ):  # fmt: skip
    both = linear_with_bias(f"{_LAYER}.self_attn.{name}", f"{_OURS}/self_attention/{path}", inputs, outputs)
    rules += both if bias else both[:1]
  return rules


def _gated_mlp(bias: bool) -> list[Rule]:
  rules = []
  for name, path, inputs, outputs in (
    ("gate_proj", "wi_0", "D", "F"), ("up_proj", "wi_1", "D", "F"), ("down_proj", "wo", "F", "D"),
  ):  # fmt: skip
    both = linear_with_bias(f"{_LAYER}.mlp.{name}", f"{_OURS}/mlp/{path}", inputs, outputs)
    rules += both if bias else both[:1]
  return rules


def _qk_norms() -> list[Rule]:
  return [
    norm(f"{_LAYER}.self_attn.q_norm", f"{_OURS}/self_attention/query_norm", "h"),
    norm(f"{_LAYER}.self_attn.k_norm", f"{_OURS}/self_attention/key_norm", "h"),
  ]


def _around_layers(tied: bool) -> list[Rule]:
  rules = [
    Rule("model.embed_tokens.weight", ("token_embedder/embedding",), "D", "V"),
    norm(f"{_LAYER}.input_layernorm", f"{_OURS}/pre_self_attention_layer_norm"),
    norm(f"{_LAYER}.post_attention_layernorm", f"{_OURS}/post_self_attention_layer_norm"),
    norm("model.norm", "decoder/decoder_norm"),
  ]
  return rules if tied else [*rules, linear("lm_head", "decoder/logits_dense", "D", "V")]


@dataclass(frozen=True)
class Architecture:
  """prefix: a level that some files leave out. ignored: patterns of tensors that hold no parameter."""

  rules: tuple[Rule, ...]
  prefix: str
  ignored: tuple[str, ...] = ()

  def is_ignored(self, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in self.ignored)

  def tensors(self, num_layers: int, sizes: Mapping[str, int]) -> Iterator[tuple[Rule, int | None, int | None, str]]:
    """(rule, layer, expert, name) of every tensor, layer by layer."""
    for layer in (None, *range(num_layers)):
      for rule in self.rules:
        if ("{layer}" in rule.name) != (layer is not None):
          continue
        for expert in range(sizes[rule.lead]) if rule.per_expert else (None,):
          yield rule, layer, expert, rule.name.format(layer=layer, expert=expert)


def llama(tied: bool, attention_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False) -> Architecture:
  """Llama, Mistral, Qwen3: pre-norm layers of attention and a gated feed-forward layer."""
  rules = [*_around_layers(tied), *_projections(attention_bias), *_gated_mlp(mlp_bias)]
  if qk_norm:
    rules += _qk_norms()
  return Architecture(tuple(rules), "model.", (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",))
