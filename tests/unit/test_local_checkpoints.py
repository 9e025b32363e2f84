"""Local checkpoints in one process: what is written, kept, refused, and read into other shardings."""

import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxghost.checkpoint import manager as manager_module
from maxghost.checkpoint.local import LocalCheckpoints, Piece, peer_shift
from maxghost.checkpoint.manager import CheckpointError, CheckpointManager
from maxghost.config import ConfigError, load
from maxghost.config.files import config_dir
from maxghost.parallel import distributed


def placed(values, mesh, *axes):
  return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))


def tree_of(mesh, axes):
  rng = np.random.default_rng(0)
  return {
    "model": {
      "w": placed(jnp.asarray(rng.normal(size=(8, 12)), jnp.bfloat16), mesh, *axes),
      "b": placed(rng.normal(size=(24,)).astype(np.float32), mesh),
      "q": placed(rng.integers(-7, 7, (16, 3)).astype(np.int8), mesh, axes[0]),
    },
    "optimizer": {"step": placed(np.uint32(7), mesh), "key": placed(jax.random.key(3), mesh)},
  }


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same(a, b):
  words = [
    jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves((a, b))
  ]
  ours, theirs = words[: len(words) // 2], words[len(words) // 2 :]
  return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(ours, theirs, strict=True))


@pytest.fixture
def meshes():
  devices = np.array(jax.devices())
  return jax.sharding.Mesh(devices.reshape(4, 2), ("a", "b")), jax.sharding.Mesh(devices[:4].reshape(2, 2), ("a", "b"))


@pytest.fixture
def manager(tmp_path):
  said = []
  made = CheckpointManager(tmp_path / "run" / "checkpoints", local=str(tmp_path / "near"), say=said.append)
  made.said = said
  assert made.restore_latest({}) is None  # as every run does at its start
  yield made
  made.close()


def folders(tmp_path):
  return sorted(path.name.partition("-")[0] for path in (tmp_path / "near").glob("run-*/*"))


def test_pieces_overlap_where_both_lie():
  a, b = Piece("x", (0, 2), (4, 3)), Piece("x", (2, 0), (4, 4))
  assert a.overlap(b) == ((slice(2, 4), slice(0, 2)), (slice(0, 2), slice(2, 4)))
  assert a.overlap(Piece("x", (4, 2), (1, 1))) is None and Piece("x", (), ()).overlap(Piece("x", (), ())) == ((), ())


@pytest.mark.parametrize("axes", [("a", "b"), ("a", None), (None, "b")])
def test_read_into_another_mesh_bit_for_bit(tmp_path, manager, meshes, axes):
  tree = tree_of(meshes[0], axes)
  manager.save(5, tree, {"data": 1}, local=True)
  manager.wait()
  manager._local.wait()
  again = CheckpointManager(tmp_path / "run" / "checkpoints", local=str(tmp_path / "near"), say=print)
  restored = again.restore_latest(abstract(tree_of(meshes[1], axes[::-1])))
  assert restored.step == 5 and restored.positions["data"] == 1 and "near" in str(restored.path)
  assert same(restored.tree, tree) and restored.tree["model"]["w"].sharding.mesh.shape == meshes[1].shape
  again.close()


def test_the_newest_is_used_and_a_durable_one_replaces_the_local_ones(tmp_path, manager, meshes):
  tree = tree_of(meshes[0], ("a", "b"))
  for step in (3, 6):
    manager.save(step, tree, {}, local=True)
  assert folders(tmp_path)[0] == "3"  # until that of step 6 is written everywhere
  manager.save(9, tree, {}, local=True)
  manager._local.wait()
  assert folders(tmp_path) == ["9"] and manager.newest() == "the local one of step 9"
  manager.save(8, tree, {})
  manager.wait()
  assert folders(tmp_path) == ["9"] and manager.restore_latest(abstract(tree)).step == 9
  manager.save(10, tree, {})
  manager.wait()
  assert folders(tmp_path) == [] and not list((tmp_path / "near").iterdir())
  assert manager.restore_latest(abstract(tree)).path == tmp_path / "run" / "checkpoints" / "10"


def changed_byte(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)


