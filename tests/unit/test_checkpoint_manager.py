"""Checkpoints: what goes in comes out bit by bit; damage is noticed, named and stepped over; misfits raise."""

import os
import shutil
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxghost.checkpoint import host_checksum
from maxghost.checkpoint import manager as manager_module
from maxghost.checkpoint.checksum import checksums
from maxghost.checkpoint.host_checksum import checksum_of
from maxghost.checkpoint.manager import CheckpointError, CheckpointManager
from maxghost.config import ConfigError
from maxghost.parallel import distributed


def make_tree(seed=0):
  rng = np.random.default_rng(seed)
  return {
    "model": {
      "decoder": {"layers": {"mlp": {"wi_0": {"kernel": jnp.asarray(rng.normal(size=(3, 20, 36)), jnp.float32)}}}},
      "dropout": {"rngs": {"count": jnp.uint32(7 + seed), "key": jax.random.key(11 + seed)}},
      "norm": {"scale": jnp.asarray(rng.normal(size=(20,)), jnp.bfloat16)},
    },
    "optimizer": {
      "opt_state": {"0": {"mu": {"w": jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)}, "count": jnp.int32(seed)}},
      "step": jnp.uint32(seed),
    },
  }


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def numbers(tree):
  raw = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
  return [np.asarray(x) for x in jax.tree.leaves(raw)]


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(numbers(a), numbers(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.fixture
def messages():
  return []


@pytest.fixture
def manager(tmp_path, messages):
  made = CheckpointManager(tmp_path / "checkpoints", max_to_keep=3, say=messages.append)
  yield made
  made.close()


def largest_file(folder):
  files = [os.path.join(root, name) for root, _, names in os.walk(folder / "items") for name in names]
  return max(files, key=os.path.getsize)


def test_what_was_saved_is_restored_although_it_was_donated(manager):
  tree = make_tree(4)
  expected = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), tree)
  manager.save(4, tree, {"data": {"document": 12, "rest": [1, 2, 3]}, "x": 0.1})
  change = jax.jit(lambda t: jax.tree.map(lambda x: x * 2 + 1, t), donate_argnums=0)
  changed = change({"model": tree["model"]["norm"], "optimizer": tree["optimizer"]})
  jax.block_until_ready(change(changed))
  manager.wait()
  restored = manager.restore_latest(abstract(make_tree()))
  assert restored.step == 4
  assert restored.positions["data"] == {"document": 12, "rest": [1, 2, 3]} and restored.positions["x"] == 0.1
  assert_same(restored.tree, jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, expected))


def test_restores_the_newest_and_keeps_only_so_many(manager):
  for step in (1, 2, 3, 10):
    manager.save(step, make_tree(step), {"step": step})
  manager.wait()
  assert manager.steps() == [2, 3, 10]
  assert manager.restore_latest(abstract(make_tree())).positions["step"] == 10


def test_the_folder_may_be_named_from_the_one_beside_it(tmp_path, monkeypatch):
  """TensorStore takes no `..`; a URL is refused before a folder of that name is made."""
  (tmp_path / "beside").mkdir()
  monkeypatch.chdir(tmp_path / "beside")
  made = CheckpointManager("../run/checkpoints")
  made.save(3, make_tree(3), {})
  made.wait()
  assert_same(made.restore_latest(abstract(make_tree())).tree, make_tree(3))
  made.close()
  with pytest.raises(ConfigError, match="gs://bucket/run: only local folders"):
    CheckpointManager("gs://bucket/run")
  assert list((tmp_path / "beside").iterdir()) == []


def test_no_checkpoint_is_none(manager):
  assert manager.restore_latest(abstract(make_tree())) is None


def cut(folder):
  path = largest_file(folder)
  os.truncate(path, os.path.getsize(path) // 2)


def flip(folder):
  """One bit inside the stored weights: Orbax reads it without complaint, the checksum does not."""
  path = largest_file(folder)
  with open(path, "r+b") as file:
    file.seek(os.path.getsize(path) // 2)
    byte = file.read(1)[0]
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte ^ 4]))


def drop_positions(folder):
  shutil.rmtree(folder / "positions")


def drop_metadata(folder):
  os.remove(folder / "items" / "_METADATA")


def empty(folder):
  shutil.rmtree(folder)
  folder.mkdir()


