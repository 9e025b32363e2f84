"""Whether the scores mean something: against retrainings, removals, exact Shapley values and honest baselines.

  python benchmarks/attribution_quality.py [--only digits|lm|truth|SECTION] [--small] [--corpus FOLDER]
      [--markdown FILE]

digits: a foreign nnx model (64-64-10 MLP, scikit-learn digits, 10 % wrong labels), scored in every step.
lm: a byte language model of two layers on six domains (four of Python's standard library, two made up).
truth: documents left out of one step, and the run followed without them (`_truth`).
--corpus: also retrieve on the six domains that `tools/fetch_corpora.py FOLDER` has fetched, split by document.
Fixed seeds; needs the `dev` extra. --small: fewer steps, seeds and subsets, to see that all runs. Targets are stated
with each figure as PASS or MISS; a baseline that beats the scores stands beside them.
"""

import contextlib
import functools
import io
import sys
from pathlib import Path

import _byte_lm as lm
import _digits as digits
import _measure
import _truth
import numpy as np
from _measure import Figure

WARM_STEPS = (100, 150, 200, 250, 300)
EARLY_STEPS = (1, 2, 3, 10, 30)


def digits_telescoping(small: bool):
  """Sum of all contributions over the measured drop, SGD."""
  settings = ((0.2, 300), (0.05, 300)) if small else ((0.2, 300), (0.05, 1200), (0.02, 3000), (0.005, 12000))
  runs = [digits.telescoping(0, rate, steps) for rate, steps in settings]
  rows = [
    {
      "experiment": f"digits SGD, lr {run['learning rate']:g} x {run['steps']}",
      "drop, nats": run["drop"],
      "first order / drop": run["first"] / run["drop"],
      "second order / drop": run["second"] / run["drop"],
      **{f"AUROC {name}": value for name, value in run["auroc"].items()},
    }
    for run in runs
  ]
  last, base = runs[-1], runs[1]
  figures = [
    Figure(
      f"digits, lr {last['learning rate']:g}: |first order / drop - 1|", abs(last["first"] / last["drop"] - 1), 0.1
    ),
    Figure(
      f"digits, lr {base['learning rate']:g}: |second order / drop - 1|", abs(base["second"] / base["drop"] - 1), 0.05
    ),
    Figure("digits: largest relative error of sum(scores) = <g, u>", max(r["check_rel_err"] for r in runs), 1e-5),
    Figure("digits, lr 0.2: AUROC of wrong labels, second order", runs[0]["auroc"]["second order"]),
    Figure("digits, lr 0.2: AUROC of wrong labels, plain loss (baseline)", runs[0]["auroc"]["loss during the run"]),
  ]
  return rows, figures


def digits_datamodel(small: bool):
  """Linear datamodelling score: 128 retrainings on half of the images."""
  steps, subsets = (60, 16) if small else (300, 128)
  run = digits.telescoping(0, 0.2, steps)
  values = run["values"] | {"random": np.random.default_rng(9).random(digits.NUM_TRAIN)}
  score = digits.datamodel_score(0, 0.2, steps, values, subsets)
  row = {"experiment": f"digits LDS, lr 0.2 x {steps}, {subsets} half subsets", **score}
  return [row], [Figure(f"digits LDS, {name}", value) for name, value in score.items()]


def digits_adam(small: bool):
  """AdamW's columns against the drop."""
  out = digits.adam_columns(0, steps=60 if small else 300)
  rows, figures = [], []
  for order in ("first", "second"):
    predicted = sum(out[order].values())
    rows.append(
      {"experiment": f"digits AdamW, {order} order", **out[order], "predicted": predicted, "drop": out["drop"]}
    )
    limit = 0.1 if order == "first" else 0.05
    figures.append(Figure(f"digits AdamW: |{order} order / drop - 1|", abs(predicted / out["drop"] - 1), limit))
  return rows, figures


def digits_leave_one_out(small: bool):
  """Correlation with the effect of leaving one image out of the batch, Adam."""
  early, warm = (EARLY_STEPS[:3], WARM_STEPS[:1]) if small else (EARLY_STEPS, WARM_STEPS)
  steps = (*early, *warm)
  seeds = range(1 if small else 3)
  tables = [digits.leave_one_out(seed, steps) for seed in seeds]
  mean = {name: np.mean([table[name] for table in tables], 0) for name in tables[0]}
  rows = [
    {
      "experiment": f"digits Adam, leave one out, {name}",
      **{f"step {s}": float(v) for s, v in zip(steps, values, strict=True)},
    }
    for name, values in mean.items()
  ]
  num = len(early)
  figures = [
    Figure("digits leave-one-out after warm-up, Adam direction", float(mean["adam"][num:].mean()), 0.98, True),
    Figure(
      "digits leave-one-out after warm-up, Adam direction, second order",
      float(mean["adam, second order"][num:].mean()),
      0.98,
      True,
    ),
    Figure("digits leave-one-out after warm-up, SGD direction", float(mean["sgd"][num:].mean())),
    Figure("digits leave-one-out, preconditioner held fixed", float(mean["frozen state"][num:].mean()), 0.98, True),
    Figure(
      f"digits leave-one-out, steps {early[0]}-{early[-1]}: Adam minus SGD direction",
      float(mean["adam"][:num].mean() - mean["sgd"][:num].mean()),
      0.0,
      True,
    ),
  ]
  return rows, figures


