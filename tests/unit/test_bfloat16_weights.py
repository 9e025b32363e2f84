"""Train steps of a model whose weights are bfloat16: what needs float32 beside them, and what must have their type."""

import numpy as np
import pytest
import tiny
from train_steps import TRAIN, Run

NARROW = {"dtype": "bfloat16", "weight_dtype": "bfloat16", "gradient_clipping_threshold": 0.5}


def steps(**changes) -> tuple[Run, list]:
  run = Run(**(NARROW | changes))
  return run, [run.step(batch) for batch in TRAIN[:3]]


@pytest.mark.parametrize("curvature", ["none", "secant"])
def test_a_stored_validation_gradient_has_their_type_and_its_loss_has_not(curvature):
  _, outs = steps(ghost_val_every=2, ghost_curvature=curvature)
  _, each = steps(ghost_curvature=curvature)
  np.testing.assert_array_equal(outs[0]["val_loss"], each[0]["val_loss"])
  np.testing.assert_array_equal(outs[0]["contribution_BSK"], each[0]["contribution_BSK"])
  assert [out["val_loss"].dtype for out in outs] == [np.float32] * 3
  assert np.isnan(outs[1]["val_loss"]).all() and np.isfinite(outs[2]["val_loss"]).all()
  assert all(out["scored_ok"] and (out["contribution_BSK"] != 0).any() for out in outs)


@pytest.mark.parametrize("direction", ["adam", "sgd"])
def test_forward_mode_takes_a_float32_direction(direction):
  """Against the scores by rules of the same step, to what rounding in bfloat16 leaves of a document's score."""
  (_, (_, found, _)), (_, (_, expected, _)) = (
    steps(ghost_schedule=schedule, ghost_direction=direction) for schedule in ("forward_mode", "two_pass")
  )
  size = np.abs(expected["contribution_BSK"]).max()
  by_row, expected_by_row = (out["contribution_BSK"].sum(1) for out in (found, expected))
  assert np.abs(by_row - expected_by_row).max() < 0.06 * size
  assert found["check_rel_err"][0] < 2**-8  # a rounding of bfloat16, in which the tangents are


def test_norms_are_float32_sums():
  run, (out, *_) = steps(ghost_enabled=False)
  assert out["grad_norm"].dtype == out["param_norm"].dtype == out["clip_factor"].dtype == np.float32
  start = tiny.by_label(tiny.make_model(run.cfg))
  wide = np.sqrt(sum(float((v.astype(np.float64) ** 2).sum()) for v in start.values()))
  assert out["param_norm"] == pytest.approx(wide, rel=1e-6)


def test_greats_chooses_among_rows():
  _, outs = steps(ghost_select="greats", ghost_select_fraction=0.5)
  assert all(out["scored_ok"] and 0 < out["chosen_B"].sum() < tiny.ROWS for out in outs)