@pytest.mark.parametrize("damage", [cut, flip, drop_positions, drop_metadata, empty])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, messages, damage):
  folder = tmp_path / "checkpoints"
  writer = CheckpointManager(folder, max_to_keep=3)
  for step in (5, 9):
    writer.save(step, make_tree(step), {"step": step})
  writer.wait()
  writer.close()
  damage(folder / "9")

  manager = CheckpointManager(folder, max_to_keep=3, say=messages.append)
  restored = manager.restore_latest(abstract(make_tree()))
  assert restored.step == restored.positions["step"] == 5
  assert_same(restored.tree, make_tree(5))
  assert str(folder / "9") in messages[0] and "cannot be used" in messages[0]
  assert manager.steps() == [5] and (folder / "9.unusable").is_dir()
  manager.save(9, make_tree(90), {"step": 90})  # the run comes to this step again
  manager.wait()
  assert manager.restore_latest(abstract(make_tree())).positions["step"] == 90
  manager.close()


def test_a_half_written_checkpoint_is_named_and_removed(tmp_path, messages):
  folder = tmp_path / "checkpoints"
  writer = CheckpointManager(folder)
  for step in (5, 9):
    writer.save(step, make_tree(step), {"step": step})
  writer.close()
  os.rename(folder / "9", folder / "9.orbax-checkpoint-tmp")
  manager = CheckpointManager(folder, say=messages.append)
  assert manager.restore_latest(abstract(make_tree())).step == 5
  assert len(messages) == 1 and "9.orbax-checkpoint-tmp" in messages[0]
  assert not (folder / "9.orbax-checkpoint-tmp").exists()
  manager.close()


def test_when_none_is_good_nothing_starts_from_scratch(tmp_path, messages):
  folder = tmp_path / "checkpoints"
  writer = CheckpointManager(folder)
  writer.save(5, make_tree(5), {})
  writer.close()
  flip(folder / "5")
  manager = CheckpointManager(folder, say=messages.append)
  with pytest.raises(CheckpointError, match=r"none of the checkpoints .* can be used: 5"):
    manager.restore_latest(abstract(make_tree()))
  assert (folder / "5").is_dir()
  manager.close()


@pytest.mark.parametrize(
  "change, named",
  [
    (lambda t: t["optimizer"].pop("step"), r"has optimizer/step, unknown to the model"),
    (lambda t: t["model"].update(bias=jnp.zeros(3)), r"misses model/bias"),
    (lambda t: t["model"]["norm"].update(scale=jnp.zeros(21, jnp.bfloat16)), r"norm/scale is bfloat16\[20\] there"),
    (lambda t: t["model"]["norm"].update(scale=jnp.zeros(20)), r"norm/scale .* and float32\[20\] in the model"),
  ],
)
def test_leaves_that_do_not_fit_are_named(manager, messages, change, named):
  manager.save(5, make_tree(5), {})
  manager.wait()
  wanted = make_tree()
  change(wanted)
  with pytest.raises(CheckpointError, match=named):
    manager.restore_latest(abstract(wanted))
  assert messages == []  # not taken for damage: no older checkpoint is tried


def test_a_save_that_fails_raises(manager, tmp_path):
  manager.save(1, make_tree(1), {})
  manager.wait()
  shutil.rmtree(tmp_path / "checkpoints")
  (tmp_path / "checkpoints").write_text("in the way")
  with pytest.raises(CheckpointError, match="could not be written"):
    manager.save(2, make_tree(2), {})
    manager.wait()


def fail():
  raise OSError("disk full")


def wait_in_vain():
  raise TimeoutError("Timed out while waiting for async_write_complete barrier.")


def test_a_save_that_fails_is_named_by_its_step_and_raised_once(tmp_path, caplog):
  """The failure of one save shows when the next one begins; threads of Orbax do not report it too."""
  manager = CheckpointManager(tmp_path / "checkpoints")
  manager.save(1, make_tree(1), {})
  manager._manager.wait_until_finished = fail
  with pytest.raises(CheckpointError, match=r"checkpoints/1 could not be written \(OSError: disk full"):
    manager.save(2, make_tree(2), {})
  manager.close()
  assert not caplog.records


async def hang(*args, **kwargs):
  """Storage that does not answer."""

  def result(timeout):
    time.sleep(timeout)
    raise TimeoutError

  return [SimpleNamespace(result=result)]


