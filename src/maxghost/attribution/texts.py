"""Document texts by id, read from the source in the run's config.yml."""

import re
from collections.abc import Iterable
from pathlib import Path

from maxghost import config
from maxghost.config import ConfigError

DocumentKey = tuple[str, str, int]
SNIPPET_BYTES = 1200
_ORNAMENT = re.compile(r"([^\w\s])\1{3,}")


class Texts:
  """Documents of a run by id."""

  def __init__(self, source):
    self.source = source

  def find(self, wanted: Iterable[DocumentKey]) -> dict[DocumentKey, bytes]:
    """The texts of the ids that the source still has; one pass over the ids, and only found texts are read."""
    from maxghost.data import DocumentId, find_documents

    found = find_documents(self.source, [DocumentId(*key) for key in wanted])
    return {(key.domain, key.path, key.offset): bytes(self.source[index].text) for key, index in found.items()}


class Source:
  """The documents of a run, opened on first use."""

  def __init__(self, run_dir: Path):
    self._run_dir, self._dataset, self._problem = run_dir, None, ""

  def texts(self, fingerprints: tuple[str, ...]) -> tuple[Texts | None, list[str]]:
    """(texts, messages: why there are none, or that the source has changed since the run).

    fingerprints: of the source during training, from the score log; empty if not recorded.
    """
    if self._dataset is None and not self._problem:
      self._open()
    if self._dataset is None:
      return None, [self._problem]
    now = self._dataset.fingerprint
    messages = []
    if any(then != now for then in fingerprints):
      messages.append(
        f"the source of the documents has changed since the run (fingerprint {', '.join(fingerprints)} then, {now} "
        "now): texts may differ from those that were scored"
      )
    return Texts(self._dataset.source), messages

  def _open(self):
    path = Path(self._run_dir) / "config.yml"
    if not path.is_file():
      self._problem = "config.yml is missing, so the texts of the documents cannot be shown"
      return
    from maxghost import data  # costs time, so only where texts are shown

    try:
      cfg = config.load(path)
      self._dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed)
    except ConfigError as error:
      self._problem = f"the texts of the documents cannot be shown: {error}"


def snippet(text: bytes, num_chars: int) -> str:
  """The first `num_chars` characters on one line, with repeated spaces and ornaments shortened and a final ellipsis."""
  squeezed = " ".join(_ORNAMENT.sub(r"\1\1\1", text[: 8 * num_chars].decode("utf-8", "replace")).split())
  return squeezed if len(squeezed) <= num_chars else squeezed[: num_chars - 1].rstrip() + "…"
