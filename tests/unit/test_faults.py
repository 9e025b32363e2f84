"""Faults and hostile input: disks that fail at any write, damage in any kind of file, commands fuzzed.

Each fault is answered with an error of ours, or changes nothing. The long searches are marked slow; a few cases of each
run always.
"""

import dataclasses
import errno
import itertools
import os
import shutil
import sys
import threading
import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from attribution_runs import make_run
from test_training_loop import make_config, records, run_toy, score_arrays

from maxghost import cli, config, data
from maxghost.checkpoint import layouts_store
from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.checkpoint.manager import CheckpointError
from maxghost.config import ConfigError
from maxghost.config.values import guard
from maxghost.data import prepare, prepared
from maxghost.data.sources import synthetic
from maxghost.parallel import rendezvous
from maxghost.training.score_recorder import ScoreLogError

OURS = (ConfigError, CheckpointError, ScoreLogError, OSError)
slow = pytest.mark.slow


class Disk:
  """Python's own calls that change files below a folder: they are counted, and all fail from one of them on."""

  def __init__(self):
    self.folder, self.calls, self.fails_from = "", 0, sys.maxsize
    sys.addaudithook(self._hook)  # stays as long as the process

  def _hook(self, event, args):
    if not self.folder or event not in ("open", "os.mkdir", "os.rename", "os.truncate") or not isinstance(args[0], str):
      return
    if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
      return
    if args[0].startswith(self.folder):
      self.calls += 1
      if self.calls > self.fails_from:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), args[0])


DISK = Disk()


@pytest.fixture
def disk(tmp_path):
  DISK.folder, DISK.calls, DISK.fails_from = str(tmp_path / "run" / ""), 0, sys.maxsize
  yield DISK
  DISK.folder = ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole") / "run"
  run_toy(folder, make_config())
  return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """The same run, stopped after nine steps."""
  folder = tmp_path_factory.mktemp("stopped") / "run"
  run_toy(folder, make_config(), stop_at=8)
  return folder


def check_full_disk(folder, disk, whole, fails_from, monkeypatch):
  """The run ends with an error of ours, no thread with another, and nothing is lost once there is space again."""
  raised = []
  monkeypatch.setattr(threading, "excepthook", raised.append)
  disk.fails_from = fails_from
  with pytest.raises(OURS):
    run_toy(folder, make_config())
  assert raised == []
  disk.fails_from = sys.maxsize
  run_toy(folder, make_config())
  assert records(folder) == records(whole)
  assert score_arrays(folder) == score_arrays(whole)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fails_from", [1, 14, 33])
def test_a_disk_that_is_full(tmp_path, disk, whole, fails_from, monkeypatch):
  check_full_disk(tmp_path / "run", disk, whole, fails_from, monkeypatch)


@slow
@pytest.mark.timeout(3000)
def test_a_disk_that_is_full_from_any_write_on(tmp_path, disk, whole, monkeypatch):
  run_toy(tmp_path / "run", make_config())
  for fails_from in range(disk.calls):
    shutil.rmtree(tmp_path / "run")
    disk.calls = 0
    check_full_disk(tmp_path / "run", disk, whole, fails_from, monkeypatch)


def flip(path, rng, digits: bool) -> None:
  """Changes one digit of a text, or flips one bit."""
  raw = bytearray(path.read_bytes())
  places = [i for i, byte in enumerate(raw) if chr(byte).isdigit()] if digits else []
  at = int(rng.choice(places or len(raw)))
  digit = ord("0") + (raw[at] - ord("0") + int(rng.integers(1, 10))) % 10
  raw[at] = digit if places else raw[at] ^ 1 << int(rng.integers(8))
  path.write_bytes(raw)


def check_damage(folder, stopped, whole, name, rng, capsys):
  """A run that is continued after damage is refused or goes on as if nothing were; if not, it says something."""
  shutil.copytree(stopped, folder)
  flip(folder / name, rng, digits=name.endswith(("metadata", "METADATA", ".jsonl", ".json")))
  capsys.readouterr()
  try:
    run_toy(folder, make_config())
  except OURS:
    return
  said = "".join(capsys.readouterr())
  if not said:
    assert records(folder) == records(whole) and score_arrays(folder) == score_arrays(whole), name


@pytest.mark.parametrize("name", ["checkpoints/9/positions/metadata", "metrics.jsonl"])
def test_one_changed_digit(tmp_path, stopped, whole, name, capsys):
  for seed in range(2):
    check_damage(tmp_path / str(seed), stopped, whole, name, np.random.default_rng(seed), capsys)


@slow
@pytest.mark.timeout(3000)
def test_one_flipped_bit_or_changed_digit_in_any_file(tmp_path, stopped, whole, capsys):
  rng = np.random.default_rng(1)
  names = [path.relative_to(stopped).as_posix() for path in sorted(stopped.rglob("*")) if path.is_file()]
  names = [name for name in names if os.path.getsize(stopped / name)]
  assert len(names) > 20
  for name, number in itertools.product(names, range(12)):
    check_damage(tmp_path / f"{number}", stopped, whole, name, rng, capsys)
    shutil.rmtree(tmp_path / f"{number}")


