"""Safetensors folders: tensors in one or several files, read and written one at a time.

A folder holds `model.safetensors`, or shards that `model.safetensors.index.json` lists. The library reads; this module
writes, because the library needs all tensors of a file in memory at once. A file is 8 bytes with the length of a JSON
header, the header (dtype, shape and place of each tensor), and the tensors' bytes in that order.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError, Sized, read_json, write_json
from maxghost.config.files import write_whole

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ALIGNMENT = 8
_DTYPES = {
  "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
  "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor(Sized):
  """A stored tensor. read(index): index is a slice on the first axis, or None for all of it."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[slice | None], np.ndarray]


def numpy_dtype(name: str) -> np.dtype:
  """The dtype of a name such as bfloat16, which numpy alone does not know."""
  import ml_dtypes

  return np.dtype(getattr(ml_dtypes, name, None) or name)


def open_tensors(folder: Path) -> dict[str, Tensor]:
  """All tensors of the folder by name; only headers are read.

  Raises LayoutError for a missing, cut or damaged file, and for an index that does not fit its files.
  """
  index_file = folder / INDEX
  if not index_file.is_file():
    single = folder / SINGLE
    if not single.is_file():
      raise LayoutError(f"{folder} is damaged or half copied: it has neither {SINGLE} nor {INDEX}")
    return _open_file(single)
  try:
    weight_map = read_json(index_file)["weight_map"]
    files = sorted(set(weight_map.values()))
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise LayoutError(f"{index_file} is damaged: {error!r}") from error
  missing = [name for name in files if not (folder / name).is_file()]
  if missing:
    raise LayoutError(f"{folder} is half copied: {INDEX} lists {', '.join(missing)}, which is not there")
  tensors: dict[str, Tensor] = {}
  for name in files:
    tensors |= _open_file(folder / name)
  lost = sorted(set(weight_map) - set(tensors))
  if lost:
    raise LayoutError(f"{folder}: {INDEX} lists {lost[0]}, which is in none of its files ({len(lost)} such tensors)")
  return tensors


def _open_file(file: Path) -> dict[str, Tensor]:
  try:
    import safetensors
  except ImportError:
    raise LayoutError("safetensors files need the package safetensors: pip install 'maxghost[hf]'") from None
  try:
    opened = safetensors.safe_open(file, framework="numpy")
    return {name: _tensor(file, opened, name) for name in opened.keys()}  # noqa: SIM118 - no mapping
  except (safetensors.SafetensorError, OSError) as error:
    raise LayoutError(f"{file} is cut or damaged: {error}") from error


def _tensor(file: Path, opened: Any, name: str) -> Tensor:
  view = opened.get_slice(name)
  stored = view.get_dtype()
  if stored not in _DTYPES:
    raise LayoutError(f"{file}: {name} has dtype {stored}; only {', '.join(_DTYPES)} are read")

  def read(index: slice | None = None) -> np.ndarray:
    return opened.get_tensor(name) if index is None else view[index]

  return Tensor(name, tuple(view.get_shape()), numpy_dtype(_DTYPES[stored]), read)


@dataclass(frozen=True)
class Planned(Sized):
  """A tensor to write. make(): its values, in memory only while they are written."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]


def write_tensors(folder: Path, tensors: list[Planned], shard_bytes: int) -> None:
  """Writes the tensors into `folder`, in files of at most shard_bytes (or one tensor), with an index where several."""
  shards = list(_shards(tensors, shard_bytes))
  if len(shards) == 1:
    _write_file(folder / SINGLE, shards[0])
    return
  weight_map = {}
  for number, shard in enumerate(shards, 1):
    name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    _write_file(folder / name, shard)
    weight_map |= {tensor.name: name for tensor in shard}
  total = sum(tensor.nbytes for tensor in tensors)
  index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
  write_json(folder / INDEX, index, indent=2)


def _shards(tensors: list[Planned], shard_bytes: int) -> Iterator[list[Planned]]:
  shard: list[Planned] = []
  size = 0
  for tensor in tensors:
    if shard and size + tensor.nbytes > shard_bytes:
      yield shard
      shard, size = [], 0
    shard.append(tensor)
    size += tensor.nbytes
  yield shard


def _write_file(file: Path, tensors: list[Planned]) -> None:
  codes = {numpy_dtype(name): code for code, name in _DTYPES.items()}
  # Widest types first: then every tensor begins at a multiple of its item size.
  tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  place = 0
  for tensor in tensors:
    offsets = [place, place + tensor.nbytes]
    header[tensor.name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    place += tensor.nbytes
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  with write_whole(file, durable=False) as out:
    out.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
      values = np.ascontiguousarray(tensor.make())
      if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise ValueError(f"{tensor.name}: made {values.dtype}{values.shape}, planned {tensor.dtype}{tensor.shape}")
      out.write(values.reshape(-1).view(np.uint8).data)
