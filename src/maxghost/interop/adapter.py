"""`maxghost checkpoint adapter merge`: LoRA adapters of PEFT in models.

Exit code 0: written; 1: what was written differs (nothing is left); 2: refused, with the tensors named.
"""

import argparse
from collections.abc import Sequence

from maxghost import config
from maxghost.checkpoint.layouts_store import tool
from maxghost.interop.hf_checkpoint import export_model


@tool("adapter")
def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  cfg = config.load(args.config) if args.config else None
  export_model(args.model, args.target, cfg=cfg, adapter=args.adapter)
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="maxghost checkpoint adapter", description="LoRA adapters (docs/huggingface.md)."
  )
  verbs = parser.add_subparsers(dest="verb", required=True)
  merge = verbs.add_parser("merge", help="a model with an adapter merged into its weights, as a Hugging Face folder")
  merge.add_argument("model", metavar="MODEL", help="run, checkpoint, imported folder, or Hugging Face folder")
  merge.add_argument("adapter", metavar="ADAPTER", help="adapter folder of PEFT")
  merge.add_argument("target", metavar="TARGET", help="folder to write; must not exist")
  merge.add_argument("--config", help="config.yml of a model that has none beside it")
  return parser