@pytest.mark.parametrize("text", ["[]", "{", '{"tree_metadata": 3}', '{"tree_metadata": {"a": {"key_metadata": 1}}}'])
def test_metadata_of_a_checkpoint_of_wrong_types(tmp_path, stopped, text, capsys):
  shutil.copytree(stopped / "checkpoints" / "9", tmp_path / "9")
  (tmp_path / "9" / "items" / "_METADATA").write_text(text)
  assert cli.main(["checkpoint", "inspect", str(tmp_path / "9")]) == 2
  assert capsys.readouterr().err.count("\n") == 1


@slow
@pytest.mark.timeout(3000)
def test_a_damaged_checkpoint_is_inspected_without_a_traceback(tmp_path, stopped):
  rng, whole = np.random.default_rng(3), stopped / "checkpoints" / "9"
  names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
  for name, number in itertools.product(names, range(40)):
    shutil.copytree(whole, tmp_path / "9")
    flip(tmp_path / "9" / name, rng, digits=number % 2 == 0 and name.name.endswith(("metadata", "METADATA")))
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "9")]) in (0, 1, 2)
    shutil.rmtree(tmp_path / "9")


def read_by_layout(path):
  """What attribute, generate, convert, export and a run that begins with it read: arrays in parts or whole."""
  found = {}
  for name, array in layouts_store.open_tree(path).arrays().items():
    if array.shape:
      array.read((slice(0, 1),))
    found[name] = array.read(None).tobytes()
  return found


def test_no_changed_bit_of_a_checkpoint_gives_a_wrong_tensor(tmp_path, stopped):
  whole, rng, refused = stopped / "checkpoints" / "9", np.random.default_rng(4), 0
  expected = read_by_layout(whole)
  shutil.copytree(whole, tmp_path / "9")
  for name in [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]:
    for _ in range(4):
      flip(tmp_path / "9" / name, rng, digits=False)
      try:
        assert read_by_layout(tmp_path / "9") == expected, name
      except LayoutError:
        refused += 1
      shutil.copy(whole / name, tmp_path / "9" / name)
  assert refused > 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus") / "prepared"
  prepare.prepare(synthetic.load(domain_bytes=20_000), config.load().data, str(folder), part_bytes=30_000)
  return folder


def read(folder):
  keys = {"dataset_type": "grain", "dataset_files": (str(folder),), "ghost_val_sets": ("words",)}
  return data.load_dataset(dataclasses.replace(config.load().data, **keys))


def check_index(tmp_path, corpus, name, rng):
  shutil.copytree(corpus, tmp_path)
  flip(tmp_path / name, rng, digits=name.endswith(".json"))
  with pytest.raises(ConfigError, match=r"checksum|damaged|was prepared"):
    read(tmp_path)
  assert prepare.verify(str(tmp_path)) != []
  prepare.prepare(synthetic.load(domain_bytes=20_000), config.load().data, str(tmp_path), part_bytes=30_000)
  assert (tmp_path / name).read_bytes() == (corpus / name).read_bytes()


INDEX = (prepared.INDEX_FILE, "index/content_hash.npy", "index/paths.bin")


@pytest.mark.parametrize("name", INDEX)
def test_a_changed_index_of_a_prepared_corpus(tmp_path, corpus, name):
  assert len(read(corpus).source) > 0 and prepare.verify(str(corpus)) == []
  check_index(tmp_path / "x", corpus, name, np.random.default_rng(0))


@slow
def test_any_change_of_a_prepared_corpus(tmp_path, corpus):
  rng = np.random.default_rng(2)
  names = [prepared.INDEX_FILE, *(f"index/{path.name}" for path in sorted((corpus / "index").iterdir()))]
  for name, _ in itertools.product(names, range(20)):
    check_index(tmp_path / "x", corpus, name, rng)
    shutil.rmtree(tmp_path / "x")


def test_a_compressed_file_that_is_damaged(tmp_path):
  """zlib.error is none of the errors that gzip documents."""
  import gzip

  path = tmp_path / "a.txt.gz"
  raw = bytearray(gzip.compress(os.urandom(3000).hex().encode()))
  raw[12:40] = bytes(28)
  path.write_bytes(raw)
  with pytest.raises(zlib.error):
    gzip.decompress(raw)
  for number in range(9):
    (tmp_path / f"b{number}.txt").write_text("words " * 500)
  keys = {"dataset_type": "text", "dataset_files": (f"{tmp_path}/*",), "ghost_val_sets": ("text",)}
  with pytest.raises(ConfigError, match=r"a\.txt\.gz cannot be read"):
    data.load_dataset(dataclasses.replace(config.load().data, **keys))
  left = data.load_dataset(dataclasses.replace(config.load().data, on_corrupt="skip", **keys))
  assert any("a.txt.gz" in note for note in left.notes())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("fuzz") / "run", "dataset_type=synthetic", "ghost_val_sets=words", steps=6)


