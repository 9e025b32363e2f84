"""Axes: round ticks, and labels that do not overlap."""

import math

from maxghost.attribution.numbers import MINUS


def ticks(low: float, high: float, count: int = 5) -> list[float]:
  """About `count` round values that span [low, high]."""
  if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
    return [low]
  rough = (high - low) / max(count, 1)
  power = 10 ** math.floor(math.log10(rough))
  step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
  first = math.floor(low / step + 1e-9)
  last = math.ceil(high / step - 1e-9)
  return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
  """A tick's value with as many decimals as the distance between ticks needs."""
  if value == 0:
    return "0"
  if abs(value) >= 1e6 or (step < 1e-4):
    text = f"{abs(value):.3g}"
  else:
    decimals = next(d for d in range(9) if d == 8 or abs(step * 10**d - round(step * 10**d)) < 1e-6)
    text = f"{abs(value):,.{decimals}f}".replace(",", "\u202f")
  return (MINUS if value < 0 else "") + text


def spread(positions: list[float], gap: float, low: float, high: float) -> list[float]:
  """Positions moved as little as needed so that neighbours are `gap` apart and all lie in [low, high]."""
  order = sorted(range(len(positions)), key=lambda i: positions[i])
  placed = [positions[i] for i in order]
  for i in range(1, len(placed)):
    placed[i] = max(placed[i], placed[i - 1] + gap)
  if placed and placed[-1] > high:
    placed[-1] = high
    for i in range(len(placed) - 2, -1, -1):
      placed[i] = min(placed[i], placed[i + 1] - gap)
  if placed and placed[0] < low:
    placed[0] = low
    for i in range(1, len(placed)):
      placed[i] = max(placed[i], placed[i - 1] + gap)
  result = [0.0] * len(positions)
  for rank, i in enumerate(order):
    result[i] = placed[rank]
  return result
