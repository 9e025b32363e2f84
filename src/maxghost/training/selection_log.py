"""Which of the seen documents were trained on (ghost_select): `<run>/ghost/selection.jsonl`, one line per step.

{"step": 7, "seen": 31, "chosen": [0, 1, 4]}: of the step's 31 rows in the score log, in their order, those three. The
score log holds the ids, scores and losses of all that were seen; `attribution.chosen.load` joins the two.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

FILE = "selection.jsonl"


def append(folder: Path, step: int, seen: int, chosen: Sequence[int]) -> None:
  """Adds a step's line to the file in `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / FILE, "a", encoding="utf-8") as file:
    file.write(json.dumps({"step": step, "seen": seen, "chosen": list(chosen)}) + "\n")


def restore(folder: Path, completed_steps: int) -> None:
  """Removes the lines of steps that are still to come, and a last line that was cut short."""
  path = folder / FILE
  if not path.is_file():
    return
  kept = []
  for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
    if line.endswith("\n") and json.loads(line)["step"] < completed_steps:
      kept.append(line)
  temporary = path.with_suffix(".tmp")
  temporary.write_text("".join(kept), encoding="utf-8")
  os.replace(temporary, path)
