"""Stored checkpoint trees: every leaf by path, opened but not read.

Orbax restores whole trees; a converter holds one array at a time, so this module reads arrays with TensorStore, which
Orbax is built on. A path is a tuple: text for a dict key or a field name, int for a position in a list.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from maxghost.checkpoint.host_checksum import checksum_of
from maxghost.config.files import check_seal, write_text
from maxghost.config.values import ConfigError, listed, nearest_beside, slash_path

TEMPORARY_MARK = ".orbax-checkpoint-tmp"
ITEM_NAMES = ("items", "default", "state", "model_params")
STEP_METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"
GONE = "is gone: a run in training removes old ones; name newer ones, or wait for its end"
_EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")
_OPEN_AT_ONCE = 256
_MOST_UNLIKE = 8

TreePath = tuple[str | int, ...]
AnyPath = str | os.PathLike


class LayoutError(ConfigError):
  """A checkpoint that cannot be read, or a request that it cannot meet."""


class VerificationError(LayoutError):
  """What was written differs from its source, and was removed."""

  exit_code = 1


def full_path(path: AnyPath) -> Path:
  """An absolute path without what TensorStore refuses, `~` and `..`. Raises LayoutError for a URL or no UTF-8."""
  if "://" in str(path):
    raise LayoutError(f"{path}: only local folders are read and written; copy the checkpoint here first")
  full = os.path.abspath(os.path.expanduser(path))
  if any("\ud800" <= one <= "\udfff" for one in full):
    raise LayoutError(f"{full}: this path is no UTF-8, and checkpoints need one that is; rename its folders")
  return Path(full)


def nested(flat: Mapping[Any, Any]) -> Any:
  """Nested dicts of leaves by path."""
  if () in flat:
    return flat[()]
  children: dict[Any, dict[tuple, Any]] = {}
  for path, value in flat.items():
    children.setdefault(path[0], {})[path[1:]] = value
  return {key: nested(value) for key, value in children.items()}


@dataclass(frozen=True, eq=False)
class StoredArray:
  """One array of a checkpoint, or tensor of a file. shape, dtype: as stored; those of a random key are its words'.

  read: reads the block of a tuple of slices, one per dimension (of a tensor: for the first one); None reads all.
  key_impl: the generator of a random key. chunk_nbytes: bytes to decode in order to read one element.
  """

  path: TreePath
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[tuple[slice, ...] | None], np.ndarray]
  key_impl: str | None = None
  chunk_nbytes: int = 0

  @property
  def name(self) -> str:
    return slash_path(self.path)

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Empty:
  """A place of the tree without an array: None or an empty container. kind: Orbax's name of its type."""

  kind: str = "None"


@dataclass(frozen=True)
class Text:
  """A string leaf, which no layout has."""


Node = StoredArray | Empty | Text


@dataclass
class RawTree:
  """All leaves of a checkpoint and its metadata, whatever its layout; `origin` names it in errors."""

  nodes: dict[TreePath, Node]
  origin: str = "the given tree"
  step_metadata: dict[str, Any] = field(default_factory=dict)
  tree_metadata: Any = None
  folder: "Location | None" = None

  @property
  def location(self) -> "Location":
    assert self.folder is not None, f"{self.origin} is in memory"
    return self.folder

  @property
  def custom_metadata(self) -> dict[str, Any]:
    return self.step_metadata.get("custom_metadata") or {}

  def arrays(self) -> dict[TreePath, StoredArray]:
    return {path: node for path, node in self.nodes.items() if isinstance(node, StoredArray)}


Opener = Callable[[AnyPath], RawTree]


@dataclass(frozen=True)
class Location:
  """item: the folder with the tree. step: its parent, or the same folder if Orbax wrote no item level."""

  item: Path
  step: Path

  def siblings(self) -> list[str]:
    """Other items of the same step: data iterator, positions, ..."""
    around = self.step.iterdir() if self.item != self.step else ()
    return sorted(p.name for p in around if p.is_dir() and p.name != self.item.name)


def locate(path: AnyPath) -> Location:
  """Finds the tree in `<run>/checkpoints/<step>` or `<...>/<step>/items`. Raises LayoutError unless it is unique."""
  folder = full_path(path)
  if TEMPORARY_MARK in folder.name or TEMPORARY_MARK in folder.parent.name:
    raise LayoutError(f"{path} was never finished ('{TEMPORARY_MARK}' in its name); use a finished checkpoint")
  if not folder.is_dir():
    raise LayoutError(f"there is no checkpoint folder {path}{nearest_beside(Path(path))}")
  if (folder / TREE_METADATA).is_file():
    outer = folder.parent
    has_level = not (folder / STEP_METADATA).is_file() and (outer / STEP_METADATA).is_file()
    return Location(item=folder, step=outer if has_level else folder)
  items = sorted(p.name for p in folder.iterdir() if (p / TREE_METADATA).is_file())
  if not (chosen := next((name for name in (*ITEM_NAMES, *items) if name in items), "")):
    raise LayoutError(_no_tree(path, folder))
  if chosen not in ITEM_NAMES and len(items) > 1:
    raise LayoutError(f"{path} holds several trees: {', '.join(items)}; name one, as in {folder / chosen}")
  return Location(item=folder / chosen, step=folder)


