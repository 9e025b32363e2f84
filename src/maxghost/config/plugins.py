"""The plug-ins that keys choose by name, and what each can do: known before JAX is imported.

A plug-in's module is imported when it is used. A built-in one has its line here; `optimizers.register` adds the line of
one that is defined elsewhere.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A way to score. lacks: {what it cannot take, a name of `Scoring.wants`: why}."""

  lacks: Mapping[str, str]


_ONE_WALK = "which takes validation and training rows back together, once"
_ONE_BATCH = "which appends the validation rows to the training batch"
_WHOLE = "which forms whole directions without rules"
_STACKED = "which walks back over stacked layers"

# The values of ghost_schedule for ghost_engine=graddotprod, and the other engines.
SCHEDULES = ("two_pass", "reverse_scan", "concat")
SCHEDULE_FACTS: dict[str, Schedule] = {
  "two_pass": Schedule({"offload": "which forms whole directions"}),
  "reverse_scan": Schedule(
    dict.fromkeys(("second_order", "val_every", "accumulation", "mask", "selection"), _ONE_WALK)
    | {"unstacked": _STACKED}
  ),
  "concat": Schedule(
    dict.fromkeys(("second_order", "val_every", "accumulation", "mask", "selection"), _ONE_BATCH)
    | {
      "sets": "which scores against one validation set",
      "early_rank": "which forms the direction inside each layer",
      "offload": "which forms whole directions",
      "balance": "which would count the validation rows in the experts' load",
      "tiles": "which cannot score the head inside its tiles",
    }
  ),
  "jvp": Schedule(dict.fromkeys(("schedule", "rank", "selection", "offload"), _WHOLE)),
  "perexample": Schedule(
    dict.fromkeys(("schedule", "rank", "selection", "offload"), _WHOLE) | {"positions": "which scores whole examples"}
  ),
}
ENGINES = ("graddotprod", *(name for name in SCHEDULE_FACTS if name not in SCHEDULES))


@dataclasses.dataclass(frozen=True)
class Scoring:
  """What a run, or a call of `GhostEngine`, asks of its schedule. wants: {what: ("key=value", what to use instead)}."""

  engine: str
  schedule: str
  wants: Mapping[str, tuple[str, str]]

  def problems(self, prefix: str = "ghost_") -> Iterator[str]:
    """One line for everything that the schedule cannot take. prefix: of the keys' names."""
    rules = self.engine == "graddotprod"
    key, name, names = ("schedule", self.schedule, SCHEDULES) if rules else ("engine", self.engine, ENGINES)
    lacks = SCHEDULE_FACTS[name].lacks
    for want, (given, instead) in self.wants.items():
      if want in lacks:
        # The engine with rules takes what any of its schedules does.
        able = [n for n in names if want not in (SCHEDULE_FACTS[n].lacks if n in SCHEDULE_FACTS else ())]
        other = f", or {prefix}{key}={' or '.join(able)}" if able else ""
        yield f"{given} does not go with {prefix}{key}={name}, {lacks[want]}; use {instead}{other}"


@dataclasses.dataclass(frozen=True)
class Plugin:
  """target: "module:Class", or the class itself. schedules: values of ghost_schedule that it works with."""

  target: str | type
  schedules: tuple[str, ...] = SCHEDULES


@dataclasses.dataclass(frozen=True)
class Optimizer(Plugin):
  """An update rule; the fields are those of `optimizers.UpdateRule`."""

  direction: str | None = None
  columns: tuple[str, ...] = ()
  by_segment: bool = False
  elementwise: bool = False


OPTIMIZERS: dict[str, Optimizer] = {
  "adamw": Optimizer(
    "maxghost.optimizers.adamw:AdamW",
    direction="adam",
    columns=("momentum", "weight_decay"),
    by_segment=True,
    elementwise=True,
  ),
  "sgd": Optimizer(
    "maxghost.optimizers.sgd:Sgd",
    direction="sgd",
    columns=("momentum", "weight_decay"),
    by_segment=True,
    elementwise=True,
  ),
}

KINDS: dict[str, Mapping[str, Plugin]] = {"opt_type": OPTIMIZERS}  # the plug-ins of each key


class Names(Sequence[str]):
  """The values of a key, read anew each time it is asked: a plug-in may be registered after the key was made."""

  def __init__(self, read: Callable[[], Sequence[str]]):
    self._read = read

  @overload
  def __getitem__(self, index: int) -> str: ...

  @overload
  def __getitem__(self, index: slice) -> Sequence[str]: ...

  def __getitem__(self, index):
    return self._read()[index]

  def __len__(self) -> int:
    return len(self._read())


def directions() -> tuple[str, ...]:
  """Values of ghost_direction."""
  own = [optimizer.direction for optimizer in OPTIMIZERS.values() if optimizer.direction not in (None, "sgd")]
  return ("auto", "sgd", *map(str, own), "second_order")


def ledger_columns(*opt_types: str) -> tuple[str, ...]:
  """The columns that the ledger of these optimizers (by default: of any registered one) can have, in order."""
  own = dict.fromkeys(name for opt_type in opt_types or OPTIMIZERS for name in OPTIMIZERS[opt_type].columns)
  return ("predicted_examples", *own, "unscored", "direction_residual")


OPT_TYPES = Names(lambda: tuple(OPTIMIZERS))
DIRECTIONS = Names(directions)
LEDGER = Names(ledger_columns)


def register(key: str, name: str, plugin: Any) -> None:
  """Adds a plug-in to those of `key`. Raises ValueError for a name that another class has taken."""
  table: Any = KINDS[key]
  if name in table and table[name] != plugin:
    raise ValueError(f"{key}={name} is already {table[name].target}; give the other one a name of its own")
  table[name] = plugin


def schedule_problems(values: Mapping[str, str], schedule: str) -> Iterator[str]:
  """One line for each plug-in that the schedule cannot take. values: {key of KINDS: its value}, named in each line."""
  named = ", ".join(f"{key}={value}" for key, value in values.items())
  for key, name in values.items():
    taken = KINDS[key][name].schedules
    if schedule in taken:
      continue
    way = "has no scores; use ghost_enabled=false"
    if taken:
      way = f"works with {', '.join(taken)}; use ghost_schedule={taken[0]}"
    yield f"{named} and ghost_schedule={schedule} do not go together: {key}={name} {way}, or another {key}"


def auto_problem(opt_type: str) -> str:
  """What is said of ghost_direction=auto for an optimizer that offers no direction."""
  offering = [name for name, optimizer in OPTIMIZERS.items() if optimizer.direction]
  return (
    f"ghost_direction=auto means the optimizer's own direction, but opt_type={opt_type} offers none; use "
    f"ghost_direction=sgd (the plain validation gradient), ghost_enabled=false, or opt_type={' or '.join(offering)}"
  )
