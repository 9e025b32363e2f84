"""The plug-ins that keys choose by name, and what each can do, without importing JAX.

A plug-in's module is imported when it is used. A built-in one has its line here; `optimizers.register` and
`objectives.register` add the line of one that is defined elsewhere.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from maxghost.config.files import read_table

# {schedule: {what it cannot take: why}}; the names of `schedules.SCHEDULES`.
SCHEDULE_LACKS: dict[str, dict[str, str]] = read_table("schedules.yml")
SCHEDULES = ("two_pass", "reverse_scan", "concat")  # by rules; what an optimizer works with
RUN_SCHEDULES = (*SCHEDULES, "forward_mode")  # the values of ghost_schedule
ENGINES = {"graddotprod": "two_pass", "jvp": "forward_mode", "perexample": "per_example"}  # of `GhostEngine`


def scoring_problems(schedule: str, names: Mapping[str, str], asked: Mapping[str, tuple]) -> Iterator[str]:
  """A line for each of `asked`, {what: (whether, "key=value", instead)}, that the schedule, by `names`, cannot take.

  Other schedules are only named where they take all that is asked for.
  """
  wanted = {want for want, (asks, *_) in asked.items() if asks}
  able = " or ".join(name for other, name in names.items() if wanted.isdisjoint(SCHEDULE_LACKS[other]))
  for want, (asks, given, instead) in asked.items():
    if asks and want in SCHEDULE_LACKS[schedule]:
      other = f", or {able}" if able else ""
      yield f"{given} does not go with {names[schedule]}, {SCHEDULE_LACKS[schedule][want]}; use {instead}{other}"


@dataclasses.dataclass(frozen=True)
class Plugin:
  """target: "module:Class", or the class itself. The other fields are class variables of it, which it explains."""

  target: str | type
  schedules: tuple[str, ...] = SCHEDULES

  @classmethod
  def of(cls, plugin: type) -> Self:
    """The entry of a class."""
    return cls(plugin, *(getattr(plugin, field.name) for field in dataclasses.fields(cls)[1:]))

  def takes(self, schedule: str) -> bool:
    """Whether it works with a ghost_schedule, of which forward_mode has the passes of two_pass."""
    return schedule.replace("forward_mode", "two_pass") in self.schedules

  @property
  def is_own(self) -> bool:
    """Whether the class is the user's, not one of the package."""
    return not isinstance(self.target, str)

  def load(self) -> Any:
    if not isinstance(self.target, str):
      return self.target
    module, _, name = self.target.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclasses.dataclass(frozen=True)
class Optimizer(Plugin):
  """An update rule (`optimizers.UpdateRule`)."""

  direction: str | None = None
  columns: tuple[str, ...] = ()
  by_segment: bool = False
  elementwise: bool = False
  offers: tuple[str, ...] = ()


OF_STEP = ("path", "marginal")  # directions through the whole step as a function of the batch gradient
# Names of a step's other numbers, which no column of an optimizer may have; momentum and weight_decay are columns.
_TAKEN = {*read_table("score_log.yml")["units"], "exact", "last", "predicted"} - {"momentum", "weight_decay"}
_usual = {"columns": ("momentum", "weight_decay"), "by_segment": True, "elementwise": True, "offers": OF_STEP}
_own = functools.partial(Optimizer, **_usual)
OPTIMIZERS: dict[str, Optimizer] = {
  "adamw": _own("maxghost.optimizers.adamw:AdamW", direction="adam"),
  "sgd": _own("maxghost.optimizers.sgd:Sgd", direction="sgd"),
  "muon": _own("maxghost.optimizers.muon:Muon", direction="path", elementwise=False),
}


@dataclasses.dataclass(frozen=True)
class Objective(Plugin):
  """What a run minimises (`objectives.Objective`)."""

  rows_per_unit: int = 1
  records: str = "text"
  reference: str = ""
  perplexity: bool = True
  validated_by: str = ""
  samples: bool = False


_loss = functools.partial(Objective, schedules=("two_pass", "reverse_scan"), perplexity=False)
_pairs = functools.partial(_loss, rows_per_unit=2, records="pairs")
OBJECTIVES: dict[str, Objective] = {
  "next_token": Objective("maxghost.objectives.next_token:LanguageModelLoss"),
  "sft": Objective("maxghost.objectives.next_token:FineTuning", records="conversations"),
  "dpo": _pairs("maxghost.objectives.dpo:PreferenceLoss", reference="start"),
  "distill": _loss("maxghost.objectives.distill:Distillation", reference="teacher"),
  "grpo": _loss(
    "maxghost.objectives.grpo:PolicyLoss", records="conversations", reference="start", validated_by="sft", samples=True
  ),
  "margin": _pairs("maxghost.objectives.dpo:Margin"),
}
OF_VALIDATION = ("margin",)  # objectives of validation sets alone: nothing bounds them from below
# Losses on pairs (dpo_algo), and those of them that compare with no reference.
PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge", "robust", "simpo", "orpo")
WITHOUT_REFERENCE = ("simpo", "orpo")
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")  # of data that holds the reference's log-probabilities

