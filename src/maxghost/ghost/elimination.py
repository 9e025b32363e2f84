"""Elimination on small Gram matrices, without LAPACK: its batched routines can deadlock in a jitted program on CPU.

... batch axes, r rank, n matrices.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxghost.parallel import shardings

_LARGEST = 128  # rank up to which a matrix and its triangle stay in the registers of one thread block


def eliminate(gram, floor):
  """(pivots [..., r], triangle [..., r, r]) of symmetric gram [..., r, r]: triangle is unit upper, and
  triangleᵀ gram triangle is diagonal with these pivots. floor [...]: a column with a pivot not above it does not enter
  later columns.

  On a GPU one kernel handles all matrices. An XLA loop launches several kernels for each column, which took most of the
  time of the factors (docs/ghost.md).
  """
  if shardings.platform() == "gpu" and gram.shape[-1] <= _LARGEST:
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
  """As `eliminate`, by a Pallas kernel, one thread block per matrix. interpret: as plain operations, on any backend.

  On a mesh every device eliminates all matrices, which are small, because a kernel is opaque to the partitioner.
  """
  batch, rank = gram.shape[:-2], gram.shape[-1]
  num, size = math.prod(batch), max(16, 1 << (rank - 1).bit_length())  # Triton wants powers of two
  grams = jnp.pad(gram.reshape(num, rank, rank), ((0, 0), (0, size - rank), (0, size - rank)))
  run = functools.partial(_kernel_call, rank, interpret)
  layout = shardings.current()
  if layout is not None and layout.num_devices > 1:
    every = PartitionSpec()
    run = jax.shard_map(run, mesh=layout.mesh, in_specs=(every, every), out_specs=(every, every), check_vma=False)
  pivots, triangle = run(grams, floor.reshape(num, 1))
  return pivots[:, :rank].reshape(*batch, rank), triangle[:, :rank, :rank].reshape(gram.shape)


def _kernel_call(rank: int, interpret: bool, grams, floors):
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  num, size, _ = grams.shape
  square = pl.BlockSpec((1, size, size), lambda i: (i, 0, 0))
  return pl.pallas_call(
    functools.partial(_kernel, rank),
    grid=(num,),
    in_specs=[square, pl.BlockSpec((1, 1), lambda i: (i, 0))],
    out_specs=[pl.BlockSpec((1, size), lambda i: (i, 0)), square],
    out_shape=[jax.ShapeDtypeStruct((num, size), grams.dtype), jax.ShapeDtypeStruct(grams.shape, grams.dtype)],
    compiler_params=triton.CompilerParams(num_warps=max(1, size * size // 1024)),
    interpret=interpret,
    name="ghost_eliminate",
  )(grams, floors)


def _kernel(rank: int, gram_ref, floor_ref, pivots_ref, triangle_ref):
  """Selects rows and columns by sums over a mask: a block in registers cannot be indexed by a variable."""
  gram, floor = gram_ref[0], floor_ref[0, 0]
  rows, columns = (jax.lax.broadcasted_iota(jnp.int32, gram.shape, axis) for axis in (0, 1))
  index = jax.lax.broadcasted_iota(jnp.int32, gram.shape[:1], 0)

  def step(k, carry):
    gram, triangle = carry
    row = jnp.sum(jnp.where(rows == k, gram, 0), 0)
    pivot = jnp.sum(jnp.where(index == k, row, 0))
    inverse = jnp.where(pivot > floor, 1 / jnp.where(pivot > floor, pivot, 1), 0)
    multiplier = jnp.where(index > k, row * inverse, 0)
    column = jnp.sum(jnp.where(columns == k, triangle, 0), 1)
    return gram - row[:, None] * multiplier[None, :], triangle - column[:, None] * multiplier[None, :]

  identity = (rows == columns).astype(gram.dtype)
  gram, triangle = jax.lax.fori_loop(0, rank, step, (gram, identity))
  pivots_ref[0], triangle_ref[0] = jnp.sum(jnp.where(rows == columns, gram, 0), 0), triangle
