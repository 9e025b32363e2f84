"""Which documents are held out for validation: decided by each document's id and the seed, never by its place."""

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources.base import Source

_SPLIT = text_hash("train/validation split")
_SCAN = 1 << 20  # documents looked at together


class Split:
  """The held-out share of the validation domains."""

  def __init__(self, source: Source, val_domains: tuple[str, ...], fraction: float, seed: int):
    for domain in val_domains:
      if domain not in source.domains:
        hint = did_you_mean(domain, source.domains) or f"; the data has {', '.join(source.domains)}"
        raise ConfigError(f"ghost_val_domain={domain} is not a domain of the data{hint}")
    self._source = source
    self._limit = np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    self._nothing = fraction <= 0.0
    self._all = fraction >= 1.0
    self._seed = seed
    self._numbers = np.array([source.domains.index(domain) for domain in val_domains], np.int64)

  def held_out(self, indices: np.ndarray) -> np.ndarray:
    """bool[n]: whether each document is held out."""
    if self._nothing or not len(indices):
      return np.zeros(len(indices), bool)
    inside = np.isin(self._source.domain_numbers(indices), self._numbers)
    if self._all:
      return inside
    return inside & (combine(_SPLIT, self._seed, self._source.id_hashes(indices)) < self._limit)

  def pool(self, domain: str, limit: int) -> np.ndarray:
    """int64[n]: the first `limit` held-out documents of a domain, by number."""
    number, found, total = self._source.domains.index(domain), [], 0
    for first in range(0, len(self._source), _SCAN):
      indices = np.arange(first, min(first + _SCAN, len(self._source)))
      indices = indices[self._source.domain_numbers(indices) == number]
      indices = indices[self.held_out(indices)]
      found.append(indices)
      total += len(indices)
      if total >= limit:
        break
    return np.concatenate(found)[:limit] if found else np.empty(0, np.int64)
