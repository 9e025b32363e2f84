"""Packs documents into rows: cuts them, places the chunks, and fills the arrays of a batch. No Python per token.

Dimensions: N tokens, T positions of a row, S segments of a row, C chunks, R rows, B rows of one batch, D documents.
A document of n tokens (begin and end tokens included) has n - 1 pairs of input and target. The pairs are cut into
chunks of at most T; a chunk becomes one segment of one row. So each pair occurs exactly once, and no target is in
another document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from maxghost.data.types import Batch

REFERENCE = "reference_logps"  # array of a batch: float32 [B, S], summed log-probabilities under a reference
FIRST_FIT, CONCAT = "first_fit", "concat_then_split"


@dataclass(frozen=True)
class Layout:
  """How tokens become rows."""

  row_length: int  # T
  max_segments: int  # S
  strategy: str = FIRST_FIT
  add_bos: bool = True
  add_eos: bool = True


@dataclass(frozen=True, eq=False)
class Encoded:
  """Concatenated tokens of documents, with begin and end tokens."""

  tokens: np.ndarray  # uint16 or int32[N]
  ends: np.ndarray  # int64[D], end of each document in `tokens`
  documents: np.ndarray  # int64[D], index of each document into the source
  byte_table: np.ndarray | None  # source bytes by token id; None where `sizes` holds them
  sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64[N], source bytes of each token
  weights: np.ndarray | None = None  # float32[N], loss weight of each token as a target; None = 1
  reference: np.ndarray | None = None  # float32[D], log-probability of each response under a reference
  partner: "Encoded | None" = None  # the rejected responses of pairs, where this holds the chosen ones


@dataclass(frozen=True, eq=False)
class Rows:
  """Packed rows, stored as the places of their segments in a token array; `fill` makes arrays of them. Tokens, weights
  and reference are as in `Encoded`. partner: as many rows with the rejected responses of pairs."""

  tokens: np.ndarray
  row_ends: np.ndarray  # int64[R], cumulative number of chunks; the following are per chunk, in the order of the rows
  start: np.ndarray  # int64[C], first pair in `tokens`
  length: np.ndarray  # int64[C], pairs
  document: np.ndarray  # int64[C], index into the source
  offset: np.ndarray  # int64[C], first byte in the document
  slot: np.ndarray  # int64[C], segment of the row
  begin: np.ndarray  # int32[C], position in the row
  weights: np.ndarray | None = None
  reference: np.ndarray | None = None
  partner: "Rows | None" = None
  end: np.ndarray | None = None  # int64[C], the byte behind in the document

  def __len__(self) -> int:
    return len(self.row_ends)

  @property
  def sides(self) -> tuple["Rows", ...]:
    """These rows, and those of the rejected responses."""
    return (self,) if self.partner is None else (self, self.partner)

  def numbered_from(self, first: int) -> "Rows":
    """The same with `first` added to the documents' indices."""
    partner = None if self.partner is None else self.partner.numbered_from(first)
    return replace(self, document=self.document + first, partner=partner)


def token_dtype(vocab_size: int) -> type:
  """The dtype of packed tokens; batches are int32."""
  return np.uint16 if vocab_size <= 1 << 16 else np.int32


