"""The names users choose engines, schedules and directions by, and which of them go together."""

import difflib
from collections.abc import Sequence

from maxghost.config import plugins

ENGINES = ("graddotprod", "jvp", "perexample")
SCHEDULES = plugins.SCHEDULES
DIRECTIONS = plugins.DIRECTIONS


def check(key: str, value: str, choices: Sequence[str]) -> str:
  """`value` if it is one of `choices`; ValueError naming the nearest otherwise."""
  if value in choices:
    return value
  near = difflib.get_close_matches(value, choices, n=1, cutoff=0.3)
  hint = f"; did you mean {near[0]}?" if near else ""
  raise ValueError(f"{key}={value}: use one of {', '.join(choices)}{hint}")


def check_combination(engine: str, schedule: str, direction: str, rank: int) -> None:
  """ValueError for settings that contradict each other."""
  if engine != "graddotprod" and rank:
    raise ValueError(f"ghost_rank={rank} has no meaning for engine={engine}; use ghost_rank=0 or graddotprod")
  if engine != "graddotprod" and schedule != "two_pass":
    raise ValueError(f"engine={engine} has no ghost_schedule={schedule}; use two_pass or graddotprod")
  if schedule == "concat" and rank and direction in ("sgd", "second_order"):
    raise ValueError("ghost_schedule=concat forms the direction inside each op: use ghost_rank=0, or two_pass")
  if schedule != "two_pass" and direction == "second_order":
    raise ValueError(f"ghost_direction=second_order needs ghost_schedule=two_pass, not {schedule}")
