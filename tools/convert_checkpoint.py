"""Command line of `maxghost.checkpoint.convert`: checkpoints from one layout to another."""

import sys

from maxghost.checkpoint.convert import main

if __name__ == "__main__":
  sys.exit(main())
