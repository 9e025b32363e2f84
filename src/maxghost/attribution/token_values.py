"""The contribution of each token of a document, from the files of ghost_detail=token (see scorelog/tokens.py).

B rows, T positions, K validation sets.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxghost import config
from maxghost.attribution.texts import SHOWN_CHARS, DocumentKey
from maxghost.config import ConfigError
from maxghost.scorelog import tokens
from maxghost.scorelog.shard import DamagedShard

END = "⟨end⟩"


class Marked(NamedTuple):
  """One exposure of a document: pieces of its text, as far as it is shown, and the value of each; its total in nats."""

  step: int
  total: float
  pieces: tuple[str, ...]
  values: np.ndarray


def find(
  run_dir: Path, wanted: list[list[DocumentKey]], checksums: Mapping[int, int], accept_lost_rows: bool
) -> tuple[dict[tuple[int, DocumentKey], Marked], list[str]]:
  """({(k, id): Marked}, messages) of the exposure of each document with the largest absolute contribution.

  wanted: document ids per validation set. checksums: {step: CRC-32 of its file}, from the score log. Empty for a run
  without token files. Raises ConfigError for a damaged file, unless accept_lost_rows.
  """
  if not (files := tokens.files(Path(run_dir) / "ghost" / tokens.FOLDER)):
    return {}, []
  from maxghost.data.tokenizers import load_tokenizer  # only where token files exist

  try:
    data = config.load(Path(run_dir) / "config.yml").data
    tokenizer = load_tokenizer(data.tokenizer_type, data.tokenizer_path)
  except (ConfigError, OSError) as error:
    return {}, [f"the tokens of the documents cannot be shown: {error}"]
  best: dict[tuple[int, DocumentKey], tuple[int, np.ndarray, np.ndarray]] = {}
  messages = []
  for step, path in files.items():
    try:
      file = tokens.read(path, checksums.get(step))
    except DamagedShard as error:
      if not accept_lost_rows:
        raise ConfigError(f"run_dir={run_dir}: {error}; put it back, or go on without: --accept-lost-rows") from error
      messages.append(f"lost: {error}")
      continue
    for k, keys in enumerate(map(set, wanted)):
      for key, ids, values in _documents(file, k):
        if key in keys and len(ids) and ((k, key) not in best or abs(values.sum()) > abs(best[k, key][2].sum())):
          best[k, key] = (step, ids, values)
  return {key: Marked(step, *_pieces(ids, values, tokenizer)) for key, (step, ids, values) in best.items()}, messages


def _documents(file: dict[str, np.ndarray], k: int) -> Iterator[tuple[DocumentKey, np.ndarray, np.ndarray]]:
  """(id, tokens, their contributions to set k) of each document of a file."""
  for b, s in zip(*np.nonzero(file["offset"] >= 0), strict=True):
    key = (str(file["domain"][b, s]), str(file["path"][b, s]), int(file["offset"][b, s]))
    inside = file["inputs_segmentation"][b] == s + 1
    yield key, file["targets"][b, inside], file["contribution_KBT"][k, b, inside]


def _pieces(ids: Iterable[int], values: np.ndarray, tokenizer) -> tuple[float, tuple[str, ...], np.ndarray]:
  """(total, texts, values) of pieces; tokens that share a character form one piece, a token without text is END."""
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  pieces, sums, text, total, size = [], [], "", 0.0, 0
  for place, (number, value) in enumerate(zip(ids, values, strict=True), 1):
    raw = tokenizer.piece(int(number))
    size += len(raw)
    if size > SHOWN_CHARS:
      break
    text, total = text + decoder.decode(raw, place == len(values)), total + float(value)  # it may end in a character
    if not decoder.getstate()[0]:
      pieces.append(text or END)
      sums.append(total)
      text, total = "", 0.0
  return float(values.sum()), tuple(pieces), np.array(sums)
