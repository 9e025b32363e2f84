"""`maxghost checkpoint adapter export|merge`: LoRA adapters in the folders of PEFT, and merged into a model.

Exit code 0: written; 1: what was written differs (nothing is left); 2: refused, with the tensors named.
"""

import argparse
import shutil
from collections.abc import Sequence

from maxghost import config
from maxghost.checkpoint.layouts_store import LayoutError, VerificationError, tool
from maxghost.interop import merge, model_path, peft
from maxghost.interop.hf_checkpoint import export_model


@tool("adapter")
def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  cfg = config.load(args.config) if args.config else None
  if args.verb == "merge":
    export_model(args.model, args.target, cfg=cfg, adapter=args.adapter)
    return 0
  cfg = cfg or model_path.find(args.run).config
  if cfg is None:
    raise LayoutError(f"{args.run}: no config.yml beside it says what model it is; name one with --config")
  settings, arrays = merge.open_adapter(args.run, cfg.model)
  peft.save_adapter(args.target, cfg.model, settings, arrays, base=args.base or cfg.checkpoint.given)
  found, again = peft.load_adapter(args.target, cfg.model)
  same = all(arrays[label].tobytes() == values.tobytes() for label, values in again.items())
  if not same or (found.scale, again.keys()) != (settings.scale, arrays.keys()):
    shutil.rmtree(args.target)
    raise VerificationError(f"verification failed: {args.target} reads differently; nothing is left there")
  print(f"written {args.target}: {len(arrays)} arrays of rank {settings.rank}, verified byte by byte")
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="maxghost checkpoint adapter", description="LoRA adapters (docs/huggingface.md)."
  )
  verbs = parser.add_subparsers(dest="verb", required=True)
  out = verbs.add_parser("export", help="the adapter of a run into a folder that PEFT loads")
  out.add_argument("run", metavar="RUN", help="a run with lora_rank, or a checkpoint of it")
  out.add_argument("--base", default="", help="name of the base model for adapter_config.json (load_parameters_path)")
  into = verbs.add_parser("merge", help="a model with an adapter merged into its weights, as a Hugging Face folder")
  into.add_argument("model", metavar="MODEL", help="run, checkpoint, imported folder, or Hugging Face folder")
  into.add_argument("adapter", metavar="ADAPTER", help="adapter folder of PEFT, or a run with lora_rank")
  for verb in (out, into):
    verb.add_argument("target", metavar="TARGET", help="folder to write; must not exist")
    verb.add_argument("--config", help="config.yml of a model that has none beside it")
  return parser