@pytest.mark.parametrize(
  ("harm", "said"),
  [
    (lambda path: os.truncate(path, 40), "is left out: 0.bin has 40 bytes"),
    (changed_byte, "changed since they were saved"),
    (lambda path: changed_byte(path.with_suffix(".json")), "is left out"),
    (lambda path: path.with_suffix(".json").unlink(), ""),  # as of a process that was killed while it wrote
  ],
)
def test_a_damaged_one_is_named_and_the_durable_one_used(tmp_path, manager, meshes, harm, said):
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(2, tree, {})
  manager.save(4, tree, {}, local=True)
  manager.wait()
  manager._local.wait()
  harm(next((tmp_path / "near").glob("run-*/4-*/0.bin")))
  assert manager.restore_latest(abstract(tree)).step == 2
  assert said in " ".join(manager.said)
  assert folders(tmp_path) == []


def test_another_run_of_the_same_name_is_left_alone(tmp_path, manager, meshes):
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(4, tree, {}, local=True)
  manager._local.wait()
  (tmp_path / "run" / "checkpoints" / ".local").unlink()  # as of a run folder that was removed
  other = CheckpointManager(tmp_path / "run" / "checkpoints", local=str(tmp_path / "near"))
  assert other.restore_latest(abstract(tree)) is None and folders(tmp_path) == ["4"]
  other.close()


HAND_MADE = (  # without a checksum
  "{}",
  '{"run": "a", "attempts": 3}',
  '{"run": "a", "attempts": [["b"]]}',
  '{"run": "a", "attempts": [["b", "c"]]}',
)


@pytest.mark.parametrize(
  "damage",
  [lambda text: text[:9], lambda text: text.replace(", 0]", ", 7]"), *(lambda _, one=one: one for one in HAND_MADE)],
)
def test_a_damaged_list_of_attempts_is_named(tmp_path, manager, meshes, damage):
  """Otherwise a local checkpoint could count that the run has gone back behind."""
  manager.restore_latest(abstract(tree_of(meshes[0], ("a", "b"))))
  path = tmp_path / "run" / "checkpoints" / ".local"
  path.write_text(damage(path.read_text()))
  with pytest.raises(ConfigError, match=r"checkpoints/\.local is damaged or half copied"):
    CheckpointManager(tmp_path / "run" / "checkpoints", local=str(tmp_path / "near"))


@pytest.mark.parametrize("local", [True, False])
def test_one_from_before_the_run_went_on_elsewhere_is_left_out(tmp_path, manager, meshes, local):
  """As of a machine that was away while the others began again at an earlier step."""
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(2, tree, {})
  manager.wait()
  manager.save(6, tree, {"of": "first"}, local=True)
  manager._local.wait()
  away, near = tmp_path / "away", tmp_path / "near"
  near.rename(away)
  second = CheckpointManager(tmp_path / "run" / "checkpoints", local=str(near) if local else "")
  assert second.restore_latest(abstract(tree)).step == 2
  if local:
    second.save(5, tree, {"of": "second"}, local=True)
    second._local.wait()
  second.close()
  for path in away.glob("run-*/6-*"):
    path.rename(near / path.parent.name / path.name) if local else away.rename(near)
  said = []
  third = CheckpointManager(tmp_path / "run" / "checkpoints", local=str(near), say=said.append)
  restored = third.restore_latest(abstract(tree))
  assert (restored.step, restored.positions.get("of")) == ((5, "second") if local else (2, None))
  assert "is left out: the run went on from step 2" in " ".join(said)
  third.close()


def test_other_leaves_are_an_error(manager, meshes):
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(4, tree, {}, local=True)
  manager._local.wait()
  wanted = abstract(tree)
  wanted["model"]["extra"] = wanted["model"].pop("b")
  with pytest.raises(CheckpointError, match="model/extra"):
    manager.restore_latest(wanted)


def test_a_full_disk_ends_the_run_with_its_name(tmp_path, manager, meshes):
  tree = tree_of(meshes[0], ("a", "b"))
  blocked = tmp_path / "near" / next((tmp_path / "near").iterdir()).name
  blocked.rmdir()
  blocked.write_text("")
  manager.save(4, tree, {}, local=True)
  with pytest.raises(OSError, match=r"local checkpoint .*4-\w+ could not be written \(process 0: Not a directory\)"):
    manager._local.wait()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match=r"local_checkpoint_directory=.*file/x cannot be written .*name a folder"):
    CheckpointManager(tmp_path / "run" / "checkpoints", local=str(tmp_path / "file" / "x"))


