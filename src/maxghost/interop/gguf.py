"""GGUF files: one file with sizes, quantised tensors and a tokenizer, read like a Hugging Face folder.

The package `gguf` reads the file; tensors come out as float32 under the names of Hugging Face. Query and key rows of
some families are stored for a rotation of neighbouring pairs; they are put in the order of Hugging Face, where the two
halves of a head are rotated against each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, write_json
from maxghost.config.families import FAMILIES, Family
from maxghost.config.values import import_package

SUFFIX = ".gguf"
_MOST_VALUES = 1 << 23  # of a header; a vocabulary of a million words has half of them
_CONTROL, _USER_DEFINED = 3, 4  # token_type of special tokens, and of others that are never split
# What the package raises over a damaged file.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError)
_SIZES = {"hidden_size": "embedding_length", "num_attention_heads": "attention.head_count",
          "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
          "max_position_embeddings": "context_length"}  # fmt: skip


@dataclass(frozen=True)
class GgufFile:
  """family: of its architecture. metadata: what it says of the model, by key. tensors: under Hugging Face's names."""

  path: Path
  family: Family
  metadata: Mapping[str, Any]
  tensors: dict[str, StoredArray]

  def number(self, name: str, kind: type = int, default: float | None = None) -> Any:
    """A positive number of the architecture; a float as the shortest decimal of its float32. Raises LayoutError."""
    value = self.metadata.get(f"{self.family.gguf}.{name}", default)
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < np.inf:
      what = "size" if kind is int else "positive number"
      raise LayoutError(f"{self.path}: {self.family.gguf}.{name}={value!r:.60} is no {what}")
    return value if kind is int else float(str(np.float32(value)))

  def texts(self, name: str) -> list[str]:
    value = self.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
      raise LayoutError(f"{self.path} is damaged: tokenizer.ggml.{name} is no list of texts")
    return value


def open_file(path: Path) -> GgufFile:
  """Reads the header. Raises LayoutError for a cut file, an architecture that is not known, and unknown types."""
  gguf = import_package("gguf", f"{path}, a GGUF file,", "hf")

  class Reader(gguf.GGUFReader):
    """Stops at the end of the file, where the package would read on, and at a header that would fill the memory."""

    num_values = 0

    def _get(self, offset, dtype, count=1, override_order=None):
      values = super()._get(offset, dtype, count, override_order)
      self.num_values += 1
      if len(values) != int(count) or self.num_values > _MOST_VALUES:
        raise ValueError(f"{int(count)} values at byte {offset} are not there")
      return values

  try:
    with np.errstate(all="ignore"):  # sizes of a damaged file
      reader = Reader(path)
      if reader.byte_order != "I":
        raise ValueError("it is of a big-endian machine, whose blocks the package does not decode")
      metadata = {name: field.contents() for name, field in reader.fields.items()}
  except _DAMAGE as error:
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    raise LayoutError(f"{path} is no GGUF file, or is cut or damaged: {cause}") from error
  architecture = metadata.get("general.architecture")
  known = {family.gguf: family for family in FAMILIES.values() if family.gguf}
  if not isinstance(architecture, str) or architecture not in known:
    raise LayoutError(f"{path} is of architecture {architecture!s:.60}; only {', '.join(known)} is read")
  file = GgufFile(path, known[architecture], metadata, {})
  heads = {"attn_q": file.number("attention.head_count")}
  heads["attn_k"] = file.number("attention.head_count_kv", default=heads["attn_q"])
  names = _huggingface_names(file, len(reader.tensors))
  for tensor in reader.tensors:
    if tensor.name in names.values():  # llama.cpp knows no such tensor, and its rows might be in another order
      raise LayoutError(f"{path} has unknown {tensor.name}")
    part, theirs = tensor.name.rpartition(".")[0].rpartition(".")[2], str(names.get(tensor.name, tensor.name))
    file.tensors[theirs] = _tensor(path, theirs, tensor, heads.get(part, 0) if file.family.gguf_pairs else 0)
  return file


def _huggingface_names(file: GgufFile, most: int) -> dict[str, str]:
  """{name in the file: Hugging Face's} of the family's table, by the package's own list of names."""
  import gguf

  number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.family.gguf)
  num_layers = min(file.number("block_count"), most)  # no file has more layers than tensors
  known, rules = gguf.get_tensor_name_map(number, num_layers), file.family.huggingface.tensors
  names = (rule.name.format(layer=layer, expert=0) for rule in rules for layer in range(num_layers))
  return {ours: name for name in names if (ours := known.get_name(name, try_suffixes=(".weight", ".bias")))}


