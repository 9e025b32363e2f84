"""Sketches: each entry is the product of an example's gradient with a known random direction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost.ghost.attach import prepare_twin, split
from maxghost.ghost.schedules import base, per_example
from maxghost.ghost.sketch import SPEC, factored, random_directions, sketch_gradient, sketch_pass

EXAMPLES = 5


class Model(nnx.Module):
  def __init__(self, hidden: int, outputs: int):
    self.first = nnx.Linear(12, hidden, rngs=nnx.Rngs(0))
    self.second = nnx.Linear(hidden, outputs, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def loss(model, batch):
  return jnp.square(model(batch["x"]) - batch["y"]).sum(-1), batch["weight"]


@pytest.mark.parametrize(
  ("hidden", "outputs", "low_rank", "count", "side"),
  [(9, 2, {True, False}, 3, 1), (2, 7, {False}, 3, 1), (9, 2, {True, False}, 18, 3)],
)
def test_entries_are_products_with_the_drawn_directions(hidden, outputs, low_rank, count, side):
  """A matrix large enough for rank-one directions (12 x 9) and a narrow one (9 x 2), or narrow ones alone; also the
  projections of two groups of 3 x 3 pairs, which are A' g B."""
  rng = np.random.default_rng(0)
  x, y, weight = rng.normal(size=(EXAMPLES, 12)), rng.normal(size=(EXAMPLES, outputs)), rng.random(EXAMPLES)
  batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {"x": x, "y": y, "weight": weight})
  model, key = Model(hidden, outputs), jax.random.key(3)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  twin = prepare_twin(model, batch, loss, num_sets=1, num_positions=None, spec=SPEC)
  assert {p.low_rank for p in twin.scored} == low_rank
  with tiny.cheap_compilation():
    run = jax.jit(lambda key, *states: sketch_pass(twin, *states, loss, batch, key, count, None, side))
    blocks_MRn = run(key, *split(model))
    drawn = jax.jit(jax.vmap(lambda left, right, own: random_directions(twin, left, None, right, own)))
    own = jax.random.split(key, count)
    group, a, b = np.unravel_index(np.arange(count), (count // side**2, side, side))
    parts_R = drawn(*(own[group * side**2 + place] for place in (a * side, b, a * side + b)))
  assert blocks_MRn.shape == (len(twin.scored), count, EXAMPLES)
  exact = per_example.gradients_of
  gradients = jax.jit(lambda params: exact(base.Model(graphdef, params, rest), loss, batch))(params)
  for r in range(count):
    parts = jax.tree.map(lambda x, r=r: x[r], parts_R)
    for m, param in enumerate(twin.scored):
      u = (parts[param.label][0] @ parts[param.label][1])[0] if param.low_rank else parts[param.label][0][0]
      assert set(np.unique(np.asarray(u))) <= {-1.0, 1.0}
      expected = (gradients[param.label] * u[None]).reshape(EXAMPLES, -1).sum(-1)
      np.testing.assert_allclose(blocks_MRn[m, r], expected, rtol=1e-4, atol=1e-5)
  whole = {label: g.sum(0) for label, g in gradients.items()}
  with tiny.cheap_compilation():
    of_whole = jax.jit(lambda key, gradient: sketch_gradient(twin, gradient, key, count, None, side))(key, whole)
  np.testing.assert_allclose(of_whole, blocks_MRn.sum(-1), rtol=1e-4, atol=1e-5)
  if side > 1:  # the pairs of a group share their vectors
    label = next(p.label for p in twin.scored if p.low_rank)
    left, right = (np.asarray(x).reshape(count, -1) for x in parts_R[label])
    assert len(np.unique(left, axis=0)) == len(np.unique(right, axis=0)) == count // side


def test_factors_keep_row_and_column_means_and_are_exact_at_rank_one():
  scale = np.random.default_rng(1).uniform(1, 3, (2, 5, 8)).astype(np.float32)
  rows, columns = factored(jnp.asarray(scale))
  product = rows[..., :, None] * columns[..., None, :]
  np.testing.assert_allclose(product.mean(-1), scale.mean(-1), rtol=1e-5)
  np.testing.assert_allclose(product.mean(-2), scale.mean(-2), rtol=1e-5)
  np.testing.assert_allclose(jnp.outer(*factored(jnp.asarray(np.outer(scale[0, :, 0], scale[0, 0])))),
                             np.outer(scale[0, :, 0], scale[0, 0]), rtol=1e-5)  # fmt: skip
