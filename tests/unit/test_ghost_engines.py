"""Engines jvp and perexample: the totals of graddotprod, by forward mode and by materialised gradients.

n examples, T positions, K validation sets.
"""

import itertools

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import ghost, objectives

N, N_VAL, T, TOKENS = 6, 4, 7, 23
FLOAT64 = {"dtype": "float64", "weight_dtype": "float64", "remat_policy": "none"}


class Gate(nnx.Module):
  """A layer that has no rule."""

  def __init__(self, width):
    self.strength = nnx.Param(jnp.zeros(width))

  def __call__(self, x):
    strength = jnp.expand_dims(self.strength[...], range(x.ndim - 1))
    return x * jax.nn.sigmoid(strength * x)


class Tagger(nnx.Module):
  """Token ids [n, T] to logits [n, T, 23]; positions mix."""

  def __init__(self, rngs):
    self.table, self.dense = nnx.Embed(TOKENS, 10, rngs=rngs), nnx.Linear(10, 12, rngs=rngs)
    self.gate, self.out = Gate(12), nnx.Linear(12, TOKENS, rngs=rngs)

  def __call__(self, ids):
    return self.out(self.gate(jnp.cumsum(jnp.tanh(self.dense(self.table(ids))), 1)))


def loss_fn(model, batch):
  """(losses [n, T], weights [n, T])."""
  return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][..., None], -1)[..., 0], batch["w"]


def make_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  x, y = rng.integers(0, TOKENS, (2, num, T))
  weights = ((rng.random((num, T)) + 0.2) * (rng.random((num, T)) < 0.7)).astype(np.float32)
  weights[2] = 0
  return {"x": x, "y": y, "w": weights}


TRAIN_ROWS, VALS = make_batch(N, 1), [make_batch(N_VAL, 2), make_batch(3, 3)]


class Case:
  def __init__(self):
    self.model = foreign.randomized(Tagger)
    self.oracle = foreign.Oracle(self.model, loss_fn, TRAIN_ROWS, *VALS)
    self.moments = foreign.moments_like(self.oracle)
    self.delta = jax.tree.map(lambda x: 0.2 * jnp.cos(7 * x), nnx.state(self.model, nnx.Param))

  def score(self, engine, direction="sgd", **settings):
    adam = ghost.AdamState({k: jnp.asarray(v) for k, v in self.moments.items()}, 4, 0.7)
    extra = {"adam": {"state": adam}, "second_order": {"delta": self.delta}}.get(direction, {})
    engine = ghost.GhostEngine(engine=engine, direction=direction, **settings)
    return foreign.score(engine, self.model, TRAIN_ROWS, VALS, loss_fn=loss_fn, **extra)

  def expected(self, direction, k) -> dict:
    if direction == "adam":
      return self.oracle.dots(self.oracle.adam(self.moments, count=4, kappa=0.7, index=k))
    return self.oracle.dots(self.oracle.G[k])


@pytest.fixture(scope="module")
def case():
  return Case()


def test_graddotprod_needs_a_rule_where_the_others_need_none(case):
  with pytest.raises(ValueError, match=r"gate/strength \(Gate\).*engine='jvp'"):
    case.score("graddotprod")


@pytest.mark.parametrize("direction", ["sgd", "adam"])
@pytest.mark.parametrize("engine", ["jvp", "perexample"])
def test_totals(case, engine, direction):
  result = case.score(engine, direction)
  share = case.oracle.weights / case.oracle.weights.sum()
  for k in range(2):
    expected = foreign.total(case.expected(direction, k))
    assert oracles.relative_error(result.dot[k], expected) < 1e-5
    assert oracles.relative_error(result.additive[k], expected * share) < 1e-5
    assert result.dot[k, 2] == 0  # no weight
  for label, g in tiny.by_label(result.grads).items():
    assert oracles.relative_error(g, case.oracle.g[label]) < 1e-5, label
  if engine == "jvp":
    assert result.per_param == {}
    return
  for k in range(2):
    foreign.assert_scores({label: v[k] for label, v in result.per_param.items()}, case.expected(direction, k), 1e-5)


