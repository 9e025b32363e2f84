"""Converts a checkpoint from any layout to any other, one array at a time, and checks the result byte by byte.

Exit code 0: written and verified; 1: the written checkpoint differs from the source (nothing is left); 2: refused.
Values never change; `linen_scaling` is the separate step that rescales query weights.
"""

import argparse
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from maxghost.checkpoint import compare, layouts_store
from maxghost.checkpoint.layouts import LAYOUTS, LINEN, NNX, Checkpoint, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import INTEGER, SCANNED, UNSCANNED, LayerReader, blocks_of, chunk_of
from maxghost.checkpoint.layouts_store import LayoutError, Location, RawTree, VerificationError, full_path
from maxghost.config.arguments import Parser, megabytes
from maxghost.config.files import write_text
from maxghost.config.values import guarded, slash_path
from maxghost.interop.convert_plan import KEEP, TARGETS, Plan, Target, TargetLeaf, make_plan
from maxghost.interop.huggingface import open_tree

DEFAULT_RAM_BYTES = 1 << 31
_BLOCK_BYTES = 1 << 26
_COMMIT_BYTES = 64_000_000
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_KVSTORE_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
RAM_ARGUMENT: dict[str, Any] = {"dest": "ram_bytes", "type": megabytes, "default": DEFAULT_RAM_BYTES, "metavar": "MB"}
DIRECTIONS = ("auto", "linen_to_nnx", "nnx_to_linen")


def convert(source: str | os.PathLike, target_path: str | os.PathLike, *, to: str = "", direction: str = "auto",
            read: ReadOptions | None = None, dry_run: bool = False, verify: bool = True,
            ram_bytes: int = DEFAULT_RAM_BYTES, say: Callable[[str], None] = print, **wishes: Any) -> Plan:  # fmt: skip
  """Converts the checkpoint or Hugging Face folder `source` into the new folder `target_path`; returns what went where.

  to: the target layout; '' = the other family, as `direction` says. read: how to read the source. verify: whether to
  read the target again and compare it with the source. ram_bytes: host memory for arrays; those larger than a third of
  it are moved in blocks, of at least one chunk. say: receives each message for the user. wishes: the other fields of
  `Target`. Raises LayoutError where something cannot be moved, and nothing was written.
  """
  raw = open_tree(source)
  checkpoint = read_checkpoint(raw, read, strict=True)
  target = Target(_target_layout(checkpoint.layout == LINEN, to, direction), **wishes)
  plan = make_plan(checkpoint, target)
  out = full_path(target_path)
  check_target(raw, out)
  lines = _summary(checkpoint, target, plan, out)
  if dry_run:
    lines += [f"  {leaf.text()}" for leaf in plan.leaves]
    lines += [f"  (nothing) -> {slash_path(path)}  {empty.kind}" for path, empty in plan.empties]
    lines += ["dry run: nothing was written"]
  for line in lines:
    say(line)
  rngs = not (target.bare or target.drop_rngs)
  if not dry_run:
    with written(checkpoint, plan, out, verify=verify, ram_bytes=ram_bytes, params_only=target.bare, rngs=rngs):
      pass
    say(f"written {out}" + (", verified byte by byte" if verify else ", not verified (--no-verify)"))
  return plan


def _target_layout(is_linen: bool, to: str, direction: str) -> str:
  if direction not in DIRECTIONS:
    raise LayoutError(f"direction={direction}: use {', '.join(DIRECTIONS)}")
  if direction == ("nnx_to_linen" if is_linen else "linen_to_nnx"):
    raise LayoutError(f"source is {'Linen' if is_linen else 'NNX'} layout; {direction} refused")
  wanted = to or (NNX if is_linen else LINEN)
  if wanted not in TARGETS:
    raise LayoutError(f"to={to}: use {', '.join(TARGETS)}")
  if direction != "auto" and (direction == "nnx_to_linen") != Target(wanted).is_linen:
    raise LayoutError(f"direction={direction} and to={to} contradict each other; give one of them")
  return wanted


