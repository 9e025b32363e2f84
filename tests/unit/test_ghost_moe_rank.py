"""Low-rank directions of experts: factors for each expert, and scores along them, in float64.

K validation sets, n examples, T positions, E experts, I inputs and O outputs of a matrix, r rank.
"""

import dataclasses

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import routed
import test_ghost_moe
import tiny
from flax import nnx

from maxghost import ghost
from maxghost.ghost import directions, low_rank, sketch
from maxghost.ghost.attach import attach, split
from maxghost.models import moe
from maxghost.objectives import LanguageModelLoss

TRAIN, VALIDATION = test_ghost_moe.TRAIN, test_ghost_moe.VALIDATION
COUNT, KAPPA, RANK = test_ghost_moe.COUNT, test_ghost_moe.KAPPA, 3
FACTOR = jax.jit(lambda u: low_rank.factor(u, 4, "a", groups=1))
SCALED = 10.0 ** np.arange(-2, 3)  # of the matrices of one group
CASES = {"mixtral-two_pass-sgd": ("two_pass", "sgd", routed.MIXTRAL)}
SLOW_CASES = {
  "mixtral-reverse_scan-sgd": ("reverse_scan", "sgd", routed.MIXTRAL),
  "gpt_oss-two_pass-sgd-unrolled": ("two_pass", "sgd", {**routed.GPT_OSS, "scan_layers": False}),
  "gpt_oss-two_pass-adam": ("two_pass", "adam", {**routed.GPT_OSS, "remat_policy": "full"}),
  "gpt_oss-reverse_scan-adam": ("reverse_scan", "adam", routed.GPT_OSS),
  "mixtral-dense-two_pass-sgd": ("two_pass", "sgd", {**routed.MIXTRAL, "sparse_matmul": False}),
}


def is_experts(label: str) -> bool:
  return label.split("/")[-1] in ("wi_0", "wi_1", "wo")


def along_factors(u: dict, captured: dict, stacked: bool, P: dict | None, g: dict) -> dict:
  """u of the experts' matrices, each replaced by the product of its factors; checks what these capture. With P, Adam's,
  they are made for the batch's gradient g."""
  out = {}
  for label in filter(is_experts, u):
    layers = u[label] if stacked and "/layers/" in label else u[label][None]
    weights = np.ones_like(layers) if P is None else P[label].reshape(layers.shape) ** -1.0
    products = []
    gradients = g[label].reshape(layers.shape)
    for layer, weight, gradient, share in zip(layers, weights, gradients, np.atleast_1d(captured[label]), strict=True):
      square = weight**2
      a, b = np.sqrt(square.mean(2)), np.sqrt(square.mean(1) / square.mean((1, 2))[:, None])
      if P is None:
        factors = [foreign.factor(m, RANK, label) for m in layer]
      else:
        factors = [
          foreign.factor_for(*e, RANK, label) for e in zip(gradient, zip(a, b, strict=True), layer, strict=True)
        ]
      left, right, _ = zip(*factors, strict=True)
      product, weight = np.stack(left) @ np.stack(right), a[:, :, None] * b[:, None, :]
      assert share == pytest.approx(((product * weight) ** 2).sum() / ((layer * weight) ** 2).sum(), rel=1e-8), label
      products.append(product)
    out[label] = np.stack(products).reshape(u[label].shape)
  return out


