"""The console script `maxghost`, and `python -m maxghost COMMAND ...`."""

import sys

from maxghost import import_module


def main() -> int:
  """Runs the command and returns its exit code."""
  return import_module("maxghost.cli").main()


if __name__ == "__main__":
  sys.exit(main())
