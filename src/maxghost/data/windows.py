"""Windows: some units of a source, read, tokenized and packed into shuffled rows.

Position p of an epoch belongs to lane p mod num_lanes, and each lane's positions are split into windows. A window is a
pure function of (lane, epoch, window). So a position in the data is three small integers per lane, no packing remainder
is carried from window to window, and any process or worker can compute any window.
"""

from typing import NamedTuple, Protocol

import numpy as np

from maxghost.data import packing
from maxghost.data.hashing import content_hashes, permutation, text_hash
from maxghost.data.packing import Encoded, Layout, Rows
from maxghost.data.sources.base import Source, read_or_skip
from maxghost.data.split import Split, scan
from maxghost.data.tokenizers import Tokenizer

_SAMPLES = 32  # documents read to estimate a stream's mean document size


class Window(NamedTuple):
  """Rows, and counts of what was read for them (documents, bytes, tokens, rows, empty, copies, corrupt)."""

  rows: Rows
  counts: dict[str, int]


def no_counts() -> dict[str, int]:
  """New counters of what is read, all 0."""
  return dict.fromkeys(("documents", "bytes", "empty", "copies", "corrupt"), 0)


class HeldOut(NamedTuple):
  """The held-out texts, whose copies training leaves out: `content_hashes` (uint64, sorted) and sizes in bytes."""

  hashes: np.ndarray
  sizes: frozenset[int]

  def copies(self, text_hashes: np.ndarray) -> np.ndarray:
    """bool[n]: whether each hash is that of a held-out text."""
    return np.isin(text_hashes, self.hashes)


NO_COPIES = HeldOut(np.empty(0, np.uint64), frozenset())


class Units(Protocol):
  """What is read in random order: documents, or blocks of prepared documents.

  drops_copies: whether copies of held-out texts are left out.
  """

  drops_copies: bool

  def all_units(self) -> np.ndarray | range:
    """Numbers of the units to train on."""
    ...

  def units_of(self, domain: int) -> np.ndarray | range:
    """Numbers of a domain's units."""
    ...

  def mean_bytes(self, units: np.ndarray | range) -> int:
    """Approximate mean text bytes of these units."""
    ...

  def encode(self, units: np.ndarray) -> tuple[Encoded, dict[str, int]]:
    """Training documents of the units (held-out ones left out), and counts of what was read."""
    ...

  def encode_documents(self, indices: np.ndarray) -> Encoded:
    """Documents by number, held out or not."""
    ...

  def read(self, indices: np.ndarray) -> list[bytes | None]:
    """Texts by document number; see `read_or_skip` for corrupt ones."""
    ...


