"""Queries against sums made by hand in NumPy, their formats and mistakes, compaction. K = 2 validation sets."""

import csv
import io
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest
from attribution_runs import make_run

from maxghost import attribution, report, scores
from maxghost.attribution import aggregate, output, query
from maxghost.attribution.query import Query, ask
from maxghost.attribution.summary import summarize
from maxghost.attribution.where import Where
from maxghost.config import ConfigError
from maxghost.scorelog import Writer
from maxghost.scorelog import format as fmt
from maxghost.scorelog.compact import compact
from maxghost.scorelog.shard import write_shard

SYNTHETIC = ("dataset_type=synthetic", "ghost_val_sets=words")
SETS = ("words", "exams")
COLUMNS = ("step", "domain", "path", "offset", "chunk", "epoch", "tokens", "loss", "dot", "contribution")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("runs") / "base", *SYNTHETIC, val_sets=SETS, steps=47, rows_per_step=11)


@pytest.fixture(scope="module")
def table(run_dir):
  """All rows as plain columns."""
  log = attribution.load(run_dir)
  return {name: log[name] for name in COLUMNS}


def by_hand(table, keys, keep=slice(None), k=0):
  """{key: (chunks, tokens, contribution)} in plain Python."""
  sums = {}
  for i in np.arange(len(table["step"]))[keep]:
    key = tuple(table[name][i].item() for name in keys)
    chunks, tokens, contribution = sums.get(key, (0, 0, 0.0))
    sums[key] = (chunks + 1, tokens + int(table["tokens"][i]), contribution + float(table["contribution"][i, k]))
  return sums


@pytest.mark.parametrize("by", ["domain", "source", "document", "step"])
@pytest.mark.parametrize(
  ("where", "keep"),
  [
    ("", lambda t: np.ones(len(t["step"]), bool)),
    ("domain~*s,step>=20", lambda t: (t["domain"] != "noise") & (t["step"] >= 20)),
    ("path!~*/b*,tokens<100", lambda t: (np.char.find(t["path"], "/b") < 0) & (t["tokens"] < 100)),
    ("contribution>0 , domain!=noise", lambda t: (t["contribution"][:, 1] > 0) & (t["domain"] != "noise")),
  ],
)
def test_sums_by_hand(run_dir, table, by, where, keep):
  answer = ask(attribution.load(run_dir), Query(by=by, where=where, val_set="exams"))
  keys = aggregate.GROUPINGS[by]
  expected = by_hand(table, keys, keep(table), 1)
  assert answer.num_groups == len(expected) and len(expected) > 2
  found = zip(*(answer.columns[n] for n in (*keys, "chunks", "tokens", "contribution")), strict=True)
  for *key, chunks, tokens, contribution in found:
    assert expected.pop(tuple(key)) == (chunks, tokens, pytest.approx(contribution, rel=1e-6, abs=1e-12))
  values = answer.columns["contribution"]
  assert (np.diff(values) <= 0).all()
  np.testing.assert_allclose(answer.columns["per_million_tokens"], values / answer.columns["tokens"] * 1e6)
  np.testing.assert_allclose(answer.columns["per_chunk"], values / answer.columns["chunks"])


def test_merging_of_partial_sums(run_dir, table, monkeypatch):
  monkeypatch.setattr(aggregate, "MERGE_ROWS", 7)
  monkeypatch.setattr(fmt, "BLOCK_ROWS", 5)
  log = attribution.load(run_dir)
  sums = aggregate.GroupSums(log, "document")
  for shard in log.shards:
    for rows in shard.blocks(5):
      sums.add(shard, rows)
  groups = sums.result()
  expected = by_hand(table, ("domain", "path", "offset"))
  keys = list(
    zip(groups.keys["domain"].tolist(), groups.keys["path"].tolist(), groups.keys["offset"].tolist(), strict=True)
  )
  assert keys == sorted(expected)
  np.testing.assert_allclose(groups.contribution_GK[:, 0], [expected[key][2] for key in keys], rtol=1e-6, atol=1e-12)


