"""What a run says about the memory of its step: the closed form, what XLA allocates, what to do if it is too much."""

import os
from collections.abc import Mapping

import jax
from flax import nnx

from maxghost.config import Config
from maxghost.parallel.memory_estimate import MemoryEstimate, compiled_sizes, estimate, shown
from maxghost.parallel.memory_verdict import advice, verdict
from maxghost.parallel.shardings import slash_path


def estimate_of(cfg: Config, state: nnx.State, mesh_shape: Mapping[str, int] | None = None) -> MemoryEstimate:
  """The estimate for a train state's own parameters. state: of a TrainStateNNX, abstract or not."""
  params = nnx.to_flat_state(nnx.filter_state(state, nnx.Param))
  parameters = {
    slash_path(path[1:]): (v.get_value().shape, v.get_metadata().get("axes") or (None,) * v.get_value().ndim)
    for path, v in params
    if path[0] == "model"
  }
  return estimate(cfg, mesh_shape, parameters)


def capacity(device: jax.Device) -> int | None:
  """Bytes that a step may use on the device: what its allocator says, on CPU its share of the machine's memory, else
  None."""
  limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
  if limit is None and device.platform == "cpu" and hasattr(os, "sysconf"):
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
  return limit


def start_lines(estimated: MemoryEstimate, limit: int | None) -> list[str]:
  """The table and the verdict, before anything is compiled."""
  lines = estimated.table()
  return lines if limit is None else [*lines, *verdict(estimated, limit).splitlines()]


def compiled_line(estimated: MemoryEstimate, analysis) -> str:
  """The closed form beside XLA's `memory_analysis()` of the compiled step."""
  return estimated.beside(compiled_sizes(analysis))


def too_large(error: Exception, estimated: MemoryEstimate, limit: int | None) -> str:
  """XLA's words on an allocation that failed, and what to change."""
  lines = str(error).splitlines() or ["RESOURCE_EXHAUSTED"]
  words = next((line.strip() for line in lines if "exceeds" in line), lines[0])
  return "\n".join([f"out of device memory: {words}", *shortage(estimated, limit)])


def shortage(estimated: MemoryEstimate, limit: int | None) -> list[str]:
  """What to change where XLA needs more than there is: the verdict, or, where the estimate is that it fits, how to need
  a fifth less than estimated."""
  if limit is not None and estimated.total > limit:
    return verdict(estimated, limit).splitlines()
  less = int(0.8 * estimated.total)
  head = f"memory: the estimate is {shown(estimated.total)}, and XLA needs more; to need a fifth less:"
  return [head, *advice(estimated, less)]
