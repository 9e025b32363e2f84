"""Document texts by id, read from the source in the run's config.yml."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from maxghost import config
from maxghost.config.values import printable

DocumentKey = tuple[str, str, int]
SHOWN_CHARS = 1200
_ORNAMENT = re.compile(r"([^\w\s])\1{3,}")


class Source:
  """The documents of a run, opened on first use; `documents` is None where they cannot be read."""

  def __init__(self, run_dir: Path):
    self._path = Path(run_dir) / "config.yml"
    self._shown: Callable[[bytes], bytes] = bytes
    self.documents: Any = None
    self._dataset: Any = None

  def open(self, fingerprints: tuple[str, ...]) -> list[str]:
    """Opens the source; returns messages: why there are no texts, or that `fingerprints`, of the run, are others."""
    if self.documents is None:
      if not self._path.is_file():
        return ["config.yml is missing, so the texts of the documents cannot be shown"]
      from maxghost import data  # costs time, so only where texts are shown

      try:
        cfg = config.load(self._path)
        keys = cfg.data  # a corpus that `maxghost attribute` scored may be shorter than a row
        keys = dataclasses.replace(keys, max_target_length=2) if cfg.records == "text" else keys
        dataset = data.load_dataset(keys, cfg.run.data_shuffle_seed, records=cfg.records)
      except config.ConfigError as error:
        return [f"the texts of the documents cannot be shown: {error}"]
      self.documents, self._dataset = dataset.source, dataset
      self._shown = data.readable if cfg.records == "conversations" else bytes
    return changed(fingerprints, self._dataset.fingerprint)

  def num_trained(self) -> int:
    """Number of documents that are neither held out nor left out; 0 where the source cannot be read."""
    from maxghost.data.split import scan

    if self._dataset is None:
      return 0
    part = self._dataset.parts[0]
    kept = sum(int((~part.split.left_out(indices)).sum()) for indices in scan(len(part.source)))
    return kept - len(self._dataset.copies or ()) * part.drops_copies

  def find(self, wanted: Iterable[DocumentKey]) -> dict[DocumentKey, str]:
    """The texts of the ids that the source still has; one pass over the ids, and only found texts are read."""
    if self.documents is None:
      return {}
    from maxghost.data import find_documents
    from maxghost.data.sources.base import read_or_skip

    found = find_documents(self.documents, wanted)
    texts = zip(found, read_or_skip(self.documents.texts, np.array([*found.values()], np.int64)), strict=True)
    return {key: self._shown(text).decode("utf-8", "replace") for key, text in texts if text is not None}


def changed(then: tuple[str, ...], now: str) -> list[str]:
  """A sentence if documents have another fingerprint now."""
  others = sorted({*then} - {now})
  said = f"(fingerprint {', '.join(others)} then, {now} now): texts may differ from those that were scored"
  return [f"the source of the documents has changed since the run {said}"] if others else []


def print_notes(notes: Iterable[str]) -> None:
  for note in notes:
    print(printable(f"maxghost: note: {note}"), file=sys.stderr)


def snippet(text: str, num_chars: int) -> str:
  """The first `num_chars` characters on one line, with repeated spaces and ornaments shortened and a final ellipsis."""
  squeezed = " ".join(_ORNAMENT.sub(r"\1\1\1", text[: 8 * num_chars]).split())
  return squeezed if len(squeezed) <= num_chars else squeezed[: num_chars - 1].rstrip() + "…"
