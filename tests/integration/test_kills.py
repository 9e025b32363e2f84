"""Commands that are killed at any change of a file: nothing is half-written, a second start gives the same bytes."""

import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from maxghost import scorelog
from maxghost.config import ConfigError
from maxghost.data import prepared
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.scorelog import Writer

ENDLESS = 10**9
# Runs a module's command that dies before its n-th change of a file below a folder; prints how many changes there were.
RUNNER = """
import os, runpy, signal, sys
limit, folder, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
calls = 0
def hook(event, args):
  global calls
  if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate"):
    return
  if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
    return
  if isinstance(args[0], (str, os.PathLike)) and os.fspath(args[0]).startswith(folder):
    calls += 1
    if calls > limit:
      os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.argv = [module, *sys.argv[4:]]
try:
  runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
  assert not end.code, end.code
print("changes:", calls)
"""
slow = pytest.mark.slow


def start(limit, folder, module, *arguments):
  command = [sys.executable, "-c", RUNNER, str(limit), str(folder), module, *map(str, arguments)]
  return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(limit, folder, module, *arguments):
  """The number of changes of a command that ended well; None for one that was killed."""
  process = start(limit, folder, module, *arguments)
  out, err = process.communicate(timeout=300)
  assert process.returncode in (0, -9), err[-3000:]
  return int(out.rpartition("changes: ")[2]) if process.returncode == 0 else None


def files_of(folder):
  return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def points(total, some):
  """All moments, or some of them: the first, the last, and others between."""
  return range(total) if some is None else sorted({0, total - 1, *np.linspace(0, total - 1, some, dtype=int).tolist()})


# Compaction.


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
  """A log of five files of two processes."""
  folder = tmp_path_factory.mktemp("scores") / "run"
  for process in (0, 1):
    writer = Writer(folder, process=(process, 2), period=2)
    for step in range(5 - process):
      rows = {"tokens": [3], "loss": [1.5], "dot": [step], "contribution": [step + process / 8]}
      writer.append({"step": step, "tokens": 6}, rows, [("a", f"{process}", step)])
    writer.close()
  return folder


def rows_of(folder):
  log = scorelog.load(folder)
  return sorted(zip(*(log[name].tolist() for name in ("step", "path", "offset", "tokens", "share")), strict=True))


def check_compaction(scores, tmp_path, some):
  whole = tmp_path / "whole"
  shutil.copytree(scores, whole)
  total = run(ENDLESS, whole, "maxghost.scores", whole, "--compact")
  assert total > 4 and rows_of(whole) == rows_of(scores)
  for limit in points(total, some):
    folder = tmp_path / f"killed_{limit}"
    shutil.copytree(scores, folder)
    assert run(limit, folder, "maxghost.scores", folder, "--compact") is None
    assert rows_of(folder) == rows_of(scores)
    assert run(ENDLESS, folder, "maxghost.scores", folder, "--compact") is not None
    assert files_of(folder) == files_of(whole), limit


def test_a_killed_compaction(scores, tmp_path):
  check_compaction(scores, tmp_path, 2)


@slow
def test_a_compaction_killed_at_any_change(scores, tmp_path):
  check_compaction(scores, tmp_path, None)


# Preparation.


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  lines = (json.dumps({"id": n, "text": f"Text number {n}. " * 40}) + "\n" for n in range(60))
  (folder / "a.jsonl").write_text("".join(lines))
  return folder / "a.jsonl"


def check_prepared(folder, whole):
  """Either nothing says that the corpus is there, or all of it is."""
  try:
    source = prepared.PreparedSource(str(folder), ByteTokenizer())
  except (ConfigError, FileNotFoundError):
    return
  assert source.fingerprint == prepared.PreparedSource(str(whole), ByteTokenizer()).fingerprint


def preparation(texts, folder):
  settings = ("dataset_type=text", f"dataset_files=a={texts}", "ghost_val_sets=a")
  return ("maxghost.data", "prepare", *settings, "--output", folder, "--part_bytes", 10_000)


def check_preparation(texts, tmp_path, some):
  whole = tmp_path / "whole"
  total = run(ENDLESS, whole, *preparation(texts, whole))
  assert total > 20
  for limit in points(total, some):
    folder = tmp_path / f"killed_{limit}"
    assert run(limit, folder, *preparation(texts, folder)) is None
    check_prepared(folder, whole)
    assert run(ENDLESS, folder, *preparation(texts, folder)) is not None
    assert files_of(folder) == files_of(whole), limit


def test_a_killed_preparation(texts, tmp_path):
  check_preparation(texts, tmp_path, 2)


@slow
@pytest.mark.timeout(1800)
def test_a_preparation_killed_at_any_change(texts, tmp_path):
  check_preparation(texts, tmp_path, None)


@slow
@pytest.mark.timeout(600)
def test_workers_of_a_killed_preparation_end(texts, tmp_path):
  """Killed at random moments, with worker processes; none of them stays."""
  whole = tmp_path / "whole"
  run(ENDLESS, whole, *preparation(texts, whole))
  rng = np.random.default_rng(1)
  for number in range(6):
    folder = tmp_path / f"killed_{number}"
    process = start(ENDLESS, folder, *preparation(texts, folder), "--workers", 2)
    time.sleep(rng.uniform(1, 6))
    process.kill()
    process.communicate(timeout=60)  # waits for the pipes, which workers hold open too
    check_prepared(folder, whole)
    assert run(ENDLESS, folder, *preparation(texts, folder)) is not None
    assert files_of(folder) == files_of(whole)


# Conversion.


@slow
@pytest.mark.timeout(1800)
def test_a_killed_conversion(tmp_path):
  """Killed at random moments the target is there whole or not at all; the command again writes the same arrays."""
  from maxghost.checkpoint.compare import compare_checkpoints
  from maxghost.checkpoint.manager import CheckpointManager

  rng = np.random.default_rng(2)
  layers = {"mlp": {"wi_0": {"kernel": rng.normal(size=(3, 200, 360)).astype(np.float32)}}}
  manager = CheckpointManager(tmp_path / "checkpoints", asynchronous=False)
  manager.save(3, {"model": {"decoder": {"layers": layers}}}, {})
  manager.close()
  source, whole = tmp_path / "checkpoints" / "3", tmp_path / "whole"

  def arguments(target):
    return ("maxghost", "checkpoint", "convert", "--source_path", source, "--target_path", target, "--params_only")

  begin = time.monotonic()
  total = run(ENDLESS, tmp_path, *arguments(whole))
  seconds = time.monotonic() - begin
  for number in range(10):
    target = tmp_path / f"target_{number}"
    if number < 4:  # at a change of a file
      assert run(int(rng.integers(total)), tmp_path, *arguments(target)) is None
    else:
      process = start(ENDLESS, tmp_path, *arguments(target))
      time.sleep(seconds * rng.uniform(0.5, 1))
      process.kill()
      process.communicate(timeout=60)
    if not target.exists():
      assert run(ENDLESS, tmp_path, *arguments(target)) is not None
    assert compare_checkpoints(whole, target).equal
