"""Tokenized corpora as `python -m maxghost.data prepare` writes them: ArrayRecord shards and a memory-mapped index.

A record is a block: the tokens of consecutive documents of one domain. The index has one memory-mapped .npy file per
column, so for a hundred million documents a worker needs memory only for the pages it reads.
"""

import json
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError
from maxghost.data.packing import Encoded, Layout, token_dtype
from maxghost.data.sources.arrayrecord import Readers
from maxghost.data.sources.base import CorruptError, Source, check_domains, read_or_skip
from maxghost.data.split import Split
from maxghost.data.tokenizers import Tokenizer
from maxghost.data.types import DocumentId
from maxghost.data.windows import NO_COPIES, HeldOut, concatenated, frame, no_counts

INDEX_FILE = "maxghost-index.json"
INDEX_VERSION = 1
# Per document: hash of the id, hash of the text, number of the path, offset in it, bytes of text, and the cumulative
# number of tokens. Per block: the number of documents before it, and its domain. Per path: its end in paths.bin.
DOCUMENT_COLUMNS = {
  "id_hash": np.uint64,
  "content_hash": np.uint64,
  "path": np.uint32,
  "offset": np.int64,
  "num_bytes": np.int64,
  "token_end": np.int64,
}
BLOCK_COLUMNS = {"block_first": np.int64, "block_domain": np.uint16}
PATH_COLUMNS = {"path_end": np.int64, "path_domain": np.uint16}
COLUMNS = {**DOCUMENT_COLUMNS, **BLOCK_COLUMNS, **PATH_COLUMNS}


def is_prepared(path: str) -> bool:
  return (Path(path) / INDEX_FILE).is_file()


class PreparedSource(Source):
  """The documents of a prepared folder. Texts are decoded from tokens, exactly if the tokenizer is lossless.

  Is pickled without the memory-mapped columns of the index. meta: the JSON part of the index.
  """

  def __init__(self, folder: str, tokenizer: Tokenizer, domains: tuple[str, ...] = ()):
    """domains: the wanted ones; empty = all. Raises ConfigError when the folder was made with another tokenizer."""
    self._folder = Path(folder)
    self.meta = meta = json.loads((self._folder / INDEX_FILE).read_text(encoding="utf-8"))
    if meta["version"] != INDEX_VERSION:
      raise ConfigError(f"{folder} was prepared as version {meta['version']}, but this program reads {INDEX_VERSION}")
    self._map()
    _check_tokenizer(folder, meta["tokenizer"], tokenizer)
    check_domains(domains, meta["domains"], folder)
    self.domains = tuple(domains) or tuple(meta["domains"])
    self._number = np.full(len(meta["domains"]) + 1, -1, np.int64)  # of each domain of the folder in `domains`
    for place, name in enumerate(self.domains):
      self._number[meta["domains"].index(name)] = place
    self.num_bytes = sum(meta["domain_bytes"][name] for name in self.domains)
    self.files = {shard["name"]: shard["sha256"][:16] for shard in meta["shards"]}
    self.fingerprint = f"{meta['fingerprint']}-{','.join(self.domains)}"
    self.totals = {name: (meta["domain_documents"][name], meta["domain_bytes"][name]) for name in self.domains}
    self._shards = [str(self._folder / "shards" / shard["name"]) for shard in meta["shards"]]
    self._shard_ends = np.cumsum([shard["blocks"] for shard in meta["shards"]], dtype=np.int64)
    self._readers = Readers()
    self.tokenizer = tokenizer
    self._dtype = token_dtype(tokenizer.vocab_size)

  def _map(self) -> None:
    folder = self._folder / "index"
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in COLUMNS}
    self.columns = {name: array.view(np.ndarray) for name, array in mapped.items()}  # np.memmap is slow to index
    self._paths = np.memmap(folder / "paths.bin", np.uint8, mode="r")

  def __getstate__(self) -> dict:
    return {name: value for name, value in self.__dict__.items() if name not in ("columns", "_paths")}

  def __setstate__(self, state: dict) -> None:
    self.__dict__.update(state)
    self._map()

  def __len__(self) -> int:
    return len(self.columns["id_hash"])

  def _tokens_before(self, document: int) -> int:
    """Tokens of all documents before this one."""
    return int(self.columns["token_end"][document - 1]) if document else 0

  def document_id(self, index: int) -> DocumentId:
    columns, number = self.columns, int(self.columns["path"][index])
    first = int(columns["path_end"][number - 1]) if number else 0
    path = self._paths[first : int(columns["path_end"][number])].tobytes().decode("utf-8")
    return DocumentId(self.meta["domains"][int(columns["path_domain"][number])], path, int(columns["offset"][index]))

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    """int64[n]; -1 for a document of an unwanted domain."""
    return self._number[self.columns["path_domain"][self.columns["path"][indices]]]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    return np.asarray(self.columns["id_hash"][indices])

  def sizes(self, indices: np.ndarray) -> np.ndarray:
    return np.asarray(self.columns["num_bytes"][indices])

  def content_hashes(self, indices: np.ndarray) -> np.ndarray:
    return np.asarray(self.columns["content_hash"][indices])

  def texts(self, indices: np.ndarray) -> list[bytes]:
    return [self.tokenizer.decode(ids) for ids, _ in self.tokens(indices)]

  def blocks_of(self, domain: int) -> np.ndarray:
    """Numbers of a domain's blocks."""
    return np.flatnonzero(self._number[self.columns["block_domain"]] == domain)

  def documents_of(self, block: int) -> tuple[int, int]:
    """First document of a block, and the one after its last."""
    first = self.columns["block_first"]
    return int(first[block]), int(first[block + 1]) if block + 1 < len(first) else len(self)

  def block_tokens(self, blocks: np.ndarray) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of the blocks, and the bytes behind each (None for a tokenizer with a table). Raises CorruptError."""
    shards = np.searchsorted(self._shard_ends, blocks, side="right")
    records = blocks - np.where(shards > 0, self._shard_ends[shards - 1], 0)
    out: list[tuple[np.ndarray, np.ndarray | None]] = [(np.empty(0), None)] * len(blocks)
    for shard in np.unique(shards).tolist():
      places = np.flatnonzero(shards == shard)
      raw = self._readers.read(self._shards[shard], records[places].tolist())
      for place, one in zip(places.tolist(), raw, strict=True):
        out[place] = self._parse(self._shards[shard], int(records[place]), int(blocks[place]), one)
    return out

  def _parse(self, path: str, record: int, block: int, raw: bytes) -> tuple[np.ndarray, np.ndarray | None]:
    first, stop = self.documents_of(block)
    count = self._tokens_before(stop) - self._tokens_before(first)
    size = count * np.dtype(self._dtype).itemsize
    tabled = self.tokenizer.byte_table is not None
    if len(raw) != size + (0 if tabled else 4 * count):
      raise CorruptError(f"{path}, record {record}: {len(raw)} bytes where the index says {count} tokens")
    tokens = np.frombuffer(raw, self._dtype, count)
    return tokens, None if tabled else np.frombuffer(raw, np.uint32, count, size)

  def lengths(self, first: int, stop: int) -> np.ndarray:
    """int64[n]: tokens of each document in first..stop."""
    return np.diff(self.columns["token_end"][first:stop], prepend=self._tokens_before(first))

  def tokens(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of documents, and the bytes behind each as `block_tokens` gives them. Raises CorruptError."""
    blocks = np.searchsorted(self.columns["block_first"], indices, side="right") - 1
    wanted = np.unique(blocks)
    read = dict(zip(wanted.tolist(), self.block_tokens(wanted), strict=True))
    out = []
    for index, block in zip(np.asarray(indices).tolist(), blocks.tolist(), strict=True):
      before = self._tokens_before(self.documents_of(block)[0])
      place = slice(self._tokens_before(index) - before, self._tokens_before(index + 1) - before)
      tokens, sizes = read[block]
      out.append((tokens[place], None if sizes is None else sizes[place]))
    return out


