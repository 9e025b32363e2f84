"""The list of keys and the explanation of one, from the fields of the schema and the comments of configs/base.yml."""

import dataclasses
import functools

from maxghost.config import renamed, values
from maxghost.config.files import config_dir
from maxghost.config.load import Loaded, fields
from maxghost.config.schema import SECTIONS


def limits(field: dataclasses.Field) -> str:
  """The choices or bounds of a key in words, such as `one of a, b` or `1 or more`; empty when there are none."""
  choices, minimum, maximum = values.limits(field)
  maximum = None if maximum == values.MOST else maximum
  if choices:
    each = "each one of " if values.is_tuple(field.type) else "one of "
    return each + ", ".join(values.shown(choice) for choice in choices)
  low, high = (None if bound is None else str(bound).removesuffix(".0") for bound in (minimum, maximum))
  if low and high:
    return f"from {low} to {high}"
  if low:
    return f"{low} or more"
  return f"{high} or less" if high else ""


@functools.cache
def comments() -> dict[str, str]:
  """{key: the comment above it in configs/base.yml, with its limits}."""
  found, lines = {}, []
  for line in (config_dir() / "base.yml").read_text("utf-8").splitlines():
    if line.startswith("# ") and not line.startswith("# ----"):
      lines.append(line.removeprefix("# "))
    else:
      found[line.partition(":")[0]], lines = " ".join(lines), []
  return found


def about(field: dataclasses.Field) -> str:
  """What a key is, without its limits."""
  return comments()[field.name].removesuffix(f" ({limits(field)})")


def print_help(key: str | None = None, usage: str = "") -> None:
  """Prints all keys below `usage`, or explains one, with colours on a terminal. Raises ConfigError."""
  if key is not None:
    print(explain(key))
    return
  from rich.console import Console
  from rich.text import Text

  width, text = max(len(name) for name in fields()), Text(usage)
  for name, cls in SECTIONS.items():
    text += Text.assemble("\n\n" if text else "", (name, "bold"), f": {cls.__doc__}")
    for f in dataclasses.fields(cls):
      parts = filter(None, (values.type_name(f.type), limits(f), f"default {values.shown(f.default)}"))
      text += Text.assemble("\n  ", (f"{f.name:<{width}}", "cyan"), f"  {about(f)} ", (f"[{'; '.join(parts)}]", "dim"))
  with (console := Console()).capture() as captured:  # rich's own print ends the process at a closed pipe
    console.print(text, soft_wrap=True)
  print(captured.get(), end="")


def explain(key: str) -> str:
  """One key in full: help, type, default, limits, section. Raises ConfigError with the nearest valid name."""
  known = fields()
  if key not in known:
    raise values.ConfigError(renamed.unknown(key, known))
  field = known[key]
  section, cls = next((name, cls) for name, cls in SECTIONS.items() if field in dataclasses.fields(cls))
  rows = [
    ("type", values.type_name(field.type)), ("default", values.shown(field.default)),
    ("limits", limits(field) or "none"), ("section", f"{section}: {cls.__doc__}"),
  ]  # fmt: skip
  if (value := (field.default, *values.limits(field)[0])[-1]) not in ("", ()):
    rows.append(("example", f"{key}={values.shown(value)}"))
  return "\n".join([key, f"  {about(field)}", *(f"  {name + ':':<9}{text}" for name, text in rows)])


def list_values(loaded: Loaded) -> str:
  flat = loaded.config.flat()
  rows = {name: (values.to_yaml(name, flat[name]).rstrip("\n"), loaded.origins[name]) for name in flat}
  width = min(60, max(len(text) for text, _ in rows.values()))
  lines = []
  for section, cls in SECTIONS.items():
    named = (rows[item.name] for item in dataclasses.fields(cls))
    lines += [f"# {section}", *(f"{text:<{width}}  # {origin}" for text, origin in named)]
  return "\n".join(lines)
