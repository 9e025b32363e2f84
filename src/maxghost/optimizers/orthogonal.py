"""Newton-Schulz as a function of matrices, and the operator that a step of Muon from rest is made of. Products only.

Newton-Schulz multiplies X by p(X Xᵀ) from the left, five times, with p(a) = c0 + c1 a + c2 a²: U S Vᵀ becomes
U f(S) Vᵀ. m rows, n columns, m <= n; leading axes number matrices.
"""

import jax
import jax.numpy as jnp

COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5  # of optax and MaxText
_ROOT_STEPS, _INVERSE_STEPS = 8, 5  # for p / c0, which is between 0.18 and 1: errors below 1e-16


def balanced(x, y):
  """sqrt(H) Y sqrt(K) for x [..., I, O] with |X| <= 1 and y [*lead, ..., I, O]: H X = X K is X after Newton-Schulz.

  It is linear and symmetric in Y, and maps X to its Newton-Schulz iterate. One half stands on either side of Y, as in
  Shampoo, whose step from rest has the powers -1/4 of G Gᵀ and of Gᵀ G (Gupta et al., arXiv:1802.09568).
  """
  if x.shape[-2] > x.shape[-1]:
    return _transposed(balanced(_transposed(x), _transposed(y)))
  c0, c1, c2 = COEFFICIENTS
  one = jnp.eye(x.shape[-2], dtype=x.dtype)
  with jax.default_matmul_precision("highest"):
    for _ in range(STEPS):
      a = x @ _transposed(x)
      bend = c1 * one + c2 * a
      p = c0 * one + a @ bend
      root, inverse = _root(p / c0), 0.58 * one
      for _ in range(_INVERSE_STEPS):
        inverse = inverse @ (2 * one - (root + one) @ inverse)
      rest = bend @ inverse / c0  # sqrt(p(Xᵀ X) / c0) = 1 + Xᵀ rest X, without that larger matrix
      y = c0 * (root @ y)
      y, x = y + y @ _transposed(x) @ rest @ x, p @ x
  return y


def _root(p):
  """The root of p, with eigenvalues between 0.18 and 1: Denman and Beavers' iteration in its form without inverses."""
  one = jnp.eye(p.shape[-1], dtype=p.dtype)
  root, inverse = p, one
  for _ in range(_ROOT_STEPS):
    middle = (3 * one - inverse @ root) / 2
    root, inverse = root @ middle, middle @ inverse
  return root


def _transposed(x):
  return jnp.swapaxes(x, -1, -2)
