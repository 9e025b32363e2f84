"""Output files of the commands; answers as a table, JSON, CSV or Parquet."""

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.attribution.numbers import integer, number
from maxghost.attribution.query import Answer
from maxghost.attribution.texts import snippet
from maxghost.config import ConfigError
from maxghost.config.files import write_text
from maxghost.scorelog.export import import_pyarrow

WIDE = 120  # characters; a narrower table leaves out what it can
HEADS = {
  "contribution": "total",
  "half_width": "±",
  "per_million_tokens": "per M tokens",
  "per_million_half_width": "±",
  "per_chunk": "per chunk",
}


def write_output(path: Path, text: str) -> None:
  """Writes a text file whole or not at all. Raises ConfigError where the place cannot be written."""
  try:
    write_text(path, text)
  except OSError as error:
    raise ConfigError(f"cannot write {path} ({error.strerror}); name another place with --output") from error


def as_json(answer: Answer, by: str) -> str:
  """One object with the question, units and rows; a non-finite number is null."""
  rows = [dict(zip(answer.columns, values, strict=True)) for values in _plain_rows(answer)]
  head = {"by": by, "val_set": answer.val_set, "groups": answer.num_groups, "best": answer.num_top}
  units = {name: text for name, text in answer.units.items() if name in answer.columns}
  body = {**head, "units": units, "notes": answer.notes, "rows": rows}
  return json.dumps(body, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def as_csv(answer: Answer) -> str:
  """A header and one line per group; a non-finite number is empty."""
  buffer = io.StringIO()
  writer = csv.writer(buffer, lineterminator="\n")
  writer.writerow(answer.columns)
  writer.writerows(_plain_rows(answer))
  return buffer.getvalue()


def write_parquet(answer: Answer, path: Path):
  """A Parquet file whose fields carry their units. Raises ConfigError without pyarrow."""
  pa, parquet = import_pyarrow("--format parquet")
  table = pa.table(answer.columns)
  units = [{"unit": answer.units[name]} if name in answer.units else None for name in answer.columns]
  fields = [field.with_metadata(unit) for field, unit in zip(table.schema, units, strict=True)]
  try:
    parquet.write_table(table.cast(pa.schema(fields, metadata={"val_set": answer.val_set})), path)
  except OSError as error:
    raise ConfigError(f"cannot write {path} ({error.strerror or error}); name another place with --output") from error


def show(answer: Answer, console):
  """The answer as a rich table; worst groups stand below a rule."""
  from rich.table import Table
  from rich.text import Text

  hidden = {"text", "share"}
  if console.width < WIDE:
    hidden |= {"per_chunk", "per_million_half_width", "loss"}
  shown = [name for name in answer.columns if name not in hidden]
  table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
  keys = [name for name in shown if name not in answer.units]
  for name in shown:
    table.add_column(
      HEADS.get(name, name), justify="left" if name in ("domain", "path") else "right", no_wrap=name != "path"
    )
  for i, values in enumerate(_rows(answer)):
    if i == answer.num_top and i > 0:
      table.add_section()
      table.add_row(*["…" if name in keys[:1] else "" for name in shown])
    row = dict(zip(answer.columns, values, strict=True))
    cells = [_cell(name, row[name]) for name in shown]
    if row.get("text"):
      at, text = shown.index("path"), snippet(row["text"], 120)
      cells[at] = Text(f"{cells[at]}\n", no_wrap=True, overflow="ellipsis").append(text, "dim")
    table.add_row(*cells)
  console.print(table)
  console.print(
    Text(
      f"{len(answer)} of {integer(answer.num_groups)} groups; {answer.units['contribution']}, for the "
      f"{answer.val_set} validation loss; ± is a 95 % interval",
      style="dim",
    )
  )


def _cell(name: str, value):
  from rich.text import Text

  if isinstance(value, str):
    return Text(value, no_wrap=True, overflow="ellipsis")
  if name in ("contribution", "per_million_tokens", "per_chunk"):
    return number(float(value), plus=True)
  if name == "loss" or name.endswith("half_width"):
    return number(float(value), 2 if name.endswith("half_width") else 3)
  return integer(int(value))


def _plain_rows(answer: Answer) -> Iterator[list]:
  """The rows as Python values; None for a number that is not finite."""
  for values in _rows(answer):
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    yield [None if isinstance(value, float) and not math.isfinite(value) else value for value in plain]


def _rows(answer: Answer) -> Iterator[tuple]:
  return zip(*answer.columns.values(), strict=True)
