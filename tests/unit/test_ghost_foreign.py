"""The engine on other people's nnx models and losses: dense layers with biases, norms with biases, own layers.

n examples, T positions, I, O widths of a layer, K validation sets.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import ghost
from maxghost.ghost import rules

N, N_VAL, T, TOKENS, WIDTH, HIDDEN, CLASSES = 7, 5, 11, 17, 6, 9, 4


def randomized(make, seed: int = 0) -> nnx.Module:
  """The model that `make(rngs)` builds, with random parameters: initial zeros and ones would hide a dropped term."""
  graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
  rng = np.random.default_rng(seed)
  return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype), state))


class Tagger(nnx.Module):
  """Tokens [n, T] to class logits [n, T, CLASSES]: table, LayerNorm with bias, two kinds of dense layers with bias."""

  def __init__(self, rngs, dtype=jnp.float32):
    kwargs = {"param_dtype": dtype, "rngs": rngs}
    self.table = nnx.Embed(TOKENS, WIDTH, **kwargs)
    self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-3, **kwargs)
    self.layers = nnx.List([nnx.Linear(WIDTH, HIDDEN, **kwargs), nnx.Linear(HIDDEN, WIDTH, **kwargs)])
    self.scale = nnx.RMSNorm(WIDTH, **kwargs)
    self.heads = nnx.LinearGeneral(WIDTH, (2, 3), use_bias=True, **kwargs)
    self.out = nnx.LinearGeneral((2, 3), CLASSES, axis=(-2, -1), use_bias=True, **kwargs)

  def __call__(self, ids):
    x = self.norm(self.table(ids))
    x = x + self.layers[1](jax.nn.gelu(self.layers[0](x)))
    return self.out(jnp.tanh(self.heads(self.scale(x))))


def tagging_loss(model, batch):
  """(losses [n, T], weights [n, T])."""
  return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][..., None], -1)[..., 0], batch["w"]


def tagging_batch(num: int, seed: int, dtype="float32") -> dict:
  rng = np.random.default_rng(seed)
  weights = rng.random((num, T)) * (rng.random((num, T)) < 0.7)
  weights[-1] = 0
  return {
    "x": rng.integers(0, TOKENS, (num, T), np.int32),
    "y": rng.integers(0, CLASSES, (num, T), np.int32),
    "w": np.asarray(weights, dtype),
  }


class Mlp(nnx.Module):
  """[n, WIDTH] to [n, CLASSES]."""

  def __init__(self, rngs):
    self.first, self.norm = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.LayerNorm(HIDDEN, rngs=rngs)
    self.second = nnx.Linear(HIDDEN, CLASSES, use_bias=False, rngs=rngs)

  def __call__(self, x):
    return self.second(jax.nn.relu(self.norm(self.first(x))))


def squared_loss(model, batch):
  """(losses [n], weights [n]): one loss per example, no positions."""
  return jnp.square(model(batch["x"]) - batch["y"]).sum(-1), batch["w"]


def regression_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  x, y = (rng.normal(size=(num, width)).astype(np.float32) for width in (WIDTH, CLASSES))
  return {"x": x, "y": y, "w": (rng.random(num) + 0.2).astype(np.float32)}


def per_example(model, loss_fn, train, val):
  """({label: [n, *parameter]} gradients of sum(losses * weights) of each example, its weight [n]) of both batches."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def total(params, row):
    losses, weights = loss_fn(nnx.merge(graphdef, params, rest), {name: v[None] for name, v in row.items()})
    return (losses * weights).sum(), weights.sum()

  rows = {name: np.concatenate([train[name], val[name]]) for name in train}
  with tiny.cheap_compilation():
    gradients, weights = jax.jit(jax.vmap(jax.grad(total, has_aux=True), in_axes=(None, 0)))(params, rows)
  n = len(train["w"])
  flat = {"/".join(map(str, p)): np.asarray(v[...], np.float64) for p, v in nnx.to_flat_state(gradients)}
  weights = np.asarray(weights, np.float64)
  return ({k: g[:n] for k, g in flat.items()}, weights[:n]), ({k: g[n:] for k, g in flat.items()}, weights[n:])


def mean_gradient(gradients: dict, weights) -> dict:
  return {label: g.sum(0) / weights.sum() for label, g in gradients.items()}


def expected_dots(model, loss_fn, train, val) -> dict:
  """{label: <grad l_i, G>}, [n] each."""
  (gradients, weights), validation = per_example(model, loss_fn, train, val)
  weights = np.where(weights > 0, weights, np.inf)
  return {label: v / weights for label, v in oracles.dots(gradients, mean_gradient(*validation)).items()}


