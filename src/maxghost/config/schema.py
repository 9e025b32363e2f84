"""Every configuration key: its type, its default and its limits.

A user's YAML is flat; here each component has a frozen section of its own. A key is a dataclass field made by
`key(...)`; configs/base.yml explains it in the comment above its default, which `maxghost train --help` prints. To add
a key, write its field here, its lines there, its reader, and a check in validate.py where it can contradict another, or
`unread` where another one turns it off.
"""

import dataclasses
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from maxghost.config import plugins
from maxghost.config.families import FAMILIES
from maxghost.config.validate import DISTRIBUTED, ROUNDED, value_problems
from maxghost.config.values import HOST_MEMORY, MOST, ConfigError

# `unread` of the keys of built-in objectives; one of a plug-in may read any key.
_NO_PAIRS = "objective=next_token|sft|distill|grpo"
_NO_TEACHER = "objective=next_token|sft|dpo|grpo"
_NO_SAMPLES = "objective=next_token|sft|dpo|distill"
WEIGHTS_ONLY = ("int8w", "int4w")  # values of `quantization` for models that are not trained


def key(default: Any, *, choices: Collection | Callable = (), minimum: float | None = None,
        maximum: float | None = None, unread: str = "") -> Any:  # fmt: skip
  """A config field; `choices` or `minimum`/`maximum` bound the value. choices: a table or a function where plug-ins add
  some later. unread: "other=a|b;third=c", values of other keys with which no run reads this one; a note says so."""
  if maximum is None and type(default) is int:
    maximum = MOST
  limits = {"choices": choices, "minimum": minimum, "maximum": maximum}
  return dataclasses.field(default=default, metadata=limits | {"unread": unread})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
  """Where a run lives and how long it is."""

  run_name: str = key("base")
  base_output_directory: str = key("runs")
  steps: int = key(200, minimum=1)
  log_period: int = key(1, minimum=1)
  eval_interval: int = key(100, minimum=-1)
  eval_steps: int = key(4, minimum=1)
  sample_every: int = key(0, minimum=0)
  sample_prompt: str = key("")
  init_weights_seed: int = key(0, minimum=0, maximum=2**32 - 1)
  data_shuffle_seed: int = key(0, minimum=0, maximum=2**32 - 1)
  enable_tensorboard: bool = key(True)
  trackers: tuple[str, ...] = key((), choices=("wandb", "mlflow", "trackio"))
  profiler: str = key("", choices=("", "xplane"))
  skip_first_n_steps_for_profiler: int = key(1, minimum=0)
  profiler_steps: int = key(5, minimum=1)
  jax_cache_dir: str = key("")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
  """The decoder-only transformer."""

  model_name: str = key("default")
  decoder_block: str = key("llama2", choices=FAMILIES)
  base_emb_dim: int = key(256, minimum=1)
  base_num_query_heads: int = key(4, minimum=1, maximum=10**5)
  base_num_kv_heads: int = key(2, minimum=1, maximum=10**5)
  head_dim: int = key(64, minimum=1, maximum=10**6)
  base_mlp_dim: int = key(768, minimum=1)
  base_num_decoder_layers: int = key(4, minimum=1, maximum=10**5)
  vocab_size: int = key(259, minimum=2)
  mlp_activations: tuple[str, ...] = key(
    ("silu", "linear"), choices=("silu", "gelu", "relu", "linear", "quick_gelu", "one_plus")
  )
  mlp_activations_limit: float = key(-1.0)
  mlp_bias: bool = key(False)
  logits_via_embedding: bool = key(False)
  normalization_layer_epsilon: float = key(1e-5, minimum=0.0)
  trainable_position_size: int = key(-1, minimum=-1)
  rope_type: str = key("default", choices=("default", "llama3.1", "yarn", "none"))
  rope_max_timescale: float = key(10000.0, minimum=2.0, unread="rope_type=none")
  rope_factor: float = key(1.0, minimum=1.0, unread="rope_type=default|none")
  original_max_position_embeddings: int = key(8192, minimum=1, unread="rope_type=default|none")
  rope_low_freq_factor: float = key(1.0, minimum=1e-6, unread="rope_type=default|yarn|none")
  rope_high_freq_factor: float = key(4.0, minimum=1e-6, unread="rope_type=default|yarn|none")
  beta_fast: float = key(32.0, minimum=1e-6, unread="rope_type=default|llama3.1|none")
  beta_slow: float = key(1.0, minimum=1e-6, unread="rope_type=default|llama3.1|none")
  rope_truncate: bool = key(True, unread="rope_type=default|llama3.1|none")
  rope_attention_scaling: bool = key(True, unread="rope_type=default|llama3.1|none")
  attention_bias: bool = key(False)
  attention_sink: bool = key(False)
  attn_logits_soft_cap: float = key(0.0, minimum=0.0)
  attention_type: tuple[str, ...] = key(("global",), choices=("global", "local_sliding"))
  sliding_window_size: int = key(0, minimum=0)
  inhomogeneous_layer_cycle_interval: int = key(1, minimum=1)
  use_qk_norm: bool = key(False)
  use_qk_clip: bool = key(False)
  qk_clip_threshold: float = key(100.0, minimum=1e-3, unread="use_qk_clip=false")
  num_experts: int = key(1, minimum=1, maximum=10**6)
  num_experts_per_tok: int = key(1, minimum=1)
  base_moe_mlp_dim: int = key(-1, minimum=-1, unread="num_experts=1")
  norm_topk_prob: bool = key(True, unread="num_experts=1")
  load_balance_loss_weight: float = key(0.0, minimum=0.0)
  sparse_matmul: bool = key(True, unread="num_experts=1")
  dropout_rate: float = key(0.0, minimum=0.0, maximum=0.999)
  dtype: str = key("float32", choices=("float32", "bfloat16", "float64"))
  weight_dtype: str = key("float32", choices=("float32", "bfloat16", "float64"))
  matmul_precision: str = key("default", choices=("default", "high", "highest"))
  quantization: str = key("", choices=("", *ROUNDED, *WEIGHTS_ONLY))
  quantize_kvcache: bool = key(False)
  attention: str = key("autoselected", choices=("autoselected", "dot_product", "blockwise", "flash"))
  scan_layers: bool = key(True)
  remat_policy: str = key("auto", choices=("auto", "none", "minimal", "full"))
  segment_lengths: tuple[int, ...] = key((), minimum=1, maximum=MOST)
  offload_to_host: tuple[str, ...] = key((), choices=HOST_MEMORY)
  z_loss_multiplier: float = key(0.0, minimum=0.0)
  final_logits_soft_cap: float = key(0.0, minimum=0.0)
  mtp_num_layers: int = key(0, minimum=0, maximum=64)
  mtp_loss_scaling_factor: float = key(0.1, minimum=1e-6, unread="mtp_num_layers=0")
  num_vocab_tiling: int = key(1, minimum=1)
  vocab_tiling_axis: str = key("tokens", choices=("tokens", "vocab"), unread="num_vocab_tiling=1")

  @property
  def feed_forward_width(self) -> int:
    """Of one expert, or of the dense layer."""
    return self.base_mlp_dim if self.num_experts == 1 or self.base_moe_mlp_dim < 0 else self.base_moe_mlp_dim

  @property
  def stacked_segments(self) -> tuple[int, ...]:
    """`segment_lengths` in entries of the stack, each a cycle of unlike layers."""
    return tuple(length // self.inhomogeneous_layer_cycle_interval for length in self.segment_lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
  """What is read, how it is split, tokenized and packed."""

  dataset_type: str = key("stdlib", choices=("stdlib", "synthetic", "text", "tfds", "grain", "hf"))
  dataset_domains: tuple[str, ...] = key(())
  dataset_domain_bytes: int = key(-1, minimum=-1, maximum=10**15)
  dataset_files: tuple[str, ...] = key(())
  dataset_path: str = key("")
  train_split: str = key("train")
  train_data_columns: tuple[str, ...] = key(("text",))
  document_fields: tuple[str, ...] = key(())
  chat_template_path: str = key("")
  sft_train_on_completion_only: bool = key(True, unread="objective=next_token|distill|dpo|margin")
  dataset_mixture: tuple[str, ...] = key(())
  dataset_exclude_file: str = key("")
  dataset_include_file: str = key("")
  on_corrupt: str = key("error", choices=("error", "skip"))
  tokenizer_type: str = key("byte", choices=("byte", "huggingface", "sentencepiece", "tiktoken"))
  tokenizer_path: str = key("")
  max_target_length: int = key(256, minimum=2)
  per_device_batch_size: int = key(8, minimum=1)
  packing: str = key("first_fit", choices=("first_fit", "concat_then_split", "none"))
  max_segments_per_seq: int = key(-1, minimum=-1, unread="packing=none")
  shuffle_window_bytes: int = key(8_388_608, minimum=1, maximum=10**15)
  dataset_shards: int = key(1, minimum=1)
  add_bos: bool = key(True)
  add_eos: bool = key(True)
  grain_worker_count: int = key(0, minimum=0, maximum=4096)
  offline_data_dir: str = key("")
  ghost_val_sets: tuple[str, ...] = key(())
  ghost_val_fraction: float = key(0.25, minimum=0.0, maximum=1.0)
  ghost_val_copies: str = key("drop", choices=("drop", "keep", "error"))

  @property
  def max_segments(self) -> int:
    """S, the most segments of a row."""
    usual = self.max_segments_per_seq if self.max_segments_per_seq > 0 else min(32, self.max_target_length // 32)
    return 1 if self.packing == "none" else max(1, usual)

  @property
  def validation_sets(self) -> dict[str, str]:
    """{name: domain} of the sets that are scored against."""
    first = (*self.dataset_domains, "words")[0] if self.dataset_type == "synthetic" else "manual"
    pairs = [plugins.without_objective(text)[0].partition("=") for text in self.ghost_val_sets or (first,)]
    return {name: name if plugins.is_files(domain) else domain or name for name, _, domain in pairs}

  @property
  def validation_objectives(self) -> tuple[str, ...]:
    """The objective of each validation set; "" for that of the run."""
    return tuple(plugins.without_objective(text)[1] for text in self.ghost_val_sets) or ("",)

  @property
  def has_reference(self) -> bool:
    """Whether records of pairs have the log-probabilities of the reference."""
    return plugins.REFERENCE_COLUMNS[0] in self.train_data_columns

  def validation_files(self, records: str) -> dict[str, tuple[str, ...]]:
    """{records: the `name=glob` of validation sets in files of their own}. records: those of the run's objective."""
    found: dict[str, tuple[str, ...]] = {}
    for text, own in map(plugins.without_objective, self.ghost_val_sets):
      if plugins.is_files(text.partition("=")[2]):
        kind = plugins.OBJECTIVES[own].records if own else records
        found[kind] = (*found.get(kind, ()), text)
    return found

  @property
  def mixture(self) -> str:
    """How an epoch is made: "proportional", by "weights" (shares of the rows), or by "epochs" (times per epoch)."""
    if not self.dataset_mixture:
      return "proportional"
    return "epochs" if self.dataset_mixture[0].endswith("x") else "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
  """AdamW, SGD or Muon and their schedule."""

  objective: str = key("next_token", choices=plugins.OBJECTIVES)
  opt_type: str = key("adamw", choices=plugins.OPTIMIZERS)
  learning_rate: float = key(1e-3, minimum=0.0)
  lr_schedule_type: str = key("cosine", choices=("cosine", "wsd", "constant"))
  warmup_steps_fraction: float = key(0.2, minimum=0.0, maximum=1.0)
  wsd_decay_steps_fraction: float = key(0.1, minimum=0.0, maximum=1.0, unread="lr_schedule_type=cosine|constant")
  learning_rate_final_fraction: float = key(0.1, minimum=0.0, maximum=1.0, unread="lr_schedule_type=constant")
  adam_b1: float = key(0.9, minimum=0.0, maximum=0.999999, unread="opt_type=sgd")
  adam_b2: float = key(0.95, minimum=0.0, maximum=0.999999, unread="opt_type=sgd")
  adam_eps: float = key(1e-8, minimum=1e-15, unread="opt_type=sgd")
  adam_weight_decay: float = key(0.1, minimum=0.0, unread="opt_type=sgd")
  mu_dtype: str = key("float32", choices=("float32", "bfloat16"), unread="opt_type=sgd")
  sgd_momentum: float = key(0.0, minimum=0.0, maximum=0.999999, unread="opt_type=adamw|muon")
  muon_beta: float = key(0.95, minimum=0.0, maximum=0.999999, unread="opt_type=adamw|sgd")
  muon_weight_decay: float = key(0.0, minimum=0.0, unread="opt_type=adamw|sgd")
  muon_consistent_rms: float = key(0.0, minimum=0.0, unread="opt_type=adamw|sgd")
  trainable_parameters_mask: tuple[str, ...] = key(())
  gradient_accumulation_steps: int = key(1, minimum=1)
  gradient_clipping_threshold: float = key(1.0, minimum=0.0)
  dpo_algo: str = key("sigmoid", choices=plugins.PREFERENCE_LOSSES, unread=_NO_PAIRS)
  dpo_beta: float = key(0.1, minimum=1e-6, unread=f"{_NO_PAIRS};dpo_algo=orpo")
  dpo_label_smoothing: float = key(0.0, minimum=0.0, maximum=0.499999, unread=_NO_PAIRS)
  orpo_lambda: float = key(0.1, minimum=0.0, unread=f"{_NO_PAIRS};dpo_algo=sigmoid|ipo|hinge|robust|simpo")
  simpo_gamma: float = key(0.5, minimum=0.0, unread=f"{_NO_PAIRS};dpo_algo=sigmoid|ipo|hinge|robust|orpo")
  distill_teacher: str = key("")
  distill_alpha: float = key(0.5, minimum=0.0, maximum=1.0, unread=_NO_TEACHER)
  distill_temperature: float = key(1.0, minimum=1e-3, unread=_NO_TEACHER)
  distill_kl: str = key("forward", choices=("forward", "reverse"), unread=_NO_TEACHER)
  distill_top_k: int = key(0, minimum=0, unread=_NO_TEACHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
  """Reinforcement learning (objective=grpo): the model's own answers, their rewards and the loss on them."""

  num_generations: int = key(8, minimum=2, unread=_NO_SAMPLES)
  num_iterations: int = key(1, minimum=1, unread=_NO_SAMPLES)
  max_completion_length: int = key(64, minimum=1, unread=_NO_SAMPLES)
  decode_sampling_temperature: float = key(1.0, minimum=1e-3, unread=_NO_SAMPLES)
  reward_functions: tuple[str, ...] = key(("arithmetic",), unread=_NO_SAMPLES)
  reward_weights: tuple[float, ...] = key((), unread=_NO_SAMPLES)
  scale_rewards: str = key("group", choices=("group", "batch", "none"), unread=_NO_SAMPLES)
  grpo_loss_type: str = key("dapo", choices=("dapo", "grpo", "dr_grpo"), unread=_NO_SAMPLES)
  grpo_epsilon: tuple[float, float] = key((0.2, 0.2), minimum=1e-4, unread=_NO_SAMPLES)
  grpo_beta: float = key(0.0, minimum=0.0, unread=_NO_SAMPLES)
  grpo_kl: str = key("rho_k3", choices=("rho_k3", "k2"), unread=f"{_NO_SAMPLES};grpo_beta=0.0")
  mask_truncated_completions: bool = key(False, unread=_NO_SAMPLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
  """Low-rank adapters (LoRA): what is trained in place of the model's own weights."""

  lora_rank: int = key(0, minimum=0, maximum=10**5)
  lora_alpha: float = key(8.0, minimum=1e-6, unread="lora_rank=0")
  lora_module_path: str = key("", unread="lora_rank=0")
  lora_dropout: float = key(0.0, minimum=0.0, maximum=0.999, unread="lora_rank=0")
  lora_weight_qtype: str = key("", choices=("", "bfloat16", "int8", "nf4"))
  lora_restore_path: str = key("")

  @property
  def scale(self) -> float:
    return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class GhostConfig:
  """Per-example scores: what is scored, along which direction."""

  ghost_enabled: bool = key(True)
  ghost_schedule: str = key("two_pass", choices=plugins.RUN_SCHEDULES)
  ghost_direction: str = key("auto", choices=plugins.directions)
  ghost_curvature: str = key("none", choices=("none", "secant", "hessian"))
  ghost_rank: int = key(0, minimum=0)
  ghost_val_batch_size: int = key(2, minimum=1)
  ghost_val_refresh_steps: int = key(20, minimum=0)
  ghost_every: int = key(1, minimum=1)
  ghost_val_every: int = key(1, minimum=1)
  ghost_exclude: tuple[str, ...] = key(())
  ghost_detail: str = key("layer", choices=("total", "module", "layer", "token"))
  ghost_log_period: int = key(20, minimum=1)
  ghost_select: str = key("none", choices=("none", "topk", "threshold", "greats", "random", "bottomk"))
  ghost_select_fraction: float = key(0.5, minimum=0.0, maximum=1.0, unread="ghost_select=none")
  ghost_reweight: tuple[float, ...] = key((), minimum=0.0)

  @property
  def direction(self) -> str:
    """ghost_direction without the name second_order (`plugins.directed`)."""
    return plugins.directed(self.ghost_direction, self.ghost_curvature)[0]

  @property
  def curvature(self) -> str:
    """ghost_curvature, also where ghost_direction=second_order names it."""
    return plugins.directed(self.ghost_direction, self.ghost_curvature)[1]

  @property
  def num_stored(self) -> int:
    """Number of validation gradients of each set that later steps need."""
    return (self.ghost_val_every > 1) + (self.curvature == "secant")

  @property
  def carries_curvature(self) -> bool:
    """Whether the curvature of replaced validation rows serves the first step with new ones (`step.make_closing`)."""
    of_every_step = self.ghost_every == self.ghost_val_every == 1 and self.ghost_val_refresh_steps > 0
    return self.curvature == "secant" and of_every_step and self.passes == "two_pass"

  @property
  def engine(self) -> str:
    """How directions meet gradients: by rules for layers, or by the forward mode of differentiation."""
    return "jvp" if self.ghost_schedule == "forward_mode" else "graddotprod"

  @property
  def passes(self) -> str:
    """The schedule of the passes: forward_mode has those of two_pass."""
    return "two_pass" if self.ghost_schedule == "forward_mode" else self.ghost_schedule

  @property
  def reweighting(self) -> tuple[int, float, float]:
    """(steps between two changes of the shares, 0 for never; size of a change; least share of a domain)."""
    steps, size, floor = plugins.reweighting_parts(self.ghost_reweight)
    return int(steps), size, floor


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
  """Saving and resuming."""

  load_parameters_path: str = key("")
  load_full_state_path: str = key("")
  checkpoint_period: int = key(100, minimum=0)
  max_num_checkpoints_to_keep: int = key(2, minimum=0, unread="checkpoint_period=0")
  async_checkpointing: bool = key(True, unread="checkpoint_period=0")
  local_checkpoint_directory: str = key("")
  local_checkpoint_period: int = key(0, minimum=0)

  @property
  def given(self) -> str:
    """The path of the model that a new run begins with; empty = none."""
    return self.load_full_state_path or self.load_parameters_path

  @property
  def given_by(self) -> str:
    return "load_full_state_path" if self.load_full_state_path else "load_parameters_path"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
  """Many devices: the mesh, what is sharded how, several processes, compiling for absent hardware."""

  ici_data_parallelism: int = key(1, minimum=-1)
  ici_fsdp_parallelism: int = key(-1, minimum=-1)
  ici_tensor_parallelism: int = key(1, minimum=-1)
  ici_context_parallelism: int = key(1, minimum=-1)
  ici_expert_parallelism: int = key(1, minimum=-1)
  ici_stage_parallelism: int = key(1, minimum=-1)
  dcn_data_parallelism: int = key(-1, minimum=-1)
  dcn_fsdp_parallelism: int = key(1, minimum=-1)
  dcn_tensor_parallelism: int = key(1, minimum=-1)
  dcn_context_parallelism: int = key(1, minimum=-1)
  dcn_expert_parallelism: int = key(1, minimum=-1)
  dcn_stage_parallelism: int = key(1, minimum=-1)
  num_layers_per_pipeline_stage: int = key(-1, minimum=-1)
  num_pipeline_repeats: int = key(-1, minimum=-1)
  num_pipeline_microbatches: int = key(-1, minimum=-1)
  logical_axis_rules: tuple[tuple[str, tuple[str, ...]], ...] = key(())
  override_logical_axis_rules: bool = key(False, unread="logical_axis_rules=[]")
  shard_optimizer_over_data: bool = key(False)
  sharding_tolerance: float = key(0.02, minimum=0.0)
  jax_distributed: str = key("auto")
  jax_distributed_timeouts: tuple[int, int] = key((300, 100), minimum=1, maximum=10**6)
  compile_topology: str = key("")
  compiled_trainstep_file: str = key("")
  enable_diloco: bool = key(False)
  diloco_sync_period: int = key(36, minimum=1, unread="enable_diloco=false")
  diloco_outer_lr: float = key(0.3, minimum=0.0, unread="enable_diloco=false")
  diloco_outer_momentum: float = key(0.9, minimum=0.0, maximum=0.999999, unread="enable_diloco=false")
  num_diloco_fragments: int = key(1, minimum=1, unread="enable_diloco=false")
  num_communication_overlapping_steps: int = key(0, minimum=0, unread="enable_diloco=false")
  communication_overlapping_alpha: float = key(0.5, minimum=0.0, maximum=1.0, unread="enable_diloco=false")

  @property
  def apart(self) -> int:
    """Number of slices that train apart (DiLoCo); 1 without."""
    return self.dcn_data_parallelism if self.enable_diloco else 1

  @property
  def processes(self) -> tuple[str, int, int] | None:
    """(address of process 0, index of this process, number of processes); None where no address is given."""
    found = DISTRIBUTED.fullmatch(self.jax_distributed)
    return (found[1], int(found[2]), int(found[3])) if found else None

  @property
  def topology(self) -> tuple[str, int]:
    """(`compile_topology` of one slice, slices)."""
    found = re.fullmatch(r"([1-9][0-9]{0,3})x(.+)", self.compile_topology)
    return (found[2], int(found[1])) if found else (self.compile_topology, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
  """All sections. Built by `maxghost.config.load`; validated at construction. Raises ConfigError."""

  run: RunConfig = RunConfig()
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  rollout: RolloutConfig = RolloutConfig()
  adapter: AdapterConfig = AdapterConfig()
  ghost: GhostConfig = GhostConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  parallel: ParallelConfig = ParallelConfig()

  def __post_init__(self):
    if problems := value_problems(self.flat(), fields()):
      raise ConfigError(*problems)

  @property
  def val_sets(self) -> dict[str, str]:
    """{name: domain} of the validation sets that training scores against; empty without ghost."""
    return self.data.validation_sets if self.ghost.ghost_enabled else {}

  @property
  def records(self) -> str:
    """What a document of the run is: "text", "conversations" or "pairs"."""
    return plugins.OBJECTIVES[self.optimizer.objective].records

  @property
  def samples(self) -> bool:
    """Whether the run trains on answers that its model samples."""
    return plugins.OBJECTIVES[self.optimizer.objective].samples

  @property
  def set_objectives(self) -> tuple[str, ...]:
    """The objective of each validation set."""
    own = plugins.OBJECTIVES[self.optimizer.objective].validated_by or self.optimizer.objective
    return tuple(name or own for name in self.data.validation_objectives)

  @property
  def val_objectives(self) -> tuple[str, ...]:
    """The objective of each validation set that training scores against."""
    return self.set_objectives if self.ghost.ghost_enabled else ()

  @property
  def evaluated(self) -> str:
    """The objective of evaluations, which read the first validation set."""
    return self.set_objectives[0]

  @property
  def eval_rows(self) -> int:
    """Rows of a batch of evaluations on each device: per_device_batch_size, rounded up to whole units."""
    unit = plugins.OBJECTIVES[self.evaluated].rows_per_unit
    return -(-self.data.per_device_batch_size // unit) * unit

  @property
  def reference(self) -> str:
    """What the frozen second model of the run is, as in `plugins.Objective`; "" where there is none."""
    without = {"dpo"} if self.optimizer.dpo_algo in plugins.WITHOUT_REFERENCE else set()
    used = (plugins.OBJECTIVES[name] for name in {self.optimizer.objective, *self.set_objectives} - without)
    found = {one.reference for one in used if self.rollout.grpo_beta or not one.samples}
    if self.data.has_reference:
      found -= {"start"}
    elif "start" in found and self.adapter.lora_rank and not self.adapter.lora_restore_path:
      found = {"base"}
    if self.data.offline_data_dir:
      found -= {"teacher"}
    return max(found, default="")

  @property
  def direction_name(self) -> str:
    """The direction that scores are made with, for logs: auto by its own name, and the curvature."""
    own = plugins.OPTIMIZERS[self.optimizer.opt_type].direction
    name = str(own) if self.ghost.direction == "auto" else self.ghost.direction
    return name if self.ghost.curvature == "none" else f"{name}+{self.ghost.curvature}"

  @property
  def counts_clipping(self) -> bool:
    """Whether contributions count what a document changes of the gradient's clipping: those of marginal credit do."""
    return self.ghost.direction == "marginal" and self.optimizer.gradient_clipping_threshold > 0

  def flat(self) -> dict[str, Any]:
    """Every key and its value, in the order of the sections."""
    sections = (getattr(self, name) for name in SECTIONS)
    return {f.name: getattr(section, f.name) for section in sections for f in dataclasses.fields(section)}


# name -> dataclass of every section
SECTIONS: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Config)}


def fields() -> dict[str, dataclasses.Field]:
  """Every key of the schema and its dataclass field, in the order of the sections."""
  return {item.name: item for cls in SECTIONS.values() for item in dataclasses.fields(cls)}
