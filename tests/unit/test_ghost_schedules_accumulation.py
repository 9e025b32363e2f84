"""Gradient accumulation: the step, the scores and the account of the whole batch, from one micro-batch after another.

B = 9 rows in three micro-batches; micro-batch m holds rows m, m + 3, m + 6. Float64.
"""

import functools
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx
from train_steps import VALIDATION, Run

from maxghost import objectives
from maxghost.ghost.schedules import Model, passes
from maxghost.training import console, memory
from maxghost.training.state import trainable

FLOAT64 = {"dtype": "float64", "weight_dtype": "float64", "remat_policy": "none"}
ROWS = ((4, 5, 3), (13,), (2,), (1, 7, 2, 2), (8, 3), (3, 9), (12,), (5, 5), (6,))
UNEVEN = tiny.make_batch(ROWS, seed=300)
HOLLOW = {**UNEVEN, "targets_segmentation": UNEVEN["targets_segmentation"].copy()}
HOLLOW["targets_segmentation"][1::3] = 0  # micro-batch 1 has no token that counts
BATCHES = [UNEVEN, HOLLOW]
COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


class TwoSteps:
  """A batch with uneven micro-batches, then one with an empty micro-batch."""

  def __init__(self, num_micro: int, **changes):
    self.run = Run(batch=UNEVEN, gradient_accumulation_steps=num_micro, **FLOAT64, **changes)
    self.around, self.out = [self.run.snapshot()], []
    for batch in BATCHES:
      self.out.append(self.run.step(batch))
      self.around.append(self.run.snapshot())


@pytest.fixture(scope="module")
def whole():
  return TwoSteps(1, ghost_direction="sgd")


@pytest.fixture(scope="module")
def split():
  return TwoSteps(3, ghost_direction="sgd")


def test_the_micro_batches_are_uneven_and_one_is_empty():
  counts = [[(b["targets_segmentation"][m::3] != 0).sum() for m in range(3)] for b in BATCHES]
  assert len(set(counts[0])) == 3
  assert counts[1][1] == 0
  assert min(counts[1][0], counts[1][2]) > 0


@pytest.mark.parametrize("i", [0, 1])
def test_everything_is_that_of_the_whole_batch(whole, split, i):
  """Gradient, update, scores of every document, contributions by parameter, account."""
  actual, expected = split.out[i], whole.out[i]
  assert actual.keys() == expected.keys()
  for name in sorted(expected.keys() - {"check_rel_err", "param_contribution", "nonfinite_scores", "scored_ok"}):
    assert oracles.relative_error(actual[name], expected[name]) < 1e-9, name
  for label, value in expected["param_contribution"].items():
    assert oracles.relative_error(actual["param_contribution"][label], value) < 1e-9, label
  for name in ("params", "first", "second"):
    for label, value in getattr(whole.around[i + 1], name).items():
      assert oracles.relative_error(getattr(split.around[i + 1], name)[label], value) < 1e-9, (name, label)
  assert actual["check_rel_err"][0] < 1e-10
  assert actual["scored_ok"]


@pytest.mark.parametrize("i", [0, 1])
def test_no_micro_batch_overwrites_anothers_scores(split, i):
  """Every document that has a token to count has a score of its own; no two are equal."""
  out = split.out[i]
  has_tokens = out["tokens_BS"] > 0
  scores = out["score_dot_BSK"][..., 0]
  assert (scores[has_tokens] != 0).all()
  assert len(np.unique(scores[has_tokens])) == has_tokens.sum() > 9
  assert (scores[~has_tokens] == 0).all()


COUPLED = {"experts": routed.MIXTRAL | {"load_balance_loss_weight": 2.0}, "dropout": {"dropout_rate": 0.3}}


@pytest.mark.parametrize(
  ("case", "batch"),
  [("experts", UNEVEN), ("experts", HOLLOW), ("dropout", UNEVEN)],
  ids=["experts", "hollow", "dropout"],
)
def test_forward_mode_scores_each_micro_batch_by_itself(case, batch):
  """The load of the experts and the masks are those of a micro-batch, in the gradient and in both schedules' scores."""
  keys = COUPLED[case] | {"opt_type": "sgd", "gradient_accumulation_steps": 3}
  found, expected = (
    Run(batch=batch, ghost_schedule=schedule, **(FLOAT64 | keys)).step(batch)
    for schedule in ("forward_mode", "two_pass")
  )
  assert found["check_rel_err"][0] < 1e-10
  by_row, expected_by_row = (out["contribution_BSK"].sum(1) for out in (found, expected))
  assert oracles.relative_error(by_row, expected_by_row) < 1e-9


@pytest.mark.parametrize("changes", [{"dropout_rate": 0.5}, {"lora_rank": 2, "lora_dropout": 0.5}])
def test_micro_batches_draw_masks_of_their_own(changes):
  """Equal rows in different micro-batches have different losses, as in one batch."""
  cfg = tiny.make_config(**changes)
  model, key = tiny.make_model(cfg), jax.random.key(0)
  for _, part in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
    part[...] = jax.random.normal(key, part.shape)
  equal = {name: values[[3, 3]] for name, values in UNEVEN.items()}
  with tiny.cheap_compilation():
    passed = passes.accumulated(
      Model(*nnx.split(model, trainable(cfg, model), ...)), objectives.create(cfg).training(key), equal, 2
    )
  first, second = np.asarray(passed.losses)
  assert (first != second)[equal["targets_segmentation"][0] != 0].all()


