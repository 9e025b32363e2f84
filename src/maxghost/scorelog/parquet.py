"""Compaction: many small score files become few Parquet files, one per range of steps.

`ghost/parquet/` holds, per range, `rows_<first>_<last>.parquet` (one row per scored chunk, texts dictionary-encoded;
any Parquet reader opens it), `steps_...` (one row per step) and `modules_...` (one per step, module, layer and domain).
The rows are written last: a range without them does not exist. Per-set columns are called `contribution` for one
validation set and `contribution[name]` for several.

K validation sets, N rows, M modules, L layers, D domains.
"""

import fcntl
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError
from maxghost.scorelog import format as fmt

ROWS_PER_PART = 8_000_000
_NAME = re.compile(r"rows_(\d+)_(\d+)\.parquet")


def import_pyarrow(what: str):
  """(pyarrow, pyarrow.parquet); raises ConfigError that names the extra."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as error:
    raise ConfigError(f"{what} needs pyarrow: pip install 'maxghost[scores]'") from error
  return pyarrow, pyarrow.parquet


def part_files(folder: Path) -> list[Path]:
  """The committed row files in `<run>/ghost/parquet`, by first step."""
  found = [(int(m[1]), -int(m[2]), path) for path in folder.glob("rows_*.parquet") if (m := _NAME.fullmatch(path.name))]
  return [path for *_, path in sorted(found)]


class Part:
  """One range of steps in Parquet; offers what format.Shard offers. Rows of all processes, process after process."""

  process_index = 0
  problem = ""

  def __init__(self, path: Path):
    self.path = path
    _, self._parquet = import_pyarrow(f"reading {path}")
    try:
      self._file = self._parquet.ParquetFile(path)
      self.meta = json.loads(self._file.schema_arrow.metadata[b"maxghost"])
    except FileNotFoundError:
      raise
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise fmt.DamagedShard(f"{path.name}: not a readable score file ({error})") from error
    version = self.meta.get("schema_version")
    if not isinstance(version, int) or version > fmt.SCHEMA_VERSION:
      raise fmt.NewerSchema(path, version)
    self.val_sets = tuple(self.meta["val_sets"])
    self.num_rows = self._file.metadata.num_rows
    self.first_step, self.last_step = int(self.meta["first_step"]), int(self.meta["last_step"])

  @property
  def domains(self) -> np.ndarray:
    return np.array(self.meta["domains"], dtype=np.str_)

  @functools.cached_property
  def paths(self) -> np.ndarray:
    table = self._parquet.read_table(self.path, columns=["path"], read_dictionary=["path"])
    return np.array(table["path"].unique().to_pylist(), dtype=np.str_)

  @functools.cached_property
  def steps(self) -> np.ndarray:
    table = self._parquet.read_table(_beside(self.path, "steps"))
    array = np.zeros((table.num_rows,), fmt.step_dtype(len(self.val_sets)))
    _from_columns(array, table, self.val_sets)
    return array

  @functools.cached_property
  def modules(self) -> fmt.Modules | None:
    layout = self.meta["modules"]
    if layout is None:
      return None
    table = self._parquet.read_table(_beside(self.path, "modules"))
    steps = np.array(layout["steps"], np.int64)
    shape = (len(steps), len(layout["names"]), layout["num_layers"], len(layout["domains"]), len(self.val_sets))
    value_SMLDK = np.full(shape, np.nan, np.float32)
    place = tuple(table[name].to_numpy() for name in ("module_index", "layer", "domain_index"))
    step = np.searchsorted(steps, table["step"].to_numpy())
    for k, column in enumerate(_set_columns("contribution", self.val_sets)):
      value_SMLDK[(step, *place, k)] = table[column].to_numpy()
    return fmt.Modules(tuple(layout["names"]), tuple(layout["domains"]), steps, value_SMLDK)

  def blocks(self, block_rows: int = fmt.BLOCK_ROWS, columns: frozenset[str] | None = None) -> Iterator[np.ndarray]:
    """As format.Shard.blocks. columns: those that are needed; the others stay 0 and are not read."""
    wanted = set(fmt.row_dtype(1).names) if columns is None else set(columns)
    names = [name for name in self._file.schema_arrow.names if name.partition("[")[0] in wanted]
    file = self._parquet.ParquetFile(self.path, read_dictionary=["domain", "path"])
    place = {
      name: {text: i for i, text in enumerate(getattr(self, f"{name}s").tolist())}
      for name in ("domain", "path")
      if name in wanted
    }
    for batch in file.iter_batches(block_rows, columns=names):
      rows = np.zeros((batch.num_rows,), fmt.row_dtype(len(self.val_sets)))
      _from_columns(rows, batch, self.val_sets, skip=tuple(place))
      for name, index in place.items():
        encoded = batch.column(name)
        table = np.array([index[text] for text in encoded.dictionary.to_pylist()], np.int32)
        rows[name] = table[encoded.indices.to_numpy()]
      yield rows

  def rows(self) -> np.ndarray:
    blocks = list(self.blocks())
    return np.concatenate(blocks) if blocks else np.zeros((0,), fmt.row_dtype(len(self.val_sets)))


def _beside(rows_path: Path, kind: str) -> Path:
  return rows_path.with_name(rows_path.name.replace("rows_", f"{kind}_", 1))


def _set_columns(name: str, val_sets) -> list[str]:
  return [name] if len(val_sets) == 1 else [f"{name}[{val_set}]" for val_set in val_sets]


def _from_columns(array: np.ndarray, table, val_sets, skip: tuple = ()):
  """Fills a structured array from a pyarrow table or batch; columns that are not there stay 0."""
  for name in array.dtype.names:
    if name in skip:
      continue
    if array.dtype[name].shape:
      for k, column in enumerate(_set_columns(name, val_sets)):
        if column in table.schema.names:
          array[name][:, k] = table.column(column).to_numpy()
    elif name in table.schema.names:
      array[name] = table.column(name).to_numpy()


def _columns(pa, array: np.ndarray, val_sets, skip: tuple = ()) -> dict:
  columns = {}
  for name in array.dtype.names:
    if name in skip:
      continue
    if array.dtype[name].shape:
      for k, column in enumerate(_set_columns(name, val_sets)):
        columns[column] = pa.array(np.ascontiguousarray(array[name][:, k]))
    else:
      columns[name] = pa.array(np.ascontiguousarray(array[name]))
  return columns


def compact(run_dir: Path, keep_shards: bool = False, rows_per_part: int = ROWS_PER_PART) -> list[str]:
  """Turns the finished score files of a run into Parquet; returns sentences about what was done.

  keep_shards: the original files stay (readers then use the Parquet files). Of a run that is still training, files that
  it may write again are left alone. Raises ConfigError as attribution.load does, and without pyarrow.
  """
  from maxghost.scorelog.reader import load

  import_pyarrow("--compact")
  log = load(run_dir)
  running = _is_running(run_dir)
  files = [shard for shard in log.shards if isinstance(shard, fmt.Shard)]
  open_from = min((s.first_step for s in files if running and not s.meta.get("closed")), default=None)
  ready = [s for s in files if open_from is None or s.last_step < open_from]
  if not ready:
    return ["nothing to compact" + (": the training has not finished another score file" if running else "")]
  lines = [f"left as it is: {message}" for message in log.messages]
  for group in _groups(ready, rows_per_part):
    path = write_part(group[0].path.parent / "parquet", group)
    size = sum(file.stat().st_size for file in (path, _beside(path, "steps")))
    lines.append(
      f"{path}: steps {group[0].first_step} to {group[-1].last_step}, {sum(s.num_rows for s in group):,} rows, "
      f"{size:,} bytes from {sum(s.path.stat().st_size for s in group):,}"
    )
    if not keep_shards:
      for shard in group:
        shard.path.unlink()
  return lines


def _is_running(run_dir: Path) -> bool:
  """Whether a training process holds the run's lock."""
  lock = Path(run_dir) / ".lock"
  if not lock.exists():
    return False
  with open(lock) as file:
    try:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
      return True
  return False