def score(engine, *args, **kwargs):
  with tiny.cheap_compilation():
    return jax.tree.map(np.asarray, engine.score(*args, **kwargs))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_dense_layers_norms_and_biases(dtype, tolerance):
  with jax.enable_x64(dtype == "float64"):
    model = randomized(lambda rngs: Tagger(rngs, jnp.dtype(dtype)))
    train, val = tagging_batch(N, 1, dtype), tagging_batch(N_VAL, 2, dtype)
    result = score(ghost.GhostEngine(per_position=True), model, train, val, loss_fn=tagging_loss)
    expected = expected_dots(model, tagging_loss, train, val)
  assert len(expected) == 2 * 6  # every layer has two parameters but the table and RMSNorm, with one each
  assert result.per_param.keys() == expected.keys()
  for label, value in expected.items():
    assert np.abs(value).max() > 0, label
    assert oracles.relative_error(result.per_param[label], value) < tolerance, label
  assert oracles.relative_error(result.dot, sum(expected.values())) < tolerance
  assert oracles.relative_error(result.per_position.sum(-1), result.additive) < tolerance
  assert result.dot[-1] == 0  # no weight


@pytest.fixture(scope="module")
def mlp():
  model = randomized(Mlp)
  train, val = regression_batch(N, 3), regression_batch(N_VAL, 4)
  return model, train, val, expected_dots(model, squared_loss, train, val)


def test_losses_without_positions(mlp):
  model, train, val, expected = mlp
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
  assert result.per_position is None
  for label, value in expected.items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label
  assert oracles.relative_error(result.additive, result.dot * train["w"] / train["w"].sum()) < 1e-6


def test_a_list_of_validation_sets_gives_one_row_each(mlp):
  model, train, val, expected = mlp
  other = regression_batch(3, 5)
  result = score(ghost.GhostEngine(), model, train, [other, val], loss_fn=squared_loss)
  assert result.dot.shape == (2, N)
  assert oracles.relative_error(result.dot[1], sum(expected.values())) < 1e-5
  assert oracles.relative_error(result.dot[0], sum(expected_dots(model, squared_loss, train, other).values())) < 1e-5


def test_a_scaled_loss_scales_both_gradients_and_scaled_weights_nothing(mlp):
  model, train, val, expected = mlp

  def scaled(model, batch):
    losses, weights = squared_loss(model, batch)
    return -3 * losses, 5 * weights

  result = score(ghost.GhostEngine(), model, train, val, loss_fn=scaled)
  assert oracles.relative_error(result.dot, 9 * sum(expected.values())) < 1e-5


def test_a_row_of_negative_weight_has_its_own_gradient(mlp):
  """Its part of the batch loss is taken away, and its mean loss is as before."""
  model, train, val, expected = mlp
  turned = {**train, "w": train["w"] * np.where(np.arange(N) == 2, -0.1, 1).astype(np.float32)}
  for engine in ("graddotprod", "perexample"):
    result = score(ghost.GhostEngine(engine=engine), model, turned, val, loss_fn=squared_loss)
    assert oracles.relative_error(result.dot, sum(expected.values())) < 1e-5


def test_excluded_parameters_are_left_out_and_the_rest_is_the_same(mlp):
  model, train, val, expected = mlp
  result = score(ghost.GhostEngine(exclude=("*/bias", "second/*")), model, train, val, loss_fn=squared_loss)
  assert result.per_param.keys() == {"first/kernel", "norm/scale"}
  kept = sum(expected[label] for label in result.per_param)
  assert oracles.relative_error(result.dot, kept) < 1e-5
  assert tiny.by_label(result.grads).keys() == expected.keys()  # the training gradient is whole


class Shift(nnx.Module):
  """A layer that flax does not have: x + tanh(a) * |x|, nonlinear in its parameter."""

  def __init__(self, width):
    self.a = nnx.Param(jnp.linspace(-1.0, 1.0, width))

  def __call__(self, x):
    a = jnp.expand_dims(self.a[...], range(x.ndim - 1))
    return x + jnp.tanh(a) * jnp.abs(x)


class WithShift(Mlp):
  def __init__(self, rngs):
    super().__init__(rngs)
    self.shift = Shift(WIDTH)

  def __call__(self, x):
    return super().__call__(self.shift(x))


