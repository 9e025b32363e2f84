"""Confidence intervals for totals of noisy contributions."""

import numpy as np

NUM_BLOCKS = 20


def student_t95(df):
  """Half-width of a 95 % interval in standard errors, for degrees of freedom; NaN below 1."""
  from scipy.special import stdtrit  # starts threads, which `attribute` wants after its own heap

  return stdtrit(df, 0.975)


def exposure_half_width(count, total, square):
  """95 % half-width of a sum of `count` contributions, had they been in other batches, from its square; NaN for one."""
  variance = np.maximum(square - total**2 / np.maximum(count, 1), 0) / np.maximum(count - 1, 1)
  return student_t95(count - 1) * np.sqrt(count * variance)


def block_half_width(sums: np.ndarray) -> np.ndarray:
  """95 % half-width of the total of sums[..., B] over B equal blocks of consecutive steps; NaN for fewer than 3.

  The variance comes from the differences of consecutive blocks (von Neumann, 1941), so that a trend over the run does
  not count as noise. Blocks replace steps because consecutive steps share validation rows.
  """
  if (num := sums.shape[-1]) < 3:
    return np.full(sums.shape[:-1], np.nan)
  return student_t95(num - 1) * np.sqrt(num * ((np.diff(sums, axis=-1) ** 2).sum(-1) / (2 * (num - 1))))


def block_edges(num: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
  """Where at most `num_blocks` blocks of about equally many of `num` entries begin, and where the last ends."""
  return np.linspace(0, num, min(num_blocks, num) + 1).round().astype(np.int64)


def to_blocks(sums: np.ndarray, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
  """sums[..., B] over bins, added up over at most `num_blocks` blocks of consecutive bins."""
  return np.add.reduceat(sums, block_edges(sums.shape[-1], num_blocks)[:-1], axis=-1)
