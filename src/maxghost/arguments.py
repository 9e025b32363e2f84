"""Command lines with flags (report, scores): a wrong one is reported in one line, with the nearest flag."""

import argparse
import io
import os
import sys
from collections.abc import Callable

from maxghost import cli
from maxghost.config import ConfigError, did_you_mean

ACCEPT_HELP = "go on without damaged or missing score files, and say what is lost"


def run_door(work: Callable[[], int]) -> int:
  """Runs `work` and returns the exit code: 2 where the input is wrong. A reader may leave early (`| head`)."""
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not a traceback
  try:
    code = cli.guard(work)
    sys.stdout.flush()
    return code
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again at its exit
    return 0


class Parser(argparse.ArgumentParser):
  """argparse that raises ConfigError instead of printing its usage and exiting; flags are never abbreviated."""

  def __init__(self, verb: str, description: str | None, epilog: str | None = None):
    plain = argparse.RawDescriptionHelpFormatter
    super().__init__(
      prog=f"maxghost {verb}", description=description, epilog=epilog, allow_abbrev=False, formatter_class=plain
    )

  def error(self, message: str):
    raise ConfigError(f"{message}; {self.prog} --help lists the arguments")

  def parse(self, argv: list[str] | None) -> argparse.Namespace:
    """Raises ConfigError for anything wrong."""
    args, unknown = self.parse_known_args(argv)
    if unknown:
      flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
      hint = did_you_mean(unknown[0].partition("=")[0], flags) if unknown[0].startswith("-") else ""
      if hint:
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint}")
      self.error(f"unknown argument {unknown[0]!r}")
    return args
