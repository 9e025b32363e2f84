"""Schedules reverse_scan and concat against per-example gradients: the scores of two_pass by other ways.

n examples, T positions, K validation sets, L layers, V validation rows.
"""

import dataclasses

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import ghost
from maxghost.ghost import low_rank

LAYERS, RANK = 3, 5
TRAIN = tiny.make_batch(tiny.PACKED, seed=41)
VALS = [tiny.make_batch(tiny.VALIDATION, seed=42), tiny.make_batch(((5, 7), (13,), (4,)), seed=43)]
COUNT, KAPPA = 6, 0.8
FLOAT64 = {"dtype": "float64", "weight_dtype": "float64"}
CASES = {  # schedule, direction, rank, changes of the model
  "reverse_scan-sgd": ("reverse_scan", "sgd", 0, {"remat_policy": "full"}),
  "reverse_scan-rank-tied": ("reverse_scan", "sgd", RANK, {"logits_via_embedding": True, "remat_policy": "minimal"}),
  "concat-adam-tied": ("concat", "adam", 0, {"logits_via_embedding": True, "scan_layers": False}),
}
SLOW_CASES = {
  "reverse_scan-adam-rank": ("reverse_scan", "adam", RANK, {"remat_policy": "none"}),
  "reverse_scan-adam": ("reverse_scan", "adam", 0, {"remat_policy": "minimal"}),
  # test_tiled_head has it with a tiled head
  "reverse_scan-adam-tied": ("reverse_scan", "adam", 0, {"logits_via_embedding": True, "remat_policy": "none"}),
  "reverse_scan-sgd-tied": ("reverse_scan", "sgd", 0, {"logits_via_embedding": True, "remat_policy": "none"}),
  "concat-sgd": ("concat", "sgd", 0, {"remat_policy": "full"}),
  "concat-sgd-tied": ("concat", "sgd", 0, {"logits_via_embedding": True, "scan_layers": False, "remat_policy": "none"}),
  "concat-adam": ("concat", "adam", 0, {"remat_policy": "minimal"}),
}


class Oracle:
  """Gradients of the rows of all batches, and second moments, in float64."""

  def __init__(self, tied: bool):
    cfg = tiny.make_config(logits_via_embedding=tied, remat_policy="none", **FLOAT64)
    rows = [TRAIN, *VALS]
    with jax.enable_x64(True), tiny.cheap_compilation():
      gradients = oracles.ExampleGradients(tiny.make_model(cfg))
      losses, flat = gradients.with_losses({name: np.concatenate([r[name] for r in rows]) for name in TRAIN})
    ends = np.cumsum([len(r["inputs"]) for r in rows])[:-1]
    split = {label: np.split(g, ends) for label, g in flat.items()}
    self.gradients = {label: parts[0] for label, parts in split.items()}
    self.g = oracles.batch_gradient(self.gradients, TRAIN)
    self.G = [oracles.batch_gradient({k: parts[1 + i] for k, parts in split.items()}, VALS[i]) for i in range(2)]
    self.val_loss = [v.sum() / oracles.token_counts(r).sum() for v, r in zip(np.split(losses, ends), rows, strict=True)]
    rng = np.random.default_rng(5)
    self.moments = {label: 1e-3 * rng.random(g.shape) ** 4 + 1e-7 for label, g in self.g.items()}

  def direction(self, kind: str, k: int, rank: int) -> dict:
    if kind != "adam":
      return {label: low_rank_product(label, v) for label, v in self.G[k].items()} if rank else self.G[k]
    ones = {label: np.ones_like(v) for label, v in self.g.items()}
    constants = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
    P = oracles.adam_direction(ones, self.g, self.moments, count=COUNT, kappa=KAPPA, **constants)
    u = {label: P[label] * v for label, v in self.G[k].items()}
    return {label: low_rank_product(label, v, self.g[label], P[label]) for label, v in u.items()} if rank else u


# The parameters' matrix views [I, O] that rank 5 makes cheaper, by the number of leading axes of I.
GAINING = {"query": 1, "out": 2, "wi_0": 1, "wi_1": 1, "wo": 1, "logits_dense": 1, "token_embedder": 1}


