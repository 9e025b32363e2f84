"""Compiles the train step for devices that need not be present, and reports the compiler's figures."""

import contextlib
import dataclasses
import functools
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from maxghost.config import Config, ConfigError
from maxghost.data.build import max_segments
from maxghost.parallel import Layout, collectives, report, shardings, topologies
from maxghost.parallel.collectives import Collective
from maxghost.parallel.mesh import describe, mesh_shape, num_slices
from maxghost.training import compiled_steps, devices, resume, state
from maxghost.training.compiling import compiler_options
from maxghost.training.flops import step_flops
from maxghost.training.memory import MemoryEstimate, estimate
from maxghost.training.memory import report as memory_report
from maxghost.training.memory.table import compiled_sizes
from maxghost.training.step import make_train_step

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "exceeds available HBM")


@dataclasses.dataclass(frozen=True)
class Planned:
  """A train step for a layout, not traced yet. arguments: abstract state, batch and validation batches."""

  cfg: Config
  layout: Layout
  graphdef: nnx.GraphDef
  arguments: tuple
  spread: str

  @property
  def num_params(self) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(resume.to_tree(self.arguments[0])["model"]))

  @functools.cached_property
  def memory(self) -> MemoryEstimate:
    """The estimate per device; raises ConfigError for a model that cannot be scored."""
    return estimate(self.cfg, self.layout, (self.graphdef, self.arguments[0]))

  @property
  def rows(self) -> int:
    return devices.rows_per_step(self.cfg, self.layout.num_devices)

  @property
  def flops(self):
    """`StepFlops` over all devices."""
    return step_flops(self.cfg.model, self.rows, self.cfg.data.max_target_length)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled step and its HLO text; `executable` is None if it did not fit, and `problem` the compiler's message."""

  planned: Planned
  executable: Any
  seconds: float
  hlo: str = ""
  problem: str = ""

  @property
  def device_bytes(self) -> int | None:
    """Arguments, temporaries and new outputs on one device; None if the step did not compile."""
    if self.executable is None:
      return None
    return sum(compiled_sizes(self.executable.memory_analysis()).values())

  def collectives(self) -> list[Collective]:
    layout = self.planned.layout
    slices = num_slices(self.planned.cfg.parallel, layout.mesh.devices.flat)
    _, dcn = mesh_shape(self.planned.cfg.parallel, layout.num_devices, slices)
    crossing = tuple(axis for axis, size in dcn.items() if size > 1)
    return collectives.read(self.hlo, dict(layout.mesh.shape), crossing)


def plan(cfg: Config, layout: Layout) -> Planned:
  """Plans a step without allocating or compiling. Raises ConfigError for a mesh that does not fit the run."""
  devices.check_layout(cfg, layout)
  graphdef, abstract = state.abstract_split(cfg)
  abstract = layout.abstract(abstract)
  report.check_rules(abstract, layout)
  spread = report.check_spread(abstract, layout, cfg.parallel.sharding_tolerance)
  sets = cfg.data.validation_sets if cfg.ghost.ghost_enabled else {}
  arguments = (
    abstract,
    devices.batch_shapes(cfg, devices.rows_per_step(cfg, layout.num_devices), layout),
    (devices.batch_shapes(cfg, cfg.ghost.ghost_val_batch_size, layout),) * len(sets),
  )
  return Planned(cfg, layout, graphdef, arguments, spread)


def step_function(planned: Planned):
  """The train step; raises ConfigError for a model that the engine cannot score."""
  train_state, batch, val_batches = planned.arguments
  try:
    with shardings.tracing_for(planned.layout.platform):  # traces the twin with the kernels of these devices
      step, _ = make_train_step(
        planned.cfg,
        planned.graphdef,
        train_state,
        batch,
        num_segments=max_segments(planned.cfg.data),
        num_sets=max(len(val_batches), 1),
      )
  except ValueError as error:
    raise ConfigError(str(error)) from error
  return step


def lower(planned: Planned):
  """The traced step."""
  step = step_function(planned)
  return compiled_steps.lower("train_step", step, planned.layout, time.perf_counter(), *planned.arguments)[2]


