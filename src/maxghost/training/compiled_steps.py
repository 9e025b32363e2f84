"""The functions of a run, each compiled once, ahead of the first step."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxghost.config import Config, ConfigError, plugins, replace
from maxghost.ghost.attach import Twin
from maxghost.ghost.schedules.forward_mode import refuse_custom_vjp
from maxghost.parallel import distributed, shardings
from maxghost.training import outer, own_objective, scoring
from maxghost.training import step as step_lib
from maxghost.training.devices import batch_shapes, compiler_options
from maxghost.training.diloco import Diloco
from maxghost.training.memory_report import compiled_sizes
from maxghost.training.plan import Plan


class Executable(NamedTuple):
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


class Program:
  """The functions that the loop calls. scored: {label: size} of the scored parameters.

  train_step(state, batch, val_batches) -> (state, out) donates the state; plain_step is the same without scores, for
  runs that score only some steps. closing: see `step.make_closing`. evaluate(state, batch) -> (summed loss, tokens).
  compare_rows: see `own_objective`. to_host: copies a step's outputs to the host. outer: `Outer.after` of slices that
  train apart; None without DiLoCo.
  """

  def __init__(self, futures: Mapping[str, Future[Executable]], scored: dict[str, int], apart: Diloco | None = None):
    self._futures, self._functions, self.scored = futures, dict[str, Callable](), scored
    self.to_host = apart.to_host if apart else scoring.to_host
    self.outer = functools.partial(outer.Outer(apart).after, self.function) if apart else None

  def function(self, name: str) -> Callable:
    """Waits until all processes have compiled the function, so that none waits inside it."""
    if name not in self._functions:
      self._functions[name] = self.executable(name).call
      distributed.gather(name)
    return self._functions[name]

  def is_ready(self, name: str) -> bool:
    return name in self._functions or all(distributed.gather(self._futures[name].done()))  # the same in every process

  def check_objective(self, cfg: Config, state, batch) -> None:
    """Compares the rows of an own objective, once. Raises ConfigError if they read each other."""
    if "compare_rows" in self._futures.keys() - self._functions:
      own_objective.refuse_coupled(cfg, *jax.device_get(self.function("compare_rows")(state, batch)))

  def executable(self, name: str = "train_step") -> Executable:
    """Waits until this process has compiled the function."""
    return self._futures[name].result()


def train_step(plan: Plan) -> tuple[Callable, Twin | None]:
  """(the step, the twin of a scored one). Raises ConfigError for a model that the engine cannot score."""
  cfg, (_, batch, val_batches) = plan.cfg, plan.arguments
  if plan.apart:
    batch = batch_shapes(cfg, plan.rows // plan.layout.apart, plan.layout)
  try:
    with shardings.tracing_for(plan.layout.platform):  # traces the twin with the kernels of these devices
      sizes = {"num_segments": cfg.data.max_segments, "num_sets": max(len(val_batches), 1)}
      step, twin = step_lib.make_train_step(cfg, plan.graphdef, plan.inner, batch, **sizes)
  except ValueError as error:  # a parameter without a rule, a pattern that matches nothing
    raise ConfigError(str(error)) from error
  return plan.apart.train_step(step) if plan.apart else step, twin


def build(plan: Plan) -> Program:
  """Traces the functions of a run and starts to compile them in the background. Raises as `train_step`."""
  pool = ThreadPoolExecutor(1, "compile")  # one thread: a compilation uses all cores
  cfg, graphdef, layout, apart = plan.cfg, plan.graphdef, plan.layout, plan.apart
  (state, batch, val_batches), futures = plan.arguments, {}

  def submit(name: str, begin: float, function: Callable, *arguments, **options) -> None:
    """Lowers in this thread, the only one that may trace, and compiles in the pool."""
    lowered = lower(name, function, layout, *arguments, **options)
    futures[name] = pool.submit(_compile, name, lowered, time.perf_counter() - begin, layout)

  begin = time.perf_counter()
  step, twin = train_step(plan)
  submit("train_step", begin, step, *plan.arguments)
  if cfg.val_sets and cfg.ghost.ghost_every > 1:
    on_host = tuple(what for what in cfg.model.offload_to_host if what != "val_gradient")
    unscored = replace(cfg, ghost_enabled=False, ghost_reweight=(), offload_to_host=on_host)
    plain, _ = train_step(dataclasses.replace(plan, cfg=unscored))
    submit("plain_step", time.perf_counter(), plain, state, batch, ())
  if cfg.val_sets:
    closing = step_lib.make_closing(cfg, graphdef)
    submit("closing", time.perf_counter(), apart.each(closing) if apart else closing, state, val_batches)
  if cfg.val_sets and plugins.OBJECTIVES[cfg.optimizer.objective].is_own:
    rows = cfg.data.per_device_batch_size * layout.num_devices // (layout.apart if apart else 1)
    compare = own_objective.make_comparison(cfg, graphdef, rows)
    submit("compare_rows", time.perf_counter(), apart.each(compare, jnp.max) if apart else compare, state, batch)
  if cfg.run.eval_interval > 0:
    rows = batch_shapes(cfg, cfg.eval_rows * layout.num_devices, layout, cfg.evaluated)
    evaluate = step_lib.make_eval_step(cfg, graphdef)
    submit("evaluate", time.perf_counter(), apart.evaluation(evaluate) if apart else evaluate, state, rows)
  for name, (function, arguments, out) in (outer.Outer(apart).programs() if apart else {}).items():
    submit(name, time.perf_counter(), function, *arguments, out_shardings=out)
  pool.shutdown(wait=False)
  return Program(futures, {p.label: math.prod((*p.stack_shape, *p.shape)) for p in twin.scored} if twin else {}, apart)


def lower(name: str, function: Callable, layout: shardings.Layout, *arguments,
          out_shardings: Any = None) -> jax.stages.Lowered:  # fmt: skip
  """Lowers a function. A train or outer step donates its state and returns it with the same shardings. Raises
  ConfigError for a loss without the forward mode that ghost_schedule=forward_mode needs."""
  options: dict[str, Any] = {"out_shardings": out_shardings}
  if name in ("train_step", "plain_step") or name.startswith(outer.OUTER_STEP):
    options = {"donate_argnums": (0,), "out_shardings": (layout.shardings(arguments[0]), None)}
  function.__name__ = name  # what profiles and JAX's own compile log call it
  with shardings.use(layout), refuse_custom_vjp():
    return jax.jit(function, **options).lower(*arguments)


def _compile(name: str, lowered: jax.stages.Lowered, trace_seconds: float, layout: shardings.Layout) -> Executable:
  begin = time.perf_counter()
  compiled = lowered.compile(compiler_options=compiler_options(layout))
  return Executable(name, compiled, trace_seconds, time.perf_counter() - begin)
