"""Rules across keys, each with values that break it and values on its edge."""

import dataclasses
import re

import pytest

from maxghost import config
from maxghost.config import plugins, validate


@pytest.mark.parametrize(
  ("overrides", "told"),
  [
    (
      "base_num_query_heads=10 base_num_kv_heads=4",
      "base_num_query_heads=10 is not a multiple of base_num_kv_heads=4; use base_num_query_heads=8 or 12, "
      "or base_num_kv_heads=1 or 2 or 5 or 10",
    ),
    ("base_num_query_heads=3 base_num_kv_heads=7", "use base_num_query_heads=7, or base_num_kv_heads=1 or 3"),
    ("head_dim=15", "head_dim=15 is odd, but the rotary embedding turns pairs; use 16"),
    ("mlp_activations=", "mlp_activations=[] has 0 names"),
    ("mlp_activations=silu,gelu,linear", "mlp_activations=[silu, gelu, linear] has 3 names"),
    ("vocab_size=258", "vocab_size=258 is too small for tokenizer_type=byte, which has 259 ids; use 259 or more"),
    (
      "lr_schedule_type=wsd warmup_steps_fraction=0.3 wsd_decay_steps_fraction=0.8",
      "together exceed 1; use wsd_decay_steps_fraction=0.7 or less",
    ),
    ("eval_interval=0", "eval_interval=0 is no interval; use -1"),
    ("profiler=xplane steps=3", "after skip_first_n_steps_for_profiler=1 traces none of steps=3; use steps=4"),
    ("ghost_direction=adam opt_type=sgd", "ghost_direction=adam contradicts opt_type=sgd"),
    ("ghost_val_fraction=0", "ghost_val_fraction=0.0 leaves no validation documents"),
    ("ghost_val_fraction=1", "ghost_val_fraction=1.0 leaves no documents of it to train on"),
    ("lora_rank=8 lora_module_path=a{99999999999}", "is not a regular expression (the repetition number is too large"),
    ("load_full_state_path=a load_parameters_path=b", "leave load_parameters_path empty"),
    ("load_full_state_path=a ghost_curvature=secant", "which load_full_state_path does not have"),
  ],
)
def test_contradiction_is_named_with_the_fix(overrides, told):
  with pytest.raises(config.ConfigError) as caught:
    config.load(*overrides.split())
  (problem,) = caught.value.problems
  assert told in problem


@pytest.mark.parametrize(
  "overrides",
  [
    "base_num_query_heads=10 base_num_kv_heads=5",
    "base_num_query_heads=8 base_num_kv_heads=4",
    "base_num_query_heads=12 base_num_kv_heads=4",
    "head_dim=16",
    "mlp_activations=gelu",
    "vocab_size=259",
    "lr_schedule_type=wsd warmup_steps_fraction=0.3 wsd_decay_steps_fraction=0.7",
    "profiler=xplane steps=3 skip_first_n_steps_for_profiler=0",
    "lr_schedule_type=cosine warmup_steps_fraction=0.3 wsd_decay_steps_fraction=0.8",
    "eval_interval=-1",
    "ghost_direction=sgd opt_type=sgd",
    "ghost_direction=sgd opt_type=adamw",
    "ghost_direction=adam opt_type=adamw",
    "ghost_direction=adam opt_type=sgd ghost_enabled=false",
    "ghost_val_fraction=0 ghost_enabled=false",
    "ghost_val_fraction=1 ghost_enabled=false",
    "ghost_val_fraction=0 ghost_val_sets=exam=/data/exam.txt",
    "ghost_log_period=500 steps=3",
  ],
)
def test_the_fixes_it_names_work(overrides):
  flat = config.load(*overrides.split()).flat()
  for text in overrides.split():
    key, _, value = text.partition("=")
    assert flat[key] in (value, (value,)) or float(flat[key] == 1 if value == "true" else flat[key]) == as_number(value)


def as_number(text):
  return {"true": 1.0, "false": 0.0}.get(text) if text in ("true", "false") else float(text)


def test_a_check_that_needs_a_broken_value_is_left_out():
  with pytest.raises(config.ConfigError) as caught:
    config.load("base_num_kv_heads=x", "base_num_query_heads=9", "head_dim=5")
  assert len(caught.value.problems) == 2
  assert "head_dim=5 is odd" in caught.value.problems[1]


