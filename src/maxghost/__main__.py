"""The console script `maxghost`, and `python -m maxghost COMMAND ...`."""

import sys

from maxghost import import_module, left_with


def main() -> int:
  """Runs the command and returns its exit code."""
  return left_with(import_module("maxghost.cli").main())


if __name__ == "__main__":
  sys.exit(main())
