"""The console script `maxghost`, and `python -m maxghost COMMAND ...`."""

import signal
import sys


def main() -> int:
  """Runs the command and returns its exit code. Ctrl-C during the imports ends the process without a traceback."""
  interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
  if interruptible:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  from maxghost import cli

  if interruptible:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  return cli.main()


if __name__ == "__main__":
  sys.exit(main())
