"""Hugging Face folders in and out: the fixtures that transformers wrote, and what must be refused by name."""

import errno
import json
import re
import shutil
import sys
from pathlib import Path

import hf_models
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
from flax import nnx

from maxghost import config, load_model
from maxghost.config import ConfigError
from maxghost.data.tokenizers import load_tokenizer
from maxghost.interop import hf_checkpoint, huggingface_config, model_path, safetensors_files
from maxghost.interop.huggingface import open_tree
from maxghost.interop.quantize import quantize_checkpoint


def silent(line):
  pass


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
  """All tensors of a folder, by the library alone."""
  return {name: x for file in folder.glob("*.safetensors") for name, x in safetensors.numpy.load_file(file).items()}


def rewrite(folder: Path, change) -> None:
  """Writes model.safetensors anew with change(tensors)."""
  safetensors.numpy.save_file(change(tensors_of(folder)), folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
  content = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(content | changes))


@pytest.fixture
def llama(tmp_path):
  """A copy of the llama2 fixture that a test may damage."""
  shutil.copytree(hf_models.FOLDER / "llama2", tmp_path / "llama2")
  return tmp_path / "llama2"


def loaded_labels(place: model_path.ModelPlace, cfg) -> dict[str, np.ndarray]:
  graphdef, state = load_model.load(place, cfg, silent)
  return tiny.by_label(nnx.merge(graphdef, state))


@pytest.mark.parametrize("name", hf_models.NAMES)
def test_import_gives_the_model_and_export_gives_the_same_bits_back(name, tmp_path):
  """Parameters and configuration as hf_models makes them, whose logits are those of transformers."""
  source, imported, exported = hf_models.FOLDER / name, tmp_path / "in", tmp_path / "out"
  cfg = hf_checkpoint.import_model(source, imported, scan_layers=name != "mixtral", say=silent)
  expected_cfg, weights, *_ = hf_models.load(name, attention="autoselected")
  assert huggingface_config.differing(cfg.model, expected_cfg.model) == {}
  found = loaded_labels(*load_model.find(imported, scan_layers=True))
  assert set(found) == set(weights)
  for label, value in weights.items():
    np.testing.assert_array_equal(found[label], value, err_msg=label)
  hf_checkpoint.export_model(imported, exported, shard_bytes=9000, say=silent)
  assert len(list(exported.glob("model-*-of-*.safetensors"))) > 2
  before, after = tensors_of(source), tensors_of(exported)
  assert set(before) == set(after)
  for tensor, value in before.items():
    assert value.dtype == after[tensor].dtype and value.tobytes() == after[tensor].tobytes(), tensor
  read = [huggingface_config.keys_of(safetensors_files.read_json(f / "config.json"), "x") for f in (source, exported)]
  assert read[0] == read[1]


def test_logits_straight_from_the_folder(tmp_path):
  """Sharded, layers unlike each other, experts in one tensor: the model without any import."""
  parity = np.load(hf_models.FOLDER / "gpt_oss" / "logits.npz")
  hf_checkpoint.export_model(hf_models.FOLDER / "gpt_oss", tmp_path / "shards", shard_bytes=9000, say=silent)
  graphdef, state = load_model.load(*load_model.find(tmp_path / "shards"), silent)
  with tiny.cheap_compilation():
    logits = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, parity["tokens"])
  np.testing.assert_allclose(logits, parity["logits"], rtol=0, atol=2e-5)


