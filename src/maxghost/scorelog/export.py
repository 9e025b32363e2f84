"""The score log as Parquet files for other programs: `rows`, `steps` and `modules.parquet`. maxghost never reads them.

Per-set columns are called `contribution` for one validation set and `contribution[name]` for several.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.config.files import write_whole
from maxghost.config.values import ConfigError, import_package
from maxghost.scorelog.format import TEXTS, columns_of, for_others
from maxghost.scorelog.reader import ScoreLog


def to_parquet(log: ScoreLog, folder: Path) -> list[Path]:
  """Writes the log, rows in bounded memory, texts dictionary-encoded; returns the files. Raises ConfigError."""
  pa, parquet = (import_package(name, "--export parquet", "scores") for name in ("pyarrow", "pyarrow.parquet"))
  about = {"val_sets": log.val_sets, "objective": log.objective, "ledger": log.ledger, "units": log.units}
  metadata = {"maxghost": json.dumps(about | {name: log.said_of(name) for name in ("direction", "fingerprint")})}
  steps = iter([columns_of({name: log.steps[name] for name in log.steps.dtype.names or ()}, log.val_sets)])
  sources, written = {"rows": _row_tables(pa, log), "steps": steps, "modules": _modules(log)}, []
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # an earlier export here stays until all of this one is there
      for name, tables in sources.items():
        path = folder / f"{name}.parquet"
        if (first := next(tables, None)) is None:
          continue
        schema = pa.table(first).schema.with_metadata(metadata)
        with parquet.ParquetWriter(stack.enter_context(write_whole(path)), schema) as writer:
          writer.write_table(pa.table(first, schema=schema))
          for columns in tables:
            writer.write_table(pa.table(columns, schema=schema))
        written.append(path)
    for name in sources.keys() - {path.stem for path in written}:
      (folder / f"{name}.parquet").unlink(missing_ok=True)  # of an earlier export here
  except OSError as error:
    raise ConfigError(f"cannot write {folder} ({error.strerror or error}); name another place with --output") from error
  return written


def _row_tables(pa, log: ScoreLog) -> Iterator[dict]:
  for shard, rows in log.blocks():
    columns = log.columns_of(rows)
    for name in (*TEXTS, *log.fields):
      texts = pa.array(for_others(shard.texts(name)), pa.string())
      columns[name] = pa.DictionaryArray.from_arrays(pa.array(columns[name]), texts)
    yield columns


def _modules(log: ScoreLog) -> Iterator[dict]:
  """Long form, one row per step, module, layer and domain, without the cells that do not exist."""
  for part in log.modules():
    step, module, layer, domain = np.nonzero(np.isfinite(part.contribution_SMLDK).any(-1))
    names = {"module": np.array(part.names)[module], "domain": np.array(for_others(part.domains))[domain]}
    values = {"layer": layer.astype(np.int32), "contribution": part.contribution_SMLDK[step, module, layer, domain]}
    yield {"step": part.steps[step], **names, **columns_of(values, log.val_sets)}