def assert_case(schedule, direction, changes):
  with jax.enable_x64(True):
    cfg, model = test_ghost_moe.make(**changes)
    _, dense = test_ghost_moe.make(**{**changes, "sparse_matmul": False, "remat_policy": "none"})
    oracle = foreign.Oracle(dense, LanguageModelLoss(), TRAIN, VALIDATION)
    u, adam, P = oracle.G[0], None, None
    if direction == "adam":
      moments = {label: v.astype(np.float64) for label, v in foreign.moments_like(oracle).items()}
      u = oracle.adam(moments, count=COUNT, kappa=KAPPA)
      ones = oracles.adam_direction(
        {label: np.ones_like(v) for label, v in u.items()}, oracle.g, moments, count=COUNT, kappa=KAPPA, b1=0.9,
        b2=0.95, eps=1e-8,
      )  # fmt: skip
      adam, P = ghost.AdamState({k: jnp.asarray(v) for k, v in moments.items()}, COUNT, KAPPA), ones
    others = tuple(label for label in u if not is_experts(label))  # left out: they take most of the time to compile
    engine = ghost.GhostEngine(cfg, schedule=schedule, direction=direction, rank=RANK, exclude=others)
    result = foreign.score(engine, model, TRAIN, VALIDATION, state=adam)
  expected = along_factors(u, result.captured, cfg.model.scan_layers, P, oracle.g)
  oracle.gradients = {label: oracle.gradients[label] for label in expected}
  layers = cfg.model.base_num_decoder_layers // cfg.model.inhomogeneous_layer_cycle_interval
  stacked = layers if cfg.model.scan_layers else 0
  along, exact = oracle.dots(expected, stacked), oracle.dots(u, stacked)
  assert result.captured.keys() == expected.keys()
  foreign.assert_scores(result.per_param, along, 1e-8)
  for label, value in exact.items():  # a real approximation: of rank 3 with more tokens than that
    assert oracles.relative_error(along[label], value) > 1e-3, label


