"""Command lines with flags (report, scores, ...); mistakes are reported in one line with the nearest flag."""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxghost.config.values import MOST, ConfigError, did_you_mean

SEEDS = -(2**63), 2**63 - 1  # the smallest and the largest seed that JAX takes
ACCEPT_HELP = "continue without damaged or missing score files, and list what is lost"


def megabytes(text: str) -> int:
  """The bytes of a number of megabytes above 0, as an argument's `type`."""
  if not 0 < (size := float(text)) < math.inf:
    raise argparse.ArgumentTypeError(f"{text}: a number of megabytes above 0")
  return max(int(size * 1e6), 1)


class Parser(argparse.ArgumentParser):
  """An argparse parser that raises ConfigError instead of exiting, and accepts no abbreviated flags."""

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
    self._negative_number_matcher = re.compile(r"-\.?\d")  # else -1e-5 would be a flag

  def error(self, message: str):
    raise ConfigError(f"{message}; {self.prog} --help lists the arguments")

  def parse(self, argv: Sequence[str] | None, **least: float) -> argparse.Namespace:
    """The parsed arguments; least: as of `check`. Raises ConfigError."""
    if wrong := [text for text in (sys.argv[1:] if argv is None else argv) if text.endswith("=--")]:
      self.error(f"{wrong[0]!r}: -- is no value")  # argparse drops it
    args, unknown = self.parse_known_args(argv)
    if unknown:
      self.refuse(unknown[0])
    self.check(args, **least)
    return args

  def check(self, args: argparse.Namespace, most: float = MOST, **least: float) -> None:
    """Raises ConfigError for the first of the named arguments that is given and is not a number from least to most."""
    for name, bound in least.items():
      value = getattr(args, name)
      if value is not None and not bound <= value <= most:
        said = f"at least {bound}" if not value > most else f"at most {most}"
        raise ConfigError(f"{self.flag(name)} {value}: {said}")

  def read_together(self, args: argparse.Namespace, beside: Mapping[str, Iterable[str]], **without: Iterable[str]):
    """Raises ConfigError for a given argument without effect: {another: those that have none beside, without it}."""
    given = [name for name, value in vars(args).items() if value != self.get_default(name)]
    for word, table, end in (("with", beside, "one of them"), ("without", without, "it")):
      for other, names in table.items():
        if (other in given) == (word == "with") and (idle := [name for name in given if name in names]):
          raise ConfigError(f"{self.flag(idle[0])} has no effect {word} {self.flag(other)}; leave {end} out")

  def flag(self, name: str) -> str:
    """As it is typed: `--query-rows` of query_rows."""
    return next(action.option_strings[0] for action in self._actions if action.dest == name)

  def refuse(self, unknown: str) -> Any:
    """Raises ConfigError for an unknown argument, with the nearest flag."""
    flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
    if hint := did_you_mean(unknown.partition("=")[0], flags) if unknown.startswith("-") else "":
      raise ConfigError(f"unknown argument {unknown!r}{hint}")
    self.error(f"unknown argument {unknown!r}")
