"""The train step under every schedule, direction and refresh: the same training, and an account that adds up.

All in float64, so that a difference is a fault and not rounding. B rows, S documents in a row, K validation sets.
"""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config
from maxghost.objectives import LanguageModelLoss

FLOAT64 = {"dtype": "float64", "weight_dtype": "float64", "remat_policy": "none"}
COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")
OTHER = tiny.make_batch(((2, 7), (10,), (3,)), seed=201)
STEPS = 4


class Steps:
  """Four steps: parameters and Adam's state around each, and the outputs."""

  def __init__(self, val_batches=(VALIDATION,), **changes):
    self.run = Run(num_sets=len(val_batches), **FLOAT64, **changes)
    self.val_batches = val_batches
    self.around, self.out = [self.run.snapshot()], []
    for i in range(STEPS):
      self.out.append(self.run.step(TRAIN[i], val_batches))
      self.around.append(self.run.snapshot())

  def change(self, i: int) -> dict:
    return {label: self.around[i + 1].params[label] - v for label, v in self.around[i].params.items()}


RUNS = {
  "plain": {"ghost_enabled": False},
  "concat": {"ghost_schedule": "concat", "ghost_val_batch_size": len(VALIDATION["inputs"])},
  "second_order": {"ghost_direction": "second_order"},
  "val_every": {"ghost_val_every": 3},
  "rank": {"ghost_rank": 5, "ghost_exclude": ("*norm*", "*self_attention*", "*wi_1*", "token_embedder/*")},
  "reverse_scan": {"ghost_schedule": "reverse_scan", "gradient_clipping_threshold": 0.0},
  "reverse_scan-rank": {
    "ghost_schedule": "reverse_scan", "ghost_direction": "sgd", "ghost_rank": 5, "gradient_clipping_threshold": 0.0,
  },
  "plain-unclipped": {"ghost_enabled": False, "gradient_clipping_threshold": 0.0},
  "dropout": {
    "num_sets": 2, "dropout_rate": 0.1, "ghost_exclude": ("*norm*", "decoder/logits_dense/*"), "ghost_detail": "module",
  },
}  # fmt: skip
for name in ("plain", "second_order", "val_every", "rank"):  # compared bit for bit
  RUNS[name]["exact"] = True
RUNS["dropout-reverse_scan"] = RUNS["dropout"] | {"ghost_schedule": "reverse_scan"}


@pytest.fixture(scope="module")
def steps_of():
  made = {}

  def get(name) -> Steps:
    if name not in made:
      changes = dict(RUNS[name])
      made[name] = Steps((VALIDATION, OTHER)[: changes.pop("num_sets", 1)], **changes)
    return made[name]

  return get


@pytest.fixture(scope="module")
def gradient():
  """G at any parameters: `gradient(values, batch)` -> {label: array}."""
  with jax.enable_x64(True):
    examples = oracles.ExampleGradients(tiny.make_model(tiny.make_config(**FLOAT64)))

  def at(values: dict, batch: dict) -> dict:
    with jax.enable_x64(True), tiny.cheap_compilation():
      return oracles.batch_gradient(examples(batch, values), batch)

  return at


def inner(left: dict, right: dict) -> float:
  return sum(float((left[label] * right[label]).sum()) for label in left)


def assert_same_training(ours: Steps, theirs: Steps, tolerance: float) -> None:
  for i in range(STEPS + 1):
    for name in ("params", "first", "second"):
      for label, value in getattr(theirs.around[i], name).items():
        actual = getattr(ours.around[i], name)[label]
        if tolerance:
          assert oracles.relative_error(actual, value) < tolerance, (i, name, label)
        else:
          np.testing.assert_array_equal(actual, value, err_msg=f"{i} {name} {label}")
    assert ours.around[i].clip_factor == pytest.approx(theirs.around[i].clip_factor, rel=tolerance or 1e-15)


@pytest.mark.parametrize(
  ("name", "plain", "tolerance"),
  [
    pytest.param("second_order", "plain", 0, marks=pytest.mark.slow),
    ("val_every", "plain", 0),
    pytest.param("rank", "plain", 0, marks=pytest.mark.slow),
    ("concat", "plain", 1e-9),
    ("reverse_scan", "plain-unclipped", 1e-9),
    pytest.param("dropout-reverse_scan", "dropout", 1e-9, marks=pytest.mark.slow),
  ],
)
def test_training_is_that_without_scores(name, plain, tolerance, steps_of):
  """two_pass: the same bits. The others: the same up to the order of sums."""
  assert_same_training(steps_of(name), steps_of(plain), tolerance)
  factors = [s.clip_factor for s in steps_of("plain").around[1:]]
  assert min(factors) < 1  # clipping is at work


