"""The truth table of the quality suite, in its quick form: a few images left out of two steps of one digits run."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from test_path_credit import secant

from maxghost.optimizers import by_label
from maxghost.optimizers.base import Matrix

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _muon_forms
import _truth

AT, HORIZONS, ROWS = (3, 40), (0, 2), 12


@pytest.fixture(scope="module")
def steps():
  return _truth.Steps(_truth.digits("AdamW", at=AT, rows=ROWS))


@pytest.fixture(scope="module")
def found(steps):
  return _truth.measure(steps, (0,), HORIZONS)


def test_a_path_score_is_what_leaving_the_image_out_of_the_step_changes(found):
  assert found.real_CnH.shape == (len(AT), ROWS, len(HORIZONS)) and np.isfinite(found.real_CnH).all()
  pearson, _, slope = _truth.statistics(found.scores_MCn, found.real_CnH)
  bent, straight, frozen = (found.names.index(name) for name in ("path + hessian", "path", "frozen state"))
  assert 0.9 < slope[bent, 0] < 1.1 and pearson[bent, 0] > 0.97
  assert 0.85 < slope[straight, 0] < 1.1 and pearson[straight, 0] > pearson[frozen, 0]
  assert (found.in_all_MCn[: found.num_credits] / found.scores_MCn[: found.num_credits] > 2).all()


def test_the_scores_are_products_with_single_gradients_and_following_is_training_on(steps):
  """Against the formulas, and against a run that is trained without the image in a plain loop."""
  with jax.enable_x64(True):
    batches, val = _truth.wide(steps.world.data(0))
    before = steps.advance(steps.start(0), batches, AT[0] - 1)
    state = steps.advance(before, batches, AT[0])
    batch = _truth.batch_of(batches, AT[0])
    scores, in_all = steps.scores(before[0], state, state[0], batch, val)
    params, (opt_state, _), count = state
    shares, whole = jax.jit(lambda params: (steps.shares(params, batch), steps.gradient(params, batch)))(params)
    gradient = jax.jit(jax.value_and_grad(steps.val_loss))
    g, G, G_before = (by_label(x) for x in (whole, gradient(params, val)[1], gradient(before[0], val)[1]))
    kept = steps.rule.read(opt_state, count=count)
    constants = {"count": int(count), "kappa": 1.0, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
    for bend, direction in (("", G), (" + secant", {k: x + (x - G_before[k]) / 2 for k, x in G.items()})):
      u = {}
      for label, x in direction.items():
        m, v = (np.asarray(kept.arrays[name][label], np.float64) for name in ("first_moment", "second_moment"))
        u[label] = secant(np.asarray(x), np.asarray(g[label]), m, v, **constants)[0]
      expected = 3e-3 * _truth.products(shares, u)
      assert oracles.relative_error(scores[f"path{bend}"], expected) < 1e-12
    later = 0.9 ** np.arange(_truth.STEPS - AT[0])
    factor = (later * (1 - 0.9 ** (AT[0] + 1)) / (1 - 0.9 ** (AT[0] + 1 + np.arange(len(later))))).sum()
    assert oracles.relative_error(in_all["path"], factor * scores["path"]) < 1e-6  # the rate is float32

    real_nH = steps.follow(state, batches, val, jnp.array(HORIZONS))
    apply, ends = jax.jit(lambda grads: steps.apply(state, grads)[0]), []
    for left_out in (1.0, 0.0):
      run = apply(_truth.passes.like(params, {k: x - shares[k][2] * left_out for k, x in g.items()}))
      ends.append(float(gradient(steps.advance(run, batches, AT[0] + 1 + HORIZONS[-1])[0], val)[0]))
    assert float(real_nH[2, 1]) == pytest.approx(ends[0] - ends[1], abs=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 7, 4)])
def test_each_frozen_form_of_muon_gives_back_its_step(shape):
  """Held fixed, an operator applied to what it was made of is the step itself."""
  rng = np.random.default_rng(1)
  with jax.enable_x64(True):
    g, momentum, y = (jnp.asarray(rng.normal(size=shape)) for _ in range(3))

    def response(form):
      rule = _muon_forms.FrozenMuon(form=form)
      return _muon_forms.FrozenResponse(rule, Matrix(1, 1), 0, g, momentum, jnp.int32(4), jnp.ones(()), form)

    moved = response("left")._moved(momentum, g)
    n, share = response("left")._momentum()
    for form in _muon_forms.FORMS:
      found = response(form)
      assert oracles.relative_error(found.apply(n) / share, moved) < 1e-10
      assert float(jnp.vdot(y, found.apply(g))) == pytest.approx(float(jnp.vdot(found.transpose(y), g)), rel=1e-10)
