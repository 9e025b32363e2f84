"""Copies of finished runs, as an interruption would have left them."""

import shutil
from pathlib import Path


def interrupted(whole: Path, broken: Path) -> str:
  """Copies the output folder of the finished run `run` as if it had been killed in its last step.

  The last checkpoint and the last record of metrics.jsonl are left out. Returns that checkpoint's name.
  """
  shutil.copytree(whole, broken)
  last = max((broken / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
  shutil.rmtree(last)
  metrics = broken / "run" / "metrics.jsonl"
  metrics.write_text("".join(metrics.read_text("utf-8").splitlines(keepends=True)[:-1]), "utf-8")
  return last.name