def test_an_own_layer_is_an_error_until_its_rule_is_registered(mlp):
  model = randomized(WithShift)
  _, train, val, _ = mlp
  with pytest.raises(ValueError, match=r"shift/a \(Shift\).*@ghost.rule.*[^_]exclude, .*engine='jvp'.*Linear"):
    ghost.GhostEngine().score(model, train, val, loss_fn=squared_loss)

  @ghost.rule(Shift)
  class ShiftRule(ghost.Rule):
    pass

  result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
  expected = expected_dots(model, squared_loss, train, val)
  for label, value in expected.items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label


@pytest.mark.parametrize(
  ("given", "said"),
  [
    (lambda self, call, name, direction: None, r"shift/a: Wrong.score gives .*NoneType.*, not \('K', 7\)"),
    (lambda self, call, name, direction: jnp.zeros((1, 5)), r"gives \(1, 5\), not \('K', 7\)"),
    (lambda self, *call: 0.95 * ghost.Rule.score(self, *call), "shift/a.* do not add up to <gradient, direction>"),
    (lambda self, call, name, direction: jnp.full((1, N), jnp.nan), "shift/a.* do not add up to <gradient, direction>"),
  ],
)
def test_what_a_rule_gives_that_is_no_score_is_refused(given, said, mlp, monkeypatch):
  monkeypatch.setitem(rules.RULES, Shift, type("Wrong", (ghost.Rule,), {"score": given})())
  with pytest.raises(ValueError, match=said):
    score(ghost.GhostEngine(), randomized(WithShift), *mlp[1:3], loss_fn=squared_loss)


def test_a_custom_vjp_has_no_forward_mode(mlp):
  rounded = jax.custom_vjp(lambda x: jnp.round(x))
  rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, cotangent: (cotangent,))
  loss_fn = lambda model, batch: (rounded(squared_loss(model, batch)[0]), batch["w"])  # noqa: E731
  with pytest.raises(ValueError, match=r"custom_vjp has no forward mode, by which engine='jvp' .*.*perexample"):
    ghost.GhostEngine(engine="jvp").score(*mlp[:3], loss_fn=loss_fn)


class UsedTwice(nnx.Module):
  """One dense layer called twice: its score needs both uses, and under Adam's direction so does its direction."""

  def __init__(self, rngs):
    self.inner, self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, x):
    return self.out(self.inner(jnp.tanh(self.inner(x))))


def test_a_layer_called_twice_adds_both_uses(mlp):
  model = randomized(UsedTwice)
  _, train, val, _ = mlp
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
  for label, value in expected_dots(model, squared_loss, train, val).items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label


def test_a_layer_called_twice_is_refused_where_its_direction_needs_both_uses(mlp):
  """Each use alone sees half of the weight gradient that Adam's direction is made of: a wrong score, and no check that
  compares a use with itself would notice."""
  model = randomized(UsedTwice)
  _, train, val, _ = mlp
  zeros = {label: np.zeros_like(v) for label, v in tiny.by_label(model).items()}
  with pytest.raises(ValueError, match=r"inner \(2 calls\).*whole gradient.*[^_]exclude"):
    ghost.GhostEngine(direction="adam").score(model, train, val, loss_fn=squared_loss, state=ghost.AdamState(zeros, 0))


class TiedByHand(nnx.Module):
  """A table that is also the output, here `how`: by its method, by its array, as another layer's weight."""

  def __init__(self, rngs, how: str):
    self.how, self.table = how, nnx.Embed(CLASSES, WIDTH, rngs=rngs)
    self.out = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)
    self.apart = nnx.data((nnx.Param(jnp.ones((1, 1, WIDTH))),)) if how == "apart" else None

  def __call__(self, ids):
    x = jnp.tanh(self.table(ids)) * (1 if self.apart is None else self.apart[0][...])
    if self.how == "array":
      return self.out(x) + x @ self.table.embedding[...].T
    if self.how == "assigned":
      self.out.kernel[...] = self.table.embedding[...].T
    return self.out(x) + (self.table.attend(x) if self.how == "method" else 0)


def penalized_loss(model, batch):
  losses, weights = tagging_loss(model, batch)
  return losses + 0.01 * jnp.square(model.out.kernel[...]).sum(), weights