def test_a_gpt_oss_with_another_clamp_is_exported_with_a_note_and_without_one_refused(tmp_path):
  """transformers 4 clamps at 7 whatever config.json says; 5 clamps at a limit below zero too."""
  source, content = tmp_path / "hf", json.loads((hf_models.FOLDER / "gpt_oss" / "config.json").read_text())
  shutil.copytree(hf_models.FOLDER / "gpt_oss", source)
  for limit, notes in ((7.0, []), (5.0, ["note: transformers 4 does not read swiglu_limit=5 and computes with 7"])):
    (source / "config.json").write_text(json.dumps(content | {"swiglu_limit": limit}))
    hf_checkpoint.export_model(source, tmp_path / f"out{limit}", say=(said := []).append)
    assert [line.partition(";")[0] for line in said if line.startswith("note")] == notes
  cfg = hf_checkpoint.import_model(source, tmp_path / "in", say=silent)
  for limit in (-1.0, 0.0):
    (source / "config.json").write_text(json.dumps(content | {"swiglu_limit": limit}))
    with pytest.raises(ConfigError, match=f"swiglu_limit={limit} must be above 0"):
      load_model.find(source)
    config.save(config.replace(cfg, mlp_activations_limit=limit), tmp_path / "in" / "config.yml")
    with pytest.raises(ConfigError, match=f"swiglu_limit={limit} must be above 0"):
      hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", say=silent)
  assert not (tmp_path / "out").exists()


def test_narrow_weights_keep_their_bits_and_widen_on_request(llama, tmp_path):
  rewrite(llama, lambda tensors: {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
  cfg = hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  assert cfg.model.weight_dtype == "bfloat16" and cfg.model.dtype == "float32"
  place, _ = load_model.find(tmp_path / "in")
  wide = loaded_labels(place, config.replace(cfg, weight_dtype="float32"))
  table = tensors_of(llama)["model.embed_tokens.weight"]
  assert wide["token_embedder/embedding"].dtype == np.float32
  np.testing.assert_array_equal(wide["token_embedder/embedding"], table.astype(np.float32))
  hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", say=silent)
  assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
  assert tensors_of(tmp_path / "out")["model.embed_tokens.weight"].tobytes() == table.tobytes()
  with pytest.raises(ConfigError, match=r"is float32\[29, 12\] there and bfloat16"):
    load_model.load(model_path.find(hf_models.FOLDER / "llama2"), cfg, silent)


def test_files_that_leave_the_first_level_out_or_hold_a_tied_table_twice(tmp_path):
  bare, tied = tmp_path / "bare", tmp_path / "tied"
  shutil.copytree(hf_models.FOLDER / "gpt2", bare)
  rewrite(bare, lambda tensors: {name.removeprefix("transformer."): x for name, x in tensors.items()})
  masks = {f"h.{i}.attn.bias": np.ones((1, 1, 31, 31), np.float32) for i in range(4)}
  rewrite(bare, lambda tensors: tensors | masks)
  nodes = open_tree(bare).nodes
  np.testing.assert_array_equal(
    nodes["decoder", "layers_3", "mlp", "wi", "bias"].read(None),
    tensors_of(hf_models.FOLDER / "gpt2")["transformer.h.3.mlp.c_fc.bias"],
  )
  shutil.copytree(hf_models.FOLDER / "qwen3", tied)
  rewrite(tied, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
  assert ("decoder", "logits_dense", "kernel") not in open_tree(tied).nodes
  rewrite(tied, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
  with pytest.raises(ConfigError, match=r"has unknown lm_head\.weight"):
    open_tree(tied)


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.float32])
@pytest.mark.parametrize(
  ("name", "level", "ignored"),
  [("gpt2", "transformer.", "h.0.attn.bias"), ("llama2", "model.", "layers.0.self_attn.rotary_emb.inv_freq")],
)
def test_tensors_without_a_parameter_say_nothing_of_the_dtype(name, level, ignored, kind, tmp_path):
  """The masks and frequencies that older releases of transformers saved with a model, also of the bare one."""
  shutil.copytree(hf_models.FOLDER / name, tmp_path / "hf")
  extra = {level + ignored: np.ones((2, 3), kind)}
  rewrite(tmp_path / "hf", lambda tensors: {x: v.astype(ml_dtypes.bfloat16) for x, v in tensors.items()} | extra)
  assert model_path.find(tmp_path / "hf").config.model.weight_dtype == "bfloat16"
  rewrite(tmp_path / "hf", lambda tensors: {x.removeprefix(level): v for x, v in tensors.items()})
  cfg = hf_checkpoint.import_model(tmp_path / "hf", tmp_path / "in", say=silent)
  assert cfg.model.weight_dtype == "bfloat16"


def test_a_whole_file_is_preferred_to_shards_as_in_transformers(llama, tmp_path):
  hf_checkpoint.export_model(llama, tmp_path / "shards", shard_bytes=9000, say=silent)
  rewrite(llama, lambda tensors: {name: x + 1 for name, x in tensors.items()})
  for file in (tmp_path / "shards").glob("model*"):  # whole or, as save_pretrained leaves them, in part
    shutil.copy(file, llama)
    read = open_tree(llama).nodes["decoder", "decoder_norm", "scale"].read(None)
    np.testing.assert_array_equal(read, tensors_of(tmp_path / "shards")["model.norm.weight"] + 1)


def test_what_a_training_key_does_is_no_other_model(llama, tmp_path):
  """QK-Clip only scales weights between steps: a run may begin with an import, and is exported."""
  cfg = hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  cfg = config.replace(cfg, use_qk_clip=True, qk_clip_threshold=50.0)
  load_model.check_config(cfg)
  config.save(cfg, tmp_path / "in" / "config.yml")
  hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", say=silent)
  before, after = tensors_of(llama), tensors_of(tmp_path / "out")
  assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


def test_other_files_of_the_folder_need_no_room(llama, tmp_path, monkeypatch):
  (llama / "pytorch_model.bin").write_bytes(bytes(1_000_000))
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=500_000))
  hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
  with pytest.raises(ConfigError, match=r"0\.00 GB free, the checkpoint needs about"):
    hf_checkpoint.import_model(llama, tmp_path / "again", say=silent)


