"""Console output: the lines of a run, and on a terminal a progress bar below them."""

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from maxghost.config import Config
from maxghost.config.schema import GhostConfig
from maxghost.config.values import printable
from maxghost.training.plan import Plan
from maxghost.training.run_directory import CHECKPOINTS, CONFIG_FILE, METRICS_FILE
from maxghost.training.scoring import scoring_spec

MAX_STEP_LINE = 120  # characters; metrics.jsonl has every value


def step_line(record: Mapping[str, Any], val_sets: tuple[str, ...] = ()) -> str:
  """MaxText's step line, shortened, then what fits for the first validation set: its loss, `drop`, by how much the step
  lowered that loss, and the predicted drop by domain, largest first. Values that were not measured are left out."""
  line = f"completed step: {record['step']}, seconds: {record['perf/step_time_seconds']:.3f}"
  line += f", Tokens/s/device: {record['perf/per_device_tokens_per_sec']:.0f}, loss: {record['learning/loss']:.3f}"
  if "rollout/reward" in record:
    line += f", reward: {record['rollout/reward']:.3f}"
  elif "rollout/mean_length" in record:
    line += ", reward: none, as no function judged an answer"
  for name in val_sets[:1]:
    over = f" over {record['ghost/account_steps']} steps" if "ghost/account_steps" in record else ""
    start = f"ghost/contribution/{name}/"
    domains = sorted((key for key in record if key.startswith(start)), key=lambda key: -abs(record[key]))
    parts = [("val_loss", f"ghost/val_loss/{name}", ".3f"), (f"drop{over}", f"ghost/actual_drop/{name}", "+.5f")]
    for label, key, form in [*parts, *((key.removeprefix(start), key, "+.5f") for key in domains)]:
      value = record.get(key, math.nan)
      part = f", {label}: {value:{form}}"
      if math.isfinite(value) and len(line + part) <= MAX_STEP_LINE:
        line += part
  return line


def eval_line(step: int, record: Mapping[str, Any]) -> str:
  likely = f"perplexity={record['eval/avg_perplexity']:.3f}, " if "eval/avg_perplexity" in record else ""
  loss, weights = f"loss={record['eval/avg_loss']:.4f}", f"total_weights={round(record['eval/total_weights'], 3)}"
  return f"Completed eval after train step {step}, {loss}, {likely}{weights}"


class Console:
  """Prints lines; between `start` and `stop`, on a terminal, keeps a progress bar with the time left below them."""

  def __init__(self, stream: TextIO | None = None):
    self._stream, self._progress = stream or sys.stdout, None

  def line(self, text: str) -> None:
    text = printable(text)  # domains and samples come from data and models
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
    self._progress.add_task("training", total=total_steps, completed=completed_steps, loss="")
    self._progress.start()

  def advance(self, completed_steps: int, loss: float) -> None:
    if self._progress is not None:
      self._progress.update(self._progress.task_ids[0], completed=completed_steps, loss=f"loss {loss:.3f}")

  def stop(self) -> None:
    if self._progress is not None:
      self._progress.stop()
      self._progress = None


def start_lines(plan: Plan, dataset, scored: Mapping[str, int], path: Path) -> list[str]:
  """Sizes of model, batch and data, the mesh, and the run directory. scored: sizes of the scored parameters."""
  cfg, ghost = plan.cfg, plan.cfg.ghost
  lines = [*plan.lines(), f"data: {cfg.data.dataset_type}, {dataset.num_train_documents:,} documents to train on",
           *(f"  {entry.line}" for entry in dataset.summary()), *(f"  {note}" for note in dataset.notes())]  # fmt: skip
  if cfg.val_sets:
    share, sets = sum(scored.values()) / plan.num_params, " and of ".join(f"'{name}'" for name in cfg.val_sets)
    rows = f"{ghost.ghost_val_batch_size} rows of {sets}, direction {ghost.ghost_direction}"
    how = f"schedule {ghost.ghost_schedule}{', in a second pass over the batch' if scoring_spec(cfg).early else ''}"
    lines.append(f"ghost: {len(scored)} parameter arrays scored ({share:.2%} of all parameters) against {rows}, {how}")
    if ghost.ghost_curvature == "secant":
      lines.append(f"ghost_curvature=secant: {of_first_order(ghost)}")
  lines += repeated_rows(cfg, plan.layout.num_devices, dataset)
  if file := cfg.parallel.compiled_trainstep_file:
    lines.append(f"compiled_trainstep_file={file} is for train_compile, which writes it; a run compiles its own step")
  return [*lines, f"run directory: {path}"]


