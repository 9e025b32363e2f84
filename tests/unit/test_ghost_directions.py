"""Directions: the validation gradient, Adam's with its state held fixed, second order. Against explicit formulas.

n examples, T positions, K validation sets.
"""

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import ghost

N, N_VAL, T, TOKENS = 6, 4, 7, 23
COUNT, KAPPA = 4, 0.7


class Tagger(nnx.Module):
  """Token ids [n, T] to logits [n, T, 23], with a tied table and a layer of every kind of parameter."""

  def __init__(self, rngs, dtype=jnp.float32):
    kwargs = {"param_dtype": dtype, "rngs": rngs}
    self.table = nnx.Embed(TOKENS, 10, **kwargs)
    self.dense = nnx.Linear(10, 12, **kwargs)
    self.heads = nnx.LinearGeneral(12, (2, 5), **kwargs)
    self.norm = nnx.LayerNorm(10, epsilon=1e-2, **kwargs)

  def __call__(self, ids):
    x = self.table(ids)
    x = x + self.heads(jnp.tanh(self.dense(jnp.cumsum(x, 1)))).reshape(x.shape)
    return self.table.attend(self.norm(x))


def tagging_loss(model, batch):
  """(losses [n, T], weights [n, T])."""
  return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][..., None], -1)[..., 0], batch["w"]


def tagging_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  weights = (rng.random((num, T)) + 0.2) * (rng.random((num, T)) < 0.7)
  return {
    "x": rng.integers(0, TOKENS, (num, T)), "y": rng.integers(0, TOKENS, (num, T)), "w": weights.astype(np.float32),
  }  # fmt: skip


TRAIN, VALS = tagging_batch(N, 1), [tagging_batch(N_VAL, 2), tagging_batch(3, 3)]


@pytest.fixture(scope="module")
def model():
  return foreign.randomized(Tagger)


@pytest.fixture(scope="module")
def oracle(model):
  return foreign.Oracle(model, tagging_loss, TRAIN, *VALS)


def test_adam_against_its_formula(model, oracle):
  """v holds this step's gradient, scaled by the clipping factor that goes into it."""
  moments = foreign.moments_like(oracle)
  adam = ghost.AdamState({k: jnp.asarray(v) for k, v in moments.items()}, COUNT, KAPPA)
  result = foreign.score(ghost.GhostEngine(direction="adam"), model, TRAIN, VALS, loss_fn=tagging_loss, state=adam)
  for k in range(len(VALS)):
    u = oracle.adam(moments, count=COUNT, kappa=KAPPA, index=k)
    lagged = {label: g * 0 + oracle.G[k][label] / np.sqrt(moments[label]) for label, g in oracle.g.items()}
    expected = oracle.dots(u)
    foreign.assert_scores({label: v[k] for label, v in result.per_param.items()}, expected, 1e-5)
    shares = [foreign.total(oracle.dots(direction)) for direction in (oracle.G[k], lagged)]
    for other in shares:  # a wrong direction is far away
      assert abs(np.corrcoef(other, foreign.total(expected))[0, 1]) < 0.999


def test_a_step_far_along_and_no_clipping_are_the_defaults(model, oracle):
  """count large: the bias corrections vanish; kappa 1."""
  moments = foreign.moments_like(oracle, seed=6)
  adam = ghost.AdamState({k: jnp.asarray(v) for k, v in moments.items()}, 10_000)
  result = foreign.score(ghost.GhostEngine(direction="adam"), model, TRAIN, VALS[0], loss_fn=tagging_loss, state=adam)
  u = {
    label: 0.1 / (np.sqrt(0.95 * moments[label] + 0.05 * oracle.g[label] ** 2) + 1e-8) * G
    for label, G in oracle.G[0].items()
  }
  foreign.assert_scores(result.per_param, oracle.dots(u), 1e-5)


