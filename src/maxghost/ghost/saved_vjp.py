"""A VJP in two halves that may run in different loops: what the forward half saved is plain arrays.

`jax.vjp` returns the residuals that are arguments (`args_res`) apart from those it had to compute
(`opaque_residuals`). Only the latter have to be stored. Arguments are given again to the backward half, and there an
argument that the value does not depend on, such as a direction, may be another one than in the forward half.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


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
