"""The memory estimate of a step: tensors, rows of tensors, and the printed table."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from maxghost.config import Config

SHORT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "s32"}


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
    dtype = SHORT_NAMES.get(self.dtype, self.dtype)
    return f"{many}{dtype}[{','.join(map(str, self.shape))}] {shown(self.bytes)}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table: the tensors of one kind at the moment of the maximum."""

  name: str
  tensors: tuple[Tensor, ...]

  @property
  def bytes(self) -> int:
    return sum(tensor.bytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
  """Bytes per device at the moment of a step with the highest memory.

  rows: at that moment, the resident ones first. moment: its name. resident: memory between steps. host: bytes in the
  host's pinned memory. tokens: processed at once. walk: how validation and training rows share the backward pass, or
  empty. change(**keys) -> the estimate with other settings, or None if they are refused.
  """

  rows: tuple[Row, ...]
  moment: str
  resident: tuple[Row, ...]
  host: int
  tokens: int
  cfg: Config
  change: Callable[..., "MemoryEstimate | None"]
  walk: str = ""

  @property
  def total(self) -> int:
    return sum(row.bytes for row in self.rows)

  @property
  def arguments(self) -> int:
    return sum(row.bytes for row in self.resident)

  @property
  def temporaries(self) -> int:
    """XLA's temporaries: everything except the arguments."""
    return self.total - self.arguments

  def table(self) -> list[str]:
    lines = [f"memory per device, closed form, fullest during {self.moment} ({self.tokens:,} tokens per device):"]
    rows = [(row.name, row.bytes) for row in self.rows if row.bytes]
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
  """A size in a suitable unit."""
  for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if size >= factor:
      return f"{size / factor:.2f} {unit}"
  return f"{size:.0f} B"
