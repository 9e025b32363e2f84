"""The devices of a run: JAX's options, the layout, and the shapes of the batches."""

from typing import Any

import jax

from maxghost.config import Config, ConfigError
from maxghost.config.pipeline import rows_problem
from maxghost.objectives import create
from maxghost.parallel import distributed, heap
from maxghost.parallel.axis_rules import unused_axes
from maxghost.parallel.shardings import Layout, current, in_order
from maxghost.training import host_memory


def configure_jax(cfg: Config) -> None:
  """Sets JAX's global options from the config; must be called before the first array is made. Raises ConfigError."""
  if jax.config.values["jax_disable_jit"]:
    raise ConfigError("JAX_DISABLE_JIT is set, but functions are compiled before the first call; unset it")
  if "float64" in (cfg.model.dtype, cfg.model.weight_dtype):
    jax.config.update("jax_enable_x64", True)
  if cfg.run.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", cfg.run.jax_cache_dir)


def compiler_options(layout: Layout | None = None) -> dict[str, Any]:
  """XLA's options for `lower().compile(...)` and `jax.jit`. layout: of the program; None: the current, or one device.

  On CPU most of a step's time is spent in matrix products, which are library calls, so LLVM's higher levels only make
  the compilation longer (default configuration, JAX 0.10.2: 15.7 s of CPU time instead of 9.4, with the same bits).
  JAX's own setting jax_disable_most_optimizations lowers the level further and takes precedence.
  """
  layout = layout or current()
  if (layout.platform if layout else jax.default_backend()) != "cpu":
    return {}
  level = {} if jax.config.read("jax_disable_most_optimizations") else {"xla_backend_optimization_level": 1}
  return level | (in_order(layout.mesh.devices.flat) if layout else {})


def open_layout(cfg: Config) -> Layout:
  """Connects the processes, if several, and returns the layout over all devices. Raises ConfigError if they refuse."""
  configure_jax(cfg)
  heap.call("mallopt", heap.ARENA_MAX, 1)  # before XLA starts its threads
  distributed.start(cfg.parallel)
  distributed.check_same_config(cfg)
  layout = Layout.of(cfg.parallel)
  if layout.platform == "cpu":
    heap.keep()
  host_memory.check(cfg, layout.mesh.devices.flat[0])
  return layout


def check_layout(cfg: Config, layout: Layout) -> None:
  """Raises ConfigError for a mesh, or samples of the model, that do not fit the run."""
  if cfg.samples and cfg.model.quantize_kvcache:  # `maxghost generate` may: no key of the configuration is wrong
    said = f"quantize_kvcache=true samples from another model than objective={cfg.optimizer.objective} trains"
    raise ConfigError(f"{said}; use quantize_kvcache=false")
  if unused := unused_axes(layout.rules):
    axis = unused[0]
    said = f"mesh axis '{axis}' has {layout.mesh.shape[axis]} devices, but no row of logical_axis_rules names it"
    fix = f"use ici_{axis}_parallelism=1, or add a row such as [layers, [{axis}]]"
    raise ConfigError(f"{said}: they would all do the same work; {fix}")
  length, context = cfg.data.max_target_length, layout.rules.sizes["context"]
  if length % context:
    near = max(length - length % context, context)
    said = f"max_target_length={length} does not divide over context {context}"
    raise ConfigError(f"{said}; use max_target_length={near} or {near + context}, or another ici_context_parallelism")
  if layout.num_devices == 1:
    return
  if (stages := layout.stages) is not None:
    sizes, per_device = layout.rules.sizes, cfg.data.per_device_batch_size
    together = stages.num * sizes["tensor"] * sizes["context"]
    if problem := rows_problem(per_device, together, stages.num, stages.num_micro):
      raise ConfigError(problem)
  rows, parts = rows_per_step(cfg, layout.num_devices), layout.row_parts
  if cfg.ghost.ghost_enabled and cfg.ghost.ghost_schedule == "concat" and cfg.ghost.ghost_val_batch_size % parts:
    said = f"ghost_schedule=concat appends ghost_val_batch_size={cfg.ghost.ghost_val_batch_size} rows to the batch"
    fix = f"use ghost_val_batch_size={parts}, or ghost_schedule=two_pass"
    raise ConfigError(f"{said}, which then does not divide over {parts} devices; {fix}")
  chosen = num_chosen(cfg, rows)
  if chosen % parts:
    near = max(parts, chosen - chosen % parts)
    said = f"ghost_select_fraction={cfg.ghost.ghost_select_fraction:g} of {rows} rows is {chosen}"
    raise ConfigError(f"{said}, which does not divide over {parts} devices; use ghost_select_fraction={near / rows:g}")
  if distributed.count() == 1:
    return
  if cfg.run.sample_every:
    said = f"sample_every={cfg.run.sample_every}: texts are sampled by a single process, and there are"
    raise ConfigError(f"{said} {distributed.count()}; use sample_every=0, and `maxghost generate` on a checkpoint")
  if cfg.samples:
    said = f"objective={cfg.optimizer.objective} samples in a single process, and there are"
    raise ConfigError(f"{said} {distributed.count()}; start one")
  if cfg.ghost.ghost_select != "none" or cfg.ghost.ghost_detail == "token":
    key = "ghost_detail=token" if cfg.ghost.ghost_detail == "token" else f"ghost_select={cfg.ghost.ghost_select}"
    said = f"{key} writes files that one process alone can write; {distributed.count()} processes need"
    raise ConfigError(f"{said} ghost_select=none and a ghost_detail other than token")


def rows_per_step(cfg: Config, num_devices: int) -> int:
  """Rows of one step over all devices and micro-batches."""
  return cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps * num_devices


def num_chosen(cfg: Config, num_candidates: int) -> int:
  """Rows in the training pass. ghost_select=threshold keeps all rows and masks the targets of those not chosen."""
  if cfg.ghost.ghost_select in ("none", "threshold"):
    return num_candidates
  return max(1, round(cfg.ghost.ghost_select_fraction * num_candidates))


def validation_shapes(cfg: Config, layout: Layout) -> tuple[dict[str, jax.ShapeDtypeStruct], ...]:
  """`batch_shapes` of each validation set."""
  return tuple(batch_shapes(cfg, cfg.ghost.ghost_val_batch_size, layout, name) for name in cfg.val_objectives)


def batch_shapes(cfg: Config, num_rows: int, layout: Layout, objective: str = "", apart: bool = False) -> dict:
  """Shapes and shardings of a batch of the run's objective, or of another one. apart: as in `Layout.rows`."""
  spec, sharding = create(cfg, objective).batch_spec(num_rows, cfg.data.max_target_length), layout.rows(num_rows, apart)
  return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in spec.items()}
