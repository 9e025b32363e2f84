"""Sketches of per-example gradients: their products with random directions, from one backward pass.

<g_i, g_j> = E[<g_i, z> <g_j, z>] for any z with E[z zᵀ] = 1, such as a direction of rank one (z = a bᵀ, entries ±1),
which costs I + O per token instead of I O (Choe et al., arXiv:2405.13954, also sketch gradients along factors). A
matrix so narrow that it saves nothing gets a z of independent entries. The products of different parameters are kept
separate, since their cross terms would only add noise.

With a side k > 1 the R directions come in R / k² groups of all k x k pairs of k vectors a and k vectors b, so that a
group is a projected gradient Aᵀ g B (as in the same paper, and TrackStar, arXiv:2410.17413): the products cost 2 R / k
vectors in place of 2 R. Groups are independent of each other, the pairs of one group are not.

R directions, n examples, T positions; a parameter's matrix view is [I, O].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxghost.ghost.attach import Twin
from maxghost.ghost.directions import DirectionSpec, products
from maxghost.ghost.schedules.base import Model
from maxghost.ghost.schedules.passes import train_pass

# Of a sketch's twin. Adapters of rank 2 have no matrix wide enough for directions of rank one.
SPEC = DirectionSpec(rank=1, must_gain=False)


def random_directions(twin: Twin, key, scale: dict | None = None, right=None, own=None) -> dict:
  """{label: parts} for `Twin.direction_state`: twin.num_sets random directions of every scored parameter.

  scale: {label: array}, to sketch P g instead of g for an elementwise P; of rank one, `factored` replaces it. right,
  own: keys in place of `key` for the vectors b, and for directions of independent entries.
  """
  count, parts = len(twin.scored), {}
  folded = jax.vmap(jax.random.fold_in, (None, 0))  # one operation, which compiles sooner than one for each
  keys_P3 = zip(*(folded(key if k is None else k, jnp.arange(count)) for k in (own, key, right)), strict=True)
  for (own, *sides), param in zip(keys_P3, twin.scored, strict=True):
    axis, shapes = len(param.stack_shape), param.part_shapes(twin.num_sets)
    shape = (*param.stack_shape, *param.shape)
    factor = jnp.ones(shape, jnp.float32) if scale is None else scale[param.label].astype(jnp.float32)
    if not param.low_rank:
      signs = jax.random.rademacher(own, shapes["gradient"], jnp.float32)
      parts[param.label] = (signs * jnp.expand_dims(factor, axis),)
      continue
    # With a scale the last axes of both are those of the factors, groups included.
    rows_LI, columns_LO = (jnp.expand_dims(x, axis) for x in factored(param.parameter.matrices(factor, axis)))
    drawn = (jax.random.fold_in(side, number) for number, side in enumerate(sides))
    left, right = (jax.random.rademacher(k, s, jnp.float32) for k, s in zip(drawn, shapes.values(), strict=True))
    parts[param.label] = (left * rows_LI[..., :, None], right * columns_LO[..., None, :])
  return parts


def _for_each(function: Callable, key, num_directions: int, side: int):
  """[R, ...] of function(keys of a, of b, of independent entries); what needs only a or b is computed once for each."""
  own_R = jax.random.split(key, num_directions)
  if side == 1:
    return jax.vmap(lambda own: function(own, own, own))(own_R)
  own_Gkk = own_R.reshape(-1, side, side)
  for axes in ((None, 0, 0), (0, None, 0), (0, 0, 0)):
    function = jax.vmap(function, axes)
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), function(own_Gkk[:, :, 0], own_Gkk[:, 0], own_Gkk))


def sketch_pass(
  twin: Twin, params, rest, loss_fn, batch, key, num_directions: int, scale: dict | None = None, side: int = 1
):
  """Additive sketches f32[M, R, n(, T)] of the batch, one block for each scored parameter and layer.

  twin: of `SPEC` and one validation set. `jax.vmap` runs what does not depend on a direction once.
  """

  def one(*keys):
    state = twin.direction_state(random_directions(twin, keys[0], scale, *keys[1:]))
    found = train_pass(Model(twin.graphdef, params, rest), loss_fn, batch, twin, state).scores
    pairs = [(found[p.label], len(p.stack_shape) + 1) for p in twin.scored]
    return jnp.concatenate([scores.reshape(-1, *scores.shape[depth:]) for scores, depth in pairs])

  return jnp.moveaxis(_for_each(one, key, num_directions, side), 0, 1)


def sketch_gradient(twin: Twin, gradient: dict, key, num_directions: int, scale: dict | None = None, side: int = 1):
  """Sketch f32[M, R] of one gradient {label: array}, of a batch that is one query, in the blocks of `sketch_pass`."""

  def one(*keys):
    parts = random_directions(twin, keys[0], scale, *keys[1:])
    return jnp.concatenate([products(p, gradient[p.label], parts[p.label]).reshape(-1) for p in twin.scored])

  return _for_each(one, key, num_directions, side).T


def factored(scale):
  """(rows [..., I], columns [..., O]) whose outer product has the row and column means of scale [..., I, O]."""
  mean = scale.mean((-2, -1))
  return scale.mean(-1), scale.mean(-2) / jnp.maximum(mean, jnp.finfo(scale.dtype).tiny)[..., None]
