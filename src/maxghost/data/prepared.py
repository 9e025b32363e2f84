"""Tokenized corpora as `python -m maxghost.data prepare` writes them: ArrayRecord shards and a memory-mapped index.

A record is a block: the tokens of consecutive documents of one domain. The index has a memory-mapped file per column.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError
from maxghost.config.files import check_seal
from maxghost.data.hashing import changed_files
from maxghost.data.packing import Encoded, token_dtype
from maxghost.data.sources.arrayrecord import OPEN_FILES, open_reader, read_records
from maxghost.data.sources.base import CorruptError, Source, check_known, read_or_skip, wanted_fields
from maxghost.data.sources.records import Opened, read_by_shard
from maxghost.data.tokenizers import Tokenizer
from maxghost.data.types import DocumentId
from maxghost.data.windows import NO_COUNTS, Units, concatenated

INDEX_FILE = "maxghost-index.json"
INDEX_VERSION = 1
# Per document: hash of the id, hash of the text, number of the path, offset in it, bytes of text, and the cumulative
# number of tokens. Per block: the number of documents before it, and its domain. Per path: its end in paths.bin.
DOCUMENT_COLUMNS = {"id_hash": np.uint64, "content_hash": np.uint64, "path": np.uint32, "offset": np.int64,
                    "num_bytes": np.int64, "token_end": np.int64}  # fmt: skip
BLOCK_COLUMNS = {"block_first": np.int64, "block_domain": np.uint16}
COLUMNS = {**DOCUMENT_COLUMNS, **BLOCK_COLUMNS, "path_end": np.int64, "path_domain": np.uint16}
FIELD_TEXTS, FIELD_END = "fields.bin", "field_end"  # all fields as one text, and the end of each; only with fields
_FIX = "run `python -m maxghost.data verify` and prepare again"


def is_prepared(path: str) -> bool:
  return (Path(path).expanduser() / INDEX_FILE).is_file()


def read_index(folder: Path) -> dict:
  """The JSON part of the index. Raises ConfigError for a damaged one, or one of another version."""
  try:
    meta = check_seal(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8")))
  except ValueError as error:
    raise ConfigError(f"{folder / INDEX_FILE}: damaged ({error}); prepare the corpus again") from error
  if meta["version"] != INDEX_VERSION:
    raise ConfigError(f"{folder} was prepared as version {meta['version']}, but this program reads {INDEX_VERSION}")
  return meta


class PreparedSource(Source):
  """The documents of a prepared folder. Texts are decoded from tokens, exactly if the tokenizer is lossless."""

  def __init__(self, folder: str, tokenizer: Tokenizer, domains: tuple[str, ...] = (), fields: tuple[str, ...] = (),
               is_checked: bool = False):  # fmt: skip
    """domains: the wanted ones; empty = all. fields: as in `document_fields`; empty = those that it was prepared with.
    is_checked: the index was compared with its checksums before. Raises ConfigError where one of these does not fit."""
    self._folder = Path(folder).expanduser()
    self.meta = meta = read_index(self._folder)  # the JSON part of the index
    for _, sentence in () if is_checked else changed_files(self._folder / "index", meta.get("index", {})):
      raise ConfigError(f"{sentence}; prepare the corpus again")
    made_with = meta["tokenizer"]
    if made_with["fingerprint"] != tokenizer.fingerprint:
      path = folder if made_with["copied"] else made_with["path"]
      way = f"{made_with['type']} " + (f"tokenizer_path={path}" if made_with["path"] else "and no tokenizer_path")
      raise ConfigError(f"{folder} was prepared with another tokenizer than {tokenizer.name}; use tokenizer_type={way}")
    check_known("dataset_domains", domains, meta["domains"], folder)
    self._asked, kept = fields, tuple(meta.get("fields", ()))
    wanted = wanted_fields(fields or kept) if fields or kept else {}
    check_known("document_fields", wanted.values(), kept, f"the prepared corpus {folder}")
    self.fields, self._field_places = tuple(wanted), [kept.index(field) for field in wanted.values()]
    self.domains = tuple(domains) or tuple(meta["domains"])
    self.numbers = np.full(len(meta["domains"]) + 1, -1, np.int64)  # in `domains`, of each domain of the folder
    for place, name in enumerate(self.domains):
      self.numbers[meta["domains"].index(name)] = place
    self.num_bytes = sum(meta["domain_bytes"][name] for name in self.domains)
    self.files = {shard["name"]: shard["sha256"][:16] for shard in meta["shards"]}
    self.fingerprint = f"{meta['fingerprint']}-{','.join(self.domains)}"
    self._shards = [str(self._folder / "shards" / shard["name"]) for shard in meta["shards"]]
    self._shard_ends = np.cumsum([shard["blocks"] for shard in meta["shards"]], dtype=np.int64)
    self._readers = Opened(open_reader, OPEN_FILES)
    self.tokenizer, self._dtype = tokenizer, token_dtype(tokenizer.vocab_size)
    index, names = self._folder / "index", (*COLUMNS, FIELD_END) if self.fields else COLUMNS
    # As plain arrays: np.memmap is slow to index.
    self.columns = {name: np.load(index / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in names}
    self._paths = _mapped(index / "paths.bin")
    self._field_texts = _mapped(index / FIELD_TEXTS) if self.fields else np.zeros(0, np.uint8)

  def __reduce__(self):
    return PreparedSource, (str(self._folder), self.tokenizer, self.domains, self._asked, True)

  def __len__(self) -> int:
    return len(self.columns["id_hash"])

  def tokens_before(self, document: int) -> int:
    return int(self.columns["token_end"][document - 1]) if document else 0

  def document_id(self, index: int) -> DocumentId:
    columns, number = self.columns, int(self.columns["path"][index])
    path = _text(self._paths, columns["path_end"], number).decode("utf-8", "surrogateescape")
    return DocumentId(self.meta["domains"][int(columns["path_domain"][number])], path, int(columns["offset"][index]))

  def document_fields(self, index: int) -> tuple[str, ...]:
    places = (index * len(self.meta["fields"]) + place for place in self._field_places)
    return tuple(_text(self._field_texts, self.columns[FIELD_END], place).decode("utf-8") for place in places)

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    return self.numbers[self.columns["path_domain"][self.columns["path"][indices]]]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    return np.asarray(self.columns["id_hash"][indices])

  def sizes(self, indices: np.ndarray) -> np.ndarray:
    return np.asarray(self.columns["num_bytes"][indices])

  def content_hashes(self, indices: np.ndarray) -> np.ndarray:
    return np.asarray(self.columns["content_hash"][indices])

  def texts(self, indices: np.ndarray) -> list[bytes]:
    return [self.tokenizer.decode(ids) for ids, _ in self.tokens(indices)]

  def documents_of(self, block: int) -> tuple[int, int]:
    """First document of a block, and the one after its last."""
    first = self.columns["block_first"]
    return int(first[block]), int(first[block + 1]) if block + 1 < len(first) else len(self)

  def block_tokens(self, blocks: np.ndarray) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of the blocks, and the bytes behind each, None if the table has them for all. Raises CorruptError."""
    shards = np.searchsorted(self._shard_ends, blocks, side="right")
    records = blocks - np.where(shards > 0, self._shard_ends[shards - 1], 0)
    read = lambda n, at: read_records(self._readers, self._shards[n], records[at].tolist())  # noqa: E731
    raw = read_by_shard(shards, records, read)
    table, item, out = self.tokenizer.byte_table, np.dtype(self._dtype).itemsize, []
    for block, shard, record, one in zip(blocks.tolist(), shards.tolist(), records.tolist(), raw, strict=True):
      first, stop = self.documents_of(block)
      count = self.tokens_before(stop) - self.tokens_before(first)
      has_sizes = len(one) == count * (item + 4)
      if not has_sizes and (table is None or len(one) != count * item):
        said = f"{len(one)} bytes where the index says {count} tokens"
        raise CorruptError(f"{self._shards[shard]}, record {record}: {said}")
      ids = np.frombuffer(one, self._dtype, count)
      sizes = np.frombuffer(one, np.uint32, count, count * item) if has_sizes else None
      if sizes is None and table is not None and self.tokenizer.normalizes:
        sizes = table[ids]
      out.append((ids, sizes))
    return out

  def tokens(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of documents, and the bytes behind each as `block_tokens` gives them. Raises CorruptError."""
    blocks = np.searchsorted(self.columns["block_first"], indices, side="right") - 1
    wanted = np.unique(blocks)
    read, out = dict(zip(wanted.tolist(), self.block_tokens(wanted), strict=True)), []
    for index, block in zip(np.asarray(indices).tolist(), blocks.tolist(), strict=True):
      (tokens, sizes), before = read[block], self.tokens_before(self.documents_of(block)[0])
      place = slice(self.tokens_before(index) - before, self.tokens_before(index + 1) - before)
      out.append((tokens[place], None if sizes is None else sizes[place]))
    return out


def _mapped(path: Path) -> np.ndarray:
  """The bytes of a file, which may have none."""
  return np.memmap(path, np.uint8, mode="r").view(np.ndarray) if path.stat().st_size else np.zeros(0, np.uint8)


def _text(texts: np.ndarray, ends: np.ndarray, number: int) -> bytes:
  """One of several texts, which lie end to end."""
  return texts[int(ends[number - 1]) if number else 0 : int(ends[number])].tobytes()


class PreparedUnits(Units):
  """A prepared folder, tokenized already. A unit is a block."""

  source: PreparedSource

  def all_units(self) -> np.ndarray | range:
    if len(self.source.domains) == len(self.source.meta["domains"]):
      return range(len(self.source.columns["block_first"]))
    return np.flatnonzero(self.source.numbers[self.source.columns["block_domain"]] >= 0)

  def units_of(self, domain: int) -> np.ndarray:
    return np.flatnonzero(self.source.numbers[self.source.columns["block_domain"]] == domain)

  def mean_bytes(self, units: np.ndarray | range) -> int:
    return max(1, self.source.num_bytes // max(1, len(self.all_units())))  # blocks are of one size

  def encode(self, units: np.ndarray) -> tuple[Encoded, dict[str, int]]:
    source, counts = self.source, NO_COUNTS.copy()
    found = read_or_skip(source.block_tokens, units, self.on_corrupt, _FIX)
    blocks = [(*source.documents_of(block), read) for block, read in zip(units.tolist(), found, strict=True)]
    counts["corrupt"] = sum(stop - first for first, stop, read in blocks if read is None)
    blocks = [(first, stop, *read) for first, stop, read in blocks if read is not None]
    documents = concatenated([np.arange(first, stop) for first, stop, *_ in blocks])
    keep = ~self.split.left_out(documents)
    if self.on_copies != "keep":
      copies = keep & np.isin(source.content_hashes(documents), self.hashes)
      counts["copies"] = int(copies.sum())
      keep &= ~copies
    pieces, place = [], 0
    for first, stop, tokens, sizes in blocks:
      count = np.diff(source.columns["token_end"][first:stop], prepend=source.tokens_before(first))
      kept = keep[place : place + stop - first]
      place += stop - first
      if not kept.all():
        mask = np.repeat(kept, count)
        count, tokens, sizes = count[kept], tokens[mask], None if sizes is None else sizes[mask]
      pieces.append((tokens, count, sizes))
    documents = documents[keep]
    counts["documents"], counts["bytes"] = len(documents), int(source.sizes(documents).sum())
    return self.frame(pieces, documents), counts

  def encode_documents(self, indices: np.ndarray) -> Encoded:
    found = read_or_skip(self.source.tokens, indices, self.on_corrupt, _FIX)
    pieces = [(ids, np.array([len(ids)]), sizes) for ids, sizes in filter(None, found)]
    return self.frame(pieces, indices[[one is not None for one in found]])

  def cutter(self, index: int) -> Callable[[int, int], str]:
    """Bytes are those that were tokenized, in place of which a tokenizer without a table may decode others."""
    (found,) = read_or_skip(self.source.tokens, np.array([index]), self.on_corrupt, _FIX)
    if found is None or (sizes := found[1]) is None:
      return super().cutter(index)
    starts, decode = np.cumsum(sizes, dtype=np.int64) - sizes, self.source.tokenizer.decode
    return lambda *place: decode(found[0][slice(*np.searchsorted(starts, place))]).decode("utf-8", "replace")
