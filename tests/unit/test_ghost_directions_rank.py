"""Low-rank directions: the factors themselves, and scores along them.

I, O sides of a matrix, r rank, n examples, K validation sets.
"""

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from foreign import factor, factor_for

from maxghost import ghost
from maxghost.ghost import low_rank

I, O = 37, 23  # noqa: E741


def matrix(singular_values, seed: int = 0) -> np.ndarray:
  """[I, O] in float64 with these leading singular values."""
  rng = np.random.default_rng(seed)
  left, right = (np.linalg.qr(rng.normal(size=(side, len(singular_values))))[0] for side in (I, O))
  return (left * np.asarray(singular_values)) @ right.T


SPECTRA = {
  "flat": np.ones(O),
  "slow": 1 / (1 + np.arange(O)),
  "fast": 2.0 ** -np.arange(O),
}


def rotated(u, number: int) -> np.ndarray:
  """[number, I, O]: u times random orthogonal matrices, for each of which a Gaussian Omega is a new draw."""
  rng = np.random.default_rng(9)
  return np.stack([u @ np.linalg.qr(rng.normal(size=(O, O)))[0] for _ in range(number)])


@pytest.mark.parametrize("rank", [3, 8])
def test_the_error_keeps_to_its_bound(rank):
  """Mean over 10 draws against the bound of the docstring for every k <= r - 2, and against the best rank-r error."""
  u = np.stack([rotated(matrix(values), 10) for values in SPECTRA.values()])
  left, right, _ = factor(u, rank)
  errors = np.linalg.norm(u - left @ right, axis=(-2, -1))
  for values, draws in zip(SPECTRA.values(), errors, strict=True):
    tail = [np.sqrt((values[k:] ** 2).sum()) for k in range(O)]
    assert draws.mean() <= min(np.sqrt(1 + k / (rank - k - 1)) * tail[k] for k in range(rank - 1))
    assert draws.min() >= tail[rank] * (1 - 1e-12)


def test_float32_comes_as_close_as_float64():
  """Up to 0.4 percent of u: a basis that loses more columns to rounding gains nothing from a higher rank."""
  u = np.stack([matrix(values) for values in SPECTRA.values()])
  for wide in (False, True):
    left, right, captured = factor(u, 9, wide=wide)
    for i, values in enumerate(SPECTRA.values()):
      size, best = np.linalg.norm(values), np.sqrt((values[9:] ** 2).sum())
      error = np.linalg.norm(u[i] - left[i].astype(np.float64) @ right[i])
      assert error < 1.1 * best + 4e-3 * size
      assert captured[i] == pytest.approx(1 - (error / size) ** 2, abs=1e-5)


def test_the_label_alone_seeds_the_draw():
  u = matrix(SPECTRA["slow"])
  bases = [factor(u, 5, label)[0] for label in ("layers/a", "layers/b", "layers/a")]
  np.testing.assert_array_equal(bases[0], bases[2])
  assert np.abs(bases[0] - bases[1]).max() > 0.01


