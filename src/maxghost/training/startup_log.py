"""Console lines at the start and the end of a run."""

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import jax

import maxghost
from maxghost.config import Config
from maxghost.parallel import Layout, distributed
from maxghost.parallel.mesh import describe
from maxghost.training import devices
from maxghost.training.compiled_steps import Program
from maxghost.training.flops import StepFlops
from maxghost.training.loop import Outcome
from maxghost.training.run_directory import METRICS_FILE


def domain_lines(summary: Iterable) -> list[str]:
  """One line per domain of the data: documents, size, and held-out documents. summary: data.DomainSummary."""
  lines = []
  for entry in summary:
    held_out = f", {entry.held_out} documents held out for validation" if entry.held_out else ""
    size = "" if entry.bytes is None else f", {entry.bytes / 1e6:.2f} MB"  # unknown for some formats
    lines.append(f"  {entry.domain}: {entry.documents} documents{size}{held_out}")
  return lines


def start_lines(
  cfg: Config,
  dataset,
  num_params: int,
  scored: Mapping[str, int],
  flops: StepFlops,
  path: Path,
  layout: Layout,
  spread: str,
) -> list[str]:
  """Sizes of model, batch and data, the mesh, and the run directory. spread: the share that a device holds."""
  tokens = devices.rows_per_step(cfg, layout.num_devices) * cfg.data.max_target_length
  validation = devices.describe_validation(cfg, layout)
  lines = [
    f"number parameters: {num_params / 1e9:.3f} billion ({num_params:,})",
    *([f"mesh: {describe(layout.mesh)}{_processes()}; {spread}"] if layout.num_devices > 1 else []),
    f"{devices.describe_batch(cfg, layout)}; {cfg.run.steps} steps = {tokens * cfg.run.steps:,} tokens",
    *([] if validation is None else [validation]),
    f"data: {cfg.data.dataset_type}, {dataset.num_train_documents:,} documents to train on",
    *domain_lines(dataset.summary()),
    *(f"  {note}" for note in dataset.notes()),
    flops.describe(),
  ]
  if cfg.ghost.ghost_enabled:
    share = sum(scored.values()) / num_params
    sets = " and of ".join(f"'{name}'" for name in cfg.data.validation_sets)
    lines.append(
      f"ghost: {len(scored)} parameter arrays scored ({share:.2%} of all parameters) against "
      f"{cfg.ghost.ghost_val_batch_size} rows of {sets}, direction {cfg.ghost.ghost_direction}, "
      f"schedule {cfg.ghost.ghost_schedule}"
    )
  return [*lines, f"run directory: {path}"]


def _processes() -> str:
  return f" of {distributed.count()} processes" if distributed.count() > 1 else ""


def facts(cfg: Config, num_params: int, flops: StepFlops, program: Program, layout: Layout) -> dict[str, str]:
  """{label: text} for run_facts.json."""
  device = jax.devices()[0]
  mesh = {"mesh": describe(layout.mesh) + _processes()} if layout.num_devices > 1 else {}
  return {
    "parameters": f"{num_params:,}",
    "device": f"{layout.num_devices} x {device.device_kind} ({device.platform})",
    **mesh,
    "rows per step": f"{devices.rows_per_step(cfg, layout.num_devices):,}",
    "arithmetic per step": f"{flops.total / 1e12:.4f} TFLOP in the model",
    "train step": program.describe(),
    "versions": f"maxghost {maxghost.__version__}, jax {jax.__version__}, "
    f"flax {importlib.metadata.version('flax')}, Python {platform.python_version()}",
  }


def end_lines(cfg: Config, outcome: Outcome, path: Path, rows: int) -> list[str]:
  """The main results of a complete run, from its metrics.jsonl, and the report command."""
  with open(path / METRICS_FILE, encoding="utf-8") as file:
    records = [json.loads(line) for line in file]
  first, last = records[0], records[-1]
  tokens = sum(record["learning/total_weights"] for record in records)
  lines = [
    f"Training complete: {len(records)} steps, {tokens:,} target tokens, training loss {first['learning/loss']:.3f} -> "
    f"{last['learning/loss']:.3f}",
    *speed_lines(cfg, outcome, rows),
  ]
  if "eval/avg_loss" in last:
    lines.append(f"Held-out loss: {last['eval/avg_loss']:.4f} (perplexity {last['eval/avg_perplexity']:.3f})")
  if cfg.ghost.ghost_enabled:
    lines += [ghost_line(records, name) for name in cfg.data.validation_sets]
  return [*lines, f"Report: python -m maxghost.report {path}"]


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


def speed_lines(cfg: Config, outcome: Outcome, rows: int) -> list[str]:
  """Median step time of this process without its first step, if there are others. rows: of a step over all devices."""
  steady = outcome.seconds[1:]
  if not steady:
    return []
  middle = median(steady)
  tokens = rows * cfg.data.max_target_length
  return [f"Median step {middle:.3f} s, {tokens / middle:,.0f} tokens/s"]
