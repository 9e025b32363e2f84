"""The main job, as a newcomer runs it: `python -m maxghost.train configs/base.yml`, then the report.

  python benchmarks/main_job.py [--keep FOLDER] [key=value ...]
  python benchmarks/main_job.py ghost_direction=path ghost_curvature=secant

Runs both commands in a fresh folder and checks what they left against the targets: wall time, the loss against the
unigram entropy of the very bytes that were trained on (a model that has learned nothing but byte frequencies has that
loss), the contribution per token of each domain, and the predicted against the measured drop of the validation loss.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
import numpy as np
from _measure import Figure

from maxghost import attribution, data
from maxghost import config as configuration
from maxghost.attribution.summary import summarize

LAST_STEPS = 20  # the final loss is their mean


def main() -> int:
  args = _measure.arguments(__doc__, keep=None)
  with tempfile.TemporaryDirectory() as scratch:
    folder = Path(args.keep or scratch)
    return check(folder, args)


def check(folder: Path, args) -> int:
  """Trains into `folder`, reports, and prints the figures."""
  train_seconds, first_step_seconds, run_dir = train(folder, args.overrides)
  begin = time.perf_counter()
  subprocess.run([sys.executable, "-m", "maxghost.report", str(run_dir)], check=True, stdout=subprocess.DEVNULL)
  report_seconds = time.perf_counter() - begin
  cfg = configuration.load(str(run_dir / "config.yml"))
  losses = [json.loads(line)["learning/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
  entropy, tokens = unigram_entropy(cfg)
  last_loss = float(np.mean(losses[-LAST_STEPS:]))
  log = attribution.load(run_dir)
  part = summarize(log).sets[0]
  check = float(np.nanmax(np.abs(log.steps["check_rel_err"])))
  rows = [
    {
      "domain": value.domain, "tokens": value.tokens, "nats in all": value.contribution,
      "nats per million tokens": value.per_million, "± (95 %)": value.per_million_half_width,
      "training loss": value.loss,
    }
    for value in part.domains
  ]  # fmt: skip
  per_million = {value.domain: value.per_million for value in part.domains}
  own = per_million.pop(next(iter(cfg.data.validation_sets)), math.nan)
  predicted, actual = float(part.ledger.predicted), float(part.ledger.actual)
  figures = [
    Figure("seconds from start to the end of training", train_seconds, 180.0, form="{:.0f}"),
    Figure("seconds to the first step's line", first_step_seconds, 15.0, form="{:.1f}"),
    Figure("seconds of the report", report_seconds, form="{:.1f}"),
    Figure("training loss of the first step, nats per byte", losses[0], form="{:.3f}"),
    Figure("unigram entropy of the bytes trained on, nats", entropy, form="{:.3f}"),
    Figure(f"training loss, mean of the last {LAST_STEPS} steps", last_loss, form="{:.3f}"),
    Figure("that loss over that entropy", last_loss / entropy, 0.75, form="{:.2f}"),
    Figure(
      f"contribution per token of '{next(iter(cfg.data.validation_sets))}' over the next best domain's",
      own / max(per_million.values()), 1.0, above=True, form="{:.2f}",
    ),
    Figure("measured drop of the validation loss, nats", actual, form="{:.3f}"),
    Figure("first order over measured drop", float(part.ledger.first_order) / actual, form="{:.3f}"),
    Figure("first order and curvature over measured drop, above 0.98", predicted / actual, 1.02, form="{:.3f}"),
    Figure("largest error of the scores' self-check", check, 1e-5, form="{:.1e}"),
  ]  # fmt: skip
  if part.ledger.ahead is not None:
    said = float(part.ledger.columns_sum) / actual
    figures.append(
      Figure("first order and expected curvature over measured drop, above 0.90", said, 1.10, form="{:.3f}")
    )
  notes = [f"{len(losses)} steps, {tokens:,} target bytes"]
  return _measure.publish("main_job", rows, figures, notes, args.json)


def train(folder: Path, overrides) -> tuple[float, float, Path]:
  """(wall seconds, seconds to the line of step 0, run directory) of the real command."""
  command = [sys.executable, "-m", "maxghost.train", str(_measure.BASE), f"base_output_directory={folder}", *overrides]
  begin, first, printed = time.perf_counter(), math.nan, []
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
    for line in process.stdout:
      if line.startswith("completed step: 0"):
        first = time.perf_counter() - begin
      printed.append(line)
  if process.returncode:
    raise RuntimeError(f"training ended with {process.returncode}:\n{''.join(printed[-20:])}")
  seconds = time.perf_counter() - begin
  return seconds, first, folder / configuration.load(str(_measure.BASE), *overrides).run.run_name


def unigram_entropy(cfg) -> tuple[float, int]:
  """(entropy in nats of the target tokens of the run, their number): the data is read again, which gives the same."""
  dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed, vocab_size=cfg.model.vocab_size)
  counts = np.zeros(cfg.model.vocab_size, np.int64)
  for _ in range(cfg.run.steps):
    arrays = next(dataset.train).arrays
    counts += np.bincount(arrays["targets"][arrays["targets_segmentation"] != 0], minlength=len(counts))
  shares = counts[counts > 0] / counts.sum()
  return float(-(shares * np.log(shares)).sum()), int(counts.sum())


if __name__ == "__main__":
  sys.exit(_measure.run(main))
