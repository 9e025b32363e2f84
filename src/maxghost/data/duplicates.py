"""Training documents that repeat held-out ones, exactly or nearly, and training documents that repeat each other."""

import json
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxghost.config.files import with_end, write_text
from maxghost.config.values import ConfigError, import_package, reading
from maxghost.data.hashing import content_hashes
from maxghost.data.sources.base import Source, id_hash
from maxghost.data.split import scan
from maxghost.data.types import DocumentId

_SHINGLE_WORDS, _PERMUTATIONS = 8, 128  # the standard error of a similarity is then at most 0.09
_MISSES = (0.01, 0.99)  # weights of false candidates, which are compared then, and of missed documents
_BATCH, _MOST = 256, 0.98  # documents read together; the largest threshold of an index of so many permutations


class Pair(NamedTuple):
  """A training document and the document it repeats."""

  copy: DocumentId
  original: DocumentId
  similarity: float  # 1 for an exact copy, else the estimated Jaccard similarity of the sets of 8-word shingles
  held_out: bool  # whether the original is


def exact(documents: Iterable[tuple[DocumentId, bytes, bool]]) -> list[Pair]:
  """Byte-identical pairs among (id, text, held out). A group's original is its first held-out one, else its first."""
  groups, pairs = defaultdict(list), []
  for document, text, held_out in documents:
    if text:
      groups[int(content_hashes([text])[0])].append((document, held_out))
  for group in groups.values():
    group.sort(key=lambda member: not member[1])
    (original, is_held_out), *others = group
    pairs.extend(Pair(copy, original, 1.0, is_held_out) for copy, out in others if not out)
  return pairs


def near(documents: Iterable[tuple[DocumentId, bytes, bool]], threshold: float) -> list[Pair]:
  """Training documents with a similarity of `threshold` to a held-out one, by MinHash (Broder 1997) and its hashing."""
  datasketch = import_package("datasketch", "--near")

  def sketch(text: bytes):
    words = text.split()
    shingles = {b" ".join(words[n : n + _SHINGLE_WORDS]) for n in range(max(1, len(words) - _SHINGLE_WORDS + 1))}
    made = datasketch.MinHash(_PERMUTATIONS)
    made.update_batch(shingles)
    return made

  index, known, training = datasketch.MinHashLSH(min(threshold, _MOST), _PERMUTATIONS, weights=_MISSES), {}, []
  for document, text, held_out in documents:
    if text and held_out:
      known[document] = sketch(text)
      index.insert(document, known[document])
    elif text:
      training.append((document, sketch(text)))
  pairs = []
  for document, made in training:
    found = [(made.jaccard(known[original]), original) for original in index.query(made)]
    pairs.extend(Pair(document, original, share, True) for share, original in found if share >= threshold)
  return sorted(pairs, key=lambda pair: (-pair.similarity, pair.copy))


def documents_of(dataset) -> Iterator[tuple[DocumentId, bytes, bool]]:
  """(id, text, held out) of every document that can be read."""
  for part in dataset.parts:
    for indices in scan(len(part.source), _BATCH):
      indices = indices[part.source.domain_numbers(indices) >= 0]
      held_out = part.split.held_out(indices).tolist()
      for index, text, out in zip(indices.tolist(), part.read(indices), held_out, strict=True):
        if text is not None:
          yield part.source.document_id(index), text, out


def write_ids(path: str, documents: Iterable[DocumentId]) -> int:
  """Writes the distinct ids as JSON lines for `dataset_exclude_file`; returns their number."""
  unique = dict.fromkeys(documents)
  write_text(path, "".join(json.dumps(document._asdict()) + "\n" for document in unique))
  return len(unique)


def read_ids(path: str, source: Source, key: str = "dataset_exclude_file") -> tuple[np.ndarray, int, int]:
  """Reads a file of `write_ids`, or of `{"id": ...}` lines that name records. Returns the sorted hashes (uint64) of the
  documents' ids, the number of ids that no record has, and that of all. Raises ConfigError naming file and line."""
  with reading(path, f"{key}="):
    text = with_end(Path(path).expanduser()).read_text(encoding="utf-8")
  hashes: list[int] = []
  records: dict[str, int] = {}  # line of each record's id
  for number, line in enumerate(text.split("\n"), 1):  # other line ends may stand inside of a text
    if not line.strip():
      continue
    try:
      entry = json.loads(line)
      if entry.keys() & {"domain", "path", "offset"}:
        hashes.append(int(id_hash(entry["domain"], entry["path"], operator.index(entry["offset"]))))
      else:
        records[entry["id"] if isinstance(entry["id"], str) else json.dumps(entry["id"])] = number
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
      said = f"{key}={path}, line {number}: not an object with domain, path and offset, or id ({error})"
      raise ConfigError(said) from error
  of_records, unknown = _hashes_of(records, source, f"{key}={path}") if records else ([], [])
  if unknown and key == "dataset_exclude_file":
    raise ConfigError(f"{key}={path}, line {records[unknown[0]]}: no record of the data has the id {unknown[0]!r}")
  return np.unique(np.array(hashes + of_records, np.uint64)), len(unknown), len({*hashes}) + len(records)


def _hashes_of(records: dict[str, int], source: Source, said: str) -> tuple[list[int], list[str]]:
  """(hashes of the ids of the documents whose record has one of these ids, ids of no record); reads all records."""
  if "id" not in source.fields:
    raise ConfigError(f"{said} has ids of records, but the data keeps none; name id in document_fields")
  place = source.fields.index("id")
  found = {n: name for n in range(len(source)) if (name := source.document_fields(n)[place]) in records}
  names = {*found.values()}
  return source.id_hashes(np.array([*found], np.int64)).tolist(), [name for name in records if name not in names]
