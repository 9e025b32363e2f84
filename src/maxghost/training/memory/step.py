"""Bytes of one train step on one device, from the abstract objects of the run, before anything is compiled.

The estimate is the maximum over the backward pass of one layer, that of the output head, and the update.
"""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from maxghost import config
from maxghost.config import Config, ConfigError
from maxghost.config.schema import ParallelConfig
from maxghost.parallel import Layout
from maxghost.training import state
from maxghost.training.memory.activations import Activations
from maxghost.training.memory.device import Device, PlacedState
from maxghost.training.memory.directions import Directions
from maxghost.training.memory.table import MemoryEstimate, Row, Tensor

Split = tuple[nnx.GraphDef, nnx.State]

# Keys that change neither the shapes nor the shardings of the train state.
_OF_THE_STEP = {
  "attention", "num_vocab_tiling", "remat_policy", "segment_lengths", "ghost_schedule", "ghost_rank",
  "per_device_batch_size", "gradient_accumulation_steps", "max_target_length",
}  # fmt: skip


def estimate(
  cfg: Config, layout: Layout | None = None, split: Split | None = None, build: Callable = state.abstract_split
) -> MemoryEstimate:
  """Bytes per device of one train step.

  layout: of the run's devices; None: one device. build(cfg) -> (graphdef, abstract state) of the `TrainStateNNX`.
  split: its result, if known. Raises ConfigError for a model that cannot be scored.
  """
  placed = functools.partial(PlacedState, layout or Layout.of(ParallelConfig(), jax.devices()[:1]))
  states = {} if split is None else {_state_keys(cfg): placed(split)}
  return _estimate(cfg, states, lambda cfg: placed(build(cfg)))


def _estimate(cfg: Config, states: dict[str, PlacedState], build: Callable[[Config], PlacedState]) -> MemoryEstimate:
  """As `estimate`. states: a cache by `_state_keys`."""
  keys = _state_keys(cfg)
  try:
    if keys not in states:
      states[keys] = build(cfg)
    device = Device(cfg, states[keys])
  except ValueError as error:  # a parameter without a rule, a pattern that matches nothing, a rank that saves nothing
    raise ConfigError(str(error)) from error
  directions = Directions(device)
  activations = Activations(device, directions.walks_back, directions.in_turn)
  moments = _moments(device, activations, directions.rows(activations))
  name, rows = max(moments.items(), key=lambda item: sum(row.bytes for row in item[1]))

  def change(**keys) -> MemoryEstimate | None:
    try:
      return _estimate(config.replace(cfg, **keys), states, build)
    except ConfigError:
      return None

  walk = directions.walk(activations.layers_at_once)
  return MemoryEstimate(tuple(rows), name, device.resident, device.host_bytes, activations.tokens, cfg, change, walk)


def _state_keys(cfg: Config) -> str:
  """The settings that the train state depends on."""
  return repr([item for item in cfg.flat().items() if item[0] not in _OF_THE_STEP])


def _moments(device: Device, activations: Activations, scores: list[Row]) -> dict[str, list[Row]]:
  """{moment of the step: memory at that moment}."""
  model, also = device.cfg.model, [*scores, *_buffers(device)]
  segments = _segments(device)
  streamed = segments if "weights" in model.offload_to_host else []
  out = {"the update": [*device.resident, _gradients(device, streamed), *also]}
  if device.num_layers:
    layers = [_gradients(device, segments), *activations.in_layers()]
    out["the backward pass of a layer"] = [*device.resident, *layers, *also]
  if (table := device.output_table) is not None:
    out["the backward pass of the head"] = [*device.resident, *activations.in_head(table), *also]
  return out


def _segments(device: Device) -> list[Tensor]:
  """Weights and gradients of the current segments, which are separate arrays in a loop over the layers of a segment."""
  model = device.cfg.model
  layer = device.elements(True) // model.base_num_decoder_layers
  tensors = [
    Tensor((2, length * layer), model.weight_dtype, f"weights of a segment of {length} layers, and their gradient")
    for length in model.segment_lengths
  ]
  if "weights" in model.offload_to_host:
    why = "weights of the next segment, on their way from the host"
    tensors.append(Tensor((model.segment_lengths[0] * layer,), model.weight_dtype, why))
  return tensors


def _gradients(device: Device, segments: list[Tensor]) -> Row:
  model, accumulates = device.cfg.model, device.cfg.optimizer.gradient_accumulation_steps > 1
  held = device.elements(False if "weights" in model.offload_to_host else None)
  tensors = [Tensor((held,), "float32" if accumulates else model.weight_dtype, "gradient of the step")]
  if accumulates:
    tensors.append(Tensor((held,), model.weight_dtype, "gradient of one micro-batch"))
  return Row("gradients", (*tensors, *segments))


def _buffers(device: Device) -> list[Row]:
  """Weights gathered for one layer, and its gradient before it is scattered."""
  stacked = [v for v in device.params.values() if v.stacked]
  gathered = sum(v.gathered - v.elements for v in stacked) // device.cfg.model.base_num_decoder_layers
  if not gathered:
    return []
  why = "weights of one layer, gathered, and their gradient"
  return [Row("collectives' buffers", (Tensor((gathered,), device.cfg.model.weight_dtype, why, 2),))]
