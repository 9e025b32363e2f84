"""A source made of shards, each of which reads the documents of one file, split or table."""

import contextlib
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxghost.config import ConfigError, DataConfig
from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources import base
from maxghost.data.sources.base import CorruptError, Source, T, as_text, join_columns
from maxghost.data.types import DocumentId

_SAMPLES = 32  # records read to estimate the total size
_FIRST = 8  # records of a domain that tell its fields
RECORD = "{}, record {}".format  # the place of a record, of a file and its number there


class Opened:
  """The last `limit` results of `open_one`; pickled without them. lock: for what threads must not read at once."""

  def __init__(self, open_one: Callable, limit: int | None):
    self._open_one, self._limit, self.lock = open_one, limit, threading.Lock()
    self.get = functools.lru_cache(limit)(open_one)

  def __reduce__(self):
    return Opened, (self._open_one, self._limit)


@dataclass(frozen=True)
class Shard:
  """Documents of one domain in one file, split or table. It is pickled with its functions.

  name: the path in the documents' ids. read: gives the records at some offsets; also takes the sizes of the documents
  (of a source with an index) and the names of the fields to read; raises CorruptError. is_text: `read` gives the texts
  themselves, not records. place: where the document at an offset is, for a message.
  """

  domain: str
  name: str
  fingerprint: str
  count: int
  read: Callable[[list[int], list[int], tuple[str, ...]], Iterable[Any]]
  place: Callable[[int], str]
  is_text: bool = False

  def texts(self, offsets: list[int], sizes: list[int], columns: tuple[str, ...]) -> list[bytes]:
    found = zip(offsets, self.read(offsets, sizes, columns), strict=True)
    if self.is_text:
      return [text for _, text in found]
    return [join_columns(functools.partial(self.place, n), record, columns) for n, record in found]


