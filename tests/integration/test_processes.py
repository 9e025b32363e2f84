"""Real processes on this machine: two of four devices are one of eight; one is killed, and the run goes on.

Each has a folder of its own, as a machine has a disk.

Collectives between processes are Gloo's.
"""

import functools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from maxghost import attribution, train

STEPS, PERIOD = 8, 3
# adam_eps is larger than the gradients' rounding: with 1e-8 the first steps divide rounding by rounding.
KEYS = (
  "base_num_decoder_layers=2", "base_emb_dim=32", "base_mlp_dim=48", "head_dim=8", "base_num_kv_heads=4",
  "vocab_size=272", "max_target_length=64", "per_device_batch_size=1", "dataset_type=synthetic",
  "ghost_val_sets=words", "ghost_val_batch_size=8", "ghost_detail=module", "learning_rate=3e-3", "adam_eps=1e-3",
  "warmup_steps_fraction=0.1", f"steps={STEPS}", f"checkpoint_period={PERIOD}", "eval_interval=4", "eval_steps=1",
  "ghost_log_period=3", "enable_tensorboard=false", "sharding_tolerance=1.0", "attention=dot_product",
  "remat_policy=minimal",
  "jax_distributed_timeouts=300,60",
)  # fmt: skip


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


class Processes:
  """`num` processes of `maxghost.train` with 8 / num virtual devices each, process k in the folder `machine_k`.

  patches: {process: Python code that runs before the command}.
  """

  def __init__(self, folder, num, *changes, patches=()):
    port = free_port()
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "PYTHONUNBUFFERED": "1",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={8 // num}",
    }
    common = [*KEYS, f"base_output_directory={folder}", f"jax_cache_dir={folder / 'cache'}", *changes]
    self.started, self.outputs = [], []
    for index in range(num):
      own = []
      if num > 1:
        own = [f"jax_distributed=127.0.0.1:{port},{index}/{num}"]  # fmt: skip
      self.outputs.append(folder / f"out_{port}_{index}.txt")
      with open(self.outputs[-1], "w") as output:
        module = ["-m", "maxghost.train"]
        if index in patches:
          module = ["-c", f"{patches[index]}\nimport sys\nfrom maxghost import train\nsys.exit(train.main())"]
        command, machine = [sys.executable, *module, *common, *own], folder / f"machine_{index}"
        machine.mkdir(exist_ok=True)
        where = {"cwd": machine, "env": environment}
        self.started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **where))

  def text(self, index: int) -> str:
    return self.outputs[index].read_text()

  def wait_for(self, text: str, seconds: float = 800) -> None:
    end = time.monotonic() + seconds
    while text not in self.text(0):
      assert time.monotonic() < end and self.started[0].poll() is None, self.text(0)[-3000:]
      time.sleep(0.1)

  def codes(self, seconds: float = 800) -> list[int]:
    return [process.wait(seconds) for process in self.started]

  def succeed(self) -> None:
    codes = self.codes()
    assert codes == [0] * len(codes), [self.text(i)[-3000:] for i in range(len(codes))]


