"""One score file: an `.npz` (np.load opens it), written whole and sealed with a checksum.

Its members, in this order:
  meta         JSON text: schema version, units, validation sets, objective, ledger, direction, process, data source
  domain_table, path_table    string tables; `rows` holds indices into them; one more for each field of the documents
  steps        structured array, one record per training step
  module_*     optional: contribution by module, layer and domain
  rows         structured array, one record per scored unit; last and uncompressed, so that a large file is read block
               by block
The zip's comment, the last bytes of the file, holds the CRC-32 of all bytes before it: any flipped bit is noticed.
"""

import contextlib
import io
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxghost.config import ConfigError
from maxghost.config.files import write_whole
from maxghost.scorelog import format as fmt

_SEAL = re.compile(rb"maxghost crc32 ([0-9a-f]{8})")
_SEAL_BYTES = len(b"maxghost crc32 00000000")
# What zipfile, zlib and NumPy raise for bytes that are no archive or no array.
DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError, struct.error,
          zlib.error, zipfile.BadZipFile)  # fmt: skip


class DamagedShard(ConfigError):
  """A file whose bytes are not those that were written; the message says why."""


def write_shard(path: Path, meta: dict, tables: Mapping[str, Iterable[str]], steps: np.ndarray,
                modules: fmt.Modules | None, blocks: Iterable[np.ndarray], num_rows: int) -> None:  # fmt: skip
  """Writes one file, whole or not at all. meta: the header. steps: records of `format.step_dtype`. blocks: `num_rows`
  records of `format.row_dtype` in all, which point into `tables`: of domain, path and the fields of the header."""
  members: dict[str, Any] = {"meta": np.array(json.dumps(meta))}
  members |= {f"{name}_table": np.array([*texts], np.str_) for name, texts in tables.items()} | {"steps": steps}
  if modules is not None:
    members |= {f"module_{name}": np.array(getattr(modules, name), np.str_) for name in ("names", "domains")}
    members["module_steps"] = np.asarray(modules.steps, np.int64)
    members["module_contribution"] = np.asarray(modules.contribution_SMLDK, np.float32)
  with write_whole(path) as file:
    with zipfile.ZipFile(file, "w") as archive:
      archive.comment = b"\0" * _SEAL_BYTES
      for name, array in members.items():
        info = zipfile.ZipInfo(f"{name}.npy")
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, array.nbytes
        with archive.open(info, "w") as member:
          np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
      with archive.open(zipfile.ZipInfo("rows.npy"), "w", force_zip64=True) as member:
        dtype = fmt.row_dtype(len(meta["val_sets"]), meta.get("fields", ()), meta.get("parts", ()))
        header = np.lib.format.header_data_from_array_1_0(np.zeros(0, dtype)) | {"shape": (num_rows,)}
        np.lib.format.write_array_header_1_0(member, header)
        for block in blocks:
          member.write(np.ascontiguousarray(block, dtype).tobytes())
    size = file.seek(0, os.SEEK_END) - _SEAL_BYTES
    checksum = _checksum(file, size)
    file.seek(size)
    file.write(b"maxghost crc32 %08x" % checksum)


def _checksum(file: BinaryIO, size: int) -> int:
  file.seek(0)
  checksum = 0
  while size > 0:
    if not (block := file.read(min(size, 1 << 20))):
      raise EOFError("the file became shorter while it was read")
    checksum = zlib.crc32(block, checksum)
    size -= len(block)
  return checksum


def _check_seal(file: BinaryIO) -> None:
  """Raises ValueError for a file that does not end with the checksum of its bytes."""
  if (size := file.seek(0, os.SEEK_END) - _SEAL_BYTES) < 0:
    raise ValueError("not a score file" if size > -_SEAL_BYTES else "empty file")
  file.seek(size)
  if (seal := _SEAL.fullmatch(file.read())) is None:
    raise ValueError("the checksum at its end is missing: cut short or changed, or written by an older maxghost")
  if int(seal[1], 16) != _checksum(file, size):
    raise ValueError("its bytes do not match its checksum")


