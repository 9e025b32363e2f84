"""Writes a checkpoint folder leaf by leaf, in the form of Orbax: OCDBT, zarr3, `_METADATA`, key implementations.

The folder is written under a name that Orbax takes for unfinished, and renamed when every leaf is on disk. After an
error there is no folder of the final name.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from maxghost.checkpoint.layouts_store import (
  STEP_METADATA,
  TEMPORARY_MARK,
  TREE_METADATA,
  Empty,
  LayoutError,
  TreePath,
  write_json,
)
from maxghost.config.files import write_text
from maxghost.config.values import slash_path

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_COMMIT_BYTES = 64_000_000
_KVSTORE_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
  """Yields a temporary sibling of `target`; renames it to `target` at the end, or removes it where anything is raised.

  Raises LayoutError where the target exists or the disk is full.
  """
  if target.exists() or target.is_symlink():
    raise LayoutError(f"target {target} exists; name a new folder")
  temporary = target.with_name(f"{target.name}{TEMPORARY_MARK}-{time.time_ns()}")
  made = _make_parents(target.parent)
  try:
    temporary.mkdir()
    yield temporary
    if target.exists():
      raise LayoutError(f"target {target} appeared while it was being written; nothing was replaced")
    temporary.rename(target)
  except BaseException as error:
    shutil.rmtree(temporary, ignore_errors=True)
    for folder in made:
      with contextlib.suppress(OSError):
        folder.rmdir()
    if isinstance(error, OSError):
      raise LayoutError(f"{target} could not be written: {error}; nothing is left there") from error
    raise


def _make_parents(folder: Path) -> list[Path]:
  """Creates the missing parents; returns them innermost first, so that a failure can take them away again."""
  missing = [p for p in (folder, *folder.parents) if not p.exists()]
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise LayoutError(f"{folder} cannot be made: {error}") from error
  return missing


class TreeWriter:
  """Puts leaves into `folder` one after another; `close` makes the tree complete.

  At most one leaf, or block of a leaf, and _COMMIT_BYTES of leaves not yet committed are held in memory.
  """

  def __init__(self, folder: Path):
    folder.mkdir(exist_ok=True)
    self._folder = folder
    self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    self._transaction = ts.Transaction()
    self._pending = 0
    self._entries: dict[str, dict] = {}
    self._array_metadata: list[dict] = []
    self._names: dict[str, TreePath] = {}

  def put(
    self,
    path: TreePath,
    shape: tuple[int, ...],
    dtype: np.dtype,
    blocks: Iterable[tuple[tuple[slice, ...], np.ndarray]],
    *,
    chunk_shape: tuple[int, ...],
    key_impl: str | None = None,
  ) -> None:
    """Writes one array from its blocks. key_impl: of a random key, whose uint32 words are given."""
    name = self._register(path, "np.ndarray", {"skip_deserialize": False, "write_shape": list(shape)})
    chunk_shape = tuple(max(1, size) for size in chunk_shape)
    with _named_failure():
      store = self._open(name, {"metadata": _zarr3(shape, dtype, chunk_shape)}, create=True)
      for index, block in blocks:
        store[index].write(block).result()
        self._pending += block.nbytes
        if self._pending >= _COMMIT_BYTES:
          self._commit()
          store = self._open(name, {})
    metadata: dict[str, Any] = {"param_name": name, "write_shape": list(shape), "chunk_shape": list(chunk_shape)}
    metadata["ext_metadata"] = {"random_key_impl": key_impl} if key_impl else None
    self._array_metadata.append({"array_metadata": metadata})

  def put_empty(self, path: TreePath, empty: Empty) -> None:
    self._register(path, empty.kind, {"skip_deserialize": True})

  def close(self, custom_metadata: Any = None) -> None:
    with _named_failure():
      self._commit()
    (self._folder / "array_metadatas").mkdir()
    write_json(self._folder / "array_metadatas" / "process_0", {"array_metadatas": self._array_metadata})
    tree = {
      "tree_metadata": self._entries,
      "use_ocdbt": True,
      "use_zarr3": True,
      "store_array_data_equal_to_fill_value": True,
      "custom_metadata": custom_metadata,
    }
    write_json(self._folder / TREE_METADATA, tree)
    _mark_finished(self._folder)

  def _register(self, path: TreePath, kind: str, about: dict[str, Any]) -> str:
    """Enters a leaf into the tree; returns the name that it is stored by."""
    name = ".".join(map(str, path))
    if name in self._names:
      raise LayoutError(
        f"two leaves would be stored as '{name}': {slash_path(self._names[name])} and {slash_path(path)}"
      )
    self._names[name] = path
    keys = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path]
    self._entries[str(tuple(map(str, path)))] = {"key_metadata": keys, "value_metadata": {"value_type": kind, **about}}
    return name

  def _open(self, name: str, more: dict, *, create: bool = False) -> ts.TensorStore:
    files = {"driver": "file", "path": f"{self._folder}/"}
    store = {"driver": "ocdbt", "base": files, "path": f"{name}/", "config": _KVSTORE_CONFIG, "assume_config": True}
    spec = {"driver": "zarr3", "kvstore": store, "store_data_equal_to_fill_value": True, **more}
    return ts.open(spec, context=self._context, transaction=self._transaction, open=not create, create=create).result()

  def _commit(self) -> None:
    # One commit rewrites the index of all arrays, so small leaves share one.
    self._transaction.commit_async().result()
    self._transaction, self._pending = ts.Transaction(), 0


def _zarr3(shape: tuple[int, ...], dtype: np.dtype, chunk_shape: tuple[int, ...]) -> dict:
  little = {"name": "bytes", "configuration": {"endian": "little"}}
  sharding = {
    "chunk_shape": chunk_shape,
    "codecs": [little, {"name": "zstd", "configuration": {"level": 1}}],
    "index_codecs": [little, {"name": "crc32c"}],
    "index_location": "end",
  }
  return {
    "shape": shape,
    "data_type": np.dtype(dtype).name,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
    "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
  }


@contextlib.contextmanager
def _named_failure() -> Iterator[None]:
  try:
    yield
  except ValueError as error:  # TensorStore's one error type
    cause = " ".join(str(error).split())[:300]
    raise LayoutError(f"writing failed ({cause}); nothing is left at the target") from error


def write_step_metadata(step: Path, item_name: str, custom_metadata: dict, like: dict) -> None:
  """`_CHECKPOINT_METADATA` of a step folder; `like`: the source's, whose metrics and start time are kept."""
  now = time.time_ns()
  content = {
    "item_handlers": {item_name: _HANDLER} if item_name else _HANDLER,
    "metrics": like.get("metrics") or {},
    "performance_metrics": {},
    "init_timestamp_nsecs": like.get("init_timestamp_nsecs") or now,
    "commit_timestamp_nsecs": now,
    "custom_metadata": custom_metadata,
  }
  write_json(step / STEP_METADATA, content)
  _mark_finished(step)


def _mark_finished(folder: Path) -> None:
  # Orbax looks for this file where a file system has no atomic rename.
  write_text(folder / "commit_success.txt", "Checkpoint commit was successful")
