"""The run directory: what it holds, whether a command may use it, and who writes into it.

`inspect` looks and never writes, so that every complaint comes before anything exists on disk; `claim` creates the
directory, takes its lock and writes config.yml. Nothing here imports JAX: commands call `inspect` before JAX starts.
"""

import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxghost import config
from maxghost.config import Config, ConfigError
from maxghost.config.files import write_text
from maxghost.config.schema import ParallelConfig

CONFIG_FILE = "config.yml"
METRICS_FILE = "metrics.jsonl"
FACTS_FILE = "run_facts.json"
LOCK_FILE = ".lock"
# Keys that say where a run lives, not what it computes: a run directory may be moved or renamed.
LOCATION_KEYS = frozenset({"run_name", "base_output_directory"})
# Keys that change what is printed or saved and when, or on which devices, never a batch or what is computed from it.
# per_device_batch_size times the devices must stay: the session checks that, for only JAX can tell the devices.
RESUMABLE_KEYS = frozenset(
  {
    *(field.name for field in dataclasses.fields(ParallelConfig)),
    "per_device_batch_size",
    "log_period",
    "eval_interval",
    "eval_steps",
    "sample_every",
    "sample_prompt",
    "enable_tensorboard",
    "jax_cache_dir",
    "checkpoint_period",
    "max_num_checkpoints_to_keep",
    "async_checkpointing",
  }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Existing:
  """What stands at the place of the run. `previous_config` is None where no run has been yet."""

  path: Path
  previous_config: Config | None
  changed: dict[str, tuple[Any, Any]]
  completed_steps: int

  @property
  def is_new(self) -> bool:
    return self.previous_config is None


def inspect(cfg: Config) -> Existing:
  """Reads the run's directory and decides whether this command may use it. Writes nothing.

  `completed_steps` is 0 unless the run once went to its end; then it is the number of steps of that run.
  Raises ConfigError where the place is not writable, holds something that is not a run, or holds a run whose
  config differs in a key that may not change (all differing keys are named).
  """
  path = Path(cfg.run.base_output_directory).expanduser() / cfg.run.run_name
  _check_writable(path, cfg)
  if not path.exists() or not _entries(path):
    return Existing(path, None, {}, 0)
  config_path = path / CONFIG_FILE
  if not config_path.exists():
    raise ConfigError(
      f"run_name={cfg.run.run_name}: {path} exists, is not empty and has no {CONFIG_FILE}, so it is not a run "
      "directory; choose another run_name or base_output_directory"
    )
  previous = _read_config(config_path)
  changed = config.differing_keys(previous, cfg)
  _check_changes(path, changed)
  return Existing(path, previous, changed, _completed_steps(path, previous))


def has_checkpoint(existing: Existing) -> bool:
  """Whether a checkpoint lies there, good or not."""
  folder = existing.path / "checkpoints"
  return folder.is_dir() and any(entry.name.isdecimal() for entry in folder.iterdir())


def claim(existing: Existing, cfg: Config) -> "RunDirectory":
  """Creates the directory where it is new, locks it and writes config.yml. Raises ConfigError where it cannot."""
  path = existing.path
  try:
    path.mkdir(parents=True, exist_ok=True)
    lock = open(path / LOCK_FILE, "a+")  # noqa: SIM115 - held open as long as the process lives
  except OSError as error:
    raise ConfigError(_unwritable(path, cfg, str(error.strerror))) from error
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.seek(0)
    holder = lock.read().strip() or "unknown"
    lock.close()
    raise ConfigError(
      f"run_name={cfg.run.run_name}: process {holder} is training in {path}; stop it first or choose another run_name"
    ) from error
  except OSError as error:  # some network file systems have no locks
    print(f"maxghost: {path} cannot be locked ({error.strerror}); do not start a second run in it", file=sys.stderr)
  lock.truncate(0)
  lock.write(f"{os.getpid()}\n")
  lock.flush()
  config.save(cfg, path / CONFIG_FILE)
  return RunDirectory(path, lock)


class RunDirectory:
  """The places inside a claimed run directory. The lock is released by `close`, or by the end of the process.

  lock: None in a process whose first process holds it.
  """

  def __init__(self, path: Path, lock=None):
    self.path = path
    self._lock = lock

  @property
  def metrics_path(self) -> Path:
    return self.path / METRICS_FILE

  @property
  def tensorboard_path(self) -> Path:
    return self.path / "tensorboard"

  @property
  def checkpoints_path(self) -> Path:
    return self.path / "checkpoints"

  def write_facts(self, facts: Mapping[str, str]) -> None:
    """run_facts.json: what is worth knowing of this process beside the config; the report shows it."""
    write_text(self.path / FACTS_FILE, json.dumps(facts, indent=2) + "\n")

  def close(self) -> None:
    if self._lock is not None:
      self._lock.close()


def last_metrics_record(path: Path, tail_bytes: int = 1 << 20) -> dict | None:
  """The last whole record of a metrics.jsonl, or None where there is none."""
  if not path.exists():
    return None
  with open(path, "rb") as file:
    file.seek(max(0, os.path.getsize(path) - tail_bytes))
    lines = file.read().split(b"\n")
  for line in reversed(lines[:-1]):  # what follows the last newline is not whole
    try:
      return json.loads(line)
    except ValueError:
      return None
  return None


def _entries(path: Path) -> list[str]:
  """Names in the directory that a run has left; the traces of a start that was killed do not count."""
  if not path.is_dir():
    raise ConfigError(f"{path} exists and is not a directory; choose another run_name or base_output_directory")
  return [name for name in os.listdir(path) if name != LOCK_FILE and not name.startswith(f".{CONFIG_FILE}.")]


def _unwritable(path: Path, cfg: Config, reason: str) -> str:
  return (
    f"base_output_directory={cfg.run.base_output_directory}: cannot write {path} ({reason}); "
    "name a folder you may write to"
  )


def _check_writable(path: Path, cfg: Config) -> None:
  if cfg.run.run_name in ("", ".", ".."):
    raise ConfigError(f"run_name={cfg.run.run_name!r}: must be a folder name, for example run_name=base")
  place = path.absolute()
  while not os.path.lexists(place):
    place = place.parent
  if not place.is_dir():
    raise ConfigError(_unwritable(path, cfg, f"{place} is not a directory"))
  if not os.access(place, os.W_OK | os.X_OK):
    raise ConfigError(_unwritable(path, cfg, f"no permission in {place}"))


def _read_config(path: Path) -> Config:
  try:
    return config.load(path)
  except ConfigError as error:
    problems = [f"{problem} (the config of the run in {path.parent})" for problem in error.problems]
    raise ConfigError(*problems) from error


def _check_changes(path: Path, changed: dict[str, tuple[Any, Any]]) -> None:
  refused = {name: pair for name, pair in changed.items() if name not in RESUMABLE_KEYS | LOCATION_KEYS}
  if "steps" in refused and refused["steps"][1] > refused["steps"][0]:
    del refused["steps"]
  if not refused:
    return
  listed = "; ".join(f"{name}: the run has {before}, the command {now}" for name, (before, now) in refused.items())
  more = " (steps may only grow)" if "steps" in refused else ""
  raise ConfigError(f"{path} holds a run with another config: {listed}{more}; use these values or another run_name")


def _completed_steps(path: Path, previous: Config) -> int:
  """The run's own number of steps where its last record has been written (it is written after all else), else 0."""
  record = last_metrics_record(path / METRICS_FILE)
  steps = previous.run.steps
  return steps if record is not None and record.get("step") == steps - 1 else 0
