"""Former names of keys, and MaxText's names."""

import dataclasses
import os
import re
import time

import pytest

from maxghost import config, data
from maxghost.config import renamed


@pytest.mark.parametrize("key", renamed.FORMER)
def test_a_former_name_is_answered_with_the_present_one(key, tmp_path):
  (tmp_path / "own.yml").write_text(f"{key}: 1\nconfig_is_resolved: true\n")  # also in the saved file of a run
  calls = {
    "command line": lambda: config.load(f"{key}=1"),
    "own.yml:1": lambda: config.load(tmp_path / "own.yml"),
    "": lambda: config.replace(config.load(), **{key: 1}),
  }
  for origin, call in calls.items():
    with pytest.raises(config.ConfigError) as caught:
      call()
    (said,) = caught.value.problems
    assert said.startswith(f"key '{key}'") and said.endswith(renamed.FORMER[key]) and origin in said


def test_names_of_other_trainers_are_those_of_keys():
  other = [text.split()[1] for text in renamed.FORMER.values() if text.endswith(" here")]
  assert renamed.FORMER["lr"] == "is learning_rate here" and other and set(other) <= set(config.fields())
  named = {
    word for text in renamed.FORMER.values() if " here" in text for word in re.findall(r"[a-z]+(?:_[a-z0-9]+)+", text)
  }
  assert "warmup_steps_fraction" in named and named <= set(config.fields())


def test_the_bias_of_a_router_comes_with_those_of_its_experts():
  keys = "decoder_block=mixtral", "num_experts=4"
  with pytest.raises(config.ConfigError) as caught:
    config.load(*keys, "routed_bias=true", "mlp_bias=false")
  (said,) = caught.value.problems
  assert said.startswith("routed_bias=true (command line) is not read with mlp_bias=false; it is mlp_bias, ")
  for router in ("true", "false"):
    loaded = config.load_with_origins(*keys, f"routed_bias={router}", "mlp_bias=true")
    assert loaded.config.model.mlp_bias
    assert [note for note in loaded.notes if "routed_bias" in note] == (
      [] if router == "true" else ["routed_bias=false (command line) is not read with mlp_bias=true"]
    )


@pytest.mark.parametrize(
  ("overrides", "wanted"),
  [
    ("dataset_type=grain grain_train_files=a=/x/*.array_record", {"dataset_files": ("a=/x/*.array_record",)}),
    ("dataset_type=tfds dataset_name=lm1b:1.1.0", {"dataset_files": ("lm1b:1.1.0",)}),
    ("dataset_type=hf hf_path=/x", {"dataset_files": ("/x",)}),
    ("packing=yes", {"packing": "first_fit"}),
    ("scale_rewards=True", {"scale_rewards": "group"}),
    ("scale_rewards=false", {"scale_rewards": "none"}),
    ("packing=true grain_packing_type=concat_then_split", {"packing": "concat_then_split"}),
    ("enable_checkpointing=true checkpoint_period=7", {"checkpoint_period": 7}),
    ("compile_topology=v5e-16 compile_topology_num_slices=2", {"compile_topology": "2xv5e-16"}),
    ("jax_distributed_initialization_timeout=31", {"jax_distributed_timeouts": (31, 100)}),
    ("packing=false grain_packing_type=concat_then_split", {"packing": "none"}),
    ("enable_checkpointing=false", {"checkpoint_period": 0}),
    ("dropout_rate=0.3 enable_dropout=false", {"dropout_rate": 0.0}),
    ("skip_jax_distributed_system=true", {"jax_distributed": "off"}),
    ("jax_distributed_heartbeat_timeout_seconds=60", {"jax_distributed_timeouts": (300, 60)}),
    ("max_num_checkpoints_to_keep=None", {"max_num_checkpoints_to_keep": 0}),
    ("ici_pipeline_parallelism=2", {"ici_stage_parallelism": 2}),
    (
      "parameter_memory_host_offload=true optimizer_memory_host_offload=true segment_lengths=2 ghost_enabled=false",
      {"offload_to_host": ("weights", "optimizer")},
    ),
  ],
)
def test_maxtext_names_keep_working(overrides, wanted):
  loaded = config.load_with_origins(None, *overrides.split())
  flat = loaded.config.flat()
  assert {key: flat[key] for key in wanted} == wanted
  assert all(loaded.origins[key] == "command line" for key in wanted if flat[key] != config.load().flat()[key])


