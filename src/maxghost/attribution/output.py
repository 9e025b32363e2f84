"""Output files of the commands; answers as a table, JSON, CSV or Parquet."""

import contextlib
import csv
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from maxghost.attribution.numbers import integer, number, plus_minus
from maxghost.attribution.query import Answer
from maxghost.attribution.report_text import loss_of
from maxghost.attribution.texts import snippet
from maxghost.config.files import write_whole
from maxghost.config.values import ConfigError, import_package, printable

SPARED = ("per_chunk", "loss", "in_all", "chunks", "tokens", "offset")  # left out of a narrow table, in this order
PIPE_WIDTH = 160  # of a table that no terminal shows
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of cells that spreadsheets take for formulas
INTERVALS = {"contribution": "half_width", "per_million_tokens": "per_million_half_width"}  # shown in the same cell


def write_output(path: Path, content: str | bytes) -> None:
  """Writes a file whole or not at all. Raises ConfigError where the place cannot be written."""
  try:
    with write_whole(path) as file:
      file.write(content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
  except OSError as error:
    raise ConfigError(f"cannot write {path} ({error.strerror}); name another place with --output") from error


@contextlib.contextmanager
def console(pipe_width: int | None = PIPE_WIDTH) -> Iterator[Any]:
  """A console of rich, whose text goes to stdout at the end: rich's own print ends the process at a closed pipe."""
  from rich.console import Console

  made = Console(width=None if sys.stdout.isatty() else pipe_width, highlight=False)
  made.width = max(made.width, 76)  # a narrower terminal wraps the lines; tables would lose names and digits
  with made.capture() as captured:
    yield made
  sys.stdout.write(captured.get())


def as_table(answer: Answer) -> str:
  with contextlib.redirect_stdout(io.StringIO()) as file, console() as made:
    show(answer, made)
  return file.getvalue()


def as_json(answer: Answer, by: str) -> str:
  """One object with the question, units and rows; a non-finite number is null."""
  rows = [dict(zip(answer.columns, values, strict=True)) for values in _plain_rows(answer)]
  head = {"by": by, "val_set": answer.val_set, "direction": answer.direction}
  head |= {"groups": answer.num_groups, "best": answer.num_top}
  units = {name: text for name, text in answer.units.items() if name in answer.columns}
  body = {**head, "units": units, "notes": answer.notes, "rows": rows}
  return json.dumps(body, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def as_csv(answer: Answer) -> str:
  """A header and one line per group; a non-finite number is empty, a text that a spreadsheet would run gets a '."""
  lines: list[str] = []
  file: Any = SimpleNamespace(write=lines.append)
  writer = csv.writer(file)  # with line ends of \n alone it would not quote an \r
  writer.writerow(answer.columns)
  for row in _plain_rows(answer):
    writer.writerow(f"'{v}" if isinstance(v, str) and v.startswith(FORMULA) else v for v in row)
  return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def write_parquet(answer: Answer, path: Path):
  """A Parquet file whose fields carry their units. Raises ConfigError without pyarrow."""
  pa, parquet = (import_package(name, "--format parquet", "scores") for name in ("pyarrow", "pyarrow.parquet"))
  table, buffer, units = pa.table(answer.for_others()), io.BytesIO(), answer.units
  about = {"val_set": answer.val_set, "direction": answer.direction}
  fields = [field.with_metadata({"unit": units[field.name]} if field.name in units else None) for field in table.schema]
  parquet.write_table(table.cast(pa.schema(fields, metadata=about)), buffer)
  write_output(path, buffer.getvalue())


def show(answer: Answer, console):
  """The answer as a rich table with the names that --sort takes, fewer in a narrow console; worst groups come last."""
  from rich.text import Text

  from maxghost.attribution.terminal import make_table

  rows = [dict(zip(answer.columns, values, strict=True)) for values in zip(*answer.columns.values(), strict=True)]
  hidden = {"text", "share", *INTERVALS.values()}
  cells = {name: [_cell(name, row) for row in rows] for name in answer.columns if name not in hidden}
  widths = {name: 2 + max([len(name), *(cell.cell_len for cell in cells[name])]) for name in cells}
  room = console.width + max(0, widths.get("path", 0) - 20)  # of which a path keeps 20
  for name in SPARED:
    if sum(widths[shown] for shown in cells) > room:
      cells.pop(name, None)
  heads = (name if isinstance(next(iter(answer.columns[name]), 0), str) else f">{name}" for name in cells)
  table = make_table("", *heads)
  for i, (row, *values) in enumerate(zip(rows, *cells.values(), strict=True)):
    if i == answer.num_top and i > 0:
      table.add_row("…")
    if row.get("text"):
      cells["path"][i].append(f"\n{snippet(printable(row['text']), 120)}", "dim")
    table.add_row(*values)
  console.print(table)
  about = f"{len(answer)} of {integer(answer.num_groups)} groups; {answer.units['contribution']}, for the "
  about += f"{loss_of(answer.val_set)}, direction {answer.direction or 'not logged'}; ± is a 95 % interval"
  if "in_all" in cells:
    about += "; in_all counts what momentum does with the gradient in later steps, if nothing else changes"
  console.print(Text(printable(about), style="dim"))


def _cell(name: str, row: dict):
  from rich.text import Text

  value = row[name]
  if isinstance(value, str):
    return Text(printable(value) or "(none)", "" if value else "dim", no_wrap=True, overflow="ellipsis")
  if name in (*INTERVALS, "in_all", "per_chunk"):
    return Text(number(float(value), plus=True) + plus_minus(float(row.get(INTERVALS.get(name), float("nan")))))
  return Text(number(float(value)) if name == "loss" else integer(int(value)))


def _plain_rows(answer: Answer) -> Iterator[list]:
  """The rows as Python values; None for a number that is not finite."""
  for values in zip(*answer.columns.values(), strict=True):
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    yield [None if isinstance(value, float) and not math.isfinite(value) else value for value in plain]
