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
  magnitude = math.floor(math.log10(abs(value)))
  if -5 <= magnitude < 7:
    text = f"{abs(value):,.{max(0, digits - 1 - magnitude)}f}".replace(",", THIN)
  else:
    mantissa, exponent = f"{abs(value):.{digits - 1}e}".split("e")
    text = f"{mantissa}e{int(exponent)}".replace("-", MINUS)
  return (MINUS if value < 0 else "+" if plus else "") + text


def integer(value: int) -> str:
  return f"{value:,}".replace(",", THIN)


def counted(value: int, noun: str) -> str:
  return f"{integer(value)} {noun}{'' if value == 1 else 's'}"


def compact(value: float) -> str:
  """1234567 -> 1.23 M."""
  for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
    if abs(value) >= limit:
      return f"{number(value / (1e3 if unit == 'k' else limit), 3)}{THIN}{unit}"
  return integer(round(value))


def percent(share: float | None) -> str:
  if share is None or not math.isfinite(share):
    return "–"
  return f"{number(100 * share, 2 if abs(share) < 1 else 3)}{THIN}%"


def plus_minus(half_width: float) -> str:
  """The 95 % interval, to follow a number; empty if it is unknown."""
  return f" ± {number(half_width, 2)}" if math.isfinite(half_width) else ""
