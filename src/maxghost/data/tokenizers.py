"""Text to token ids and back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
  """Turns documents into ids.

  bos_id, eos_id: ids put before and after a document; None where the tokenizer has none. pad_id fills rows.
  fingerprint: changes with the vocabulary. lossless: `byte_table` holds the source bytes of each id, int64[V], and
  decoding gives back the text; else `encode_bytes` tells the bytes behind each token.
  """

  name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  pad_id: int
  fingerprint: str
  byte_table: np.ndarray | None

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Ids of each text, int32[n] or a smaller integer type. Raises UnicodeDecodeError where text must be UTF-8."""

  def encode_bytes(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `encode`, with the bytes from each token's start to the next one's (int64[n]); for lossy tokenizers."""

  def decode(self, ids: np.ndarray) -> bytes:
    """The bytes that the ids stand for; special ids stand for none."""


class ByteTokenizer:
  """A token is a byte; 256 begins a document, 257 ends it, 258 pads. Needs nothing and loses nothing."""

  name = "byte"
  vocab_size = 259
  bos_id, eos_id, pad_id = 256, 257, 258
  fingerprint = "byte"
  byte_table = np.array([1] * 256 + [0] * 3, np.int64)

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(text, np.uint8) for text in texts]

  def encode_bytes(self, texts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.frombuffer(text, np.uint8), np.ones(len(text), np.int64)) for text in texts]

  def decode(self, ids: np.ndarray) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()
