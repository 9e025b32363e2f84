"""Numbers of the report by hand, its sentences where the corpus is damaged, and its page on a phone."""

import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from attribution_runs import MODULES, make_run
from test_report import write_log

from maxghost import attribution, config, report, scores
from maxghost.attribution import live, report_text, summary
from maxghost.attribution.html import render
from maxghost.attribution.html.charts import Line, line_chart, ticks
from maxghost.attribution.summary import Ledger, summarize
from maxghost.attribution.texts import Source
from maxghost.scorelog import Writer


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "page"
  return make_run(folder, "dataset_type=synthetic", "ghost_val_sets=words", val_sets=("words", "b"), steps=30)


def test_a_corpus_that_cannot_be_read_any_more_is_said(tmp_path, capsys):
  file = tmp_path / "a.jsonl"
  lines = [json.dumps({"text": f"text number {n} " * 9}) + "\n" for n in range(40)]
  file.write_text("".join(lines))
  (tmp_path / "v.txt").write_text("held out " * 99)
  keys = ("dataset_type=text", f"dataset_files=a={file}", f"ghost_val_sets=v={tmp_path}/v.txt")
  run_dir = make_run(tmp_path / "run", *keys, steps=6)
  file.write_text("".join([lines[0], *("{" + line[1:].replace("}", "!") for line in lines[1:])]))
  assert report.main([str(run_dir)]) == 0
  assert scores.main([str(run_dir), "--by", "document", "--text"]) == 0
  said = capsys.readouterr()
  assert "has changed since the run" in " ".join(said.out.split()) and "are no longer in the source" in said.err


def test_the_loss_of_a_document_is_the_mean_over_its_tokens(tmp_path):
  writer = Writer(tmp_path)
  for tokens, losses in (((30, 1, 0), (2.0, 6.0, 0.0)), ((10, 0, 0), (4.0, 0.0, 0.0))):
    rows = {"tokens": tokens, "loss": losses, "dot": [0.1] * 3, "contribution": [0.3, 0.2, 0.1]}
    writer.append({"step": writer.position()["num_steps"]}, rows, [("a", name, 0) for name in ("x", "one", "none")])
  writer.close()
  part = summarize(attribution.load(tmp_path)).sets[0]
  found = {value.path: value.loss for value in (*part.top, *part.bottom)}
  assert (found["x"], found["one"]) == (2.5, 6.0) and np.isnan(found["none"])


@pytest.mark.parametrize("documents", [0, 1])
def test_nothing_is_said_of_documents_that_are_not_asked_for(run_dir, tmp_path, capsys, documents):
  page = tmp_path / "page.html"
  assert report.main([str(run_dir), "--documents", str(documents), "--no-texts", "--output", str(page)]) == 0
  said = " ".join(capsys.readouterr().out.split())
  for text in ("Documents that helped most", "Documents that hurt", "interval"):
    assert (text in said) == bool(documents), text
  assert ("Documents that h" in page.read_text()) == bool(documents)


def test_a_narrow_terminal_loses_no_column(run_dir, monkeypatch, capsys, tmp_path):
  """At 40 columns the table of domains had no name of a domain left, and `scores` no path."""
  monkeypatch.setenv("COLUMNS", "40")
  assert report.main([str(run_dir), "--output", str(tmp_path / "page.html")]) == 0
  table = capsys.readouterr().out.split("Domains, for the ")[1].split("Of average")[0]
  assert "Domain  " in table and "Training" in table and "…" not in table


def test_a_log_counts_the_steps_that_were_taken(tmp_path):
  """Not the measurement behind the last one, by which two steps were `steps 0 to 2`."""
  steps = [({"val_loss": 2.0}, [("a", "x", 0, 0, 9, 1.0)])] * 2
  assert "2 rows of steps 0 to 1, against manual;" in repr(attribution.load(write_log(tmp_path, steps, closing=1.0)))
  untold = [({}, rows) for _, rows in steps]
  assert "steps 0 to 1," in repr(attribution.load(write_log(tmp_path / "untold", untold)))