def low_rank_product(label: str, u, gradient=None, weighting=None) -> np.ndarray:
  """u, or left @ right of its matrix view, layer by layer. The factors themselves are tested in *_directions_rank.

  gradient, weighting: of the batch, and the elementwise response, where a direction is formed in the backward pass.
  """
  rows = GAINING.get(label.split("/")[-2])
  if rows is None:
    return u
  shape = u.shape[int("/layers/" in label) :]
  view = lambda x: x.reshape(-1, int(np.prod(shape[:rows])), int(np.prod(shape[rows:])))  # noqa: E731
  if gradient is None:
    left, right, _ = foreign.factor(view(u), RANK, label)
    return (left @ right).reshape(u.shape)
  with jax.enable_x64(True):
    weights = [tuple(map(np.asarray, low_rank.rank_one_root(jnp.asarray(1 / P_IO**2)))) for P_IO in view(weighting)]
  factors = [foreign.factor_for(*each, RANK, label) for each in zip(view(gradient), weights, view(u), strict=True)]
  return np.stack([left @ right for left, right, _ in factors]).reshape(u.shape)


@pytest.fixture(scope="module")
def oracle_of():
  made = {}

  def get(tied: bool) -> Oracle:
    if tied not in made:
      made[tied] = Oracle(tied)
    return made[tied]

  return get


def assert_case(schedule, kind, rank, changes, oracle_of):
  cfg = tiny.make_config(**FLOAT64, **changes)
  oracle = oracle_of(cfg.model.logits_via_embedding)
  vals = VALS[:1] if schedule == "concat" else VALS
  with jax.enable_x64(True), tiny.cheap_compilation():
    model = tiny.make_model(cfg)
    adam = None
    if kind == "adam":
      moments = {
        label: jnp.asarray(tiny.stacked_value(oracle.moments, tuple(label.split("/"))))
        for label in tiny.by_label(model)
      }
      adam = ghost.AdamState(moments, COUNT, KAPPA)
    engine = ghost.GhostEngine(cfg, schedule=schedule, direction=kind, rank=rank, per_position=True)
    result = jax.tree.map(np.asarray, engine.score(model, TRAIN, vals, state=adam))
  tokens = oracles.token_counts(TRAIN)
  for k in range(len(vals)):
    expected = oracles.dots(oracle.gradients, oracle.direction(kind, k, rank), LAYERS)
    expected = {label: v / np.maximum(tokens, 1) for label, v in expected.items()}
    scores = {label: np.take(v, k, axis=-2) for label, v in result.per_param.items()}
    foreign.assert_scores(tiny.stack_layers(scores, LAYERS), expected, 1e-9 if rank else 1e-12)
    assert oracles.relative_error(result.dot[k], foreign.total(expected)) < (1e-9 if rank else 1e-12)
  assert oracles.relative_error(result.per_position.sum(-1), result.additive) < 1e-12
  np.testing.assert_allclose(result.val_loss, oracle.val_loss[1 : 1 + len(vals)], rtol=1e-12)
  assert result.loss == pytest.approx(oracle.val_loss[0], rel=1e-12)
  gradients = tiny.stack_layers(tiny.by_label(result.grads), LAYERS)
  for label, g in oracle.g.items():
    assert oracles.relative_error(gradients[label], g) < 1e-12, label
  if rank:
    absent = {"logits_dense"} if cfg.model.logits_via_embedding else set()
    assert {label.split("/")[-2] for label in result.captured} == GAINING.keys() - absent


@pytest.mark.parametrize("name", CASES)
def test_scores_gradient_and_losses(name, oracle_of):
  assert_case(*CASES[name], oracle_of)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_scores_gradient_and_losses_of_the_other_combinations(name, oracle_of):
  assert_case(*SLOW_CASES[name], oracle_of)


N, N_VAL, T, TOKENS = 6, 4, 7, 23


class Block(nnx.Module):
  """A layer that wants a third argument and its index: [n, T, 10] -> [n, T, 10]."""

  def __init__(self, rngs):
    self.norm, self.up = nnx.LayerNorm(10, rngs=rngs), nnx.Linear(10, 14, rngs=rngs)
    self.down = nnx.Linear(14, 10, rngs=rngs)

  def __call__(self, x, mask_nT, index):
    h = jnp.tanh(self.up(jnp.cumsum(self.norm(x) * mask_nT[..., None], 1)))
    return x + self.down(h) / (1.0 + index)


