"""Linear operators that stand for Muon's step without following a path, for the table of leave out and follow.

A step of a matrix is D(g) = c NS(X), X = N / |N|, N linear in the gradient g. Newton-Schulz multiplies from the left by
a polynomial of X Xᵀ, L X, which is X R with the same polynomial of Xᵀ X. Each form holds something fixed:

    left, right     L or R of this step: c L Y / |N|, c Y R / |N|
    both halves     sqrt(L) Y sqrt(R), as Shampoo has it

All other parameters are scored along AdamW's path, as `Muon` does.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.optimizers import Parameter, orthogonal
from maxghost.optimizers.base import Response
from maxghost.optimizers.muon import Muon, PathResponse

FORMS = ("left", "right", "both halves")


@dataclasses.dataclass(frozen=True)
class FrozenMuon(Muon):
  """Muon scored by one of FORMS."""

  form: str = "left"

  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Response:
    found = super().response(parameter, gradient, arrays, scalars)
    if not isinstance(found, PathResponse):
      return found
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return FrozenResponse(**fields, form=self.form)


@dataclasses.dataclass(frozen=True)
class FrozenResponse(PathResponse):
  """One matrix's operator, which is symmetric."""

  form: str = "left"

  def transpose(self, x):
    return self.apply(x)

  def apply(self, x):
    y = x.astype(self.g.dtype).reshape(-1, *self.g.shape)
    view, n, share = self.matrix.view, *self._momentum()
    size = jnp.sqrt(jnp.sum(jnp.square(view(n)), (-2, -1), keepdims=True)) + self.rule.adam.eps
    scale = self.rule.scale(*view(n).shape[-2:]) * share / size
    return (scale[None] * operator(self.form, view(n) / size, view(y))).reshape(x.shape)

  def _momentum(self):
    """(N, the weight of g in it)."""
    beta, t = self.rule.beta, self.count + 1
    held = beta / (1 - beta ** (t + 1))
    share = (1 - beta) * (held + 1 / (1 - beta**t))
    return held * beta * self.momentum + share * self.g, share


def operator(form: str, x, y):
  """L Y, Y R or sqrt(L) Y sqrt(R) for x [..., I, O] with |X| <= 1 and y [K, ..., I, O]."""
  if form == "both halves":
    return orthogonal.balanced(x, y)
  if form == "right":
    return jnp.swapaxes(operator("left", jnp.swapaxes(x, -1, -2), jnp.swapaxes(y, -1, -2)), -1, -2)
  c0, c1, c2 = orthogonal.COEFFICIENTS
  one = jnp.broadcast_to(jnp.eye(x.shape[-2], dtype=x.dtype), (*x.shape[:-1], x.shape[-2]))
  for _ in range(orthogonal.STEPS):
    a = x @ jnp.swapaxes(x, -1, -2)
    p = c0 * one + c1 * a + c2 * a @ a
    x, y = p @ x, jax.vmap(functools.partial(jnp.matmul, p))(y)
  return y
