"""The order in which the units of a source (documents or blocks) are read, and the domain of each row.

Everything is a function of the seed and of a position, and no order is stored: the result is the same for any number of
processes, and the cost does not grow with the number of documents.
"""

from collections.abc import Sequence

import numpy as np

from maxghost.data.hashing import combine, shuffled_index, text_hash

_ORDER = text_hash("unit order")
_COPY = text_hash("copy order")
_MIXTURE = text_hash("mixture")
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


class Uniform:
  """Every unit once per epoch, in a new order each epoch. all_units: the units, sorted by number."""

  def __init__(self, units: np.ndarray | range, seed: int):
    self.all_units, self._seed = units, seed

  def __len__(self) -> int:
    return len(self.all_units)

  def units(self, epoch: int, positions: np.ndarray) -> np.ndarray:
    """int64[n]: the units at these positions of the epoch."""
    return _pick(self.all_units, shuffled_index(positions, len(self), _ORDER, self._seed, epoch))


class Repeated:
  """Each part's units `repeats` times per epoch; 1.5 reads all, and a random half again, a new one each epoch."""

  def __init__(self, parts: Sequence[np.ndarray | range], repeats: Sequence[float], seed: int):
    self._parts, self._seed = parts, seed
    self.all_units = np.concatenate([np.asarray(part) for part in parts])
    self._ends = np.cumsum([round(len(part) * times) for part, times in zip(parts, repeats, strict=True)])

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
      for times in np.unique(copy):
        index[copy == times] = shuffled_index(
          index[copy == times], len(part), _COPY, self._seed, epoch, number, int(times)
        )
      out[here] = _pick(part, index)
    return out


def _pick(units: np.ndarray | range, index: np.ndarray) -> np.ndarray:
  return index + units.start if isinstance(units, range) else units[index]


def row_domains(weights: Sequence[float], seed: int, lane: int, first: int, count: int) -> np.ndarray:
  """int64[count]: domain numbers of the rows first, first + 1, ... of a lane in a mixture.

  The domains divide [0, 1) by weight, and the rows visit it in steps of the golden ratio: after n rows, a domain of
  weight w has had n w rows within a few (Weyl 1916).
  """
  ends = np.cumsum(np.asarray(weights, np.float64) / np.sum(weights))
  with np.errstate(over="ignore"):
    steps = (np.uint64(first) + np.arange(count, dtype=np.uint64)) * np.uint64(_GOLDEN)
    place = (steps + combine(_MIXTURE, seed, lane)).astype(np.float64) / 2.0**64
  return np.minimum(np.searchsorted(ends, place, side="right"), len(ends) - 1)