def losses(run):
  lines = (run / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def rows(run) -> dict:
  """{(step, document, chunk): dot, contribution, tokens}"""
  log = attribution.load(run)
  names = [log[name].tolist() for name in ("step", "domain", "path", "offset", "chunk")]
  values = [log[name].reshape(len(names[0]), -1)[:, 0].tolist() for name in ("dot", "contribution", "tokens")]
  return dict(zip(zip(*names, strict=True), zip(*values, strict=True), strict=True))


def assert_same_run(ours, theirs, steps=STEPS) -> None:
  """Losses to 1e-6, scores to 1e-5, the same rows, each once."""
  expected = losses(theirs)
  actual = losses(ours)
  assert [record["step"] for record in actual] == [record["step"] for record in expected] == list(range(steps))
  for a, b in zip(actual, expected, strict=True):
    for name in ("learning/loss", "ghost/val_loss/words"):
      assert a[name] == pytest.approx(b[name], rel=1e-6)
    assert a["learning/total_weights"] == b["learning/total_weights"]
    by_domain = {name: value for name, value in b.items() if name.startswith("ghost/contribution/")}
    assert len(by_domain) > 2
    assert {name: a[name] for name in by_domain} == pytest.approx(by_domain, rel=1e-4, abs=1e-5)
  actual, expected = rows(ours), rows(theirs)
  assert actual.keys() == expected.keys() and len(actual) > 5 * steps
  assert len(attribution.load(ours)["step"]) == len(attribution.load(theirs)["step"])
  a, b = (np.array([values[key] for key in expected]) for values in (actual, expected))
  for column in (0, 1):
    assert np.abs(a[:, column] - b[:, column]).max() < 1e-5 * np.abs(b[:, column]).max()
  np.testing.assert_array_equal(a[:, 2], b[:, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def one_process(folder):
  """The run of one process, which is this one, and its eight devices."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    assert train.main([*KEYS, f"base_output_directory={folder}", "run_name=one"]) == 0
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
  return folder / "one"


LOCAL = ("local_checkpoint_directory=near", "local_checkpoint_period=1")


@pytest.mark.timeout(1800)
def test_two_processes_are_one(folder, one_process):
  processes = Processes(folder, 2, "run_name=two", *LOCAL)
  processes.succeed()
  assert "mesh: fsdp 8 (8 devices) of 2 processes" in processes.text(0)
  assert "completed step" not in processes.text(1)  # process 0 speaks for all
  assert_same_run(folder / "two", one_process)
  assert not list((folder / "machine_1" / "near").iterdir())  # the end of a run is durable


@pytest.mark.timeout(1800)
def test_a_process_of_two_is_killed_and_its_machine_lost(folder, one_process):
  """The disk of the other machine is lost too: the run goes on from what the first one has."""
  run = folder / "killed_once"
  processes = Processes(folder, 2, "run_name=killed_once", *LOCAL)
  processes.wait_for("completed step: 4,")
  begin = time.monotonic()
  processes.started[1].send_signal(signal.SIGKILL)
  codes = processes.codes()
  assert time.monotonic() - begin < 200  # on a busy machine; a missing heartbeat takes 60
  durable = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
  if codes == [-signal.SIGABRT, -signal.SIGKILL]:  # Gloo did not notice it: JAX ends the run, after a line of ours
    assert "process 1 has given no sign of life" in processes.text(0)
  else:
    assert codes == [1, -signal.SIGKILL]
    assert "another process of the run is lost" in processes.text(0)
    assert f"the last good checkpoint is {run / 'checkpoints' / str(durable)}, the local one" in processes.text(0)
  shutil.rmtree(folder / "machine_0")

  again = Processes(folder, 2, "run_name=killed_once", *LOCAL)
  again.succeed()
  assert re.search(r"Continuing after [4-7] completed steps: \S+/machine_0/near/killed_once-", again.text(0))
  assert_same_run(run, one_process)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_random_kills_from_two_to_one_to_four_processes(folder):
  """In the middle of steps, saves and starts; some take a machine's disk with them. No row is lost or doubled."""
  steps, num_kills, rng, began = 160, 20, np.random.default_rng(7), []
  keys = (f"steps={steps}", "checkpoint_period=12", "jax_distributed_timeouts=300,20")
  Processes(folder, 1, "run_name=unbroken", *keys).succeed()
  for number in range(num_kills + 1):
    processes = Processes(folder, num := (2, 1, 4)[number // 7], "run_name=moved", *keys, *LOCAL)
    if number < num_kills:
      if rng.random() < 0.25:
        time.sleep(rng.uniform(0, 12))
      else:
        processes.wait_for("completed step: ")
        first = int(processes.text(0).partition("completed step: ")[2].partition(",")[0])
        processes.wait_for(f"completed step: {first + rng.integers(7)},")
        time.sleep(rng.uniform(0, 1))
      victims = rng.choice(num, rng.integers(1, num + 1), replace=False).tolist()
      for index in victims:
        processes.started[index].kill()
      codes = processes.codes()
      assert 0 not in codes and all("Traceback" not in processes.text(i) for i in {*range(num)} - {*victims}), codes
      if rng.random() < 0.4:
        shutil.rmtree(folder / f"machine_{victims[0]}" / "near", ignore_errors=True)
    began += re.findall(r"Continuing after (\d+) completed steps: (\S+)", processes.text(0))
  assert processes.codes() == [0] * num, processes.text(0)[-3000:]
  print([(int(step), "local" if "near" in path else "durable") for step, path in began])
  assert sum("near" in path for _, path in began) > 5
  assert_same_run(folder / "moved", folder / "unbroken", steps)


HANGING = """
import itertools, time
from maxghost.training import batches
drawn, numbers = batches.Prefetcher.__next__, itertools.count()
def next_or_never(self):
  if next(numbers) == 5:
    time.sleep(10**6)
  return drawn(self)
batches.Prefetcher.__next__ = next_or_never
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_whose_data_hang_is_named(folder):
  """In 8 seconds, and ten times what a batch took before; with the collective in which the other one waits."""
  processes = Processes(folder, 2, "run_name=hangs", "jax_distributed_timeouts=300,8", patches={1: HANGING})
  assert processes.codes(300) == [1, 1]
  found = re.search(
    r"process 0 of 2: process 1 of 2 hangs for (\d+) s \(step 5: reads its batch, at .*next_or_never\)\); the others "
    r"wait for it in train_step, whose first collective between processes is the [a-z-]+ of \S+ over fsdp; ",
    processes.text(0),
  )
  assert found and 8 <= int(found[1]) < 60, processes.text(0)[-3000:]
  assert "process 1 of 2: process 1 of 2 hangs" in processes.text(1) and "Traceback" not in processes.text(0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_process_is_asked_to_stop_and_all_do(folder, one_process):
  stopped = Processes(folder, 2, "run_name=stopped")
  stopped.wait_for("completed step: 2,")
  stopped.started[1].send_signal(signal.SIGTERM)
  assert stopped.codes() == [0, 0] and "Stopped by another process after" in stopped.text(0)
  Processes(folder, 2, "run_name=stopped").succeed()
  assert_same_run(folder / "stopped", one_process)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_random_moments_two_processes_are_the_same_run(folder, one_process):
  """One of them, or both at once; what was lost is done again, and nothing is done twice."""
  rng = np.random.default_rng(5)
  for _ in range(6):
    processes = Processes(folder, 2, "run_name=killed", "jax_distributed_timeouts=300,20")
    time.sleep(rng.uniform(4, 40))
    victims = [[0], [1], [0, 1]][rng.integers(3)]
    for index in victims:
      processes.started[index].kill()
    codes = processes.codes()
    for index in {0, 1} - {*victims}:
      assert codes[index] != -signal.SIGKILL and "Traceback" not in processes.text(index), processes.text(index)[-3000:]
  Processes(folder, 2, "run_name=killed").succeed()
  assert_same_run(folder / "killed", one_process)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_processes_continue_what_one_began_on_another_mesh(folder, one_process):
  begun = Processes(folder, 1, "run_name=four")
  begun.wait_for("completed step: 4,")
  begun.started[0].send_signal(signal.SIGTERM)
  assert begun.codes() == [0]
  four = Processes(folder, 4, "run_name=four", "ici_tensor_parallelism=2")
  four.succeed()
  assert "Continuing after" in four.text(0) and "fsdp 4 x tensor 2 (8 devices) of 4 processes" in four.text(0)
  assert_same_run(folder / "four", one_process)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_processes_continue_what_stages_on_two_began(folder, one_process):
  """Each stage is a process, which is killed: its layers and moments are on its disk and its peer's."""
  stages = Processes(folder, 2, "run_name=stages", "ici_pipeline_parallelism=2", *LOCAL)
  stages.wait_for("completed step: 4,")
  for process in stages.started:
    process.kill()
  assert "stage 2 x fsdp 4 (8 devices) of 2 processes" in stages.text(0)
  shutil.rmtree(folder / "machine_1" / "near")
  four = Processes(folder, 4, "run_name=stages", "ici_tensor_parallelism=2", *LOCAL)
  four.succeed()
  assert re.search(r"Continuing after [4-7] completed steps: \S+/machine_0/near/stages-", four.text(0))
  assert_same_run(folder / "stages", one_process)


@pytest.mark.slow
def test_processes_of_unlike_keys_say_which(folder):
  port = free_port()
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  started = []
  for index in range(2):
    own = (f"jax_distributed=127.0.0.1:{port},{index}/2", f"steps={STEPS + index}")  # fmt: skip
    place = (f"base_output_directory={folder}", "run_name=unlike")
    command = [sys.executable, "-m", "maxghost.train", *KEYS, *place, *own]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started.append(subprocess.Popen(command, env=environment, **pipes))
  for process in started:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and f"steps={STEPS + 1} in process 1, {STEPS} in process 0" in err
  assert not (folder / "unlike").exists()


def two_in_folders_of_their_own(folder, *changes, limit=None):
  """(exit code, stderr) of two processes, each in a folder of its own; `limit` is called in the second one."""
  port, started = free_port(), []
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
  }
  for index in range(2):
    own = folder / str(index)
    own.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "maxghost.train", *KEYS, *changes, f"jax_distributed=127.0.0.1:{port},{index}/2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started.append(subprocess.Popen(command, env=environment, cwd=own, preexec_fn=limit if index else None, **pipes))
  return [(process.communicate(timeout=600)[1], process.returncode)[::-1] for process in started]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_that_is_not_shared_is_refused(folder):
  for code, err in two_in_folders_of_their_own(folder / "unshared", "run_name=unshared"):
    assert code == 2 and "process 1 does not see what process 0 writes to" in err, err[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_begin_with_the_same_model_or_say_so(folder, one_process):
  """A path that is relative, or of a disk of its own, may hold another model in each process."""
  Processes(folder, 1, "run_name=other", "init_weights_seed=5").succeed()
  changes = (f"base_output_directory={folder}", "load_parameters_path=model", "checkpoint_period=0")
  for name, models in (("like", [one_process] * 2), ("unlike", [one_process, folder / "other"])):
    for index, model in enumerate(models):
      shutil.copytree(model, folder / name / str(index) / "model")
    for code, err in two_in_folders_of_their_own(folder / name, *changes, f"run_name=from_{name}"):
      assert (code == 0) == (name == "like"), err[-3000:]
      assert code == 0 or "reads other arrays than process 0; give all the same files" in err, err[-3000:]
      assert "Traceback" not in err
  assert train.main([*KEYS, *changes[::2], f"load_parameters_path={one_process}", "run_name=from_one"]) == 0
  assert_same_run(folder / "from_like", folder / "from_one")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_of_unlike_data_say_so(folder):
  for index in range(2):
    own = folder / "unlike_data" / str(index) / "texts"
    own.mkdir(parents=True)
    for number in range(40):
      (own / f"{number}.txt").write_text(f"Process {index if number == 7 else 0} reads number {number}. " * 40)
  changes = (
    "dataset_type=text",
    "dataset_files=[words=texts/*.txt]",
    f"base_output_directory={folder}",
    "run_name=data",
  )
  for code, err in two_in_folders_of_their_own(folder / "unlike_data", *changes):
    assert code == 2 and "process 1 reads other data than process 0" in err, err[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_write_that_fails_in_one_process_ends_both_at_once(folder):
  limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20 << 10, 20 << 10))
  changes = (f"base_output_directory={folder}", "run_name=full", "ghost_enabled=false")
  begin = time.monotonic()
  ended = two_in_folders_of_their_own(folder / "full_disk", *changes, limit=limit)
  assert time.monotonic() - begin < 200
  for code, err in ended:
    assert code == 1 and "could not be written by process 1" in err and "Traceback" not in err, err[-3000:]


ERRORS = {
  "a line": ("from maxghost.config import ConfigError as Error", 2, "maxghost: broken here"),
  "a traceback": ("Error = TypeError", 1, "TypeError: broken here"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "process"), [("a line", 0), ("a line", 1), ("a traceback", 1)])
def test_an_error_that_one_process_meets_alone_ends_both(folder, kind, process):
  """The other waits for it, and JAX would let it wait for the other."""
  error, code, said = ERRORS[kind]
  patch = f"""
from maxghost import data
{error}

def broken(*args, **options):
  raise Error("broken here")

data.make_dataset = broken
"""
  begin, changes = time.monotonic(), ("run_name=alone", "jax_distributed_timeouts=60,30")
  run = Processes(folder, 2, *changes, patches={process: patch})
  other, codes = 1 - process, run.codes()
  assert time.monotonic() - begin < 120
  texts = [run.text(i) for i in range(2)]
  assert (codes[process], codes[other]) == (code, 1), [text[-3000:] for text in texts]
  assert said in texts[process] and "*** " not in texts[process], texts[process][-3000:]
  waited = f"process {other} of 2: process {process} of 2 has ended with code {code}; its output says why"
  assert waited in texts[other] and "*** " not in texts[other], texts[other][-3000:]
