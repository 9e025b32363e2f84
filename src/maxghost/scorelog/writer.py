"""Writes the score log: every scored row of every step exactly once.

`<run>/ghost/dot_prod_log_iter_<step>.npz` holds one interval of `period` steps, of which <step> is the last. `flush`
also writes the unfinished interval, which the whole one replaces later; of both, a reader keeps the longer. Each file
holds the number of steps and rows before it, `position.json` the totals, so that a reader notices a missing file.

K validation sets, N rows, M modules, L layers, D domains.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import recfunctions

from maxghost.config import ConfigError, did_you_mean
from maxghost.config.files import sealed, sync, write_whole
from maxghost.scorelog import format as fmt
from maxghost.scorelog.reader import ScoreLog
from maxghost.scorelog.shard import DamagedShard, Shard, drop_covered, write_shard

REQUIRED = ("tokens", "loss", "dot", "contribution")
SAID = ("direction", "fingerprint")  # of the rows in the header of their file


class Interval:
  """Steps without a final file. before: steps and rows before them. replaced: an early flush's file, with its SAID."""

  def __init__(self, num_sets: int, ledger: Sequence[str], before: tuple[int, int], fields: Sequence[str], parts):
    self._num_sets, self._ledger, self.before = num_sets, ledger, before
    self._dtype = fmt.row_dtype(num_sets, fields=fields, parts=parts)
    self._columns = (*fmt.ROW_COLUMNS, *fmt.part_columns(parts))
    self.tables: dict[str, dict[str, int]] = {name: {} for name in (*fmt.TEXTS, *fields)}
    self.steps: list[np.ndarray] = []
    self.rows: list[np.ndarray] = []
    self.modules: list[fmt.Modules] = []
    self.replaced: Path | None = None
    self.said: dict[str, Any] = {}

  @property
  def first_step(self) -> int:
    return int(self.steps[0]["step"][0])

  @property
  def last_step(self) -> int:
    return int(self.steps[-1]["step"][-1])

  def add(self, record: Mapping[str, Any], rows: Mapping, documents: Sequence, modules: Mapping | None) -> int:
    """Checks and adds one step; returns its number of rows."""
    number = int(record["step"])
    step = fmt.unmeasured_steps([number], self._num_sets, self._ledger)
    names = step.dtype.names or ()
    for name, value in record.items():
      if name not in names:
        raise ValueError(f"unknown step column {name!r}{did_you_mean(name, names)}")
      if name != "step":
        step[name][0] = np.asarray(value, np.float64)
    row = self._rows(number, rows, documents, step["tokens"][0])
    if modules is not None:
      self.modules.append(self._modules(number, modules))
    self.steps.append(step)
    self.rows.append(row)
    return len(row)

  def _rows(self, step: int, rows: Mapping, documents: Sequence, step_tokens: float) -> np.ndarray:
    num_rows, array = len(documents), np.zeros((len(documents),), self._dtype)
    array["step"] = step
    if num_rows and (missing := set(REQUIRED) - set(rows)):
      raise ValueError(f"score rows lack the columns {', '.join(sorted(missing))}")
    names = [name for name in self._columns if name not in ("step", *fmt.TEXTS, "offset")]
    for name in rows:
      if name not in names:
        raise ValueError(f"unknown score column {name!r}{did_you_mean(name, names)}")
      value, expected = np.asarray(rows[name]), array[name].shape
      if value.shape != expected and not (value.shape == (num_rows,) and expected == (num_rows, 1)):
        raise ValueError(f"score column {name!r} has shape {value.shape}, expected {expected} for {num_rows} documents")
      array[name] = value.reshape(expected)
    if "share" not in rows:
      array["share"] = array["tokens"] / max(step_tokens if np.isfinite(step_tokens) else array["tokens"].sum(), 1)
    for i, (domain, path, offset, *fields) in enumerate(documents):
      if len(fields) != len(self.tables) - len(fmt.TEXTS):
        raise ValueError(f"document {documents[i]!r}: expected domain, path, offset and {list(self.tables)[2:]}")
      array["offset"][i] = offset
      for (name, table), text in zip(self.tables.items(), (domain, path, *fields), strict=True):
        array[name][i] = table.setdefault(str(text).rstrip("\0"), len(table))  # as NumPy gives it back
    return array

  def _modules(self, step: int, modules: Mapping) -> fmt.Modules:
    names, domains = tuple(modules["names"]), tuple(modules["domains"])
    value_MLDK = np.asarray(modules["contribution"], np.float32)
    value_MLDK = value_MLDK[..., None] if value_MLDK.ndim == 3 and self._num_sets == 1 else value_MLDK
    expected = (len(names), value_MLDK.shape[1] if value_MLDK.ndim == 4 else 0, len(domains), self._num_sets)
    if value_MLDK.shape != expected:
      raise ValueError(f"module contributions have shape {value_MLDK.shape}, expected [M, layers, D, K] = {expected}")
    found = fmt.Modules(names, domains, np.array([step]), value_MLDK[None])
    if self.modules and found.layout != self.modules[0].layout:
      raise ValueError("the names of modules and domains must not change inside a run")
    return found

  @classmethod
  def load(cls, shard: Shard, last_step: int, ledger: Sequence[str], fields: Sequence[str]) -> Self:
    """The steps of a file up to `last_step`; fields that the file does not have are empty."""
    interval = cls(len(shard.val_sets), ledger, shard.before, fields, shard.parts)
    steps, rows, modules = fmt.with_ledger(shard.steps, len(shard.val_sets), ledger), shard.rows(), shard.modules
    interval.steps = [steps[steps["step"] <= last_step]]
    interval.rows = [recfunctions.require_fields(rows[rows["step"] <= last_step], interval._dtype)]
    known = (*fmt.TEXTS, *shard.fields)
    for name, table in interval.tables.items():
      table.update({str(text): i for i, text in enumerate(shard.texts(name) if name in known else [""])})
    if modules is not None:
      kept = modules.steps <= last_step
      values = modules.contribution_SMLDK[kept]
      interval.modules = [fmt.Modules(modules.names, modules.domains, modules.steps[kept], values)]
    interval.replaced, interval.said = shard.path, {name: shard.meta[name] for name in SAID}
    return interval