def test_sums_over_many_files_take_linear_time(run_dir):
  """A run with short intervals has one part per file, and far fewer groups than would be merged early."""
  log = attribution.load(run_dir)
  sums, shard, rows, seconds = aggregate.GroupSums(log, "domain"), log.shards[0], log.shards[0].rows()[:1], []
  for _ in range(6):
    begin = time.process_time()
    for _ in range(1500):
      sums.add(shard, rows)
    seconds.append(time.process_time() - begin)
  assert min(seconds[-2:]) < 3 * seconds[0]  # a sum over all parts for each: 4.5 times
  assert sums.result().exposures.tolist() == [9000]


def test_negative_and_huge_offsets_are_kept_apart(tmp_path):
  """Offsets that do not fit beside the path in one sort key."""
  writer = Writer(tmp_path)
  offsets = [2**62, -5, 0, 2**62, 2**62 + 1]
  rows = {"tokens": [1] * 5, "loss": [1.0] * 5, "dot": [1.0] * 5, "contribution": [1.0, 2.0, 4.0, 8.0, 16.0]}
  writer.append({"step": 0}, rows, [("a", "p" + str(i % 2), offset) for i, offset in enumerate(offsets)])
  writer.close()
  answer = ask(attribution.load(tmp_path), Query(by="document", sort="offset"))
  assert answer.columns["offset"].tolist() == [-5, 0, 2**62, 2**62, 2**62 + 1]
  assert sorted(answer.columns["contribution"].tolist()) == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_layers_add_up_to_domains(run_dir):
  log = attribution.load(run_dir)
  for where in ("", "domain=digits", "step<13,domain!=noise"):
    domains = ask(log, Query(by="domain", where=where))
    for by in ("layer", "module"):
      answer = ask(log, Query(by=by, where=where))
      assert answer.columns["contribution"].sum() == pytest.approx(domains.columns["contribution"].sum(), rel=1e-4)
      assert (answer.columns["tokens"] == domains.columns["tokens"].sum()).all()
  assert sorted(ask(log, Query(by="layer")).columns["layer"].tolist()) == [
    "layer 0",
    "layer 1",
    "layer 2",
    "layer 3",
    "logits_dense",
    "token_embedder",
  ]


