"""Is the data still worth its tokens: repeated exposures and duplicated texts.

K validation sets, E exposure numbers.
"""

import dataclasses
import hashlib

import numpy as np

from maxghost.attribution.log import ScoreLog

LAST_EXPOSURE = 6  # this many and more are counted together
MAX_ROWS = 2_000_000  # rows held in memory; a longer log is sampled by document
MAX_HASHED_DOCUMENTS = 200_000


@dataclasses.dataclass(frozen=True, slots=True)
class ExposureTable:
  """Value by how often the same text had been trained on before; first pass = 1, the last entry means "and more".

  rows, tokens: [E]. contribution_EK: nats. expected_EK: nats the same tokens would have been worth at the average of
  their domain in the same part of the run, so that a falling learning rate does not count as falling value.
  sampled: 1 in this many documents was looked at.
  """

  rows: np.ndarray
  tokens: np.ndarray
  contribution_EK: np.ndarray
  expected_EK: np.ndarray
  sampled: int

  @property
  def has_repeats(self) -> bool:
    return bool(self.rows[1:].sum())


@dataclasses.dataclass(frozen=True, slots=True)
class Duplicates:
  """Texts that occur under more than one id of the scored documents.

  tokens: trained on all copies; extra_tokens: on all but one of each text. contribution_K: nats of all copies.
  """

  num_texts: int
  num_documents: int
  tokens: int
  extra_tokens: int
  contribution_K: np.ndarray
  examples: list[list[tuple[str, str, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
  """duplicates: None when the texts were not at hand or are too many to compare."""

  exposures: ExposureTable
  duplicates: Duplicates | None


class Exposures:
  """Accumulator for ExposureTable; holds about MAX_ROWS rows, of whole documents chosen by a hash of their id."""

  def __init__(self, log: ScoreLog):
    self._num_sets = len(log.val_sets)
    self._sampled = 1
    while log.num_rows / self._sampled > MAX_ROWS:
      self._sampled *= 2
    self._paths: dict[str, int] = {}
    self._domains = {name: i for i, name in enumerate(log.domains)}
    self._parts: list[np.ndarray] = []
    self._dtype = np.dtype(
      [
        ("path", "<i8"),
        ("offset", "<i8"),
        ("chunk", "<i8"),
        ("step", "<i8"),
        ("domain", "<i4"),
        ("tokens", "<i4"),
        ("contribution", "<f4", (self._num_sets,)),
      ]
    )

  def add(self, shard, rows: np.ndarray):
    if not len(rows):
      return
    paths = np.array([self._paths.setdefault(str(path), len(self._paths)) for path in shard.paths], np.int64)
    if self._sampled > 1:
      rows = rows[_hash(paths[rows["path"]], rows["offset"]) % np.uint64(self._sampled) == 0]
    domains = np.array([self._domains[str(name)] for name in shard.domains], np.int32)
    part = np.zeros(len(rows), self._dtype)
    part["path"], part["domain"] = paths[rows["path"]], domains[rows["domain"]]
    for name in ("offset", "chunk", "step", "tokens", "contribution"):
      part[name] = rows[name]
    self._parts.append(part)

  def result(self, time) -> ExposureTable:
    """time: the TimeSums of the same log, for the average value of a domain in a part of the run."""
    rows = np.concatenate(self._parts) if self._parts else np.zeros(0, self._dtype)
    rows = rows[np.lexsort((rows["step"], rows["offset"], rows["path"], rows["domain"]))]
    number = np.minimum(_passes(rows), LAST_EXPOSURE) - 1
    bins = np.searchsorted(time.edges, rows["step"], "right") - 1
    tokens, contribution = rows["tokens"].astype(np.float64), rows["contribution"].astype(np.float64)
    per_token_DBK = time.contribution_DBK / np.maximum(time.tokens_DB, 1)[..., None]
    expected = per_token_DBK[rows["domain"], bins] * tokens[:, None]

    def total(values):
      return np.bincount(number, values, LAST_EXPOSURE)

    sets = range(self._num_sets)
    return ExposureTable(
      np.bincount(number, minlength=LAST_EXPOSURE),
      total(tokens).astype(np.int64),
      np.stack([total(contribution[:, k]) for k in sets], 1),
      np.stack([total(expected[:, k]) for k in sets], 1),
      self._sampled,
    )


def _passes(rows: np.ndarray) -> np.ndarray:
  """int64[N]: which pass over its document a row belongs to; rows sorted by document, then step.

  A document is read front to back, so a chunk that does not lie behind the one before begins a new pass.
  """
  if not len(rows):
    return np.zeros(0, np.int64)
  new_document = np.append(True, np.zeros(len(rows) - 1, bool))
  for name in ("domain", "path", "offset"):
    new_document[1:] |= np.diff(rows[name]) != 0
  new_pass = new_document.copy()
  new_pass[1:] |= np.diff(rows["chunk"]) <= 0
  count = np.cumsum(new_pass)
  before = np.maximum.accumulate(np.where(new_document, count, 0))
  return count - before + 1


def _hash(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """uint64[N] of two integer columns (splitmix64's finisher)."""
  with np.errstate(over="ignore"):
    x = a.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + b.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def duplicates(texts, groups) -> Duplicates | None:
  """Exact duplicates among the scored documents, found by a hash of their text.

  texts: attribution.texts.Texts or None. groups: Groups by document. None when there are no texts or too many.
  """
  if texts is None or len(groups) > MAX_HASHED_DOCUMENTS or len(texts.source) > MAX_HASHED_DOCUMENTS:
    return None
  keys = zip(groups.keys["domain"].tolist(), groups.keys["path"].tolist(), groups.keys["offset"].tolist(), strict=True)
  place = {key: i for i, key in enumerate(keys)}
  by_text: dict[bytes, list[tuple]] = {}
  for index in range(len(texts.source)):
    key = tuple(texts.source.document_id(index))
    if key in place:
      digest = hashlib.blake2b(bytes(texts.source[index].text).strip(), digest_size=16).digest()
      by_text.setdefault(digest, []).append(key)
  copies = [keys for keys in by_text.values() if len(keys) > 1]
  tokens = [[int(groups.tokens[place[key]]) for key in keys] for keys in copies]
  copies_index = [place[key] for keys in copies for key in keys]
  largest_first = sorted(range(len(copies)), key=lambda i: -sum(tokens[i]))
  return Duplicates(
    len(copies),
    len(copies_index),
    sum(map(sum, tokens)),
    sum(sum(t) - max(t) for t in tokens),
    groups.contribution_GK[copies_index].sum(0),
    [copies[i] for i in largest_first[:10]],
  )
