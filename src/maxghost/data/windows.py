"""Windows: some units of a source, read, tokenized and packed into shuffled rows.

Position p of an epoch belongs to lane p mod num_lanes, and each lane's positions are split into windows. A window is a
pure function of (lane, epoch, window). So a position in the data is three small integers per lane, no packing remainder
is carried from window to window, and any process or worker can compute any window.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxghost.data import packing
from maxghost.data.hashing import content_hashes, permutation, text_hash
from maxghost.data.order import Repeated, Uniform
from maxghost.data.packing import Encoded, Layout, Rows
from maxghost.data.sources.base import Source, read_or_skip
from maxghost.data.split import Split, scan
from maxghost.data.tokenizers import Tokenizer

NO_COUNTS: dict[str, int] = dict.fromkeys(("documents", "bytes", "empty", "copies", "corrupt"), 0)
_SAMPLES = 32  # documents read to estimate a stream's mean document size


class Window(NamedTuple):
  """Rows, and counts of what was read for them (documents, bytes, tokens, rows, empty, copies, corrupt)."""

  rows: Rows
  counts: dict[str, int]


class HeldOut(NamedTuple):
  """The held-out texts, whose copies training leaves out: `content_hashes` (uint64, sorted) and sizes in bytes."""

  hashes: np.ndarray
  sizes: frozenset[int]

  def copies(self, text_hashes: np.ndarray) -> np.ndarray:
    """bool[n]: whether each hash is that of a held-out text."""
    return np.isin(text_hashes, self.hashes)


NO_TEXTS = HeldOut(np.empty(0, np.uint64), frozenset())


@dataclass(frozen=True, eq=False)
class Units:
  """What is read in random order, and tokenized as it is read: the documents of a source.

  Attributes:
    on_corrupt: as in the configuration.
    held_out: the held-out texts of all sources.
    drops_copies: whether documents with these texts are not trained on.
  """

  source: Source
  split: Split
  tokenizer: Tokenizer
  layout: Layout
  on_corrupt: str
  held_out: HeldOut = NO_TEXTS
  drops_copies: bool = False

  def all_units(self) -> np.ndarray | range:
    """Numbers of the units to train on."""
    return range(len(self.source))

  def units_of(self, domain: int) -> np.ndarray | range:
    """Numbers of a domain's units; a range where they are consecutive."""
    found = [indices[self.source.domain_numbers(indices) == domain] for indices in scan(len(self.source))]
    indices = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
      return range(int(indices[0]), int(indices[-1]) + 1)
    return indices

  def mean_bytes(self, units: np.ndarray | range) -> int:
    """Approximate mean text bytes of these units."""
    if len(units) == len(self.source):
      return max(1, self.source.num_bytes // max(1, len(units)))
    some = np.asarray(units[:: max(1, len(units) // _SAMPLES)])
    found = [len(text) for text in read_or_skip(self.source.texts, some) if text]
    return max(1, sum(found) // max(1, len(found)))

  def encode(self, units: np.ndarray) -> tuple[Encoded, dict[str, int]]:
    """Training documents of the units (held-out ones left out), and counts of what was read."""
    held_out = self.held_out if self.drops_copies else NO_TEXTS
    return self._encode(units[~self.split.left_out(units)], held_out)

  def encode_documents(self, indices: np.ndarray) -> Encoded:
    """Documents by number, held out or not."""
    return self._encode(indices, NO_TEXTS)[0]

  def read(self, indices: np.ndarray) -> list[bytes | None]:
    """Texts by document number; None for a corrupt one that is skipped."""
    return read_or_skip(self.source.texts, indices, self.on_corrupt)

  def _encode(self, indices: np.ndarray, held_out: HeldOut) -> tuple[Encoded, dict[str, int]]:
    kept, texts = [], []
    counts = NO_COUNTS.copy()
    for index, text in zip(indices.tolist(), self.read(indices), strict=True):
      if text is None:
        counts["corrupt"] += 1
      elif not text:
        counts["empty"] += 1
      elif len(text) in held_out.sizes and held_out.copies(content_hashes([text]))[0]:
        counts["copies"] += 1
      else:
        kept.append(index)
        texts.append(text)
    counts["documents"] += len(kept)
    counts["bytes"] += sum(map(len, texts))
    sizes = None
    if self.tokenizer.byte_table is None:
      pairs = self.tokenizer.encode_bytes(texts)
      ids, sizes = [ids for ids, _ in pairs], concatenated([size for _, size in pairs])
    else:
      ids = self.tokenizer.encode(texts)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    piece = (concatenated(ids), lengths, sizes)
    return self.frame([piece], np.array(kept, np.int64)), counts

  def frame(self, pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]], documents: np.ndarray) -> Encoded:
    """Adds the layout's begin and end tokens to documents.

    pieces: (ids of some documents end to end, int64 length of each, source bytes of each id or None where the tokenizer
    has a byte table). documents: int64[D], of all pieces.
    """
    before, after = int(self.layout.add_bos), int(self.layout.add_eos)
    lengths = concatenated([lengths for _, lengths, _ in pieces])
    ends = np.cumsum(lengths + before + after)
    tokens = np.empty(int(ends[-1]) if len(ends) else 0, packing.token_dtype(self.tokenizer.vocab_size))
    is_text = np.ones(len(tokens), bool)
    if before:
      heads = ends - lengths - before - after
      tokens[heads], is_text[heads] = self.tokenizer.bos_id, False
    if after:
      tokens[ends - 1], is_text[ends - 1] = self.tokenizer.eos_id, False
    stop = 0
    for ids, count, _ in pieces:  # piece by piece, so that each stays in the CPU's cache
      first, stop = stop, stop + len(ids) + len(count) * (before + after)
      tokens[first:stop][is_text[first:stop]] = ids
    table, sizes = self.tokenizer.byte_table, [behind for _, _, behind in pieces if behind is not None]
    return Encoded(tokens, ends, documents, table, concatenated(sizes) if table is None else None, (before, after))


def concatenated(arrays: list[np.ndarray]) -> np.ndarray:
  """`np.concatenate` that gives an empty array for an empty list."""
  return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


class Windows:
  """The windows of every lane of one stream: of all the data, or of a domain. The stream's name enters its seeds."""

  def __init__(
    self, units: Units, order: Uniform | Repeated, *, name: str, seed: int, num_lanes: int, window_bytes: int
  ):
    """order: the stream's units by position. window_bytes: approximate text of a window."""
    self.units, self._order = units, order
    self.name, self.seed, self._num_lanes = name, seed, num_lanes
    self._units_per_window = max(1, window_bytes // units.mean_bytes(order.all_units))

  def _num_units(self, lane: int) -> int:
    """Units of a lane per epoch, including those of held-out documents."""
    return len(range(lane, len(self._order), self._num_lanes))

  def num_windows(self, lane: int) -> int:
    return -(-self._num_units(lane) // self._units_per_window)

  def after(self, lane: int, epoch: int, window: int) -> tuple[int, int]:
    """(epoch, window) of the lane's next window."""
    return (epoch, window + 1) if window + 1 < self.num_windows(lane) else (epoch + 1, 0)

  def make(self, lane: int, epoch: int, window: int) -> Window:
    """Reads and packs a window. It has no rows when all its documents are held out or empty."""
    first = window * self._units_per_window
    place = np.arange(first, min(first + self._units_per_window, self._num_units(lane)))
    encoded, counts = self.units.encode(self._order.units(epoch, place * self._num_lanes + lane))
    seeds = (text_hash("window", self.name), self.seed, lane, epoch, window)
    rows = packing.pack(encoded, self.units.layout, lambda size, what: permutation(size, text_hash(what), *seeds))
    return Window(rows, {**counts, "rows": len(rows), "tokens": int(rows.length.sum())})

  def from_workers(self, lane: int, epoch: int, window: int, num_workers: int) -> Iterator[Window]:
    """A lane's windows from this one on, made by processes that each prefetch one."""
    import grain  # imports JAX, which nothing else in this package needs
    from absl import flags

    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()  # Grain reads its absl flags, which keep their defaults
    per_epoch = self.num_windows(lane)
    numbers = grain.MapDataset.range(epoch * per_epoch + window, 1 << 40)
    dataset = numbers.map(lambda number: self.make(lane, *divmod(int(number), per_epoch)))
    one_at_a_time = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    return (Window(*made) for made in dataset.to_iter_dataset(one_at_a_time).mp_prefetch(options))