class PreparedUnits:
  """Blocks of a prepared folder, tokenized already. A unit is a block."""

  def __init__(
    self, source: PreparedSource, split: Split, layout: Layout, *, on_corrupt: str, held_out: HeldOut = NO_COPIES
  ):
    self._source, self._split, self._layout = source, split, layout
    self._on_corrupt, self._held_out = on_corrupt, held_out
    self.drops_copies = bool(held_out.sizes)

  def all_units(self) -> np.ndarray | range:
    if len(self._source.domains) == len(self._source.meta["domains"]):
      return range(len(self._source.columns["block_first"]))
    return np.sort(np.concatenate([self.units_of(number) for number in range(len(self._source.domains))]))

  def units_of(self, domain: int) -> np.ndarray:
    return self._source.blocks_of(domain)

  def mean_bytes(self, units: np.ndarray | range) -> int:
    return max(1, self._source.num_bytes // max(1, len(self.all_units())))  # blocks are of one size

  def encode(self, units: np.ndarray) -> tuple[Encoded, dict[str, int]]:
    counts = no_counts()
    fix = "run `python -m maxghost.data verify` and prepare again, or use on_corrupt=skip"
    read = []
    for block, found in zip(
      units.tolist(), read_or_skip(self._source.block_tokens, units, self._on_corrupt, fix), strict=True
    ):
      first, stop = self._source.documents_of(block)
      if found is None:
        counts["corrupt"] += stop - first
      else:
        read.append((first, stop, *found))
    documents = concatenated([np.arange(first, stop) for first, stop, _, _ in read])
    keep = self._kept(documents, counts)
    pieces, place = [], 0
    for first, stop, tokens, sizes in read:
      count, kept = self._source.lengths(first, stop), keep[place : place + stop - first]
      place += stop - first
      if not kept.all():
        mask = np.repeat(kept, count)
        count, tokens, sizes = count[kept], tokens[mask], None if sizes is None else sizes[mask]
      pieces.append((tokens, count, sizes))
    documents = documents[keep]
    counts["documents"] += len(documents)
    counts["bytes"] += int(self._source.sizes(documents).sum())
    return frame(pieces, documents, self._source.tokenizer, self._layout), counts

  def encode_documents(self, indices: np.ndarray) -> Encoded:
    pieces = [(ids, np.array([len(ids)]), sizes) for ids, sizes in self._source.tokens(indices)]
    return frame(pieces, np.asarray(indices), self._source.tokenizer, self._layout)

  def read(self, indices: np.ndarray) -> list[bytes | None]:
    return read_or_skip(self._source.texts, indices, self._on_corrupt)

  def _kept(self, documents: np.ndarray, counts: dict[str, int]) -> np.ndarray:
    """bool[n]: whether to train on each document. Adds the copies of held-out texts to `counts`."""
    keep = ~self._split.left_out(documents)
    if self.drops_copies:
      copies = keep & self._held_out.copies(self._source.content_hashes(documents))
      counts["copies"] += int(copies.sum())
      keep &= ~copies
    return keep


def _check_tokenizer(folder: str, made_with: dict, tokenizer: Tokenizer) -> None:
  if made_with["fingerprint"] != tokenizer.fingerprint:
    where = f" tokenizer_path={folder}" if made_with["copied"] else f" tokenizer_path={made_with['path']}"
    raise ConfigError(
      f"{folder} was prepared with another tokenizer than {tokenizer.name}; use tokenizer_type={made_with['type']}"
      + (where if made_with["path"] else " and no tokenizer_path")
    )