@pytest.mark.parametrize(
  ("how", "loss_fn", "named"),
  [
    ("array", tagging_loss, "table/embedding"),
    ("assigned", tagging_loss, "table/embedding"),
    ("apart", tagging_loss, "apart/0"),
    ("method", penalized_loss, "out/kernel"),
    ("method", tagging_loss, None),
  ],
)
def test_a_param_that_is_used_outside_its_layer_is_refused(how, loss_fn, named):
  """No rule sees that use: the score would lack a part of the gradient, and nothing would tell."""
  model = randomized(lambda rngs: TiedByHand(rngs, how))
  train, val = ({**b, "x": b["x"] % CLASSES} for b in (tagging_batch(N, 1), tagging_batch(N_VAL, 2)))
  expected = sum(expected_dots(model, loss_fn, train, val).values())
  result = score(ghost.GhostEngine(engine="jvp"), model, train, val, loss_fn=loss_fn)
  assert oracles.relative_error(result.dot, expected) < 1e-5
  if named is None:
    return
  with pytest.raises(ValueError, match=rf"^{named}: used outside its layer's methods.*engine='jvp'"):
    ghost.GhostEngine().score(model, train, val, loss_fn=loss_fn)
  if how != "apart":
    exclude = (named,)
    assert score(ghost.GhostEngine(exclude=exclude), model, train, val, loss_fn=loss_fn).dot.shape == (N,)


class OwnProduct(Mlp):
  """Dense layers whose product or promotion is the user's own."""

  def __init__(self, rngs):
    super().__init__(rngs)

    def product(x, w, dims, precision=None, preferred_element_type=None, out_sharding=None):
      return jax.lax.dot_general(x, jnp.tanh(w), dims, precision)

    promote = lambda arrays, dtype=None, inexact=True: [x if x is None else x * x for x in arrays]  # noqa: E731
    self.first = nnx.Linear(WIDTH, HIDDEN, dot_general=product, rngs=rngs)
    self.middle = nnx.LinearGeneral(HIDDEN, HIDDEN, dot_general_cls=lambda: product, rngs=rngs)
    self.second = nnx.Linear(HIDDEN, CLASSES, promote_dtype=promote, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.middle(jax.nn.relu(self.norm(self.first(x))))))


@pytest.mark.parametrize("rank", [0, 1])
def test_dense_layers_with_a_product_of_the_users(mlp, rank):
  model, (_, train, val, _) = randomized(OwnProduct), mlp
  if rank:
    with pytest.raises(ValueError, match=r"rank=1 saves nothing on any .*: use 0 for exact scores"):
      ghost.GhostEngine(rank=rank).score(model, train, val, loss_fn=squared_loss)
    return
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
  for label, value in expected_dots(model, squared_loss, train, val).items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label


class WithArrays(Mlp):
  """Arrays that are not Params, in the places where nnx finds them."""

  def __init__(self, rngs):
    super().__init__(rngs)
    shifts = [jnp.linspace(0.0, 1.0 + i, WIDTH)[None] for i in range(3)]
    self.own, self.several, self.named = shifts[0], nnx.data([shifts[1]]), nnx.data({"shift": shifts[2]})

  def __call__(self, x):
    return super().__call__(x + self.own * self.several[0] - self.named["shift"])


def test_a_model_may_hold_arrays_in_lists_and_dicts(mlp):
  model, (_, train, val, _) = WithArrays(nnx.Rngs(0)), mlp
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
  expected = sum(expected_dots(model, squared_loss, train, val).values())
  assert oracles.relative_error(result.dot, expected) < 1e-5


class Scaled(nnx.Module):
  """A layer with a rule, a parameter and a layer inside."""

  def __init__(self, rngs):
    self.scale, self.inner = nnx.Param(jnp.ones(())), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, x):
    return self.inner(x) * self.scale[...]


@ghost.rule(Scaled)
class ScaledRule(ghost.Rule):
  pass


class WithScaled(nnx.Module):
  def __init__(self, rngs):
    self.layer = Scaled(rngs)

  def __call__(self, x):
    return self.layer(x)


def test_a_layer_with_a_rule_and_layers_inside_is_refused_by_name(mlp):
  _, train, val, _ = mlp
  with pytest.raises(ValueError, match=r"^layer \(Scaled\) has a rule, .* not in layer/inner: move its own parameters"):
    ghost.GhostEngine().score(WithScaled(nnx.Rngs(0)), train, val, loss_fn=squared_loss)


