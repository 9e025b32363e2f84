"""One run from start to end: builds its parts, resumes from the last checkpoint, and reports the result."""

import os
from collections.abc import Callable
from typing import Any

import jax

from maxghost.config import Config, ConfigError, plugins
from maxghost.data import tokenizer_files
from maxghost.data.build import parse_weights
from maxghost.objectives import create
from maxghost.parallel import Layout, distributed, report
from maxghost.training import compiled_steps, devices, resume, run_directory, startup_log, state
from maxghost.training.console import Console
from maxghost.training.flops import peak_flops, step_flops
from maxghost.training.host_memory import HostMemory
from maxghost.training.loop import Hardware, Sinks, TrainingLoop
from maxghost.training.memory import estimate
from maxghost.training.memory import report as memory_report
from maxghost.training.memory.table import compiled_sizes
from maxghost.training.metrics import MetricsLog, TensorBoardLog
from maxghost.training.prefetch import Batches, Prefetcher
from maxghost.training.resume import Position
from maxghost.training.reweighting import Reweighter
from maxghost.training.run_directory import Existing, RunDirectory
from maxghost.training.samples import Sampler
from maxghost.training.score_recorder import ScoreRecorder
from maxghost.training.signals import StopSignals


class Session:
  """A training run. The constructor validates, with JAX, and writes nothing; `run` trains.

  dataset: with this process's part of the rows. open_checkpoints, open_scores: make a checkpoint manager and a score
  writer for the run directory. open_parameters: maps the tree of the model's abstract arrays to a function that reads
  them, for a run that starts from a given model; None: from init_weights_seed. force: compiles a step even if it is
  estimated to need far too much memory. With several processes, the first one prints and writes common results.
  """

  def __init__(
    self,
    cfg: Config,
    existing: Existing,
    dataset,
    signals: StopSignals,
    layout: Layout,
    *,
    open_checkpoints: Callable,
    open_scores: Callable,
    open_parameters: Callable | None = None,
    console: Console | None = None,
    force: bool = False,
  ):
    HostMemory.of(cfg).check(layout.mesh.devices.flat[0])
    self._cfg, self._existing, self._dataset, self._signals = cfg, existing, dataset, signals
    self._layout, self._own = layout, devices.rows_of_process(cfg, layout)
    self._rows = devices.rows_per_step(cfg, layout.num_devices)
    self._open_checkpoints, self._open_scores = open_checkpoints, open_scores
    self._console = console or Console(None if distributed.is_first() else open(os.devnull, "w"))  # noqa: SIM115
    self._checkpoints: Any = None
    self._val_sets = cfg.data.validation_sets if cfg.ghost.ghost_enabled else {}
    self._graphdef, abstract = state.abstract_split(cfg)
    self._abstract = layout.abstract(abstract)
    report.check_rules(self._abstract, layout)
    self._spread = report.check_spread(self._abstract, layout, cfg.parallel.sharding_tolerance)
    self._memory = estimate(cfg, layout, (self._graphdef, self._abstract))
    self._capacity = memory_report.capacity(jax.local_devices()[0])
    if not force:
      memory_report.check(self._memory, self._capacity)
    self._sampler = Sampler(cfg, dataset.tokenizer) if cfg.run.sample_every else None
    self._read_parameters = open_parameters and open_parameters(self._wanted()["model"])
    for domain in self._val_sets.values():
      dataset.validation_batch(0, cfg.ghost.ghost_val_batch_size, domain)  # raises where a set has no rows
    self._program = compiled_steps.build(
      cfg,
      self._graphdef,
      self._abstract,
      devices.batch_shapes(cfg, self._rows, layout),
      (devices.batch_shapes(cfg, cfg.ghost.ghost_val_batch_size, layout),) * len(self._val_sets),
      devices.batch_shapes(cfg, cfg.data.per_device_batch_size * layout.num_devices, layout),
      dataset.max_segments,
      layout,
    )

  def run(self) -> int:
    """Trains to the end or to a signal; returns the exit code. Raises what the loop raises.

    If another process of the run is lost, this one reports it and exits at once with code 1.
    """
    try:
      return self._run()
    except (RuntimeError, ValueError) as error:  # raised by the runtimes, also through Orbax
      if not distributed.is_lost_peer(error):
        raise
      distributed.end_without_peers(error, f"{self.last_checkpoint()}; start all processes again to continue from it")
      raise

  def _run(self) -> int:
    run_dir = self._claim()
    if distributed.is_first():
      folder = run_dir.path / tokenizer_files.FOLDER
      tokenizer_files.save(self._dataset.tokenizer, self._cfg.data.tokenizer_type, folder)
    sinks = None
    prefetcher = None
    try:
      train_state, position, sinks = self._open(run_dir)
      reweighter = self._reweighter(position)  # before the first batch is drawn
      batches = Batches(self._dataset, create(self._cfg).prepare)
      prefetcher = Prefetcher(
        batches,
        lambda arrays: self._layout.put_local(arrays, self._rows),
        self._cfg.run.steps - position.completed_steps,
      )
      flops = step_flops(self._cfg.model, self._rows, self._cfg.data.max_target_length)
      self._announce(position, flops, run_dir)
      hardware = Hardware(self._layout.num_devices, peak_flops(jax.devices()[0]), self._rows, flops)
      loop = TrainingLoop(
        self._cfg,
        self._program,
        batches,
        sinks,
        self._signals,
        hardware,
        put=self._layout.put_global,
        val_sets=self._val_sets,
        reweighter=reweighter,
        sampler=self._sampler,
      )
      outcome = loop.run(train_state, position, prefetcher)
      if not position.completed_steps:  # the reader counts what this process has read
        self._console.line(self._dataset.train.describe())
    except BaseException as error:
      if distributed.is_lost_peer(error):
        raise  # closing would wait for the others
      self._close(prefetcher, sinks, run_dir)
      raise
    self._close(prefetcher, sinks, run_dir)
    return self._conclude(outcome, run_dir)

  def _claim(self) -> RunDirectory:
    """The first process claims the directory; the others wait for it."""
    if distributed.is_first():
      try:
        run_dir = run_directory.claim(self._existing, self._cfg)
      except ConfigError as error:
        distributed.gather(str(error))
        raise
    said = distributed.gather("")[0]
    if said:
      raise ConfigError(said)
    return run_dir if distributed.is_first() else RunDirectory(self._existing.path)

  @staticmethod
  def _close(prefetcher: Prefetcher | None, sinks: Sinks | None, run_dir: RunDirectory) -> None:
    if prefetcher is not None:
      prefetcher.close()
    if sinks is not None:
      sinks.close()
    run_dir.close()

  def out_of_memory(self, error: Exception) -> str:
    """Advice on a failed allocation."""
    return memory_report.too_large(error, self._memory, self._capacity)

  def last_checkpoint(self) -> str:
    """The newest checkpoint, for a message."""
    steps = self._checkpoints.steps() if self._checkpoints else []
    if not steps:
      return "no checkpoint has been saved yet"
    return f"the last good checkpoint is {self._checkpoints.path(steps[-1])}"

  def _wanted(self) -> dict:
    """Shapes, dtypes and shardings of the arrays of a train state."""
    return resume.to_tree(resume.abstract_arrays(self._abstract))

  def _open(self, run_dir: RunDirectory) -> tuple[Any, Position, Sinks]:
    """Opens the logs and restores the newest valid checkpoint, or starts; later records are removed."""
    cfg = self._cfg
    restored = None
    if cfg.checkpoint.checkpoint_period:
      self._checkpoints = self._open_checkpoints(
        run_dir.checkpoints_path,
        max_to_keep=cfg.checkpoint.max_num_checkpoints_to_keep,
        asynchronous=cfg.checkpoint.async_checkpointing,
        say=self._console.line,
      )
      restored = self._checkpoints.restore_latest(self._wanted())
    if restored is None:
      position = Position(rows=self._rows)
      train_state = state.create_split(cfg, self._layout)[1]
      if self._read_parameters:
        train_state = resume.from_tree(resume.to_tree(train_state) | {"model": self._read_parameters()}, train_state)
        self._console.line(f"Starting from the parameters of {cfg.checkpoint.load_parameters_path}")
    else:
      position = Position.from_json(restored.positions)
      self._check_rows(position, restored.positions["config"])
      train_state = resume.from_tree(restored.tree, self._abstract)
      self._dataset.train.restore(position.data)
    self._say_start(restored)
    metrics_log = scores = tensorboard = None
    if distributed.is_first():
      metrics_log = MetricsLog(run_dir.metrics_path)
      metrics_log.restore(position.metrics_bytes)
    if cfg.ghost.ghost_enabled and self._own.writes:
      scores = self._open_recorder(run_dir, position)
    if cfg.run.enable_tensorboard and distributed.is_first():
      first = position.completed_steps if position.pending is None else position.pending["step"]
      tensorboard = TensorBoardLog(run_dir.tensorboard_path, first)
    return train_state, position, Sinks(self._console, metrics_log, tensorboard, scores, self._checkpoints)

  def _open_recorder(self, run_dir: RunDirectory, position: Position) -> ScoreRecorder:
    """Opens the log of this process's rows at its position."""
    cfg = self._cfg
    optimizer = plugins.OPTIMIZERS[cfg.optimizer.opt_type]
    writer = self._open_scores(
      run_dir.path,
      tuple(self._val_sets),
      process_index=distributed.index(),
      period=cfg.ghost.ghost_log_period,
      fingerprint=self._dataset.fingerprint,
      num_processes=distributed.count(),
      objective=cfg.optimizer.objective,
      ledger=plugins.ledger_columns(cfg.optimizer.opt_type),
      direction=str(optimizer.direction) if cfg.ghost.ghost_direction == "auto" else cfg.ghost.ghost_direction,
    )
    recorder = ScoreRecorder(
      writer, self._dataset.document_id, self._dataset.source.domains, run_dir.path / "ghost" / "tokens"
    )
    recorder.restore(position.scores_of(distributed.index()), position.completed_steps)
    return recorder

  def _check_rows(self, position: Position, then: dict) -> None:
    """Raises ConfigError if this command would train on batches of another size."""
    if position.rows and position.rows != self._rows:
      own = self._cfg.optimizer.gradient_accumulation_steps * self._layout.num_devices
      way = f"per_device_batch_size={position.rows // own}" if position.rows % own == 0 else "another number of devices"
      raise ConfigError(
        f"per_device_batch_size={self._cfg.data.per_device_batch_size} on {self._layout.num_devices} devices is "
        f"{self._rows} rows per step, but {self._existing.path} was trained with {position.rows} "
        f"(per_device_batch_size={then.get('per_device_batch_size')}); use {way}, or another run_name"
      )

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
    params = sum(leaf.size for leaf in jax.tree.leaves(resume.to_tree(self._abstract)["model"]))
    for line in startup_log.start_lines(
      cfg, self._dataset, params, self._program.scored, flops, run_dir.path, self._layout, self._spread
    ):
      say(line)
    for line in memory_report.start_lines(self._memory, self._capacity):
      say(line)
    if position.completed_steps < cfg.run.steps:
      say(self._program.describe())
      if (analysis := self._program.memory_analysis()) is not None:
        say(self._memory.beside(compiled_sizes(analysis)))
      if distributed.is_first():
        run_dir.write_facts(startup_log.facts(cfg, params, flops, self._program, self._layout))

  def _conclude(self, outcome, run_dir: RunDirectory) -> int:
    cfg, say = self._cfg, self._console.line
    if not outcome.interrupted:
      if distributed.is_first():
        for line in startup_log.end_lines(cfg, outcome, run_dir.path, self._rows):
          say(line)
      return 0
    saved = f"saved in {run_dir.checkpoints_path / str(outcome.completed_steps)}"
    if not cfg.checkpoint.checkpoint_period:
      saved = "not saved, because checkpoint_period=0"
    elif not outcome.completed_steps:
      saved = "nothing to save"
    say(f"Stopped by {self._signals.name} after {outcome.completed_steps} of {cfg.run.steps} steps; {saved}")
    if cfg.checkpoint.checkpoint_period:
      say(f"The same command continues it, or: python -m maxghost.train {run_dir.path / run_directory.CONFIG_FILE}")
    return self._signals.exit_code
