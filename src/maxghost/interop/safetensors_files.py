"""Safetensors folders: tensors in one or several files, read and written one at a time.

The library reads; this module writes, because the library needs all tensors of a file in memory at once. A file is 8
bytes with the length of a JSON header, the header (dtype, shape and place of each tensor), and the tensors' bytes.

MXFP4, as gpt-oss is published, is read as the bfloat16 arrays that it stands for. A matrix `name` [E, in, out] lies as
`name_blocks` uint8[E, out, G, 16] and `name_scales` uint8[E, out, G]: G groups of 32 inputs, two to a byte with the
first in its low half, each a 4-bit float (E2M1) times the power of two of its group (E8M0). OCP Microscaling Formats
(MX) specification 1.0, sections 5.2 to 5.4. Every product is exact in bfloat16.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # numpy knows the name bfloat16 from here on
import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, read_json, write_json
from maxghost.config.files import write_whole
from maxghost.config.values import import_package

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ALIGNMENT = 8
_BLOCKS, _SCALES = "_blocks", "_scales"  # of a matrix in MXFP4
_GROUP_BYTES = 16
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
           "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip


def open_tensors(folder: Path) -> dict[str, StoredArray]:
  """The folder's tensors by name, packed ones as their matrices, unread. Raises LayoutError for damaged files."""
  index_file, weight_map, files = folder / INDEX, {}, [SINGLE]
  single = (folder / SINGLE).is_file()  # transformers prefers it to an index
  if not single and index_file.is_file():
    try:
      weight_map = read_json(index_file)["weight_map"]
      files = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError) as error:
      raise LayoutError(f"{index_file} is damaged: {error!r}") from error
    if wrong := [name for name in files if not isinstance(name, str) or not name or Path(name).name != name]:
      raise LayoutError(f"{index_file} is damaged: it lists {wrong[0]!r}, which is no name of a file beside it")
  elif not single:
    raise LayoutError(f"{folder} has neither {SINGLE} nor {INDEX}: half copied, or weights of another format")
  if missing := [name for name in files if not (folder / name).is_file()]:
    raise LayoutError(f"{folder} is half copied: {INDEX} lists {', '.join(missing)}, which is not there")
  held = {file: open_file(folder / file) for file in files}
  there = {(name, file) for file, tensors in held.items() for name in tensors if name in weight_map}
  if wrong := sorted({*weight_map.items()} ^ there):  # a tensor in two files may have two values
    raise LayoutError(f"{folder}: {wrong[0][0]} is not in the file that {INDEX} names, or in others too")
  return _unpacked({name: tensor for own in held.values() for name, tensor in own.items()})


def open_file(file: Path) -> dict[str, StoredArray]:
  """The tensors of one file by name, as they lie there; only its header is read. Raises LayoutError."""
  safetensors = import_package("safetensors", file, "hf")
  try:
    opened = safetensors.safe_open(file, framework="numpy")
    return {name: _tensor(file, opened, name) for name in opened.keys()}  # noqa: SIM118 - no mapping
  except (safetensors.SafetensorError, OSError) as error:
    raise LayoutError(f"{file} is cut or damaged: {error}") from error


def _tensor(file: Path, opened: Any, name: str) -> StoredArray:
  view = opened.get_slice(name)
  if (stored := view.get_dtype()) not in _DTYPES:
    raise LayoutError(f"{file}: {name} has dtype {stored}; only {', '.join(_DTYPES)} are read")
  read = lambda index=None: opened.get_tensor(name) if index is None else view[index]  # noqa: E731
  return StoredArray((name,), tuple(view.get_shape()), np.dtype(_DTYPES[stored]), read)


def _unpacked(tensors: dict[str, StoredArray]) -> dict[str, StoredArray]:
  """The tensors, each pair of blocks and scales replaced by the matrix it stands for; decoded when it is read."""
  out = dict(tensors)
  for base in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
    blocks, scales = out.pop(base + _BLOCKS), out.pop(base + _SCALES, None)
    if scales is None:
      raise LayoutError(f"{blocks.name} has no {base + _SCALES} beside it: the folder is half copied")
    out[base] = _matrix(base, blocks, scales)
  return out


def _matrix(name: str, blocks: StoredArray, scales: StoredArray) -> StoredArray:
  fits = blocks.shape == (*scales.shape, _GROUP_BYTES) and len(scales.shape) == 3
  if not fits or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
    said = f"{blocks.name} is {blocks.dtype}{list(blocks.shape)} and its scales are {scales.dtype}{list(scales.shape)}"
    raise LayoutError(f"{said}; MXFP4 is uint8[experts, out, groups, {_GROUP_BYTES}] with uint8[experts, out, groups]")
  experts, outputs, groups = scales.shape
  read = lambda index=None: decode(blocks.read(index), scales.read(index))  # noqa: E731
  return StoredArray((name,), (experts, groups * 2 * _GROUP_BYTES, outputs), np.dtype("bfloat16"), read)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """bfloat16[E, in, out] from blocks uint8[E, out, G, 16] and scales uint8[E, out, G]; NaN where a scale is 255."""
  byte = np.arange(256, dtype=np.uint8)
  pairs = np.stack([byte & 15, byte >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(ml_dtypes.bfloat16)
  values: Any = pairs[blocks]
  values *= scales.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)[..., None, None]
  return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def write_tensors(folder: Path, tensors: list[StoredArray], shard_bytes: int, single: str = SINGLE) -> None:
  """Writes tensors, one in memory at a time, to files of shard_bytes with an index, or to the only file `single`."""
  shards: list[list[StoredArray]] = [[]]
  size = 0  # of the last shard
  for tensor in tensors:
    if shards[-1] and size + tensor.nbytes > shard_bytes:
      shards, size = [*shards, []], 0
    shards[-1].append(tensor)
    size += tensor.nbytes
  names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
  for name, shard in zip(names if shards[1:] else [single], shards, strict=True):
    _write_file(folder / name, shard)
  if shards[1:]:
    weight_map = sorted((tensor.name, name) for name, shard in zip(names, shards, strict=True) for tensor in shard)
    total = sum(tensor.nbytes for tensor in tensors)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}, indent=2)


def _write_file(file: Path, tensors: list[StoredArray]) -> None:
  codes = {np.dtype(name): code for code, name in _DTYPES.items()}
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
      out.write(np.ascontiguousarray(tensor.read(None)).reshape(-1).view(np.uint8).data)