def test_a_tied_gpt2_may_hold_its_table_twice(tmp_path):
  shutil.copytree(hf_models.FOLDER / "gpt2", tmp_path / "tied")
  rewrite(tmp_path / "tied", lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"]})
  assert ("decoder", "logits_dense", "kernel") not in open_tree(tmp_path / "tied").nodes
  rewrite(tmp_path / "tied", lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2})
  with pytest.raises(ConfigError, match=r"has unknown lm_head\.weight"):
    open_tree(tmp_path / "tied")


def test_entries_that_no_key_stands_for_come_back(llama, tmp_path):
  """Through an import, through a run that started from it, and straight from the folder."""
  kept = {"max_position_embeddings": 97, "initializer_range": 0.017, "eos_token_id": [2, 7], "use_cache": False}
  edit_config(llama, quantization_config={"quant_method": "none"}, **kept)
  cfg = hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  run = tmp_path / "run"
  shutil.copytree(tmp_path / "in" / "items", run / "checkpoints" / "3" / "items")
  config.save(cfg, run / "config.yml")
  place = model_path.find(tmp_path / "in")
  model_path.keep_huggingface(place, cfg, run)
  gone = tmp_path / "moved"
  for source, target in ((tmp_path / "in", "out"), (llama, "straight"), (run, "tuned"), (run, "later")):
    hf_checkpoint.export_model(source, tmp_path / target, say=silent)
    content = json.loads((tmp_path / target / "config.json").read_text())
    assert {name: content.get(name) for name in kept} == kept and "quantization_config" not in content
    if source == run and (tmp_path / "in").exists():
      (tmp_path / "in").rename(gone)  # a run needs the import no more
  (run / "huggingface.json").unlink()
  hf_checkpoint.export_model(run, tmp_path / "alone", say=silent)
  assert json.loads((tmp_path / "alone" / "config.json").read_text())["max_position_embeddings"] == 2048


