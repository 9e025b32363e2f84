"""Which of the seen documents were trained on (ghost_select): `<run>/ghost/selection.jsonl`, one line per step.

{"step": 7, "seen": 31, "chosen": [0, 1, 4]} names three of the step's 31 rows in the score log, by their position. The
score log holds the ids, scores and losses of all seen documents, and each line's CRC-32. No reader of scores needs the
lines: a row that was not trained on has share 0 in the score log (`ScoreLog.chosen`).
"""

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxghost.config.files import write_whole
from maxghost.config.values import naming

FILE = "selection.jsonl"


def append(folder: Path, step: int, seen: int, chosen: Sequence[int]) -> int:
  """Adds a step's line to the file in `folder`; returns the line's CRC-32 for the step's record."""
  folder.mkdir(parents=True, exist_ok=True)
  line = json.dumps({"step": step, "seen": seen, "chosen": list(chosen)}).encode() + b"\n"
  with naming("", folder / FILE), open(folder / FILE, "ab") as file:
    file.write(line)
  return zlib.crc32(line)


def missing(folder: Path, wanted: Mapping[int, int]) -> list[str]:
  """A sentence where lines are missing or changed. wanted: {step: CRC-32 of its line}."""
  path = folder / FILE
  data = path.read_bytes() if wanted and path.is_file() else b""
  found = {zlib.crc32(line) for line in data.splitlines(keepends=True)}
  lost = [step for step, checksum in wanted.items() if checksum not in found]
  return [f"{FILE}: lines of {len(lost)} steps are missing or changed, that of step {lost[0]} first"] if lost else []


def restore(folder: Path, completed_steps: int) -> None:
  """Removes the lines of later steps, and a last line that was cut short. A damaged line stays: readers name it."""
  path = folder / FILE
  if not path.is_file():
    return
  kept = []
  for line in path.read_bytes().splitlines(keepends=True):
    with contextlib.suppress(ValueError, KeyError, TypeError):
      if int(json.loads(line)["step"]) >= completed_steps:
        continue
    if line.endswith(b"\n"):
      kept.append(line)
  with write_whole(path) as file:
    file.write(b"".join(kept))
