"""Direction path: an example's credit is its part of what the batch changed of the step, D(g) - D(0).

Against optax with and without the gradient, against the integral that defines it, and against one gradient a
document.
"""

import dataclasses

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import test_ghost_directions as tagging
import tiny
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config, ghost, optimizers
from maxghost.optimizers.sgd import MomentumSgd

RATE, KAPPA, STEPS = 0.3, 0.7, 3
RULE = optimizers.AdamW(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1, mu_dtype="float64")
WIDE = {"dtype": "float64", "weight_dtype": "float64"}
COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


def secant(G, g, m, v, *, count, kappa, b1, b2, eps):
  """(P_t G, D(0)) by the definition: the difference of two steps over the gradient; 0 where that is 0."""
  t = count + 1

  def moved(g):
    return (b1 * m + (1 - b1) * g) / (1 - b1**t) / (np.sqrt((b2 * v + (1 - b2) * g**2) / (1 - b2**t)) + eps)

  return (moved(kappa * g) - moved(0 * g)) / np.where(g == 0, 1, kappa * g) * G, moved(0 * g)


class History:
  """AdamW's state after some steps of random gradients of many sizes, this step's gradient, and the step by optax."""

  def __init__(self, dtype, steps: int = STEPS):
    rng = np.random.default_rng(3)
    size = lambda: 10.0 ** rng.uniform(-4, 1, (5, 7))  # noqa: E731
    draw = lambda: {"w": jnp.asarray(rng.normal(size=(5, 7)) * size(), dtype)}  # noqa: E731
    self.params, tx = draw(), RULE.transformation(optax.constant_schedule(RATE))
    opt_state = tx.init(self.params)
    for _ in range(steps):
      _, opt_state = tx.update(draw(), opt_state, self.params)
    self.g, self.G = draw()["w"], draw()["w"]
    self.rule = RULE.path()
    state = self.rule.read(opt_state, clip_factor=KAPPA)
    self.arrays, self.count = state.of("w"), int(state.count)
    self.response = self.rule.response(optimizers.Parameter("w"), self.g, self.arrays, self.rule.scalars(steps, KAPPA))
    step = lambda g: tx.update({"w": g}, opt_state, self.params)[0]["w"]  # noqa: E731
    self.step, self.without = step(KAPPA * self.g), step(0 * self.g)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("steps", [0, STEPS])
def test_credits_add_up_to_what_the_batch_changed_of_the_step(dtype, tolerance, steps):
  with jax.enable_x64(dtype == "float64"):
    made = History(dtype, steps)
    credit = RATE * KAPPA * jnp.vdot(made.response.transpose(made.G), made.g)
    changed = -jnp.vdot(made.G, made.step - made.without)
    columns = made.rule.column_arrays(optimizers.Parameter("w"), made.params["w"], made.g, made.arrays, made.response)
    scales = made.rule.column_scales(RATE, KAPPA)
    rest = sum(scales[name] * jnp.vdot(made.G, array) for name, array in columns.items())
    size = float(jnp.abs(made.G * made.step).sum() + jnp.abs(made.G * made.without).sum())
    frozen = RULE.response(optimizers.Parameter("w"), made.g, made.arrays, made.rule.scalars(steps, KAPPA)).factor
    with_frozen = RATE * KAPPA * float((frozen * made.G * made.g).sum())
    expected = float(-jnp.vdot(made.G, made.without))
  assert float(credit) == pytest.approx(float(changed), abs=tolerance * size)
  assert float(rest) == pytest.approx(expected, abs=tolerance * size)
  if steps:  # with the second moment held fixed the sum is another
    assert abs(with_frozen - float(changed)) > 0.01 * size
  else:
    np.testing.assert_allclose(made.response.factor, frozen, rtol=1e-5)


def narrow(b1: float) -> optimizers.AdamW:
  return optimizers.AdamW(b1=b1, b2=0.9, eps=1e-6, weight_decay=0.1, mu_dtype="bfloat16")


