"""The routed layer: grouped products against numpy loops, sparse against dense, balanced and pathological routing.

R rows, G groups, I inputs, O outputs, E experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx

from maxghost.models import autodiff, grouped_matmul, moe

ROWS, INPUTS, OUTPUTS = 150, 6, 11
SIZES = {  # rows of each group; blocks hold 64 and 128 rows
  "uneven": [3, 70, 0, 13, 64],
  "all in one": [0, 0, 150, 0],
  "last only": [0, 150],
  "single rows": [1, 0, 1, 148],
  "one group": [150],
}


def rows_of(sizes, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (ROWS, INPUTS), (len(sizes), INPUTS, OUTPUTS), (ROWS, OUTPUTS)
  return (rng.normal(size=shape) for shape in shapes)


def by_loop(x, w, g, sizes):
  """(x w, g wᵀ, sums of xᵀ g), row by row in float64."""
  group = np.repeat(np.arange(len(sizes)), sizes)
  y, back, sums = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
  for r, e in enumerate(group):
    y[r], back[r] = x[r] @ w[e], w[e] @ g[r]
    sums[e] += np.outer(x[r], g[r])
  return y, back, sums


def by_blocks(x, w, sizes):
  return grouped_matmul.grouped_matmul(x, w, sizes)


def by_ragged_dot(x, w, sizes):
  with autodiff.forward_mode():
    return grouped_matmul.grouped_matmul(x, w, sizes)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("product", [by_blocks, by_ragged_dot])
def test_product_and_its_gradients_against_a_loop(product, sizes):
  x, w, g = rows_of(sizes)
  expected = by_loop(x, w, g, sizes)
  with jax.enable_x64(True), tiny.cheap_compilation():

    @jax.jit
    def run(x, w, g, sizes):
      y, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
      return y, *pull(g)

    actual = run(x, w, g, np.asarray(sizes, np.int32))
  for a, e in zip(actual, expected, strict=True):
    assert oracles.relative_error(a, e) < 1e-13


def test_ragged_kernels_of_other_platforms_against_a_loop():
  """What TPU and GPU compile, run here: the branches that `platform_dependent` leaves out on CPU."""
  sizes = SIZES["uneven"]
  x, w, g = rows_of(sizes)
  chosen = []

  def ragged(on_cpu, elsewhere, arguments):
    chosen.append(elsewhere)
    return elsewhere(*arguments)

  with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
    patch.setattr(grouped_matmul, "_choose", ragged)
    counts = jnp.asarray(sizes, jnp.int32)
    actual = (
      grouped_matmul.product(x, w, counts),
      grouped_matmul.product(g, w, counts, contract=2),
      grouped_matmul.outer_sums(x, g, counts),
    )
  assert len(chosen) == 3
  for a, e in zip(actual, by_loop(x, w, g, sizes), strict=True):
    assert oracles.relative_error(a, e) < 1e-13


def test_bfloat16_sums_in_float32():
  sizes = [90, 60]
  x, w, g = (jnp.asarray(v, jnp.bfloat16) for v in rows_of(sizes))
  *_, expected = by_loop(*(np.asarray(v, np.float64) for v in (x, w, g)), sizes)
  sums = jax.jit(grouped_matmul.outer_sums)(x, g, jnp.asarray(sizes))
  assert sums.dtype == jnp.float32
  assert oracles.relative_error(sums, expected) < 1e-6


def test_mapped_and_second_derivatives():
  """Under vmap, as for several validation sets or examples; and a Hessian-vector product, forward over reverse."""
  x, w, _ = rows_of(SIZES["uneven"])
  sizes = jnp.asarray([SIZES["uneven"], [150, 0, 0, 0, 0], [0, 149, 0, 0, 1]])

  def loss(product):
    return lambda w, sizes: jnp.sin(product(jnp.asarray(x), w, sizes)).sum()

  def curvature(function, sizes):
    return jax.jvp(lambda w: jax.grad(function)(w, sizes), (jnp.asarray(w),), (jnp.cos(w),))[1]

  with jax.enable_x64(True), tiny.cheap_compilation():
    mapped = jax.jit(lambda sizes: jax.vmap(lambda s: curvature(loss(by_blocks), s))(sizes))(sizes)
    expected = jax.jit(lambda sizes: jnp.stack([curvature(loss(by_ragged_dot), s) for s in sizes]))(sizes)
  assert oracles.relative_error(mapped, expected) < 1e-12


# The layer.

BATCH = tiny.make_batch(tiny.PACKED, seed=51)
ROUTINGS = ("random", "all to the same experts", "two experts empty")


def layer_of(routing: str, **changes):
  """(routed layer with biases, its input): `routing` is made by the router's bias."""
  cfg = tiny.make_config(**{**routed.GPT_OSS, **changes})
  model = tiny.make_model(cfg)
  layers = model.decoder.layers.layers_0
  layer = nnx.merge(nnx.graphdef(layers), jax.tree.map(lambda v: v[0], nnx.state(layers))).feed_forward
  if routing == "all to the same experts":
    layer.gate.bias[...] = jnp.asarray([0.0, 0.0, 60.0, 30.0, 15.0])
  if routing == "two experts empty":
    layer.gate.bias[...] = jnp.asarray([0.0, -60.0, 0.0, 0.0, -60.0])
  x_BTD = np.random.default_rng(3).normal(size=(tiny.ROWS, tiny.POSITIONS, 20)).astype(np.float32)
  return layer, x_BTD


