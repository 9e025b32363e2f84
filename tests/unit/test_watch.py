"""The watch over processes, with signs of life made up for the others."""

import atexit
import json
import math
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from maxghost.parallel import collectives, distributed, watch


class EndOfRun(Exception):
  """In place of the end of the process."""


class Store(dict):
  """others: {process: function of this process's own sign that gives the process's sign, or None}."""

  def __init__(self, others):
    self._others, self._beat = others, 0

  def key_value_set(self, key, value, allow_overwrite):
    assert allow_overwrite
    self[key], own = value, json.loads(value)
    for process, sign in self._others.items():
      if (said := sign(dict(own))) is not None:
        self[f"maxghost/alive/{process}"] = json.dumps(said)
    self._beat += 1
    if self._beat > 200:
      raise EndOfRun("nothing was noticed")

  def key_value_dir_get(self, prefix):
    return [(key, value) for key, value in self.items() if key.startswith(prefix)]


def watched(monkeypatch, capsys, others, phases, patience=1.0, explained=True):
  """What process 0 prints, and its exit code."""
  codes = []

  def end(code):
    codes.append(code)
    raise EndOfRun

  monkeypatch.setattr(distributed, "count", lambda: 1 + len(others))
  monkeypatch.setattr(distributed, "exit_at_once", end)
  monkeypatch.setattr(multihost, "get_jax_distributed_client", lambda: Store(others))
  one = watch.Watch(patience)
  if explained:
    one.explain = lambda program: f"whose first collective between processes is that of {program}"
  for phase in phases:
    one(*phase[:3], bounded=phase[3])
  with pytest.raises(EndOfRun):
    one._run()
  return capsys.readouterr().err, codes


STEP = [(3, "reads its batch", "", True), (3, "starts train_step", "train_step", True)]


def test_a_process_that_is_behind_is_named_with_the_collective(monkeypatch, capsys):
  began = time.monotonic() - 40

  def behind(own):
    return own | {"number": 1, "doing": "step 3: reads its batch", "program": "", "limit": 8.0, "line": "x.py:7 (f)",
                  "seconds": time.monotonic() - began}  # fmt: skip

  said, codes = watched(monkeypatch, capsys, {1: behind, 2: lambda own: own}, STEP)
  assert codes == [1]
  wanted = "process 0 of 3: process 1 of 3 hangs for 40 s (step 3: reads its batch, at x.py:7 (f)); the others wait "
  wanted += "for it in train_step, whose first collective between processes is that of train_step; start all"
  assert wanted in said


def test_all_in_one_program(monkeypatch, capsys):
  said, codes = watched(monkeypatch, capsys, {1: lambda own: own | {"limit": 0.1}}, STEP)
  assert codes == [1] and "step 3: starts train_step hangs in all processes" in said and "that of train_step" in said


@pytest.mark.parametrize("limit", [8.0, math.inf])
def test_a_slow_or_unbounded_phase_is_no_hang(monkeypatch, capsys, limit):
  behind = lambda own: own | {"number": 1, "limit": limit, "seconds": 7.0}  # noqa: E731
  said, codes = watched(monkeypatch, capsys, {1: behind}, STEP, patience=0.5)
  assert codes == [] and said == ""


@pytest.mark.parametrize("ask", [lambda *_: time.sleep(10**6), lambda *_: 1 / 0])
def test_a_hang_is_named_although_nothing_more_can_be_said_of_it(monkeypatch, capsys, ask):
  """As where the checkpoints are on the file server that hangs."""
  monkeypatch.setattr(watch, "ASK_SECONDS", 0.1)
  one = watch.Watch(1.0)
  one.explain = one.advice = ask
  monkeypatch.setattr(watch, "Watch", lambda patience: one)
  said, codes = watched(monkeypatch, capsys, {1: lambda own: own | {"limit": 0.1}}, STEP, explained=False)
  assert codes == [1] and said.endswith("in all processes for 0 s; start all processes again\n"), said


@pytest.mark.parametrize("process", [0, 2])
@pytest.mark.parametrize("fails_too", [False, True])
def test_a_process_that_has_failed_is_named_unless_this_one_fails_too(monkeypatch, capsys, process, fails_too):
  """Process 0, which holds the store, waits at its end for the others to see it, and they for its end."""
  waited, leaving = [], threading.Event()
  if fails_too:
    leaving.set()
  monkeypatch.setattr(watch, "_leaving", leaving)
  monkeypatch.setattr(time, "sleep", waited.append)
  monkeypatch.setattr(Store, "__init__", lambda self, others: left(self, others))

  def left(store, others):
    store._others, store._beat = others, 190
    store[f"maxghost/left/{process}"] = "2"

  said, codes = watched(monkeypatch, capsys, {1: lambda own: own, 2: lambda own: own}, (), patience=0.1)
  assert waited[0] == (watch.LEAVE_SECONDS if process else 1.0) < 2 * watch.LEAVE_SECONDS
  wanted = f"maxghost: process 0 of 3: process {process} of 3 has ended with code 2; its output says why; start all "
  assert (codes, said) == ([], "") if fails_too else (codes == [1] and said.startswith(wanted))


