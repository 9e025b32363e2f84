"""The checksum of `checkpoint.checksum`, computed with NumPy for tools that read checkpoints without JAX."""

from collections.abc import Iterable

import numpy as np

# Odd, so that multiplying by it loses nothing modulo 2^32; the bits are well spread (2^32 / golden ratio).
SPREAD = 2654435761
_BLOCK = 1 << 22  # words processed at a time


def checksum_of(parts: Iterable[np.ndarray]) -> int:
  """The checksum of an array on the host. parts: the array in consecutive pieces along its leading axis."""
  total = start = 0
  for x in parts:
    bits = np.ascontiguousarray(x).view({1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)).reshape(-1)
    for words in np.array_split(bits, 1 + len(bits) // _BLOCK):
      position = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
      weight = (position * np.uint32(2) + np.uint32(1)) * np.uint32(SPREAD)
      weight ^= (weight >> np.uint32(15)) & np.uint32(2**32 - 2)
      total += int(((words.astype(np.uint32) + np.uint32(1)) * weight).sum(dtype=np.uint64))
      start += len(words)
  return total % 2**32
