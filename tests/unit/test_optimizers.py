"""Schedules against their formulas and MaxText's own values, AdamW against numpy, clipping."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxghost import ghost, optimizers
from maxghost.config import ConfigError, plugins
from maxghost.config.schema import OptimizerConfig

PEAK, FINAL = 0.02, 0.005


def rates(steps, **changes) -> list[float]:
  cfg = OptimizerConfig(learning_rate=PEAK, learning_rate_final_fraction=FINAL / PEAK, **changes)
  schedule = optimizers.learning_rate_schedule(cfg, steps)
  return [float(schedule(jnp.asarray(step))) for step in range(steps)]


def cosine(share):
  return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * share)) / 2


def linear(share):
  return PEAK + (FINAL - PEAK) * share


@pytest.mark.parametrize(
  ("kind", "after_warmup"),
  [
    ("cosine", [cosine(i / 15) for i in range(16)]),
    ("wsd", [PEAK] * 11 + [linear(i / 4) for i in range(5)]),
    ("constant", [PEAK] * 16),
  ],
)
def test_schedules_follow_their_formulas_from_exactly_zero_to_the_last_step(kind, after_warmup):
  actual = rates(20, lr_schedule_type=kind, warmup_steps_fraction=0.2, wsd_decay_steps_fraction=0.25)
  np.testing.assert_allclose(actual, [PEAK * i / 4 for i in range(4)] + after_warmup, rtol=1e-6)
  assert actual[0] == 0
  assert actual[4] == pytest.approx(PEAK, rel=1e-7)
  assert actual[-1] == pytest.approx(PEAK if kind == "constant" else FINAL, rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(kind):
  actual = rates(7, lr_schedule_type=kind, warmup_steps_fraction=0.0, wsd_decay_steps_fraction=0.3)
  assert actual[0] == pytest.approx(PEAK, rel=1e-7)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2])
def test_tiny_runs_have_finite_positive_rates(kind, steps):
  for rate in rates(steps, lr_schedule_type=kind, warmup_steps_fraction=0.1):
    assert FINAL * 0.999 <= rate <= PEAK * 1.001


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (10, 0.9)])
def test_cosine_ends_at_the_final_rate_even_if_one_step_is_left(steps, warmup):
  assert rates(steps, lr_schedule_type="cosine", warmup_steps_fraction=warmup)[-1] == pytest.approx(FINAL, rel=1e-6)


@pytest.mark.parametrize(("share", "last"), [(0.0, PEAK), (0.1, FINAL), (0.29, linear(1)), (1.0, FINAL)])
def test_wsd_ends_at_the_final_rate_if_any_step_decays(share, last):
  """Of ten steps: none, the last one, the last two, and all."""
  actual = rates(10, lr_schedule_type="wsd", warmup_steps_fraction=0.0, wsd_decay_steps_fraction=share)
  assert actual[-1] == pytest.approx(last, rel=1e-6)
  assert actual[0] == pytest.approx(PEAK, rel=1e-6)


def test_cosine_has_the_rates_that_a_maxtext_run_printed():
  """Three steps of maxtext 0.2.4: learning_rate=.05 learning_rate_final_fraction=.5 warmup_steps_fraction=0 steps=3."""
  cfg = OptimizerConfig(learning_rate=0.05, learning_rate_final_fraction=0.5, warmup_steps_fraction=0.0)
  schedule = optimizers.learning_rate_schedule(cfg, 3)
  printed = [0.05000000074505806, 0.03749999776482582, 0.02500000037252903]
  np.testing.assert_allclose([schedule(jnp.asarray(i)) for i in range(3)], printed, rtol=1e-6)


ADAM = OptimizerConfig(
  learning_rate=0.1, lr_schedule_type="cosine", warmup_steps_fraction=0.5, adam_b1=0.8, adam_b2=0.9, adam_eps=1e-3,
  adam_weight_decay=0.3,
)  # fmt: skip


def updates(cfg, params, gradients, steps):
  tx = optimizers.make_optimizer(cfg, steps)
  state, out = tx.init(params), []
  for g in gradients:
    update, state = tx.update(g, state, params)
    params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, update)
    out.append(params)
  return out, state


def test_adamw_follows_its_formula():
  rng = np.random.default_rng(0)
  params = {name: rng.normal(size=shape) for name, shape in (("kernel", (3, 2)), ("scale", (5,)))}
  gradients = [{name: rng.normal(size=v.shape) for name, v in params.items()} for _ in range(4)]
  with jax.enable_x64(True):
    actual, _ = updates(ADAM, jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, gradients), 4)
  for name, theta in params.items():
    m = v = 0.0
    for t in range(1, 5):
      g = gradients[t - 1][name]
      m = 0.8 * m + 0.2 * g
      v = 0.9 * v + 0.1 * g**2
      rate = [0.0, 0.05, 0.1, 0.01][t - 1]
      step = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.3 * theta
      theta = theta - rate * step
      # The first moment is kept in float32, also for float64 weights: 6e-8 of an update.
      np.testing.assert_allclose(actual[t - 1][name], theta, rtol=1e-6, err_msg=f"{name} after step {t}")
    np.testing.assert_array_equal(actual[0][name], params[name])  # step 0 of the warm-up changes nothing


def test_moments_of_bfloat16_weights():
  params = {"kernel": jnp.ones((3, 2), jnp.bfloat16)}
  _, state = updates(ADAM, params, [{"kernel": jnp.full((3, 2), 0.5, jnp.bfloat16)}], 4)
  assert state[0].mu["kernel"].dtype == jnp.float32


def test_sgd_follows_the_schedule_and_nothing_else():
  cfg = dataclasses.replace(ADAM, opt_type="sgd", lr_schedule_type="constant", warmup_steps_fraction=0.0)
  params, gradient = {"w": jnp.asarray([1.0, 2.0])}, {"w": jnp.asarray([0.5, -1.0])}
  (after,), state = updates(cfg, params, [gradient], 4)
  np.testing.assert_allclose(after["w"], [0.95, 2.1], rtol=1e-6)
  assert not any(leaf.shape == (2,) for leaf in jax.tree.leaves(state))


def test_the_optimizer_of_the_scores_is_the_optimizer_of_the_step():
  rule = optimizers.create(ADAM)
  assert rule == optimizers.AdamW(0.8, 0.9, 1e-3, 0.3) == optimizers.direction_rule(ADAM, "auto")
  sgd = dataclasses.replace(ADAM, opt_type="sgd")
  assert optimizers.create(sgd) == optimizers.Sgd() == optimizers.direction_rule(sgd, "auto")


@pytest.mark.parametrize(
  ("threshold", "factor"), [(0.0, 1.0), (6.5, 0.5), (13.0, 1.0), (20.0, 1.0), (1.3, 0.1)], ids=lambda v: str(v)
)
def test_clipping_by_the_global_norm(threshold, factor):
  gradients = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([[4.0], [12.0]])}
  norm, actual, clipped = optimizers.clip(gradients, threshold)
  assert float(norm) == pytest.approx(13)
  assert float(actual) == pytest.approx(factor)
  for name, g in gradients.items():
    np.testing.assert_allclose(clipped[name], factor * g, rtol=1e-6)


def test_the_global_norm_of_bfloat16_gradients_is_a_float32_sum():
  """Small arrays beside a large one: added one by one in bfloat16, each would be lost."""
  gradients = {f"b{i}": jnp.full(7, 0.296875, jnp.bfloat16) for i in range(60)}
  gradients["a"] = jnp.full((64, 64), 0.25, jnp.bfloat16)
  expected = np.sqrt(60 * 7 * 0.296875**2 + 64 * 64 * 0.25**2)
  norm, factor, clipped = optimizers.clip(gradients, 1.0)
  assert float(norm) == pytest.approx(expected, rel=1e-6)
  assert float(factor) == pytest.approx(1 / expected, rel=1e-6)
  assert clipped["a"].dtype == jnp.bfloat16


def test_a_zero_gradient_is_not_divided_by():
  _, factor, clipped = optimizers.clip({"a": jnp.zeros(3)}, 1.0)
  assert float(factor) == 1
  assert (clipped["a"] == 0).all()


PARAMETERS = {
  "kernel": optimizers.Parameter("kernel", 1, 0, optimizers.Matrix(1, 1)),
  "bias": optimizers.Parameter("bias"),
}


def check(rule, marginal=False):
  params = nnx.state(nnx.Linear(3, 5, rngs=nnx.Rngs(0), kernel_metadata={"matrix": (1, 1)}), nnx.Param)
  optimizers.check_account(rule, rule.path() if marginal else rule, params, PARAMETERS, marginal)


@pytest.mark.parametrize("rule", [optimizers.AdamW(0.7, 0.8), optimizers.Muon(0.7)])
def test_built_in_rules_pass_the_check_of_an_own_one(rule):
  """Also that of their `marginal`, in whose place `path` is refused. Muon finds its matrices by the paths of arrays."""
  check(rule, marginal=True)
  wrong = type("Wrong", (type(rule),), {"name": "wrong", "marginal": type(rule).path})(0.7)
  with pytest.raises(ConfigError, match="opt_type=wrong: the response of marginal is not the derivative of the step"):
    check(wrong, marginal=True)


class Twice(optimizers.Sgd):
  """The parent's step, twice."""

  name = "twice"
  direction = "twiced"
  elementwise = True

  def transformation(self, learning_rate):
    return optax.chain(optax.scale(2.0), super().transformation(learning_rate))

  def response(self, parameter, gradient, arrays, scalars):
    return optimizers.Elementwise(jnp.full_like(gradient, 2.0))


