"""`GhostEngineManager` around a hand-written loop, and the foreign-model example."""

import dataclasses
import json
import runpy
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from maxghost import ghost, report, scorelog, scores

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


def make_manager(engine, tmp_path, val=VALS, save_every=2, **settings):
  model = Mlp(nnx.Rngs(0))
  return ghost.GhostEngineManager(
    engine, model, val, output_dir=tmp_path / "scores", loss_fn=loss_fn, save_every=save_every, **settings
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
  assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == [*names, "position.json"]
  assert [path.name for path in saved] == names[:2]
  log = scorelog.load(tmp_path / "scores")
  assert log.messages == [] and (log.val_sets, log.objective) == (("validation 0", "validation 1"), "custom")
  np.testing.assert_array_equal(log["step"], np.repeat(range(STEPS), N))
  np.testing.assert_array_equal(log["offset"], (100 * np.arange(STEPS)[:, None] + np.arange(N)).ravel())
  assert set(log["path"]) == {"ids"}
  np.testing.assert_array_equal(log["dot"], np.concatenate([r.dot.T for r in expected]))
  np.testing.assert_array_equal(log["contribution"], np.concatenate([r.additive.T for r in expected]))
  np.testing.assert_allclose(log["share"], np.concatenate([b["w"] / b["w"].sum() for b in BATCHES]), rtol=1e-6)
  np.testing.assert_allclose(log.steps["loss"], [float(r.loss) for r in expected])
  np.testing.assert_array_equal(log.steps["val_loss"], np.stack([r.val_loss for r in expected]))


def test_an_example_of_dot_zero_has_its_share(engine, tmp_path):
  manager = make_manager(engine, tmp_path)
  with tiny.cheap_compilation():
    result = engine.score(manager.model, BATCHES[0], VALS, loss_fn=loss_fn)
  zero = jax.numpy.zeros_like(result.dot)
  manager.engine = types.SimpleNamespace(score=lambda *_, **__: dataclasses.replace(result, dot=zero, additive=zero))
  manager.attach_train_batch(BATCHES[0])
  manager.prepare_gradients()
  manager.aggregate_and_log(0)
  manager.cleanup()
  weights = BATCHES[0]["w"]
  np.testing.assert_allclose(scorelog.load(tmp_path / "scores")["share"], weights / weights.sum(), rtol=1e-6)


def test_every_command_reads_the_log_and_a_loop_that_starts_again_continues_it(engine, tmp_path, capsys):
  domains = [("code", "a.py", 0), ("code", "a.py", 7), *(("web", "b", i) for i in range(N - 2))]
  for steps in (range(4), range(2, 5)):  # the second one starts from a checkpoint after two steps
    manager = make_manager(engine, tmp_path, VALS[0])
    with tiny.cheap_compilation():
      for step in steps:
        manager.attach_train_batch(BATCHES[step], ids=None if step == 4 else domains)
        manager.prepare_gradients()
        manager.aggregate_and_log(step, learning_rate=0.5)
    manager.cleanup()
  assert "scores from step 2 on are replaced" in capsys.readouterr().err
  log = scorelog.load(tmp_path / "scores")
  assert log.steps["step"].tolist() == [0, 1, 2, 3, 4]
  assert log["path"][-N:].tolist() == ["step 4"] * N
  np.testing.assert_allclose(log["contribution"], 0.5 * log["share"][:, None] * log["dot"], rtol=1e-5)
  assert scores.main([str(tmp_path / "scores"), "--by", "document", "--format", "json"]) == 0
  rows = json.loads(capsys.readouterr().out)["rows"]
  assert {(r["domain"], r["path"], r["offset"]): r["chunks"] for r in rows}["code", "a.py", 7] == 4
  assert report.main([str(tmp_path / "scores"), "--no-texts"]) == 0
  assert scores.main([str(tmp_path / "scores"), "--compact"]) == 0
  assert scorelog.load(tmp_path / "scores").num_rows == 5 * N


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


def test_the_scores_of_a_batch_are_not_those_of_the_next(engine, tmp_path):
  """Also in a loop that leaves out `clear_gradients`, or `prepare_gradients` in a step."""
  manager = make_manager(engine, tmp_path, VALS[0])
  manager.attach_train_batch(BATCHES[0])
  with tiny.cheap_compilation():
    manager.prepare_gradients()
  manager.attach_train_batch(BATCHES[1], ids=range(N))
  with pytest.raises(ValueError, match=r"out of order: prepare_gradients\(\)"):
    manager.aggregate_and_log(1)


def test_ids_settings_and_batch_sizes_are_checked(engine, tmp_path):
  manager = make_manager(engine, tmp_path, VALS[0])
  with pytest.raises(ValueError, match="5 ids for 6 examples"):
    manager.attach_train_batch(BATCHES[0], ids=range(5))
  for one in (7, "seven", np.array(7)):
    with pytest.raises(ValueError, match="1 ids for 6 examples: give one id per example"):
      manager.attach_train_batch(BATCHES[0], ids=one)
  no_place = r"ids: \('a', .*\) is no \(domain, path, offset\)"
  places = [("a", 1), ("a", "b", "c"), ("a", "b", None), ("a", "b", 2**63)]
  wrong = ([0] * 5, "5 ids for 6"), ({*range(N)}, "ids is a set, which has no order")
  for ids, found in (*(([place] * N, no_place) for place in places), *wrong):
    with pytest.raises(ValueError, match=found):
      manager.attach_train_batch(BATCHES[0], ids=ids)
  with pytest.raises(ValueError, match=r"train_batch must hold arrays of numbers .*; it holds int"):
    manager.attach_train_batch({"x": 3})
  with pytest.raises(ValueError, match="1 names for 2 validation batches"):
    make_manager(engine, tmp_path, val_sets=("a", "a"))
  with pytest.raises(ValueError, match="save_every=0: use 1 or more"):
    make_manager(engine, tmp_path, save_every=0)
  with pytest.raises(ValueError, match="2 names for 1 validation batches"):
    make_manager(engine, tmp_path, VALS[0], val_sets=("a", "b"))
  with tiny.cheap_compilation():
    for step, batch in enumerate((BATCHES[0], make_batch(3, 9))):
      manager.attach_train_batch(batch)
      manager.prepare_gradients()
      for other in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match=f"step={other!r}: give the number of the step, 0 or more"):
          manager.aggregate_and_log(other)
      manager.aggregate_and_log(step)
  manager.save_metrics(1)
  assert scorelog.load(tmp_path / "scores")["offset"].tolist() == [*range(N), 0, 1, 2]