def check_target(raw: RawTree, out: Path) -> None:
  source, step, target = raw.location.item.resolve(), raw.location.step.resolve(), out.resolve()
  found = {
    "equals source": target in (source, step), "holds the source": source.is_relative_to(target),
    "lies inside the source": target.is_relative_to(step), "exists": out.exists() or out.is_symlink(),
  }  # fmt: skip
  if wrong := [text for text, is_so in found.items() if is_so]:
    raise LayoutError(f"target {out} {wrong[0]}; name a new folder")


@contextlib.contextmanager
def written(checkpoint: Checkpoint, plan: Plan, out: Path, *, has_level: bool | None = None, verify: bool = True,
            ram_bytes: int = DEFAULT_RAM_BYTES, **options: Any) -> Iterator[Path]:  # fmt: skip
  """Writes the new folder `out` and yields it, under its temporary name, for what goes beside the tree.

  has_level: whether the tree gets a folder `items`; None: as the source. options: of `check_written`. Raises
  LayoutError for a folder that exists, and where the disk cannot hold it, estimated from the source's stored size.
  """
  raw = checkpoint.raw
  check_target(raw, out)
  everything = sum(array.nbytes for array in raw.arrays().values())
  stored = sum(f.stat().st_size for f in raw.location.item.rglob("*") if f.is_file()) or everything
  needed = int(min(stored, everything) * sum(leaf.nbytes for leaf in plan.leaves) / max(everything, 1))
  existing = next(p for p in (out, *out.parents) if p.exists())
  if (free := shutil.disk_usage(existing).free) < needed:
    raise LayoutError(f"{existing} has {free / 1e9:.2f} GB free, the checkpoint needs about {needed / 1e9:.2f} GB")
  has_level = raw.location.item != full_path(raw.origin) if has_level is None else has_level
  with new_folder(out) as temporary:
    place = Location(item=temporary / "items" if has_level else temporary, step=temporary)
    write_plan(raw, plan, place, ram_bytes)
    if verify:
      check_written(checkpoint, layouts_store.open_at(place, str(out)), ram_bytes=ram_bytes, **options)
    yield temporary


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
  """Yields a sibling of `target`, named as Orbax names unfinished ones; renames it, or removes it on an error."""
  temporary = target.with_name(f"{target.name}{layouts_store.TEMPORARY_MARK}-{time.time_ns()}")
  made = [folder for folder in target.parents if not folder.exists()]
  try:
    temporary.mkdir(parents=True)
    yield temporary
    temporary.rename(target)  # onto an empty folder at most
  except BaseException as error:
    shutil.rmtree(temporary, ignore_errors=True)
    for folder in made:
      with contextlib.suppress(OSError):
        folder.rmdir()
    if isinstance(error, OSError):
      raise LayoutError(f"{target} could not be written: {error}; nothing is left there") from error
    raise


def write_plan(raw: RawTree, plan: Plan, place: Location, ram_bytes: int) -> None:
  """Writes the arrays into a folder of `new_folder` as Orbax does; holds one block, and _COMMIT_BYTES of others."""
  place.item.mkdir(exist_ok=True)
  entries = [(leaf.path, "np.ndarray", {"write_shape": list(leaf.shape)}) for leaf in plan.leaves]
  tree, names = {}, {}
  for path, kind, about in [*entries, *((path, empty.kind, {}) for path, empty in plan.empties)]:
    if (name := ".".join(map(str, path))) in names:
      raise LayoutError(f"two leaves would be stored as '{name}': {slash_path(names[name])} and {slash_path(path)}")
    names[name] = path
    keys = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path]
    value = {"value_type": kind, "skip_deserialize": not about, **about}
    tree[str(tuple(map(str, path)))] = {"key_metadata": keys, "value_metadata": value}
  try:
    arrays = _write_arrays(place.item, plan.leaves, ram_bytes)
  except LayoutError:
    raise
  except ValueError as error:  # TensorStore's one error type
    cause = " ".join(str(error).split())[:300]
    raise LayoutError(f"writing failed ({cause}); nothing is left at the target") from error
  now, like, write_json = time.time_ns(), raw.step_metadata, layouts_store.write_json
  (place.item / "array_metadatas").mkdir()
  write_json(place.item / "array_metadatas" / "process_0", {"array_metadatas": arrays})
  content = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
  write_json(place.item / layouts_store.TREE_METADATA, content | {"custom_metadata": raw.tree_metadata})
  handlers = _HANDLER if place.item == place.step else {place.item.name: _HANDLER}
  times = {"init_timestamp_nsecs": like.get("init_timestamp_nsecs") or now, "commit_timestamp_nsecs": now}
  metrics = {"metrics": like.get("metrics") or {}, "performance_metrics": {}}
  content = {"item_handlers": handlers, **metrics, **times, "custom_metadata": plan.custom_metadata}
  write_json(place.step / layouts_store.STEP_METADATA, content)
  for folder in {place.item, place.step}:  # Orbax looks for this file where a file system has no atomic rename
    write_text(folder / "commit_success.txt", "Checkpoint commit was successful")