@pytest.mark.parametrize(
  ("rank", "wide"),
  [
    (1, True), (5, False), (O, True), pytest.param(1, False, marks=pytest.mark.slow),
    pytest.param(5, True, marks=pytest.mark.slow), pytest.param(O, False, marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_captured_energy_is_exact_and_the_basis_orthonormal(rank, wide):
  tolerance = 1e-12 if wide else 1e-5
  u = matrix(SPECTRA["slow"], seed=1) * 1e-3
  left, right, captured = factor(u, rank, wide=wide)
  assert left.shape == (I, rank)
  assert right.shape == (rank, O)
  np.testing.assert_allclose(left.T @ left, np.eye(rank), atol=tolerance)
  product = left.astype(np.float64) @ right
  assert captured == pytest.approx((product**2).sum() / (u**2).sum(), rel=10 * tolerance)
  # The factors are the projection of u: nothing of u is left along the basis.
  np.testing.assert_allclose(left.T @ (u - product), 0, atol=tolerance * np.linalg.norm(u))


def test_a_matrix_of_low_rank_is_reproduced_at_any_scale():
  """Rank 4 under rank 9: columns without support are zero, nothing is divided by zero, no square leaves float32."""
  u = matrix([3, 1, 0.2, 0.05], seed=2)
  scales = np.asarray([1e-30, 1.0, 1e25])
  left, right, captured = factor(scales[:, None, None] * u, 9, wide=False)
  for i, scale in enumerate(scales):
    np.testing.assert_allclose(left[i].astype(np.float64) @ right[i] / scale, u, atol=1e-5)
    assert captured[i] == pytest.approx(1, abs=1e-5)
    lengths = np.linalg.norm(left[i], axis=0)
    assert ((lengths == 0) | (np.abs(lengths - 1) < 1e-3)).all()
    assert (lengths > 0.9).sum() >= 4


def test_singular_values_far_apart_keep_the_basis_orthonormal():
  """1 to 1e-4: the squares meet at the rounding of float32, the smallest column is rounding alone."""
  u = matrix(10.0 ** -np.arange(5), seed=3)
  left, right, _ = factor(u, 5, wide=False)
  kept = np.linalg.norm(left, axis=0) > 0
  np.testing.assert_allclose(left.T @ left, np.diag(kept.astype(float)), atol=1e-3)
  assert np.linalg.norm(left.astype(np.float64) @ right - u) < 4e-3


ONES = np.ones(I), np.ones(O)


def norm_root(gradient) -> np.ndarray:
  """[I, I], C^(1/2) of `low_rank.factor_for`."""
  values, vectors = np.linalg.eigh(I * gradient @ gradient.T / (gradient**2).sum() + 0.01 * np.eye(I))
  return vectors * np.sqrt(values) @ vectors.T


def test_factors_for_a_gradient_keep_to_the_bound_in_its_norm():
  """Error over the bound with the singular values of C^(1/2) A, for the best k <= r - 2, mean of 10 draws of A."""
  rng = np.random.default_rng(6)
  weights = tuple(4.0 ** rng.uniform(-1, 1, side) for side in (I, O))
  weight = np.outer(*weights)
  gradient = matrix(SPECTRA["fast"], seed=7) * weight
  root = norm_root(gradient / weight)
  u = np.stack([[matrix(values, seed) / weight for seed in range(10)] for values in SPECTRA.values()])
  left, right, captured = factor_for(gradient, weights, u, 8)
  rest = (u - left @ right) * weight
  errors, plain = np.linalg.norm(root @ rest, axis=(2, 3)), np.linalg.norm(rest, axis=(2, 3))
  size = np.linalg.norm(u * weight, axis=(2, 3))
  tails = np.sqrt((np.linalg.svd(root @ (u * weight))[1][..., ::-1] ** 2).cumsum(-1))[..., ::-1]
  bounds = np.min([np.sqrt(1 + k / (8 - k - 1)) * tails[..., k] for k in range(7)], axis=0)
  assert (np.mean(errors / bounds, axis=1) <= 1).all()
  assert (errors >= tails[..., 8] * (1 - 1e-12)).all()
  assert (plain <= 10 * errors).all()
  assert (plain <= size).all()
  np.testing.assert_allclose(captured, 1 - (plain / size) ** 2, rtol=1e-12)


def test_weights_lower_the_expected_error_of_a_score():
  """Gradients with variances of rank one, direction spread like Adam's: 1000 products with and without the weights."""
  rng = np.random.default_rng(2)
  scale = 4.0 ** rng.uniform(-2, 2, I)[:, None] * 4.0 ** rng.uniform(-2, 2, O)
  u = matrix(SPECTRA["slow"]) / scale
  gradients = scale * rng.normal(size=(1000, I, O))
  with jax.enable_x64(True):
    weights = [np.asarray(x) for x in low_rank.rank_one_root(jnp.asarray(scale**2))]
  np.testing.assert_allclose(np.outer(*weights), scale, rtol=1e-12)
  root_mean_square = []
  for given in (weights, ONES):
    left, right, _ = factor_for(np.zeros((I, O)), given, u, 6)
    root_mean_square.append(np.sqrt(np.mean(np.einsum("nio,io->n", gradients, u - left @ right) ** 2)))
  assert root_mean_square[0] < 0.7 * root_mean_square[1]


def test_what_the_examples_share_is_kept():
  """Adam's first direction, the validation gradient over the size of the batch's: of full rank, and the examples
  resemble their sum. Their scores come 5 times closer than with factors that know nothing of them."""
  rng = np.random.default_rng(4)
  x, b = rng.normal(size=(10, I)) / (1 + np.arange(10))[:, None], rng.normal(size=(10, O))
  mix = rng.normal(size=(61, 10))
  examples = np.einsum("nk,ki,ko->nio", 0.3 * mix + 1, x, b)
  gradient = examples[:60].sum(0)
  u = examples[60] / np.abs(gradient)
  exact = np.einsum("nio,io->n", examples[:60], u)
  errors = []
  for known in (gradient, np.zeros_like(gradient)):
    left, right, _ = factor_for(known, ONES, u, 6)
    errors.append(np.einsum("nio,io->n", examples[:60], left @ right) - exact)
  assert np.linalg.norm(errors[0]) < 0.2 * np.linalg.norm(errors[1])


def test_factors_for_a_gradient_at_any_scale_and_without_one():
  """Rank 4 under rank 9 comes back whole in float32 and set by set, whatever the gradient, and none gives no NaN."""
  u = matrix([3, 1, 0.2, 0.05], seed=2)
  scales = np.asarray([1e-25, 1.0, 1e20])[:, None, None]
  noise = np.random.default_rng(1).normal(size=(I, O))
  for gradient in (1e-25 * noise, 1e20 * noise, 0 * noise):
    left, right, captured = factor_for(gradient, ONES, scales * u, 9, wide=False)
    for i, scale in enumerate(scales):
      np.testing.assert_allclose(left[i].astype(np.float64) @ right[i] / scale, u, atol=1e-4)
    np.testing.assert_allclose(captured, 1, atol=1e-5)
    left, right, captured = factor_for(gradient, ONES, 0 * u, 9, wide=False)
    assert (left @ right == 0).all()
    assert captured == 0


def test_zero_has_zero_factors():
  left, right, captured = factor(np.zeros((I, O)), 5, wide=False)
  assert (left == 0).all()
  assert (right == 0).all()
  assert captured == 0


def test_not_a_number_is_not_hidden():
  u = matrix([1.0, 0.5])
  bad = u.copy()
  bad[3, 4] = np.nan
  for left, right, _ in (factor(bad, 5, wide=False), factor_for(u, ONES, bad, 6), factor_for(bad, ONES, u, 6)):
    assert np.isnan(left @ right).any()


def test_leading_axes_are_batch_axes():
  u = np.stack([np.stack([matrix(SPECTRA["slow"], seed=3 * j + k) for k in range(3)]) for j in range(2)])
  left, right, captured = factor(u, 5)
  assert captured.shape == (2, 3)
  for j in range(2):
    for k in range(3):
      single_left, single_right, single_captured = factor(u[j, k], 5)
      np.testing.assert_allclose(left[j, k] @ right[j, k], single_left @ single_right, atol=1e-12)
      assert captured[j, k] == pytest.approx(single_captured, rel=1e-12)


N, N_VAL, RANK = 6, 2, 3


class Wide(nnx.Module):
  """[n, 21] and ids [n] to logits over 41 tokens. At rank 3 `gate` is too small to gain; all other matrices gain."""

  def __init__(self, rngs):
    self.table = nnx.Embed(41, 20, rngs=rngs)
    self.dense = nnx.Linear(21, 30, rngs=rngs)
    self.heads = nnx.LinearGeneral(30, (4, 5), rngs=rngs)
    self.gate = nnx.Linear(20, 4, rngs=rngs)

  def __call__(self, x, ids):
    rows = self.table(ids)
    h = self.heads(jnp.tanh(self.dense(x)))
    return self.table.attend((h * jax.nn.sigmoid(self.gate(rows))[..., None]).reshape(rows.shape) + rows)


def loss_fn(model, batch):
  """(losses [n], weights [n])."""
  logits = jax.nn.log_softmax(model(batch["x"], batch["ids"]))
  return -jnp.take_along_axis(logits, batch["y"][:, None], -1)[:, 0], batch["w"]


def make_batch(num: int, seed: int) -> dict:
  rng = np.random.default_rng(seed)
  ids, y = rng.integers(0, (5, 41), (num, 2)).T
  x = rng.normal(size=(num, 21)).astype(np.float32)
  return {"x": x, "ids": ids, "y": y, "w": (rng.random(num) + 0.2).astype(np.float32)}


class Untied(Wide):
  """One use of every matrix, so that two validation examples give it a gradient of rank 2."""

  def __init__(self, rngs):
    super().__init__(rngs)
    self.out = nnx.Linear(20, 41, use_bias=False, rngs=rngs)

  def __call__(self, x, ids):
    h = self.heads(jnp.tanh(self.dense(x)))
    return self.out((h * jax.nn.sigmoid(self.gate(self.table(ids)))[..., None]).reshape(len(x), -1))


TRAIN, VAL, LARGE_VAL = make_batch(N, 1), make_batch(N_VAL, 2), make_batch(40, 3)
FACTORED = {"table/embedding", "dense/kernel", "heads/kernel"}


def test_scores_are_exact_where_the_direction_has_no_more_than_this_rank():
  """One validation example adds one outer product to every matrix: two of them, rank 3."""
  model = foreign.randomized(Untied)
  oracle = foreign.Oracle(model, loss_fn, TRAIN, VAL)
  result = foreign.score(ghost.GhostEngine(rank=RANK), model, TRAIN, VAL, loss_fn=loss_fn)
  foreign.assert_scores(result.per_param, oracle.dots(oracle.G[0]), 1e-5)
  assert result.captured.keys() == FACTORED | {"out/kernel"}
  for value in result.captured.values():
    assert value == pytest.approx(1, abs=1e-5)


@pytest.fixture(scope="module")
def wide():
  model = foreign.randomized(Wide, scale=0.7)
  return model, foreign.Oracle(model, loss_fn, TRAIN, VAL, LARGE_VAL)


def weights_of(u: dict, P: dict | None) -> dict:
  """{label: a b as a matrix}, in whose norm a direction is factored: 1 for SGD, 1 / P at rank one for Adam."""
  weights = {label: np.ones((len(u[label]), u[label].size // len(u[label]))) for label in FACTORED}
  for label in weights if P else ():
    square = 1 / P[label].reshape(weights[label].shape) ** 2
    weights[label] = np.sqrt(np.outer(square.sum(1), square.sum(0)) / square.sum())
  return weights


def along_factors(u: dict, weights: dict, g: dict | None) -> dict:
  """u with the matrices that gain replaced by their factors' product, from the same draw; g: the batch's gradient,
  where the factors are made for it."""
  out = dict(u)
  for label, weight in weights.items():
    matrix_IO = u[label].reshape(weight.shape)
    if g is None:
      left, right, _ = factor(matrix_IO, RANK, label, wide=False)
    else:
      ab = np.sqrt((weight**2).mean(1)), np.sqrt((weight**2).mean(0) / (weight**2).mean())
      left, right, _ = factor_for(g[label].reshape(weight.shape), ab, matrix_IO, RANK, label, wide=False)
    out[label] = (left @ right).reshape(u[label].shape)
  return out


def assert_low_rank(result, oracle, k, u, tolerance, P=None):
  """Scores along the factors; the rest of the direction bounds the error; small parameters stay exact."""
  weights = weights_of(u, P)
  exact, expected = oracle.dots(u), oracle.dots(along_factors(u, weights, oracle.g if P else None))
  scores = {label: v[k] for label, v in result.per_param.items()}
  foreign.assert_scores(scores, expected, tolerance)
  errors = []
  for label, value in exact.items():
    if label not in FACTORED:
      assert oracles.relative_error(scores[label], value) < 1e-5
      continue
    captured, weight = result.captured[label][k], weights[label].ravel()
    rest = np.linalg.norm(u[label].ravel() * weight) * np.sqrt(max(1 - captured, 0))
    gradient = np.linalg.norm(oracle.gradients[label].reshape(N, -1) / weight, axis=1) / oracle.weights
    assert (np.abs(scores[label] - value) <= gradient * rest * 1.001 + 2e-6 * np.abs(value).max()).all()
    errors.append(oracles.relative_error(scores[label], value))
  return errors


def test_sgd_scores_along_factors_made_before_the_pass(wide):
  """A tied table, a dense layer over several axes, and two sets at once: of rank <= 4 and of full rank."""
  model, oracle = wide
  result = foreign.score(ghost.GhostEngine(rank=RANK), model, TRAIN, [VAL, LARGE_VAL], loss_fn=loss_fn)
  assert result.captured.keys() == FACTORED
  few, many = (assert_low_rank(result, oracle, k, oracle.G[k], 2e-5) for k in range(2))
  assert max(few) < max(many)


def test_adam_scores_along_factors_made_in_the_backward_pass(wide):
  model, oracle = wide
  moments = foreign.moments_like(oracle)
  adam = ghost.AdamState({k: jnp.asarray(v) for k, v in moments.items()}, 3, 0.9)
  engine = ghost.GhostEngine(direction="adam", rank=RANK)
  result = foreign.score(engine, model, TRAIN, [VAL, LARGE_VAL], loss_fn=loss_fn, state=adam)
  assert result.captured.keys() == FACTORED
  for k in range(2):
    u = oracle.adam(moments, count=3, kappa=0.9, index=k)
    P = {label: u[label] / oracle.G[k][label] for label in FACTORED}
    assert min(assert_low_rank(result, oracle, k, u, 1e-4, P)) > 1e-2  # P_t G has full rank: it is a real approximation


def test_a_rank_that_saves_nothing_is_refused_with_the_largest_that_does(wide):
  model, _ = wide
  with pytest.raises(ValueError, match=r"^rank=7 saves nothing .* use at most 6, or 0 for exact scores"):
    ghost.GhostEngine(rank=7).score(model, TRAIN, VAL, loss_fn=loss_fn)
  small = foreign.randomized(lambda rngs: nnx.Linear(21, 41, rngs=rngs))

  def dense_loss(model, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][:, None], -1)[:, 0], batch["w"]

  with pytest.raises(ValueError, match=r"use at most 6, or 0"):
    ghost.GhostEngine(rank=7).score(small, TRAIN, VAL, loss_fn=dense_loss)
  result = foreign.score(ghost.GhostEngine(rank=6), small, TRAIN, VAL, loss_fn=dense_loss)
  assert result.captured.keys() == {"kernel"}


def test_rank_with_another_engine_is_refused():
  for engine in ("jvp", "perexample"):
    with pytest.raises(ValueError, match=rf"^rank=4 .* engine={engine}, .*use rank=0, or engine=graddotprod"):
      ghost.GhostEngine(rank=4, engine=engine)


@pytest.mark.slow  # test_ghost_schedules has scores along factors of stacked layers
def test_stacked_layers_are_factored_one_by_one():
  """The transformer against a direction of rank <= 3, under rank 5: exact, and an energy for every layer."""
  cfg = tiny.make_config(base_mlp_dim=60, base_num_decoder_layers=2, remat_policy="none")
  model = tiny.make_model(cfg)
  train, val = tiny.make_batch(tiny.UNPACKED[:3], seed=1), tiny.make_batch(((3,),), seed=2, mask=0.0)
  with tiny.cheap_compilation():
    exact, factored = (ghost.GhostEngine(cfg, rank=rank).score(model, train, val) for rank in (0, 5))
  names = {label.split("/")[-2] for label in factored.captured}
  assert names == {"query", "out", "wi_0", "wi_1", "wo", "logits_dense", "token_embedder"}  # not key and value, 20 x 12
  assert factored.captured["decoder/layers/mlp/wo/kernel"].shape == (2,)
  for label, value in exact.per_param.items():
    assert oracles.relative_error(factored.per_param[label], value) < 1e-4, label
  layers = np.asarray(exact.per_param["decoder/layers/mlp/wo/kernel"])
  assert oracles.relative_error(layers[0], layers[1]) > 0.1
