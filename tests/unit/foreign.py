"""Per-example oracles for any nnx model and loss: one gradient per example in float64, directions by their formulas.

A loss is `loss_fn(model, batch) -> (losses, weights)`, each [n] or [n, T]. n examples, L stacked layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import tiny
from flax import nnx

from maxghost.ghost import low_rank


def randomized(make, seed: int = 0, scale: float = 0.4) -> nnx.Module:
  """The model that `make(rngs)` builds, with random Params: initial zeros and ones would hide a dropped term."""
  graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
  assert not jax.tree.leaves(rest), "only Params are given values here"
  rng = np.random.default_rng(seed)
  params = jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), params)
  return nnx.merge(graphdef, params, rest)


class Oracle:
  """Gradients of every example of both batches, in float64 whatever the model's dtype; wide=False: in that dtype.

  gradients: {label: [n, *parameter]} of sum(losses * weights) of each training example; weights [n]; G: one
  {label: array} per validation batch, the gradient of its mean loss; g: that of the training batch.
  """

  def __init__(self, model, loss_fn, train, *vals, wide: bool = True):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    batches = [train, *vals]

    def total(params, rest, row):
      model = nnx.merge(graphdef, params, rest)
      losses, weights = loss_fn(_computing_in_float64(model) if wide else model, jax.tree.map(lambda v: v[None], row))
      return (losses * weights).sum(), weights.sum()

    widen = _wide if wide else np.asarray
    with jax.enable_x64(wide), tiny.cheap_compilation():
      rows = jax.tree.map(lambda *parts: np.concatenate([widen(p) for p in parts]), *batches)
      params, rest = jax.tree.map(widen, (params, rest))
      gradients = jax.jit(jax.vmap(jax.grad(total, has_aux=True), in_axes=(None, None, 0)))
      flat, weights = gradients(params, rest, rows)
    ends = np.cumsum([len(jax.tree.leaves(b)[0]) for b in batches])[:-1]
    split = {label: np.split(np.asarray(v), ends) for label, v in tiny.by_label(flat).items()}
    weights = np.split(np.asarray(weights), ends)
    self.gradients, self.weights = {label: parts[0] for label, parts in split.items()}, weights[0]
    self.g, *self.G = (
      {label: parts[i].sum(0) / weights[i].sum() for label, parts in split.items()} for i in range(len(batches))
    )

  def adam(self, moments: dict, *, count, kappa=1.0, index=0) -> dict:
    """P_t G, with the constants of the default configuration."""
    return oracles.adam_direction(self.G[index], self.g, moments, count=count, kappa=kappa, b1=0.9, b2=0.95, eps=1e-8)

  def dots(self, u: dict, stacked: int = 0) -> dict:
    """{label: <grad l_i, u>} [n] (or [L, n] below "/layers/")."""
    per_weight = np.where(self.weights > 0, 1 / np.where(self.weights > 0, self.weights, 1), 0)
    return {label: v * per_weight for label, v in oracles.dots(self.gradients, u, stacked).items()}


def total(dots: dict):
  """[n] from {label: [n] or [L, n]}."""
  return sum(v.sum(0) if v.ndim == 2 else v for v in dots.values())


def moments_like(oracle: Oracle, seed: int = 5) -> dict:
  """Adam's second moments as after some steps: of many sizes, none 0, in float32."""
  rng = np.random.default_rng(seed)
  return {label: (1e-2 * rng.random(g.shape) ** 4 + 1e-6).astype(np.float32) for label, g in oracle.g.items()}


def score(engine, *args, **kwargs):
  """`engine.score(...)` with numpy leaves, compiled cheaply."""
  with tiny.cheap_compilation():
    return jax.tree.map(np.asarray, engine.score(*args, **kwargs))


_factor = jax.jit(low_rank.factor, static_argnums=(1, 2))
_factor_for = jax.jit(low_rank.factor_for, static_argnums=(3, 4))


def factor(u, rank: int, label: str = "a/kernel", wide: bool = True):
  """`low_rank.factor` as numpy arrays, computed in float64 or float32."""
  with jax.enable_x64(wide), tiny.cheap_compilation():
    return [np.asarray(x) for x in _factor(np.asarray(u, np.float64 if wide else np.float32), rank, label)]


def factor_for(gradient, weights, u, rank: int, label: str = "a/kernel", wide: bool = True):
  """`low_rank.factor_for` likewise."""
  with jax.enable_x64(wide), tiny.cheap_compilation():
    arrays = jax.tree.map(lambda x: np.asarray(x, np.float64 if wide else np.float32), (gradient, weights, u))
    return [np.asarray(x) for x in _factor_for(*arrays, rank, label)]


def assert_scores(actual: dict, expected: dict, tolerance: float, rounded: dict | None = None) -> None:
  """The same labels, no score that is all zero, and every label (and layer) within a relative tolerance.

  rounded: the expected scores from per-example gradients in the model's own dtype. Scores may be off by ten times
  what its rounding moves any of those.
  """
  if rounded is not None:
    tolerance = max(tolerance, *(10 * oracles.relative_error(rounded[label], v) for label, v in expected.items()))
  assert actual.keys() == expected.keys()
  largest = max(np.abs(value).max() for value in expected.values())
  for label, value in expected.items():
    assert np.abs(value).max() > 1e-6 * largest, f"{label} does not matter here: {np.abs(value).max():.1e}"
    for layer in range(len(value)) if value.ndim == 2 else [...]:
      error = oracles.relative_error(actual[label][layer], value[layer])
      assert error < tolerance, f"{label} {layer}: {error:.1e}"


def _computing_in_float64(model):
  """Layers such as nnx.Embed keep the dtype they were made with, whatever their parameters become."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.Module) and getattr(node, "dtype", None) in (jnp.float32, jnp.bfloat16):
      node.dtype = jnp.float64
  return model


def _wide(x):
  x = np.asarray(x)
  return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
