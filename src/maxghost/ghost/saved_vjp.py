"""A VJP in two halves that may run in different loops: what the forward half saved is plain arrays.

`jax.vjp` returns the residuals that are arguments (`args_res`) apart from those it had to compute
(`opaque_residuals`). Only the latter have to be stored. Arguments are given again to the backward half, and there an
argument that the value does not depend on, such as a direction, may be another one than in the forward half.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.models import autodiff

_SMALL = 8  # a saved array this many times smaller than the cotangent is a statistic, not an activation


class SavedVjp:
  """The VJP of `function(*arguments)`, a value that is an array or a pytree of arrays.

  `forward` and `backward` are traced in this order, each as often as one likes, with arguments of the same shapes. What
  is saved between them is decided by jax.checkpoint around `function`, if there is one.
  """

  def __init__(self, function: Callable):
    self._function = function
    self._pull: Any = None

  def forward(self, *arguments):
    """(value, saved): `saved` is a list of arrays."""
    value, self._pull = jax.vjp(self._function, *arguments)
    return value, self._pull.opaque_residuals

  def backward(self, saved, cotangent, *arguments):
    """Cotangents of the arguments, from what `forward` saved for the same ones."""
    return dataclasses.replace(self._pull, args_res=list(arguments), opaque_residuals=saved)(cotangent)


def pull_in_order(function: Callable, arguments: tuple, cotangent):
  """Cotangents of the arguments of `function`, by a backward pass that holds little at a time.

  As `jax.vjp(function, *arguments)[1](cotangent)`, inside `autodiff.gradients_in_order`, and with the statistics of the
  forward pass (log-sum-exps, inverse norms) there before the backward pass starts: what they are taken from may be 100
  times as large, and the TPU compiler would keep it.
  """
  vjp = SavedVjp(function)
  _, saved = vjp.forward(*arguments)
  limit = max(x.nbytes for x in jax.tree.leaves(cotangent)) // _SMALL
  small = [jnp.issubdtype(x.dtype, jnp.floating) and x.nbytes <= limit for x in saved]
  statistics = [x for x, flag in zip(saved, small, strict=True) if flag]
  statistics, cotangent = jax.lax.optimization_barrier((statistics, cotangent))
  ready = iter(statistics)
  saved = [next(ready) if flag else x for x, flag in zip(saved, small, strict=True)]
  with autodiff.gradients_in_order():
    return vjp.backward(saved, cotangent, *arguments)