@pytest.mark.parametrize("rule", [narrow(0.8), narrow(0.8).path(), MomentumSgd(0.7)], ids=["own", "path", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_describe_the_step_also_from_narrow_moments(rule, dtype):
  """optax alone would round the products of the moments in bfloat16, to 1 % of the step."""
  rng = np.random.default_rng(3)
  draw = lambda: {"w": jnp.asarray(rng.normal(size=(50, 7)), dtype)}  # noqa: E731
  tx, params = rule.transformation(optax.constant_schedule(RATE)), draw()
  before = tx.init(params)
  for _ in range(3):
    last, before = tx.update(draw(), before, params)
  g, parameter, state = draw()["w"], optimizers.Parameter("w"), rule.read(before)
  kept = state.of("w")
  response = rule.response(parameter, g, kept, rule.scalars(state.count, 1.0))
  moved, after = tx.update({"w": g}, before, params)
  columns, scales = rule.column_arrays(parameter, params["w"], g, kept, response), rule.column_scales(RATE, 1.0)
  wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
  expected = -RATE * wide(response.whole(g.astype("float32"))) - sum(scales[n] * wide(x) for n, x in columns.items())
  np.testing.assert_allclose(moved["w"], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
  assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(before)]
  recalled = rule.last_update(params["w"] * 0, kept, dataclasses.replace(state, last_rate=RATE))
  assert recalled.dtype == last["w"].dtype == np.float32


def test_it_is_the_integral_of_the_steps_derivative():
  """Gauss-Legendre nodes over x in [0, 1] of D'(x g), entry by entry, by JAX's derivative."""
  with jax.enable_x64(True):
    made = History("float64")
    m, v = made.arrays["first_moment"], made.arrays["second_moment"]

    def moved(g):
      return (0.8 * m + 0.2 * g) / (1 - 0.8**4) / (jnp.sqrt((0.9 * v + 0.1 * g**2) / (1 - 0.9**4)) + 1e-6)

    nodes, weights = np.polynomial.legendre.leggauss(400)
    slopes = [
      w / 2 * jax.jvp(moved, ((x + 1) / 2 * KAPPA * made.g,), (jnp.ones_like(m),))[1]
      for x, w in zip(nodes, weights, strict=True)
    ]
    assert oracles.relative_error(made.response.factor, sum(slopes)) < 1e-6


def test_entries_without_a_gradient_or_a_history_have_finite_credit():
  """Nor does the last one, whose square is 0 in float32, divide by a root of 0."""
  zero = jnp.zeros(4)
  state = {"first_moment": jnp.array([0, 0.5, 0, 1e-20]), "second_moment": zero.at[1].set(0.2)}
  rule, g = RULE.path(), jnp.array([0.0, 0.0, 2.0, 1e-20])
  response = rule.response(optimizers.Parameter("w"), g, state, rule.scalars(4, 1.0))
  frozen = RULE.response(optimizers.Parameter("w"), g, state, rule.scalars(4, 1.0))
  np.testing.assert_allclose(response.factor, frozen.factor, rtol=1e-6)


def test_the_library_engine_against_one_gradient_per_example():
  model = foreign.randomized(tagging.Tagger)
  oracle = foreign.Oracle(model, tagging.tagging_loss, tagging.TRAIN, *tagging.VALS)
  v = foreign.moments_like(oracle)
  m = {k: (np.sqrt(x) * np.cos(np.arange(x.size)).reshape(x.shape)).astype(np.float32) for k, x in v.items()}
  arrays = [{k: jnp.asarray(x) for k, x in tree.items()} for tree in (v, m)]
  state = ghost.AdamState(arrays[0], tagging.COUNT, tagging.KAPPA, arrays[1])
  batches = tagging.TRAIN, tagging.VALS
  result = foreign.score(
    ghost.GhostEngine(direction="path"), model, *batches, loss_fn=tagging.tagging_loss, state=state
  )
  constants = {"count": tagging.COUNT, "kappa": tagging.KAPPA, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
  for k, G in enumerate(oracle.G):
    u = {label: secant(G[label], oracle.g[label], m[label], v[label], **constants)[0] for label in G}
    expected = oracle.dots(u)
    foreign.assert_scores({label: x[k] for label, x in result.per_param.items()}, expected, 1e-5)
    frozen = foreign.total(oracle.dots(oracle.adam(v, count=tagging.COUNT, kappa=tagging.KAPPA, index=k)))
    assert oracles.relative_error(frozen, foreign.total(expected)) > 0.1
  with pytest.raises(ValueError, match=r"direction 'path' needs fitting first_moment in state=: AdamState.from_optax"):
    ghost.GhostEngine(direction="path").score(
      model, *batches, loss_fn=tagging.tagging_loss, state=ghost.AdamState(arrays[0], 0)
    )


@pytest.fixture(scope="module")
def gradients():
  """One gradient per document of a batch, and the batch gradient, at given parameters."""
  with jax.enable_x64(True):
    examples = oracles.ExampleGradients(tiny.make_model(tiny.make_config(remat_policy="none", **WIDE)))

  def at(params, rows):
    with jax.enable_x64(True), tiny.cheap_compilation():
      found = examples(rows, params)
    return found, oracles.batch_gradient(found, rows)

  return at


def second_step(run, gradients):
  """Two steps; of the second: (before, outputs, after), its documents, their rows, and the gradients there."""
  run.step(TRAIN[0])
  before = run.snapshot()
  out, after = run.step(TRAIN[1]), run.snapshot()
  documents = tiny.documents(TRAIN[1])
  rows = tiny.stack_rows([tiny.alone(TRAIN[1], *document) for document in documents])
  at = before.params
  return before, out, after, documents, rows, gradients(at, rows), gradients(at, VALIDATION)


def assert_contributions(out, documents, rows, dots_N, tolerance: float):
  """Of the N documents at (row, segment), from their products <sum of gradients, u>; all other places are 0."""
  scale = float(out["clip_factor"]) * float(out["learning_rate"]) / oracles.token_counts(rows).sum()
  expected = np.zeros(out["contribution_BSK"].shape[:2])
  for (row, segment), dot in zip(documents, dots_N, strict=True):
    expected[row, segment - 1] = scale * dot
  assert oracles.relative_error(out["contribution_BSK"][..., 0], expected) < tolerance


@pytest.mark.parametrize(
  "changes",
  [
    {"ghost_exclude": ("*norm*",)},
    {"ghost_schedule": "reverse_scan", "gradient_clipping_threshold": 0.0, "logits_via_embedding": False},
  ],
  ids=["two_pass", "reverse_scan"],
)
def test_the_train_step_scores_documents_alone_and_its_account_closes(changes, gradients):
  """float64. The second step has a history; the clipping factor inside the moments is that of the step before."""
  run = Run(ghost_direction="path", remat_policy="full", **WIDE, **changes)
  start = run.snapshot()
  before, out, after, documents, rows, (g_N, g), (_, G) = second_step(run, gradients)
  cfg, kappa, lr = run.cfg.optimizer, float(out["clip_factor"]), float(out["learning_rate"])
  constants = {"count": 1, "kappa": before.clip_factor, "b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
  scored = [k for k in g if not ("ghost_exclude" in changes and "norm" in k)]
  u = {k: secant(G[k], g[k], before.first[k], before.second[k], **constants)[0] for k in scored}
  dots_N = sum(oracles.dots({k: g_N[k] for k in scored}, u).values())
  assert_contributions(out, documents, rows, dots_N, 1e-7)  # m is kept in float32
  drop = -sum(float((G[k] * (after.params[k] - v)).sum()) for k, v in before.params.items())
  columns = [float(out[name][0]) for name in COLUMNS]
  size = sum(map(abs, columns))
  assert sum(columns) == pytest.approx(drop, abs=1e-7 * size)
  resting = {k: secant(G[k], g[k], before.first[k], before.second[k], **constants)[1] for k in G}
  assert columns[1] == pytest.approx(lr * sum(float((G[k] * x).sum()) for k, x in resting.items()), abs=1e-7 * size)
  last = -sum(float((G[k] * (v - start.params[k])).sum()) for k, v in before.params.items())
  assert out["prev_predicted"][0] == pytest.approx(last, abs=1e-7 * abs(last))  # from the moments alone
  assert out["check_rel_err"][0] < 1e-10
  if kappa == 1:
    assert abs(columns[-1]) < 1e-10 * size


def test_sgd_with_momentum_credits_documents_and_names_what_momentum_moves(gradients):
  """float64, constant learning rate: the second step moves by the clipped gradient and 0.7 times the first step."""
  keys = {"opt_type": "sgd", "sgd_momentum": 0.7, "ghost_direction": "path", "lr_schedule_type": "constant"}
  run = Run(remat_policy="full", **WIDE, **keys)
  start = run.snapshot()
  before, out, after, documents, rows, (g_N, g), (_, G) = second_step(run, gradients)
  scale, first = float(out["clip_factor"]) * float(out["learning_rate"]), {}
  for label, value in before.params.items():
    first[label] = value - start.params[label]
    moved = after.params[label] - value
    np.testing.assert_allclose(moved, 0.7 * first[label] - scale * g[label], rtol=1e-9, atol=1e-14)
  shares = {document: i for i, document in enumerate(documents)}
  expected = np.zeros(out["contribution_BSK"].shape[:2])
  for (row, segment), i in shares.items():
    dot = sum(float((g_N[label][i] * G[label]).sum()) for label in G)
    expected[row, segment - 1] = scale * dot / oracles.token_counts(rows).sum()
  assert oracles.relative_error(out["contribution_BSK"][..., 0], expected) < 1e-11
  last = -sum(float((G[label] * x).sum()) for label, x in first.items())
  assert out["momentum"][0] == pytest.approx(0.7 * last, rel=1e-11)
  assert out["prev_predicted"][0] == pytest.approx(last, rel=1e-11)
  assert out["weight_decay"][0] == 0 and out["check_rel_err"][0] < 1e-10


def test_an_optimizer_without_a_path_is_refused_and_sgd_is_its_own():
  with pytest.raises(config.ConfigError, match=r"ghost_direction=pth .*did you mean 'path'"):
    config.load(None, "ghost_direction=pth")
  cfg = config.load(None, "opt_type=sgd", "ghost_direction=path")
  assert optimizers.direction_rule(cfg.optimizer, "path") == optimizers.Sgd()
  assert RULE.path().direction == "path" and RULE.path().b1 == RULE.b1
