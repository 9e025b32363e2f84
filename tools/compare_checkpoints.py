"""`maxghost checkpoint compare`: are two checkpoints equal?"""

import sys

from maxghost.interop.__main__ import main

if __name__ == "__main__":
  sys.exit(main(["compare", *sys.argv[1:]]))
