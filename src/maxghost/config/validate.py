"""Checks across keys, one function each.

To add a check, write a function of the values and add it to `CHECKS`. It reads keys as attributes (`v.steps`) and
yields one line per problem: the keys with their values, the limit, and values that work. A check stops at a key whose
own value is wrong, so it may rely on types, bounds and choices.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import Field
from typing import Any

from maxghost.config import plugins
from maxghost.config.families import FAMILIES
from maxghost.config.values import WrongTypeError, divisors, from_python, limit_problems, shown

DISTRIBUTED = re.compile(r"(\S+:[0-9]+),([0-9]+)/([0-9]+)")  # jax_distributed=HOST:PORT,K/N
BYTE_TOKENIZER_IDS = 259  # 256 bytes, and the begin, end and padding ids


class Values:
  """The valid values by key. Reading a key whose own value is wrong raises UnsoundError, which ends the check."""

  def __init__(self, values: dict[str, Any]):
    self._values = values

  def __getattr__(self, name: str) -> Any:
    try:
      return self._values[name]
    except KeyError:
      raise UnsoundError(name) from None


class UnsoundError(LookupError):
  """A check read a key whose own value is wrong."""


def heads(v: Values) -> Iterator[str]:
  num_heads, num_kv = v.base_num_query_heads, v.base_num_kv_heads
  if num_heads % num_kv:
    down, up = num_heads - num_heads % num_kv, num_heads + num_kv - num_heads % num_kv
    more = f"{down} or {up}" if down else str(up)
    yield (
      f"base_num_query_heads={num_heads} is not a multiple of base_num_kv_heads={num_kv}; "
      f"use base_num_query_heads={more}, or base_num_kv_heads={' or '.join(map(str, divisors(num_heads)))}"
    )


def rotary_head_dim(v: Values) -> Iterator[str]:
  if v.head_dim % 2 and v.rope_type != "none":
    yield f"head_dim={v.head_dim} is odd, but the rotary embedding turns pairs; use {v.head_dim + 1}"


def mlp_activations(v: Values) -> Iterator[str]:
  if len(v.mlp_activations) not in (1, 2):
    yield (
      f"mlp_activations={shown(v.mlp_activations)} has {len(v.mlp_activations)} names, but the feed-forward layer has "
      "two branches, gate and up, or one; use [silu, linear], or a single name such as [gelu]"
    )


def family(v: Values) -> Iterator[str]:
  record = FAMILIES[v.decoder_block]
  block, example = f"decoder_block={record.name}", f"model_name={record.example}"
  for key, needed in record.needs.items():
    value = getattr(v, key)
    if value != needed:
      own = next(other.name for other in FAMILIES.values() if not other.needs)
      yield (
        f"{block} has {key}={shown(needed)}, not {shown(value)}; set it ({example} sets all of the family), or "
        f"decoder_block={own} for a model of your own"
      )
  if record.routed and v.num_experts == 1:
    yield f"{block} has experts, but num_experts=1; set it, or {example}"
  if record.routed is False and v.num_experts > 1:
    routed = next(other.name for other in FAMILIES.values() if other.routed)
    yield f"{block} has no experts, but num_experts={v.num_experts}; use decoder_block={routed}"
  if record.learned_positions and v.trainable_position_size < 1:
    yield f"{block} learns its positions; set trainable_position_size, such as 1024"


def positions(v: Values) -> Iterator[str]:
  if 0 <= v.trainable_position_size < v.max_target_length:
    yield (
      f"trainable_position_size={v.trainable_position_size} is less than max_target_length={v.max_target_length}; "
      f"use {v.max_target_length} or more, max_target_length={v.trainable_position_size} or less, or -1 for no table"
    )
  if v.rope_type in ("llama3.1", "yarn") and v.rope_factor == 1.0:
    yield f"rope_type={v.rope_type} with rope_factor=1.0 stretches nothing; set rope_factor, or rope_type=default"
  if v.rope_type == "llama3.1" and v.rope_high_freq_factor <= v.rope_low_freq_factor:
    yield (
      f"rope_high_freq_factor={shown(v.rope_high_freq_factor)} must be more than "
      f"rope_low_freq_factor={shown(v.rope_low_freq_factor)}; Llama 3.1 has 4.0 and 1.0"
    )
  if v.rope_type == "yarn" and v.beta_fast <= v.beta_slow:
    yield f"beta_fast={shown(v.beta_fast)} must be more than beta_slow={shown(v.beta_slow)}; YaRN has 32.0 and 1.0"


def layer_cycle(v: Values) -> Iterator[str]:
  num_layers, cycle, types = v.base_num_decoder_layers, v.inhomogeneous_layer_cycle_interval, v.attention_type
  if num_layers % cycle:
    yield (
      f"base_num_decoder_layers={num_layers} is not a multiple of inhomogeneous_layer_cycle_interval={cycle}; "
      f"use {num_layers - num_layers % cycle or cycle} or {num_layers - num_layers % cycle + cycle} layers"
    )
  if len(types) not in (1, cycle):
    yield (
      f"attention_type={shown(types)} has {len(types)} entries; give one, or one for each of the "
      f"inhomogeneous_layer_cycle_interval={cycle} layers of a cycle"
    )
  if "local_sliding" in types and v.sliding_window_size < 1:
    yield "attention_type=local_sliding needs sliding_window_size, the number of tokens a position sees, such as 128"
  if "local_sliding" not in types and v.sliding_window_size:
    yield (
      f"sliding_window_size={v.sliding_window_size} is read by attention_type=local_sliding only, not by "
      f"{shown(types)}; set attention_type, or sliding_window_size=0"
    )


def experts(v: Values) -> Iterator[str]:
  if v.num_experts_per_tok > v.num_experts:
    yield (
      f"num_experts_per_tok={v.num_experts_per_tok} is more than num_experts={v.num_experts}; "
      f"use {v.num_experts} or less"
    )
  if v.base_moe_mlp_dim == 0:
    yield "base_moe_mlp_dim=0 is no width; use -1 for that of base_mlp_dim, or a positive one"
  if v.num_experts == 1 and v.load_balance_loss_weight:
    yield (
      f"load_balance_loss_weight={shown(v.load_balance_loss_weight)} balances experts, but num_experts=1; "
      "use load_balance_loss_weight=0.0"
    )


def validation_sets(v: Values) -> Iterator[str]:
  names = [text.partition("=")[0] for text in v.ghost_val_sets]
  if "" in names:
    yield f"ghost_val_sets={shown(v.ghost_val_sets)} has a set without a name; write name=domain"
  for name in sorted({name for name in names if names.count(name) > 1}):
    yield f"ghost_val_sets={shown(v.ghost_val_sets)} names '{name}' twice; give each set its own name"


def ghost_combinations(v: Values) -> Iterator[str]:
  if v.ghost_every > 1 and v.ghost_val_every > 1:
    yield (
      f"ghost_every={v.ghost_every} already computes the validation gradient every {v.ghost_every} steps; "
      f"use ghost_val_every=1, not {v.ghost_val_every}"
    )
  if v.ghost_direction == "second_order" and v.gradient_accumulation_steps > 1:
    yield "ghost_direction=second_order forms the whole step first; use gradient_accumulation_steps=1"
  if v.ghost_direction == "second_order" and v.ghost_val_every > 1:
    yield f"ghost_direction=second_order needs this step's curvature; use ghost_val_every=1, not {v.ghost_val_every}"
  if "carries" in v.offload_to_host and (v.ghost_schedule != "reverse_scan" or not v.segment_lengths):
    yield (
      f"offload_to_host={shown(v.offload_to_host)}: carries needs ghost_schedule=reverse_scan and segment_lengths; "
      "leave it out"
    )


def scoring(v: Values) -> Iterator[str]:
  """What `plugins.SCHEDULE_LACKS` says of the run's schedule."""
  direction, rule = v.ghost_direction, plugins.OPTIMIZERS[v.opt_type]
  early = direction in ("sgd", "second_order") or (direction == "auto" and rule.direction == "sgd")

  def asks(does: bool, key: str, instead: str) -> tuple[bool, str, str]:
    return does, f"{key}={shown(getattr(v, key))}", instead if " " in instead else f"{key}={instead}"

  asked = {
    "rank": asks(v.ghost_rank > 0, "ghost_rank", "0"),
    "early_rank": asks(v.ghost_rank > 0 and early, "ghost_rank", "0"),
    "sets": asks(len(v.ghost_val_sets) > 1, "ghost_val_sets", "one set"),
    "second_order": asks(direction == "second_order", "ghost_direction", "auto"),
    "val_every": asks(v.ghost_val_every > 1, "ghost_val_every", "1"),
    "accumulation": asks(v.gradient_accumulation_steps > 1, "gradient_accumulation_steps", "1"),
    "mask": asks(bool(v.trainable_parameters_mask), "trainable_parameters_mask", "[]"),
    "selection": asks(v.ghost_select != "none", "ghost_select", "none"),
    "unstacked": asks(not v.scan_layers, "scan_layers", "true"),
    "balance": asks(v.ghost_enabled and v.load_balance_loss_weight > 0, "load_balance_loss_weight", "0.0"),
    "tiles": asks(v.ghost_enabled and v.num_vocab_tiling > 1, "num_vocab_tiling", "1"),
  }
  names = {name: f"ghost_schedule={name}" for name in plugins.RUN_SCHEDULES}
  yield from plugins.scoring_problems(v.ghost_schedule, names, asked)


