"""Data health: the value of repeated passes and of duplicated texts.

K validation sets, E passes, D domains, B bins of consecutive steps.
"""

import dataclasses
import hashlib

import numpy as np

from maxghost.attribution.aggregate import Groups, TimeSums
from maxghost.attribution.texts import DocumentKey

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
  """Texts with more than one id among the num_compared scored documents whose text was found.

  tokens: of all copies; extra_tokens: of all but one copy of each text. contribution_K: nats of all copies.
  """

  num_compared: int
  num_texts: int
  num_documents: int
  tokens: int
  extra_tokens: int
  contribution_K: np.ndarray
  examples: list[list[DocumentKey]]


def passes(time: TimeSums) -> PassTable:
  """The value of each pass, from sums over the run."""
  rows_EDB, tokens_EDB, share_EDB, _, *value_KEDB = time.sums_CEDB
  expected = []
  for value_EDB in value_KEDB:
    share_DB = share_EDB.sum(0)
    expected.append(share_EDB * (value_EDB.sum(0) / np.where(share_DB > 0, share_DB, 1)))
  total_EK, expected_EK = (np.sum(values, (2, 3)).T for values in (value_KEDB, expected))
  return PassTable(rows_EDB.sum((1, 2)).astype(int), tokens_EDB.sum((1, 2)).astype(int), total_EK, expected_EK)


def duplicates(documents, groups: Groups) -> Duplicates | None:
  """Exact duplicates among the scored documents, by a hash of their text; None without texts, or with too many.

  documents: the data source, or None. groups: by document.
  """
  if documents is None or len(groups) > MAX_HASHED_DOCUMENTS or len(documents) > MAX_HASHED_DOCUMENTS:
    return None
  place = {key: i for i, key in enumerate(groups.document_ids())}
  by_text: dict[bytes, list[DocumentKey]] = {}
  for index in range(len(documents)):
    key = tuple(documents.document_id(index))
    if key in place:
      digest = hashlib.blake2b(bytes(documents[index].text).strip(), digest_size=16).digest()
      by_text.setdefault(digest, []).append(key)
  copies = [(groups.tokens[[place[key] for key in keys]], keys) for keys in by_text.values() if len(keys) > 1]
  copies.sort(key=lambda copy: -copy[0].sum())
  members = [place[key] for _, keys in copies for key in keys]
  return Duplicates(
    sum(map(len, by_text.values())),
    len(copies),
    len(members),
    int(groups.tokens[members].sum()),
    int(sum(tokens.sum() - tokens.max() for tokens, _ in copies)),
    groups.contribution_GK[members].sum(0),
    [keys for _, keys in copies[:10]],
  )