class Processes:
  """Threads that take each other for processes of a run: `run` gives what a function of their number returns."""

  def __init__(self, monkeypatch, count):
    self._count, self._own, self._said = count, threading.local(), {}
    self._all = threading.Barrier(count, timeout=20)
    monkeypatch.setattr(distributed, "count", lambda: count)
    monkeypatch.setattr(distributed, "index", lambda: self._own.index)
    monkeypatch.setattr(distributed, "is_first", lambda: self._own.index == 0)
    monkeypatch.setattr(distributed, "gather", self._gather)

  def _gather(self, value):
    said = self._said.setdefault(next(self._own.numbers), {})
    said[self._own.index] = json.dumps(value)
    self._all.wait()
    return [json.loads(said[index]) for index in range(self._count)]

  def run(self, work):
    found = [None] * self._count

    def one(index):
      self._own.index, self._own.numbers = index, itertools.count()
      found[index] = work(index)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(self._count)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self._said.clear()
    return found


def test_a_process_that_cannot_read_its_part_leaves_no_other_waiting(tmp_path, monkeypatch, meshes):
  """Both processes go on to the same exchange, whatever happens to one of them."""
  tree = {"w": tree_of(meshes[0], ("a", "b"))["model"]["w"]}
  written = LocalCheckpoints(tmp_path / "0", tmp_path, "x")
  written.save(4, tree, {})
  written.wait()
  name = written.names()[0]

  def restore(index):
    near = LocalCheckpoints(tmp_path / str(index), tmp_path, f"y{index}", [("x", 0)])
    if near.usable() != [name]:
      return "not usable"
    reason = ""
    if index:
      monkeypatch.setattr(near, "_lend", lambda *_: 1 / 0)
    try:
      near.restore(name, abstract(tree))
    except Exception as error:
      reason = str(error)
    return distributed.gather(["after", reason])

  ours, theirs = Processes(monkeypatch, 2).run(restore)
  assert ours == theirs and [one[0] for one in ours] == ["after", "after"]
  assert all("could not be written (process 1: ZeroDivisionError" in one[1] for one in ours)


def test_what_one_process_cannot_read_is_compared_by_none(manager, monkeypatch, meshes):
  """Checksums are sums over all processes: one that is missing would be waited for."""
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(2, tree, {})
  manager.wait()
  gather = lambda mine: [mine, "OSError: disk broken" if isinstance(mine, str) else mine]  # noqa: E731
  monkeypatch.setattr(distributed, "gather", gather)
  monkeypatch.setattr(manager_module, "checksums", lambda leaves: pytest.fail("process 1 does not add up"))
  with pytest.raises(CheckpointError, match="none of the checkpoints"):
    manager.restore_latest(abstract(tree))
  assert "cannot be used (OSError: disk broken)" in manager.said[0]


@pytest.mark.parametrize(
  ("machines", "shift"),
  [((0,), 0), ((0, 1), 1), ((0, 0, 1, 1), 2), ((0, 1, 0, 1), 1), ((0, 1, 2), 1), ((0, 0, 1), 0), ((0, 0), 0)],
)
def test_the_peer_of_a_process_is_on_another_machine(machines, shift):
  """Also where numbers go around the machines, as with srun --distribution=cyclic."""
  assert peer_shift(machines) == shift


def test_what_only_one_machine_holds_is_sent_from_it_once(tmp_path, monkeypatch):
  """Two processes on each of two machines: what both of one machine hold would be lost with it."""
  boots = iter("aabb")
  processes = Processes(monkeypatch, 4)
  machines = dict(enumerate(boots))
  gather = distributed.gather
  monkeypatch.setattr(distributed, "gather", lambda value: gather(machines[distributed.index()]))

  def sends(index):
    near = LocalCheckpoints(tmp_path, tmp_path, "x")
    return [near._sends(holders) for holders in ({0}, {0, 1}, {2, 3}, {0, 2}, {0, 1, 2, 3})]

  found = np.array(processes.run(sends))
  np.testing.assert_array_equal(found.sum(0), [1, 1, 1, 0, 0])
  assert found[0, :2].all() and found[2, 2]