@pytest.mark.parametrize("schedule", ["two_pass", "concat"])
def test_weights_may_be_flags(mlp, schedule):
  model, train, val, _ = mlp
  flags = [{**batch, "w": batch["w"] > 0.6} for batch in (train, val)]
  floats = [{**batch, "w": batch["w"].astype(np.float32)} for batch in flags]
  found, same = (
    score(ghost.GhostEngine(schedule=schedule), model, *both, loss_fn=squared_loss) for both in (flags, floats)
  )
  np.testing.assert_array_equal(found.dot, same.dot)


def test_an_example_of_negative_weight_has_its_score(mlp):
  """Its gradient goes into the step with the other sign, but it is an example like others."""
  model, train, val, expected = mlp
  turned = {**train, "w": train["w"] * np.where(np.arange(N) == 2, np.float32(-0.5), 1)}
  result = score(ghost.GhostEngine(), model, turned, val, loss_fn=squared_loss)
  assert oracles.relative_error(result.dot, sum(expected.values())) < 1e-5
  assert oracles.relative_error(result.additive, result.dot * turned["w"] / turned["w"].sum()) < 1e-5


@pytest.mark.parametrize("empty", ["train_batch", "val_batch"])
def test_an_empty_batch_is_refused_by_name(mlp, empty):
  model, train, val, _ = mlp
  given = {"train_batch": train, "val_batch": val} | {empty: {name: x[:0] for name, x in train.items()}}
  with pytest.raises(ValueError, match=f"^{empty} is empty; give at least one row"):
    ghost.GhostEngine().score(model, *given.values(), loss_fn=squared_loss)


ORDERS = {"reordered": np.array([3, 0, 2, 1, 6, 4, 5]), "mirrored": np.array([3, 2, 1, 0, 4, 5, 6])}


class Coupled(Mlp):
  """Rows that read each other in the way `how` between the two dense layers."""

  def __init__(self, rngs, how: str):
    super().__init__(rngs)
    self.how = how
    self.batch_norm = nnx.BatchNorm(HIDDEN, use_scale=False, use_bias=False, rngs=rngs) if how == "batch norm" else None

  def __call__(self, x):
    x = self.norm(self.first(x))
    if self.how in ORDERS:  # and put back: each row's loss is its own
      order = ORDERS[self.how][len(x) > ORDERS[self.how]]
      return self.second(x[order])[np.argsort(order)]
    if self.how == "statistics":
      x = x - jax.lax.stop_gradient(x.mean(0, keepdims=True))
    if self.how == "next row":
      x = x + jnp.roll(x, 1, 0)
    return self.second(self.batch_norm(x) if self.batch_norm else x)


@pytest.mark.parametrize(
  ("how", "schedule", "named"),
  [
    ("reordered", "two_pass", "second/kernel"),
    ("mirrored", "two_pass", "second/kernel"),
    ("batch norm", "two_pass", "first/bias, first/kernel, norm/scale"),
    ("next row", "concat", "first/bias, first/kernel, norm/bias, norm/scale"),
    ("statistics", "two_pass", None),
  ],
)
def test_rows_that_read_each_other_are_refused(mlp, how, schedule, named):
  """A layer's score of a row would hold parts of the losses of others. Forward mode needs no rows in the layers."""
  _, train, val, _ = mlp
  model = Coupled(nnx.Rngs(0), how)
  if named:
    with pytest.raises(ValueError, match=rf"^{named}: scores of a row depend on the losses of other.*engine='jvp'"):
      score(
        ghost.GhostEngine(schedule=schedule), model, train, train if schedule == "concat" else val, loss_fn=squared_loss
      )
    return
  expected = score(ghost.GhostEngine(engine="jvp"), model, train, val, loss_fn=squared_loss)
  assert (
    oracles.relative_error(score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss).dot, expected.dot) < 1e-5
  )


