"""The functions of a run, each compiled once, ahead of the first step; and the step compiled for devices elsewhere."""

import contextlib
import dataclasses
import functools
import math
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from maxghost.config import ConfigError, replace
from maxghost.data.build import max_segments
from maxghost.ghost.attach import Twin
from maxghost.parallel import collectives, distributed, shardings, topologies
from maxghost.parallel.collectives import Collective
from maxghost.parallel.mesh import mesh_shape, num_slices
from maxghost.parallel.shardings import Layout, use
from maxghost.training import step as step_lib
from maxghost.training.devices import batch_shapes, compiler_options
from maxghost.training.memory_report import compiled_sizes, shortage
from maxghost.training.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Executable:
  """One compiled function, with the times to trace and compile it."""

  name: str
  call: jax.stages.Compiled
  trace_seconds: float
  compile_seconds: float

  def describe(self) -> str:
    """One line: compile time, memory and XLA's FLOPs."""
    parts = [f"Compiled {self.name} in {self.compile_seconds:.1f} s (traced in {self.trace_seconds:.1f} s)"]
    if (memory := self.call.memory_analysis()) is not None:
      parts.append(f"Total estimated memory size: {sum(compiled_sizes(memory).values()) / 1e9:.3f} GB per device")
    flops = (self.call.cost_analysis() or {}).get("flops", 0.0)
    if flops > 0:
      parts.append(f"XLA counts {flops / 1e12:.4f} TFLOP, the body of each loop once")
    return "; ".join(parts)


def _compiled(name: str) -> functools.cached_property[Callable]:
  """A property of Program. It waits until every process has compiled the function, so that none waits inside it."""

  def call(program: "Program") -> Callable:
    compiled = program.executable(name)
    distributed.gather(name)
    return compiled.call

  return functools.cached_property(call)


class Program:
  """The functions that the loop calls. scored: labels and sizes of the scored parameters.

  train_step(state, batch, val_batches) -> (state, out) donates the state. closing: see `step.make_closing`.
  evaluate(state, batch) -> (summed loss, tokens).
  """

  def __init__(self, futures: Mapping[str, Future[Executable]], scored: dict[str, int]):
    self._futures = futures
    self.scored = scored

  train_step = _compiled("train_step")
  plain_step = _compiled("plain_step")  # without scores, for runs that score only some steps
  closing = _compiled("closing")
  evaluate = _compiled("evaluate")

  def is_ready(self, name: str) -> bool:
    return self._futures[name].done()

  def executable(self, name: str = "train_step") -> Executable:
    """Waits until this process has compiled the function."""
    return self._futures[name].result()


def train_step(plan: Plan) -> tuple[Callable, Twin | None]:
  """(the step, the twin of a scored one). Raises ConfigError for a model that the engine cannot score."""
  cfg, (train_state, batch, val_batches) = plan.cfg, plan.arguments
  try:
    with shardings.tracing_for(plan.layout.platform):  # traces the twin with the kernels of these devices
      return step_lib.make_train_step(
        cfg, plan.graphdef, train_state, batch, num_segments=max_segments(cfg.data), num_sets=max(len(val_batches), 1)
      )
  except ValueError as error:  # a parameter without a rule, a pattern that matches nothing
    raise ConfigError(str(error)) from error


def build(plan: Plan) -> Program:
  """Traces the step and the evaluations, and starts to compile them in the background. Raises as `train_step`."""
  pool = ThreadPoolExecutor(1, "compile")  # one: XLA uses all cores for one compilation
  cfg, graphdef, layout = plan.cfg, plan.graphdef, plan.layout
  state, batch, val_batches = plan.arguments
  futures = {}

  def submit(name: str, begin: float, function: Callable, *arguments) -> None:
    """Lowers here, since only the main thread traces."""
    lowered = lower(name, function, layout, *arguments)
    futures[name] = pool.submit(_compile, name, lowered, time.perf_counter() - begin, layout.platform)

  begin = time.perf_counter()
  step, twin = train_step(plan)
  submit("train_step", begin, step, *plan.arguments)
  if cfg.val_sets and cfg.ghost.ghost_every > 1:
    begin = time.perf_counter()
    plain, _ = train_step(dataclasses.replace(plan, cfg=replace(cfg, ghost_enabled=False)))
    submit("plain_step", begin, plain, state, batch, ())
  if cfg.val_sets:
    submit("closing", time.perf_counter(), step_lib.make_closing(cfg, graphdef), state, val_batches)
  if cfg.run.eval_interval > 0:
    rows = batch_shapes(cfg, cfg.data.per_device_batch_size * layout.num_devices, layout)
    submit("evaluate", time.perf_counter(), step_lib.make_eval_step(cfg, graphdef), state, rows)
  pool.shutdown(wait=False)
  return Program(futures, {p.label: math.prod((*p.stack_shape, *p.shape)) for p in twin.scored} if twin else {})


def lower(name: str, function: Callable, layout: Layout, *arguments) -> jax.stages.Lowered:
  """Lowers a function. A step donates its state, and returns it with the same shardings."""
  function.__name__ = name  # what profiles and JAX's own compile log call it
  options: dict[str, Any] = {}
  if name in ("train_step", "plain_step"):
    options = {"donate_argnums": (0,), "out_shardings": (layout.shardings(arguments[0]), None)}
  with use(layout):
    return jax.jit(function, **options).lower(*arguments)


