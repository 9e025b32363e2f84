"""Console lines at the start and the end of a run."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import jax

import maxghost
from maxghost.config import Config
from maxghost.config.files import write_text
from maxghost.training.loop import Outcome
from maxghost.training.plan import Plan
from maxghost.training.run_directory import CHECKPOINTS, CONFIG_FILE, METRICS_FILE

FACTS_FILE = "run_facts.json"


def start_lines(plan: Plan, dataset, scored: Mapping[str, int], path: Path) -> list[str]:
  """Sizes of model, batch and data, the mesh, and the run directory. scored: sizes of the scored parameters."""
  cfg = plan.cfg
  lines = [
    *plan.lines(),
    f"data: {cfg.data.dataset_type}, {dataset.num_train_documents:,} documents to train on",
    *(f"  {entry.line}" for entry in dataset.summary()),
    *(f"  {note}" for note in dataset.notes()),
  ]
  if plan.cfg.val_sets:
    share = sum(scored.values()) / plan.num_params
    sets = " and of ".join(f"'{name}'" for name in plan.cfg.val_sets)
    lines.append(
      f"ghost: {len(scored)} parameter arrays scored ({share:.2%} of all parameters) against "
      f"{cfg.ghost.ghost_val_batch_size} rows of {sets}, direction {cfg.ghost.ghost_direction}, "
      f"schedule {cfg.ghost.ghost_schedule}"
    )
  return [*lines, f"run directory: {path}"]


def write_facts(path: Path, plan: Plan, train_step: str) -> None:
  """Writes run_facts.json, facts of this process besides the config, for the report.

  train_step: a line on its compilation.
  """
  device = jax.devices()[0]
  facts = {
    "parameters": f"{plan.num_params:,}",
    "device": f"{plan.layout.num_devices} x {device.device_kind} ({device.platform})",
    **({"mesh": plan.mesh} if plan.layout.num_devices > 1 else {}),
    "rows per step": f"{plan.rows:,}",
    "arithmetic per step": f"{plan.flops.total / 1e12:.4f} TFLOP in the model",
    "train step": train_step,
    "versions": f"maxghost {maxghost.__version__}, jax {jax.__version__}, "
    f"flax {importlib.metadata.version('flax')}, Python {platform.python_version()}",
  }
  write_text(path / FACTS_FILE, json.dumps(facts, indent=2) + "\n")


def interrupted_lines(cfg: Config, outcome: Outcome, path: Path, signal: str) -> list[str]:
  """How far the run came, and how to continue it."""
  saved = f"saved in {path / CHECKPOINTS / str(outcome.completed_steps)}"
  if not cfg.checkpoint.checkpoint_period:
    saved = "not saved, because checkpoint_period=0"
  elif not outcome.completed_steps:
    saved = "nothing to save"
  lines = [f"Stopped by {signal} after {outcome.completed_steps} of {cfg.run.steps} steps; {saved}"]
  if cfg.checkpoint.checkpoint_period:
    lines.append(f"The same command continues it, or: python -m maxghost.train {path / CONFIG_FILE}")
  return lines


def end_lines(plan: Plan, outcome: Outcome, path: Path) -> list[str]:
  """The main results of a complete run, from its metrics.jsonl, and the report command."""
  try:
    records = [json.loads(line) for line in (path / METRICS_FILE).read_bytes().splitlines()]
    tokens = sum(record["learning/total_weights"] for record in records)
  except (ValueError, KeyError, TypeError) as error:
    return [f"Training complete; {path / METRICS_FILE} is damaged ({error}): no summary"]
  first, last = records[0], records[-1]
  lines = [
    f"Training complete: {len(records)} steps, {tokens:,} target tokens, training loss {first['learning/loss']:.3f} -> "
    f"{last['learning/loss']:.3f}"
  ]
  if steady := outcome.seconds[1:]:  # of this process; the first step is a warm-up
    middle = median(steady)
    lines.append(f"Median step {middle:.3f} s, {plan.rows * plan.cfg.data.max_target_length / middle:,.0f} tokens/s")
  if "eval/avg_loss" in last:
    lines.append(f"Held-out loss: {last['eval/avg_loss']:.4f} (perplexity {last['eval/avg_perplexity']:.3f})")
  return [
    *lines,
    *(ghost_line(records, name) for name in plan.cfg.val_sets),
    f"Report: python -m maxghost.report {path}",
  ]


def ghost_line(records: list[dict], name: str) -> str:
  """The drop of the validation loss over the run, with its prediction if measured."""
  actual, predicted, check = (
    [record.get(f"ghost/{column}/{name}") for record in records]
    for column in ("actual_drop", "predicted_drop", "check_rel_err")
  )
  measured = sum("ghost/scored" in record for record in records)
  where = "" if measured == len(records) else f" in the {measured} scored steps of {len(records)}"
  drop = sum(value or 0.0 for value in actual)
  parts = [f"Validation loss '{name}' {'rose' if drop < 0 else 'fell'} by {abs(drop):.4f} nats{where}"]
  if any(value is not None for value in predicted):
    parts.append(f"predicted by the gradients: {sum(value or 0.0 for value in predicted):.4f}")
    parts.append(f"largest error of the score self-check {max(value or 0.0 for value in check):.1e}")
  if unscored := sum(not record.get("ghost/scored", True) for record in records):
    parts.append(f"{unscored} steps were not scored, because their scores were not finite")
  return "; ".join(parts)
