"""Commands: mistakes are reported in one line, those in flags with the nearest one."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from maxghost.config.values import ConfigError, did_you_mean, print_problem

ACCEPT_HELP = "continue without damaged or missing score files, and list what is lost"

USER_ERROR = 2


def guard(work: Callable[[], int | None], name: str = "maxghost") -> int:
  """Runs a command and returns its exit code. What is no defect of the program is a line of `name` on stderr.

  0 if the output was closed early (`| head`); 1 for a file or disk that fails; 2 for wrong input, where nothing was
  written; 130 for Ctrl-C.
  """
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks
  code = 0
  try:
    code = work() or 0
    sys.stdout.flush()
  except ConfigError as error:
    for problem in error.problems or (str(error),):
      print_problem(problem, name)
    return error.exit_code
  except KeyboardInterrupt as error:
    print_problem(str(error) or "interrupted", name)
    return 130
  except OSError as error:
    print_problem(error, name)
    return code if isinstance(error, BrokenPipeError) else 1
  except ValueError as error:
    if "embedded null" not in str(error):
      raise
    print_problem("a path holds a NUL character", name)
    return USER_ERROR
  return code


class Parser(argparse.ArgumentParser):
  """An argparse parser that raises ConfigError instead of exiting, and accepts no abbreviated flags."""

  def __init__(self, *args: Any, **options: Any):
    plain = argparse.RawDescriptionHelpFormatter
    super().__init__(*args, allow_abbrev=False, formatter_class=plain, **options)

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
