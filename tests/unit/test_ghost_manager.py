"""`GhostEngineManager` around a hand-written loop, and the foreign-model example."""

import runpy
from pathlib import Path

import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from maxghost import ghost

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreign_model.py"
N, STEPS = 6, 5


class Mlp(nnx.Module):
  def __init__(self, rngs):
    self.first, self.second = nnx.Linear(5, 7, rngs=rngs), nnx.Linear(7, 3, rngs=rngs)

  def __call__(self, x):
    return self.second(nnx.relu(self.first(x)))


def loss_fn(model, batch):
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]), batch["w"]


def make_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  x, w = rng.normal(size=(num, 5)).astype(np.float32), (rng.random(num) + 0.2).astype(np.float32)
  return {"x": x, "y": rng.integers(0, 3, num), "w": w}


BATCHES, VALS = [make_batch(N, 10 + i) for i in range(STEPS)], [make_batch(4, 2), make_batch(3, 3)]


@pytest.fixture(scope="module")
def engine():
  return ghost.GhostEngine()


def make_manager(engine, tmp_path, val=VALS, save_every=2):
  model = Mlp(nnx.Rngs(0))
  return ghost.GhostEngineManager(
    engine, model, val, output_dir=tmp_path / "scores", loss_fn=loss_fn, save_every=save_every
  )


def test_a_hand_written_loop(engine, tmp_path):
  """Trains as a loop without scores does; the files hold every step once, with the engine's numbers and the ids."""
  manager = make_manager(engine, tmp_path)
  model, other = manager.model, Mlp(nnx.Rngs(0))
  optimizer, other_optimizer = (nnx.Optimizer(m, optax.adamw(1e-2), wrt=nnx.Param) for m in (model, other))
  expected, saved = [], []
  gradient = nnx.jit(nnx.grad(lambda m, b: (loss_fn(m, b)[0] * b["w"]).sum() / b["w"].sum()))
  with tiny.cheap_compilation():
    for step, batch in enumerate(BATCHES):
      manager.attach_train_batch(batch, ids=100 * step + np.arange(N))
      assert manager.prepare_forward_input() is batch
      expected.append(engine.score(model, batch, VALS, loss_fn=loss_fn))
      optimizer.update(model, manager.prepare_gradients())
      np.testing.assert_array_equal(manager.aggregate_and_log(step), expected[-1].dot)
      manager.clear_gradients()
      if manager.should_save_metrics(step):
        saved.append(manager.save_metrics(step))
      other_optimizer.update(other, gradient(other, batch))
  manager.cleanup()
  for label, value in tiny.by_label(other).items():
    np.testing.assert_allclose(tiny.by_label(model)[label], value, rtol=1e-4, atol=1e-6, err_msg=label)
  names = [f"dot_prod_log_iter_{step}.npz" for step in (1, 3, 4)]
  assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == names
  assert [path.name for path in saved] == names[:2]
  rows = [np.load(tmp_path / "scores" / name) for name in names]
  joined = {name: np.concatenate([r[name] for r in rows]) for name in ("step", "ids", "dot", "loss", "val_loss")}
  np.testing.assert_array_equal(joined["step"], range(STEPS))
  np.testing.assert_array_equal(joined["ids"], 100 * np.arange(STEPS)[:, None] + np.arange(N))
  np.testing.assert_array_equal(joined["dot"], np.stack([r.dot for r in expected]))
  assert joined["dot"].shape == (STEPS, 2, N)
  np.testing.assert_allclose(joined["loss"], [float(r.loss) for r in expected])
  np.testing.assert_array_equal(joined["val_loss"], np.stack([r.val_loss for r in expected]))


def test_an_evaluation_in_between_cannot_attach_a_batch(engine, tmp_path):
  manager = make_manager(engine, tmp_path, VALS[0])
  manager.attach_train_batch(BATCHES[0])
  manager.detach_for_evaluation()
  with pytest.raises(ValueError, match=r"attach_train_batch called out of order: reattach_after_evaluation\(\)"):
    manager.attach_train_batch(BATCHES[1])
  manager.reattach_after_evaluation()
  manager.attach_train_batch(BATCHES[1])
  assert manager.prepare_forward_input() is BATCHES[1]


def test_methods_out_of_order_say_what_comes_first(engine, tmp_path):
  manager = make_manager(engine, tmp_path, VALS[0])
  for method, first in (
    (manager.prepare_forward_input, "attach_train_batch"),
    (manager.prepare_gradients, "attach_train_batch"),
    (lambda: manager.aggregate_and_log(0), "prepare_gradients"),
    (lambda: manager.save_metrics(0), "aggregate_and_log"),
  ):
    with pytest.raises(ValueError, match=rf"out of order: {first}"):
      method()
  assert not manager.should_save_metrics(1)  # nothing to save
  manager.cleanup()
  assert not (tmp_path / "scores").exists()


def test_ids_settings_and_batch_sizes_are_checked(engine, tmp_path):
  manager = make_manager(engine, tmp_path, VALS[0])
  with pytest.raises(ValueError, match="5 ids for 6 examples"):
    manager.attach_train_batch(BATCHES[0], ids=range(5))
  with pytest.raises(ValueError, match="save_every=0: use 1 or more"):
    make_manager(engine, tmp_path, save_every=0)
  with tiny.cheap_compilation():
    for step, batch in enumerate((BATCHES[0], make_batch(3, 9))):
      manager.attach_train_batch(batch)
      manager.prepare_gradients()
      if step == 0:
        manager.aggregate_and_log(step)
  with pytest.raises(ValueError, match=r"step 1 has scores \(3,\), the steps before \(6,\).*save_metrics\(step\)"):
    manager.aggregate_and_log(1)
  manager.save_metrics(0)
  manager.aggregate_and_log(1)
  np.testing.assert_array_equal(np.load(manager.save_metrics(1))["ids"], [[0, 1, 2]])


def test_the_foreign_model_example_finds_wrong_labels(capsys):
  """Fewer than 40 lines; of the 32 lowest scores 4 would have wrong labels by chance."""
  assert len(EXAMPLE.read_text().splitlines()) < 40
  with tiny.cheap_compilation():
    facts = runpy.run_path(str(EXAMPLE))
  assert facts["found"] >= 12
  assert f"{facts['found']} of the 32 lowest scores have wrong labels" in capsys.readouterr().out
