"""Keys and values of the beginnings of prompts, kept for the next prompt that begins so."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class Prefixes:
  """Chunks of read prompts, each by all tokens up to its end. limit: of bytes; the least recently used leave first."""

  def __init__(self, limit: int):
    self.limit, self.bytes = limit, 0
    self._chunks: collections.OrderedDict[bytes, tuple[Any, int]] = collections.OrderedDict()

  def find(self, prompt: np.ndarray, size: int) -> Sequence[Any]:
    """The known chunks of `size` tokens with which a prompt begins; its last token is never in them."""
    beginnings = (prompt[:end].tobytes() for end in range(size, len(prompt), size))
    known = [*itertools.takewhile(self._chunks.__contains__, beginnings)]
    for key in reversed(known):  # a beginning leaves after what it is the beginning of
      self._chunks.move_to_end(key)
    return [self._chunks[key][0] for key in known]

  def add(self, prompt: np.ndarray, chunk: Any) -> None:
    """Keeps the arrays of a chunk, which ends where `prompt` does."""
    size, key = sum(x.nbytes for x in jax.tree.leaves(chunk)), prompt.tobytes()
    if size > self.limit or key in self._chunks:
      return
    while self.bytes + size > self.limit:
      self.bytes -= self._chunks.popitem(last=False)[1][1]
    self._chunks[key] = chunk, size
    self.bytes += size
