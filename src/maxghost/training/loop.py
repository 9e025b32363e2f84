"""The training loop: one step runs on the device while the host reads the step before.

One iteration takes the batch that was fetched ahead, starts step k, then reads the outputs of step k - 1. The host
waits there, for outputs that are ready about when step k begins. Otherwise only evaluations and checkpoints wait, and
their time is not counted in any step.

A step's record is written one step late, because its `actual_drop` needs the validation loss after it. The pending
record is part of every checkpoint, so that an interruption neither loses nor duplicates it.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from maxghost.optimizers import learning_rate_schedule
from maxghost.parallel import distributed
from maxghost.training import metrics
from maxghost.training.batches import Fetched, Prefetcher, ValidationRows
from maxghost.training.compiled_steps import Program
from maxghost.training.console import Console, eval_line, step_line
from maxghost.training.metrics import MetricsLog
from maxghost.training.plan import Plan
from maxghost.training.reweighting import Reweighter
from maxghost.training.rollouts import Rollouts
from maxghost.training.score_recorder import ScoreRecorder
from maxghost.training.signals import StopSignals
from maxghost.training.state import Position, carry, saved_parts


class Sinks(NamedTuple):
  """The outputs of a run; None: switched off. checkpoints: a `CheckpointManager`. trackers: as in `trackers.py`.
  by_domain: a `DomainSums`, which unlike `scores` every process has. watch: a `Watch`, told what the loop does."""

  console: Console
  metrics: MetricsLog | None
  scores: ScoreRecorder | None
  checkpoints: Any
  trackers: tuple = ()
  by_domain: Callable[..., Callable[[], dict[str, float]]] = lambda outputs, batch: dict
  watch: Callable[..., None] = lambda step, doing, program="", bounded=False: None

  def close(self) -> None:
    """Writes everything to disk, also after an error."""
    with contextlib.ExitStack() as stack:  # closes all, even if one fails
      for sink in (self.metrics, self.scores, self.checkpoints, *self.trackers):
        if sink is not None:
          stack.callback(sink.close)


class TrainingLoop:
  """Runs the steps of a run from a position to its end, or to a signal. validation_batch: as `draw` of
  `ValidationRows`. sampler: maps the train state to a sampled text. rollouts: samples the answers that the steps train
  on; None: training data is only read."""

  def __init__(self, plan: Plan, program: Program, validation_batch: Callable, sinks: Sinks, signals: StopSignals, *,
               reweighter: Reweighter | None = None, sampler: Callable[[Any], str] | None = None,
               rollouts: Rollouts | None = None):  # fmt: skip
    self._plan, self._cfg, self._program, self._sinks = plan, plan.cfg, program, sinks
    self._signals, self._val_sets = signals, tuple(plan.cfg.val_sets)
    self._validation = ValidationRows(plan.cfg.ghost, validation_batch, plan.cfg.val_sets, plan.layout.put)
    self._reweighter, self._sampler, self._rollouts = reweighter, sampler, rollouts
    self._read: Callable[[], None] | None = None  # reads the outputs of the started step
    self._by_domain: Callable[[], dict[str, float]] = dict  # belongs to the pending record
    self._seconds: list[float] = []
    self._eval_batches: list = []
    self._stop = distributed.StopFlag()

  def run(self, state, position: Position, prefetcher: Prefetcher) -> tuple[int, list[float]]:
    """Trains from `position` on; returns the completed steps, and the seconds of each of this process, the first a
    warm-up. The state is donated. Raises NonFiniteMetricError, and what the sinks raise. When this returns, the last
    checkpoint is on disk. After the last step the closing validation loss is recorded. The last record of
    metrics.jsonl is written after everything else, so it marks a complete run."""
    self._state, self._position, self._saved_steps = state, position, position.completed_steps
    self._pending: dict[str, Any] | None = position.pending  # the record of the last step
    self._closing: dict[str, Any] | None = position.closing  # outputs of `step.make_closing` before an outer step
    self._validation.first = position.completed_steps if position.open_loss is None else 0
    num_steps = self._cfg.run.steps
    rate = learning_rate_schedule(self._cfg.optimizer, num_steps)(max(position.completed_steps - 1, 0))
    taken = (position.pending or {}).get("learning/current_learning_rate", rate)
    same = position.closing is not None or np.isclose(taken, rate, rtol=1e-5, atol=0)
    self._rescheduled = None if same else position.completed_steps
    self._sinks.console.start(num_steps, position.completed_steps)
    try:
      self._last_ready = time.perf_counter()
      for step in range(position.completed_steps, num_steps):
        if self._stop.any(bool(self._signals.requested)):
          break
        self._turn(step, self._fetched(step, prefetcher))
      self._read_started()
      self._sinks.watch(None, "ends the run")
      if self._sinks.checkpoints:
        self._save()
        self._sinks.checkpoints.wait()
      if self._position.completed_steps == num_steps:
        self._close_account()
      self._write_pending(show=True)
    except metrics.NonFiniteMetricError:
      self._write_pending(show=True)
      raise
    finally:
      self._sinks.console.stop()
    return self._position.completed_steps, self._seconds

  # Starting a step.

  def _fetched(self, step: int, prefetcher: Prefetcher) -> Fetched:
    """The next batch. Sampling answers waits for the step before; its time is not part of any step's."""
    self._sinks.watch(step, "reads its batch", bounded=self._rollouts is None)
    if self._rollouts is None:
      return next(prefetcher)
    self._read_started()
    fetched = self._rollouts(step, self._state, prefetcher)
    self._restart_clock()
    return fetched

  def _turn(self, step: int, fetched: Fetched) -> None:
    replaced = self._closing or self._close_replaced_rows(step)
    is_plain = bool(self._val_sets) and step % self._cfg.ghost.ghost_every != 0
    name = "plain_step" if is_plain else "train_step"
    self._sinks.watch(step, f"waits until {name} is compiled")
    run = self._program.function(name)
    self._program.check_objective(self._cfg, self._state, fetched.arrays)
    self._sinks.watch(step, f"starts {name}", name, bounded=True)
    self._state, outputs = run(self._state, fetched.arrays, () if is_plain else self._validation.batches(step))
    self._read_started()
    self._read = functools.partial(self._read_outputs, step, name, fetched, outputs, replaced)
    done, is_last = step + 1, step + 1 == self._cfg.run.steps
    if self._program.outer:
      self._sinks.watch(step, "takes an outer step")
      self._state, self._closing, account = self._program.outer(self._state, step, self._validation)
      if account:
        self._read_started()
        self._pending = (self._pending or {}) | account
    interval = self._cfg.run.eval_interval
    if interval > 0 and (is_last or done % interval == 0):
      self._evaluate()
    if self._sampler and (is_last or done % self._cfg.run.sample_every == 0):
      self._sample()
    periods = self._cfg.checkpoint.checkpoint_period, self._cfg.checkpoint.local_checkpoint_period
    durable, local = (period > 0 and done % period == 0 for period in periods)
    if self._sinks.checkpoints and not is_last and (durable or local):
      self._read_started()
      self._save(local=not durable)

  def _close_replaced_rows(self, step: int) -> dict[str, jax.Array] | None:
    """Closes the account of rows that this step replaces (`step.make_closing`), before the state is donated."""
    if not self._validation.replaces(step):
      return None
    is_ready = self._program.is_ready("closing")
    if not is_ready:  # still compiling, early in a run: not counted in a step's time
      self._read_started()
    self._sinks.watch(step, "closes the account of earlier rows")  # which may wait for a compilation
    if not is_ready:
      self._program.executable("closing")
      self._restart_clock()
    closing = self._program.function("closing")(self._state, self._validation.batches(step - 1))
    if turned := closing.pop("turned", None):
      self._state = carry(self._state, turned)
    return closing

  # Evaluations, checkpoints and the end, which wait for results.

  def _evaluate(self) -> None:
    """Adds eval/*, always on the same rows, to the record of the step just started."""
    self._read_started()
    self._sinks.watch(None, "evaluates", "evaluate")
    if not self._eval_batches:
      num_rows, put = self._cfg.eval_rows * self._plan.layout.num_devices, self._plan.layout.put
      self._eval_batches = [put(self._validation.draw(i, num_rows).arrays) for i in range(self._cfg.run.eval_steps)]
    sums = [self._program.function("evaluate")(self._state, batch) for batch in self._eval_batches]
    assert self._pending is not None
    self._pending |= metrics.eval_metrics(jax.device_get(sums), self._cfg.evaluated)
    self._sinks.console.line(eval_line(self._pending["step"], self._pending))
    self._restart_clock()

  def _sample(self) -> None:
    """Adds a text of the model to the record of the step just started."""
    self._read_started()
    self._sinks.watch(None, "samples a text")
    assert self._sampler is not None and self._pending is not None
    text = self._pending[metrics.SAMPLE] = self._sampler(self._state)
    self._sinks.console.line(f"sample after step {self._pending['step']}: {json.dumps(text, ensure_ascii=False)}")
    self._restart_clock()

  def _save(self, local: bool = False) -> None:
    """Saves the state after the last step that was read, with the positions of the same moment."""
    sinks, completed = self._sinks, self._position.completed_steps
    if completed == self._saved_steps and not sinks.checkpoints.only_local:
      return
    sinks.watch(None, "saves a checkpoint")
    log, scores, closing = sinks.metrics, sinks.scores, self._closing
    position = dataclasses.replace(
      self._position, metrics_bytes=log.position() if log else 0, metrics_crc=log.checksum if log else None,
      pending=self._pending and self._pending | self._by_domain(), scores=scores.position() if scores else None,
      reweighting=self._reweighter.state() if self._reweighter else None,
      rollouts=self._rollouts.position(completed) if self._rollouts else None,
      closing=closing and {name: np.asarray(value).tolist() for name, value in closing.items()},
    ).of_all_processes()  # fmt: skip
    if not local:
      sinks.console.line(f"Saving a checkpoint after {completed} completed steps")
      self._saved_steps = completed
    own, frozen = saved_parts(self._state)
    positions = dataclasses.asdict(position) | {"config": self._cfg.flat()}
    sinks.checkpoints.save(completed, own, positions, frozen, local=local)
    self._restart_clock()

  def _close_account(self) -> None:
    """Records the validation loss after the last step, which closes the account of that step."""
    num_steps = self._cfg.run.steps
    if not self._validation.has_open_account(num_steps):
      return
    closing = self._closing or self._program.function("closing")(self._state, self._validation.batches(num_steps - 1))
    closing.pop("turned", None)
    closing = self._close_step(num_steps, closing)
    if self._sinks.scores:
      self._sinks.scores.record(num_steps, None, closing, None)
      self._sinks.scores.position()  # on disk before the last record of metrics.jsonl says that the run is complete

  # Reading the outputs of a step.

  def _read_started(self) -> None:
    if self._read is not None:
      read, self._read = self._read, None
      read()

  def _read_outputs(self, step: int, program: str, fetched: Fetched, outputs: Any, replaced: dict | None) -> None:
    """Reads a step's outputs and completes the record before it. replaced: `step.make_closing` on replaced rows."""
    self._sinks.watch(step, f"waits for {program}", program, bounded=True)
    outputs = self._program.to_host(outputs)  # waits until the step is done
    seconds = self._restart_clock()
    metrics.check_finite(step, outputs)
    closing = None
    if self._validation.closes(step):
      here = {"prev_val_loss": outputs.get("val_loss")} | {k: v for k, v in outputs.items() if k == "prev_predicted"}
      closing = self._close_step(step, here if replaced is None else replaced)
    open_loss = outputs["val_loss"].tolist() if self._validation.is_fresh(step) else self._position.open_loss
    self._write_pending()
    record = {"step": step} | metrics.learning_metrics(outputs, self._cfg.optimizer.objective)
    record |= self._plan.rates(seconds) | fetched.metrics
    if self._rollouts:
      self._rollouts.write(fetched)
    scores = self._sinks.scores
    if "val_loss" in outputs:
      record |= metrics.ghost_metrics(outputs, self._val_sets)
      if unscored := metrics.unscored_line(step, outputs):
        self._sinks.console.line(unscored)
      self._by_domain = self._sinks.by_domain(outputs, fetched.batch)
      if scores:
        scores.record(step, outputs, closing, fetched.batch)
    elif scores and closing is not None:
      scores.record(step, None, closing, None)
    if self._reweighter:
      record |= self._reweighter.observe(step, outputs, fetched.batch)
    self._pending = record
    self._seconds.append(seconds)
    changed = {"completed_steps": step + 1, "data": fetched.position, "open_loss": open_loss}
    self._position = dataclasses.replace(self._position, **changed)
    self._sinks.console.advance(step + 1, record["learning/loss"])

  def _restart_clock(self) -> float:
    """Seconds since the previous result was ready: the actual time of a step."""
    before, self._last_ready = self._last_ready, time.perf_counter()
    return self._last_ready - before

  def _close_step(self, step: int, closing: dict) -> dict[str, np.ndarray]:
    """Adds to the record of step - 1 the drop since the validation loss was last measured, and its curvature.

    Returns closing (`step.make_closing`) on the host. By the trapezoid rule the step lowered the loss by half the sum
    of what the gradients before and after it predict; curvature is that minus the prediction before it, which may
    contain some already.
    """
    assert self._pending is not None and self._position.open_loss is not None, "a step is open"
    closing = {name: np.asarray(value) for name, value in self._program.to_host(closing).items()}
    if step == self._rescheduled:  # the update was taken at another rate than the schedule with more steps says
      closing.pop("prev_predicted", None)
    if (num_steps := self._validation.account_steps(step)) > 1:
      self._pending["ghost/account_steps"] = num_steps
    for k, (name, before) in enumerate(zip(self._val_sets, self._position.open_loss, strict=True)):
      self._pending[f"ghost/actual_drop/{name}"] = before - float(closing["prev_val_loss"][k])
      predicted = self._pending.get(f"ghost/predicted_drop/{name}")
      if "prev_predicted" in closing and predicted is not None:
        ahead = self._pending.get(f"ghost/predicted_curvature/{name}", 0.0)
        self._pending[f"ghost/curvature/{name}"] = (float(closing["prev_predicted"][k]) - predicted - ahead) / 2
    return closing

  def _write_pending(self, show: bool = False) -> None:
    """Writes the pending record to the logs, and every `log_period` steps (or with `show`) to the console."""
    if self._pending is None:
      return
    record, self._pending, self._by_domain = self._pending | self._by_domain(), None, dict
    for log in (self._sinks.metrics, *self._sinks.trackers):
      if log:
        log.append(record)
    if show or record["step"] % self._cfg.run.log_period == 0:
      self._sinks.console.line(step_line(record, self._val_sets))
