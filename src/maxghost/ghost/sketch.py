"""Sketches of per-example gradients: their products with random directions, from one backward pass.

<g_i, g_j> = E[<g_i, z> <g_j, z>] for any z with E[z zᵀ] = 1, such as a direction of rank one (z = a bᵀ, entries ±1),
which costs I + O per token instead of I O (Choe et al., arXiv:2405.13954, also sketch gradients along factors). A
matrix so narrow that it saves nothing gets a z of independent entries. The products of different parameters are kept
separate, since their cross terms would only add noise.

R directions, n examples, T positions; a parameter's matrix view is [I, O].
"""

import jax
import jax.numpy as jnp

from maxghost.ghost.attach import Twin
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.schedules.base import Model
from maxghost.ghost.schedules.passes import train_pass

# Of a sketch's twin. Adapters of rank 2 have no matrix wide enough for directions of rank one.
SPEC = DirectionSpec(rank=1, must_gain=False)


def random_directions(twin: Twin, key, scale: dict | None = None) -> dict:
  """{label: parts} for `Twin.direction_state`: twin.num_sets random directions of every scored parameter.

  scale: {label: array}, to sketch P g instead of g for an elementwise P; of rank one, `factored` replaces it.
  """
  parts, keys_P = {}, _fold_in(key, len(twin.scored))
  sides_P2 = jax.vmap(lambda own: _fold_in(own, 2))(keys_P)
  for own, sides_2, param in zip(keys_P, sides_P2, twin.scored, strict=True):
    axis, shapes = len(param.stack_shape), param.part_shapes(twin.num_sets)
    shape = (*param.stack_shape, *param.shape)
    factor = jnp.ones(shape, jnp.float32) if scale is None else scale[param.label].astype(jnp.float32)
    if not param.low_rank:
      signs = jax.random.rademacher(own, shapes["gradient"], jnp.float32)
      parts[param.label] = (signs * jnp.expand_dims(factor, axis),)
      continue
    # With a scale the last axes of both are those of the factors, groups included.
    rows_LI, columns_LO = (jnp.expand_dims(x, axis) for x in factored(param.parameter.matrices(factor, axis)))
    left, right = (jax.random.rademacher(k, s, jnp.float32) for k, s in zip(sides_2, shapes.values(), strict=True))
    parts[param.label] = (left * rows_LI[..., :, None], right * columns_LO[..., None, :])
  return parts


def _fold_in(key, count: int):
  """[count] keys, `fold_in` of 0, 1, ...: as one operation, which compiles sooner than one for each."""
  return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def sketch_pass(twin: Twin, params, rest, loss_fn, batch, key, num_directions: int, scale: dict | None = None):
  """Additive sketches f32[M, R, n(, T)] of the batch, one block for each scored parameter and layer.

  twin: of `SPEC` and one validation set. `jax.vmap` runs what does not depend on a direction once.
  """

  def one(key):
    state = twin.direction_state(random_directions(twin, key, scale))
    found = train_pass(Model(twin.graphdef, params, rest), loss_fn, batch, twin, state).scores
    pairs = [(found[p.label], len(p.stack_shape) + 1) for p in twin.scored]
    return jnp.concatenate([scores.reshape(-1, *scores.shape[depth:]) for scores, depth in pairs])

  return jax.vmap(one, out_axes=1)(jax.random.split(key, num_directions))


def sketch_gradient(twin: Twin, gradient: dict, key, num_directions: int, scale: dict | None = None):
  """Sketch f32[M, R] of one gradient {label: array}, of a batch that is one query, in the blocks of `sketch_pass`."""

  def one(key):
    parts = random_directions(twin, key, scale)
    return jnp.concatenate([_along(p, parts[p.label], gradient[p.label]) for p in twin.scored])

  return jax.lax.map(one, jax.random.split(key, num_directions)).T


def _along(param, parts, gradient):
  """<gradient, direction> [layers] of one parameter."""
  axis = len(param.stack_shape)
  if param.low_rank:
    left, right = parts
    left_LI, right_LO = (x.squeeze(axis) for x in (left.squeeze(-1), right.squeeze(-2)))
    product = jnp.einsum("...io,...i,...o->...", param.parameter.matrices(gradient, axis), left_LI, right_LO)
  else:
    product = parts[0].squeeze(axis) * gradient
  return product.sum(tuple(range(axis, product.ndim))).reshape(-1)


def factored(scale):
  """(rows [..., I], columns [..., O]) whose outer product has the row and column means of scale [..., I, O]."""
  mean = scale.mean((-2, -1))
  return scale.mean(-1), scale.mean(-2) / jnp.maximum(mean, jnp.finfo(scale.dtype).tiny)[..., None]
