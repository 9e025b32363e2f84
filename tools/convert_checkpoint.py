"""Command line of `maxghost.interop.convert`: checkpoints from one layout to another."""

import sys

from maxghost.interop.convert import main

if __name__ == "__main__":
  sys.exit(main())
