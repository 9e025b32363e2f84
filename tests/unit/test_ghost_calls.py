"""The engine on layers that are called in transforms, in loops and with arguments by name.

n examples, T positions.
"""

import collections
import dataclasses
import enum
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from test_ghost_foreign import (
  CLASSES,
  N_VAL,
  TOKENS,
  WIDTH,
  Mlp,
  N,
  expected_dots,
  randomized,
  regression_batch,
  score,
  squared_loss,
  tagging_batch,
  tagging_loss,
)

from maxghost import ghost
from maxghost.ghost import engine as engine_lib
from maxghost.ghost import rules


def stacked(rngs):
  make = nnx.vmap(lambda key: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
  return make(jax.random.split(rngs.params(), 3))


def through_a_cast(layer, x):
  nnx.update(layer, jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(layer, nnx.Param)))
  return layer(x)


def through_scan(layers, x):
  return nnx.scan(lambda x, one: jnp.tanh(one(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)


@nnx.jit
def compiled(layer, x):
  return jnp.tanh(layer(x))


@nnx.remat
def recomputed(layer, x):
  return jnp.tanh(layer(x))


BODIES = {
  "decorated jit": (None, compiled),
  "decorated remat": (None, recomputed),
  "remat": (None, lambda layer, x: nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(layer, x)),
  "jit": (None, lambda layer, x: nnx.jit(lambda layer, x: jnp.tanh(layer(x)))(layer, x)),
  "scan": (stacked, through_scan),
  "vmap": (stacked, lambda layers, x: nnx.vmap(lambda one, x: one(x), in_axes=(0, None))(layers, x).mean(0)),
  "cast": (None, through_a_cast),
  "rnn": (lambda rngs: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)), lambda layer, x: layer(x)),
  "mask": (lambda rngs: nnx.Conv(WIDTH, WIDTH, (2,), mask=jnp.ones((2, WIDTH, WIDTH)).at[0].set(0), rngs=rngs), None),
}


@pytest.mark.parametrize("body", BODIES)
def test_layers_in_transforms_of_nnx_and_with_random_numbers_or_arrays_of_their_own(body):
  """Variables of the twin belong to the trace that uses them; a cell's unused random numbers are no dropout. A function
  that is decorated once keeps its traces, but not those that look for uses of the parameters."""
  make, call = BODIES[body]
  make = make or (lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.table, self.out = nnx.Embed(TOKENS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)
      self.layer = make(rngs)

    def __call__(self, ids):
      x = self.table(ids)
      return self.out(self.layer(x) if call is None else call(self.layer, x))

  model, train, val = Model(nnx.Rngs(0)), tagging_batch(N, 1), tagging_batch(N_VAL, 2)
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=tagging_loss)
  by_forward_mode = score(ghost.GhostEngine(engine="jvp"), model, train, val, loss_fn=tagging_loss)
  by_example = score(ghost.GhostEngine(engine="perexample"), model, train, val, loss_fn=tagging_loss)
  for found in (result, by_forward_mode):
    assert oracles.relative_error(found.dot, by_example.dot) < (1e-2 if body == "cast" else 1e-5)
  if body not in ("cast", "rnn"):  # each layer runs once, that of a stack too
    found = score(ghost.GhostEngine(schedule="concat"), model, train, val, loss_fn=tagging_loss)
    assert oracles.relative_error(found.dot, by_example.dot) < 1e-5


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_a_transformed_method_of_the_model_leaves_its_other_layers_as_they_are(transform):
  """It gives the model copies of all its Params, which are no Params that the model sets."""

  class Model(Mlp):
    def __call__(self, x):
      return self.second(transform(lambda self, x: jnp.tanh(self.first(x)))(self, x))

  model, (train, val) = randomized(Model), (regression_batch(N, 3), regression_batch(N_VAL, 4))
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=squared_loss)
  expected = sum(expected_dots(model, squared_loss, train, val).values())
  assert oracles.relative_error(result.dot, expected) < 1e-5


def positions(rng, num):
  return {"x": rng.normal(size=(num, 3, WIDTH)).astype(np.float32), "w": np.ones(num, np.float32)}


REPEATED = {
  "a cell over time": (lambda rngs: nnx.RNN(nnx.SimpleCell(WIDTH, WIDTH, rngs=rngs)), lambda layer, x: layer(x)),
  "nnx.vmap": (None, lambda layer, x: nnx.vmap(lambda one, x: one(x), in_axes=(None, 1), out_axes=1)(layer, x)),
  "jax.vmap": (None, lambda layer, x: jax.vmap(lambda x: layer(x), in_axes=1, out_axes=1)(x)),
  "a loop": (None, lambda layer, x: jax.lax.scan(lambda x, _: (jnp.tanh(layer(x)), None), x, None, 3)[0]),
  "a jitted function": (None, lambda layer, x: compiled(layer, compiled(layer, compiled(layer, x)))),
}


