"""Writes the weights of a model in few bits: int8 or int4, matrix by matrix as they are read.

Exit code 0: written and verified; 1: the written checkpoint differs (nothing is left); 2: refused.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from maxghost import config
from maxghost.checkpoint.layouts import ReadOptions, read_checkpoint, without_value
from maxghost.checkpoint.layouts_layers import blocks_of
from maxghost.checkpoint.layouts_store import LayoutError, RawTree, StoredArray, full_path
from maxghost.config.arguments import Parser
from maxghost.config.schema import WEIGHTS_ONLY, ModelConfig
from maxghost.config.values import guarded
from maxghost.data import tokenizer_files
from maxghost.data.tokenizers import load_tokenizer
from maxghost.interop import model_path
from maxghost.interop.convert import DEFAULT_RAM_BYTES, RAM_ARGUMENT, written
from maxghost.interop.convert_plan import Target, make_plan
from maxghost.interop.huggingface import open_tree
from maxghost.interop.linen_scaling import read_unscaled

_PIECE = 1 << 22


def quantized(raw: RawTree, model: ModelConfig, quantization: str) -> RawTree:
  """The model of any layout with the parts of its matrices in their place, made as they are read. Imports JAX.

  Raises LayoutError where the checkpoint has no such matrix, or as `read_unscaled`.
  """
  from flax import nnx

  from maxghost import models
  from maxghost.adapters.quantized import NAMES, matrix_axes, places

  checkpoint = read_unscaled(raw, model)
  plain = nnx.eval_shape(lambda: models.create(dataclasses.replace(model, quantization=""), rngs=nnx.Rngs(0)))
  found = {
    re.sub(r"^decoder/layers(/layers)?_\d+/", "decoder/layers/", label): (form, *matrix_axes(module))
    for label, (module, _, form) in places(plain, quantization).items()
  }
  refs = [("/".join(path), ref) for (path, _), ref in checkpoint.params.leaves.items()]
  held = {x.array: (None if x.index is None else x.axis, *found[label]) for label, x in refs if label in found}
  if missing := found.keys() - {label for label, _ in refs}:
    raise LayoutError(f"{raw.origin} has no {min(missing)}, which {quantization} narrows")
  nodes = {}
  for path, node in checkpoint.raw.nodes.items():
    if node not in held:
      nodes[path] = node
      continue
    own = without_value(path)
    for name in NAMES[held[node][1]]:
      new = name if own[-1] in ("kernel", "embedding") else f"{own[-1]}_{name}"  # of experts, after their name
      place = (*own[:-1], new, *path[len(own) :])
      nodes[place] = _part(dataclasses.replace(node, path=place), node, name, *held[node])
  return dataclasses.replace(checkpoint.raw, nodes=nodes)


def _part(like: StoredArray, source: StoredArray, name: str, axis: int | None, form: str, in_axes: int, out_axes: int):
  """A part of a matrix, or of a stack of matrices along `axis` and of experts, quantised one by one as it is read.

  Where a matrix has one axis of outputs (a table: of rows), those asked for are read, _PIECE numbers at a time.
  """
  import jax

  from maxghost.adapters.quantized import quantize

  run = jax.jit(functools.partial(quantize, qtype=form, depth=0, in_axes=in_axes, what=source.name))
  inner = [size for i, size in enumerate(source.shape) if i != axis]
  lead = len(inner) - in_axes - out_axes
  one = jax.eval_shape(run, jax.ShapeDtypeStruct(tuple(inner[lead:]), source.dtype))[name]
  shape = [*inner[:lead], *one.shape]
  place = None if axis is None else min(axis, len(shape))
  if axis is not None and place is not None:
    shape.insert(place, source.shape[axis])
  along = 0 if form == "table" else -1 if out_axes == 1 else None  # axis of matrix and part that is cut into pieces
  step = max(1, _PIECE * inner[lead:][along] // math.prod(inner[lead:])) if along is not None else 0

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    whole = [slice(*(index[i] if index else slice(None)).indices(size)) for i, size in enumerate(shape)]
    wanted = (slice(0, 1) if place is None else whole.pop(place), *whole)
    out = np.empty([s.stop - s.start for s in wanted], one.dtype)
    chunk = [*out.shape[1 + lead :]]
    if along is not None:
      chunk[along] = step
    for block in blocks_of(out.shape, (1,) * (1 + lead) + tuple(chunk)):
      layer, *asked = (slice(b.start + s.start, b.stop + s.start) for b, s in zip(block, wanted, strict=True))
      matrix, taken = [slice(0, size) for size in inner[lead:]], asked[lead:]
      if along is not None:
        matrix[along], taken[along] = taken[along], slice(None)
      places = [*asked[:lead], *matrix]
      if axis is not None:
        places.insert(axis, layer)
      w = source.read(tuple(places))
      part = run(w.reshape([n for i, n in enumerate(w.shape) if i != axis][lead:]))[name]
      out[block] = np.asarray(part)[tuple(taken)]
    return out[0] if place is None else np.moveaxis(out, 0, place)

  return dataclasses.replace(like, shape=tuple(shape), dtype=np.dtype(one.dtype), read=read, chunk_nbytes=0)


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
  made = read_checkpoint(quantized(open_tree(place.tree), cfg.model, quantization), ReadOptions(keep_unknown=True))
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
