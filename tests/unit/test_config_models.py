"""Keys of the model families: what contradicts itself is named with the fix, and the fix works."""

import pytest

from maxghost import config

MOE = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2"


@pytest.mark.parametrize(
  ("overrides", "told"),
  [
    ("decoder_block=qwen3", "decoder_block=qwen3 has use_qk_norm=true, not false; set it (model_name=qwen3-0.6b"),
    ("decoder_block=mixtral", "has experts, but num_experts=1; set it, or model_name=mixtral-8x7b"),
    ("decoder_block=mistral num_experts=4", "decoder_block=mistral has no experts, but num_experts=4"),
    ("model_name=gpt2-small trainable_position_size=-1", "decoder_block=gpt2 learns its positions"),
    ("model_name=gpt2-small max_target_length=1025", "trainable_position_size=1024 is less than max_target"),
    ("model_name=gpt2-small rope_type=default", "decoder_block=gpt2 has rope_type=none, not default"),
    ("rope_type=yarn", "rope_type=yarn with rope_factor=1.0 stretches nothing"),
    ("rope_type=yarn rope_factor=4 beta_fast=1", "beta_fast=1.0 must be more than beta_slow=1.0"),
    ("rope_type=llama3.1 rope_factor=8 rope_low_freq_factor=4", "rope_high_freq_factor=4.0 must be more than"),
    ("base_num_decoder_layers=5 inhomogeneous_layer_cycle_interval=2", "use 4 or 6 layers"),
    ("base_num_decoder_layers=1 inhomogeneous_layer_cycle_interval=2", "use 2 layers"),
    ("rope_max_timescale=1", "below the least allowed value 2.0"),
    ("attention_type=global,global", "has 2 entries; give one, or one for each of the inhomogeneous_layer_cycle_inter"),
    ("attention_type=local_sliding", "attention_type=local_sliding needs sliding_window_size"),
    ("sliding_window_size=8", "sliding_window_size=8 is read by attention_type=local_sliding only"),
    (f"{MOE} num_experts_per_tok=5", "num_experts_per_tok=5 is more than num_experts=4; use 4 or less"),
    (f"{MOE} base_moe_mlp_dim=0", "base_moe_mlp_dim=0 is no width"),
    ("load_balance_loss_weight=0.1", "load_balance_loss_weight=0.1 balances experts, but num_experts=1"),
    (f"{MOE} load_balance_loss_weight=0.1 ghost_schedule=concat", "ghost_schedule=concat, which would count"),
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
    "decoder_block=qwen3 use_qk_norm=true",
    MOE,
    f"{MOE} decoder_block=llama2 load_balance_loss_weight=0.1 ghost_schedule=reverse_scan",
    "model_name=gpt2-small max_target_length=1024",
    "decoder_block=llama2 rope_type=none head_dim=7",
    "rope_type=yarn rope_factor=4",
    "base_num_decoder_layers=6 inhomogeneous_layer_cycle_interval=2",
    "attention_type=local_sliding sliding_window_size=8",
    "attention_type=local_sliding,global sliding_window_size=8 inhomogeneous_layer_cycle_interval=2",
  ],
)
def test_the_fixes_it_names_work(overrides):
  config.load(*overrides.split())
