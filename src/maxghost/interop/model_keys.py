"""Which keys of a model make its function, and which only how it is computed or trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxghost.config import ModelConfig

# Keys that change memory, time, rounding or training, and leave the meaning of the parameters as it is.
HOW_COMPUTED = frozenset({
  "model_name", "decoder_block", "dropout_rate", "dtype", "weight_dtype", "matmul_precision", "attention",
  "scan_layers", "remat_policy", "segment_lengths", "offload_to_host", "z_loss_multiplier",
  "num_vocab_tiling", "vocab_tiling_axis", "load_balance_loss_weight", "sparse_matmul",
})  # fmt: skip
_ROPE_KEYS = ("rope_factor", "original_max_position_embeddings")
_YARN_KEYS = ("beta_fast", "beta_slow", "rope_truncate", "rope_attention_scaling")
_LLAMA3_KEYS = ("rope_low_freq_factor", "rope_high_freq_factor")
_EXPERT_KEYS = ("num_experts_per_tok", "norm_topk_prob", "base_moe_mlp_dim")


def function_keys(model: ModelConfig) -> dict[str, Any]:
  """The keys that make the model's function; what its other keys leave without effect is not among them."""
  keys = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
  unread = set(HOW_COMPUTED)
  if model.rope_type not in ("llama3.1", "yarn"):
    unread.update(_ROPE_KEYS)
  if model.rope_type != "yarn":
    unread.update(_YARN_KEYS)
  if model.rope_type != "llama3.1":
    unread.update(_LLAMA3_KEYS)
  if model.rope_type == "none":
    unread.add("rope_max_timescale")
  if model.num_experts > 1:
    keys["base_moe_mlp_dim"] = expert_width(model)
    unread.add("base_mlp_dim")
  else:
    unread.update(_EXPERT_KEYS)
  return {key: value for key, value in keys.items() if key not in unread}


def expert_width(model: ModelConfig) -> int:
  return model.base_mlp_dim if model.base_moe_mlp_dim < 0 else model.base_moe_mlp_dim


def differing(found: ModelConfig, wanted: ModelConfig) -> Mapping[str, tuple[Any, Any]]:
  """Keys of the function that differ: {key: (found, wanted)}."""
  a, b = function_keys(found), function_keys(wanted)
  names = [*a, *(key for key in b if key not in a)]
  return {key: (getattr(found, key), getattr(wanted, key)) for key in names if a.get(key) != b.get(key)}
