"""GGUF files: written here byte by byte and by the library, against plain loops over their blocks; and hostile ones."""

import struct
import sys
import time

import numpy as np
import pytest

from maxghost.config import ConfigError
from maxghost.interop import gguf, hf_checkpoint, huggingface, model_path
from maxghost.interop.huggingface import open_tree

library = pytest.importorskip("gguf")

SIZES = {"heads": 6, "kv": 2, "width": 8, "embed": 32, "mlp": 64, "layers": 2}
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


def text(value: str) -> bytes:
  return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value) -> bytes:
  if isinstance(value, str):
    return text(key) + struct.pack("<I", 8) + text(value)
  if isinstance(value, bool):
    return text(key) + struct.pack("<I?", 7, value)
  if isinstance(value, np.int32):
    return text(key) + struct.pack("<Ii", 5, value)
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


def test_a_tensor_larger_than_the_memory_is_decoded_once(tmp_path, monkeypatch):
  """As with enough memory: decoding gives whole tensors, whatever the block that was asked for."""
  write(tmp_path / "m.gguf")
  decoded, dequantize = [], library.quants.dequantize
  monkeypatch.setattr(library.quants, "dequantize", lambda *args: decoded.append(args[0].shape) or dequantize(*args))
  hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "much", say=lambda _: None)
  expected = sorted(decoded)
  decoded.clear()
  hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "little", ram_bytes=20_000, say=lambda _: None)
  assert sorted(decoded) == expected


def test_the_tokenizer_of_the_file(tmp_path):
  from maxghost.data.tokenizers import load_tokenizer

  write(tmp_path / "m.gguf")
  cfg = hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "in", say=lambda line: None)
  assert model_path.find(tmp_path / "in").config.data == cfg.data and cfg.data.add_bos is False
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 259)
  (ids,) = tokenizer.encode([b"ab12"])
  assert ids.tolist() == [258, 2 + ord("1") - 33, 2 + ord("2") - 33]


def test_a_token_that_was_added_is_one_token(tmp_path):
  """Special or not: without merges that lead to it, and wherever a text is split."""
  from maxghost.data.tokenizers import load_tokenizer

  tokens = ["<|s|>", "<|e|>", *[chr(33 + i) if i < 94 else chr(256 + i) for i in range(256)], "ab", "<think 1>"]
  change = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, *[1] * 257, 4]}
  write(tmp_path / "m.gguf", vocab=260, change=change)
  cfg = hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "in", say=lambda line: None)
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  assert tokenizer.encode([b"a<think 1>b"])[0].tolist() == [2 + ord("a") - 33, 259, 2 + ord("b") - 33]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"general.architecture": "gemma"}, "architecture gemma; only llama"),
    ({"tokenizer.ggml.pre": "odd"}, "splitting rule odd"),
    ({"llama.rope.scaling.type": "linear"}, "scaled rotary"),
    ({"llama.rope.scaling.factor": 4.0}, "scaled rotary"),
    ({"llama.rope.scale_linear": 4.0}, "scaled rotary"),
    ({"llama.rope.scaling.attn_factor": 1.25}, "scaled rotary"),
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


SUPER = {"embed": 256, "mlp": 512, "heads": 2, "kv": 1, "width": 128}  # rows hold whole blocks of 256 values


