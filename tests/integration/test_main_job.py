"""The real command on a tiny model: killed, stopped, its newest checkpoint damaged, and continued.

The one figure that counts: losses and scores of every step have the same bits as those of a run left alone.
"""

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

STEPS, PERIOD = 30, 8
KEYS = (
  "learning_rate=3e-3",
  "warmup_steps_fraction=0.1",
  "base_num_decoder_layers=2",
  "base_emb_dim=32",
  "base_mlp_dim=48",
  "head_dim=8",
  "max_target_length=64",
  "per_device_batch_size=6",
  "dataset_domain_bytes=60000",
  "dropout_rate=0.1",
  f"steps={STEPS}",
  f"checkpoint_period={PERIOD}",
  "eval_interval=7",
  "eval_steps=2",
  "ghost_log_period=5",
  "ghost_val_refresh_steps=6",
  "attention=dot_product",
  "remat_policy=minimal",  # these two compile fastest
)


class Command:
  """`python -m maxghost.train` in a folder of its own; compiled programs are shared by all starts."""

  def __init__(self, folder):
    self.folder = folder
    self.environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "PYTHONUNBUFFERED": "1",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

  def start(self, *changes, limit=None, **environment):
    arguments = [*KEYS, f"base_output_directory={self.folder}", f"jax_cache_dir={self.folder / 'cache'}", *changes]
    return subprocess.Popen(
      [sys.executable, "-m", "maxghost.train", *arguments],
      env=self.environment | environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      preexec_fn=limit,
    )

  def run(self, *changes, **environment):
    """(exit code, stdout, stderr) of a start that is left alone."""
    process = self.start(*changes, **environment)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err

  def stop_at(self, pattern, number, *changes, delay=0.0):
    """Sends a signal `delay` seconds after a line of stdout that matches; (exit code, stdout, stderr)."""
    process = self.start(*changes)
    seen = []
    for line in process.stdout:
      seen.append(line)
      if re.match(pattern, line):
        time.sleep(delay)
        process.send_signal(number)
        break
    out, err = process.communicate(timeout=300)
    return process.returncode, "".join(seen) + out, err


def losses(run):
  """The records without what a clock measured."""
  lines = (run / "metrics.jsonl").read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]


def scores(run):
  """(step records, rows) of all score files, as bytes, with document names spelled out."""
  steps, rows = [], []
  for path in sorted((run / "ghost").glob("*.npz"), key=lambda p: int(p.stem.split("_")[-1])):
    with np.load(path) as file:
      steps += [step.tobytes() for step in file["steps"]]
      fields = [name for name in file["rows"].dtype.names if name not in ("domain", "path")]
      for row in file["rows"]:
        name = str(file["domain_table"][row["domain"]]), str(file["path_table"][row["path"]])
        rows.append((*name, *(row[field].tobytes() for field in fields)))
  return steps, rows