def selection(v: Values) -> Iterator[str]:
  if v.ghost_select == "none":
    return
  if not v.ghost_enabled:
    yield f"ghost_select={v.ghost_select} chooses by scores; use ghost_enabled=true, or ghost_select=none"
  if v.ghost_direction == "second_order":
    yield f"ghost_select={v.ghost_select} chooses before the step is known; use ghost_direction=auto or sgd"
  if v.gradient_accumulation_steps > 1:
    yield (
      f"ghost_select={v.ghost_select} chooses among the rows of a whole batch; use gradient_accumulation_steps=1, "
      f"not {v.gradient_accumulation_steps}"
    )
  if v.ghost_every > 1:
    yield f"ghost_select={v.ghost_select} needs the scores of every step; use ghost_every=1, not {v.ghost_every}"
  if v.ghost_select != "threshold" and v.ghost_select_fraction == 0.0:
    yield "ghost_select_fraction=0.0 leaves no row to train on; use a share such as 0.5"


def reweighting(v: Values) -> Iterator[str]:
  if not v.ghost_reweight:
    return
  given = f"ghost_reweight={shown(v.ghost_reweight)}"
  steps, *_ = v.ghost_reweight
  if len(v.ghost_reweight) > 3 or steps < 1 or steps % 1:
    yield f"{given} is not [steps, size, floor], such as [20, 0.2, 0.02]; empty = never"
  if not v.ghost_enabled:
    yield f"{given} follows the scores; use ghost_enabled=true, or no ghost_reweight"
  if not v.dataset_mixture or v.dataset_mixture[0].endswith("x"):
    yield f"{given} changes the domains' shares of the rows; give shares to start from, dataset_mixture=[a=0.5,b=0.5]"
  floor = (*v.ghost_reweight, 0.2, 0.02)[2]
  if v.dataset_mixture and floor * len(v.dataset_mixture) > 1:
    yield (
      f"{given}: a floor of {shown(floor)} for {len(v.dataset_mixture)} domains is more than all rows; "
      f"use {1 / len(v.dataset_mixture):.3g} or less"
    )


