"""Command line of `maxghost.checkpoint.compare`: are two checkpoints equal?"""

import sys

from maxghost.checkpoint.compare import main

if __name__ == "__main__":
  sys.exit(main())
