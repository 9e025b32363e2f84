"""The keys of a pipeline over mesh axis stage, checked together."""

import math
from collections.abc import Iterator
from typing import Any

from maxghost.config.values import divisors

KEYS = ("num_layers_per_pipeline_stage", "num_pipeline_repeats", "num_pipeline_microbatches")
STAGES = ("ici_stage_parallelism", "dcn_stage_parallelism")


def split(num_layers: int, stages: int, per_stage: int, repeats: int) -> tuple[int, str]:
  """(repeats, what is wrong or ''): num_layers = stages x per_stage x repeats. -1: what the others leave.

  With both open there is one repeat.
  """
  if repeats == -1 and per_stage != -1:
    rounds, left = divmod(num_layers, stages * per_stage)
  else:
    rounds = max(repeats, 1)
    left = num_layers % (stages * rounds) or (per_stage != -1 and num_layers != stages * rounds * per_stage)
  if rounds and not left:
    return rounds, ""
  given = {key: value for key, value in zip(KEYS, (per_stage, repeats), strict=False) if value > 0}
  if num_layers % stages:
    able = [n for n in divisors(num_layers) if n > 1]
    fits = [n for n in able if split(num_layers, n, per_stage, repeats)[0]]
    use = f"{' or '.join(map(str, fits or able))} stages" if able else "one stage"
    use += f" without {' and '.join(given)}" if given and not fits else ""
    return 0, f"{num_layers} stacked layers do not divide over {stages} stages; use {use}"
  ways = [f"{k} with {num_layers // stages // k}" for k in divisors(num_layers // stages)]
  said = " x ".join([f"{stages} stages", *(f"{key}={value}" for key, value in given.items())])
  return 0, f"{num_layers} stacked layers are not {said}; use {KEYS[0]} with {KEYS[1]}: {', or '.join(ways[:4])}"


def layers_problem(model: Any, keys: Any) -> str:
  """What is wrong, or '', with the layers of a model on the stages that `keys` name. Both: values of keys."""
  layers, cycle = model.base_num_decoder_layers, model.inhomogeneous_layer_cycle_interval
  stages = keys.ici_stage_parallelism * keys.dcn_stage_parallelism
  given = keys.num_layers_per_pipeline_stage, keys.num_pipeline_repeats
  if stages == 1 or not model.scan_layers or not (problem := split(layers // cycle, stages, *given)[1]):
    return ""
  named = " x ".join(f"{key}={getattr(keys, key)}" for key in STAGES if getattr(keys, key) > 1)
  return f"{named}, base_num_decoder_layers={layers}{f' in cycles of {cycle}' if cycle > 1 else ''}: {problem}"


def check(v: Any) -> Iterator[str]:
  """Problems of a pipeline with the layers, the rows and what else a run asks for."""
  ici, dcn = v.ici_stage_parallelism, v.dcn_stage_parallelism
  for key in KEYS:
    if getattr(v, key) == 0:
      usual = "as many as stages" if key == KEYS[2] else "what is left"
      yield f"{key}=0 is no number; use -1 for {usual}, or 1 or more"
      return
  for key, size in zip(STAGES, (ici, dcn), strict=True):
    if size == -1:
      yield f"{key}=-1 leaves open how layers are cut into stages; give it a number, such as 2"
  if min(ici, dcn) < 1:
    return
  if (stages := ici * dcn) == 1:
    for key in KEYS:
      if getattr(v, key) not in (-1, 1):
        yield f"{v[key]} is for a pipeline; set ici_stage_parallelism to its stages, such as 2, or leave {key} out"
    return
  if problem := layers_problem(v, v):
    given = [getattr(v, key) for key in KEYS[:2]]
    whole = stages * v.inhomogeneous_layer_cycle_interval * math.prod(max(number, 1) for number in given)
    below = v.base_num_decoder_layers // whole * whole
    fits = [str(number) for number in (below, below + whole) if number] if min(given) < 0 else [str(whole)]
    yield f"{problem}, or base_num_decoder_layers={' or '.join(fits)}"
  yield from _rows(v, stages)
  yield from _refused(v, stages)


def _rows(v: Any, stages: int) -> Iterator[str]:
  """Micro-batches against stages and against the rows of the devices that share a micro-batch."""
  micro = stages if v.num_pipeline_microbatches == -1 else v.num_pipeline_microbatches
  if micro < stages:
    least = f"{v[KEYS[2]]} is less than the {stages} stages, of which some would always wait"
    yield f"{least}; use {stages} or more, such as {stages * v.per_device_batch_size}"
    return
  others = (f"{group}_{axis}_parallelism" for axis in ("tensor", "context") for group in ("ici", "dcn"))
  together = stages * math.prod(getattr(v, name) for name in others)  # below 1: `check_layout` knows the sizes
  if together > 0 and (problem := rows_problem(v.per_device_batch_size, together, stages, micro)):
    yield problem


def rows_problem(per_device: int, together: int, stages: int, num_micro: int) -> str:
  """What is wrong, or '', with the rows of `together` devices, which no others share, in so many micro-batches."""
  if (rows := per_device * together) % num_micro == 0:
    return ""
  fits = [str(m) for m in divisors(rows) if m >= stages]
  batch = per_device + -per_device % (num_micro // math.gcd(together, num_micro))
  given = f"per_device_batch_size={per_device} makes {rows} rows for {together} devices that work on the same ones"
  use = f"num_pipeline_microbatches={' or '.join(fits[:4])}, or " if fits else ""
  return f"{given}, which do not divide into {num_micro} micro-batches; use {use}per_device_batch_size={batch}"


def _refused(v: Any, stages: int) -> Iterator[str]:
  """What does not go with a pipeline."""
  wrong = {
    "scan_layers": (not v.scan_layers, "has no stack that stages could share", "true"),
    "segment_lengths": (bool(v.segment_lengths), "cuts the layers into segments of one device", "[]"),
    "offload_to_host": (bool({*v.offload_to_host} - {"val_gradient"}), "moves segments of layers of one device", "[]"),
    "enable_diloco": (v.enable_diloco, "trains slices apart, each with all layers", "false"),
    "dropout_rate": (v.dropout_rate > 0, "would draw other masks for each micro-batch", "0.0"),
    "lora_dropout": (v.lora_dropout > 0, "would draw other masks for each micro-batch", "0.0"),
  }
  makes = " x ".join(key for key in STAGES if getattr(v, key) > 1)
  for key, (asks, why, instead) in wrong.items():
    if asks:
      yield f"{v[key]} {why}, and {makes} makes {stages} stages; use {key}={instead}, or one stage"
