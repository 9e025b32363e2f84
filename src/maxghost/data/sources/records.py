"""A source made of parts whose records are counted: shard files, splits, tables. A document's offset is its record."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maxghost.config import ConfigError
from maxghost.data.hashing import combine, content_hashes, text_hash
from maxghost.data.sources.base import CorruptError
from maxghost.data.types import Document, DocumentId

_SAMPLES = 32  # records read to estimate the size of all


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


class RecordSource:
  """The documents of some parts, numbered through."""

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

  def __getitem__(self, index: int) -> Document:
    (text,) = self.texts(np.array([index]))
    return Document(*self.document_id(index), text)

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

  def sizes(self, indices: np.ndarray) -> None:
    return None

  def content_hashes(self, indices: np.ndarray) -> np.ndarray:
    return content_hashes(self.texts(indices))

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
    """Text bytes in all, from records spread over the source."""
    sizes = []
    for index in np.unique(np.linspace(0, len(self) - 1, _SAMPLES).astype(np.int64)).tolist():
      try:
        sizes.append(len(self.texts(np.array([index]))[0]))
      except CorruptError:
        continue
    return int(np.mean(sizes) * len(self)) if sizes else 0
