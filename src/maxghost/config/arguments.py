"""Command lines with flags (report, scores, ...); mistakes are reported in one line with the nearest flag."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from maxghost.config.values import ConfigError, did_you_mean

ACCEPT_HELP = "continue without damaged or missing score files, and list what is lost"


class Parser(argparse.ArgumentParser):
  """An argparse parser that raises ConfigError instead of exiting, and accepts no abbreviated flags."""

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

  def error(self, message: str):
    raise ConfigError(f"{message}; {self.prog} --help lists the arguments")

  def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments. Raises ConfigError."""
    if wrong := [text for text in (sys.argv[1:] if argv is None else argv) if text.endswith("=--")]:
      self.error(f"{wrong[0]!r}: -- is no value")  # argparse drops it
    args, unknown = self.parse_known_args(argv)
    if unknown:
      self.refuse(unknown[0])
    return args

  def refuse(self, unknown: str) -> Any:
    """Raises ConfigError for an unknown argument, with the nearest flag."""
    flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
    if hint := did_you_mean(unknown.partition("=")[0], flags) if unknown.startswith("-") else "":
      raise ConfigError(f"unknown argument {unknown!r}{hint}")
    self.error(f"unknown argument {unknown!r}")
