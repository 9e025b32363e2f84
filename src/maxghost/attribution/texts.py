"""Document texts by id, read from the source in the run's config.yml."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from maxghost import config
from maxghost.config.values import printable

DocumentKey = tuple[str, str, int]
END = 2**62  # the byte behind a document, also `end_BS` of its last chunk
SHOWN_CHARS = 1200
_ORNAMENT = re.compile(r"([^\w\s])\1{3,}")


class Source:
  """The documents of a run, opened on first use; `dataset` is None where they cannot be read."""

  def __init__(self, run_dir: Path):
    self._path = Path(run_dir) / "config.yml"
    self.dataset: Any = None

  def open(self, fingerprints: tuple[str, ...]) -> list[str]:
    """Opens the source; returns messages: why there are no texts, or that `fingerprints`, of the run, are others."""
    if self.dataset is None:
      if not self._path.is_file():
        return ["config.yml is missing, so the texts of the documents cannot be shown"]
      from maxghost import data  # costs time, so only where texts are shown

      try:
        cfg = config.load(self._path)
        keys = dataclasses.replace(cfg.data, on_corrupt="skip", max_target_length=2)  # scored ones may be short
        self.dataset = data.load_dataset(keys, cfg.run.data_shuffle_seed, records=cfg.records)
      except config.ConfigError as error:
        return [f"the texts of the documents cannot be shown: {error}"]
    return changed(fingerprints, self.dataset.fingerprint)

  def find(self, wanted: Iterable[DocumentKey]) -> dict[DocumentKey, str]:
    """The texts of the ids that the source still has; no scored document was empty, but one may be corrupt by now."""
    return {key: text for key, cut in self.cutters(wanted).items() if (text := cut(0, END))}

  def cutters(self, wanted: Iterable[DocumentKey]) -> dict[DocumentKey, Callable[[int, int], str]]:
    """Gives the texts from one byte to another; one pass over the ids, and only found texts are read."""
    if self.dataset is None:
      return {}
    from maxghost.data import find_documents

    return {key: self.dataset.parts[0].cutter(n) for key, n in find_documents(self.dataset.source, wanted).items()}


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
