"""Which documents are held out for validation: decided by each document's id and the seed, not by its position."""

from collections.abc import Iterable

import numpy as np

from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources.base import Source, id_hash
from maxghost.data.types import DocumentId

_SPLIT = text_hash("train/validation split")
_SCAN = 1 << 20  # documents examined together


class Split:
  """The held-out share of the validation domains of a source."""

  def __init__(self, source: Source, val_domains: tuple[str, ...], fraction: float, seed: int,
               excluded: np.ndarray | None = None, included: np.ndarray | None = None):  # fmt: skip
    """val_domains: names that the source does not have are ignored. excluded: sorted `id_hashes` of documents that are
    not trained on. included: those of the only documents that are trained on; None = all."""
    self._source, self._seed = source, seed
    self._limit = None if fraction >= 1 else np.uint64(int(fraction * 2**64))  # of the hashes; None: all
    self.excluded, self.included = np.empty(0, np.uint64) if excluded is None else excluded, included
    self._numbers = np.array([source.domains.index(name) for name in val_domains if name in source.domains], np.int64)

  def held_out(self, indices: np.ndarray) -> np.ndarray:
    """bool[n]: whether each document is held out."""
    inside = np.isin(self._source.domain_numbers(indices), self._numbers)
    if self._limit is not None and inside.any():
      inside[inside] = combine(_SPLIT, self._seed, self._source.id_hashes(indices[inside])) < self._limit
    return inside

  def left_out(self, indices: np.ndarray) -> np.ndarray:
    """bool[n]: whether each document is not trained on: of no domain of the run, held out, excluded or not included."""
    out = self.held_out(indices) | (self._source.domain_numbers(indices) < 0)
    if len(self.excluded):
      out |= np.isin(self._source.id_hashes(indices), self.excluded)
    if self.included is not None:
      out |= ~np.isin(self._source.id_hashes(indices), self.included)
    return out

  def pool(self, domain: str, limit: int) -> np.ndarray:
    """int64[n]: the first `limit` held-out documents of a domain, by number."""
    number, found = self._source.domains.index(domain), np.empty(0, np.int64)
    for indices in scan(len(self._source)):
      indices = indices[self._source.domain_numbers(indices) == number]
      found = np.append(found, indices[self.held_out(indices)])
      if len(found) >= limit:
        break
    return found[:limit]


def scan(stop: int, most: int = _SCAN, start: int = 0):
  """start..stop-1 in arrays of at most `most`."""
  for first in range(start, stop, most):
    yield np.arange(first, min(first + most, stop))


def find_documents(source: Source, wanted: Iterable[tuple[str, str, int]]) -> dict[DocumentId, int]:
  """Numbers of the documents with these ids; ids that the source does not have are left out."""
  left, found = {DocumentId(*document) for document in wanted}, {}
  hashes = np.array([id_hash(*document) for document in left], np.uint64)
  for indices in scan(len(source)):
    here = indices[np.isin(source.id_hashes(indices), hashes)].tolist()
    found |= {document: index for index in here if (document := source.document_id(index)) in left}
    if len(found) == len(left):
      break
  return found
