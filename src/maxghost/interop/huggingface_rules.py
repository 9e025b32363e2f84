"""Which tensor of a Hugging Face model is which parameter here: one table per architecture, read in both directions.

Letters of the shapes: V vocabulary, P rows of a position table, D embed dim, H query heads, K key/value heads, h head
width, F feed-forward width, E experts, M width of one expert. A parameter is lead + inputs + outputs; the tensor has
the inputs as one axis and the outputs as one axis, in the order that `transpose` says.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from maxghost.config import ModelConfig
from maxghost.interop.model_keys import expert_width


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


def _projections(attention: str, bias: bool) -> list[Rule]:
  rules = []
  for name, path, inputs, outputs in (
    ("q_proj", "query", "D", "Hh"), ("k_proj", "key", "D", "Kh"), ("v_proj", "value", "D", "Kh"),
    ("o_proj", "out", "Hh", "D"),
  ):  # fmt: skip
    both = linear_with_bias(f"{_LAYER}.self_attn.{name}", f"{_OURS}/{attention}/{path}", inputs, outputs)
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


def _experts(name: str, names: tuple[str, str, str], path: str) -> list[Rule]:
  """A router, and one tensor per expert and matrix. names: of gate, up and down."""
  rules = [linear(f"{name}.gate", f"{path}/gate", "D", "E")]
  for ours, theirs, inputs, outputs in zip(("wi_0", "wi_1", "wo"), names, "DDM", "MMD", strict=True):
    weight = f"{name}.experts.{{expert}}.{theirs}.weight"
    rules.append(Rule(weight, (f"{path}/{ours}",), outputs, inputs, lead="E", transpose=True))
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
  prefix: str = "model."
  ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

  def is_ignored(self, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in self.ignored)

  def tensors(self, num_layers: int, sizes: Mapping[str, int]) -> Iterator[tuple[Rule, int | None, int | None, str]]:
    """(rule, layer, expert, name) of every tensor; all layers of a rule together, as stacked checkpoints hold them."""
    for rule in self.rules:
      for layer in range(num_layers) if "{layer}" in rule.name else (None,):
        for expert in range(sizes[rule.lead]) if rule.per_expert else (None,):
          yield rule, layer, expert, rule.name.format(layer=layer, expert=expert)


def llama(model: ModelConfig) -> Architecture:
  """Llama, Mistral, Qwen3: pre-norm layers of attention and a gated feed-forward layer."""
  rules = _around_layers(model.logits_via_embedding) + _projections("self_attention", model.attention_bias)
  return Architecture((*rules, *_gated_mlp(model.mlp_bias), *(_qk_norms() if model.use_qk_norm else ())))


def mixtral(model: ModelConfig) -> Architecture:
  rules = _around_layers(model.logits_via_embedding) + _projections("self_attention", False)
  experts = _experts(f"{_LAYER}.block_sparse_moe", ("w1", "w3", "w2"), f"{_OURS}/MoeBlock_0")
  return Architecture((*rules, *experts))


def qwen3_moe(model: ModelConfig) -> Architecture:
  rules = _around_layers(model.logits_via_embedding) + _projections("self_attention", model.attention_bias)
  experts = _experts(f"{_LAYER}.mlp", ("gate_proj", "up_proj", "down_proj"), f"{_OURS}/moe_block")
  return Architecture((*rules, *_qk_norms(), *experts))


def gpt_oss(model: ModelConfig) -> Architecture:
  """All experts of a layer in one tensor, [in, out], gate and up columns in turn; a sink for each head."""
  mlp = f"{_OURS}/GptOssMlp"
  experts = f"{_LAYER}.mlp.experts"
  rules = [
    *_around_layers(model.logits_via_embedding),
    *_projections("GptOssAttention", True),
    Rule(f"{_LAYER}.self_attn.sinks", (f"{_OURS}/GptOssAttention/sinks",), "H"),
    *linear_with_bias(f"{_LAYER}.mlp.router", f"{mlp}/gate", "D", "E"),
    Rule(f"{experts}.gate_up_proj", (f"{mlp}/wi_0", f"{mlp}/wi_1"), "M", "D", lead="E", interleaved=True),
    Rule(f"{experts}.gate_up_proj_bias", (f"{mlp}/wi_0_bias", f"{mlp}/wi_1_bias"), "M", lead="E", interleaved=True),
    Rule(f"{experts}.down_proj", (f"{mlp}/wo",), "D", "M", lead="E"),
    Rule(f"{experts}.down_proj_bias", (f"{mlp}/wo_bias",), "D", lead="E"),
  ]
  return Architecture(tuple(rules))


def gpt2(model: ModelConfig) -> Architecture:
  """Weights stored [in, out]; query, key and value side by side in one tensor."""
  layer, attention, mlp = "transformer.h.{layer}", f"{_OURS}/self_attention", f"{_OURS}/mlp"
  heads = tuple(f"{attention}/{name}" for name in ("query", "key", "value"))

  def dense(name: str, paths: tuple[str, ...], inputs: str, outputs: str) -> list[Rule]:
    return [
      Rule(f"{name}.weight", tuple(f"{path}/kernel" for path in paths), outputs, inputs),
      Rule(f"{name}.bias", tuple(f"{path}/bias" for path in paths), outputs),
    ]

  def layer_norm(name: str, path: str) -> list[Rule]:
    return [norm(name, path), Rule(f"{name}.bias", (f"{path}/bias",), "D")]

  rules = [
    Rule("transformer.wte.weight", ("token_embedder/embedding",), "D", "V"),
    Rule("transformer.wpe.weight", ("decoder/position_embedder/embedding",), "D", "P"),
    *layer_norm("transformer.ln_f", "decoder/decoder_norm"),
    *layer_norm(f"{layer}.ln_1", f"{_OURS}/pre_self_attention_layer_norm"),
    *layer_norm(f"{layer}.ln_2", f"{_OURS}/post_self_attention_layer_norm"),
    *dense(f"{layer}.attn.c_attn", heads, "D", "Hh"),
    *dense(f"{layer}.attn.c_proj", (f"{attention}/out",), "Hh", "D"),
    *dense(f"{layer}.mlp.c_fc", (f"{mlp}/wi",), "D", "F"),
    *dense(f"{layer}.mlp.c_proj", (f"{mlp}/wo",), "F", "D"),
  ]
  if not model.logits_via_embedding:
    rules.append(linear("lm_head", "decoder/logits_dense", "D", "V"))
  return Architecture(tuple(rules), "transformer.", (r"transformer\.h\.\d+\.attn\.(masked_)?bias",))


# By decoder_block.
ARCHITECTURES: dict[str, Callable[[ModelConfig], Architecture]] = {
  "gpt2": gpt2, "llama2": llama, "mistral": llama, "mixtral": mixtral, "qwen3": llama, "qwen3_moe": qwen3_moe,
  "gpt_oss": gpt_oss,
}  # fmt: skip


def sizes(model: ModelConfig) -> dict[str, int]:
  """The letters of the shapes."""
  return {
    "V": model.vocab_size,
    "P": model.trainable_position_size,
    "D": model.base_emb_dim,
    "H": model.base_num_query_heads,
    "K": model.base_num_kv_heads,
    "h": model.head_dim,
    "F": model.base_mlp_dim,
    "E": model.num_experts,
    "M": expert_width(model),
  }
