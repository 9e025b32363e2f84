"""Charts as inline SVG with a title and a description in words; colours come from the style sheet."""

import dataclasses
import json

import numpy as np

from maxghost.attribution.html.markup import Markup, join, tag
from maxghost.attribution.html.scale import spread, tick_text, ticks
from maxghost.attribution.numbers import number

WIDTH, HEIGHT = 520, 270
TOP, BOTTOM, LEFT = 30, 34, 46
NUM_COLORS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
  """One curve, drawn where finite. color: index into the palette. dots: mark the single measurements."""

  name: str
  x: np.ndarray
  y: np.ndarray
  color: int
  dots: bool = False
  faint: bool = False


def line_chart(lines: list[Line], *, title: str, x_label: str, y_label: str, zero: bool = False) -> Markup:
  """Curves over steps with their names at the ends; the pointer or the arrow keys show the values.

  zero: the y axis includes and marks 0.
  """
  lines = [line for line in lines if np.isfinite(line.y).any()]
  if not lines:
    return tag("p", "No data was logged for this chart.", class_="muted")
  label_width = max(len(line.name) for line in lines) * 6.9 + 14
  right = min(max(label_width, 30), 170)
  values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
  low, high = float(values.min()), float(values.max())
  if zero:
    low, high = min(low, 0.0), max(high, 0.0)
  if high <= low:
    low, high = low - 0.5, high + 0.5
  y_ticks = ticks(low, high, 5)
  low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
  x_low = float(min(line.x.min() for line in lines))
  x_high = float(max(line.x.max() for line in lines))
  x_high = x_high if x_high > x_low else x_low + 1

  def px(x):
    return LEFT + (np.asarray(x, float) - x_low) / (x_high - x_low) * (WIDTH - LEFT - right)

  def py(y):
    return HEIGHT - BOTTOM - (np.asarray(y, float) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

  marks = [*_y_axis(y_ticks, py, WIDTH - right, zero), *_x_axis(x_low, x_high, px)]
  marks += [tag("text", y_label, x=0, y=12, class_="axis-title")]
  marks += [tag("text", x_label, x=round(WIDTH - right, 1), y=HEIGHT - 2, class_="axis-title end")]
  marks += [_curve(line, px, py) for line in lines]
  marks += _end_labels(lines, px, py, WIDTH - right)
  marks.append(tag("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden"))
  words = "; ".join(_in_words(line) for line in lines)
  return _svg(title, f"{y_label} over {x_label}. {words}.", marks, _readout(lines, px, x_label))


def _svg(title: str, description: str, marks, readout: str) -> Markup:
  box, label = f"0 0 {WIDTH} {HEIGHT}", f"{title}. {description}"
  body = [tag("title", title), tag("desc", description), *marks]
  svg = tag("svg", *body, viewBox=box, role="img", tabindex="0", aria_label=label, data_readout=readout)
  return tag("figure", svg, tag("div", class_="tip", role="status", hidden=True), class_="chart")


def _y_axis(y_ticks, py, x_end, zero: bool) -> list[Markup]:
  step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 1.0
  marks = []
  for value in y_ticks:
    y = round(float(py(value)), 1)
    marks.append(tag("line", x1=LEFT, x2=round(x_end, 1), y1=y, y2=y, class_="zero" if zero and value == 0 else "grid"))
    marks.append(tag("text", tick_text(value, step), x=LEFT - 6, y=y + 4, class_="tick end"))
  return marks


def _x_axis(x_low, x_high, px) -> list[Markup]:
  values = [value for value in ticks(x_low, x_high, 5) if x_low <= value <= x_high and value == round(value)]
  step = values[1] - values[0] if len(values) > 1 else 1.0
  y = HEIGHT - BOTTOM
  return [
    tag("text", tick_text(value, step), x=round(float(px(value)), 1), y=y + 16, class_="tick middle")
    for value in values
  ]


def _curve(line: Line, px, py) -> Markup:
  finite = np.isfinite(line.y)
  xs, ys = np.atleast_1d(px(line.x[finite])), np.atleast_1d(py(line.y[finite]))
  class_ = f"c{line.color % NUM_COLORS}{' faint' if line.faint else ''}"
  marks = []
  if len(xs) > 1:
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
    marks.append(tag("path", d=f"M{points}", class_=f"line {class_}"))
  if line.dots or len(xs) == 1:
    places = [(f"{x:.1f}", f"{y:.1f}") for x, y in zip(xs, ys, strict=True)]
    marks += [tag("circle", cx=x, cy=y, r=3.2, class_=f"dot {class_}") for x, y in places]
  return join(marks)


def _end_labels(lines, px, py, x_end) -> list[Markup]:
  ends = []
  for line in lines:
    last = np.flatnonzero(np.isfinite(line.y))[-1]
    ends.append((float(px(line.x[last])), float(py(line.y[last]))))
  placed = spread([y for _, y in ends], 14, TOP, HEIGHT - BOTTOM)
  marks = []
  for line, (x, y), label_y in zip(lines, ends, placed, strict=True):
    color = f"c{line.color % NUM_COLORS}"
    if abs(label_y - y) > 4 or x < x_end - 2:
      place = {"x1": round(x + 2, 1), "y1": round(y, 1), "x2": round(x_end + 5, 1), "y2": round(label_y, 1)}
      marks.append(tag("line", **place, class_=f"leader {color}"))
    marks.append(
      tag("text", _shorten(line.name), x=round(x_end + 8, 1), y=round(label_y + 4, 1), class_=f"label {color}")
    )
  return marks


def _shorten(name: str, limit: int = 22) -> str:
  return name if len(name) <= limit else name[: limit - 1] + "…"


def _in_words(line: Line) -> str:
  finite = np.flatnonzero(np.isfinite(line.y))
  first, last = finite[0], finite[-1]
  if first == last:
    return f"{line.name}: {number(float(line.y[last]))}"
  return f"{line.name}: from {number(float(line.y[first]))} to {number(float(line.y[last]))}"


def _readout(lines: list[Line], px, x_label: str) -> str:
  """JSON for the page's script: one entry of position and values per distinct x."""
  at = {x: [] for x in sorted({float(x) for line in lines for x in line.x})}
  for line in lines:
    for x, y in zip(line.x, line.y, strict=True):
      if np.isfinite(y):
        at[float(x)].append(f"{line.name} {number(float(y))}")
  entries = [[round(float(px(x)), 1), f"{x_label} {int(x)}", *values] for x, values in at.items() if values]
  return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


def bar(value: float, half_width: float, low: float, high: float, *, start: float = 0.0, color: str = "") -> Markup:
  """A small horizontal bar from `start` to start + value on the scale [low, high], with its 95 % interval.

  color: a class of the style sheet; empty = by sign. Screen readers skip it: the table's cells hold the same numbers.
  """
  width, height = 220, 18
  span = (high - low) or 1.0

  def px(v):
    return (v - low) / span * (width - 8) + 4

  left, right = sorted((px(start), px(start + value)))
  kind = color or ("helps" if value >= 0 else "hurts")
  marks = [
    tag("rect", x=f"{left:.1f}", y=3, width=f"{max(right - left, 0.8):.1f}", height=12, rx=1.5, class_=f"bar {kind}"),
    tag("line", x1=f"{px(0):.1f}", x2=f"{px(0):.1f}", y1=0, y2=height, class_="zero"),
  ]
  if np.isfinite(half_width) and half_width > 0:
    a, b = px(max(low, start + value - half_width)), px(min(high, start + value + half_width))
    marks.append(tag("path", d=f"M{a:.1f} 6V12M{a:.1f} 9H{b:.1f}M{b:.1f} 6V12", class_="whisker"))
  return tag("svg", *marks, viewBox=f"0 0 {width} {height}", class_="bar-cell", aria_hidden="true")


def bar_range(values, half_widths) -> tuple[float, float]:
  """The scale for `bar` that includes zero and all intervals."""
  values, half_widths = np.asarray(values), np.nan_to_num(half_widths, posinf=0.0)
  ends = np.concatenate([[0.0], values - half_widths, values + half_widths])
  return float(np.nanmin(ends)), float(np.nanmax(ends))