class Column(list):
  """As a column of pandas after a shuffle: rows have labels, by which it is indexed, and an order of their own."""

  def __getitem__(self, label):
    return super().__getitem__(label if isinstance(label, slice) else -1 - label)

  def __array__(self, dtype=None, copy=None):
    return np.array([*self], object)


def test_ids_are_those_of_the_rows_in_order(engine, tmp_path):
  """In any array: labels of a column are no places, a number of JAX is a number, and a hash may need 64 bits."""
  manager = make_manager(engine, tmp_path, VALS[0])
  big = 2**64 - 1
  given = (Column([7, 8, 9, None, big, "x"]), jax.numpy.arange(N), np.array([3, 1, 2, 0, 5, 4]))
  with tiny.cheap_compilation():
    for step, ids in enumerate(given):
      manager.attach_train_batch(BATCHES[0], ids=ids)
      manager.prepare_gradients()
      with pytest.raises(ValueError, match=r"learning_rate=array\(\[0.1\]\): give one number, that of the step"):
        manager.aggregate_and_log(step, learning_rate=np.array([0.1]))
      manager.aggregate_and_log(step)
  manager.cleanup()
  log = scorelog.load(tmp_path / "scores")
  assert log["path"].tolist() == [*["ids"] * 3, "step 0", str(big), "x", *["ids"] * 2 * N]
  assert log["offset"].tolist() == [7, 8, 9, 3, 0, 0, *range(N), 3, 1, 2, 0, 5, 4]


def test_the_foreign_model_example_finds_wrong_labels(capsys):
  """Fewer than 40 lines; of the 32 lowest scores 4 would have wrong labels by chance."""
  assert len(EXAMPLE.read_text().splitlines()) < 40
  with tiny.cheap_compilation(), jax.numpy_rank_promotion("allow"):  # as in a script of a user
    facts = runpy.run_path(str(EXAMPLE))
  assert facts["found"] >= 12
  assert f"{facts['found']} of the 32 lowest scores have wrong labels" in capsys.readouterr().out


class Dropped(Mlp):
  def __init__(self, rngs):
    super().__init__(rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.second(self.dropout(nnx.relu(self.first(x))))


def test_dropout_in_training_mode_is_refused_because_its_numbers_would_never_change(engine):
  model = Dropped(nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"dropout in training mode.*call model.eval\(\) first"):
    engine.score(model, BATCHES[0], VALS[0], loss_fn=loss_fn)
  model.eval()
  with tiny.cheap_compilation():
    scored = engine.score(model, BATCHES[0], VALS[0], loss_fn=loss_fn)
  same = nnx.merge(nnx.split(Mlp(nnx.Rngs(1)))[0], nnx.state(model, nnx.Param))
  with tiny.cheap_compilation():
    plain = engine.score(same, BATCHES[0], VALS[0], loss_fn=loss_fn)
  np.testing.assert_allclose(scored.dot, plain.dot, rtol=1e-5)
