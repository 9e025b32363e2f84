"""Small tools for hand-written backward passes."""

import contextlib
import contextvars

import jax
import jax.numpy as jnp
import numpy as np

_forward_mode = contextvars.ContextVar("maxghost_forward_mode", default=False)
_in_order = contextvars.ContextVar("maxghost_gradients_in_order", default=False)


@contextlib.contextmanager
def forward_mode():
  """Traces this project's hand-written backward passes as plain JAX, with the same values.

  `jax.jvp` needs this, because custom_vjp has no forward mode.
  """
  token = _forward_mode.set(True)
  try:
    yield
  finally:
    _forward_mode.reset(token)


def in_forward_mode() -> bool:
  return _forward_mode.get()


@contextlib.contextmanager
def gradients_in_order():
  """Makes a backward pass compute a layer's weight gradient and scores before it goes on to the previous layer.

  Affects dense and probed layers; values stay the same. Otherwise the TPU compiler defers weight gradients that have
  further uses, and keeps the inputs and cotangents of several layers for them.
  """
  token = _in_order.set(True)
  try:
    yield
  finally:
    _in_order.reset(token)


def barrier(*trees):
  """Returns the trees; inside `gradients_in_order`, no array is available before all of them are."""
  if not _in_order.get():
    return trees
  leaves, tree = jax.tree.flatten(trees)
  sized = [x.dtype != jax.dtypes.float0 for x in leaves]
  held = iter(jax.lax.optimization_barrier([x for x, flag in zip(leaves, sized, strict=True) if flag]))
  return jax.tree.unflatten(tree, [next(held) if flag else x for x, flag in zip(leaves, sized, strict=True)])


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


def no_cotangent(x):
  """The cotangent of integers, flags and PRNG keys."""
  return np.zeros(x.shape, jax.dtypes.float0)


def split_residual(x):
  """Returns x; the cotangents of the branch that starts here are summed before those of x's other uses are added.

  Float addition depends on its order. At the start of a residual branch this makes the order independent of how the
  branch's first layer writes its backward pass, so a run with scores has the bits of one without.
  """
  return x if in_forward_mode() else _split_residual(x)


@jax.custom_vjp
def _split_residual(x):
  return x


_split_residual.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent,))


def join_cotangents(xs: list) -> list:
  """Returns xs; inside `gradients_in_order` all of their cotangents are computed before one is used.

  For the branches of a product. Otherwise the TPU compiler computes each cotangent where its branch's dense layer uses
  it, and keeps the branches and the product's cotangent until the last one. Computed together, the cotangents replace
  these arrays.
  """
  return list(xs) if in_forward_mode() else _join_cotangents(list(xs))


@jax.custom_vjp
def _join_cotangents(xs):
  return xs


_join_cotangents.defvjp(lambda xs: (xs, None), lambda _, cotangents: (list(barrier(*cotangents)),))