def test_an_export_has_room_for_stretched_positions(tmp_path, llama):
  """transformers warns of fewer positions than YaRN stretches to; its release 5 reads no Llama of uneven heads."""
  scaling = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 5.0, "original_max_position_embeddings": 4096}
  content = json.loads((llama / "config.json").read_text()) | {"rope_parameters": scaling}
  del content["max_position_embeddings"]
  (llama / "config.json").write_text(json.dumps(content))
  said = []
  hf_checkpoint.export_model(llama, tmp_path / "out", say=said.append)
  assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 20480
  assert not any("transformers 5" in line for line in said)
  edit_config(llama, num_attention_heads=24, num_key_value_heads=8, head_dim=2)
  hf_checkpoint.export_model(llama, tmp_path / "uneven", say=said.append)
  assert any("transformers 5 reads no Llama" in line for line in said)


def drop(*names):
  return lambda tensors: {name: x for name, x in tensors.items() if name not in names}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (drop("model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
     r"lacks model\.norm\.weight, model\.layers\.1\.mlp\.up_proj\.weight"),
    (lambda tensors: tensors | {"model.layers.3.mlp.up_proj.weight": np.zeros(2)},
     r"has unknown model\.layers\.3\.mlp\.up_proj\.weight"),
    (lambda tensors: tensors | {"model.norm.weight": np.zeros(7, np.float32)},
     r"model\.norm\.weight is \[7\], config\.json makes it \[12\]"),
    (lambda tensors: tensors | {"model.norm.weight": np.zeros(12, np.complex64)}, "has dtype C64"),
    (lambda tensors: tensors | {"model.layers.0.input_layernorm.weight": np.zeros(12, np.float16)},
     r"dtype float16 in layers_0 but float32 in layers_1; .* \(hf import: --no-scan_layers\)"),
  ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(llama, tmp_path, change, message):
  rewrite(llama, change)
  with pytest.raises(ConfigError, match=message):
    hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  assert not (tmp_path / "in").exists()


def test_layers_of_unlike_dtypes_are_quantised_as_the_refusal_says(llama, tmp_path):
  rewrite(llama, lambda tensors: tensors | {"model.layers.0.input_layernorm.weight": np.zeros(12, np.float16)})
  with pytest.raises(ConfigError, match="quantize: scan_layers=false"):
    quantize_checkpoint(llama, tmp_path / "out", "int8w", say=silent)
  hf_checkpoint.import_model(llama, tmp_path / "in", scan_layers=False, say=silent)
  assert not quantize_checkpoint(tmp_path / "in", tmp_path / "out", "int8w", say=silent).model.scan_layers


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "llma"}, "model_type=llma is not known.*llama"),
    ({"model_type": "mixtral"}, "num_local_experts"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu is not known here; known is silu"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type=linear is not known"),
    ({"num_attention_heads": 5}, "base_num_query_heads=5 is not a multiple"),
    ({"hidden_size": "wide"}, "hidden_size=wide must be int"),
    ({"num_attention_heads": 0}, "num_attention_heads=0 is below the least allowed value 1"),
    ({"rms_norm_eps": [1]}, r"rms_norm_eps=\[1\] must be float"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta=x must be float"),
    ({"rope_parameters": [1]}, "rope_parameters=.* must be an object"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "needs low_freq_factor"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": None}}, "rope_type=yarn needs factor"),
    (
      {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}},
      "original_max_position_embeddings=x must be int",
    ),
    (
      {
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 16,
      },
      "original_max_position_embeddings=16, beside 64 for the rotation",
    ),
    ({"layer_types": [["full_attention"]] * 3}, "layer_types=.* does not read it, all its layers have full_attention"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is above the greatest"),
    (
      {"model_type": "mixtral", "num_local_experts": 9000, "num_experts_per_tok": 1, "num_hidden_layers": 90_000},
      "more than 1,000,000 layers",
    ),
    ({"num_hidden_layers": 4}, r"lacks model\.layers\.3\.input_layernorm\.weight"),
    ({"num_hidden_layers": 2}, r"has unknown model\.layers\.2\."),
    ({"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.q_proj\.bias"),
    ({"tie_word_embeddings": True}, r"has unknown lm_head\.weight"),
  ],
)
def test_a_config_json_of_another_function_is_refused(llama, changes, message):
  edit_config(llama, **changes)
  with pytest.raises(ConfigError, match=message):
    model_path.find(llama)
    open_tree(llama)


def test_a_gpt_oss_without_sliding_layers_has_a_window_all_the_same(tmp_path):
  """transformers forms a mask with it for any gpt-oss, and stops where config.json has none."""
  shutil.copytree(hf_models.FOLDER / "gpt_oss", tmp_path / "hf")
  layers = json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"]
  edit_config(tmp_path / "hf", layer_types=["full_attention"] * layers)
  hf_checkpoint.export_model(tmp_path / "hf", tmp_path / "out", say=silent)
  content = json.loads((tmp_path / "out" / "config.json").read_text())
  assert content["sliding_window"] == 128 and content["layer_types"] == ["full_attention"] * layers
  assert model_path.find(tmp_path / "out").config.model.attention_type == ("global",)


def test_a_window_that_begins_at_a_huge_layer_begins_nowhere():
  content = json.loads((hf_models.FOLDER / "qwen3" / "config.json").read_text())
  content |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 10**12}
  assert huggingface_config.keys_of(content, "x")["attention_type"] == ("global",)
  content |= {"max_window_layers": 0}
  assert huggingface_config.keys_of(content, "x")["attention_type"] == ("local_sliding",)
  assert huggingface_config.keys_of(content | {"use_sliding_window": None}, "x")["attention_type"] == ("global",)


