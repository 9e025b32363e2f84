"""Direction marginal: an example's credit is the derivative of the step D(g) at the whole batch gradient.

Against JAX's derivative of optax's AdamW and of Muon's step written out, and against one gradient a document.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import test_muon as muon
import test_path_credit as path
from test_path_credit import COLUMNS, KAPPA, RATE, RULE, WIDE, gradients, second_step  # noqa: F401  a fixture
from train_steps import Run

from maxghost import config, optimizers
from maxghost.config import plugins
from maxghost.optimizers import Parameter

P = Parameter("w")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("steps", [0, 3])
def test_adamw_is_the_derivative_of_optaxs_step(dtype, tolerance, steps):
  """Entries of many sizes."""
  with jax.enable_x64(dtype == "float64"):
    made = path.History(dtype, steps)
    rule, state = RULE.marginal(), (made.arrays, RULE.scalars(made.count, KAPPA))
    response = rule.response(P, made.g, *state)

    def moved(g):
      """D by its definition, over the learning rate."""
      m, v = (made.arrays[name] for name in ("first_moment", "second_moment"))
      t = steps + 1
      root = jnp.sqrt((RULE.b2 * v + (1 - RULE.b2) * g**2) / (1 - RULE.b2**t))
      return (RULE.b1 * m + (1 - RULE.b1) * g) / (1 - RULE.b1**t) / (root + RULE.eps)

    step, pull = jax.vjp(moved, KAPPA * made.g)
    (expected,) = pull(made.G)
    optax_step = -RATE * (step + RULE.weight_decay * made.params["w"])
    assert oracles.relative_error(optax_step, made.step) < tolerance  # the definition is optax's
    # A difference of two large terms: relative to these.
    scale = np.abs(response.size * made.G) + np.abs(expected)
    assert float((np.abs(response.transpose(made.G) - expected) / scale).max()) < tolerance
    if steps:
      assert oracles.relative_error(made.response.transpose(made.G), expected) > 0.01  # path is another one


def test_entries_without_a_gradient_or_a_history_have_finite_credit():
  """The last one's square is 0 in float32."""
  zero = jnp.zeros(4)
  state = {"first_moment": jnp.array([0, 0.5, 0, 1e-20]), "second_moment": zero.at[1].set(0.2)}
  response = RULE.marginal().response(P, jnp.array([0.0, 0.0, 2.0, 1e-20]), state, RULE.scalars(4, 1.0))
  held = RULE.response(P, zero, state, RULE.scalars(4, 1.0)).factor
  still = np.array([0, 1, 3])  # no gradient moves the second moment
  np.testing.assert_allclose(response.factor[still], held[still], rtol=1e-6)
  assert np.isfinite(response.factor).all() and 0 <= response.factor[2] < held[2] * 1e-4  # a sign step: nearly flat


@pytest.mark.parametrize("label", ["decoder/layers/self_attention/query/kernel", "decoder/layers/MoeBlock_0/wi_0"])
@pytest.mark.parametrize("steps", [0, 3], ids=["from rest", "with momentum"])
def test_muon_is_the_derivative_of_its_step_with_and_without_momentum(label, steps):
  matrix = muon.SHAPES[label][1]
  parameter = Parameter(label, matrix.rows, int("Moe" in label), matrix)
  rule = optimizers.Muon(muon.BETA, 0.2, 0.0, optimizers.AdamW(0.7, 0.9, muon.EPS, 0.1, "float64")).marginal()
  constants = {"count": steps, "beta": muon.BETA, "eps": muon.EPS, "rms": 0.0}

  def account(g, G, m):
    scalars = rule.scalars(steps, KAPPA)
    response = rule.response(parameter, g, {"first_moment": m}, scalars)
    _, pull = jax.vjp(lambda g: muon.step_of(label, g, m, **constants), KAPPA * g)
    still = rule.response(parameter, 0 * g, {"first_moment": 0 * m}, scalars)
    pushed = jnp.vdot(response.whole(g), G)
    return pull(G)[0], response.transpose(G), pushed - jnp.vdot(response.transpose(G), g), still.transpose(G)

  for dtype, tolerance in (("float64", 1e-12), ("float32", 2e-5)):
    with jax.enable_x64(dtype == "float64"):
      made = muon.Credit(label, dtype, steps)
      expected, found, adjoint, still = jax.jit(account)(made.g, made.G, made.m)
    if dtype == "float64":
      exact = np.asarray(expected)
      assert abs(float(adjoint)) < 1e-12 * np.abs(exact * np.asarray(made.g)).sum()
      assert (np.asarray(still) == 0).all()
    assert oracles.relative_error(np.asarray(found), exact) < tolerance


