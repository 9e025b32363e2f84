"""A source made of parts with numbered records: shard files, splits, tables. A document's offset is its record."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maxghost.config import ConfigError
from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources.base import Source, read_or_skip
from maxghost.data.types import DocumentId

_SAMPLES = 32  # records read to estimate the total size


class RecordShard(Protocol):
  """name: the path in the ids. notes: lines for the user. fingerprint: changes with the data."""

  domain: str
  name: str
  fingerprint: str
  notes: tuple[str, ...]

  def __len__(self) -> int: ...

  def texts(self, records: Sequence[int]) -> list[bytes]:
    """Texts of some records. Raises CorruptError."""
    ...


class RecordSource(Source):
  """The documents of all parts, numbered consecutively."""

  def __init__(self, parts: Sequence[RecordShard], notes: tuple[str, ...] = ()):
    self.domains = tuple(dict.fromkeys(part.domain for part in parts))
    self._parts = parts
    self.files = {f"{part.domain}/{part.name}": part.fingerprint for part in parts}
    self.fingerprint = f"{text_hash(*(word for item in self.files.items() for word in item)):016x}"
    self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    self._domain_number = np.array([self.domains.index(part.domain) for part in parts], np.int64)
    self._part_hash = np.array([text_hash(part.domain, part.name) for part in parts], np.uint64)
    for domain in self.domains:
      if not any(len(part) for part in parts if part.domain == domain):
        raise ConfigError(f"domain '{domain}' has no documents")
    self.notes = (*notes, *dict.fromkeys(note for part in parts for note in part.notes))
    self.num_bytes = self._estimate()

  def __len__(self) -> int:
    return int(self._ends[-1])

  def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Part and record in it (int64[n] each)."""
    numbers = np.searchsorted(self._ends, indices, side="right")
    return numbers, indices - np.where(numbers > 0, self._ends[numbers - 1], 0)

  def document_id(self, index: int) -> DocumentId:
    number, record = (int(x[0]) for x in self._locate(np.array([index])))
    return DocumentId(self._parts[number].domain, self._parts[number].name, record)

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    return self._domain_number[self._locate(indices)[0]]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    numbers, records = self._locate(indices)
    return combine(self._part_hash[numbers], records)

  def texts(self, indices: np.ndarray) -> list[bytes]:
    numbers, records = self._locate(indices)
    out: list[bytes] = [b""] * len(indices)
    for number in np.unique(numbers).tolist():
      places = np.flatnonzero(numbers == number)
      places = places[np.argsort(records[places], kind="stable")]
      for place, text in zip(places.tolist(), self._parts[number].texts(records[places].tolist()), strict=True):
        out[place] = text
    return out

  def _estimate(self) -> int:
    """Total text bytes, from records spread over the source."""
    some = np.unique(np.linspace(0, len(self) - 1, _SAMPLES).astype(np.int64))
    sizes = [len(text) for text in read_or_skip(self.texts, some) if text is not None]
    return int(np.mean(sizes) * len(self)) if sizes else 0