def write_by_the_library(path, kind, raw=None, renamed=None, endian="LITTLE"):
  """A Llama of one layer by gguf's own writer; blk.0.ffn_gate of the given type. Returns {GGUF name: what it holds}.

  raw: bytes [rows, bytes of a row] of that tensor, where the library cannot quantise it. renamed: other names.
  """
  rng, s = np.random.default_rng(5), SUPER
  writer = library.GGUFWriter(path, "llama", endianess=library.GGUFEndian[endian])
  writer.add_block_count(1)
  writer.add_context_length(77)
  writer.add_embedding_length(s["embed"])
  writer.add_feed_forward_length(s["mlp"])
  writer.add_head_count(s["heads"])
  writer.add_head_count_kv(s["kv"])
  writer.add_layer_norm_rms_eps(1e-5)
  shapes = {
    "token_embd": (37, s["embed"]), "output_norm": (s["embed"],), "blk.0.attn_norm": (s["embed"],),
    "blk.0.ffn_norm": (s["embed"],), "blk.0.attn_q": (s["heads"] * s["width"], s["embed"]),
    "blk.0.attn_k": (s["kv"] * s["width"], s["embed"]), "blk.0.attn_v": (s["kv"] * s["width"], s["embed"]),
    "blk.0.attn_output": (s["embed"], s["heads"] * s["width"]), "blk.0.ffn_gate": (s["mlp"], s["embed"]),
    "blk.0.ffn_up": (s["mlp"], s["embed"]), "blk.0.ffn_down": (s["embed"], s["mlp"]),
  }  # fmt: skip
  held = {}
  for name, shape in shapes.items():
    held[name] = rng.normal(size=shape).astype(np.float32)
    if name != "blk.0.ffn_gate":
      writer.add_tensor((renamed or {}).get(name, f"{name}.weight"), held[name])
      continue
    held[name] = library.quants.quantize(held[name], kind) if raw is None else raw
    writer.add_tensor(f"{name}.weight", held[name], raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return held


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path):
  """The package reads its blocks as if their bytes were in the usual order."""
  write_by_the_library(tmp_path / "m.gguf", library.GGMLQuantizationType.F32, endian="BIG")
  with pytest.raises(ConfigError, match="it is of a big-endian machine"):
    gguf.open_file(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
def test_a_tensor_under_the_name_of_hugging_face_is_unknown(tmp_path, name):
  """Its rows may be in another order, and it may be there twice."""
  write_by_the_library(tmp_path / "m.gguf", library.GGMLQuantizationType.F32, renamed={"blk.0.attn_q": name})
  with pytest.raises(ConfigError, match=f"has unknown {name}"):
    gguf.open_file(tmp_path / "m.gguf")


GATE = "model.layers.0.mlp.gate_proj.weight"
WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


@pytest.mark.parametrize("name", WRITTEN)
def test_every_type_that_the_library_writes(tmp_path, name):
  kind = library.GGMLQuantizationType[name]
  held = write_by_the_library(tmp_path / "m.gguf", kind)
  tensor = gguf.open_file(tmp_path / "m.gguf").tensors[GATE]
  expected = library.quants.dequantize(held["blk.0.ffn_gate"], kind)
  assert tensor.dtype == np.float32 and tensor.shape == (512, 256)
  np.testing.assert_array_equal(tensor.read(None), expected)
  np.testing.assert_array_equal(tensor.read(slice(100, 107)), expected[100:107])


def scale_and_minimum(scales: np.ndarray, j: int) -> tuple[int, int]:
  """Six bits each of group j in the 12 bytes of a Q4_K or Q5_K block."""
  s = [int(x) for x in scales]
  if j < 4:
    return s[j] & 63, s[j + 4] & 63
  return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def decode_k(block: np.ndarray, kind: str) -> list[float]:
  """The 256 values of one block, value by value. Source: dequantize_row_q*_K in ggml-quants.c."""
  half = lambda at: float(block[at : at + 2].view("<f2")[0])  # noqa: E731
  out = []
  if kind == "Q6_K":
    low, high, scales, d = block[:128], block[128:192], block[192:208].view(np.int8), half(208)
    for i in range(256):
      part, quarter, at = i // 128, i % 128 // 32, i % 32
      nibble = int(low[64 * part + 32 * (quarter % 2) + at]) >> 4 * (quarter // 2) & 15
      two = int(high[32 * part + at]) >> 2 * quarter & 3
      out.append(d * int(scales[8 * part + 2 * quarter + at // 16]) * ((nibble | two << 4) - 32))
    return out
  d, least, start = half(0), half(2), 16 if kind == "Q4_K" else 48
  for i in range(256):
    scale, minimum = scale_and_minimum(block[4:16], i // 32)
    q = int(block[start + 32 * (i // 64) + i % 32]) >> 4 * (i // 32 % 2) & 15
    if kind == "Q5_K":
      q += 16 * (int(block[16 + i % 32]) >> i // 32 & 1)
    out.append(d * scale * q - least * minimum)
  return out


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_types_against_loops_over_their_blocks(tmp_path, name):
  kind = library.GGMLQuantizationType[name]
  size = library.GGML_QUANT_SIZES[kind][1]
  rng = np.random.default_rng(7)
  raw = rng.integers(0, 256, (512, size)).astype(np.uint8)
  for at in (0, 2) if size != 210 else (208,):
    raw[:, at : at + 2] = rng.normal(size=(512, 1)).astype("<f2").view(np.uint8)
  write_by_the_library(tmp_path / "m.gguf", kind, raw)
  file = gguf.open_file(tmp_path / "m.gguf")
  model = huggingface.configuration(gguf.config_json(file), "m.gguf").model
  assert (model.base_mlp_dim, model.head_dim) == (512, 128)
  nodes = huggingface.tree_of(file.tensors, model, tmp_path / "m.gguf").nodes
  gate = nodes["decoder", "layers_0", "mlp", "wi_0", "kernel"].read(None)
  expected = np.array([decode_k(block, name) for block in raw[:9]], np.float64)
  np.testing.assert_array_equal(gate.T[:9], expected.astype(np.float32))
  whole = library.quants.dequantize(raw, kind)
  np.testing.assert_array_equal(gate.T, whole)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"llama.attention.head_count": "six"}, r"llama\.attention\.head_count='six' is no size"),
    ({"llama.attention.head_count": 0}, r"head_count=0 is no size"),
    ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv=\[2, 2\] is no size"),
    ({"llama.block_count": True}, r"block_count=True is no size"),
    ({"llama.block_count": 4_000_000_000}, r"num_hidden_layers=4000000000 is above the greatest"),
    ({"llama.attention.layer_norm_rms_epsilon": "x"}, r"layer_norm_rms_epsilon='x' is no positive number"),
    ({"llama.rope.freq_base": float("nan")}, r"freq_base=nan is no positive number"),
    ({"general.alignment": 3}, r"is cut or damaged: Invalid alignment"),
    ({"general.architecture": 7}, r"is of architecture 7; only llama"),
    ({"tokenizer.ggml.tokens": 5}, r"tokenizer\.ggml\.tokens is no list of texts"),
    ({"tokenizer.ggml.eos_token_id": 9999}, r"its tokenizer does not fit together"),
    ({"tokenizer.ggml.eos_token_id": np.int32(-1)}, r"its tokenizer does not fit together \(-1\)"),
    ({"tokenizer.ggml.merges": ["ab"]}, r"its tokenizer does not fit together"),
    ({"tokenizer.ggml.pre": ["smollm"]}, r"tokenizer of kind gpt2 with splitting rule \['smollm'\]"),
  ],
)
def test_metadata_of_a_wrong_type_is_named(tmp_path, change, message):
  write(tmp_path / "m.gguf", change=change)
  with pytest.raises(ConfigError, match=message):
    hf_checkpoint.import_model(tmp_path / "m.gguf", tmp_path / "in", say=lambda line: None)
  assert not (tmp_path / "in").exists()


def header(num_tensors: int, num_keys: int, rest: bytes) -> bytes:
  return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


@pytest.mark.parametrize(
  "content",
  [
    header(2**60, 0, b""),
    header(0, 2**63, b""),
    header(0, 1, struct.pack("<Q", 2**62) + b"key"),
    header(0, 1, text("key") + struct.pack("<IIQ", 9, 0, 2**60)),  # 2^60 bytes
    header(0, 1, text("key") + struct.pack("<IIQ", 9, 9, 2**60)),
    header(0, 1, text("key") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),  # lists in lists
    header(0, 1, text("key") + struct.pack("<II", 77, 0)),
    header(0, 2, entry("key", 1) + entry("key", 1)),
    header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 0)),
    header(1, 0, text("w") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)),
    header(1, 0, text("w") + struct.pack("<IQIQ", 1, 2**62, 0, 0)),
    header(1, 0, text("w") + struct.pack("<IQIQ", 1, 32, 0, 2**63)),
    header(1, 0, text("w") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(4096)),  # no whole block
    header(1, 0, text("w") + struct.pack("<IQIQ", 1, 32, 999, 0) + bytes(4096)),
    header(1, 0, text("w") + struct.pack("<I", 2**32 - 1)),
  ],
)
def test_hostile_headers_are_answered_at_once(tmp_path, content):
  (tmp_path / "m.gguf").write_bytes(content)
  start = time.monotonic()
  with pytest.raises(ConfigError, match="is cut or damaged: ") as raised:
    gguf.open_file(tmp_path / "m.gguf")
  assert time.monotonic() - start < 5 and "\n" not in str(raised.value)


def test_integers_and_unknown_blocks_are_no_weights(tmp_path):
  file = tmp_path / "m.gguf"
  write_by_the_library(file, library.GGMLQuantizationType.I8, np.zeros((512, 256), np.int8))
  with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate\.weight is of type I8, which is not read"):
    gguf.open_file(file)


def test_flipped_bits_never_end_in_a_traceback(tmp_path):
  write(tmp_path / "m.gguf")
  whole = (tmp_path / "m.gguf").read_bytes()
  rng, refused = np.random.default_rng(11), 0
  for place in rng.integers(0, 9000, 300):
    raw = bytearray(whole)
    raw[place] ^= 1 << int(rng.integers(8))
    (tmp_path / "m.gguf").write_bytes(raw)
    try:
      file = gguf.open_file(tmp_path / "m.gguf")
      huggingface.configuration(gguf.config_json(file), "m.gguf")
    except ConfigError:
      refused += 1
  assert refused > 50


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package):
  write(tmp_path / "model.gguf")
  file = gguf.open_file(tmp_path / "model.gguf")
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ConfigError, match=rf"model\.gguf.* needs the package {package}; .*pip install 'maxghost\[hf\]'"):
    gguf.open_file(tmp_path / "model.gguf")
    gguf.write_tokenizer(file, tmp_path / "tokenizer")
  monkeypatch.setattr(hf_checkpoint, "written", lambda *_, **__: pytest.fail("the weights were written"))
  with pytest.raises(ConfigError, match=f"needs the package {package}"):
    hf_checkpoint.import_model(tmp_path / "model.gguf", tmp_path / "in", say=lambda line: None)