class Tower(nnx.Module):
  """Somebody else's model: a table (used again at the output), stacked blocks, an output scale."""

  def __init__(self, rngs):
    self.table = nnx.Embed(TOKENS, 10, rngs=rngs)
    self.trunk = nnx.Module()
    self.trunk.blocks = nnx.vmap(Block)(rngs.split(3))
    self.norm = nnx.RMSNorm(10, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class TowerLoss(ghost.StagedLoss):
  """A StagedLoss written outside the project."""

  layers_path: tuple = ("trunk", "blocks")

  def __call__(self, model, batch):
    graphdef, state = nnx.split(model.trunk.blocks)

    def body(x, scanned):
      state, index = scanned
      return nnx.merge(graphdef, state)(x, *self.layer_inputs(batch), self.layer_key(index)), None

    x, _ = jax.lax.scan(body, self.embed(model, batch), (state, jnp.arange(3)))
    return self.head(model, x, batch)

  def embed(self, model, batch):
    return model.table(batch["x"])

  def layer_inputs(self, batch):
    return (batch["mask"],)

  def layer_key(self, index):
    return index

  def head(self, model, x, batch):
    logits = model.table.attend(model.norm(x))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)[..., 0]
    return losses, batch["w"]


def tower_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  x, y = rng.integers(0, TOKENS, (2, num, T))
  mask, weights = rng.random((2, num, T)).astype(np.float32)
  return {"x": x, "y": y, "mask": mask, "w": weights * (weights < 0.8)}


@pytest.fixture(scope="module")
def tower():
  model = foreign.randomized(Tower)
  train, val = tower_batch(N, 1), tower_batch(N_VAL, 2)
  return model, train, val, foreign.Oracle(model, TowerLoss(), train, val)


@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan", "concat"])
def test_a_foreign_model_with_stacked_layers(tower, schedule):
  model, train, val, oracle = tower
  result = foreign.score(ghost.GhostEngine(schedule=schedule), model, train, val, loss_fn=TowerLoss())
  expected = oracle.dots(oracle.G[0])
  for label, value in result.per_param.items():
    value = value.sum(0) if value.ndim == 2 else value
    assert oracles.relative_error(value, expected[label]) < 1e-5, label
  assert result.per_param.keys() == expected.keys()
  assert result.per_param["trunk/blocks/up/kernel"].shape == (3, N)
  for label, g in tiny.by_label(result.grads).items():
    assert oracles.relative_error(g, oracle.g[label]) < 1e-5, label


class SkipLoss(TowerLoss):
  """With the input of the first layer in the head, for training and validation rows."""

  passes_embedded = True

  def __call__(self, model, batch):
    graphdef, state = nnx.split(model.trunk.blocks)
    embedded = x = self.embed(model, batch)
    for i in range(3):
      layer = nnx.merge(graphdef, jax.tree.map(lambda v, i=i: v[i], state))
      x = layer(x, *self.layer_inputs(batch), self.layer_key(i))
    return self.head(model, self.joined(embedded, x), batch)

  def joined(self, embedded, x):
    return x + 3 * embedded


def test_the_head_of_validation_rows_may_read_the_input_of_the_first_layer(tower):
  model, train, val, _ = tower
  engines = [ghost.GhostEngine(schedule=schedule) for schedule in ("two_pass", "reverse_scan")]
  expected, found = (foreign.score(engine, model, train, val, loss_fn=SkipLoss()).per_param for engine in engines)
  for label, value in found.items():
    assert oracles.relative_error(value, expected[label]) < 1e-5, label


def test_reverse_scan_says_what_it_needs(tower):
  model, train, val, _ = tower

  def plain_loss(model, batch):
    return TowerLoss()(model, batch)

  engine = ghost.GhostEngine(schedule="reverse_scan")
  with pytest.raises(ValueError, match=r"needs a StagedLoss \(embed, layers, head\); use two_pass"):
    engine.score(model, train, val, loss_fn=plain_loss)
  with pytest.raises(ValueError, match=r"no stacked layers at trunk/floors"):
    engine.score(model, train, val, loss_fn=TowerLoss(("trunk", "floors")))
  unrolled = tiny.make_config(scan_layers=False)
  with pytest.raises(ValueError, match=r"no stacked layers at decoder/layers; set scan_layers=true"):
    ghost.GhostEngine(schedule="reverse_scan").score(tiny.make_model(unrolled), TRAIN, VALS[0])


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"schedule": "reverse-scan"}, "schedule=reverse-scan.*did you mean 'reverse_scan'"),
    (
      {"schedule": "concat", "rank": 2},
      "rank=2 .* schedule=concat, which forms the direction inside each layer; use rank=0",
    ),
    (
      {"schedule": "concat", "direction": "second_order"},
      "second_order .* schedule=concat.*or schedule=two_pass",
    ),
    (
      {"schedule": "reverse_scan", "direction": "second_order"},
      "second_order .* schedule=reverse_scan.*two_pass",
    ),
    ({"schedule": "concat", "engine": "jvp"}, "schedule=concat does not go with engine=jvp, .*use schedule=two_pass"),
  ],
)
def test_settings_that_contradict_each_other(settings, message):
  with pytest.raises(ValueError, match=message):
    ghost.GhostEngine(**settings)


