"""GGUF files of Llama models: one file with sizes, quantised tensors and a tokenizer, read like a Hugging Face folder.

Tensors come out as float32 under the names of Hugging Face. A dimension list is written fastest first: the values lie
[out, in] in rows. Query and key rows are stored for a rotation of neighbouring pairs; here, as in Hugging Face, the two
halves of a head are rotated against each other, so the rows of each head are put in that order.
Format: github.com/ggml-org/ggml, docs/gguf.md; blocks of quantised values: ggml-common.h there.
"""

import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.interop.safetensors_files import Tensor

SUFFIX = ".gguf"
_BLOCK = 32  # values of a quantised block
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_CONTROL = 3  # token_type of a special token
_NAMES = {
  "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {
  "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}  # fmt: skip


def _plain(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
  return lambda raw: raw.view(dtype).astype(np.float32)


def _bfloat16(raw: np.ndarray) -> np.ndarray:
  return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(raw: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
  """16 bytes of a block are 32 values: all low halves first, then all high halves."""
  return np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
  blocks = raw.reshape(-1, 18)
  return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks[:, :2])


def _q4_1(raw: np.ndarray) -> np.ndarray:
  blocks = raw.reshape(-1, 20)
  return _nibbles(blocks[:, 4:]) * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q8_0(raw: np.ndarray) -> np.ndarray:
  blocks = raw.reshape(-1, 34)
  return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * _half(blocks[:, :2])


# Number of the type: (its name, values of a block, bytes of a block, from bytes to values).
_TYPES: dict[int, tuple[str, int, int, Callable[[np.ndarray], np.ndarray]]] = {
  0: ("F32", 1, 4, _plain("<f4")),
  1: ("F16", 1, 2, _plain("<f2")),
  2: ("Q4_0", _BLOCK, 18, _q4_0),
  3: ("Q4_1", _BLOCK, 20, _q4_1),
  8: ("Q8_0", _BLOCK, 34, _q8_0),
  30: ("BF16", 1, 2, _bfloat16),
}


@dataclass(frozen=True)
class GgufFile:
  """metadata: what the file says of the model, by key. tensors: under Hugging Face's names."""

  path: Path
  metadata: Mapping[str, Any]
  tensors: dict[str, Tensor]


def open_file(path: Path) -> GgufFile:
  """Reads the header. Raises LayoutError for a cut file, another architecture than Llama, and unknown types."""
  try:
    with open(path, "rb") as file:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  except (OSError, ValueError) as error:
    raise LayoutError(f"{path} cannot be read: {error}") from error
  if data[:4] != b"GGUF":
    raise LayoutError(f"{path} is no GGUF file")
  cursor = _Cursor(data, path, 4)
  version = cursor.number("I")
  if version not in (2, 3):
    raise LayoutError(f"{path} is GGUF version {version}; versions 2 and 3 are read")
  num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
  metadata: dict[str, Any] = {}
  for _ in range(num_keys):
    key = cursor.text()
    metadata[key] = cursor.value(cursor.number("I"))
  entries = [cursor.tensor() for _ in range(num_tensors)]
  if metadata.get("general.architecture") != "llama":
    raise LayoutError(f"{path} is of architecture {metadata.get('general.architecture')}; only llama is read")
  alignment = metadata.get("general.alignment", 32)
  start = -(-cursor.place // alignment) * alignment
  tensors = dict(_tensors(path, data, start, entries, metadata))
  return GgufFile(path, metadata, tensors)


class _Cursor:
  """Reads the header from front to back."""

  def __init__(self, data: mmap.mmap, path: Path, place: int):
    self._data, self._path, self.place = data, path, place

  def number(self, code: str) -> Any:
    size = struct.calcsize(f"<{code}")
    return struct.unpack(f"<{code}", self._take(size))[0]

  def text(self) -> str:
    return self._take(self.number("Q")).decode("utf-8", errors="replace")

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.text()
    if kind == _ARRAY:
      inner, count = self.number("I"), self.number("Q")
      if inner in _NUMBERS:
        code = _NUMBERS[inner]
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))
      return [self.value(inner) for _ in range(count)]
    if kind not in _NUMBERS:
      raise LayoutError(f"{self._path} is damaged: value of type {kind} in its header")
    return self.number(_NUMBERS[kind])

  def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
    name = self.text()
    shape = tuple(self.number("Q") for _ in range(self.number("I")))
    return name, shape[::-1], self.number("I"), self.number("Q")

  def _take(self, size: int) -> bytes:
    if self.place + size > len(self._data):
      raise LayoutError(f"{self._path} is cut: its header goes on behind the end of the file")
    self.place += size
    return self._data[self.place - size : self.place]


def _tensors(path: Path, data: mmap.mmap, start: int, entries: list, metadata: Mapping) -> Iterator[tuple[str, Tensor]]:
  for name, shape, kind, offset in entries:
    if kind not in _TYPES:
      known = ", ".join(entry[0] for entry in _TYPES.values())
      raise LayoutError(f"{path}: {name} is of type {kind}; types that are read: {known}")
    _, values, size, decode = _TYPES[kind]
    num_bytes = int(np.prod(shape, dtype=np.int64)) // values * size
    place = start + offset
    if place + num_bytes > len(data):
      raise LayoutError(f"{path} is cut: {name} ends behind the end of the file")
    theirs, heads = _huggingface_name(path, name), _heads(name, metadata)

    def read(index=None, place=place, num_bytes=num_bytes, decode=decode, shape=shape, heads=heads):
      raw = np.frombuffer(data, np.uint8, num_bytes, place)
      array = decode(raw).reshape(shape)
      array = _in_halves(array, heads) if heads else array
      return array if index is None else array[index]

    yield theirs, Tensor(theirs, shape, np.dtype(np.float32), read)


def _huggingface_name(path: Path, name: str) -> str:
  if name in _OUTSIDE:
    return _OUTSIDE[name]
  found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
  if not found or found[2] not in _NAMES:
    raise LayoutError(f"{path} has the unknown tensor {name}")
  return f"model.layers.{found[1]}.{_NAMES[found[2]]}.weight"


def _heads(name: str, metadata: Mapping[str, Any]) -> int:
  """Heads whose rows are to be put in order; 0 for other tensors."""
  heads = metadata["llama.attention.head_count"]
  if ".attn_q." in name:
    return heads
  return metadata.get("llama.attention.head_count_kv", heads) if ".attn_k." in name else 0


def _in_halves(array: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a head from (pair, member) order to (member, pair) order."""
  rows, columns = array.shape
  return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def config_json(file: GgufFile) -> dict[str, Any]:
  """The config.json of the same model. Raises LayoutError where the file does not say a size."""
  names = {
    "hidden_size": "embedding_length", "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "max_position_embeddings": "context_length",
  }  # fmt: skip
  missing = [f"llama.{key}" for key in names.values() if f"llama.{key}" not in file.metadata]
  if missing:
    raise LayoutError(f"{file.path} does not say {', '.join(missing)}")
  if file.metadata.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensors:
    raise LayoutError(f"{file.path} has scaled rotary frequencies, which are not read from GGUF")
  content = {theirs: file.metadata[f"llama.{ours}"] for theirs, ours in names.items()}
  # Stored as float32; the shortest decimal of that is what was meant.
  for key in ("rms_norm_eps",):
    content[key] = float(str(np.float32(content[key])))
  heads = content["num_attention_heads"]
  return content | {
    "model_type": "llama",
    "vocab_size": file.tensors["model.embed_tokens.weight"].shape[0],
    "num_key_value_heads": file.metadata.get("llama.attention.head_count_kv", heads),
    "head_dim": file.metadata.get("llama.rope.dimension_count", content["hidden_size"] // heads),
    "rope_theta": float(str(np.float32(file.metadata.get("llama.rope.freq_base", 10000.0)))),
    "tie_word_embeddings": "lm_head.weight" not in file.tensors,
  }


def write_tokenizer(file: GgufFile, folder: Path) -> None:
  """tokenizer.json and tokenizer_config.json of the file's byte-level BPE. Raises LayoutError for another kind."""
  try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
  except ImportError:
    raise LayoutError("the tokenizer in a GGUF file needs the package tokenizers: pip install 'maxghost[hf]'") from None
  said = file.metadata
  kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "gpt-2")
  bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  splits = {"gpt-2": [bytes_only], "smollm": [pre_tokenizers.Digits(individual_digits=True), bytes_only]}
  if kind != "gpt2" or split not in splits:
    raise LayoutError(
      f"{file.path}: tokenizer of kind {kind} with splitting rule {split}; known are gpt2 with {' or '.join(splits)}"
    )
  tokens = said["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ", 1)) for merge in said["tokenizer.ggml.merges"]]
  made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
  made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(splits[split]), decoders.ByteLevel()
  kinds = said.get("tokenizer.ggml.token_type", [])
  made.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL])
  made.save(str(folder / "tokenizer.json"))
  ids = {name: said.get(f"tokenizer.ggml.{key}_token_id") for name, key in
         (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))}  # fmt: skip
  words = {name: tokens[number] for name, number in ids.items() if number is not None}
  words["add_bos_token"] = bool(said.get("tokenizer.ggml.add_bos_token", False))
  (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
