"""Keys that the schema does not have: former names, and MaxText's names for what maxghost calls otherwise.

One table, `OTHER`. MaxText's names may be typed everywhere and are folded into the keys of the schema; former names are
answered with the present ones, except in the saved configuration of a run, which keeps its meaning.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxghost.config.errors import did_you_mean
from maxghost.config.values import WORDS

Values = Mapping[str, Any]


@dataclass(frozen=True)
class OtherKey:
  """answer: behind the name in an error, such as "is now steps". kind: the type of its value.

  fold(value, values): the changes of keys of the schema that the value asks for; values: those given by other keys.
  """

  answer: str
  kind: Any
  fold: Callable[[Any, Values], dict[str, Any]]
  maxtext: bool = False


def _nothing(value: Any, values: Values) -> dict[str, Any]:
  return {}


def _files(kind: str) -> Callable[[Any, Values], dict[str, Any]]:
  return lambda value, values: {"dataset_files": value} if value and values["dataset_type"] == kind else {}


def _offload(what: str, asked: Any) -> Callable[[Any, Values], dict[str, Any]]:
  def fold(value: Any, values: Values) -> dict[str, Any]:
    held = dict.fromkeys((*values["offload_to_host"], *((what,) if value == asked else ())))
    return {"offload_to_host": tuple(name for name in ("weights", "optimizer", "carries") if name in held)}

  return fold


def _validation_domain(value: str, values: Values) -> dict[str, Any]:
  return {"ghost_val_sets": (value,)} if value != "manual" and not values["ghost_val_sets"] else {}


def _validation_files(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  given = {text.partition("=")[0]: text for text in value}
  return {"ghost_val_sets": tuple(given.get(text, text) for text in values["ghost_val_sets"])} if value else {}


def _mixture(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  end = "x" if values["dataset_mixture"] == ("epochs",) else ""
  return {"dataset_mixture": tuple(text + end for text in value)}


def _reweighting(place: int) -> Callable[[Any, Values], dict[str, Any]]:
  def fold(value: Any, values: Values) -> dict[str, Any]:
    held = values["ghost_reweight"]
    return {"ghost_reweight": (*held[:place], float(value))} if held else {}

  return fold


def _slices(value: int, values: Values) -> dict[str, Any]:
  one = values["compile_topology"]
  return {"compile_topology": f"{value}x{one}"} if value > 1 and one else {}


_TEXTS = tuple[str, ...]
_PROCESS = "is now jax_distributed=HOST:PORT,K/N, process K of N with process 0 at HOST:PORT"
_REWEIGHT = "is now part of ghost_reweight=[steps, size, floor]"
_GENERATE = "samples during training have 64 tokens at temperature 0.7; see `maxghost generate` for others"
OTHER: dict[str, OtherKey] = {
  "stream_weights": OtherKey("is now offload_to_host=[weights]", str, _offload("weights", "host")),
  "stream_optimizer": OtherKey("is now offload_to_host=[optimizer]", str, _offload("optimizer", "host")),
  "ghost_stream_carries": OtherKey("is now offload_to_host=[carries]", str, _offload("carries", "host")),
  "segment_length": OtherKey(
    "is now segment_lengths, which takes a number too", int, lambda k, _: {"segment_lengths": (k,)} if k else {}
  ),
  "text_files": OtherKey("is now dataset_files, with dataset_type=text", _TEXTS, _files("text")),
  "dataset_weights": OtherKey(
    "is now dataset_mixture: [a=0.25,b=0.75] for shares of the rows, [a=2x,b=1x] for passes per epoch", _TEXTS, _mixture
  ),
  "ghost_val_domain": OtherKey("is now ghost_val_sets, which takes one domain too", str, _validation_domain),
  "ghost_reweight_every": OtherKey(_REWEIGHT, int, _reweighting(0)),
  "ghost_reweight_step": OtherKey(_REWEIGHT, float, _reweighting(1)),
  "ghost_reweight_floor": OtherKey(_REWEIGHT, float, _reweighting(2)),
  "ghost_select_threshold": OtherKey(
    "is now ghost_select_fraction",
    float,
    lambda x, values: {"ghost_select_fraction": x} if values["ghost_select"] == "threshold" else {},
  ),
  "ghost_val_files": OtherKey("is now part of ghost_val_sets: name=glob", _TEXTS, _validation_files),
  "ghost_engine": OtherKey(
    "is now part of ghost_schedule: forward_mode for jvp",
    str,
    lambda engine, _: {"ghost_schedule": "forward_mode"} if engine == "jvp" else {},
  ),
  "normalization_layer_type": OtherKey("is no key any more: decoder_block=gpt2 has layer_norm", str, _nothing),
  "sample_tokens": OtherKey(f"is no key any more: {_GENERATE}", int, _nothing),
  "sample_temperature": OtherKey(f"is no key any more: {_GENERATE}", float, _nothing),
  # Where a process stood says nothing of the next start.
  "jax_distributed_coordinator_address": OtherKey(_PROCESS, str, _nothing),
  "jax_distributed_num_processes": OtherKey(_PROCESS, int, _nothing),
  "jax_distributed_process_id": OtherKey(_PROCESS, int, _nothing),
  # MaxText's names.
  "jax_distributed_initialization_timeout": OtherKey(
    "is jax_distributed_timeouts", int, lambda s, values: _timeouts(values, start=s), maxtext=True
  ),
  "jax_distributed_heartbeat_timeout_seconds": OtherKey(
    "is jax_distributed_timeouts", int, lambda s, values: _timeouts(values, heartbeat=s), maxtext=True
  ),
  "skip_jax_distributed_system": OtherKey(
    "is jax_distributed=off", bool, lambda skip, _: {"jax_distributed": "off"} if skip else {}, maxtext=True
  ),
  "grain_train_files": OtherKey("is dataset_files, with dataset_type=grain", _TEXTS, _files("grain"), maxtext=True),
  "hf_path": OtherKey("is dataset_files, with dataset_type=hf", _TEXTS, _files("hf"), maxtext=True),
  "dataset_name": OtherKey("is dataset_files, with dataset_type=tfds", _TEXTS, _files("tfds"), maxtext=True),
  "grain_packing_type": OtherKey(
    "is packing", str, lambda how, values: {"packing": how} if values["packing"] != "none" else {}, maxtext=True
  ),
  "enable_checkpointing": OtherKey(
    "is checkpoint_period, 0 for no checkpoints",
    bool,
    lambda on, _: {} if on else {"checkpoint_period": 0},
    maxtext=True,
  ),
  "enable_dropout": OtherKey("is dropout_rate", bool, lambda on, _: {} if on else {"dropout_rate": 0.0}, maxtext=True),
  "parameter_memory_host_offload": OtherKey(
    "is offload_to_host=[weights]", bool, _offload("weights", True), maxtext=True
  ),
  "optimizer_memory_host_offload": OtherKey(
    "is offload_to_host=[optimizer]", bool, _offload("optimizer", True), maxtext=True
  ),
  "compile_topology_num_slices": OtherKey("is compile_topology=2xv5e-16", int, _slices, maxtext=True),
  "routed_bias": OtherKey("is mlp_bias", bool, lambda on, _: {"mlp_bias": True} if on else {}, maxtext=True),
  "ici_pipeline_parallelism": OtherKey(
    "is ici_stage_parallelism", int, lambda n, _: {"ici_stage_parallelism": n}, maxtext=True
  ),
  "dcn_pipeline_parallelism": OtherKey(
    "is dcn_stage_parallelism", int, lambda n, _: {"dcn_stage_parallelism": n}, maxtext=True
  ),
}

# Values that are read as others: {key: {text: text}}.
SYNONYMS: dict[str, dict[str, str]] = {
  "packing": {text: "first_fit" if on else "none" for text, on in WORDS.items()},
  "ghost_reweight": {"true": "20", "false": ""},
  "dataset_mixture": {"proportional": ""},
  "max_num_checkpoints_to_keep": {"none": "0"},
}


def _timeouts(values: Values, start: int | None = None, heartbeat: int | None = None) -> dict[str, Any]:
  first, second = values["jax_distributed_timeouts"]
  return {"jax_distributed_timeouts": (start or first, heartbeat or second)}


# MaxText's keys with the values that ask for what maxghost does anyway: {value: keys}; * is any value.
_SAME = {
  "*": "hardware log_config max_position_embeddings override_model_config use_iota_embed",
  "false": "activations_in_float32 debug_sharding dump_hlo dump_jaxpr enable_autocheckpoint "
  "enable_checkpoint_cloud_logger enable_continuous_checkpointing enable_diloco enable_emergency_checkpoint "
  "enable_goodput_recording enable_jax_profiler enable_multi_tier_checkpointing enable_orbax_v1 "
  "enable_rampup_batch_size enable_single_controller enable_wandb force_unroll fused_mlp fused_qkv gcs_metrics moba "
  "monitor_goodput normalize_embedding_logits quantize_kvcache rope_interleave save_config_to_gcs share_kv_projections "
  "skip_step_on_spikes use_audio use_chat_template use_dpo use_indexer use_mrope use_multimodal use_post_attn_norm "
  "use_post_ffw_norm use_qk_clip use_qwix_quantization use_random_routing use_ring_of_experts use_sft "
  "use_untrainable_positional_embedding use_vertex_tensorboard vocab_tiling_ag_once",
  "true": "abort_on_inf_loss abort_on_nan_loss enable_data_shuffling enable_nnx pure_nnx pure_nnx_decoder "
  "save_checkpoint_on_completion tokenize_eval_data tokenize_train_data",
  "": "chat_template custom_mesh_and_rule hf_access_token load_full_state_path lora_input_adapters_path metrics_file "
  "profiler quantization routed_score_func",
  "0": "adam_eps_root chunk_attn_window_size eval_start_step first_num_dense_layers "
  "mtp_num_layers q_lora_rank reuse_example_batch shared_experts target_eval_loss",
  "1": "global_parameter_scale interleave_moe_layer_step num_epoch partial_rotary_factor routed_scaling_factor "
  "dcn_autoregressive_parallelism dcn_context_autoregressive_parallelism dcn_diloco_parallelism "
  "dcn_fsdp_transpose_parallelism dcn_sequence_parallelism dcn_tensor_sequence_parallelism "
  "ici_autoregressive_parallelism ici_context_autoregressive_parallelism ici_diloco_parallelism "
  "ici_fsdp_transpose_parallelism ici_sequence_parallelism ici_tensor_sequence_parallelism",
  "-1": "capacity_factor learning_rate_schedule_steps n_routing_groups nope_layer_interval num_slices "
  "topk_routing_group",
  "linear": "wsd_decay_style",
  "causal_lm": "training_objective",
}
# What to use instead of a key of MaxText: {what: keys}.
_INSTEAD = {
  "use dataset_files": "hf_train_files hf_data_dir grain_train_mixture_config_path grain_file_type",
  "use ghost_val_sets, with ghost_val_fraction or as name=glob": "eval_dataset_name eval_split grain_eval_files "
  "hf_eval_files hf_eval_split",
  "use train_data_columns": "eval_data_columns",
  "use steps": "num_epoch learning_rate_schedule_steps",
  "use load_parameters_path": "load_full_state_path",
  "use logical_axis_rules": "mesh_axes custom_mesh custom_mesh_and_rule data_sharding input_data_sharding_logical_axes",
  "use dcn_data_parallelism": "num_slices",
  "use sparse_matmul": "megablox",
  "use `maxghost generate`": "prompt max_prefill_predict_length decode_sampling_strategy decode_sampling_temperature "
  "decode_sampling_top_k decode_sampling_nucleus_p autoregressive_decode_assert",
  "metrics.jsonl in the run's folder holds them": "metrics_file gcs_metrics",
  "use tools/dump_shardings.py": "debug_sharding",
}
_MOST_LINES = 10  # of keys that only MaxText has


def asks_for_nothing(key: str, text: Any) -> bool:
  """Whether this is a key of MaxText with a value that changes nothing here; a value that is no text always does."""
  if not isinstance(text, str):
    return False
  plain = text.strip().lower().removesuffix(".0")
  return any(key in keys.split() for value, keys in _SAME.items() if value in ("*", "" if plain == "none" else plain))


@functools.cache
def _maxtext_keys() -> frozenset[str]:
  package = Path(__file__).parents[1]
  folder = package / "configs" if (package / "configs").is_dir() else package.parents[1] / "configs"
  lines = (folder / "maxtext_keys.txt").read_text("utf-8").splitlines()
  return frozenset(" ".join(lines[1:]).split())


def unknown(key: str, known: Mapping[str, Any], origin: str = "") -> str:
  """What is wrong with a key that the schema does not have: its present name, MaxText's, or the nearest valid ones."""
  where = f" ({origin})" if origin else ""
  if key in OTHER:
    return f"key '{key}'{where} {OTHER[key].answer}"
  if key in _maxtext_keys():
    instead = next((f"; {what}" for what, keys in _INSTEAD.items() if key in keys.split()), "")
    return f"'{key}'{where}{_FOREIGN}{instead}"
  return f"unknown key '{key}'{where}{did_you_mean(key, known)}"


_FOREIGN = " is a MaxText key that maxghost does not have"


def shortened(problems: list[str]) -> list[str]:
  """The problems, with many keys that only MaxText has on one line: a whole base.yml of MaxText holds hundreds."""
  foreign = [text for text in problems if _FOREIGN in text]
  if len(foreign) <= _MOST_LINES:
    return problems
  names = ", ".join(text.split("'")[1] for text in foreign[:_MOST_LINES])
  line = (
    f"{len(foreign)} keys are MaxText keys that maxghost does not have: {names}, ...; a file needs only the keys that "
    "it changes (docs/from-maxtext.md)"
  )
  return [line, *(text for text in problems if _FOREIGN not in text)]