def repeated_rows(cfg: Config, num_devices: int, dataset) -> Iterator[str]:
  """A line for each key that asks for more held-out rows than there are."""
  scored, many, batch = cfg.ghost.ghost_val_batch_size, cfg.run.eval_steps, cfg.eval_rows * num_devices
  asked = [(domain, scored, f"ghost_val_batch_size={scored}") for domain in cfg.val_sets.values()]
  if cfg.run.eval_interval > 0:
    asked.append((dataset.val_domain, many * batch, f"eval_steps={many} batches of {batch} rows"))
  for domain, wanted, said in asked:
    if wanted > (there := sum(map(len, dataset.validation_rows(domain).sides))):
      yield f"{said}: domain '{domain}' has {there:,} held-out rows, so some count more than once"


def of_first_order(ghost: GhostConfig) -> str:
  """Says which steps the secant adds nothing to: those without an earlier validation gradient of the same rows."""
  every, shared = max(ghost.ghost_every, ghost.ghost_val_every), ghost.ghost_val_every
  renewed = 0 if ghost.carries_curvature else ghost.ghost_val_refresh_steps
  if 0 < renewed <= every:
    return f"all steps are scored to first order: ghost_val_refresh_steps={renewed} draws new rows for every gradient"
  first, again = "step 0 is", "is the first step"
  if shared > 1:
    first, again = f"steps 0 to {shared - 1} are", f"are the first {shared} steps"
  drawn = f", and so {again} with new validation rows (ghost_val_refresh_steps={renewed})"
  return f"{first} scored to first order{drawn if renewed else ''}"


def interrupted_lines(cfg: Config, completed_steps: int, path: Path, signal: str) -> list[str]:
  stopped = f"Stopped by {signal} after {completed_steps} of {cfg.run.steps} steps"
  if not cfg.checkpoint.checkpoint_period:
    return [f"{stopped}; not saved, because checkpoint_period=0"]
  folder = path / CHECKPOINTS / str(completed_steps)  # missing if this run has not completed a step of its own
  saved = f"saved in {folder}" if folder.is_dir() else "nothing to save"
  again = shlex.join(["python", "-m", "maxghost.train", str(path / CONFIG_FILE)])
  return [f"{stopped}; {saved}", f"The same command continues it, or: {again}"]


def end_lines(plan: Plan, seconds: Sequence[float], path: Path) -> list[str]:
  """The main results of a complete run, from its metrics.jsonl, and the report command. seconds: of each step."""
  try:
    records = [json.loads(line) for line in (path / METRICS_FILE).read_bytes().splitlines()]
    weights = sum(record["learning/total_weights"] for record in records)
  except (ValueError, KeyError, TypeError) as error:
    return [f"Training complete; {path / METRICS_FILE} is damaged ({error}): no summary"]
  first, last = records[0], records[-1]
  loss = f"training loss {first['learning/loss']:.3f} -> {last['learning/loss']:.3f}"
  units = "pairs" if plan.cfg.records == "pairs" else "target tokens"
  if plan.cfg.samples and plan.cfg.rollout.grpo_loss_type == "grpo":
    units = "answers"  # each has the weight 1
  lines = [f"Training complete: {len(records)} steps, {round(weights):,} {units}, {loss}"]
  if steady := seconds[1:]:  # the first step is a warm-up
    middle = median(steady)
    lines.append(f"Median step {middle:.3f} s, {plan.rows * plan.cfg.data.max_target_length / middle:,.0f} tokens/s")
  if (held_out := last.get("eval/avg_loss")) is not None:  # null where it was not finite
    likely = f" (perplexity {perplexity:.3f})" if (perplexity := last.get("eval/avg_perplexity")) is not None else ""
    lines.append(f"Held-out loss: {held_out:.4f}{likely}")
  lines += [ghost_line(records, name) for name in plan.cfg.val_sets]
  return [*lines, f"Report: python -m maxghost.report {shlex.quote(str(path))}"]


def ghost_line(records: list[dict], name: str) -> str:
  """The drop of the validation loss over the run, with its prediction if measured."""
  names = (f"ghost/{column}/{name}" for column in ("actual_drop", "predicted_drop", "curvature", "check_rel_err"))
  actual, predicted, curvature, check = ([record.get(key) for record in records] for key in names)
  measured = sum("ghost/scored" in record for record in records)
  where = "" if measured == len(records) else f" in the {measured} scored steps of {len(records)}"
  drop = sum(value or 0.0 for value in actual)
  parts = [f"Validation loss '{name}' {'rose' if drop < 0 else 'fell'} by {abs(drop):.4f} nats{where}"]
  if any(value is not None for value in predicted):
    first = sum(value or 0.0 for value in predicted)
    turned = f", with curvature {first + sum(filter(None, curvature)):.4f}" if any(curvature) else ""
    parts.append(f"predicted by the gradients: {first:.4f}{turned}")
    parts.append(f"largest error of the score self-check {max(value or 0.0 for value in check):.1e}")
  if unscored := sum(not record.get("ghost/scored", True) for record in records):
    parts.append(f"{unscored} steps were not scored, because their scores were not finite")
  return "; ".join(parts)
