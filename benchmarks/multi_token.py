"""The default run with and without multi-token prediction: held-out loss, and whether its scores still add up.

  python benchmarks/multi_token.py [--seeds 2] [--depths 1] [key=value ...]

Trains the default configuration with mtp_num_layers 0 and --depths in turns, the first seed with scores. The held-out
loss and lm_loss are those of the next token alone. Step times are medians of whole runs, so only their ratio says
something, and only where nothing else runs.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import _measure
import main_job
import numpy as np
from _measure import Figure

from maxghost import attribution
from maxghost.attribution.summary import summarize


def main() -> int:
  args = _measure.arguments(__doc__, seeds=2, depths=1)
  pairs = [(seed, depths) for seed in range(args.seeds) for depths in (0, args.depths)]
  rows = [run(depths, seed, args.overrides) for seed, depths in pairs]
  of = {depths: [row for row in rows if row["modules"] == depths] for depths in (0, args.depths)}
  scored, plain = of[args.depths][0], of[0][0]
  name = f"{args.depths} module{'s' if args.depths > 1 else ''}"
  means = {depths: float(np.mean([row["held-out loss"] for row in part])) for depths, part in of.items()}
  figures = [
    Figure(f"held-out loss with {depths or 'no'} modules, mean of {args.seeds} seeds", mean, form="{:.4f}")
    for depths, mean in means.items()
  ]
  figures += [
    Figure(f"{name}: loss of the further tokens, last steps, nats", scored["loss of further tokens"], form="{:.3f}"),
    Figure(
      f"{name}: first order and curvature over measured drop, above 0.98", scored["explained"], 1.02, form="{:.3f}"
    ),
    Figure(f"{name}: largest error of the scores' self-check", scored["self-check"], 1e-5, form="{:.1e}"),
    Figure(f"{name}: time of a scored step over that without", scored["seconds"] / plain["seconds"], form="{:.2f}"),
  ]
  return _measure.publish("multi_token", rows, figures, [], args.json)


def run(depths: int, seed: int, overrides) -> dict:
  """One training run and what it says; printed as it ends."""
  keys = [f"mtp_num_layers={depths}", f"init_weights_seed={seed}", f"data_shuffle_seed={seed}"]
  keys += ["enable_tensorboard=false", f"ghost_enabled={str(seed == 0).lower()}"]
  with tempfile.TemporaryDirectory() as scratch:
    _, _, run_dir = main_job.train(Path(scratch), [*keys, *overrides])
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    last, row = records[-main_job.LAST_STEPS :], {"modules": depths, "seed": seed}
    row["held-out loss"] = [record["eval/avg_loss"] for record in records if "eval/avg_loss" in record][-1]
    row["lm_loss"] = float(np.mean([record.get("learning/lm_loss", record["learning/loss"]) for record in last]))
    row["loss of further tokens"] = float(np.mean([record["learning/mtp_loss"] for record in last])) if depths else ""
    row["seconds"] = statistics.median(record["perf/step_time_seconds"] for record in records)
    if seed == 0:
      log = attribution.load(run_dir)
      ledger = summarize(log).sets[0].ledger
      row["explained"] = float(ledger.predicted) / float(ledger.actual)
      row["self-check"] = float(np.nanmax(np.abs(log.steps["check_rel_err"])))
  print(json.dumps(row), flush=True)
  return row


if __name__ == "__main__":
  sys.exit(_measure.run(main))
