"""Reads the score log: `load(run_dir)` merges the files of all processes and intervals.

Rows are read on demand: `blocks` streams them in bounded memory, `log[name]` is a whole column.
K validation sets, N rows, S steps.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.config.files import check_seal
from maxghost.config.values import ConfigError, did_you_mean, nearest_beside
from maxghost.scorelog import format as fmt
from maxghost.scorelog import selection, tokens
from maxghost.scorelog.shard import DamagedShard, Shard, drop_covered

SHOWN_LOSSES = 6


def run_of(path: Path) -> Path:
  """The folder of a run, also of the `ghost/` in it: texts and losses lie beside the scores."""
  return path.parent if path.name == "ghost" and (path.parent / "config.yml").is_file() else path


def load(run_dir, *, accept_lost_rows: bool = False) -> "ScoreLog":
  """Opens the score log of a run, after comparing each file with its checksum.

  run_dir: holds `ghost/`, or is that folder, or a folder with a custom loop's files. accept_lost_rows: continue without
  damaged or missing files; `messages` lists them. Raises ConfigError for a missing or foreign folder, a damaged or
  missing file (unless accepted), a file of another schema, or files scored against different validation sets.
  """
  run_dir = run_of(Path(run_dir))
  if not run_dir.is_dir():
    raise ConfigError(f"run_dir={run_dir}: no such folder{nearest_beside(run_dir)}")
  folder = run_dir if run_dir.name == "ghost" or not (run_dir / "ghost").is_dir() else run_dir / "ghost"
  written = _written(folder)  # before the files are listed: what is written in between is not missed
  shards, lost = _open(folder)
  if not shards and lost:
    raise ConfigError(f"run_dir={run_dir}: none of {len(lost)} score files is readable ({lost[0]})")
  if shards:
    log = ScoreLog(run_dir, shards, accept_lost_rows)
    lost += [*_missing(log.shards, written), *_unread(folder), *log.lost_beside(folder)]
    if lost and not accept_lost_rows:
      more = [f"and {len(lost) - SHOWN_LOSSES} more"] if len(lost) > SHOWN_LOSSES else []
      way = "Put the files back, or go on without them: --accept-lost-rows (in Python accept_lost_rows=True)"
      raise ConfigError(f"run_dir={run_dir}: scores are lost: {'; '.join(lost[:SHOWN_LOSSES] + more)}. {way}")
    log.messages += [f"lost: {sentence}" for sentence in lost]
    return log
  foreign = "" if (run_dir / "config.yml").is_file() else "not a run of maxghost (no config.yml, no scores)"
  found = "".join(_unread(folder)) or foreign or "no score files"
  raise ConfigError(f"run_dir={run_dir}: {found}; with ghost_enabled=true a run logs some every ghost_log_period steps")


def _open(folder: Path, tries: int = 5) -> tuple[list[Shard], list[str]]:
  """The whole files, and a sentence about each that is not."""
  shards, lost = [], []
  for path in sorted(path for path in folder.iterdir() if fmt.parse_shard_name(path.name)):
    try:
      shards.append(Shard(path))
    except FileNotFoundError:  # a run that is training has replaced it by a longer one: look again
      if tries:
        return _open(folder, tries - 1)
      lost.append(f"{path.name} disappeared")
    except DamagedShard as error:
      lost.append(f"{error} (damaged, left out whole)")
  return shards, lost


def _written(folder: Path) -> dict[int, dict]:
  """{process: position} as the writers recorded it. Raises ConfigError for a damaged file."""
  found = {}
  for path in folder.glob("position*.json"):
    try:
      position = check_seal(json.loads(path.read_text("utf-8")))
      found[int(path.stem.partition("_p")[2] or 0)] = {key: int(position[key]) for key in ("num_steps", "num_rows")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
      raise ConfigError(f"{path}: damaged ({error}); remove it to read the scores without it") from error
  return found


def _missing(shards: list[Shard], written: dict[int, dict]) -> Iterator[str]:
  """A sentence about each gap between the files of a process, found by each file's count of what precedes it."""
  named = {process for shard in shards for process in shard.meta.get("processes", ())}
  for process in sorted(named - {*written, *(shard.process_index for shard in shards)}):
    yield f"all files of process {process} are missing"
  for process, group in itertools.groupby(shards, lambda shard: shard.process_index):
    end, last = (0, 0), None
    for shard in group:
      if shard.before != end:
        yield _gap(f"before step {shard.first_step}", last, shard.before, end)
      end, last = shard.after, shard.last_step
    if process in written and (total := tuple(written.pop(process).values())) > end:
      yield _gap("at the end", last, total, end)
  for process, position in written.items():
    if position["num_rows"]:
      yield f"all {position['num_rows']} rows of process {process} are missing"


