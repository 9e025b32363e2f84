"""`python -m maxghost COMMAND ...`, as the console script `maxghost`."""

import sys

from maxghost.cli import main

if __name__ == "__main__":
  sys.exit(main())
