"""Every configuration key: its default, its type, its help line and its limits.

A user's YAML is flat; here each component has a frozen section of its own and receives only that section. A key is a
dataclass field made by `key(...)`; `maxghost train --help` and `configs/base.yml` are written from these fields. To add
a key, write its field here and its reader in the same change, add a check to validate.py where it can contradict
another key, and run `python -m maxghost.config.write_base`. Nothing in this package imports JAX, so that a wrong key is
reported before JAX starts.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxghost.config import plugins
from maxghost.config.errors import ConfigError
from maxghost.config.families import FAMILIES
from maxghost.config.validate import DISTRIBUTED, reweighting_parts, value_problems
from maxghost.config.values import MOST


def key(
  default: Any, help: str, *, choices: Sequence = (), minimum: float | None = None, maximum: float | None = None
) -> Any:
  """A config field: `help` is one line with the unit; `choices` or `minimum`/`maximum` bound the value."""
  if maximum is None and type(default) is int:
    maximum = MOST
  metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
  if isinstance(default, (list, dict)):
    raise TypeError("config defaults are immutable: use a tuple")
  return dataclasses.field(default=default, metadata=metadata)


def _is_files(domain: str) -> bool:
  """Whether a validation set is given by a glob of files and not by a domain."""
  return any(sign in domain for sign in "/*.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
  """Where a run lives and how long it is."""

  run_name: str = key("base", "name of the run; its folder is <base_output_directory>/<run_name>")
  base_output_directory: str = key("runs", "folder that holds the runs")
  steps: int = key(200, "total training steps", minimum=1)
  log_period: int = key(1, "print a step line every this many steps", minimum=1)
  eval_interval: int = key(100, "evaluate on the validation documents every this many steps; -1 = never", minimum=-1)
  eval_steps: int = key(4, "batches per evaluation", minimum=1)
  sample_every: int = key(0, "let the model continue sample_prompt every this many steps; 0 = never", minimum=0)
  sample_prompt: str = key("", "text that samples begin with; empty = only the begin-of-document token")
  init_weights_seed: int = key(0, "seed of the initial weights and of dropout", minimum=0, maximum=2**32 - 1)
  data_shuffle_seed: int = key(0, "seed of the document order and the validation split", minimum=0, maximum=2**32 - 1)
  enable_tensorboard: bool = key(True, "write TensorBoard event files")
  jax_cache_dir: str = key("", "folder for JAX's persistent compilation cache; empty = none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
  """The decoder-only transformer."""

  model_name: str = key("default", "a file of configs/models/ (without .yml) laid over the base; default = none")
  decoder_block: str = key(
    "llama2",
    "architecture family: parameter names, and what the family cannot do without; see configs/models/",
    choices=plugins.Names(lambda: tuple(FAMILIES)),
  )
  base_emb_dim: int = key(256, "embed dim D", minimum=1)
  base_num_query_heads: int = key(4, "query heads H", minimum=1, maximum=10**5)
  base_num_kv_heads: int = key(2, "key/value heads K; divides the query heads", minimum=1, maximum=10**5)
  head_dim: int = key(64, "width h of one head", minimum=1, maximum=10**6)
  base_mlp_dim: int = key(768, "width F of the feed-forward layer", minimum=1)
  base_num_decoder_layers: int = key(4, "layers L", minimum=1, maximum=10**5)
  vocab_size: int = key(259, "vocabulary V; must hold the tokenizer's ids", minimum=2)
  mlp_activations: tuple[str, ...] = key(
    ("silu", "linear"),
    "activations of the feed-forward branches, multiplied: gate, up; or a single one. gelu is the tanh form, "
    "quick_gelu is x sigmoid(1.702 x), one_plus is 1 + x",
    choices=("silu", "gelu", "relu", "linear", "quick_gelu", "one_plus"),
  )
  mlp_activations_limit: float = key(
    -1.0, "clamp before the activations: gate from above, up on both sides; 0 or less = none"
  )
  mlp_bias: bool = key(False, "biases in the feed-forward layer, the experts' and the router's included")
  logits_via_embedding: bool = key(False, "tie the output projection to the token embedding")
  normalization_layer_epsilon: float = key(1e-5, "epsilon of the norms", minimum=0.0)
  trainable_position_size: int = key(-1, "rows of a learned position embedding; -1 = none", minimum=-1)
  rope_type: str = key(
    "default",
    "rotary embedding: plain, or with the wavelengths stretched as Llama 3.1 or YaRN do; none = no rotation",
    choices=("default", "llama3.1", "yarn", "none"),
  )
  rope_max_timescale: float = key(10000.0, "longest wavelength of the rotary embedding", minimum=1.0)
  rope_factor: float = key(1.0, "llama3.1, yarn: how much longer the longest wavelengths get", minimum=1.0)
  original_max_position_embeddings: int = key(
    8192, "llama3.1, yarn: context length before the stretching, tokens", minimum=1
  )
  rope_low_freq_factor: float = key(
    1.0, "llama3.1: wavelengths over original length / this are stretched in full", minimum=1e-6
  )
  rope_high_freq_factor: float = key(4.0, "llama3.1: wavelengths under original length / this stay", minimum=1e-6)
  beta_fast: float = key(32.0, "yarn: pairs that turn more often than this in the original length stay", minimum=1e-6)
  beta_slow: float = key(1.0, "yarn: pairs that turn less often than this are stretched in full", minimum=1e-6)
  rope_truncate: bool = key(True, "yarn: round the bounds of the ramp between both outwards to whole pairs")
  rope_attention_scaling: bool = key(True, "yarn: scale the rotated heads by 0.1 ln(rope_factor) + 1")
  attention_bias: bool = key(False, "biases in the query, key, value and out projections")
  attention_sink: bool = key(False, "one learned logit per head that takes part in the softmax and has no value")
  attn_logits_soft_cap: float = key(0.0, "c: attention scores become c tanh(scores / c); 0 = no cap", minimum=0.0)
  attention_type: tuple[str, ...] = key(
    ("global",), "for all layers, or one for each of a cycle", choices=("global", "local_sliding")
  )
  sliding_window_size: int = key(0, "local_sliding: tokens a position sees, itself included", minimum=0)
  inhomogeneous_layer_cycle_interval: int = key(
    1, "layers after which the pattern of unlike layers repeats; that many are stacked as one", minimum=1
  )
  use_qk_norm: bool = key(False, "RMSNorm of every query and key head before the rotation")
  num_experts: int = key(1, "experts of the feed-forward layer; 1 = a dense one", minimum=1, maximum=10**6)
  num_experts_per_tok: int = key(1, "experts that each token is sent to", minimum=1)
  base_moe_mlp_dim: int = key(-1, "width of one expert; -1 = base_mlp_dim", minimum=-1)
  norm_topk_prob: bool = key(True, "weights of a token's experts add up to 1; false = their share among all experts")
  load_balance_loss_weight: float = key(0.0, "weight of the router's load-balancing loss", minimum=0.0)
  sparse_matmul: bool = key(True, "multiply each token with its own experts only; false = with all, to compare")
  dropout_rate: float = key(0.0, "dropout on the residual branches", minimum=0.0, maximum=0.999)
  dtype: str = key("float32", "compute dtype", choices=("float32", "bfloat16", "float64"))
  weight_dtype: str = key("float32", "parameter dtype", choices=("float32", "bfloat16", "float64"))
  matmul_precision: str = key("default", "precision of matrix products", choices=("default", "high", "highest"))
  attention: str = key(
    "autoselected",
    "attention kernel: all scores at once; in blocks with memory linear in the length; splash on TPU and cuDNN on GPU; "
    "autoselected = blockwise on CPU and above 1,024 tokens, else dot_product",
    choices=("autoselected", "dot_product", "blockwise", "flash"),
  )
  scan_layers: bool = key(True, "stack the layers and run them with one lax.scan")
  remat_policy: str = key(
    "minimal",
    "what the backward pass recomputes: none saves all, minimal saves matmul outputs, full saves layer inputs only",
    choices=("none", "minimal", "full"),
  )
  segment_lengths: tuple[int, ...] = key(
    (),
    "layers per segment, or of segments within segments, outermost first; the backward pass keeps segment inputs only "
    "and recomputes inside; empty = off",
    minimum=1,
    maximum=MOST,
  )
  offload_to_host: tuple[str, ...] = key(
    (),
    "what waits in pinned host memory, one segment at a time on the device: weights and optimizer state of the stacked "
    "layers; carries = segment inputs of reverse_scan's validation rows",
    choices=("weights", "optimizer", "carries"),
  )
  z_loss_multiplier: float = key(0.0, "weight of the squared log-partition added to each token's loss", minimum=0.0)
  final_logits_soft_cap: float = key(0.0, "c: logits become c tanh(logits / c); 0 = no cap", minimum=0.0)
  num_vocab_tiling: int = key(1, "tiles of output projection and loss; 1/n of the logits exists at a time", minimum=1)
  vocab_tiling_axis: str = key(
    "tokens", "what num_vocab_tiling divides: the positions of a row, or the vocabulary", choices=("tokens", "vocab")
  )

  @property
  def stacked_segments(self) -> tuple[int, ...]:
    """`segment_lengths` in entries of the stack, each a cycle of unlike layers."""
    return tuple(length // self.inhomogeneous_layer_cycle_interval for length in self.segment_lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
  """What is read, how it is split, tokenized and packed."""

  dataset_type: str = key(
    "stdlib", "source of the documents", choices=("stdlib", "synthetic", "text", "tfds", "grain", "hf")
  )
  dataset_domains: tuple[str, ...] = key(
    (), "domains to train on; empty = all the source has (stdlib: code, docstrings, manual, tables)"
  )
  dataset_domain_bytes: int = key(
    -1,
    "cap on the bytes read per domain; 0 = no cap, -1 = 2,000,000 for stdlib and synthetic, else none",
    minimum=-1,
    maximum=10**15,
  )
  dataset_files: tuple[str, ...] = key(
    (),
    "domain=glob of files, ** goes down folders. text: .txt, .jsonl (.gz, .zst), .parquet; grain: ArrayRecord, .parquet"
    " or a prepared folder; hf: domain=dataset folder; tfds: domain=dataset/config:version",
  )
  dataset_path: str = key("", "tfds: folder of the datasets; empty = ~/tensorflow_datasets")
  train_split: str = key("train", "tfds, hf: split to train on")
  train_data_columns: tuple[str, ...] = key(("text",), "text columns of a record; several are joined by line ends")
  dataset_mixture: tuple[str, ...] = key(
    (),
    "domain=share of the rows (0.25) for each domain, or how often an epoch goes through it (2x); empty = every "
    "document once per epoch",
  )
  dataset_exclude_file: str = key(
    "", "JSON lines of document ids (domain, path, offset) to leave out of training, as `duplicates` writes them"
  )
  on_corrupt: str = key(
    "error", "a document or file that cannot be read ends the run, or is skipped and counted", choices=("error", "skip")
  )
  tokenizer_type: str = key("byte", "tokenizer", choices=("byte", "huggingface", "sentencepiece", "tiktoken"))
  tokenizer_path: str = key("", "tokenizer.json or its folder, SentencePiece model, or tiktoken encoding or file")
  max_target_length: int = key(256, "sequence length T, tokens per row", minimum=2)
  per_device_batch_size: int = key(8, "rows per device and step", minimum=1)
  packing: str = key(
    "first_fit",
    "several documents in a row: first_fit (or true) = cut a document only where it is longer than a row; "
    "concat_then_split = cut at row ends; none (or false) = one document in a row",
    choices=("first_fit", "concat_then_split", "none"),
  )
  max_segments_per_seq: int = key(-1, "documents a packed row can hold; -1 = one per 32 tokens, at most 32", minimum=-1)
  shuffle_window_bytes: int = key(
    8_388_608,
    "text read, shuffled and packed together; larger mixes better and takes more memory",
    minimum=1,
    maximum=10**15,
  )
  dataset_shards: int = key(
    1, "streams of documents; a multiple of the processes lets each read only its own", minimum=1
  )
  add_bos: bool = key(True, "put a begin-of-document token before each document")
  add_eos: bool = key(True, "put an end-of-document token after each document")
  grain_worker_count: int = key(
    0,
    "processes that read, tokenize and pack ahead of the training; 0 = a thread of the main process",
    minimum=0,
    maximum=4096,
  )
  ghost_val_sets: tuple[str, ...] = key(
    (),
    "validation sets, each scored apart: a domain, or name=domain, of which a share is held out; or name=glob of text "
    "files, held out in whole; empty = manual, for synthetic its first domain",
  )
  ghost_val_fraction: float = key(0.25, "share of the validation domain's documents held out", minimum=0.0, maximum=1.0)
  ghost_val_copies: str = key(
    "drop",
    "training documents byte-identical to a held-out one: leave out and report, keep and report, or an error",
    choices=("drop", "keep", "error"),
  )

  @property
  def validation_sets(self) -> dict[str, str]:
    """{name: domain} of the sets that are scored against."""
    first = (*self.dataset_domains, "words")[0] if self.dataset_type == "synthetic" else "manual"
    pairs = [text.partition("=") for text in self.ghost_val_sets or (first,)]
    return {name: name if _is_files(domain) else domain or name for name, _, domain in pairs}

  @property
  def validation_files(self) -> tuple[str, ...]:
    """The `name=glob` of the validation sets that are files of their own."""
    return tuple(text for text in self.ghost_val_sets if _is_files(text.partition("=")[2]))

  @property
  def mixture(self) -> str:
    """How an epoch is made: "proportional", by "weights" (shares of the rows), or by "epochs" (times per epoch)."""
    if not self.dataset_mixture:
      return "proportional"
    return "epochs" if self.dataset_mixture[0].endswith("x") else "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
  """AdamW or SGD and their schedule."""

  objective: str = key("next_token", "what the training steps minimise", choices=plugins.OBJECTIVE_NAMES)
  opt_type: str = key("adamw", "optimizer", choices=plugins.OPT_TYPES)
  learning_rate: float = key(1e-3, "peak learning rate", minimum=0.0)
  lr_schedule_type: str = key(
    "cosine", "cosine decay, or wsd = warmup, stable, decay", choices=("cosine", "wsd", "constant")
  )
  warmup_steps_fraction: float = key(0.2, "share of the steps spent warming up", minimum=0.0, maximum=1.0)
  wsd_decay_steps_fraction: float = key(0.1, "wsd: share of the steps spent decaying", minimum=0.0, maximum=1.0)
  learning_rate_final_fraction: float = key(0.1, "final over peak learning rate", minimum=0.0, maximum=1.0)
  adam_b1: float = key(0.9, "decay of the first moment", minimum=0.0, maximum=0.999999)
  adam_b2: float = key(0.95, "decay of the second moment", minimum=0.0, maximum=0.999999)
  adam_eps: float = key(1e-8, "added to the root of the second moment", minimum=0.0)
  adam_weight_decay: float = key(0.1, "decoupled weight decay", minimum=0.0)
  mu_dtype: str = key(
    "float32", "dtype of Adam's first moment; the second has that of the weights", choices=("float32", "bfloat16")
  )
  trainable_parameters_mask: tuple[str, ...] = key(
    (), "path patterns (fnmatch) of the parameters to train, the others stay as they are; empty = all"
  )
  gradient_accumulation_steps: int = key(1, "micro-batches of per_device_batch_size rows per step", minimum=1)
  gradient_clipping_threshold: float = key(1.0, "largest global gradient norm; 0 = no clipping", minimum=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GhostConfig:
  """Per-example scores: what is scored, along which direction."""

  ghost_enabled: bool = key(True, "score every training document in every step")
  ghost_schedule: str = key(
    "two_pass",
    "how validation and training share a step: one after the other, layer by layer in one walk back, in one batch; "
    "forward_mode = two passes without rules for layers",
    choices=plugins.RUN_SCHEDULES,
  )
  ghost_direction: str = key(
    "auto",
    "sgd = validation gradient, adam = through this step's AdamW preconditioner, auto = the optimizer's own, "
    "second_order = with half the curvature along the step, through the optimizer's preconditioner",
    choices=plugins.DIRECTIONS,
  )
  ghost_rank: int = key(0, "rank of the factors a direction is held in; 0 = exact", minimum=0)
  ghost_val_batch_size: int = key(2, "validation rows per step", minimum=1)
  ghost_val_refresh_steps: int = key(20, "steps between draws of new validation rows; 0 = keep the first", minimum=0)
  ghost_every: int = key(1, "score every this many steps; the steps between are plain training steps", minimum=1)
  ghost_val_every: int = key(1, "steps between validation gradients; scores use the newest", minimum=1)
  ghost_exclude: tuple[str, ...] = key((), "path patterns (fnmatch) of parameters left unscored on purpose")
  ghost_detail: str = key(
    "layer",
    "what is kept beside each document's total: nothing, contributions per module, per module and layer, or also per "
    "token",
    choices=("total", "module", "layer", "token"),
  )
  ghost_log_period: int = key(20, "steps per score file", minimum=1)
  ghost_select: str = key(
    "none",
    "train on rows chosen by their scores: the best (topk), above a threshold, the best together (greats: what two "
    "rows teach twice counts once); random and bottomk are for comparison",
    choices=("none", "topk", "threshold", "greats", "random", "bottomk"),
  )
  ghost_select_fraction: float = key(
    0.5,
    "share of the rows that ghost_select trains on; for threshold, of the mean absolute value of the step's rows; all "
    "rows are scored",
    minimum=0.0,
    maximum=1.0,
  )
  ghost_reweight: tuple[float, ...] = key(
    (),
    "[steps, size, floor]: every so many steps the shares in dataset_mixture follow the nats per token earned, by size "
    "(0.2) for the mean domain, none below floor (0.02); empty = never",
    minimum=0.0,
  )

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
    steps, size, floor = reweighting_parts(self.ghost_reweight)
    return int(steps), size, floor


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
  """Saving and resuming."""

  load_parameters_path: str = key(
    "",
    "start a new run from the parameters of this model: a run or a checkpoint of any layout (also MaxText's), an "
    "imported folder, or a Hugging Face folder; empty = from init_weights_seed",
  )
  checkpoint_period: int = key(
    100, "save every this many steps, and resume from the newest good checkpoint; 0 = no checkpoints", minimum=0
  )
  max_num_checkpoints_to_keep: int = key(2, "older checkpoints are removed; 0 = keep all", minimum=0)
  async_checkpointing: bool = key(True, "write checkpoints in the background")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
  """Many devices: the mesh, what is sharded how, several processes, compiling for absent hardware."""

  ici_data_parallelism: int = key(1, "devices of a slice that hold copies of the weights; -1 = the rest", minimum=-1)
  ici_fsdp_parallelism: int = key(-1, "devices of a slice that weights and rows are split over (ZeRO-3)", minimum=-1)
  ici_tensor_parallelism: int = key(1, "devices of a slice that heads, mlp and vocab are split over", minimum=-1)
  ici_context_parallelism: int = key(1, "devices of a slice that the positions of a row are split over", minimum=-1)
  ici_expert_parallelism: int = key(1, "devices of a slice that experts are split over; rows are too", minimum=-1)
  ici_stage_parallelism: int = key(1, "devices of a slice on mesh axis stage; a rule must use it", minimum=-1)
  dcn_data_parallelism: int = key(-1, "slices (joined by a slower network) that hold copies; -1 = the rest", minimum=-1)
  dcn_fsdp_parallelism: int = key(1, "slices that weights and rows are split over", minimum=-1)
  dcn_tensor_parallelism: int = key(1, "slices that heads, mlp and vocab are split over", minimum=-1)
  dcn_context_parallelism: int = key(1, "slices that the positions of a row are split over", minimum=-1)
  dcn_expert_parallelism: int = key(1, "slices that experts are split over", minimum=-1)
  dcn_stage_parallelism: int = key(1, "slices on mesh axis stage", minimum=-1)
  logical_axis_rules: tuple[tuple[str, tuple[str, ...]], ...] = key(
    (),
    "rows [logical axis, [mesh axes]] in place of the default rows of that axis (docs/multihost.md); a second row of "
    "an axis is used where a tensor has spent the first one's mesh axes",
  )
  override_logical_axis_rules: bool = key(False, "use logical_axis_rules alone, without the default rows")
  shard_optimizer_over_data: bool = key(False, "split the optimizer's moments over the data axes too (ZeRO-1)")
  sharding_tolerance: float = key(
    0.02, "how much more of the weights a device may hold than an even split gives it, as a share", minimum=0.0
  )
  jax_distributed: str = key(
    "auto",
    "several processes: HOST:PORT,K/N = process K of N, process 0 listens at HOST:PORT; auto = as JAX detects SLURM, "
    "Open MPI, Kubernetes, Cloud TPU; on = an error if none is found; off",
  )
  jax_distributed_timeouts: tuple[int, int] = key(
    (300, 100),
    "seconds within which all processes must have started, and after which one without a sign of life counts as lost",
    minimum=1,
    maximum=10**6,
  )
  compile_topology: str = key("", "train_compile: what to compile for, such as v5e-16, 2xv5e-16 (two slices) or cpu-8")
  compiled_trainstep_file: str = key("", "train_compile: file to save the compiled step in; empty = none")

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
  ghost: GhostConfig = GhostConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  parallel: ParallelConfig = ParallelConfig()

  def __post_init__(self):
    known = {f.name: f for part in self.sections() for f in dataclasses.fields(part)}
    problems = value_problems(self.flat(), known)
    if problems:
      raise ConfigError(*problems)

  def flat(self) -> dict[str, Any]:
    """Every key and its value, in the order of the sections."""
    return {f.name: getattr(part, f.name) for part in self.sections() for f in dataclasses.fields(part)}

  def sections(self) -> tuple:
    return tuple(getattr(self, name) for name in SECTIONS)


# name -> dataclass of every section
SECTIONS: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Config)}