@pytest.mark.parametrize("how", REPEATED)
def test_a_layer_in_a_loop_is_called_as_often_as_the_loop_runs(how):
  """One call in the trace, of which each run sees only its own part of the weight gradient."""
  make, call = REPEATED[how]

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.layer = make(rngs) if make else nnx.Linear(WIDTH, WIDTH, rngs=rngs)
      self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
      return self.out(jnp.tanh(call(self.layer, x)).mean(1))

  def loss_fn(model, batch):
    return jnp.square(model(batch["x"]) - 1).sum(-1), batch["w"]

  model, rng = Model(nnx.Rngs(0)), np.random.default_rng(3)
  train, val = positions(rng, 5), positions(rng, 4)
  result, expected = (
    score(ghost.GhostEngine(engine=engine), model, train, val, loss_fn=loss_fn)
    for engine in ("graddotprod", "perexample")
  )
  for label, value in expected.per_param.items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label
  zeros = {label: np.zeros_like(v) for label, v in tiny.by_label(model).items()}
  for arguments, state in ((("two_pass", "adam"), ghost.AdamState(zeros, 0)), (("concat", "sgd"), None)):
    engine = ghost.GhostEngine(schedule=arguments[0], direction=arguments[1])
    with pytest.raises(ValueError, match=r"^layer.* \(3 calls\).*needs the whole gradient"):
      engine.score(model, train, val, loss_fn=loss_fn, state=state)