def test_auto_follows_the_optimizer(model, oracle):
  adamw, sgd = (tiny.make_config(opt_type=name) for name in ("adamw", "sgd"))
  assert ghost.GhostEngine(adamw, direction="auto").spec.rule.direction == "adam"
  assert ghost.GhostEngine(sgd, direction="auto").spec.rule.direction == "sgd"
  changed = ghost.GhostEngine(tiny.make_config(adam_b1=0.8, adam_b2=0.9, adam_eps=1e-3), direction="adam").spec.rule
  assert (changed.b1, changed.b2, changed.eps) == (0.8, 0.9, 1e-3)


def test_a_configuration_names_the_direction():
  def made(**keys):
    return ghost.GhostEngine(tiny.make_config(**keys))

  assert made().spec.rule.direction == "sgd"  # auto would need the optimizer's state
  assert made(ghost_direction="adam").spec.rule.direction == "adam"
  assert made(ghost_curvature="hessian").spec.early and made(ghost_direction="second_order").spec.early
  assert not ghost.GhostEngine(tiny.make_config(ghost_curvature="hessian"), direction="sgd").spec.early
  with pytest.raises(ValueError, match=r"^ghost_curvature=secant compares steps.*'second_order'"):
    made(ghost_curvature="secant")


@pytest.mark.parametrize("direction", ["sgd", "second_order"])
def test_scores_are_slopes_along_the_direction(direction):
  """Central differences of every example's loss along u, in float64: no derivative of ours is involved but u."""
  with jax.enable_x64(True):
    model = foreign.randomized(lambda rngs: Tagger(rngs, jnp.float64))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    delta = jax.tree.map(lambda x: jnp.sin(3 * x), params) if direction == "second_order" else None
    wide = [{**b, "w": b["w"].astype(np.float64)} for b in (TRAIN, VALS[0])]
    engine = ghost.GhostEngine(direction=direction)
    result = foreign.score(engine, model, *wide, loss_fn=tagging_loss, delta=delta)

    @jax.jit
    def slopes(params):
      def val_loss(params):
        losses, weights = tagging_loss(nnx.merge(graphdef, params, rest), wide[1])
        return (losses * weights).sum() / weights.sum()

      def along(params, u, step):
        return jax.tree.map(lambda p, v: p + step * v, params, u)

      gradient = jax.grad(val_loss)
      u = gradient(params)
      if delta is not None:
        ahead, behind = (gradient(along(params, delta, step)) for step in (1e-4, -1e-4))
        u = jax.tree.map(lambda g, a, b: g + 0.5 * (a - b) / 2e-4, u, ahead, behind)

      def example_losses(step):
        losses, weights = tagging_loss(nnx.merge(graphdef, along(params, u, step), rest), wide[0])
        return (losses * weights).sum(1) / weights.sum(1)

      return (example_losses(1e-5) - example_losses(-1e-5)) / 2e-5

    expected = np.asarray(slopes(params))
  assert oracles.relative_error(result.dot, expected) < 1e-6


class Small(nnx.Module):
  """34 parameters: small enough for the whole Hessian."""

  def __init__(self, rngs):
    self.first, self.second = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
    self.scale = nnx.RMSNorm(4, epsilon=0.1, rngs=rngs)

  def __call__(self, x):
    return self.second(self.scale(jnp.tanh(self.first(x))))


def squared_loss(model, batch):
  """(losses [n], weights [n])."""
  return jnp.square(model(batch["x"]) - batch["y"]).sum(-1), batch["w"]


def regression_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  x, y = (rng.normal(size=(num, width)).astype(np.float32) for width in (3, 2))
  return {"x": x, "y": y, "w": (rng.random(num) + 0.2).astype(np.float32)}