def test_second_order_is_the_same_by_both(case):
  """And far from first order; test_ghost_directions has the formula."""
  by_jvp, by_example = (case.score(engine, "second_order") for engine in ("jvp", "perexample"))
  assert oracles.relative_error(by_jvp.dot, by_example.dot) < 1e-5
  assert oracles.relative_error(by_jvp.dot[0], foreign.total(case.expected("sgd", 0))) > 0.02


def test_forward_mode_scores_the_loss_of_each_token(case):
  """<grad of the token's own loss, u>: not what flows through the token's position, which graddotprod reports."""
  result = case.score("jvp", per_position=True)
  graphdef, params, rest = nnx.split(case.model, nnx.Param, ...)

  def losses(params):
    return loss_fn(nnx.merge(graphdef, params, rest), TRAIN_ROWS)[0]

  with tiny.cheap_compilation():
    jacobian = tiny.by_label(jax.jit(jax.jacrev(losses))(params))
  products = {label: (v * case.oracle.G[0][label]).reshape(N, T, -1).sum(-1) for label, v in jacobian.items()}
  weights = TRAIN_ROWS["w"].astype(np.float64)
  assert oracles.relative_error(result.per_position[0], sum(products.values()) * weights / weights.sum()) < 1e-5
  assert oracles.relative_error(result.per_position.sum(-1), result.additive) < 1e-6


@pytest.mark.parametrize("engine", ["jvp", "perexample"])
def test_excluded_parameters_are_left_out(case, engine):
  result = case.score(engine, exclude=("gate/*", "*/bias"))
  kept = {label: v for label, v in case.expected("sgd", 1).items() if "gate" not in label and "bias" not in label}
  assert oracles.relative_error(result.dot[1], foreign.total(kept)) < 1e-5
  if engine == "perexample":
    assert result.per_param.keys() == kept.keys()
  with pytest.raises(ValueError, match=r"^exclude pattern 'gates/\*' matches no parameter .*; paths: .*gate/strength"):
    case.score(engine, exclude=("gates/*",))


class Shared(nnx.Module):
  """One Param under two names."""

  def __init__(self, rngs):
    self.first, self.second = nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)
    self.second.kernel = self.first.kernel

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def test_a_param_under_two_names_is_refused_by_the_rules_and_scored_by_forward_mode():
  model = foreign.randomized(Shared)
  rng = np.random.default_rng(0)
  train, val = ({"x": rng.normal(size=(n, 5)).astype(np.float32), "w": np.ones(n, np.float32)} for n in (N, N_VAL))

  def squares(model, batch):
    return jnp.square(model(batch["x"])).sum(-1), batch["w"]

  with pytest.raises(ValueError, match=r"second/kernel is also first/kernel|first/kernel is also second/kernel"):
    ghost.GhostEngine().score(model, train, val, loss_fn=squares)
  result = foreign.score(ghost.GhostEngine(engine="jvp"), model, train, val, loss_fn=squares)
  oracle = foreign.Oracle(model, squares, train, val)
  assert oracles.relative_error(result.dot, foreign.total(oracle.dots(oracle.G[0]))) < 1e-5


def test_the_transformer_by_all_three_engines():
  """Its attention, norms and loss have backward passes written by hand, which forward mode goes around."""
  cfg = tiny.make_config(logits_via_embedding=True, base_num_decoder_layers=2, z_loss_multiplier=0.01, **FLOAT64)
  train, val = tiny.make_batch(tiny.PACKED[:4], seed=1), tiny.make_batch(tiny.VALIDATION, seed=2)
  with jax.enable_x64(True), tiny.cheap_compilation():
    model = tiny.make_model(cfg)
    results = {
      engine: jax.tree.map(np.asarray, ghost.GhostEngine(cfg, engine=engine).score(model, train, val))
      for engine in ("graddotprod", "jvp", "perexample")
    }
  expected = results["graddotprod"]
  for engine in ("jvp", "perexample"):
    assert oracles.relative_error(results[engine].dot, expected.dot) < 1e-11
    assert results[engine].loss == pytest.approx(expected.loss, rel=1e-12)
  for label, value in results["perexample"].per_param.items():
    exact = expected.per_param[label]
    assert oracles.relative_error(value, exact.sum(0) if exact.ndim == 2 else exact) < 1e-11, label


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"engine": "jpv"}, "engine=jpv: use one of graddotprod, jvp, perexample; did you mean 'jvp'"),
    ({"engine": "per_example"}, "did you mean 'perexample'"),
    ({"engine": "graddot"}, "did you mean 'graddotprod'"),
    (
      {"engine": "perexample", "per_position": True},
      "whole examples; use per_position=False, or engine=graddotprod or engine=jvp",
    ),
    ({"engine": "jvp", "schedule": "reverse_scan"}, "schedule=reverse_scan does not go with engine=jvp"),
    ({"direction": 3}, "direction=3: use one of auto, sgd"),
    ({"rank": 2.5}, r"^rank=2\.5: use 0 \(exact\) or a positive whole number"),
    ({"rank": "4"}, "^rank='4': use 0"),
  ],
)
def test_unknown_names_and_combinations(settings, message):
  with pytest.raises(ValueError, match=message):
    ghost.GhostEngine(**settings)


