"""Checks across keys.

To add a check, write a function of the values and add it to `CHECKS`. It reads keys as attributes (`v.steps`), shows
them by `v["steps"]` (the text "steps=200"), and yields one line per problem: the keys with their values, the limit, and
values that work. A check ends at a key whose own value is wrong, so it may rely on types, bounds and choices.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import Field
from typing import Any

from maxghost.config import families, pipeline, plugins
from maxghost.config.values import WrongTypeError, divisors, from_python, limit_problems, shown

DISTRIBUTED = re.compile(r"(\S+:[0-9]+),([0-9]+)/([0-9]+)")  # jax_distributed=HOST:PORT,K/N
BYTE_IDS = 259  # 256 bytes, and the begin, end and padding ids
# Outermost first: axes that split rows vary slowest, so that a process holds whole rows; tensor, which communicates
# most, varies fastest.
MESH_AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")
ROUNDED = ("int8", "fp8", "int8_stochastic", "fp8_stochastic")  # values of `quantization` for training
INT8_TERMS = 2**31 // 127**2  # products of int8 whose sum always fits in int32


class UnsoundError(LookupError):
  """A check read a key whose own value is wrong."""


class Values:
  """The valid values by key. Reading a key whose own value is wrong raises UnsoundError, which ends the check."""

  def __init__(self, values: dict[str, Any]):
    vars(self).update(values)

  def __getattr__(self, name: str) -> Any:
    raise UnsoundError(name)

  def __getitem__(self, name: str) -> str:
    """`name=value`, as a user writes it."""
    return f"{name}={shown(getattr(self, name))}"


def heads(v: Values) -> Iterator[str]:
  num_heads, num_kv = v.base_num_query_heads, v.base_num_kv_heads
  if num_heads % num_kv:
    down = num_heads - num_heads % num_kv
    more = f"{down} or {down + num_kv}" if down else str(num_kv)
    use = f"use base_num_query_heads={more}, or base_num_kv_heads={' or '.join(map(str, divisors(num_heads)))}"
    yield f"{v['base_num_query_heads']} is not a multiple of {v['base_num_kv_heads']}; {use}"


def qk_clip(v: Values) -> Iterator[str]:
  if not v.use_qk_clip:
    return
  given = v["use_qk_clip"]
  if v.use_qk_norm:
    yield f"{given} scales queries and keys, which use_qk_norm=true normalizes afterwards; use one of the two"
  if v.attn_logits_soft_cap:
    yield f"{given} bounds attention logits, as {v['attn_logits_soft_cap']} does already; use one of the two"
  if "weights" in v.offload_to_host:
    yield f"{given} scales weights after the step, but {v['offload_to_host']} has them in host memory by then; use one"
  if v.trainable_parameters_mask:
    yield f"{given} would scale weights that {v['trainable_parameters_mask']} keeps as they are; use one of the two"


def rotary(v: Values) -> Iterator[str]:
  if v.head_dim % 2 and v.rope_type != "none":
    yield f"{v['head_dim']} is odd, but the rotary embedding turns pairs; use {v.head_dim + 1}"
  if v.rope_type in ("llama3.1", "yarn") and v.rope_factor == 1.0:
    yield f"{v['rope_type']} with rope_factor=1.0 stretches nothing; set rope_factor, or rope_type=default"
  if v.rope_type == "llama3.1" and v.rope_high_freq_factor <= v.rope_low_freq_factor:
    yield f"{v['rope_high_freq_factor']} must be more than {v['rope_low_freq_factor']}; Llama 3.1 has 4.0 and 1.0"
  if v.rope_type == "yarn" and v.beta_fast <= v.beta_slow:
    yield f"{v['beta_fast']} must be more than {v['beta_slow']}; YaRN has 32.0 and 1.0"


def mlp_activations(v: Values) -> Iterator[str]:
  if len(v.mlp_activations) not in (1, 2):
    given = f"{v['mlp_activations']} has {len(v.mlp_activations)} names"
    yield f"{given}; use two, of the branches gate and up, such as [silu, linear], or one, such as [gelu]"


def sizes(v: Values) -> Iterator[str]:
  if v.tokenizer_type == "byte" and v.vocab_size < BYTE_IDS:
    yield f"{v['vocab_size']} is too small for tokenizer_type=byte, which has {BYTE_IDS} ids; use {BYTE_IDS} or more"
  if 0 <= v.trainable_position_size < v.max_target_length:
    shorter = f"max_target_length={v.trainable_position_size} or less, " if v.trainable_position_size > 1 else ""
    use = f"{v.max_target_length} or more, {shorter}or -1 for no table"
    yield f"{v['trainable_position_size']} is less than {v['max_target_length']}; use {use}"
  tiled = "max_target_length" if v.vocab_tiling_axis == "tokens" else "vocab_size"
  if v.num_vocab_tiling > (size := getattr(v, tiled)):
    yield f"{v['num_vocab_tiling']} with {v['vocab_tiling_axis']} is more than {v[tiled]}; use at most {size}"


def layer_cycle(v: Values) -> Iterator[str]:
  num_layers, cycle, types = v.base_num_decoder_layers, v.inhomogeneous_layer_cycle_interval, v.attention_type
  every = v["inhomogeneous_layer_cycle_interval"]
  if num_layers % cycle:
    use = " or ".join(str(num_layers // cycle * cycle + more) for more in (0, cycle)).removeprefix("0 or ")
    yield f"{v['base_num_decoder_layers']} is not a multiple of {every}; use {use} layers"
  if len(types) not in (1, cycle):
    yield f"{v['attention_type']} has {len(types)} entries; give one, or one for each of the {every} layers of a cycle"
  if "local_sliding" in types and v.sliding_window_size < 1:
    yield "attention_type=local_sliding needs sliding_window_size, the number of tokens a position sees, such as 128"
  if "local_sliding" not in types and v.sliding_window_size:
    use = "set attention_type, or sliding_window_size=0"
    yield f"{v['sliding_window_size']} is read by attention_type=local_sliding only, not by {shown(types)}; {use}"


def experts(v: Values) -> Iterator[str]:
  if v.num_experts_per_tok > v.num_experts:
    yield f"{v['num_experts_per_tok']} is more than {v['num_experts']}; use {v.num_experts} or less"
  if v.base_moe_mlp_dim == 0:
    yield "base_moe_mlp_dim=0 is no width; use -1 for that of base_mlp_dim, or a positive one"
  if v.num_experts == 1 and v.load_balance_loss_weight:
    yield f"{v['load_balance_loss_weight']} balances experts, but num_experts=1; use load_balance_loss_weight=0.0"


def quantization(v: Values) -> Iterator[str]:
  if v.quantization not in ROUNDED:
    return
  given = v["quantization"]
  if v.lora_rank:
    yield f"{given} is for trained weights; use quantization='', and lora_weight_qtype=int8 below {v['lora_rank']}"
  terms = -(-v.vocab_size // (v.num_vocab_tiling if v.vocab_tiling_axis == "vocab" else 1))
  if v.quantization.startswith("int8") and terms > INT8_TERMS:
    least, room = -(-v.vocab_size // INT8_TERMS), f"int32 holds {INT8_TERMS} int8 products"
    way = f"num_vocab_tiling={least} with vocab_tiling_axis=vocab, or quantization=fp8"
    yield f"{given} sums over {terms} of the {v['vocab_size']} words, and {room}; use {way}"
  if v.num_experts > 1 and not v.sparse_matmul:
    yield f"{given} multiplies tokens with their own experts; use sparse_matmul=true, not false"


def multi_token(v: Values) -> Iterator[str]:
  if not v.mtp_num_layers:
    return
  given, able = v["mtp_num_layers"], ("next_token", "sft")
  if v.objective not in able:
    instead = f"mtp_num_layers=0, or objective={' or '.join(able)}"
    yield f"{given} predicts text, which {v['objective']} does not; use {instead}"
  if v.use_qk_clip:
    yield f"{given} adds layers that {v['use_qk_clip']} would not clip; use one of the two"
  if v.lora_rank:
    yield f"{given} adds modules that {v['lora_rank']} would not train; use mtp_num_layers=0"
  if v.mtp_num_layers >= v.max_target_length:
    yield f"{given} looks further than a row of {v['max_target_length']}; use {v.max_target_length - 1} or less"


def segments(v: Values) -> Iterator[str]:
  if not (levels := v.segment_lengths):
    return
  given = v["segment_lengths"] if len(levels) > 1 else f"segment_lengths={levels[0]}"
  if not v.scan_layers:
    yield f"{given} cuts stacked layers into segments; use scan_layers=true, or no segments"
  whole, name, cycle = v.base_num_decoder_layers, v["base_num_decoder_layers"], v.inhomogeneous_layer_cycle_interval
  if whole % cycle:
    return  # `layer_cycle` reports it
  for length in levels:
    choices = [cycle * k for k in divisors(whole // cycle)]
    if length not in choices:
      which = f": {length}" if len(levels) > 1 else ""
      unlike = f" into whole cycles of {cycle} unlike layers" if cycle > 1 else ""
      yield f"{given}{which} does not divide {name}{unlike}; use one of {', '.join(map(str, choices))}"
      return
    whole, name = length, f"the segment of {length} around it"


def offloading(v: Values) -> Iterator[str]:
  given, rule, micro_batches = v["offload_to_host"], plugins.OPTIMIZERS[v.opt_type], v.gradient_accumulation_steps
  if v.enable_diloco or v.ici_stage_parallelism * v.dcn_stage_parallelism != 1:
    return  # refused as a whole by `slices_apart` or `pipeline.check`: no advice on what else it would need
  if "carries" in v.offload_to_host and (v.ghost_schedule != "reverse_scan" or not v.segment_lengths):
    yield f"{given}: carries needs ghost_schedule=reverse_scan and segment_lengths; leave it out"
  if set(v.offload_to_host) <= {"carries", "val_gradient"}:
    return
  if not rule.by_segment:
    yield f"{given} updates by segments, which {v['opt_type']} cannot; use offload_to_host=[], or another opt_type"
  if not v.segment_lengths:
    near = min(divisors(v.base_num_decoder_layers), key=lambda k: abs(k * k - v.base_num_decoder_layers))
    fix = f"give segment_lengths, such as {near}" if v.scan_layers else "use scan_layers=true and segment_lengths"
    yield f"{given} moves one segment of layers at a time; {fix}"
  trained = not v.lora_rank or "optimizer" in v.offload_to_host  # beside frozen weights, adapters stay on the device
  if v.ghost_enabled and trained and "offload" in plugins.SCHEDULE_LACKS[v.ghost_schedule]:
    instead = f"ghost_schedule=reverse_scan, not {v.ghost_schedule}, or ghost_enabled=false"
    yield f"{given} forms directions one segment at a time; use {instead}"
  if v.sample_every and "weights" in v.offload_to_host:
    yield f"{v['sample_every']} wants the weights on the device; use sample_every=0 with {given}"
  if micro_batches > 1 and "weights" in v.offload_to_host and not v.lora_rank:
    yield f"{given} sends gradients to the host once per step; use gradient_accumulation_steps=1, not {micro_batches}"


def gradient_on_host(v: Values) -> Iterator[str]:
  asked = {  # that neither the training pass nor a later step needs the whole validation gradient
    "ghost_enabled": (v.ghost_enabled, "true"), "ghost_schedule": (v.ghost_schedule == "two_pass", "two_pass"),
    "ghost_direction": (v.ghost_direction == "sgd", "sgd"), "ghost_rank": (v.ghost_rank > 0, "32"),
    "ghost_curvature": (v.ghost_curvature == "none", "none"), "ghost_val_every": (v.ghost_val_every == 1, "1"),
    "ghost_select": (v.ghost_select == "none", "none"), "use_qk_clip": (not v.use_qk_clip, "false"),
  }  # fmt: skip
  wrong = {v[key]: f"{key}={use}" for key, (holds, use) in asked.items() if not holds}
  if wrong and "val_gradient" in v.offload_to_host:
    needs = f"{v['offload_to_host']}: the step needs val_gradient on the device with {', '.join(wrong)}"
    yield f"{needs}; use {' '.join(wrong.values())}, or leave it out"


def mixture(v: Values) -> Iterator[str]:
  given = v["dataset_mixture"]
  if any("=" not in text for text in v.dataset_mixture):
    yield f"{given} is not of the form [a=0.25,b=0.75] for shares of the rows, or [a=2x,b=1x] for passes per epoch"
  if len({text.endswith("x") for text in v.dataset_mixture}) > 1:
    yield f"{given} mixes shares of the rows (0.25) with passes per epoch (2x); use one kind for all domains"


def processes(v: Values) -> Iterator[str]:
  if v.jax_distributed in ("auto", "on", "off"):
    return
  found, given = DISTRIBUTED.fullmatch(v.jax_distributed), v["jax_distributed"]
  if not found or not 0 < int(found[1].rpartition(":")[2]) < 2**16 or not int(found[3]):
    yield f"{given} is not auto, on, off or HOST:PORT,K/N (process K, from 0, of N), such as 10.0.0.1:1234,0/2"
  elif int(found[2]) >= int(found[3]):
    yield f"{given} calls this process {found[2]}, but of {found[3]} the numbers are 0 to {int(found[3]) - 1}"


def mesh_sizes(v: Values) -> Iterator[str]:
  for group in ("ici", "dcn"):
    names = {f"{group}_{axis}_parallelism": getattr(v, f"{group}_{axis}_parallelism") for axis in MESH_AXES}
    for name in (name for name, size in names.items() if size == 0):
      yield f"{name}=0 leaves no devices; use 1 to leave the axis out, or -1 for what the others leave"
    filled = [name for name, size in names.items() if size == -1]
    if len(filled) > 1:
      given = " and ".join(f"{name}=-1" for name in filled)
      yield f"{given}: only one key of a group can take what the others leave; give {filled[0]} a number"


def periods(v: Values) -> Iterator[str]:
  if v.eval_interval == 0:
    yield "eval_interval=0 is no interval; use -1 for never, or the number of steps between evaluations"
  if v.profiler and v.steps < (least := v.skip_first_n_steps_for_profiler + 3):  # one runs when the trace begins
    yield f"{v['profiler']} after {v['skip_first_n_steps_for_profiler']} traces none of {v['steps']}; use steps={least}"
  if v.lr_schedule_type == "wsd" and v.warmup_steps_fraction + v.wsd_decay_steps_fraction > 1:
    use = f"use wsd_decay_steps_fraction={shown(round(1 - v.warmup_steps_fraction, 6))} or less"
    yield f"{v['warmup_steps_fraction']} and {v['wsd_decay_steps_fraction']} together exceed 1; {use}"
  period, durable = v.local_checkpoint_period, v.checkpoint_period
  if bool(period) != bool(v.local_checkpoint_directory):
    where = "a folder on a disk of each machine, or in its memory (/dev/shm)"
    yield f"{v['local_checkpoint_period']} and {v['local_checkpoint_directory']}: give both, {where}"
  elif period and not period < durable:
    fix = f"use local_checkpoint_period={durable // 10 or 1}" if durable > 1 else "use checkpoint_period=100"
    yield f"{v['local_checkpoint_period']} must be smaller than {v['checkpoint_period']}, which is durable; {fix}"


def plugins_together(v: Values) -> Iterator[str]:
  rule = plugins.OPTIMIZERS[v.opt_type]
  direction, _ = plugins.directed(v.ghost_direction, v.ghost_curvature)
  if v.ghost_enabled:
    if problem := plugins.direction_problem(direction, v.opt_type):
      yield problem
    if direction not in ("auto", "sgd", *plugins.OF_STEP, rule.direction):
      offering = [name for name, other in plugins.OPTIMIZERS.items() if other.direction == direction]
      use = f"use ghost_direction={'auto or sgd' if rule.direction else 'sgd'}, or opt_type={' or '.join(offering)}"
      yield f"{v['ghost_direction']} contradicts {v['opt_type']}: it goes through another optimizer's update; {use}"
    named = ", ".join(v[key] for key in plugins.KINDS)
    for key, known in plugins.KINDS.items():
      if not (plugin := known[getattr(v, key)]).takes(v.ghost_schedule):
        taken = plugin.schedules
        some = f"works with {', '.join(taken)}; use ghost_schedule={taken[0]}" if taken else ""
        way = some or "has no scores; use ghost_enabled=false"
        yield f"{named} and {v['ghost_schedule']} do not go together: {v[key]} {way}, or another {key}"
  if v.ghost_select == "greats" and not rule.elementwise:
    wanted = "compares rows by an elementwise update"
    yield f"ghost_select=greats {wanted}, which {v['opt_type']} has not; use ghost_select=topk or threshold"


def objective_units(v: Values) -> Iterator[str]:
  if (rows := plugins.OBJECTIVES[v.objective].rows_per_unit) == 1:
    return
  what = f"{v['objective']} makes a unit of {rows} adjacent rows"
  for name in ("per_device_batch_size", *(("ghost_val_batch_size",) if v.ghost_enabled else ())):
    if (size := getattr(v, name)) % rows:
      yield f"{what}, which {name}={size} would part; use {name}={size - size % rows + rows}"
  if v.ghost_select != "none":
    yield f"{what}, and {v['ghost_select']} chooses single rows; use ghost_select=none"


def conversations(v: Values) -> Iterator[str]:
  own, used = plugins.OBJECTIVES[v.objective], plugins.objectives_of(v.objective, v.ghost_val_sets)
  if v.chat_template_path and all(one.records == "text" for one in used):
    yield f"{v['chat_template_path']} is for conversations, but {v['objective']} reads plain text; use objective=sft"
  if own.records != "text" and not own.samples and v.packing == "concat_then_split":
    yield f"{v['packing']} cuts {own.records} at row ends, but {v['objective']} keeps them whole; use packing=first_fit"


def preferences(v: Values) -> Iterator[str]:
  """The keys of objectives on pairs, and what their reference needs."""
  algo, smoothing = v.dpo_algo, v.dpo_label_smoothing
  if v.objective in plugins.OF_VALIDATION:
    yield f"{v['objective']} has no least value, so it is of validation sets alone: ghost_val_sets=[name=domain@margin]"
  if smoothing and algo not in (able := ("sigmoid", "robust", "simpo")):
    yield f"{v['dpo_label_smoothing']} is not part of {v['dpo_algo']}; use 0.0, or dpo_algo={' or '.join(able)}"
  used = [one for one in plugins.objectives_of(v.objective, v.ghost_val_sets) if not one.samples]
  if v.z_loss_multiplier and any(one.rows_per_unit > 1 for one in used):
    yield f"{v['z_loss_multiplier']} would change the log-probabilities that pairs compare; use z_loss_multiplier=0.0"
  columns = [name for name in plugins.REFERENCE_COLUMNS if name in v.train_data_columns]
  if len(columns) == 1:
    yield f"{v['train_data_columns']} has {columns[0]} alone; name both of {', '.join(plugins.REFERENCE_COLUMNS)}"
  if columns or algo in plugins.WITHOUT_REFERENCE or not any(one.reference == "start" for one in used):
    return
  way = f"use {' or '.join(f'dpo_algo={name}' for name in plugins.WITHOUT_REFERENCE)}, or data with the columns "
  way += ", ".join(plugins.REFERENCE_COLUMNS)
  if v.load_full_state_path:
    yield f"load_full_state_path does not say with which parameters that run began, its reference; {way}"
  if "weights" in v.offload_to_host and not v.lora_rank:
    yield f"{v['offload_to_host']} has no room in host memory for the reference of {v['dpo_algo']}; {way}"


def rollouts(v: Values) -> Iterator[str]:
  """What sampling from the model in training asks of the other keys."""
  sampling = {name for name, one in plugins.OBJECTIVES.items() if one.samples}
  if any(plugins.without_objective(text)[1] in sampling for text in v.ghost_val_sets):
    yield f"{v['ghost_val_sets']}: answers are sampled in training alone; use @sft, the loss of gold answers"
  if v.objective not in sampling:
    return
  given, rows = v["objective"], v.per_device_batch_size
  own = {"prompt", "prompts", "completion", "completions", "answers"}  # of rollouts.jsonl and of reward functions
  for name in sorted(own & {text.partition("=")[0] for text in v.document_fields}):
    yield f"document_fields={name}: {given} has a column of this name; give the field another: own_name={name}"
  if rows % v.num_generations:
    yield f"per_device_batch_size={rows} parts groups of {v['num_generations']}; use {rows + -rows % v.num_generations}"
  if v.max_completion_length >= v.max_target_length:
    most = v.max_target_length - 1
    yield f"{v['max_completion_length']} leaves no room for a prompt in {v['max_target_length']}; use {most} or less"
  if len(v.reward_weights) not in (0, len(v.reward_functions)) or not v.reward_functions:
    yield f"{v['reward_weights']} and {v['reward_functions']}: name a function or more, and a weight for each or none"
  if twice := [name for name in v.reward_functions if v.reward_functions.count(name) > 1]:
    yield f"reward_functions names {twice[0]} twice; name it once, with its weight in reward_weights"
  if v.ghost_reweight and v.num_iterations > 1:
    yield f"{v['ghost_reweight']} draws for every step, and {v['num_iterations']} samples less often; use one of them"
  for key in ("z_loss_multiplier", "dropout_rate", "lora_dropout"):
    if getattr(v, key) and (v.lora_rank or key != "lora_dropout"):
      yield f"{v[key]} would change the log-probabilities of answers; use {key}=0.0"
  if v.decode_sampling_temperature != 1 and v.num_vocab_tiling > 1:
    yield f"{v['decode_sampling_temperature']} does not go with {v['num_vocab_tiling']}; use 1.0, or num_vocab_tiling=1"
  if not v.sft_train_on_completion_only:
    yield f"{given} asks for where answers begin; use sft_train_on_completion_only=true"
  if v.opt_type in ("adamw", "muon") and v.adam_eps < 1e-10:
    yield f"{given} gives answers that teach nothing a tiny gradient, which {v['adam_eps']} enlarges; use 1e-10 or more"
  for key, only in (("packing", "none"), ("ghost_select", "none"), ("ghost_detail", "layer"), ("offline_data_dir", "")):
    if getattr(v, key) != only and (key != "ghost_detail" or v.ghost_detail == "token"):
      yield f"{v[key]} does not go with {given}, whose rows are single answers; use {key}={only or chr(39) * 2}"
  if "weights" in v.offload_to_host:
    yield f"{v['offload_to_host']} does not go with {given}, which samples with the weights on the device"
  if v.grpo_beta and v.load_full_state_path:
    yield f"load_full_state_path does not say with which parameters that run began, the reference of {v['grpo_beta']}"


def distillation(v: Values) -> Iterator[str]:
  kinds = {one.reference for one in plugins.objectives_of(v.objective, v.ghost_val_sets)} - {""}
  if len(kinds) > 1 and not v.offline_data_dir:
    yield f"{v['objective']} and {v['ghost_val_sets']} want several frozen models; use one, or offline_data_dir"
  if "teacher" not in kinds:
    for name in ("distill_teacher", "offline_data_dir"):
      if getattr(v, name):
        yield f"{v[name]} is for objective=distill, not {v['objective']}; leave it out"
    return
  if not v.distill_teacher and not v.offline_data_dir:
    way = "or offline_data_dir, a folder of maxghost distill-logits"
    yield f"objective=distill needs distill_teacher, a run, a checkpoint or a Hugging Face folder, {way}"
  if v.offline_data_dir and v.ghost_reweight:
    yield f"{v['offline_data_dir']} holds rows in a known order, which {v['ghost_reweight']} changes; use one of them"
  if v.num_vocab_tiling > 1:
    yield f"objective=distill compares whole distributions; use num_vocab_tiling=1, not {v.num_vocab_tiling}"
  if v.distill_top_k > v.vocab_size:
    yield f"{v['distill_top_k']} is more than {v['vocab_size']}; use 0 for the whole vocabulary"
  if "weights" in v.offload_to_host and not v.offline_data_dir:
    yield f"{v['offload_to_host']} does not go with objective=distill, whose teacher is on the device"


def validation_sets(v: Values) -> Iterator[str]:
  given = [plugins.without_objective(text) for text in v.ghost_val_sets]
  names = [text.partition("=")[0] for text, _ in given]
  records = plugins.OBJECTIVES[v.objective].records
  for text, name in dict.fromkeys(pair for pair in given if pair[1]):
    said = f"ghost_val_sets={text}@{name}"
    if (one := plugins.OBJECTIVES.get(name)) is None:
      yield f"{said} asks for the objective {name}; use {' or '.join(plugins.OBJECTIVES)}"
    elif one.records != records and not plugins.is_files(text.partition("=")[2]):
      yield f"{said} reads {one.records}, but the domains have {records}; give files of its own: name=glob@{name}"
    elif not one.takes(v.ghost_schedule):
      yield f"{said}: objective {name} works with {', '.join(one.schedules)}, not {v['ghost_schedule']}"
    elif (size := v.ghost_val_batch_size) % one.rows_per_unit:
      near = f"use ghost_val_batch_size={size - size % one.rows_per_unit + one.rows_per_unit}"
      yield f"{said}: {name} has units of {one.rows_per_unit} rows, which {size} rows would part; {near}"
  if "" in names:
    yield f"{v['ghost_val_sets']} has a set without a name; write name=domain"
  for name in sorted({name for name in names if names.count(name) > 1}):
    yield f"{v['ghost_val_sets']} names '{name}' twice; give each set its own name"
  of_domains = not given or not all(plugins.is_files(text.partition("=")[2]) for text, _ in given)
  if v.ghost_enabled and of_domains and v.ghost_val_fraction in (0.0, 1.0):
    lacking = "validation documents to score against" if v.ghost_val_fraction == 0.0 else "documents of it to train on"
    without = "" if v.ghost_select != "none" or v.ghost_reweight else ", or ghost_enabled=false"  # which these need
    yield f"{v['ghost_val_fraction']} leaves no {lacking}, but ghost_enabled=true; use a share such as 0.25{without}"


def scoring(v: Values) -> Iterator[str]:
  """What the run's schedule lacks (`plugins.SCHEDULE_LACKS`), and scores that several steps share."""
  direction, curvature = plugins.directed(v.ghost_direction, v.ghost_curvature)
  rule, loss = plugins.OPTIMIZERS[v.opt_type], plugins.OBJECTIVES[v.objective]
  plain = rule.direction == "sgd" and direction in ("auto", *plugins.OF_STEP)
  early = curvature == "hessian" or direction == "sgd" or plain
  if v.ghost_enabled and v.opt_type == "adamw" and v.adam_weight_decay * v.learning_rate >= 1:
    most = f"use adam_weight_decay below {1 / v.learning_rate:.3g}, or ghost_enabled=false"
    yield f"{v['adam_weight_decay']} at {v['learning_rate']} leaves nothing of a parameter for the ledger; {most}"
  key, none = ("ghost_direction", "auto") if v.ghost_direction == "second_order" else ("ghost_curvature", "none")
  if v.ghost_every > 1 and v.ghost_val_every > 1:
    given = f"{v['ghost_every']} already computes the validation gradient every {v.ghost_every} steps"
    yield f"{given}; use ghost_val_every=1, not {v.ghost_val_every}"
  if v.ghost_direction == "second_order" and v.ghost_curvature == "secant":
    yield f"{v['ghost_direction']} means ghost_curvature=hessian; use ghost_direction=auto for ghost_curvature=secant"
  if curvature == "hessian" and v.ghost_val_every > 1:
    yield f"{v[key]} needs this step's curvature; use ghost_val_every=1, not {v.ghost_val_every}"
  streamed = v.ghost_enabled and v.lora_rank > 0 and "weights" in v.offload_to_host  # without adapters: `offloading`
  twice = [(key, none)] * (curvature == "hessian") + [("ghost_select", "topk")] * (v.ghost_select == "greats")
  once = [("quantization", "''")] * (v.quantization in ROUNDED) + [("offload_to_host", "[]")] * streamed
  for (asks, use), (lacks, off) in itertools.product(twice, once):
    yield f"{v[asks]} takes second derivatives, which {v[lacks]} has not; use {asks}={use}, or {lacks}={off}"
  own = loss.validated_by or v.objective
  own_losses = any((plugins.without_objective(text)[1] or own) != v.objective for text in v.ghost_val_sets or ("",))
  clips, drops = direction == "marginal" and v.gradient_clipping_threshold > 0, v.ghost_enabled and v.dropout_rate > 0
  asked = {
    "rank": (v.ghost_rank > 0, "ghost_rank", "0"), "early_rank": (v.ghost_rank > 0 and early, "ghost_rank", "0"),
    "sets": (len(v.ghost_val_sets) > 1, "ghost_val_sets", "one set"),
    "own_losses": (own_losses and v.ghost_schedule in loss.schedules, "ghost_val_sets", "sets without @objective"),
    "hessian": (curvature == "hessian", key, none), "secant": (curvature == "secant", key, none),
    "val_every": (v.ghost_val_every > 1, "ghost_val_every", "1"),
    "accumulation": (v.gradient_accumulation_steps > 1, "gradient_accumulation_steps", "1"),
    "mask": (bool(v.trainable_parameters_mask), "trainable_parameters_mask", "[]"),
    "adapters": (v.ghost_enabled and v.lora_rank > 0, "lora_rank", "0"),
    "selection": (v.ghost_select != "none", "ghost_select", "none"),
    "unstacked": (not v.scan_layers, "scan_layers", "true"), "dropout": (drops, "dropout_rate", "0.0"),
    "qk_clip": (v.ghost_enabled and v.use_qk_clip, "use_qk_clip", "false"),
    "balance": (v.ghost_enabled and v.load_balance_loss_weight > 0, "load_balance_loss_weight", "0.0"),
    "further_tokens": (v.ghost_enabled and v.mtp_num_layers > 0, "mtp_num_layers", "0"),
    "tiles": (v.ghost_enabled and v.num_vocab_tiling > 1, "num_vocab_tiling", "1"),
    "clipping": (v.ghost_enabled and clips, "ghost_direction", "path"),
    "rounding": (v.ghost_enabled and v.quantization in ROUNDED, "quantization", "''"),
    "streamed": (streamed, "offload_to_host", "[]"),
    "offload": (v.ghost_schedule == "reverse_scan" and v.offload_to_host, "offload_to_host", "[]"),  # and `offloading`
  }  # fmt: skip
  names = {name: f"ghost_schedule={name}" for name in plugins.RUN_SCHEDULES}
  named = {want: (asks, v[key], use if " " in use else f"{key}={use}") for want, (asks, key, use) in asked.items()}
  yield from plugins.scoring_problems(v.ghost_schedule, names, named)


