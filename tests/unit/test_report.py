"""The report: its numbers against hand-made rows, its page, its command line. Sizes: K = 2 sets, D = 3 domains."""

import html.parser
import itertools
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
from attribution_runs import make_run

from maxghost import attribution, report, scores
from maxghost.attribution import live, report_text, statistics
from maxghost.attribution import summary as summary_module
from maxghost.attribution.html import render
from maxghost.attribution.html.charts import spread, tick_text, ticks
from maxghost.attribution.metrics import Series, read_metrics, thin
from maxghost.attribution.numbers import compact, integer, number, percent
from maxghost.attribution.texts import Source
from maxghost.config import ConfigError
from maxghost.config.values import printable
from maxghost.scorelog import Writer

SYNTHETIC = ("dataset_type=synthetic", "ghost_val_sets=words")


def summarize(log, num_documents=20):
  return summary_module.summarize(log, num_documents, Source(log.run_dir))


def write_log(run_dir, steps, val_sets=("manual",), closing=None, epochs=None, objective="next_token"):
  """steps: (step columns, rows of (domain, path, offset, chunk, tokens, contribution per set))."""
  writer = Writer(run_dir, val_sets, period=3, objective=objective)
  writer.restore(None)
  for step, (record, rows) in enumerate(steps):
    contribution = np.array([row[5] for row in rows], float).reshape(len(rows), len(val_sets))
    columns = {
      "tokens": [row[4] for row in rows],
      "loss": [1.0 + row[4] for row in rows],
      "dot": contribution * 2,
      "contribution": contribution,
      "chunk": [row[3] for row in rows],
    }
    if epochs is not None:
      columns["epoch"] = epochs[step]
    writer.append({"step": step, **record}, columns, [row[:3] for row in rows])
  if closing is not None:
    writer.append({"step": len(steps), "prev_val_loss": closing}, {}, [])
  writer.close()
  return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("runs") / "two-sets", *SYNTHETIC, val_sets=("manual", "exams"), steps=44)


def test_ledger_and_domains_by_hand(tmp_path):
  steps = [
    (
      {"val_loss": 5.0, "prev_val_loss": 9.0, "predicted_examples": 0.5, "momentum": 0.0, "weight_decay": -0.125},
      [("a", "x", 0, 0, 10, 0.75), ("b", "y", 0, 0, 30, -0.25)],
    ),
    (
      {"val_loss": 4.0, "prev_val_loss": 4.5, "predicted_examples": 1.0, "momentum": 2.0, "weight_decay": -0.125},
      [("a", "x", 0, 0, 10, 0.25), ("b", "z", 7, 0, 50, 0.75)],
    ),
  ]
  with_close = summarize(attribution.load(write_log(tmp_path / "r", steps, closing=[1.5])))
  part = with_close.sets[0]
  assert part.ledger.columns == {
    "predicted_examples": 1.5,
    "momentum": 2.0,
    "weight_decay": -0.25,
    "unscored": None,
    "direction_residual": None,
  }
  assert part.ledger.actual == (5.0 - 4.5) + (4.0 - 1.5)
  assert part.ledger.predicted == 3.25 and part.ledger.rest == -0.25
  assert [(v.domain, v.contribution, v.tokens, v.exposures) for v in part.domains] == [
    ("a", 1.0, 20, 2),
    ("b", 0.5, 80, 2),
  ]
  assert part.domains[0].per_million == 50_000 and part.domains[1].per_million == 6250
  assert part.domains[1].loss == (30 * 31 + 50 * 51) / 80
  assert [(v.path, v.offset, v.contribution) for v in part.top] == [("x", 0, 1.0), ("z", 7, 0.75)]
  assert not part.helped and not part.hurt and part.num_judged == 0  # no document has three chunks
  assert not any("add up" in message for message in with_close.messages)

  assert "first-order prediction" not in report_text.ledger_sentence(part.ledger)
  assert "Momentum carries 62" in report_text.ledger_sentence(part.ledger)

  without_close = summarize(attribution.load(write_log(tmp_path / "s", steps))).sets[0].ledger
  assert (without_close.actual, without_close.predicted, len(without_close.steps)) == (0.5, 0.375, 1)
  assert "over 1 step (0 to 0). 33\u202f% of the predicted drop came on top" in report_text.ledger_sentence(
    without_close
  )


