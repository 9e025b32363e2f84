"""Data health: the value of repeated passes and of duplicated texts.

K validation sets, E passes, D domains, B bins of consecutive steps.
"""

import dataclasses
import hashlib

import numpy as np

from maxghost.attribution.aggregate import domain_numbers
from maxghost.scorelog.reader import ScoreLog

LAST_PASS = 6  # counted together with later ones
MAX_HASHED_DOCUMENTS = 200_000


@dataclasses.dataclass(frozen=True, slots=True)
class PassTable:
  """Value by pass over the data; the first pass is entry 0, the last entry also holds all later passes.

  rows, tokens: [E]. contribution_EK: nats. expected_EK: nats of the same shares of the batch losses at the average
  value of their domain in the same part of the run, so that a falling learning rate does not look like falling value.
  """

  rows: np.ndarray
  tokens: np.ndarray
  contribution_EK: np.ndarray
  expected_EK: np.ndarray

  @property
  def has_repeats(self) -> bool:
    return bool(self.rows[1:].sum())


@dataclasses.dataclass(frozen=True, slots=True)
class Duplicates:
  """Texts with more than one id among the scored documents.

  tokens: of all copies; extra_tokens: of all but one copy of each text. contribution_K: nats of all copies.
  """

  num_texts: int
  num_documents: int
  tokens: int
  extra_tokens: int
  contribution_K: np.ndarray
  examples: list[list[tuple[str, str, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
  """duplicates: None without texts, or with too many to compare."""

  passes: PassTable
  duplicates: Duplicates | None


class PassSums:
  """Accumulator for PassTable; edges: of the bins of steps over which a domain's average is taken."""

  def __init__(self, log: ScoreLog, edges: np.ndarray):
    self._log, self._edges = log, edges
    self._rows = np.zeros(LAST_PASS, np.int64)
    self._contribution_EK = np.zeros((LAST_PASS, len(log.val_sets)))
    self._tokens_E = np.zeros(LAST_PASS)
    self._share_EDB = np.zeros((LAST_PASS, len(log.domains), len(edges) - 1))

  def add(self, shard, rows: np.ndarray):
    if not len(rows):
      return
    number = np.clip(rows["epoch"], 0, LAST_PASS - 1)
    self._rows += np.bincount(number, minlength=LAST_PASS)
    self._tokens_E += np.bincount(number, rows["tokens"], LAST_PASS)
    for k in range(self._contribution_EK.shape[1]):
      self._contribution_EK[:, k] += np.bincount(number, rows["contribution"][:, k], LAST_PASS)
    domain = domain_numbers(self._log, shard)[rows["domain"]]
    bins = np.searchsorted(self._edges, rows["step"], "right") - 1
    cell = np.ravel_multi_index((number, domain, bins), self._share_EDB.shape)
    self._share_EDB += np.bincount(cell, rows["share"], self._share_EDB.size).reshape(self._share_EDB.shape)

  def result(self, time) -> PassTable:
    """time: the TimeSums of the same log and edges."""
    per_share_DBK = time.contribution_DBK / np.where(time.share_DB > 0, time.share_DB, 1)[..., None]
    expected_EK = np.einsum("edb,dbk->ek", self._share_EDB, per_share_DBK)
    return PassTable(self._rows, self._tokens_E.astype(np.int64), self._contribution_EK, expected_EK)


def duplicates(texts, groups) -> Duplicates | None:
  """Exact duplicates among the scored documents, by a hash of their text; None without texts, or with too many.

  texts: attribution.texts.Texts or None. groups: Groups by document.
  """
  if texts is None or len(groups) > MAX_HASHED_DOCUMENTS or len(texts.source) > MAX_HASHED_DOCUMENTS:
    return None
  place = {key: i for i, key in enumerate(groups.document_ids())}
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