def test_a_later_key_wins_over_an_earlier_name_and_is_noted(tmp_path):
  (tmp_path / "own.yml").write_text("enable_checkpointing: false\n")
  loaded = config.load_with_origins(tmp_path / "own.yml", "checkpoint_period=5")
  assert loaded.config.checkpoint.checkpoint_period == 5
  (note,) = loaded.notes
  assert "own.yml:1) is overridden by checkpoint_period=5 (command line)" in note


@pytest.mark.parametrize(
  ("file", "typed", "wanted"),
  [
    ("use_sft: true", "use_sft=false", {"objective": "next_token"}),
    ("enable_checkpointing: false", "enable_checkpointing=true", {"checkpoint_period": 100}),
    ("enable_wandb: true", "enable_wandb=false", {"trackers": ()}),
    ("compile_topology: v5e-16\ncompile_topology_num_slices: 2", "compile_topology_num_slices=4",
     {"compile_topology": "4xv5e-16"}),
    ("lora_rank: 16\nlora_use_rslora: true", "lora_use_rslora=true", {"lora_alpha": 32.0}),
    ("lora_rank: 16\nlora_use_rslora: true", "lora_use_rslora=false", {"lora_alpha": 8.0}),
    ("segment_lengths: 2\nghost_schedule: reverse_scan\nparameter_memory_host_offload: false\n"
     "optimizer_memory_host_offload: true",
     "parameter_memory_host_offload=true", {"offload_to_host": ("weights", "optimizer")}),
    ("lora_use_rslora: true\nlora_alpha: 2", "enable_lora=true", {"lora_rank": 8, "lora_alpha": 2 * 8**0.5}),
  ],
)  # fmt: skip
def test_a_name_on_the_command_line_replaces_it_in_the_file(file, typed, wanted, tmp_path):
  (tmp_path / "own.yml").write_text(f"{file}\n")
  loaded = config.load_with_origins(tmp_path / "own.yml", typed)
  assert {key: loaded.config.flat()[key] for key in wanted} == wanted and not loaded.notes


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ("grain_train_files=F", "grain_train_files=[F] (command line) is not read with dataset_type=stdlib"),
    (
      "packing=none grain_packing_type=first_fit",
      "grain_packing_type=first_fit (command line) is not read with packing=",
    ),
    ("grain_train_files=[]", ""),
    ("grain_packing_type=first_fit", ""),
    ("dataset_type=hf hf_path=/x", ""),
  ],
)
def test_a_maxtext_name_that_no_run_reads_is_noted(overrides, said):
  notes = config.load_with_origins(None, *overrides.split()).notes
  assert len(notes) == bool(said) and "".join(notes).startswith(said)


def test_two_objectives_at_once_are_refused(tmp_path):
  for keys in (("objective=dpo", "use_sft=true"), ("use_dpo=true", "use_sft=true")):
    with pytest.raises(config.ConfigError, match=r"^use_sft .* objective=sft, not objective=dpo .* leave one out$"):
      config.load(*keys)
  (tmp_path / "own.yml").write_text("objective: dpo\n")
  assert config.load(tmp_path / "own.yml", "use_sft=true").optimizer.objective == "sft"


def test_maxtext_names_the_loss_of_pairs_in_its_group(tmp_path):
  (tmp_path / "own.yml").write_text("use_dpo: true\ndpo: {algo: dpo, dpo_beta: 0.2}\n")
  loss = config.load(tmp_path / "own.yml").optimizer
  assert (loss.objective, loss.dpo_algo, loss.dpo_beta) == ("dpo", "sigmoid", 0.2)
  assert config.load(tmp_path / "own.yml", "dpo.algo=orpo").optimizer.dpo_algo == "orpo"


