"""Writes configs/base.yml from the schema: `python -m maxghost.config.write_base [PATH]`."""

import sys
import textwrap
from pathlib import Path

from maxghost.config import values
from maxghost.config.files import config_dir, write_text
from maxghost.config.help import limits, sections

HEADER = """\
# Every key with its default. A file of your own needs only the keys it changes.
# Later wins: this file < configs/models/<model_name>.yml < key=value on the command line.
# Written by `python -m maxghost.config.write_base` from src/maxghost/config/schema.py; change it there.
"""


def base_text() -> str:
  """The text of configs/base.yml."""
  lines = [HEADER]
  for name, cls, items in sections():
    lines.append(f"\n# ---- {name}: {cls.__doc__}\n")
    for item in items:
      about, bound = item.metadata["help"], limits(item)
      paragraphs = [f"{about} ({bound})" if bound else about]
      if len(paragraphs[0]) > 117:
        paragraphs = [about, f"({bound})"] if bound else [about]
      for paragraph in paragraphs:
        lines.extend(f"# {line}\n" for line in textwrap.wrap(paragraph, 117, break_long_words=False))
      lines.append(values.to_yaml(item.name, item.default))
  return "".join(lines)


def main(argv: list[str] | None = None) -> int:
  arguments = sys.argv[1:] if argv is None else argv
  path = Path(arguments[0]) if arguments else config_dir() / "base.yml"
  write_text(path, base_text())
  print(f"wrote {path}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