class Quadratic:
  """`Small`, its explicit Hessian of the validation loss in float64, and a step delta."""

  def __init__(self):
    self.model = foreign.randomized(Small)
    self.train, self.val = regression_batch(N, 4), regression_batch(N_VAL, 5)
    self.graphdef, params, self.rest = nnx.split(self.model, nnx.Param, ...)
    self.delta = jax.tree.map(lambda x: 0.3 * jnp.cos(5 * x), params)
    self.oracle = foreign.Oracle(self.model, squared_loss, self.train, self.val)
    with jax.enable_x64(True), tiny.cheap_compilation():
      wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
      flat, unravel = jax.flatten_util.ravel_pytree(wide)
      val = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), self.val)

      def loss(flat):
        losses, weights = squared_loss(nnx.merge(self.graphdef, unravel(flat), self.rest), val)
        return (losses * weights).sum() / weights.sum()

      hessian = np.asarray(jax.jit(jax.hessian(loss))(flat))
      step, _ = jax.flatten_util.ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), self.delta))
      self.curvature = tiny.by_label(unravel(jnp.asarray(hessian @ np.asarray(step))))
    assert np.abs(hessian - hessian.T).max() < 1e-10

  def score(self, delta):
    engine = ghost.GhostEngine(direction="second_order")
    return foreign.score(engine, self.model, self.train, self.val, loss_fn=squared_loss, delta=delta)

  def expected(self, share: float) -> dict:
    return self.oracle.dots({k: G + share * self.curvature[k] for k, G in self.oracle.G[0].items()})


@pytest.fixture(scope="module")
def quadratic():
  return Quadratic()


def test_second_order_against_the_explicit_hessian(quadratic):
  result = quadratic.score(quadratic.delta)
  foreign.assert_scores(result.per_param, quadratic.expected(0.5), 1e-5)
  for share in (0.0, 1.0):  # the half matters here
    assert oracles.relative_error(result.dot, foreign.total(quadratic.expected(share))) > 0.05


def test_second_order_is_linear_in_the_step(quadratic):
  dots = [
    quadratic.score(jax.tree.map(lambda x, scale=scale: scale * x, quadratic.delta)).dot for scale in (0.0, 1.0, -3.0)
  ]
  assert oracles.relative_error(dots[0], foreign.total(quadratic.expected(0.0))) < 1e-5
  assert oracles.relative_error(dots[2] - dots[0], -3 * (dots[1] - dots[0])) < 1e-5


@pytest.mark.parametrize(
  ("settings", "extra", "message"),
  [
    ({"direction": "adm"}, {}, "direction=adm.*sgd, adam, path, marginal, second_order.*did you mean 'adam'"),
    ({"direction": "second-order"}, {}, "did you mean 'second_order'"),
    ({"rank": -2}, {}, "^rank=-2.*0 .exact.*positive"),
    ({"direction": "adam"}, {}, "needs state=.*AdamState"),
    ({}, {"state": ghost.AdamState({}, 0)}, "direction 'sgd' reads no state"),
    ({"direction": "second_order"}, {}, "needs delta=State"),
    ({}, {"delta": nnx.State({})}, "direction 'second_order' needs delta"),
  ],
)
def test_missing_superfluous_and_unknown_are_refused(model, settings, extra, message):
  with pytest.raises(ValueError, match=message):
    ghost.GhostEngine(**settings).score(model, TRAIN, VALS[0], loss_fn=tagging_loss, **extra)


@pytest.mark.parametrize("count", [0, N_VAL])
def test_validation_without_rows_or_without_weight_is_refused(model, count):
  nothing = {name: v[:count] * (name != "w") for name, v in VALS[0].items()}
  with pytest.raises(ValueError, match="val_batch is empty" if count == 0 else "validation"):
    ghost.GhostEngine().score(model, TRAIN, nothing, loss_fn=tagging_loss)


class CalledTwice(nnx.Module):
  def __init__(self, rngs):
    self.inner, self.out = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)

  def __call__(self, x):
    return self.out(self.inner(jnp.tanh(self.inner(x))))


def test_a_layer_called_twice_is_refused_where_the_whole_gradient_is_needed():
  model, train, val = foreign.randomized(CalledTwice), regression_batch(N, 4), regression_batch(N_VAL, 5)
  adam = ghost.AdamState({}, 0)
  with pytest.raises(ValueError, match=r"inner \(2 calls\).*[^_]direction=sgd with\s+two_pass.*[^_]exclude"):
    ghost.GhostEngine(direction="adam").score(model, train, val, loss_fn=squared_loss, state=adam)
