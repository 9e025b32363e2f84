"""A new dense family is its record and a model file: registered here alone, it is built, checked, moved."""

import json

import hf_models
import numpy as np
import pytest
import safetensors.numpy
import tiny
from flax import nnx

from maxghost import config, load_model
from maxghost.checkpoint.layouts import MAXGHOST, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_store import tree_from_memory, write_json
from maxghost.config import ConfigError
from maxghost.config.families import FAMILIES, Entry, Family, HuggingFace, TensorRule, register, table
from maxghost.interop import hf_checkpoint, huggingface, huggingface_config, safetensors_files
from maxghost.training.state import to_tree

# Names of its own for modules, tensors and config.json; weights [in, out]; query and key side by side.
TENSORS = (
  *table("", "", """
    wte.weight  token_embedder/embedding      V>D
    ln_f.scale  decoder/decoder_norm/scale    D
    head.weight decoder/logits_dense/kernel   D>V  !logits_via_embedding
  """),
  *table("blocks.{layer}.", "decoder/layers/", """
    ln_a.scale  {norm_0}/scale                                  D
    ln_b.scale  {norm_1}/scale                                  D
    qk.weight   {attention}/query/kernel+{attention}/key/kernel D>Hh
    v.weight    {attention}/value/kernel                        D>Kh
    o.weight    {attention}/out/kernel                          Hh>D
    up.weight   {mlp}/wi_0/kernel|{mlp}/wi_1/kernel             D>F
    down.weight {mlp}/wo/kernel                                 F<D
  """),
)  # fmt: skip
TOY = Family(
  "toy",
  HuggingFace(
    "toy_lm", "ToyForCausalLM",
    (*(entry for entry in FAMILIES["mistral"].huggingface.entries if entry.key != "normalization_layer_epsilon"),
     Entry("normalization_layer_epsilon", ("eps",), 1e-3)),
    TENSORS, {"activation": ("swiglu", "silu_glu")}, prefix="",
  ),
  needs={"use_qk_norm": False, "mlp_activations": ("silu", "linear")},
  example="toy-1b", attention="attn", mlp="ffn", norms=("ln_attn", "ln_ffn"),
)  # fmt: skip


@pytest.fixture
def toy():
  register(TOY)
  yield TOY
  del FAMILIES["toy"]


def silent(line):
  pass


@pytest.fixture
def cfg(toy, tmp_path):
  (tmp_path / "toy.yml").write_text("decoder_block: toy\n")
  return config.load(tmp_path / "toy.yml", *(f"{key}={value}" for key, value in SIZES_OF_THE_MODEL.items()))


SIZES_OF_THE_MODEL = tiny.SIZES | {"base_num_kv_heads": 8}


def test_its_layers_have_its_names_and_the_function_of_llama(cfg):
  model, llama = tiny.make_model(cfg), tiny.make_model(config.replace(cfg, decoder_block="llama2"))
  inner = {label.split("/")[2] for label in tiny.by_label(model) if label.startswith("decoder/layers/")}
  assert inner == {"attn", "ffn", "ln_attn", "ln_ffn"}
  names = {"attn": "self_attention", "ffn": "mlp"}
  names |= {"ln_attn": "pre_self_attention_layer_norm", "ln_ffn": "post_self_attention_layer_norm"}
  theirs = tiny.by_label(llama)
  renamed = {"/".join(names.get(part, part) for part in label.split("/")): label for label in tiny.by_label(model)}
  assert set(renamed) == set(theirs)
  same = tiny.with_values(nnx.eval_shape(lambda: model), {label: theirs[name] for name, label in renamed.items()})
  tokens = np.arange(2 * 13).reshape(2, 13) % 263
  with tiny.cheap_compilation():
    np.testing.assert_array_equal(same(tokens), llama(tokens))


def test_a_folder_goes_in_and_out_bit_by_bit(cfg, tmp_path):
  values = tiny.by_label(tiny.make_model(cfg))
  tree = {"model": to_tree(nnx.state(tiny.make_model(cfg)))}
  checkpoint = read_checkpoint(tree_from_memory(tree), ReadOptions(layout=MAXGHOST, scan_axis=0))
  (tmp_path / "folder").mkdir()
  safetensors_files.write_tensors(tmp_path / "folder", huggingface.planned_tensors(checkpoint, cfg.model), 1 << 30)
  content = huggingface_config.config_json(cfg.model, "float32", 64, {})
  assert (content["model_type"], content["eps"], content["activation"]) == ("toy_lm", 3e-3, "swiglu")
  write_json(tmp_path / "folder" / "config.json", content)

  tensors = safetensors.numpy.load_file(tmp_path / "folder" / "model.safetensors")
  assert len(tensors) == 3 + 3 * 7
  layer = {
    name.split("/")[-2]: value[1] for name, value in values.items() if name.endswith("kernel") and "layers" in name
  }
  np.testing.assert_array_equal(tensors["blocks.1.qk.weight"][:, 48:], layer["key"].reshape(20, 48))
  np.testing.assert_array_equal(tensors["blocks.1.up.weight"][:, 1::2], layer["wi_1"])
  np.testing.assert_array_equal(tensors["blocks.1.down.weight"], layer["wo"].T)

  imported = hf_checkpoint.import_model(tmp_path / "folder", tmp_path / "in", say=silent)
  assert imported.model.decoder_block == "toy" and imported.model.normalization_layer_epsilon == 3e-3
  graphdef, state = load_model.load(*load_model.find(tmp_path / "in"), silent)
  found = tiny.by_label(nnx.merge(graphdef, state))
  assert {label: value.tobytes() for label, value in found.items()} == {k: v.tobytes() for k, v in values.items()}
  hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", say=silent)
  files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("folder", "out")]
  assert files[0] == files[1]


def test_its_keys_are_checked(cfg, toy):
  with pytest.raises(ConfigError, match=r"toy has use_qk_norm=false, not true; set it .model_name=toy-1b"):
    config.replace(cfg, use_qk_norm=True)
  with pytest.raises(ConfigError, match="decoder_block=toy has no experts, but num_experts=4"):
    config.replace(cfg, num_experts=4, num_experts_per_tok=2)
  with pytest.raises(ValueError, match="decoder_block=toy is registered already"):
    register(toy)


def test_an_unknown_family_is_named_with_the_nearest():
  with pytest.raises(ConfigError, match=r"decoder_block=lama2.*did you mean 'llama2'"):
    config.load("decoder_block=lama2")


def test_lines_of_a_table():
  rules = table("a.", "b/", "x.weight p|q E:Dh<M key\ny r D")
  assert rules == (
    TensorRule("a.x.weight", ("b/p", "b/q"), "M", "Dh", "E", transpose=True, interleaved=True, when="key"),
    TensorRule("a.y", ("b/r",), "D"),
  )


@pytest.mark.parametrize("first", [0, 1, 3])
def test_an_export_says_from_which_layer_on_windows_slide(first):
  """The first releases of transformers with Qwen3 read max_window_layers alone."""
  content = json.loads((hf_models.FOLDER / "qwen3" / "config.json").read_text())
  content |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": first}
  content |= {"num_hidden_layers": 3, "vocab_size": 29}
  keys = huggingface_config.keys_of(content, "x")
  written = huggingface_config.config_json(config.ModelConfig(**keys), "float32", 64, {})
  assert written["layer_types"] == ["full_attention"] * first + ["sliding_attention"] * (3 - first)
  assert huggingface_config.keys_of(written | {"layer_types": None}, "x") == keys