@pytest.mark.parametrize(
  "name", ["reverse_scan", pytest.param("reverse_scan-rank", marks=pytest.mark.slow), "rank", "val_every"]
)
def test_the_columns_add_up(name, steps_of, gradient):
  """To -<G, Delta>, G at the parameters and rows of the step whose validation gradient is in use."""
  steps = steps_of(name)
  for i, out in enumerate(steps.out):
    used = i - i % 3 if name == "val_every" else i
    G = gradient(steps.around[used].params, VALIDATION)
    columns = [float(out[column][0]) for column in COLUMNS]
    size = sum(map(abs, columns))
    assert sum(columns) == pytest.approx(-inner(G, steps.change(i)), abs=1e-7 * size), i  # m is kept in float32
    assert out["predicted"][0] == pytest.approx(sum(columns), abs=1e-12 * size)
    assert out["check_rel_err"][0] < 1e-10
    np.testing.assert_allclose(out["contribution_BSK"].sum(), out["predicted_examples"][0], atol=1e-12 * size)
    assert out["scored_ok"]


def test_a_low_rank_direction_leaves_a_residual(steps_of):
  out = steps_of("rank").out[2]
  assert set(out["captured"]) > {"decoder/layers/mlp/wo/kernel", "decoder/logits_dense/kernel"}
  captured = out["captured"]["decoder/layers/mlp/wo/kernel"]
  assert captured.shape == (3, 1)
  assert 0.2 < captured.min() < captured.max() < 1
  assert abs(out["direction_residual"][0]) > 1e-3 * abs(out["predicted_examples"][0])


def test_the_residual_of_an_exact_direction_is_the_change_of_the_clipping_factor(steps_of):
  """Inside v_t stands the factor of the step before; without clipping nothing is left."""
  for out in steps_of("reverse_scan").out:
    assert abs(out["direction_residual"][0]) < 1e-10 * abs(out["predicted_examples"][0])


def test_a_validation_gradient_serves_three_steps_and_is_then_made_anew(steps_of, gradient):
  steps = steps_of("val_every")
  assert [bool(np.isnan(out["val_loss"][0])) for out in steps.out] == [False, True, True, False]
  start = gradient(steps.around[0].params, VALIDATION)
  for i, G in enumerate([start, start, start, gradient(steps.around[3].params, VALIDATION)]):
    np.testing.assert_allclose(
      steps.out[i]["contribution_BSK"].sum(), expected_examples(steps, i, G, gradient), rtol=1e-9
    )


