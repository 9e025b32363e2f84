"""Messages on the memory of a step: the estimate, XLA's allocation, and suggestions if it is too much."""

import os
from typing import Any

import jax

from maxghost.config import ConfigError
from maxghost.training.memory.table import MemoryEstimate, shown
from maxghost.training.memory.verdict import advice, remedies, verdict

# Times the memory of a device. The estimate is within a tenth of the TPU compiler's figure for dense models; it is
# rough on CPU and for small programs.
CLEARLY_TOO_MUCH = 1.5


def capacity(device: Any) -> int | None:
  """Bytes that a step may use on a `jax.Device`: its allocator's limit, or on CPU its share of the machine's memory."""
  limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
  if limit is None and device.platform == "cpu" and hasattr(os, "sysconf"):
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
  return limit


def check(estimated: MemoryEstimate, limit: int | None) -> None:
  """Raises ConfigError, with settings to change, if the step needs clearly more than the `capacity`."""
  if limit is None or estimated.total <= CLEARLY_TOO_MUCH * limit:
    return
  steps = remedies(estimated, limit)
  way = "more devices, or a smaller model"
  if steps:
    way = " ".join(keys for keys, _, _ in steps) + f", which is estimated to need {shown(steps[-1][2].total)}"
  raise ConfigError(
    f"the step is estimated to need {shown(estimated.total)} per device, which has {shown(limit)}; use {way}; "
    "--force starts it all the same"
  )


def start_lines(estimated: MemoryEstimate, limit: int | None) -> list[str]:
  """The table and the verdict, before anything is compiled."""
  lines = estimated.table()
  return lines if limit is None else [*lines, *verdict(estimated, limit).splitlines()]


def too_large(error: Exception, estimated: MemoryEstimate, limit: int | None) -> str:
  """XLA's message on a failed allocation, and settings to change."""
  lines = str(error).splitlines() or ["RESOURCE_EXHAUSTED"]
  words = next((line.strip() for line in lines if "exceeds" in line), lines[0])
  return "\n".join([f"out of device memory: {words}", *shortage(estimated, limit)])


def shortage(estimated: MemoryEstimate, limit: int | None) -> list[str]:
  """Settings to change if XLA needs too much: the verdict, or, if the estimate fits, how to need a fifth less."""
  if limit is not None and estimated.total > limit:
    return verdict(estimated, limit).splitlines()
  less = int(0.8 * estimated.total)
  head = f"memory: the estimate is {shown(estimated.total)}, and XLA needs more; to need a fifth less:"
  return [head, *advice(estimated, less)]
