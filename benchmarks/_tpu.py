"""Programs compiled ahead of time by the real TPU compiler, on a machine without a TPU.

Needs libtpu (`pip install '.[tpu]'`).
"""

import dataclasses
import os
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxghost.parallel import shardings
from maxghost.training.memory_report import MemoryEstimate

jax.config.update("jax_platforms", "cpu")
# Before libtpu is loaded: several processes may load it, and no cloud metadata is asked for.
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}

CHIPS = {"v5e": ("v5e:1x1", (1, 1, 1)), "v5p": ("v5:2x2x1", (2, 2, 1)), "v6e": ("v6e:1x1", (1, 1, 1))}
HBM = {"v5e": 15.75 * 2**30}  # usable bytes of one chip


def chip(name: str):
  """One device of the topology, described by the TPU compiler."""
  from jax.experimental import topologies

  topology, bounds = CHIPS[name]
  found = topologies.get_topology_desc(
    platform="tpu", topology_name=topology, chip_config_name="default", chips_per_host_bounds=bounds, num_slices=1
  )
  return found.devices[0]


def compiled_with_cycles(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
  """The program, and the cycles that the compiler's schedule gives its operations.

  The schedule has no cycles for what runs beside other operations (copies, gathers on a SparseCore) and none for Pallas
  kernels. NaN for a program with loops, whose bodies it counts once.
  """
  with tempfile.TemporaryDirectory() as folder:
    compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
    (path,) = pathlib.Path(folder).glob("*.after_codegen.txt")
    text = path.read_text(encoding="utf-8")
  entry = text[text.index("\nENTRY ") :]
  cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)))
  return compiled, float("nan") if " while(" in text else float(cycles)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of a program, in bytes. error: its words where the program does not fit, with `wanted` all
  that it would need; else the other numbers hold.

  The words call `wanted` temporaries, but they count arguments and outputs, too: compiled for a v5p, which has room,
  the program of benchmarks/memory.py that does not fit a v5e takes as much as this with its arguments and outputs.
  """

  temporaries: float = float("nan")
  arguments: float = float("nan")
  outputs: float = float("nan")  # beyond donated arguments
  host: float = float("nan")  # arguments in host memory
  error: str = ""
  wanted: float = float("nan")
  closed: float = float("nan")  # the closed form of it all
  off: float = float("nan")  # relative to what the compiler says

  def beside(self, closed: MemoryEstimate, inputs: int = 0) -> "Compiled":
    """With the closed form of the same program. inputs: bytes of arguments that a train step does not have."""
    total = closed.total + inputs
    return dataclasses.replace(self, closed=total, off=total / self.peak - 1)

  @property
  def peak(self) -> float:
    """Device bytes in all, wanted or had."""
    return self.wanted if self.error else self.temporaries + self.arguments + self.outputs


def _bytes(shapes) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def compile_for(device, function: Callable, *arguments, donate: tuple[int, ...] = ()) -> Compiled:
  """`function` compiled for `device`. arguments: pytrees of shapes; a sharding with a memory kind keeps that kind."""
  sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())

  def placed(x):
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.with_memory_kind(kind) if kind else sharding)

  try:
    with shardings.tracing_for(device.platform):
      lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(placed, arguments))
    memory = lowered.compile().memory_analysis()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error) or "exceeds available HBM" not in str(error):
      raise
    line = next(line for line in str(error).splitlines() if "exceeds available HBM" in line)
    wanted = re.search(r"\(([\d.]+)([MG])\) exceeds", line)
    scale = {"M": 2**20, "G": 2**30}[wanted[2]] if wanted else float("nan")
    sizes = {"arguments": _bytes(arguments), "outputs": _bytes(lowered.out_info)}
    return Compiled(error=line, wanted=float(wanted[1]) * scale if wanted else float("nan"), **sizes)
  return Compiled(
    memory.temp_size_in_bytes,
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes - memory.alias_size_in_bytes,
    memory.host_argument_size_in_bytes,
  )