def test_a_step_whose_successor_was_not_scored_has_no_measured_drop(tmp_path):
  writer = Writer(tmp_path)
  rows = {"tokens": [1], "loss": [1.0], "dot": [1.0], "contribution": [1.0]}
  for step, before in ((0, 5.0), (1, 4.0), (3, 1.0)):
    record = {"step": step, "val_loss": before, "prev_val_loss": before, "predicted_examples": 1.0}
    writer.append(record, rows, [("a", "b", 0)])
  writer.close()
  ledger = summarize(attribution.load(tmp_path)).sets[0].ledger
  assert (ledger.actual, ledger.predicted, len(ledger.steps)) == (1.0, 1.0, 1)


def test_curvature_is_half_the_difference_of_what_the_gradients_around_a_step_predict(tmp_path):
  """Where the gradient after a step is unknown (other rows, a gap in the log), the step stays first order."""
  losses = ((5.0, math.nan, math.nan, 1.0), (4.5, 4.5, 0.25, 2.0), (3.5, 3.25, math.nan, 0.5))
  names = ("val_loss", "prev_val_loss", "prev_predicted", "predicted_examples")
  steps = [(dict(zip(names, row, strict=True)), [("a", "x", 0, 0, 9, row[3])]) for row in losses]
  part = summarize(attribution.load(write_log(tmp_path, steps, closing=3.0))).sets[0]
  ledger = part.ledger
  assert (ledger.columns_sum, ledger.curvature, ledger.actual) == (3.5, (0.25 - 1.0) / 2, 0.5 + 1.25 + 0.5)
  assert ledger.predicted == 3.125 and ledger.predicted_S.tolist() == [0.625, 2.0, 0.5]
  lines = {line.label: line for line in report_text.ledger_lines(ledger)}
  assert lines["Curvature"].start == 3.5 and lines["Predicted drop"].value == 3.125
  assert lines["Rest"].value == ledger.actual - 3.125 and "neither" in lines["Rest"].words


def test_curvature_that_the_steps_expected_is_not_counted_again(tmp_path):
  """First order 1.4 and 2.0, of which the steps expected -0.4 and -0.5; then the trapezoid with what came after."""
  names = ("val_loss", "prev_val_loss", "prev_predicted", "predicted_examples", "predicted_curvature")
  losses = ((5.0, math.nan, math.nan, 1.0, -0.4), (4.5, 4.5, 0.25, 1.5, -0.5), (3.5, 3.25, 1.0, 0.5, 0.0))
  steps = [(dict(zip(names, row, strict=True)), [("a", "x", 0, 0, 9, row[3])]) for row in losses]
  ledger = summarize(attribution.load(write_log(tmp_path, steps, closing=3.0))).sets[0].ledger
  assert (ledger.ahead, ledger.columns_sum) == (pytest.approx(-0.9), 3.0)
  trapezoid = (1.4 + 0.25) / 2 + (2.0 + 1.0) / 2 + 0.5
  assert ledger.predicted == pytest.approx(trapezoid)
  words = {line.label: line.words for line in report_text.ledger_lines(ledger)}["Curvature"]
  assert "less the curvature that the steps expected" in words


def test_missing_rows_are_noticed(tmp_path):
  steps = [({"val_loss": 5.0, "predicted_examples": 0.5}, [("a", "x", 0, 0, 10, 0.25)])] * 4
  messages = summarize(attribution.load(write_log(tmp_path, steps))).messages
  assert any("add up to 1 nats, the steps' own sums to 2:" in m for m in messages)


def test_block_interval_ignores_a_trend_and_covers_noise():
  assert statistics.block_half_width(np.array([3.0, 3.0, 3.0, 3.0])) == 0
  assert np.isnan(statistics.block_half_width(np.array([3.0, 4.0])))
  ramp = statistics.block_half_width(np.arange(20.0))
  assert ramp < 0.2 * 2.093 * math.sqrt(20) * np.arange(20.0).std(ddof=1)  # t at 19 degrees
  draws = np.random.default_rng(0).normal(0.3, 1.0, (4000, 20))
  covered = np.abs(draws.sum(1) - 0.3 * 20) <= statistics.block_half_width(draws)
  assert 0.92 < covered.mean() < 0.98


