"""`maxghost checkpoint convert|compare|inspect|rescale|quantize|hf`: tools for checkpoints of any layout."""

import functools
import sys
from collections.abc import Sequence

from maxghost.checkpoint import compare, inspect_checkpoint
from maxghost.config.values import ConfigError, did_you_mean, guarded
from maxghost.interop import convert, hf_checkpoint, huggingface, linen_scaling, quantize

_TOOLS = {
  "convert": (convert.main, "from one layout to another: Linen, NNX, maxghost, parameters alone"),
  "compare": (functools.partial(compare.main, opener=huggingface.open_tree), "are two checkpoints equal"),
  "inspect": (functools.partial(inspect_checkpoint.main, opener=huggingface.open_tree), "what a checkpoint holds"),
  "rescale": (linen_scaling.main, "attention factor into or out of the query weights (MaxText)"),
  "quantize": (quantize.main, "weights in int8 or int4, for maxghost generate"),
  "hf": (hf_checkpoint.main, "import or export a Hugging Face model folder"),
}


@guarded("maxghost")
def main(argv: Sequence[str] | None = None) -> int:
  name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
  if name in _TOOLS:
    return _TOOLS[name][0](rest)
  if name not in ("", "-h", "--help"):
    raise ConfigError(f"unknown tool {name!r}{did_you_mean(name, _TOOLS, 'there are')}")
  tools = "\n".join(f"  {name:<8} {about}" for name, (_, about) in _TOOLS.items())
  print(f"usage: maxghost checkpoint TOOL [...]\n\n{tools}", file=sys.stdout if name else sys.stderr)
  return 0 if name else 2


if __name__ == "__main__":
  sys.exit(main())