NASTY = (
  "", "-", "--", "=", "a\0b", "\x1b[2J\x1b]0;x\x07", "\u202e", "\ufffd", "../..", "/dev/null", "x" * 5000, "x/" * 3000,
  "-1", "1e999", "nan", "[" * 3000, "{a: *b}", "!!python/object:os.system", "%s%n", "10**18", "9" * 400, ",", ":", "~",
  "é", "*", "domain=", "step>=x", "--where=--", "--by", "--top", "--sort=", "steps=1e18", "head_dim=1e12",
  "base_num_decoder_layers=1e30", "segment_lengths=[[[[", "run_name=../x", "base_output_directory=\0", "--help",
  "--json",
)  # fmt: skip
COMMANDS = (
  ("train", "--print_config"), ("report",), ("scores",), ("generate", "/no/such/model"), ("attribute", "/no/such/run"),
  ("data", "verify"), ("data", "show", "dataset_type=synthetic", "dataset_domain_bytes=20000"),
  ("checkpoint", "inspect"), ("checkpoint", "compare"), ("checkpoint", "convert"), ("checkpoint", "hf"), (),
)  # fmt: skip


def check_command(run_dir, command, words, capsys):
  """A command ends with an exit code; what it says of a mistake is short, and steers no terminal."""
  arguments = [*command, *(str(run_dir) if word == "RUN" else word for word in words)]
  begin = capsys.readouterr() and os.times().elapsed
  try:
    code = cli.main(arguments)
  except SystemExit as exit:  # argparse's own
    code = exit.code
  err = capsys.readouterr().err
  assert code in (0, 1, 2), arguments
  assert "Traceback" not in err and os.times().elapsed - begin < 20
  assert all(len(line) < 2100 for line in err.splitlines()), arguments
  assert all(char.isprintable() or char == "\n" for char in err), arguments


def fuzzed(test, max_examples):
  words = st.lists(
    st.one_of(st.sampled_from(NASTY), st.just("RUN"), st.text(st.characters(codec="utf-8"), max_size=30)), max_size=4
  )
  given = hypothesis.given(command=st.sampled_from(COMMANDS), words=words)
  health = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
  settings = hypothesis.settings(
    max_examples=max_examples, derandomize=True, suppress_health_check=health, database=None, deadline=None
  )
  return settings(given(test))


def test_no_argument_ends_in_a_traceback(run_dir, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for command, words in itertools.product(
    (("scores",), ("train", "--print_config"), ("data",), ("data", "show"), ("checkpoint",), ("checkpoint", "hf")),
    (("RUN", "--where=--"), ("a\0b",), ("\x1b[2J", "--\x1b")),
  ):
    check_command(run_dir, command, words, capsys)
  fuzzed(lambda command, words: check_command(run_dir, command, words, capsys), 12)()


@slow
@pytest.mark.timeout(3000)
def test_no_argument_at_all_ends_in_a_traceback(run_dir, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  fuzzed(lambda command, words: check_command(run_dir, command, words, capsys), 3000)()


@pytest.mark.parametrize(
  ("error", "code", "said"),
  [
    (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1, "maxghost: /x/y: No space left on device\n"),
    (OSError("the score log could not be written"), 1, "maxghost: the score log could not be written\n"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x/y"), 2, "maxghost: x/y: File name too long\n"),
    (ConfigError("a\x1b[2Jb"), 2, "maxghost: a\\x1b[2Jb\n"),
    (ConfigError("x" * 9999), 2, f"maxghost: {'x' * 2000}...\n"),
    (KeyboardInterrupt(), 130, "maxghost: interrupted\n"),
    (ValueError("embedded null byte"), 2, "maxghost: a path holds a NUL character\n"),
    (
      RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
      1,
      "maxghost: out of device memory: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n",
    ),
  ],
)
def test_one_guard_turns_faults_into_a_line(error, code, said, capsys):
  def work():
    raise error

  assert guard(work) == code and capsys.readouterr().err == said


def test_ports_of_the_environment_that_are_none(monkeypatch):
  monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0")
  with pytest.raises(ConfigError, match=r"0.0.0.0 is no address .*HOST:PORT, .*_BIND_ADDRESS=0.0.0.0:1234"):
    rendezvous.listen("127.0.0.1:1234")
  for name, value in {"STEP_NODELIST": "a,b", "JOB_ID": "70001", "PROCID": "0", "NTASKS": "2"}.items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  for port in ("abc", "65536", "0"):
    monkeypatch.setenv("JAX_COORDINATOR_PORT", port)
    with pytest.raises(ConfigError, match=f"JAX_COORDINATOR_PORT={port} is no port"):
      rendezvous.of_launcher()