def test_values_of_maxtext_names_are_checked():
  for text, told in (
    ("grain_packing_type=best_fit", "is packing=best_fit is not one of first_fit"),
    ("enable_checkpointing=7", "is not of type bool"),
    ("jax_distributed_initialization_timeout=-3", "below the least allowed value 1"),
  ):
    with pytest.raises(config.ConfigError, match=told):
      config.load(text)


@pytest.mark.parametrize(
  "text",
  ["fused_qkv: False", "quantization: ''", "hardware: tpu", "shared_experts: 0", "capacity_factor: -1.0",
   "lora_input_adapters_path:", "normalize_embedding_logits: False", "ici_sequence_parallelism: 1",
   "rope_use_scale: True", "rope_linear_scaling_factor: 1.0", "rope_min_timescale: 1",
   "use_truncation: false", "mtp_eval_target_module: 0", "distill_beta: 0.0", "distill_alpha_schedule: constant",
   "distill_temperature_end: None", "use_tunix_gradient_accumulation: false"],
)  # fmt: skip
def test_a_maxtext_key_that_asks_for_nothing_is_accepted(text, tmp_path):
  (tmp_path / "own.yml").write_text(text)
  assert config.load(tmp_path / "own.yml") == config.load()


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("fused_qkv=true", "'fused_qkv' (command line) is a MaxText key that maxghost does not have"),
    ("num_epoch=3", "'num_epoch' (command line) is a MaxText key that maxghost does not have; use steps"),
    ("hf_train_files=x", "does not have; use dataset_files"),
    ("teacher_overrides={}", "does not have; use distill_teacher"),
    ("mtp_eval_target_module=1", "is a MaxText key that maxghost does not have"),
    ("ici_diloco_parallelism=2", "is a MaxText key that maxghost does not have"),
  ],
)
def test_another_maxtext_key_is_refused_with_what_to_use(text, told):
  with pytest.raises(config.ConfigError) as caught:
    config.load(text)
  (said,) = caught.value.problems
  assert told in said


# What MaxText's own model files say, key by key, and where our file of that model says otherwise.
MAXTEXT_FILES = {
  "llama2-7b": (
    "base_emb_dim: 4096\nbase_num_query_heads: 32\nbase_num_kv_heads: 32\nbase_mlp_dim: 11008\nhead_dim: 128\n"
    "base_num_decoder_layers: 32\nmlp_activations: ['silu','linear']\nvocab_size: 32000\nenable_dropout: false\n"
    "logits_via_embedding: false\nnormalization_layer_epsilon: 1.0e-5\ndecoder_block: 'llama2'\n"
    "logical_axis_rules: [['norm', 'fsdp']]",
    {"logical_axis_rules"},
  ),
  "mixtral-8x7b": (
    "base_emb_dim: 4096\nbase_num_query_heads: 32\nbase_num_kv_heads: 8\nbase_mlp_dim: 14336\nhead_dim: 128\n"
    "base_moe_mlp_dim: 14336\nbase_num_decoder_layers: 32\nmlp_activations: ['silu','linear']\nvocab_size: 32000\n"
    "enable_dropout: False\nlogits_via_embedding: False\nnormalization_layer_epsilon: 1.0e-5\nnum_experts: 8\n"
    "num_experts_per_tok: 2\nrope_max_timescale: 1_000_000\ndecoder_block: 'mixtral'",
    {"load_balance_loss_weight"},
  ),
  "qwen3-0.6b": (
    "base_emb_dim: 1024\nbase_num_query_heads: 16\nbase_num_kv_heads: 8\nbase_mlp_dim: 3072\nhead_dim: 128\n"
    "base_num_decoder_layers: 28\nmlp_activations: ['silu', 'linear']\nvocab_size: 151936\ndecoder_block: 'qwen3'\n"
    "normalization_layer_epsilon: 1.0e-6\nrope_max_timescale: 1000000\nuse_qk_norm: True\nlogits_via_embedding: True\n"
    "normalize_embedding_logits: False\nenable_dropout: False",
    set(),
  ),
}