def test_block_interval_is_that_of_neighbouring_differences():
  """Sums 1, 3, 2, 7: squared differences 4 + 1 + 25 over 2 (4 - 1) are a variance of 5; t at 3 degrees is 3.18245."""
  half = statistics.block_half_width(np.array([[1.0, 3.0, 2.0, 7.0], [2.0, 6.0, 4.0, 14.0]]))
  np.testing.assert_allclose(half, [3.182446 * math.sqrt(4 * 5), 2 * 3.182446 * math.sqrt(4 * 5)], rtol=1e-6)
  np.testing.assert_array_equal(statistics.to_blocks(np.arange(7.0), 3), [1, 9, 11])


def test_the_quantiles_are_students_at_every_number_of_degrees():
  """Of n values with a variance of 1, the half-width of the total is t times the root of n."""
  count = np.arange(2, 42)
  half = statistics.exposure_half_width(count, np.zeros(40), count - 1.0)
  np.testing.assert_allclose(half, scipy.stats.t.ppf(0.975, count - 1) * np.sqrt(count), rtol=1e-9)


def test_exposure_interval_is_students():
  values = np.random.default_rng(1).normal(0.2, 2.0, (4000, 7))
  half = statistics.exposure_half_width(np.full(4000, 7), values.sum(1), (values**2).sum(1))
  assert 0.93 < (np.abs(values.sum(1) - 1.4) <= half).mean() < 0.97
  assert half[0] == pytest.approx(2.446912 * math.sqrt(7) * values[0].std(ddof=1))
  assert np.isnan(statistics.exposure_half_width(np.array([0, 1]), np.array([0.0, 3.0]), np.array([0.0, 9.0]))).all()


def test_passes_over_the_data_and_their_value(tmp_path):
  """Of domain a, the second pass is worth half of what the first is worth in the same step."""
  first, second, other = ("a", "x", 0, 0, 40, 4.0), ("a", "y", 0, 0, 40, 2.0), ("b", "z", 0, 0, 80, 1.0)
  steps = [({}, [first]), ({}, [first, second, other]), ({}, [second, other])]
  table = summarize(attribution.load(write_log(tmp_path, steps, epochs=[[0], [0, 1, 0], [9, 0]]))).passes
  assert table.rows.tolist() == [4, 1, 0, 0, 0, 1] and table.tokens.tolist() == [240, 40, 0, 0, 0, 40]
  assert table.contribution_EK[:, 0].tolist() == [10.0, 2.0, 0, 0, 0, 2.0]
  assert table.expected_EK[:, 0].tolist() == pytest.approx([9.0, 3.0, 0, 0, 0, 2.0])
  assert table.rows[1:].any()


def test_value_of_a_domain_against_the_same_steps(tmp_path):
  """b is seen only while tokens are worth little, but is worth three times a's token then."""
  steps = [({}, [("a", "x", 0, 0, 40, 8.0)]), ({}, [("a", "x", 0, 0, 30, 0.3), ("b", "y", 0, 0, 10, 0.3)])]
  a, b = summarize(attribution.load(write_log(tmp_path, steps))).sets[0].domains
  assert (a.domain, b.domain) == ("a", "b")
  assert b.relative == pytest.approx(0.3 / (0.6 * 10 / 40)) and a.relative == pytest.approx(8.3 / (8 + 0.6 * 30 / 40))


def test_documents_are_ranked_by_what_is_sure_per_token(tmp_path):
  """Long documents have the largest totals; the best per token are those whose interval ends highest above zero."""
  values = {
    "long": [(1000, 5.0), (1000, 5.5), (1000, 4.5)],
    "short": [(10, 1.0), (10, 1.1), (10, 0.9)],
    "noisy": [(10, 9.0), (10, -6.0), (10, 4.0)],
    "twice": [(10, 3.0), (10, 3.0)],
    "bad": [(10, -0.5), (10, -0.6), (10, -0.4)],
    "doubtful": [(10, -2.0), (10, 1.0), (10, -1.0)],
  }
  steps = [
    ({}, [("a", name, 0, 0, *rows[step]) for name, rows in values.items() if step < len(rows)]) for step in range(3)
  ]
  part = summarize(attribution.load(write_log(tmp_path, steps))).sets[0]
  assert [v.path for v in part.helped] == ["short", "long"] and [v.path for v in part.hurt] == ["bad"]
  assert [v.path for v in part.top] == ["long", "noisy", "twice"] and part.num_judged == 5
  assert [v.path for v in part.bottom] == ["doubtful", "bad", "short"]
  assert "at the lower end of the 95 % interval, among the 5 documents" in report_text.helped_sentence(part)
  assert "Of 5 documents without any effect, less than one" in report_text.hurt_sentence(part)
  page, only = render(summarize(attribution.load(tmp_path))), [({}, [("a", "x", 0, 0, 10, -1.0)])] * 4
  assert page.index("Documents that helped most") < page.index("<bdi>short") < page.index("Documents that hurt")
  part = summarize(attribution.load(write_log(tmp_path / "b", only))).sets[0]
  assert not part.helped and "None of the 1 document with 3 or more" in report_text.helped_sentence(part)
  assert [v.path for v in part.hurt] == ["x"] and not part.bottom


