"""The layout of a run on its devices, and the sizes that follow from it.

B rows, T positions.
"""

import jax

from maxghost.config import Config, ConfigError
from maxghost.objectives import create
from maxghost.parallel import Layout, distributed
from maxghost.parallel.axis_rules import unused_axes
from maxghost.parallel.shardings import OwnRows, own_rows


def configure_jax(cfg: Config) -> None:
  """Sets JAX's global options from the config; must be called before the first array is made."""
  if "float64" in (cfg.model.dtype, cfg.model.weight_dtype):
    jax.config.update("jax_enable_x64", True)
  if cfg.run.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", cfg.run.jax_cache_dir)


def open_layout(cfg: Config) -> Layout:
  """Connects the processes, if there are several, and builds the mesh over all devices.

  Raises ConfigError for a configuration that the devices cannot satisfy.
  """
  configure_jax(cfg)
  distributed.start(cfg.parallel)
  distributed.check_same_config(cfg)
  layout = Layout.of(cfg.parallel)
  check_layout(cfg, layout)
  return layout


def check_layout(cfg: Config, layout: Layout) -> None:
  """Raises ConfigError for a mesh that does not fit the run."""
  if unused := unused_axes(layout.rules):
    axis = unused[0]
    raise ConfigError(
      f"mesh axis '{axis}' has {layout.mesh.shape[axis]} devices, but no row of logical_axis_rules names it: they "
      f"would all do the same work; use ici_{axis}_parallelism=1, or add a row such as [layers, [{axis}]]"
    )
  length, context = cfg.data.max_target_length, layout.rules.sizes["context"]
  if length % context:
    near = max(length - length % context, context)
    raise ConfigError(
      f"max_target_length={length} does not divide over context {context}; use max_target_length={near} or "
      f"{near + context}, or another ici_context_parallelism"
    )
  if layout.num_devices == 1:
    return
  rows, parts = rows_per_step(cfg, layout.num_devices), layout.row_parts
  if cfg.ghost.ghost_enabled and cfg.ghost.ghost_schedule == "concat" and cfg.ghost.ghost_val_batch_size % parts:
    raise ConfigError(
      f"ghost_schedule=concat appends ghost_val_batch_size={cfg.ghost.ghost_val_batch_size} rows to the batch, which "
      f"then does not divide over {parts} devices; use ghost_val_batch_size={parts}, or ghost_schedule=two_pass"
    )
  if cfg.ghost.ghost_select not in ("none", "threshold"):
    chosen = max(1, round(cfg.ghost.ghost_select_fraction * rows))
    if chosen % parts:
      near = max(parts, chosen - chosen % parts)
      raise ConfigError(
        f"ghost_select_fraction={cfg.ghost.ghost_select_fraction:g} of {rows} rows is {chosen}, which does not divide "
        f"over {parts} devices; use ghost_select_fraction={near / rows:g}"
      )
  if distributed.count() > 1 and cfg.run.sample_every:
    raise ConfigError(
      f"sample_every={cfg.run.sample_every}: texts are sampled by a single process, and there are "
      f"{distributed.count()}; use sample_every=0, and `maxghost generate` on a checkpoint"
    )
  if distributed.count() > 1 and (cfg.ghost.ghost_select != "none" or cfg.ghost.ghost_detail == "token"):
    key = "ghost_detail=token" if cfg.ghost.ghost_detail == "token" else f"ghost_select={cfg.ghost.ghost_select}"
    raise ConfigError(
      f"{key} writes files that one process alone can write; {distributed.count()} processes need "
      "ghost_select=none and a ghost_detail other than token"
    )


def rows_per_step(cfg: Config, num_devices: int) -> int:
  """Rows of one step over all devices and micro-batches."""
  return cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps * num_devices


def rows_of_process(cfg: Config, layout: Layout) -> OwnRows:
  """The part of the batch that this process reads and records."""
  rows = rows_per_step(cfg, layout.num_devices)
  return OwnRows() if distributed.count() == 1 else own_rows(layout.rows(rows), rows, distributed.index())


def batch_shapes(cfg: Config, num_rows: int, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and shardings of a batch of the run's objective."""
  spec, sharding = create(cfg).batch_spec(num_rows, cfg.data.max_target_length), layout.rows(num_rows)
  return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in spec.items()}


def describe_batch(cfg: Config, layout: Layout) -> str:
  """One line on the batch of a step over all devices, with all factors."""
  accumulated, length = cfg.optimizer.gradient_accumulation_steps, cfg.data.max_target_length
  rows = rows_per_step(cfg, layout.num_devices)
  micro = f" in {accumulated} micro-batches" if accumulated > 1 else ""
  factors = [f"per_device_batch_size {cfg.data.per_device_batch_size}"]
  factors += [f"{layout.num_devices} devices"] if layout.num_devices > 1 else []
  factors += [f"gradient_accumulation_steps {accumulated}"] if accumulated > 1 else []
  made = f" ({' x '.join(factors)})" if len(factors) > 1 else ""
  return f"batch: {rows} rows{micro}{made} of {length} tokens = {rows * length:,} tokens per step"


def describe_validation(cfg: Config, layout: Layout) -> str | None:
  """One line on the placement of the validation rows; None without ghost or on one group of devices."""
  if not cfg.ghost.ghost_enabled or layout.row_parts == 1:
    return None
  rows = cfg.ghost.ghost_val_batch_size
  parts = layout.rules.parts(layout.rules.rows_axes(rows))
  if parts == layout.row_parts:
    return f"validation: {rows} rows over {parts} devices"
  copies = layout.row_parts // parts
  return (
    f"validation: {rows} rows, each computed by {copies} groups of devices alike; a ghost_val_batch_size that "
    f"{layout.row_parts} divides would be spread over all"
  )
