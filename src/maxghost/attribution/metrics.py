"""Reads metrics.jsonl, run_facts.json and config.yml for the report."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from maxghost.attribution.statistics import block_edges
from maxghost.config.files import check_seal


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
  """One metric over the steps at which it was logged: steps int64 [S], values float64 [S]."""

  steps: np.ndarray
  values: np.ndarray

  def __len__(self) -> int:
    return len(self.steps)


def read_metrics(path: Path) -> tuple[dict[str, Series], list[tuple[int, str]], list[str]]:
  """({name: numeric metric} of metrics.jsonl, (step, text) of what the model wrote during training, what is missing or
  unreadable); by step, of which a later record counts."""
  if not path.is_file():
    return {}, [], [f"{path.name} is missing: the loss curve and the speed are left out"]
  columns: dict[str, dict[int, float]] = {}
  samples: dict[int, str] = {}
  unreadable = 0
  with open(path, "rb") as file:
    for line in file:
      try:
        record = json.loads(line)
        step = int(record.pop("step"))
        numbers = {name: float(value) for name, value in record.items() if type(value) in (int, float)}
      except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        unreadable += 1
        continue
      for name, value in numbers.items():
        columns.setdefault(name, {})[step] = value
      if "sample/text" in record:
        samples[step] = str(record["sample/text"])
  messages = [f"{path.name}: {unreadable} lines could not be read and were left out"] if unreadable else []
  ordered = {name: zip(*sorted(points.items()), strict=True) for name, points in columns.items()}
  return {name: Series(*map(np.array, pairs)) for name, pairs in ordered.items()}, sorted(samples.items()), messages


def thin(series: Series, num_points: int) -> Series:
  """At most `num_points` points, each the mean over consecutive steps, at the last of them."""
  if len(series) <= num_points:
    return series
  edges = block_edges(len(series), num_points)
  return Series(series.steps[edges[1:] - 1], np.add.reduceat(series.values, edges[:-1]) / np.diff(edges))


def read_mapping(path: Path) -> dict[str, str]:
  """The entries of a YAML or JSON file of any version as text; empty without the file."""
  if not path.is_file():
    return {}
  import yaml

  try:
    loaded = check_seal(yaml.safe_load(path.read_text("utf-8")) or {})
  except (yaml.YAMLError, OSError, ValueError, TypeError):
    return {path.name: "unreadable"}
  return {str(k): "" if v is None else str(v) for k, v in loaded.items()}