NATS = r"−?[\d.\u202f]+(?:e−?\d+)?"
PERCENT = rf"({NATS})\u202f%"
HOW = "(?:First order predicted|First order and (?:curvature explain|the expected curvature predicted))"


def said(text: str) -> float:
  return float(text.replace("−", "-").replace("\u202f", ""))


def check_sentences(text: str, ledger) -> None:
  """Every sentence about the ledger is one of these, and what it says of the numbers holds."""
  predicted, actual, first = ledger.predicted, ledger.actual, ledger.columns_sum - (ledger.ahead or 0.0)
  parts = [ledger.columns.get(name) or 0.0 for name in ("momentum", "predicted_examples")]
  rest = r"(?: the prediction does not explain these steps\. Read the .*, not as exact nats\.)"
  known = {
    rf"The \w+ validation loss fell {NATS} nats per token\.": lambda: actual > 0,
    rf"The \w+ validation loss rose {NATS} nats per token\.": lambda: actual < 0,
    r"The \w+ validation loss did not change\.": lambda: actual == 0,
    rf"The \w+ validation loss was predicted to fall {NATS} nats per token; no drop was measured\.":
      lambda: actual is None and predicted > 0,
    rf"The \w+ validation loss was predicted to rise {NATS} nats per token; no drop was measured\.":
      lambda: actual is None and predicted < 0,
    r"The \w+ validation loss was predicted to stay as it is; no drop was measured\.":
      lambda: actual is None and predicted == 0,
    rf"{HOW} {NATS}\.": lambda: predicted >= 0 and not predicted * actual > 0,
    rf"{HOW} {NATS} \({PERCENT} of it\)\.":
      lambda share: predicted >= 0 and share == pytest.approx(100 * predicted / actual, rel=0.06),
    rf"{HOW} a rise of {NATS}\.": lambda: predicted < 0 and not predicted * actual > 0,
    rf"{HOW} a rise of {NATS} \({PERCENT} of it\)\.":
      lambda share: predicted < 0 and share == pytest.approx(100 * predicted / actual, rel=0.06),
    r"The predicted drops of the steps, added up over \d+ steps? \(\d+ to \d+\)\.": lambda: True,
    rf"Momentum carries {PERCENT} of (?:it|its first-order part|what the steps predicted), the ex.*? {PERCENT} "
    rf"\({NATS} nats\): .*? momentum\.":
      lambda momentum, examples: momentum > 20 * 0.99
      and (momentum, examples)
      == pytest.approx([100 * part / ledger.columns_sum for part in parts], rel=0.06),
    rf"They contain \+?({NATS}) nats of curvature that the steps expected, .*? alone predicts ({NATS}) nats\.":
      lambda ahead, alone: ahead == pytest.approx(ledger.ahead, rel=0.06) and alone == pytest.approx(first, rel=0.06),
    rf" ?(?:Curvature|Further curvature) takes back {PERCENT} of what first order predicts; .*? among documents\.":
      lambda share: ledger.curvature * first < 0 and share == pytest.approx(-100 * ledger.curvature / first, rel=0.06),
    rf" ?(?:Curvature|Further curvature) adds {PERCENT} of what first order predicts; .*? among documents\.":
      lambda share: ledger.curvature * first > 0 and share == pytest.approx(100 * ledger.curvature / first, rel=0.06),
    rf"{PERCENT} of the predicted drop did not happen:{rest}": lambda share: 0 < actual < predicted and share > 19,
    rf"{PERCENT} of the predicted drop came on top:{rest}": lambda share: 0 < predicted < actual and share > 19,
    rf"{PERCENT} of the predicted rise did not happen:{rest}": lambda share: predicted < actual < 0 and share > 19,
    rf"{PERCENT} of the predicted rise came on top:{rest}": lambda share: actual < predicted < 0 and share > 19,
    rf"The measured loss fell {NATS} nats per token, against a predicted rise:{rest}": lambda: predicted < 0 < actual,
    rf"The measured loss rose {NATS} nats per token, against a predicted drop:{rest}": lambda: actual < 0 < predicted,
    rf"The measured loss did not change, against a predicted (?:drop|rise):{rest}": lambda: predicted and not actual,
    rf"No change was predicted, but the measured loss (?:fell|rose) {NATS} nats per token:{rest}":
      lambda: not predicted and actual,
  }  # fmt: skip
  while text:
    found = [(m, holds) for pattern, holds in known.items() if (m := re.match(pattern + r"(?: |$)", text))]
    match, holds = max(found, key=lambda pair: pair[0].end(), default=(None, None))
    assert match, f"no rule for: {text}"
    assert holds(*map(said, match.groups())), match[0]
    text = text[match.end() :]


