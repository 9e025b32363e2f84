"""`python -m maxghost.train configs/base.yml [key=value ...]`: trains a model and scores every training document.

The same command continues an interrupted run. Exit codes: 0 done, or stopped by SIGTERM with everything saved; 1 the
run failed, with the reason in one line; 2 wrong input, nothing was written; 130 Ctrl-C.
"""

import errno
import os
import sys
from collections.abc import Callable, Mapping

from maxghost import cli
from maxghost.config import Config, ConfigError
from maxghost.training import run_directory
from maxghost.training.run_directory import Existing

SWITCHES = {"force": "starts a step that is estimated to need far more memory than there is"}


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns the exit code."""
  return cli.run_command(_run, argv, "train", SWITCHES)


def _run(cfg: Config, force: bool) -> int:
  existing = run_directory.inspect(cfg)
  if existing.completed_steps == cfg.run.steps:
    print(f"{existing.path} is complete: {existing.completed_steps} steps.")
    print(f"To train longer, set steps={2 * existing.completed_steps}")
    print(f"Report: python -m maxghost.report {existing.path}")
    return 0
  if not existing.is_new and not cfg.checkpoint.checkpoint_period:
    raise ConfigError(
      f"checkpoint_period=0: {existing.path} holds an unfinished run, which would be overwritten; "
      "choose another run_name"
    )
  from maxghost import trackers
  from maxghost.data import build

  trackers.check(cfg)
  open_parameters = _parameters(cfg, existing)
  corpus = build.open_all(cfg.data, cfg.run.data_shuffle_seed, cfg.model.vocab_size)
  return _train(cfg, existing, corpus, open_parameters, force)


def _parameters(cfg: Config, existing: Existing) -> Callable | None:
  """A function that opens the initial parameters; None for a run that has a checkpoint."""
  if not cfg.checkpoint.load_parameters_path or run_directory.has_checkpoint(existing):
    return None
  from maxghost import load_model
  from maxghost.interop import model_path

  place = load_model.check_config(cfg)

  def open_parameters(wanted: Mapping) -> Callable[[], dict]:
    read = load_model.open_parameters(place, cfg, wanted)

    def read_all() -> dict:
      model_path.keep_huggingface(place, cfg, existing.path)
      return read()

    return read_all

  return open_parameters


def _train(
  cfg: Config, existing: Existing, corpus, open_parameters: Callable | None = None, force: bool = False
) -> int:
  """Trains and returns the exit code. corpus: (source, tokenizer). JAX is imported here."""
  from maxghost import data, trackers
  from maxghost.checkpoint.manager import CheckpointError, CheckpointManager
  from maxghost.training import devices
  from maxghost.training.loop import StopSignals
  from maxghost.training.metrics import NonFiniteMetricError
  from maxghost.training.plan import Plan
  from maxghost.training.score_recorder import ScoreLogError
  from maxghost.training.session import Session

  session = None
  with StopSignals() as signals:
    try:
      plan = Plan.of(cfg, devices.open_layout(cfg))
      own, seed = plan.own, cfg.run.data_shuffle_seed
      dataset = data.make_dataset(
        corpus[0], cfg.data, seed, own.num_shards, own.shard, tokenizer=corpus[1], batch_size=plan.rows
      )
      session = Session(
        plan, existing, dataset, signals, open_checkpoints=CheckpointManager, open_parameters=open_parameters,
        open_trackers=trackers.open_all, force=force,
      )  # fmt: skip
      return session.run()
    except NonFiniteMetricError as error:
      assert session is not None, "only a step can be non-finite"
      return _failed(f"{error}; {session.last_checkpoint()}")
    except (CheckpointError, ScoreLogError) as error:
      return _failed(str(error))
    except OSError as error:
      if error.errno != errno.ENOSPC:
        raise
      return _failed(f"the disk is full ({error.filename or existing.path}); free some space and start again")
    except RuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error) or session is None:
        raise
      return _failed(session.out_of_memory(error))
    except KeyboardInterrupt:
      print("\nmaxghost: stopped at once; the same command continues from the last checkpoint", file=sys.stderr)
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(130)  # does not wait for threads that compile or write


def _failed(message: str) -> int:
  print(f"maxghost: {message}", file=sys.stderr)
  return 1


if __name__ == "__main__":
  sys.exit(main())
