"""Loads a model from a run, a checkpoint, an imported folder or a Hugging Face folder, for the commands."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxghost import config
from maxghost.checkpoint.layouts import read_checkpoint
from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.config import Config, ConfigError, ModelConfig, pipeline
from maxghost.config.schema import WEIGHTS_ONLY
from maxghost.config.values import divisors, naming, shown, slash_path
from maxghost.data.tokenizers import load_tokenizer
from maxghost.interop import huggingface, merge, model_path, quantize
from maxghost.interop.huggingface_config import differing
from maxghost.interop.linen_scaling import head_changes, unscaled
from maxghost.interop.load_tree import Taken, open_load
from maxghost.interop.model_path import ModelPlace, plain


def find(path: str | Path, config_file: str | None = None, otherwise: str | None = None, key: str = "", **changes):
  """(where the model is, its configuration, with `changes`); reads no parameters. Raises ConfigError.

  config_file: for a checkpoint without a configuration, or one that must agree with it. otherwise: a configuration for
  a model that has none. key: that gave the path, for errors.
  """
  place = model_path.find(path, key)
  config_file = config_file or (None if place.config else otherwise)
  given = config.load(config_file) if config_file else None
  return place, config.replace(model_path.configured(place, path, given, f"--config {config_file}"), **changes)


def layout_of(cfg: Config) -> Any:
  """The mesh that `ici_*` above 1 name, over as many devices; None: one device. Imports JAX. Raises ConfigError."""
  import jax

  from maxghost.parallel import mesh

  sizes, devices = [*mesh.group_sizes(cfg.parallel, "ici").values()], jax.devices()
  if len(devices) == 1 or max(sizes) <= 1:
    return None
  return _of_one_slice(cfg, devices if -1 in sizes else devices[: math.prod(sizes)])


def layout_over(cfg: Config, num: int) -> Any:
  """Weights and rows split over `num` devices, whatever mesh the run had; None: one. Raises ConfigError."""
  import jax

  from maxghost.parallel import mesh

  most, width = len(jax.devices()), cfg.model.base_emb_dim
  if num > most or width % num:
    fits = max(n for n in divisors(width) if n <= min(num, most))
    said = f"this machine has {most}" if num > most else f"the width {width} of the model does not divide over {num}"
    raise ConfigError(f"--devices {num}: {said}; use --devices {fits}")
  sizes = {f"ici_{axis}_parallelism": 1 for axis in mesh.MESH_AXES} | {"ici_fsdp_parallelism": num}
  return None if num == 1 else _of_one_slice(cfg, jax.devices()[:num], **sizes)


def _of_one_slice(cfg: Config, devices: Sequence, **sizes: int) -> Any:
  """The mesh of the run's `ici_*`, or of `sizes`, where the slices of the run have no part in it."""
  from maxghost.parallel import mesh, shardings

  slices = {f"dcn_{axis}_parallelism": 1 for axis in mesh.MESH_AXES}
  return shardings.Layout.of(dataclasses.replace(cfg.parallel, enable_diloco=False, **slices | sizes), devices)


def load(place: ModelPlace, cfg: Config, say: Callable[[str], None] = print, adapter: str = "", layout: Any = None):
  """(graphdef, state) of the model, split as `layout` says, with its adapters or `adapter` merged in. Imports JAX."""
  from flax import nnx

  from maxghost import adapters
  from maxghost.training import state
  from maxghost.training.devices import configure_jax

  configure_jax(cfg)
  place, cfg, adapter = model_path.with_base(place, cfg, adapter)
  graphdef, abstract = nnx.split(adapters.create_abstract(cfg))
  wanted = state.to_tree(state.abstract_arrays(layout.abstract(abstract) if layout else abstract))
  return graphdef, state.from_tree(open_parameters(place, cfg, {"model": wanted}, say, adapter)()["model"], abstract)


