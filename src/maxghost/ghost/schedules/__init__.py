"""Schedules: how validation and training passes share a step. `score` runs them.

To add one, write a function of `Problem` that returns `Scored`, and add lines to `SCHEDULES` and
`config.plugins.SCHEDULE_LACKS`.
"""

from collections.abc import Callable

from maxghost.ghost.schedules import by_rules, reverse_scan, without_rules
from maxghost.ghost.schedules.base import Model, Problem, Scored, Settings, Stored, TrainPass, Validation

__all__ = ["Model", "Problem", "Scored", "Settings", "Stored", "TrainPass", "Validation", "score"]

SCHEDULES: dict[str, Callable[[Problem], Scored]] = {
  "two_pass": by_rules.two_pass,
  "reverse_scan": reverse_scan.run,
  "concat": by_rules.concat,
  "forward_mode": without_rules.forward_mode,
  "per_example": without_rules.per_example,
}


def score(problem: Problem) -> Scored:
  """Runs the passes of one scored step. Raises ValueError for a loss or model that the schedule does not support."""
  return SCHEDULES[problem.schedule](problem)
