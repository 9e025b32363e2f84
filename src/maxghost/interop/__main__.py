"""`maxghost checkpoint convert|compare|inspect|rescale|hf`: tools for checkpoints of any layout."""

import importlib
import sys
from collections.abc import Sequence

_TOOLS = {
  "convert": ("maxghost.interop.convert", "from one layout to another: Linen, NNX, maxghost, parameters alone"),
  "compare": ("maxghost.checkpoint.compare", "are two checkpoints equal, whatever their layouts"),
  "inspect": ("maxghost.checkpoint.inspect_checkpoint", "path, shape, dtype and bytes of every leaf"),
  "rescale": ("maxghost.interop.linen_scaling", "attention factor into or out of the query weights (MaxText)"),
  "hf": ("maxghost.interop.hf_checkpoint", "import or export a Hugging Face model folder"),
}


def main(argv: Sequence[str] | None = None) -> int:
  arguments = list(sys.argv[1:] if argv is None else argv)
  if not arguments or arguments[0] not in _TOOLS:
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    lines = ["usage: maxghost checkpoint TOOL [...]", ""]
    lines += [f"  {name:<8} {about}" for name, (_, about) in _TOOLS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
  module = importlib.import_module(_TOOLS[arguments[0]][0])
  if arguments[0] in ("compare", "inspect"):
    from maxghost.interop.huggingface import open_tree

    return module.main(arguments[1:], open_tree)
  return module.main(arguments[1:])


if __name__ == "__main__":
  sys.exit(main())