def _no_tree(path: Any, folder: Path) -> str:
  names = sorted(p.name for p in folder.iterdir())
  if "checkpoints" in names:
    folder = folder / "checkpoints"
  if steps := sorted(p.name for p in folder.iterdir() if p.name.isdecimal()):
    return f"{path} holds the steps {', '.join(sorted(steps, key=int))}; name one, as in {folder / steps[0]}"
  if any(name in ITEM_NAMES or name in ("manifest.ocdbt", "d", STEP_METADATA) for name in names):
    return f"{path} is damaged or half copied: it has no {TREE_METADATA}"
  if "checkpoint" in names:
    return f"{path} is a msgpack checkpoint of early Flax; only Orbax checkpoints are read"
  if "config.yml" in names:
    return f"{path} has a configuration, but no checkpoint; a run saves some with checkpoint_period above 0"
  return f"{path} is no Orbax checkpoint: it holds {', '.join(names[:6]) or 'nothing'}"


def open_tree(path: AnyPath) -> RawTree:
  """Opens a checkpoint folder; reads metadata and array headers only. Raises LayoutError as `locate` does."""
  return open_at(locate(path), str(path))


def open_at(where: Location, origin: str) -> RawTree:
  """As `open_tree`, for a place that `locate` found; `origin` names it in errors."""
  tree = read_json(where.item / TREE_METADATA)
  step_metadata = read_json(where.step / STEP_METADATA) if (where.step / STEP_METADATA).is_file() else {}
  if not isinstance(tree.get("tree_metadata"), dict):
    raise LayoutError(f"{where.item / TREE_METADATA} is damaged: it has no tree_metadata")
  nodes: dict[TreePath, Node] = {}
  wanted = []
  try:
    for entry in tree["tree_metadata"].values():
      path = tuple(int(k["key"]) if k["key_type"] == 1 else str(k["key"]) for k in entry["key_metadata"])
      kind = entry["value_metadata"]["value_type"]
      nodes[path] = Empty(kind) if kind in _EMPTY_TYPES else Text()  # or an array, opened below
      wanted += [] if kind in (*_EMPTY_TYPES, "string") else [path]
  except (TypeError, KeyError, ValueError) as error:
    raise LayoutError(f"{where.item / TREE_METADATA} is damaged ({type(error).__name__}: {error})") from error
  nodes |= _open_arrays(where.item, tree, wanted)
  return RawTree(nodes, origin, step_metadata, tree.get("custom_metadata"), where)


def _open_arrays(item: Path, tree: dict, wanted: list[TreePath]) -> dict[TreePath, StoredArray]:
  ocdbt = (item / "manifest.ocdbt").is_file()
  if not ocdbt and tree.get("use_ocdbt", True) and wanted:
    raise LayoutError(f"{item} is damaged or half copied: it has no manifest.ocdbt")
  impls, driver = _key_impls(item), "zarr3" if tree.get("use_zarr3") else "zarr"
  beside = item.parent / "positions" / "metadata"  # in a run
  known = read_json(beside).get("checksums", {}) if item.name == "items" and beside.is_file() else {}
  context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})

  def start(name: str) -> ts.Future:
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{item}/{name}/"}
    if ocdbt:
      base = {"driver": "file", "path": f"{item}/"}
      kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
    # A missing chunk is damage here, never the fill value.
    options = {"fill_missing_data_reads": False, "recheck_cached_metadata": False}
    return ts.open({"driver": driver, "kvstore": kvstore, **options}, open=True, read=True, context=context)

  arrays = {}
  for first in range(0, len(wanted), _OPEN_AT_ONCE):
    names = {path: ".".join(map(str, path)) for path in wanted[first : first + _OPEN_AT_ONCE]}
    for path, future in {path: start(name) for path, name in names.items()}.items():
      checksum = known.get(slash_path(path))
      arrays[path] = _stored(item, path, _result(item, path, future), impls.get(names[path]), checksum)
  return arrays