small = st.one_of(st.just(0.0), st.floats(0.001, 1000), st.floats(-1000, -0.001))


maybe = st.one_of(st.none(), small)


@hypothesis.given(small, small, small, maybe, maybe, maybe)
@hypothesis.settings(max_examples=400, deadline=None)
def test_every_sentence_follows_from_its_numbers(examples, momentum, decay, actual, curvature, ahead):
  columns = {"predicted_examples": examples, "momentum": momentum, "weight_decay": decay, "unscored": None}
  drops = None if actual is None else np.array([actual / 2, actual / 2])
  ledger = summary_module.Ledger(columns, np.array([3, 4]), np.zeros(2), drops, curvature, ahead)
  part = SimpleNamespace(name="manual", ledger=ledger, domains=[])
  check_sentences(report_text.headline(part), ledger)
  check_sentences(report_text.lead(part), ledger)
  check_sentences(report_text.ledger_sentence(ledger), ledger)


@hypothesis.given(st.lists(st.tuples(small, st.one_of(st.just(math.nan), st.floats(0, 100))), min_size=1, max_size=6))
@hypothesis.settings(max_examples=200, deadline=None)
def test_only_domains_that_differ_from_zero_are_said_to_have_raised_the_loss(values):
  domains = [summary_module.Value(f"d{i}x", 3, 10, 1.0, total, half) for i, (total, half) in enumerate(values)]
  ledger = summary_module.Ledger({"predicted_examples": 1.0}, np.array([3]), np.zeros(1), None)
  text = report_text.lead(SimpleNamespace(name="manual", ledger=ledger, domains=domains))
  worth, _, harm = text.partition("By more than the noise, the loss was raised by ")
  harmful = [v.domain for v in domains if math.isfinite(v.half_width) and v.contribution + v.half_width < 0]
  assert [name for name in re.findall(r"d\dx", harm)] == harmful[:3]
  assert ("more" in harm) == (len(harmful) > 3) and bool(harm) == bool(harmful)
  assert re.findall(r"d\dx", worth) == [v.domain for v in domains[:4]]


def test_the_three_losses_are_explained(run_dir):
  """The measured drop, the ends of the curve and the evaluation are three numbers; the page says why."""
  summary = summarize(attribution.load(run_dir))
  part = summary.sets[0]
  steps = attribution.load(run_dir).steps
  assert part.num_renewals == 2  # make_run takes other rows at steps 20 and 40
  page = render(summary)
  ends = " and ".join(number(steps["val_loss"][i, 0]) for i in (0, 43))
  assert f"The measured drop ({number(part.ledger.actual)}) compares the same rows" in page
  assert f"the ends of the curve ({ends}) are of different rows" in page
  assert page.count("renewed 2 times, where their curve jumps. The measured drop (") == 2
  assert page.count("Evaluation averages") == 1
  assert "blue lowers the loss and orange raises it" in page
  ticks_of_steps = re.findall(r'class="tick middle"[^>]*>([^<]+)<', page)
  assert ticks_of_steps.count("0") == ticks_of_steps.count("44") == page.count("data-readout")


HOSTILE = "evil\x1b[31m\x9b1m\u202e\x07"


