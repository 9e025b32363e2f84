"""Text to token ids and back: bytes, a Hugging Face `tokenizer.json`, a SentencePiece model, tiktoken.

Every tokenizer gives the number of source bytes of each token, so that any cut of a document has a byte offset.
V: size of the vocabulary.
"""

import base64
import functools
import hashlib
import itertools
import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.config.files import with_end, write_text
from maxghost.config.values import ConfigError, did_you_mean, import_package, reading

BYTE, HUGGINGFACE, SENTENCEPIECE, TIKTOKEN = "byte", "huggingface", "sentencepiece", "tiktoken"
_PROBE = '  Two\tgrüne x_1 = 0x7F;\r\n\n"don\'t" 漢字 🙂 \u00a0end. '
SPECIAL_WORDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIALS = {"bos_token": ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "<|endoftext|>"),
             "eos_token": ("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|endoftext|>"),
             "pad_token": ("<|pad|>", "<pad>", "[PAD]")}  # fmt: skip


class Tokenizer:
  """Converts documents to token ids and back. Is pickled by the path of its file. byte_table: uint8 or int32[V], source
  bytes of each id; decoding is then exact. None for a tokenizer that normalizes text, whose `encode_bytes` gives them
  token by token."""

  name: str
  path: Path | None = None  # of its file
  vocab_size: int
  bos_id: int | None  # before a document; None if the tokenizer has none
  eos_id: int | None  # after a document, likewise
  pad_id: int
  fingerprint: str  # changes with the vocabulary
  byte_table: np.ndarray | None = None
  specials: Mapping[str, int] = {}  # ids of tokens that no text spells
  normalizes: bool = False  # whether it may change text that the probe lacks, such as letters with combining marks
  _pieces: list[bytes | None]
  _spelled: Callable[[int], str] = str  # a token as the vocabulary of a tokenizer without byte_table spells it

  def __reduce__(self):
    return type(self), (str(self.path),) if self.path else ()

  @functools.cached_property
  def stop_ids(self) -> frozenset[int]:
    """Tokens that end a text: the end token, and those of a chat model's generation_config.json. Raises ConfigError."""
    found = [] if self.eos_id is None else [self.eos_id]
    if self.path and self.path.is_file():
      ids = read_settings(file := self.path.parent / "generation_config.json").get("eos_token_id")
      found += [number for number in (ids if isinstance(ids, list) else [ids]) if number is not None]
      if wrong := [number for number in found if type(number) is not int or abs(number) >= 2**31]:
        raise ConfigError(f"{file}: eos_token_id={wrong[0]!r:.60} is no token id")
    return frozenset(found)

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Ids of each text, an integer array [n]. Raises UnicodeDecodeError for a tokenizer of UTF-8 text."""
    raise NotImplementedError

  def encode_bytes(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Like `encode`, with the source bytes of each token, from its start to the next one's (integers [n])."""
    assert self.byte_table is not None, "a tokenizer without a table overrides this"
    return [(ids, self.byte_table[ids]) for ids in self.encode(texts)]

  def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a rendered chat template, whose special tokens are read as such, int32[n], and the characters that each
    covers (first, and behind the last), int64[n, 2]. Raises ConfigError for a kind that cannot."""
    raise ConfigError(f"chat templates need tokenizer_type=huggingface, a tokenizer.json; {self.name} is another kind")

  def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
    """The text of the ids; special ids have none, nor have those that only the model's padded vocabulary has."""
    return b"".join([self._pieces[i] or b"" for i in np.asarray(ids).tolist() if i < self.vocab_size])

  def piece(self, number: int) -> bytes:
    """The bytes of a token inside a text; alone, its first space may be dropped, and a part of a character replaced."""
    text = self.decode([*self._letter, number])[len(self.decode(self._letter)) :]
    is_byte = text == "\ufffd".encode() and (name := self._spelled(number)).startswith("<0x")
    return bytes.fromhex(name[3:5]) if is_byte else text

  def encode_pair(self, before: bytes, text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Ids of two texts, each tokenized alone, unless that says another text, as where the tokenizer begins each with a
    space. Then both together, and the second begins where the tokens are no longer those of the first alone."""
    own, rest = self.encode([before, text])
    if self.decode(np.concatenate([own, rest])) != before + text:
      (whole,) = self.encode([before + text])
      own, rest = np.split(whole, [num_shared(own, whole)])
    return own, rest

  def encode_behind(self, text: bytes) -> np.ndarray:
    """Ids of a text, maybe normalized, behind another one: tokenizers that begin texts with a space add none."""
    (alone,) = self.encode([text])
    for wanted, before in itertools.product((text, self.decode(alone)), (b"", b".", b"a", b"0")):
      _, rest = self.encode_pair(before, text)
      if self.decode([*self._letter, *rest]) == b"a" + wanted:
        return rest
    return alone

  @functools.cached_property
  def _letter(self) -> list[int]:
    """Ids of a letter, behind which `piece` decodes."""
    return self.encode([b"a"])[0].tolist()

  def _set_specials(self, vocab: dict[str, int], settings: Path | None = None) -> None:
    """Finds the special ids by the names in `settings`, a tokenizer_config.json, else by the usual names."""
    named = read_settings(settings) if settings else {}
    names = ([named[key]] if named.get(key) else usual for key, usual in _SPECIALS.items())
    self.bos_id, self.eos_id, pad = (next((vocab[name] for name in some if name in vocab), None) for some in names)
    self.pad_id = pad if pad is not None else self.eos_id or 0

  def _set_pieces(self, pieces: list[bytes | None]) -> None:
    """pieces: bytes of each id; None for specials. They become a byte table if that reproduces a probe text."""
    self._pieces = pieces
    table = np.array([0 if piece is None else len(piece) for piece in pieces], np.int32)
    table = table.astype(np.uint8) if table.max() < 256 else table
    texts = [_PROBE.encode(), _PROBE.strip().encode()]  # some tokenizers put a space before the second
    decoded = [Tokenizer.decode(self, ids) for ids in self.encode(texts)]
    self.byte_table = table if decoded[0] == texts[0] else None
    self.normalizes = self.normalizes or decoded[1] != texts[1]


def num_shared(one: Sequence | np.ndarray, two: Sequence | np.ndarray) -> int:
  """The number of items with which both begin."""
  return sum(itertools.takewhile(bool, map(operator.eq, one, two)))


def read_settings(file: Path) -> dict[str, Any]:
  """The object in a tokenizer_config.json, special tokens as texts; empty without the file. Raises ConfigError."""
  try:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    words = {name: found.get(name) or "" for name in SPECIAL_WORDS}
    return found | {name: "" + (word["content"] if isinstance(word, dict) else word) for name, word in words.items()}
  except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
    raise ConfigError(f"tokenizer_path={file.parent}: {file} is damaged: {type(error).__name__} {error}") from error


def load_tokenizer(kind: str, path: str = "") -> Tokenizer:
  """The tokenizer of `tokenizer_type` and `tokenizer_path`. Raises ConfigError: missing file or package."""
  if kind == BYTE and path:
    raise ConfigError(f"tokenizer_path={path} is set, but tokenizer_type=byte reads no file; set the file's type")
  if kind == BYTE:
    return ByteTokenizer()
  load, wanted = _KINDS[kind]
  if not path:
    raise ConfigError(f"tokenizer_type={kind} needs tokenizer_path, {wanted}")
  return load(os.path.expanduser(path))


def check_specials(tokenizer: Tokenizer, add_bos: bool, add_eos: bool) -> None:
  """Raises ConfigError when add_bos or add_eos asks for a token that the tokenizer lacks."""
  wanted = (("add_bos", "begin", add_bos, tokenizer.bos_id), ("add_eos", "end", add_eos, tokenizer.eos_id))
  if problems := [
    f"{key}=true, but the tokenizer {tokenizer.name} has no {place}-of-document token; use {key}=false"
    for key, place, asked, found in wanted
    if asked and found is None
  ]:
    raise ConfigError(*problems)


class ByteTokenizer(Tokenizer):
  """A token is a byte; 256 begins a document, 257 ends it, 258 pads. Lossless, without a file."""

  name = fingerprint = "byte"
  vocab_size, bos_id, eos_id, pad_id = 259, 256, 257, 258
  byte_table = np.array([1] * 256 + [0] * 3, np.uint8)

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(text, np.uint8) for text in texts]

  def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()


class HuggingFaceTokenizer(Tokenizer):
  """A `tokenizer.json`, run by the `tokenizers` library. Text that spells a special token is encoded as text."""

  def __init__(self, path: str):
    tokenizers = import_package("tokenizers", "tokenizer_type=huggingface")
    file = Path(path) / "tokenizer.json" if os.path.isdir(path) else Path(path)
    raw = _read(file)
    try:
      self._inner = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
      vocab = self._inner.get_vocab(with_added_tokens=True)
      self.vocab_size = max(vocab.values()) + 1
    except Exception as error:  # the library raises plain Exception
      raise ConfigError(f"tokenizer_path={path} is no tokenizer.json: {error}") from error
    self._inner.encode_special_tokens = True
    self._inner.no_truncation()
    self._inner.no_padding()
    self.name, self.path, self.fingerprint, self._spelled = str(file), file, _digest(raw), self._inner.id_to_token
    self.normalizes = self._inner.normalizer is not None
    self._set_specials(vocab, file.parent / "tokenizer_config.json")
    added = self._inner.get_added_tokens_decoder()
    self.specials = {token.content: number for number, token in added.items() if token.special}
    if '"ByteLevel"' in raw.decode("utf-8"):
      pieces: list[bytes | None] = [None] * self.vocab_size
      decoder = byte_level_alphabet()
      for token, number in vocab.items():
        if number in added:
          pieces[number] = None if added[number].special else added[number].content.encode()
        elif all(letter in decoder for letter in token):
          pieces[number] = bytes(decoder[letter] for letter in token)
      self._set_pieces(pieces)

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode("utf-8") for text in texts]
    return [np.array(e.ids, np.int32) for e in self._inner.encode_batch_fast(decoded, add_special_tokens=False)]

  @functools.cached_property
  def _with_specials(self):
    made = type(self._inner).from_str(self._inner.to_str())
    made.encode_special_tokens = False
    return made

  def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    found = self._with_specials.encode(text.encode().decode(), add_special_tokens=False)  # told if it is no Unicode
    places = np.array(found.offsets, np.int64).reshape(-1, 2)
    places[1:, 0] = np.minimum(places[1:, 0], places[:-1, 1])  # some leave out spaces before a token
    return np.array(found.ids, np.int32), places

  def encode_bytes(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    if self.byte_table is not None and not self.normalizes:
      return super().encode_bytes(texts)
    out = []
    encodings = self._inner.encode_batch([text.decode("utf-8") for text in texts], add_special_tokens=False)
    for one, text in zip(encodings, texts, strict=True):
      starts_character = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80  # bytes 10xxxxxx continue one
      place = np.append(np.flatnonzero(starts_character), len(text))
      out.append((np.array(one.ids, np.int32), _gaps(place[[start for start, _ in one.offsets]], len(text))))
    return out

  def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
    if self.byte_table is not None:
      return super().decode(ids)
    return self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True).encode("utf-8")


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model file. It normalizes text, so decoding may give other white space or letters."""

  def __init__(self, path: str):
    sentencepiece = import_package("sentencepiece", "tokenizer_type=sentencepiece")
    raw = _read(Path(path))
    try:
      self._inner = sentencepiece.SentencePieceProcessor(model_proto=raw)
      if not self._inner.vocab_size():
        raise RuntimeError("it has no pieces")
    except RuntimeError as error:
      raise ConfigError(f"tokenizer_path={path} is no SentencePiece model: {error}") from error
    self.name, self.path, self.fingerprint, self._spelled = path, Path(path), _digest(raw), self._inner.id_to_piece
    self.vocab_size = self._inner.vocab_size()
    specials = (self._inner.bos_id(), self._inner.eos_id(), self._inner.pad_id())
    self.bos_id, self.eos_id, pad = (None if number < 0 else number for number in specials)
    self.pad_id = pad if pad is not None else self.eos_id or 0
    self.specials = {self._spelled(i): i for i in range(self.vocab_size) if self._inner.is_control(i)}

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in self._inner.encode([text.decode("utf-8") for text in texts])]

  def encode_bytes(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    found = self._inner.encode([text.decode() for text in texts], return_type="offset_mapping", return_bytes=True)
    return [
      (np.array(one["ids"], np.int32), _gaps([start for start, _ in one["offsets"]], len(text)))
      for one, text in zip(found, texts, strict=True)
    ]

  def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
    return self._inner.decode([i for i in np.asarray(ids).tolist() if i < self.vocab_size]).encode("utf-8")


class TiktokenTokenizer(Tokenizer):
  """A tiktoken encoding by name (`o200k_base`; looked up in TIKTOKEN_CACHE_DIR), or a file of ranks. With a file of
  ranks, text is split as in Llama 3, and the begin and end tokens follow the ranks. A `*.encoding.json`, as a run saves
  it, names its file of ranks and also holds the splitting rule and special tokens."""

  def __init__(self, path: str):
    tiktoken = import_package("tiktoken", "tokenizer_type=tiktoken")
    self._inner = (_tiktoken_file if os.path.isfile(path) else _tiktoken_name)(tiktoken, path)
    self.name, self.path = path, Path(path)
    self.vocab_size = self._inner.n_vocab
    self.specials = {name: self._inner.encode_single_token(name) for name in sorted(self._inner.special_tokens_set)}
    self._set_specials(self.specials)
    values = self._inner.token_byte_values()
    pieces = {self._inner.encode_single_token(piece): piece for piece in values}
    self.fingerprint = _digest(b"".join(len(piece).to_bytes(4, "little") + piece for piece in values))
    self._set_pieces([pieces.get(number) for number in range(self.vocab_size)])

  def save(self, folder: Path) -> None:
    """Writes the ranks, the splitting rule and the special tokens; the name alone would need a download."""
    stem = Path(self.name).stem
    ranks = [base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(self._pieces) if piece is not None]
    (folder / f"{stem}.tiktoken").write_bytes(b"".join(ranks))
    rules = {"ranks": f"{stem}.tiktoken", "split": self._inner._pat_str, "special_tokens": self.specials}
    write_text(folder / f"{stem}.encoding.json", json.dumps(rules, indent=2) + "\n")

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    decoded = [text.decode("utf-8") for text in texts]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [np.array(ids, np.int32) for ids in self._inner.encode_ordinary_batch(decoded, num_threads=threads)]


_KINDS = {HUGGINGFACE: (HuggingFaceTokenizer, "a tokenizer.json or its folder"),
          SENTENCEPIECE: (SentencePieceTokenizer, "a SentencePiece model file (*.model)"),
          TIKTOKEN: (TiktokenTokenizer, "the name of an encoding such as o200k_base, or a .tiktoken file")}  # fmt: skip
# How Llama 3 splits text before its merges, as its published tokenizer configuration states it.
_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tiktoken_name(tiktoken, name: str):
  known = tiktoken.list_encoding_names()
  if name not in known:
    hint = did_you_mean(name, known, "tiktoken has")
    raise ConfigError(f"tokenizer_path={name} is neither a file nor a tiktoken encoding{hint}")
  try:
    return tiktoken.get_encoding(name)
  except Exception as error:  # whatever the library's download raises
    said = f"tokenizer_path={name} could not be loaded ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder"
    raise ConfigError(f"{said} that holds its file, or give a .tiktoken file") from error


def _tiktoken_file(tiktoken, path: str):
  rules = {"ranks": Path(path).name, "split": _LLAMA3_SPLIT, "special_tokens": None}
  try:
    if path.endswith(".json"):
      rules = json.loads(_read(Path(path)))
    file, specials = Path(path).parent / rules["ranks"], rules["special_tokens"]
    lines = filter(None, with_end(file).read_bytes().splitlines())  # tiktoken's own reader keeps what it once read
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    if specials is None:
      specials = {"<|begin_of_text|>": len(ranks), "<|end_of_text|>": len(ranks) + 1}
    if len({*ranks.values()}) < len(ranks) or any(bytes([n]) not in ranks for n in range(256)):  # a panic in tiktoken
      raise ValueError("tokens must have different ranks, and each of the 256 bytes one")
    return tiktoken.Encoding(path, pat_str=rules["split"], mergeable_ranks=ranks, special_tokens=specials)
  except (ValueError, KeyError, OSError, TypeError, AttributeError, OverflowError, RecursionError) as error:
    raise ConfigError(f"tokenizer_path={path} is no tiktoken file: {error!r}") from error


def _gaps(starts: Sequence[int] | np.ndarray, stop: int) -> np.ndarray:
  """int64[n]: from each token's start to the next one's; the first counts from 0, the last to `stop`."""
  return np.diff(np.array([0, *starts[1:], stop], np.int64)) if len(starts) else np.zeros(0, np.int64)


def byte_level_alphabet() -> dict[str, int]:
  """{letter: byte} of GPT-2's byte-level vocabulary: printable bytes are their own letter, others start at 256."""
  plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
  other = [byte for byte in range(256) if byte not in plain]
  return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(other)}


def _read(file: Path) -> bytes:
  with reading(file, "tokenizer_path="):
    return with_end(file).read_bytes()


def _digest(raw: bytes) -> str:
  return hashlib.blake2b(raw, digest_size=8).hexdigest()