def _groups(shards: list, rows_per_part: int) -> Iterator[list]:
  """Neighbouring files of all processes, cut where no file reaches across."""
  ordered = sorted(shards, key=lambda s: (s.first_step, s.last_step, s.process_index))
  group: list = []
  for shard in ordered:
    reach = max((s.last_step for s in group), default=-1)
    if group and shard.first_step > reach and sum(s.num_rows for s in group) >= rows_per_part:
      yield group
      group = []
    group.append(shard)
  if group:
    yield group


def write_part(folder: Path, shards: list, last_step: int | None = None) -> Path:
  """Writes one range from files or parts, up to `last_step`; steps and modules first, then the rows that commit it."""
  pa, parquet = import_pyarrow("--compact")
  folder.mkdir(parents=True, exist_ok=True)
  first = min(s.first_step for s in shards)
  last = max(s.last_step for s in shards) if last_step is None else last_step
  val_sets = shards[0].val_sets
  path = folder / f"rows_{first:09d}_{last:09d}.parquet"
  steps = np.concatenate([s.steps for s in shards])
  steps = steps[np.unique(steps["step"], return_index=True)[1]]
  _write(parquet, pa.table(_columns(pa, steps[steps["step"] <= last], val_sets)), _beside(path, "steps"))
  layout = _write_modules(pa, parquet, shards, val_sets, last, _beside(path, "modules"))
  fingerprints = dict.fromkeys(s.meta["fingerprint"] for s in shards if s.meta.get("fingerprint"))
  meta = {
    "schema_version": fmt.SCHEMA_VERSION,
    "val_sets": val_sets,
    "first_step": first,
    "last_step": last,
    "fingerprint": ", ".join(fingerprints),
    "units": fmt.UNITS,
    "modules": layout,
    "domains": sorted({str(name) for s in shards for name in s.domains}),
  }
  _write_rows(pa, parquet, shards, meta, path)
  return path


