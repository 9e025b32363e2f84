"""Hugging Face models in and out, one tensor at a time.

An import makes a folder with items/, config.yml and tokenizer/ of a Hugging Face folder or a GGUF file. Both directions
keep every tensor's bits and dtype, and are read again and compared. Exit codes: 0 written; 1 what was written differs
(nothing is left); 2 refused.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from maxghost import config
from maxghost.checkpoint.layouts import read_checkpoint
from maxghost.checkpoint.layouts_store import LayoutError, full_path, read_json, write_json
from maxghost.config.arguments import Parser
from maxghost.config.values import guarded, import_package, nearest_beside
from maxghost.data import tokenizer_files
from maxghost.data.tokenizers import load_tokenizer
from maxghost.interop import gguf, huggingface, huggingface_config, merge, model_path, peft
from maxghost.interop.convert import DEFAULT_RAM_BYTES, RAM_ARGUMENT, check_target, check_written, new_folder, written
from maxghost.interop.convert_plan import Target, make_plan
from maxghost.interop.huggingface import open_tree
from maxghost.interop.linen_scaling import unscaled
from maxghost.interop.safetensors_files import open_tensors, write_tensors

_SHARD_BYTES = 5_000_000_000


def import_model(source: str | Path, target: str | Path, *, scan_layers: bool = True,
                 ram_bytes: int = DEFAULT_RAM_BYTES, say: Callable[[str], None] = print) -> config.Config:  # fmt: skip
  """Writes the Hugging Face folder or GGUF file `source` as the new folder `target`; returns its configuration.

  Raises ConfigError for tensors that are missing, unknown or misshapen, and for a tokenizer of another vocabulary.
  """
  source, target = full_path(source), full_path(target)
  if not source.exists():
    raise LayoutError(f"there is no {source}{nearest_beside(source, '*')}")
  if source.suffix == gguf.SUFFIX:
    import_package("tokenizers", f"the tokenizer in {source}", "hf")
    file = gguf.open_file(source)
    content, tensors, origin = gguf.config_json(file), file.tensors, source
    write_tokenizer = functools.partial(gguf.write_tokenizer, file)
  elif huggingface.is_huggingface(source):
    origin = source / huggingface.CONFIG_JSON
    content, tensors = read_json(origin), open_tensors(source)
    write_tokenizer = functools.partial(tokenizer_files.copy, source)
  else:
    raise LayoutError(f"{source} is no Hugging Face model folder: it has no {huggingface.CONFIG_JSON}")
  cfg = config.replace(huggingface.configuration(content, str(origin), tensors), scan_layers=scan_layers)
  model_path.tokenizer_keys(source, cfg.model.vocab_size)  # a wrong one is named before anything is written
  checkpoint = read_checkpoint(huggingface.tree_of(tensors, cfg.model, source))
  plan = make_plan(checkpoint, Target.of(cfg.model))
  say(f"source {source}: {cfg.model.decoder_block}, {checkpoint.num_params():,} parameters, {cfg.model.weight_dtype}")
  with written(checkpoint, plan, target, has_level=True, params_only=True, ram_bytes=ram_bytes) as temporary:
    tokenizer = temporary / tokenizer_files.FOLDER
    write_tokenizer(tokenizer)
    if keys := model_path.tokenizer_keys(tokenizer, cfg.model.vocab_size):
      keys["tokenizer_path"] = str(target / Path(keys["tokenizer_path"]).relative_to(temporary))
    keys = {"tokenizer_path": "", "load_parameters_path": str(target), "run_name": target.name, **keys}
    cfg = config.replace(cfg, **keys)
    write_json(temporary / model_path.HUGGINGFACE_FILE, content, indent=2, sort_keys=True)
    config.save(cfg, temporary / model_path.CONFIG_FILE)
  say(f"written {target}, verified byte by byte; train it with: maxghost train {target / model_path.CONFIG_FILE}")
  return cfg


def export_model(source: str | Path, target: str | Path, *, cfg: config.Config | None = None, adapter: str | Path = "",
                 shard_bytes: int = _SHARD_BYTES, ram_bytes: int = DEFAULT_RAM_BYTES,
                 say: Callable[[str], None] = print) -> None:  # fmt: skip
  """Writes the parameters of a checkpoint of any layout as the new Hugging Face folder `target`.

  cfg: the configuration of the model, where no config.yml lies beside the checkpoint. adapter: a folder of PEFT, or a
  run with adapters, to merge into the parameters; a run with adapters has its own. Raises ConfigError.
  """
  place = model_path.find(source)
  model_path.check_whole(place, "an export")
  place, cfg, adapter = model_path.with_base(place, model_path.configured(place, source, cfg), str(adapter))
  checkpoint = unscaled(read_checkpoint(open_tree(place.tree)), cfg.model)
  checkpoint = merge.open_merged(checkpoint, cfg.model, adapter, say) if adapter else checkpoint
  kept = {leaf: ref for leaf, ref in checkpoint.params.leaves.items() if leaf[0][0] != "mtp_block"}
  if further := len(checkpoint.params.leaves) - len(kept):
    say(f"left out: {further} arrays of multi-token prediction, for which Hugging Face's formats have no place")
    checkpoint, cfg = checkpoint.with_params(kept), config.replace(cfg, mtp_num_layers=0)
  target = full_path(target)
  check_target(checkpoint.raw, target)
  for package in ("safetensors", "tokenizers") if cfg.data.tokenizer_type == "byte" else ("safetensors",):
    import_package(package, f"an export of {source}", "hf")  # not after everything is written
  tensors = huggingface.planned_tensors(checkpoint, cfg.model, ram_bytes // 3)
  origin = model_path.huggingface_file(place, cfg)
  others = huggingface_config.other_entries(read_json(origin), cfg.model) if origin else {}
  original, scaled = cfg.model.original_max_position_embeddings, cfg.model.rope_type in ("yarn", "llama3.1")
  positions = max(cfg.data.max_target_length, 2048, int(original * cfg.model.rope_factor) * scaled)
  dtypes = {ref.dtype.name for ref in checkpoint.params.leaves.values()}
  dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
  content = huggingface_config.config_json(cfg.model, dtype, positions, special_ids(cfg), others)
  with new_folder(target) as temporary:
    write_tensors(temporary, tensors, shard_bytes)
    write_json(temporary / huggingface.CONFIG_JSON, content, indent=2, sort_keys=True)
    if cfg.data.tokenizer_path:
      tokenizer_files.export(cfg.data.tokenizer_type, Path(cfg.data.tokenizer_path), temporary)
    elif cfg.data.tokenizer_type == "byte":
      tokenizer_files.write_bytes(temporary, cfg.data.add_bos, cfg.data.chat_template_path)
    elif origin:  # a tokenizer that only transformers reads, and the tokens that end a text
      for folder in (origin.parent, origin.parent / tokenizer_files.FOLDER):
        tokenizer_files.copy(folder, temporary)
    check_written(checkpoint, huggingface.open_folder(temporary), params_only=True, ram_bytes=ram_bytes)
  if cfg.data.tokenizer_type == "tiktoken":
    say("note: without the tokenizer, as transformers reads no files of tiktoken")
  if cfg.model.decoder_block == "llama2" and cfg.model.base_emb_dim % cfg.model.base_num_query_heads:
    say("note: transformers 5 reads no Llama with a base_emb_dim that base_num_query_heads does not divide; 4 does")
  if cfg.model.decoder_block == "gpt_oss" and (limit := cfg.model.mlp_activations_limit) != 7:
    say(f"note: transformers 4 does not read swiglu_limit={limit:g} and computes with 7; use transformers 5")
  size = sum(tensor.nbytes for tensor in tensors)
  say(f"written {target}: {len(tensors)} tensors, {size / 1e6:.1f} MB, verified byte by byte")


def special_ids(cfg: config.Config) -> dict[str, int]:
  if cfg.data.tokenizer_type != "byte" and not cfg.data.tokenizer_path:
    return {}
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
  return {name: number for name, number in ids.items() if number is not None}


@guarded("hf_checkpoint")
def main(argv: Sequence[str] | None = None) -> int:
  about = "Hugging Face models to maxghost checkpoints and back (docs/huggingface.md)."
  parser = Parser(prog="maxghost checkpoint hf", description=about)
  verbs = parser.add_subparsers(dest="verb", required=True)
  into = verbs.add_parser("import", help="a Hugging Face folder into a checkpoint with config.yml and tokenizer")
  into.add_argument("source", metavar="HF_FOLDER", help="folder with config.json, or a .gguf file of a Llama model")
  into.add_argument("--scan_layers", action=argparse.BooleanOptionalAction, default=True, help="stack layers (default)")
  out = verbs.add_parser("export", help="a checkpoint into a folder that transformers loads")
  out.add_argument("source", metavar="CHECKPOINT", help="a run, a step of it, or an imported folder; any layout")
  out.add_argument("--config", help="config.yml of the model, where none lies beside the checkpoint")
  out.add_argument("--shard_mb", help="largest file", **RAM_ARGUMENT | {"dest": "shard_bytes", "default": _SHARD_BYTES})
  out.add_argument("--adapter", default="", help="LoRA adapter to merge in: a folder of PEFT, or a run with lora_rank")
  adapter = verbs.add_parser("adapter", help="the LoRA adapter of a run into a folder that PEFT loads")
  adapter.add_argument("source", metavar="RUN", help="a run with lora_rank, or a step of it")
  for verb in (into, out, adapter):
    verb.add_argument("target", metavar="TARGET", help="folder to write; must not exist")
  for verb in (into, out):
    verb.add_argument("--ram_mb", help="host memory for arrays", **RAM_ARGUMENT)
  args = parser.parse(argv)
  if args.verb == "import":
    import_model(args.source, args.target, scan_layers=args.scan_layers, ram_bytes=args.ram_bytes)
  elif args.verb == "adapter":
    cfg = model_path.find(args.source).config or config.Config()
    settings, arrays = merge.open_adapter(args.source, cfg.model)
    peft.save_adapter(args.target, cfg.model, settings, arrays, base=cfg.checkpoint.given)
    print(f"written {args.target}: {len(arrays)} arrays of rank {settings.rank}")
  else:
    cfg = config.load(args.config) if args.config else None
    sizes = {"shard_bytes": args.shard_bytes, "ram_bytes": args.ram_bytes}
    export_model(args.source, args.target, cfg=cfg, adapter=args.adapter, **sizes)
  return 0
