"""Command lines with flags (report, scores, ...); mistakes are reported in one line with the nearest flag."""

import argparse
import sys

from maxghost.config import ConfigError, did_you_mean

ACCEPT_HELP = "continue without damaged or missing score files, and list what is lost"


class Parser(argparse.ArgumentParser):
  """An argparse parser that raises ConfigError instead of exiting, and accepts no abbreviated flags."""

  def __init__(self, verb: str, description: str | None, epilog: str | None = None):
    plain = argparse.RawDescriptionHelpFormatter
    super().__init__(
      prog=f"maxghost {verb}", description=description, epilog=epilog, allow_abbrev=False, formatter_class=plain
    )

  def error(self, message: str):
    raise ConfigError(f"{message}; {self.prog} --help lists the arguments")

  def parse(self, argv: list[str] | None) -> argparse.Namespace:
    """The parsed arguments. Raises ConfigError."""
    if wrong := [text for text in (sys.argv[1:] if argv is None else argv) if text.endswith("=--")]:
      self.error(f"{wrong[0]!r}: -- is no value")  # argparse drops it
    args, unknown = self.parse_known_args(argv)
    if unknown:
      flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
      hint = did_you_mean(unknown[0].partition("=")[0], flags) if unknown[0].startswith("-") else ""
      if hint:
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint}")
      self.error(f"unknown argument {unknown[0]!r}")
    return args
