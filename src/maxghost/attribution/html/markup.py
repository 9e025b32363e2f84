"""HTML elements from Python values."""

import html


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
