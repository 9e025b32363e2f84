"""Low-rank factors of a direction: a randomized range finder without LAPACK.

u[I, O] is replaced by Q Qᵀ u, with Q[I, r] an orthonormal basis of the range of u (uᵀ u Omega), Omega Gaussian. Scoring
then costs r (I + O) instead of I O per token. For any u and target rank k <= r - 2,
E |u - Q Qᵀ u|_F <= (1 + k / (r - k - 1))^(1/2) (sum of the squared singular values beyond the k-th)^(1/2)
(Halko, Martinsson and Tropp, arXiv:0909.4061, theorem 10.5; the power step only improves it), so a score is off by at
most |grad l_i|_F times that. The error of the batch's sum is known exactly: it is the ledger's direction residual.

Leading axes are batch axes: [..., I, O]. r rank.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Generator, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxghost.parallel import shardings

_HIGHEST = jax.lax.Precision.HIGHEST
_LEAST_WEIGHT = 1e-4  # relative to the largest weight, since factors are divided by weights
_WHITE = 1e-2  # relative to the mean eigenvalue of g gᵀ: weight of gradients unlike g in the norm of `factor_for`
_LARGEST_RANK = 128  # up to which a matrix and its triangle stay in the registers of one thread block
_TOGETHER = 8  # matrices in one step of the TPU's kernel
_NEGLIGIBLE = 1e-3  # squared length of a column that an orthonormalisation could only enlarge, not make orthogonal
_Factoring = Generator[tuple[Any, bool], Any, Any]  # yields the arguments of `_triangle`, is sent its result


def gains(rank: int, inputs: int, outputs: int) -> bool:
  """Whether factors of this rank at least halve the cost of scoring an [inputs, outputs] matrix."""
  return 0 < 2 * rank * (inputs + outputs) <= inputs * outputs


def rank_one_root(square_IO):
  """(a [..., I], b [..., O]): a_i b_j is the root of the rank-one matrix with the row and column sums of
  square_IO >= 0 [..., I, O] (as in Adafactor, arXiv:1804.04235, equation 4); at least 1e-4 of the largest.

  Where the entries of a gradient are independent with variances square_IO near rank one, the mean square error of its
  product with a factored direction is then |diag(a) (u - left right) diag(b)|²_F.
  """
  a, b = (jnp.sqrt(jnp.mean(square_IO, axis)) for axis in (-1, -2))
  b = b / jnp.sqrt(jnp.mean(square_IO, (-2, -1)))[..., None]
  return tuple(jnp.maximum(x, _LEAST_WEIGHT * jnp.max(x, -1, keepdims=True)) for x in (a, b))


def factor(u, rank: int, label: str, groups: int = 0):
  """(left [..., I, r], right [..., r, O], captured [...]): u ~ left @ right, captured = |left right|² / |u|² in [0, 1].

  groups: last leading axes that number the parts of one direction, of which captured is the joint share. label: seeds
  Omega. Singular values below 5e-3 of the largest may be lost to float32 rounding, which captured shows.
  """
  return factor_all([(u, rank, label, groups)])[0]


def factor_all(arguments: Iterable[tuple]) -> list[tuple]:
  """`factor` of each tuple of arguments, all of one rank, whose small matrices are eliminated together."""
  return _together([_factoring(*one) for one in arguments])


def _factoring(u, rank: int, label: str, groups: int = 0) -> _Factoring:
  u = u.astype(jnp.promote_types(u.dtype, jnp.float32))
  omega = jax.random.normal(_key(label), (u.shape[-1], rank), u.dtype)
  q = _matmul(u, jnp.broadcast_to(omega, (*u.shape[:-2], *omega.shape)))
  # Products are scaled, not u: scaling u, or finding its largest entry, costs as much as a product.
  size = jnp.max(jnp.abs(q), (-2, -1), keepdims=True)
  scale = _one_over(size)
  # Between the two products; otherwise the columns of small singular values, now squared, would be lost to rounding.
  z = yield from orthonormal_rows(_transposed_matmul(q * scale, u) * scale, drop=False)
  q = yield from orthonormalize(_matmul_transposed(u, z) * scale, drop=False)
  q = yield from orthonormalize(q, drop=True)
  right = _transposed_matmul(q, u)
  return q, right, _share(right * scale, u * scale, size, groups)


def factor_for(gradient, weights, u, rank: int, label: str, groups: int = 0):
  """`factor` of u for products with gradients that resemble gradient [..., I, O], such as its examples' gradients.

  weights: (a [..., I], b [..., O]), all positive: the spread of a gradient's rows and columns, see `rank_one_root`.
  Leading axes of weights and gradient are the last ones of u, or all of them. With A = diag(a) u diag(b) and
  g = diag(a)^-1 gradient diag(b)^-1, u becomes diag(a)^-1 A Q Qᵀ diag(b)^-1, Q[O, r] an orthonormal basis of the range
  of (Aᵀ C A) Aᵀ z, the columns of z Gaussian with covariance C = I g gᵀ / |g|² + 0.01.
  The bound of this module holds for C^(1/2) A in place of u: the error of A is small along g, so for gradients like g,
  and |A - A Q Qᵀ|_F is at most 10 times the bound and never more than |A|_F. captured = |A Q|² / |A|²; a
  score is off by at most |diag(a)^-1 grad l_i diag(b)^-1|_F |A|_F (1 - captured)^(1/2). A zero gradient makes C flat.
  """
  return _together([_factoring_for(gradient, weights, u, rank, label, groups)])[0]


def _factoring_for(gradient, weights, u, rank: int, label: str, groups: int) -> _Factoring:
  wide = jnp.promote_types(u.dtype, jnp.float32)
  u, g, a, b = (x.astype(wide) for x in (u, gradient, weights[0][..., :, None], weights[1][..., None, :]))
  ab = a * b
  size = jnp.max(jnp.abs(u * _raised(ab, u)), (-2, -1), keepdims=True)
  scale, g_scale = _one_over(size), _one_over(jnp.max(jnp.abs(g / ab), (-2, -1), keepdims=True))
  squares = jnp.sum(jnp.square(g / ab * g_scale), (-2, -1), keepdims=True)
  g_scale *= jnp.sqrt(g.shape[-2] * _one_over(squares))

  # Weights multiply the thin factors: weighted copies of u and g would cost as much as the products.
  def across(z):  # A zᵀ
    y = _matmul_transposed(u, z * _raised(b, z))
    return _raised(a, y) * y * scale

  def back(y):  # yᵀ A
    z = _transposed_matmul(_raised(a, y) * y, u)
    return z * _raised(b, z) * scale

  def g_across(z):  # g zᵀ; g gᵀ has a mean eigenvalue of 1
    y = _matmul_transposed(g, z / _raised(b, z))
    return y / _raised(a, y) * _raised(g_scale, y)

  def g_back(y):  # yᵀ g
    z = _transposed_matmul(y / _raised(a, y), g)
    return z / _raised(b, z) * _raised(g_scale, z)

  keys, shapes = jax.random.split(_key(label)), ((rank, g.shape[-1]), (g.shape[-2], rank))
  first, second = (jax.random.normal(key, shape, wide) for key, shape in zip(keys, shapes, strict=True))
  y = g_across(jnp.broadcast_to(_raised(first, g), (*g.shape[:-2], *first.shape)))
  y += _WHITE**0.5 * _raised(second, y)
  z = yield from orthonormal_rows(back(y), drop=False)
  y = yield from orthonormalize(across(z), drop=False)
  z = yield from orthonormal_rows(back(g_across(g_back(y)) + _WHITE * y), drop=False)
  z = yield from orthonormal_rows(z, drop=True)
  left = _matmul_transposed(u, z * _raised(b, z))
  a, b, ab = (_raised(x, u) for x in (a, b, ab))
  return left, z / b, _share(a * left * scale, u * ab * scale, size, groups)


def _raised(x, like):
  """x with axes of size 1 in front, as many axes as `like`."""
  return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)


def _key(label: str):
  return jax.random.key(zlib.crc32(label.encode()))


def _one_over(size):
  """1 / size, or 1 where that would overflow."""
  return 1 / jnp.where(size < jnp.finfo(size.dtype).tiny, 1, size)


def _share(part, whole, size, groups: int):
  """|part|² / |whole|², joint over the last `groups` axes; 0 where both are 0. size [..., 1, 1]: divisor of both."""
  kept, energy = (jnp.sum(jnp.square(x), (-2, -1)) for x in (part, whole))
  if groups:
    axes, size = tuple(range(-groups, 0)), size.squeeze((-2, -1))
    share = jnp.square(size * _one_over(jnp.max(size, axes, keepdims=True)))
    kept, energy = (jnp.sum(share * x, axes) for x in (kept, energy))
  return kept * _one_over(energy)


_matmul = functools.partial(jnp.matmul, precision=_HIGHEST)
_matmul_transposed = functools.partial(jnp.einsum, "...io,...ro->...ir", precision=_HIGHEST)
# In the other order XLA's CPU compiler transposes b, which is slow.
_transposed_matmul = functools.partial(jnp.einsum, "...ir,...io->...ro", precision=_HIGHEST)


def orthonormalize(y, drop: bool) -> _Factoring:
  """y [..., I, r] C with C upper triangular, orthonormal up to rounding times the squared condition number of y, so to
  rounding if applied twice (Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44, 2015).

  Columns that nearly depend on earlier ones become zero (drop), or are only enlarged for the next application (Fukaya
  et al., "Shifted Cholesky QR", SIAM J. Sci. Comput. 42, 2020).
  """
  return _matmul(y, (yield _transposed_matmul(y, y), drop))


def orthonormal_rows(z, drop: bool) -> _Factoring:
  """z [..., r, O] with orthonormal rows: `orthonormalize` of its transpose."""
  return _transposed_matmul((yield _matmul_transposed(z, z), drop), z)


@jax.named_scope("ghost_factor")
def _together(factorings: list[_Factoring]) -> list:
  """The results of factorings, which run in step: the triangles that all ask for next are formed in one call."""
  results, asked = [], [next(factoring) for factoring in factorings]
  while asked:
    triangles, asked = _triangles(*zip(*asked, strict=True)), []
    for factoring, triangle in zip(factorings, triangles, strict=True):
      try:
        asked.append(factoring.send(triangle))
      except StopIteration as done:
        results.append(done.value)
  return results


def _triangles(grams: tuple, drops: tuple) -> list:
  """`_triangle` of each. One call has a loop or kernel for all: a few matrices would leave most of a GPU idle."""
  if len(grams) == 1:
    return [_triangle(*grams, *drops)]
  (drop,), flat = set(drops), [gram.reshape(-1, *gram.shape[-2:]) for gram in grams]
  ends = list(itertools.accumulate(len(matrices) for matrices in flat))
  found = jnp.split(_triangle(jnp.concatenate(flat), drop), ends[:-1])
  return [triangle.reshape(gram.shape).astype(gram.dtype) for triangle, gram in zip(found, grams, strict=True)]


def _triangle(gram, drop: bool):
  """C of `orthonormalize`, [..., r, r]. gram: yᵀ y."""
  negligible = _NEGLIGIBLE if drop else 32 * jnp.finfo(gram.dtype).eps
  floor = negligible * jnp.max(jnp.diagonal(gram, axis1=-2, axis2=-1), axis=-1)
  pivots, triangle = eliminate(gram, floor)
  floors = jnp.broadcast_to(floor[..., None], pivots.shape)
  least = jnp.zeros_like(floors) if drop else jnp.where(floors > 0, jax.lax.rsqrt(jnp.where(floors > 0, floors, 1)), 0)
  scale = jnp.where(pivots > floors, jax.lax.rsqrt(jnp.where(pivots > floors, pivots, 1)), least)
  return triangle * scale[..., None, :]


def eliminate(gram, floor):
  """(pivots [..., r], triangle [..., r, r]) of symmetric gram [..., r, r]: triangle is unit upper, and triangleᵀ gram
  triangle is diagonal with these pivots. floor [...]: a column with a pivot not above it does not enter later columns.

  Without LAPACK, whose batched routines can deadlock in a jitted program on CPU. On a GPU or TPU a kernel handles all
  matrices: an XLA loop starts several for each column, most of the factors' time on a GPU (docs/figures.md).
  """
  wide = jax.dtypes.canonicalize_dtype(float) == jnp.float64  # then loops have a 64-bit index, which Mosaic refuses
  if gram.shape[-1] <= _LARGEST_RANK and shardings.platform() in (("gpu",) if wide else ("gpu", "tpu")):
    return by_kernel(gram, floor)
  return by_loop(gram, floor)


def by_loop(gram, floor):
  """As `eliminate`: rank-one updates that batch over all leading axes, on any backend."""
  rank = gram.shape[-1]
  columns = jnp.arange(rank)

  def step(k, carry):
    gram, triangle = carry
    row = jax.lax.dynamic_index_in_dim(gram, k, axis=-2, keepdims=False)
    pivot = jax.lax.dynamic_index_in_dim(row, k, axis=-1, keepdims=False)
    inverse = jnp.where(pivot > floor, 1 / jnp.where(pivot > floor, pivot, 1), 0)
    multiplier = jnp.where(columns > k, row * inverse[..., None], 0)
    gram = gram - row[..., :, None] * multiplier[..., None, :]
    column = jax.lax.dynamic_index_in_dim(triangle, k, axis=-1, keepdims=True)
    return gram, triangle - column * multiplier[..., None, :]

  identity = jnp.broadcast_to(jnp.eye(rank, dtype=gram.dtype), gram.shape)
  gram, triangle = jax.lax.fori_loop(0, rank, step, (gram, identity))
  return jnp.diagonal(gram, axis1=-2, axis2=-1), triangle


def by_kernel(gram, floor, *, interpret: bool = False):
  """As `eliminate`, by a Pallas kernel: a thread block of a GPU takes one matrix, a step of a TPU several, whose
  operations overlap. interpret: as plain operations, on any backend.

  On a mesh every device eliminates all matrices, which are small, because a kernel is opaque to the partitioner.
  """
  from jax.experimental import pallas as pl

  (*batch, rank, _), on_tpu = gram.shape, shardings.platform() == "tpu"
  num, size = math.prod(batch), max(16, 1 << (rank - 1).bit_length())  # Triton wants powers of two
  if on_tpu:
    together, params = min(num, _TOGETHER), None
  else:
    from jax.experimental.pallas import triton  # deprecated since JAX 0.12

    together, params = 1, triton.CompilerParams(num_warps=max(1, size * size // 1024))
  grams = jnp.pad(gram.reshape(num, rank, rank), ((0, -num % together), (0, size - rank), (0, size - rank)))
  floors = jnp.pad(floor.reshape(num, 1, 1), ((0, -num % together), (0, 0), (0, 0)))
  block = lambda *shape: pl.BlockSpec((together if on_tpu else None, *shape), lambda i: (i, 0, 0))  # noqa: E731
  run = pl.pallas_call(
    functools.partial(_kernel, rank), grid=(len(grams) // together,), in_specs=[block(size, size), block(1, 1)],
    out_specs=[block(1, size), block(size, size)],
    out_shape=[jax.ShapeDtypeStruct((len(grams), rows, size), gram.dtype) for rows in (1, size)],
    compiler_params=params, interpret=interpret, name="ghost_eliminate",
  )  # fmt: skip
  if (layout := shardings.across_devices()) is not None:
    specs = PartitionSpec(), PartitionSpec()
    run = shardings.mapped(run, layout.mesh, specs, specs)
  pivots, triangle = run(grams, floors)
  return pivots[:num, 0, :rank].reshape(*batch, rank), triangle[:num, :rank, :rank].reshape(gram.shape)


def _kernel(rank: int, gram_ref, floor_ref, pivots_ref, triangle_ref):
  """Selects rows and columns by sums over a mask: a block in registers cannot be indexed by a variable."""
  gram, floor = gram_ref[...], floor_ref[...]  # [..., r, r], [..., 1, 1]
  rows, columns = (jax.lax.broadcasted_iota(jnp.int32, gram.shape, gram.ndim - axis) for axis in (2, 1))
  index = jax.lax.broadcasted_iota(jnp.int32, pivots_ref.shape, gram.ndim - 1)

  def step(k, carry):
    gram, triangle = carry
    row = jnp.sum(jnp.where(rows == k, gram, 0), -2, keepdims=True)
    pivot = jnp.sum(jnp.where(index == k, row, 0), -1, keepdims=True)
    inverse = jnp.where(pivot > floor, 1 / jnp.where(pivot > floor, pivot, 1), 0)
    multiplier = jnp.where(index > k, row * inverse, 0)
    columns_k = (jnp.sum(jnp.where(columns == k, x, 0), -1, keepdims=True) for x in carry)
    return tuple(x - column * multiplier for x, column in zip((gram, triangle), columns_k, strict=True))

  gram, triangle = jax.lax.fori_loop(0, rank, step, (gram, (rows == columns).astype(gram.dtype)))
  pivots_ref[...] = jnp.sum(jnp.where(rows == columns, gram, 0), -2, keepdims=True)
  triangle_ref[...] = triangle