def test_intervals_of_layers_do_not_depend_on_the_number_of_processes(tmp_path):
  """Each process logs its part of a step; blocks are of steps, whose parts are added up before."""
  part_SPML = np.random.default_rng(0).normal(0, 1, (9, 2, 2, 3, 1)).astype(np.float32)
  names = {"names": ("wq", "wo"), "domains": ("a",)}
  for run, logged_SPML in (("one", part_SPML.sum(1, keepdims=True)), ("two", part_SPML)):
    num = logged_SPML.shape[1]
    writers = [Writer(tmp_path / run, process=(process, num), period=4) for process in range(num)]
    for step, process in itertools.product(range(9), range(num)):
      modules = names | {"contribution": logged_SPML[step, process]}
      rows = {"tokens": [4 // num], "loss": [1.0], "dot": [1.0], "contribution": [1.0]}
      writers[process].append({"step": step, "tokens": 4}, rows, [("a", "x", 0)], modules=modules)
    for writer in writers:
      writer.close()
  for by, where in itertools.product(("layer", "module"), ("", "step>2")):
    one, two = (ask(attribution.load(tmp_path / run), Query(by=by, where=where)).columns for run in ("one", "two"))
    for name in ("contribution", "half_width", "tokens"):
      np.testing.assert_allclose(two[name], one[name], rtol=1e-5)


def test_layers_of_cycles_are_numbered_through_the_model(tmp_path):
  """A stack of two cycles of two unlike layers has four layers; ghost_detail=module logs the sums over the stack."""
  stacked = ["decoder/layers/layers_0/wq", "decoder/layers/layers_0/wo", "decoder/layers/layers_1/wq"]
  value_MLDK = np.array([[1, 2], [4, 8], [16, 32], [64, np.nan]], np.float32)[:, :, None, None]
  for run, logged in (("layer", value_MLDK), ("module", np.nansum(value_MLDK, 1, keepdims=True))):
    writer = Writer(tmp_path / run)
    rows = {"tokens": [4], "loss": [1.0], "dot": [1.0], "contribution": [127.0]}
    modules = {"names": (*stacked, "decoder/norm"), "domains": ("a",), "contribution": logged}
    writer.append({"step": 0, "tokens": 4}, rows, [("a", "x", 0)], modules=modules)
    writer.close()
  of_layers, of_modules = (
    ask(attribution.load(tmp_path / run), Query(by="layer")).columns for run in ("layer", "module")
  )
  found = dict(zip(of_layers["layer"].tolist(), of_layers["contribution"].tolist(), strict=True))
  assert found == {"layer 0": 5.0, "layer 1": 16.0, "layer 2": 10.0, "layer 3": 32.0, "decoder/norm": 64.0}
  assert sorted(of_modules["contribution"].tolist()) == [3.0, 12.0, 48.0, 64.0]


def test_scales(run_dir, table):
  log = attribution.load(run_dir)
  rate = log.steps["learning_rate"][table["step"]]
  per_lr = dict(zip(*(ask(log, Query(scale="per_lr")).columns[n] for n in ("domain", "contribution")), strict=True))
  share = dict(zip(*(ask(log, Query(scale="share")).columns[n] for n in ("domain", "contribution")), strict=True))
  value = table["contribution"][:, 0].astype(float)
  absolute = np.bincount(table["step"], np.abs(value))[table["step"]]
  for domain in per_lr:
    at = table["domain"] == domain
    assert per_lr[domain] == pytest.approx((value / rate)[at].sum(), rel=1e-5)
    assert share[domain] == pytest.approx((value / absolute)[at].sum(), rel=1e-5)


def test_steps_without_a_learning_rate_have_no_value_per_rate(tmp_path, capsys):
  """A loop of one's own logged it for the first step only; the second one's documents are worth more than nothing."""
  writer = Writer(tmp_path)
  for step, more in enumerate(({"learning_rate": 0.1}, {})):
    rows = {name: [1.0, 0.5] for name in ("tokens", "loss", "dot", "contribution")}
    writer.append({"step": step} | more, rows, [("known" if step == 0 else "unknown", "p", 0), ("both", "p", 0)])
  writer.close()
  for where in ("", "step=1"):
    assert scores.main([str(tmp_path), "--scale", "per_lr", "--where", where]) == 2
    assert "of some steps no learning rate was logged; leave them out" in capsys.readouterr().err
  assert scores.main([str(tmp_path), "--scale", "per_lr", "--where", "step<1", "--format", "json"]) == 0
  assert [row["contribution"] for row in json.loads(capsys.readouterr().out)["rows"]] == pytest.approx([10, 5])


def test_ids_are_chosen_by_a_measure_and_summed_in_its_unit(run_dir, tmp_path, capsys):
  """A place in a file is no measure; the worth of what is dropped has the unit of the scale."""
  ids = ["--drop-below", "0", "--output", str(tmp_path / "ids.jsonl")]
  for more in (ids, ["--keep", "5%", "--format", "ids"]):
    assert scores.main([str(run_dir), *more, "--sort", "offset"]) == 2
    assert "--sort offset is no number to choose by" in capsys.readouterr().err
  assert not (tmp_path / "ids.jsonl").exists()
  assert scores.main([str(run_dir), "--drop-below", "-1e-5", "--output", str(tmp_path / "few.jsonl")]) == 0
  assert "few.jsonl: " in capsys.readouterr().out
  for scale, unit in (("nats", "nats"), ("per_lr", "nats per unit of learning rate")):
    assert scores.main([str(run_dir), *ids, "--scale", scale]) == 0
    assert f" {unit}; to train without them" in capsys.readouterr().out


def test_intervals_by_hand(tmp_path):
  """Of domains from 20 blocks of steps, two each; of documents from their chunks; a step alone has none."""
  keys = {"val_sets": SETS, "steps": 40, "rows_per_step": 11, "closing": False}
  log = attribution.load(make_run(tmp_path, *SYNTHETIC, **keys))
  value, domain = log["contribution"][:, 1].astype(float), log["domain"]
  for where, first, size in (("", 0, 2), ("step>=20", 20, 1)):
    found = ask(log, Query(where=where, val_set="exams")).columns
    for name, half_width in zip(found["domain"], found["half_width"], strict=True):
      of_steps = np.bincount(log["step"][domain == name], value[domain == name], 40)
      difference = np.diff(of_steps[first:].reshape(20, size).sum(1))
      assert half_width == pytest.approx(2.0930 * np.sqrt(20 * np.mean(difference**2) / 2), rel=1e-3)
    per_million = found["half_width"] / found["tokens"] * 1e6
    np.testing.assert_allclose(found["per_million_half_width"], per_million, rtol=1e-9)
  found = ask(log, Query(by="document", val_set="exams")).columns
  three = next(i for i, chunks in enumerate(found["chunks"]) if chunks == 3)
  own = value[(log["path"] == found["path"][three]) & (log["offset"] == found["offset"][three])]
  assert len(own) == 3 and found["half_width"][three] == pytest.approx(4.3027 * np.sqrt(3) * own.std(ddof=1), rel=1e-4)
  assert np.isnan(ask(log, Query(by="step")).columns["half_width"]).all()


def test_intervals_count_scored_steps_only(tmp_path):
  """With ghost_every=2 every second step only measures what the one before it did; the report says the same."""
  log = attribution.load(make_run(tmp_path / "all", *SYNTHETIC, steps=8, rows_per_step=30, closing=False))
  for every in (1, 2):
    writer = Writer(tmp_path / f"every{every}", log.val_sets)
    writer.restore(None)
    for number, record in enumerate(log.steps):
      at = log["step"] == record["step"]
      rows = {name: log[name][at] for name in ("tokens", "loss", "dot", "contribution", "share")}
      documents = list(zip(log["domain"][at], log["path"][at], log["offset"][at].tolist(), strict=True))
      about = {name: record[name] for name in ("learning_rate", "loss", "val_loss", "predicted_examples")}
      writer.append({"step": every * number, **about}, rows, documents)
      if every == 2 or number == 7:
        writer.append({"step": every * number + 1, "prev_val_loss": record["val_loss"] - 0.1}, {}, [])
    writer.close()
    found, whole = (
      ask(attribution.load(path), Query()).columns for path in (tmp_path / f"every{every}", tmp_path / "all")
    )
    np.testing.assert_allclose(found["half_width"], whole["half_width"], rtol=1e-9)
    (part,) = summarize(attribution.load(tmp_path / f"every{every}")).sets
    known = dict(zip(whole["domain"], whole["half_width"], strict=True))
    for value in part.domains:
      assert value.half_width == pytest.approx(known[value.domain], rel=1e-9)


def test_unknown_values_are_neither_best_nor_worst(run_dir):
  """A document with one chunk has no interval: it stands behind all that have one, from either end."""
  log = attribution.load(run_dir)
  half_width = ask(log, Query(by="document")).columns["half_width"]
  known = np.sort(half_width[np.isfinite(half_width)])
  assert 3 < len(known) < len(half_width)
  some = ask(log, Query(by="document", top=2, bottom=3, sort="half_width")).columns["half_width"]
  np.testing.assert_array_equal(some, [*known[::-1][:2], *known[:3]])
  both = ask(log, Query(by="document", top=1, bottom=10**6, sort="half_width"))
  assert len(both) == both.num_groups
  np.testing.assert_array_equal(both.columns["half_width"][1 : len(known)], known[:-1])
  assert np.isnan(both.columns["half_width"][len(known) :]).all()


def test_only_documents_with_a_known_value_are_kept(run_dir, capsys):
  half_width = ask(attribution.load(run_dir), Query(by="document")).columns["half_width"]
  known = np.sort(half_width[np.isfinite(half_width)])
  assert scores.main([str(run_dir), "--keep", "100%", "--format", "ids", "--sort", "half_width"]) == 0
  assert len(capsys.readouterr().out.splitlines()) == len(known) < len(half_width)
  assert scores.main([str(run_dir), "--keep", "9%", "--format", "ids", "--by", "id", "--sort", "id"]) == 2
  assert scores.main([str(run_dir), "--keep", "9%", "--format", "ids", "--sort", "path"]) == 2
  assert "--sort path is no number to choose by" in capsys.readouterr().err


def test_best_and_worst(run_dir):
  log = attribution.load(run_dir)
  whole = ask(log, Query(by="document")).columns["contribution"]
  some = ask(log, Query(by="document", top=3, bottom=2))
  assert some.columns["contribution"].tolist() == [*whole[:3], *whole[:-3:-1]] and some.num_top == 3
  every = ask(log, Query(by="domain", top=3, bottom=9))
  assert len(every) == every.num_groups == len(set(every.columns["domain"]))
  by_tokens = ask(log, Query(by="domain", sort="tokens")).columns["tokens"]
  assert (np.diff(by_tokens) <= 0).all()


def test_where_reads_quotes_and_spaces(run_dir):
  where = Where(" domain = \"a, b\" ,path~'x=*', loss >= 1e-3")
  assert [(c.column, c.operator, c.value) for c in where.conditions] == [
    ("domain", "=", "a, b"),
    ("path", "~", "x=*"),
    ("loss", ">=", 1e-3),
  ]
  (bracketed,) = Where("path~notes[1]*").conditions
  assert bracketed.holds(["notes[1].txt", "notes1.txt"]).tolist() == [True, False]
  (unclosed,) = Where("path='tis.txt").conditions
  assert unclosed.value == "'tis.txt"
  with np.errstate(over="raise"):  # float32 has no such number
    assert Where("loss<1e39").holds("loss", np.ones(2, np.float32)).all()


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    (["--where", "stp>=3"], "unknown column 'stp'; did you mean 'step'?"),
    (["--where", "domain>code"], "a text takes =, !=, ~, !~"),
    (["--where", "step=ten"], "'ten' is not a whole number"),
    (["--where", "step"], "cannot read 'step'"),
    (["--by", "domian"], "--by domian: unknown; did you mean 'domain'?"),
    (["--by", "layer", "--where", "path=x"], "--where path: with --by layer only step and domain"),
    (["--set", "exms"], "did you mean 'exams'?"),
    (["--sort", "contribtion"], "did you mean 'contribution'?"),
    (["--scale", "nat"], "--scale nat: unknown; did you mean 'nats'?"),
    (["--text"], "use --by document"),
    (["--format", "parquet"], "needs --output FILE"),
    (["--format", "jsn"], "did you mean 'json'?"),
    (["--top", "-1"], "--top -1: at least 0"),
    (["--botom", "1"], "did you mean '--bottom'?"),
    (["--drop-below", "0", "--output", "x", "--by", "step"], "--by step: --drop-below writes the ids of documents"),
    (["--drop-below", "nan", "--output", "x"], "--drop-below nan: nothing is below it"),
    (["--drop-below", "0", "--output", "x", "--top", "3"], "--top has no effect with --drop-below"),
    (["--export", "parquet", "--where", "step=1"], "--where has no effect with --export; leave one of them out"),
    (["--what-if", "reward=x", "--format", "json"], "--format has no effect with --what-if"),
    (["--compact", "--by", "step"], "--by has no effect with --compact"),
    (["--export", "csv"], "argument --export: invalid choice: 'csv' (choose from "),
    (["--output", "/nowhere/x.csv", "--format", "csv"], "cannot write /nowhere/x.csv"),
    (["--output", "x.csv"], "--output x.csv: --format table is not csv; add --format csv"),
    (["--output", ""], "cannot write . ("),
    (["--output", "/"], "cannot write / ("),
  ],
)
def test_bad_input_is_one_line(run_dir, capsys, arguments, line):
  assert scores.main([str(run_dir), *arguments]) == 2
  error = capsys.readouterr().err
  assert line in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [("report", "--output", "page.html"), ("scores", "--by", "document")])