def test_concat_scores_one_validation_set():
  with pytest.raises(ValueError, match=r"2 sets .* schedule=concat, .*or schedule=two_pass or schedule=reverse_scan"):
    ghost.GhostEngine(schedule="concat").score(None, TRAIN, VALS)


@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan"])
def test_excluded_layers_are_trained_on_the_training_rows_alone(tower, schedule):
  model, train, val, oracle = tower
  engine = ghost.GhostEngine(schedule=schedule, exclude=("*/up/*", "table/*"))
  result = foreign.score(engine, model, train, val, loss_fn=TowerLoss())
  assert len(result.per_param) == 5
  for label, g in tiny.by_label(result.grads).items():
    assert oracles.relative_error(g, oracle.g[label]) < 1e-5, label


def test_concat_refuses_layers_it_cannot_keep_apart(tower):
  """An unscored layer sees one batch of training and validation rows: its gradient would hold both."""
  model, train, val, _ = tower
  with pytest.raises(ValueError, match=r"concat cannot leave table/embedding unscored.*two_pass or reverse_scan"):
    ghost.GhostEngine(schedule="concat", exclude=("table/*",)).score(model, train, val, loss_fn=TowerLoss())


class Dense(nnx.Module):
  """[n, 5] -> [n, 3], for formulas by hand."""

  def __init__(self, rngs):
    self.first, self.second = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def squared_loss(model, batch):
  return jnp.square(model(batch["x"]) - batch["y"]).sum(-1), jnp.ones(len(batch["x"]))


def ghostsuite_log(values: dict, train: dict, val: dict) -> np.ndarray:
  """[n]: what GhostSuite's GradDotProd logs, in numpy: one backward pass of the mean loss over train | validation, then
  for every layer the Gram form (x_i . x_v) (b_i . b_v), and b_i . b_v for a bias."""
  x, y = (np.concatenate([train[name], val[name]]).astype(np.float64) for name in ("x", "y"))
  n = len(train["x"])
  hidden = np.tanh(x @ values["first/kernel"] + values["first/bias"])
  b_second = 2 * (hidden @ values["second/kernel"] + values["second/bias"] - y) / len(x)
  b_first = b_second @ values["second/kernel"].T * (1 - hidden**2)
  logged = np.zeros(n)
  for inputs, b in ((x, b_first), (hidden, b_second)):
    grads = b[:n] @ b[n:].T
    logged += ((inputs[:n] @ inputs[n:].T + 1) * grads).sum(1)
  return logged


@pytest.mark.parametrize(("schedule", "num_val"), [("concat", 3), ("two_pass", 1)])
def test_ghostsuites_log_is_the_dot_product_by_v_over_n_plus_v_squared(schedule, num_val):
  model = foreign.randomized(Dense)
  rng = np.random.default_rng(num_val)
  train, val = (
    {"x": rng.normal(size=(num, 5)).astype(np.float32), "y": rng.normal(size=(num, 3)).astype(np.float32)}
    for num in (N, num_val)
  )
  result = foreign.score(ghost.GhostEngine(schedule=schedule), model, train, val, loss_fn=squared_loss)
  logged = ghostsuite_log(tiny.by_label(model), train, val)
  assert oracles.relative_error(result.dot * num_val / (N + num_val) ** 2, logged) < 1e-5


def loss_of_large_targets(model, batch):
  size_n = jnp.square(batch["y"]).sum(-1)
  return squared_loss(model, batch)[0], size_n > size_n.mean()


def test_weights_that_read_all_rows_read_those_of_their_own_batch():
  """Schedule concat has one batch of both kinds of rows."""
  model, rng, results = foreign.randomized(Dense), np.random.default_rng(0), {}
  train, val = ({"x": rng.normal(size=(N, 5)), "y": scale * rng.normal(size=(N, 3))} for scale in (1, 5))
  for schedule in ("two_pass", "concat"):
    engine = ghost.GhostEngine(schedule=schedule)
    results[schedule] = foreign.score(engine, model, train, val, loss_fn=loss_of_large_targets)
  for name in ("dot", "share", "loss", "val_loss"):
    assert oracles.relative_error(*(getattr(result, name) for result in results.values())) < 1e-5, name