class ByKeyword(nnx.Module):
  """Layers that are called with their arguments by name, among them one whose own name differs from its base's."""

  def __init__(self, rngs):
    self.table, self.norm = nnx.Embed(TOKENS, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
    self.lora = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
    self.low = nnx.LoRA(WIDTH, 2, WIDTH, base_module=nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
    self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

  def __call__(self, ids):
    return self.out(inputs=self.low(x=self.lora(x=self.norm(x=self.table(inputs=ids)))))


def test_layers_may_be_called_with_arguments_by_name():
  model, train, val = randomized(ByKeyword), tagging_batch(N, 1), tagging_batch(N_VAL, 2)
  result = score(ghost.GhostEngine(), model, train, val, loss_fn=tagging_loss)
  expected = score(ghost.GhostEngine(engine="perexample"), model, train, val, loss_fn=tagging_loss)
  for label, value in expected.per_param.items():
    assert oracles.relative_error(result.per_param[label], value) < 1e-5, label


class Field(nnx.Module):
  """Layers that `call` uses in its own way."""

  def __init__(self, call):
    self.first, self.second = nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(0)), nnx.Linear(5, 1, rngs=nnx.Rngs(1))
    self.call = call

  def potential(self, x):
    return self.second(jnp.tanh(self.first(x))).sum()

  def __call__(self, x):
    return self.call(self, x)


def with_state_doubled(model, x):
  graphdef, state = nnx.split(model.first)
  return nnx.merge(graphdef, jax.tree.map(lambda a: 2 * a, state))(x)


@pytest.mark.parametrize("schedule", ["two_pass", "concat"])
@pytest.mark.parametrize(
  ("call", "said"),
  [
    (lambda model, x: jax.grad(model.potential)(x), "first/kernel.*: scores do not add up"),
    (with_state_doubled, "first/kernel.*: scores do not add up"),
  ],
  ids=["gradient", "state"],
)
def test_a_model_that_differentiates_a_layer_or_sets_all_of_its_state_is_refused(call, said, schedule):
  """The backward pass of a probed layer scores one use of its parameters, of their own values."""
  model, rng, engine = Field(call), np.random.default_rng(3), ghost.GhostEngine(schedule=schedule)
  train, val = (rng.normal(size=(num, WIDTH)).astype(np.float32) for num in (5, 4))
  for _ in range(2):
    with pytest.raises(ValueError, match=said):
      engine.score(model, train, val, loss_fn=lambda model, x: jnp.square(model(x) - 1).sum(-1))


class Weighted(nnx.Module):
  def __init__(self):
    self.weight = nnx.Param(jnp.ones(WIDTH))

  def __call__(self, x):
    return x * jnp.broadcast_to(self.weight[...], x.shape)


def test_a_rule_with_a_wrong_score_is_refused(monkeypatch):
  """Also in place of a right one, with which the engine has a program."""

  class Twice(ghost.Rule):
    def score(self, call, name, direction):
      return 2 * super().score(call, name, direction)

  x, engine = np.random.default_rng(3).normal(size=(5, WIDTH)).astype(np.float32), ghost.GhostEngine()
  run = functools.partial(engine.score, Weighted(), x, x[:4], loss_fn=lambda model, x: jnp.square(model(x) - 1).sum(-1))
  monkeypatch.setitem(rules.RULES, Weighted, ghost.Rule())
  run()
  monkeypatch.setitem(rules.RULES, Weighted, Twice())
  with pytest.raises(ValueError, match=r"^weight: scores do not add up"):
    run()


@pytest.mark.parametrize("rank", [0, 1])
def test_ids_outside_of_a_table_that_the_model_leaves_out_have_no_part_in_a_score(rank):
  """JAX looks up NaN for them."""

  def loss_fn(model, ids):
    return jnp.square(jnp.where(ids[..., None] < TOKENS, model(ids), 0)).sum((1, 2))

  model, ids = nnx.Embed(TOKENS, 8, rngs=nnx.Rngs(0)), np.array([[0, 1, TOKENS], [1, 2, 2], [TOKENS + 5, 0, 0]])
  found = [
    score(ghost.GhostEngine(engine=engine, rank=r), model, ids, ids, loss_fn=loss_fn).dot
    for engine, r in (("graddotprod", rank), ("perexample", 0))
  ]
  assert np.isfinite(found[0]).all() and (rank or oracles.relative_error(*found) < 1e-5)


@pytest.fixture(scope="module")
def regression():
  rng = np.random.default_rng(3)
  train, val = ({"x": rng.normal(size=(num, WIDTH)).astype(np.float32)} for num in (N, N_VAL))
  return randomized(Mlp), train, val


KEPT = {}  # what a function below reads as a global


def scaled_by_global(model, batch):
  return KEPT["scale"][0] * jnp.square(model(batch["x"])).sum(-1)


def scaled_by_none(model, batch):
  return jnp.square(model(batch["x"])).sum(-1)


class Scaled:
  """A loss as an object, and by a method that calls another one inside of a function."""

  def __init__(self, scale):
    self.scale = scale

  def __call__(self, model, batch):
    return self.scale[0] * jnp.square(model(batch["x"])).sum(-1)

  def by_method(self, model, batch):
    return jax.tree.map(lambda x: self(model, {"x": x}), batch["x"])


class OfClass(Scaled):
  """Its scale is an attribute of its class."""

  def __init__(self):
    pass


MODULE = types.ModuleType("settings")
READ = {
  "partial": lambda scale: functools.partial(lambda scale, *args: Scaled(scale)(*args), scale),
  "object": Scaled,
  "method": lambda scale: Scaled(scale).by_method,
  "function": lambda scale: lambda *args, loss=lambda *args: Scaled(scale)(*args): loss(*args),
  "global": lambda scale: KEPT.update(scale=scale) or scaled_by_global,
  "module": lambda scale: vars(MODULE).update(scale=scale) or (lambda *args: Scaled(MODULE.scale)(*args)),
  "class": lambda scale: setattr(OfClass, "scale", scale) or (lambda *args: OfClass()(*args)),
}


@pytest.mark.parametrize("kind", ["list", "array"])
@pytest.mark.parametrize("how", READ)
def test_what_a_loss_function_reads_by_others_may_change_in_place(regression, how, kind):
  model, train, val = regression
  scale = [1.0] if kind == "list" else np.ones(1, np.float32)
  engine, loss_fn, found = ghost.GhostEngine(engine="jvp"), READ[how](scale), []
  for scale[0] in (1.0, 1.0, 3.0):
    loss_fn = loss_fn if how in ("object", "method") else READ[how](scale)  # a function made anew is the same one
    found.append(score(engine, model, train, val, loss_fn=loss_fn).dot)
  assert len(engine._compiled) == 2
  assert oracles.relative_error(found[2], 9 * found[0]) < 1e-5


@dataclasses.dataclass(slots=True)
class Slotted:
  scale: float

  def __call__(self, model, batch):
    return self.scale * scaled_by_none(model, batch)


class Kind(enum.Enum):
  ONE = 1
  TWO = 2


def test_slots_sets_and_dicts_of_any_keys_may_change(regression):
  slotted, numbers, row, named = Slotted(1.0), {1.0}, collections.deque([1.0]), {"one": 1.0}
  of_kind = {Kind.ONE: 1.0, Kind.TWO: 0.0}
  cases = [
    (slotted, lambda: setattr(slotted, "scale", 3.0)),
    (lambda *args: sum(numbers) * scaled_by_none(*args), lambda: numbers.add(2.0)),
    (lambda *args: sum(row) * scaled_by_none(*args), lambda: row.append(2.0)),
    (lambda *args: sum(of_kind.values()) * scaled_by_none(*args), lambda: of_kind.update({Kind.TWO: 2.0})),
    (lambda *args: getattr(slotted, "scale", 1) * scaled_by_none(*args), lambda: setattr(slotted, "scale", 4.0)),
    (lambda *args: named.get("one", 3.0) * scaled_by_none(*args), lambda: named.update(two=named.pop("one"))),
  ]
  for loss_fn, change in cases:
    first, again = (engine_lib._identity(loss_fn)[0] for _ in range(2))
    change()
    assert first == again != engine_lib._identity(loss_fn)[0]
  engine, slotted.scale = ghost.GhostEngine(engine="jvp"), 1.0
  before = score(engine, *regression, loss_fn=slotted).dot
  slotted.scale = 3.0
  assert oracles.relative_error(score(engine, *regression, loss_fn=slotted).dot, 9 * before) < 1e-5


class Wide(Mlp):
  def __call__(self, x):
    return KEPT["scale"][0] * super().__call__(x)


def test_what_a_model_reads_may_change(regression, monkeypatch):
  engine, found = ghost.GhostEngine(engine="jvp"), []
  for scale in (1.0, 1.0, 3.0):
    monkeypatch.setitem(KEPT, "scale", [scale])
    found.append(score(engine, randomized(Wide), *regression[1:], loss_fn=scaled_by_none).dot)
  assert len(engine._compiled) == 2
  assert oracles.relative_error(found[2], 81 * found[0]) < 1e-5


@pytest.mark.parametrize("engine", ["graddotprod", "jvp", "perexample"])
def test_weights_that_depend_on_parameters_are_refused(regression, engine):
  """Each engine would have its own idea of an example's loss."""
  model, train, val = regression

  def loss_fn(model, batch, fixed=lambda x: x):
    losses = jnp.square(model(batch["x"])).sum(-1)
    return losses, fixed(jnp.exp(-losses))

  with pytest.raises(ValueError, match=r"^weights depend on the model's parameters"):
    ghost.GhostEngine(engine=engine).score(model, train, val, loss_fn=loss_fn)
  fixed = functools.partial(loss_fn, fixed=jax.lax.stop_gradient)
  ghost.GhostEngine(engine=engine).score(model, train, val, loss_fn=fixed)


def test_every_id_has_the_row_of_a_table_with_one():
  """As in `nnx.Embed`, which looks nothing up."""

  class OneRow(nnx.Module):
    def __init__(self, rngs):
      self.table, self.out = nnx.Embed(1, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids):
      return self.out(self.table(ids))

  args = (OneRow(nnx.Rngs(0)), tagging_batch(N, 1), tagging_batch(N_VAL, 2))
  found, expected = (
    score(ghost.GhostEngine(engine=engine), *args, loss_fn=tagging_loss) for engine in ("graddotprod", "perexample")
  )
  assert oracles.relative_error(found.per_param["table/embedding"], expected.per_param["table/embedding"]) < 1e-5


@pytest.mark.parametrize("weights", [[1, -1, 2, -2, 0, 0], [[1, -1], [0, 0], [2, -2], [0, 0], [0, 0], [0, 0]]])
def test_weights_that_cancel_are_refused(weights):
  """A mean over a weight of 0 would be infinite; a batch without any weight has scores of 0."""
  weights, model = np.asarray(weights, np.float32), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  batch = {"x": np.arange(18, dtype=np.float32).reshape(6, 3) % 5, "w": weights}

  def loss_fn(model, batch):
    losses = jnp.square(model(batch["x"]))
    return losses if batch["w"].ndim == 2 else losses.sum(-1), batch["w"]

  engine, val = ghost.GhostEngine(), {**batch, "w": np.abs(weights)}
  with pytest.raises(ValueError, match=r"weights of train_batch add up to 0.0: a mean loss needs a sum above 0"):
    score(engine, model, batch, val, loss_fn=loss_fn)
  assert not score(engine, model, {**batch, "w": 0 * weights}, val, loss_fn=loss_fn).dot.any()


class GhostNames(nnx.Module):
  def __init__(self):
    self.ghost_scale = nnx.Param(jnp.arange(1.0, 4))

  def __call__(self, x):
    return x * self.ghost_scale[None]


def test_parameters_may_have_names_like_those_of_probes(monkeypatch):
  monkeypatch.setitem(rules.RULES, GhostNames, ghost.Rule())
  x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
  found = [
    score(ghost.GhostEngine(engine=engine), GhostNames(), x, x[:2], loss_fn=lambda m, x: jnp.square(m(x)).sum(-1)).dot
    for engine in ("graddotprod", "perexample")
  ]
  assert oracles.relative_error(*found) < 1e-5
