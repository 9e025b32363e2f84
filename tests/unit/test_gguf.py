"""GGUF files: a small one written here, byte by byte, against plain loops over its blocks."""

import struct

import numpy as np
import pytest

from maxghost.config import ConfigError
from maxghost.interop import gguf, hf_checkpoint, model_path
from maxghost.interop.huggingface import open_tree

SIZES = {"heads": 6, "kv": 2, "width": 8, "embed": 32, "mlp": 64, "layers": 2}
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


def text(value: str) -> bytes:
  return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value) -> bytes:
  if isinstance(value, str):
    return text(key) + struct.pack("<I", 8) + text(value)
  if isinstance(value, bool):
    return text(key) + struct.pack("<I?", 7, value)
  if isinstance(value, list) and isinstance(value[0], str):
    return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
  if isinstance(value, list):
    return text(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
  return text(key) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def quantise(values: np.ndarray, kind: int, rng) -> tuple[bytes, np.ndarray]:
  """(bytes, the values they stand for) of random blocks; the given values only say how many there are."""
  if kind in (F32, F16, BF16):
    if kind == BF16:
      short = (values.view(np.uint32) >> 16).astype(np.uint16)
      return short.tobytes(), (short.astype(np.uint32) << 16).view(np.float32)
    stored = values.astype("<f4" if kind == F32 else "<f2")
    return stored.tobytes(), stored.astype(np.float32)
  raw, decoded = b"", []
  for _ in range(values.size // 32):
    d, m = (np.float16(x) for x in rng.normal(size=2))
    if kind == Q8_0:
      q = rng.integers(-127, 128, 32).astype(np.int8)
      raw += d.tobytes() + q.tobytes()
      decoded += [float(np.float32(x) * np.float32(d)) for x in q]
      continue
    q = rng.integers(0, 16, 32)
    nibbles = bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
    raw += d.tobytes() + (m.tobytes() if kind == Q4_1 else b"") + nibbles
    shift, add = (0, np.float32(m)) if kind == Q4_1 else (8, np.float32(0))
    decoded += [float(np.float32(int(x) - shift) * np.float32(d) + add) for x in q]
  return raw, np.array(decoded, np.float32).reshape(values.shape)


def write(path, *, vocab=259, change=None):
  """A Llama of two layers; returns {GGUF name: values}."""
  rng = np.random.default_rng(3)
  s = SIZES
  shapes = {"token_embd": (vocab, s["embed"]), "output_norm": (s["embed"],)}
  for i in range(s["layers"]):
    shapes |= {
      f"blk.{i}.attn_norm": (s["embed"],), f"blk.{i}.ffn_norm": (s["embed"],),
      f"blk.{i}.attn_q": (s["heads"] * s["width"], s["embed"]), f"blk.{i}.attn_k": (s["kv"] * s["width"], s["embed"]),
      f"blk.{i}.attn_v": (s["kv"] * s["width"], s["embed"]),
      f"blk.{i}.attn_output": (s["embed"], s["heads"] * s["width"]),
      f"blk.{i}.ffn_gate": (s["mlp"], s["embed"]), f"blk.{i}.ffn_up": (s["mlp"], s["embed"]),
      f"blk.{i}.ffn_down": (s["embed"], s["mlp"]),
    }  # fmt: skip
  kinds = {"token_embd": Q8_0, "attn_q": Q4_1, "attn_k": Q4_0, "attn_v": F16, "ffn_gate": BF16, "attn_output": F32}
  header, body, truth = b"", b"", {}
  for name, shape in shapes.items():
    kind = kinds.get(name.split(".")[-1], F32)
    raw, truth[name] = quantise(rng.normal(size=shape).astype(np.float32), kind, rng)
    dims = shape[::-1]
    header += text(f"{name}.weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
    body += raw + bytes(-len(raw) % 32)
  letters = [chr(33 + i) if i < 94 else chr(256 + i) for i in range(vocab - 3)]
  meta = {
    "general.architecture": "llama", "llama.block_count": s["layers"], "llama.context_length": 128,
    "llama.embedding_length": s["embed"], "llama.feed_forward_length": s["mlp"],
    "llama.attention.head_count": s["heads"], "llama.attention.head_count_kv": s["kv"],
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": s["width"],
    "llama.rope.freq_base": 700.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|s|>", "<|e|>", *letters, "ab"], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3, 3, *[1] * (vocab - 2)], "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": False,
  }  # fmt: skip
  meta |= change or {}
  start = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(meta)) + b"".join(entry(*item) for item in meta.items())
  start += header
  path.write_bytes(start + bytes(-len(start) % 32) + body)
  return truth


def test_an_import_holds_every_value_of_the_file(tmp_path):
  truth = write(tmp_path / "m.gguf")
  cfg = hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "in", scan_layers=False, say=lambda line: None)
  model = cfg.model
  assert (model.base_emb_dim, model.head_dim, model.base_num_kv_heads, model.logits_via_embedding) == (32, 8, 2, True)
  assert (model.normalization_layer_epsilon, model.rope_max_timescale) == (1e-5, 700.0)
  nodes = {"/".join(path): node for path, node in open_tree(tmp_path / "in").nodes.items()}
  stored = {name: node.read(None) for name, node in nodes.items()}
  np.testing.assert_array_equal(stored["model/token_embedder/embedding"], truth["token_embd"])
  layer = "model/decoder/layers_1"
  np.testing.assert_array_equal(stored[f"{layer}/mlp/wi_0/kernel"], truth["blk.1.ffn_gate"].T)
  np.testing.assert_array_equal(stored[f"{layer}/mlp/wo/kernel"], truth["blk.1.ffn_down"].T)
  np.testing.assert_array_equal(
    stored[f"{layer}/self_attention/out/kernel"], truth["blk.1.attn_output"].T.reshape(6, 8, 32)
  )
  # Row 2 i + m of a head is member m of pair i; here the first members of all pairs come first.
  for name, key, heads in (("query", "attn_q", 6), ("key", "attn_k", 2)):
    rows = truth[f"blk.1.{key}"].reshape(heads, 8, 32)
    expected = np.stack([rows[:, 2 * (i % 4) + i // 4] for i in range(8)], axis=1)
    np.testing.assert_array_equal(stored[f"{layer}/self_attention/{name}/kernel"], expected.transpose(2, 0, 1))


def test_the_tokenizer_of_the_file(tmp_path):
  from maxghost.data.tokenizers import load_tokenizer

  write(tmp_path / "m.gguf")
  cfg = hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "in", say=lambda line: None)
  assert model_path.find(tmp_path / "in").config.data == cfg.data and cfg.data.add_bos is False
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 259)
  (ids,) = tokenizer.encode([b"ab12"])
  assert ids.tolist() == [258, 2 + ord("1") - 33, 2 + ord("2") - 33]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"general.architecture": "gemma"}, "architecture gemma; only llama"),
    ({"tokenizer.ggml.pre": "odd"}, "splitting rule odd"),
    ({"llama.rope.scaling.type": "linear"}, "scaled rotary"),
    ({"llama.attention.head_count": 4, "llama.rope.dimension_count": 12, "llama.block_count": 3}, "lacks model"),
  ],
)
def test_files_that_are_refused(tmp_path, change, message):
  write(tmp_path / "m.gguf", change=change)
  with pytest.raises(ConfigError, match=message):
    hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "in", say=lambda line: None)
  assert not (tmp_path / "in").exists()


def test_cut_files(tmp_path):
  write(tmp_path / "m.gguf")
  whole = (tmp_path / "m.gguf").read_bytes()
  for size in (len(whole) - 1, 900, 3, 0):
    (tmp_path / "m.gguf").write_bytes(whole[:size])
    with pytest.raises(ConfigError, match=r"is cut|no GGUF file|cannot be read"):
      gguf.open_file(tmp_path / "m.gguf")


@pytest.mark.hf
def test_values_are_those_of_the_gguf_library(tmp_path):
  gguf = pytest.importorskip("gguf")
  write(tmp_path / "m.gguf")
  ours = gguf.open_file(tmp_path / "m.gguf").tensors
  for tensor in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors:
    if ".attn_q." not in tensor.name and ".attn_k." not in tensor.name:
      expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
      np.testing.assert_array_equal(ours[gguf._huggingface_name("", tensor.name)].read(None), expected)