@pytest.mark.parametrize("name", CASES)
def test_scores_along_the_factors_of_each_expert(name):
  assert_case(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_scores_along_the_factors_of_each_expert_in_every_other_form(name):
  assert_case(*SLOW_CASES[name])


def decomposed(u):
  """Exact factors (left, right) of u [..., I, O] of the rank of its smaller side."""
  left, values, right = np.linalg.svd(u, full_matrices=False)
  return left * values[..., None, :], right


def layer_scores(layer, spec, parts, x):
  """{label: [K, n, T]} of one layer with these directions."""
  twin = attach(layer, num_examples=x.shape[0], num_positions=x.shape[1], num_sets=2, spec=spec)
  params, rest = split(layer)
  weight = np.random.default_rng(6).normal(size=x.shape)

  def run(params, probes):
    model = twin.merge(params, probes, twin.direction_state(parts(twin)), rest)
    return (model(x, None, moe.no_routing(5, x.shape[:2], x.dtype))[0] * weight).sum()

  with tiny.cheap_compilation():
    _, probes = jax.jit(jax.grad(run, (0, 1)))(params, twin.zero_probes())
  return {label: np.asarray(v) for label, v in twin.scores(probes)[0].items()}, twin


@pytest.mark.slow
def test_factors_of_full_rank_give_the_exact_scores_of_two_sets(monkeypatch):
  """Rank 14 of matrices 20 x 14, which no rank gains on: handed to the rule as they are. Two sets at once."""
  with jax.enable_x64(True):
    cfg = tiny.make_config(**routed.MIXTRAL, **routed.FLOAT64)
    layer = moe.RoutedMoe(cfg.model, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(3)
    for _, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
      variable[...] = rng.normal(size=variable.shape)
    x = rng.normal(size=(3, 7, 20))
    drawn = np.random.default_rng(4)
    u = {label: drawn.normal(size=(2, *v.shape)) for label, v in sorted(tiny.by_label(layer).items())}
    exact, _ = layer_scores(layer, directions.DirectionSpec(), lambda _: {k: (v,) for k, v in u.items()}, x)
    monkeypatch.setattr(low_rank, "gains", lambda rank, *sides: sides == (20, 14) or sides == (14, 20))

    def full_rank(twin):
      return {p.label: decomposed(u[p.label]) if p.low_rank else (u[p.label],) for p in twin.scored}

    factored, twin = layer_scores(layer, directions.DirectionSpec(rank=14), full_rank, x)
  assert {p.label for p in twin.scored if p.low_rank} == {"wi_0", "wi_1", "wo"}
  for label, value in exact.items():
    assert np.abs(value[0] - value[1]).max() > 0.1
    assert oracles.relative_error(factored[label], value) < 1e-12, label


def test_captured_of_a_group_is_the_share_of_all_its_matrices():
  """Matrices of very different sizes, one of them zero, beyond what float32 can square."""
  rng = np.random.default_rng(0)
  u = rng.normal(size=(3, 5, 11, 9)) * SCALED[:, None, None]
  u[1, 2] = 0
  for wide, unit in ((True, 1.0), (False, 1e25), (False, 1e-30)):
    with jax.enable_x64(wide):
      own = np.float64 if wide else np.float32
      left, right, captured = (np.asarray(x) for x in FACTOR(jnp.asarray(u * unit, own)))
    assert (left.shape, right.shape, captured.shape) == ((3, 5, 11, 4), (3, 5, 4, 9), (3,))
    assert not left[1, 2].any() and not right[1, 2].any()
    product = left.astype(np.float64) @ right / unit
    expected = (product**2).sum((1, 2, 3)) / (u**2).sum((1, 2, 3))
    np.testing.assert_allclose(captured, expected, rtol=1e-12 if wide else 1e-5)
    one = foreign.factor(u[0, 3], 4, "a", wide)
    np.testing.assert_allclose(product[0, 3], one[0].astype(np.float64) @ one[1], atol=(1e-12 if wide else 1e-5) * 40)
  assert not np.asarray(FACTOR(jnp.zeros_like(u, jnp.float32))[2]).any()


def test_a_small_expert_keeps_its_direction_whole():
  """20 x 14 gains up to rank 4: at rank 5 the dense layers of 20 x 41 alone have factors."""
  cfg = tiny.make_config(**routed.MIXTRAL)
  model = nnx.eval_shape(lambda: tiny.make_model(cfg))
  for rank, gains in ((4, True), (5, False)):
    twin = attach(model, num_examples=3, spec=directions.DirectionSpec(rank=rank))
    assert {p.low_rank for p in twin.scored if is_experts(p.label)} == {gains}
    assert any(p.low_rank for p in twin.scored)


def test_sketches_draw_one_direction_for_each_expert():
  """With a scale: the products of the drawn factors with a gradient, expert by expert."""
  cfg = tiny.make_config(**routed.MIXTRAL)
  model = nnx.eval_shape(lambda: tiny.make_model(cfg))
  twin = attach(model, num_examples=3, spec=directions.DirectionSpec(rank=1))
  twin = dataclasses.replace(twin, scored=tuple(p for p in twin.scored if is_experts(p.label)))
  rng = np.random.default_rng(8)
  gradient, scale = (
    {p.label: jnp.asarray(draw((*p.stack_shape, *p.shape)), jnp.float32) for p in twin.scored}
    for draw in (lambda shape: rng.normal(size=shape), lambda shape: rng.random(shape) + 0.1)
  )
  key = jax.random.key(1)
  with tiny.cheap_compilation():
    got = sketch.sketch_gradient(twin, gradient, key, 2, scale)
    drawn = [sketch.random_directions(twin, k, scale) for k in jax.random.split(key, 2)]
  expected = []
  for p in twin.scored:
    shapes = p.part_shapes(1)
    assert [part.shape for part in drawn[0][p.label]] == [shapes["left"], shapes["right"]]
    u = np.stack([np.asarray(left @ right)[:, 0] for left, right in (parts[p.label] for parts in drawn)])  # [R, L, EIO]
    assert len(np.unique(np.sign(u[0, 0, :, 0, 0] * u[0, 0, :, 1, 1]))) == 2  # experts have signs of their own
    value = np.asarray(scale[p.label])
    np.testing.assert_allclose(np.abs(u[0]).mean(-1), value.mean(-1), rtol=1e-5)
    np.testing.assert_allclose(np.abs(u[0]).mean(-2), value.mean(-2), rtol=1e-5)
    expected.append((u * np.asarray(gradient[p.label])).sum((2, 3, 4)).T)
  np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-4, atol=1e-3)
