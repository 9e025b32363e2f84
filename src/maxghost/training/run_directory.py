"""The run directory: its contents, its lock, and whether a command may use it.

`inspect` never writes, so that errors are raised before anything exists on disk. `claim` creates the directory, locks
it and writes config.yml. This module does not import JAX: commands call `inspect` before JAX starts.
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from maxghost import config
from maxghost.config import Config, ConfigError, ParallelConfig
from maxghost.config.values import naming, shown

CONFIG_FILE = "config.yml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
# Keys of a run's location, which do not change its results: a run directory may be moved or renamed.
LOCATION_KEYS = frozenset({"run_name", "base_output_directory"})
# Where a run reads weights that no step changes, each time it starts: `CheckpointManager.check_frozen` refuses others.
FROZEN_KEYS = {"start": {"load_parameters_path", "load_full_state_path", "lora_restore_path"},
               "teacher": {"distill_teacher"}, "adapters": {"load_parameters_path"}}  # fmt: skip
# Keys that change output, saving or devices, but never a batch or the values computed from it. per_device_batch_size
# times the number of devices must not change: the session checks this, because only JAX knows the devices.
RESUMABLE_KEYS = frozenset(
  {*(field.name for field in dataclasses.fields(ParallelConfig) if not re.search("diloco|overlapping", field.name)),
   "per_device_batch_size", "log_period", "eval_interval", "eval_steps", "sample_every", "sample_prompt",
   "enable_tensorboard", "jax_cache_dir", "trackers", "profiler", "skip_first_n_steps_for_profiler", "profiler_steps",
   "checkpoint_period", "max_num_checkpoints_to_keep", "async_checkpointing", "local_checkpoint_directory",
   "local_checkpoint_period"})  # fmt: skip


class Existing(NamedTuple):
  """What exists of the run on disk. completed_steps: the number of steps of a finished run, else 0."""

  path: Path
  is_new: bool
  changed: dict[str, tuple[Any, Any]]
  completed_steps: int


def inspect(cfg: Config) -> Existing:
  """Reads the run's directory and checks that this command may use it. Writes nothing. Raises ConfigError if the path
  is not writable, or holds anything but a run whose config differs only in keys that may change (it names others). A
  run that has recorded no step is new, with any config."""
  folder = cfg.run.base_output_directory
  if "://" in folder:
    raise ConfigError(f"base_output_directory={folder}: runs are written to local folders; mount the bucket as one")
  path = Path(folder).expanduser() / cfg.run.run_name
  _check_writable(path, cfg)
  names = os.listdir(path) if path.exists() else []
  if all(name == LOCK_FILE or name.startswith(f".{CONFIG_FILE}.") for name in names):  # of a killed start
    return Existing(path, True, {}, 0)
  config_path = path / CONFIG_FILE
  if not config_path.exists():
    said = f"run_name={cfg.run.run_name}: {path} exists, is not empty and has no {CONFIG_FILE}"
    raise ConfigError(f"{said}, so it is not a run directory; choose another run_name or base_output_directory")
  metrics = path / METRICS_FILE
  if metrics.exists() and not metrics.stat().st_size and not has_checkpoint(path):  # stopped before it recorded a step
    return Existing(path, True, {}, 0)
  try:
    previous = config.load(config_path)
  except ConfigError as error:
    raise ConfigError(*(f"{problem} (the config of the run in {path})" for problem in error.problems)) from error
  changed = config.differing_keys(previous, cfg)
  _check_changes(path, changed, cfg)
  if (now := cfg.parallel.apart) != (before := previous.parallel.apart):
    said = f"dcn_data_parallelism={now}: {path} holds a DiLoCo run of {before} slices, each with parameters of its own"
    raise ConfigError(f"{said}; use dcn_data_parallelism={before} or another run_name")
  return Existing(path, False, changed, _completed_steps(path, previous.run.steps))


def has_checkpoint(path: Path) -> bool:
  """Whether the run in `path` has a checkpoint, valid or not."""
  return any(entry.name.isdecimal() for entry in (path / CHECKPOINTS).glob("*"))


def claim(existing: Existing, cfg: Config) -> TextIO:
  """Locks the directory, and begins a new run with config.yml; one that is there stays until all checkpoints fit
  (`Session`). Raises ConfigError on failure. Closing the lock, or the end of the process, releases the directory."""
  path = existing.path
  try:
    path.mkdir(parents=True, exist_ok=True)
    # Held open as long as the process lives. A link is refused: its target would be emptied.
    lock = open(os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")  # noqa: SIM115
  except OSError as error:
    raise ConfigError(_unwritable(path, cfg, str(error.strerror))) from error
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.seek(0)
    holder = lock.read().strip() or "unknown"
    lock.close()
    said = f"run_name={cfg.run.run_name}: process {holder} is training in {path}"
    raise ConfigError(f"{said}; stop it first or choose another run_name") from error
  except OSError as error:  # some network file systems have no locks
    print(f"maxghost: {path} cannot be locked ({error.strerror}); do not start a second run in it", file=sys.stderr)
  try:
    if inspect(cfg).is_new and not (path / CONFIG_FILE).exists():  # again: another process may have written since
      config.save(cfg, path / CONFIG_FILE)
  except ConfigError:
    lock.close()
    raise
  with naming("", path / LOCK_FILE):
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
  return lock


def withdraw(existing: Existing) -> None:
  """Removes the directory of a run that was refused before it recorded anything, so that its name is free again."""
  names = {*os.listdir(existing.path)}
  if names <= {LOCK_FILE, CONFIG_FILE, CHECKPOINTS} and not any((existing.path / CHECKPOINTS).glob("[!.]*")):
    shutil.rmtree(existing.path, ignore_errors=True)


def _unwritable(path: Path, cfg: Config, reason: str) -> str:
  said = f"base_output_directory={cfg.run.base_output_directory}: cannot write {path} ({reason})"
  return f"{said}; name a folder you may write to"


def _check_writable(path: Path, cfg: Config) -> None:
  name = cfg.run.run_name
  if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(os.fsencode(name)) > 255:
    said = f"run_name={name!r}: must be the name of a folder in base_output_directory"
    raise ConfigError(f"{said}, of at most 255 bytes, without line ends; for example run_name=base")
  for folder in (path.absolute(), path.absolute() / CHECKPOINTS):
    place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not place.is_dir():
      raise ConfigError(_unwritable(path, cfg, f"{place} is not a directory"))
    if not os.access(place, os.W_OK | os.X_OK):
      raise ConfigError(_unwritable(path, cfg, f"no permission in {place}"))


def check_saved(path: Path, saved: Mapping[str, Any], cfg: Config) -> None:
  """Raises ConfigError where config.yml was changed by hand since the checkpoint, which holds `saved`."""
  now = json.loads(json.dumps(cfg.flat()))
  changed = {name: (then, now[name]) for name, then in saved.items() if name in now and then != now[name]}
  _check_changes(path, {name: pair for name, pair in changed.items() if type(pair[0]) is type(pair[1])}, cfg)


def _check_changes(path: Path, changed: dict[str, tuple[Any, Any]], cfg: Config) -> None:
  free = RESUMABLE_KEYS | LOCATION_KEYS
  if has_checkpoint(path):
    free |= FROZEN_KEYS.get(cfg.reference, set()) | (FROZEN_KEYS["adapters"] if cfg.adapter.lora_rank else set())
  refused = {name: pair for name, pair in changed.items() if name not in free}
  if "steps" in refused and refused["steps"][1] > refused["steps"][0]:
    del refused["steps"]
  if not refused:
    return
  listed = "; ".join(f"{name}: the run has {shown(a)}, the command {shown(b)}" for name, (a, b) in refused.items())
  more = " (steps may only grow)" if "steps" in refused else ""
  raise ConfigError(f"{path} holds a run with another config: {listed}{more}; use these values or another run_name")


def _completed_steps(path: Path, steps: int) -> int:
  """The run's number of steps if its last record exists (it is written after everything else), else 0."""
  try:
    with open(path / METRICS_FILE, "rb") as file:
      file.seek(max(0, os.path.getsize(file.name) - (1 << 20)))
      lines = file.read().split(b"\n")[:-1]  # text after the last newline is incomplete
    return steps if json.loads(lines[-1])["step"] == steps - 1 else 0
  except (FileNotFoundError, ValueError, TypeError, LookupError):
    return 0