def test_a_write_that_takes_too_long_is_one_line(tmp_path, monkeypatch):
  monkeypatch.setattr(manager_module, "WRITE_SECONDS", 1)
  monkeypatch.setattr(ocp.JsonCheckpointHandler, "async_save", hang)
  manager = CheckpointManager(tmp_path / "checkpoints")
  manager.save(3, make_tree(3), {})
  with pytest.raises(CheckpointError, match=r"/3 could not be written \(it was not written in 1 s: the storage"):
    manager.wait()
  assert manager.steps() == []
  manager.close()


def test_a_checkpoint_in_the_making_is_no_good_one(manager, tmp_path):
  manager.save(1, make_tree(1), {})
  manager.wait()
  manager.save(2, make_tree(2), {})
  manager._manager.wait_until_finished()
  (tmp_path / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp")
  assert manager.steps() == [1]


def test_a_checkpoint_is_durable_when_it_has_its_name(manager, tmp_path, monkeypatch):
  synced = []
  monkeypatch.setattr(manager_module, "sync", synced.append)
  manager.save(1, make_tree(1), {})
  manager.wait()
  final = tmp_path / "checkpoints" / "1"
  files = {path for path in final.rglob("*") if path.is_file()}
  assert {path.name for path in files} >= {"metadata", "_METADATA", "_CHECKPOINT_METADATA"}
  assert files <= set(synced) and synced[-1] == final.parent


def test_any_changed_digit_of_the_positions_is_noticed(tmp_path, messages):
  folder = tmp_path / "checkpoints"
  writer = CheckpointManager(folder)
  for step in (5, 9):
    writer.save(step, make_tree(step), {"data": {"lanes": [31, 7]}, "metrics_bytes": 1250})
  writer.close()
  path = folder / "9" / "positions" / "metadata"
  text = path.read_text()
  manager = CheckpointManager(folder, say=messages.append)
  for start in [text.index("31"), text.index("1250"), text.index("crc32") + 9]:
    path.write_text(text[:start] + ("8" if text[start] != "8" else "7") + text[start + 1 :])
    assert manager.restore_latest(abstract(make_tree())).step == 5
    assert "does not match its checksum" in messages[0]
    (folder / "9.unusable").rename(folder / "9")
    manager._manager.reload()
    messages.clear()
  path.write_text(text)
  assert manager.restore_latest(abstract(make_tree())).step == 9
  manager.close()


class Store:
  """The key-value store of several processes, of which this is process 0."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    self.values[key] = value

  def key_value_increment(self, key, by):
    self.values[key] = self.values.get(key, 0) + by
    return self.values[key]

  def blocking_key_value_get(self, key, timeout_ms):
    if key not in self.values:
      raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")
    return self.values[key]

  def key_value_dir_get(self, prefix):
    return [(key, value) for key, value in self.values.items() if key.startswith(f"{prefix}/")]


@pytest.fixture
def two(monkeypatch):
  store = Store()
  for name, value in {"count": 2, "index": 0, "is_first": True}.items():
    monkeypatch.setattr(distributed, name, lambda value=value: value)
  monkeypatch.setattr(distributed, "store", lambda: store)
  return store


def test_no_process_waits_for_one_that_could_not_write(two):
  with pytest.raises(jax.errors.JaxRuntimeError):
    manager_module._barrier(key="a", timeout_ms=0)
  manager_module._barrier(key="a", timeout_ms=0)  # the second one to come
  two.values["maxghost/failures/1"] = "OSError: No space left on device"
  with pytest.raises(manager_module.PeerFailure, match="No space left"):
    manager_module._barrier(key="b", timeout_ms=10**6)


def test_a_write_that_fails_in_one_process_fails_in_all(tmp_path, two, monkeypatch):
  def wait():
    raise manager_module.PeerFailure("OSError: No space left on device")

  made = object.__new__(CheckpointManager)
  made._directory, made._saving, made._has_failed = tmp_path, 7, False
  made._manager = SimpleNamespace(wait_until_finished=wait, check_for_errors=lambda: None)
  monkeypatch.setattr(distributed, "gather", lambda mine: [mine, "OSError: No space left on device"])
  with pytest.raises(CheckpointError, match=r"/7 could not be written by process 1 \(OSError: No space left"):
    made.wait()
  assert two.values == {}  # it is not this process that reports the failure
  monkeypatch.setattr(distributed, "gather", lambda mine: [mine, ""])
  with pytest.raises(CheckpointError, match="by process 0"):
    made._guard(fail)
  monkeypatch.setattr(distributed, "gather", lambda mine: [mine, "it was not written in 3,600 s"])
  with pytest.raises(CheckpointError, match=r"by process 1 .*not written in 3,600 s"):
    made._guard(wait_in_vain)
  monkeypatch.setattr(distributed, "gather", lambda mine: [mine, ""])
  two.values.clear()
  with pytest.raises(CheckpointError, match="by process 0"):
    made._guard(fail)
  assert two.values == {"maxghost/failures/0": "OSError: disk full"}


def test_a_folder_that_another_process_does_not_see_is_refused(tmp_path, two, monkeypatch):
  made = object.__new__(CheckpointManager)
  made._directory = tmp_path / "checkpoints"
  monkeypatch.setattr(manager_module, "SEEN_SECONDS", 0)
  monkeypatch.setattr(distributed, "gather", lambda mine: [mine, mine])
  made._check_shared()
  monkeypatch.setattr(distributed, "gather", lambda mine: [mine, False])
  with pytest.raises(ConfigError, match="base_output_directory: process 1 does not see what process 0 writes to"):
    made._check_shared()
  assert list(made._directory.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "int16"])
def test_checksum_sees_every_bit_and_every_move(dtype):
  rng = np.random.default_rng(3)
  x = np.asarray(jnp.asarray(rng.integers(0, 2, size=(6, 7, 3)), dtype))
  total = checksums([jnp.asarray(x)])[0]
  seen = {total}
  for index in ((0, 0, 0), (5, 6, 2), (3, 1, 2)):
    y = x.copy()
    raw = y.view(np.uint8).reshape(*x.shape, -1) if dtype != "bool" else y
    raw[index] ^= 1
    seen.add(checksums([jnp.asarray(y)])[0])
  seen.add(checksums([jnp.asarray(x[::-1])])[0])
  seen.add(checksums([jnp.asarray(x.reshape(7, 6, 3).swapaxes(0, 1))])[0])
  assert len(seen) == 6


@pytest.mark.parametrize(
  "dtype",
  ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int64", "int8", "bool", "int4", "float4_e2m1fn"],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3, 2)])
def test_the_checksum_on_the_host_is_the_one_on_devices(dtype, shape, monkeypatch):
  monkeypatch.setattr(host_checksum, "_BLOCK", 4)
  x = np.random.default_rng(5).integers(0 if dtype == "bool" else -5, 2, size=shape).astype(jnp.dtype(dtype))
  with jax.enable_x64(True):
    (expected,) = checksums([jnp.asarray(x)])
  assert checksum_of([x]) == expected
  if shape:
    assert checksum_of(x[i : i + 2] for i in range(0, shape[0], 2)) == expected


def test_checksum_does_not_depend_on_the_sharding():
  devices = jax.devices()
  assert len(devices) >= 8, "the tests run with eight virtual devices"
  x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)), jnp.float32)
  mesh = jax.sharding.Mesh(np.array(devices[:8]), ("data",))
  sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
  assert checksums([x]) == checksums([sharded])


def test_saving_runs_in_the_background(manager):
  manager.save(1, make_tree(1), {})
  assert threading.active_count() > 1
  manager.wait()
  assert manager.steps() == [1]


def test_other_versions_than_those_that_wrote_a_checkpoint_are_named(manager, messages, monkeypatch):
  """Bits may then differ; the run goes on. A checkpoint of before, without a record, says nothing."""
  tree, then = make_tree(), manager_module.made_with()
  manager.save(1, tree, {"n": 1})
  manager.wait()
  assert manager.restore_latest(abstract(tree)).positions["made_with"] == then and messages == []
  assert then.keys() == {"jax", "jaxlib", "flax", "optax", "numpy", "device"}
  monkeypatch.setattr(manager_module, "made_with", lambda: then | {"jax": "99.1", "device": "TPU v9 (tpu)"})
  assert_same(manager.restore_latest(abstract(tree)).tree, tree)
  (said,) = messages
  assert f"jax {then['jax']}, now 99.1; device {then['device']}, now TPU v9 (tpu): the run goes on" in said