def _gap(where: str, last: int | None, there: tuple, have: tuple) -> str:
  after = "" if last is None else f" (after step {last})"
  if there < have:
    return f"{have[1] - there[1]} rows more than were written {where}{after}"
  return f"{there[0] - have[0]} steps with {there[1] - have[1]} rows are missing {where}{after}"


def _unread(folder: Path) -> list[str]:
  kinds = {"parquet/rows_*.parquet": "an earlier maxghost", "dot_prod_log_iter_*.pt": "GhostSuite"}
  kinds["grad_dotprods/dot_prod_log_iter_*.pt"] = "GhostSuite"
  found = ((made, next(folder.glob(pattern), None)) for pattern, made in kinds.items())
  return [f"{path} holds scores of {made}, which this one does not read" for made, path in found if path]


class ScoreLog(fmt.Frame):
  """A run's scores. `log["contribution"]` is the whole column f32[N, K]; `log.steps["loss"]` is f64[S]. val_sets,
  objective: of all files. parts: of a row, each with a column contribution_<part>. ledger: columns of the predicted
  drop. columns: of the rows, with the fields of the documents behind. messages: sentences for the reader."""

  def __init__(self, run_dir: Path, shards: list[Shard], accept_lost_rows: bool):
    self.run_dir, self.shards, self.accept_lost_rows = run_dir, drop_covered(shards), accept_lost_rows
    self.messages: list[str] = []
    self.val_sets, self.objective, self.parts = shards[0].val_sets, shards[0].objective, shards[0].parts
    for shard in shards:  # also a covered file may be of another run
      if (shard.val_sets, shard.objective, shard.parts) != (self.val_sets, self.objective, self.parts):
        found = f"objective {shard.objective}, validation sets {', '.join((*shard.val_sets, *shard.parts))}"
        first = f"{shards[0].path.name} has {self.objective}, {', '.join((*self.val_sets, *self.parts))}"
        raise ConfigError(f"{shard.path.name}: {found}, but {first}; the files are of different runs")
    self.ledger = tuple(dict.fromkeys(name for shard in shards for name in shard.ledger))
    self.units = fmt.units(self.ledger)
    self.fields = tuple(name for name in shards[0].fields if all(name in shard.fields for shard in shards))
    if partial := sorted({name for shard in shards for name in shard.fields} - set(self.fields)):
      self.messages.append(f"only some of the score files have the documents' {', '.join(partial)}")
    self.num_rows = sum(shard.num_rows for shard in self.shards)
    self.columns = (*fmt.ROW_COLUMNS, *fmt.part_columns(self.parts), *self.fields)

  def __repr__(self) -> str:
    taken = np.isfinite(self.steps["loss"]) | np.isfinite(self.steps["val_loss"]).any(-1)  # the last is only measured
    steps = self.steps["step"][taken if taken.any() else ~taken]
    said = f"steps {min(steps, default='-')} to {max(steps, default='-')}, against {', '.join(self.val_sets)}"
    return f"ScoreLog({self.run_dir}: {self.num_rows:,} rows of {said}; {list(self.columns)})"

  def for_others(self) -> dict[str, np.ndarray]:
    """Every column of all rows, texts written out."""
    parts = []
    for shard, rows in self.blocks():
      texts = {name: np.array(fmt.for_others(shard.texts(name)))[rows[name]] for name in (*fmt.TEXTS, *self.fields)}
      parts.append(self.columns_of(rows) | texts)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

  def columns_of(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of some rows, set by set, with `in_all` where the log knows it; texts are indices."""
    arrays = {name: rows[name] for name in self.columns}
    if self.knows_in_all:
      arrays["in_all"] = self.in_all(rows).astype(np.float32)
    return fmt.columns_of(arrays, self.val_sets)

  @functools.cached_property
  def knows_in_all(self) -> bool:
    """Whether the steps tell what momentum does with their gradients later."""
    return bool(np.isfinite(self.steps["learning_rate_in_all"]).any())

  def in_all(self, rows: np.ndarray) -> np.ndarray:
    """f64[N, K]: contributions with what momentum does with the gradients of `rows` later; NaN where unknown. In steps
    with learning rate 0 the product is formed from `dot`, since the contribution is 0 there."""
    steps, place_N = self.steps, np.searchsorted(self.steps["step"], rows["step"])
    rate_S, reach_S = steps["learning_rate"], steps["learning_rate_in_all"]
    value_NK = rows["contribution"] * (reach_S / np.where(rate_S > 0, rate_S, np.nan))[place_N, None]
    if (still_N := rate_S[place_N] == 0).any():
      scale_S = np.where(reach_S == 0, 0.0, reach_S * steps["clip_factor"])  # after the last step nothing stays
      scale_N = rows["share"][still_N] * scale_S[place_N[still_N]]
      value_NK[still_N] = rows["dot"][still_N] * scale_N[:, None]
    return value_NK

  def said_of(self, name: str) -> tuple[str, ...]:
    """The distinct values of a key of the files' headers (fingerprint, direction)."""
    return tuple(dict.fromkeys(s.meta[name] for s in self.shards if s.meta.get(name)))

  @functools.cached_property
  def steps(self) -> np.ndarray:
    """Structured array of the steps in order, as `format.step_dtype`; from the lowest process that holds a step."""
    table = np.concatenate([fmt.with_ledger(s.steps, len(self.val_sets), self.ledger) for s in self.shards])
    return table[np.unique(table["step"], return_index=True)[1]]

  @functools.cached_property
  def domains(self) -> tuple[str, ...]:
    """Names of the domains that have rows, sorted."""
    return tuple(sorted({str(name) for shard in self.shards for name in shard.texts("domain")}))

  def modules(self) -> Iterator[fmt.Modules]:
    """Contributions by module, layer and domain, file by file. Raises ConfigError for files of unlike modules."""
    first = None
    for shard in self.shards:
      if (modules := shard.modules) is not None:
        if modules.layout != (first := first or modules.layout):
          raise ConfigError(f"{shard.path.name}: other modules, layers or domains than in the files before it")
        yield modules

  def blocks(self) -> Iterator[tuple[Shard, np.ndarray]]:
    """(file, rows) in bounded memory; texts are indices into the file's tables. Raises ConfigError for others."""
    for shard in self.shards:
      try:
        sizes = {name: len(shard.texts(name)) for name in (*fmt.TEXTS, *self.fields)}
        for rows in shard.blocks():
          for name, size in sizes.items():
            if len(outside := rows[name][(rows[name] < 0) | (rows[name] >= size)]):
              entry = f"a row points to entry {outside[0]} of {size} in its table of {name}s"
              raise ConfigError(f"{shard.path}: {entry}: the file is damaged; remove it to use the others")
          yield shard, rows
      except (DamagedShard, FileNotFoundError) as error:
        raise ConfigError(f"{shard.path} changed while it was read; try again ({error})") from error

  def __getitem__(self, name: str) -> np.ndarray:
    """A whole column as one array; domain, path and fields as strings. Raises ConfigError for an unknown name."""
    if name == "in_all" and self.knows_in_all:
      return np.concatenate([np.zeros((0, len(self.val_sets))), *(self.in_all(rows) for _, rows in self.blocks())])
    if name not in self.columns:
      raise ConfigError(f"unknown score column {name!r}{did_you_mean(name, self.columns)}")
    is_text = name in (*fmt.TEXTS, *self.fields)
    empty = fmt.row_dtype(len(self.val_sets), fields=self.fields, parts=self.parts)[name]
    parts = (shard.texts(name)[rows[name]] if is_text else rows[name] for shard, rows in self.blocks())
    return np.concatenate([np.zeros((0, *empty.shape), "<U1" if is_text else empty.base), *parts])

  def checksums(self, name: str) -> dict[int, int]:
    """{step: CRC-32} of what lies beside the log: tokens_crc or selection_crc."""
    known = self.steps[np.isfinite(self.steps[name])]
    return dict(zip(known["step"].tolist(), known[name].astype(np.int64).tolist(), strict=True))

  def lost_beside(self, folder: Path) -> list[str]:
    """A sentence for each kind of file beside the log, in its folder, of which some are missing."""
    return [*tokens.missing(folder, self.checksums("tokens_crc")),
            *selection.missing(folder, self.checksums("selection_crc"))]  # fmt: skip

  def chosen(self) -> np.ndarray:
    """bool[N]: whether the row was trained on, in a run with ghost_select. Raises ConfigError for one without."""
    folder = self.shards[0].path.parent
    if not (folder / selection.FILE).is_file():
      raise ConfigError(f"{folder}: no {selection.FILE}; the run was not trained with ghost_select")
    return self["share"] > 0