def selection(v: Values) -> Iterator[str]:
  given, micro_batches = v["ghost_select"], v.gradient_accumulation_steps
  if v.ghost_select == "none":
    return
  if not v.ghost_enabled:
    yield f"{given} chooses by scores; use ghost_enabled=true, or ghost_select=none"
  if v.ghost_direction == "second_order" or v.ghost_curvature == "hessian":
    use = "direction=auto or sgd" if v.ghost_direction == "second_order" else "curvature=secant or none"
    yield f"{given} chooses before the step is known; use ghost_{use}"
  if micro_batches > 1:
    yield f"{given} chooses among a whole batch's rows; use gradient_accumulation_steps=1, not {micro_batches}"
  if v.ghost_every > 1:
    yield f"{given} needs the scores of every step; use ghost_every=1, not {v.ghost_every}"
  if v.ghost_select != "threshold" and v.ghost_select_fraction == 0.0:
    yield "ghost_select_fraction=0.0 leaves no row to train on; use a share such as 0.5"


def reweighting(v: Values) -> Iterator[str]:
  if not v.ghost_reweight:
    return
  given, num_domains = v["ghost_reweight"], len(v.dataset_mixture)
  steps, _, floor, *_ = plugins.reweighting_parts(v.ghost_reweight)
  if len(v.ghost_reweight) > 3 or steps < 1 or steps % 1:
    yield f"{given} is not [steps, size, floor], such as [20, 0.2, 0.02]; empty = never"
  if not v.ghost_enabled:
    yield f"{given} follows the scores; use ghost_enabled=true, or no ghost_reweight"
  if not num_domains or v.dataset_mixture[0].endswith("x"):
    yield f"{given} changes the domains' shares of the rows; give shares to start from, dataset_mixture=[a=0.5,b=0.5]"
  if num_domains and floor * num_domains > 1:
    most = f"{1 / num_domains:.3g}"
    yield f"{given}: a floor of {shown(floor)} for {num_domains} domains is more than all rows; use {most} or less"