@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan"])
def test_the_train_step_scores_documents_alone_and_its_account_closes(schedule, gradients):  # noqa: F811
  """float64, AdamW with clipping; what credits leave of the step along the path is the direction residual."""
  clipping = {} if schedule == "two_pass" else {"gradient_clipping_threshold": 0.0}
  run = Run(ghost_direction="marginal", remat_policy="full", ghost_schedule=schedule, **WIDE, **clipping)
  before, out, after, documents, rows, (g_N, g), (_, G) = second_step(run, gradients)
  cfg, lr = run.cfg.optimizer, float(out["learning_rate"])
  b1, b2, t = cfg.adam_b1, cfg.adam_b2, 2
  u = {}
  for k in g:
    assumed, m, v = before.clip_factor * g[k], before.first[k], before.second[k]
    root = np.sqrt((b2 * v + (1 - b2) * assumed**2) / (1 - b2**t))
    moved = (b1 * m + (1 - b1) * assumed) / (1 - b1**t) / (root + cfg.adam_eps)
    slope = (1 - b2) * assumed / (1 - b2**t) / np.where(root == 0, 1, root)
    u[k] = ((1 - b1) / (1 - b1**t) - moved * slope) / (root + cfg.adam_eps) * G[k]
  dots_N = sum(oracles.dots(g_N, u).values())
  # The products alone; contributions count the clipping too (`test_marginal_clipping`).
  products = out["score_dot_BSK"] * out["share_BS"][..., None] * out["clip_factor"] * out["learning_rate"]
  path.assert_contributions(out | {"contribution_BSK": products}, documents, rows, dots_N, 1e-7)  # m is in float32
  drop = -sum(float((G[k] * (after.params[k] - v)).sum()) for k, v in before.params.items())
  columns = [float(out[name][0]) for name in COLUMNS]
  assert sum(columns) == pytest.approx(drop, abs=1e-7 * sum(map(abs, columns)))
  resting = {k: b1 * before.first[k] / (1 - b1**t) for k in G}
  resting = {k: m / (np.sqrt(b2 * before.second[k] / (1 - b2**t)) + cfg.adam_eps) for k, m in resting.items()}
  without = lr * sum(float((G[k] * x).sum()) for k, x in resting.items())
  assert columns[1] == pytest.approx(without, abs=1e-7 * sum(map(abs, columns)))  # as along the path
  assert abs(columns[-1]) > 0.01 * abs(columns[0])  # marginal credits do not add up to the step
  assert out["check_rel_err"][0] < 1e-10


def test_who_offers_it():
  cfg = config.load(None, "opt_type=sgd", "ghost_direction=marginal")
  assert optimizers.direction_rule(cfg.optimizer, "marginal") == optimizers.Sgd()
  of_muon = optimizers.direction_rule(config.load(None, "opt_type=muon").optimizer, "marginal")
  assert (of_muon.name, of_muon.direction) == ("muon", "marginal") and of_muon.others.direction == "marginal"
  assert [rule.offers for rule in (RULE, optimizers.Sgd(), of_muon)] == 3 * [plugins.OF_STEP]
  assert plugins.direction_problem("marginal", "adamw") == ""


def test_an_optimizer_without_it_is_refused(monkeypatch):
  without = dataclasses.replace(plugins.OPTIMIZERS["adamw"], offers=("path",))
  monkeypatch.setitem(plugins.OPTIMIZERS, "adamw", without)
  with pytest.raises(
    config.ConfigError, match=r"ghost_direction=marginal .* opt_type=adamw does not offer; .*sgd or muon"
  ):
    config.load(None, "ghost_direction=marginal")
  assert config.load(None, "ghost_direction=path").direction_name == "path"