def _write(parquet, table, path: Path):
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  parquet.write_table(table, temporary)
  os.replace(temporary, path)


def _write_rows(pa, parquet, shards, meta: dict, path: Path):
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  writer = None
  try:
    for shard in shards:
      for rows in shard.blocks():
        rows = rows[rows["step"] <= meta["last_step"]]
        columns = _columns(pa, rows, meta["val_sets"], skip=("domain", "path"))
        for name in ("domain", "path"):
          table = pa.array(getattr(shard, f"{name}s").tolist(), pa.string())
          columns[name] = pa.DictionaryArray.from_arrays(pa.array(np.ascontiguousarray(rows[name])), table)
        batch = pa.table(columns)
        if writer is None:
          schema = batch.schema.with_metadata({"maxghost": json.dumps(meta)})
          writer = parquet.ParquetWriter(temporary, schema)
        writer.write_table(batch.replace_schema_metadata(schema.metadata))
    if writer is None:
      raise ConfigError("nothing to compact: the score files hold no rows")
    writer.close()
    with open(temporary, "rb") as file:
      os.fsync(file.fileno())
    os.replace(temporary, path)
    fmt.sync_folder(path.parent)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def _write_modules(pa, parquet, shards, val_sets, last: int, path: Path) -> dict | None:
  """Long form, without the cells that do not exist; returns what is needed to build the array again."""
  parts = [(s, s.modules) for s in shards if s.process_index == 0 and s.modules is not None]
  if not parts:
    return None
  names, domains = parts[0][1].names, parts[0][1].domains
  value_SMLDK = np.concatenate([m.contribution_SMLDK for _, m in parts])
  steps = np.concatenate([m.steps for _, m in parts])
  value_SMLDK, steps = value_SMLDK[steps <= last], steps[steps <= last]
  step, module, layer, domain = np.nonzero(np.isfinite(value_SMLDK).any(-1))
  table = {
    "step": steps[step],
    "module": np.array(names, dtype=np.str_)[module],
    "module_index": module,
    "layer": layer,
    "domain": np.array(domains, dtype=np.str_)[domain],
    "domain_index": domain,
  }
  for k, column in enumerate(_set_columns("contribution", val_sets)):
    table[column] = value_SMLDK[step, module, layer, domain, k]
  _write(parquet, pa.table(table), path)
  return {"names": names, "domains": domains, "num_layers": value_SMLDK.shape[2], "steps": steps.tolist()}


def cut(folder: Path, last_step: int):
  """Removes what the parts in `folder` hold after `last_step`: for a run that continues from an older checkpoint."""
  for path in part_files(folder):
    first, last = map(int, _NAME.fullmatch(path.name).groups())
    if last <= last_step:
      continue
    if first <= last_step:
      write_part(folder, [Part(path)], last_step)
    for kind in ("rows", "steps", "modules"):
      _beside(path, kind).unlink(missing_ok=True)