def _write_arrays(folder: Path, leaves: list[TargetLeaf], ram_bytes: int) -> list[dict]:
  """Writes arrays with OCDBT and zarr3; returns what Orbax notes about each."""
  reader, context = LayerReader(ram_bytes // 3), ts.Context({"cache_pool": {"total_bytes_limit": 0}})
  block_bytes = min(_BLOCK_BYTES, max(ram_bytes // 12, 1))  # small chunks are compressed side by side
  transaction, pending, notes = ts.Transaction(), 0, []

  def store_of(name: str, **more: Any) -> ts.TensorStore:
    files = {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": files, "path": f"{name}/", "config": _KVSTORE_CONFIG, "assume_config": True}
    spec = {"driver": "zarr3", "kvstore": kvstore, "store_data_equal_to_fill_value": True, **more}
    new = "metadata" in more
    return ts.open(spec, context=context, transaction=transaction, open=not new, create=new).result()

  for leaf in leaves:
    # The array, else one layer of it, with its longest dimension halved until it fits a block.
    layered = leaf.axis if leaf.nbytes > block_bytes else None
    shape = tuple(1 if axis == layered else size for axis, size in enumerate(leaf.shape))
    chunk = chunk_of(shape, leaf.dtype.itemsize, block_bytes)
    name, stored_chunk = ".".join(map(str, leaf.path)), [max(1, size) for size in chunk]
    grid = {"name": "regular", "configuration": {"chunk_shape": stored_chunk}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd", "configuration": {"level": 1}}]
    zarr3 = {"shape": leaf.shape, "data_type": leaf.dtype.name, "chunk_grid": grid, "codecs": codecs}
    store = store_of(name, metadata=zarr3)
    for index in blocks_of(leaf.shape, chunk):
      block = read_block(reader, leaf, index)
      store[index].write(block).result()
      pending += block.nbytes
      if pending >= _COMMIT_BYTES:  # one commit rewrites the index of all arrays, so small leaves share one
        transaction.commit_async().result()
        transaction, pending = ts.Transaction(), 0
        store = store_of(name)
    about = {"param_name": name, "write_shape": list(leaf.shape), "chunk_shape": stored_chunk}
    about["ext_metadata"] = {"random_key_impl": leaf.key_impl} if leaf.key_impl else None
    notes.append({"array_metadata": about})
  transaction.commit_async().result()
  return notes


def read_block(reader: LayerReader, leaf: TargetLeaf, index: tuple[slice, ...] | None = None) -> np.ndarray:
  """A block of a target array, or all of it for None, assembled from its parts."""
  index = index if index is not None else tuple(slice(0, size) for size in leaf.shape)
  if leaf.axis is None:
    block = reader.part(leaf.parts[0], index)
  else:
    inner = index[: leaf.axis] + index[leaf.axis + 1 :]
    block = np.empty(tuple(s.stop - s.start for s in index), leaf.parts[0].dtype)
    for i, ref in enumerate(leaf.parts[index[leaf.axis]]):
      block[(slice(None),) * leaf.axis + (i,)] = reader.part(ref, inner)
  return np.asarray(block, dtype=leaf.dtype, order="C")


def check_written(source: Checkpoint, found: RawTree, **options: Any) -> None:
  """Compares a written tree, read without hints, with the source; options of `compare`. Raises VerificationError."""
  target = read_checkpoint(found)
  # Moments in another form than the parameters are repaired on the way: a difference, but not from what was planned.
  planned = () if target.odd_moments() else (compare.STRUCTURE,)
  if wrong := [row for row in compare.compare(source, target, **options).rows if row.kind not in planned]:
    what = f"{len(wrong)} {'parameters' if options.get('params_only') else 'leaves'} differ"
    raise VerificationError(f"verification failed: {what}, the first: {wrong[0].text()}; nothing is left at the target")


def _summary(source: Checkpoint, target: Target, plan: Plan, out: Path) -> list[str]:
  forms = sorted({c.form for c in source.params.containers.values()}) or ["no layers"]
  size = sum(leaf.nbytes for leaf in plan.leaves)
  axis = f" on dimension {source.scan_axis}" if "scanned" in forms else ""
  lines = [
    f"source {source.raw.origin}: {source.layout} layout, {', '.join(forms)}{axis}, {source.num_params():,} parameters"
    f", {len(source.moments)} moment trees",
    f"target {out}: {target.layout} layout, layers {target.layers}, {len(plan.leaves)} arrays, {size / 1e6:.1f} MB",
  ]
  if siblings := source.raw.location.siblings():
    lines.append(f"not part of the tree, left behind: {', '.join(siblings)}")
  return lines + plan.notes


@guarded("convert_checkpoint")
def main(argv: Sequence[str] | None = None) -> int:
  # Its values have the names of the parameters of `convert` and the fields of `Target`.
  about = "Converts checkpoints between the Linen, NNX and maxghost layouts, bit by bit (docs/checkpoints.md)."
  parser = Parser(prog="maxghost checkpoint convert", description=about)

  def add(name: str, about: str, **more: Any) -> None:
    parser.add_argument(*sorted({f"--{name}", f"--{name.replace('_', '-')}"}, reverse=True), help=about, **more)

  add("source_path", "step folder (RUN/checkpoints/2) or item folder (.../2/items)", required=True)
  add("target_path", "folder to write; must not exist", required=True)
  add("direction", "auto: from the source's family to the other one", choices=DIRECTIONS, default="auto")
  add("to", "target layout; linen puts random state into nnx_aux, as MaxText's NNX does", choices=TARGETS, default="")
  add("from", "source layout, if it is not detected", dest="source_layout", choices=LAYOUTS, default="")
  add("layers", "form of the layers in the target", choices=(KEEP, SCANNED, UNSCANNED, INTEGER), default=KEEP)
  for name, form in (("scan_layers", SCANNED), ("no-scan_layers", UNSCANNED)):
    add(name, f"--layers {form}", dest="layers", action="store_const", const=form)
  add("scan_axis", "dimension of stacked layers; default: recorded, or the layout's", dest="source_scan_axis", type=int)
  add("target_scan_axis", "target's; default: the source's (maxghost 0, from maxghost 1)", dest="scan_axis", type=int)
  add("layer_period", "stack unlike layers in blocks of this many (layers/layers_0, ...)", type=int, default=0)
  about = "more names of layer containers: tower for tower_0, tower_1"
  names: dict[str, Any] = {"type": lambda text: tuple(filter(None, text.split(","))), "default": ()}
  add("layer_containers", about, dest="source_containers", metavar="NAME,...", **names)
  unknown: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY"}
  add("params_only", "parameters alone, for decoding or fine-tuning", action="store_true")
  add("drop_rngs", "leave random keys and counts out", action="store_true")
  add("keep", "copy an unknown top-level key as it is", dest="source_keep", **unknown)
  add("drop", "leave an unknown top-level key out", dest="source_drop", **unknown)
  wrapped: dict[str, Any] = {"choices": ("yes", "no"), "default": ""}
  add("wrapped", "whether the source's leaves are under `value`; default: detected", dest="source_wrapped", **wrapped)
  add("target_wrapped", "the same of the target; default: params yes, others no", dest="wrapped", **wrapped)
  add("ram_mb", "host memory for arrays; large ones are moved in blocks", **RAM_ARGUMENT)
  add("dry_run", "print what would go where and write nothing", action="store_true")
  add("verify", "re-read the target and compare all bytes", action=argparse.BooleanOptionalAction, default=True)
  options = vars(parser.parse(argv, layer_period=0))
  options |= {name: {"yes": True, "no": False}.get(options[name]) for name in ("source_wrapped", "wrapped")}
  source = {name.removeprefix("source_"): options.pop(name) for name in [*options] if name.startswith("source_")}
  convert(source.pop("path"), read=ReadOptions(**source), **options)
  return 0
