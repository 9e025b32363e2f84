"""Charts and bars as positions and words; macros.html draws them, style.css colours them."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from maxghost.attribution.numbers import MINUS, THIN, integer, number

WIDTH, HEIGHT = 520, 270
TOP, BOTTOM, LEFT = 30, 34, 46
NUM_COLORS = 8
BAR_WIDTH = 220


class Line(NamedTuple):
  """One curve, drawn where finite. color: index into the palette. dots: mark the single measurements."""

  name: str
  x: np.ndarray
  y: np.ndarray
  color: int
  dots: bool = False
  faint: bool = False


def line_chart(heading: str, lines: list[Line], steps: tuple[int, int], y_label: str, zero: bool = False) -> dict:
  """Curves with their names at the ends, over `steps` and what they reach beyond these. zero: the y axis marks 0."""
  lines = [line for line in lines if np.isfinite(line.y).any()]
  chart = {"heading": heading, "y_label": y_label, "lines": []}
  if not lines:
    return chart
  right = WIDTH - min(max(max(len(line.name) for line in lines) * 6.9 + 14, 30), 170)
  values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines] + [np.zeros(int(zero))])
  low, high = float(values.min()), float(values.max())
  if high <= low:
    low, high = low - 0.5, high + 0.5
  y_ticks = ticks(low, high)
  reached = np.concatenate([steps, *(line.x[np.isfinite(line.y)] for line in lines)])
  ends = float(reached.min()), float(reached.max())
  x_low, x_high = ends if ends[0] < ends[1] else (ends[0] - 1, ends[0] + 1)  # a single step stands in the middle
  margin = 0.1 * (x_high - x_low)  # between a round tick and those at the ends
  inner = [v for v in ticks(x_low, x_high) if x_low + margin < v < x_high - margin and v == round(v)]
  x_ticks = sorted({*ends, *inner})
  px = _scale(x_low, x_high, LEFT, right)
  py = _scale(min(low, y_ticks[0]), max(high, y_ticks[-1]), HEIGHT - BOTTOM, TOP)
  drawn = [_curve(line, px, py) for line in lines]
  for curve, label_y in zip(drawn, spread([c["points"][-1][1] for c in drawn], 14, TOP, HEIGHT - BOTTOM), strict=True):
    end_x, end_y = curve["points"][-1]
    curve |= {"label_y": round(float(label_y), 1), "leader": abs(label_y - end_y) > 4 or end_x < right - 2}
  return chart | {
    "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": round(right, 1), "top": TOP, "bottom": HEIGHT - BOTTOM,
    "y_ticks": [(py(v), tick_text(v, y_ticks[1] - y_ticks[0]), "zero" if zero and v == 0 else "grid") for v in y_ticks],
    "x_ticks": [(px(value), integer(round(value))) for value in x_ticks], "lines": drawn,
    "readout": _readout(lines, px),
  }  # fmt: skip


def _scale(low: float, high: float, start: float, end: float) -> Callable[[Any], Any]:
  """The map from [low, high] to pixels [start, end], to a tenth of a pixel."""
  return lambda value: np.round(start + (np.asarray(value, float) - low) / (high - low) * (end - start), 1).tolist()


def _curve(line: Line, px, py) -> dict:
  finite = np.isfinite(line.y)
  points, y = list(zip(px(line.x[finite]), py(line.y[finite]), strict=True)), line.y[finite]
  own = {name: getattr(line, name) for name in ("name", "color", "dots", "faint")}
  words = number(float(y[-1])) if len(y) == 1 else f"from {number(float(y[0]))} to {number(float(y[-1]))}"
  return own | {"points": points, "path": "M" + "L".join(f"{x} {y}" for x, y in points), "words": words}


def _readout(lines: list[Line], px) -> str:
  """JSON for the page's script: one entry of position and values per distinct step, the last value of each line."""
  at: dict[float, dict[int, str]] = {}
  for i, line in enumerate(lines):
    for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True):
      if math.isfinite(y):
        at.setdefault(x, {})[i] = f"{line.name} {number(y)}"
  entries = [[px(x), f"step {x:.0f}", *values.values()] for x, values in sorted(at.items())]
  return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


def bars(items: list, values: Any, half_widths: Any = 0.0, starts: Any = 0.0) -> list[tuple[Any, dict]]:
  """Each item with a horizontal bar from `starts` to start + value; 95 % intervals. One scale, which includes zero."""
  value, half, start = np.broadcast_arrays(np.nan_to_num(values), np.nan_to_num(half_widths, posinf=0.0), starts)
  end, zero = start + value, np.zeros(len(items))
  marks = np.stack([zero, np.minimum(start, end), np.maximum(start, end), end - half, end + half], axis=1)
  low, high = marks.min(initial=0), marks.max(initial=0)
  px = _scale(low, high if high > low else low + 1, 4, BAR_WIDTH - 4)
  return [
    (item, {"zero": zero, "x": x, "width": max(round(right - x, 1), 0.8), "whisker": whisker if width > 0 else None})
    for item, (zero, x, right, *whisker), width in zip(items, px(marks), half, strict=True)
  ]


def ticks(low: float, high: float) -> list[float]:
  """About 5 round values that span [low, high]."""
  rough = (high - low) / 5
  power = 10 ** math.floor(math.log10(rough))
  step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
  """A tick's value with as many decimals as the distance between ticks needs."""
  if value == 0:
    return "0"
  decimals = next((d for d in range(8) if abs(step * 10**d - round(step * 10**d)) < 1e-6), 8)
  form = ".3g" if abs(value) >= 1e6 or step < 1e-4 else f",.{decimals}f"
  return (MINUS if value < 0 else "") + format(abs(value), form).replace(",", THIN)


def spread(positions: list[float], gap: float, low: float, high: float) -> np.ndarray:
  """Positions moved as little as needed so that neighbours are `gap` apart and all lie in [low, high]."""
  order = np.argsort(positions, kind="stable")
  offsets = gap * np.arange(len(order))
  packed = np.maximum.accumulate(np.asarray(positions, float)[order] - offsets)
  placed = np.empty(len(order))
  placed[order] = np.maximum(np.minimum(packed, high - offsets[-1]), low) + offsets
  return placed
