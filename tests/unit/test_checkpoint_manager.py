"""Checkpoints: what goes in comes out bit by bit; damage is noticed, named and stepped over; misfits raise."""

import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxghost.checkpoint import manager as manager_module
from maxghost.checkpoint.checksum import checksums
from maxghost.checkpoint.manager import CheckpointError, CheckpointManager
from maxghost.config import ConfigError


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