def digits_shapley(small: bool):
  """One step's scores against exact Shapley values over all 256 subsets of its batch."""
  rows, figures = [], []
  for rate in (0.2,) if small else (0.2, 0.05, 0.02):
    out = digits.exact_shapley(0, rate)
    rows += [
      {"experiment": f"digits exact Shapley, lr {rate:g}, {order} order", "largest relative error": e, "Spearman": r}
      for order, (e, r) in out.items()
    ]
    figures.append(Figure(f"digits Shapley, lr {rate:g}: Spearman of second order", out["second"][1], 0.95, True))
  return rows, figures


def lm_telescoping(small: bool):
  """The trainer's own ledger over a run, AdamW: three validation domains at the base rate, one elsewhere."""
  steps = 20 if small else 240
  group = lm.telescoping(_corpus(), lm.QUERIES, steps=steps)
  slow = lm.telescoping(_corpus(), ("manual",), steps=steps, learning_rate=3e-4)
  curved = lm.telescoping(_corpus(), ("manual",), steps=steps, ghost_direction="second_order")
  rows, figures = [], []
  for name, run in (("first order, lr 3e-3", group), ("first order, lr 3e-4", slow), ("second order, lr 3e-3", curved)):
    ratio = float(run["predicted_K"].sum() / run["drop_K"].sum())
    rows.append(
      {"experiment": f"LM AdamW, {name}", "drop, nats": float(run["drop_K"].mean()), "predicted / drop": ratio}
    )
    limit = {"first order, lr 3e-4": 0.1, "second order, lr 3e-3": 0.05}.get(name)
    figures.append(Figure(f"LM AdamW, {name}: |predicted / drop - 1|", abs(ratio - 1), limit))
  truth = lm.group_truth(_corpus(), group["by_domain_DK"], lm.QUERIES, steps=steps, size=1 if small else 3)
  rows.append({"experiment": "LM group truth: Spearman with retrainings on 3 of 6 domains", **truth})
  figures += [Figure(f"LM LDS over whole domains, {name}", value) for name, value in truth.items()]
  return rows, figures


def lm_retrieval(small: bool, folder: str):
  """Chunks of the domain asked for among 600 unseen ones."""
  rows, figures = _retrieval("LM", _corpus(), _models(small), None)
  if folder:
    corpus = lm.load_fetched(folder)
    found = _retrieval("LM, fetched corpus", corpus, lm.snapshots(corpus, _snapshot_steps(small)), 0.9)
    rows, figures = rows + found[0], figures + found[1]
  return rows, figures


def _retrieval(title: str, corpus, models, wanted):
  rows, figures = [], []
  for name, chosen in (
    ("middle of the run", models[1:2]),
    ("end of the run", models[-1:]),
    ("all checkpoints", models),
  ):
    recall = lm.retrieval(corpus, chosen)
    rows.append({"experiment": f"{title}: recall@100, {name}", **recall})
  for method, value in recall.items():
    limit = wanted if method == "cosine, centred" else None
    figures.append(Figure(f"{title}: domain retrieval, normalised recall@100, {method}", value, limit, True))
  return rows, figures


def lm_duplicates(small: bool):
  """Value per copy of one row planted 1 to 8 times in a batch of 16."""
  table = lm.duplicates(_corpus(), _models(small)[1], 0.1)
  first, last = table[0], table[-1]
  rows = [
    {"experiment": f"LM duplicates, {row['copies']} of 16", **{k: row[k] for k in ("first", "second", "real")}}
    for row in table
  ]
  fall = {order: (first[order] - last[order]) / abs(first["real"]) for order in ("first", "second", "real")}
  error = max(abs(row["second"] / row["real"] - 1) for row in table)
  figures = [
    Figure("LM duplicates: fall of the value per copy from 1 to 8 copies, over its size, real", fall["real"]),
    Figure("LM duplicates: the same, first order", fall["first"]),
    Figure("LM duplicates: the same, second order", fall["second"], 0.05, True),
    Figure("LM duplicates: largest relative error of the second order", error, 0.1),
  ]
  return rows, figures