def test_a_reweighting_without_a_floor_has_the_default_one():
  """0.02 for each of eight domains, not the 0.2 of the size, which would be more than all rows."""
  mixture = ",".join(f"{name}=0.125" for name in "abcdefgh")
  assert config.load("ghost_reweight=20,0.2", f"dataset_mixture={mixture}").ghost.reweighting == (20, 0.2, 0.02)


def test_a_schedule_that_an_objective_does_not_take_is_named_as_it_was_given(monkeypatch):
  """forward_mode has the passes of two_pass, which nobody wrote."""
  own = dataclasses.replace(plugins.OBJECTIVES["next_token"], schedules=("concat",))
  monkeypatch.setitem(plugins.OBJECTIVES, "own", own)
  said = "objective=own and ghost_schedule=forward_mode do not go together: objective=own works with concat; use"
  with pytest.raises(config.ConfigError, match=said):
    config.load("objective=own", "ghost_schedule=forward_mode")


def test_a_new_check_is_run(monkeypatch):
  def short(v):
    if v.steps < v.log_period:
      yield f"steps={v.steps} is less than log_period={v.log_period}"

  monkeypatch.setattr(validate, "CHECKS", [*validate.CHECKS, short])
  assert config.load("steps=3", "log_period=3").run.steps == 3
  with pytest.raises(config.ConfigError, match="steps=3 is less than log_period=4"):
    config.load("steps=3", "log_period=4")
  with pytest.raises(config.ConfigError, match="steps=3 is less than log_period=5"):
    config.replace(config.load("steps=3"), log_period=5)


def test_huge_numbers_are_answered_at_once():
  with pytest.raises(config.ConfigError, match="not a multiple"):
    config.load("base_num_query_heads=100000", "base_num_kv_heads=7")
  with pytest.raises(config.ConfigError, match=r"or 16, or per_device_batch_size=500000000$"):
    config.load("ici_stage_parallelism=2", "num_pipeline_microbatches=1000000000")


@pytest.mark.parametrize(
  ("keys", "said", "not_said"),
  [
    (
      "ghost_rank=8 ghost_schedule=forward_mode use_qk_clip=true",
      "use ghost_rank=0, or ghost_schedule=two_pass",
      "scan",
    ),
    ("trainable_position_size=1", "use 256 or more, or -1 for no table", "max_target_length=1 "),
    ("ghost_val_fraction=0.0 ghost_select=topk", "use a share such as 0.25", "or ghost_enabled=false"),
    ("ghost_val_sets=a=manual@sft ghost_schedule=concat", "use sets without @objective", "=one set"),
    ("offload_to_host=optimizer segment_lengths=2 ghost_schedule=reverse_scan use_qk_clip=true", "false", "two_pass"),
    ("adam_weight_decay=2 learning_rate=0.5", "adam_weight_decay below 2, or ghost_enabled=false", "twice"),
    ("objective=grpo packing=none ghost_schedule=concat", "use ghost_schedule=two_pass", "ghost_val_sets"),
  ],
)
def test_advice_does_not_lead_into_the_next_refusal(keys, said, not_said):
  with pytest.raises(config.ConfigError) as refused:
    config.load(*keys.split())
  assert said in str(refused.value) and not_said not in str(refused.value)


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ("ghost_select=greats quantization=fp8", "quantization=fp8 has not; use ghost_select=topk, or quantization=''"),
    ("{} ghost_select=greats", "offload_to_host=[weights] has not; use ghost_select=topk, or offload_to_host=[]"),
    ("{} ghost_curvature=hessian", "has not; use ghost_curvature=none, or offload_to_host=[]"),
    ("{} ghost_direction=second_order", "has not; use ghost_direction=auto, or offload_to_host=[]"),
    ("{} ghost_schedule=forward_mode", "use offload_to_host=[], or ghost_schedule=two_pass or"),
  ],
)
def test_what_takes_second_or_forward_derivatives_is_refused_where_there_are_none(keys, said):
  """Frozen weights on the host have a backward pass of their own; rounded products have the straight-through one."""
  with pytest.raises(config.ConfigError, match=re.escape(said)):
    config.load(*keys.format("lora_rank=2 segment_lengths=2 offload_to_host=weights").split())
