"""Keys that the schema does not have: former names of keys, and MaxText's names for what maxghost calls otherwise.

`OTHER` holds both. MaxText's names may be given anywhere and are folded into the keys of the schema. Former names are
errors that name the present key, except in the saved configuration of a run, which keeps its meaning.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from maxghost.config.errors import did_you_mean
from maxghost.config.files import config_dir
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
  fold: Fold = lambda value, values: {}
  maxtext: bool = False


def _where(asked: Any, key: str, changed: Any) -> Fold:
  return lambda value, values: {key: changed} if value == asked else {}


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


def _validation_files(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  given = {text.partition("=")[0]: text for text in value}
  return {"ghost_val_sets": tuple(given.get(text, text) for text in values["ghost_val_sets"])} if value else {}


def _mixture(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  end = "x" if values["dataset_mixture"] == ("epochs",) else ""
  return {"dataset_mixture": tuple(text + end for text in value)}


def _slices(value: int, values: Values) -> dict[str, Any]:
  one = values["compile_topology"]
  return {"compile_topology": f"{value}x{one}"} if value > 1 and one else {}


_TEXTS = tuple[str, ...]
_PROCESS = "is now jax_distributed=HOST:PORT,K/N, process K of N with process 0 at HOST:PORT"
_REWEIGHT = "is now part of ghost_reweight=[steps, size, floor]"
_GENERATE = "is no key any more: samples during training have 64 tokens at temperature 0.7; see `maxghost generate`"
_MIXTURE = "is now dataset_mixture: [a=0.25,b=0.75] for shares of the rows, [a=2x,b=1x] for passes per epoch"
_ENGINE = "is now part of ghost_schedule: forward_mode for jvp"
_FORMER = {
  "stream_weights": OtherKey("is now offload_to_host=[weights]", str, _offload("weights", "host")),
  "stream_optimizer": OtherKey("is now offload_to_host=[optimizer]", str, _offload("optimizer", "host")),
  "ghost_stream_carries": OtherKey("is now offload_to_host=[carries]", str, _offload("carries", "host")),
  "segment_length": OtherKey(
    "is now segment_lengths, which takes a number too", int, lambda k, _: {"segment_lengths": (k,)} if k else {}
  ),
  "text_files": OtherKey("is now dataset_files, with dataset_type=text", _TEXTS, _files("text")),
  "dataset_weights": OtherKey(_MIXTURE, _TEXTS, _mixture),
  "ghost_val_domain": OtherKey(
    "is now ghost_val_sets, which takes one domain too",
    str,
    lambda name, held: {"ghost_val_sets": (name,)} if name != "manual" and not held["ghost_val_sets"] else {},
  ),
  "ghost_reweight_every": OtherKey(_REWEIGHT, int, _item("ghost_reweight", 0)),
  "ghost_reweight_step": OtherKey(_REWEIGHT, float, _item("ghost_reweight", 1)),
  "ghost_reweight_floor": OtherKey(_REWEIGHT, float, _item("ghost_reweight", 2)),
  "ghost_select_threshold": OtherKey(
    "is now ghost_select_fraction",
    float,
    lambda share, held: {"ghost_select_fraction": share} if held["ghost_select"] == "threshold" else {},
  ),
  "ghost_val_files": OtherKey("is now part of ghost_val_sets: name=glob", _TEXTS, _validation_files),
  "ghost_engine": OtherKey(_ENGINE, str, _where("jvp", "ghost_schedule", "forward_mode")),
  "normalization_layer_type": OtherKey("is no key any more: decoder_block=gpt2 has layer_norm", str),
  "sample_tokens": OtherKey(_GENERATE, int),
  "sample_temperature": OtherKey(_GENERATE, float),
  # Where a process stood says nothing of the next start.
  "jax_distributed_coordinator_address": OtherKey(_PROCESS, str),
  "jax_distributed_num_processes": OtherKey(_PROCESS, int),
  "jax_distributed_process_id": OtherKey(_PROCESS, int),
}
_TIMEOUTS = "is jax_distributed_timeouts"
_CHECKPOINTS = "is checkpoint_period, 0 for no checkpoints"
_MAXTEXT = {
  "jax_distributed_initialization_timeout": OtherKey(_TIMEOUTS, int, _item("jax_distributed_timeouts", 0, unset=0)),
  "jax_distributed_heartbeat_timeout_seconds": OtherKey(_TIMEOUTS, int, _item("jax_distributed_timeouts", 1, unset=0)),
  "skip_jax_distributed_system": OtherKey("is jax_distributed=off", bool, _where(True, "jax_distributed", "off")),
  "grain_train_files": OtherKey("is dataset_files, with dataset_type=grain", _TEXTS, _files("grain")),
  "hf_path": OtherKey("is dataset_files, with dataset_type=hf", _TEXTS, _files("hf")),
  "dataset_name": OtherKey("is dataset_files, with dataset_type=tfds", _TEXTS, _files("tfds")),
  "grain_packing_type": OtherKey(
    "is packing", str, lambda way, held: {"packing": way} if held["packing"] != "none" else {}
  ),
  "enable_checkpointing": OtherKey(_CHECKPOINTS, bool, _where(False, "checkpoint_period", 0)),
  "enable_dropout": OtherKey("is dropout_rate", bool, _where(False, "dropout_rate", 0.0)),
  "parameter_memory_host_offload": OtherKey("is offload_to_host=[weights]", bool, _offload("weights", True)),
  "optimizer_memory_host_offload": OtherKey("is offload_to_host=[optimizer]", bool, _offload("optimizer", True)),
  "compile_topology_num_slices": OtherKey("is compile_topology=2xv5e-16", int, _slices),
  "routed_bias": OtherKey("is mlp_bias", bool, _where(True, "mlp_bias", True)),
  "ici_pipeline_parallelism": OtherKey("is ici_stage_parallelism", int, lambda n, _: {"ici_stage_parallelism": n}),
  "dcn_pipeline_parallelism": OtherKey("is dcn_stage_parallelism", int, lambda n, _: {"dcn_stage_parallelism": n}),
}
OTHER = _FORMER | {name: dataclasses.replace(other, maxtext=True) for name, other in _MAXTEXT.items()}

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
  return yaml.safe_load((config_dir() / "maxtext" / "keys.yml").read_text("utf-8"))


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
