"""What a run says when it starts and when it ends."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from maxghost.config import Config
from maxghost.training.flops import StepFlops
from maxghost.training.loop import Outcome


def domain_lines(summary: Iterable) -> list[str]:
  """One line per domain of the data: documents and text, and what of it is held out. summary: data.DomainSummary."""
  lines = []
  for entry in summary:
    held_out = f", {entry.held_out} documents held out for validation" if entry.held_out else ""
    size = "" if entry.bytes is None else f", {entry.bytes / 1e6:.2f} MB"  # not every format tells it
    lines.append(f"  {entry.domain}: {entry.documents} documents{size}{held_out}")
  return lines


def start_lines(cfg: Config, dataset, num_params: int, scored: Mapping[str, int], flops: StepFlops, path: Path) -> list:
  """Sizes of the model, the batch and the data, and where the run is written."""
  accumulated = cfg.optimizer.gradient_accumulation_steps
  rows, length = cfg.data.per_device_batch_size * accumulated, cfg.data.max_target_length
  micro = f" in {accumulated} micro-batches" if accumulated > 1 else ""
  lines = [
    f"number parameters: {num_params / 1e9:.3f} billion ({num_params:,})",
    f"batch: {rows} rows{micro} of {length} tokens = {rows * length:,} tokens per step; {cfg.run.steps} steps = "
    f"{rows * length * cfg.run.steps:,} tokens",
    f"data: {cfg.data.dataset_type}, {dataset.num_train_documents:,} documents to train on",
    *domain_lines(dataset.summary()),
    *(f"  {note}" for note in dataset.notes()),
    flops.describe(),
  ]
  if cfg.ghost.ghost_enabled:
    share = sum(scored.values()) / num_params
    lines.append(
      f"ghost: {len(scored)} parameter arrays scored ({share:.2%} of all parameters) against "
      f"{cfg.ghost.ghost_val_batch_size} rows of '{cfg.data.ghost_val_domain}', direction {cfg.ghost.ghost_direction}, "
      f"schedule {cfg.ghost.ghost_schedule}"
    )
  return [*lines, f"run directory: {path}"]


def end_lines(cfg: Config, outcome: Outcome, path: Path, metrics_path: Path) -> list[str]:
  """The headline figures of a complete run, read from metrics.jsonl, and the report command."""
  records = read_records(metrics_path)
  first, last = records[0], records[-1]
  tokens = sum(record["learning/total_weights"] for record in records)
  lines = [
    f"Training complete: {len(records)} steps, {tokens:,} target tokens, loss {first['learning/loss']:.3f} -> "
    f"{last['learning/loss']:.3f}",
    *speed_lines(cfg, outcome),
  ]
  if "eval/avg_loss" in last:
    lines.append(f"Held-out loss: {last['eval/avg_loss']:.4f} (perplexity {last['eval/avg_perplexity']:.3f})")
  if cfg.ghost.ghost_enabled:
    lines.append(ghost_line(records, cfg.data.ghost_val_domain))
  return [*lines, f"Report: python -m maxghost.report {path}"]


def ghost_line(records: list[dict], name: str) -> str:
  """The drop of the validation loss over the run against its prediction; what no step measured is left out."""
  actual, predicted, check = (
    [record.get(f"ghost/{column}/{name}") for record in records]
    for column in ("actual_drop", "predicted_drop", "check_rel_err")
  )
  parts = [f"Validation loss '{name}' fell by {sum(value or 0.0 for value in actual):.4f} nats"]
  if any(value is not None for value in predicted):
    parts.append(f"predicted by the gradients: {sum(value or 0.0 for value in predicted):.4f}")
    parts.append(f"largest error of the score self-check {max(value or 0.0 for value in check):.1e}")
  if unscored := sum(not record["ghost/scored"] for record in records):
    parts.append(f"{unscored} steps were not scored, because their scores were not finite")
  return "; ".join(parts)


def speed_lines(cfg: Config, outcome: Outcome) -> list[str]:
  """Median step time of this process without its first step; nothing where there are no more steps than that."""
  steady = outcome.seconds[1:]
  if not steady:
    return []
  middle = median(steady)
  rows = cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps
  tokens = rows * cfg.data.max_target_length
  return [f"Median step {middle:.3f} s, {tokens / middle:,.0f} tokens/s"]


def read_records(metrics_path: Path) -> list[dict]:
  with open(metrics_path, encoding="utf-8") as file:
    return [json.loads(line) for line in file]