def run_layer(layer, x_BTD, blank):
  """(y, routing, gradients of a random projection of y) as numpy."""
  graphdef, state = nnx.split(layer)
  direction = np.random.default_rng(4).normal(size=x_BTD.shape).astype(np.float32)

  @jax.jit
  def run(state, x):
    y, pull, routing = jax.vjp(
      lambda s, x: nnx.merge(graphdef, s)(x, BATCH["inputs_segmentation"], blank), state, x, has_aux=True
    )
    return y, routing, pull(jnp.asarray(direction))

  y, routing, (grads, dx) = run(state, x_BTD)
  return np.asarray(y), jax.tree.map(np.asarray, routing), {**tiny.by_label(grads), "x": np.asarray(dx)}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_sparse_equals_dense(routing):
  blank = moe.no_routing(5, (tiny.ROWS, tiny.POSITIONS), jnp.float32)
  (y, told, grads), (expected, _, expected_grads) = (
    run_layer(*layer_of(routing, sparse_matmul=sparse), blank) for sparse in (True, False)
  )
  np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
  assert grads.keys() == expected_grads.keys()
  for label, g in expected_grads.items():
    np.testing.assert_allclose(grads[label], g, atol=1e-5 * max(np.abs(g).max(), 1e-3), err_msg=label)
  if routing == "two experts empty":
    assert not expected_grads["wi_0"][[1, 4]].any() and expected_grads["wi_0"][[0, 2, 3]].any((1, 2)).all()
    load_E = told["chosen_BE"].sum(0) / (BATCH["inputs_segmentation"] > 0).sum()
    np.testing.assert_allclose(load_E * 4, [1 / 3, 0, 1 / 3, 1 / 3, 0], atol=1e-6)
  if routing == "all to the same experts":
    assert expected_grads["wi_0"][2].any()
    np.testing.assert_allclose(told["entropy_BT"], 0, atol=1e-6)


def test_load_and_entropy_count_tokens_that_are_there():
  """Loads by a loop over the tokens of the batch that are not padding; the layer's share is 1 / 4 of the model's."""
  layer, x_BTD = layer_of("random")
  blank = moe.no_routing(5, (tiny.ROWS, tiny.POSITIONS), jnp.float32)
  _, told, _ = run_layer(layer, x_BTD, blank)
  logits = x_BTD.astype(np.float64) @ np.asarray(layer.gate.kernel[...]) + np.asarray(layer.gate.bias[...])
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  load, count = np.zeros(5), 0
  for row, position in np.argwhere(BATCH["inputs_segmentation"] > 0):
    load[np.argsort(-logits[row, position])[:3]] += 1
    count += 1
  np.testing.assert_allclose(told["chosen_BE"].sum(0) * 4, load / 3, rtol=1e-5)
  np.testing.assert_allclose(told["entropy_BT"] * 4, -(p * np.log(p)).sum(-1), rtol=1e-5)
  np.testing.assert_allclose(told["load_balance_BT"] * 4, 5 * (p * load / count).sum(-1), rtol=1e-5)
