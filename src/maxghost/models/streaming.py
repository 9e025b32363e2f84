"""Stacked weights that live in pinned host memory and come to the device one segment at a time.

The memory of an array is part of its type (`memory_space`): leaves on the host are fetched, others stay in place.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.models import segments
from maxghost.models.autodiff import join, no_cotangent, separate
from maxghost.parallel import shardings

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_host(x) -> bool:
  """Whether an array or tracer lives in host memory."""
  return getattr(jax.typeof(x), "memory_space", _DEVICE) == _HOST


def any_on_host(tree) -> bool:
  return any(on_host(x) for x in jax.tree.leaves(tree))


def to_host(tree):
  """Every leaf in host memory."""
  return jax.tree.map(lambda x: jax.device_put(x, _HOST), tree)


def to_device(tree):
  """Every leaf in device memory."""
  return jax.tree.map(lambda x: jax.device_put(x, _DEVICE) if on_host(x) else x, tree)


def read_late(function: Callable, tree, norm):
  """function(tree on the device). What is in host memory is fetched when `norm` is known, not before, as XLA would: in
  the branch of a condition on it, with NaN where norm is not finite. Not on CPUs, whose memories are one, and whose
  devices can wait for each other without end in collectives of a branch."""
  fetched = lambda tree: function(to_device(tree))  # noqa: E731
  if not any_on_host(tree) or shardings.platform() == "cpu":
    return fetched(tree)
  shapes = jax.eval_shape(fetched, tree)
  unknown = lambda tree: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)  # noqa: E731
  return jax.lax.cond(jnp.isfinite(norm), fetched, unknown, tree)


def like(tree, template):
  """`tree` with each leaf moved to the memory of the same leaf of `template`."""
  return jax.tree.map(lambda x, t: jax.device_put(x, _HOST) if on_host(t) else x, tree, template)


def fetch(stacked, index):
  """Entry `index` of the leading axis of every leaf, in device memory."""
  return to_device(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked))


def after(index, tree):
  """`index`, available after the smallest leaf of `tree`: else XLA would keep the first segment for all loops."""
  leaves = [x for x in jax.tree.leaves(tree) if not on_host(x)]
  index = jnp.asarray(index)
  return jax.lax.optimization_barrier((index, min(leaves, key=jnp.size)))[0] if leaves else index


def loop(step: Callable, carry, xs, stacked, *, reverse: bool = False) -> tuple[Any, Any]:
  """`lax.scan` of step(carry, x, segment) -> (carry, y) over the leading axis of xs and stacked: (carry, ys).

  Leaves of `stacked` on the host are fetched one step ahead, so that transfer and computation overlap and two segments
  are on the device. Leaves of xs on the host are fetched when they are used.
  """
  if not any_on_host(stacked):
    plain = lambda carry, scanned: step(carry, to_device(scanned[0]), scanned[1])  # noqa: E731
    return jax.lax.scan(plain, carry, (xs, stacked), reverse=reverse)
  num = jax.tree.leaves(stacked)[0].shape[0]

  def body(state, scanned):
    (carry, here), (index, x) = state, scanned
    ahead = fetch(stacked, jnp.maximum(index - 1, 0) if reverse else jnp.minimum(index + 1, num - 1))
    carry, y = step(carry, to_device(x), here)
    return (carry, ahead), y

  first = fetch(stacked, after(num - 1 if reverse else 0, carry))
  (carry, _), ys = jax.lax.scan(body, (carry, first), (jnp.arange(num), xs), reverse=reverse)
  return carry, ys


def scan(body: Callable, carry, xs, shared, segment_lengths: tuple[int, ...]):
  """Runs carry = body(carry, x, shared) over the layers, with the leaves of xs on the host streamed by segments.

  Values and gradients are those of `segments.scan`. The gradient of a leaf on the host is sent there segment by
  segment, so that device memory holds the weights of two segments and the gradient of one.
  carry: a pytree of floats. shared: inputs of every layer. segment_lengths: as in `segments.scan`, at least one.
  """
  if not segment_lengths:
    raise ValueError("streamed layers need segments: give segment_lengths")
  segments.check(jax.tree.leaves(xs)[0].shape[0], segment_lengths)
  floats, others = separate_floats(segments.split(xs, segment_lengths[0]))
  shared_floats, shared_others = separate_floats(shared)

  def segment(carry, floats, shared_floats, others, shared_others):
    xs, shared = join(floats, others), join(shared_floats, shared_others)
    return segments.scan(lambda c, x: (body(c, x, shared), None), carry, xs, segment_lengths[1:])[0]

  def through(carry, floats, shared_floats, others, shared_others):
    step = lambda x, _, here: (segment(x, here[0], shared_floats, here[1], shared_others), x)  # noqa: E731
    return loop(step, carry, None, (floats, others))

  def forward(*arguments):
    is_leaf = lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal)  # noqa: E731
    of = lambda get: jax.tree.map(get, arguments, is_leaf=is_leaf)  # noqa: E731
    moving, still = (of(lambda x, flag=flag: x.value if x.perturbed == flag else None)[1] for flag in (True, False))
    out, boundaries = through(*(values := of(lambda x: x.value)))
    return out, (boundaries, moving, still, *values[2:])

  def backward(residuals, cotangent):
    boundaries, moving, still, shared_floats, others, shared_others = residuals

    def step(state, x, here):
      cotangent, shared_cotangents = state
      moving_here, still_here, others_here = here
      apply = lambda c, own, all: segment(c, join(own, still_here), all, others_here, shared_others)  # noqa: E731
      _, pull = jax.vjp(apply, x, moving_here, shared_floats)
      cotangent, weights, added = pull(cotangent)
      return (cotangent, jax.tree.map(jnp.add, shared_cotangents, added)), like(weights, moving)

    zeros = jax.tree.map(jnp.zeros_like, shared_floats)
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    cotangent = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if is_zero(x) else x, cotangent)
    state, stacked = (cotangent, zeros), (moving, still, others)
    (cotangent, shared_cotangents), weights = loop(step, state, boundaries, stacked, reverse=True)
    return cotangent, weights, shared_cotangents, *(jax.tree.map(no_cotangent, t) for t in (others, shared_others))

  run = jax.custom_vjp(lambda *arguments: through(*arguments)[0])
  run.defvjp(forward, backward, symbolic_zeros=True)
  return run(carry, floats, shared_floats, others, shared_others)


def separate_floats(tree):
  """(the tree of the floats, the tree of the other leaves), see `autodiff.separate`."""
  return separate(tree, lambda x: jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact))