class RecordSource(Source):
  """The documents of all shards, numbered consecutively.

  index: offset and size of each document (int64[n] each); without it, a document's offset is its number in the shard.
  """

  def __init__(self, shards: Sequence[Shard], cfg: DataConfig, notes: Sequence[str] = (),
               index: tuple[np.ndarray, np.ndarray] | None = None):  # fmt: skip
    self.domains, self.notes = tuple(dict.fromkeys(shard.domain for shard in shards)), tuple(notes)
    (domain, name), count = Counter((shard.domain, shard.name) for shard in shards).most_common(1)[0]
    if count > 1:
      said = f"dataset_files: {count} sources of domain '{domain}' are named '{name}' in the ids of their documents"
      raise ConfigError(f"{said}; give each another domain or name, or files of one name one pattern")
    self.files = {f"{shard.domain}/{shard.name}": shard.fingerprint for shard in shards}
    self.fingerprint = f"{text_hash(*itertools.chain(*self.files.items())):016x}"
    self._shards, self._cfg, self._index = shards, cfg, index
    self._ends = np.cumsum([shard.count for shard in shards], dtype=np.int64)
    self._domain_number = np.array([self.domains.index(shard.domain) for shard in shards], np.int64)
    self._shard_hash = np.array([text_hash(shard.domain, shard.name) for shard in shards], np.uint64)
    for domain in self.domains:
      own = [shard for shard in shards if shard.domain == domain]
      if not any(shard.count for shard in own):
        names = ", ".join(shard.name for shard in own[:3])
        raise ConfigError(f"domain '{domain}' has no documents: {names} cannot be read or hold none")
    if index is None:  # estimated from some records
      some = np.unique(np.linspace(0, len(self) - 1, _SAMPLES).astype(np.int64))
      sizes = [len(text) for text in base.read_or_skip(self.texts, some) if text is not None]
      sizes = sizes or [0 for _ in base.read_or_skip(self.texts, some[:1], cfg.on_corrupt)]  # perhaps no text at all
      self.num_bytes = int(np.mean(sizes) * len(self))
    else:
      self.num_bytes = int(index[1].sum())
    self._fields = self._kept(cfg.document_fields)
    self.fields = tuple(self._fields)

  def _kept(self, asked: Sequence[str]) -> dict[str, str]:
    """{name in the log: field of the records}. Raises ConfigError for one that a domain's first records lack."""
    wanted, known = base.wanted_fields(asked), {}  # the fields of each domain's first records
    for shard, end in zip(self._shards, self._ends.tolist(), strict=True):
      is_known = shard.is_text or known.get(shard.domain)
      for index in range(end - shard.count, end)[: 0 if is_known else _FIRST]:
        with contextlib.suppress(CorruptError):  # reported when its text is read
          known[shard.domain] = known.get(shard.domain, {}) | self._record(index, wanted)
    for domain, record in known.items() if asked else ():
      base.check_known("document_fields", wanted.values(), record, f"domain '{domain}'")
    if asked and not known:
      raise ConfigError(f"document_fields={','.join(asked)}: the data has no records with fields; leave it empty")
    return wanted if asked or any("id" in record for record in known.values()) else {}

  def _shard(self, index: int) -> tuple[Shard, int]:
    """The shard of a document, and its offset in it."""
    number, offset = (int(x[0]) for x in self._locate(np.array([index])))
    return self._shards[number], offset

  def _record(self, index: int, fields: Mapping[str, str]) -> Mapping[str, Any]:
    """The record of a document; empty where it is no object."""
    shard, offset = self._shard(index)
    size = 0 if self._index is None else int(self._index[1][index])
    (record,) = shard.read([offset], [size], tuple(fields.values()))
    return record if isinstance(record, dict) else {}

  def place(self, index: int) -> str:
    shard, offset = self._shard(index)
    return shard.place(offset)

  def document_fields(self, index: int) -> tuple[str, ...]:
    read = lambda _: [self._record(index, self._fields)]  # noqa: E731
    (record,) = base.read_or_skip(read, np.array([index]), self._cfg.on_corrupt) if self._fields else ({},)
    return tuple(as_text((record or {}).get(field)) for field in self._fields.values())

  def __len__(self) -> int:
    return int(self._ends[-1])

  def _locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shard of each document and offset in it (int64[n] each)."""
    numbers = np.searchsorted(self._ends, indices, side="right")
    if self._index is not None:
      return numbers, self._index[0][indices]
    return numbers, indices - np.where(numbers > 0, self._ends[numbers - 1], 0)

  def document_id(self, index: int) -> DocumentId:
    shard, offset = self._shard(index)
    return DocumentId(shard.domain, shard.name, offset)

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    return self._domain_number[self._locate(indices)[0]]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    numbers, offsets = self._locate(indices)
    return combine(self._shard_hash[numbers], offsets)

  def sizes(self, indices: np.ndarray) -> np.ndarray | None:
    is_exact = all(shard.is_text for shard in self._shards)  # of records, the size is not that of the text in them
    return self._index[1][indices] if self._index is not None and is_exact else None

  def texts(self, indices: np.ndarray) -> list[bytes]:
    numbers, offsets = self._locate(indices)
    sizes, columns = offsets if self._index is None else self._index[1][indices], self._cfg.train_data_columns
    read = lambda n, at: self._shards[n].texts(offsets[at].tolist(), sizes[at].tolist(), columns)  # noqa: E731
    return read_by_shard(numbers, offsets, read)


def read_by_shard(numbers: np.ndarray, offsets: np.ndarray, read: Callable[[int, np.ndarray], list[T]]) -> list[T]:
  """What `read` gives for each shard and the places in `numbers` and `offsets` that belong to it, in their order."""
  out: list = [None] * len(numbers)
  order = np.lexsort((offsets, numbers))  # what a shard reads at once lies together
  for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else ():
    for place, found in zip(places.tolist(), read(int(numbers[places[0]]), places), strict=True):
      out[place] = found
  return out