@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [  # transformers has a window of 4,096 and a first layer of 28 where these are missing
    ("qwen3", {"max_window_layers": 0}, "x has no sliding_window"),
    ("qwen3", {"sliding_window": 8}, "x has no max_window_layers or layer_types"),
    ("qwen3", {"sliding_window": 8, "layer_types": [["full_attention"]] * 3}, "layer_types=.* must name"),
    ("qwen3_moe", {"max_window_layers": 0}, "x has no sliding_window"),
    # its first releases with Qwen3-MoE read max_window_layers, the present ones do not
    ("qwen3_moe", {"sliding_window": 8, "max_window_layers": 1}, "max_window_layers=1: some releases of transformers"),
    ("qwen3_moe", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "Qwen3MoeForCausalLM .* not read it"),
    ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, "MistralForCausalLM .* not read it"),
    ("llama2", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, "LlamaForCausalLM .* not read it"),
  ],
)
def test_which_layers_slide_is_what_every_release_of_transformers_reads(name, changes, message):
  content = json.loads((hf_models.FOLDER / name / "config.json").read_text())
  content = {entry: value for entry, value in content.items() if "wind" not in entry and entry != "layer_types"}
  with pytest.raises(ConfigError, match=message):
    huggingface_config.keys_of(content | {"use_sliding_window": True} | changes, "x")