@pytest.mark.parametrize("name", MAXTEXT_FILES)
def test_a_model_file_of_maxtext_loads_as_ours_of_that_model(name, tmp_path):
  text, other = MAXTEXT_FILES[name]
  (tmp_path / "own.yml").write_text(text)
  differing = config.differing_keys(config.load(tmp_path / "own.yml"), config.load(f"model_name={name}"))
  assert set(differing) - {"model_name"} <= other, differing


def test_maxtext_takes_the_rotation_of_llama31_from_its_name(tmp_path):
  """Its files of these models have no rope_type."""
  (tmp_path / "models").mkdir()
  (file := tmp_path / "models" / "llama3.1-70b.yml").write_text("rope_max_timescale: 500_000\ndecoder_block: llama2\n")
  said = "rope_type=llama3.1 rope_factor=8 says because the model is called llama3.1-70b; set both keys, or rope_type="
  for given in ((file,), ("model_name=llama3.1-70b",)):
    with pytest.raises(config.ConfigError, match=re.escape(said)):
      config.load(*given, base_dir=tmp_path)
    assert config.load(*given, "rope_type=llama3.1", "rope_factor=8", base_dir=tmp_path).model.rope_factor == 8
  assert config.load("model_name=llama3.1-8b").model.rope_type == "llama3.1"


def test_a_whole_file_of_maxtext_is_few_lines(tmp_path):
  names = sorted(renamed._maxtext()["lacking"].split())
  assert len(names) > 500 and not set(names) & (set(config.fields()) | set(renamed.OTHER))
  (tmp_path / "base.yml").write_text("".join(f"{name}: 77.5\n" for name in names) + "stepz: 1\n")
  with pytest.raises(config.ConfigError) as caught:
    config.load(tmp_path / "base.yml")
  first, second = caught.value.problems
  assert "docs/from-maxtext.md" in first and len(first) < 500 and "'stepz'" in second
  assert "MaxText key that maxghost does not have; leave it out" in renamed.unknown("base_config", config.fields())


def test_the_page_for_maxtext_users_names_every_translated_key():
  page = (config.config_dir().parent / "docs" / "from-maxtext.md").read_text()
  assert [name for name in renamed.OTHER if name not in page] == []


@pytest.mark.parametrize(
  "text",
  ["steps=1e18", "head_dim=1e12", "base_num_decoder_layers=1e30 segment_lengths=7", "base_num_query_heads=1e15",
   "base_num_decoder_layers=1e15 offload_to_host=weights", "segment_lengths=1e30", "jax_distributed_timeouts=1e20,5"],
)  # fmt: skip
def test_numbers_without_sense_are_refused_at_once(text):
  began = time.perf_counter()
  with pytest.raises(config.ConfigError) as caught:
    config.load(*text.split())
  assert len(caught.value.problems) == 1 and "above the greatest allowed value" in str(caught.value)
  assert time.perf_counter() - began < 1


def test_every_whole_number_has_an_upper_bound():
  for name, field in config.fields().items():
    if field.type is int or "int" in str(field.type):
      assert field.metadata["maximum"] is not None, name


def test_files_that_are_no_configuration_are_refused_at_once(tmp_path):
  os.mkfifo(tmp_path / "pipe.yml")
  (tmp_path / "deep.yml").write_text("a: " + "[" * 3000 + "]" * 3000)
  for call, told in (
    (lambda: config.load(tmp_path / "pipe.yml"), "no regular file"),
    (lambda: config.load(tmp_path / "deep.yml"), "nested too deeply"),
    (lambda: config.load("dataset_domains=" + "[" * 3000 + "]" * 3000), "is not a YAML list"),
  ):
    began = time.process_time()
    with pytest.raises(config.ConfigError, match=told) as caught:
      call()
    assert time.process_time() - began < 1 and len(str(caught.value)) < 300


def test_synthetic_data_needs_no_validation_key():
  synthetic = config.load("dataset_type=synthetic").data
  assert synthetic.validation_sets == {"words": "words"}
  assert config.load("dataset_type=synthetic", "dataset_domains=digits,words").data.validation_sets == {
    "digits": "digits"
  }
  data.load_dataset(dataclasses.replace(synthetic, dataset_domain_bytes=20_000)).validation_batch(0, 2)
