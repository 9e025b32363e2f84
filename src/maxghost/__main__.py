"""The console script `maxghost`, and `python -m maxghost COMMAND ...`."""

import os
import sys

from maxghost import import_module


def main() -> int:
  """Runs the command and returns its exit code."""
  code = import_module("maxghost.cli").main()
  if code == 130 and "jax" in sys.modules and sys.argv[1:2] != ["train"]:  # which ends between two steps
    sys.stdout.flush()
    os._exit(code)  # Ctrl-C: threads of XLA that still compute would crash the interpreter's own end
  return code


if __name__ == "__main__":
  sys.exit(main())