def _compile(name: str, lowered: jax.stages.Lowered, trace_seconds: float, platform: str) -> Executable:
  begin = time.perf_counter()
  compiled = lowered.compile(compiler_options=compiler_options(platform))
  return Executable(name, compiled, trace_seconds, time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The step compiled for devices that need not be present, and its HLO text.

  executable: None if it did not fit; problem: the compiler's message then.
  """

  plan: Plan
  executable: Any
  seconds: float
  hlo: str = ""
  problem: str = ""

  def collectives(self) -> list[Collective]:
    layout = self.plan.layout
    slices = num_slices(self.plan.cfg.parallel, layout.mesh.devices.flat)
    _, dcn = mesh_shape(self.plan.cfg.parallel, layout.num_devices, slices)
    crossing = tuple(axis for axis, size in dcn.items() if size > 1)
    return collectives.read(self.hlo, dict(layout.mesh.shape), crossing)

  def save(self, path: Path) -> int:
    """Pickles the serialized executable; returns its size in bytes.

    `jax.experimental.serialize_executable.deserialize_and_load(*pickle.load(file))` loads it as a function, on a
    machine with these devices and the same versions.
    """
    payload = pickle.dumps(serialize_executable.serialize(self.executable))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload)
    return len(payload)


def compile_step(plan: Plan, options: dict | None = None, folder: Path | None = None) -> Compiled:
  """Compiles the step; a step that is too large for the memory is not an error.

  options: further compiler options. folder: for the texts of the TPU compiler, if they are to be kept. Raises as
  `train_step`.
  """
  lowered = lower("train_step", train_step(plan)[0], plan.layout, *plan.arguments)
  platform = plan.layout.platform
  begin = time.perf_counter()
  with _no_cache(), tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(folder) as place:
    # XLA cannot always read back what libtpu compiled (`as_text`), so libtpu writes the text.
    dump = {"xla_dump_to": str(place), "xla_dump_hlo_as_text": True} if platform == "tpu" else {}
    try:
      executable = lowered.compile(compiler_options=compiler_options(platform) | dump | (options or {}))
    except Exception as error:  # XLA's own type, which differs between versions
      if "RESOURCE_EXHAUSTED" not in str(error) and "exceeds available HBM" not in str(error):
        raise
      lines = [line.strip() for line in str(error).splitlines()]
      problem = next((line for line in lines if "exceeds" in line or "Ran out of memory" in line), lines[0])[:400]
      return Compiled(plan, None, time.perf_counter() - begin, problem=problem)
    seconds = time.perf_counter() - begin
    texts = sorted(Path(place).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    hlo = texts[-1].read_text() if texts else executable.as_text() or ""
  return Compiled(plan, executable, seconds, hlo)


@contextlib.contextmanager
def _no_cache():
  """Compile without JAX's persistent cache.

  The seconds reported are those of a compilation, and JAX 0.10 writes an executable that it read from the cache on CPU
  without some of its functions.
  """
  before = jax.config.values["jax_enable_compilation_cache"]
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def report_lines(compiled: Compiled, topology: str) -> tuple[list[str], bool]:
  """(lines on compile time, FLOPs, memory and collectives, whether the step fits the memory of a device)."""
  plan, have = compiled.plan, topologies.hbm_bytes(topology)
  if compiled.executable is None:
    lines = [f"memory: does not fit: {compiled.problem}"]
    return lines if have is None else [*lines, *shortage(plan.memory, have)], False
  memory = compiled.executable.memory_analysis()
  need = sum(compiled_sizes(memory).values())
  parts = {
    **{row.name: row.bytes for row in plan.memory.resident},
    "temporaries": memory.temp_size_in_bytes,
    "outputs that replace no argument": max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
    "program": memory.generated_code_size_in_bytes,
    "padding of arguments": max(memory.argument_size_in_bytes - plan.memory.arguments, 0),
  }
  lines = [f"compiled in {compiled.seconds:.1f} s", "memory of one device:"]
  lines += [f"  {name:<34}{size / 1e9:10.3f} GB" for name, size in parts.items() if size >= 5e5]
  lines.append(f"  {'total':<34}{need / 1e9:10.3f} GB")
  fits = have is None or need <= have
  if have is not None:
    left = have - need
    verdict = f"fits, {left / 1e9:.2f} GB to spare" if fits else f"does not fit, {-left / 1e9:.2f} GB too much"
    lines.append(f"memory: needs {need / 1e9:.2f} of {have / 1e9:.2f} GB: {verdict}")
    lines += [] if fits else shortage(plan.memory, have)
  tokens = plan.rows * plan.cfg.data.max_target_length
  counted = max((compiled.executable.cost_analysis() or {}).get("flops", 0.0), 0.0) * plan.layout.num_devices
  found = collectives.table(compiled.collectives())
  return [
    *lines,
    plan.memory.beside(compiled_sizes(memory)),
    f"FLOPs per token: {plan.flops.total / tokens / 1e9:.3f} G by shapes; XLA counts {counted / tokens / 1e9:.3f} "
    "G, the body of each loop once, scoring and recomputation included",
    "collectives of a step, on each device:" if found else "collectives of a step: none",
    *(f"  {line}" for line in found),
  ], fits
