"""Compaction: merges the small score files of each process into fewer, larger ones of the same format."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.config.files import sync
from maxghost.scorelog import format as fmt
from maxghost.scorelog.reader import load
from maxghost.scorelog.shard import DamagedShard, Shard, drop_covered, write_shard

ROWS_PER_FILE = 8_000_000


def compact(run_dir: Path, rows_per_file: int = ROWS_PER_FILE, accept_lost_rows: bool = False) -> list[str]:
  """Merges the finished score files of a run; returns one line about each merge. A merged file replaces the last of its
  files; the others are removed afterwards, also those that an earlier compaction merged before it was killed. Files
  that a run in training may write again stay. Raises ConfigError as `load` does."""
  running = any([_is_running(at) for at in (run_dir, run_dir.resolve().parent)])  # first, since it may end meanwhile
  log = load(run_dir, accept_lost_rows=accept_lost_rows)
  open_from = min((s.first_step for s in log.shards if running and not s.meta.get("closed")), default=None)
  groups = _groups([s for s in log.shards if open_from is None or s.last_step < open_from], rows_per_file)
  lines = [f"left as it is: {message}" for message in log.messages]
  for group in groups:
    path, sizes = group[-1].path, sum(shard.path.stat().st_size for shard in group)
    _merge(group, log.ledger)
    for shard in group[:-1]:
      shard.path.unlink()
    sync(path.parent)
    steps, rows = f"steps {group[0].first_step} to {group[-1].last_step}", sum(shard.num_rows for shard in group)
    bytes_now = f"{path.stat().st_size:,} bytes from {sizes:,} in {len(group)} files"
    lines.append(f"{path}: {steps}, {rows:,} rows, {bytes_now}")
  if left := [] if running else _left_behind(log.shards):
    lines.append(f"removed {len(left)} files whose rows are in others, or that were half written")
  for path in left:
    path.unlink()
  if not groups:
    lines.append("nothing to compact" + (": the training has not finished another score file" if running else ""))
  return lines


def _left_behind(shards: list[Shard]) -> list[Path]:
  """Files of a command or run that was killed: those whose steps another one holds, and partial ones."""
  folder, kept = shards[0].path.parent, {shard.path for shard in shards}
  found = list(folder.glob(".dot_prod_log_iter_*.tmp"))
  for path in folder.glob("*.npz"):
    if path not in kept and fmt.parse_shard_name(path.name):
      with contextlib.suppress(DamagedShard):  # it stays, named by every reader
        if all(shard.path != path for shard in drop_covered([*shards, Shard(path)])):
          found.append(path)
  return found


def _is_running(run_dir: Path) -> bool:
  """Whether a training process holds the run's lock."""
  with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(run_dir / ".lock") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
      return True
  return False


def _groups(shards: list[Shard], rows_per_file: int) -> list[list[Shard]]:
  """Two or more neighbouring files of one process, cut where a file is large enough or where one is missing."""
  groups: list[list[Shard]] = []
  for shard in shards:
    if groups and _follows(shard, groups[-1][-1]) and sum(s.num_rows for s in groups[-1]) < rows_per_file:
      groups[-1].append(shard)
    else:
      groups.append([shard])
  return [group for group in groups if len(group) > 1]


def _follows(shard: Shard, last: Shard) -> bool:
  """Whether one header can stand for both files, and no step is missing between them."""
  names = ("process_index", "fields", "fingerprint", "direction")
  same = all(shard.meta.get(name) == last.meta.get(name) for name in names)
  layouts = [part and part.layout for part in (last.modules, shard.modules)]
  return same and shard.before == last.after and layouts[0] == layouts[1]


def _merge(shards: list[Shard], ledger: tuple[str, ...]) -> None:
  """Writes the merged file over the last one of them."""
  last, names = shards[-1], (*fmt.TEXTS, *shards[-1].fields)
  tables = {name: np.unique(np.concatenate([shard.texts(name) for shard in shards])) for name in names}

  def blocks() -> Iterator[np.ndarray]:
    for shard in shards:
      places = {name: np.searchsorted(table, shard.texts(name)) for name, table in tables.items()}
      for block in shard.blocks():
        rows = block.copy()
        for name, place in places.items():
          rows[name] = place[rows[name]]
        yield rows

  modules = fmt.Modules.joined([part for shard in shards if (part := shard.modules) is not None])
  meta = last.meta | {"schema_version": fmt.version_of(last.parts), "first_step": shards[0].first_step,
                      "before": shards[0].before, "closed": True, "ledger": ledger}  # fmt: skip
  steps = np.concatenate([fmt.with_ledger(shard.steps, len(last.val_sets), ledger) for shard in shards])
  write_shard(last.path, meta, tables, steps, modules, blocks(), sum(shard.num_rows for shard in shards))