@pytest.mark.parametrize("hidden_by", ["a head of zeros", "a row that is NaN"])
def test_rows_that_read_each_other_are_refused_as_soon_as_scores_show_it(mlp, hidden_by):
  """The first batch has no score but 0 or NaN below the head, so it cannot tell."""
  _, train, val, _ = mlp
  model, engine, first = Coupled(nnx.Rngs(0), "next row"), ghost.GhostEngine(), train
  kernel = model.second.kernel[...]
  if hidden_by == "a head of zeros":
    model.second.kernel[...] = jnp.zeros_like(kernel)
  else:
    first = {**train, "x": np.full_like(train["x"], np.nan)}
  score(engine, model, first, val, loss_fn=squared_loss)
  model.second.kernel[...] = kernel
  with pytest.raises(ValueError, match=r"first/kernel, .*scores of a row depend on the losses of other"):
    score(engine, model, train, val, loss_fn=squared_loss)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_is_scored_in_evaluation_mode_alone(mlp, training):
  class Model(nnx.Module):
    def __init__(self, rngs):
      self.first, self.second = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, CLASSES, rngs=rngs)
      self.norm, self.act = nnx.BatchNorm(HIDDEN, use_running_average=not training, rngs=rngs), nnx.PReLU()

    def __call__(self, x):
      return self.second(self.act(self.norm(self.first(x))))

  (_, train, val, _), model = mlp, Model(nnx.Rngs(0))
  with jax.numpy_rank_promotion("allow"):
    if training:
      with pytest.raises(ValueError, match=r"^norm\.__call__ changes mean, var, .*call model.eval\(\) first"):
        ghost.GhostEngine().score(model, train, val, loss_fn=squared_loss)
      return
    result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
    expected = expected_dots(model, squared_loss, train, val)
  for label, value in expected.items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label


class Stateful(nnx.Module):
  """A layer with a rule that counts its calls, returns a pair, or keeps what it saw, by `how`."""

  def __init__(self, how: str):
    self.how, self.gain, self.calls = how, nnx.Param(jnp.ones((1, WIDTH))), nnx.Variable(jnp.ones(()))

  def __call__(self, x):
    if self.how == "counts":
      self.calls[...] = self.calls[...] + 1
    if self.how == "keeps":
      self.seen = nnx.Intermediate(x)
    out = x * self.gain[...] * self.calls[...]
    return (out, x) if self.how == "pair" else out


@ghost.rule(Stateful)
class StatefulRule(ghost.Rule):
  pass


class WithStateful(Mlp):
  def __init__(self, rngs, how: str):
    super().__init__(rngs)
    self.layer = Stateful(how)

  def __call__(self, x):
    out = self.layer(x)
    x = out[0] if isinstance(out, tuple) else self.layer(jnp.tanh(out))
    return super().__call__(x)


@pytest.mark.parametrize(
  ("how", "said"), [("counts", "changes calls"), ("keeps", "changes seen"), ("pair", "returns a tuple"), ("none", None)]
)
def test_a_layer_with_a_rule_that_changes_itself_or_returns_no_array_is_refused(mlp, how, said):
  """The probed call would not see the change: a count stays, and what is read of it later is that of before."""
  _, train, val, _ = mlp
  model = WithStateful(nnx.Rngs(0), how)
  if said:
    with pytest.raises(
      ValueError, match=rf"^layer\.__call__ {said}.*, name its parameters in exclude, or use engine='jvp'"
    ):
      ghost.GhostEngine().score(model, train, val, loss_fn=squared_loss)
  expected = score(ghost.GhostEngine(engine="jvp", exclude=("layer/*",)), model, train, val, loss_fn=squared_loss)
  found = score(ghost.GhostEngine(exclude=("layer/*",)), model, train, val, loss_fn=squared_loss)
  assert oracles.relative_error(found.dot, expected.dot) < 1e-5


class Distances:
  """A loss as a method."""

  def __init__(self, teacher, scale):
    self.teacher, self.scale, self.step = teacher, scale, 0

  def loss(self, model, batch):
    return self.scale[0] * jnp.square(model(batch["x"]) - self.teacher(batch["x"])).sum(-1)


@pytest.mark.parametrize("how", ["closure", "method"])
def test_what_a_loss_function_holds_may_change_in_place(mlp, how):
  """Such as a teacher that follows the model: a program holds the arrays that it was compiled with."""
  (model, train, val, _), teacher, scale = mlp, randomized(Mlp, 3), [1.0]
  made = Distances(teacher, scale)

  def closed(model, batch):
    return scale[0] * jnp.square(model(batch["x"]) - teacher(batch["x"])).sum(-1)

  engine, found = ghost.GhostEngine(), []
  for change in (None, lambda: nnx.update(teacher, nnx.state(randomized(Mlp, 4))), lambda: scale.__setitem__(0, 3.0)):
    if change:
      change()
    for made.step in range(2):  # not read by the loss
      found.append(score(engine, model, train, val, loss_fn=closed if how == "closure" else made.loss).dot)
  assert len(engine._compiled) == 3
  fresh = score(ghost.GhostEngine(engine="jvp"), model, train, val, loss_fn=closed).dot
  assert oracles.relative_error(found[-1], fresh) < 1e-5
  assert oracles.relative_error(found[3], fresh / 9) < 1e-5 < oracles.relative_error(found[1], fresh / 9)
