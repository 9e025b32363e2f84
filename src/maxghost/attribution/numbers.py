"""Numbers for people: significant digits, a real minus sign."""

import math

MINUS = "\u2212"
THIN = "\u202f"


def number(value: float | None, digits: int = 3, plus: bool = False) -> str:
  """`digits` significant digits with a real minus sign and thin spaces between thousands; an en dash for no value."""
  if value is None or not math.isfinite(value):
    return "–"
  if value == 0:
    return "0"
  mantissa, exponent = f"{abs(value):.{digits - 1}e}".split("e")
  magnitude = int(exponent)  # of the rounded value
  if 1e-5 <= abs(value) < 1e7:
    text = f"{abs(value):,.{max(0, digits - 1 - magnitude)}f}".replace(",", THIN)
  else:
    text = f"{mantissa}e{magnitude}".replace("-", MINUS)
  return (MINUS if value < 0 else "+" if plus else "") + text


def integer(value: int) -> str:
  return f"{value:,}".replace(",", THIN)


def counted(value: int, noun: str) -> str:
  return f"{integer(value)} {noun}{'' if value == 1 else 's'}"


def compact(value: float) -> str:
  """1234567 -> 1.23 M."""
  for limit, size, unit in ((999.5e9, 1e12, "T"), (999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
    if abs(value) >= limit:
      return f"{number(value / size, 3)}{THIN}{unit}"
  return integer(round(value))


def percent(share: float | None) -> str:
  if share is None or not math.isfinite(share):
    return "–"
  return f"{number(100 * share, 2 if abs(share) < 1 else 3)}{THIN}%"


def plus_minus(half_width: float) -> str:
  """The 95 % interval, to follow a number; empty if it is unknown."""
  return f" ± {number(half_width, 2)}" if math.isfinite(half_width) else ""