def test_a_closed_output_is_no_failure(command, run_dir, tmp_path):
  argv = [sys.executable, "-m", "maxghost", command[0], str(run_dir), *command[1:]]
  process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
  process.stdout.close()
  assert (process.stderr.read(), process.wait(60)) == (b"", 0)
  process.stderr.close()


def test_a_pipe_as_output_is_written_into_and_not_replaced(tmp_path):
  os.mkfifo(pipe := tmp_path / "pipe")
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  output.write_output(pipe, "said")
  assert (os.read(reader, 9), pipe.is_fifo()) == (b"said", True)
  os.close(reader)


def test_formats_agree(run_dir, tmp_path, capsys):
  def output(*arguments):
    assert scores.main([str(run_dir), "--by", "document", "--top", "5", *arguments]) == 0
    return capsys.readouterr().out

  rows = json.loads(output("--format", "json"))["rows"]
  assert len(rows) == 5 and rows[0]["contribution"] >= rows[4]["contribution"]
  lines = list(csv.DictReader(io.StringIO(output("--format", "csv"))))
  assert [float(line["contribution"]) for line in lines] == [row["contribution"] for row in rows]
  output("--format", "parquet", "--output", str(tmp_path / "x.parquet"))
  pq = pytest.importorskip("pyarrow.parquet")
  stored = pq.read_table(tmp_path / "x.parquet")
  assert stored["offset"].to_pylist() == [row["offset"] for row in rows]
  assert stored.schema.field("contribution").metadata == {b"unit": b"nats"}
  shown = output()
  assert rows[0]["path"] in shown and "5 of" in shown
  output("--output", str(tmp_path / "x.txt"))
  assert rows[0]["path"] in (tmp_path / "x.txt").read_text()


