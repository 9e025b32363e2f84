"""config.json of a Hugging Face model to configuration keys, and back.

A value that would make another function than ours is refused by name. Keys that change nothing here (dropout of
pretraining, token ids, caches) are left out.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.config import ModelConfig, did_you_mean
from maxghost.config.values import shown
from maxghost.interop.model_keys import differing, expert_width

# Our key and theirs, for every architecture that names its sizes as Llama does; GPT-2 has names of its own.
_SIZES = {
  "base_emb_dim": "hidden_size",
  "base_num_query_heads": "num_attention_heads",
  "base_mlp_dim": "intermediate_size",
  "base_num_decoder_layers": "num_hidden_layers",
  "vocab_size": "vocab_size",
}
_GPT2_SIZES = {
  "base_emb_dim": "n_embd",
  "base_num_query_heads": "n_head",
  "base_num_decoder_layers": "n_layer",
  "vocab_size": "vocab_size",
  "trainable_position_size": "n_positions",
}
# model_type: (decoder_block, the class of transformers)
_KINDS = {
  "llama": ("llama2", "LlamaForCausalLM"),
  "mistral": ("mistral", "MistralForCausalLM"),
  "mixtral": ("mixtral", "MixtralForCausalLM"),
  "qwen3": ("qwen3", "Qwen3ForCausalLM"),
  "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
  "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
  "gpt2": ("gpt2", "GPT2LMHeadModel"),
}
_ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32", "float64": "float64"}
_LAYER_TYPES = {"full_attention": "global", "sliding_attention": "local_sliding"}
_YARN = {"rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "rope_truncate": "truncate"}
_LLAMA3 = {
  "rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor", "rope_high_freq_factor": "high_freq_factor",
}  # fmt: skip


class _Reader:
  """A config.json whose problems are collected, so that all of them are told at once."""

  def __init__(self, content: Mapping[str, Any], origin: str):
    self.content, self.origin = content, origin
    self.problems: list[str] = []

  def get(self, key: str, default: Any = None) -> Any:
    value = self.content.get(key)
    return default if value is None else value

  def require(self, key: str, *allowed: Any, default: Any) -> None:
    """Only these values make a function that is known here."""
    value = self.get(key, default)
    if value not in allowed:
      self.problem(f"{key}={shown(value)} is not known here; known is {' or '.join(map(shown, allowed))}")

  def problem(self, text: str) -> None:
    self.problems.append(f"{self.origin}: {text}")


def keys_of(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
  """The model keys that make the function of a config.json. Raises LayoutError for what no key can express."""
  kind = content.get("model_type")
  if kind not in _KINDS:
    hint = did_you_mean(str(kind), _KINDS) or f"; known are {', '.join(sorted(_KINDS))}"
    raise LayoutError(f"{origin}: model_type={kind} is not known{hint}")
  names = _GPT2_SIZES if kind == "gpt2" else _SIZES
  missing = [key for key in names.values() if key not in content]
  if missing:
    raise LayoutError(f"{origin} has no {', '.join(missing)}")
  read = _Reader(content, origin)
  keys = {ours: content[theirs] for ours, theirs in names.items()} | {"decoder_block": _KINDS[kind][0]}
  keys |= _gpt2(read) if kind == "gpt2" else _like_llama(read, kind)
  if read.problems:
    raise LayoutError(*read.problems)
  return keys


def _gpt2(read: _Reader) -> dict[str, Any]:
  embed, heads = read.content["n_embd"], read.content["n_head"]
  # gelu_new and gelu_pytorch_tanh are the same tanh form.
  read.require("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
  read.require("scale_attn_weights", True, default=True)
  read.require("scale_attn_by_inverse_layer_idx", False, default=False)
  return {
    "base_num_kv_heads": heads,
    "head_dim": embed // heads,
    "base_mlp_dim": read.get("n_inner", 4 * embed),
    "mlp_activations": ("gelu",),
    "mlp_bias": True,
    "attention_bias": True,
    "normalization_layer_type": "layer_norm",
    "normalization_layer_epsilon": float(read.get("layer_norm_epsilon", 1e-5)),
    "rope_type": "none",
    "logits_via_embedding": bool(read.get("tie_word_embeddings", True)),
    "max_target_length": min(256, read.content["n_positions"]),
  }


def _like_llama(read: _Reader, kind: str) -> dict[str, Any]:
  heads = read.content["num_attention_heads"]
  read.require("hidden_act", "silu", default="silu")
  keys = {
    "base_num_kv_heads": read.get("num_key_value_heads", heads),
    "head_dim": read.get("head_dim", read.content["hidden_size"] // heads),
    "logits_via_embedding": bool(read.get("tie_word_embeddings", False)),
    "normalization_layer_epsilon": float(read.get("rms_norm_eps", 1e-6)),
    "mlp_activations": ("silu", "linear"),
    "use_qk_norm": kind in ("qwen3", "qwen3_moe"),
  }
  keys |= _rotary(read) | _attention_types(read, kind)
  if kind in ("llama", "qwen3", "qwen3_moe", "gpt_oss"):
    keys["attention_bias"] = bool(read.get("attention_bias", kind == "gpt_oss"))
  if kind == "llama":
    keys["mlp_bias"] = bool(read.get("mlp_bias", False))
  if kind in _ROUTED:
    keys |= _experts(read, kind)
  return keys


def _experts(read: _Reader, kind: str) -> dict[str, Any]:
  count = read.get("num_local_experts", read.get("num_experts"))
  if count is None or read.get("num_experts_per_tok") is None:
    read.problem("num_local_experts (or num_experts) and num_experts_per_tok must be there")
  keys = {
    "num_experts": count,
    "num_experts_per_tok": read.get("num_experts_per_tok"),
    "load_balance_loss_weight": float(read.get("router_aux_loss_coef", 0.0)),
    "norm_topk_prob": bool(read.get("norm_topk_prob", False)) if kind == "qwen3_moe" else True,
  }
  if kind != "qwen3_moe":
    keys["base_moe_mlp_dim"] = read.content["intermediate_size"]
  if kind == "qwen3_moe":
    read.require("decoder_sparse_step", 1, default=1)
    read.require("mlp_only_layers", [], default=[])
    keys["base_moe_mlp_dim"] = read.get("moe_intermediate_size", -1)
  if kind == "gpt_oss":
    read.require("swiglu_alpha", 1.702, default=1.702)
    keys |= {
      "attention_sink": True, "mlp_bias": True, "routed_bias": True, "mlp_activations": ("quick_gelu", "one_plus"),
      "mlp_activations_limit": float(read.get("swiglu_limit", 7.0)),
    }  # fmt: skip
  return keys


def _attention_types(read: _Reader, kind: str) -> dict[str, Any]:
  """Which layers slide: `layer_types` names each; without it all do that have a window (Qwen3: use_sliding_window)."""
  window, num_layers = read.get("sliding_window"), read.content["num_hidden_layers"]
  types = read.get("layer_types")
  if types is None:
    slides = bool(window) and kind != "llama" and read.get("use_sliding_window", True)
    if slides and kind in ("qwen3", "qwen3_moe"):
      first = read.get("max_window_layers", 0)
      types = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    elif kind == "gpt_oss":
      types = ["sliding_attention", "full_attention"] * num_layers
    else:
      types = ["sliding_attention" if slides else "full_attention"] * num_layers
  types = types[:num_layers]
  if len(types) != num_layers or set(types) - set(_LAYER_TYPES):
    read.problem(f"layer_types={shown(types)} must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers")
    return {}
  ours = [_LAYER_TYPES[name] for name in types]
  cycle = next(c for c in range(1, num_layers + 1) if num_layers % c == 0 and ours == ours[:c] * (num_layers // c))
  slides = "local_sliding" in ours
  return {
    "attention_type": tuple(ours[:cycle]),
    "inhomogeneous_layer_cycle_interval": cycle,
    "sliding_window_size": window if slides else 0,
  }


def _rotary(read: _Reader) -> dict[str, Any]:
  """transformers 5 writes rope_parameters, 4 writes rope_theta and rope_scaling."""
  parameters = dict(read.get("rope_parameters") or read.get("rope_scaling") or {})
  theta = parameters.get("rope_theta", read.get("rope_theta", 10000.0))
  kind = parameters.get("rope_type", parameters.get("type", "default"))
  keys = {"rope_max_timescale": float(theta), "rope_type": {"llama3": "llama3.1"}.get(kind, kind)}
  if kind not in ("default", "llama3", "yarn"):
    read.problem(f"rope_type={kind} is not known here; known are default, llama3, yarn")
    return {}
  if kind == "default":
    return keys
  original = parameters.get("original_max_position_embeddings") or read.get("max_position_embeddings")
  keys["original_max_position_embeddings"] = original
  for ours, theirs in (_YARN if kind == "yarn" else _LLAMA3).items():
    if parameters.get(theirs) is not None:
      value = parameters[theirs]
      keys[ours] = value if isinstance(value, bool) else float(value)
  if kind == "yarn":
    keys["rope_attention_scaling"] = _scales_attention(read, parameters)
  return keys


def _scales_attention(read: _Reader, parameters: Mapping[str, Any]) -> bool:
  """Whether YaRN scales the heads by its usual factor; a factor of another size is refused."""
  usual = 0.1 * math.log(parameters["factor"]) + 1.0 if parameters.get("factor", 1.0) > 1.0 else 1.0
  factor = parameters.get("attention_factor")
  if parameters.get("mscale") or parameters.get("mscale_all_dim"):
    read.problem("rope_parameters with mscale are not known here")
  if factor is None or math.isclose(factor, usual, rel_tol=1e-6):
    return True
  if factor != 1.0:
    read.problem(f"attention_factor={factor} is not known here; known are 1.0 and the usual {usual:.6g}")
  return False


def weight_dtype(dtypes: set[str], origin: str) -> str:
  """The key weight_dtype for tensors of these dtypes: the narrowest that holds all of them exactly."""
  unknown = dtypes - set(_DTYPES)
  if unknown:
    raise LayoutError(f"{origin}: parameters of dtype {', '.join(sorted(unknown))} are not known")
  kept = {_DTYPES[name] for name in dtypes}
  return kept.pop() if len(kept) == 1 else "float64" if "float64" in kept else "float32"


def config_json(model: ModelConfig, dtype: str, max_positions: int, special_ids: Mapping[str, int]) -> dict[str, Any]:
  """A config.json that transformers reads as this model. special_ids: bos_token_id, ...

  Raises LayoutError where transformers has no such model: what is written is read again, and must give the same keys.
  """
  kind = next(name for name, (block, _) in _KINDS.items() if block == model.decoder_block)
  write: Callable = _write_gpt2 if kind == "gpt2" else _write_like_llama
  content = {
    "architectures": [_KINDS[kind][1]],
    "model_type": kind,
    "tie_word_embeddings": model.logits_via_embedding,
    "dtype": dtype,
    "torch_dtype": dtype,
    "use_cache": True,
    **write(model, kind, max_positions),
    **special_ids,
  }
  again = keys_of(content, "config.json")
  again.pop("max_target_length", None)
  lost = differing(ModelConfig(**again), model)
  if lost:
    raise LayoutError(*(
      f"{key}={shown(value)}: {_KINDS[kind][1]} of transformers has {shown(theirs)}"
      for key, (theirs, value) in lost.items()
    ))  # fmt: skip
  return content


def _write_gpt2(model: ModelConfig, kind: str, max_positions: int) -> dict[str, Any]:
  return {
    **{theirs: getattr(model, ours) for ours, theirs in _GPT2_SIZES.items()},
    "n_inner": model.base_mlp_dim,
    "n_ctx": model.trainable_position_size,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": model.normalization_layer_epsilon,
  }


def _write_like_llama(model: ModelConfig, kind: str, max_positions: int) -> dict[str, Any]:
  types, cycle = model.attention_type, model.inhomogeneous_layer_cycle_interval
  slides = "local_sliding" in types
  content = {
    **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
    "num_key_value_heads": model.base_num_kv_heads,
    "head_dim": model.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": max_positions,
    "rms_norm_eps": model.normalization_layer_epsilon,
    "attention_bias": model.attention_bias,
    **_write_rotary(model),
  }
  if kind == "llama":
    content["mlp_bias"] = model.mlp_bias
  else:
    content["sliding_window"] = model.sliding_window_size if slides else None
  if kind in ("qwen3", "qwen3_moe"):
    content |= {"use_sliding_window": slides, "max_window_layers": 0 if slides else model.base_num_decoder_layers}
  if kind in ("qwen3", "gpt_oss"):
    theirs = {ours: name for name, ours in _LAYER_TYPES.items()}
    content["layer_types"] = [theirs[types[i % cycle % len(types)]] for i in range(model.base_num_decoder_layers)]
  if kind in ("mixtral", "gpt_oss"):
    content["intermediate_size"] = expert_width(model)
  if kind in _ROUTED:
    count = model.num_experts
    content |= {
      "num_local_experts": count, "num_experts_per_tok": model.num_experts_per_tok,
      "router_aux_loss_coef": model.load_balance_loss_weight, "output_router_logits": False,
    }  # fmt: skip
  if kind == "qwen3_moe":
    content |= {
      "num_experts": model.num_experts, "moe_intermediate_size": expert_width(model), "decoder_sparse_step": 1,
      "norm_topk_prob": model.norm_topk_prob, "mlp_only_layers": [],
    }  # fmt: skip
  if kind == "gpt_oss":
    content |= {"swiglu_limit": model.mlp_activations_limit, "swiglu_alpha": 1.702}
  return content


def _write_rotary(model: ModelConfig) -> dict[str, Any]:
  """In the words of transformers 5 and of 4."""
  scaling: dict[str, Any] = {}
  if model.rope_type != "default":
    names = _YARN if model.rope_type == "yarn" else _LLAMA3
    scaling = {"rope_type": "yarn" if model.rope_type == "yarn" else "llama3"}
    scaling |= {theirs: getattr(model, ours) for ours, theirs in names.items()}
    scaling["original_max_position_embeddings"] = model.original_max_position_embeddings
    if model.rope_type == "yarn" and not model.rope_attention_scaling:
      scaling["attention_factor"] = 1.0
  parameters = {"rope_theta": model.rope_max_timescale, "rope_type": "default"} | scaling
  content = {"rope_theta": model.rope_max_timescale, "rope_parameters": parameters}
  return content | ({"rope_scaling": scaling} if scaling else {})