class Shard:
  """One opened file whose checksum was compared: its header in memory, tables and rows read on demand; one that its run
  will write again is held in memory. before, after: steps and rows of the process in front of it, and up to its end.
  Raises DamagedShard for a file that is not whole, ConfigError for one of another schema, FileNotFoundError."""

  def __init__(self, path: Path):
    self.path = path
    self._source: Path | io.BytesIO = path
    with self._reading(), open(path, "rb") as file:
      _check_seal(file)
      with zipfile.ZipFile(file) as archive:
        self._seal = archive.comment
        self.meta = json.loads(str(np.lib.format.read_array(io.BytesIO(archive.read("meta.npy")))))
        if (version := self.meta["schema_version"]) not in (fmt.SCHEMA_VERSION - 1, fmt.SCHEMA_VERSION):
          reads = f"this maxghost reads up to {fmt.SCHEMA_VERSION}; update maxghost"
          raise ConfigError(f"{path}: schema_version={version}, {reads}")
        self.val_sets, self.process_index = tuple(self.meta["val_sets"]), int(self.meta["process_index"])
        self.first_step, self.last_step = int(self.meta["first_step"]), int(self.meta["last_step"])
        self.before = (int(self.meta["before"][0]), int(self.meta["before"][1]))
        self.ledger, self.objective = tuple(self.meta["ledger"]), str(self.meta["objective"])
        self.fields, self.parts = (tuple(self.meta.get(name, ())) for name in ("fields", "parts"))
        with archive.open("rows.npy") as member:
          (self.num_rows,), self._dtype = _row_header(member)
        self._names = {name.removesuffix(".npy") for name in archive.namelist()}
      if self._dtype != fmt.row_dtype(len(self.val_sets), self.fields, self.parts):
        raise ValueError("its rows have an unknown layout")
      if self.meta.get("closed") is False:  # the run in training may remove it while it is read
        file.seek(0)
        self._source = io.BytesIO(file.read())

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    try:
      yield
    except (FileNotFoundError, ConfigError):
      raise
    except DAMAGE as error:
      raise DamagedShard(f"{self.path.name}: {error or type(error).__name__}") from error

  @contextlib.contextmanager
  def _archive(self) -> Iterator[zipfile.ZipFile]:
    with self._reading(), zipfile.ZipFile(self._source) as archive:
      if archive.comment != self._seal:
        raise ValueError("was written again while it was read, as by a compaction")
      yield archive

  def _table(self, name: str) -> np.ndarray:
    with self._archive() as archive:
      return np.lib.format.read_array(io.BytesIO(archive.read(f"{name}.npy")))

  def texts(self, name: str) -> np.ndarray:
    """The table that a column of texts points into."""
    return self._table(f"{name}_table")

  @property
  def steps(self) -> np.ndarray:
    return fmt.with_ledger(self._table("steps"), len(self.val_sets), self.ledger)

  @property
  def after(self) -> tuple[int, int]:
    return self.before[0] + len(self.steps), self.before[1] + self.num_rows

  @property
  def modules(self) -> fmt.Modules | None:
    if "module_contribution" not in self._names:
      return None
    names, domains = (tuple(map(str, self._table(f"module_{name}"))) for name in ("names", "domains"))
    return fmt.Modules(names, domains, self._table("module_steps"), self._table("module_contribution"))

  def blocks(self, block_rows: int = fmt.BLOCK_ROWS) -> Iterator[np.ndarray]:
    """The rows in order, at most `block_rows` at a time, read-only."""
    with self._archive() as archive, archive.open("rows.npy") as member:
      _row_header(member)
      for start in range(0, self.num_rows, block_rows):
        size = min(block_rows, self.num_rows - start) * self._dtype.itemsize
        data = member.read(size)
        if len(data) != size:
          raise EOFError("became shorter while it was read")
        yield np.frombuffer(data, self._dtype)

  def rows(self) -> np.ndarray:
    return np.concatenate([np.zeros((0,), self._dtype), *self.blocks()])


def _row_header(member) -> tuple[tuple[int, ...], np.dtype]:
  np.lib.format.read_magic(member)
  shape, _, dtype = np.lib.format.read_array_header_1_0(member)
  return shape, dtype


def drop_covered(shards: list) -> list:
  """Without the files whose steps all lie inside another file of the same process (an interval flushed early)."""
  kept: list = []
  for shard in sorted(shards, key=lambda s: (s.process_index, s.first_step, -s.last_step, -s.num_rows)):
    before = kept[-1] if kept else None
    if before is None or before.process_index != shard.process_index or shard.last_step > before.last_step:
      kept.append(shard)
  return kept