def test_all_layers_of_qwen3_moe_slide_without_a_first_one():
  content = json.loads((hf_models.FOLDER / "qwen3_moe" / "config.json").read_text())
  keys = huggingface_config.keys_of(content | {"use_sliding_window": True, "sliding_window": 8}, "x")
  assert (keys["attention_type"], keys["sliding_window_size"]) == (("local_sliding",), 8)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("changes", [{"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}])
def test_transformers_has_a_wavelength_of_these_models_where_it_is_missing(name, changes):
  content = json.loads((hf_models.FOLDER / name / "config.json").read_text())
  content |= {"rope_parameters": None, "rope_scaling": {"rope_type": "default"}} | changes
  with pytest.raises(ConfigError, match=r"x has no rope_theta$"):
    huggingface_config.keys_of(content, "x")


def test_both_releases_of_transformers_read_the_same_rotation():
  content = json.loads((hf_models.FOLDER / "gpt_oss" / "config.json").read_text())
  keys = lambda **changes: huggingface_config.keys_of(content | {"rope_theta": 700.0} | changes, "x")  # noqa: E731
  scaling = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}
  assert keys(rope_scaling=scaling)["rope_factor"] == 3.0  # both prefer rope_scaling
  with pytest.raises(ConfigError, match="x has no rope_scaling or rope_parameters"):  # 5 scales by 32, 4 does not
    keys(rope_scaling=None, rope_parameters=None)
  model = config.ModelConfig(**keys(rope_parameters={"rope_type": "default"}, vocab_size=29))
  written = huggingface_config.config_json(model, "float32", 64, {})
  assert written["rope_scaling"] is None  # where it is missing, 4 scales by 32


@pytest.mark.parametrize(
  ("name", "entries"),
  [
    ("mistral", ["sliding_window"]), ("mixtral", ["rms_norm_eps"]), ("qwen3", ["head_dim"]),
    ("qwen3_moe", ["num_key_value_heads"]),
  ],
)  # fmt: skip
def test_what_transformers_would_fill_in_from_one_model_must_be_there(name, entries):
  content = json.loads((hf_models.FOLDER / name / "config.json").read_text())
  huggingface_config.keys_of(content, "x")
  with pytest.raises(ConfigError, match=f"x has no {' or '.join(entries)}"):
    huggingface_config.keys_of({entry: value for entry, value in content.items() if entry not in entries}, "x")


@pytest.mark.parametrize("named", [3, None, "../model.safetensors", ""])
def test_an_index_of_something_else_than_files_beside_it_is_refused(named, tmp_path):
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named}}))
  with pytest.raises(ConfigError, match=r"is damaged: it lists .* no name of a file beside it"):
    safetensors_files.open_tensors(tmp_path)


def test_an_export_takes_no_configuration_of_another_model(llama, tmp_path):
  """Shapes tell nothing of the rotation."""
  cfg = config.replace(model_path.find(llama).config, rope_max_timescale=9.0)
  with pytest.raises(ConfigError, match=r"--config is another model than .*: they differ in rope_max_timescale"):
    hf_checkpoint.export_model(llama, tmp_path / "out", cfg=cfg)