def low_rank_adapters(v: Values) -> Iterator[str]:
  given = v["lora_rank"]
  if not v.lora_rank:
    for name in ("lora_weight_qtype", "lora_restore_path"):
      if getattr(v, name):
        yield f"{v[name]} is read beside adapters; set lora_rank, such as 8, or leave {name} empty"
    return
  if v.load_full_state_path:
    yield f"{given} has a state of its own; use load_parameters_path for the base, and lora_restore_path for adapters"
  try:
    re.compile(v.lora_module_path)
  except (re.error, OverflowError, RecursionError) as error:
    yield f"lora_module_path='{v.lora_module_path}' is not a regular expression ({error})"
  if v.trainable_parameters_mask:
    yield f"{given} trains adapters alone; use trainable_parameters_mask=[], and lora_module_path for their layers"
  if v.use_qk_clip:
    yield f"{given} keeps the weights of queries and keys, which use_qk_clip=true scales; use one of the two"


def given_model(v: Values) -> Iterator[str]:
  if v.load_full_state_path and v.load_parameters_path:
    yield "load_full_state_path reads the parameters too; leave load_parameters_path empty"
  if v.load_full_state_path and v.ghost_reweight:
    yield f"{v['ghost_reweight']} needs the shares of all earlier steps, which load_full_state_path does not have"
  if v.load_full_state_path and v.ghost_curvature == "secant":
    yield f"{v['ghost_curvature']} needs the last step's validation gradient, which load_full_state_path does not have"