def test_weights_may_be_narrower_than_what_is_computed():
  """The sums over micro-batches are then in the type of the losses."""
  cfg = tiny.make_config(dtype="float64", weight_dtype="float32", base_num_decoder_layers=1, remat_policy="none")
  with jax.enable_x64(True), tiny.cheap_compilation():
    model = Model(*nnx.split(tiny.make_model(cfg), nnx.Param, ...))
    pass_of = jax.jit(lambda count: passes.accumulated(model, objectives.create(cfg), UNEVEN, count), static_argnums=0)
    whole, split = (tiny.by_label(pass_of(count).grads) for count in (1, 3))
  for label, gradient in whole.items():
    assert split[label].dtype == np.float32
    assert oracles.relative_error(split[label], gradient) < 1e-6, label


@functools.cache
def own_path() -> TwoSteps:
  """AdamW's own direction."""
  return TwoSteps(3)


WHOLE = {
  "path": {}, "adam": {"ghost_direction": "adam", "logits_via_embedding": True},
  "muon": {"opt_type": "muon"}, "secant": {"ghost_curvature": "secant", "ghost_val_refresh_steps": 0},
  "hessian": {"ghost_curvature": "hessian"}, "experts": routed.MIXTRAL,
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_a_direction_that_needs_the_gradient_is_that_of_the_whole_batch(case):
  """Scores, account and update are those of schedule forward_mode without micro-batches; P_t has this step's factor."""
  steps = own_path() if case == "path" else TwoSteps(3, **WHOLE[case])
  expected = TwoSteps(1, ghost_schedule="forward_mode", **WHOLE[case])
  for i, (out, truth) in enumerate(zip(steps.out, expected.out, strict=True)):
    for name in ("score_dot_BSK", "contribution_BSK", "predicted_examples", "momentum", "grad_norm", "clip_factor"):
      assert oracles.relative_error(out[name], truth[name]) < 1e-9, name
    assert out["clip_factor"] < 1
    for label, value in expected.around[i + 1].params.items():
      assert oracles.relative_error(steps.around[i + 1].params[label], value) < 1e-9, label
    size = np.abs(out["contribution_BSK"]).sum()
    by_layer = sum(x.sum(0) for x in out["param_contribution"].values())
    np.testing.assert_allclose(by_layer, out["contribution_BSK"], atol=1e-12 * size)
    np.testing.assert_allclose(out["contribution_BSK"].sum(), out["predicted_examples"][0], atol=1e-12 * size)
    if case != "muon":  # whose path is an integral by two nodes
      assert abs(out["direction_residual"][0]) < 1e-9 * size
    assert out["check_rel_err"][0] < 1e-10


def test_the_columns_of_micro_batches_add_up_with_factors_too():
  """Factors of the whole batch's directions: what they leave out stands in the residual."""
  steps, exact = TwoSteps(3, ghost_rank=3), own_path()
  with jax.enable_x64(True), tiny.cheap_compilation():
    gradients = oracles.ExampleGradients(tiny.make_model(tiny.make_config(**FLOAT64)))
    for i, out in enumerate(steps.out):
      before = steps.around[i].params
      G = oracles.batch_gradient(gradients(VALIDATION, before), VALIDATION)
      change = {label: steps.around[i + 1].params[label] - v for label, v in before.items()}
      columns = [float(out[name][0]) for name in COLUMNS]
      size = sum(map(abs, columns))
      predicted = -sum(float((G[label] * v).sum()) for label, v in change.items())
      assert sum(columns) == pytest.approx(predicted, abs=1e-7 * size)
      assert abs(out["direction_residual"][0]) > 1e-3 * size
      assert out["check_rel_err"][0] < 1e-10
      assert all(captured.min() > 0.1 and captured.max() <= 1 for captured in out["captured"].values())
      scores, expected = (x["contribution_BSK"].ravel() for x in (out, exact.out[i]))
      assert np.corrcoef(scores, expected)[0, 1] > 0.9


BUT_ONE = tuple(f"*{part}*" for part in ("norm", "self_attention", "wi_", "embed", "logits"))


@pytest.mark.parametrize("exclude", [(), BUT_ONE], ids=["all", "one matrix"])
def test_factors_are_those_of_one_batch(exclude):
  """In the backward pass of one batch and before that of micro-batches: both suit products with its gradient."""
  changes = FLOAT64 | {"ghost_rank": 3, "gradient_clipping_threshold": 0.0, "base_num_decoder_layers": 1}
  changes["ghost_exclude"] = exclude
  one, several = (Run(batch=UNEVEN, gradient_accumulation_steps=num, **changes).step(UNEVEN) for num in (1, 3))
  for name in ("contribution_BSK", "captured", "direction_residual"):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9), one[name], several[name])
  assert np.abs(one["direction_residual"]).max() > 1e-3 * np.abs(one["contribution_BSK"]).sum()


@pytest.mark.parametrize(
  ("changes", "there"),
  [
    ({}, 1),
    ({"ghost_direction": "marginal"}, 2),
    ({"ghost_direction": "sgd"}, 0),
    ({"gradient_accumulation_steps": 1}, 0),
  ],
  ids=str,
)
def test_directions_that_are_known_before_the_pass_are_told(changes, there):
  """In the estimate of memory, and at the start of a run. there: their number; marginal credit adds the gradient."""
  cfg = tiny.make_config(**({"gradient_accumulation_steps": 2} | changes))
  tensors = [tensor for held in memory.estimate(cfg).rows.values() for tensor in held]
  assert sum(t.shape[0] for t in tensors if t.why == "directions of the whole gradient") == there
  plan = mock.MagicMock(cfg=cfg, num_params=1, layout=mock.MagicMock(num_devices=1))
  lines = console.start_lines(plan, mock.MagicMock(num_train_documents=1), {}, Path("run"))
  (line,) = [line for line in lines if line.startswith("ghost: ")]
  assert line.endswith("schedule two_pass, in a second pass over the batch" if there else "schedule two_pass")
