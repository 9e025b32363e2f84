"""Confidence intervals for totals of noisy contributions."""

import math

import numpy as np

# Two-sided 95 % quantile of Student's t by degrees of freedom; beyond, a series in 1/df is accurate to 0.1 %.
_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NUM_BLOCKS = 20


def student_t95(df):
  """Half-width of a 95 % interval in standard errors, for an array of degrees of freedom; NaN below 1."""
  df = np.asarray(df, np.float64)
  z = 1.959964
  series = z + (z**3 + z) / (4 * np.maximum(df, 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * np.maximum(df, 1) ** 2)
  table = np.array(_T95)[np.clip(df, 0, len(_T95) - 1).astype(int)]
  return np.where(df < 1, np.nan, np.where(df < len(_T95), table, series))


def exposure_half_width(count, total, square):
  """95 % half-width of a sum of `count` contributions, had they been in other batches, from its square; NaN for one."""
  variance = np.maximum(square - total**2 / np.maximum(count, 1), 0) / np.maximum(count - 1, 1)
  return np.where(count > 1, student_t95(count - 1) * np.sqrt(count * variance), np.nan)


def block_half_width(sums: np.ndarray) -> np.ndarray:
  """95 % half-width of the total of sums[..., B] over B equal blocks of consecutive steps; NaN for fewer than 3.

  The variance comes from the differences of consecutive blocks (von Neumann, 1941), so that a trend over the run does
  not count as noise. Blocks replace steps because consecutive steps share validation rows.
  """
  if (num := sums.shape[-1]) < 3:
    return np.full(sums.shape[:-1], np.nan)
  variance = (np.diff(sums, axis=-1) ** 2).sum(-1) / (2 * (num - 1))
  return student_t95(num - 1) * np.sqrt(num * variance)


def block_edges(num: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
  """Where at most `num_blocks` blocks of about equally many of `num` entries begin, and where the last ends."""
  return np.linspace(0, num, min(num_blocks, num) + 1).round().astype(np.int64)


def to_blocks(sums: np.ndarray, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
  """sums[..., B] over bins, added up over at most `num_blocks` blocks of consecutive bins."""
  return np.add.reduceat(sums, block_edges(sums.shape[-1], num_blocks)[:-1], axis=-1)
