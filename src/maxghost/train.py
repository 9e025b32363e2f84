"""`python -m maxghost.train configs/base.yml [key=value ...]`: trains a model and scores every training document.

The same command continues an interrupted run. Exit codes: 0 done, or stopped by SIGTERM with everything saved; 1 the
run failed, with the reason in one line; 2 wrong input, nothing was written; 130 Ctrl-C.
"""

import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping

from maxghost import cli, left_with
from maxghost.config import Config, ConfigError
from maxghost.config.values import print_problem
from maxghost.training import run_directory, trackers
from maxghost.training.run_directory import Existing
from maxghost.training.signals import StopSignals

SWITCHES = {"force": "starts a step that is estimated to need far more memory than there is"}


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns the exit code."""
  sys.unraisablehook = _report_unraisable  # to the end of the process, since such callbacks may come late
  with StopSignals() as signals:  # before JAX is imported, whose own code loses an early Ctrl-C
    try:
      code = cli.run_command(functools.partial(_run, signals=signals), argv, "train", SWITCHES)
    except Exception:
      if not _is_one_of_several():
        raise
      traceback.print_exc()
      code = 1
    if code and _is_one_of_several():
      from maxghost.parallel import watch

      watch.leave(code)
    return code


def _is_one_of_several() -> bool:
  """Whether this process has joined others. Does not import JAX, without which none has."""
  return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _report_unraisable(unraisable, before=sys.unraisablehook) -> None:
  """Leaves out callbacks of TensorStore that find the event loop of a failed save closed; the command says why."""
  if not isinstance(unraisable.exc_value, RuntimeError) or str(unraisable.exc_value) != "Event loop is closed":
    before(unraisable)


def _run(cfg: Config, force: bool, signals: StopSignals) -> int:
  existing = run_directory.inspect(cfg)
  if (done := existing.completed_steps) == cfg.run.steps:
    print(f"{existing.path} is complete: {done} steps.\nTo train longer, set steps={2 * done}")
    print(f"Report: python -m maxghost.report {shlex.quote(str(existing.path))}")
    return 0
  lost = f"the run in {existing.path} would be overwritten; choose another run_name"
  if not existing.is_new and not cfg.checkpoint.checkpoint_period:
    raise ConfigError(f"checkpoint_period=0: {lost}")
  if done and not run_directory.has_checkpoint(existing.path):
    raise ConfigError(f"steps={cfg.run.steps}: after {done} steps there is no checkpoint to continue from, and {lost}")
  from maxghost import load_model
  from maxghost.data import build, rewards, teacher_logits

  trackers.check(cfg)
  teacher_logits.check(cfg)
  for name in cfg.rollout.reward_functions if cfg.samples else ():
    rewards.load(name)
  open_parameters, teacher = _parameters(cfg, existing), load_model.teacher(cfg)
  corpus = build.open_all(cfg.data, cfg.run.data_shuffle_seed, cfg.model.vocab_size, cfg.records)
  return _train(cfg, existing, corpus, signals, open_parameters, force, teacher or (None, None))


def _parameters(cfg: Config, existing: Existing) -> Callable | None:
  """A function that opens what the run begins with; None for a run that has a checkpoint and needs it no more."""
  resumed = run_directory.has_checkpoint(existing.path)
  needed = not resumed or cfg.adapter.lora_rank or cfg.reference == "start"
  if not needed or not (cfg.checkpoint.given or cfg.adapter.lora_restore_path):
    return None
  from maxghost import load_model
  from maxghost.interop import model_path

  place = load_model.check_config(cfg) if cfg.checkpoint.given else None
  if place and cfg.checkpoint.load_full_state_path:
    load_model.check_steps(place, cfg)

  def open_parameters(wanted: Mapping) -> Callable[[], dict]:
    wanted = wanted if cfg.checkpoint.load_full_state_path else {"model": wanted["model"]}
    if cfg.adapter.lora_rank:
      read = load_model.open_adapted(place, cfg, wanted, resumed and cfg.reference != "start")
    else:
      assert place is not None
      read = load_model.open_given(place, cfg, wanted)

    def read_all() -> dict:
      tree = read()
      if place:
        model_path.keep_huggingface(place, cfg, existing.path)
      return tree

    return read_all

  return open_parameters


def _train(
  cfg: Config, existing: Existing, corpus, signals: StopSignals, open_parameters: Callable | None, force: bool, teacher
) -> int:
  """Trains and returns the exit code. corpus: (source, tokenizer). teacher: as of `load_model`. Imports JAX."""
  from maxghost import data
  from maxghost.checkpoint.manager import CheckpointError, CheckpointManager
  from maxghost.data import teacher_logits
  from maxghost.data.rewards import RolloutError
  from maxghost.parallel import distributed
  from maxghost.parallel.watch import Watch
  from maxghost.training import devices
  from maxghost.training.metrics import NonFiniteMetricError
  from maxghost.training.plan import Plan
  from maxghost.training.score_recorder import ScoreLogError
  from maxghost.training.session import Session

  session = None
  try:
    if (code := _stopped(signals)) is not None:
      return code
    layout = devices.open_layout(cfg)
    plan, watch = Plan.of(cfg, layout, teacher[0]), Watch(cfg.parallel.jax_distributed_timeouts[1])
    watch.start()
    (source, tokenizer), own = corpus, plan.own
    read = plan.rows // (cfg.rollout.num_generations if cfg.samples else 1)  # only the prompts of sampled answers
    dataset = data.make_dataset(
      source, cfg.data, cfg.run.data_shuffle_seed, own.num_shards, own.shard, tokenizer=tokenizer, records=cfg.records,
      batch_size=read, answer_length=cfg.rollout.max_completion_length if cfg.samples else 0)  # fmt: skip
    if cfg.data.offline_data_dir:
      teacher_logits.bind(cfg.data.offline_data_dir, plan.rows, dataset.train)
    session = Session(
      plan, existing, dataset, signals, open_checkpoints=CheckpointManager, open_parameters=open_parameters,
      force=force, open_teacher=teacher[1], watch=watch)  # fmt: skip
    code = _stopped(signals)
    return session.run() if code is None else code
  except NonFiniteMetricError as error:
    print_problem(f"{error}; {session.last_checkpoint() if session else ''}")
  except (CheckpointError, RolloutError, ScoreLogError, OSError) as error:
    print_problem(error)
    if isinstance(error, BrokenPipeError):  # of which the line before says nothing
      print_problem("the output was closed; the same command continues from the last checkpoint")
  except RuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error) or session is None:
      raise
    print_problem(session.out_of_memory(error))
  except KeyboardInterrupt:
    if session is None and (code := _stopped(signals)) is not None:
      return code
    print("\nmaxghost: stopped at once; the same command continues from the last checkpoint", file=sys.stderr)
    distributed.exit_at_once(130)
    raise
  return 1


def _stopped(signals: StopSignals) -> int | None:
  """The exit code after a signal before the first step. None if several processes have met, which stop together."""
  if signals.requested is None or _is_one_of_several():
    return None
  print(f"Stopped by {signals.name} before the first step; nothing was written")
  return signals.exit_code


if __name__ == "__main__":
  sys.exit(left_with(main()))
