"""Made-up run directories for tests of reports and queries: plausible numbers from a fixed seed, nothing trained."""

import json
from pathlib import Path

import numpy as np

from maxghost import config, data
from maxghost.scorelog import Writer

# How much a token of the domain is worth for the validation sets, relative to the mean.
WORTH = {"manual": 3.0, "docstrings": 1.4, "code": 0.7, "tables": -0.5}
MODULES = ("token_embedder", "self_attention/query", "mlp/wo", "logits_dense")


def make_run(
  run_dir,
  *overrides: str,
  steps: int = 40,
  rows_per_step: int = 9,
  val_sets=("manual",),
  seed: int = 3,
  modules: bool = True,
  closing: bool = True,
  fingerprint: str | None = None,
) -> Path:
  """Writes config.yml, metrics.jsonl and the score log of a run over the documents that `overrides` configure."""
  run_dir = Path(run_dir)
  run_dir.mkdir(parents=True, exist_ok=True)
  cfg = config.load(None, f"steps={steps}", *overrides)
  config.save(cfg, run_dir / "config.yml")
  dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed)
  rng = np.random.default_rng(seed)
  domains = sorted(dataset.source.domains)
  worth = {name: WORTH.get(name, 1.5 - i) for i, name in enumerate(domains)}
  fingerprint = dataset.fingerprint if fingerprint is None else fingerprint
  writer = Writer(run_dir, val_sets, period=20, fingerprint=fingerprint)
  writer.restore(None)
  previous = None
  with open(run_dir / "metrics.jsonl", "w") as metrics:
    for step in range(steps):
      documents = [dataset.document(i) for i in rng.integers(0, len(dataset.source), rows_per_step)]
      record, rows, parts = make_step(rng, step, steps, documents, worth, domains, len(val_sets), previous)
      previous = record.pop("after")
      writer.append(record, rows, [tuple(d.id) for d in documents], modules=parts if modules else None)
      metrics.write(json.dumps(metrics_record(record, rows, step, steps)) + "\n")
  if closing:
    writer.append({"step": steps, "prev_val_loss": previous}, {}, [])
  writer.close()
  return run_dir


def make_step(rng, step, steps, documents, worth, domains, num_sets, previous):
  """One step's record, rows and module contributions; the columns add up, the measured drop is a little smaller."""
  num = len(documents)
  learning_rate = 3e-3 * min(1.0, (step + 1) / (0.1 * steps)) * (0.55 + 0.45 * np.cos(np.pi * step / steps))
  speed = 3.4 * np.exp(-step / (0.22 * steps)) / (0.22 * steps)
  tokens = np.minimum(rng.integers(30, 256, num), [len(d.text) + 1 for d in documents]).astype(np.int32)
  value = np.array([worth[d.domain] for d in documents])
  share = tokens / tokens.sum()
  contribution = 0.14 * speed * share[:, None] * (value[:, None] + rng.normal(0, 1.2, (num, num_sets)))
  examples = contribution.sum(0)
  momentum = 0.88 * speed * (1 + rng.normal(0, 0.15, num_sets))
  decay = np.full(num_sets, -0.0015 * speed)
  drop = (examples + momentum + decay) * rng.normal(0.96, 0.03, num_sets)
  before = 2.0 + 3.55 * np.exp(-step / (0.22 * steps)) + rng.normal(0, 0.05, num_sets) * (step % 20 == 0)
  before = before if previous is None or step % 20 == 0 else previous
  loss = 2.05 + 3.4 * np.exp(-step / (0.2 * steps)) + rng.normal(0, 0.3, num)
  record = {
    "step": step,
    "learning_rate": learning_rate,
    "learning_rate_in_all": 3 * learning_rate,
    "clip_factor": 1.0,
    "tokens": int(tokens.sum()),
    "loss": float((loss * share).sum()),
    "val_loss": before,
    "prev_val_loss": before if previous is None else previous,
    "predicted_examples": examples,
    "momentum": momentum,
    "weight_decay": decay,
    "unscored": np.zeros(num_sets),
    "direction_residual": np.zeros(num_sets),
    "check_rel_err": np.full(num_sets, 3e-7) * rng.random(),
    "after": before - drop,
  }
  rows = {
    "tokens": tokens,
    "loss": loss,
    "dot": contribution / (learning_rate * share[:, None]),
    "contribution": contribution,
    "chunk": np.zeros(num, np.int64),
  }
  split_MLDK = np.full((len(MODULES), 4, len(domains), num_sets), np.nan)
  by_domain = np.stack([contribution[[d.domain == name for d in documents]].sum(0) for name in domains])
  weights = rng.dirichlet([2, 1, 1, 1, 1, 2, 2, 2, 2, 4])
  split_MLDK[0, 0], split_MLDK[3, 0] = weights[0] * by_domain, weights[9] * by_domain
  split_MLDK[1] = weights[1:5, None, None] * by_domain
  split_MLDK[2] = weights[5:9, None, None] * by_domain
  return record, rows, {"names": MODULES, "domains": domains, "contribution": split_MLDK}


def metrics_record(record, rows, step, steps) -> dict:
  metrics = {
    "step": step,
    "learning/loss": record["loss"],
    "learning/current_learning_rate": record["learning_rate"],
    "learning/total_weights": record["tokens"],
    "perf/step_time_seconds": 0.41 + 0.02 * (step % 3),
    "perf/per_device_tokens_per_sec": record["tokens"] / 0.42,
    "perf/per_device_tflops_per_sec": 0.021,
  }
  if (step + 1) % max(1, steps // 3) == 0:
    metrics["eval/avg_loss"] = float(record["val_loss"][0]) + 0.02
  return metrics
