"""HTML elements from Python values, and numbers as people read them."""

import html
import math

MINUS = "\u2212"
THIN = "\u202f"


class Markup(str):
  """Text that is HTML already; everything else is escaped."""

  __slots__ = ()


def escape(value) -> str:
  """A value as text inside an element or attribute; characters that HTML cannot hold become the replacement sign."""
  text = str(value).encode("utf-8", "replace").decode("utf-8")
  text = "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)
  return html.escape(text, quote=True)


def tag(name: str, /, *children, **attributes) -> Markup:
  """`<name attr="...">children</name>`. `class_` and `for_` lose the underscore, other underscores become dashes.

  An attribute that is None or False is left out, True stands alone.
  """
  parts = [name]
  for key, value in attributes.items():
    if value is None or value is False:
      continue
    key = key.rstrip("_").replace("_", "-")
    parts.append(key if value is True else f'{key}="{escape(value)}"')
  opening = " ".join(parts)
  if name in ("meta", "br", "line", "rect", "path", "circle", "input", "col") and not children:
    return Markup(f"<{opening}>" if name in ("meta", "br", "input", "col") else f"<{opening}/>")
  return Markup(f"<{opening}>{join(children)}</{name}>")


def join(children) -> Markup:
  """Children in order; strings are escaped, lists flattened, None left out."""
  parts = []
  for child in children:
    if isinstance(child, Markup):
      parts.append(str(child))
    elif isinstance(child, (list, tuple)):
      parts.append(str(join(child)))
    elif child is not None:
      parts.append(escape(child))
  return Markup("".join(parts))


def number(value: float | None, digits: int = 3, plus: bool = False) -> str:
  """`digits` significant digits with a real minus sign; thin spaces between thousands; an en dash for nothing."""
  if value is None or not math.isfinite(value):
    return "–"
  if value == 0:
    return "0"
  magnitude = math.floor(math.log10(abs(value)))
  if -5 <= magnitude < 7:
    decimals = max(0, digits - 1 - magnitude)
    text = f"{abs(value):,.{decimals}f}".replace(",", THIN)
  else:
    mantissa, exponent = f"{abs(value):.{digits - 1}e}".split("e")
    text = f"{mantissa}e{int(exponent)}".replace("-", MINUS)
  if not text.strip("0." + THIN):
    return "0"
  return (MINUS if value < 0 else "+" if plus else "") + text


def integer(value: int) -> str:
  return f"{value:,}".replace(",", THIN)


def compact(value: float) -> str:
  """1234567 -> 1.23 M."""
  for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
    if abs(value) >= limit:
      return f"{number(value / (1e3 if unit == 'k' else limit), 3)}{THIN}{unit}"
  return integer(round(value))


def percent(share: float | None) -> str:
  return (
    "–" if share is None or not math.isfinite(share) else f"{number(100 * share, 2 if abs(share) < 1 else 3)}{THIN}%"
  )
