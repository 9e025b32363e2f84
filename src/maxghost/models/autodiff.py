"""Small tools for hand-written backward passes."""

import contextlib
import contextvars

import jax
import jax.numpy as jnp

_forward_mode = contextvars.ContextVar("maxghost_forward_mode", default=False)
_in_order = contextvars.ContextVar("maxghost_gradients_in_order", default=False)


@contextlib.contextmanager
def forward_mode():
  """Inside, functions of this project with a hand-written backward pass are traced as plain JAX, so that `jax.jvp`
  can pass through them (custom_vjp has no forward mode). Same values."""
  token = _forward_mode.set(True)
  try:
    yield
  finally:
    _forward_mode.reset(token)


def in_forward_mode() -> bool:
  return _forward_mode.get()


@contextlib.contextmanager
def gradients_in_order():
  """Inside, a backward pass goes on to the layer before only when a dense or probed layer's weight gradient, and its
  scores, are there. Where these have further uses the TPU compiler puts them off, left alone, and keeps the inputs and
  cotangents of several layers for them. Same values."""
  token = _in_order.set(True)
  try:
    yield
  finally:
    _in_order.reset(token)


def barrier(*trees):
  """The trees; inside `gradients_in_order`, none of their arrays is there before all are."""
  if not _in_order.get():
    return trees
  leaves, tree = jax.tree.flatten(trees)
  sized = [x.dtype != jax.dtypes.float0 for x in leaves]
  held = iter(jax.lax.optimization_barrier([x for x, flag in zip(leaves, sized, strict=True) if flag]))
  return jax.tree.unflatten(tree, [next(held) if flag else x for x, flag in zip(leaves, sized, strict=True)])


def after(tree, read):
  """The arrays of `tree`, bit for bit, but not there before the arrays in `read` are, on any backend.

  XLA decides on CPU on copies and on order when optimization barriers are gone already: there, only a value that
  depends on another comes after it. A sum of squares never is the most negative number, which XLA does not know.
  """
  floats = [x for x in jax.tree.leaves(read) if jnp.issubdtype(x.dtype, jnp.inexact)]
  squares = [jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in floats]
  total = sum(squares, jnp.zeros((), jnp.float32))
  never = total == jnp.finfo(total.dtype).min
  return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)


def split_residual(x):
  """x itself; the cotangents of a branch that starts here are added up before they meet those of x's other uses.

  Float addition depends on its order. With this at the start of a residual branch the order does not depend on how
  the branch's first layer writes its own backward pass, so a run with scores has the bits of one without.
  """
  return x if in_forward_mode() else _split_residual(x)


@jax.custom_vjp
def _split_residual(x):
  return x


_split_residual.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent,))


def join_cotangents(xs: list) -> list:
  """xs itself; inside `gradients_in_order` the cotangents of all of them are there before one is used.

  For the branches of a product: left alone, the TPU compiler forms each branch's cotangent where that branch's dense
  layer uses it, and keeps the product's cotangent and the branches for the last of them. Formed at once, they take the
  place of what they are formed from.
  """
  return list(xs) if in_forward_mode() else _join_cotangents(list(xs))


@jax.custom_vjp
def _join_cotangents(xs):
  return xs


_join_cotangents.defvjp(lambda xs: (xs, None), lambda _, cotangents: (list(barrier(*cotangents)),))