class Reversed(Twice):
  """Also along the last axis in reverse."""

  identity = False

  def transformation(self, learning_rate):
    turn = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g[..., ::-1], grads))
    return optax.chain(turn, super().transformation(learning_rate))

  def response(self, parameter, gradient, arrays, scalars):
    return Turned()


class Turned(optimizers.Response):
  def apply(self, x):
    return 2 * x[..., ::-1]


def test_what_a_rule_inherits_must_be_true_of_it(monkeypatch):
  """A class that extends a built-in rule would train or score as its parent does, without a word."""
  optimizers.register(Twice)
  try:
    with pytest.raises(ConfigError, match="opt_type=twice: from_config gives a Sgd, not a Twice"):
      optimizers.create(OptimizerConfig(opt_type="twice"))
  finally:
    del plugins.OPTIMIZERS["twice"]
  with pytest.raises(ConfigError, match=r"identity=True, but Elementwise.apply is not; set identity = False"):
    check(Twice())
  with pytest.raises(ConfigError, match=r"elementwise=True, but Turned.apply is not; set elementwise = False"):
    check(Reversed())
  monkeypatch.setattr(Twice, "identity", False)
  monkeypatch.setattr(Reversed, "elementwise", False)
  check(Twice())
  check(Reversed())


def test_state_is_found_and_measured():
  """Shapes, dtypes and bytes are those of the optax state; a state of another optimizer is refused."""
  kernel = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)
  kept = optimizers.AdamW(mu_dtype="float32").state_shapes(kernel).values()
  assert sum(x.size * x.dtype.itemsize for x in kept) == 15 * (4 + 2)
  assert optimizers.Sgd().state_shapes(kernel) == {}
  params = {"a": {"b": jnp.ones((2, 3))}}
  state = optax.adamw(1e-3).init(params)
  adam = ghost.AdamState.from_optax(state, clip_factor=0.5)
  assert list(adam.second_moments) == ["a/b"] and int(adam.count) == 0 and adam.clip_factor == 0.5
  with pytest.raises(ValueError, match=r"no .mu., which opt_type=adamw keeps"):
    ghost.AdamState.from_optax(optax.sgd(1e-3).init(params))