def test_a_curve_of_contributions_ends_at_the_last_step_that_was_taken(run_dir):
  """The measurement behind the last step is none: the contributions of step 29 were drawn at "step 30"."""
  page = html.unescape(render(summarize(attribution.load(run_dir))))
  for chart in ("Cumulative contribution of each domain", "Value of a domain over time"):
    assert re.findall(r"step (\d+)", page.split(f"<h3>{chart}")[1].split("</svg>")[0])[-1] == "29", chart


def test_facts_of_the_run_have_the_separator_of_other_numbers(tmp_path):
  run_dir = make_run(tmp_path / "run", "dataset_type=synthetic", "ghost_val_sets=words", val_sets=("words",), steps=4)
  (run_dir / "run_facts.json").write_text('{"parameters": "3,280,640", "versions": "a 0.2.0, b 1"}')
  facts = summarize(attribution.load(run_dir)).facts
  assert (facts["parameters"], facts["versions"]) == ("3\u202f280\u202f640", "a 0.2.0, b 1")


def test_the_layers_of_the_heat_map_add_up_to_the_domains(run_dir):
  for part in summarize(attribution.load(run_dir)).sets:
    assert part.heat_map.rows == (*(f"layer {i}" for i in range(4)), MODULES[0], MODULES[-1])
    found = dict(zip(part.heat_map.domains, part.heat_map.value_RD.sum(0), strict=True))
    assert found == pytest.approx({value.domain: value.per_million for value in part.domains}, rel=1e-5)
    for value in (*part.domains, *part.helped):
      relative = value.half_width / abs(value.contribution)
      assert value.per_million_half_width == pytest.approx(relative * abs(value.per_million))


@pytest.mark.filterwarnings("error")
def test_a_heat_map_without_a_finite_value_is_shown_as_such(tmp_path):
  """As after a diverged step, whose modules are no numbers; NumPy warned on the terminal."""
  writer = Writer(tmp_path, ("v",))
  rows = {"tokens": [9], "loss": [1.0], "dot": [[0.1]], "contribution": [[0.1]]}
  modules = {"names": ["head"], "domains": ["d"], "contribution": np.full((1, 1, 1, 1), np.nan)}
  writer.append({"step": 0}, rows, [("d", "p", 0)], modules=modules)
  writer.close()
  page = render(summarize(attribution.load(tmp_path)))
  assert re.search(r"Which layers learned.*<td>–</td></tr>", page, re.DOTALL)


def test_of_the_steps_with_one_validation_gradient_the_first_has_the_measured_drop(tmp_path):
  """ghost_val_every=2: the loss is known before every second step alone."""
  losses = ((5.0, np.nan), (np.nan, np.nan), (3.5, 4.0), (np.nan, np.nan))
  records = [{"val_loss": loss, "prev_val_loss": last, "predicted_examples": 0.25} for loss, last in losses]
  steps = [(record, [("a", "x", 0, 0, 9, 0.25)]) for record in records]
  ledger = summarize(attribution.load(write_log(tmp_path, steps, closing=[3.0]))).sets[0].ledger
  assert ledger.actual_S.tolist() == [1.0, 0.0, 0.5, 0.0] and ledger.predicted == 1.0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rows_that_do_not_add_up_to_the_steps_are_noticed_at_any_scale(tmp_path, scale):
  for off, messages in ((0.05, 1), (0.001, 0)):
    steps = [({"predicted_examples": sign * scale}, [("a", "x", 0, 0, 9, sign * scale)]) for sign in (1, -1)]
    steps.append(({"predicted_examples": scale}, [("a", "x", 0, 0, 9, (1 + 3 * off) * scale)]))
    said = summarize(attribution.load(write_log(tmp_path / f"{off}", steps))).messages
    assert sum("rows are missing or doubled" in message for message in said) == messages