def slices_apart(v: Values) -> Iterator[str]:
  """DiLoCo: its slices, its periods, and what cannot be trained in slices apart."""
  if not v.enable_diloco:
    return
  given, period, steps = v["enable_diloco"], v.diloco_sync_period, v.num_communication_overlapping_steps
  if v.dcn_data_parallelism < 2:
    one = f"{given} trains slices apart, but {v['dcn_data_parallelism']} names no second one"
    yield f"{one}; give dcn_data_parallelism the number of slices, 2 or more"
  most = min(v.base_num_decoder_layers // v.inhomogeneous_layer_cycle_interval, period)
  if v.num_diloco_fragments > most:
    why = f"each needs a layer, and a step of {v['diloco_sync_period']}"
    yield f"{v['num_diloco_fragments']} is too many: {why}; use {most} or less"
  if v.num_diloco_fragments > 1 and not v.scan_layers:
    yield f"{v['num_diloco_fragments']} parts stacked layers; use scan_layers=true, or num_diloco_fragments=1"
  if steps >= period:
    waits = f"{v['num_communication_overlapping_steps']} is not less than {v['diloco_sync_period']}"
    yield f"{waits}: the next outer step would come before this one; use {period - 1} or less"
  if "slice" in v.document_fields:
    yield f"{given} records the slice of each row as 'slice', which {v['document_fields']} names too; rename the field"
  frozen = any(one.reference for one in plugins.objectives_of(v.objective, v.ghost_val_sets))
  refused = {
    "lora_rank": (v.lora_rank > 0, "keeps a frozen model in each slice", "0"),
    "num_experts": (v.num_experts > 1, "sends routing between the slices in every step", "1"),
    "dropout_rate": (v.dropout_rate > 0, "would draw the same masks in every slice", "0.0"),
    "offload_to_host": (bool(v.offload_to_host), "moves one model, not one for each slice", "[]"),
    "objective": (frozen, "has a frozen model", "next_token or sft"),
    "load_full_state_path": (bool(v.load_full_state_path), "has no state of slices", "'', and load_parameters_path"),
    "ghost_select": (v.ghost_enabled and v.ghost_select != "none", "chooses rows of one model", "none"),
    "ghost_curvature": (v.ghost_enabled and v.ghost_curvature == "secant", "compares steps across outer ones", "none"),
    "ghost_val_every": (v.ghost_enabled and v.ghost_val_every > 1, "scores across outer steps", "1"),
  }  # fmt: skip
  for key, (asks, why, instead) in refused.items():
    if asks:
      yield f"{v[key]} {why}, which {given} does not take; use {key}={instead}, or enable_diloco=false"


CHECKS: list[Callable[[Values], Iterator[str]]] = [
  heads, rotary, qk_clip, mlp_activations, families.check, sizes, layer_cycle, experts, quantization, multi_token,
  segments, gradient_on_host, offloading, mixture, processes, mesh_sizes, periods, plugins_together, objective_units,
  conversations, preferences, rollouts, distillation, validation_sets, scoring, selection, reweighting,
  low_rank_adapters, given_model, slices_apart, pipeline.check,
]  # fmt: skip


def cross_problems(values: dict[str, Any]) -> list[str]:
  """The lines of every check; `values` leaves out the keys whose own values are wrong."""
  problems = []
  for check in CHECKS:
    with contextlib.suppress(UnsoundError):
      problems.extend(check(Values(values)))
  return problems


def value_problems(flat: dict[str, Any], fields: dict[str, Field]) -> list[str]:
  """All problems of values given in Python: types, limits and choices of each key, then the checks across keys."""
  problems, sound = [], {}
  for key, value in flat.items():
    try:
      if isinstance(value, list):
        raise WrongTypeError("tuple (a frozen configuration holds no lists)")
      read = from_python(value, fields[key].type)
    except WrongTypeError as error:
      problems.append(f"{key}={value!r} is not of type {error}")
      continue
    if wrong := limit_problems(fields[key], read):
      problems.extend(f"{key}={shown(value)}{text}" for text in wrong)
    else:
      sound[key] = read
  return problems + cross_problems(sound)
