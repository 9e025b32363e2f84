"""Weights in few bits: int4 by loops, models of parts against models of what they stand for, and their checkpoints.

d inputs, p outputs, t = 8 inputs of a block, V vocabulary.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import routed
import tiny
from flax import nnx

from maxghost import adapters, config, generate, load_model, models, train
from maxghost.adapters import quantized
from maxghost.checkpoint.compare import compare
from maxghost.checkpoint.layouts import MAXGHOST, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_store import open_tree, tree_from_memory, write_json
from maxghost.config import ConfigError
from maxghost.interop import __main__ as checkpoint_tools
from maxghost.interop import hf_checkpoint, huggingface, huggingface_config, safetensors_files
from maxghost.interop.convert import convert
from maxghost.training.state import to_tree

TIED = {"logits_via_embedding": True}


def test_int4_is_near_the_best_of_all_steps_and_zeros():
  """Codes and bytes by the formula; a block of 8 inputs errs as with the best of all 256 pairs, or little more."""
  rng = np.random.default_rng(0)
  w = rng.normal(size=(64, 2, 3)).astype(np.float32)
  w[32:40, 1, 2] = 0.25  # a block of one value
  w[:, 0, 1] = w[8:16, 1, 0] = 0
  w[0, 0, 0] = 6.0  # one that clipping would lose
  parts = quantized.quantize(jnp.asarray(w), "int4", 0, 1)
  found = np.asarray(quantized.dequantize(parts, "int4", jnp.float32))
  assert {name: (x.dtype, x.shape) for name, x in parts.items()} == {
    "codes": (jnp.uint8, (32, 2, 3)), "steps": (jnp.uint8, (8, 6)), "scales": (jnp.bfloat16, (1, 6)),
  }  # fmt: skip
  codes, steps = (np.asarray(parts[name]).reshape(-1, 6) for name in ("codes", "steps"))
  scales, flat = np.asarray(parts["scales"], np.float64)[0], w.reshape(64, 6).astype(np.float64)
  ratios = []
  for j in range(6):
    columns = flat[:, j].reshape(8, 8)
    wanted = max(np.ptp(columns, 1).max() / 15, np.abs(columns).max() / 12)
    assert scales[j] == np.float64(np.float32(wanted).astype(ml_dtypes.bfloat16))
    for block in range(8):
      held = lambda k, z, code, s=scales[j]: (code - (12 + 4 * z) / 6) * s * 2.0 ** (-k / 8)  # noqa: E731
      b = flat[8 * block :, j][:8]
      pairs = codes[4 * block :, j][:4]
      own = held(int(steps[block, j]) % 16, int(steps[block, j]) // 16, np.stack([pairs % 16, pairs // 16], 1).ravel())
      np.testing.assert_allclose(found.reshape(64, 6)[8 * block :, j][:8], own, rtol=1e-6)
      values = (held(k, z, np.arange(16)) for k in range(16) for z in range(16))
      best = min(np.square(np.abs(b[:, None] - v).min(1)).sum() for v in values)
      if np.ptp(b):
        ratios.append(np.square(own - b).sum() / best)
      else:
        np.testing.assert_allclose(own, b, rtol=0.05)  # 0 exactly
  assert min(ratios) > 1 - 1e-6 and max(ratios) < 1.5 and np.mean(ratios) < 1.03
  assert sum(x.nbytes for x in parts.values()) == w.size * 5 // 8 + 2 * 6


@pytest.mark.parametrize(
  ("quantization", "changes"),
  [
    pytest.param("int8w", TIED, id="int8w-tied"),
    pytest.param("int4w", routed.MIXTRAL, id="int4w-experts"),
    pytest.param("int4w", TIED, id="int4w-tied", marks=pytest.mark.slow),
    pytest.param("int8w", routed.MIXTRAL, id="int8w-experts", marks=pytest.mark.slow),
  ],
)
def test_a_model_of_parts_is_the_model_of_what_they_stand_for(quantization, changes):
  cfg = tiny.make_config(**changes)
  plain, narrow = tiny.make_model(cfg), quantized.narrow(tiny.make_model(cfg), quantization)
  abstract = adapters.create_abstract(config.replace(cfg, quantization=quantization))
  assert jax.tree.map(jnp.shape, nnx.state(abstract)) == jax.tree.map(jnp.shape, nnx.state(narrow))
  places = quantized.places(plain, quantization)
  assert not any("gate" in label for label in places) and "token_embedder/embedding" in places
  before = {label: np.asarray(getattr(module, name)[...]) for label, (module, name, _) in places.items()}
  for label, (module, name, form) in places.items():
    kernel, (in_axes, out_axes) = getattr(module, name), quantized.matrix_axes(module)
    depth = kernel.ndim - in_axes - out_axes
    held = quantized.dequantize(quantized.quantize(kernel[...], form, depth, in_axes), form, jnp.float32, depth)
    setattr(module, name, kernel.replace(held.reshape(kernel.shape)))
    error = np.abs(np.asarray(held).reshape(kernel.shape) - before[label]).max() / np.abs(before[label]).max()
    assert 0 < error < (0.1 if form == "int4" else 0.005)
  batch = tiny.make_batch(tiny.PACKED[:2], seed=4)
  np.testing.assert_allclose(tiny.logits(narrow, batch), tiny.logits(plain, batch), rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A Hugging Face folder of a tiny model, imported with stacked layers and with a configuration of byte tokens."""
  path = tmp_path_factory.mktemp("model")
  cfg = tiny.make_config()
  tree = {"model": to_tree(nnx.state(tiny.make_model(cfg)))}
  checkpoint = read_checkpoint(tree_from_memory(tree), ReadOptions(layout=MAXGHOST, scan_axis=0))
  (path / "hf").mkdir()
  safetensors_files.write_tensors(path / "hf", huggingface.planned_tensors(checkpoint, cfg.model), 1 << 30)
  write_json(path / "hf" / "config.json", huggingface_config.config_json(cfg.model, "float32", 64, {}))
  hf_checkpoint.import_model(path / "hf", path / "stacked", say=lambda _: None)
  config.save(config.replace(config.load(path / "stacked/config.yml"), tokenizer_type="byte", attention="dot_product"),
              path / "stacked/config.yml")  # fmt: skip
  return path