def test_a_narrow_table_keeps_numbers_and_paths(run_dir):
  """Columns are left out instead: of 80 characters, numbers once left one to the path and the text."""
  from rich.console import Console

  answer = ask(attribution.load(run_dir), Query(by="document", top=3))
  answer.columns["path"], answer.columns["text"] = ["folder/file-1.py", "f" * 60, "x"], ["some words " * 20, "", "end"]
  console = Console(width=80, file=io.StringIO())
  output.show(answer, console)
  lines = console.file.getvalue().splitlines()
  assert "folder/file-1.py " in lines[1] and "…" not in lines[1] and "some words some w" in lines[2]
  assert "f" * 17 in lines[3] and lines[5].strip() == "end" and max(map(len, lines)) <= 80


def test_one_exposure_has_no_interval_in_json(tmp_path, capsys):
  writer = Writer(tmp_path)
  writer.append({"step": 0}, {"tokens": [1], "loss": [1.0], "dot": [1.0], "contribution": [1.0]}, [("a", "b", 0)])
  writer.close()
  assert scores.main([str(tmp_path), "--by", "document", "--format", "json"]) == 0
  assert json.loads(capsys.readouterr().out)["rows"][0]["half_width"] is None


def test_a_document_without_tokens_has_no_value_per_token(tmp_path, capsys):
  writer = Writer(tmp_path)
  rows = {"tokens": [0, 4], "loss": [0.0, 2.0], "dot": [0.0, 1.0], "contribution": [0.0, -1.0]}
  writer.append({"step": 0}, rows, [("a", "none", 0), ("a", "four", 0)])
  writer.close()
  assert scores.main([str(tmp_path), "--by", "source", "--sort", "loss", "--format", "json"]) == 0
  four, none = json.loads(capsys.readouterr().out)["rows"]
  assert four["loss"] == 2.0 and four["per_million_tokens"] == -250_000 and none["contribution"] == 0
  assert none["path"] == "none" and none["loss"] is none["per_million_tokens"] is None


