"""Newton-Schulz as a function of matrices, and the operator that a step of Muon from rest is made of. Products only.

Newton-Schulz multiplies X by p(X Xᵀ) from the left, five times, with p(a) = c0 + c1 a + c2 a²: U S Vᵀ becomes
U f(S) Vᵀ. m rows, n columns, m <= n; leading axes number matrices.
"""

import jax
import jax.numpy as jnp

COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5  # of optax and MaxText
_ROOT_STEPS, _INVERSE_STEPS = 8, 5  # for p / c0, which is between 0.18 and 1: errors below 1e-16


def balanced(x, y):
  """sqrt(H) Y sqrt(K) for x [..., I, O] with |X| <= 1 and y [K, ..., I, O]: H X = X K is X after Newton-Schulz.

  It is linear and symmetric in Y, and maps X to its Newton-Schulz iterate. One half stands on either side of Y, as in
  Shampoo, whose step from rest has the powers -1/4 of G Gᵀ and of Gᵀ G (Gupta et al., arXiv:1802.09568).
  """
  if x.shape[-2] > x.shape[-1]:
    return balanced(x.mT, y.mT).mT
  c0, c1, c2 = COEFFICIENTS
  one = jnp.broadcast_to(jnp.eye(x.shape[-2], dtype=x.dtype), (*x.shape[:-1], x.shape[-2]))

  def root_step(_, state):
    """Of Denman and Beavers' iteration in its form without inverses: (p, 1) -> (sqrt(p), its inverse)."""
    root, inverse = state
    middle = (3 * one - inverse @ root) / 2
    return root @ middle, middle @ inverse

  def iteration(_, state):
    x, y = state
    a = x @ x.mT
    bend = c1 * one + c2 * a
    p = c0 * one + a @ bend
    root, _ = jax.lax.fori_loop(0, _ROOT_STEPS, root_step, (p / c0, one))
    of_root_and_one = lambda _, z: z @ (2 * one - (root + one) @ z)  # noqa: E731
    inverse = jax.lax.fori_loop(0, _INVERSE_STEPS, of_root_and_one, 0.58 * one)
    rest = bend @ inverse / c0  # sqrt(p(Xᵀ X) / c0) = 1 + Xᵀ rest X, without that larger matrix
    y = jax.vmap(lambda y: root @ y)(c0 * y)
    return p @ x, y + jax.vmap(lambda y: y @ x.mT @ rest @ x)(y)

  with jax.default_matmul_precision("highest"):
    return jax.lax.fori_loop(0, STEPS, iteration, (x, y))[1]