def cut(ends: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Chunks of documents whose tokens end at `ends`: which document, first pair, number of pairs (int64[C] each)."""
  sizes = np.diff(ends, prepend=0)
  starts, pairs = ends - sizes, np.maximum(sizes - 1, 0)
  chunks = -(-pairs // row_length)
  document = np.repeat(np.arange(len(ends)), chunks)
  number = np.arange(len(document)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
  start = starts[document] + number * row_length
  return document, start, np.minimum(pairs[document] - number * row_length, row_length)


def first_fit(length: np.ndarray, row_length: int, max_segments: int) -> np.ndarray:
  """Places each chunk into the row with the least room that still holds it; the row of each, int64[C]. Chunks are
  taken longest first (best-fit decreasing, Johnson 1973) within small groups that each contain all lengths; otherwise
  the shortest chunks would fill rows that run out of segments before they are full. length: int64[C]."""
  row, order = np.empty(len(length), np.int64), np.argsort(-length, kind="stable")
  num_full = int(np.count_nonzero(length == row_length))
  row[order[:num_full]] = np.arange(num_full)
  order = order[num_full:]
  rows = max(1, int(length[order].sum()) // row_length)
  groups = max(1, len(order) // max(8, 2 * (len(order) // rows)))  # of about two rows' pairs, longest first in each
  order = np.concatenate([order[first::groups] for first in range(groups)])
  open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by room left
  segments: list[int] = []  # of the rows that are not of one full chunk
  rooms = 0  # bit r is set when some open row has room r
  placed = []
  for size in length[order].tolist():
    if fitting := rooms >> size:
      room = size + (fitting & -fitting).bit_length() - 1
      here = open_rows[room].pop()
      if not open_rows[room]:
        rooms &= ~(1 << room)
      room -= size
      segments[here] += 1
    else:
      here, room = len(segments), row_length - size
      segments.append(1)
    placed.append(here)
    if room and segments[here] < max_segments:
      open_rows[room].append(here)
      rooms |= 1 << room
  row[order] = np.array(placed, np.int64) + num_full
  return row


def concat(ends: np.ndarray, order: np.ndarray, row_length: int, max_segments: int) -> tuple[np.ndarray, ...]:
  """Concatenates the documents in `order` and cuts them where a row is full or has max_segments. Returns document,
  first pair, number of pairs and row of each chunk (int64[C] each)."""
  sizes = np.diff(ends, prepend=0)
  starts, pairs = ends - sizes, np.maximum(sizes - 1, 0)
  chunks: list[tuple[int, int, int, int]] = []
  row, room, used = 0, row_length, 0
  for document, begin, left in zip(order.tolist(), starts[order].tolist(), pairs[order].tolist(), strict=True):
    while left:
      size = min(left, room)
      chunks.append((document, begin, size, row))
      begin, left, room, used = begin + size, left - size, room - size, used + 1
      if not room or used == max_segments:
        row, room, used = row + 1, row_length, 0
  return tuple(np.array(chunks, np.int64).reshape(-1, 4).T)


def pack(encoded: Encoded, layout: Layout, order: Callable[[int, str], np.ndarray]) -> Rows:
  """Packs the documents into rows. order(n, name): a pseudo-random permutation int64[n]; name selects which."""
  ends, segments, partner = encoded.ends, layout.max_segments, encoded.partner
  if layout.strategy == CONCAT:
    document, start, length, row = concat(ends, order(len(ends), "documents"), layout.row_length, segments)
  else:
    document, start, length = cut(ends, layout.row_length)
    # A pair needs the room of its longer response, and none is longer than a row.
    other = length if partner is None else cut(partner.ends, layout.row_length)[2]
    row = first_fit(np.maximum(length, other), layout.row_length, segments)
  place = np.argsort(order(int(row.max(initial=-1)) + 1, "rows"))  # the inverse permutation
  rows = _placed(encoded, document, start, length, place[row])
  if partner is None:
    return rows
  return replace(rows, partner=_placed(partner, *cut(partner.ends, layout.row_length), place[row]))


def _placed(encoded: Encoded, document: np.ndarray, start: np.ndarray, length: np.ndarray, row: np.ndarray) -> Rows:
  by_row = np.argsort(row, kind="stable")
  sizes, length = np.bincount(row), length[by_row]
  row_ends = np.cumsum(sizes)
  heads = np.repeat(row_ends - sizes, sizes)  # the first chunk of each chunk's row
  before, offset = np.cumsum(length) - length, _offsets(encoded, document, start)[by_row]
  slot, begin = np.arange(len(heads)) - heads, (before - before[heads]).astype(np.int32)
  document, start = document[by_row], start[by_row]
  reference = None if encoded.reference is None else encoded.reference[document]
  chunks = (row_ends, start, length, encoded.documents[document], offset, slot, begin)
  return Rows(encoded.tokens, *chunks, encoded.weights, reference)


def _offsets(encoded: Encoded, document: np.ndarray, start: np.ndarray) -> np.ndarray:
  """int64[C]: byte offset of each chunk in its document. A document's chunks are consecutive and in order."""
  offset, table = np.zeros(len(start), np.int64), encoded.byte_table
  heads = np.flatnonzero(np.diff(document, prepend=-1))  # the first chunk of each document
  counts = np.diff(heads, append=len(document))
  for head, count in zip(heads[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
    first = start[head : head + count]
    place = slice(int(first[0]), int(first[-1]))
    sizes = encoded.sizes[place] if table is None else table.take(encoded.tokens[place])
    # In 32 bits: several times as fast.
    offset[head + 1 : head + count] = np.cumsum(np.add.reduceat(sizes, first[:-1] - first[0], dtype=np.uint32))
  return offset


def fill(pieces: Sequence[tuple[Rows, int, int]], layout: Layout, pad_id: int) -> Batch:
  """The batch of the rows (rows, number of the row, epoch) in `pieces`; of pairs, chosen and rejected rows in turn."""
  pieces = [(side, n, epoch) for rows, n, epoch in pieces for side in rows.sides]
  groups: dict[int, list[int]] = {}
  for b, (rows, _, _) in enumerate(pieces):
    groups.setdefault(id(rows), []).append(b)
  weighted, parts = any(rows.weights is not None for rows, _, _ in pieces), []
  for here in groups.values():
    numbers = np.array([pieces[b][1] for b in here], np.int64)
    parts.append(_filled(pieces[here[0]][0], numbers, layout, pad_id, weighted))
  arrays = parts[0]
  if len(parts) > 1:  # of several streams of a mixture, or of both sides: restore the order of the pieces
    back = np.argsort(np.concatenate([*groups.values()]))
    arrays = {name: np.concatenate([part[name] for part in parts])[back] for name in arrays}
  epoch_B = np.array([epoch for _, _, epoch in pieces], np.int64)
  return Batch(arrays, arrays.pop("document_BS"), arrays.pop("offset_BS"), epoch_B, end_BS=arrays.pop("end_BS", None))


def _filled(rows: Rows, numbers: np.ndarray, layout: Layout, pad_id: int, weighted: bool) -> dict[str, np.ndarray]:
  """The arrays of a batch, [B, T], and `document_BS` and `offset_BS` of its segments."""
  B, T, stop = len(numbers), layout.row_length, rows.row_ends[numbers]
  count = stop - np.where(numbers > 0, rows.row_ends[numbers - 1], 0)
  row = np.arange(B).repeat(count)
  chunk = np.arange(len(row)) + (stop - count.cumsum())[row]
  slot, begin, start, length = (x[chunk] for x in (rows.slot, rows.begin, rows.start, rows.length))
  last = count.cumsum() - 1  # of each row; it also covers the padding
  filled = begin[last] + length[last]
  covered = length.copy()
  covered[last] += T - filled

  def spread(values: np.ndarray) -> np.ndarray:
    """int32[B, T]: each chunk's value at its positions."""
    return values.astype(np.int32, copy=False).repeat(covered).reshape(B, T)

  of_chunks = {"document_BS": rows.document, "offset_BS": rows.offset}
  of_chunks |= {} if rows.end is None else {"end_BS": rows.end}
  identity = np.full((len(of_chunks), B, layout.max_segments), -1, np.int64)
  identity[:, row, slot] = [values[chunk] for values in of_chunks.values()]
  positions = np.arange(T, dtype=np.int32) - spread(begin)
  segmentation = spread(slot + 1)
  place = spread(start)
  place += positions
  inputs = rows.tokens.take(place, mode="clip").astype(np.int32)  # past the end only under padding
  targets = np.empty_like(inputs)
  targets[:, :-1] = inputs[:, 1:]  # true but for the last pair of each chunk
  targets[row, begin + length - 1] = rows.tokens[start + length]
  found = {"inputs": inputs, "inputs_position": positions, "inputs_segmentation": segmentation, "targets": targets,
           "targets_position": positions, "targets_segmentation": segmentation}  # fmt: skip
  if weighted:
    weights = np.ones(B * T, np.float32) if rows.weights is None else rows.weights.take(place + 1, mode="clip")
    found["targets_weights"] = weights.astype(np.float32).reshape(B, T)
  for short in np.flatnonzero(filled < T).tolist():
    for name, array in found.items():
      array[short, filled[short] :] = pad_id if name in ("inputs", "targets") else 0
  if rows.reference is not None:
    found[REFERENCE] = np.zeros((B, layout.max_segments), np.float32)
    found[REFERENCE][row, slot] = rows.reference[chunk]
  return found | dict(zip(of_chunks, identity, strict=True))
