"""The text behind a document id, read again from the source that the run's config.yml names."""

import re
from collections.abc import Iterable
from pathlib import Path

from maxghost import config
from maxghost.config import ConfigError

DocumentKey = tuple[str, str, int]
SNIPPET_BYTES = 1200
_ORNAMENT = re.compile(r"([^\w\s])\1{3,}")


class Texts:
  """Documents of a run by id. `changed` when the source is no longer the one whose texts were scored."""

  def __init__(self, source, changed: bool):
    self.source = source
    self.changed = changed

  def find(self, wanted: Iterable[DocumentKey]) -> dict[DocumentKey, bytes]:
    """Texts of those ids that the source still has; one pass over the ids, only the found texts are read."""
    from maxghost.data import DocumentId, find_documents

    found = find_documents(self.source, [DocumentId(*key) for key in wanted])
    return {(key.domain, key.path, key.offset): bytes(self.source[index].text) for key, index in found.items()}


class Source:
  """The documents of a run, opened once and only when they are first asked for."""

  def __init__(self, run_dir: Path):
    self._run_dir = run_dir
    self._dataset = None
    self._problem = ""

  def texts(self, fingerprints: tuple[str, ...]) -> tuple[Texts | None, list[str]]:
    """The texts, and sentences to show: why there are none, or that the source has changed since.

    fingerprints: of the source while the run trained, from the score log; empty when they were not recorded.
    """
    if self._dataset is None and not self._problem:
      self._open()
    if self._dataset is None:
      return None, [self._problem]
    now = self._dataset.fingerprint
    changed = any(then != now for then in fingerprints)
    messages = []
    if changed:
      messages.append(
        f"the source of the documents has changed since the run (fingerprint {', '.join(fingerprints)} then, {now} "
        "now): texts may differ from those that were scored"
      )
    return Texts(self._dataset.source, changed), messages

  def _open(self):
    path = Path(self._run_dir) / "config.yml"
    if not path.is_file():
      self._problem = "config.yml is missing, so the texts of the documents cannot be shown"
      return
    from maxghost import data  # reading the corpus is only paid for where texts are asked for

    try:
      cfg = config.load(path)
      self._dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed)
    except ConfigError as error:
      self._problem = f"the texts of the documents cannot be shown: {error}"


def snippet(text: bytes, num_chars: int) -> str:
  """The first `num_chars` characters on one line; runs of spaces and ornament are squeezed, a cut shows an ellipsis."""
  squeezed = " ".join(_ORNAMENT.sub(r"\1\1\1", text[: 8 * num_chars].decode("utf-8", "replace")).split())
  return squeezed if len(squeezed) <= num_chars else squeezed[: num_chars - 1].rstrip() + "…"