def test_a_local_one_does_not_wait_for_a_durable_one(tmp_path, manager, monkeypatch, meshes):
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(2, tree, {})
  waiting = manager._manager.wait_until_finished
  monkeypatch.setattr(manager._manager, "wait_until_finished", lambda: pytest.fail("it would take an hour"))
  manager.save(3, tree, {}, local=True)
  monkeypatch.setattr(manager._manager, "check_for_errors", lambda: 1 / 0)
  with pytest.raises(CheckpointError, match=r"checkpoints/2 could not be written \(ZeroDivisionError"):
    manager.save(4, tree, {}, local=True)
  monkeypatch.undo()
  monkeypatch.setattr(manager._manager, "wait_until_finished", waiting)
  manager.wait()
  assert folders(tmp_path) == ["3"]


def test_two_processes_of_a_machine_empty_its_folder_at_once(tmp_path, manager, monkeypatch, meshes):
  """One finds it gone, or with the other's next checkpoint in it."""
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(2, tree, {}, local=True)
  rmdir = Path.rmdir

  def faster(path):
    rmdir(path)
    raise FileNotFoundError(path)

  monkeypatch.setattr(Path, "rmdir", faster)
  manager.save(3, tree, {})
  manager.wait()
  assert manager.newest().endswith("checkpoints/3")


def test_what_is_no_checkpoint_is_passed_over(tmp_path, manager, meshes):
  """A file of the system in the folder; and a checkpoint in the making is not named as a good one."""
  tree = tree_of(meshes[0], ("a", "b"))
  manager.save(2, tree, {}, local=True)
  manager._local.wait()
  (manager._local.folder / ".DS_Store").write_text("")
  (manager._local.folder / f"5-{manager._local.attempt}").mkdir()
  assert manager.newest() == "the local one of step 2" and manager.restore_latest(abstract(tree)).step == 2


def test_a_copy_of_the_run_neither_reads_nor_removes_the_local_ones_of_the_run(tmp_path, manager, meshes):
  """Both have the same folder on a machine: it is named after the run and its word, which are copied too."""
  tree, said = tree_of(meshes[0], ("a", "b")), []
  manager.save(2, tree, {})
  manager.wait()
  shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")
  goes_on = CheckpointManager(tmp_path / "run" / "checkpoints", local=str(tmp_path / "near"), say=said.append)
  assert goes_on.restore_latest(abstract(tree)).step == 2
  goes_on.save(6, tree, {}, local=True)
  goes_on._local.wait()
  copied = CheckpointManager(tmp_path / "elsewhere/run/checkpoints", local=str(tmp_path / "near"), say=said.append)
  assert copied.restore_latest(abstract(tree)).step == 2 and "6-" in said[-1] and "another copy of the run" in said[-1]
  copied.save(3, tree, {}, local=True)
  copied._local.wait()
  assert folders(tmp_path) == ["3", "6"]
  assert goes_on.restore_latest(abstract(tree)).step == 6
  goes_on.close()
  copied.close()


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (["local_checkpoint_period=5"], "give both"),
    (["local_checkpoint_directory=/x"], "give both"),
    (["local_checkpoint_directory=/x", "local_checkpoint_period=100"], "must be smaller than checkpoint_period=100"),
    (
      ["local_checkpoint_directory=/x", "local_checkpoint_period=5", "checkpoint_period=0"],
      "use checkpoint_period=100",
    ),
    (["enable_multi_tier_checkpointing=true"], "use local_checkpoint_directory and local_checkpoint_period"),
  ],
)
def test_keys_that_do_not_go_together(keys, said):
  with pytest.raises(ConfigError, match=said):
    load(config_dir() / "base.yml", *keys)


def test_maxtext_keys():
  keys = ["enable_emergency_checkpoint=true", "local_checkpoint_directory=/x", "local_checkpoint_period=5"]
  assert load(config_dir() / "base.yml", *keys).checkpoint.local_checkpoint_period == 5
  assert load(config_dir() / "base.yml", *keys[:2]).checkpoint.local_checkpoint_period == 20
  with pytest.raises(ConfigError, match=r"local_checkpoint_directory=.*: give both"):
    load(config_dir() / "base.yml", keys[0])
  off = load(config_dir() / "base.yml", "enable_emergency_checkpoint=false")
  assert off.checkpoint.local_checkpoint_period == 0 and json.dumps(off.flat()["local_checkpoint_directory"]) == '""'
