"""A checksum of an array that does not depend on how it is sharded, computed where the array lies.

Orbax notices a missing or truncated file, but not a flipped bit inside an uncompressed chunk; the checksum does. Sums
of integers modulo 2^32 are exact in any order, so the number of devices does not change the result.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxghost.checkpoint.host_checksum import SPREAD
from maxghost.models import streaming
from maxghost.parallel.shardings import ordered_collectives


def checksums(leaves: Sequence[jax.Array | np.ndarray]) -> list[int]:
  """One number in [0, 2^32) for each array; waits for the result. Equal bytes and shape give equal numbers."""
  run = jax.jit(_checksums, compiler_options=ordered_collectives(leaves))
  return [int(np.asarray(value)) for value in run(leaves)]


def _checksum(x: jax.Array) -> jax.Array:
  """uint32 []: sum of (bits + 1) * odd weight of the position, modulo 2^32. Host memory is read entry by entry."""
  if not streaming.on_host(x):
    return _weighted_sum(_words(x), 0)

  def add(index, total):
    entry = jax.device_put(lax.dynamic_slice_in_dim(x, index, 1), jax.memory.Space.Device)
    return total + _weighted_sum(_words(entry), index)

  return lax.fori_loop(0, x.shape[0], add, jnp.uint32(0))


def _weighted_sum(words: jax.Array, start) -> jax.Array:
  """The sum over `words`, which begin at entry `start` of the array's leading axis."""
  # Odd weights: changing one element always changes the sum. Spread weights: changes of two hardly ever cancel.
  position = jnp.full(words.shape, jnp.uint32(start) * jnp.uint32(math.prod(words.shape[1:]) % 2**32))
  stride = 1
  for axis in reversed(range(words.ndim)):
    position += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= words.shape[axis]
  weight = (position * jnp.uint32(2) + jnp.uint32(1)) * jnp.uint32(SPREAD)
  weight ^= (weight >> 15) & ~jnp.uint32(1)
  return jnp.sum((words + jnp.uint32(1)) * weight, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """The bits of the elements as uint32; 64-bit elements give one more axis of two words."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], axis=-1)
  bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).bits
  return lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(int(bits), 32)}")).astype(jnp.uint32)


def _checksums(leaves) -> list[jax.Array]:
  return [_checksum(leaf) for leaf in leaves]