def check_config(cfg: Config) -> ModelPlace:
  """Finds the model that a run begins with; reads only configurations. Raises ConfigError for another than `cfg`'s."""
  key, path = cfg.checkpoint.given_by, cfg.checkpoint.given
  place = model_path.find(path, key)
  if place.config is None:
    return place
  with naming(key, path):
    model_path.check_whole(place, "training")
  if place.config.adapter.lora_rank:
    base = place.config.checkpoint.given or "BASE"
    own = f"load_parameters_path={base} lora_restore_path={path} with its lora_rank and lora_alpha"
    merged = f"merge them first: maxghost checkpoint hf export {path} FOLDER"
    raise ConfigError(f"{key}={path} holds adapters alone; use {own}, or {merged}")
  if unlike := differing(place.config.model, cfg.model):
    listed = "; ".join(f"{key}={shown(found)} there, {shown(here)} here" for key, (found, here) in unlike.items())
    way = f"let maxghost checkpoint hf import {path} FOLDER write a config with them"
    own = f"begin with its own: maxghost train {place.config_file} {key}={path} run_name=NAME"
    said = f"{key}={path} is another model ({place.config_file}): {listed}; set these keys as they are there"
    raise ConfigError(f"{said}, or {way if huggingface.is_huggingface(place.tree) else own}")
  return place


def teacher(cfg: Config, offline: bool = False) -> tuple[ModelConfig, Callable] | None:
  """(the model of `distill_teacher`, what opens its parameters), or None for a run that reads no teacher unless
  offline: its logits are to be written. Raises ConfigError if it does not fit."""
  if cfg.reference != "teacher" and not offline:
    return None
  path, said = cfg.optimizer.distill_teacher, f"distill_teacher={cfg.optimizer.distill_teacher}"
  place, found = find(path, key="distill_teacher")
  model_path.check_whole(place, "a teacher")
  place, found, adapter = model_path.with_base(place, found)
  own, its = (load_tokenizer(c.data.tokenizer_type, c.data.tokenizer_path) for c in (cfg, found))
  if found.model.vocab_size != cfg.model.vocab_size or own.fingerprint != its.fingerprint:
    what = f"({found.model.vocab_size} entries, tokenizer {its.name}) than the run ({cfg.model.vocab_size}, {own.name})"
    raise ConfigError(f"{said} has another vocabulary {what}; use a teacher with the same tokenizer and vocab_size")
  if problem := pipeline.layers_problem(found.model, cfg.parallel):
    raise ConfigError(f"{said} passes the stages of the run: {problem}, or offline_data_dir, written without stages")
  return found.model, lambda wanted: open_given(place, found, {"model": wanted}, ("distill_teacher", path), adapter)


def check_steps(place: ModelPlace, cfg: Config) -> None:
  """Raises ConfigError if a run cannot go on after the steps of `load_full_state_path`."""
  given, keys = cfg.checkpoint.load_full_state_path, {"ghost_val_every": "validation gradient"}
  keys |= {"num_iterations": "answers"} if cfg.samples else {}
  with naming("load_full_state_path", given):
    step = read_checkpoint(huggingface.open_tree(place.tree)).step
  said = f"load_full_state_path={given}"
  if step is None:
    raise LayoutError(f"{said} does not say how many steps it has taken; use load_parameters_path")
  if (first := int(step.read(None))) >= cfg.run.steps:
    raise ConfigError(f"{said} has taken {first} steps; use steps={2 * first}, or another above it")
  for key, what in keys.items():
    if first % (every := cfg.flat()[key]):
      raise ConfigError(f"{key}={every}: {said} keeps no {what} of its {first} steps; use a divisor of {first}")


def open_parameters(place: ModelPlace, cfg: Config, wanted: Mapping, say: Callable = print, adapter="") -> Callable:
  """Pairs a model, with `adapter` merged in, and the tree `wanted`; returns what reads it. Raises ConfigError."""
  checkpoint = read_checkpoint(huggingface.open_tree(place.tree))
  there, here = place.config.model.quantization if place.config else "", cfg.model.quantization
  narrows = here in WEIGHTS_ONLY and there != here
  if adapter or narrows:
    model_path.check_whole(place, f"adapter={adapter}" if adapter else f"quantization={here}")
    checkpoint = unscaled(checkpoint, cfg.model)
  checkpoint = merge.open_merged(checkpoint, cfg.model, adapter, say) if adapter else checkpoint
  checkpoint = quantize.quantized(checkpoint, cfg.model, here) if narrows else checkpoint
  if not checkpoint.values_from:
    what = "nothing tells whether MaxText or maxghost scaled the query weights"
    raise LayoutError(f"{place.tree}: {what}; write a copy that does with maxghost checkpoint rescale")
  head_dim, rope_pairs = head_changes(checkpoint, cfg.model)
  return open_load(checkpoint, wanted, head_dim=head_dim, rope_pairs=rope_pairs, widen=True, say=say)