def test_positions_of_a_batch_without_any(case):
  model, rng = foreign.randomized(lambda rngs: nnx.Linear(5, 3, rngs=rngs)), np.random.default_rng(0)
  batch = {"w": np.ones(N, np.float32), "x": rng.normal(size=(N, 5)).astype(np.float32)}
  with pytest.raises(ValueError, match=r"per_position=True needs arrays \[n, T\] in the batch"):
    ghost.GhostEngine(per_position=True).score(
      model, batch, batch, loss_fn=lambda m, b: (jnp.square(m(b["x"])).sum(-1), b["w"])
    )


def squares(model, batch):
  return jnp.square(model(batch["x"])).sum(-1)


@pytest.mark.parametrize("engine", ["graddotprod", "jvp", "perexample"])
@pytest.mark.parametrize("kind", [bool, np.int32, jnp.bfloat16], ids=["flags", "integers", "bfloat16"])
def test_weights_of_any_type_count_as_their_numbers(engine, kind):
  """In bfloat16 301 weights of 1 add up to 300 or 302."""
  model, rng = foreign.randomized(lambda rngs: nnx.Linear(5, 3, rngs=rngs)), np.random.default_rng(0)
  rows = {"x": rng.normal(size=(451, 5)).astype(np.float32), "w": np.arange(451) % 3 != 1}
  val = {"x": rows["x"][:4], "w": np.ones(4, bool)}

  def loss(dtype):
    return lambda model, batch: (jnp.square(model(batch["x"])).sum(-1), batch["w"].astype(dtype))

  found, expected = (
    foreign.score(ghost.GhostEngine(engine=engine), model, rows, val, loss_fn=loss(dtype))
    for dtype in (kind, np.float32)
  )
  assert rows["w"].sum() == 301 and (expected.dot[::3] != 0).all()
  np.testing.assert_array_equal(found.dot, expected.dot)
  np.testing.assert_array_equal(found.additive, expected.additive)
  assert found.loss == expected.loss


def test_engine_perexample_multiplies_gradients_in_bfloat16_in_float32():
  """Gradients of small numbers, which are exact in bfloat16; their products with each other are not."""
  graphdef, params = nnx.split(foreign.randomized(lambda rngs: nnx.Linear(5, 3, use_bias=False, rngs=rngs)))
  model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
  rows = {"x": np.random.default_rng(0).integers(1, 14, (N, 5)).astype(np.float32)}
  result = foreign.score(
    ghost.GhostEngine(engine="perexample"), model, rows, rows, loss_fn=lambda m, b: m(b["x"]).sum(-1)
  )
  np.testing.assert_allclose(
    result.dot, 3 * rows["x"] @ rows["x"].mean(0).astype(jnp.bfloat16).astype(np.float32), rtol=1e-6
  )


def test_positions_of_a_loss_without_any():
  model = foreign.randomized(lambda rngs: nnx.Linear(5, 3, rngs=rngs))
  rows = {"x": np.ones((N, 5), np.float32)}
  with pytest.raises(ValueError, match=r"per_position=True needs losses of each position, but .* shape \(6,\)"):
    ghost.GhostEngine(engine="jvp", per_position=True).score(model, rows, rows, loss_fn=squares)


WEIGHTLESS = [("graddotprod", (5, 4)), ("jvp", (2, 4)), ("perexample", (2, 4)), ("graddotprod", (2, 3, 4))]