# The plug-ins of each key.
KINDS: dict[str, dict[str, Any]] = {"opt_type": OPTIMIZERS, "objective": OBJECTIVES}


def directions() -> tuple[str, ...]:
  """The values of ghost_direction."""
  known = (None, "sgd", *OF_STEP)
  own = [str(optimizer.direction) for optimizer in OPTIMIZERS.values() if optimizer.direction not in known]
  return ("auto", "sgd", *own, *OF_STEP, "second_order")


def directed(direction: str, curvature: str) -> tuple[str, str]:
  """(ghost_direction, ghost_curvature), with what stands for ghost_direction=second_order."""
  return ("auto", "hessian") if direction == "second_order" else (direction, curvature)


def reweighting_parts(given: tuple[float, ...]) -> tuple[float, ...]:
  """(steps between two changes of the shares, 0 for never; size of a change; least share of a domain)."""
  return (*given, *(0.0, 0.2, 0.02)[len(given) :])


def ledger_columns(opt_type: str | None = None, qk_clip: bool = True) -> tuple[str, ...]:
  """The columns that the ledger of this optimizer (None: of any registered one) can have, in order."""
  own = dict.fromkeys(name for opt in ([opt_type] if opt_type else OPTIMIZERS) for name in OPTIMIZERS[opt].columns)
  return ("predicted_examples", *own, *(("qk_clip",) if qk_clip else ()), "unscored", "direction_residual")


def without_objective(text: str) -> tuple[str, str]:
  """(name=domain, objective) of an entry name=domain@objective of ghost_val_sets; the objective may be missing."""
  found = re.fullmatch(r"(.*)@(\w+)", text)
  return (found[1], found[2]) if found else (text, "")


def objectives_of(objective: str, val_sets: Sequence[str]) -> list[Objective]:
  """The objectives of training and of the entries of ghost_val_sets that name one; unknown names are left out."""
  named = {objective, *(without_objective(text)[1] for text in val_sets)}
  return [one for name, one in OBJECTIVES.items() if name in named]


def is_files(domain: str) -> bool:
  """Whether a validation set is given by a glob of files and not by a domain."""
  return any(sign in domain for sign in "/*.")


def describe(key: str, cls: type) -> None:
  """Gives a built-in class its name and what its line says of it, as class variables; no other class has a line."""
  for name, plugin in KINDS[key].items():
    if plugin.target == f"{cls.__module__}:{cls.__qualname__}":
      for field in dataclasses.fields(plugin)[1:]:
        setattr(cls, field.name, getattr(plugin, field.name))
      cls.name = name  # pyright: ignore


def register(key: str, cls: Any, base: type, entry: type[Plugin]) -> None:
  """Adds a class to the plug-ins of `key`. Raises ValueError for one that is not whole, or whose name is taken."""
  if not isinstance(cls, type) or not issubclass(cls, base):
    raise ValueError(f"{key}: {cls!r:.80} is no class that extends {base.__name__}")
  name, lacking = getattr(cls, "name", ""), sorted(getattr(cls, "__abstractmethods__", ()))
  if lacking or not isinstance(name, str) or not name:
    raise ValueError(f"{key}: {cls.__name__} needs {', '.join(lacking) or f'a text as its name, not {name!r}'}")
  plugin, table = entry.of(cls), KINDS[key]
  if not isinstance(given := plugin.schedules, tuple) or not set(given) <= set(SCHEDULES):
    raise ValueError(f"{key}: {cls.__name__}.schedules is {given!r}; give a tuple of {', '.join(SCHEDULES)}")
  if not isinstance(given := getattr(plugin, "columns", ()), tuple) or _TAKEN.intersection(given):
    raise ValueError(f"{key}: {cls.__name__}.columns is {given!r}; give a tuple of names that no step has")
  if not isinstance(given := getattr(plugin, "rows_per_unit", 1), int) or given < 1:
    raise ValueError(f"{key}: {cls.__name__}.rows_per_unit is {given!r}; give the number of rows, 1 or more")
  if (given := getattr(plugin, "records", "text")) not in (known := sorted({x.records for x in OBJECTIVES.values()})):
    raise ValueError(f"{key}: {cls.__name__}.records is {given!r}; give one of {', '.join(known)}")
  if name in table and table[name] != plugin:
    raise ValueError(f"{key}={name} is already {table[name].target}; give the other one a name of its own")
  table[name] = plugin


def direction_problem(direction: str, opt_type: str) -> str:
  """The error for a ghost_direction, auto or one of OF_STEP, that the optimizer does not offer; '' for all others."""
  able = lambda one: one.direction is not None if direction == "auto" else direction in one.offers  # noqa: E731
  if direction not in ("auto", *OF_STEP) or able(OPTIMIZERS[opt_type]):
    return ""
  what = f"credits the optimizer's whole step, which opt_type={opt_type} does not offer; use ghost_direction=auto"
  if direction == "auto":
    what = f"means the optimizer's own direction, but opt_type={opt_type} offers none; use ghost_direction=sgd (the "
    what += "plain validation gradient), ghost_enabled=false"
  offering = " or ".join(name for name, optimizer in OPTIMIZERS.items() if able(optimizer))
  return f"ghost_direction={direction} {what}, or opt_type={offering}"
