"""The order of the training documents, and their packing window by window.

An epoch is a pseudo-random order of all documents. Its positions are dealt to `num_lanes` lanes (position p to lane
p mod num_lanes), and each lane's documents are taken in windows. A window is read, tokenized, packed into rows, and its
rows are shuffled: a pure function of (lane, epoch, window). So a position in the data is three small numbers per lane,
there is no packing remainder outside of a window, and any process can compute any lane.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from maxghost.data import packing
from maxghost.data.hashing import content_hash, permutation, shuffled_index, text_hash
from maxghost.data.sources.base import Source
from maxghost.data.split import Split
from maxghost.data.tokenizers import Tokenizer

_ORDER = text_hash("document order")
_ROWS = text_hash("row order")


@dataclass(frozen=True)
class Layout:
  """How tokens become rows."""

  row_length: int
  max_segments: int
  packing: bool
  add_bos: bool
  add_eos: bool


class Counts:
  """What reading met, over all windows so far; safe to add to from several threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self.values: dict[str, int] = {}

  def add(self, **more: int) -> None:
    with self._lock:
      for name, value in more.items():
        self.values[name] = self.values.get(name, 0) + value


def pack_documents(source: Source, indices: np.ndarray, tokenizer: Tokenizer, layout: Layout, order_seeds: tuple,
                   texts: list[bytes] | None = None) -> packing.Rows:
  """Rows of the documents `indices`; `document` is the index into the source, `offset` the byte in the document."""
  texts = [source[int(index)].text for index in indices] if texts is None else texts
  tokens, ends = tokenizer.encode(texts)
  tokens, ends = frame(tokens, ends, tokenizer, layout)
  segments = layout.max_segments if layout.packing else 1
  rows = packing.pack(tokens, ends, layout.row_length, segments, lambda size: permutation(size, *order_seeds))
  before = np.concatenate(([0], np.cumsum(tokenizer.token_bytes(tokens))))
  starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
  offset = before[rows.start] - before[starts[rows.document]]
  return packing.Rows(rows.tokens, rows.row_ends, rows.start, rows.length, np.asarray(indices)[rows.document], offset)


def frame(tokens: np.ndarray, ends: np.ndarray, tokenizer: Tokenizer, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
  """The token array with begin and end tokens around each document, and the new ends."""
  extra = int(layout.add_bos) + int(layout.add_eos)
  if not extra or not len(ends):
    return tokens, ends
  lengths = np.diff(ends, prepend=0)
  number = np.arange(len(ends))
  new_ends = ends + (number + 1) * extra
  out = np.empty(len(tokens) + extra * len(ends), np.int32)
  out[np.arange(len(tokens)) + np.repeat(number * extra + int(layout.add_bos), lengths)] = tokens
  if layout.add_bos:
    out[new_ends - lengths - extra] = tokenizer.bos_id
  if layout.add_eos:
    out[new_ends - 1] = tokenizer.eos_id
  return out, new_ends


class Windows:
  """Makes the windows of every lane."""

  def __init__(self, source: Source, split: Split, tokenizer: Tokenizer, layout: Layout, *, seed: int, num_lanes: int,
               window_bytes: int, held_out_texts: Iterable[bytes] = ()):
    self._source, self._split, self._tokenizer, self._layout = source, split, tokenizer, layout
    self._seed = seed
    self.num_lanes = num_lanes
    mean = max(1, source.num_bytes // max(1, len(source)))
    self.documents_per_window = max(1, window_bytes // mean)
    self._copies = {content_hash(text) for text in held_out_texts}
    self._copy_sizes = {len(text) for text in held_out_texts}
    self.counts = Counts()

  def num_documents(self, lane: int) -> int:
    """Documents of a lane per epoch, the held-out ones included."""
    return len(range(lane, len(self._source), self.num_lanes))

  def num_windows(self, lane: int) -> int:
    return -(-self.num_documents(lane) // self.documents_per_window)

  def make(self, lane: int, epoch: int, window: int) -> packing.Rows:
    """The rows of a window; may be none when all its documents are held out."""
    first = window * self.documents_per_window
    place = np.arange(first, min(first + self.documents_per_window, self.num_documents(lane)))
    indices = shuffled_index(place * self.num_lanes + lane, len(self._source), _ORDER, self._seed, epoch)
    indices = indices[~self._split.held_out(indices)]
    kept, texts, copies = [], [], 0
    for index in indices.tolist():
      text = self._source[index].text
      if len(text) in self._copy_sizes and content_hash(text) in self._copies:
        copies += 1
        continue
      kept.append(index)
      texts.append(text)
    seeds = (_ROWS, self._seed, lane, epoch, window)
    rows = pack_documents(self._source, np.array(kept, np.int64), self._tokenizer, self._layout, seeds, texts)
    self.counts.add(windows=1, documents=len(kept), copies=copies, rows=len(rows), tokens=int(rows.length.sum()))
    return rows
