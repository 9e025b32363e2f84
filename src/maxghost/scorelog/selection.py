"""Which of the seen documents were trained on (ghost_select): `<run>/ghost/selection.jsonl`, one line per step.

{"step": 7, "seen": 31, "chosen": [0, 1, 4]} names three of the step's 31 rows in the score log, by their position. The
score log holds the ids, scores and losses of all seen documents, and each line's CRC-32; `ScoreLog.chosen` joins both.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError
from maxghost.config.files import write_whole

FILE = "selection.jsonl"


def append(folder: Path, step: int, seen: int, chosen: Sequence[int]) -> int:
  """Adds a step's line to the file in `folder`; returns the line's CRC-32 for the step's record."""
  folder.mkdir(parents=True, exist_ok=True)
  line = json.dumps({"step": step, "seen": seen, "chosen": list(chosen)}).encode() + b"\n"
  with open(folder / FILE, "ab") as file:
    file.write(line)
  return zlib.crc32(line)


def missing(folder: Path, wanted: Mapping[int, int]) -> list[str]:
  """A sentence where lines are missing or changed. wanted: {step: CRC-32 of its line}."""
  path = folder / FILE
  found = {zlib.crc32(line) for line in path.read_bytes().splitlines(keepends=True)} if path.is_file() else set()
  lost = [step for step, checksum in wanted.items() if checksum not in found]
  return [f"{FILE}: lines of {len(lost)} steps are missing or changed, that of step {lost[0]} first"] if lost else []


def restore(folder: Path, completed_steps: int) -> None:
  """Removes the lines of later steps, and a last line that was cut short."""
  path = folder / FILE
  if not path.is_file():
    return
  lines = path.read_bytes().splitlines(keepends=True)
  kept = [line for line in lines if line.endswith(b"\n") and not _is_of_later_step(line, completed_steps)]
  with write_whole(path) as file:
    file.write(b"".join(kept))


def _is_of_later_step(line: bytes, completed_steps: int) -> bool:
  """A damaged line stays: every reader of the log names it."""
  try:
    return int(json.loads(line)["step"]) >= completed_steps
  except (ValueError, KeyError, TypeError):
    return False


def chosen(folder: Path, steps: np.ndarray, wanted: Mapping[int, int]) -> np.ndarray:
  """bool[rows of the score log]: whether the row's document was trained on in that step.

  Args:
    folder: the log's.
    steps: i8[rows], the step of each row of the log.
    wanted: {step: CRC-32 of its line}; other lines are left out. Empty for a log that has none.

  Raises:
    ConfigError: for a run without selection, and where the score log holds other rows than were selected from (files
      removed or added by hand).
  """
  path = folder / FILE
  if not path.is_file():
    raise ConfigError(f"{folder}: no {FILE}; the run was not trained with ghost_select")
  starts = {int(step): (int(first), int(count)) for step, first, count in zip(*_groups(steps), strict=True)}
  out = np.zeros(len(steps), bool)
  for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
    if wanted and zlib.crc32(line) not in wanted.values():
      continue
    try:
      entry = json.loads(line)
      step, seen, taken = int(entry["step"]), int(entry["seen"]), np.array(entry["chosen"], int)
    except (ValueError, KeyError, TypeError) as error:
      raise ConfigError(f"{path}:{number}: not a line of selected rows ({error})") from error
    first, count = starts.get(step, (0, 0))
    if count not in (0, seen):
      raise ConfigError(f"{path}:{number}: step {step} selected from {seen} documents, the score log holds {count}")
    if count:
      out[first + taken] = True
  return out


def _groups(steps: np.ndarray):
  """(step, first row, rows) of each run of equal steps."""
  starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
  return steps[starts], starts, np.diff(starts, append=len(steps))