@pytest.mark.parametrize("ids", ["end", [1, "x"], 1 << 40, 1.5, True, {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(ids, tmp_path):
  make_tokenizer(tmp_path, 3, begins=True)
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
  with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id=.* is no token id"):
    _ = load_tokenizer("huggingface", str(tmp_path)).stop_ids


def test_yarn_with_another_attention_factor_is_refused():
  content = json.loads((hf_models.FOLDER / "gpt_oss" / "config.json").read_text())
  content["rope_parameters"]["attention_factor"] = 1.0
  assert huggingface_config.keys_of(content, "x")["rope_attention_scaling"] is False
  content["rope_parameters"]["attention_factor"] = 1.5
  with pytest.raises(ConfigError, match=r"attention_factor=1\.5"):
    huggingface_config.keys_of(content, "x")


def test_rotary_words_of_transformers_4_mean_the_same():
  content = json.loads((hf_models.FOLDER / "llama3" / "config.json").read_text())
  rope = content.pop("rope_parameters")
  old = content | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
  new = json.loads((hf_models.FOLDER / "llama3" / "config.json").read_text())
  assert huggingface_config.keys_of(old, "x") == huggingface_config.keys_of(new, "x")


def test_cut_and_half_copied_files(llama, tmp_path):
  file = llama / "model.safetensors"
  whole = file.read_bytes()
  for size in (len(whole) - 3, 20, 0):
    file.write_bytes(whole[:size])
    with pytest.raises(ConfigError, match="is cut or damaged"):
      hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  file.unlink()
  with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
    model_path.find(llama)
  hf_checkpoint.export_model(hf_models.FOLDER / "llama2", tmp_path / "shards", shard_bytes=9000, say=silent)
  lost = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
  lost.unlink()
  with pytest.raises(ConfigError, match=f"half copied.*{lost.name}"):
    model_path.find(tmp_path / "shards")
  assert not (tmp_path / "in").exists()


def test_a_full_disk_leaves_no_target(monkeypatch, tmp_path):
  real, written = safetensors_files._write_file, []

  def full(file, tensors):
    if written:
      raise OSError(errno.ENOSPC, "No space left on device", str(file))
    written.append(file)
    real(file, tensors)

  monkeypatch.setattr(safetensors_files, "_write_file", full)
  with pytest.raises(ConfigError, match=r"could not be written.*No space left on device.*nothing is left there"):
    hf_checkpoint.export_model(hf_models.FOLDER / "llama2", tmp_path / "out", shard_bytes=9000, say=silent)
  assert written and list(tmp_path.iterdir()) == []


def test_what_was_written_is_read_again(monkeypatch, tmp_path, capsys):
  """A writer that changes one value leaves nothing and the exit code is 1."""
  real = safetensors_files._write_file

  def damaging(file, tensors):
    real(file, tensors)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)

  monkeypatch.setattr(safetensors_files, "_write_file", damaging)
  assert hf_checkpoint.main(["export", str(hf_models.FOLDER / "llama2"), str(tmp_path / "out")]) == 1
  assert "verification failed: 1 parameters differ" in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_targets_and_sources_that_are_refused(llama, tmp_path, capsys):
  for target, message in ((llama, "equals source"), (llama / "x", "lies inside the source"),
                          (tmp_path, "holds the source")):  # fmt: skip
    assert hf_checkpoint.main(["import", str(llama), str(target)]) == 2
    assert message in capsys.readouterr().err
  assert hf_checkpoint.main(["import", str(tmp_path), str(tmp_path / "in")]) == 2
  assert "is no Hugging Face model folder" in capsys.readouterr().err
  for name in ("llama", "llama2.gguf"):
    assert hf_checkpoint.main(["import", str(tmp_path / name), str(tmp_path / "in")]) == 2
    assert f"there is no {tmp_path / name}; nearest is {llama}" in capsys.readouterr().err
  assert hf_checkpoint.main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
  assert "there is no model folder" in capsys.readouterr().err
  assert hf_checkpoint.main(["import", str(llama), str(tmp_path / "in")]) == 0
  assert hf_checkpoint.main(["import", str(llama), str(tmp_path / "in")]) == 2
  assert "exists; name a new folder" in capsys.readouterr().err


def test_paths_may_lead_through_the_folder_above(llama, tmp_path, monkeypatch):
  (tmp_path / "beside").mkdir()
  monkeypatch.chdir(tmp_path / "beside")
  cfg = hf_checkpoint.import_model("../llama2", "../beside/../in", say=silent)
  assert cfg.checkpoint.load_parameters_path == str(tmp_path / "in")
  found = loaded_labels(*load_model.find("../in"))
  np.testing.assert_array_equal(found["token_embedder/embedding"], tensors_of(llama)["model.embed_tokens.weight"])
  hf_checkpoint.export_model("../in", "../out", say=silent)
  assert tensors_of(tmp_path / "out").keys() == tensors_of(llama).keys()


def make_tokenizer(folder: Path, num_words: int, begins: bool) -> None:
  """A tokenizer.json of byte-level BPE without merges: 256 bytes, then specials <s>, </s> and num_words more."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, processors

  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
  made.add_special_tokens(["<s>", "</s>", *(f"<|{i}|>" for i in range(num_words))])
  made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  if begins:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
  made.save(str(folder / "tokenizer.json"))


def test_the_tokenizer_comes_along_and_must_fit(llama, tmp_path):
  def widen(tensors):
    wide = {name: np.resize(tensors[name], (261, 12)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return tensors | wide

  rewrite(llama, widen)
  edit_config(llama, vocab_size=261)
  make_tokenizer(llama, 3, begins=True)
  (llama / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
  cfg = hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  assert (cfg.data.tokenizer_type, cfg.data.add_bos) == ("huggingface", True)
  shutil.move(tmp_path / "in", tmp_path / "moved")
  _, found = load_model.find(tmp_path / "moved")
  assert Path(found.data.tokenizer_path) == tmp_path / "moved" / "tokenizer"
  assert load_tokenizer("huggingface", found.data.tokenizer_path).stop_ids == {257, 259}
  hf_checkpoint.export_model(tmp_path / "moved", tmp_path / "out", say=silent)
  assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
  content = json.loads((tmp_path / "out" / "config.json").read_text())
  assert (content["bos_token_id"], content["eos_token_id"]) == (256, 257)
  make_tokenizer(llama, 3, begins=False)
  assert model_path.find(llama).config.data.add_bos is False
  make_tokenizer(llama, 4, begins=True)
  with pytest.raises(ConfigError, match="has ids up to 261, but the model's vocabulary ends at 260"):
    hf_checkpoint.import_model(llama, tmp_path / "again", say=silent)


def test_a_model_of_bytes_is_exported_with_its_tokenizer_and_template(llama, tmp_path, monkeypatch):
  tables = ("model.embed_tokens.weight", "lm_head.weight")
  rewrite(llama, lambda tensors: tensors | {name: np.resize(tensors[name], (261, 12)) for name in tables})
  edit_config(llama, vocab_size=261)
  cfg = hf_checkpoint.import_model(llama, tmp_path / "in", say=silent)
  template = tmp_path / "in" / "tokenizer" / "chat_template.jinja"
  template.parent.mkdir()
  template.write_text("{{ messages[0].content }}")
  keys = {"objective": "sft", "chat_template_path": "/moved/away", "tokenizer_type": "byte", "add_bos": False}
  config.save(config.replace(cfg, **keys), tmp_path / "in" / "config.yml")
  for package in ("safetensors", "tokenizers"):  # named before the weights are written
    with monkeypatch.context() as patch:
      patch.setitem(sys.modules, package, None)
      patch.setattr(hf_checkpoint, "write_tensors", lambda *_: pytest.fail("it was written"))
      with pytest.raises(ConfigError, match=rf"an export of .*/in needs the package {package}; .*pip install"):
        hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", say=silent)
  hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", say=silent)
  assert (tmp_path / "out" / template.name).read_text() == template.read_text()
  found = model_path.find(tmp_path / "out").config.data
  assert (found.tokenizer_type, found.add_bos) == ("huggingface", False)


def test_keys_that_differ_from_the_given_model_are_listed(llama):
  path = f"load_parameters_path={llama}"
  with pytest.raises(ConfigError, match=r"is another model .*base_emb_dim=12 there, 256 here; .*vocab_size=29 there"):
    load_model.check_config(config.load(path))
  # Keys that only experts read have the same values in both; what to do comes last.
  with pytest.raises(ConfigError) as caught:
    load_model.check_config(config.load(path, "num_experts=4", "num_experts_per_tok=1", "norm_topk_prob=false"))
  pairs = re.findall(r"(\w+)=(\S+) there, (\S+) here", str(caught.value))
  assert ("num_experts", "1", "4") in pairs and all(there != here for _, there, here in pairs), pairs
  assert str(caught.value).endswith(f"or let maxghost checkpoint hf import {llama} FOLDER write a config with them")
  cfg = config.replace(model_path.find(llama).config, load_parameters_path=str(llama), attention="dot_product")
  assert load_model.check_config(cfg).tree == llama


def test_export_refuses_what_transformers_has_no_model_for():
  cfg = load_model.find(hf_models.FOLDER / "llama2")[1]
  for changes, message in (
    ({"mlp_activations": ("gelu", "linear")}, r"mlp_activations=\[gelu, linear\]: LlamaForCausalLM of transformers"),
    ({"use_qk_norm": True}, "use_qk_norm=true"),
    ({"mlp_activations_limit": 7.0}, r"mlp_activations_limit=7\.0"),
    ({"rope_type": "none"}, "rope_type=none"),
  ):
    with pytest.raises(ConfigError, match=message):
      huggingface_config.config_json(config.replace(cfg, **changes).model, "float32", 99, {})