def test_nothing_from_the_data_steers_the_terminal(tmp_path, capsys, monkeypatch):
  text = f"a text {HOSTILE} of some length, again and again"
  run_dir = tmp_path / "run"
  rows = [(HOSTILE, f"{HOSTILE}.txt", 0, 0, 9, value) for value in (1.0, 1.1, 0.9)]
  write_log(run_dir, [({"val_loss": 2.0, "predicted_examples": 1.0}, [row]) for row in rows])
  monkeypatch.setattr(Source, "open", lambda self, fingerprints: [f"note {HOSTILE}"])
  monkeypatch.setattr(Source, "find", lambda self, wanted: {key: text for key in wanted})
  assert report.main([str(run_dir)]) == 0
  for arguments in (["--by", "document", "--text"], ["--by", "source"], ["--where", f"domain={HOSTILE[:-2]}"]):
    assert scores.main([str(run_dir), *arguments]) == 0
  assert scores.main([str(run_dir), "--by", HOSTILE]) == 2
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  for form in ("json", "csv"):
    assert scores.main([str(run_dir), "--by", "document", "--text", "--format", form]) == 0
  shown = "".join(capsys.readouterr())
  assert "evil" in shown and "a text" in shown
  assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
  assert "\u202e" not in (run_dir / "report.html").read_text("utf-8")


def test_page_is_self_contained_and_well_formed(run_dir):
  page = render(summarize(attribution.load(run_dir), 12))
  check = PageCheck()
  check.feed(page)
  assert not check.open and not check.problems
  assert not re.search(r"""(src|href)=|url\(|@import|https?:|fetch\(["'](?!version)""", page)
  assert check.counts["svg"] > 8 and check.counts["section"] == 2 and check.counts["button"] == 2
  assert check.labelled_drawings == check.counts["svg"]
  for phrase in ("exams", "Momentum", "nats per million tokens", "layer 3", "logits_dense", "Data health"):
    assert phrase in page, phrase
  assert len(page) < 1_000_000


class PageCheck(html.parser.HTMLParser):
  """Counts elements, finds unbalanced ones, and drawings that neither speak nor are hidden."""

  def __init__(self):
    super().__init__()
    self.open, self.problems, self.counts, self.labelled_drawings = [], [], {}, 0

  def handle_starttag(self, name, attributes):
    self.counts[name] = self.counts.get(name, 0) + 1
    if name == "svg":
      given = dict(attributes)
      self.labelled_drawings += bool(given.get("aria-label")) or given.get("aria-hidden") == "true"
    if name not in ("meta", "br", "input", "col"):
      self.open.append(name)

  def handle_startendtag(self, name, attributes):
    self.counts[name] = self.counts.get(name, 0) + 1

  def handle_endtag(self, name):
    if not self.open or self.open.pop() != name:
      self.problems.append(f"</{name}> at {self.getpos()}")


def test_hostile_names_are_escaped(tmp_path):
  name = "</script><script>alert(1)</script>\ud800\x00\"'"
  steps = [({"val_loss": 2.0, "predicted_examples": 1.0}, [(name.replace("\0", ""), name[:-3], 0, 0, 5, 1.0)])] * 3
  page = render(summarize(attribution.load(write_log(tmp_path, steps, val_sets=("<b>",)))))
  page.encode("utf-8")
  assert "<script>alert" not in page and "<b>" not in page.replace("<b>Please note", "")
  assert page.count("<script>") == 1


def test_one_step_and_no_other_files(tmp_path):
  steps = [({"val_loss": 2.0, "predicted_examples": -1.0}, [("a", "x", 0, 0, 5, -1.0)])]
  summary = summarize(attribution.load(write_log(tmp_path, steps)))
  assert summary.sets[0].ledger.actual is None and not summary.sets[0].hurt
  assert any("config.yml is missing" in m for m in summary.messages)
  assert any("metrics.jsonl is missing" in m for m in summary.messages)
  assert "was predicted to rise 1.00 nats per token; no drop was measured" in render(summary)


def test_not_finite_contributions_are_left_out_and_said(tmp_path):
  steps = [({}, [("a", "x", 0, 0, 5, math.nan), ("a", "y", 0, 0, 5, 2.0)])]
  summary = summarize(attribution.load(write_log(tmp_path, steps)))
  assert summary.sets[0].domains[0].contribution == 2.0
  assert any(m.startswith("1 rows with a non-finite contribution") for m in summary.messages)


