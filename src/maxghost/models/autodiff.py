"""Small tools for hand-written backward passes."""

import contextvars
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.parallel.shardings import setting

_forward_mode = contextvars.ContextVar("maxghost_forward_mode", default=False)
_inputs_only = contextvars.ContextVar("maxghost_inputs_only", default=False)
_in_order = contextvars.ContextVar("maxghost_gradients_in_order", default=False)

# Traces hand-written backward passes as plain JAX of equal values: custom_vjp has no forward mode for `jax.jvp`.
forward_mode = functools.partial(setting, _forward_mode, True)
in_forward_mode = _forward_mode.get

# Layers inside give a backward pass for their inputs alone: of any rows, and without what a probed layer adds.
inputs_only = functools.partial(setting, _inputs_only, True)
for_inputs_only = _inputs_only.get

# Makes a backward pass compute a dense or probed layer's weight gradient and scores before the previous layer's.
# Otherwise the TPU compiler defers weight gradients that have further uses, and keeps what several layers need for it.
gradients_in_order = functools.partial(setting, _in_order, True)


def barrier(*trees):
  """Returns the trees; inside `gradients_in_order`, no array is available before all of them are."""
  if not _in_order.get():
    return trees
  arrays, others = separate(trees, lambda x: x.dtype != jax.dtypes.float0)
  return join(jax.lax.optimization_barrier(arrays), others)


def after(tree, read):
  """Returns the arrays of `tree`, bit for bit, but available only after those in `read`, on any backend.

  On CPU, XLA removes optimization barriers before it decides on copies and order, so only a data dependency keeps the
  order. XLA does not know that a sum of squares is never the most negative number.
  """
  floats = [x for x in jax.tree.leaves(read) if jnp.issubdtype(x.dtype, jnp.inexact)]
  squares = [jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in floats]
  total = sum(squares, jnp.zeros((), jnp.float32))
  never = total == jnp.finfo(total.dtype).min
  return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)


def separate(tree, chosen: Callable):
  """(the tree of the chosen leaves, the tree of the others), None in place of the leaves that the other one has."""
  return tuple(jax.tree.map(lambda x, flag=flag: x if chosen(x) == flag else None, tree) for flag in (True, False))


def join(first, second):
  """The inverse of `separate`."""
  return jax.tree.map(lambda x, other: other if x is None else x, first, second, is_leaf=lambda x: x is None)


def no_cotangent(x):
  """The cotangent of integers, flags and PRNG keys."""
  return np.zeros(x.shape, jax.dtypes.float0)


def zero_cotangent(x):
  return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else no_cotangent(x)


def with_backward(forward: Callable, backward: Callable, nondiff_argnums: tuple[int, ...] = ()) -> Callable:
  """The function `forward(*arguments)[0]` with a hand-written backward pass; plain JAX inside `forward_mode`.

  forward returns (output, what the backward pass keeps). All arguments are as of `jax.custom_vjp` and its `defvjp`.
  """

  def plain(*arguments):
    return forward(*arguments)[0]

  rule = jax.custom_vjp(plain, nondiff_argnums=nondiff_argnums)
  rule.defvjp(forward, backward)
  return lambda *arguments: plain(*arguments) if in_forward_mode() else rule(*arguments)


# split_residual(x) is x; the cotangents of the branch that starts here are summed before those of other uses are added.
# Float addition depends on its order. At the start of a residual branch this makes the order independent of how the
# branch's first layer writes its backward pass, so a run with scores has the bits of one without.
split_residual = with_backward(lambda x: (x, None), lambda _, cotangent: (cotangent,))

# join_cotangents(xs): the branches of a product; inside `gradients_in_order` all their cotangents are computed before
# one is used. Otherwise the TPU compiler keeps the branches and the product's cotangent until the last one is computed.
join_cotangents = with_backward(lambda xs: (xs, None), lambda _, cotangents: (list(barrier(*cotangents)),))