def checkpoints(run):
  return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def flip_bits(folder):
  """Damage that no file size tells. Several bits, as a single one may lie in no array."""
  files = [os.path.join(root, name) for root, _, names in os.walk(folder / "items") for name in names]
  path = max(files, key=os.path.getsize)
  size = os.path.getsize(path)
  with open(path, "r+b") as file:
    for place in range(size // 8, size, size // 8):
      file.seek(place)
      byte = file.read(1)[0]
      file.seek(place)
      file.write(bytes([byte ^ 4]))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
  return Command(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def left_alone(command):
  """(stdout, stderr) of an uninterrupted run, with JAX's log of what it compiled."""
  code, out, err = command.run("run_name=alone", JAX_LOG_COMPILES="1")
  assert code == 0, err[-3000:]
  return out, err


def test_a_run_left_alone(command, left_alone):
  out, err = left_alone
  run = command.folder / "alone"
  found = losses(run)
  assert [record["step"] for record in found] == list(range(STEPS))
  assert found[-1]["learning/loss"] < found[0]["learning/loss"] - 1
  assert all(np.isfinite(record["ghost/actual_drop/manual"]) for record in found)
  assert all(record["ghost/check_rel_err/manual"] < 1e-5 for record in found)
  assert [line.split(",")[0] for line in out.splitlines() if line.startswith("completed")] == [
    f"completed step: {step}" for step in range(STEPS)
  ]
  assert re.search(
    r"^completed step: 3, seconds: [\d.]+, Tokens/s/device: \d+, loss: [\d.]+, val_loss: [\d.]+, drop: [-+][\d.]+",
    out,
    re.M,
  )
  assert max(len(line) for line in out.splitlines() if line.startswith("completed")) <= 120
  assert 0 < out.index("Compiling the train step") < out.index("Compiled train_step")
  assert f"python -m maxghost.report {run}" in out
  assert err.count("Finished XLA compilation of jit(train_step)") == 1
  assert (run / "config.yml").exists() and list((run / "tensorboard").iterdir())
  assert len(scores(run)[0]) == STEPS + 1


def test_score_rows_name_every_trained_document(command, left_alone):
  """All tokens that counted in the loss are in the score log, and contributions add up to the step's column."""
  found = losses(command.folder / "alone")
  tokens, contribution = dict.fromkeys(range(STEPS), 0), dict.fromkeys(range(STEPS), 0.0)
  column = {}
  for path in (command.folder / "alone" / "ghost").glob("*.npz"):
    with np.load(path) as file:
      for row in file["rows"]:
        tokens[int(row["step"])] += int(row["tokens"])
        contribution[int(row["step"])] += float(row["contribution"][0])
      column |= {int(step["step"]): float(step["predicted_examples"][0]) for step in file["steps"]}
  for step, record in enumerate(found):
    assert tokens[step] == record["learning/total_weights"]
    assert contribution[step] == pytest.approx(column[step], rel=1e-4, abs=1e-7)


def test_stopped_damaged_killed_and_continued_it_is_the_same_run(command, left_alone):
  """Without TensorBoard, whose import takes longer than these steps."""
  run, name = command.folder / "broken", ("run_name=broken", "enable_tensorboard=false")

  code, out, err = command.stop_at("completed step: 17,", signal.SIGTERM, *name)
  assert code == 0 and "SIGTERM received" in err
  stopped = checkpoints(run)[-1]
  assert 18 <= stopped < STEPS
  assert f"after {stopped} of {STEPS} steps; saved in {run / 'checkpoints' / str(stopped)}" in out
  assert [record["step"] for record in losses(run)] == list(range(stopped))

  flip_bits(run / "checkpoints" / str(stopped))
  code, out, err = command.stop_at("Saving a checkpoint after 30 ", signal.SIGKILL, *name)
  assert f"checkpoint {run / 'checkpoints' / str(stopped)} cannot be used" in out
  assert "Continuing after 16 completed steps" in out
  assert code == -signal.SIGKILL, out  # the last steps are done, the account is not closed

  code, out, err = command.run(*name)
  assert code == 0 and "Training complete: 30 steps" in out

  assert losses(run) == losses(command.folder / "alone")
  assert scores(run) == scores(command.folder / "alone")


def test_killed_at_its_first_checkpoint_and_stopped_by_ctrl_c_it_is_the_same_run(command, left_alone):
  run, name = command.folder / "first", ("run_name=first", "enable_tensorboard=false")

  code, out, _ = command.stop_at(f"Saving a checkpoint after {PERIOD} ", signal.SIGKILL, *name)
  assert code == -signal.SIGKILL  # in the middle of the first checkpoint, or just after it
  saved = checkpoints(run)

  code, out, err = command.stop_at("completed step: 17,", signal.SIGINT, *name)
  assert code == 130 and "Ctrl-C received" in err
  assert saved or "starts again at step 0" in out
  stopped = checkpoints(run)[-1]
  assert [record["step"] for record in losses(run)] == list(range(stopped))

  code, out, err = command.run(*name)
  assert code == 0 and f"Continuing after {stopped} completed steps" in out
  assert losses(run) == losses(command.folder / "alone")
  assert scores(run) == scores(command.folder / "alone")


def test_a_complete_run_says_so_and_starts_nothing(command, left_alone):
  begin = time.perf_counter()
  code, out, err = command.run("run_name=alone")
  assert code == 0 and "is complete: 30 steps" in out and "steps=60" in out and err == ""
  assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
  "changes, message",
  [
    (["run_name=alone", "learning_rate=1"], "learning_rate: the run has 0.003, the command 1.0"),
    (["run_name=alone", "steps=29"], "steps may only grow"),
    (["run_name=alone", "steps=60", "per_device_batch_size=5", "enable_tensorboard=false"], "was trained with 6"),
    (["run_name=new", "base_output_directory=/dev/null/x"], "cannot write"),
    (["run_name=new", "ghost_exclude=no/such/*"], "no/such"),
    (["run_name=new", "local_checkpoint_period=2", "local_checkpoint_directory=/dev/null"], "Not a directory"),
    (["run_name=new", "stepz=3"], "stepz"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(command, left_alone, changes, message):
  before, config = sorted(os.listdir(command.folder)), (command.folder / "alone" / "config.yml").read_bytes()
  code, out, err = command.run(*changes)
  complaints = [line for line in err.splitlines() if "note:" not in line]
  assert code == 2 and len(complaints) == 1 and message in complaints[0], err
  assert "Traceback" not in err and out == ""
  assert sorted(os.listdir(command.folder)) == before
  assert (command.folder / "alone" / "config.yml").read_bytes() == config


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(command):
  """The rate is 0 in the first step and absurd in the second: what is saved before that is good and is named."""
  changes = ("run_name=hot", "learning_rate=1e30", "ghost_enabled=false", "checkpoint_period=1", "eval_interval=-1")
  code, _, err = command.run(*changes)
  assert code == 1 and "Traceback" not in err
  found = re.search(r"^maxghost: step (\d+): \w+ is (?:nan|inf); the last good checkpoint is (\S+)$", err, re.M)
  assert found, err
  step, saved = int(found[1]), int(found[2].rpartition("/")[2])
  assert saved <= step and checkpoints(command.folder / "hot")[-1] == saved
  assert [record["step"] for record in losses(command.folder / "hot")] == list(range(step))


KINDS = {
  "accumulation": ("gradient_accumulation_steps=2", "per_device_batch_size=3"),
  "tokens": ("ghost_detail=token",),
  "greats": ("ghost_select=greats",),
  "reweighting": ("ghost_reweight=[6,0.5]", "dataset_mixture=[code=0.25,docstrings=0.25,manual=0.25,tables=0.25]"),
  "readers": ("grain_worker_count=2",),
  "muon": (
    "opt_type=muon",
    "muon_consistent_rms=0.2",
    "use_qk_clip=true",
    "qk_clip_threshold=0.1",
    "ghost_curvature=secant",
  ),
  "path": ("ghost_direction=path", "ghost_curvature=secant", "ghost_val_every=2", "ghost_rank=2"),
  "rollouts": (
    "objective=grpo",
    "packing=none",
    "num_generations=3",
    "num_iterations=3",
    "max_completion_length=5",
    "max_target_length=16",
    "dataset_type=text",
    "dataset_domain_bytes=-1",
    "dataset_files=[sums=SUMS]",
    "ghost_val_sets=[sums]",
    "reward_functions=[python_parses]",
    "scale_rewards=none",
    "dropout_rate=0.0",
  ),
}
KILLS = {"muon": 20, "path": 20}  # 8 for the others


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments_it_is_the_same_run(command, kind):
  rng = np.random.default_rng(list(KINDS).index(kind))
  begin = time.perf_counter()
  sums = command.folder / "sums.jsonl"
  sums.write_text("".join(f'{{"prompt": "{a}+1=", "completion": "{a + 1}"}}\n' for a in range(40)))
  changes = [text.replace("SUMS", str(sums)) for text in KINDS[kind]]
  code, _, err = command.run(f"run_name={kind}_alone", *changes)
  seconds = time.perf_counter() - begin
  assert code == 0, err[-3000:]
  name = f"run_name={kind}_killed"
  for _ in range(KILLS.get(kind, 8)):
    process = command.start(name, *changes)
    time.sleep(rng.uniform(0.1, seconds))
    process.kill()
    process.communicate(timeout=300)
  code, _, err = command.run(name, *changes)
  assert code == 0, err[-3000:]
  assert losses(command.folder / f"{kind}_killed") == losses(command.folder / f"{kind}_alone")
  assert scores(command.folder / f"{kind}_killed") == scores(command.folder / f"{kind}_alone")
  if kind == "rollouts":
    killed, alone = (command.folder / f"rollouts_{how}" / "rollouts.jsonl" for how in ("killed", "alone"))
    assert killed.read_bytes() == alone.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_ctrl_c_at_any_moment_of_the_start_is_an_answer(command):
  """The first one stops the run, with a line of ours, however early it comes once the command has begun."""

  def heard() -> None:  # also in a suite that nohup or a shell's & started
    for number in (signal.SIGINT, signal.SIGHUP):
      signal.signal(number, signal.SIG_DFL)

  for number in range(8):
    process = command.start(f"run_name=early_{number}", limit=heard)
    caught = 0
    while not caught & 1:  # the handler of SIGHUP shows that the command has begun
      assert process.poll() is None
      status = Path(f"/proc/{process.pid}/status").read_text()
      caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
      time.sleep(0.01)
    time.sleep(0.7 * number)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in err, err[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kilobytes", [1, 6, 40, 100])
def test_files_that_may_not_grow_end_the_run_in_a_line(command, left_alone, kilobytes):
  """Any file may fail first: the config, metrics, scores or checkpoint. Nothing is lost when there is space again."""
  name = f"run_name=small_{kilobytes}"
  limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (kilobytes << 10, kilobytes << 10))
  process = command.start(name, limit=limit)
  _, err = process.communicate(timeout=300)
  lines = [line for line in err.splitlines() if line.startswith("maxghost: ")]
  assert process.returncode in (1, 2) and len(lines) == 1 and "Traceback" not in err, err[-3000:]
  code, _, err = command.run(name)
  assert code == 0, err[-3000:]
  assert losses(command.folder / name.partition("=")[2]) == losses(command.folder / "alone")
  assert scores(command.folder / name.partition("=")[2]) == scores(command.folder / "alone")


@pytest.mark.slow
def test_virtual_devices_do_not_wait_for_each_other_forever(command):
  """In XLA's default order four devices start more collectives of this step than XLA has threads, and none ends."""
  flags = "--xla_force_host_platform_device_count=4 --xla_cpu_collective_call_terminate_timeout_seconds=20"
  small = {"base_emb_dim": 20, "head_dim": 6, "base_mlp_dim": 28, "base_num_decoder_layers": 4, "vocab_size": 264,
           "max_target_length": 48, "per_device_batch_size": 4, "dropout_rate": 0.0, "steps": 2}  # fmt: skip
  mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2, "sharding_tolerance": 1}
  data = {"dataset_type": "synthetic", "ghost_val_sets": "words", "dataset_domain_bytes": 20000, "run_name": "four"}
  keys = small | mesh | data | {"gradient_accumulation_steps": 2, "eval_interval": -1, "checkpoint_period": 0}
  code, out, err = command.run(*(f"{key}={value}" for key, value in keys.items()), XLA_FLAGS=flags, NPROC="4")
  assert code == 0, out + err
