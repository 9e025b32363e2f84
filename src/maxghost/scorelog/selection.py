"""Which of the seen documents were trained on (ghost_select): `<run>/ghost/selection.jsonl`, one line per step.

{"step": 7, "seen": 31, "chosen": [0, 1, 4]}: of the step's 31 rows in the score log, in their order, those three. The
score log holds the ids, scores and losses of all that were seen; `load` joins the two.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError
from maxghost.scorelog.reader import load as open_log

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


def load(run_dir) -> np.ndarray:
  """bool[rows of the score log]: whether the row's document was trained on in that step.

  Raises ConfigError for a run without selection, and where the score log holds other rows than were selected from
  (files removed or added by hand).
  """
  path = Path(run_dir) / "ghost" / FILE
  if not path.is_file():
    raise ConfigError(f"{run_dir}: no {FILE}; the run was not trained with ghost_select")
  steps = np.asarray(open_log(run_dir)["step"])
  starts = {int(step): (int(first), int(count)) for step, first, count in zip(*_groups(steps), strict=True)}
  out = np.zeros(len(steps), bool)
  for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
    entry = json.loads(line)
    first, count = starts.get(entry["step"], (0, 0))
    if count not in (0, entry["seen"]):
      raise ConfigError(
        f"{path}:{number}: step {entry['step']} selected from {entry['seen']} documents, the score log holds {count}"
      )
    if count:
      out[first + np.array(entry["chosen"], int)] = True
  return out


def _groups(steps: np.ndarray):
  """(step, first row, rows) of each run of equal steps."""
  starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
  return steps[starts], starts, np.diff(starts, append=len(steps))
