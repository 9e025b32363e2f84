"""Low-rank factors of a direction: a randomized range finder without LAPACK.

u[I, O] is replaced by Q Qᵀ u, with Q[I, r] an orthonormal basis of the range of u (uᵀ u Omega), Omega Gaussian. Scoring
then costs r (I + O) instead of I O per token. For any u and target rank k <= r - 2,
E |u - Q Qᵀ u|_F <= (1 + k / (r - k - 1))^(1/2) (sum of the squared singular values beyond the k-th)^(1/2)
(Halko, Martinsson and Tropp, arXiv:0909.4061, theorem 10.5; the power step only improves it), so a score is off by at
most |grad l_i|_F times that. The error of the batch's sum is known exactly: it is the ledger's direction residual.

Leading axes are batch axes throughout: [..., I, O]. r rank.
"""

import zlib

import jax
import jax.numpy as jnp

from maxghost.ghost import elimination

_HIGHEST = jax.lax.Precision.HIGHEST
_LEAST_WEIGHT = 1e-4  # of the largest: factors are divided by the weights again
_NEGLIGIBLE = 1e-3  # squared length of a column that an orthonormalisation could only enlarge, not make orthogonal


def gains(rank: int, inputs: int, outputs: int) -> bool:
  """Whether factors of this rank halve the cost of scoring an [inputs, outputs] matrix at least."""
  return 0 < 2 * rank * (inputs + outputs) <= inputs * outputs


def rank_one_root(square_IO):
  """(a [..., I], b [..., O]): a_i b_j is the root of the rank-one matrix with the row and column sums of
  square_IO >= 0 [..., I, O].

  Where the entries of a gradient are independent with variances square_IO, the mean square error of its product with
  a factored direction is then |diag(a) (u - left right) diag(b)|²_F, up to how far the variances are from rank one
  (as in Adafactor, arXiv:1804.04235, equation 4). Bounded away from zero by 1e-4 of the largest.
  """
  a, b = (jnp.sqrt(jnp.mean(square_IO, axis)) for axis in (-1, -2))
  b = b / jnp.sqrt(jnp.mean(square_IO, (-2, -1)))[..., None]
  return tuple(jnp.maximum(x, _LEAST_WEIGHT * jnp.max(x, -1, keepdims=True)) for x in (a, b))


@jax.named_scope("ghost_factor")
def factor(u, rank: int, label: str, weights=None, groups: int = 0):
  """(left [..., I, r], right [..., r, O], captured [...]): u ~ left @ right, captured = |left right|² / |u|² in [0, 1].

  weights: (a [..., I], b [..., O]), all positive, with fewer leading axes or as many; the norms are then those of
  diag(a) u diag(b), and so is the error bound. groups: the last so many leading axes number the parts of one direction:
  captured is the share of all of them together, without these axes.
  label seeds Omega, so that a direction depends on nothing but u and its name. A zero u gives zero factors. Singular
  values below 5e-3 of the largest may be lost to the rounding of float32; captured tells.
  """
  wide = jnp.promote_types(u.dtype, jnp.float32)
  u = u.astype(wide)
  if weights is not None:
    a, b = weights[0].astype(wide)[..., :, None], weights[1].astype(wide)[..., None, :]
    left, right, captured = factor(u * a * b, rank, label, groups=groups)
    return left / a, right / b, captured
  size = jnp.max(jnp.abs(u), (-2, -1), keepdims=True)
  # Products are scaled, not u itself: a scaled copy of u would cost as much as the products.
  scale = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1), 1)
  omega = jax.random.normal(jax.random.key(zlib.crc32(label.encode())), (u.shape[-1], rank), wide)
  q = _matmul(u, jnp.broadcast_to(omega, (*u.shape[:-2], *omega.shape))) * scale
  # Between the two products, or the columns of small singular values would drown: their squares meet at rounding.
  q = _matmul(u, orthonormalize(_matmul(u.swapaxes(-1, -2), q) * scale, drop=False)) * scale
  q = orthonormalize(orthonormalize(q, drop=False), drop=True)
  right = _matmul(q.swapaxes(-1, -2), u)
  energy, kept = (jnp.sum(jnp.square(x * scale), (-2, -1)) for x in (u, right))
  if groups:
    axes = tuple(range(-groups, 0))
    size = size.squeeze((-2, -1))
    largest = jnp.max(size, axes, keepdims=True)
    share = jnp.square(size / jnp.where(largest > 0, largest, 1))
    energy, kept = (jnp.sum(share * x, axes) for x in (energy, kept))
  return q, right, kept / jnp.where(energy > 0, energy, 1)


def _matmul(a, b):
  return jnp.matmul(a, b, precision=_HIGHEST)


def orthonormalize(y, drop: bool):
  """y [..., I, r] C with C upper triangular, orthonormal up to rounding times the squared condition number of y.

  Applying it twice gives orthonormality to rounding (Yamamoto et al., "Roundoff error analysis of the CholeskyQR2
  algorithm", ETNA 44, 2015). Columns that nearly depend on earlier ones become zero (drop) or are only enlarged, for
  the next application to see what they add (Fukaya et al., "Shifted Cholesky QR", SIAM J. Sci. Comput. 42, 2020). The
  triangle is found by `elimination` on the r x r Gram matrix.
  """
  gram = _matmul(y.swapaxes(-1, -2), y)
  negligible = _NEGLIGIBLE if drop else 32 * jnp.finfo(gram.dtype).eps
  floor = negligible * jnp.max(jnp.diagonal(gram, axis1=-2, axis2=-1), axis=-1)
  pivots, triangle = elimination.eliminate(gram, floor)
  floors = jnp.broadcast_to(floor[..., None], pivots.shape)
  kept = pivots > floors
  least = jnp.zeros_like(floors) if drop else jnp.where(floors > 0, jax.lax.rsqrt(jnp.where(floors > 0, floors, 1)), 0)
  scale = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, pivots, 1)), least)
  return _matmul(y, triangle * scale[..., None, :])
