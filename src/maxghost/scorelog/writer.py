"""The score log being written: every scored document of every step, exactly once, in the background.

`<run>/ghost/dot_prod_log_iter_<step>.npz` holds one interval of `period` steps, <step> being the last one inside.
Files are only added. `flush` writes the unfinished interval too; the file of the whole interval, written later, takes
its place. A reader that meets both keeps the longer one, so a crash between the two loses and doubles nothing.
"""

import queue
import sys
import threading
from pathlib import Path

from maxghost.config import ConfigError
from maxghost.scorelog import format as fmt
from maxghost.scorelog import parquet
from maxghost.scorelog.interval import Interval

QUEUE_LENGTH = 4  # files waiting for the disk; beyond that the training loop waits too


class Writer:
  """Writes one process's share of the score log.

  run_dir: the run's folder; files go to its `ghost/`. val_sets: names of the K validation sets. period: steps per file.
  fingerprint: the data source's fingerprint, kept so that a later reader can tell whether the texts are still the same.
  num_processes: that write at present; process 0 looks after the files of others, from a time when there were more.
  Errors of the background thread (disk full, ...) are raised by the next call.
  """

  def __init__(
    self,
    run_dir,
    val_sets=("manual",),
    process_index: int = 0,
    period: int = 20,
    fingerprint: str = "",
    num_processes: int = 1,
  ):
    if period < 1:
      raise ConfigError(f"ghost_log_period={period}: at least 1 step per score file")
    self._run_dir, self._num_processes = run_dir, num_processes
    self._folder = Path(run_dir) / "ghost"
    self._val_sets = tuple(val_sets)
    self._process_index = process_index
    self._period = period
    self._fingerprint = fingerprint
    self._pending = Interval(len(self._val_sets))
    self._last_step = -1
    self._num_steps = 0
    self._num_rows = 0
    self._restored = False
    self._error: BaseException | None = None
    self._queue: queue.Queue = queue.Queue(QUEUE_LENGTH)
    self._thread: threading.Thread | None = None

  def append(self, step_record: dict, rows: dict, documents: list, *, modules: dict | None = None):
    """Adds one step.

    step_record: `step` and any of the step columns; what is left out is NaN. Per-set values are [K] (or a scalar).
    rows: tokens [N], loss [N], dot [N, K], contribution [N, K]; optionally chunk [N], the bytes between the start of
      the document and the scored chunk, and epoch [N], how often the data had been read through before.
    documents: N ids (domain, path, offset).
    modules: {"names": M strings, "domains": D strings, "contribution": f32[M, L, D, K]} in nats; cells that do not
      exist (layers of a module outside the stack) are NaN.
    Raises ValueError for a step out of order, an unknown column or a wrong shape.
    """
    self._raise_error()
    step = int(step_record["step"])
    if self._last_step < 0 and not self._restored:
      self._refuse_foreign_files()
    if step <= self._last_step:
      raise ValueError(f"step={step}: the score log already holds step {self._last_step}; steps only grow")
    if self._pending.steps and step // self._period != self._pending.first_step // self._period:
      self._submit(last=True)
    self._num_rows += self._pending.add(step_record, rows, documents, modules)
    self._last_step = step
    self._num_steps += 1
    if (step + 1) % self._period == 0:
      self._submit(last=True)

  def flush(self):
    """Returns when every step appended so far is on disk."""
    if self._pending.steps and self._pending.replaced != self._path(self._pending.last_step):
      self._submit(last=False)
    self._queue.join()
    self._raise_error()

  def position(self) -> dict:
    """Flushes; returns what a checkpoint must hold for `restore`: last step, number of steps and of rows."""
    self.flush()
    return {"step": self._last_step, "num_steps": self._num_steps, "num_rows": self._num_rows}

  def restore(self, position: dict | None):
    """Makes the log what it was at `position`: later steps are removed. None empties the log (a run from its start).

    Says so on stderr when the files hold fewer steps or rows than the position says.
    """
    self._queue.join()
    self._raise_error()
    last_step = -1 if position is None else int(position["step"])
    for process in self._former_processes() if self._process_index == 0 else ():
      other = Writer(self._run_dir, self._val_sets, process, self._period, self._fingerprint, self._num_processes)
      other.restore(None if position is None else {"step": last_step})
    self._pending = Interval(len(self._val_sets))
    self._last_step, self._num_steps, self._num_rows = last_step, 0, 0
    self._restored = True
    kept, dropped = [], []
    for path, shard in self._own_shards(last_step):
      if shard is None or shard.first_step > last_step:
        dropped.append(path)
      elif shard.last_step > last_step:
        self._write(Interval.load(shard, last_step), path)
        kept.append(self._path(last_step))
      else:
        kept.append(path)
    self._remove_temporaries()
    self._cut_parts(last_step)
    for path in dropped:
      path.unlink(missing_ok=True)
    if self._folder.is_dir():
      fmt.sync_folder(self._folder)
    self._count(kept)
    self._say_missing(position)

  def close(self):
    """Flushes and ends the background thread."""
    try:
      self.flush()
    finally:
      if self._thread is not None:
        self._queue.put(None)
        self._thread.join()
        self._thread = None

  def _count(self, kept: list[Path]):
    """Counts the kept files and takes an unfinished last interval back into memory."""
    shards = [fmt.Shard(path) for path in dict.fromkeys(kept)]
    for shard in fmt.drop_covered(shards):
      self._num_steps += len(shard.steps)
      self._num_rows += shard.num_rows
      unfinished = (self._last_step + 1) % self._period and shard.last_step == self._last_step
      if unfinished and shard.first_step // self._period == self._last_step // self._period:
        self._pending = Interval.load(shard, self._last_step)

  def _say_missing(self, position: dict | None):
    if position is None or parquet.part_files(self._folder / "parquet"):
      return  # compacted files are of all processes together: there is no count to compare with
    for key, have in (("num_steps", self._num_steps), ("num_rows", self._num_rows)):
      if have != position.get(key, have):
        print(
          f"maxghost: the score log in {self._folder} holds {key}={have} up to step {self._last_step}, the checkpoint "
          f"counted {position[key]}: files were changed since; the missing scores stay missing",
          file=sys.stderr,
        )

  def _own_shards(self, last_step: int):
    """This process's files and what is in them (None for a useless one of steps after `last_step`)."""
    for path in self._own_files():
      try:
        shard = fmt.Shard(path)
      except fmt.NewerSchema as error:
        raise ConfigError(str(error)) from error
      except fmt.DamagedShard as error:
        print(f"maxghost: {error}; its scores are lost up to step {last_step}", file=sys.stderr)
        if fmt.parse_shard_name(path.name)[0] > last_step:
          yield path, None
        continue
      if shard.val_sets != self._val_sets and shard.first_step <= last_step:
        raise ConfigError(
          f"{path}: scored against the validation sets {', '.join(shard.val_sets)}, this run against "
          f"{', '.join(self._val_sets)}; continue with the same sets or under another run_name"
        )
      yield path, shard

  def _former_processes(self) -> list[int]:
    names = [fmt.parse_shard_name(path.name) for path in self._folder.iterdir()] if self._folder.is_dir() else []
    return sorted({name[1] for name in names if name is not None and name[1] >= self._num_processes})

  def _own_files(self) -> list[Path]:
    names = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
    return [path for path in names if (fmt.parse_shard_name(path.name) or (0, -1))[1] == self._process_index]

  def _remove_temporaries(self):
    for path in self._folder.glob("*.npz.*.tmp") if self._folder.is_dir() else ():
      name = fmt.parse_shard_name(path.name.split(".npz")[0] + ".npz")
      if name is not None and name[1] == self._process_index:
        path.unlink(missing_ok=True)

  def _cut_parts(self, last_step: int):
    """Compacted scores after `last_step` go too; they are of all processes, so the first process does it for all."""
    folder = self._folder / "parquet"
    if self._process_index == 0 and parquet.part_files(folder):
      parquet.cut(folder, last_step)

  def _refuse_foreign_files(self):
    files = self._own_files() or parquet.part_files(self._folder / "parquet")
    if files:
      raise ValueError(f"{files[0]} is already there: call restore(position), or restore(None) to begin anew")
    self._restored = True

  def _path(self, last_step: int) -> Path:
    return self._folder / fmt.shard_name(last_step, self._process_index)

  def _submit(self, last: bool):
    """Hands the pending interval to the thread; with `last` a new interval begins."""
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, name="score-writer", daemon=True)
      self._thread.start()
    interval = self._pending if last else self._pending.copy()
    self._queue.put((interval, interval.replaced, last))
    if last:
      self._pending = Interval(len(self._val_sets))
    else:
      self._pending.replaced = self._path(interval.last_step)

  def _work(self):
    while (job := self._queue.get()) is not None:
      try:
        if self._error is None:
          self._write(*job)
      except BaseException as error:
        self._error = error
      finally:
        self._queue.task_done()
    self._queue.task_done()

  def _write(self, interval: Interval, replaced: Path | None, closed: bool = False):
    """One file for the interval; then the file it makes superfluous goes. closed: it will not be written again."""
    self._folder.mkdir(parents=True, exist_ok=True)
    meta = {
      "schema_version": fmt.SCHEMA_VERSION,
      "val_sets": self._val_sets,
      "process_index": self._process_index,
      "first_step": interval.first_step,
      "last_step": interval.last_step,
      "closed": closed,
      "fingerprint": self._fingerprint,
      "units": fmt.UNITS,
    }
    path = self._path(interval.last_step)
    fmt.write_shard(path, meta, *interval.tables(), interval.step_array(), interval.modules(), interval.row_array())
    if replaced is not None and replaced != path:
      replaced.unlink(missing_ok=True)

  def _raise_error(self):
    if self._error is not None:
      raise OSError(f"the score log could not be written to {self._folder}: {self._error}") from self._error
