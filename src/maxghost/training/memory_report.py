"""The memory estimate of a step: its tensors, the printed table, and advice if it exceeds a device's memory."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.config import Config, ConfigError

SHORT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "s32"}
# Multiple of a device's memory. The estimate is within a tenth of the TPU compiler's for most models, rough on CPU.
CLEARLY_TOO_MUCH = 1.5


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One array on one device. why: its description and purpose."""

  shape: tuple[int, ...]
  dtype: str
  why: str
  count: int = 1

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize * self.count

  def describe(self) -> str:
    many = f"{self.count} x " if self.count > 1 else ""
    dtype, shape = SHORT_NAMES.get(self.dtype, self.dtype), ",".join(map(str, self.shape))
    return f"{many}{dtype}[{shape}] {shown(self.bytes)}: {self.why}"


Rows = dict[str, list[Tensor]]  # {row of the table: the arrays of one kind}


def num_bytes(tensors: Iterable[Tensor]) -> int:
  return sum(tensor.bytes for tensor in tensors)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
  """Bytes per device at the moment of a step with the highest memory.

  rows: at that moment, the resident ones first. moment: its name. resident: memory between steps. host: bytes in the
  host's pinned memory. tokens: processed at once. walk: how validation and training rows share the backward pass, or
  empty. change(**keys) -> the estimate with other settings, or None if they are refused.
  """

  rows: Rows
  moment: str
  resident: Rows
  host: int
  tokens: int
  cfg: Config
  change: Callable[..., "MemoryEstimate | None"]
  walk: str = ""

  @property
  def total(self) -> int:
    return sum(map(num_bytes, self.rows.values()))

  @property
  def arguments(self) -> int:
    return sum(map(num_bytes, self.resident.values()))

  @property
  def temporaries(self) -> int:
    return self.total - self.arguments

  def table(self) -> list[str]:
    lines = [f"memory per device, closed form, fullest during {self.moment} ({self.tokens:,} tokens per device):"]
    rows = [(name, size) for name, tensors in self.rows.items() if (size := num_bytes(tensors))]
    rows += [("total", self.total)] + ([("in host memory", self.host)] if self.host else [])
    lines += [f"  {name:<28}{shown(size):>12}" for name, size in rows]
    return [*lines, f"  {self.walk}"] if self.walk else lines

  def beside(self, compiled: Mapping[str, int]) -> str:
    """Compares the estimate with an executable's `compiled_sizes`."""
    total = compiled["arguments"] + compiled["temporaries"]
    parts = [("arguments", self.arguments), ("temporaries", self.temporaries)]
    each = ", ".join(f"{name} {shown(compiled[name])} against {shown(mine)}" for name, mine in parts)
    off = self.total / max(total, 1) - 1
    return f"memory per device: XLA {shown(total)}, closed form {shown(self.total)} ({off:+.1%}); {each}"


def compiled_sizes(analysis: Any) -> dict[str, int]:
  """{"arguments", "temporaries"} of XLA's `memory_analysis()`; outputs that replace no argument are temporaries."""
  fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  return {"arguments": analysis.argument_size_in_bytes, "temporaries": analysis.temp_size_in_bytes + max(fresh, 0)}


def shown(size: float) -> str:
  for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if size >= factor:
      return f"{size / factor:.2f} {unit}"
  return f"{size:.0f} B"


def capacity(device: Any) -> int | None:
  """Bytes that a step may use on a `jax.Device`: its allocator's limit, or on CPU its share of the machine's memory."""
  if device.platform == "cpu":
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
  return (device.memory_stats() or {}).get("bytes_limit")


def check(estimated: MemoryEstimate, limit: int | None) -> None:
  """Raises ConfigError, with settings to change, if the step needs clearly more than the `capacity`."""
  if limit is None or estimated.total <= CLEARLY_TOO_MUCH * limit:
    return
  way, steps = "more devices, or a smaller model", remedies(estimated, limit)
  if steps:
    also = f", and {way}" if steps[-1][2].total > limit else ""
    way = " ".join(keys for keys, _, _ in steps) + f", which is estimated to need {shown(steps[-1][2].total)}{also}"
  said = f"the step is estimated to need {shown(estimated.total)} per device, which has {shown(limit)}; use {way}"
  raise ConfigError(f"{said}; --force starts it all the same")


def too_large(error: Exception, estimated: MemoryEstimate, limit: int | None) -> str:
  """XLA's message on a failed allocation, and settings to change."""
  lines = str(error).splitlines() or ["RESOURCE_EXHAUSTED"]
  words = next((line.strip() for line in lines if "exceeds" in line), lines[0])
  return "\n".join([f"out of device memory: {words}", *shortage(estimated, limit)])


def shortage(estimated: MemoryEstimate, limit: int | None) -> list[str]:
  """Settings to change if XLA needs too much: the verdict, or, if the estimate fits, how to need a fifth less."""
  if limit is not None and estimated.total > limit:
    return verdict(estimated, limit)
  head = f"memory: the estimate is {shown(estimated.total)}, and XLA needs more; to need a fifth less:"
  return [head, *advice(estimated, int(0.8 * estimated.total))]