def lm_low_rank(small: bool):
  """Scores along rank-r directions against exact ones at four moments of a run."""
  steps = _snapshot_steps(small)
  out = lm.low_rank(_corpus(), _models(small), (4, 16))
  rows = [
    {"experiment": f"LM low rank, r = {rank}", **{f"step {s}": v for s, v in zip(steps, values, strict=True)}}
    for rank, values in out.items()
  ]
  return rows, [Figure(f"LM low rank, r = {r}: lowest Spearman in the run", min(v), 0.99, True) for r, v in out.items()]


def lm_selection(small: bool):
  """Equal steps on half of the rows, chosen by a method: loss on fresh rows of the validation domain."""
  steps, seeds = (10, 1) if small else (60, 3)
  methods = ("topk", "greats", "random", "bottomk")
  loss = {m: [lm.selection(_corpus(), m, seed, steps=steps) for seed in range(seeds)] for m in methods}
  rows = [{"experiment": f"LM selection, {m}", **{f"seed {s}": v for s, v in enumerate(loss[m])}} for m in methods]
  ordered = sum(t < r < b for t, r, b in zip(loss["topk"], loss["random"], loss["bottomk"], strict=True))
  greats = sum(g < r for g, r in zip(loss["greats"], loss["random"], strict=True))
  return rows, [
    Figure(f"LM selection: seeds of {seeds} with topk < random < bottomk", ordered, seeds, True),
    Figure(f"LM selection: seeds of {seeds} with greats < random", greats, seeds, True),
    Figure("LM selection: mean loss, topk minus random, nats", float(np.mean(loss["topk"]) - np.mean(loss["random"]))),
    Figure(
      "LM selection: mean loss, greats minus random, nats", float(np.mean(loss["greats"]) - np.mean(loss["random"]))
    ),
  ]


def truth_digits(small: bool):
  """What happens without an image of one step: digits, 240 steps."""
  return _truth_table(_truth.digits, small)


def truth_language(small: bool):
  """What happens without a text of one step: a byte language model of two layers, 240 steps."""
  return _truth_table(_truth.language, small)


def _truth_table(make, small: bool):
  seeds, rows, figures = (0,) if small else (0, 1, 2), [], []
  horizons = _truth.HORIZONS[:3] if small else _truth.HORIZONS
  for optimizer in _truth.OPTIMIZERS:
    world = make(optimizer, at=(3, 40)) if small else make(optimizer)
    found = _truth.measure(_truth.Steps(world), seeds, horizons)
    rows += [*_truth.table(world, found, len(seeds), horizons), *_truth.shapley_table(world, found)]
    figures += _truth.figures(world, found, len(seeds))
  return rows, figures


SECTIONS = {
  f.__name__: f
  for f in (
    digits_telescoping, digits_datamodel, digits_adam, digits_leave_one_out, digits_shapley, lm_retrieval,
    lm_low_rank, lm_duplicates, lm_selection, lm_telescoping, truth_digits, truth_language,
  )
}  # fmt: skip


@functools.cache
def _corpus():
  return lm.load_corpus()


def _snapshot_steps(small: bool) -> tuple[int, ...]:
  return (2, 5) if small else (5, 40, 120, 240)


@functools.cache
def _models(small: bool):
  return lm.snapshots(_corpus(), _snapshot_steps(small))


def main() -> int:
  args = _measure.arguments(__doc__, False, only="", small=False, corpus="", markdown=None)
  failed = 0
  text = io.StringIO()
  for name, section in SECTIONS.items():
    if args.only not in name:
      continue
    given = (args.small, args.corpus) if section is lm_retrieval else (args.small,)
    rows, figures = section(*given)
    groups: dict[tuple, list] = {}
    for row in rows:
      groups.setdefault(tuple(row), []).append(row)
    title = f"{name}: {section.__doc__.splitlines()[0]}"
    *front, last = groups.values()
    notes = ["\n" + _measure.markdown(group) + "\n" for group in front]
    failed |= _measure.publish(title, last, figures, notes, args.json)
    body = "\n\n".join(_measure.markdown(group) for group in groups.values())
    text.write(
      f"\n### {section.__doc__.splitlines()[0]}\n\n{body}\n\n" + "".join(f"- {f.line().strip()}\n" for f in figures)
    )
    if args.markdown:
      Path(args.markdown).write_text("# Attribution quality\n" + text.getvalue(), encoding="utf-8")
  return failed


if __name__ == "__main__":
  with contextlib.suppress(BrokenPipeError):
    sys.exit(_measure.run(main))
