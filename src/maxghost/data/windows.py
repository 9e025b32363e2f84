"""Windows: some units of a source, read, tokenized and packed into shuffled rows.

Position p of an epoch belongs to lane p mod num_lanes, and each lane's positions are split into windows. A window is a
pure function of (lane, epoch, window) and the seed: a position in the data is three small integers per lane, nothing is
carried from window to window, any process can compute any window, and no order of the documents is stored.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from maxghost.config.values import ConfigError
from maxghost.data.hashing import GOLDEN, combine, content_hashes, permutation, shuffled_index, text_hash
from maxghost.data.packing import Encoded, Layout, Rows, pack, token_dtype
from maxghost.data.sources.base import Source, read_or_skip
from maxghost.data.split import Split, scan
from maxghost.data.tokenizers import Tokenizer

NO_COUNTS: dict[str, int] = dict.fromkeys(("documents", "bytes", "empty", "copies", "corrupt", "cut", "spelled"), 0)
_ORDER, _COPY, _MIXTURE = text_hash("unit order"), text_hash("copy order"), text_hash("mixture")
_SAMPLES = 32  # documents read to estimate a stream's mean document size


@dataclass(frozen=True, eq=False)
class Units:
  """What is read in random order, and tokenized as it is read: the documents of a source."""

  source: Source
  split: Split
  tokenizer: Tokenizer
  layout: Layout
  on_corrupt: str
  hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # sorted, of all held-out texts
  sizes: frozenset[int] = frozenset()  # of the held-out texts in bytes
  on_copies: str = "keep"  # of these texts in the training data: drop, keep or error
  shown = staticmethod(bytes)  # a document's text as a reader sees it
  settings: ClassVar[tuple[str, ...]] = ()  # what the tokens depend on besides source, tokenizer and layout
  examined: ClassVar[Mapping[str, int]] = {}  # counts of what was read before the training

  def all_units(self) -> np.ndarray | range:
    """Numbers of the units to train on."""
    return range(len(self.source))

  def units_of(self, domain: int) -> np.ndarray | range:
    """Numbers of a domain's units; a range where they are consecutive."""
    indices = concatenated([some[self.source.domain_numbers(some) == domain] for some in scan(len(self.source))])
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
      return range(int(indices[0]), int(indices[-1]) + 1)
    return indices

  def mean_bytes(self, units: np.ndarray | range) -> int:
    if len(units) == len(self.source):
      return max(1, self.source.num_bytes // max(1, len(units)))
    some = np.asarray(units[:: max(1, len(units) // _SAMPLES)])
    found = [len(text) for text in read_or_skip(self.source.texts, some) if text]
    return max(1, sum(found) // max(1, len(found)))

  def encode(self, units: np.ndarray) -> tuple[Encoded, dict[str, int]]:
    """Training documents of the units (held-out ones left out), and counts of what was read."""
    return self._encode(units[~self.split.left_out(units)], self.on_copies != "keep")

  def encode_documents(self, indices: np.ndarray) -> Encoded:
    """Documents by number, held out or not."""
    return self._encode(indices, False)[0]

  def read(self, indices: np.ndarray) -> list[bytes | None]:
    """Texts by document number; None for a corrupt one that is skipped. Raises ConfigError for too few texts."""
    found = read_or_skip(self.source.texts, indices, self.on_corrupt)
    if len(found) != len(indices):
      raise ConfigError(f"{type(self.source).__name__}.texts gives {len(found)} texts for {len(indices)} documents")
    return found

  def cutter(self, index: int) -> Callable[[int, int], str]:
    """Gives the text of a document from one byte to another, for a reader; nothing of a corrupt one that is skipped."""
    text = self.shown(self.read(np.array([index]))[0] or b"")
    return lambda begin, end: text[begin:end].decode("utf-8", "replace")

  def _encode(self, indices: np.ndarray, drops_copies: bool) -> tuple[Encoded, dict[str, int]]:
    kept, texts, counts = [], [], NO_COUNTS.copy()
    for index, text in zip(indices.tolist(), self.read(indices), strict=True):
      if text is None:
        counts["corrupt"] += 1
      elif not text:
        counts["empty"] += 1
      elif drops_copies and len(text) in self.sizes and np.isin(content_hashes([text]), self.hashes)[0]:
        counts["copies"] += 1
      else:
        kept.append(index)
        texts.append(text)
    counts["documents"] += len(kept)
    counts["bytes"] += sum(map(len, texts))
    return self.tokenized(np.array(kept, np.int64), texts, counts), counts

  def tokenized(self, documents: np.ndarray, texts: list[bytes], counts: dict[str, int]) -> Encoded:
    """The documents (int64[D]) with these texts, tokenized. Corrects `counts` for those that it leaves out."""
    if self.tokenizer.byte_table is None or self.tokenizer.normalizes:
      pairs = self.tokenizer.encode_bytes(texts)
      ids, sizes = [ids for ids, _ in pairs], concatenated([size for _, size in pairs])
    else:
      ids, sizes = self.tokenizer.encode(texts), None
    return self.frame([(concatenated(ids), np.fromiter(map(len, ids), np.int64, len(ids)), sizes)], documents)

  def frame(self, pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]], documents: np.ndarray) -> Encoded:
    """Adds the layout's begin and end tokens to documents. pieces: (ids of some documents end to end, int64 length of
    each, source bytes of each id or None where the byte table gives them). documents: int64[D], of all pieces."""
    before, after = int(self.layout.add_bos), int(self.layout.add_eos)
    lengths = concatenated([lengths for _, lengths, _ in pieces])
    ends = np.cumsum(lengths + before + after)
    tokens = np.empty(int(ends[-1]) if len(ends) else 0, token_dtype(self.tokenizer.vocab_size))
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
    if not (behind := [behind for _, _, behind in pieces if behind is not None]):
      return Encoded(tokens, ends, documents, self.tokenizer.byte_table)
    sizes = np.zeros(len(tokens), np.int64)
    sizes[is_text] = concatenated(behind)
    return Encoded(tokens, ends, documents, None, sizes)


def concatenated(arrays: list[np.ndarray]) -> np.ndarray:
  """`np.concatenate` that gives an empty array for an empty list."""
  return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


class Order:
  """The units of an epoch by position, in a new order each epoch. parts: units, each part sorted by number. repeats:
  how often an epoch goes through each part; 1.5 reads all, and a random half again, a new one each epoch. None: each
  unit of the only part once."""

  def __init__(self, parts: Sequence[np.ndarray | range], seed: int, repeats: Sequence[float] | None = None):
    self._parts, self._seed, self._once = parts, seed, repeats is None
    self.all_units = parts[0] if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])
    self._ends = np.cumsum([round(len(part) * times) for part, times in zip(parts, repeats or [1], strict=True)])

  def __len__(self) -> int:
    return int(self._ends[-1])

  def units(self, epoch: int, positions: np.ndarray) -> np.ndarray:
    """int64[n]: the units at these positions of the epoch."""
    place = shuffled_index(positions, len(self), _ORDER, self._seed, epoch)
    part_numbers = np.searchsorted(self._ends, place, side="right")
    out = np.empty(len(place), np.int64)
    for number, part in enumerate(self._parts):
      here = part_numbers == number
      copy, index = np.divmod(place[here] - (self._ends[number - 1] if number else 0), max(1, len(part)))
      for times in () if self._once else np.unique(copy):
        seeds = (_COPY, self._seed, epoch, number, int(times))
        index[copy == times] = shuffled_index(index[copy == times], len(part), *seeds)
      out[here] = index + part.start if isinstance(part, range) else part[index]
    return out


def row_domains(weights: Sequence[float], seed: int, lane: int, first: int, count: int) -> np.ndarray:
  """int64[count]: domain numbers of the rows first, first + 1, ... of a lane in a mixture. The domains divide [0, 1) by
  weight, and the rows visit it in steps of the golden ratio: after n rows, a domain of weight w has had n w rows within
  a few (Weyl 1916)."""
  ends = np.cumsum(np.asarray(weights, np.float64) / np.sum(weights))
  with np.errstate(over="ignore"):
    steps = (np.uint64(first) + np.arange(count, dtype=np.uint64)) * GOLDEN
    place = (steps + combine(_MIXTURE, seed, lane)).astype(np.float64) / 2.0**64
  return np.minimum(np.searchsorted(ends, place, side="right"), len(ends) - 1)


class Windows:
  """The windows of every lane of one stream: of all the data, or of a domain. The stream's name enters its seeds.
  order: the stream's units by position. window_bytes: approximate text of a window."""

  def __init__(self, units: Units, order: Order, *, name: str, seed: int, num_lanes: int, window_bytes: int):
    self.units, self._order, self.name, self.seed, self.num_lanes = units, order, name, seed, num_lanes
    self._units_per_window = max(1, window_bytes // units.mean_bytes(order.all_units))

  def _num_units(self, lane: int) -> int:
    """Units of a lane per epoch, including those of held-out documents."""
    return len(range(lane, len(self._order), self.num_lanes))

  def num_windows(self, lane: int) -> int:
    return -(-self._num_units(lane) // self._units_per_window)

  def after(self, lane: int, epoch: int, window: int) -> tuple[int, int]:
    """(epoch, window) of the lane's next window."""
    return (epoch, window + 1) if window + 1 < self.num_windows(lane) else (epoch + 1, 0)

  def make(self, lane: int, epoch: int, window: int) -> tuple[Rows, dict[str, int]]:
    """The rows of a window, none when all documents are held out or empty, and counts of what was read."""
    first = window * self._units_per_window
    place = np.arange(first, min(first + self._units_per_window, self._num_units(lane)))
    encoded, counts = self.units.encode(self._order.units(epoch, place * self.num_lanes + lane))
    if counts["copies"] and self.units.on_copies == "error":
      said = f"{counts['copies']} or more training documents are byte-identical copies of held-out text"
      raise ConfigError(f"ghost_val_copies=error: {said}; find them with: python -m maxghost.data duplicates")
    seeds = (text_hash("window", self.name), self.seed, lane, epoch, window)
    rows = pack(encoded, self.units.layout, lambda size, what: permutation(size, text_hash(what), *seeds))
    return rows, {**counts, "rows": sum(map(len, rows.sides)), "tokens": sum(int(x.length.sum()) for x in rows.sides)}

  def from_workers(self, lane: int, epoch: int, window: int, num_workers: int) -> Iterator[tuple[Rows, dict[str, int]]]:
    """A lane's windows from this one on, made by processes that each prefetch one."""
    import grain  # imports JAX, which nothing else in this package needs
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain reads its absl flags, which keep their defaults
    per_epoch = self.num_windows(lane)
    numbers = grain.MapDataset.range(epoch * per_epoch + window, 1 << 40)
    dataset = numbers.map(lambda number: self.make(lane, *divmod(int(number), per_epoch)))
    one_at_a_time = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    return iter(dataset.to_iter_dataset(one_at_a_time).mp_prefetch(options, end_with_parent))


def end_with_parent(*_: int) -> None:
  """Ends this worker when its main process was killed; nothing else would. Takes what Grain passes to a worker."""
  parent = multiprocessing.parent_process()
  assert parent is not None, "this is a worker"
  threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