@pytest.mark.parametrize(
  ("engine", "shape"),
  WEIGHTLESS
  + [
    pytest.param(engine, shape, marks=pytest.mark.slow)
    for engine, shape in itertools.product(("graddotprod", "jvp", "perexample"), ((5, 4), (2, 4), (2, 3, 4)))
    if (engine, shape) not in WEIGHTLESS
  ],
  ids=str,
)
def test_losses_alone_have_weight_one(engine, shape):
  """Losses [2, T] are not taken apart as losses and weights."""
  model = foreign.randomized(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
  batch = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
  alone, weighted = (
    foreign.score(ghost.GhostEngine(engine=engine), model, batch, batch, loss_fn=loss_fn)
    for loss_fn in (squares, lambda m, b: (squares(m, b), jnp.ones(b["x"].shape[:-1])))
  )
  np.testing.assert_array_equal(alone.dot, weighted.dot)
  assert alone.loss == weighted.loss
  assert alone.dot.shape == shape[:1] and np.abs(alone.dot).min() > 0


@pytest.mark.parametrize("engine", ["graddotprod", "jvp"])
@pytest.mark.parametrize(
  ("result", "shapes"),
  [
    (lambda losses: losses.mean(), r"the shapes \(\) for a batch of 5 rows"),
    (lambda losses: (losses, losses[0]), r"the shapes \(5,\), \(\) for a batch"),
    (lambda losses: (losses, losses, losses), r"the shapes \(5,\), \(5,\), \(5,\) for a batch"),
    (lambda losses: (losses[:2], losses[:2]), r"the shapes \(2,\), \(2,\) for a batch"),
  ],
)
def test_what_else_a_loss_function_returns_is_named(engine, result, shapes):
  model, batch = foreign.randomized(lambda rngs: nnx.Linear(4, 3, rngs=rngs)), {"x": np.ones((5, 4), np.float32)}
  message = shapes + r".*return \(losses, weights\), or losses alone, each of shape \(5,\) or \(5, positions\)"
  with pytest.raises(ValueError, match=message):
    ghost.GhostEngine(engine=engine).score(model, batch, batch, loss_fn=lambda m, b: result(squares(m, b)))


def test_arguments_that_are_missing_or_no_batch_are_named():
  model, batch = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), {"x": np.ones((5, 4), np.float32)}
  wrong = {
    "loss_fn= is missing": (batch, batch, None),
    "train_batch must hold arrays .*; it holds int": ({"x": 1}, batch, squares),
    "train_batch must hold arrays .*; it holds nothing": (None, batch, squares),
    "val_batch must hold arrays .*; it holds nothing": (batch, [batch, {}], squares),
    "val_batch must hold arrays .*; it holds a scalar": (batch, {"x": np.float32(1)}, squares),
    "train_batch must hold arrays .*; it holds a scalar$": ({**batch, "z": np.float32(1)}, batch, squares),
    "must hold arrays of numbers .*; it holds an array of <U1$": (batch, {**batch, "z": np.full(5, "a")}, squares),
    "must hold arrays of numbers .*; it holds an array of object": ({"x": np.full(5, None)}, batch, squares),
    "loss_fn=3 is no function": (batch, batch, 3),
    r"weights of train_batch add up to -5.0": (batch, batch, lambda m, b: (squares(m, b), -jnp.ones(5))),
    "val_batch must hold arrays .*; it holds arrays of 1 and 5 rows": (batch, {**batch, "z": np.ones((1, 4))}, squares),
    "val_batch is a tuple, but train_batch a dict: a list holds several validation batches": (
      batch,
      (batch, batch),
      squares,
    ),
    "val_batch is a ndarray, but train_batch a list": ([batch["x"]], [batch["x"]], squares),
  }
  for message, (train, val, loss_fn) in wrong.items():
    with pytest.raises(ValueError, match=message):
      ghost.GhostEngine().score(model, train, val, loss_fn=loss_fn)
  with pytest.raises(ValueError, match="loss_fn= is missing"):  # as the model of docs/engine.md
    ghost.GhostEngine().score(nnx.Dict(hidden=model), batch, batch)
  with pytest.raises(ValueError, match="cfg='adam' is no configuration"):
    ghost.GhostEngine("adam")
  with pytest.raises(ValueError, match=r"pattern 'kernl\*' matches no parameter"):  # one pattern, not six
    ghost.GhostEngine(exclude="kernl*").score(model, batch, batch, loss_fn=squares)
  for settings in ({"exclude": 3}, {"exclude": ("bias", 3)}, {"rank": True}):
    with pytest.raises(ValueError, match=r"exclude=3: give patterns|rank=True: use 0"):
      ghost.GhostEngine(**settings)
  for delta in (nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param), {"a": 1}, np.ones(3)):
    with pytest.raises(ValueError, match=r"delta= needs the paths, shapes and dtypes of nnx.state\(model, nnx.Param\)"):
      ghost.GhostEngine(direction="second_order").score(model, batch, batch, loss_fn=squares, delta=delta)
  narrow = ghost.AdamState({"kernel": np.ones((4, 3)), "bias": np.ones(())}, 3)  # would be broadcast
  with pytest.raises(ValueError, match=r"needs fitting second_moment in state=: .*: bias$"):
    ghost.GhostEngine(direction="adam").score(model, batch, batch, loss_fn=squares, state=narrow)
  optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
  for state in (optimizer, optimizer.opt_state):
    with pytest.raises(ValueError, match=r"needs state=AdamState.from_optax\(optimizer\)"):
      ghost.GhostEngine(direction="adam").score(model, batch, batch, loss_fn=squares, state=state)