def compile_step(planned: Planned, options: dict | None = None, folder: Path | None = None) -> Compiled:
  """Compiles the step; a step that is too large for the memory is not an error.

  options: further compiler options. folder: for the texts of the TPU compiler, if they are to be kept.
  """
  lowered = lower(planned)
  platform = planned.layout.platform
  begin = time.perf_counter()
  with tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(folder) as place:
    # XLA cannot always read back what libtpu compiled (`as_text`), so libtpu writes the text.
    dump = {"xla_dump_to": str(place), "xla_dump_hlo_as_text": True} if platform == "tpu" else {}
    try:
      executable = lowered.compile(compiler_options=compiler_options(platform) | dump | (options or {}))
    except Exception as error:  # XLA's own type, which differs between versions
      if not any(word in str(error) for word in _OUT_OF_MEMORY):
        raise
      return Compiled(planned, None, time.perf_counter() - begin, problem=_reason(error))
    seconds = time.perf_counter() - begin
    texts = sorted(Path(place).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    hlo = texts[-1].read_text() if texts else executable.as_text()
  return Compiled(planned, executable, seconds, hlo)


def _reason(error: Exception) -> str:
  """XLA's message on the missing memory."""
  lines = [line.strip() for line in str(error).splitlines()]
  return next((line for line in lines if "exceeds" in line or "Ran out of memory" in line), lines[0])[:400]


def plan_lines(planned: Planned) -> list[str]:
  """Lines on mesh, batch, model and memory, known before compiling."""
  cfg, layout = planned.cfg, planned.layout
  validation = devices.describe_validation(cfg, layout)
  return [
    f"mesh: {describe(layout.mesh)}; {planned.spread}",
    devices.describe_batch(cfg, layout),
    *([] if validation is None else [validation]),
    f"number parameters: {planned.num_params / 1e9:.3f} billion ({planned.num_params:,})",
    planned.flops.describe(),
    *planned.memory.table(),
  ]


def report_lines(compiled: Compiled, topology: str) -> list[str]:
  """Compile time, FLOPs, memory and verdict, collectives."""
  planned = compiled.planned
  lines = [f"compiled in {compiled.seconds:.1f} s"] if compiled.executable else []
  lines += memory_lines(compiled, topology)
  if compiled.executable is None:
    return lines
  tokens = planned.rows * planned.cfg.data.max_target_length
  analysis = compiled.executable.cost_analysis() or {}
  counted = max(analysis.get("flops", 0.0), 0.0) * planned.layout.num_devices
  lines.append(
    f"FLOPs per token: {planned.flops.total / tokens / 1e9:.3f} G by shapes; XLA counts {counted / tokens / 1e9:.3f} "
    "G, the body of each loop once, scoring and recomputation included"
  )
  found = collectives.table(compiled.collectives())
  lines.append("collectives of a step, on each device:" if found else "collectives of a step: none")
  return [*lines, *(f"  {line}" for line in found)]


def memory_lines(compiled: Compiled, topology: str) -> list[str]:
  """Lines on the memory of one device by parts, and whether it suffices."""
  have = topologies.hbm_bytes(topology)
  if compiled.executable is None:
    lines = [f"memory: does not fit: {compiled.problem}"]
    return lines if have is None else [*lines, *memory_report.shortage(compiled.planned.memory, have)]
  memory = compiled.executable.memory_analysis()
  fresh = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
  parts = {
    **{row.name: row.bytes for row in compiled.planned.memory.resident},
    "temporaries": memory.temp_size_in_bytes,
    "outputs that replace no argument": fresh,
    "program": memory.generated_code_size_in_bytes,
  }
  parts["padding of arguments"] = max(memory.argument_size_in_bytes - compiled.planned.memory.arguments, 0)
  lines = ["memory of one device:"]
  lines += [f"  {name:<34}{size / 1e9:10.3f} GB" for name, size in parts.items() if size >= 5e5]
  need = sum(compiled_sizes(memory).values())
  lines.append(f"  {'total':<34}{need / 1e9:10.3f} GB")
  if have is not None:
    left = have - need
    verdict = f"fits, {left / 1e9:.2f} GB to spare" if left >= 0 else f"does not fit, {-left / 1e9:.2f} GB too much"
    lines.append(f"memory: needs {need / 1e9:.2f} of {have / 1e9:.2f} GB: {verdict}")
    if left < 0:
      lines += memory_report.shortage(compiled.planned.memory, have)
  return [*lines, compiled.planned.memory.beside(compiled_sizes(memory))]


def fits(compiled: Compiled, topology: str) -> bool:
  """Whether the step compiled and stays within the memory of a device."""
  have, need = topologies.hbm_bytes(topology), compiled.device_bytes
  return need is not None and (have is None or need <= have)


def save(compiled: Compiled, path: Path) -> int:
  """Pickles the result of `jax.experimental.serialize_executable`; returns its size in bytes.

  `jax.experimental.serialize_executable.deserialize_and_load(*pickle.load(file))` loads it as a function, on a machine
  with these devices and the same versions.
  """
  from jax.experimental import serialize_executable

  payload = pickle.dumps(serialize_executable.serialize(compiled.executable))
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(payload)
  return len(payload)
