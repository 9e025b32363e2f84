"""The Python code of README and docs runs as it stands: the blocks of a page in order, in one namespace."""

import re
from pathlib import Path

import jax
import pytest

from maxghost import scorelog
from maxghost.config import plugins
from maxghost.ghost import rules

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = {
  "aot.md",
  "checkpoints.md",
  "generation.md",
  "memory.md",
}  # need a TPU's compiler, a run or a checkpoint
REGISTRIES = (plugins.OPTIMIZERS, plugins.OBJECTIVES, rules.RULES)


@pytest.fixture(autouse=True)
def own_registries():
  """What the code of a page registers is forgotten after it."""
  before = [dict(table) for table in REGISTRIES]
  yield
  for table, entries in zip(REGISTRIES, before, strict=True):
    table.clear()
    table.update(entries)


def run_page(page: str) -> dict:
  """Runs a page with all but its Python code blanked, so that a traceback names the page and its line."""
  text = (ROOT / page).read_text("utf-8")
  lines = ["" for _ in text.splitlines()]
  blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M))
  assert blocks, f"{page} has no Python code to run"
  for block in blocks:
    first = text[: block.start(1)].count("\n")
    lines[first : first + block[1].count("\n")] = block[1].splitlines()
  namespace: dict = {"__name__": "page"}
  with jax.numpy_rank_promotion("allow"):  # as in a script of a user
    exec(compile("\n".join(lines), page, "exec"), namespace)
  return namespace


def test_pages_with_code_are_run():
  """A page that gains Python code gets its test here."""
  pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
  found = {page.name for page in pages if "```python" in page.read_text("utf-8")}
  assert found == {"extending.md", "engine.md", "attribution.md"} | NOT_RUN


def test_code_of_the_plug_ins_runs():
  run_page("docs/extending.md")
  assert "momentum" in plugins.OPTIMIZERS and "pair_mean" in plugins.OBJECTIVES


def test_code_of_the_engine_runs_and_writes_a_log(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  page = run_page("docs/engine.md")
  assert page["result"].dot.shape == (8,) and sorted(page["result"].per_param)[0] == "layers/0/bias"
  log = scorelog.load("runs/own")
  assert log["step"].tolist() == [step for step in range(4) for _ in range(8)]


def test_code_of_the_score_log_runs(tmp_path, monkeypatch):
  """It reads runs/base, which stands for any run, and writes a log of its own."""
  monkeypatch.chdir(tmp_path)
  writer = scorelog.Writer("runs/base")
  writer.restore(None)
  for step in range(98, 103):
    rows = {"tokens": [31, 7], "loss": [2.5, 3.1], "dot": [0.02, -0.01], "contribution": [0.25 * step, -1.0]}
    writer.append({"step": step, "val_loss": 2.0}, rows, [("code", "a.py", 0), ("code", "b.py", 0)])
  writer.close()
  page = run_page("docs/attribution.md")
  assert page["answer"].columns["contribution"].tolist() == [0.25 * (100 + 101 + 102), -3.0]
  assert scorelog.load("runs/own")["tokens"].tolist() == [31, 7]
