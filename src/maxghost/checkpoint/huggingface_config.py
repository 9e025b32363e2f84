"""config.json of a Hugging Face model to configuration keys, and back.

A value that would make another function than ours is refused by name. Keys that change nothing here (dropout of
pretraining, token ids, caches) are left out.
"""

from collections.abc import Mapping
from typing import Any

from maxghost.checkpoint.huggingface_rules import Architecture, llama
from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.config import ModelConfig
from maxghost.config.values import shown

# Our key and theirs, for every architecture that names its sizes as Llama does.
_SIZES = {
  "base_emb_dim": "hidden_size",
  "base_num_query_heads": "num_attention_heads",
  "base_mlp_dim": "intermediate_size",
  "base_num_decoder_layers": "num_hidden_layers",
  "vocab_size": "vocab_size",
}
_CLASSES = {"llama": "LlamaForCausalLM"}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32", "float64": "float64"}


def keys_of(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
  """The model keys that make the function of a config.json. Raises LayoutError for what no key can express."""
  kind = content.get("model_type")
  if kind not in _CLASSES:
    raise LayoutError(f"{origin}: model_type={kind} is not known; known are {', '.join(sorted(_CLASSES))}")
  problems: list[str] = []
  missing = [key for key in _SIZES.values() if key not in content]
  if missing:
    raise LayoutError(f"{origin} has no {', '.join(missing)}")
  keys = {ours: content[theirs] for ours, theirs in _SIZES.items()}
  heads = content["num_attention_heads"]
  keys |= {
    "decoder_block": "llama2",
    "base_num_kv_heads": content.get("num_key_value_heads") or heads,
    "head_dim": content.get("head_dim") or content["hidden_size"] // heads,
    "logits_via_embedding": bool(content.get("tie_word_embeddings", False)),
    "normalization_layer_epsilon": float(content.get("rms_norm_eps", 1e-6)),
    "mlp_activations": ("silu", "linear"),
  }
  if content.get("hidden_act", "silu") != "silu":
    problems.append(f"{origin}: hidden_act={content['hidden_act']}; only silu is known for model_type={kind}")
  keys |= _rotary(content, origin, problems)
  for key in ("attention_bias", "mlp_bias"):
    if content.get(key):
      problems.append(f"{origin}: {key}=true; this model has no such biases here")
  if problems:
    raise LayoutError(*problems)
  return keys


def _rotary(content: Mapping[str, Any], origin: str, problems: list[str]) -> dict[str, Any]:
  """transformers 5 writes rope_parameters, 4 writes rope_theta and rope_scaling."""
  parameters = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
  theta = parameters.get("rope_theta", content.get("rope_theta", 10000.0))
  kind = parameters.get("rope_type", parameters.get("type", "default"))
  if kind != "default":
    problems.append(f"{origin}: rope_type={kind} is not known; known is default")
  return {"rope_max_timescale": float(theta)}


def weight_dtype(dtypes: set[str], origin: str) -> str:
  """The key weight_dtype for tensors of these dtypes: the narrowest that holds all of them exactly."""
  unknown = dtypes - set(_DTYPES)
  if unknown:
    raise LayoutError(f"{origin}: parameters of dtype {', '.join(sorted(unknown))} are not known")
  kept = {_DTYPES[name] for name in dtypes}
  return kept.pop() if len(kept) == 1 else "float64" if "float64" in kept else "float32"


def architecture(model: ModelConfig) -> Architecture:
  """The table for a model configuration. Raises LayoutError where transformers has no such model."""
  return llama(model.logits_via_embedding)


def sizes(model: ModelConfig) -> dict[str, int]:
  """The letters of `huggingface_rules`."""
  return {
    "V": model.vocab_size,
    "D": model.base_emb_dim,
    "H": model.base_num_query_heads,
    "K": model.base_num_kv_heads,
    "h": model.head_dim,
    "F": model.base_mlp_dim,
  }


def config_json(model: ModelConfig, dtype: str, max_positions: int, special_ids: Mapping[str, int]) -> dict[str, Any]:
  """A config.json that transformers reads as this model. special_ids: bos_token_id, ...

  Raises LayoutError where transformers has no such model.
  """
  problems = []
  if model.mlp_activations != ("silu", "linear"):
    problems.append(f"mlp_activations={shown(model.mlp_activations)}: Llama of transformers has [silu, linear] only")
  if problems:
    raise LayoutError(*problems)
  content = {theirs: getattr(model, ours) for ours, theirs in _SIZES.items()}
  return {
    "architectures": [_CLASSES["llama"]],
    "model_type": "llama",
    **content,
    "num_key_value_heads": model.base_num_kv_heads,
    "head_dim": model.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": max_positions,
    "rms_norm_eps": model.normalization_layer_epsilon,
    "rope_theta": model.rope_max_timescale,
    "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_max_timescale},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": model.logits_via_embedding,
    "dtype": dtype,
    "torch_dtype": dtype,
    **special_ids,
  }
