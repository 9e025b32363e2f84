"""Architecture families: one record holds all that is particular to a `decoder_block`.

To add a dense family, write its record here or `register` it from your own code, and add a file to configs/models.
Layers take their names from the record, the configuration its checks, and `interop` the names and shapes of the tensors
of Hugging Face and GGUF.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maxghost.config.files import config_dir

REQUIRED = object()  # default of an entry that config.json must have


@dataclass(frozen=True, slots=True)
class Entry:
  """A model key and its name in config.json.

  names: the first one present is read, all are written; none for a key that follows from others. default: the value
  where config.json has none, or a function of the content of config.json.
  """

  key: str
  names: tuple[str, ...]
  default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class TensorRule:
  """Which parameters a tensor of Hugging Face holds.

  A parameter has the shape lead + inputs + outputs; the tensor has the inputs as one axis and the outputs as one axis.

  name: of the tensor, with {layer} and {expert}; {expert} means one tensor for each entry of `lead`.
  paths: the parameters without their layer index. Several lie side by side along the outputs, or in turn
    (`interleaved`).
  transpose: stored as [out, in], as torch's linear layers are.
  when: a key of the model that must be true (`key`) or false (`!key`) for the tensor to exist.
  """

  name: str
  paths: tuple[str, ...]
  outputs: str
  inputs: str = ""
  lead: str = ""
  transpose: bool = False
  interleaved: bool = False
  when: str = ""


def table(theirs: str, ours: str, lines: str) -> tuple[TensorRule, ...]:
  """Rules from lines of `tensor parameters shape [when]`, which configs/tensors.txt explains.

  Args:
    theirs: What the names of the tensors begin with.
    ours: What the paths of the parameters begin with.
    lines: One rule a line; empty lines and comments are left out.
  """
  rules = []
  for line in map(str.split, lines.splitlines()):
    if not line or line[0] == "#":
      continue
    name, paths, shape, *when = line
    lead, _, rest = shape.rpartition(":")
    inputs, _, outputs = rest.replace("<", ">").rpartition(">")
    every = tuple(ours + path for path in paths.replace("|", "+").split("+"))
    rules.append(TensorRule(theirs + name, every, outputs, inputs, lead, "<" in rest, "|" in paths, "".join(when)))
  return tuple(rules)


@dataclass(frozen=True, slots=True)
class HuggingFace:
  """A family as `transformers` has it.

  model_type, model_class: in config.json. entries: model keys that config.json holds.
  demands: entries of config.json without a key here, and the values that make the function known here; the first is
    the default and is written.
  sliding: which layers slide where `layer_types` does not say: none (""), "all", "late" (from max_window_layers on) or
    "alternate". layer_types: whether that entry is written.
  prefix: a level that some files leave out of the tensors' names. ignored: patterns of tensors without a parameter.
  """

  model_type: str
  model_class: str
  entries: tuple[Entry, ...]
  tensors: tuple[TensorRule, ...]
  demands: Mapping[str, tuple] = field(default_factory=lambda: {"hidden_act": ("silu",)})
  sliding: str = ""
  layer_types: bool = False
  prefix: str = "model."
  ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


@dataclass(frozen=True, slots=True)
class Family:
  """What `decoder_block=name` stands for.

  needs: values that all published models of the family have; with others the name would promise another function.
  example: a file of configs/models. routed: whether it has experts; None = with and without.
  attention, mlp, experts, norms: names of a layer's modules; of the norms before attention and before the feed-forward
    layer.
  maxtext_scales_queries: whether MaxText keeps 1/sqrt(head_dim) in the query weights instead of in attention; None
    where MaxText has no such family.
  layer_norm: LayerNorm with bias in place of RMSNorm.
  gguf: the architecture in GGUF files; "" = not read. gguf_pairs: whether neighbouring pairs are rotated there.
  """

  name: str
  huggingface: HuggingFace
  example: str = ""
  needs: Mapping[str, Any] = field(default_factory=dict)
  routed: bool | None = False
  learned_positions: bool = False
  layer_norm: bool = False
  attention: str = "self_attention"
  mlp: str = "mlp"
  experts: str = "MoeBlock_0"
  norms: tuple[str, str] = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
  maxtext_scales_queries: bool | None = None
  gguf: str = ""
  gguf_pairs: bool = False

  def tensors(self) -> tuple[TensorRule, ...]:
    """The table of Hugging Face tensors with the family's own names in it."""
    names = {"attention": self.attention, "mlp": self.mlp, "experts": self.experts}
    names |= {f"norm_{i}": name for i, name in enumerate(self.norms)}
    return tuple(
      dataclasses.replace(rule, paths=tuple(path.format_map(names) for path in rule.paths))
      for rule in self.huggingface.tensors
    )


FAMILIES: dict[str, Family] = {}


def register(*families: Family) -> None:
  """Makes each family a choice of `decoder_block`. Raises ValueError where its name is taken."""
  for family in families:
    if family.name in FAMILIES:
      raise ValueError(f"decoder_block={family.name} is registered already")
    FAMILIES[family.name] = family


def shipped(*names: str) -> tuple[TensorRule, ...]:
  """The rules of the named groups of configs/tensors.txt, in order."""
  groups = {}
  for group in (config_dir() / "tensors.txt").read_text("utf-8").split("\n[")[1:]:
    head, _, lines = group.partition("\n")
    name, _, begins = head.partition("]")
    theirs, ours, *_ = (*begins.split(), "", "")
    groups[name] = table(theirs, ours, lines)
  return tuple(rule for name in names for rule in groups[name])


