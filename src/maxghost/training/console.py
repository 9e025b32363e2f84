"""Console output: lines in MaxText's form, and on a terminal a progress bar below them."""

import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO


def step_line(record: Mapping[str, Any], val_sets: tuple[str, ...] = ()) -> str:
  """MaxText's step line and, where validation sets are named, ghost's part.

  Drops of the validation loss are in nats per token; positive means that it fell. Values that the step did not measure
  are left out: `actual_drop` before an interruption, losses of steps without validation (ghost_val_every).
  """
  parts = [f"completed step: {record['step']}"]
  parts += [f"seconds: {record['perf/step_time_seconds']:.3f}"]
  parts += [f"TFLOP/s/device: {record['perf/per_device_tflops_per_sec']:.3f}"]
  parts += [f"Tokens/s/device: {record['perf/per_device_tokens_per_sec']:.3f}"]
  parts += [f"total_weights: {record['learning/total_weights']}", f"loss: {record['learning/loss']:.3f}"]
  parts += [f"perplexity: {record['learning/perplexity']:.3f}", f"lr: {record['learning/current_learning_rate']:.3e}"]
  parts += [f"grad_norm: {record['learning/grad_norm']:.3f}"]
  for name in val_sets:
    label = f"[{name}]" if len(val_sets) > 1 else ""
    over = f" over {record['ghost/account_steps']} steps" if "ghost/account_steps" in record else ""
    shown = {"val_loss": (label, ".3f"), "predicted_drop": (label, "+.5f"), "actual_drop": (over + label, "+.5f")}
    shown["check_rel_err"] = (label, ".1e")
    for column, (suffix, form) in shown.items():
      value = record.get(f"ghost/{column}/{name}", math.nan)
      if not math.isnan(value):
        parts.append(f"{'score_check' if column == 'check_rel_err' else column}{suffix}: {value:{form}}")
  return ", ".join(parts)


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
