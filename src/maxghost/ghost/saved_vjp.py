"""A VJP in two halves that may run in different loops: the forward half saves plain arrays.

`jax.vjp` separates residuals that are arguments (`args_res`) from computed ones (`opaque_residuals`); only the latter
must be stored. The backward half gets the arguments again. An argument that the value does not depend on, such as a
direction, may then differ from that of the forward half.
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

  `forward` must be traced before `backward`; each may be traced several times, with arguments of the same shapes. A
  jax.checkpoint around `function` decides what is saved.
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

  Equals `jax.vjp(function, *arguments)[1](cotangent)`, inside `autodiff.gradients_in_order`. The statistics of the
  forward pass (log-sum-exps, inverse norms) are computed before the backward pass starts. Otherwise the TPU compiler
  would keep their inputs, which may be 100 times as large.
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