def test_texts_are_found_and_a_changed_source_is_said(tmp_path):
  same = summarize(attribution.load(make_run(tmp_path / "same", *SYNTHETIC, steps=3)))
  assert all(value.text for value in same.sets[0].top)
  assert not any("changed since" in m for m in same.messages)
  other = summarize(attribution.load(make_run(tmp_path / "other", *SYNTHETIC, steps=3, fingerprint="1a2b")))
  assert any("has changed since the run (fingerprint 1a2b then," in m for m in other.messages)


def test_command(run_dir, capsys):
  assert report.main([str(run_dir), "--documents", "3"]) == 0
  out = capsys.readouterr().out
  for phrase in ("Predicted drop", "Measured drop", "Documents that helped most", "million tokens"):
    assert phrase in out, phrase
  whole = (page := run_dir / "report.html").read_text()
  assert len(whole) > 20_000
  page.unlink()
  assert report.main([str(run_dir / "ghost"), "--documents", "3"]) == 0 and page.read_text() == whole


@pytest.mark.parametrize(
  ("argv", "line"),
  [
    (["nowhere"], "run_dir=nowhere: no such folder"),
    ([str(Path(__file__).parents[1] / "unti")], f"no such folder; nearest is {Path(__file__).parent}"),
    ([__file__], f"no such folder but a file; use {Path(__file__).parent}"),
    ([".", "--dokuments", "3"], "unknown argument '--dokuments'; did you mean '--documents'?"),
    ([".", "--documents", "-1"], "--documents -1: at least 0"),
    ([], "the following arguments are required: RUN_DIR"),
    (["."], "not a run of maxghost"),
  ],
)
def test_bad_input(argv, line, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert report.main(argv) == 2
  assert line in (error := capsys.readouterr().err) and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_zero_scored_steps(tmp_path, capsys):
  write_log(tmp_path, [({"val_loss": 1.0}, [])])
  assert report.main([str(tmp_path)]) == 2
  assert "holds 1 step but no scored document yet" in capsys.readouterr().err
  assert not (tmp_path / "report.html").exists()


def test_report_does_not_import_jax():
  modules = "maxghost.report, maxghost.attribution.summary, maxghost.attribution.html, maxghost.data"
  code = f"import sys, {modules}; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)


def test_metrics_file_with_bad_lines(tmp_path):
  lines = [{"step": 1, "learning/loss": 3.0}, {"step": 0, "learning/loss": 4.0, "x": None, "flag": True}]
  wrong = ['{"step": 1e999}', '{"step": 2, "x": %s}' % ("9" * 400), "[" * 9999, '{"step": 2, "learn']
  text = "".join(json.dumps(line) + "\n" for line in lines) + "\n".join(wrong)
  (tmp_path / "metrics.jsonl").write_text(text)
  metrics, samples, messages = read_metrics(tmp_path / "metrics.jsonl")
  assert samples == [] and list(metrics) == ["learning/loss"] and metrics["learning/loss"].values.tolist() == [4.0, 3.0]
  assert messages == ["metrics.jsonl: 4 lines could not be read and were left out"]


def test_what_the_model_wrote_is_shown(tmp_path):
  write_log(tmp_path, [({"val_loss": 2.0, "predicted_examples": -1.0}, [("a", "x", 0, 0, 5, -1.0)])])
  lines = [{"step": step, "learning/loss": 3.0, "sample/text": f"once <{step}> upon"} for step in range(12)]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "sampl')
  page = render(summarize(attribution.load(tmp_path)))
  assert "What the model wrote" in page and "once &lt;11&gt; upon" in page and "once &lt;4&gt;" in page
  assert "once &lt;3&gt;" not in page  # the last eight


def test_thin_keeps_the_mean():
  series = Series(np.arange(1000), np.arange(1000.0))
  thinned = thin(series, 100)
  assert thinned.steps[-1] == 999 and thinned.values[0] == 4.5 and len(thinned) == 100


def test_numbers_as_people_read_them():
  found = [number(v) for v in (0.0245, -1234.5, 5e-9, 0.09996, math.nan, None, 0.0)]
  assert found == ["0.0245", "−1\u202f234", "5.00e−9", "0.100", "–", "–", "0"]
  assert number(2, plus=True) == "+2.00" and integer(12345) == "12\u202f345"
  found = [compact(v) for v in (950, 953_000, 1_234_567, 99_960, 999_960)]
  assert found == ["950", "953\u202fk", "1.23\u202fM", "100\u202fk", "1.00\u202fM"]
  assert percent(0.5) == "50\u202f%" and percent(None) == "–"
  assert printable("a\x07b\n\u202e") == "a\ufffdb\n\ufffd"


def test_axes():
  assert ticks(0.3, 9.7) == [0, 2, 4, 6, 8, 10] and ticks(-0.2, 0.6) == [-0.2, 0, 0.2, 0.4, 0.6]
  assert tick_text(-0.25, 0.25) == "−0.25" and tick_text(1500, 500) == "1\u202f500" and tick_text(2.5, 2.5) == "2.5"
  placed = spread([10, 11, 12, 99], 14, 0, 100)
  assert all(b - a >= 14 for a, b in itertools.pairwise(placed)) and placed[-1] <= 100


def test_live_view(tmp_path):
  """On loopback only; the version changes with the scores; foreign host names are refused."""
  server = live.LiveServer(tmp_path, 0, 5, with_texts=False)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    assert server.server_address[0] == "127.0.0.1"
    url = f"http://127.0.0.1:{server.server_port}"

    def get(path, **headers):
      return urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=20).read().decode()

    before = get("/version")
    assert get("/version", Host="localhost") == before  # of port 80, which browsers leave out
    assert "Waiting for scores" in get("/") and f'data-live="{before}"' in get("/")
    step = ({"val_loss": 2.0, "predicted_examples": 1.0}, [("a", "x", 0, 0, 5, 1.0)])
    write_log(tmp_path, [step] * 4)
    after = get("/version")
    page = get("/")
    assert after != before and "What each domain was worth" in page and f'data-live="{after}"' in page
    for path, headers, code in (("/etc/passwd", {}, 404), ("/", {"Host": "evil.example:80"}, 403)):
      with pytest.raises(urllib.error.HTTPError) as refused:
        get(path, **headers)
      assert refused.value.code == code
    with pytest.raises(ConfigError, match="cannot be used"):
      live.LiveServer(tmp_path, server.server_port, 5, with_texts=False)
  finally:
    server.shutdown()
    server.server_close()