class TextUnits:
  """Documents of a source, tokenized as they are read. A unit is a document."""

  def __init__(
    self,
    source: Source,
    split: Split,
    tokenizer: Tokenizer,
    layout: Layout,
    *,
    on_corrupt: str,
    held_out: HeldOut = NO_COPIES,
  ):
    self._source, self._split, self._tokenizer, self._layout = source, split, tokenizer, layout
    self._on_corrupt, self._held_out = on_corrupt, held_out
    self.drops_copies = bool(held_out.sizes)

  def all_units(self) -> range:
    return range(len(self._source))

  def units_of(self, domain: int) -> np.ndarray | range:
    """A range where the domain's documents are consecutive."""
    found = [indices[self._source.domain_numbers(indices) == domain] for indices in scan(len(self._source))]
    indices = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
      return range(int(indices[0]), int(indices[-1]) + 1)
    return indices

  def mean_bytes(self, units: np.ndarray | range) -> int:
    if len(units) == len(self._source):
      return max(1, self._source.num_bytes // max(1, len(units)))
    some = np.asarray(units[:: max(1, len(units) // _SAMPLES)])
    found = [len(text) for text in read_or_skip(self._source.texts, some) if text]
    return max(1, sum(found) // max(1, len(found)))

  def encode(self, units: np.ndarray) -> tuple[Encoded, dict[str, int]]:
    return self._encode(units[~self._split.left_out(units)], self._held_out)

  def encode_documents(self, indices: np.ndarray) -> Encoded:
    return self._encode(indices, NO_COPIES)[0]

  def read(self, indices: np.ndarray) -> list[bytes | None]:
    return read_or_skip(self._source.texts, indices, self._on_corrupt)

  def _encode(self, indices: np.ndarray, held_out: HeldOut) -> tuple[Encoded, dict[str, int]]:
    kept, texts = [], []
    counts = no_counts()
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
    if self._tokenizer.byte_table is None:
      pairs = self._tokenizer.encode_bytes(texts)
      ids, sizes = [ids for ids, _ in pairs], concatenated([size for _, size in pairs])
    else:
      ids = self._tokenizer.encode(texts)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    piece = (concatenated(ids), lengths, sizes)
    return frame([piece], np.array(kept, np.int64), self._tokenizer, self._layout), counts


def concatenated(arrays: list[np.ndarray]) -> np.ndarray:
  """`np.concatenate` that gives an empty array for an empty list."""
  return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def frame(
  pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
  documents: np.ndarray,
  tokenizer: Tokenizer,
  layout: Layout,
) -> Encoded:
  """Adds the layout's begin and end tokens to documents.

  pieces: (ids of some documents end to end, int64 length of each, source bytes of each id or None where the tokenizer
  has a byte table). documents: int64[D], of all pieces.
  """
  before, after = int(layout.add_bos), int(layout.add_eos)
  lengths = concatenated([lengths for _, lengths, _ in pieces])
  ends = np.cumsum(lengths + before + after)
  tokens = np.empty(int(ends[-1]) if len(ends) else 0, packing.token_dtype(tokenizer.vocab_size))
  sizes = (
    None
    if tokenizer.byte_table is not None
    else concatenated([behind for _, _, behind in pieces if behind is not None])
  )
  if before:
    tokens[ends - lengths - before - after] = tokenizer.bos_id
  if after:
    tokens[ends - 1] = tokenizer.eos_id
  stop = 0
  for ids, count, _ in pieces:  # piece by piece, so that each stays in the CPU's cache
    own = np.cumsum(count + before + after)
    first, stop = stop, stop + (int(own[-1]) if len(own) else 0)
    is_text = np.ones(stop - first, bool)
    if before:
      is_text[own - count - before - after] = False
    if after:
      is_text[own - 1] = False
    tokens[first:stop][is_text] = ids
  return Encoded(tokens, ends, documents, tokenizer.byte_table, sizes, (before, after))


class Windows:
  """The windows of every lane of one stream: of all the data, or of a domain. The stream's name enters its seeds."""

  def __init__(self, units: Units, order, layout: Layout, *, name: str, seed: int, num_lanes: int, window_bytes: int):
    """order: the stream's units by position (`Uniform` or `Repeated`). window_bytes: approximate text of a window."""
    self._units, self._order, self._layout = units, order, layout
    self.name, self._seeds = name, (text_hash("window", name), seed)
    self.num_lanes = num_lanes
    self.units_per_window = max(1, window_bytes // units.mean_bytes(order.all_units))

  def num_units(self, lane: int) -> int:
    """Units of a lane per epoch, including those of held-out documents."""
    return len(range(lane, len(self._order), self.num_lanes))

  def num_windows(self, lane: int) -> int:
    return -(-self.num_units(lane) // self.units_per_window)

  def after(self, lane: int, epoch: int, window: int) -> tuple[int, int]:
    """(epoch, window) of the lane's next window."""
    return (epoch, window + 1) if window + 1 < self.num_windows(lane) else (epoch + 1, 0)

  def make(self, lane: int, epoch: int, window: int) -> Window:
    """Reads and packs a window. It has no rows when all its documents are held out or empty."""
    first = window * self.units_per_window
    place = np.arange(first, min(first + self.units_per_window, self.num_units(lane)))
    encoded, counts = self._units.encode(self._order.units(epoch, place * self.num_lanes + lane))
    seeds = (*self._seeds, lane, epoch, window)
    rows = packing.pack(encoded, self._layout, lambda size, what: permutation(size, text_hash(what), *seeds))
    return Window(rows, {**counts, "rows": len(rows), "tokens": int(rows.length.sum())})