def test_a_process_that_fails_tells_the_others_and_ends_whatever_they_do(monkeypatch):
  store, codes, leaving = {}, [], threading.Event()

  class Told:
    def key_value_set(self, key, value, allow_overwrite):
      store[key] = value

  monkeypatch.setattr(watch, "_leaving", leaving)
  monkeypatch.setattr(watch, "LEAVE_SECONDS", 0.1)
  monkeypatch.setattr(distributed, "index", lambda: 3)
  monkeypatch.setattr(distributed, "exit_at_once", codes.append)
  monkeypatch.setattr(multihost, "get_jax_distributed_client", Told)
  monkeypatch.setattr(jax.distributed, "shutdown", lambda: time.sleep(5))  # waits for the others
  watch.leave(2)
  assert codes == [2] and store == {"maxghost/left/3": "2"} and leaving.is_set()


def test_the_store_may_fail_for_a_while(monkeypatch, capsys):
  """The others would take a process that is no longer heard of for one that hangs."""
  answers = iter([False, True, True, False, True])

  def at_times(own):
    if not next(answers, True):
      raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service is busy")
    return own | {"limit": 0.1}

  said, codes = watched(monkeypatch, capsys, {1: at_times}, STEP)
  assert codes == [1] and "hangs in all processes" in said


def test_the_thread_has_ended_before_python_does(monkeypatch):
  """A thread that is inside the runtime then aborts the process, after a run that is complete."""
  at_exit = []
  monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(multihost, "get_jax_distributed_client", lambda: Store({}))
  watch.Watch(1000.0).start()
  thread = next(thread for thread in threading.enumerate() if thread.name == "watch")
  for function, *arguments in at_exit:
    function(*arguments)
  assert not thread.is_alive()


def test_a_process_without_a_sign_of_life_is_named_with_what_it_did(monkeypatch, capsys):
  """Process 2 beats, process 1 has stopped."""
  stopped = lambda own: own | {"beat": 5, "doing": "step 2: waits for train_step"}  # noqa: E731
  said, codes = watched(monkeypatch, capsys, {1: stopped, 2: lambda own: own}, (), patience=0.2)
  assert codes == [] and said.count("no sign of life") == 1
  assert said.startswith(
    "maxghost: process 1 has given no sign of life for 0 s (its last: step 2: waits for train_step);"
  )


def test_limits_follow_the_longest_phase_of_a_kind(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(time, "monotonic", lambda: clock[0])
  one = watch.Watch(100.0)
  assert one._phase.limit == math.inf
  for step, seconds in ((0, 30.0), (1, 3.0)):
    one(step, "starts train_step", "train_step", bounded=True)
    assert one._phase.limit == (400.0 if step else watch.FIRST_SECONDS)
    clock[0] += seconds
  one(None, "saves a checkpoint")
  assert one._phase.limit == math.inf and one._sign(1)["limit"] == math.inf
  one(2, "starts train_step", "train_step", bounded=True)
  assert one._phase.limit == 400.0 and one._sign(1)["doing"] == "step 2: starts train_step"


def test_the_first_collective_between_processes(monkeypatch):
  """Axis a joins devices of one process (say 4 and 4 of them), axis b does not: the second collective is the first
  between processes."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("b", "a"))

  def program(x):
    return jax.lax.psum(jax.lax.psum(x * 2, "a").sum(), "b")

  rows = PartitionSpec(("b", "a"))
  mapped = jax.shard_map(program, mesh=mesh, in_specs=rows, out_specs=PartitionSpec())
  x = jax.ShapeDtypeStruct((16, 3), np.float32, sharding=NamedSharding(mesh, rows))
  text = jax.jit(mapped).lower(x).compile().as_text()
  assert collectives.first_between_processes(text, mesh) == ""  # of one process

  class Device:
    def __init__(self, number):
      self.process_index = number // 4

  class TwoProcesses:
    devices, axis_names, shape = np.array([Device(i) for i in range(8)]).reshape(2, 4), ("b", "a"), mesh.shape

  assert collectives.first_between_processes(text, TwoProcesses) == "all-reduce of f32[] over b"

  def branching(flag, x):
    return jax.lax.cond(flag[0], lambda x: jax.lax.psum(x * 2, "b"), lambda x: x + 1, x)

  whole = PartitionSpec()
  mapped = jax.shard_map(branching, mesh=mesh, in_specs=(whole, rows), out_specs=rows, check_vma=False)
  flag = jax.ShapeDtypeStruct((1,), bool, sharding=NamedSharding(mesh, whole))
  text = jax.jit(mapped).lower(flag, x).compile().as_text()
  assert collectives.first_between_processes(text, TwoProcesses) == "all-reduce of f32[2,3] over b"
