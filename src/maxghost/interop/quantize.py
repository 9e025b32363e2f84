"""Writes the weights of a model in few bits: int8 or int4, matrix by matrix as they are read.

Exit code 0: written and verified; 1: the written checkpoint differs (nothing is left); 2: refused.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxghost import config
from maxghost.checkpoint.layouts import Checkpoint, read_checkpoint
from maxghost.checkpoint.layouts_layers import Ref, blocks_of
from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, full_path
from maxghost.config.arguments import Parser
from maxghost.config.schema import WEIGHTS_ONLY, ModelConfig
from maxghost.config.values import guarded, slash_path
from maxghost.data import tokenizer_files
from maxghost.data.tokenizers import load_tokenizer
from maxghost.interop import model_path
from maxghost.interop.convert import DEFAULT_RAM_BYTES, RAM_ARGUMENT, written
from maxghost.interop.convert_plan import Target, make_plan
from maxghost.interop.huggingface import open_tree
from maxghost.interop.linen_scaling import unscaled

_PIECE = 1 << 22


def quantized(checkpoint: Checkpoint, model: ModelConfig, quantization: str) -> Checkpoint:
  """The model of any layout with the parts of its matrices in their place, made as they are read. Imports JAX.

  checkpoint: with heads as maxghost has them, see `linen_scaling.unscaled`. Raises LayoutError where it has no
  such matrix.
  """
  import jax

  from maxghost import models
  from maxghost.adapters.quantized import NAMES, matrix_axes, places, quantize

  plain = models.create_abstract(dataclasses.replace(model, quantization=""))
  found = {
    re.sub(r"^decoder/layers(/layers)?_\d+/", "decoder/layers/", label): (form, *matrix_axes(module))
    for label, (module, _, form) in places(plain, quantization).items()
  }
  if missing := found.keys() - {slash_path(path) for path, _ in checkpoint.params.leaves}:
    raise LayoutError(f"{checkpoint.raw.origin} has no {min(missing)}, which {quantization} narrows")
  leaves, compiled = {}, jax.jit(quantize, static_argnames=("qtype", "depth", "in_axes", "what"))
  for (path, layer), ref in checkpoint.params.leaves.items():
    if (label := slash_path(path)) not in found:
      leaves[path, layer] = ref
      continue
    form, in_axes, out_axes = found[label]
    run = functools.partial(compiled, qtype=form, depth=0, in_axes=in_axes, what=label)
    lead = len(ref.shape) - in_axes - out_axes
    along = lead if form == "table" else -1 if out_axes == 1 else None
    for name in NAMES[form]:
      new = name if path[-1] in ("kernel", "embedding") else f"{path[-1]}_{name}"  # of experts, after their name
      leaves[(*path[:-1], new), layer] = _part(ref, name, run, lead, along)
  return checkpoint.with_params(leaves)


def _part(ref: Ref, name: str, run: Callable[[np.ndarray], Mapping[str, Any]], lead: int, along: int | None) -> Ref:
  """The part `name` of a matrix, or of those of all experts, which `run` quantises one by one as they are read.

  lead: number of expert axes. along: the axis of rows or outputs that are quantised independently of each other. Those
  asked for are read, _PIECE numbers at a time; None reads whole matrices.
  """
  import jax

  matrix = ref.shape[lead:]
  one = jax.eval_shape(run, jax.ShapeDtypeStruct(matrix, ref.dtype))[name]
  shape, chunk = (*ref.shape[:lead], *one.shape), [*(1,) * lead, *one.shape]
  if along is not None:
    chunk[along] = max(1, _PIECE * ref.shape[along] // math.prod(matrix))

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    wanted = [slice(*s.indices(size)) for s, size in zip(index or [slice(None)] * len(shape), shape, strict=True)]
    out = np.empty([s.stop - s.start for s in wanted], one.dtype)
    for block in blocks_of(out.shape, tuple(chunk)):
      asked = [slice(b.start + s.start, b.stop + s.start) for b, s in zip(block, wanted, strict=True)]
      source = [*asked[:lead], *(slice(0, size) for size in matrix)]
      if along is not None:
        source[along], asked[along] = asked[along], slice(None)
      w = ref.read(tuple(source))
      out[block] = np.asarray(run(w.reshape(w.shape[lead:]))[name])[tuple(asked[lead:])]
    return out

  return Ref(StoredArray((*ref.array.path, name), shape, np.dtype(one.dtype), read))


def quantize_checkpoint(source: str | Path, target: str | Path, quantization: str, *,
                        cfg: config.Config | None = None, ram_bytes: int = DEFAULT_RAM_BYTES,
                        say: Callable[[str], None] = print) -> config.Config:  # fmt: skip
  """Writes the parameters of a model of any layout as the new folder `target`, which `maxghost generate` reads.

  cfg: the configuration of the model, where none lies beside it. Holds one matrix, and ram_bytes of others. Raises
  ConfigError.
  """
  place = model_path.find(source)
  cfg, target = model_path.configured(place, source, cfg), full_path(target)
  model_path.check_whole(place, f"quantising to {quantization}")
  if cfg.adapter.lora_rank:
    raise LayoutError(f"{source} holds adapters; merge them first: maxghost checkpoint hf export {source} FOLDER")
  given = {"load_parameters_path": str(target), "load_full_state_path": ""}
  cfg = config.replace(cfg, quantization=quantization, run_name=target.name, **given)
  made = quantized(unscaled(read_checkpoint(open_tree(place.tree)), cfg.model), cfg.model, quantization)
  plan = make_plan(made, Target.of(cfg.model))
  with written(made, plan, target, has_level=True, ram_bytes=ram_bytes, params_only=True) as temporary:
    if (data := cfg.data).tokenizer_path or data.tokenizer_type == "byte":
      tokenizer, folder = load_tokenizer(data.tokenizer_type, data.tokenizer_path), temporary / tokenizer_files.FOLDER
      tokenizer_files.save(tokenizer, data.tokenizer_type, folder, data.chat_template_path)
    model_path.keep_huggingface(place, cfg, temporary)
    config.save(cfg, temporary / model_path.CONFIG_FILE)
  size = sum(leaf.nbytes for leaf in plan.leaves)
  say(f"written {target}: {quantization}, {size / 1e6:.1f} MB, verified byte by byte; maxghost generate {target}")
  return cfg


@guarded("quantize")
def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="maxghost checkpoint quantize", description=__doc__)
  parser.add_argument("source", metavar="MODEL", help="run, checkpoint of any layout, imported or Hugging Face folder")
  parser.add_argument("target", metavar="TARGET", help="folder to write; must not exist")
  parser.add_argument("--quantization", choices=WEIGHTS_ONLY, required=True)
  parser.add_argument("--config", help="config.yml of the model, where none lies beside it")
  parser.add_argument("--ram_mb", help="host memory beside one matrix", **RAM_ARGUMENT)
  args = parser.parse(argv)
  cfg = config.load(args.config) if args.config else None
  quantize_checkpoint(args.source, args.target, args.quantization, cfg=cfg, ram_bytes=args.ram_bytes)
  return 0
