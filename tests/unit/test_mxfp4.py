"""Safetensors folders: expert weights in MXFP4, what their bytes stand for, in a whole gpt-oss folder; what is refused.

E experts, D embed dim, M width of an expert, G groups of 32 inputs.
"""

import json
import shutil

import hf_models
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
from flax import nnx

from maxghost import load_model
from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.interop import huggingface, safetensors_files

E, D, M = 5, 32, 96
MATRICES = {"gate_up_proj": (2 * M, D // 32), "down_proj": (D, M // 32)}  # outputs, groups


def number(nibble: int) -> float:
  """E2M1 by its definition: sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
  sign, exponent, mantissa = -1.0 if nibble >> 3 else 1.0, nibble >> 1 & 3, nibble & 1
  return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def meaning(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """float64[E, in, out], number by number."""
  experts, outputs, groups, _ = blocks.shape
  out = np.empty((experts, groups * 32, outputs))
  for e, o, g, byte in np.ndindex(blocks.shape):
    for half, nibble in enumerate((int(blocks[e, o, g, byte]) & 15, int(blocks[e, o, g, byte]) >> 4)):
      out[e, 32 * g + 2 * byte + half, o] = number(nibble) * 2.0 ** (int(scales[e, o, g]) - 127)
  return out


def packed(rng: np.random.Generator, outputs: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
  blocks = rng.integers(0, 256, (E, outputs, groups, 16)).astype(np.uint8)
  return blocks, rng.integers(115, 122, (E, outputs, groups)).astype(np.uint8)


def test_every_byte_means_what_the_format_says():
  blocks = np.arange(256, dtype=np.uint8).reshape(2, 4, 2, 16)
  scales = np.array([1, 100, 126, 127, 128, 131, 200, 252] * 2, np.uint8).reshape(2, 4, 2)
  found = safetensors_files.decode(blocks, scales)
  assert found.dtype == ml_dtypes.bfloat16 and found.shape == (2, 64, 4)
  np.testing.assert_array_equal(found.astype(np.float64), meaning(blocks, scales))
  assert np.isnan(safetensors_files.decode(blocks, np.full_like(scales, 255)).astype(np.float32)).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A gpt-oss model as it is published: bfloat16, and the experts' matrices packed."""
  made = tmp_path_factory.mktemp("packed")
  source = json.loads((hf_models.FOLDER / "gpt_oss" / "config.json").read_text())
  changes = {
    "hidden_size": D, "intermediate_size": M, "num_local_experts": E, "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
  }  # fmt: skip
  (made / "config.json").write_text(json.dumps(source | changes))
  model = huggingface.model_config(made).model
  rng, tensors = np.random.default_rng(3), {}
  for rule, _, _, name in huggingface.table(model):
    last = name.rsplit(".", 1)[-1]
    if last in MATRICES:
      tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(rng, *MATRICES[last])
    else:
      tensors[name] = rng.normal(size=rule.tensor_shape).astype(ml_dtypes.bfloat16)
  safetensors.numpy.save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
  return made


def test_a_published_folder_is_read(folder):
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  place, cfg = load_model.find(folder, scan_layers=True)
  assert cfg.model.weight_dtype == "bfloat16"
  found = tiny.by_label(nnx.merge(*load_model.load(place, cfg, lambda line: None)))
  for layer in range(4):
    name = f"model.layers.{layer}.mlp.experts."
    gate_up = meaning(tensors[f"{name}gate_up_proj_blocks"], tensors[f"{name}gate_up_proj_scales"])
    expected = {
      "wi_0": gate_up[..., 0::2],
      "wi_1": gate_up[..., 1::2],
      "wo": meaning(tensors[f"{name}down_proj_blocks"], tensors[f"{name}down_proj_scales"]),
    }
    for which, value in expected.items():
      np.testing.assert_array_equal(layer_of(found, layer, f"GptOssMlp/{which}").astype(np.float64), value)


def layer_of(labels: dict, layer: int, end: str) -> np.ndarray:
  """A layer's parameter, where layers of two kinds take turns in one stack."""
  (pair,) = [value for label, value in labels.items() if label.endswith(f"layers_{layer % 2}/{end}")]
  return pair[layer // 2]


@pytest.mark.parametrize("change, message", [
  (lambda t, name: t.pop(f"{name}_scales"), r"down_proj_blocks has no .*down_proj_scales beside it"),
  (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"][..., :-1]}), r"MXFP4 is uint8\[experts, out"),
  (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"].astype(np.int8)}), r"is int8\["),
])  # fmt: skip
def test_halves_that_do_not_fit_are_named(folder, tmp_path, change, message):
  shutil.copytree(folder, tmp_path / "copy")
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  change(tensors, "model.layers.2.mlp.experts.down_proj")
  safetensors.numpy.save_file(tensors, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
  with pytest.raises(LayoutError, match=message):
    huggingface.open_folder(tmp_path / "copy")


@pytest.mark.hf
def test_transformers_reads_the_same_numbers():
  torch = pytest.importorskip("torch")
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  blocks, scales = packed(np.random.default_rng(4), 2 * M, D // 32)
  theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.bfloat16)
  ours = safetensors_files.decode(blocks, scales)
  np.testing.assert_array_equal(theirs.float().numpy(), ours.astype(np.float32))


def test_a_tensor_in_another_file_than_the_index_says_is_refused(tmp_path):
  """Two files may hold different values."""
  for name, held in (("a", ["x"]), ("b", ["x", "y"])):
    safetensors.numpy.save_file(
      {one: np.full(3, len(held), np.float32) for one in held}, tmp_path / f"{name}.safetensors"
    )
  index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  with pytest.raises(LayoutError, match=r": x is not in the file that model\.\S+ names, or in others too"):
    safetensors_files.open_tensors(tmp_path)


def test_a_file_of_lists_in_lists_is_damaged(tmp_path):
  (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
  with pytest.raises(LayoutError, match=r"index\.json is damaged or half copied: (maximum recursion|Stack overflow)"):
    safetensors_files.open_tensors(tmp_path)