def test_a_tuple_is_one_batch():
  model, (x, y) = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), (np.ones((5, 4), np.float32), np.arange(5, dtype=np.float32))
  alone = ghost.GhostEngine().score(model, (x, y), (x, y), loss_fn=lambda m, b: b[1] * squares(m, {"x": b[0]}))
  named = ghost.GhostEngine().score(model, *2 * [{"x": x, "y": y}], loss_fn=lambda m, b: b["y"] * squares(m, b))
  np.testing.assert_array_equal(alone.dot, named.dot)


@pytest.mark.parametrize(
  "change", [lambda b: {**b, "z": b["x"]}, lambda b: {"x": b["x"][:, None]}, lambda b: {"x": b["x"].astype(np.float16)}]
)
def test_concat_needs_batches_of_one_form(change):
  model, batch = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), {"x": np.ones((5, 4), np.float32)}
  with pytest.raises(ValueError, match=r"^schedule=concat needs batches of equal arrays.*use schedule=two_pass"):
    ghost.GhostEngine(schedule="concat").score(model, batch, change(batch), loss_fn=squares)


@pytest.mark.parametrize("engine", ["graddotprod", "jvp", "perexample"])
def test_nothing_to_score_is_named(engine):
  batch = {"x": np.ones((5, 4), np.float32)}
  for model, exclude in ((nnx.Linear(4, 3, rngs=nnx.Rngs(0)), ("*",)), (nnx.Dropout(0.0), ())):
    with pytest.raises(ValueError, match=r"^exclude=\*? leaves no parameter to score; paths: (bias, kernel|none)"):
      ghost.GhostEngine(engine=engine, exclude=exclude).score(model, batch, batch, loss_fn=squares)


@pytest.mark.parametrize("engine", ["graddotprod", "jvp", "perexample"])
def test_complex_and_integer_parameters_are_refused(engine):
  """Products of complex gradients are complex numbers, and no change of the loss."""
  model = nnx.Linear(4, 3, param_dtype=jnp.complex64, dtype=jnp.complex64, rngs=nnx.Rngs(0))
  batch = {"x": np.ones((5, 4), np.float32)}
  with pytest.raises(ValueError, match=r"kernel: complex and integer Params have no scores"):
    ghost.GhostEngine(engine=engine).score(model, batch, batch, loss_fn=lambda m, b: jnp.abs(m(b["x"])).sum(-1))
  model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
  model.steps = nnx.Param(jnp.arange(2))
  with pytest.raises(ValueError, match=r"^steps: complex and integer .* integers in an nnx.Variable"):
    ghost.GhostEngine(engine=engine, exclude=("steps",)).score(model, batch, batch, loss_fn=squares)


def test_a_call_under_jit_and_a_list_in_a_layer_are_named():
  model, batch = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), {"x": np.ones((5, 4), np.float32)}
  with pytest.raises(ValueError, match=r"call it outside of jax\.jit, nnx\.jit"):
    nnx.jit(lambda m, b: ghost.GhostEngine().score(m, b, b, loss_fn=squares).dot)(model, batch)
  padded = nnx.Conv(4, 3, (3,), padding=[(2, 0)], rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"unhashable type: 'list'.*make it a tuple"):
    ghost.GhostEngine().score(padded, {"x": np.ones((5, 7, 4), np.float32)}, batch, loss_fn=squares)


COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


class Training:
  """Three steps with forward mode or rules, a part of the parameters frozen, a validation gradient for two steps."""

  def __init__(self, schedule):
    mask = ("*mlp*", "*norm*", "decoder/logits_dense/*")
    self.run = Run(
      ghost_schedule=schedule, trainable_parameters_mask=mask, ghost_val_every=2, dropout_rate=0.1, **FLOAT64
    )
    self.around, self.out = [self.run.snapshot()], []
    for i in range(3):
      self.out.append(self.run.step(TRAIN[i], (VALIDATION,)))
      self.around.append(self.run.snapshot())


@pytest.mark.slow
def test_training_with_frozen_parameters_by_forward_mode_and_by_rules():
  by_jvp, by_rules = Training("forward_mode"), Training("two_pass")
  frozen = {"token_embedder/embedding", *(f"decoder/layers/self_attention/{n}/kernel" for n in ("key", "query", "out"))}
  for training in (by_jvp, by_rules):
    for label, start in training.around[0].params.items():
      moved = (training.around[-1].params[label] != start).any()
      assert moved == (label not in frozen and "value" not in label), label
  for i, (ours, theirs) in enumerate(zip(by_jvp.out, by_rules.out, strict=True)):
    for label, value in by_rules.around[i + 1].params.items():
      assert oracles.relative_error(by_jvp.around[i + 1].params[label], value) < 1e-10, label
    for name in ("momentum", "weight_decay", "unscored", "predicted", "val_loss", "loss_BS"):
      np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, err_msg=name)
    # Forward mode knows this step's clipping factor; the rules score with that of the step before.
    assert abs(ours["direction_residual"][0]) < 1e-10 * abs(ours["predicted_examples"][0])
    exact = sum(theirs[name] for name in ("predicted_examples", "direction_residual"))
    np.testing.assert_allclose(ours["predicted_examples"], exact, rtol=1e-9)
    np.testing.assert_allclose(ours["contribution_BSK"].sum((0, 1)), ours["predicted_examples"], rtol=1e-9)
    size = sum(abs(ours[name][0]) for name in COLUMNS)
    assert sum(ours[name][0] for name in COLUMNS) == pytest.approx(ours["predicted"][0], abs=1e-12 * size)
    assert max(ours["check_rel_err"][0], theirs["check_rel_err"][0]) < 1e-10
    assert "unscored" not in ours or ours["unscored"][0] == 0


def test_a_loss_function_may_change_its_batch():
  """It is called once for each pass, on the batch as it was given."""
  model = foreign.randomized(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
  batch = {"x": np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)}

  def doubling(model, batch):
    batch["x"] = 2 * batch["x"]
    return squares(model, batch)

  found = foreign.score(ghost.GhostEngine(), model, batch, batch, loss_fn=doubling)
  doubled = {"x": 2 * batch["x"]}
  wanted = foreign.score(ghost.GhostEngine(), model, doubled, doubled, loss_fn=squares)
  np.testing.assert_allclose(found.dot, wanted.dot, rtol=1e-6)


def test_losses_of_whole_numbers_are_refused():
  model, batch = foreign.randomized(lambda rngs: nnx.Linear(4, 3, rngs=rngs)), {"x": np.ones((5, 4), np.float32)}
  with pytest.raises(ValueError, match=r"losses of type int32 and shape .*: return real losses"):
    ghost.GhostEngine().score(model, batch, batch, loss_fn=lambda m, b: squares(m, b).astype(int))


def test_engine_perexample_refuses_a_loss_whose_rows_belong_together():
  class Pairs(objectives.Objective):
    rows_per_unit = 2

    def __call__(self, model, batch):
      losses = jnp.square(model(batch["x"])).sum(-1)
      return losses - losses.reshape(-1, 2).mean(-1).repeat(2), jnp.ones(len(losses))

  rows = {"x": np.ones((4, 3), np.float32)}
  with pytest.raises(ValueError, match="takes each row alone, but the loss has units of 2 rows; use engine=jvp"):
    ghost.GhostEngine(engine="perexample").score(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rows, rows, loss_fn=Pairs())