def mixture(v: Values) -> Iterator[str]:
  if any("=" not in text for text in v.dataset_mixture):
    yield (
      f"dataset_mixture={shown(v.dataset_mixture)} is not of the form [a=0.25,b=0.75] for shares of the rows, or "
      "[a=2x,b=1x] for passes per epoch"
    )
  if len({text.endswith("x") for text in v.dataset_mixture}) > 1:
    yield (
      f"dataset_mixture={shown(v.dataset_mixture)} mixes shares of the rows (0.25) with passes per epoch (2x); "
      "use one kind for all domains"
    )


def vocab_tiling(v: Values) -> Iterator[str]:
  name, size = (
    ("max_target_length", v.max_target_length) if v.vocab_tiling_axis == "tokens" else ("vocab_size", v.vocab_size)
  )
  if v.num_vocab_tiling > size:
    yield (
      f"num_vocab_tiling={v.num_vocab_tiling} with vocab_tiling_axis={v.vocab_tiling_axis} is more than {name}={size}; "
      f"use at most {size}"
    )


def segments(v: Values) -> Iterator[str]:
  levels = v.segment_lengths
  if not levels:
    return
  given = f"segment_lengths={shown(levels if len(levels) > 1 else levels[0])}"
  if not v.scan_layers:
    yield f"{given} cuts stacked layers into segments; use scan_layers=true, or no segments"
  whole, name = v.base_num_decoder_layers, f"base_num_decoder_layers={v.base_num_decoder_layers}"
  cycle = v.inhomogeneous_layer_cycle_interval
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
  given = f"offload_to_host={shown(v.offload_to_host)}"
  if set(v.offload_to_host) <= {"carries"}:
    return
  if not v.segment_lengths:
    if v.scan_layers:
      choices = divisors(v.base_num_decoder_layers)
      near = min(choices, key=lambda k: abs(k * k - v.base_num_decoder_layers))
      yield f"{given} moves one segment of layers at a time; give segment_lengths, such as {near}"
    else:
      yield f"{given} moves one segment of stacked layers at a time; use scan_layers=true and segment_lengths"
  if v.ghost_enabled and "offload" in plugins.SCHEDULE_LACKS[v.ghost_schedule]:
    yield (
      f"{given} forms directions one segment at a time; use ghost_schedule=reverse_scan, not {v.ghost_schedule}, "
      "or ghost_enabled=false"
    )
  if v.sample_every and "weights" in v.offload_to_host:
    yield f"sample_every={v.sample_every} wants the weights on the device; use sample_every=0 with {given}"
  if v.gradient_accumulation_steps > 1 and "weights" in v.offload_to_host:
    yield (
      f"{given} sends gradients to the host once per step; use gradient_accumulation_steps=1, "
      f"not {v.gradient_accumulation_steps}"
    )