def test_the_live_view_answers_so_many_at_once(tmp_path, monkeypatch):
  """Connections that send nothing take a thread each, up to a bound, and are closed after a while."""
  monkeypatch.setattr(live._Handler, "timeout", 0.2)
  monkeypatch.setattr(live, "MOST_REQUESTS", 4)
  server = live.LiveServer(tmp_path, 0, 5, with_texts=False)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  before = threading.active_count()
  try:
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(live.MOST_REQUESTS + 4)]
    time.sleep(0.2)
    assert threading.active_count() - before <= live.MOST_REQUESTS
    url = f"http://127.0.0.1:{server.server_port}/version"
    assert urllib.request.urlopen(url, timeout=20).read()
    for connection in silent:
      connection.close()
  finally:
    server.shutdown()
    server.server_close()


@pytest.mark.browser
@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="chromium is not installed")
def test_page_in_a_real_browser(run_dir, tmp_path):
  """The script runs: one panel is shown, the tabs are marked, and the page takes a picture of some size."""
  page = tmp_path / "report.html"
  page.write_text(render(summarize(attribution.load(run_dir), 4)), "utf-8")
  browser = shutil.which("chromium") or shutil.which("google-chrome")
  flags = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--user-data-dir={tmp_path / 'profile'}",
  ]
  dom = subprocess.run(
    [browser, *flags, "--dump-dom", page.as_uri() + "#show-set-1"], capture_output=True, timeout=120, text=True
  )
  assert re.search(r'id="set-0"[^>]* hidden', dom.stdout) and not re.search(r'id="set-1"[^>]* hidden', dom.stdout)
  assert re.search(r'id="tab-1"[^>]*aria-selected="true"', dom.stdout)
  picture = tmp_path / "report.png"
  subprocess.run(
    [browser, *flags, f"--screenshot={picture}", "--window-size=1280,2400", page.as_uri()],
    capture_output=True,
    timeout=120,
    check=True,
  )
  assert picture.stat().st_size > 60_000
