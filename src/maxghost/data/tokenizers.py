"""Text to token ids and back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
  """Turns documents into ids; `bos_id`, `eos_id` and `pad_id` are ids that no text yields."""

  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int

  def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all texts in one array, int32[N], and where each text's tokens end, int64[len(texts)]."""

  def decode(self, ids: np.ndarray) -> bytes:
    """The bytes that the ids stand for; special ids stand for none."""

  def token_bytes(self, ids: np.ndarray) -> np.ndarray:
    """int64[n]: source bytes behind each token."""


class ByteTokenizer:
  """A token is a byte; 256 begins a document, 257 ends it, 258 pads. Needs nothing and loses nothing."""

  vocab_size = 259
  bos_id, eos_id, pad_id = 256, 257, 258

  def encode(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return np.frombuffer(b"".join(texts), np.uint8).astype(np.int32), ends

  def decode(self, ids: np.ndarray) -> bytes:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes()

  def token_bytes(self, ids: np.ndarray) -> np.ndarray:
    return (np.asarray(ids) < 256).astype(np.int64)
