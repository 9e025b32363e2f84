"""Keys that the schema does not have: former names of keys, and MaxText's names for what maxghost calls otherwise.

`OTHER` holds both, from configs/renamed.yml. MaxText's names may be given anywhere and are folded into the keys of the
schema. Former names are errors that name the present key, except in the saved configuration of a run, which keeps its
meaning.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from maxghost.config.errors import did_you_mean
from maxghost.config.files import read_table
from maxghost.config.values import WORDS

Values = Mapping[str, Any]
Fold = Callable[[Any, Values], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class OtherKey:
  """A key that the schema does not have.

  Attributes:
    answer: What follows the name in an error, such as "is now steps".
    kind: The type of its value.
    fold: Of (value, values of the other keys): the keys of the schema that the value changes.
    maxtext: Whether it is a key of MaxText, which may be given anywhere.
  """

  answer: str
  kind: Any
  fold: Fold
  maxtext: bool


def _files(kind: str) -> Fold:
  return lambda value, values: {"dataset_files": value} if value and values["dataset_type"] == kind else {}


def _offload(what: str, asked: Any) -> Fold:
  def fold(value: Any, values: Values) -> dict[str, Any]:
    held = (*values["offload_to_host"], *((what,) if value == asked else ()))
    return {"offload_to_host": tuple(name for name in ("weights", "optimizer", "carries") if name in held)}

  return fold


def _item(key: str, place: int, unset: Any = None) -> Fold:
  """One item of a list that is set."""

  def fold(value: Any, values: Values) -> dict[str, Any]:
    held = values[key]
    if not held or value == unset:
      return {}
    return {key: (*held[:place], type(held[0])(value), *held[place + 1 :])}

  return fold


def _validation_domain(value: str, values: Values) -> dict[str, Any]:
  return {"ghost_val_sets": (value,)} if value != "manual" and not values["ghost_val_sets"] else {}


def _validation_files(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  given = {text.partition("=")[0]: text for text in value}
  return {"ghost_val_sets": tuple(given.get(text, text) for text in values["ghost_val_sets"])} if value else {}


def _mixture(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  end = "x" if values["dataset_mixture"] == ("epochs",) else ""
  return {"dataset_mixture": tuple(text + end for text in value)}


def _slices(value: int, values: Values) -> dict[str, Any]:
  one = values["compile_topology"]
  return {"compile_topology": f"{value}x{one}"} if value > 1 and one else {}


_FOLDS: dict[str, Fold] = {
  "stream_weights": _offload("weights", "host"),
  "stream_optimizer": _offload("optimizer", "host"),
  "ghost_stream_carries": _offload("carries", "host"),
  "segment_length": lambda k, _: {"segment_lengths": (k,)} if k else {},
  "text_files": _files("text"),
  "dataset_weights": _mixture,
  "ghost_val_domain": _validation_domain,
  "ghost_reweight_every": _item("ghost_reweight", 0),
  "ghost_reweight_step": _item("ghost_reweight", 1),
  "ghost_reweight_floor": _item("ghost_reweight", 2),
  "ghost_select_threshold": lambda n, held: {"ghost_select_fraction": n} if held["ghost_select"] == "threshold" else {},
  "ghost_val_files": _validation_files,
  "jax_distributed_initialization_timeout": _item("jax_distributed_timeouts", 0, unset=0),
  "jax_distributed_heartbeat_timeout_seconds": _item("jax_distributed_timeouts", 1, unset=0),
  "grain_train_files": _files("grain"),
  "hf_path": _files("hf"),
  "dataset_name": _files("tfds"),
  "grain_packing_type": lambda way, held: {"packing": way} if held["packing"] != "none" else {},
  "parameter_memory_host_offload": _offload("weights", True),
  "optimizer_memory_host_offload": _offload("optimizer", True),
  "compile_topology_num_slices": _slices,
  "enable_wandb": lambda on, held: {"trackers": (*held["trackers"], "wandb")} if on else {},
  "ici_pipeline_parallelism": lambda n, _: {"ici_stage_parallelism": n},
  "dcn_pipeline_parallelism": lambda n, _: {"dcn_stage_parallelism": n},
}


def _fold(name: str, asked: Any = None, changed: Mapping[str, Any] | None = None) -> Fold:
  """What a key changes: as `_FOLDS` says, else the keys of its row where the value is the one of its row."""
  return _FOLDS.get(name) or (lambda value, values: dict(changed or {}) if value == asked else {})


_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "texts": tuple[str, ...]}
OTHER = {
  name: OtherKey(answer, _TYPES[kind], _fold(name, *rest), group == "maxtext")
  for group, rows in read_table("renamed.yml").items()
  for name, (kind, answer, *rest) in rows.items()
}

# Values that are read as others: {key: {text: text}}.
SYNONYMS: dict[str, dict[str, str]] = {
  "packing": {text: "first_fit" if on else "none" for text, on in WORDS.items()},
  "ghost_reweight": {"true": "20", "false": ""},
  "dataset_mixture": {"proportional": ""},
  "max_num_checkpoints_to_keep": {"none": "0"},
}


_MOST_LINES = 10  # of errors about keys that only MaxText has
_FOREIGN = " is a MaxText key that maxghost does not have"


@functools.cache
def _maxtext() -> dict[str, Any]:
  """configs/maxtext/keys.yml: MaxText's keys that the schema lacks, and what to say of some of them."""
  return read_table("maxtext/keys.yml")


def asks_for_nothing(key: str, text: Any) -> bool:
  """Whether a key of MaxText has a value that changes nothing here; a value that is no text is never one."""
  if not isinstance(text, str):
    return False
  plain = text.strip().lower().removesuffix(".0")
  same: dict[str, str] = _maxtext()["same"]
  return any(key in same[value].split() for value in ("*", "" if plain == "none" else plain) if value in same)


def unknown(key: str, known: Mapping[str, Any], origin: str = "") -> str:
  """The error for a key that the schema does not have: its present name, MaxText's, or the nearest valid ones."""
  where = f" ({origin})" if origin else ""
  if key in OTHER:
    return f"key '{key}'{where} {OTHER[key].answer}"
  if key in _maxtext()["lacking"].split():
    instead = next((f"; {what}" for what, keys in _maxtext()["instead"].items() if key in keys.split()), "")
    return f"'{key}'{where}{_FOREIGN}{instead}"
  return f"unknown key '{key}'{where}{did_you_mean(key, known)}"


def shortened(problems: list[str]) -> list[str]:
  """The problems, with many keys that only MaxText has on one line: a base.yml of MaxText holds hundreds."""
  foreign = [text for text in problems if _FOREIGN in text]
  if len(foreign) <= _MOST_LINES:
    return problems
  names = ", ".join(text.split("'")[1] for text in foreign[:_MOST_LINES])
  line = (
    f"{len(foreign)} keys are MaxText keys that maxghost does not have: {names}, ...; a file needs only the keys that "
    "it changes (docs/from-maxtext.md)"
  )
  return [line, *(text for text in problems if _FOREIGN not in text)]