def verdict(estimate: MemoryEstimate, capacity_bytes: int) -> list[str]:
  """One line if the step fits; else the largest tensors and the settings to change. capacity_bytes: of one device."""
  need, have = estimate.total, capacity_bytes
  if need <= have:
    return [f"memory: needs {shown(need)} of {shown(have)} per device; {shown(have - need)} to spare"]
  lines = [f"memory: does not fit: needs {shown(need)} per device, has {shown(have)}, {shown(need - have)} too much"]
  data, accumulated = estimate.cfg.data, estimate.cfg.optimizer.gradient_accumulation_steps
  rows = f"{estimate.tokens / data.max_target_length:g} rows of {data.max_target_length} tokens"
  micro = f", in each of {accumulated} micro-batches" if accumulated > 1 else ""
  lines.append(f"  tokens per device: {estimate.tokens:,} = {rows}{micro}")
  return lines + advice(estimate, capacity_bytes)


def advice(estimate: MemoryEstimate, capacity_bytes: int) -> list[str]:
  """The largest tensors, and the settings that bring the estimate to the capacity, or as near as possible."""
  tensors = sorted(itertools.chain(*estimate.rows.values()), key=lambda tensor: -tensor.bytes)
  lines = ["  largest:", *(f"    {tensor.describe()}" for tensor in tensors[:5])]
  if not (steps := remedies(estimate, capacity_bytes)):
    return [*lines, "  no setting helps; use more devices (ici_fsdp_parallelism), or a smaller model"]
  lines.append("  cheapest settings first, with the estimate after each:")
  lines += [f"    {text} -> {shown(after.total)} ({cost})" for text, cost, after in steps]
  if (left := steps[-1][2].total - capacity_bytes) <= 0:
    return [*lines, f"  with all of these it fits, {shown(-left)} to spare"]
  return [*lines, f"  even then {shown(left)} too much: use more devices, or a smaller model"]


def remedies(estimate: MemoryEstimate, capacity_bytes: int) -> list[tuple[str, str, MemoryEstimate]]:
  """[(keys as typed, their cost, estimate with them and the previous ones)], cheapest first, until the step fits. Each
  entry saves at least two percent. Settings that later ones make unnecessary are left out."""
  taken: dict[tuple[str, ...], tuple[dict, str]] = {}  # by name: a later value replaces an earlier one
  current = estimate
  while current.total > capacity_bytes:
    for keys, cost in _candidates(current):
      found = current.change(**keys)
      if found is not None and found.total < 0.98 * current.total:
        taken[tuple(keys)], current = (keys, cost), found  # where the earlier value was: later ones may need it
        break
    else:
      break

  def after(steps: Iterable[tuple[dict, str]]) -> MemoryEstimate | None:
    return estimate.change(**{name: value for keys, _ in steps for name, value in keys.items()})

  if current.total <= capacity_bytes:
    for names in list(taken)[:-1]:
      rest = {other: step for other, step in taken.items() if other != names}
      if (found := after(rest.values())) is not None and found.total <= capacity_bytes:
        taken = rest
  out, steps, typed = [], list(taken.values()), {}
  for i, (keys, cost) in enumerate(steps):
    typed |= {name: ",".join(map(str, v)) if isinstance(v, tuple) else v for name, v in keys.items()}
    if (found := after(steps[: i + 1])) is not None:  # else it needs the next ones, and stands in their line
      out.append((" ".join(f"{name}={value}" for name, value in typed.items()), cost, found))
      typed = {}
  return out


def _candidates(estimate: MemoryEstimate) -> Iterator[tuple[dict, str]]:
  """(keys, their cost) of settings, from those without cost to those that change the run; some save nothing."""
  cfg = estimate.cfg
  m, o, g = cfg.model, cfg.optimizer, cfg.ghost
  yield {"attention": "blockwise"}, "about the same speed"
  if m.num_vocab_tiling < 64:
    yield {"num_vocab_tiling": max(2 * m.num_vocab_tiling, 4)}, "one more product of the head's size"
  yield {"remat_policy": "minimal"}, "recomputes what is elementwise, and attention"
  yield {"mu_dtype": "bfloat16"}, "first moments in 16 bits, 8 of them significant"
  yield {"remat_policy": "full"}, "one more forward pass of the layers"
  if m.scan_layers:
    divisors = [k for k in range(2, m.base_num_decoder_layers) if m.base_num_decoder_layers % k == 0]
    best = [(after.total, k) for k in divisors if (after := estimate.change(segment_lengths=(k,)))]
    if best and (lengths := (min(best)[1],)) != m.segment_lengths:
      yield {"segment_lengths": lengths}, "one more forward pass of the layers"
  if g.ghost_enabled and g.ghost_schedule == "two_pass":
    yield {"ghost_schedule": "reverse_scan"}, "the same scores, in one walk over the layers"
  batch, accumulated = cfg.data.per_device_batch_size, o.gradient_accumulation_steps
  if batch % 2 == 0:
    yield {"per_device_batch_size": batch // 2, "gradient_accumulation_steps": 2 * accumulated}, "smaller products"
  walk = {"ghost_schedule": "reverse_scan"} if g.ghost_enabled else {}
  for more, also in (("carries", {}), ("val_gradient", {}), ("optimizer", walk), ("weights optimizer", walk)):
    offloads = tuple(dict.fromkeys((*more.split(), *m.offload_to_host)))
    yield {"offload_to_host": offloads, **also}, "traffic to the host in every step"
  if m.weight_dtype == "float32":
    yield {"weight_dtype": "bfloat16"}, "weights in 16 bits, 8 of them significant"
  yield {"per_device_batch_size": batch // 2}, "half the tokens per step"
  yield {"max_target_length": cfg.data.max_target_length // 2}, "half the context"
