"""What online selection trained on, joined to the score log."""

import json
from pathlib import Path

import numpy as np

from maxghost.attribution.log import load as load_log
from maxghost.config import ConfigError

FILE = "selection.jsonl"


def load(run_dir) -> np.ndarray:
  """bool[rows of the score log]: whether the row's document was trained on in that step.

  Raises ConfigError for a run without selection, and where the score log holds other rows than were selected from
  (files removed or added by hand).
  """
  path = Path(run_dir) / "ghost" / FILE
  if not path.is_file():
    raise ConfigError(f"{run_dir}: no {FILE}; the run was not trained with ghost_select")
  steps = np.asarray(load_log(run_dir)["step"])
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
