"""A VJP whose halves run in two scans: values of one scan's autodiff, and no more saved than that policy saves.

L = 3 layers, N = 5 rows, D = 4 features.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxghost.ghost.schedules.reverse_scan.layer import SavedVjp
from maxghost.models import stack

L, N, D = 3, 5, 4


@jax.custom_vjp
def scored(x, w, direction):
  return x @ w


def _forward(x, w, direction):
  return x @ w, (x, w, direction)


def _backward(residuals, g):
  x, w, direction = residuals
  return g @ w.T, x.T @ g, (x.T @ g) * direction


scored.defvjp(_forward, _backward)


def layer(w, direction, x, rows, positions):
  return jnp.tanh(scored(jnp.sin(x), w, direction)) * rows[positions]


@pytest.mark.parametrize(("policy", "num_saved"), [("none", None), ("minimal", 1), ("full", 0)])
def test_two_scans_equal_one_and_the_direction_comes_later(policy, num_saved):
  rng = np.random.default_rng(0)
  w, direction = rng.normal(size=(L, D, D)), rng.normal(size=(L, D, D))
  x, rows = rng.normal(size=(N, D)), rng.normal(size=(2 * N, 1))
  positions = np.arange(N) * 2
  found = {}

  def two_scans(w, direction, x):
    vjp = SavedVjp(stack.remat(layer, policy))

    def ahead(x, w):
      y, saved = vjp.forward(w, jnp.zeros((D, D)), x, rows, positions)
      return y, (x, saved)

    y, (inputs, saved) = lax.scan(ahead, x, w)
    found["saved"] = [a.shape for a in saved]

    def back(ct, scanned):
      x, saved, w, direction = scanned
      d_w, d_direction, ct, *_ = vjp.backward(saved, ct, w, direction, x, rows, positions)
      return ct, (d_w, d_direction)

    ct, (d_w, d_direction) = lax.scan(back, jnp.ones_like(y), (inputs, saved, w, direction), reverse=True)
    return d_w, d_direction, ct

  def one_scan(w, direction, x):
    body = lambda x, scanned: (layer(*scanned, x, rows, positions), None)  # noqa: E731
    return lax.scan(body, x, (w, direction))[0].sum()

  with jax.enable_x64(True):
    given = tuple(map(jnp.asarray, (w, direction, x)))
    out = jax.jit(two_scans)(*given)
    for value, expected in zip(out, jax.grad(one_scan, argnums=(0, 1, 2))(*given), strict=True):
      np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-14)
  assert num_saved is None or len(found["saved"]) == num_saved
  assert (L, D, D) not in found["saved"], "weights and directions are arguments, not residuals"
