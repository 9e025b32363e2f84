"""Documents into rows: cutting, placing, and filling the arrays of a batch. No Python per token.

Letters: T positions of a row, S segments of a row, C chunks, R rows, B rows of one batch.
A document of n tokens (begin and end tokens included) has n - 1 pairs of input and target. The pairs are cut into
chunks of at most T; a chunk becomes one segment of one row. So each pair occurs exactly once, and no target lies in
another document.
"""

from dataclasses import dataclass

import numpy as np

from maxghost.data.types import Batch


@dataclass(frozen=True, slots=True)
class Rows:
  """Packed rows, kept as where their segments lie in a token array; `fill` makes arrays of any of them.

  tokens: int32[N]. row_ends: int64[R], chunks before the end of each row. Per chunk, in the order of the rows:
  start: int64[C] first pair in `tokens`; length: int64[C] pairs; document: int64[C]; offset: int64[C] in bytes.
  """

  tokens: np.ndarray
  row_ends: np.ndarray
  start: np.ndarray
  length: np.ndarray
  document: np.ndarray
  offset: np.ndarray

  def __len__(self) -> int:
    return len(self.row_ends)


def cut(ends: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Chunks of documents whose tokens end at `ends`: which document, first pair, number of pairs (int64[C] each)."""
  starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
  pairs = np.maximum(ends - starts - 1, 0)
  chunks = -(-pairs // row_length)
  document = np.repeat(np.arange(len(ends)), chunks)
  number = np.arange(len(document)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
  start = starts[document] + number * row_length
  length = np.minimum(pairs[document] - number * row_length, row_length)
  return document, start, length


def first_fit(length: np.ndarray, row_length: int, max_segments: int) -> tuple[np.ndarray, int]:
  """Row of each chunk, longest first, each into the row with the least room that still holds it; and the rows in all.

  length: int64[C], each at most row_length. Returns int64[C] and R. Rows by room are found in a bit set, so the cost is
  a few operations per chunk. Source: best-fit decreasing, Johnson 1973.
  """
  row = np.empty(len(length), np.int64)
  order = np.argsort(-length, kind="stable")
  num_full = int(np.count_nonzero(length == row_length))
  row[order[:num_full]] = np.arange(num_full)
  num_rows = num_full
  open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by room left
  segments: dict[int, int] = {}
  rooms = 0  # bit r is set when some open row has room r
  for chunk, size in zip(order[num_full:].tolist(), length[order[num_full:]].tolist(), strict=True):
    fitting = rooms >> size
    if fitting:
      room = size + (fitting & -fitting).bit_length() - 1
      here = open_rows[room].pop()
      if not open_rows[room]:
        rooms &= ~(1 << room)
      room -= size
    else:
      here, room = num_rows, row_length - size
      num_rows += 1
    row[chunk] = here
    used = segments[here] = segments.get(here, 0) + 1
    if room and used < max_segments:
      open_rows[room].append(here)
      rooms |= 1 << room
  return row, num_rows


def pack(tokens: np.ndarray, ends: np.ndarray, row_length: int, max_segments: int, row_order) -> Rows:
  """Rows of the documents in `tokens` (int32[N], ends int64[D]); `document` and `offset` count within this call.

  row_order: a function of R that returns the order of the rows, int64[R].
  """
  document, start, length = cut(ends, row_length)
  row, num_rows = first_fit(length, row_length, max_segments)
  place = np.empty(num_rows, np.int64)
  place[row_order(num_rows)] = np.arange(num_rows)
  row = place[row]
  order = np.argsort(row, kind="stable")
  row_ends = np.cumsum(np.bincount(row, minlength=num_rows))
  return Rows(tokens, row_ends, start[order], length[order], document[order], start[order])


def fill(rows: Rows, first: int, stop: int, row_length: int, max_segments: int, pad_id: int) -> tuple[dict, ...]:
  """Arrays of the rows first..stop: {name: int32[B, T]}, document_BS and offset_BS (int64, -1 where there is none)."""
  num_rows = stop - first
  low = int(rows.row_ends[first - 1]) if first else 0
  high = int(rows.row_ends[stop - 1]) if stop > first else low
  per_row = np.diff(rows.row_ends[first:stop], prepend=low)
  length = rows.length[low:high]
  row = np.repeat(np.arange(num_rows), per_row)
  slot = np.arange(high - low) - np.repeat(np.cumsum(per_row) - per_row, per_row)
  before = np.cumsum(length) - length  # pairs of this batch before the chunk
  in_row = before - np.repeat(before[np.cumsum(per_row) - per_row], per_row) if high > low else before
  position = (np.arange(int(length.sum())) - np.repeat(before, length)).astype(np.int32)
  source = np.repeat(rows.start[low:high], length) + position
  target = np.repeat(row * row_length + in_row, length) + position

  def spread(values, empty: int) -> np.ndarray:
    out = np.full(num_rows * row_length, empty, np.int32)
    out[target] = values
    return out.reshape(num_rows, row_length)

  positions = spread(position, 0)
  segmentation = spread(np.repeat((slot + 1).astype(np.int32), length), 0)
  arrays = {
    "inputs": spread(rows.tokens[source], pad_id),
    "inputs_position": positions,
    "inputs_segmentation": segmentation,
    "targets": spread(rows.tokens[source + 1], pad_id),
    "targets_position": positions,
    "targets_segmentation": segmentation,
  }
  document_BS = np.full((num_rows, max_segments), -1, np.int64)
  offset_BS = document_BS.copy()
  document_BS[row, slot] = rows.document[low:high]
  offset_BS[row, slot] = rows.offset[low:high]
  return arrays, document_BS, offset_BS


def join(parts: list[Batch]) -> Batch:
  """One batch of the rows of several, in order."""
  if len(parts) == 1:
    return parts[0]
  return Batch(
    {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays},
    *(np.concatenate([getattr(part, name) for part in parts]) for name in ("document_BS", "offset_BS", "epoch_B")),
  )
