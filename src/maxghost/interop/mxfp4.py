"""Weights in MXFP4, as gpt-oss is published, read as the bfloat16 arrays that they stand for.

A matrix `name` [E, in, out] lies as `name_blocks` uint8[E, out, G, 16] and `name_scales` uint8[E, out, G]: G groups of
32 inputs, two to a byte with the first in its low half, each a 4-bit float (E2M1) times the power of two of its group
(E8M0). OCP Microscaling Formats (MX) specification 1.0, sections 5.2 to 5.4. Every product is exact in bfloat16.
"""

import functools

import ml_dtypes
import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.interop.safetensors_files import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # of a group


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
  """The tensors, each pair of blocks and scales replaced by the matrix it stands for; decoded when it is read.

  Raises LayoutError for a pair that lacks a half, or whose halves do not fit each other.
  """
  out = dict(tensors)
  for name in [name for name in tensors if name.endswith(_BLOCKS)]:
    base = name.removesuffix(_BLOCKS)
    blocks, scales = out.pop(name), out.pop(base + _SCALES, None)
    if scales is None:
      raise LayoutError(f"{blocks.name} has no {base + _SCALES} beside it: the folder is half copied")
    out[base] = _matrix(base, blocks, scales)
  return out


def _matrix(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
  fits = blocks.shape == (*scales.shape, _BYTES) and len(scales.shape) == 3
  if not fits or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
    raise LayoutError(
      f"{blocks.name} is {blocks.dtype}{list(blocks.shape)} and its scales are {scales.dtype}{list(scales.shape)}; "
      f"MXFP4 is uint8[experts, out, groups, {_BYTES}] with uint8[experts, out, groups]"
    )
  experts, outputs, groups = scales.shape

  def read(index: slice | None = None) -> np.ndarray:
    return decode(blocks.read(index), scales.read(index))

  return Tensor(name, (experts, groups * 2 * _BYTES, outputs), np.dtype(ml_dtypes.bfloat16), read)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """bfloat16[E, in, out] from blocks uint8[E, out, G, 16] and scales uint8[E, out, G]; NaN where a scale is 255."""
  experts, outputs, groups, _ = blocks.shape
  powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)
  values = _pairs()[blocks]
  values *= powers[..., None, None]
  return values.reshape(experts, outputs, groups * 2 * _BYTES).swapaxes(1, 2)


@functools.cache
def _pairs() -> np.ndarray:
  """bfloat16[256, 2]: the two numbers in a byte."""
  byte = np.arange(256, dtype=np.uint8)
  halves = np.stack([byte & 15, byte >> 4], axis=-1)
  return halves.view(ml_dtypes.float4_e2m1fn).astype(ml_dtypes.bfloat16)