def _tensor(path: Path, name: str, stored: Any, heads: int) -> StoredArray:
  """heads: those whose rows are to be put in order; 0 for none. Raises LayoutError for a type that is not decoded."""
  import gguf

  kind, shape = stored.tensor_type, tuple(int(size) for size in stored.shape[::-1])
  try:
    gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
  except NotImplementedError:
    raise LayoutError(f"{path}: {stored.name} is of type {kind.name}, which is not read") from None

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    array = gguf.quants.dequantize(stored.data, kind).astype(np.float32, copy=False).reshape(shape)
    if heads:  # rows of a head from (pair, member) to (member, pair)
      rows, columns = shape
      array = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return array if index is None else array[index]

  if heads and (len(shape) != 2 or shape[0] % (2 * heads)):
    raise LayoutError(f"{path}: {stored.name} is {list(shape)}, which {heads} heads of pairs do not divide")
  return StoredArray((name,), shape, np.dtype(np.float32), read)


def config_json(file: GgufFile) -> dict[str, Any]:
  """The config.json of the same model. Raises LayoutError where the file does not say a size."""
  said, rope = file.metadata, f"{file.family.gguf}.rope"  # without a type llama.cpp scales linearly
  factor = said.get(f"{rope}.scaling.factor", said.get(f"{rope}.scale_linear", 1.0))
  scaling = said.get(f"{rope}.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
  if scaling != "none" or said.get(f"{rope}.scaling.attn_factor", 1.0) != 1.0 or "rope_freqs.weight" in file.tensors:
    raise LayoutError(f"{file.path} has scaled rotary frequencies, which are not read from GGUF")
  if (embedding := file.tensors.get("model.embed_tokens.weight")) is None:
    raise LayoutError(f"{file.path} lacks token_embd.weight")
  content = {theirs: file.number(ours) for theirs, ours in _SIZES.items()}
  return content | {
    "model_type": file.family.huggingface.model_type,
    "vocab_size": embedding.shape[0],
    "num_key_value_heads": file.number("attention.head_count_kv", default=content["num_attention_heads"]),
    "head_dim": file.number("rope.dimension_count", default=content["hidden_size"] // content["num_attention_heads"]),
    "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon", float),
    "rope_theta": file.number("rope.freq_base", float, 10000.0),
    "tie_word_embeddings": "lm_head.weight" not in file.tensors,
  }


def write_tokenizer(file: GgufFile, folder: Path) -> None:
  """tokenizer.json and tokenizer_config.json of the file's byte-level BPE. Raises LayoutError for another kind."""
  tokenizers, said = import_package("tokenizers", f"the tokenizer in {file.path}", "hf"), file.metadata
  models, pre_tokenizers = tokenizers.models, tokenizers.pre_tokenizers
  kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "gpt-2")
  bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  splits = {"gpt-2": [bytes_only], "smollm": [pre_tokenizers.Digits(individual_digits=True), bytes_only]}
  if kind != "gpt2" or split not in list(splits):  # a damaged file may hold a list here, which no dict looks up
    said = f"{file.path}: tokenizer of kind {kind} with splitting rule {split}"
    raise LayoutError(f"{said}; known are gpt2 with {' or '.join(splits)}")
  tokens, kinds = file.texts("tokens"), said.get("tokenizer.ggml.token_type", [])
  merges = [(merge.partition(" ")[0], merge.partition(" ")[2]) for merge in file.texts("merges")]
  ids = {name: said.get(f"tokenizer.ggml.{key}_token_id") for name, key in
         (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))}  # fmt: skip
  try:
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(splits[split]), tokenizers.decoders.ByteLevel()
    for which, add in ((_CONTROL, made.add_special_tokens), (_USER_DEFINED, made.add_tokens)):
      add([token for token, kind in zip(tokens, kinds, strict=False) if kind == which])
    by_id = dict(enumerate(tokens))  # a list would take -1 for its last
    words: dict[str, Any] = {name: by_id[number] for name, number in ids.items() if number is not None}
  except Exception as error:  # the package raises plain Exceptions
    raise LayoutError(f"{file.path} is damaged: its tokenizer does not fit together ({error})") from error
  folder.mkdir()
  made.save(str(folder / "tokenizer.json"))
  words |= {"chat_template": x} if isinstance(x := said.get("tokenizer.chat_template"), str) else {}
  words["add_bos_token"] = bool(said.get("tokenizer.ggml.add_bos_token", False))
  write_json(folder / "tokenizer_config.json", words, indent=2)