def processes(v: Values) -> Iterator[str]:
  if v.jax_distributed in ("auto", "on", "off"):
    return
  found = DISTRIBUTED.fullmatch(v.jax_distributed)
  if not found:
    yield (
      f"jax_distributed={shown(v.jax_distributed)} is not auto, on, off or HOST:PORT,K/N (this is process K, from 0, "
      "of N), such as 10.0.0.1:1234,0/2"
    )
  elif int(found[2]) >= int(found[3]):
    yield (
      f"jax_distributed={v.jax_distributed} calls this process {int(found[2])}, but of {int(found[3])} the numbers are "
      f"0 to {int(found[3]) - 1}"
    )


def vocabulary(v: Values) -> Iterator[str]:
  if v.tokenizer_type == "byte" and v.vocab_size < BYTE_TOKENIZER_IDS:
    yield (
      f"vocab_size={v.vocab_size} is too small for tokenizer_type=byte, which has {BYTE_TOKENIZER_IDS} ids; "
      f"use {BYTE_TOKENIZER_IDS} or more"
    )


def schedule(v: Values) -> Iterator[str]:
  warmup, decay = v.warmup_steps_fraction, v.wsd_decay_steps_fraction
  if v.lr_schedule_type == "wsd" and warmup + decay > 1:
    yield (
      f"warmup_steps_fraction={shown(warmup)} and wsd_decay_steps_fraction={shown(decay)} together exceed 1; "
      f"use wsd_decay_steps_fraction={shown(round(1 - warmup, 6))} or less"
    )


def evaluation(v: Values) -> Iterator[str]:
  if v.eval_interval == 0:
    yield "eval_interval=0 is no interval; use -1 for never, or the number of steps between evaluations"


def ghost_direction(v: Values) -> Iterator[str]:
  rule, direction = plugins.OPTIMIZERS[v.opt_type], v.ghost_direction
  if not v.ghost_enabled:
    return
  if direction == "auto" and rule.direction is None:
    yield plugins.auto_problem(v.opt_type)
  if direction not in ("auto", "sgd", "second_order", rule.direction):
    offering = [name for name, other in plugins.OPTIMIZERS.items() if other.direction == direction]
    own = "auto or sgd" if rule.direction else "sgd"
    yield (
      f"ghost_direction={direction} contradicts opt_type={v.opt_type}: it goes through another optimizer's update; "
      f"use ghost_direction={own}, or opt_type={' or '.join(offering)}"
    )


