"""Damage, shares, units and an optimizer's own ledger columns. K = 2 validation sets."""

import errno
import itertools
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from attribution_runs import make_run

from maxghost import attribution, config, report, scores
from maxghost.attribution.summary import summarize
from maxghost.config import ConfigError
from maxghost.config.files import check_seal
from maxghost.parallel import distributed
from maxghost.parallel.shardings import OwnRows
from maxghost.scorelog import Writer, reader, selection, tokens
from maxghost.scorelog.compact import compact
from maxghost.scorelog.export import to_parquet
from maxghost.scorelog.reader import _written
from maxghost.scorelog.shard import DamagedShard, Shard
from maxghost.training.score_recorder import ScoreRecorder, scored_rows
from maxghost.training.session import Session
from maxghost.training.state import Position

SETS = ("manual", "exams")
PERIOD = 4


def append(writer, step, **record):
  rng = np.random.default_rng(step)
  num = step % 3 + 2
  rows = {name: rng.normal(size=(num, 2)) for name in ("dot", "contribution")}
  rows |= {"tokens": rng.integers(1, 99, num), "loss": rng.normal(size=num)}
  writer.append({"step": step, **record}, rows, [("code", f"{step}.py", i) for i in range(num)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Steps 0 to 10 in three files, with a file of tokens and a line of selected rows for each step."""
  run_dir = tmp_path_factory.mktemp("whole")
  ghost = run_dir / "ghost"
  writer = Writer(run_dir, SETS, period=PERIOD)
  one = np.ones((1, 3), np.int32)
  batch = SimpleNamespace(
    arrays=dict.fromkeys(("inputs", "targets", "inputs_segmentation"), one),
    document_BS=one[:, :1],
    offset_BS=one[:, :1],
  )
  for step in range(11):
    checks = {
      "tokens_crc": tokens.write(ghost / "tokens", step, np.ones((2, 1, 3)), batch, lambda i: ("code", "x", i)),
      "selection_crc": selection.append(ghost, step, step % 3 + 2, [step % 2]),
    }
    append(writer, step, **checks)
  writer.close()
  return run_dir


@pytest.fixture
def run_dir(whole, tmp_path):
  shutil.copytree(whole, tmp_path / "run")
  return tmp_path / "run"


def shard(run_dir, step):
  return run_dir / "ghost" / f"dot_prod_log_iter_{step}.npz"


def lost(run_dir) -> str:
  """What load refuses with; what it says where the loss is accepted."""
  with pytest.raises(ConfigError, match=r"scores are lost: .*--accept-lost-rows") as refusal:
    attribution.load(run_dir)
  log = attribution.load(run_dir, accept_lost_rows=True)
  said = "; ".join(message.removeprefix("lost: ") for message in log.messages)
  assert said in str(refusal.value)
  return said


def test_any_flipped_bit_is_noticed(run_dir):
  path = shard(run_dir, 7)
  data = path.read_bytes()
  rng = np.random.default_rng(0)
  ends = [*range(8 * 60), *range(8 * len(data) - 8 * 140, 8 * len(data))]  # the zip's own fields are densest there
  for bit in [*ends, *rng.integers(0, 8 * len(data), 400)]:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    with pytest.raises(DamagedShard, match=path.name):
      Shard(path)
  path.write_bytes(data)
  assert Shard(path).num_rows == 3 + 4 + 2 + 3


def test_a_torn_file_is_left_out_whole_and_named(run_dir):
  rows = attribution.load(run_dir)["dot"]
  path = shard(run_dir, 7)
  data = path.read_bytes()
  for bad in (b"", b"PK\x03\x04", data[:400], data[:-1], data[: len(data) // 2], b"\0" * 999, data + b"\n"):
    path.write_bytes(bad)
    said = lost(run_dir)
    assert "dot_prod_log_iter_7.npz" in said and "4 steps with 12 rows are missing before step 8 (after step 3)" in said
    kept = attribution.load(run_dir, accept_lost_rows=True)["dot"]
    np.testing.assert_array_equal(kept, np.concatenate([rows[:11], rows[23:]]))
  for step in (3, 7, 10):
    shard(run_dir, step).write_bytes(b"")
  with pytest.raises(ConfigError, match="none of 3 score files is readable"):
    attribution.load(run_dir, accept_lost_rows=True)


@pytest.mark.parametrize("times", [1, 5, 6])
def test_a_file_that_is_replaced_while_the_log_is_opened_is_looked_for_again(run_dir, monkeypatch, times):
  """A run that is training replaces the file of an unfinished interval; one that does not come back is lost."""
  rows, gone, left = attribution.load(run_dir)["dot"], shard(run_dir, 7), iter(range(times))

  def opened(path):
    if path == gone and next(left, None) is not None:
      raise FileNotFoundError(path)
    return Shard(path)

  monkeypatch.setattr(reader, "Shard", opened)
  if times > 5:
    with pytest.raises(ConfigError, match=r"scores are lost: dot_prod_log_iter_7\.npz disappeared; 4 steps"):
      attribution.load(run_dir)
  else:
    np.testing.assert_array_equal(attribution.load(run_dir)["dot"], rows)


@pytest.mark.parametrize(
  ("step", "said"),
  [
    (3, "4 steps with 11 rows are missing before step 4"),
    (7, "4 steps with 12 rows are missing before step 8 (after step 3)"),
    (10, "3 steps with 9 rows are missing at the end (after step 7)"),
  ],
)
def test_a_missing_interval_is_named(run_dir, step, said):
  shard(run_dir, step).unlink()
  assert lost(run_dir) == said


def test_of_many_missing_intervals_the_first_are_named(tmp_path):
  writer = Writer(tmp_path, SETS, period=1)
  for step in range(15):
    append(writer, step)
  writer.close()
  for step in range(0, 9, 2):
    shard(tmp_path, step).unlink()
  for step, last in ((10, ""), (12, r"; and 1 more")):
    shard(tmp_path, step).unlink()
    with pytest.raises(ConfigError, match=rf"missing before step 11 \(after step 9\){last}\. Put the files back"):
      attribution.load(tmp_path)


@pytest.fixture
def of_three(tmp_path):
  """Steps 0 to 5 of three processes, of which the third has no rows."""
  writers = [Writer(tmp_path, SETS, process=(process, 3), period=PERIOD) for process in range(3)]
  for writer in writers:
    writer.restore(None)
  for step, writer in itertools.product(range(6), writers):
    writer.append({"step": step}, {}, []) if writer is writers[2] else append(writer, step, tokens=99)
  for writer in writers:
    writer.close()
  return tmp_path


@pytest.mark.parametrize("process", [1, 2])
def test_a_process_without_any_file_is_named(of_three, process):
  for path in (of_three / "ghost").glob(f"*_p{process}.*"):
    path.unlink()
  assert lost(of_three) == f"all files of process {process} are missing"


def test_processes_that_wrote_nothing_yet_or_that_a_checkpoint_took_back_are_not_missed(tmp_path):
  """One process, then three, of which the third is killed before its first file; then one again, from before."""
  append(one := Writer(tmp_path, SETS, period=PERIOD), 0)
  one.close()
  position = one.position()
  begun = [Writer(tmp_path, SETS, process=(process, 3), period=PERIOD) for process in range(3)]
  for writer in begun:
    writer.restore(position if writer is begun[0] else {"step": 0, "num_steps": 0, "num_rows": 0})
  for writer in begun[:2]:
    append(writer, 1, tokens=99)
    writer.close()
  assert len(attribution.load(tmp_path).shards) == 2
  Writer(tmp_path, SETS, period=PERIOD).restore(position)
  assert attribution.load(tmp_path).steps["step"].tolist() == [0]


def test_a_process_whose_rows_another_writes_now_takes_its_later_rows_back(of_three, monkeypatch):
  """Killed after step 5, and continued after step 2 on a mesh on which all processes hold the same rows."""
  source = SimpleNamespace(fields=(), domains=("code",))
  dataset = SimpleNamespace(fingerprint="", document_id=tuple, document_record=tuple, source=source)
  cfg = config.load(None, f"ghost_log_period={PERIOD}", "ghost_val_sets=[manual,exams=code]")
  checkpoint = Position(3, scores=[{"step": 2}, None, None])
  monkeypatch.setattr(distributed, "count", lambda: 3)
  for process in range(3):
    monkeypatch.setattr(distributed, "index", lambda process=process: process)
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    plan = SimpleNamespace(own=OwnRows(writes=not process), slices=None)
    run = SimpleNamespace(_cfg=cfg, _path=of_three, _dataset=dataset, _plan=plan)
    run._console = run._checkpoints = run._watch = None
    assert (Session._open_sinks(run, checkpoint).scores is None) == (process > 0)
  log = attribution.load(of_three)
  assert sorted(log["step"].tolist()) == sorted(2 * [step for step in range(3) for _ in range(step % 3 + 2)])


def test_scores_compacted_to_parquet_by_an_earlier_version_are_named(run_dir):
  (run_dir / "ghost" / "parquet").mkdir()
  (run_dir / "ghost" / "parquet" / "rows_000000000_000000099.parquet").touch()
  assert "holds scores of an earlier maxghost, which this one does not read" in lost(run_dir)
  for step in (3, 7, 10):
    shard(run_dir, step).unlink()
  with pytest.raises(ConfigError, match="earlier maxghost, which this one does not read"):
    attribution.load(run_dir)


def test_rows_that_are_there_twice_are_named(run_dir):
  position = run_dir / "ghost" / "position.json"
  writer = Writer(run_dir, SETS, period=PERIOD)
  writer.restore(json.loads(position.read_text()) | {"num_rows": 30})
  for step in (11, 12):
    append(writer, step)
  writer.close()
  assert lost(run_dir) == "2 rows more than were written before step 12 (after step 11)"


def test_any_flipped_bit_of_what_was_written_is_named(run_dir):
  path = run_dir / "ghost" / "position.json"
  data = path.read_bytes()
  noticed = 0
  for place, bit in itertools.product(range(len(data)), range(8)):
    path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
    try:
      _written(path.parent)
    except ConfigError as error:
      assert "position.json: damaged" in str(error)
      noticed += 1
    else:  # the name of the seal is another; what counts is as it was
      assert json.loads(path.read_bytes())["num_rows"] == 32
  assert noticed > 8 * len(data) - 100
  path.write_bytes(data.replace(b'"num_rows": 32', b'"num_rows": 22'))
  with pytest.raises(ConfigError, match=r"position.json: damaged \(its content does not match its checksum\)"):
    attribution.load(run_dir)


def test_lost_tokens_and_selection_lines_are_named(run_dir):
  (run_dir / "ghost" / "tokens" / "step_6.npz").unlink()
  assert lost(run_dir) == "1 files of tokens/ are missing, step_6.npz first"
  chosen = attribution.load(run_dir, accept_lost_rows=True).chosen()
  path = run_dir / "ghost" / "selection.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines[:4], lines[4].replace("[0]", "[1]"), *lines[6:]]))
  assert "selection.jsonl: lines of 2 steps are missing or changed, that of step 4 first" in lost(run_dir)
  np.testing.assert_array_equal(attribution.load(run_dir, accept_lost_rows=True).chosen(), chosen)
  path.unlink()
  assert "lines of 11 steps are missing" in lost(run_dir)


def test_lost_tokens_and_selection_lines_are_named_when_a_run_goes_on(run_dir, capsys):
  (run_dir / "ghost" / "tokens" / "step_6.npz").unlink()
  (run_dir / "ghost" / "selection.jsonl").unlink()
  Writer(run_dir, SETS, period=PERIOD).restore({"step": 8, "num_steps": 9, "num_rows": 27})
  first, second = capsys.readouterr().err.splitlines()
  assert first.endswith("/ghost: 1 files of tokens/ are missing, step_6.npz first; they stay missing")
  assert "selection.jsonl: lines of 9 steps are missing or changed, that of step 0 first; they stay" in second


def test_a_changed_token_file_is_named(run_dir):
  path = run_dir / "ghost" / "tokens" / "step_6.npz"
  data = bytearray(path.read_bytes())
  data[12] ^= 1  # a date in the zip: nothing else would notice
  path.write_bytes(data)
  checksums = attribution.load(run_dir).checksums("tokens_crc")
  with pytest.raises(DamagedShard, match=r"tokens/step_6.npz: its bytes do not match"):
    tokens.read(path, checksums[6])
  assert tokens.read(path, None)["targets"].shape == (1, 3)


def test_the_commands_refuse_or_say_what_is_lost(run_dir, tmp_path, capsys):
  shard(run_dir, 7).unlink()
  for command, more in ((scores, []), (scores, ["--compact"]), (report, ["--no-texts"])):
    assert command.main([str(run_dir), *more]) == 2
    error = capsys.readouterr().err
    assert "12 rows are missing before step 8" in error and error.count("\n") == 1
  assert scores.main([str(run_dir), "--accept-lost-rows"]) == 0
  assert "note: lost: 4 steps with 12 rows" in capsys.readouterr().err
  assert report.main([str(run_dir), "--no-texts", "--accept-lost-rows"]) == 0
  assert "lost: 4 steps with 12 rows" in " ".join(capsys.readouterr().out.split())
  assert "4 steps with 12 rows are missing" in (run_dir / "report.html").read_text()


def test_a_resume_carries_no_damage_over(run_dir, capsys):
  path = shard(run_dir, 10)
  position = check_seal(json.loads((run_dir / "ghost" / "position.json").read_text()))
  assert position == {"step": 10, "num_steps": 11, "num_rows": 32}
  damaged = bytearray(path.read_bytes())
  damaged[-60] ^= 4
  path.write_bytes(damaged)
  writer = Writer(run_dir, SETS, period=PERIOD)
  writer.restore(position)
  assert "dot_prod_log_iter_10.npz" in capsys.readouterr().err
  append(writer, 11)
  writer.close()
  assert path.read_bytes() == damaged
  assert "3 steps with 9 rows are missing before step 11 (after step 7)" in lost(run_dir)


def test_a_resume_without_the_folder_goes_on_with_a_gap(tmp_path, capsys):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  writer.restore({"step": 10, "num_steps": 11, "num_rows": 32})
  assert "holds 0 steps with 0 rows, the checkpoint counted 11 with 32" in capsys.readouterr().err
  append(writer, 11)
  writer.close()
  assert lost(tmp_path) == "11 steps with 32 rows are missing before step 11"


def test_what_others_wrote_is_refused_by_name(run_dir, tmp_path):
  """Files without a seal, as schema 1, and GhostSuite's."""
  path = shard(run_dir, 7)
  with np.load(path) as file:
    np.savez(tmp_path / "plain.npz", **file)
  (tmp_path / "plain.npz").rename(path)
  with pytest.raises(DamagedShard, match=r"the checksum at its end is missing: .*older maxghost"):
    Shard(path)
  (tmp_path / "grad_dotprods").mkdir()
  (tmp_path / "grad_dotprods" / "dot_prod_log_iter_3.pt").write_bytes(b"")
  with pytest.raises(ConfigError, match="scores of GhostSuite, which this one does not read"):
    attribution.load(tmp_path)


def test_a_ledger_column_of_the_optimizer_goes_through_to_the_report(tmp_path, capsys):
  """Without momentum, with a column that only this optimizer has; shares that are no part of the tokens."""
  ledger = ("predicted_examples", "trust_ratio", "unscored", "direction_residual")
  run_dir = tmp_path / "own"
  writer = Writer(run_dir, period=3, objective="pairs", ledger=ledger, direction="lamb")
  for step in range(4):
    contribution = np.array([0.5, 0.25])
    rows = {
      "tokens": [1, 9],
      "loss": [1.0, 2.0],
      "dot": contribution,
      "contribution": contribution,
      "share": [0.5, 0.5],
    }
    record = {"step": step, "val_loss": 9.0 - step, "prev_val_loss": 9.0 - step, "predicted_examples": 0.75}
    writer.append(record | {"trust_ratio": 0.125}, rows, [("code", "a", 0), ("web", "b", 0)])
  with pytest.raises(ValueError, match="unknown step column 'momentum'"):
    writer.append({"step": 4, "momentum": 1.0}, {}, [])
  writer.close()
  log = attribution.load(run_dir)
  assert (log.objective, log.ledger, log.said_of("direction")) == ("pairs", ledger, ("lamb",))
  assert log.steps["trust_ratio"].tolist() == [[0.125]] * 4 and "optimizer" in log.units["trust_ratio"]
  part = summarize(log).sets[0]
  assert part.ledger.columns == {
    "predicted_examples": 2.25, "trust_ratio": 0.375, "unscored": None, "direction_residual": None,
  }  # fmt: skip
  assert [(v.domain, v.relative) for v in part.domains] == [("code", 4 / 3), ("web", 2 / 3)]  # of half the loss each
  assert report.main([str(run_dir), "--no-texts"]) == 0
  assert "Trust ratio" in capsys.readouterr().out
  page = (run_dir / "report.html").read_text()
  assert "Trust ratio" in page and "lamb" in page and "pairs" in page
  with pytest.raises(ValueError, match="predicted_examples among them"):
    Writer(tmp_path, ledger=("momentum",))


def test_files_of_two_objectives_are_not_mixed(tmp_path):
  for process, objective in enumerate(("next_token", "pairs")):
    writer = Writer(tmp_path, process=(process, 1), objective=objective)
    writer.append({"step": 0}, {}, [])
    writer.close()
  with pytest.raises(ConfigError, match=r"objective pairs.*has next_token.*of different runs"):
    attribution.load(tmp_path)


class Pairs:
  """A batch of B=3 rows with S=2 slots; unit 7 owns the slots (0, 0), (1, 1), (2, 1), unit 3 the slot (1, 0)."""

  document_BS = np.array([[4, -1], [9, 4], [5, 4]])
  offset_BS = np.array([[10, -1], [30, 20], [0, 40]])
  epoch_B = np.array([1, 1, 1])
  unit_BS = np.array([[7, -1], [3, 7], [8, 7]])


def test_the_slots_of_a_unit_are_one_row(tmp_path):
  rng = np.random.default_rng(0)
  outputs = {
    "tokens_BS": np.array([[3, 0], [2, 5], [0, 2]], np.int32),
    "loss_BS": rng.random((3, 2)),
    "score_dot_BSK": rng.normal(size=(3, 2, 2)),
    "contribution_BSK": rng.normal(size=(3, 2, 2)),
    "share_BS": np.array([[0.25, 0.0], [0.5, 0.125], [0.0, 0.125]]),
    "chosen_B": np.array([True, False, True]),
    "scored_ok": np.array(True),
  }
  columns, documents = scored_rows(outputs, Pairs)
  slots, values = [(0, 0), (1, 1), (2, 1)], {name: outputs[name] for name in outputs if name.endswith(("BS", "BSK"))}
  assert documents.tolist() == [4, 9] and columns["chunk"].tolist() == [10, 30]
  assert columns["tokens"].tolist() == [10, 2] and columns["share"].tolist() == [0.5, 0.5]
  np.testing.assert_allclose(columns["contribution"][0], sum(values["contribution_BSK"][s] for s in slots))
  for name, output in (("loss", "loss_BS"), ("dot", "score_dot_BSK")):
    of_unit = sum(values[output][s] * values["share_BS"][s] for s in slots) / 0.5
    np.testing.assert_allclose(columns[name][0], of_unit)
  for name, output in (("contribution", "contribution_BSK"), ("dot", "score_dot_BSK"), ("loss", "loss_BS")):
    np.testing.assert_array_equal(columns[name][1], outputs[output][1, 0])
  writer = Writer(tmp_path, SETS)
  recorder = ScoreRecorder(writer, lambda i: ("code", str(i), 0), ("code",))
  recorder.record(0, outputs, None, Pairs)
  recorder.close()
  log = attribution.load(tmp_path)
  assert log["path"].tolist() == ["4", "9"]
  assert json.loads((tmp_path / "ghost" / "selection.jsonl").read_text()) == {"step": 0, "seen": 2, "chosen": [0]}


def test_after_a_checkpoint_no_file_of_a_later_step_stays(run_dir):
  """Steps 8 to 10 are trained again: rows, tokens and selections of the first time must not be mixed with them."""
  folder = run_dir / "ghost" / "tokens"
  recorder = ScoreRecorder(Writer(run_dir, SETS, period=PERIOD), lambda i: ("code", "x", 0), ("code",))
  recorder.restore({"step": 7, "num_steps": 8, "num_rows": 23}, 8)
  recorder.close()
  assert attribution.load(run_dir).steps["step"].tolist() == sorted(tokens.files(folder)) == [*range(8)]
  assert len((run_dir / "ghost" / "selection.jsonl").read_text().splitlines()) == 8


def test_a_pair_has_the_contributions_of_its_chosen_and_its_rejected_row():
  """Rows 0 and 2 hold chosen responses; the pairs of the first two rows are in two slots."""
  pair_BS = np.array([[0, 1], [0, 1], [2, -1], [2, -1]])
  rng, counts_BS = np.random.default_rng(0), (pair_BS >= 0).astype(np.int32)
  outputs = {name: rng.normal(size=(4, 2)) for name in ("loss_BS", "share_BS")} | {"tokens_BS": counts_BS}
  outputs |= {name: rng.normal(size=(4, 2, 3)) for name in ("score_dot_BSK", "contribution_BSK")}
  batch = SimpleNamespace(document_BS=pair_BS, offset_BS=pair_BS, epoch_B=np.zeros(4, int), unit_BS=pair_BS)
  columns, documents = scored_rows(outputs, batch, ("chosen", "rejected"))
  assert documents.tolist() == [0, 1, 2]
  for first, name in enumerate(("contribution_chosen", "contribution_rejected")):
    wanted = [outputs["contribution_BSK"][row + first, slot] for row, slot in ((0, 0), (0, 1), (2, 0))]
    np.testing.assert_array_equal(columns[name], wanted)


def test_export_to_parquet(tmp_path, capsys, monkeypatch):
  parquet = pytest.importorskip("pyarrow.parquet")
  run_dir = make_run(tmp_path / "run", "dataset_type=synthetic", "ghost_val_sets=words", val_sets=SETS, steps=5)
  assert scores.main([str(run_dir), "--export", "parquet", "--output", str(tmp_path / "out")]) == 0
  assert capsys.readouterr().out.split() == [
    str(tmp_path / "out" / f"{n}.parquet") for n in ("rows", "steps", "modules")
  ]

  def full_disk(_):
    raise OSError(errno.ENOSPC, "No space left on device")
    yield

  log = attribution.load(run_dir)
  rows = parquet.read_table(tmp_path / "out" / "rows.parquet")
  assert rows["path"].to_pylist() == log["path"].tolist()
  for k, name in enumerate(SETS):
    np.testing.assert_array_equal(rows[f"contribution[{name}]"].to_numpy(), log["contribution"][:, k])
  np.testing.assert_array_equal(parquet.read_table(tmp_path / "out" / "steps.parquet")["loss"], log.steps["loss"])
  modules = parquet.read_table(tmp_path / "out" / "modules.parquet")
  (whole,) = log.modules()
  total = np.nansum(whole.contribution_SMLDK[..., 1])
  assert sum(modules["contribution[exams]"].to_pylist()) == pytest.approx(float(total), rel=1e-5)
  other = make_run(tmp_path / "other", "dataset_type=synthetic", "ghost_val_sets=words", steps=4, modules=False)
  with monkeypatch.context() as patch:  # a full disk, at the third file
    patch.setattr(attribution.ScoreLog, "modules", full_disk)
    with pytest.raises(ConfigError, match="No space left on device"):
      to_parquet(attribution.load(other), tmp_path / "out")
  assert parquet.read_table(tmp_path / "out" / "rows.parquet") == rows, "an export stays until the next one is there"
  to_parquet(attribution.load(other), tmp_path / "out")  # no module of the run before stays
  assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rows.parquet", "steps.parquet"]


def test_a_log_without_predicted_and_measured_drops_has_no_ledger(tmp_path, capsys):
  """As that of a loop that writes its rows alone."""
  writer = Writer(tmp_path, period=3)
  for step in range(4):
    rows = {"tokens": [7, 9], "loss": [2.5, 3.0], "dot": [1.0, -0.5], "contribution": [0.5, -0.25]}
    writer.append({"step": step}, rows, [("a", "x", 0), ("b", "y", 0)])
  writer.close()
  assert report.main([str(tmp_path)]) == 0
  out, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "report.html").read_text("utf-8")
  for text in (out, page):
    assert "This log holds no predicted drops of its steps" in text
    assert "over 0 steps" not in text
  assert "Predicted drop" not in out and '"row">Predicted drop' not in page


def test_the_loss_after_the_last_step_is_no_step_of_its_own(tmp_path):
  """Schedule concat logs no prediction by which the report could count the steps."""
  writer = Writer(tmp_path, period=3)
  for step in range(2):
    rows = {"tokens": [7], "loss": [2.5], "dot": [1.0], "contribution": [0.5]}
    writer.append({"step": step, "loss": 2.5, "val_loss": 3.0 - step}, rows, [("a", "x", 0)])
  writer.append({"step": 2, "prev_val_loss": 1.0}, {}, [])
  writer.close()
  assert summarize(attribution.load(tmp_path)).num_steps == 2


def test_a_file_that_a_compaction_replaces_while_it_is_read_is_noticed(tmp_path):
  """Its first rows are those of other files by then; two compactions at once would write them down."""
  run = make_run(tmp_path / "run", "dataset_type=synthetic", "ghost_val_sets=words", steps=59)
  log = attribution.load(run)
  blocks = log.blocks()
  read = [next(blocks)]
  assert scores.main([str(run), "--compact"]) == 0
  with pytest.raises(ConfigError, match="changed while it was read; try again"):
    read += [*blocks]
  with pytest.raises(ConfigError, match="was written again while it was read"):
    list(log.shards[-1].blocks())
  with pytest.raises(ConfigError, match="was written again while it was read"):
    _ = log.shards[-1].modules
  assert len(read) == 1 and attribution.load(run).num_rows == log.num_rows


@pytest.mark.parametrize("name", ["fingerprint", "direction"])
def test_compaction_keeps_apart_what_was_said_of_the_files(tmp_path, name):
  """Else the report of a run whose data changed would no longer say so."""
  position = None
  for step, value in enumerate(("a", "a", "b", "b")):
    writer = Writer(tmp_path, SETS, period=1, **{name: value})
    writer.restore(position)
    append(writer, step)
    position = writer.position()
  before = attribution.load(tmp_path)["contribution"]
  assert len(compact(tmp_path)) == 2
  log = attribution.load(tmp_path)
  assert log.said_of(name) == ("a", "b") and len(log.shards) == 2
  np.testing.assert_array_equal(log["contribution"], before)


def test_a_longer_file_of_another_run_does_not_cover_those_of_this_one(tmp_path):
  for name, num_steps in (("own", 2), ("other", 4)):
    writer = Writer(tmp_path / name, val_sets=(name,))
    for step in range(num_steps):
      writer.append({"step": step}, {}, [])
    writer.close()
  (foreign,) = (tmp_path / "other").rglob("dot_prod_log_iter_3.npz")
  (own,) = (tmp_path / "own").rglob("dot_prod_log_iter_1.npz")
  foreign.rename(own.parent / foreign.name)
  with pytest.raises(ConfigError, match="of different runs"):
    attribution.load(tmp_path / "own")


def test_files_with_other_parts_are_not_mixed(tmp_path):
  for process, parts in enumerate((("chosen", "rejected"), ())):
    writer = Writer(tmp_path, process=(process, 1), parts=parts)
    writer.append({"step": 0}, {}, [])
    writer.close()
  with pytest.raises(ConfigError, match="of different runs"):
    attribution.load(tmp_path)


def test_names_of_files_that_are_no_utf8_are_exported(tmp_path):
  writer, name = Writer(tmp_path, period=1), os.fsdecode(b"caf\xe9")
  one = np.ones(1)
  rows = {"tokens": one, "loss": one, "dot": one[:, None], "contribution": one[:, None]}
  modules = {"names": ["mlp"], "domains": [name], "contribution": np.ones((1, 1, 1, 1))}
  writer.append({"step": 0}, rows, [("code", name, 0)], modules=modules)
  log = attribution.load(tmp_path)
  to_parquet(log, tmp_path / "out")
  assert pq.read_table(tmp_path / "out" / "modules.parquet").to_pylist() == [
    {"step": 0, "module": "mlp", "domain": "caf?", "layer": 0, "contribution": 1.0}
  ]
  assert pq.read_table(tmp_path / "out" / "rows.parquet")["path"].to_pylist() == ["caf?"]
  assert log.to_pandas()["path"].tolist() == ["caf?"] and log["path"].tolist() == [name]


def test_ids_that_end_with_nul_keep_their_rows(tmp_path):
  """An unfinished interval is read again at every restart."""
  one, position = dict.fromkeys(("tokens", "loss", "dot", "contribution"), np.ones(1)), None
  for step, name in enumerate(("abc\0", "abc\0", "xyz")):
    writer = Writer(tmp_path, fields=("id",))
    writer.restore(position)
    writer.append({"step": step}, one, [("a", "p", step, name)])
    position = writer.position()
  assert attribution.load(tmp_path)["id"].tolist() == ["abc", "abc", "xyz"]


def test_an_unfinished_file_may_be_replaced_while_it_is_read(tmp_path):
  """A checkpoint writes the unfinished interval; the file of the whole one replaces it, perhaps during a report."""
  writer = Writer(tmp_path, period=4)
  rows = {"tokens": [3], "loss": [1.0], "dot": [1.0]}
  for step in range(6):
    writer.append({"step": step}, rows | {"contribution": [step]}, [(f"d{step}", "p", 0)])
  writer.position()
  log = attribution.load(tmp_path)
  for step in range(6, 8):
    writer.append({"step": step}, rows | {"contribution": [step]}, [(f"d{step}", "p", 0)])
  assert not log.shards[-1].path.exists()
  assert log["contribution"].ravel().tolist() == log["step"].tolist() == log.steps["step"].tolist() == [*range(6)]
  assert log.domains == tuple(f"d{step}" for step in range(6))