LLAMA = shipped("outer", "head", "attention", "gated_mlp", "qk_norms")
MIXTRAL = shipped("outer", "head", "attention", "mixtral_experts")
QWEN3_MOE = shipped("outer", "head", "attention", "qk_norms", "qwen3_experts")
GPT_OSS = shipped("outer", "head", "attention", "sinks", "gpt_oss_experts")
GPT2 = shipped("gpt2_outer", "gpt2_layers", "head")

SIZES = (
  Entry("base_emb_dim", ("hidden_size",)),
  Entry("base_num_query_heads", ("num_attention_heads",)),
  Entry("base_mlp_dim", ("intermediate_size",)),
  Entry("base_num_decoder_layers", ("num_hidden_layers",)),
  Entry("vocab_size", ("vocab_size",)),
  Entry("base_num_kv_heads", ("num_key_value_heads",), lambda c: c["num_attention_heads"]),
  Entry("head_dim", ("head_dim",), lambda c: c["hidden_size"] // c["num_attention_heads"]),
  Entry("logits_via_embedding", ("tie_word_embeddings",), False),
  Entry("normalization_layer_epsilon", ("rms_norm_eps",), 1e-6),
)
BIAS = Entry("attention_bias", ("attention_bias",), False)
ROUTING = (
  Entry("num_experts_per_tok", ("num_experts_per_tok",)),
  Entry("load_balance_loss_weight", ("router_aux_loss_coef",), 0.0),
)
EXPERTS = (
  Entry("num_experts", ("num_local_experts",)), Entry("base_moe_mlp_dim", ("intermediate_size",)), *ROUTING
)  # fmt: skip

register(
  Family(
    "llama2",
    HuggingFace("llama", "LlamaForCausalLM", (*SIZES, BIAS, Entry("mlp_bias", ("mlp_bias",), False)), LLAMA),
    routed=None, maxtext_scales_queries=True, gguf="llama", gguf_pairs=True,
  ),
  Family(
    "gpt2",
    HuggingFace(
      "gpt2", "GPT2LMHeadModel",
      (
        Entry("base_emb_dim", ("n_embd",)),
        Entry("base_num_query_heads", ("n_head",)),
        Entry("base_num_decoder_layers", ("n_layer",)),
        Entry("vocab_size", ("vocab_size",)),
        Entry("trainable_position_size", ("n_positions", "n_ctx")),
        Entry("base_num_kv_heads", (), lambda c: c["n_head"]),
        Entry("head_dim", (), lambda c: c["n_embd"] // c["n_head"]),
        Entry("base_mlp_dim", ("n_inner",), lambda c: 4 * c["n_embd"]),
        Entry("normalization_layer_epsilon", ("layer_norm_epsilon",), 1e-5),
        Entry("logits_via_embedding", ("tie_word_embeddings",), True),
      ),
      GPT2,
      {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the tanh form
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
      },
      prefix="transformer.", ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    ),
    "gpt2-small",
    {
      "rope_type": "none", "attention_bias": True, "mlp_bias": True,
      "mlp_activations": ("gelu",),
    },
    learned_positions=True, layer_norm=True,
  ),
  Family(
    "mistral", HuggingFace("mistral", "MistralForCausalLM", SIZES, LLAMA, sliding="all"), maxtext_scales_queries=True
  ),
  Family(
    "mixtral",
    HuggingFace(
      "mixtral", "MixtralForCausalLM", (*SIZES, *EXPERTS), MIXTRAL, sliding="all"
    ),
    "mixtral-8x7b", routed=True, maxtext_scales_queries=True,
  ),
  Family(
    "qwen3",
    HuggingFace("qwen3", "Qwen3ForCausalLM", (*SIZES, BIAS), LLAMA, sliding="late", layer_types=True),
    "qwen3-0.6b", {"use_qk_norm": True}, maxtext_scales_queries=False,
  ),
  Family(
    "qwen3_moe",
    HuggingFace(
      "qwen3_moe", "Qwen3MoeForCausalLM",
      (
        *SIZES, BIAS, *ROUTING, Entry("num_experts", ("num_local_experts", "num_experts")),
        Entry("base_moe_mlp_dim", ("moe_intermediate_size",), -1), Entry("norm_topk_prob", ("norm_topk_prob",), False),
      ),
      QWEN3_MOE,
      {"hidden_act": ("silu",), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
      sliding="late",
    ),
    "qwen3-30b-a3b", {"use_qk_norm": True}, routed=True, mlp="moe_block", experts="moe_block",
    maxtext_scales_queries=False,
  ),
  Family(
    "gpt_oss",
    HuggingFace(
      "gpt_oss", "GptOssForCausalLM",
      (
        *SIZES, *EXPERTS, Entry("attention_bias", ("attention_bias",), True),
        Entry("mlp_activations_limit", ("swiglu_limit",), 7.0),
      ),
      GPT_OSS,
      {"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
      sliding="alternate", layer_types=True,
    ),
    "gpt-oss-20b",
    {
      "attention_sink": True, "attention_bias": True, "mlp_bias": True,
      "mlp_activations": ("quick_gelu", "one_plus"), "norm_topk_prob": True,
    },
    routed=True, attention="GptOssAttention", mlp="GptOssMlp", experts="GptOssMlp", maxtext_scales_queries=False,
  ),
)  # fmt: skip
