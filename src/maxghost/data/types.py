"""Documents and batches.

Shapes: B rows of a batch, T positions of a row, S segments a row can hold.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class DocumentId(NamedTuple):
  """A document's permanent name: its domain, the path of its file, and its byte offset or record number there."""

  domain: str
  path: str
  offset: int

  @property
  def shown(self) -> str:
    return f"{self.domain}:{self.path}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Document:
  """One document: its id (domain, path, offset) and its bytes (UTF-8 where it is text)."""

  domain: str
  path: str
  offset: int
  text: bytes

  @property
  def id(self) -> DocumentId:
    return DocumentId(self.domain, self.path, self.offset)


@dataclass(frozen=True, slots=True)
class Batch:
  """Packed rows for the device, and the identity of every segment for the host.

  arrays: int32[B, T] by name: `inputs`, `targets`, and `_position`, `_segmentation` of each. Segments count 1, 2, ...
    in a row, 0 is padding; positions restart in each segment. A token counts where `targets_segmentation` is not 0,
    with the weight in float32 `targets_weights`, where documents carry weights, else with 1.
  document_BS: int64[B, S], the document (index into the source) of segment s + 1; -1 where there is none.
  offset_BS: int64[B, S], where the segment's first token begins in its document, in bytes; -1 where there is none.
  epoch_B: int64[B], how often the row's stream of documents has been read through before.
  unit_BS: int64[B, S], which scored example a segment belongs to, -1 none; None: each is one of its own.
  end_BS: int64[B, S], the byte behind the segment in its document; None where nothing reads the texts of chunks.
  """

  arrays: dict[str, np.ndarray]
  document_BS: np.ndarray
  offset_BS: np.ndarray
  epoch_B: np.ndarray
  unit_BS: np.ndarray | None = None
  end_BS: np.ndarray | None = None
