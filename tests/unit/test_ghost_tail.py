"""An oracle that shares nothing with the engine's rules: cotangents from the VJP of the part of the model that follows.

The score of a parameter in y = f(x, W) is <b_i, f(x_i, U)>, where b_i is the cotangent at y. Here b comes from plain
autodiff of the tail, a function of y written out by hand, and f(x, U) from NumPy.
n = 6 examples, T = 3 positions, D = 5, F = 7, C = 4 features.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxghost.ghost import GhostEngine

N, T, D, F, C = 6, 3, 5, 7, 4
SPREAD = nnx.initializers.normal(1.0)


class Model(nnx.Module):
  def __init__(self):
    self.first = nnx.Linear(D, F, bias_init=SPREAD, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    self.norm = nnx.RMSNorm(F, scale_init=SPREAD, param_dtype=jnp.float64, rngs=nnx.Rngs(1))
    self.second = nnx.Linear(F, C, bias_init=SPREAD, param_dtype=jnp.float64, rngs=nnx.Rngs(2))

  def __call__(self, x):
    return self.second(jnp.tanh(self.norm(self.first(x))))


def losses(y, batch):
  return jnp.square(y - batch["y"]).sum(-1), batch["weight"]


def batch_of(seed, rows):
  rng = np.random.default_rng(seed)
  return {
    "x": jnp.asarray(rng.normal(size=(rows, T, D))),
    "y": jnp.asarray(rng.normal(size=(rows, T, C))),
    "weight": jnp.asarray(rng.random((rows, T)) > 0.3, float),
  }


def mean(y, batch):
  values, weights = losses(y, batch)
  return (values * weights).sum() / weights.sum()


@jax.jit
def cotangents(model, train, val):
  """(G, outputs of the first layer and of the activation, cotangents at the outputs of the three layers)."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  g = jax.grad(lambda p: mean(nnx.merge(graphdef, p, rest)(val["x"]), val))(params)
  first = model.first(train["x"])
  hidden = jnp.tanh(model.norm(first))
  b_first = jax.grad(lambda y: mean(model.second(jnp.tanh(model.norm(y))), train))(first)
  b_norm = jax.grad(lambda y: mean(model.second(jnp.tanh(y)), train))(model.norm(first))
  b_second = jax.grad(lambda y: mean(y, train))(model.second(hidden))
  return g, first, hidden, b_first, b_norm, b_second


@pytest.mark.parametrize("schedule", ["two_pass", "concat"])
def test_scores_are_tail_cotangents_against_the_direction(schedule):
  with jax.enable_x64(True):
    model = Model()
    train, val = batch_of(1, N), batch_of(2, N - 4)
    result = GhostEngine(schedule=schedule).score(model, train, val, loss_fn=lambda m, b: losses(m(b["x"]), b))
    g, first, hidden, b_first, b_norm, b_second = cotangents(model, train, val)
    share = np.asarray(train["weight"]).sum(-1) / np.asarray(train["weight"]).sum()
    scaled = np.asarray(first) / np.sqrt(np.square(first).mean(-1, keepdims=True) + model.norm.epsilon)
    expected = {
      "first/kernel": np.einsum("ntf,ntf->n", b_first, np.asarray(train["x"]) @ np.asarray(g["first"]["kernel"][...])),
      "first/bias": np.einsum("ntf,f->n", b_first, g["first"]["bias"][...]),
      "norm/scale": np.einsum("ntf,ntf,f->n", b_norm, scaled, g["norm"]["scale"][...]),
      "second/kernel": np.einsum("ntc,ntc->n", b_second, np.asarray(hidden) @ np.asarray(g["second"]["kernel"][...])),
      "second/bias": np.einsum("ntc,c->n", b_second, g["second"]["bias"][...]),
    }
    assert result.per_param.keys() == expected.keys()
    for label, value in expected.items():
      np.testing.assert_allclose(result.per_param[label] * share, value, rtol=1e-11, atol=1e-14, err_msg=label)
