"""The truth table of the quality suite, in its quick form: a few images left out of two steps of one digits run."""

import sys
from pathlib import Path

import jax
import numpy as np
import oracles
import pytest

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _digits
import _truth
from maxghost.ghost.schedules import passes
from maxghost.optimizers import by_label

AT, HORIZONS = (3, 40), (0, 2)


@pytest.fixture(scope="module")
def world():
  return _truth.digits("AdamW", at=AT, rows=12)


@pytest.fixture(scope="module")
def found(world):
  return _truth.measure(world, (0,), HORIZONS)


def test_a_path_score_is_what_leaving_the_image_out_of_the_step_changes(world, found):
  assert found.real_CnH.shape == (2, 12, 2) and np.isfinite(found.real_CnH).all()
  path, frozen = (found.names.index(name) for name in ("path + hessian", "frozen state"))
  pearson, _, slope = _truth.statistics(found.scores_MCn, found.real_CnH)
  assert 0.9 < slope[path, 0] < 1.1 and pearson[path, 0] > 0.97
  assert abs(slope[path, 0] - 1) < abs(slope[frozen, 0] - 1)
