"""The scripts of `examples/` run as they are, and what they print is true. `foreign_model.py`: test_ghost_manager."""

import json
import re
import runpy
import sys
from pathlib import Path

import attribution_runs
import jax
import pytest
import tiny

from maxghost import scores

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch, *arguments) -> dict:
  monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
  with tiny.cheap_compilation(), jax.numpy_rank_promotion("allow"):  # as in a script of a user
    return runpy.run_path(str(EXAMPLES / name))


def test_own_loop_scores_wrong_labels_lower(tmp_path, monkeypatch, capsys):
  run("own_loop.py", monkeypatch, tmp_path)
  said = capsys.readouterr().out
  assert [path.name for path in sorted(tmp_path.glob("*.npz"))] == [f"dot_prod_log_iter_{n}.npz" for n in (19, 39)]
  wrong, right = map(float, re.search(r"wrong labels (\S+), right ones (\S+)", said).groups())
  assert wrong < 0 < right


def test_layer_rule_is_exact(monkeypatch, capsys):
  run("layer_rule.py", monkeypatch)
  assert float(re.search(r"per-example gradients (\S+)", capsys.readouterr().out)[1]) < 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  pytest.importorskip("pandas")
  keys = ("dataset_type=synthetic", "dataset_domain_bytes=20000")
  return attribution_runs.make_run(tmp_path_factory.mktemp("run"), *keys, steps=6)


def test_the_notebook_runs_from_top_to_bottom(folder, tmp_path, monkeypatch):
  monkeypatch.setenv("MAXGHOST_RUN", str(folder))
  cells = json.loads((EXAMPLES / "explore_scores.ipynb").read_text("utf-8"))["cells"]
  made: dict = {}
  for cell in cells:
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None
      exec("".join(cell["source"]), made)
  rows, log = made["rows"], made["log"]
  assert len(rows) == log.num_rows and rows["tokens"].sum() == log["tokens"].sum()
  assert len(made["documents"]) == 10 and made["late"].shape == (4, len(log.domains))
  assert made["correlation"].between(-1, 1).all()
  assert scores.main([str(folder), "--drop-below", "0", "--output", str(tmp_path / "exclude.jsonl")]) == 0
  dropped = [json.loads(line) for line in (tmp_path / "exclude.jsonl").read_text().splitlines()]
  key = lambda one: (one["domain"], one["path"], one["offset"])  # noqa: E731
  assert dropped and sorted(dropped, key=key) == sorted(made["hurt"].to_dict("records"), key=key)


def test_query_scores_makes_tables_of_the_log(folder, monkeypatch):
  made = run("query_scores.py", monkeypatch, folder)
  log = made["log"]
  assert made["domains"]["tokens"].sum() == log["tokens"].sum()
  assert made["table"]["contribution"].sum().sum() == pytest.approx(float(log["contribution"][:, 0].sum()), rel=1e-5)
  assert set(made["domains"].index) == set(made["table"]["tokens"].columns)