def _stored(item: Path, path: TreePath, store: ts.TensorStore, impl: str | None, checksum: int | None) -> StoredArray:
  def block(index: tuple[slice, ...] | None) -> np.ndarray:
    return np.asarray(_result(item, path, (store if index is None else store[index]).read()))

  def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
    nonlocal checksum
    values = block(index)
    if checksum is not None:  # checked at the first read, since an uncompressed chunk has no checksum
      parts = [values]
      if values.shape != tuple(store.shape):
        step = chunk[0] or store.shape[0]
        parts = (block((slice(i, i + step),)) for i in range(0, store.shape[0], step))
      if checksum_of(parts) != checksum:
        raise LayoutError(f"{item} is damaged: the bytes of {slash_path(path)} changed since they were saved")
      checksum = None
    return values

  dtype = np.dtype(store.dtype.numpy_dtype)
  chunk = store.chunk_layout.read_chunk.shape or store.shape
  chunk_nbytes = math.prod(min(c, n) if c else n for c, n in zip(chunk, store.shape, strict=True)) * dtype.itemsize
  return StoredArray(path, tuple(store.shape), dtype, read, impl, chunk_nbytes)


def _result(item: Path, path: TreePath, future: ts.Future) -> Any:
  try:
    return future.result()
  except Exception as error:  # TensorStore raises one type and names the cause in the text
    cause = " ".join(str(error).split())[:200]
    said = f"is damaged or half copied: leaf {slash_path(path)} cannot be read ({cause})"
    raise LayoutError(f"{item} {said if item.is_dir() else GONE}") from error


def _key_impls(item: Path) -> dict[str, str]:
  """The generator of each random key by array name, from the metadata of each process that wrote."""
  impls = {}
  for file in sorted((item / "array_metadatas").glob("process_*")):
    try:
      for entry in (about["array_metadata"] for about in read_json(file).get("array_metadatas", [])):
        if impl := (entry.get("ext_metadata") or {}).get("random_key_impl"):
          impls[entry["param_name"]] = impl
    except (KeyError, TypeError, AttributeError) as error:
      raise LayoutError(f"{file} is damaged: {type(error).__name__} {error}") from error
  return impls


def read_json(file: Path) -> dict[str, Any]:
  """Reads a JSON object. Raises LayoutError if the file is missing, holds anything else, or does not match its seal."""
  try:
    return check_seal(json.loads(file.read_text(encoding="utf-8")))
  except (ValueError, OSError, RecursionError) as error:
    raise LayoutError(f"{file} is damaged or half copied: {error}") from error


def write_json(file: Path, content: Mapping[str, Any], **style: Any) -> None:
  """Writes a JSON object. style: options of json.dumps; with indent the text ends in a newline. Raises OSError."""
  write_text(file, json.dumps(content, **style) + ("\n" if "indent" in style else ""))


def tree_from_memory(tree: Any, origin: str = "the given tree") -> RawTree:
  """A RawTree over arrays in memory: nested dicts, lists, tuples, NamedTuples (optax states), nnx.State, Nones."""
  from jax.tree_util import SequenceKey, keystr, tree_flatten_with_path

  nodes: dict[TreePath, Node] = {}
  leaves, _ = tree_flatten_with_path(tree, lambda x: x is None or (isinstance(x, (dict, list, tuple)) and not x))
  for keys, leaf in leaves:
    path = tuple(k.idx if isinstance(k, SequenceKey) else keystr((k,), simple=True) for k in keys)
    if leaf is None or isinstance(leaf, (dict, list, tuple)):
      nodes[path] = Empty("None" if leaf is None or hasattr(leaf, "_fields") else type(leaf).__name__.capitalize())
    else:
      impl, words = (str(key_impl(leaf)), key_words(leaf)) if is_typed_key(leaf) else (None, leaf)
      dtype = np.dtype(getattr(words, "dtype", None) or np.asarray(words).dtype)
      read = lambda index, words=words: np.asarray(words if index is None else words[index])  # noqa: E731
      nodes[path] = StoredArray(path, np.shape(words), dtype, read, impl)
  return RawTree(nodes, origin)


def is_typed_key(leaf: Any) -> bool:
  """Whether a leaf is a typed random key, abstract or not."""
  return "key<" in str(getattr(leaf, "dtype", ""))


def key_impl(key: Any) -> Any:
  """The generator of a typed key, abstract or not; jax.random.key_impl itself refuses an abstract key."""
  import jax

  return jax.random.key_impl(jax.numpy.empty(0, key.dtype))


def key_words(key: Any) -> Any:
  """The uint32 words of a typed key; of an abstract key, abstract words with its sharding."""
  import jax

  if isinstance(key, jax.ShapeDtypeStruct):
    words = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)
  return jax.random.key_data(key)


def misfit(origin: Any, missing: Sequence[str], extra: Sequence[str], unlike: Sequence[str]) -> str:
  """The error for a checkpoint with other leaves than the model; '' for none. unlike: a text for each unlike leaf."""
  problems = [f"misses {listed(missing)}"] if missing else []
  problems += [f"has {listed(extra)}, unknown to the model"] if extra else []
  problems += [*unlike[:_MOST_UNLIKE], *([f"and {len(unlike) - _MOST_UNLIKE} more"] if unlike[_MOST_UNLIKE:] else [])]
  return f"checkpoint {origin} does not fit this model: {'; '.join(problems)}" if problems else ""