def test_a_bin_of_several_steps_has_the_average_of_them_all(tmp_path, monkeypatch):
  """As in runs of more than 240 steps."""
  monkeypatch.setattr(summary, "CURVE_BINS", 1)
  steps = [({}, [("a", "x", 0, 0, 40, 8.0)]), ({}, [("a", "x", 0, 0, 30, 0.3), ("b", "y", 0, 0, 10, 0.3)])]
  found = summarize(attribution.load(write_log(tmp_path, steps)))
  relative = {value.domain: value.relative for value in found.sets[0].domains}
  assert relative == pytest.approx({"a": 8.3 / (1.75 * 8.6 / 2), "b": 0.3 / (0.25 * 8.6 / 2)})
  assert found.passes.expected_EK[:, 0].tolist() == pytest.approx([8.6, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_are_shown_from_the_second_on(tmp_path, passes):
  steps = [({}, [("a", "x", 0, 0, 9, 0.25)])] * passes
  found = summarize(attribution.load(write_log(tmp_path, steps, epochs=[[step] for step in range(passes)])))
  assert found.passes.rows[1:].any() == (passes == 2)


def test_texts_that_were_scored_more_than_once(tmp_path):
  """Each text is in the corpus twice, once with a space behind it; not all of the 60 documents were scored."""
  file = tmp_path / "a.jsonl"
  texts = [f"text number {n // 2} " * (9 + n // 2) + " " * (n % 2) for n in range(60)]
  file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  (tmp_path / "v.txt").write_text("held out " * 99)
  keys = ("dataset_type=text", f"dataset_files=a={file}", f"ghost_val_sets=v={tmp_path}/v.txt")
  log = attribution.load(make_run(tmp_path / "run", *keys, val_sets=("v", "w"), steps=12))
  source = Source(log.run_dir)
  found = summarize(log, source=source).duplicates
  ids = list(zip(log["domain"].tolist(), log["path"].tolist(), log["offset"].tolist(), strict=True))
  tokens, copies = {}, {}
  for key, count in zip(ids, log["tokens"].tolist(), strict=True):
    tokens[key] = tokens.get(key, 0) + count
  for key, text in source.find(tokens).items():
    copies.setdefault(text.strip(), set()).add(key)
  pairs = sorted((pair for pair in copies.values() if len(pair) == 2), key=lambda pair: -sum(map(tokens.get, pair)))
  members = set.union(*pairs)
  assert 10 < len(pairs) < len(copies) and found.num_compared == len(tokens) < 60
  assert (found.num_texts, found.num_documents) == (len(pairs), 2 * len(pairs))
  assert found.tokens == sum(tokens[key] for key in members)
  assert found.extra_tokens == sum(min(map(tokens.get, pair)) for pair in pairs)
  np.testing.assert_allclose(found.contribution_K, log["contribution"][[key in members for key in ids]].sum(0), 1e-5)
  assert [sum(map(tokens.get, pair)) for pair in found.examples] == [sum(map(tokens.get, pair)) for pair in pairs[:10]]
  assert all(set(pair) in pairs for pair in found.examples)


def test_a_report_of_a_single_document(tmp_path, capsys):
  """It has no document with a smallest total, and nothing is in the plural."""
  writer = Writer(tmp_path / "one")
  writer.restore(None)
  writer.append({"step": 0}, {"tokens": [47], "loss": [6.0], "dot": [0.1], "contribution": [0.5]}, [("a", "b", 0)])
  writer.close()
  assert report.main([str(tmp_path / "one")]) == 0
  for said in (capsys.readouterr().out, (tmp_path / "one" / "report.html").read_text("utf-8")):
    assert "Documents with the largest totals" in said and "Documents with the smallest totals" not in said
    assert re.search(r"\b1 document\b", said) and not re.search(r"\b1 (step|document)s", said)


@pytest.mark.browser
@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="chromium is not installed")
@pytest.mark.parametrize("long_names", [False, True])
def test_the_page_on_a_phone(run_dir, tmp_path, long_names):
  """At a width of 390, nothing reaches over the edge: wide tables, the ledger among them, scroll by themselves."""
  if long_names:
    run_dir = named_run(tmp_path / "long", ("n" * 200, "long name " * 20), ("s" * 80, "t"))
  looks = """const d = e.target.contentDocument, wide = [...d.querySelectorAll("*")].filter(x => !x.closest(".scroll")
    && x.getBoundingClientRect().width && x.getBoundingClientRect().right > 391);
    document.title = d.documentElement.scrollWidth + " " + d.querySelectorAll(".scroll table").length + " " +
    wide.map(x => x.outerHTML.slice(0, 60))"""
  page = html.escape(render(summarize(attribution.load(run_dir), 4, Source(run_dir))))
  frame = f'<iframe id="f" width="390" height="900" srcdoc="{page}"></iframe>'
  (tmp_path / "phone.html").write_text(
    f'{frame}<script>document.getElementById("f").onload = e => {{{looks}}}</script>', "utf-8"
  )
  browser = shutil.which("chromium") or shutil.which("google-chrome")
  flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"]
  command = [browser, *flags, "--virtual-time-budget=3000", "--dump-dom", (tmp_path / "phone.html").as_uri()]
  dom = subprocess.run(command, capture_output=True, timeout=120, text=True).stdout
  width, tables, over = re.search(r"<title>(\d+) (\d+) (.*?)</title>", dom, re.S).groups()
  assert int(width) <= 390 and int(tables) > 4 and over == ""


def named_run(folder, domains, val_sets=("manual",)):
  """Two steps over documents of these domains, in which the measured drop is known."""
  writer, num = Writer(folder, val_sets), len(domains)
  values = np.linspace(1, 2, num * len(val_sets)).reshape(num, -1)
  for step in range(2):
    rows = {"tokens": [9] * num, "loss": [1.0] * num, "dot": values, "contribution": values}
    losses = {"val_loss": 3.0 - step, "prev_val_loss": 3.0 - step, "predicted_examples": values.sum(0)}
    writer.append({"step": step} | losses, rows, [(name, f"{name}/file.txt", 7) for name in domains])
  writer.close()
  return folder


def test_names_written_from_the_right_keep_their_numbers(tmp_path):
  """Each name is isolated or followed by a mark, so that numbers behind it do not move before it."""
  name, other = "\u05e2\u05d1\u05e8\u05d9\u05ea", "\u0627\u0644\u0639"
  page = render(summarize(attribution.load(named_run(tmp_path / "run", (name, other)))))
  assert re.search(f"tokens: {other}\u200e [^ ]+, {name}\u200e [^ ]+\\.</p>", page)
  assert f"<bdi>{name}</bdi> · <bdi>{name}/file.txt</bdi> @ 7</span>" in page


def test_a_single_domain_beyond_those_with_a_colour_keeps_its_name(tmp_path):
  rows = [(name, "x", 0, 0, 10, 8.0 - i) for i, name in enumerate("abcdefgh")]
  page = render(summarize(attribution.load(write_log(tmp_path, [({"predicted_examples": 36.0}, rows)] * 3))))
  assert ">h</text>" in page and "1 others" not in page


def test_the_live_view_is_renewed_for_a_log_beside_the_page(tmp_path):
  """GhostEngineManager writes its files into the folder itself."""
  write_log(tmp_path, [({}, [("a", "x", 0, 0, 5, 1.0)])])
  server = live.LiveServer(tmp_path / "ghost", 0, 5, with_texts=False)
  server.server_close()
  before = server.version()
  write_log(tmp_path, [({}, [("a", "x", 0, 0, 5, 1.0)])] * 2)
  assert server.version() != before


def test_a_curve_beyond_the_scored_steps_stays_in_its_chart():
  """Metrics are written in every step, scores once in an interval: the axis reaches as far as the longest curve."""
  lines = [Line("validation", np.arange(20), np.linspace(3, 2, 20), 8), Line("training", np.arange(45), np.ones(45), 7)]
  chart = line_chart("Loss", lines, (0, 19), "nats")
  assert all(chart["left"] <= x <= chart["right"] for line in chart["lines"] for x, _ in line["points"])
  assert [text for _, text in chart["x_ticks"]] == ["0", "10", "20", "30", "44"]


def test_ticks_of_tiny_values_are_evenly_spaced():
  assert ticks(0, 2.16e-12) == [0, 5e-13, 1e-12, 1.5e-12, 2e-12, 2.5e-12]


def test_the_axis_of_a_single_step_has_no_other():
  line = Line("only", np.array([7, 7]), np.array([0.0, 2.0]), 0)  # a sum, from its start
  chart = line_chart("Sum", [line], (7, 7), "nats", zero=True)
  ((x, text),) = chart["x_ticks"]
  assert text == "7" and chart["left"] < x < chart["right"]
  assert json.loads(chart["readout"]) == [[x, "step 7", "only 2.00"]]


def test_the_set_of_a_loop_of_ones_own_is_not_called_twice():
  names = {"validation": "The validation loss", "manual": "The manual validation loss"}
  ledger = Ledger({"predicted_examples": 1.0}, np.array([3]), np.zeros(1), None)
  for name, words in names.items():
    assert report_text.headline(SimpleNamespace(name=name, ledger=ledger)).startswith(f"{words} was predicted")


def test_a_loss_of_pairs_is_no_mean_over_tokens(tmp_path):
  """Of the run's objective, or of each set's where the configuration names it."""
  steps = [({"val_loss": [2.0, 5.0], "predicted_examples": [0.5, 1.0]}, [("a", "x", 0, 0, 10, [0.5, 1.0])])] * 2
  run_dir = write_log(tmp_path / "r", steps, ("pairs", "web"), closing=[1.5, 4.5], objective="dpo")
  (run_dir / "metrics.jsonl").write_text('{"step": 0, "learning/loss": 0.69}\n{"step": 1, "learning/loss": 0.6}\n')
  assert [part.ledger.unit for part in summarize(attribution.load(run_dir)).sets] == ["pair", "pair"]
  keys = ("objective=dpo", "dataset_type=text", "dataset_files=[pairs=p.jsonl]")
  cfg = config.load(*keys, "ghost_val_sets=[pairs,web=w/*.jsonl@next_token]")
  config.save(cfg, run_dir / "config.yml")
  told = summarize(attribution.load(run_dir))
  of_pairs, of_tokens = told.sets
  assert report_text.headline(of_pairs) == "The pairs validation loss fell 0.500 nats per pair."
  assert report_text.headline(of_tokens) == "The web validation loss fell 0.500 nats per token."
  page = render(told)
  assert "nats per pair, first and last" in page and page.count(">training<") == 1  # not beside a loss of tokens


def test_the_live_view_shows_no_error_of_files_that_a_run_replaces_while_they_are_read(tmp_path, monkeypatch):
  step = ({"val_loss": 2.0, "predicted_examples": 1.0}, [("a", "x", 0, 0, 5, 1.0)])
  write_log(tmp_path, [step] * 4)
  with live.LiveServer(tmp_path, 0, 5, with_texts=False) as server:
    before, page, versions = server.version(), server.page(), iter(("1", "2", "2", "2"))

    def removed(*_, **__):
      raise FileNotFoundError(2, "No such file or directory", "ghost/x.npz")

    monkeypatch.setattr(live, "load", removed)
    monkeypatch.setattr(server, "version", lambda: next(versions))
    assert server.page() == page and f'data-live="{before}"' in page, "it sees another version and asks again"
    assert "Waiting for scores" in server.page(), "an error that stays is shown"
