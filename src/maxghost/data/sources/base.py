"""The reader interface: random access to documents by number, and what the reader asks of a source beyond the text."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from maxghost.data.hashing import combine, text_hash
from maxghost.data.types import Document, DocumentId


class CorruptError(ValueError):
  """A document that cannot be read: names the file, the place in it and why."""


@runtime_checkable
class Source(Protocol):
  """Random access to documents; has the shape of `grain.sources.RandomAccessDataSource`.

  domains: names in a fixed order. fingerprint: changes when the data behind the source changes; `files` tells it for
  each file (none for a source without files of its own). num_bytes: text bytes in all (an estimate where the format
  does not tell).
  """

  domains: tuple[str, ...]
  fingerprint: str
  files: dict[str, str]
  num_bytes: int

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Document: ...

  def document_id(self, index: int) -> DocumentId:
    """The id of a document, where the format allows without reading its text."""

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    """int64[n]: the place in `domains` of each document."""

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    """uint64[n]: a hash of each document's id; decides the split."""

  def texts(self, indices: np.ndarray) -> list[bytes]:
    """The documents' texts. Raises CorruptError."""

  def sizes(self, indices: np.ndarray) -> np.ndarray | None:
    """int64[n]: bytes of the texts; None where telling needs reading them."""


def id_hash(domain: str, path: str, offset: int | np.ndarray) -> np.ndarray:
  """uint64 hash of ids that share domain and path."""
  return combine(text_hash(domain, path), offset)


class DocumentList:
  """A source whose documents are in memory."""

  def __init__(self, documents: Sequence[Document], domains: tuple[str, ...], fingerprint: str = ""):
    self.documents = documents
    self.domains = domains
    self.files: dict[str, str] = {}
    self._sizes = np.fromiter((len(document.text) for document in documents), np.int64, len(documents))
    self.num_bytes = int(self._sizes.sum())
    self.fingerprint = fingerprint or f"{_digest(documents):016x}"
    place = {domain: number for number, domain in enumerate(domains)}
    self._domain_numbers = np.fromiter((place[d.domain] for d in documents), np.int64, len(documents))
    paths = {(d.domain, d.path) for d in documents}
    path_hash = {pair: text_hash(*pair) for pair in paths}
    self._id_hashes = combine(
      np.fromiter((path_hash[d.domain, d.path] for d in documents), np.uint64, len(documents)),
      np.fromiter((d.offset for d in documents), np.int64, len(documents)),
    )

  def __len__(self) -> int:
    return len(self.documents)

  def __getitem__(self, index: int) -> Document:
    return self.documents[index]

  def document_id(self, index: int) -> DocumentId:
    return self.documents[index].id

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    return self._domain_numbers[indices]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    return self._id_hashes[indices]

  def texts(self, indices: np.ndarray) -> list[bytes]:
    return [self.documents[index].text for index in indices.tolist()]

  def sizes(self, indices: np.ndarray) -> np.ndarray:
    return self._sizes[indices]


def _digest(documents: Sequence[Document]) -> int:
  return text_hash(*(part for d in documents for part in (d.domain, d.path, str(d.offset), d.text)))
