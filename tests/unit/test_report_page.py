"""The report where its corpus is damaged, and its page on a phone."""

import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from attribution_runs import make_run

from maxghost import attribution, report, scores
from maxghost.attribution import report_text
from maxghost.attribution.html import render
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
def test_the_page_on_a_phone(run_dir, tmp_path):
  """At a width of 390, nothing reaches over the edge: wide tables, the ledger among them, scroll by themselves."""
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


def test_the_set_of_a_loop_of_ones_own_is_not_called_twice():
  names = {"validation": "The validation loss", "manual": "The manual validation loss"}
  ledger = Ledger({"predicted_examples": 1.0}, np.array([3]), np.zeros(1), None)
  for name, words in names.items():
    assert report_text.headline(SimpleNamespace(name=name, ledger=ledger)).startswith(f"{words} was predicted")