@pytest.mark.parametrize("quantization", ["int4w", pytest.param("int8w", marks=pytest.mark.slow)])
def test_a_checkpoint_in_few_bits(folder, tmp_path, capsys, quantization):
  """Written a matrix at a time with little memory, it is what loading makes of the whole one, in any layout."""
  few = tmp_path / "few"
  arguments = [str(folder / "stacked"), str(few), "--quantization", quantization, "--ram_mb", "0.002"]
  assert checkpoint_tools.main(["quantize", *arguments]) == 0
  place, cfg = load_model.find(few)
  assert cfg.model.quantization == quantization
  graphdef, state = load_model.load(place, cfg)
  made, expected = load_model.load(*load_model.find(folder / "stacked", quantization=quantization))
  assert made == graphdef
  flat, wanted = dict(nnx.to_flat_state(state)), dict(nnx.to_flat_state(expected))
  assert flat.keys() == wanted.keys()
  for path, v in flat.items():
    np.testing.assert_array_equal(v[...], wanted[path][...], err_msg=str(path))
  convert(few, tmp_path / "unscanned", to=MAXGHOST, layers="unscanned", params_only=True, say=lambda _: None)
  found, same = open_tree(tmp_path / "unscanned"), open_tree(few)
  assert len(found.arrays()) > len(same.arrays())
  both = (read_checkpoint(raw) for raw in (same, found))
  assert not compare(*both, params_only=True).rows
  capsys.readouterr()
  assert generate.main([str(few), "--prompt", "ab", "--max_new_tokens", "4"]) == 0
  text = capsys.readouterr().out
  stacked = str(folder / "stacked")
  assert generate.main([stacked, "--prompt", "ab", "--max_new_tokens", "4", "--quantization", quantization]) == 0
  assert capsys.readouterr().out == text
  for command in (
    lambda: train.main([f"load_parameters_path={few}", f"base_output_directory={tmp_path}", *sizes_of(cfg)]),
    lambda: train.main([f"quantization={quantization}", f"base_output_directory={tmp_path}"]),
    lambda: checkpoint_tools.main(["quantize", str(few), str(tmp_path / "again"), "--quantization", "int8w"]),
    lambda: checkpoint_tools.main(["hf", "export", str(few), str(tmp_path / "out")]),
    lambda: generate.main([str(few), "--prompt", "ab", "--adapter", "x"]),
  ):
    assert command() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and quantization in error and "maxghost generate" in error
  assert {path.name for path in tmp_path.iterdir()} == {"few", "unscanned"}


def test_a_run_that_began_with_a_full_state_is_quantised(folder, tmp_path):
  run, few = tmp_path / "run", tmp_path / "few"
  shutil.copytree(folder / "stacked", run)
  began = {"load_full_state_path": "earlier", "load_parameters_path": ""}
  config.save(config.replace(config.load(run / "config.yml"), **began), run / "config.yml")
  assert checkpoint_tools.main(["quantize", str(run), str(few), "--quantization", "int8w"]) == 0
  assert load_model.find(few)[1].checkpoint.given == str(few)


def sizes_of(cfg) -> list[str]:
  names = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim", "vocab_size",
           "base_num_decoder_layers", "rope_max_timescale", "normalization_layer_epsilon")  # fmt: skip
  return [f"{name}={getattr(cfg.model, name)}" for name in names]


@pytest.mark.parametrize("quantization", ["int8w", "int4w"])
def test_a_checkpoint_with_odd_inputs_is_refused_before_anything_is_written(quantization, tmp_path, capsys):
  source = Path(__file__).resolve().parents[1] / "fixtures" / "hf" / "gpt2"
  command = ["quantize", str(source), str(tmp_path / "out"), "--quantization", quantization]
  assert checkpoint_tools.main(command) == 2 and not (tmp_path / "out").exists()
  assert "kernel has 15 inputs, of which no two make a pair" in capsys.readouterr().err


def test_odd_inputs_are_refused():
  with pytest.raises(ConfigError, match=r"quantization=int4w: .* has 7 inputs"):
    adapters.create_abstract(tiny.make_config(quantization="int4w", base_mlp_dim=7))
  assert models.create_abstract(tiny.make_config(quantization="int4w")) is not None
