"""One run from start to end: builds the parts, continues where the last process stopped, and says how it ended."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from maxghost.config import Config
from maxghost.data import tokenizer_files
from maxghost.data.build import parse_weights
from maxghost.training import announce, memory_report, program, resume, run_directory, state
from maxghost.training.console import Console
from maxghost.training.flops import peak_flops, step_flops
from maxghost.training.host_memory import HostMemory
from maxghost.training.loop import Hardware, Sinks, TrainingLoop
from maxghost.training.metrics import MetricsLog, TensorBoardLog
from maxghost.training.prefetch import Prefetcher
from maxghost.training.resume import Position
from maxghost.training.reweighting import Reweighter
from maxghost.training.run_directory import Existing, RunDirectory
from maxghost.training.samples import Sampler
from maxghost.training.score_recorder import ScoreRecorder
from maxghost.training.signals import StopSignals


class Session:
  """A training run. Making it validates what only JAX can tell and writes nothing; `run` does the work.

  open_checkpoints, open_scores: make a checkpoint manager and a score writer for the run directory.
  open_parameters: from the tree of the model's abstract arrays to a function that reads them, for a run that starts
  from a given model; None = from init_weights_seed.
  """

  def __init__(
    self, cfg: Config, existing: Existing, dataset, signals: StopSignals, *, open_checkpoints: Callable,
    open_scores: Callable, open_parameters: Callable | None = None, console: Console | None = None,
  ):
    configure_jax(cfg)
    HostMemory.of(cfg).check(jax.devices()[0])
    self._cfg, self._existing, self._dataset, self._signals = cfg, existing, dataset, signals
    self._open_checkpoints, self._open_scores = open_checkpoints, open_scores
    self._console = console or Console()
    self._checkpoints: Any = None
    self._val_sets = cfg.data.validation_sets if cfg.ghost.ghost_enabled else {}
    self._graphdef, self._abstract = state.abstract_split(cfg)
    self._sampler = Sampler(cfg, dataset.tokenizer) if cfg.run.sample_every else None
    self._read_parameters = open_parameters and open_parameters(self._wanted()["model"])
    self._memory = memory_report.estimate_of(cfg, self._abstract)
    self._capacity = memory_report.capacity(jax.devices()[0])
    val_batches = tuple(
      dataset.validation_batch(0, cfg.ghost.ghost_val_batch_size, domain).arrays for domain in self._val_sets.values()
    )
    self._program = program.build(
      cfg,
      self._graphdef,
      self._abstract,
      batch_shapes(cfg, rows_per_step(cfg)),
      val_batches,
      batch_shapes(cfg, cfg.data.per_device_batch_size),
      dataset.max_segments,
    )

  def run(self) -> int:
    """Trains to the end or to a signal; returns the exit code. Raises what the loop raises."""
    run_dir = run_directory.claim(self._existing, self._cfg)
    tokenizer_files.save(self._dataset.tokenizer, self._cfg.data.tokenizer_type, run_dir.path / tokenizer_files.FOLDER)
    sinks = None
    prefetcher = None
    try:
      train_state, position, sinks = self._open(run_dir)
      reweighter = self._reweighter(position)  # before the first batch is drawn
      prefetcher = Prefetcher(self._dataset.train, jax.device_put, self._cfg.run.steps - position.completed_steps)
      rows = rows_per_step(self._cfg)
      flops = step_flops(self._cfg.model, rows, self._cfg.data.max_target_length)
      self._announce(position, flops, run_dir)
      hardware = Hardware(1, peak_flops(jax.devices()[0]), rows, flops)
      loop = TrainingLoop(
        self._cfg, self._program, self._dataset, sinks, self._signals, hardware, val_sets=self._val_sets,
        reweighter=reweighter, sampler=self._sampler,
      )
      outcome = loop.run(train_state, position, prefetcher)
      if not position.completed_steps:  # the reader counts what this process has read
        self._console.line(self._dataset.train.describe())
    finally:
      if prefetcher is not None:
        prefetcher.close()
      if sinks is not None:
        sinks.close()
      run_dir.close()
    return self._conclude(outcome, run_dir)

  def out_of_memory(self, error: Exception) -> str:
    """What to do about an allocation that failed."""
    return memory_report.too_large(error, self._memory, self._capacity)

  def last_checkpoint(self) -> str:
    """Names the newest checkpoint for a message."""
    steps = self._checkpoints.steps() if self._checkpoints else []
    if not steps:
      return "no checkpoint has been saved yet"
    return f"the last good checkpoint is {self._checkpoints.path(steps[-1])}"

  def _wanted(self) -> dict:
    """Shapes, dtypes and places of the arrays of a train state."""
    return resume.to_tree(resume.abstract_arrays(self._abstract))

  def _open(self, run_dir: RunDirectory) -> tuple[Any, Position, Sinks]:
    """Opens the logs and goes to the newest good checkpoint, or to the start. Everything later is cut off."""
    cfg = self._cfg
    restored = None
    if cfg.checkpoint.enable_checkpointing:
      self._checkpoints = self._open_checkpoints(
        run_dir.checkpoints_path,
        max_to_keep=cfg.checkpoint.max_num_checkpoints_to_keep,
        asynchronous=cfg.checkpoint.async_checkpointing,
        say=self._console.line,
      )
      restored = self._checkpoints.restore_latest(self._wanted())
    if restored is None:
      position = Position()
      train_state = state.create_split(cfg)[1]
      if self._read_parameters:
        train_state = resume.from_tree(resume.to_tree(train_state) | {"model": self._read_parameters()}, train_state)
        self._console.line(f"Starting from the parameters of {cfg.checkpoint.load_parameters_path}")
    else:
      position = Position.from_json(restored.positions)
      train_state = resume.from_tree(restored.tree, self._abstract)
      self._dataset.train.restore(position.data)
    self._say_start(restored)
    metrics_log = MetricsLog(run_dir.metrics_path)
    metrics_log.restore(position.metrics_bytes)
    scores = tensorboard = None
    if cfg.ghost.ghost_enabled:
      writer = self._open_scores(
        run_dir.path, tuple(self._val_sets), period=cfg.ghost.ghost_log_period, fingerprint=self._dataset.fingerprint
      )
      scores = ScoreRecorder(
        writer, self._dataset.document_id, self._dataset.source.domains, run_dir.path / "ghost" / "tokens"
      )
      scores.restore(position.scores, position.completed_steps)
    if cfg.run.enable_tensorboard:
      first = position.completed_steps if position.pending is None else position.pending["step"]
      tensorboard = TensorBoardLog(run_dir.tensorboard_path, first)
    return train_state, position, Sinks(self._console, metrics_log, tensorboard, scores, self._checkpoints)

  def _reweighter(self, position: Position) -> Reweighter | None:
    if not self._cfg.ghost.ghost_reweight:
      return None
    weights = parse_weights(self._cfg.data, self._dataset.source.domains)
    reweighter = Reweighter(self._cfg.ghost, weights, self._dataset.train, self._dataset.document_id)
    reweighter.restore(position.reweighting)
    return reweighter

  def _say_start(self, restored) -> None:
    if restored is not None:
      self._console.line(f"Continuing after {restored.step} completed steps: {self._checkpoints.path(restored.step)}")
      if "steps" in self._existing.changed:
        before, now = self._existing.changed["steps"]
        self._console.line(f"steps: {before} -> {now}; the learning-rate schedule now spans {now} steps")
    elif not self._existing.is_new:
      self._console.line("The run was stopped before its first checkpoint: it starts again at step 0")

  def _announce(self, position: Position, flops, run_dir: RunDirectory) -> None:
    cfg, say = self._cfg, self._console.line
    if jax.device_count() > 1:
      say(f"training on 1 of {jax.device_count()} devices")
    params = sum(leaf.size for leaf in jax.tree.leaves(resume.to_tree(self._abstract)["model"]))
    for line in announce.start_lines(cfg, self._dataset, params, self._program.scored, flops, run_dir.path):
      say(line)
    for line in memory_report.start_lines(self._memory, self._capacity):
      say(line)
    if position.completed_steps < cfg.run.steps:
      say(self._program.describe())
      if (analysis := self._program.memory_analysis()) is not None:
        say(memory_report.compiled_line(self._memory, analysis))
      run_dir.write_facts(announce.facts(cfg, params, flops, self._program))

  def _conclude(self, outcome, run_dir: RunDirectory) -> int:
    cfg, say = self._cfg, self._console.line
    if not outcome.interrupted:
      for line in announce.end_lines(cfg, outcome, run_dir.path):
        say(line)
      return 0
    saved = f"saved in {run_dir.checkpoints_path / str(outcome.completed_steps)}"
    if not cfg.checkpoint.enable_checkpointing:
      saved = "not saved, because enable_checkpointing=false"
    elif not outcome.completed_steps:
      saved = "nothing to save"
    say(f"Stopped by {self._signals.name} after {outcome.completed_steps} of {cfg.run.steps} steps; {saved}")
    if cfg.checkpoint.enable_checkpointing:
      say(f"The same command continues it, or: python -m maxghost.train {run_dir.path / run_directory.CONFIG_FILE}")
    return self._signals.exit_code


def configure_jax(cfg: Config) -> None:
  """Global switches that follow from the config; to be called before the first array is made."""
  if "float64" in (cfg.model.dtype, cfg.model.weight_dtype):
    jax.config.update("jax_enable_x64", True)
  if cfg.run.jax_cache_dir:
    jax.config.update("jax_compilation_cache_dir", cfg.run.jax_cache_dir)


def rows_per_step(cfg: Config) -> int:
  """Rows of one step's batch: those of all its micro-batches."""
  return cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps


def batch_shapes(cfg: Config, num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of a batch, int32[B, T] by name."""
  shape = jax.ShapeDtypeStruct((num_rows, cfg.data.max_target_length), np.int32)
  return {f"{kind}{part}": shape for kind in ("inputs", "targets") for part in ("", "_position", "_segmentation")}
