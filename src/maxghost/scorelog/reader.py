"""The score log being read: `load(run_dir)` merges the files of all processes and intervals.

Nothing is read before it is asked for; `blocks` streams rows in bounded memory, `column` returns a whole column.
K validation sets, N rows, S steps.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.scorelog import format as fmt
from maxghost.scorelog import ghostsuite, parquet

ROW_COLUMNS = ("step", "domain", "path", "offset", "chunk", "epoch", "tokens", "loss", "dot", "contribution")


def load(run_dir, *, ghostsuite_scale: float = 1.0) -> "ScoreLog":
  """Opens the score log of a run. `run_dir` holds `ghost/`, or is that folder itself, or has GhostSuite's .pt logs.

  ghostsuite_scale: A**2 / S**2 for GhostSuite's logs of A micro-batches per step and a loss scaler of S.

  Raises ConfigError for a missing or foreign folder, no usable file, a file of a newer schema, or files of one folder
  that were scored against different validation sets. Damaged files are used as far as they go; `messages` says so.
  """
  run_dir = Path(run_dir)
  if not run_dir.is_dir():
    raise ConfigError(f"run_dir={run_dir}: no such folder")
  folder = run_dir if run_dir.name == "ghost" or not (run_dir / "ghost").is_dir() else run_dir / "ghost"
  if paths := _paths(folder):
    shards, messages = _open(paths, folder)
  elif (foreign := ghostsuite.find_folder(run_dir)) is not None:
    shards, messages = ghostsuite.read(foreign, ghostsuite_scale)
    if not shards:
      raise ConfigError(f"run_dir={run_dir}: none of GhostSuite's logs is readable ({messages[-1]})")
  else:
    is_run = (run_dir / "config.yml").is_file()
    found = "no score files" if is_run else "not a run of maxghost (no config.yml, no scores)"
    raise ConfigError(f"run_dir={run_dir}: {found}; train with ghost_enabled=true to get ghost/dot_prod_log_iter_*.npz")
  if not shards:
    raise ConfigError(f"run_dir={run_dir}: none of {len(paths)} score files is readable ({messages[0]})")
  return ScoreLog(run_dir, shards, messages)


def _paths(folder: Path) -> list[Path]:
  return [*parquet.part_files(folder / "parquet"), *sorted(p for p in folder.iterdir() if fmt.parse_shard_name(p.name))]


def _open(paths: list[Path], folder: Path, tries: int = 5) -> tuple[list, list[str]]:
  """The readable files, and a sentence about each that is not."""
  shards, messages = [], []
  for path in paths:
    try:
      shards.append(parquet.Part(path) if path.suffix == ".parquet" else fmt.Shard(path))
    except FileNotFoundError:  # a run that is training has replaced it by a longer one: look again
      if tries:
        return _open(_paths(folder), folder, tries - 1)
      messages.append(f"{path} disappeared")
    except fmt.NewerSchema as error:
      raise ConfigError(str(error)) from error
    except fmt.DamagedShard as error:
      messages.append(f"skipped a damaged score file: {error}")
  return shards, messages


class ScoreLog:
  """A run's scores. `log["contribution"]` is the whole column f32[N, K]; `log.steps["loss"]` is f64[S]."""

  def __init__(self, run_dir: Path, shards: list[fmt.Shard], messages: list[str]):
    self.run_dir = run_dir
    self.shards = _without_overlap(shards)
    self.messages = [*messages, *(shard.problem for shard in self.shards if shard.problem)]
    self.val_sets = self.shards[0].val_sets
    for shard in self.shards:
      if shard.val_sets != self.val_sets:
        raise ConfigError(
          f"{shard.path.name}: validation sets {', '.join(shard.val_sets)}, but {self.shards[0].path.name} has "
          f"{', '.join(self.val_sets)}; the files are of different runs"
        )
    self.units = fmt.UNITS

  @property
  def num_rows(self) -> int:
    return sum(shard.num_rows for shard in self.shards)

  @property
  def fingerprints(self) -> tuple[str, ...]:
    """Fingerprints of the data sources that the scored texts came from, without repeats."""
    return tuple(dict.fromkeys(s.meta["fingerprint"] for s in self.shards if s.meta.get("fingerprint")))

  @functools.cached_property
  def steps(self) -> np.ndarray:
    """Structured array of the steps in order, as `format.step_dtype`; from the lowest process that holds a step."""
    parts = [shard.steps for shard in self.shards]
    table = np.concatenate(parts) if parts else np.zeros((0,), fmt.step_dtype(len(self.val_sets)))
    _, first = np.unique(table["step"], return_index=True)
    return table[first]

  @functools.cached_property
  def domains(self) -> tuple[str, ...]:
    """Names of the domains that have rows, sorted."""
    return tuple(sorted({str(name) for shard in self.shards for name in shard.domains}))

  def modules(self) -> Iterator[fmt.Modules]:
    """Contributions by module, layer and domain, file by file; empty when the run did not log them.

    Raises ConfigError when a file has other modules, layers or domains than the files before.
    """
    first = None
    for shard in self.shards:
      if (modules := shard.modules) is not None:
        layout = (modules.names, modules.domains, modules.contribution_SMLDK.shape[1:])
        first = first or layout
        if layout != first:
          raise ConfigError(f"{shard.path.name}: other modules, layers or domains than in the files before it")
        yield modules

  def blocks(self, columns: frozenset[str] | None = None) -> Iterator[tuple[fmt.Shard, np.ndarray]]:
    """(file, rows) in bounded memory; `domain` and `path` are indices into the file's tables.

    columns: those that are needed; the others may be 0. Raises ConfigError for rows that point outside of the tables.
    """
    for shard in self.shards:
      try:
        for rows in shard.blocks(columns=columns):
          _check_indices(shard, rows, columns)
          yield shard, rows
      except (fmt.DamagedShard, FileNotFoundError) as error:
        raise ConfigError(f"{shard.path} changed while it was read; try again ({error})") from error

  def column(self, name: str) -> np.ndarray:
    """A whole column as one array; domain and path as strings. Raises ConfigError for an unknown name."""
    if name not in ROW_COLUMNS:
      raise ConfigError(f"unknown score column {name!r}{did_you_mean(name, ROW_COLUMNS)}")
    parts = []
    for shard, rows in self.blocks(frozenset((name,))):
      values = rows[name]
      parts.append(getattr(shard, f"{name}s")[values] if name in ("domain", "path") else values.copy())
    empty = fmt.row_dtype(len(self.val_sets))[name]
    return np.concatenate(parts) if parts else np.zeros((0, *empty.shape), empty.base)

  __getitem__ = column


def _without_overlap(shards: list) -> list:
  """Each step of a process once: a compacted range stands for the files inside it, a whole interval for its parts."""
  parts = fmt.drop_covered([shard for shard in shards if isinstance(shard, parquet.Part)])
  ranges = [(part.first_step, part.last_step) for part in parts]
  files = [shard for shard in shards if not isinstance(shard, parquet.Part)]
  files = [s for s in files if not any(first <= s.first_step and s.last_step <= last for first, last in ranges)]
  return sorted([*parts, *fmt.drop_covered(files)], key=lambda shard: (shard.process_index, shard.first_step))


def _check_indices(shard, rows: np.ndarray, columns: frozenset[str] | None):
  for name in ("domain", "path"):
    if len(rows) and (columns is None or name in columns):
      size = len(getattr(shard, f"{name}s"))
      if rows[name].min() < 0 or rows[name].max() >= size:
        raise ConfigError(
          f"{shard.path}: a row points to entry {rows[name].max()} of {size} in its table of {name}s: "
          "the file is damaged; remove it to use the others"
        )
