"""Schedules: how validation and training passes share a step. `score` runs them.

To add one, write a module with `run(problem) -> Scored`, and add lines to `SCHEDULES` and configs/schedules.yml.
"""

import dataclasses
from collections.abc import Callable

from maxghost.ghost.schedules import concat, forward_mode, per_example, reverse_scan, two_pass
from maxghost.ghost.schedules.base import Model, Problem, Scored, Secant, Settings, Stored, TrainPass, Validation

__all__ = ["Model", "Problem", "Scored", "Secant", "Settings", "Stored", "TrainPass", "Validation", "score"]

SCHEDULES: dict[str, Callable[[Problem], Scored]] = {
  "two_pass": two_pass.run, "reverse_scan": reverse_scan.run, "concat": concat.run, "forward_mode": forward_mode.run,
  "per_example": per_example.run,
}  # fmt: skip


def score(problem: Problem) -> Scored:
  """Runs the passes of one scored step. Raises ValueError for a loss or model that the schedule does not support."""
  return dataclasses.replace(SCHEDULES[problem.schedule](problem), secant=problem.secant)
