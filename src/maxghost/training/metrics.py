"""The metrics of a step: their names, and metrics.jsonl.

metrics.jsonl holds one JSON object per step, in order, each step exactly once: a checkpoint stores the length of the
file, and resuming cuts it back to that length. learning/*, perf/* and eval/* have MaxText's names; moe/* and ghost/*
are new, the latter with one value per validation set.
"""

import errno
import json
import math
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxghost.config import ConfigError, plugins
from maxghost.config.values import listed, naming

# If one of these is not finite, the run stops; a validation loss that is not finite only leaves its step unscored.
FINITE_METRICS = ("loss", "grad_norm", "param_norm")

# {metric: scalar output of the step}, for steps that have the output
SCALARS = {"learning/loss": "loss", "learning/grad_norm": "grad_norm", "learning/param_norm": "param_norm",
           "learning/current_learning_rate": "learning_rate", "learning/clip_factor": "clip_factor",
           "learning/lm_loss": "lm_loss", "learning/moe_lb_loss": "moe_lb_loss", "moe/router_entropy": "router_entropy",
           "learning/mtp_loss": "mtp_loss"}  # fmt: skip
# Names, and beginnings of names, that no objective gives.
OWN_METRICS = ("learning/", "perf/", "eval/", "moe/", "ghost/", "diloco/", "rollout/", "sample/")
OF_SCORES = {"val_loss", "scored_ok", "captured", "nonfinite_scores", "predicted_curvature", "check_rel_err"}
SAMPLE = "sample/text"  # a text of the model, the only metric that is not a number


class NonFiniteMetricError(RuntimeError):
  """A loss or norm became NaN or infinite."""


def check_finite(step: int, outputs: Mapping[str, Any]) -> None:
  """Raises NonFiniteMetricError for the first metric of FINITE_METRICS that is NaN or infinite."""
  for name in FINITE_METRICS:
    if name in outputs and not math.isfinite(outputs[name]):
      raise NonFiniteMetricError(f"step {step}: {name} is {float(outputs[name])}")


def _perplexity(loss: float) -> float:
  return math.exp(loss) if loss < 709.0 else math.inf


def learning_metrics(outputs: Mapping[str, Any], objective: str = "next_token") -> dict[str, float]:
  """The learning/* part of a record, and moe/* with experts, from the host copies of a step's scalar outputs.
  moe/expert_load: each expert's share of the tokens' choices, mean over layers; moe/max_expert_load: the largest, as a
  multiple of an equal share. Outputs with a slash in their names, such as rewards/chosen, are the objective's own."""
  record: dict[str, Any] = {metric: float(outputs[name]) for metric, name in SCALARS.items() if name in outputs}
  record |= {name: float(value) for name, value in outputs.items() if "/" in name}
  if plugins.OBJECTIVES[objective].perplexity:
    record["learning/perplexity"] = _perplexity(record.get("learning/lm_loss", record["learning/loss"]))
  weights = float(outputs["tokens"])
  record["learning/total_weights"] = int(weights) if weights.is_integer() else weights
  if "max_logits_LH" in outputs:
    record["learning/max_attention_logit"] = float(outputs["max_logits_LH"].max())
  if "expert_load_E" in outputs:
    load_E = outputs["expert_load_E"] / max(outputs["expert_load_E"].sum(), 1e-9)
    record |= {"moe/expert_load": load_E.tolist(), "moe/max_expert_load": float(load_E.max() * len(load_E))}
  return record


