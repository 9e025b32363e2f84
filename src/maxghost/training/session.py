"""One run from start to end: builds its parts, resumes from the last checkpoint, and reports the result."""

import contextlib
import errno
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import maxghost
from maxghost import config
from maxghost.config.files import sealed, write_text
from maxghost.config.values import first_line
from maxghost.data import tokenizer_files
from maxghost.data.build import parse_weights
from maxghost.objectives import create
from maxghost.parallel import collectives, distributed
from maxghost.parallel.watch import Watch
from maxghost.serving.samples import Sampler
from maxghost.training import compiled_steps, console, memory_report, run_directory, score_recorder, state, trackers
from maxghost.training.batches import Prefetcher
from maxghost.training.loop import Sinks, TrainingLoop
from maxghost.training.metrics import MetricsLog
from maxghost.training.plan import Plan
from maxghost.training.reweighting import Reweighter
from maxghost.training.rollouts import Rollouts
from maxghost.training.signals import StopSignals
from maxghost.training.state import Position


class Session:
  """A training run. The constructor validates, with JAX, and writes nothing; `run` trains.

  dataset: with this process's part of the rows. open_checkpoints: makes a checkpoint manager for the run directory.
  open_parameters: maps the tree of the state's abstract arrays to a function that reads all or some of them from a
  given model; None: from init_weights_seed. open_teacher: the same for the teacher. force: compiles a step even if it
  is estimated to need far too much memory.
  With several processes, process 0 prints and writes what is common.
  """

  def __init__(self, plan: Plan, existing: run_directory.Existing, dataset, signals: StopSignals, *,
               open_checkpoints: Callable, open_parameters: Callable | None, open_teacher: Callable | None,
               force: bool, watch: Watch):  # fmt: skip
    cfg, self._watch = plan.cfg, watch
    self._watch.explain = self._first_collective
    self._watch.advice = lambda: f"{self.last_checkpoint()}; start all processes again to continue from it"
    self._plan, self._cfg, self._existing, self._dataset, self._signals = plan, cfg, existing, dataset, signals
    self._path, self._open_checkpoints = existing.path, open_checkpoints
    self._console = console.Console(None if distributed.is_first() else open(os.devnull, "w"))  # noqa: SIM115
    self._checkpoints: Any = None
    self._capacity = memory_report.capacity(jax.local_devices()[0])
    if not force:
      memory_report.check(plan.memory, self._capacity)
    self._sampler = Sampler(cfg, dataset.tokenizer) if cfg.run.sample_every else None
    wanted = state.to_tree(plan.inner)
    self._read_parameters = open_parameters and open_parameters(wanted)
    self._read_teacher = open_teacher and open_teacher(wanted[state.REFERENCE])
    dataset.notes()  # raises where documents cannot be trained on
    for domain in cfg.val_sets.values():
      dataset.validation_batch(0, cfg.ghost.ghost_val_batch_size, domain)  # raises where a set has no rows
    self._program = compiled_steps.build(plan)

  def run(self) -> int:
    """Trains to the end or to a signal; returns the exit code. Exits at once with 1 if a process of the run is lost."""
    try:
      with contextlib.ExitStack() as opened:
        opened.enter_context(self._claim())
        try:
          completed, seconds = self._train(opened)
        except BaseException as error:
          if distributed.is_lost_peer(error) or getattr(error, "errno", 0) == errno.ESTALE:
            opened.pop_all()  # closing would wait for the others, or write into the directory of another run
          if isinstance(error, config.ConfigError) and distributed.is_first():
            run_directory.withdraw(self._existing)
          raise
      return self._conclude(completed, seconds)
    except (RuntimeError, ValueError) as error:  # raised by the runtimes, also through Orbax
      if distributed.is_lost_peer(error):
        self._watch.report(f"another process of the run is lost ({first_line(error)})")
        distributed.exit_at_once(1)  # waiting for it would not end
      raise

  def out_of_memory(self, error: Exception) -> str:
    """Advice on a failed allocation."""
    return memory_report.too_large(error, self._plan.memory, self._capacity)

  def last_checkpoint(self) -> str:
    """The newest checkpoint, for a message."""
    newest = self._checkpoints.newest() if self._checkpoints else ""
    return f"the last good checkpoint is {newest}" if newest else "no checkpoint has been saved yet"

  def _first_collective(self, program: str) -> str:
    """The first place where processes wait for each other in a program, for a message."""
    try:
      text = self._program.executable(program).call.as_text() or ""
    except jax.errors.JaxRuntimeError as error:  # some compilers cannot show their programs
      return f"whose collectives cannot be listed: {first_line(error)}"
    first = collectives.first_between_processes(text, self._plan.layout.mesh)
    return f"whose first collective between processes is the {first}" if first else "which has no collectives"

  def _claim(self) -> contextlib.AbstractContextManager:
    """Process 0 locks the run directory, and the others wait for it. All compare their data."""
    lock, problems = contextlib.nullcontext(), ()
    if distributed.is_first():
      try:
        lock = run_directory.claim(self._existing, self._cfg)
      except config.ConfigError as error:
        problems = error.problems
    said = distributed.gather([problems, self._dataset.train.state()["fingerprint"]])
    if said[0][0]:
      raise config.ConfigError(*said[0][0])
    if other := next((number for number, (_, data) in enumerate(said) if data != said[0][1]), 0):
      raise config.ConfigError(f"process {other} reads other data than process 0; give all processes the same files")
    return lock

  def _train(self, opened: contextlib.ExitStack) -> tuple[int, list[float]]:
    """Opens logs and checkpoints, which `opened` closes, and runs the loop."""
    plan, cfg, dataset, domains = self._plan, self._cfg, self._dataset, self._cfg.data.validation_sets
    train_state, position = self._restore()
    sinks = self._open_sinks(position)
    opened.callback(sinks.close)
    if distributed.is_first():  # only now: a command that is refused changes nothing
      folder, template = self._path / tokenizer_files.FOLDER, cfg.data.chat_template_path
      tokenizer_files.save(dataset.tokenizer, cfg.data.tokenizer_type, folder, template)
      config.save(cfg, self._path / run_directory.CONFIG_FILE)
    reweighter = None
    if cfg.ghost.ghost_reweight:
      weights = parse_weights(cfg.data, dataset.source.domains)
      reweighter = Reweighter(cfg.ghost, weights, dataset.train, dataset.document_id, plan.own.writes)
      reweighter.restore(position.reweighting)  # before the first batch is drawn
    prepare = {name: create(cfg, own).prepared for name, own in zip(domains, cfg.set_objectives, strict=True)}

    def validation_batch(index: int, num_rows: int, name: str = "") -> Any:
      name = name or next(iter(domains))
      return prepare[name](dataset.validation_batch(index, num_rows, domains[name]))

    put: Callable = functools.partial(plan.layout.put, num_rows=plan.rows)
    num_batches, rollouts = cfg.run.steps - position.completed_steps, None
    if cfg.samples:
      rollouts = Rollouts(cfg, dataset, plan.layout, self._path)
      opened.callback(rollouts.close)
      rollouts.restore(position.rollouts)
      put, num_batches = lambda arrays: None, rollouts.num_samplings(position.completed_steps)
    prefetcher = Prefetcher(dataset.train, put, num_batches, create(cfg).prepared)
    opened.callback(prefetcher.close)
    self._announce(position)
    loop = TrainingLoop(
      plan, self._program, validation_batch, sinks, self._signals,
      reweighter=reweighter, sampler=self._sampler, rollouts=rollouts,
    )  # fmt: skip
    result = loop.run(train_state, position, prefetcher)
    if not position.completed_steps:  # the reader counts what this process has read
      self._console.line(dataset.train.describe())
    return result

  def _restore(self) -> tuple[Any, Position]:
    """The newest valid checkpoint, or the start of the run."""
    plan, cfg, say, restored, frozen = self._plan, self._cfg, self._console.line, None, {}
    if cfg.checkpoint.checkpoint_period:
      kept = {"max_to_keep": cfg.checkpoint.max_num_checkpoints_to_keep, "say": say}
      kept["asynchronous"] = cfg.checkpoint.async_checkpointing
      kept["local"] = cfg.checkpoint.local_checkpoint_directory if cfg.checkpoint.local_checkpoint_period else ""
      self._checkpoints = self._open_checkpoints(self._path / run_directory.CHECKPOINTS, **kept)
      own, frozen = state.saved_parts(plan.state)
      restored = self._checkpoints.restore_latest(own)
    if restored is not None:
      position = Position.from_json(restored.positions)
      run_directory.check_saved(self._path, restored.positions["config"], cfg)
      if position.rows not in (0, plan.rows):
        own = cfg.optimizer.gradient_accumulation_steps * plan.layout.num_devices
        way = "another number of devices" if position.rows % own else f"per_device_batch_size={position.rows // own}"
        was = f"(per_device_batch_size={restored.positions['config'].get('per_device_batch_size')})"
        said = f"per_device_batch_size={cfg.data.per_device_batch_size} on {plan.layout.num_devices} devices is"
        then = f"{plan.rows} rows per step, but {self._path} was trained with {position.rows} {was}"
        raise config.ConfigError(f"{said} {then}; use {way}, or another run_name")
      self._dataset.train.restore(position.data)
      say(f"Continuing after {restored.step} completed steps: {restored.path}")
      if "steps" in self._existing.changed:
        before, now = self._existing.changed["steps"]
        say(f"steps: {before} -> {now}; the learning-rate schedule now spans {now} steps")
      if cfg.model.num_experts > 1 and cfg.model.load_balance_loss_weight:
        for key in sorted(name for name in self._existing.changed if "pipeline" in name):
          say(f"{key} is another: the balance loss of experts is computed per micro-batch of the pipeline")
      if frozen:
        _, kept = state.saved_parts(self._begun())
        base, other = cfg.checkpoint.given, cfg.optimizer.distill_teacher or cfg.adapter.lora_restore_path
        self._checkpoints.check_frozen(restored, kept, {"model": base, state.REFERENCE: other or base})
        restored = restored._replace(tree=state.merged(restored.tree, kept))
      return state.from_tree(restored.tree, plan.state), position
    train_state = self._begun()
    if given := cfg.checkpoint.load_parameters_path:
      say(f"Starting from the parameters of {given}")
    if given := cfg.adapter.lora_restore_path:
      base = "" if cfg.checkpoint.given else ", on new random weights, because load_parameters_path is empty"
      say(f"Starting from the adapters of {given}{base}")
    first = 0
    if path := cfg.checkpoint.load_full_state_path:
      first = int(state.to_tree(train_state)["optimizer"]["step"])
      say(f"Continuing after the {first} steps of {path}, on data read from the start")
    if not self._existing.is_new:
      say(f"The run was stopped before its first checkpoint: it starts again at step {first}")
    return train_state, Position(completed_steps=first, rows=plan.rows)

  def _begun(self) -> Any:
    """The initial state of the run. A reference model is a copy of its parameters, or the teacher."""
    plan, given = self._plan, self._read_parameters() if self._read_parameters else {}
    tree = state.completed(given, self._cfg, plan.layout, plan.teacher)
    if reference := state.to_tree(plan.inner).get(state.REFERENCE):
      model = self._read_teacher()["model"] if self._read_teacher else tree["model"]
      tree[state.REFERENCE] = jax.tree.map(jnp.copy, state.chosen(model, reference))
    begun = state.from_tree(tree, plan.inner)
    return plan.apart.begin(begun) if plan.apart else begun

  def _open_sinks(self, position: Position) -> Sinks:
    """Opens the logs at a position; later records are removed."""
    metrics_log, scores, followers, sets = None, None, (), tuple(self._cfg.val_sets)
    document, domains = self._dataset.document_id, self._dataset.source.domains
    if distributed.is_first():
      metrics_log = MetricsLog(self._path / run_directory.METRICS_FILE)
      metrics_log.restore(position.metrics_bytes, position.metrics_crc)
      first = position.completed_steps if position.pending is None else position.pending["step"]
      followers = trackers.open_all(self._cfg, self._path, first)
    if self._cfg.val_sets:
      scores = score_recorder.open_recorder(self._cfg, self._dataset, self._path, self._plan.slices)
      scores.restore(position.scores_of(distributed.index()), position.completed_steps)
      scores = scores if self._plan.own.writes else None  # it may have written on an earlier mesh
    by_domain = score_recorder.DomainSums(sets, domains, document, self._plan.own.writes)
    return Sinks(self._console, metrics_log, scores, self._checkpoints, followers, by_domain, self._watch)

  def _announce(self, position: Position) -> None:
    plan, program, say = self._plan, self._program, self._console.line
    lines = console.start_lines(plan, self._dataset, program.scored, self._path) + plan.memory.table()
    if self._capacity is not None:
      lines += memory_report.verdict(plan.memory, self._capacity)
    for line in lines:
      say(line)
    if position.completed_steps < self._cfg.run.steps:
      say("Compiling the train step, which takes seconds to minutes; then it runs step by step")
      compiled = program.executable()
      say(compiled.describe())
      if (analysis := compiled.call.memory_analysis()) is not None:
        say(plan.memory.beside(memory_report.compiled_sizes(analysis)))
      if distributed.is_first():
        self._write_facts(compiled.describe())

  def _write_facts(self, train_step: str) -> None:
    """Writes run_facts.json, facts of this process besides the config, for the report."""
    plan, device = self._plan, jax.devices()[0]
    facts = {
      "parameters": f"{plan.num_params:,}",
      "device": f"{plan.layout.num_devices} x {device.device_kind} ({device.platform})",
      **({"mesh": plan.mesh} if plan.layout.num_devices > 1 else {}), "rows per step": f"{plan.rows:,}",
      "arithmetic per step": f"{plan.flops.total / 1e12:.4f} TFLOP in the model", "train step": train_step,
      "versions": f"maxghost {maxghost.__version__}, jax {jax.__version__}, "
      f"flax {importlib.metadata.version('flax')}, Python {platform.python_version()}",
    }  # fmt: skip
    write_text(self._path / "run_facts.json", json.dumps(sealed(facts), indent=2) + "\n")

  def _conclude(self, completed: int, seconds: list[float]) -> int:
    if interrupted := completed < self._cfg.run.steps:
      lines = console.interrupted_lines(self._cfg, completed, self._path, self._signals.name)
    else:
      lines = console.end_lines(self._plan, seconds, self._path) if distributed.is_first() else []
    for line in lines:
      self._console.line(line)
    return self._signals.exit_code if interrupted else 0
