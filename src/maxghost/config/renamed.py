"""Keys that the schema does not have: former names, and MaxText's names for what maxghost calls otherwise.

One table, `OTHER`. MaxText's names may be typed everywhere and are folded into the keys of the schema; former names are
answered with the present ones, except in the saved configuration of a run, which keeps its meaning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxghost.config.errors import did_you_mean
from maxghost.config.values import WORDS

Values = Mapping[str, Any]


@dataclass(frozen=True)
class OtherKey:
  """answer: behind the name in an error, such as "is now steps". kind: the type of its value.

  fold(value, values): the changes of keys of the schema that the value asks for; values: those given by other keys.
  """

  answer: str
  kind: Any
  fold: Callable[[Any, Values], dict[str, Any]]
  maxtext: bool = False


def _nothing(value: Any, values: Values) -> dict[str, Any]:
  return {}


def _files(kind: str) -> Callable[[Any, Values], dict[str, Any]]:
  return lambda value, values: {"dataset_files": value} if value and values["dataset_type"] == kind else {}


def _offload(what: str, asked: Any) -> Callable[[Any, Values], dict[str, Any]]:
  def fold(value: Any, values: Values) -> dict[str, Any]:
    held = dict.fromkeys((*values["offload_to_host"], *((what,) if value == asked else ())))
    return {"offload_to_host": tuple(name for name in ("weights", "optimizer", "carries") if name in held)}

  return fold


def _validation_domain(value: str, values: Values) -> dict[str, Any]:
  return {"ghost_val_sets": (value,)} if value != "manual" and not values["ghost_val_sets"] else {}


def _mixture(value: tuple[str, ...], values: Values) -> dict[str, Any]:
  end = "x" if values["dataset_mixture"] == ("epochs",) else ""
  return {"dataset_mixture": tuple(text + end for text in value)}


def _reweighting(place: int) -> Callable[[Any, Values], dict[str, Any]]:
  def fold(value: Any, values: Values) -> dict[str, Any]:
    held = values["ghost_reweight"]
    return {"ghost_reweight": (*held[:place], float(value))} if held else {}

  return fold


def _slices(value: int, values: Values) -> dict[str, Any]:
  one = values["compile_topology"]
  return {"compile_topology": f"{value}x{one}"} if value > 1 and one else {}


_TEXTS = tuple[str, ...]
_PROCESS = "is now jax_distributed=HOST:PORT,K/N, process K of N with process 0 at HOST:PORT"
_REWEIGHT = "is now part of ghost_reweight=[steps, size, floor]"
_GENERATE = "samples during training have 64 tokens at temperature 0.7; see `maxghost generate` for others"
OTHER: dict[str, OtherKey] = {
  "stream_weights": OtherKey("is now offload_to_host=[weights]", str, _offload("weights", "host")),
  "stream_optimizer": OtherKey("is now offload_to_host=[optimizer]", str, _offload("optimizer", "host")),
  "ghost_stream_carries": OtherKey("is now offload_to_host=[carries]", str, _offload("carries", "host")),
  "segment_length": OtherKey(
    "is now segment_lengths, which takes a number too", int, lambda k, _: {"segment_lengths": (k,)} if k else {}
  ),
  "text_files": OtherKey("is now dataset_files, with dataset_type=text", _TEXTS, _files("text")),
  "dataset_weights": OtherKey(
    "is now dataset_mixture: [a=0.25,b=0.75] for shares of the rows, [a=2x,b=1x] for passes per epoch", _TEXTS, _mixture
  ),
  "ghost_val_domain": OtherKey("is now ghost_val_sets, which takes one domain too", str, _validation_domain),
  "ghost_reweight_every": OtherKey(_REWEIGHT, int, _reweighting(0)),
  "ghost_reweight_step": OtherKey(_REWEIGHT, float, _reweighting(1)),
  "ghost_reweight_floor": OtherKey(_REWEIGHT, float, _reweighting(2)),
  "sample_tokens": OtherKey(f"is no key any more: {_GENERATE}", int, _nothing),
  "sample_temperature": OtherKey(f"is no key any more: {_GENERATE}", float, _nothing),
  # Where a process stood says nothing of the next start.
  "jax_distributed_coordinator_address": OtherKey(_PROCESS, str, _nothing),
  "jax_distributed_num_processes": OtherKey(_PROCESS, int, _nothing),
  "jax_distributed_process_id": OtherKey(_PROCESS, int, _nothing),
  # MaxText's names.
  "jax_distributed_initialization_timeout": OtherKey(
    "is jax_distributed_timeouts", int, lambda s, values: _timeouts(values, start=s), maxtext=True
  ),
  "jax_distributed_heartbeat_timeout_seconds": OtherKey(
    "is jax_distributed_timeouts", int, lambda s, values: _timeouts(values, heartbeat=s), maxtext=True
  ),
  "skip_jax_distributed_system": OtherKey(
    "is jax_distributed=off", bool, lambda skip, _: {"jax_distributed": "off"} if skip else {}, maxtext=True
  ),
  "grain_train_files": OtherKey("is dataset_files, with dataset_type=grain", _TEXTS, _files("grain"), maxtext=True),
  "hf_path": OtherKey("is dataset_files, with dataset_type=hf", _TEXTS, _files("hf"), maxtext=True),
  "dataset_name": OtherKey("is dataset_files, with dataset_type=tfds", _TEXTS, _files("tfds"), maxtext=True),
  "grain_packing_type": OtherKey(
    "is packing", str, lambda how, values: {"packing": how} if values["packing"] != "none" else {}, maxtext=True
  ),
  "enable_checkpointing": OtherKey(
    "is checkpoint_period, 0 for no checkpoints",
    bool,
    lambda on, _: {} if on else {"checkpoint_period": 0},
    maxtext=True,
  ),
  "enable_dropout": OtherKey("is dropout_rate", bool, lambda on, _: {} if on else {"dropout_rate": 0.0}, maxtext=True),
  "parameter_memory_host_offload": OtherKey(
    "is offload_to_host=[weights]", bool, _offload("weights", True), maxtext=True
  ),
  "optimizer_memory_host_offload": OtherKey(
    "is offload_to_host=[optimizer]", bool, _offload("optimizer", True), maxtext=True
  ),
  "compile_topology_num_slices": OtherKey("is compile_topology=2xv5e-16", int, _slices, maxtext=True),
  "ici_pipeline_parallelism": OtherKey(
    "is ici_stage_parallelism", int, lambda n, _: {"ici_stage_parallelism": n}, maxtext=True
  ),
  "dcn_pipeline_parallelism": OtherKey(
    "is dcn_stage_parallelism", int, lambda n, _: {"dcn_stage_parallelism": n}, maxtext=True
  ),
}

# Values that are read as others: {key: {text: text}}.
SYNONYMS: dict[str, dict[str, str]] = {
  "packing": {text: "first_fit" if on else "none" for text, on in WORDS.items()},
  "ghost_reweight": {"true": "20", "false": ""},
  "dataset_mixture": {"proportional": ""},
  "max_num_checkpoints_to_keep": {"none": "0"},
}


def _timeouts(values: Values, start: int | None = None, heartbeat: int | None = None) -> dict[str, Any]:
  first, second = values["jax_distributed_timeouts"]
  return {"jax_distributed_timeouts": (start or first, heartbeat or second)}


def unknown(key: str, known: Mapping[str, Any], origin: str = "") -> str:
  """What is wrong with a key that the schema does not have: its present name, or the nearest valid ones."""
  where = f" ({origin})" if origin else ""
  if key in OTHER:
    return f"key '{key}'{where} {OTHER[key].answer}"
  return f"unknown key '{key}'{where}{did_you_mean(key, known)}"
