"""Cross-entropy against log_softmax. B rows, T positions, V vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from maxghost.objectives import token_losses

B, T, V = 7, 13, 67


def sample(dtype, seed=0, scale=4.0):
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(scale * rng.normal(size=(B, T, V)), dtype)
  return logits, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32), jnp.asarray(rng.normal(size=(B, T)), dtype)


def value_and_pullback(function, *args, **kwargs):
  @jax.jit
  def run(logits, targets, weights):
    losses, pull = jax.vjp(lambda x: function(x, targets, **kwargs), logits)
    return losses, pull(weights)[0]

  return run(*args)


@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 2e-6)])
def test_values_and_gradients_match_log_softmax(z_loss, dtype, tolerance):
  with jax.enable_x64(True):
    logits, targets, weights = sample(dtype)
    ours = value_and_pullback(token_losses, logits, targets, weights, z_loss_multiplier=z_loss)
    wide = logits.astype(float), targets, weights.astype(float)
    expected = value_and_pullback(oracles.softmax_losses, *wide, z_loss=z_loss)
  assert [x.dtype.name for x in ours] == [dtype, dtype]
  assert [x.shape for x in ours] == [(B, T), (B, T, V)]
  for mine, theirs in zip(ours, expected, strict=True):
    assert oracles.relative_error(mine, theirs) < tolerance


def test_a_scaled_outer_loss_scales_the_gradient():
  logits, targets, weights = sample("float32")

  @jax.jit
  def loss(scale):
    return jax.grad(lambda x: scale * (token_losses(x, targets, 0.03) * weights).sum())(logits)

  np.testing.assert_allclose(loss(-40.0), -40 * loss(1.0), rtol=1e-5, atol=1e-6)


def test_extreme_logits_stay_finite():
  logits, targets, weights = sample("float32", scale=1e4)
  losses, gradient = value_and_pullback(token_losses, logits, targets, weights)
  assert np.isfinite(losses).all()
  assert np.isfinite(gradient).all()
  assert np.asarray(losses).min() >= 0


def test_bfloat16_logits():
  logits, targets, weights = sample("bfloat16")
  ours = value_and_pullback(token_losses, logits, targets, weights, z_loss_multiplier=0.03)
  wide = logits.astype(np.float32), targets, weights.astype(np.float32)
  expected = value_and_pullback(oracles.softmax_losses, *wide, z_loss=0.03)
  assert [x.dtype.name for x in ours] == ["bfloat16", "bfloat16"]
  for mine, theirs in zip(ours, expected, strict=True):
    assert oracles.relative_error(mine, theirs) < 1e-2  # bfloat16 has 8 bits


def vocabulary_sized(function, *args) -> set:
  """Primitives with a non-float result of B x T x V elements: what a one-hot array is made of."""
  equations = tiny.equations(jax.make_jaxpr(function)(*args))
  sized = [(e, v.aval) for e in equations for v in e.outvars if v.aval.size == B * T * V]
  return {e.primitive.name for e, aval in sized if not jnp.issubdtype(aval.dtype, jnp.floating)}


def test_the_forward_pass_makes_no_one_hot_array():
  logits, targets, _ = sample("float32")
  assert vocabulary_sized(lambda x: token_losses(x, targets, 0.03), logits) == set()
  assert vocabulary_sized(lambda x: oracles.softmax_losses(x, targets, 0.03), logits) != set()  # the check can see one
  residuals = jax.eval_shape(lambda x: jax.vjp(lambda y: token_losses(y, targets, 0.03), x)[1], logits)
  assert sum(leaf.size == B * T * V for leaf in jax.tree.leaves(residuals)) == 1  # the logits, and no second array
