"""Console output: lines in MaxText's form, and on a terminal a progress bar below them."""

import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

MAX_STEP_LINE = 120  # characters; metrics.jsonl has what does not fit, and all the rest


def step_line(record: Mapping[str, Any], val_sets: tuple[str, ...] = ()) -> str:
  """MaxText's step line in short, then as much of ghost's part as fits, for the first validation set.

  `drop`: by how much the step lowered the validation loss; then the predicted part of the domains that moved it most.
  Values that the step did not measure are left out.
  """
  line = f"completed step: {record['step']}, seconds: {record['perf/step_time_seconds']:.3f}"
  line += f", Tokens/s/device: {record['perf/per_device_tokens_per_sec']:.0f}, loss: {record['learning/loss']:.3f}"
  for name in val_sets[:1]:
    over = f" over {record['ghost/account_steps']} steps" if "ghost/account_steps" in record else ""
    parts = {"val_loss": (f"ghost/val_loss/{name}", ".3f"), f"drop{over}": (f"ghost/actual_drop/{name}", "+.5f")}
    domains = [key for key in record if key.startswith(start := f"ghost/contribution/{name}/")]
    for key in sorted(domains, key=lambda key: -abs(record[key])):
      parts[key.removeprefix(start)] = (key, "+.5f")
    for label, (key, form) in parts.items():
      part = f", {label}: {(value := record.get(key, math.nan)):{form}}"
      line += part if math.isfinite(value) and len(line + part) <= MAX_STEP_LINE else ""
  return line


def eval_line(step: int, record: Mapping[str, Any]) -> str:
  return (
    f"Completed eval after train step {step}, loss={record['eval/avg_loss']:.4f}, "
    f"perplexity={record['eval/avg_perplexity']:.3f}, total_weights={record['eval/total_weights']}"
  )


class Console:
  """Prints lines; between `start` and `stop`, on a terminal, keeps a progress bar with the time left below them."""

  def __init__(self, stream: TextIO | None = None):
    self._stream = stream or sys.stdout
    self._progress = None
    self._task = None

  def line(self, text: str) -> None:
    if self._progress is not None:
      self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
      print(text, file=self._stream, flush=True)

  def start(self, total_steps: int, completed_steps: int) -> None:
    if not self._stream.isatty():
      return
    from rich import progress
    from rich.console import Console as RichConsole

    columns = ("training", progress.BarColumn(), progress.MofNCompleteColumn(), "{task.fields[loss]}")
    columns += (progress.TimeElapsedColumn(), "left:", progress.TimeRemainingColumn())
    self._progress = progress.Progress(*columns, console=RichConsole(file=self._stream), transient=True)
    self._task = self._progress.add_task("training", total=total_steps, completed=completed_steps, loss="")
    self._progress.start()

  def advance(self, completed_steps: int, loss: float) -> None:
    if self._progress is not None and self._task is not None:
      self._progress.update(self._task, completed=completed_steps, loss=f"loss {loss:.3f}")

  def stop(self) -> None:
    if self._progress is not None:
      self._progress.stop()
      self._progress = None
