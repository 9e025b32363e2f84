"""A dataset: documents by number, training batches, validation batches, and their summary for the user."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maxghost.config.values import ConfigError, listed
from maxghost.data import packing
from maxghost.data.hashing import permutation, text_hash
from maxghost.data.prepared import PreparedSource
from maxghost.data.reader import TrainIterator
from maxghost.data.sources.base import Source, check_known, read_or_skip
from maxghost.data.split import scan
from maxghost.data.types import Batch, Document, DocumentId
from maxghost.data.windows import Units

_VALIDATION = text_hash("validation order")
POOL_DOCUMENTS = 4096  # read of a validation domain; further ones are held out too, but not read
_COPY_BYTES = 1 << 26  # a source without known document sizes is searched for copies at the start up to this size
MANY_DOCUMENTS = 1 << 23  # above, documents are not examined one by one before training
_COPY_CANDIDATES = 100_000  # hashed at the start to find copies; with more candidates, copies are found during training


class DomainSummary(NamedTuple):
  """Documents and text bytes of a domain, and how many of them are held out; None where counting takes too long."""

  domain: str
  documents: int
  bytes: int | None
  held_out: int | None
  held_out_bytes: int | None

  @property
  def line(self) -> str:
    """`code: 140 documents, 1,973,463 bytes`, and the held-out part where there is one."""
    size, left = ("" if count is None else f", {count:,} bytes" for count in (self.bytes, self.held_out_bytes))
    held_out = f" ({self.held_out:,}{left} held out)" if self.held_out else ""
    return f"{self.domain}: {self.documents:,} document{'s' * (self.documents != 1)}{size}{held_out}"


class Dataset:
  """Documents, split, packed and batched. Made by `load_dataset`.

  parts: the training source, and the held-out files if there are any; documents are numbered through both. source: the
  training source, including its held-out documents. fingerprint: changes with the data. train: the iterator of
  training batches (`next`, `state`, `restore`). val_domain: of the first set.
  """

  def __init__(self, parts: Sequence[Units], train: TrainIterator, val_domain: str, seed: int):
    self.parts, self.train, self.val_domain, self._seed = parts, train, val_domain, seed
    self.source, self.tokenizer, self.layout = parts[0].source, parts[0].tokenizer, parts[0].layout
    self.fingerprint = "-".join(part.source.fingerprint for part in parts)
    self._ends = np.cumsum([len(part.source) for part in parts])

  def document(self, index: int) -> Document:
    source, place = self._locate(index)
    return source[place]

  def document_id(self, index: int) -> DocumentId:
    source, place = self._locate(index)
    return source.document_id(place)

  def document_record(self, index: int) -> tuple[Any, ...]:
    """The id of a training document, and its `source.fields` behind."""
    source, place = self._locate(index)
    return (*source.document_id(place), *source.document_fields(place))

  def _locate(self, index: int) -> tuple[Source, int]:
    number = int(np.searchsorted(self._ends, index, side="right"))
    if not 0 <= index < self._ends[-1]:
      raise IndexError(f"document {index} of {self._ends[-1]}")
    return self.parts[number].source, int(index - (self._ends[number - 1] if number else 0))

  @functools.cached_property
  def num_train_documents(self) -> int:
    """Documents of an epoch. For a corpus too large to examine each, this includes those that are left out."""
    if len(self.source) > MANY_DOCUMENTS:
      return sum(entry.documents - (entry.held_out or 0) for entry in self.summary()[: len(self.source.domains)])
    kept = sum(int((~self.parts[0].split.left_out(indices)).sum()) for indices in scan(len(self.source)))
    return kept - len(self.copies or ()) * (self.parts[0].on_copies != "keep")

  @functools.cache  # noqa: B019 - one dataset per run
  def summary(self) -> tuple[DomainSummary, ...]:
    """What each domain holds, in the order of the sources."""
    return tuple(entry for part in self.parts for entry in _summary(part))

  @functools.cached_property
  def copies(self) -> tuple[int, ...] | None:
    """Training documents that are byte-identical to a held-out one; None where all data would have to be read."""
    hashes, sizes = set(self.parts[0].hashes.tolist()), sorted(self.parts[0].sizes)
    if len(self.source) > MANY_DOCUMENTS:
      return None
    candidates = []
    for indices in scan(len(self.source)):
      if (lengths := self.source.sizes(indices)) is not None:
        indices = indices[np.isin(lengths, sizes)]
      elif self.source.num_bytes > _COPY_BYTES:
        return None
      candidates.extend(indices[~self.parts[0].split.left_out(indices)].tolist())
      if len(candidates) > _COPY_CANDIDATES:
        return None
    found = read_or_skip(self.source.content_hashes, np.array(candidates, np.int64))
    return tuple(index for index, value in zip(candidates, found, strict=True) if value in hashes)

  def notes(self) -> list[str]:
    """Lines to show the user at the start, besides the summary."""
    lines = [note for part in self.parts for note in (*part.source.notes, *_cut(part))]
    if (found := self.copies) is None:
      return [*lines, "copies of held-out text in the training data are looked for as it is read"]
    if not found:
      return lines
    names = listed([self.document_id(index).shown for index in found], 3)
    plural = "document is a byte-identical copy" if len(found) == 1 else "documents are byte-identical copies"
    fate = {"drop": " (left out)", "keep": " (kept, as ghost_val_copies=keep asks)"}.get(self.parts[0].on_copies, "")
    return [*lines, f"{len(found)} training {plural} of held-out text{fate}: {names}"]

  def validation_batch(self, index: int, num_rows: int, domain: str | None = None) -> Batch:
    """Packed rows [index, index + 1) * num_rows of a domain's held-out documents; starts over at their end. A function
    of the arguments and the configuration. domain: default that of the first validation set. Raises ConfigError when
    the domain has no held-out documents."""
    rows = self.validation_rows(domain)
    num_rows //= len(rows.sides)  # a pair makes two rows of a batch
    pieces = [(rows, n % len(rows), n // len(rows)) for n in range(index * num_rows, (index + 1) * num_rows)]
    return packing.fill(pieces, self.layout, self.tokenizer.pad_id)

  @functools.cache  # noqa: B019 - one dataset per run
  def validation_rows(self, domain: str | None = None) -> packing.Rows:
    """The packed rows of a validation domain; `validation_batch` repeats after them."""
    if domain is None:
      return self.validation_rows(self.val_domain)
    check_known("validation_batch", [domain], [name for part in self.parts for name in part.source.domains], "the data")
    number, part = next((n, part) for n, part in enumerate(self.parts) if domain in part.source.domains)
    encoded = part.encode_documents(part.split.pool(domain, POOL_DOCUMENTS))
    seeds = (self._seed, text_hash(domain))
    rows = packing.pack(encoded, part.layout, lambda n, what: permutation(n, _VALIDATION, text_hash(what), *seeds))
    if not len(rows):
      more = " that can be used" if domain == self.val_domain else f"; those of '{self.val_domain}' are held out"
      raise ConfigError(f"validation domain '{domain}' has no held-out documents{more}")
    return rows.numbered_from(self._ends[number] - len(part.source))


def _cut(part: Units) -> list[str]:
  """What the reader found wrong with the first conversations of a source."""
  met, length = part.examined, part.layout.row_length
  of = f"of the first {met.get('documents', 0) + met.get('corrupt', 0):,} conversations"
  said = {"corrupt": "are left out: they cannot be trained on"}
  said["cut"] = f"lose a part of their answers to max_target_length={length}"
  said["spelled"] = "spell special tokens in plain texts, which are encoded as text; write such records as messages"
  return [f"{of}, {met[name]:,} {what}" for name, what in said.items() if met.get(name)]


def _summary(part: Units) -> list[DomainSummary]:
  source = part.source
  if len(source) > MANY_DOCUMENTS and isinstance(source, PreparedSource):
    documents, sizes = source.meta["domain_documents"], source.meta["domain_bytes"]
    return [DomainSummary(domain, documents[domain], sizes[domain], None, None) for domain in source.domains]
  table, sized = np.zeros((len(source.domains), 4), np.int64), True  # documents, bytes, and the same held out
  for indices in scan(len(source)):
    numbers = source.domain_numbers(indices)
    indices, numbers = indices[numbers >= 0], numbers[numbers >= 0]
    out, sizes = part.split.held_out(indices), source.sizes(indices)
    sized = sized and sizes is not None
    weights = sizes if sizes is not None else np.zeros(len(indices), np.int64)
    columns = (np.ones(len(indices)), weights, out, np.where(out, weights, 0))
    table += np.stack([np.bincount(numbers, column, len(source.domains)) for column in columns], 1).astype(np.int64)
  rows = [[row[0], row[1] if sized else None, row[2], row[3] if sized else None] for row in table.tolist()]
  return [DomainSummary(domain, *row) for domain, row in zip(source.domains, rows, strict=True)]