def open_given(place: ModelPlace, cfg: Config, wanted: Mapping, given: tuple | None = None, adapter="") -> Callable:
  """`open_parameters` of what a run begins with, or (key, path); errors name it, also while arrays are read."""
  key, path = given or (cfg.checkpoint.given_by, cfg.checkpoint.given)
  with naming(key, path):
    return naming(key, path)(open_parameters(place, cfg, wanted, adapter=adapter))


def open_adapted(place: ModelPlace | None, cfg: Config, wanted: Mapping, resumed: bool = False) -> Callable[[], dict]:
  """As `open_parameters`, with adapters: those of lora_restore_path unless `resumed`; narrowed matrices one by one."""
  import jax
  from flax import nnx
  from flax.traverse_util import flatten_dict, unflatten_dict

  from maxghost import models
  from maxghost.adapters.quantized import quantize_layers
  from maxghost.parallel import distributed
  from maxghost.parallel.shardings import spread

  flat: dict[Any, Any] = flatten_dict(wanted["model"])
  fresh = {slash_path(path): path for path in flat if "lora" in path or "_lora_" in path[-1]}
  given, restored = cfg.adapter.lora_restore_path, {}
  if given and not resumed:
    with naming("lora_restore_path", given):
      settings, restored = merge.open_adapter(given, cfg.model)
      digest = distributed.Digest()
      for _, array in sorted(restored.items()):
        digest.add(array)
      digest.check(given)
    there = {label: tuple(x.shape) for label, x in restored.items()}
    here = {label: tuple(flat[path].shape) for label, path in fresh.items()}
    unlike = sorted(label for label in there.keys() | here.keys() if there.get(label) != here.get(label))
    if unlike or not math.isclose(settings.scale, cfg.adapter.scale, rel_tol=1e-7):
      what = f"{unlike[0]} is {there.get(unlike[0], 'missing')} there" if unlike else "its scale is another"
      keys = f"lora_rank={settings.rank} lora_alpha={settings.scale * settings.rank:.9g}"
      raise ConfigError(f"lora_restore_path={given} does not fit the adapters of this run: {what}; it has {keys}")
  kernels = {tuple(map(str, p)): v for p, v in nnx.to_flat_state(nnx.state(models.create_abstract(plain(cfg))))}

  def narrowed(v) -> Taken:
    in_axes, out_axes = v.get_metadata()["matrix"]
    qtype, depth = cfg.adapter.lora_weight_qtype, len(v.shape) - in_axes - out_axes
    return Taken(v.shape, v.dtype, functools.partial(quantize_layers, qtype=qtype, depth=depth, in_axes=in_axes))

  asked = {
    p: narrowed(v) if p not in flat else flat[p] if flat[p].dtype == v.dtype else jax.ShapeDtypeStruct(v.shape, v.dtype)
    for p, v in kernels.items()
  }
  read = open_given(place, plain(cfg), {"model": unflatten_dict(asked)}) if place else lambda: {"model": {}}

  def read_all() -> dict:
    found: dict[Any, Any] = {fresh[label]: x for label, x in restored.items()}
    arrays: dict[Any, Any] = flatten_dict(read()["model"])
    for path, x in arrays.items():
      if path not in flat:  # (..., matrix, part); a matrix of experts has a name of its own
        path = (*path[:-2], path[-1] if path[-2] == "kernel" else "_".join(path[-2:]))
      found[path] = x
    return {"model": unflatten_dict({p: spread(x.astype(flat[p].dtype), flat[p].sharding) for p, x in found.items()})}

  return read_all


def frozen(cfg: Config, wanted: Mapping[str, Any]) -> dict:
  """The arrays `wanted` of the base below the adapters of a run, from load_parameters_path or init_weights_seed."""
  from maxghost.parallel import shardings
  from maxghost.training import state

  given = cfg.checkpoint.load_parameters_path
  if given:
    return state.chosen(open_adapted(model_path.find(given, "load_parameters_path"), cfg, wanted, True)(), wanted)
  return state.chosen(state.to_tree(state.create_split(cfg, shardings.current())[1]), wanted)
