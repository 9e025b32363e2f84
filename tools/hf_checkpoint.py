"""Command line of `maxghost.interop.hf_checkpoint`: Hugging Face models in and out."""

import sys

from maxghost.interop.hf_checkpoint import main

if __name__ == "__main__":
  sys.exit(main())