def expected_examples(steps: Steps, i: int, G: dict, gradient) -> float:
  """lr kappa <g, P_t G> by its formula, with the clipping factor of the step before inside v_t."""
  cfg, before, out = steps.run.cfg.optimizer, steps.around[i], steps.out[i]
  g = gradient(before.params, TRAIN[i])
  constants = {"b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
  u = oracles.adam_direction(G, g, before.second, count=before.count, kappa=before.clip_factor, **constants)
  return float(out["learning_rate"] * out["clip_factor"]) * inner(g, u)


def test_second_order_adds_half_the_curvature_along_the_step(steps_of, gradient):
  """H Delta by central differences of the gradient; then P_t (G + 1/2 H Delta), and the true drop to third order."""
  steps = steps_of("second_order")
  for i in (0, 2):
    before, out, change = steps.around[i].params, steps.out[i], steps.change(i)
    ahead, behind = (
      gradient({k: v + step * change[k] for k, v in before.items()}, VALIDATION) for step in (1e-3, -1e-3)
    )
    G = gradient(before, VALIDATION)
    second = {label: G[label] + 0.5 * (ahead[label] - behind[label]) / 2e-3 for label in G}
    assert out["predicted"][0] == pytest.approx(-inner(second, change), rel=1e-5)
    assert out["predicted"][0] - out["predicted_curvature"][0] == pytest.approx(-inner(G, change), rel=1e-5)
    if i:
      assert out["prev_predicted"][0] == pytest.approx(-inner(G, steps.change(i - 1)), rel=1e-5)
    cfg, g, kappa = steps.run.cfg.optimizer, gradient(before, TRAIN[i]), float(out["clip_factor"])
    constants = {"b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
    state = steps.around[i]
    u = oracles.adam_direction(second, g, state.second, count=state.count, kappa=kappa, **constants)
    expected = float(out["learning_rate"]) * kappa * inner(g, u)
    np.testing.assert_allclose(out["contribution_BSK"].sum(), expected, rtol=1e-5)
    drop = out["val_loss"][0] - steps.out[i + 1]["val_loss"][0]
    first_order = -inner(G, change)
    assert abs(out["predicted"][0] - drop) < 0.25 * abs(first_order - drop)


def test_concat_has_the_scores_of_two_pass(steps_of, gradient):
  """It never holds a whole validation gradient, so it has no columns."""
  steps = steps_of("concat")
  for i, out in enumerate(steps.out):
    G = gradient(steps.around[i].params, VALIDATION)
    np.testing.assert_allclose(out["contribution_BSK"].sum(), expected_examples(steps, i, G, gradient), rtol=1e-9)
    assert not set(COLUMNS) & out.keys()
  losses = [float(out["val_loss"][0]) for out in steps.out]
  np.testing.assert_allclose(losses, [float(out["val_loss"][0]) for out in steps_of("rank").out], rtol=1e-9)


def test_validation_rows_see_no_dropout(steps_of):
  """With it the loss would differ by half a percent or more at every step."""
  mean_loss = jax.jit(LanguageModelLoss())
  with jax.enable_x64(True):
    abstract = tiny.models.create_abstract(tiny.make_config(**FLOAT64))
  for name in ("dropout", "dropout-reverse_scan"):
    steps = steps_of(name)
    for i, out in enumerate(steps.out):
      with jax.enable_x64(True), tiny.cheap_compilation():
        losses, weights = map(np.asarray, mean_loss(tiny.with_values(abstract, steps.around[i].params), VALIDATION))
        assert out["val_loss"][0] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-10)


def test_concat_refuses_dropout_which_would_reach_its_validation_rows():
  with pytest.raises(
    config.ConfigError, match=r"dropout_rate=0\.1 does not go with ghost_schedule=concat, which would"
  ):
    config.load(None, "ghost_schedule=concat", "dropout_rate=0.1")
  config.load(None, "ghost_schedule=concat", "dropout_rate=0.1", "ghost_enabled=false")


def test_reverse_scan_scores_as_two_pass_does(steps_of):
  """Two validation sets, unscored layers, dropout in the training rows alone, clipping.

  The columns that hold P_t G are not compared: walking back, this step's clipping factor is not known yet, and the one
  of the step before stands in v_t. Without clipping they are exact (above).
  """
  ours, theirs = steps_of("dropout-reverse_scan"), steps_of("dropout")
  for actual, expected in zip(ours.out, theirs.out, strict=True):
    for name in ("val_loss", "loss", "loss_BS", "score_dot_BSK", "contribution_BSK", "predicted_examples", "grad_norm"):
      assert oracles.relative_error(actual[name], expected[name]) < 1e-9, name
    assert actual["param_contribution"].keys() == expected["param_contribution"].keys()
    for label, value in expected["param_contribution"].items():
      assert oracles.relative_error(actual["param_contribution"][label], value) < 1e-9, label
    assert oracles.relative_error(actual["weight_decay"], expected["weight_decay"]) < 1e-9
    assert actual["check_rel_err"].max() < 1e-10
    assert np.abs(expected["unscored"]).min() > 0


def poisoned(run: Run, token: int) -> nnx.State:
  """The state of the run with an infinite embedding row for one token."""

  def spoil(path, x):
    if "token_embedder" in jax.tree_util.keystr(path) and "model" in jax.tree_util.keystr(path):
      return x.at[token].set(jnp.inf)
    return x

  with jax.enable_x64(True):
    return jax.tree_util.tree_map_with_path(spoil, run.state)


@pytest.mark.parametrize("name", ["rank", "reverse_scan", "concat"])
def test_a_direction_that_is_not_finite_costs_the_scores_and_nothing_else(name, steps_of):
  """An infinite row that only validation tokens read: G is not a number, the training gradient is as ever."""
  plain = steps_of("plain-unclipped" if name == "reverse_scan" else "plain").run
  ghost = steps_of(name).run
  unread = sorted(set(range(tiny.VOCAB)) - set(np.unique(TRAIN[0]["inputs"])))[0]
  val = {**VALIDATION, "inputs": VALIDATION["inputs"].copy()}
  val["inputs"][1, 2] = unread
  before = {run: run.state for run in (plain, ghost)}
  try:
    for run in (plain, ghost):
      run.state = poisoned(run, unread)
    plain_out, out = plain.step(TRAIN[0]), ghost.step(TRAIN[0], (val,))
    ours, theirs = ghost.snapshot(), plain.snapshot()
  finally:
    for run, state in before.items():
      run.state = state
  assert not out["scored_ok"]
  assert np.isnan(out["val_loss"]).all()
  assert (out["score_dot_BSK"] == 0).all()
  assert (out["contribution_BSK"] == 0).all()
  assert any(out["nonfinite_scores"].values())
  assert out["loss"] == pytest.approx(plain_out["loss"], rel=1e-12)
  for label, value in theirs.params.items():
    np.testing.assert_allclose(ours.params[label], value, rtol=1e-9, atol=1e-12, err_msg=label)
    assert np.isfinite(value).all() == (label != "token_embedder/embedding")


def test_a_walk_over_layers_of_which_nothing_is_trained():
  changes = {"trainable_parameters_mask": ("*token_embedder*", "*logits_dense*")}
  meshes.assert_same(meshes.run({}, **changes, ghost_schedule="reverse_scan"), meshes.run({}, **changes))