def seams(v: Values) -> Iterator[str]:
  rule = plugins.OPTIMIZERS[v.opt_type]
  if v.ghost_enabled:
    passes = "two_pass" if v.ghost_schedule == "forward_mode" else v.ghost_schedule
    yield from plugins.schedule_problems({key: getattr(v, key) for key in plugins.KINDS}, passes)
  if v.ghost_select == "greats" and not rule.elementwise:
    yield (
      f"ghost_select=greats compares rows by an elementwise update, which opt_type={v.opt_type} has not; "
      "use ghost_select=topk or threshold"
    )
  if {"weights", "optimizer"} & set(v.offload_to_host) and not rule.by_segment:
    yield (
      f"offload_to_host={shown(v.offload_to_host)} updates one segment of layers at a time, which "
      f"opt_type={v.opt_type} cannot; use offload_to_host=[], or another opt_type"
    )


def objective_units(v: Values) -> Iterator[str]:
  rows = plugins.OBJECTIVES[v.objective].rows_per_unit
  if rows == 1:
    return
  what = f"objective={v.objective} makes a unit of {rows} adjacent rows"
  for name in ("per_device_batch_size", *(("ghost_val_batch_size",) if v.ghost_enabled else ())):
    if (size := getattr(v, name)) % rows:
      yield f"{what}, which {name}={size} would part; use {name}={size - size % rows + rows}"
  if v.gradient_accumulation_steps > 1:
    yield (
      f"{what}, which micro-batches would part; use gradient_accumulation_steps=1, not {v.gradient_accumulation_steps}"
    )
  if v.ghost_select != "none":
    yield f"{what}, and ghost_select={v.ghost_select} chooses single rows; use ghost_select=none"


def ghost_validation(v: Values) -> Iterator[str]:
  if v.ghost_enabled and v.ghost_val_fraction in (0.0, 1.0):
    lacking = "validation documents to score against" if v.ghost_val_fraction == 0.0 else "documents of it to train on"
    yield (
      f"ghost_val_fraction={shown(v.ghost_val_fraction)} leaves no {lacking}, but ghost_enabled=true; "
      "use a share such as 0.25, or ghost_enabled=false"
    )


MESH_GROUPS = ("ici", "dcn")
# Outermost first: axes that split rows vary slowest, so that a process holds whole rows; tensor, which communicates
# most, varies fastest.
MESH_AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")


def mesh_sizes(v: Values) -> Iterator[str]:
  for group in MESH_GROUPS:
    sizes = {f"{group}_{axis}_parallelism": getattr(v, f"{group}_{axis}_parallelism") for axis in MESH_AXES}
    for name, size in sizes.items():
      if size == 0:
        yield f"{name}=0 leaves no devices; use 1 to leave the axis out, or -1 for what the others leave"
    filled = [name for name, size in sizes.items() if size == -1]
    if len(filled) > 1:
      yield (
        f"{' and '.join(f'{name}=-1' for name in filled)}: only one key of a group can take what the others leave; "
        f"give {filled[0]} a number"
      )


CHECKS: list[Callable[[Values], Iterator[str]]] = [
  heads,
  rotary_head_dim,
  mlp_activations,
  family,
  positions,
  layer_cycle,
  experts,
  vocab_tiling,
  segments,
  offloading,
  mixture,
  processes,
  vocabulary,
  schedule,
  evaluation,
  ghost_direction,
  objective_units,
  seams,
  ghost_validation,
  ghost_combinations,
  scoring,
  selection,
  reweighting,
  validation_sets,
  mesh_sizes,
]


def cross_problems(values: dict[str, Any]) -> list[str]:
  """The lines of every check; `values` leaves out the keys whose own values are wrong."""
  problems = []
  for check in CHECKS:
    try:
      problems.extend(check(Values(values)))
    except UnsoundError:
      continue
  return problems


def value_problems(flat: dict[str, Any], fields: dict[str, Field]) -> list[str]:
  """All problems of values given in Python: types, limits and choices of each key, then the checks across keys."""
  problems, sound = [], {}
  for key, value in flat.items():
    field = fields[key]
    try:
      if isinstance(value, list):
        raise WrongTypeError("tuple (a frozen configuration holds no lists)")
      sound[key] = from_python(value, field.type)
    except WrongTypeError as error:
      problems.append(f"{key}={value!r} is not of type {error}")
      continue
    wrong = limit_problems(field, sound[key])
    if wrong:
      problems.extend(f"{key}={shown(value)}{text}" for text in wrong)
      del sound[key]
  return problems + cross_problems(sound)