def test_texts_by_id(run_dir, tmp_path, capsys):
  for folder in (run_dir, run_dir / "ghost"):
    assert scores.main([str(folder), "--by", "document", "--top", "2", "--text", "--format", "json"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)["rows"]
    assert len(rows) == 2 and all(len(row["text"]) > 10 for row in rows) and not said.err
  (tmp_path / "ghost").symlink_to(run_dir / "ghost")
  answer = ask(attribution.load(tmp_path), Query(by="document", top=2, text=True))
  assert answer.columns["text"] == [None, None]
  assert answer.notes == ["config.yml is missing, so the texts of the documents cannot be shown"]


def test_nothing_found_is_said(run_dir, capsys):
  assert scores.main([str(run_dir), "--where", "domain=nix"]) == 0
  assert "no scored document satisfies --where domain=nix" in capsys.readouterr().err


def test_a_name_that_no_row_has_is_answered_with_the_nearest(run_dir, table, capsys):
  path = str(table["path"][0])
  for where, name in (("domain=word", "words"), (f"path={path}x", path)):
    assert scores.main([str(run_dir), "--where", where]) == 0
    assert f"satisfies --where {where}; did you mean '{name}'" in capsys.readouterr().err
  assert scores.main([str(run_dir), "--by", "layer", "--where", "domain=word"]) == 0
  assert "satisfies --where domain=word; did you mean 'words'" in capsys.readouterr().err


@pytest.mark.parametrize("by", query.BY)
def test_sort_takes_the_heads_of_the_table(run_dir, capsys, by):
  assert scores.main([str(run_dir), "--by", by, "--top", "3"]) == 0
  heads = capsys.readouterr().out.splitlines()[0].split()
  assert "contribution" in heads and "per_million_tokens" in heads
  for head in heads:
    assert scores.main([str(run_dir), "--by", by, "--top", "3", "--sort", head]) == 0


def test_compaction_changes_no_answer(run_dir, table, tmp_path, capsys):
  copy = make_run(tmp_path / "copy", *SYNTHETIC, val_sets=SETS, steps=47, rows_per_step=11)
  before = attribution.load(copy)
  steps, modules = before.steps, np.concatenate([m.contribution_SMLDK for m in before.modules()])
  lines = compact(copy, rows_per_file=300)
  assert len(lines) == 1 and len(list((copy / "ghost").glob("*.npz"))) == 2
  log = attribution.load(copy)
  for name in COLUMNS:
    np.testing.assert_array_equal(log[name], table[name], err_msg=name)
  assert log.steps.tobytes() == steps.tobytes()
  np.testing.assert_array_equal(np.concatenate([m.contribution_SMLDK for m in log.modules()]), modules)
  assert log.said_of("fingerprint") == before.said_of("fingerprint")
  asked = Query(by="document", where="domain=words,step>=20")
  for name, values in ask(attribution.load(run_dir), asked).columns.items():
    np.testing.assert_array_equal(values, ask(log, asked).columns[name])
  assert len(compact(copy)) == 1 and len(list((copy / "ghost").glob("*.npz"))) == 1
  assert compact(copy) == ["nothing to compact"]


@pytest.mark.parametrize("last_step", [9, 19, 33, 46])
def test_a_run_continues_over_compacted_scores(table, tmp_path, last_step):
  copy = make_run(tmp_path / "copy", *SYNTHETIC, val_sets=SETS, steps=47, rows_per_step=11)
  compact(copy)
  for _ in range(2):
    writer = Writer(copy, SETS, period=20)
    writer.restore({"step": last_step, "num_steps": last_step + 1, "num_rows": 11 * (last_step + 1)})
  assert attribution.load(copy).steps["step"].tolist() == list(range(last_step + 1))
  kept = table["step"] <= last_step
  np.testing.assert_array_equal(attribution.load(copy)["dot"], table["dot"][kept])
  for step in range(last_step + 1, 47):
    at = table["step"] == step
    rows = {name: table[name][at] for name in ("tokens", "loss", "dot", "contribution", "chunk", "epoch")}
    documents = list(zip(table["domain"][at], table["path"][at], table["offset"][at], strict=True))
    writer.append({"step": step}, rows, documents)
  writer.close()
  log = attribution.load(copy)
  for name in COLUMNS:
    np.testing.assert_array_equal(log[name], table[name], err_msg=name)
  Writer(copy, SETS).restore(None)
  assert [path.name for path in (copy / "ghost").iterdir()] == ["position.json"]  # of no rows


@pytest.mark.parametrize("entry", [-1, 4, 77])
def test_damaged_index_is_one_line(run_dir, tmp_path, entry):
  shard = attribution.load(run_dir).shards[0]
  rows = shard.rows()
  rows["domain"][3] = entry
  (tmp_path / "ghost").mkdir()
  tables = {name: shard.texts(name) for name in fmt.TEXTS}
  write_shard(tmp_path / "ghost" / shard.path.name, shard.meta, tables, shard.steps, None, [rows], len(rows))
  with pytest.raises(ConfigError, match=f"a row points to entry {entry} of 4"):
    ask(attribution.load(tmp_path), Query())


def test_the_commands_in_the_documentation_are_understood():
  text = (pathlib.Path(__file__).parents[2] / "docs" / "attribution.md").read_text("utf-8")
  commands = re.findall(r"^maxghost (scores|report) (.*?)(?:  +#.*)?$", text, re.M)
  assert len(commands) > 9
  for verb, arguments in commands:
    args = (scores if verb == "scores" else report).parse(shlex.split(arguments))
    if verb == "scores":
      fields = ("id", "lang")
      Where(args.where, fields=fields)
      query._check(Query(by=args.by, top=args.top, bottom=args.bottom, scale=args.scale, text=args.text), fields)


def test_query_names_match_the_columns(run_dir):
  answer = ask(attribution.load(run_dir), Query())
  assert set(query.MEASURES) == set(answer.units) == set(answer.columns) - {"domain"}


def test_frames_and_texts_of_logs_and_answers(run_dir):
  pandas = pytest.importorskip("pandas")
  log = attribution.load(run_dir)
  rows = log.to_pandas()
  assert {"step", "domain", "dot[words]", "contribution[exams]"} <= set(rows) and not {"dot", "contribution"} & set(
    rows
  )
  np.testing.assert_array_equal(rows["contribution[exams]"], log["contribution"][:, 1])
  assert rows["path"].tolist() == log["path"].tolist()
  answer = ask(log, Query(by="domain"))
  assert isinstance(answer.to_pandas(), pandas.DataFrame)
  assert answer.to_pandas()["contribution"].tolist() == answer.columns["contribution"].tolist()
  assert f"{log.num_rows:,} rows" in repr(log) and "against words, exams" in repr(log)
  assert all(name in repr(answer) for name in log.domains) and "of 4 groups" in repr(answer)
  assert all(f" {tokens:,} " in repr(answer) for tokens in answer.columns["tokens"].tolist())
  assert len(repr(ask(log, Query(by="document"))).splitlines()) < 30


def test_polars_frames(run_dir):
  polars = pytest.importorskip("polars", reason="polars is not part of this installation")
  log = attribution.load(run_dir)
  assert isinstance(log.to_polars(), polars.DataFrame) and len(log.to_polars()) == log.num_rows
  assert ask(log, Query()).to_polars()["domain"].to_list() == ask(log, Query()).columns["domain"]


def test_a_frame_without_its_library_is_one_line(run_dir, monkeypatch):
  monkeypatch.setitem(sys.modules, "polars", None)
  with pytest.raises(ConfigError, match=r"to_polars\(\) needs polars: pip install polars"):
    attribution.load(run_dir).to_polars()


def test_a_share_is_kept_to_the_document(tmp_path, capsys):
  """16.1 % of 1000 are 161; in floating point they are more."""
  writer = Writer(tmp_path)
  rows = {name: np.ones(1000) for name in ("tokens", "loss", "dot", "contribution")}
  writer.append({"step": 0}, rows, [("d", f"{n}", 0) for n in range(1000)])
  writer.close()
  assert scores.main([str(tmp_path), "--keep", "16.1%", "--format", "ids"]) == 0
  assert len(capsys.readouterr().out.splitlines()) == 161


def test_parquet_of_a_name_that_is_not_utf8(tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  writer = Writer(tmp_path)
  rows = {"tokens": [1], "loss": [1.0], "dot": [1.0], "contribution": [1.0]}
  writer.append({"step": 0}, rows, [("notes", os.fsdecode(b"caf\xe9.txt"), 0)])
  writer.close()
  file = tmp_path / "answer.parquet"
  assert scores.main([str(tmp_path), "--by", "document", "--format", "parquet", "--output", str(file)]) == 0
  assert parquet.read_table(file)["path"].to_pylist() == ["caf?.txt"]


def test_a_text_with_old_line_ends_stays_in_its_cell_of_csv(tmp_path, capsys):
  writer, path = Writer(tmp_path), "one\rtwo"
  writer.append({"step": 0}, {name: [1] for name in ("tokens", "loss", "dot", "contribution")}, [("a", path, 0)])
  writer.close()
  assert scores.main([str(tmp_path), "--by", "document", "--format", "csv"]) == 0
  text = capsys.readouterr().out
  (row,) = csv.DictReader(io.StringIO(text, newline=""))
  assert row["path"] == path and text.endswith("1.0\n") and "\r\n" not in text


@pytest.mark.parametrize("path", ["=1+2", "+x", "-x", "@SUM(A1)", "\tx"])
def test_a_cell_of_csv_is_no_formula(path, tmp_path, capsys):
  writer = Writer(tmp_path)
  rows = {"tokens": [1], "loss": [1.0], "dot": [1.0], "contribution": [-1.0]}
  writer.append({"step": 0}, rows, [("=cmd", path, 0)])
  writer.close()
  assert scores.main([str(tmp_path), "--by", "document", "--format", "csv"]) == 0
  (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
  assert (row["domain"], row["path"]) == ("'=cmd", f"'{path}") and row["contribution"] == "-1.0"
