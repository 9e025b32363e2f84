"""Reads metrics.jsonl and run_facts.json for the report."""

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
  """One metric over the steps at which it was logged: steps int64 [S], values float64 [S]."""

  steps: np.ndarray
  values: np.ndarray

  def __len__(self) -> int:
    return len(self.steps)


def read_metrics(path: Path) -> tuple[dict[str, Series], list[str]]:
  """({name: numeric metric} of metrics.jsonl, messages about a missing file or unreadable lines).

  The later record of a step replaces the earlier one.
  """
  if not path.is_file():
    return {}, [f"{path.name} is missing: the loss curve and the speed are left out"]
  columns: dict[str, dict[int, float]] = {}
  unreadable = 0
  with open(path, "rb") as file:
    for line in file:
      try:
        record = json.loads(line)
        step = int(record["step"])
      except (ValueError, KeyError, TypeError):
        unreadable += 1
        continue
      for name, value in record.items():
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
          columns.setdefault(name, {})[step] = float(value)
  messages = [f"{path.name}: {unreadable} lines could not be read and were left out"] if unreadable else []
  return {name: _series(points) for name, points in columns.items()}, messages


def read_samples(path: Path) -> list[tuple[int, str]]:
  """(step, text) of the samples that the model wrote during training, by step."""
  texts: dict[int, str] = {}
  if path.is_file():
    for line in path.read_bytes().splitlines():
      with contextlib.suppress(ValueError, KeyError, TypeError):
        record = json.loads(line)
        texts[int(record["step"])] = str(record["sample/text"])
  return sorted(texts.items())


def _series(points: dict[int, float]) -> Series:
  steps = np.array(sorted(points), np.int64)
  return Series(steps, np.array([points[int(step)] for step in steps]))


def thin(series: Series, num_points: int) -> Series:
  """At most `num_points` points, each the mean over consecutive steps, at the last of them."""
  if len(series) <= num_points:
    return series
  starts = np.linspace(0, len(series), num_points + 1).round().astype(int)
  sums = np.add.reduceat(series.values, starts[:-1])
  return Series(series.steps[starts[1:] - 1], sums / np.diff(starts))


def read_facts(run_dir: Path) -> dict[str, str]:
  """The facts in run_facts.json (devices, memory, parameters, ...) as text; empty without the file."""
  path = run_dir / "run_facts.json"
  if not path.is_file():
    return {}
  try:
    facts = json.loads(path.read_text("utf-8"))
  except (ValueError, OSError):
    return {"run_facts.json": "unreadable"}
  return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}
