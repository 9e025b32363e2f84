"""The functions of a run, each compiled once, ahead of the first step."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from maxghost.config import ConfigError, replace
from maxghost.data.build import max_segments
from maxghost.ghost.attach import Twin
from maxghost.parallel import distributed, shardings
from maxghost.training import step as step_lib
from maxghost.training.devices import batch_shapes, compiler_options
from maxghost.training.memory_report import compiled_sizes
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
    if (flops := (self.call.cost_analysis() or {}).get("flops", 0.0)) > 0:
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
    rows = batch_shapes(cfg, cfg.data.per_device_batch_size * layout.num_devices, layout, cfg.evaluated)
    submit("evaluate", time.perf_counter(), step_lib.make_eval_step(cfg, graphdef), state, rows)
  pool.shutdown(wait=False)
  return Program(futures, {p.label: math.prod((*p.stack_shape, *p.shape)) for p in twin.scored} if twin else {})


def lower(name: str, function: Callable, layout: shardings.Layout, *arguments) -> jax.stages.Lowered:
  """Lowers a function. A step donates its state, and returns it with the same shardings."""
  function.__name__ = name  # what profiles and JAX's own compile log call it
  options: dict[str, Any] = {}
  if name in ("train_step", "plain_step"):
    options = {"donate_argnums": (0,), "out_shardings": (layout.shardings(arguments[0]), None)}
  with shardings.use(layout):
    return jax.jit(function, **options).lower(*arguments)


def _compile(name: str, lowered: jax.stages.Lowered, trace_seconds: float, platform: str) -> Executable:
  begin = time.perf_counter()
  compiled = lowered.compile(compiler_options=compiler_options(platform))
  return Executable(name, compiled, trace_seconds, time.perf_counter() - begin)
