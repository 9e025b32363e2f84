"""The score log: exactly once across crashes, damaged files, several processes, bad input. K = 2 sets, N = 3 rows."""

import fcntl
import json
import os
import pathlib

import numpy as np
import pytest

from maxghost import attribution
from maxghost.config import ConfigError
from maxghost.scorelog import Writer
from maxghost.scorelog import format as fmt
from maxghost.scorelog.compact import compact

SETS = ("manual", "exams")
PERIOD = 5


def append_step(writer, step, process_index=0, **more):
  """A step whose numbers depend on the step and process only; step % 4 + 1 documents."""
  rng = np.random.default_rng([step, process_index])
  num = step % 4 + 1
  rows = {
    "tokens": rng.integers(1, 99, num),
    "loss": rng.normal(size=num),
    "dot": rng.normal(size=(num, 2)),
    "contribution": rng.normal(size=(num, 2)),
    "chunk": rng.integers(0, 7, num),
    "epoch": np.full(num, step // 9),
  }
  documents = [(f"d{rng.integers(3)}", f"folder/é{rng.integers(5)}.py", int(rng.integers(1 << 40))) for _ in range(num)]
  modules = {"names": ["mlp/wo", "head"], "domains": ["d0", "d1", "d2"], "contribution": rng.normal(size=(2, 4, 3, 2))}
  record = {"step": step, "loss": step / 7, "learning_rate": 1e-3, "val_loss": [step, step + 0.5], "momentum": [1, -1]}
  record |= more
  writer.append(record, rows, documents, modules=modules)


def columns(run_dir):
  log = attribution.load(run_dir)
  assert not log.messages
  modules = list(log.modules())
  names = ("step", "domain", "path", "offset", "chunk", "epoch", "tokens", "loss", "dot", "contribution")
  return {
    **{name: log[name] for name in names},
    "steps": log.steps,
    "modules": np.concatenate([m.contribution_SMLDK for m in modules]),
  }


def assert_same(a, b):
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  run_dir = tmp_path_factory.mktemp("whole")
  writer = Writer(run_dir, SETS, period=PERIOD)
  for step in range(23):
    append_step(writer, step)
  writer.close()
  return run_dir


def test_columns_come_back_as_they_were_given(whole):
  log = attribution.load(whole)
  rng = np.random.default_rng([6, 0])
  tokens, loss = rng.integers(1, 99, 3), rng.normal(size=3)
  dot, contribution = rng.normal(size=(3, 2)), rng.normal(size=(3, 2))
  at = log["step"] == 6
  np.testing.assert_array_equal(log["tokens"][at], tokens)
  np.testing.assert_array_equal(log["loss"][at], loss.astype(np.float32))
  np.testing.assert_array_equal(log["dot"][at], dot.astype(np.float32))
  np.testing.assert_array_equal(log["contribution"][at], contribution.astype(np.float32))
  chunk = rng.integers(0, 7, 3)
  np.testing.assert_array_equal(log["chunk"][at], chunk)
  documents = [(f"d{rng.integers(3)}", f"folder/é{rng.integers(5)}.py", int(rng.integers(1 << 40))) for _ in range(3)]
  assert list(zip(log["domain"][at], log["path"][at], log["offset"][at], strict=True)) == documents
  assert log.steps["step"].tolist() == list(range(23))
  assert log.steps["val_loss"][9].tolist() == [9, 9.5]
  assert np.isnan(log.steps["unscored"]).all()
  assert log.num_rows == sum(step % 4 + 1 for step in range(23))


def test_files_are_plain_npz_with_schema_and_units(whole):
  names = sorted(os.listdir(whole / "ghost"))
  assert names == [*(f"dot_prod_log_iter_{step}.npz" for step in (14, 19, 22, 4, 9)), "position.json"]
  with np.load(whole / "ghost" / "dot_prod_log_iter_9.npz") as file:
    meta = json.loads(str(file["meta"]))
    assert meta["schema_version"] == 2 and meta["val_sets"] == list(SETS)
    assert set(file["rows"].dtype.names) | set(file["steps"].dtype.names) == set(meta["units"])
    assert file["rows"]["step"].tolist() == [s for s in range(5, 10) for _ in range(s % 4 + 1)]


@pytest.mark.parametrize("checkpoint", [None, 0, 4, 6, 9, 11])
@pytest.mark.parametrize("crash", [12, 14, 17])
def test_a_crash_loses_and_doubles_nothing(whole, tmp_path, checkpoint, crash):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  position = None
  for step in range(crash + 1):
    append_step(writer, step)
    if step == checkpoint:
      position = json.loads(json.dumps(writer.position()))
  # The process dies here: what is pending in memory is lost.
  for _ in range(2):  # dying once more right after the restore changes nothing
    writer = Writer(tmp_path, SETS, period=PERIOD)
    writer.restore(position)
  for step in range(0 if checkpoint is None else checkpoint + 1, 23):
    append_step(writer, step)
  writer.close()
  assert sorted(os.listdir(tmp_path / "ghost")) == sorted(os.listdir(whole / "ghost"))
  assert_same(columns(tmp_path), columns(whole))


def test_an_older_checkpoint_than_the_last_flush(whole, tmp_path):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  for step in range(23):
    append_step(writer, step)
    if step in (6, 8, 13):
      position = writer.position()
    if step == 6:
      old = position
  writer.close()
  writer = Writer(tmp_path, SETS, period=PERIOD)
  writer.restore(old)
  for step in range(7, 23):
    append_step(writer, step)
  writer.close()
  assert_same(columns(tmp_path), columns(whole))


def test_an_early_flush_is_not_counted_twice(whole, tmp_path):
  """The file of a flush may survive a crash beside the file of the whole interval."""
  writer = Writer(tmp_path, SETS, period=PERIOD)
  for step in range(23):
    append_step(writer, step)
    if step == 7:
      writer.flush()
      early = (tmp_path / "ghost" / "dot_prod_log_iter_7.npz").read_bytes()
  writer.close()
  assert not (tmp_path / "ghost" / "dot_prod_log_iter_7.npz").exists()
  (tmp_path / "ghost" / "dot_prod_log_iter_7.npz").write_bytes(early)
  assert_same(columns(tmp_path), columns(whole))


def test_a_compaction_that_was_killed_loses_no_step_of_a_resumed_run(tmp_path, monkeypatch):
  """The merged file stands beside those that were still to be removed, and sorts before them by its name."""
  writer = Writer(tmp_path, SETS, period=PERIOD)
  for step in range(15):
    append_step(writer, step)
    if step == 7:
      position = writer.position()
  writer.close()
  before, removed = columns(tmp_path), []
  unlink = pathlib.Path.unlink

  def killed(path, **options):
    removed.append(path)
    if len(removed) > 1:
      raise KeyboardInterrupt
    unlink(path, **options)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(pathlib.Path, "unlink", killed)
    compact(tmp_path)
  writer = Writer(tmp_path, SETS, period=PERIOD)
  writer.restore(position)
  assert attribution.load(tmp_path).steps["step"].tolist() == list(range(8))
  for step in range(8, 15):
    append_step(writer, step)
  writer.close()
  assert_same(columns(tmp_path), before)


def test_the_open_file_of_a_run_in_training_stays_whichever_of_its_folders_is_named(tmp_path, monkeypatch):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  for step in range(13):
    append_step(writer, step)
  writer.flush()
  monkeypatch.chdir(tmp_path / "ghost")
  with open(tmp_path / ".lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    compact(pathlib.Path())
  for step in range(13, 15):
    append_step(writer, step)
  writer.close()
  assert attribution.load(tmp_path).steps["step"].tolist() == list(range(15))


def test_a_log_returns_to_a_step_between_those_it_holds(tmp_path):
  """A loop of one's own need not score every step."""
  writer = Writer(tmp_path, SETS, period=20)
  for step in range(0, 20, 5):
    append_step(writer, step)
  writer.close()
  writer = Writer(tmp_path, SETS, period=20)
  writer.restore({"step": 7})
  for step in (8, 13):
    append_step(writer, step)
  writer.close()
  assert attribution.load(tmp_path).steps["step"].tolist() == [0, 5, 8, 13]


def test_rows_keep_what_was_said_of_them_when_a_log_goes_on_under_another_direction(tmp_path):
  writer = Writer(tmp_path, SETS, period=20, direction="adam", fingerprint="then")
  for step in range(6):
    append_step(writer, step)
    if step == 3:
      position = writer.position()
  writer.close()
  writer = Writer(tmp_path, SETS, period=20, direction="path", fingerprint="now")
  writer.restore(position)
  for step in range(4, 9):
    append_step(writer, step)
  writer.close()
  shards = attribution.load(tmp_path).shards
  said = {(s.first_step, s.last_step): (s.meta["direction"], s.meta["fingerprint"]) for s in shards}
  assert said == {(0, 3): ("adam", "then"), (4, 8): ("path", "now")}


def test_a_log_of_other_validation_sets_is_refused_unchanged(tmp_path):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  for step in range(6):
    append_step(writer, step)
  writer.close()
  before = {path.name: path.read_bytes() for path in (tmp_path / "ghost").iterdir()}
  with pytest.raises(ConfigError, match="scored against the validation sets"):
    Writer(tmp_path, ("other",), period=PERIOD).restore({"step": 2})
  assert {path.name: path.read_bytes() for path in (tmp_path / "ghost").iterdir()} == before


def test_files_missing_since_the_checkpoint_are_said(tmp_path, capsys):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  for step in range(12):
    append_step(writer, step)
  position = writer.position()
  writer.close()
  (tmp_path / "ghost" / "dot_prod_log_iter_4.npz").unlink()
  writer = Writer(tmp_path, SETS, period=PERIOD)
  writer.restore(position)
  assert "holds 7 steps with 19 rows, the checkpoint counted 12 with 30" in capsys.readouterr().err
  for step in range(12, 17):
    append_step(writer, step)
  writer.close()
  with pytest.raises(ConfigError, match="scores are lost: 5 steps with 11 rows are missing before step 5"):
    attribution.load(tmp_path)


def test_a_newer_schema_is_refused(whole, tmp_path, monkeypatch):
  monkeypatch.setattr(fmt, "SCHEMA_VERSION", 0)
  with pytest.raises(ConfigError, match="schema_version=2, this maxghost reads up to 0; update"):
    attribution.load(whole)


def test_processes_are_merged(tmp_path):
  for process_index in (0, 1, 11):
    writer = Writer(tmp_path, SETS, process=(process_index, 1), period=PERIOD)
    writer.restore(None)
    for step in range(7):
      append_step(writer, step, process_index)
    writer.close()
  assert (tmp_path / "ghost" / "dot_prod_log_iter_4_p11.npz").exists()
  log = attribution.load(tmp_path)
  assert log.num_rows == 3 * sum(step % 4 + 1 for step in range(7))
  assert log.steps["step"].tolist() == list(range(7))
  Writer(tmp_path, SETS, process=(1, 1), period=PERIOD).restore(None)
  assert attribution.load(tmp_path).num_rows == 2 * sum(step % 4 + 1 for step in range(7))


def test_partial_files_of_other_processes_stay(tmp_path):
  """Processes of a run begin together: one may be writing while another removes what a killed one left."""
  folder = tmp_path / "ghost"
  folder.mkdir()
  names = {
    process: [f".dot_prod_log_iter_4{end}.npz.77.tmp", f".position{end}.json.77.tmp"]
    for process, end in ((0, ""), (1, "_p1"), (11, "_p11"))
  }
  for name in (name for several in names.values() for name in several):
    (folder / name).touch()
  for process in (1, 0, 11):
    Writer(tmp_path, SETS, process=(process, 12), period=PERIOD).restore(None)
    del names[process]
    assert {path.name for path in folder.glob(".*.tmp")} == {n for several in names.values() for n in several}


def test_closing_record(tmp_path):
  writer = Writer(tmp_path, ("manual",), period=2)
  rows = {"tokens": np.array([3]), "loss": np.array([1.0]), "dot": np.array([2.0]), "contribution": np.array([0.5])}
  for step in (0, 1):
    writer.append({"step": step, "val_loss": 5.0 - step}, rows, [("code", "a.py", 0)])
  writer.append({"step": 2, "prev_val_loss": [3.5]}, {}, [])
  writer.close()
  log = attribution.load(tmp_path)
  assert log.steps["prev_val_loss"][2, 0] == 3.5 and np.isnan(log.steps["val_loss"][2, 0])
  assert log["contribution"].tolist() == [[0.5], [0.5]]


def test_wrong_use_is_refused(tmp_path, whole):
  writer = Writer(tmp_path, SETS, period=PERIOD)
  append_step(writer, 3)
  with pytest.raises(ValueError, match="step=3: the score log already holds step 3"):
    append_step(writer, 3)
  with pytest.raises(ValueError, match="unknown step column 'lerning_rate'; did you mean 'learning_rate'"):
    writer.append({"step": 4, "lerning_rate": 1.0}, {}, [])
  rows = {"tokens": [1], "loss": [1.0], "dot": [[1.0, 2.0]]}
  with pytest.raises(ValueError, match="lack the columns contribution"):
    writer.append({"step": 4}, rows, [("a", "b", 0)])
  with pytest.raises(ValueError, match=r"'contribution' has shape \(1,\), expected \(1, 2\)"):
    writer.append({"step": 4}, rows | {"contribution": [1.0]}, [("a", "b", 0)])
  with pytest.raises(ValueError, match="is already there: call restore"):
    append_step(Writer(whole, SETS), 30)
  with pytest.raises(ConfigError, match="validation sets manual, exams, this run against manual;"):
    Writer(whole, ("manual",), period=PERIOD).restore({"step": 22, "num_steps": 23, "num_rows": 1})


def test_an_error_of_the_disk_reaches_the_caller(tmp_path):
  writer = Writer(tmp_path, SETS, period=1)
  (tmp_path / "ghost").write_text("a file where the folder should be")
  with pytest.raises(OSError, match=f"{tmp_path}/ghost"):
    append_step(writer, 0)


def test_foreign_folders(tmp_path):
  with pytest.raises(ConfigError, match="no such folder"):
    attribution.load(tmp_path / "nowhere")
  with pytest.raises(ConfigError, match="not a run of maxghost"):
    attribution.load(tmp_path)
  (tmp_path / "config.yml").write_text("steps: 3\n")
  with pytest.raises(ConfigError, match="no score files; with ghost_enabled=true a run logs some every"):
    attribution.load(tmp_path)


def test_unknown_column(whole):
  with pytest.raises(ConfigError, match="'contribtion'; did you mean 'contribution'"):
    attribution.load(whole)["contribtion"]


def test_a_run_of_fewer_processes_restores_the_files_of_those_that_are_gone(tmp_path):
  for index in range(2):
    writer = Writer(tmp_path, SETS, process=(index, 2), period=PERIOD)
    writer.restore(None)
    with pytest.raises(ValueError, match="the step's tokens of all of them, or the share of each row"):
      append_step(writer, 0, index)  # each process would take its tokens for those of the step
    for step in range(2 * PERIOD):
      append_step(writer, step, index, tokens=8)
    writer.close()
  assert len(list((tmp_path / "ghost").glob("*_p1.npz"))) == 2
  Writer(tmp_path, SETS, process=(0, 1), period=PERIOD).restore(
    {"step": PERIOD - 1, "num_steps": PERIOD, "num_rows": 1}
  )
  assert [path.name for path in (tmp_path / "ghost").glob("*_p1.npz")] == [f"dot_prod_log_iter_{PERIOD - 1}_p1.npz"]