class Writer:
  """Writes one process's part of the score log: for the trainer, the manager and custom training loops.

  A file is written within the call that completes its interval; what the disk refuses is raised as OSError.

  run_dir: the run's folder; files go to its `ghost/` (`folder`, which may be changed before the first step). val_sets:
  names of the K validation sets. process: (number of this process, how many write); process 0 also restores the files
  of processes beyond these. period: steps per file. fingerprint: of the data source; it tells a reader whether the
  texts are still the same. objective: of the training. ledger: columns of the predicted drop, `predicted_examples`
  among them, as the optimizer names them. direction: that the scores were computed with. fields: names of what each
  document is given with besides domain, path and offset. parts: of the rows; each has a column contribution_<part>.
  """

  def __init__(self, run_dir, val_sets: Sequence[str] = ("manual",), process: tuple[int, int] = (0, 1),
               period: int = 20, fingerprint: str = "", objective: str = fmt.NEXT_TOKEN,
               ledger: Sequence[str] = fmt.LEDGER, direction: str = "", fields: Sequence[str] = (),
               parts: Sequence[str] = ()):  # fmt: skip
    if period < 1:
      raise ConfigError(f"period={period}: at least 1 step per score file")
    if taken := [name for name in fields if name in fmt.TAKEN or not name.isidentifier()]:
      what = "the score log has a column of this name, or could have none"
      raise ConfigError(f"document_fields={taken[0]}: {what}; give the field another: own_name={taken[0]}")
    if "predicted_examples" not in ledger or len(set(ledger)) < len(ledger):
      raise ValueError(f"ledger={list(ledger)}: distinct names, predicted_examples among them")
    self.folder = Path(run_dir) / "ghost"
    (self._process_index, self._num_processes), self._period = process, period
    self.val_sets, self.ledger = tuple(val_sets), tuple(ledger)
    self.fields, self.parts = tuple(fields), tuple(parts)
    written = (*fmt.ROW_COLUMNS, *(fmt.step_dtype(len(self.val_sets), ledger).names or ()))
    self._about = {"schema_version": fmt.version_of(parts), "val_sets": self.val_sets, "objective": objective,
                   "ledger": self.ledger, "direction": direction, "fields": self.fields,
                   **({"parts": self.parts} if parts else {}), "process_index": self._process_index,
                   "fingerprint": fingerprint,
                   "units": {name: text for name, text in fmt.units(ledger).items() if name in written}}  # fmt: skip
    self._last_step, self._num_steps, self._num_rows, self._restored = -1, 0, 0, False
    self._pending = self._new_interval()

  def append(self, step_record: Mapping, rows: Mapping, documents: Sequence, *, modules: Mapping | None = None) -> None:
    """Adds one step. Raises ValueError for a step out of order, an unknown column or a wrong shape.

    step_record: `step` and any of the step columns; what is left out is NaN. Per-set values are [K] (or a scalar).
    rows: tokens [N], loss [N], dot [N, K], contribution [N, K]; optionally share [N], of the batch loss (default:
    tokens over those of the step), chunk [N], the bytes between the start of the document and the scored chunk, and
    epoch [N], how often the data had been read through before; and contribution_<part> [N, K]. documents: N ids
    (domain, path, offset), each with the values of the writer's `fields` behind. modules: {"names": M strings,
    "domains": D strings, "contribution": f32[M, L, D, K]} in nats; cells that do not exist (layers outside the stack)
    are NaN.
    """
    step = int(step_record["step"])
    if not self._restored and (files := self._own_files()):
      raise ValueError(f"{files[0][0]} is already there: call restore(position), or restore(None) to begin anew")
    self._restored = True
    if self._num_processes > 1 and documents and "share" not in rows and "tokens" not in step_record:
      raise ValueError("several processes write: give the step's tokens of all of them, or the share of each row")
    if step <= self._last_step:
      raise ValueError(f"step={step}: the score log already holds step {self._last_step}; steps only grow")
    if self._pending.steps and step // self._period != self._pending.first_step // self._period:
      self._finish()
    self._num_rows += self._pending.add(step_record, rows, documents, modules)
    self._last_step = step
    self._num_steps += 1
    if (step + 1) % self._period == 0:
      self._finish()

  def flush(self) -> None:
    """Writes every appended step to disk."""
    if self._pending.steps and self._pending.replaced != self._path(self._pending.last_step):
      self._write(self._pending)

  close = flush

  def position(self) -> dict[str, int]:
    """Flushes and returns what `restore` needs: the last step, the number of steps and of rows."""
    self.flush()
    return {"step": self._last_step, "num_steps": self._num_steps, "num_rows": self._num_rows}

  def restore(self, position: Mapping[str, int] | None) -> None:
    """Returns the log to `position`, removing later steps; None empties it. Missing scores are reported on stderr."""
    last_step = -1 if position is None else int(position["step"])
    former = {process for *_, process in self._files() if process >= self._num_processes}
    for process in sorted(former) if self._process_index == 0 else ():
      other = Writer(self.folder, self.val_sets, (process, 1), self._period, fields=self.fields)
      other.folder, other.ledger, other._about = self.folder, self.ledger, self._about | {"process_index": process}
      other.restore(None if position is None else {"step": last_step})
    self._last_step, self._restored = last_step, True
    found: list[Shard] = []
    # Partial files that this process left when it was killed, and files of later steps.
    dropped = [path for path in self.folder.glob(".*.tmp") if fmt.process_of(path.name) == self._process_index]
    for path, step in self._own_files():
      try:
        found.append(Shard(path))
      except DamagedShard as error:
        print(f"maxghost: {error}; its scores are lost up to step {last_step}", file=sys.stderr)
        dropped += [path] if step > last_step else []
    kept = [shard for shard in found if shard.first_step <= last_step]
    if others := [shard for shard in kept if shard.val_sets != self.val_sets]:
      sets = f"{', '.join(others[0].val_sets)}, this run against {', '.join(self.val_sets)}"
      said = f"{others[0].path}: scored against the validation sets {sets}"
      raise ConfigError(f"{said}; continue with the same sets or under another run_name")
    (self.folder / fmt.position_name(self._process_index)).unlink(missing_ok=True)
    kept = drop_covered(kept)  # cut at the same step, what lies inside another file would take its place
    dropped += [shard.path for shard in found if shard not in kept and shard.last_step > last_step]
    for place, shard in enumerate(kept):
      if shard.last_step > last_step:
        kept[place] = Shard(self._write(Interval.load(shard, last_step, self.ledger, self.fields)))
    for path in dropped:
      path.unlink(missing_ok=True)
    self.folder.mkdir(parents=True, exist_ok=True)  # it may have been lost
    sync(self.folder)
    self._count(kept, position)

  def _count(self, kept: list[Shard], position: Mapping[str, int] | None) -> None:
    """Counts the kept files, reports what is missing and loads an unfinished last interval into memory."""
    found, end, pending = (0, 0), (0, 0), None
    for shard in kept:
      found, end = (found[0] + len(shard.steps), found[1] + shard.num_rows), shard.after
      unfinished = (self._last_step + 1) % self._period and shard.last_step == self._last_step
      same = all(shard.meta[name] == self._about[name] for name in SAID)
      if unfinished and same and shard.first_step // self._period == self._last_step // self._period:
        pending = Interval.load(shard, self._last_step, self.ledger, self.fields)
    self._num_steps, self._num_rows = end
    if position is not None and "num_steps" in position:  # what was written counts, so that a reader sees the gap
      self._num_steps, self._num_rows = counted = int(position["num_steps"]), int(position["num_rows"])
      if found != counted:
        holds = "holds {} steps with {} rows, the checkpoint counted {} with {}".format(*found, *counted)
        print(f"maxghost: {self.folder} {holds}: files were changed; missing scores stay missing", file=sys.stderr)
      for lost in ScoreLog(self.folder, kept, True).lost_beside(self.folder) if kept else ():
        print(f"maxghost: {self.folder}: {lost}; they stay missing", file=sys.stderr)
    self._pending = pending or self._new_interval()
    self._note(self._last_step, self._num_steps, self._num_rows)

  def _files(self) -> list[tuple[Path, int, int]]:
    """(path, last step, process) of the score files of all processes."""
    return [(path, *name) for path in sorted(self.folder.glob("*.npz")) if (name := fmt.parse_shard_name(path.name))]

  def _own_files(self) -> list[tuple[Path, int]]:
    return [(path, step) for path, step, process in self._files() if process == self._process_index]

  def _path(self, last_step: int) -> Path:
    return self.folder / fmt.shard_name(last_step, self._process_index)

  def _new_interval(self) -> Interval:
    return Interval(len(self.val_sets), self.ledger, (self._num_steps, self._num_rows), self.fields, self.parts)

  def _finish(self) -> None:
    """Writes the pending interval for the last time, and begins a new one."""
    self._write(self._pending, closed=True)
    self._pending = self._new_interval()

  def _write(self, interval: Interval, closed: bool = False) -> Path:
    """Writes the interval's file and removes the one it replaces. closed: it will not be written again."""
    path = self._path(interval.last_step)
    meta = self._about | interval.said | {"first_step": interval.first_step, "last_step": interval.last_step}
    meta |= {"before": interval.before, "closed": closed}
    meta["processes"] = sorted(fmt.process_of(path.name) for path in self.folder.glob("position*.json"))
    steps, num_rows = np.concatenate(interval.steps), sum(map(len, interval.rows))
    self.folder.mkdir(parents=True, exist_ok=True)
    write_shard(path, meta, interval.tables, steps, fmt.Modules.joined(interval.modules), interval.rows, num_rows)
    self._note(interval.last_step, interval.before[0] + len(steps), interval.before[1] + num_rows)
    if interval.replaced not in (None, path):
      interval.replaced.unlink(missing_ok=True)
    interval.replaced = path
    return path

  def _note(self, step: int, num_steps: int, num_rows: int) -> None:
    position = {"step": step, "num_steps": num_steps, "num_rows": num_rows}
    with write_whole(self.folder / fmt.position_name(self._process_index), durable=False) as file:
      file.write(json.dumps(sealed(position)).encode())
