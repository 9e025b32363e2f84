"""Ahead-of-time compilation of the train step for devices that need not be present: memory, FLOPs, collectives."""

import contextlib
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from maxghost.parallel import collectives, topologies
from maxghost.parallel.collectives import Collective
from maxghost.parallel.mesh import mesh_shape, num_slices
from maxghost.training.compiled_steps import lower, train_step
from maxghost.training.devices import compiler_options
from maxghost.training.memory_report import compiled_sizes, num_bytes, shortage
from maxghost.training.plan import Plan


class Compiled(NamedTuple):
  """A step compiled for absent devices, with its HLO text. problem: the compiler's message if the step did not fit."""

  plan: Plan
  executable: Any
  seconds: float
  hlo: str = ""
  problem: str = ""

  def collectives(self) -> list[Collective]:
    layout = self.plan.layout
    slices = num_slices(self.plan.cfg.parallel, layout.mesh.devices.flat)
    _, dcn = mesh_shape(self.plan.cfg.parallel, layout.num_devices, slices)
    return collectives.read(self.hlo, dict(layout.mesh.shape), tuple(axis for axis, size in dcn.items() if size > 1))

  def save(self, path: Path) -> int:
    """Pickles the serialized executable; returns its size in bytes. JAX's
    `serialize_executable.deserialize_and_load(*pickle.load(file))` loads it, on these devices and versions."""
    return path.write_bytes(pickle.dumps(serialize_executable.serialize(self.executable)))


def compile_step(plan: Plan, options: dict | None = None, folder: Path | None = None) -> Compiled:
  """Compiles the step; one that exceeds the device memory is returned with its `problem`. options: further compiler
  options. folder: keeps the TPU compiler's texts. Raises as `train_step`."""
  lowered = lower("train_step", train_step(plan)[0], plan.layout, *plan.arguments)
  begin = time.perf_counter()
  with _no_cache(), tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(folder) as place:
    # XLA cannot always read back what libtpu compiled (`as_text`), so libtpu writes the text.
    dump = {"xla_dump_to": str(place), "xla_dump_hlo_as_text": True} if plan.layout.platform == "tpu" else {}
    try:
      executable = lowered.compile(compiler_options=compiler_options(plan.layout) | dump | (options or {}))
    except Exception as error:  # XLA's own type, which differs between versions
      if "RESOURCE_EXHAUSTED" not in str(error) and "exceeds available HBM" not in str(error):
        raise
      lines = [line.strip() for line in str(error).splitlines()]
      said = next((line for line in lines if "exceeds" in line or "Ran out of memory" in line), lines[0])
      return Compiled(plan, None, time.perf_counter() - begin, problem=said[:400])
    seconds = time.perf_counter() - begin
    texts = sorted(Path(place).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    hlo = texts[-1].read_text() if texts else executable.as_text() or ""
  return Compiled(plan, executable, seconds, hlo)


@contextlib.contextmanager
def _no_cache():
  # The cache would hide compile times, and JAX 0.10 on CPU serializes a cached executable without some functions.
  before = jax.config.values["jax_enable_compilation_cache"]
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def report_lines(compiled: Compiled, topology: str) -> tuple[list[str], bool]:
  """(lines on compile time, FLOPs, memory and collectives, whether the step fits the device memory)."""
  plan, have = compiled.plan, topologies.hbm_bytes(topology)
  if compiled.executable is None:
    lines = [f"memory: does not fit: {compiled.problem}"]
    return lines if have is None else [*lines, *shortage(plan.memory, have)], False
  memory = compiled.executable.memory_analysis()
  sizes = compiled_sizes(memory)
  need = sum(sizes.values()) + memory.generated_code_size_in_bytes
  parts = {name: num_bytes(held) for name, held in plan.memory.resident.items()}
  parts |= {"temporaries": memory.temp_size_in_bytes,
            "outputs that replace no argument": max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
            "program": memory.generated_code_size_in_bytes,
            "padding of arguments": max(memory.argument_size_in_bytes - plan.memory.arguments, 0)}  # fmt: skip
  lines = [f"compiled in {compiled.seconds:.1f} s", "memory of one device:"]
  lines += [f"  {name:<34}{size / 1e9:10.3f} GB" for name, size in parts.items() if size >= 5e5]
  lines.append(f"  {'total':<34}{need / 1e9:10.3f} GB")
  fits = have is None or need <= have
  if have is not None:
    left = (have - need) / 1e9
    verdict = f"fits, {left:.2f} GB to spare" if fits else f"does not fit, {-left:.2f} GB too much"
    lines.append(f"memory: needs {need / 1e9:.2f} of {have / 1e9:.2f} GB: {verdict}")
    lines += [] if fits else shortage(plan.memory, have)
  tokens = plan.rows * plan.cfg.data.max_target_length
  counted = max((compiled.executable.cost_analysis() or {}).get("flops", 0.0), 0.0) * plan.layout.num_devices
  xla = f"XLA counts {counted / tokens / 1e9:.3f} G, the body of each loop once, scoring and recomputation included"
  lines += [plan.memory.beside(sizes), f"FLOPs per token: {plan.flops.total / tokens / 1e9:.3f} G by shapes; {xla}"]
  found = collectives.table(compiled.collectives())
  lines.append("collectives of a step, on each device:" if found else "collectives of a step: none")
  return [*lines, *(f"  {line}" for line in found)], fits
