"""The compiled functions of a run, each compiled once, ahead of the first step."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx

from maxghost.config import Config, ConfigError, replace
from maxghost.parallel import Layout, distributed, use
from maxghost.parallel.shardings import slash_path
from maxghost.training import step as step_lib
from maxghost.training.compiling import compiler_options

STEPS = ("train_step", "plain_step")  # functions (state, batch, val_batches) -> (state, out)


@dataclasses.dataclass(frozen=True, slots=True)
class Executable:
  """One compiled function, with the times to trace and compile it."""

  name: str
  call: Callable
  trace_seconds: float
  compile_seconds: float

  def describe(self) -> str:
    """One line: compile time, memory and XLA's FLOPs."""
    parts = [f"Compiled {self.name} in {self.compile_seconds:.1f} s (traced in {self.trace_seconds:.1f} s)"]
    memory = self.call.memory_analysis()
    if memory is not None:
      arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
      fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
      parts.append(
        f"Total estimated memory size: {(arguments + fresh + temporaries) / 1e9:.3f} GB per device (arguments "
        f"{arguments / 1e9:.3f}, temporaries {temporaries / 1e9:.3f}, outputs beyond donated ones {fresh / 1e9:.3f})"
      )
    flops = (self.call.cost_analysis() or {}).get("flops", 0.0)
    if flops > 0:
      parts.append(f"XLA counts {flops / 1e12:.4f} TFLOP, the body of each loop once")
    return "; ".join(parts)


class Program:
  """The functions that the loop calls. scored: labels and sizes of the scored parameters.

  train_step(state, batch, val_batches) -> (state, out) donates the state. validation_loss(state, val_batches) -> [K].
  evaluate(state, batch) -> (summed loss, tokens). Each property waits until its function is compiled.
  """

  def __init__(self, futures: Mapping[str, Any], scored: dict[str, int]):
    self._futures = futures
    self.scored = scored

  @functools.cached_property
  def train_step(self) -> Callable:
    return self._call("train_step")

  @functools.cached_property
  def plain_step(self) -> Callable:
    """The train step without scores, for runs that score only some steps."""
    return self._call("plain_step")

  @functools.cached_property
  def validation_loss(self) -> Callable:
    return self._call("validation_loss")

  @functools.cached_property
  def evaluate(self) -> Callable:
    return self._call("evaluate")

  def _call(self, name: str) -> Callable:
    """Waits until every process has compiled the function, so that none waits inside it."""
    compiled = self._futures[name].result()
    distributed.gather(name)
    return compiled.call

  def is_ready(self, name: str) -> bool:
    return self._futures[name].done()

  def wait(self, name: str) -> None:
    self._futures[name].result()

  def memory_analysis(self):
    """XLA's memory analysis of the train step, or None. Waits for its compilation."""
    return self._futures["train_step"].result().call.memory_analysis()

  def describe(self) -> str:
    """`Executable.describe` of the train step. Waits for its compilation."""
    return self._futures["train_step"].result().describe()


def build(
  cfg: Config,
  graphdef: nnx.GraphDef,
  state: nnx.State,
  batch: Mapping[str, Any],
  val_batches: tuple,
  eval_batch: Mapping[str, Any],
  num_segments: int,
  layout: Layout | None = None,
) -> Program:
  """Traces the step and the evaluations for these shapes, and starts to compile them in the background.

  Arguments may be arrays or `jax.ShapeDtypeStruct`s; with a layout they need shardings. batch: of a step, with all
  micro-batches. val_batches: one per validation set, empty without ghost. eval_batch: of an evaluation. num_segments:
  S, segments that a row can hold. Raises ConfigError for a model that the engine cannot score.
  """
  begin = time.perf_counter()
  try:
    train_step, twin = step_lib.make_train_step(
      cfg, graphdef, state, batch, num_segments=num_segments, num_sets=max(len(val_batches), 1)
    )
  except ValueError as error:  # a parameter without a rule, a pattern that matches nothing
    raise ConfigError(str(error)) from error
  work = {"train_step": lower("train_step", train_step, layout, begin, state, batch, val_batches)}
  pool = ThreadPoolExecutor(1, "compile")  # one: XLA uses all cores for one compilation
  futures = {"train_step": pool.submit(*work["train_step"])}
  others: dict[str, tuple] = {}
  if cfg.ghost.ghost_enabled:
    others["validation_loss"] = (step_lib.make_validation_loss(cfg, graphdef), state, val_batches)
  if cfg.run.eval_interval > 0:
    others["evaluate"] = (step_lib.make_eval_step(cfg, graphdef), state, eval_batch)
  if cfg.ghost.ghost_enabled and cfg.ghost.ghost_every > 1:
    plain, _ = step_lib.make_train_step(
      replace(cfg, ghost_enabled=False), graphdef, state, batch, num_segments=num_segments
    )
    lowered = lower("plain_step", plain, layout, time.perf_counter(), state, batch, ())
    futures["plain_step"] = pool.submit(*lowered)
  for name, (function, *arguments) in others.items():
    futures[name] = pool.submit(*lower(name, function, layout, time.perf_counter(), *arguments))
  pool.shutdown(wait=False)
  scored = {} if twin is None else _sizes(state, [param.label for param in twin.scored])
  return Program(futures, scored)


def lower(name: str, function: Callable, layout: Layout | None, begin: float, *arguments) -> tuple:
  """Lowers a function; returns (`compile_lowered`, its arguments) for a thread, as only the main thread traces.

  A step donates its state, and returns it with the same shardings.
  """
  function.__name__ = name  # what profiles and JAX's own compile log call it
  options: dict[str, Any] = {}
  if name in STEPS:
    options = {"donate_argnums": (0,)}
    if layout is not None:
      options["out_shardings"] = (layout.shardings(arguments[0]), None)
  with use(layout):
    lowered = jax.jit(function, **options).lower(*arguments)
  platform = None if layout is None else layout.platform
  return compile_lowered, name, lowered, time.perf_counter() - begin, platform


def compile_lowered(name: str, lowered, trace_seconds: float, platform: str | None = None) -> Executable:
  begin = time.perf_counter()
  compiled = lowered.compile(compiler_options=compiler_options(platform))
  return Executable(name, compiled, trace_seconds, time.perf_counter() - begin)


def _sizes(state: nnx.State, labels: list[str]) -> dict[str, int]:
  """Numbers of elements of the model's parameters with these slash paths."""
  params = nnx.to_flat_state(nnx.filter_state(state, nnx.Param))
  sizes = {slash_path(path[1:]): variable.get_value().size for path, variable in params if path[0] == "model"}
  return {label: sizes[label] for label in labels}
