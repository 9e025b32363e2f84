"""Documents as batches for scoring at fixed checkpoints: every document once, in source order.

B rows, S documents in a row, T positions.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxghost import scorelog
from maxghost.attribution.texts import END, changed
from maxghost.config import Config, ConfigError, DataConfig
from maxghost.data import packing
from maxghost.data.build import kept, load_dataset, units_of
from maxghost.data.packing import Layout, Rows
from maxghost.data.sources import text
from maxghost.data.sources.files import expand
from maxghost.data.split import Split
from maxghost.data.tokenizers import load_tokenizer
from maxghost.data.types import Batch

BLOCK_DOCUMENTS = 4096  # packed at a time
_STOP = {"error": "stop"}  # a command cannot change the run's on_corrupt, and must not be told to


class Corpus:
  """The documents of `domain=glob` patterns (text, JSON lines, Parquet), tokenized and packed as a run packs them.

  data: the run's settings. records: what its documents are; they may name their own domains, but not those of queries.
  notes: for the reader. left_out: the same, of the documents without tokens in the last `batches`. Raises ConfigError
  for patterns and files that cannot be read.
  """

  left_out: tuple[str, ...] = ()

  def __init__(self, patterns: tuple[str, ...], data: DataConfig, key: str, records: str = "text"):
    own = records != "text" and key != "--queries"
    on_corrupt = _STOP.get(data.on_corrupt, data.on_corrupt)
    keys = dataclasses.replace(kept(data, records), document_fields=(), dataset_domains=(), on_corrupt=on_corrupt)
    self.source = text.load(expand(key, patterns), keys, own=own)
    self.tokenizer = load_tokenizer(data.tokenizer_type, data.tokenizer_path)
    self.layout = Layout(data.max_target_length, data.max_segments, packing.FIRST_FIT, data.add_bos, data.add_eos)
    make, split = units_of(data, self.tokenizer, records), Split(self.source, (), 0.0, 0)
    self.units = make(self.source, split, self.tokenizer, self.layout, on_corrupt)
    self.fingerprint, self._trained, self._chunks = self.source.fingerprint, None, None  # all documents
    self.notes = [*self.source.notes]

  @classmethod
  def of_run(cls, cfg: Config, run_dir: Path) -> "Corpus":
    """What a run has trained on, by its score log: its chunks, or where rows are cut from a stream
    (concat_then_split) its documents. Raises ConfigError where there is none."""
    log, trained = scorelog.load(run_dir), set()
    for shard, rows in log.blocks():
      domain, path = shard.texts("domain"), shard.texts("path")
      keys = np.unique(rows[rows["share"] > 0][["domain", "path", "offset", "chunk"]]).tolist()  # not only seen
      trained |= {(str(domain[d]), str(path[p]), offset, chunk) for d, p, offset, chunk in keys}
    data = dataclasses.replace(cfg.data, on_corrupt=_STOP.get(cfg.data.on_corrupt, cfg.data.on_corrupt))
    self, dataset = cls.__new__(cls), load_dataset(data, cfg.run.data_shuffle_seed, records=cfg.records)
    if not trained:
      raise ConfigError(f"--data run: {run_dir} has scored no document yet; name files, as in --data notes=GLOB")
    self._trained = {key[:3] for key in trained}
    self._chunks = trained if dataset.layout.strategy == packing.FIRST_FIT else None
    self.source, self.tokenizer, self.units = dataset.source, dataset.tokenizer, dataset.parts[0]
    self.layout = dataclasses.replace(dataset.layout, strategy=packing.FIRST_FIT)
    self.fingerprint, self.notes = dataset.fingerprint, changed(log.said_of("fingerprint"), dataset.fingerprint)
    return self

  def document_record(self, index: int) -> tuple[Any, ...]:
    """The id, followed by the `id` of the record where records have one."""
    return (*self.source.document_id(index), *self.source.document_fields(int(index)))

  def words_of(self, batch: Batch) -> str:
    """The texts of the documents of a batch."""
    documents = np.unique(batch.document_BS[batch.document_BS >= 0])
    return "\n".join(self.units.cutter(number)(0, END) for number in documents.tolist())

  def batches(self, num_rows: int) -> Iterator[Batch]:
    """All documents, `num_rows` rows at a time, completed with earlier rows whose documents are not named again."""
    unread = 0
    for first in range(0, len(self.source), BLOCK_DOCUMENTS):
      indices = np.arange(first, min(first + BLOCK_DOCUMENTS, len(self.source)))
      if self._trained is not None:
        indices = indices[np.array([self.source.document_id(i) in self._trained for i in indices.tolist()], bool)]
      rows = self._rows(indices)
      unread += len(np.setdiff1d(indices, rows.document))
      order = np.lexsort((rows.offset, rows.document))
      number, begin, end = rows.document[order], rows.offset[order], np.empty_like(order)
      end[order] = np.where(np.diff(number, append=-1) == 0, np.roll(begin, -1), END)
      rows = dataclasses.replace(rows, end=end)
      chosen = np.arange(len(rows))
      if self._chunks is not None:
        places = zip(rows.document.tolist(), rows.offset.tolist(), strict=True)
        known = np.array([(*self.source.document_id(index), offset) in self._chunks for index, offset in places], bool)
        chosen = np.unique(np.repeat(chosen, np.diff(rows.row_ends, prepend=0))[known])
        rows = dataclasses.replace(rows, document=np.where(known, rows.document, -1))
      for start in range(0, len(chosen), num_rows):
        numbers = np.arange(start, start + num_rows)
        batch = self._batch(rows, chosen[numbers % len(chosen)])
        batch.document_BS[numbers >= len(chosen)] = -1
        yield batch
    self.left_out = (f"documents left out as empty or corrupt: {unread:,}",) if unread else ()

  def sample(self, domain: str, num_rows: int) -> tuple[Batch, int]:
    """(batch of the domain's first rows, completed with empty rows; the total number of rows of the domain)."""
    number_N = self.source.domain_numbers(np.arange(len(self.source)))
    rows = self._rows(np.flatnonzero(number_N == self.source.domains.index(domain))[:BLOCK_DOCUMENTS])
    if not len(rows):
      raise ConfigError(f"--queries: '{domain}' holds no text to query with")
    batch = self._batch(rows, np.arange(min(num_rows, len(rows))))
    below = (0, num_rows - len(batch.epoch_B)), (0, 0)
    arrays = {name: np.pad(v, below) for name, v in batch.arrays.items()}
    document_BS, offset_BS = (np.pad(v, below, constant_values=-1) for v in (batch.document_BS, batch.offset_BS))
    return Batch(arrays, document_BS, offset_BS, np.pad(batch.epoch_B, below[0])), len(rows)

  def _rows(self, indices: np.ndarray) -> Rows:
    return packing.pack(self.units.encode_documents(indices), self.layout, lambda size, _: np.arange(size))

  def _batch(self, rows: Rows, numbers: np.ndarray) -> Batch:
    return packing.fill([(rows, int(number), 0) for number in numbers], self.layout, self.tokenizer.pad_id)
