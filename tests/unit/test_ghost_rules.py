"""The rule of every layer of flax.nnx against per-example gradients, per parameter.

n examples, T positions, H heads, S key positions; the widths of the layers are pairwise different.
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
from maxghost.ghost import rules

N, N_VAL, T, TOKENS = 6, 4, 11, 19


class Scalar(nnx.Module):
  """A learned scalar: exp(a) tanh(x)."""

  def __init__(self):
    self.a = nnx.Param(jnp.float32(0.0))

  def __call__(self, x):
    return jnp.exp(self.a[...]) * jnp.tanh(x)


class Sink(nnx.Module):
  """Softmax over keys with one learned logit per head that takes its share and leads nowhere."""

  def __init__(self, heads):
    self.logit = nnx.Param(jnp.zeros(heads))

  def __call__(self, scores_nTHS):
    sink_nTH1 = jnp.broadcast_to(self.logit[...][:, None], (*scores_nTHS.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores_nTHS, sink_nTH1], -1))[..., :-1]


@ghost.rule(Scalar)
class ScalarRule(ghost.Rule):
  pass


@ghost.rule(Sink)
class SinkRule(ghost.Rule):
  """Says the rank of its parameter, so that the layer may be stacked."""

  def rank(self, module, name):
    return 1


class Images(nnx.Module):
  """[n, 9, 7, 3] to class logits [n, 4]."""

  def __init__(self, rngs):
    self.strided = nnx.Conv(3, 8, (3, 2), strides=(2, 1), rngs=rngs)
    self.groups = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
    self.grouped = nnx.Conv(8, 12, (2, 3), feature_group_count=4, padding="VALID", use_bias=False, rngs=rngs)
    self.up = nnx.ConvTranspose(12, 5, (2, 3), strides=(2, 1), rngs=rngs)
    self.instance = nnx.InstanceNorm(5, rngs=rngs)
    self.plane = nnx.LayerNorm(5, rngs=rngs)
    self.out = nnx.LinearGeneral((5, 5), 4, axis=(-2, -1), rngs=rngs)

  def __call__(self, x):
    x = jnp.tanh(self.groups(self.strided(x)))
    x = jnp.tanh(self.instance(jnp.tanh(self.up(self.grouped(x)))))
    return self.out(self.plane(x).mean(1))


class Sequences(nnx.Module):
  """Token ids [n, T] to logits over the tokens, [n, T, 19]: tables, convolution, einsums, sinks, LoRA, dense layers."""

  def __init__(self, rngs):
    self.table = nnx.Embed(TOKENS, 6, rngs=rngs)
    self.places = nnx.Embed(T + 3, 6, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(3, 6, 21, use_bias=False, decode=False, rngs=rngs)
    self.conv = nnx.Conv(6, 8, (3,), padding="CAUSAL", rngs=rngs)
    self.queries = nnx.Einsum("btd,dhk->bthk", (8, 2, 5), (2, 5), rngs=rngs)
    self.sink = Sink(2)
    self.out = nnx.Einsum("bthk,hkd->btd", (2, 5, 9), rngs=rngs)
    self.branch = nnx.LoRA(9, 3, 7, rngs=rngs)
    self.wrapped = nnx.LoRA(7, 2, 10, base_module=nnx.Linear(7, 10, rngs=rngs), rngs=rngs)
    self.dense = nnx.LoRALinear(10, 13, lora_rank=4, rngs=rngs)
    self.scalar = Scalar()
    self.conv1d = nnx.Linear(13, 6, rngs=rngs)  # GPT-2's Conv1D: a kernel stored [in, out]
    self.norm = nnx.RMSNorm(6, rngs=rngs)

  def __call__(self, ids):
    places = jnp.broadcast_to(jnp.arange(ids.shape[1])[::-1], ids.shape)
    x = self.attention(self.table(ids) + self.places(places), mask=nnx.make_causal_mask(ids))
    x = self.conv(x)
    q = self.queries(x)
    share = self.sink(jnp.einsum("bthk,bshk->bths", q, jnp.roll(q, 1, axis=-1)))
    x = self.out(jnp.einsum("bths,bshk->bthk", share, q))
    x = self.scalar(self.dense(jnp.tanh(self.wrapped(jnp.tanh(self.branch(x))))))
    return self.table.attend(self.norm(self.conv1d(x)))


class Layer(nnx.Module):
  """One of the equal layers of `Stack`, [n, T, 6] -> [n, T, 6]."""

  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(6, rngs=rngs)
    self.conv = nnx.Conv(6, 8, (3,), feature_group_count=2, rngs=rngs)
    self.einsum = nnx.Einsum("btd,dhk->bthk", (8, 2, 5), (2, 5), rngs=rngs)
    self.sink = Sink(2)
    self.lora = nnx.LoRA(10, 3, 7, base_module=nnx.Linear(10, 7, rngs=rngs), rngs=rngs)
    self.groups = nnx.GroupNorm(7, num_groups=1, rngs=rngs)
    self.dense = nnx.LoRALinear(7, 6, lora_rank=4, rngs=rngs)

  def __call__(self, x):
    h = self.einsum(jnp.tanh(self.conv(self.norm(x))))
    h = (h * self.sink(h)).reshape(*h.shape[:2], -1)
    return x + self.dense(jnp.tanh(self.groups(self.lora(h))))


class Stack(nnx.Module):
  """Three layers stacked by nnx.vmap and run by one scan whose body is rematerialised."""

  def __init__(self, rngs):
    self.table = nnx.Embed(TOKENS, 6, rngs=rngs)
    self.body = nnx.Module()
    self.body.layers = nnx.vmap(Layer)(rngs.split(3))

  def __call__(self, ids):
    graphdef, state = nnx.split(self.body.layers)

    @jax.checkpoint
    def body(x, state):
      return nnx.merge(graphdef, state)(x), None

    x, _ = jax.lax.scan(body, self.table(ids), state)
    return self.table.attend(x)


def image_loss(model, batch):
  """(losses [n], weights [n])."""
  losses = -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][:, None], -1)[:, 0]
  return losses, batch["w"]


def token_loss(model, batch):
  """(losses [n, T], weights [n, T])."""
  return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][..., None], -1)[..., 0], batch["w"]


def image_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(num, 9, 7, 3)).astype(np.float32)
  return {"x": x, "y": rng.integers(0, 4, num), "w": (rng.random(num) + 0.2).astype(np.float32)}


def token_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  weights = (rng.random((num, T)) * (rng.random((num, T)) < 0.7)).astype(np.float32)
  weights[1] = 0
  return {"x": rng.integers(0, TOKENS, (num, T)), "y": rng.integers(0, TOKENS, (num, T)), "w": weights}


MODELS = {
  "images": (Images, image_loss, image_batch),
  "sequences": (Sequences, token_loss, token_batch),
  "stack": (Stack, token_loss, token_batch),
}


class Case:
  """A model scored against two validation sets at once, and its oracle."""

  def __init__(self, name):
    make, loss_fn, batch = MODELS[name]
    self.model, self.loss_fn = foreign.randomized(make), loss_fn
    self.train, self.vals = batch(N, 1), [batch(N_VAL, 2), batch(3, 3)]
    self.oracle = foreign.Oracle(self.model, loss_fn, self.train, *self.vals)
    self.rounded = foreign.Oracle(self.model, loss_fn, self.train, *self.vals, wide=False)
    self.stacked = 3 if name == "stack" else 0
    self.per_position = name != "images"


@pytest.fixture(scope="module")
def case_of():
  made = {}

  def get(name) -> Case:
    if name not in made:
      made[name] = Case(name)
    return made[name]

  return get


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_against_per_example_gradients(name, case_of):
  case = case_of(name)
  engine = ghost.GhostEngine(per_position=case.per_position)
  result = foreign.score(engine, case.model, case.train, case.vals, loss_fn=case.loss_fn)
  for k, G in enumerate(case.oracle.G):
    expected = case.oracle.dots(G, case.stacked)
    scores = {label: np.take(v, k, axis=-2) for label, v in result.per_param.items()}
    rounded = case.rounded.dots(case.rounded.G[k], case.stacked)
    foreign.assert_scores(scores, expected, 1e-5, rounded)
    assert oracles.relative_error(result.dot[k], foreign.total(expected)) < 1e-5
  if case.per_position:
    assert oracles.relative_error(result.per_position.sum(-1), result.additive) < 1e-5


class Positions(nnx.Module):
  """A small tied model in which positions mix, [n, T] to [n, T, 19]."""

  def __init__(self, rngs):
    self.table, self.norm = nnx.Embed(TOKENS, 6, rngs=rngs), nnx.RMSNorm(6, epsilon=1e-3, rngs=rngs)
    self.dense = nnx.Linear(6, 6, rngs=rngs)

  def __call__(self, ids):
    x = jnp.cumsum(self.table(ids), axis=1) / (1 + jnp.arange(ids.shape[1]))[None, :, None]
    return self.table.attend(self.norm(jnp.tanh(jnp.cumsum(self.dense(x), axis=1))))


def copied_logits(copies: dict, ids_T):
  """`Positions` in plain JAX for one example, with a copy of every parameter for each position."""
  count = 1 + jnp.arange(len(ids_T))[:, None]
  x_TD = jnp.cumsum(copies["table/embedding"][jnp.arange(len(ids_T)), ids_T], axis=0) / count
  h_TD = jnp.einsum("td,tdo->to", x_TD, copies["dense/kernel"]) + copies["dense/bias"]
  h_TD = jnp.tanh(jnp.cumsum(h_TD, axis=0))
  h_TD = h_TD / jnp.sqrt(jnp.mean(h_TD**2, -1, keepdims=True) + 1e-3) * copies["norm/scale"]
  return jnp.einsum("td,tvd->tv", h_TD, copies["table/embedding"])


def test_a_position_gets_what_flows_through_its_own_use_of_the_parameters():
  model = foreign.randomized(Positions)
  train, val = token_batch(N, 1), token_batch(N_VAL, 2)
  result = foreign.score(ghost.GhostEngine(per_position=True), model, train, val, loss_fn=token_loss)
  G = foreign.Oracle(model, token_loss, train, val).G[0]
  values = tiny.by_label(model)
  copies = {label: jnp.broadcast_to(v, (T, *v.shape)) for label, v in values.items()}

  def loss(copies, row):
    return (oracles.softmax_losses(copied_logits(copies, row["x"]), row["y"]) * row["w"]).sum()

  gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(copies, train)
  expected = sum((np.asarray(g, np.float64) * G[label]).reshape(N, T, -1).sum(-1) for label, g in gradients.items())
  assert oracles.relative_error(result.per_position, expected / train["w"].sum()) < 1e-5


class OwnNorm(nnx.BatchNorm):
  """A subclass needs a rule of its own."""


class Normalized(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(5, 4, rngs=rngs)
    self.norm = OwnNorm(4, use_running_average=True, rngs=rngs)

  def __call__(self, x):
    return self.norm(self.dense(x))


def vector_batch(num: int, seed: int, width: int = 5) -> dict:
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(num, width)).astype(np.float32)
  return {"x": x, "y": rng.integers(0, 4, num), "w": np.ones(num, np.float32)}


def test_a_layer_without_a_rule_is_named_with_the_ways_out():
  model = Normalized(nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"norm/bias \(OwnNorm\), norm/scale \(OwnNorm\).*@ghost.rule.*exclude.*jvp"):
    ghost.GhostEngine().score(model, vector_batch(6, 1), vector_batch(4, 2), loss_fn=image_loss)


def test_a_layer_without_a_rule_can_be_excluded_and_the_rest_is_exact():
  model = Normalized(nnx.Rngs(0))
  train, val = vector_batch(6, 1), vector_batch(4, 2)
  result = foreign.score(ghost.GhostEngine(exclude=("norm/*",)), model, train, val, loss_fn=image_loss)
  oracle = foreign.Oracle(model, image_loss, train, val)
  expected = {label: v for label, v in oracle.dots(oracle.G[0]).items() if label.startswith("dense")}
  foreign.assert_scores(result.per_param, expected, 1e-5)


def test_other_axes_of_a_dense_layer_are_refused():
  class Model(nnx.Module):
    def __init__(self, rngs):
      self.dense = nnx.LinearGeneral(5, 4, axis=1, rngs=rngs)

    def __call__(self, x):
      return self.dense(x)

  with pytest.raises(ValueError, match=r"LinearGeneral with axis=\(1,\).*trailing axes"):
    ghost.GhostEngine().score(Model(nnx.Rngs(0)), vector_batch(6, 1), vector_batch(4, 2), loss_fn=image_loss)


@pytest.mark.parametrize(
  ("layers", "cls", "said"),
  [
    ((), ghost.Rule, r"write @ghost.rule\(MyLayer\)"),
    (("Shift",), ghost.Rule, r"write @ghost.rule\(MyLayer\)"),
    ((nnx.Linear,), dict, "on a class that extends Rule"),
    ((nnx.Linear,), type("Own", (ghost.Rule,), {"methods": ("forward",)}), "Own: methods names Linear.forward, which"),
  ],
)
def test_what_is_no_rule_of_a_layer_is_not_registered(layers, cls, said):
  before = dict(rules.RULES)
  with pytest.raises(ValueError, match=said):
    ghost.rule(*layers)(cls)
  assert before == rules.RULES
