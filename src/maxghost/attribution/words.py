"""BM25 (Robertson and Zaragoza 2009) over the words of an index's chunks, and its fusion with another order.

N chunks. A file holds, for each word, the chunks that have it and what it adds to their score.
"""

import array
import collections
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from maxghost.config.files import write_whole

FILE = "words.npz"
_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75
_FUSED = 60  # Cormack, Clarke and Büttcher (SIGIR 2009)


def words_of(text: str) -> list[str]:
  return _WORD.findall(text.lower())


def write(folder: Path, texts: Iterable[tuple[int, str]], num_chunks: int) -> str:
  """Writes FILE of (chunk, its text); the name."""
  known: dict[str, int] = {}
  word, chunk, count = (array.array("i") for _ in range(3))
  length_N = np.zeros(num_chunks)
  for n, text in texts:
    found = collections.Counter(words_of(text))
    length_N[n] = found.total()
    word.extend(known.setdefault(name, len(known)) for name in found)
    chunk.extend([n] * len(found))
    count.extend(found.values())
  word_P, chunk_P, count_P = (np.array(x, np.int32) for x in (word, chunk, count))
  have_W = np.bincount(word_P, minlength=len(known))
  weight_W = np.log(1 + (num_chunks - have_W + 0.5) / (have_W + 0.5))
  norm_N = _K1 * (1 - _B + _B * length_N / max(length_N.mean(), 1.0))
  weight_P = weight_W[word_P] * count_P * (_K1 + 1) / (count_P + norm_N[chunk_P])
  order, ends_W = np.argsort(word_P, kind="stable"), np.cumsum(have_W)
  names = np.frombuffer("\n".join(known).encode(), np.uint8)
  with write_whole(folder / FILE) as file:
    np.savez(file, words=names, ends=ends_W, chunk=chunk_P[order], weight=weight_P[order].astype(np.float32))
  return FILE


class Words:
  def __init__(self, folder: Path, num_chunks: int):
    with np.load(folder / FILE) as file:
      self._ends_W, self._chunk_P, self._weight_P = file["ends"], file["chunk"], file["weight"]
      names = file["words"].tobytes().decode()
    self._number, self._num_chunks = {name: i for i, name in enumerate(names.split("\n"))}, num_chunks

  def scores(self, text: str) -> np.ndarray:
    """f32[N]; 0 for a chunk without any of the text's words."""
    score_N = np.zeros(self._num_chunks, np.float32)
    for name, times in collections.Counter(words_of(text)).items():
      if (number := self._number.get(name)) is not None:
        here = slice(self._ends_W[number - 1] if number else 0, self._ends_W[number])
        score_N[self._chunk_P[here]] += times * self._weight_P[here]
    return score_N


def fused(score_N: np.ndarray, words_N: np.ndarray) -> np.ndarray:
  """f32[N]: the sum of 1 / (60 + rank) in both orders; a chunk without any of the words has none from the second."""
  total_N = np.zeros(len(score_N))
  for values_N, counts_N in ((score_N, np.ones(len(score_N), bool)), (words_N, words_N > 0)):
    order = np.argsort(-values_N, kind="stable")
    total_N[order] += counts_N[order] / (_FUSED + 1 + np.arange(len(order)))
  return total_N.astype(np.float32)
