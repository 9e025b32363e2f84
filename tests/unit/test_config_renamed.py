"""Former names of keys, MaxText's names, and the saved configurations of earlier versions."""

import dataclasses
import os
import time

import pytest

from maxghost import config, data
from maxghost.config import renamed

# A run's own file as the version before wrote it, of the keys that are gone: (text, what it means now).
SAVED = [
  ("stream_weights: host\nstream_optimizer: none\nsegment_length: 2", {"offload_to_host": ("weights",)}),
  ("stream_weights: host\nstream_optimizer: host\nsegment_length: 2", {"offload_to_host": ("weights", "optimizer")}),
  ("ghost_stream_carries: host\nsegment_length: 2", {"offload_to_host": ("carries",)}),
  ("segment_length: 2\nsegment_lengths: []", {"segment_lengths": (2,)}),
  ("segment_length: 0\nsegment_lengths: [4, 2]", {"segment_lengths": (4, 2)}),
  ("dataset_type: text\ntext_files: [a=/x/*.txt]\nhf_path: []", {"dataset_files": ("a=/x/*.txt",)}),
  ("dataset_type: hf\ntext_files: []\nhf_path: [a=/x]", {"dataset_files": ("a=/x",)}),
  ("dataset_mixture: proportional\ndataset_weights: []", {"dataset_mixture": ()}),
  ("dataset_mixture: weights\ndataset_weights: [a=0.3, b=0.7]", {"dataset_mixture": ("a=0.3", "b=0.7")}),
  ("dataset_mixture: epochs\ndataset_weights: [a=3, b=0.5]", {"dataset_mixture": ("a=3x", "b=0.5x")}),
  ("ghost_engine: jvp\nghost_schedule: two_pass", {"ghost_schedule": "forward_mode"}),
  ("ghost_engine: graddotprod\nghost_schedule: concat", {"ghost_schedule": "concat"}),
  ("ghost_val_sets: []\nghost_val_domain: v\nghost_val_files: [v=/x/*.txt]", {"ghost_val_sets": ("v=/x/*.txt",)}),
  ("ghost_select: threshold\nghost_select_fraction: 0.5\nghost_select_threshold: 0.0", {"ghost_select_fraction": 0.0}),
  ("ghost_select: topk\nghost_select_fraction: 0.4\nghost_select_threshold: 0.0", {"ghost_select_fraction": 0.4}),
  ("packing: true\ngrain_packing_type: concat_then_split", {"packing": "concat_then_split"}),
  ("packing: false\ngrain_packing_type: first_fit", {"packing": "none"}),
  ("ghost_val_domain: code\nghost_val_sets: []", {"ghost_val_sets": ("code",)}),
  ("ghost_val_domain: manual\nghost_val_sets: []", {"ghost_val_sets": ()}),
  ("ghost_val_domain: manual\nghost_val_sets: [x=code]", {"ghost_val_sets": ("x=code",)}),
  (
    "ghost_reweight: true\nghost_reweight_every: 3\nghost_reweight_step: 0.7\nghost_reweight_floor: 0.1\n"
    "dataset_mixture: weights\ndataset_weights: [a=0.3, b=0.7]",
    {"ghost_reweight": (3.0, 0.7, 0.1)},
  ),
  ("ghost_reweight: false\nghost_reweight_every: 20\nghost_reweight_step: 0.2", {"ghost_reweight": ()}),
  ("enable_checkpointing: false\ncheckpoint_period: 7", {"checkpoint_period": 0}),
  ("enable_checkpointing: true\ncheckpoint_period: 7", {"checkpoint_period": 7}),
  ("sample_tokens: 9\nsample_temperature: 0.1\nsample_every: 4", {"sample_every": 4}),
  (
    "jax_distributed: auto\njax_distributed_coordinator_address: a:1\njax_distributed_num_processes: 2\n"
    "jax_distributed_process_id: 0\njax_distributed_initialization_timeout: 31",
    {"jax_distributed": "auto", "jax_distributed_timeouts": (31, 100)},
  ),
  ("compile_topology: v5e-16\ncompile_topology_num_slices: 2", {"compile_topology": "2xv5e-16"}),
]


@pytest.mark.parametrize(("text", "wanted"), SAVED)
def test_a_saved_configuration_of_an_earlier_version_keeps_its_meaning(text, wanted, tmp_path):
  path = tmp_path / "config.yml"
  path.write_text(
    f"config_is_resolved: true\nghost_enabled: {'ghost_reweight: true' in text or 'select' in text}\n".lower() + text
  )
  if "carries" in str(wanted):
    path.write_text(path.read_text() + "\nghost_schedule: reverse_scan")
  flat = config.load(path).flat()
  assert {key: flat[key] for key in wanted} == wanted


@pytest.mark.parametrize("key", [name for name, other in renamed.OTHER.items() if not other.maxtext])
def test_a_former_name_is_answered_with_the_present_one(key, tmp_path):
  (tmp_path / "own.yml").write_text(f"{key}: 1\n")
  calls = {
    "command line": lambda: config.load(f"{key}=1"),
    "own.yml:1": lambda: config.load(tmp_path / "own.yml"),
    "": lambda: config.replace(config.load(), **{key: 1}),
  }
  for origin, call in calls.items():
    with pytest.raises(config.ConfigError) as caught:
      call()
    (said,) = caught.value.problems
    assert said.startswith(f"key '{key}'") and said.endswith(renamed.OTHER[key].answer) and origin in said


@pytest.mark.parametrize(
  ("overrides", "wanted"),
  [
    ("dataset_type=grain grain_train_files=a=/x/*.array_record", {"dataset_files": ("a=/x/*.array_record",)}),
    ("dataset_type=tfds dataset_name=lm1b:1.1.0", {"dataset_files": ("lm1b:1.1.0",)}),
    ("dataset_type=hf hf_path=/x", {"dataset_files": ("/x",)}),
    ("packing=yes", {"packing": "first_fit"}),
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
   "lora_input_adapters_path:", "normalize_embedding_logits: False", "ici_sequence_parallelism: 1"],
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
  assert [name for name, other in renamed.OTHER.items() if other.maxtext and name not in page] == []


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
