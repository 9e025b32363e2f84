"""The default run under AdamW, Muon and SGD with momentum: how far each learns, and whether its scores add up.

  python benchmarks/optimizer_runs.py [--seeds 3] [--only muon] [key=value ...]

Trains the default configuration by `python -m maxghost.train`, first at every learning rate with one seed, then AdamW
and Muon at their best one with the other seeds. Every run takes the same steps over the same rows of its seed. Some
runs of the first seed are scored, by path credit with the curvature secant; the others are not, since scores change no
weight. Predictions are of the validation loss's drop, summed over the run.
"""

import json
import sys
import tempfile
from pathlib import Path

import _measure
import main_job
import numpy as np
from _measure import Figure

from maxghost import attribution
from maxghost.attribution.summary import summarize

PLAIN = ("ghost_enabled=false", "enable_tensorboard=false")
SCORES = ("ghost_direction=path", "ghost_curvature=secant", "enable_tensorboard=false")
# {name: (keys, learning rates, those whose run is scored)}
SWEEPS: dict[str, tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]] = {
  "adamw": ((), (3e-4, 1e-3, 3e-3, 1e-2), (3e-4, 1e-3, 3e-3)),
  "muon": (("opt_type=muon", "muon_consistent_rms=0.2"), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (3e-3,)),
  "sgd, momentum 0.9": (("opt_type=sgd", "sgd_momentum=0.9"), (0.1,), (0.1,)),
}
COMPARED = ("adamw", "muon")


def main() -> int:
  args = _measure.arguments(__doc__, seeds=3, only=None)
  chosen = {name: sweep for name, sweep in SWEEPS.items() if args.only in (None, name.split(",")[0])}
  rows, best = [], {}
  for name, (keys, rates, scored) in chosen.items():
    found = [run(name, keys, rate, 0, args.overrides, rate in scored) for rate in rates]
    best[name] = min(found, key=lambda row: row["held-out loss"])
    rows += found
  for name in [name for name in COMPARED if name in chosen]:
    rate = best[name]["learning rate"]
    rows += [run(name, chosen[name][0], rate, seed, args.overrides, scored=False) for seed in range(1, args.seeds)]
  figures = []
  for name in chosen:
    same = [row for row in rows if row["optimizer"] == name and row["learning rate"] == best[name]["learning rate"]]
    losses = [row["held-out loss"] for row in same]
    label = f"{name}, held-out loss at its best rate {best[name]['learning rate']:g}"
    figures.append(Figure(f"{label}, mean of {len(losses)} seeds", float(np.mean(losses)), form="{:.4f}"))
    if len(losses) > 1:
      figures.append(Figure(f"{label}, standard deviation", float(np.std(losses, ddof=1)), form="{:.4f}"))
  for row in rows:
    if isinstance(row["path + secant"], float):
      label = f"{row['optimizer']} {row['learning rate']:g}: path + secant over measured drop, above 0.90"
      figures.append(Figure(label, row["path + secant"], 1.10, form="{:.3f}"))
  notes = ["path + secant: what the steps said at their time, with the curvature that the last step showed"]
  return _measure.publish("optimizer_runs", rows, figures, notes, args.json)


def run(name: str, keys: tuple[str, ...], rate: float, seed: int, overrides, scored: bool = True) -> dict:
  """One training run and what it says; printed as it ends."""
  seeds = (f"init_weights_seed={seed}", f"data_shuffle_seed={seed}")
  with tempfile.TemporaryDirectory() as scratch:
    given = [*(SCORES if scored else PLAIN), *keys, f"learning_rate={rate}", *seeds, *overrides]
    _, _, run_dir = main_job.train(Path(scratch), given)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    ledger = summarize(attribution.load(run_dir)).sets[0].ledger if scored else None
  measured = float(ledger.actual) if ledger else ""
  row = {
    "optimizer": name,
    "learning rate": rate,
    "seed": seed,
    "held-out loss": [record["eval/avg_loss"] for record in records if "eval/avg_loss" in record][-1],
    "training loss": float(np.mean([record["learning/loss"] for record in records[-main_job.LAST_STEPS :]])),
    "measured drop": measured,
    "first order": float(ledger.first_order) / measured if ledger else "",
    "path + secant": float(ledger.columns_sum) / measured if ledger else "",
  }
  print(json.dumps(row), flush=True)
  return row


if __name__ == "__main__":
  sys.exit(_measure.run(main))