def ghost_metrics(outputs: Mapping[str, Any], val_sets: tuple[str, ...]) -> dict[str, Any]:
  """The ghost/* part, in nats: val_loss before the update, the predicted drop and its columns, the self-check.

  The predicted drop is -<grad L_val, update>, the sum of `plugins.ledger_columns`. A step without a validation
  loss (ghost_val_every > 1) has NaN there; schedule concat has no columns. ghost/scored is 1, or 0 if the scores were
  not finite. ghost/chosen_rows: rows trained on, with ghost_select. ghost/captured/<parameter>: the share of |u|^2 held
  by low-rank factors, per layer and set; a lower bound under Adam, whose factors first leave out directions that do not
  matter to this batch's gradient. The loop adds `ghost/actual_drop/<set>` later.
  """
  record: dict[str, Any] = {"ghost/scored": int(outputs["scored_ok"])}
  columns = [column for column in plugins.ledger_columns() if column in outputs]
  shown = [column for column in (*columns, "predicted_curvature", "check_rel_err") if column in outputs]
  if "chosen_B" in outputs:
    record["ghost/chosen_rows"] = int(outputs["chosen_B"].sum())
  for k, name in enumerate(val_sets):
    record[f"ghost/val_loss/{name}"] = float(outputs["val_loss"][k])
    if columns:
      record[f"ghost/predicted_drop/{name}"] = sum(float(outputs[column][k]) for column in columns)
      record |= {f"ghost/{column}/{name}": float(outputs[column][k]) for column in shown}
  for label, captured_LK in outputs.get("captured", {}).items():
    rows = captured_LK.tolist()  # null in JSON where a validation gradient was not finite
    record[f"ghost/captured/{label}"] = [[x if math.isfinite(x) else None for x in row] for row in rows]
  return record


def unscored_line(step: int, outputs: Mapping[str, Any]) -> str | None:
  """A line that names the parameters with non-finite scores; None if all scores are finite."""
  if outputs["scored_ok"]:
    return None
  labels = [label for label, bad in outputs.get("nonfinite_scores", {}).items() if bad]
  named = (" in " if labels else "") + listed(labels, 4)
  return f"maxghost: step {step} is not scored: its scores are not finite{named}"


def eval_metrics(sums: Sequence[tuple[Any, Any]], objective: str = "next_token") -> dict[str, float]:
  """The eval/* part from (summed loss, weight) of each batch: the weighted mean over all batches."""
  total, weights = (math.fsum(column) for column in zip(*sums, strict=True))
  loss = total / (weights or 1.0)
  likely = {"eval/avg_perplexity": _perplexity(loss)} if plugins.OBJECTIVES[objective].perplexity else {}
  return {"eval/avg_loss": loss, **likely, "eval/total_weights": int(weights) if weights.is_integer() else weights}


class MetricsLog:
  """metrics.jsonl: `append` writes one whole line; `position` is the file's length in bytes after a flush to disk.
  checksum: CRC-32 of all that was written, also before `restore`."""

  def __init__(self, path: Path):
    self._path, self.checksum = path, 0
    self._file = open(path, "ab")  # noqa: SIM115 - open as long as the run

  def append(self, record: Mapping[str, Any]) -> None:
    # JSON has no NaN: values that were not measured become null. Losses and norms are finite here.
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    line = json.dumps(clean, allow_nan=False).encode() + b"\n"
    with naming("", self._path):
      held, there = os.fstat(self._file.fileno()), os.stat(self._path) if os.path.exists(self._path) else None
      # Some network file systems number files anew, others cache their sizes.
      if not there or (there.st_size != held.st_size and not os.path.samestat(there, held)):
        raise OSError(errno.ESTALE, "moved, removed or replaced during the run; start it again", str(self._path))
      self._file.write(line)
      self._file.flush()
    self.checksum = zlib.crc32(line, self.checksum)

  def position(self) -> int:
    with naming("", self._path):
      os.fsync(self._file.fileno())
    return os.path.getsize(self._path)

  def restore(self, num_bytes: int, checksum: int | None = None) -> None:
    """Truncates the file to a position; reports changed records. Raises ConfigError if the file is shorter."""
    if (size := os.path.getsize(self._path)) < num_bytes:
      said = f"{self._path} has {size} bytes, but the checkpoint was made when it had {num_bytes}: records are missing"
      raise ConfigError(f"{said}; put the file back, or start a new run_name")
    self._file.truncate(num_bytes)
    found = zlib.crc32(self._path.read_bytes())
    self.checksum = found if checksum is None else checksum
    if self.checksum != found:
      print(f"maxghost: records in {self._path} were changed since they were written", file=sys.stderr)

  def close(self) -> None:
    with naming("", self._path):  # closing tries again to write what the disk refused
      self._file.close()
