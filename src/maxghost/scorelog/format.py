"""One score file: its columns, their units, and how it is written and read.

A file is an `.npz` (np.load opens it) that holds, in this order:
  meta         JSON text: schema version, units, validation sets, process, fingerprint of the data source
  domain_table, path_table    string tables; `rows` holds indices into them
  steps        structured array, one record per training step
  module_*     optional: contribution by module, layer and domain
  rows         structured array, one record per scored document chunk; last and uncompressed, so that a file cut short
               can be used up to its last whole row, and a large one is read block by block.

K validation sets, N rows, M modules, L layers, D domains.
"""

import dataclasses
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SCHEMA_VERSION = 1
BLOCK_ROWS = 1 << 18

UNITS = {
  "step": "training step, as in metrics.jsonl",
  "domain": "name of the document's domain",
  "path": "path of the document inside its source",
  "offset": "bytes from the start of the path to the document",
  "chunk": "bytes from the start of the document to the scored chunk",
  "epoch": "how often the stream that the chunk came from had been read through before",
  "tokens": "target tokens of the chunk that count in the loss",
  "loss": "nats per token, mean over the chunk",
  "dot": "<gradient of the chunk's mean loss, direction>, nats per unit of learning rate",
  "contribution": "nats by which the chunk's share of this step's update is predicted to lower the validation loss",
  "learning_rate": "learning rate of the step",
  "clip_factor": "scale that gradient clipping applied to the gradient",
  "val_loss": "nats per token before the step, on the step's validation rows",
  "prev_val_loss": "nats per token before the step, on the validation rows of the step before",
  "predicted_examples": "nats: sum of the contributions over the batch",
  "momentum": "nats: part of the step owed to earlier batches through the optimizer's first moment",
  "weight_decay": "nats: part of the step owed to weight decay",
  "unscored": "nats: part of the step owed to parameters left unscored on purpose",
  "direction_residual": "nats: difference between the exact and the used direction",
  "check_rel_err": "relative error of the sum of the scores against the batch gradient",
}
STEP_SCALARS = ("learning_rate", "clip_factor", "tokens", "loss")
STEP_PER_SET = (
  "val_loss",
  "prev_val_loss",
  "predicted_examples",
  "momentum",
  "weight_decay",
  "unscored",
  "direction_residual",
  "check_rel_err",
)
LEDGER = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


def row_dtype(num_sets: int) -> np.dtype:
  """One scored chunk; `dot` and `contribution` are f32[K]."""
  return np.dtype(
    [
      ("step", "<i8"),
      ("domain", "<i4"),
      ("path", "<i4"),
      ("offset", "<i8"),
      ("chunk", "<i8"),
      ("epoch", "<i4"),
      ("tokens", "<i4"),
      ("loss", "<f4"),
      ("dot", "<f4", (num_sets,)),
      ("contribution", "<f4", (num_sets,)),
    ]
  )


def step_dtype(num_sets: int) -> np.dtype:
  """One training step; what was not measured is NaN."""
  scalars = [(name, "<f8") for name in STEP_SCALARS]
  return np.dtype([("step", "<i8"), *scalars, *[(name, "<f8", (num_sets,)) for name in STEP_PER_SET]])


def unmeasured_steps(step, num_sets: int) -> np.ndarray:
  """Records of the given steps in which every measurement is NaN."""
  array = np.zeros((len(step),), step_dtype(num_sets))
  for name in (*STEP_SCALARS, *STEP_PER_SET):
    array[name] = np.nan
  array["step"] = step
  return array


@dataclasses.dataclass(frozen=True, slots=True)
class Modules:
  """Contribution in nats by module, layer and domain: contribution_SMLDK f32 over the S steps of `steps`.

  A module outside the layer stack has its value in layer 0 and NaN in the others.
  """

  names: tuple[str, ...]
  domains: tuple[str, ...]
  steps: np.ndarray
  contribution_SMLDK: np.ndarray


class DamagedShard(Exception):
  """A file that holds nothing usable; the message says why."""


def shard_name(step: int, process_index: int) -> str:
  """File name of the interval that ends with `step`."""
  return f"dot_prod_log_iter_{step}{f'_p{process_index}' if process_index else ''}.npz"


SHARD_PATTERN = re.compile(r"dot_prod_log_iter_(\d+)(?:_p(\d+))?\.npz")


def parse_shard_name(name: str) -> tuple[int, int] | None:
  """(last step, process index) of a file name, None for a foreign name."""
  found = SHARD_PATTERN.fullmatch(name)
  return (int(found[1]), int(found[2] or 0)) if found else None


def write_shard(path: Path, meta: dict, domains, paths, steps: np.ndarray, modules: Modules | None, rows: np.ndarray):
  """Writes one file whole or not at all: temporary file, fsync, rename, fsync of the folder."""
  members = {"meta": np.array(json.dumps(meta)), "domain_table": _strings(domains), "path_table": _strings(paths)}
  members["steps"] = steps
  if modules is not None:
    members["module_names"] = _strings(modules.names)
    members["module_domains"] = _strings(modules.domains)
    members["module_steps"] = np.asarray(modules.steps, np.int64)
    members["module_contribution"] = np.asarray(modules.contribution_SMLDK, np.float32)
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with open(temporary, "wb") as file:
      with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in members.items():
          archive.writestr(f"{name}.npy", _npy_bytes(array))
        archive.writestr("rows.npy", _npy_bytes(rows), compress_type=zipfile.ZIP_STORED)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  sync_folder(path.parent)


def sync_folder(folder: Path):
  """Makes renames and removals in `folder` durable."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _strings(values) -> np.ndarray:
  return np.array(list(values), dtype=np.str_) if len(values) else np.zeros((0,), dtype="<U1")


def _npy_bytes(array: np.ndarray) -> bytes:
  buffer = io.BytesIO()
  np.lib.format.write_array(buffer, np.ascontiguousarray(array) if array.ndim else array, allow_pickle=False)
  return buffer.getvalue()


class Shard:
  """One opened file: small tables in memory, rows read on demand.

  `problem` is a sentence when the file was cut short and only its first `num_rows` rows are used, else "".
  Raises DamagedShard when nothing can be used, NewerSchema for a file of a later maxghost, FileNotFoundError.
  """

  def __init__(self, path: Path):
    self.path = path
    self.problem = ""
    try:
      members = _members(path)
    except FileNotFoundError:
      raise
    except (OSError, zlib.error, ValueError) as error:
      raise DamagedShard(f"{path}: {error}") from error
    self.meta = self._meta(members)
    version = self.meta.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
      raise NewerSchema(path, version)
    self._small = {name: members[name] for name in members if name not in ("rows", "meta")}
    if "steps" not in members or "rows" not in members:
      raise DamagedShard(f"{path.name}: cut short before its first row")
    self.val_sets = tuple(self.meta["val_sets"])
    self.process_index = int(self.meta["process_index"])
    rows = members["rows"]
    self._open_rows(rows)

  def _meta(self, members) -> dict:
    try:
      meta = json.loads(str(_load(members["meta"])))
      return meta if isinstance(meta, dict) else {}
    except (KeyError, ValueError, zlib.error, EOFError) as error:
      raise DamagedShard(f"{self.path.name}: no readable header; not a maxghost score file") from error

  def _open_rows(self, member: "Member"):
    try:
      shape, dtype, start = _npy_header(member)
    except (ValueError, EOFError) as error:
      raise DamagedShard(f"{self.path.name}: cut short before its first row") from error
    if dtype != row_dtype(len(self.val_sets)) or len(shape) != 1:
      raise DamagedShard(f"{self.path.name}: its rows have an unknown layout")
    self._start, self._dtype = start, dtype
    self.num_rows = min(shape[0], max(0, member.end - start) // dtype.itemsize)
    if self.num_rows < shape[0]:
      self.problem = f"{self.path.name} is cut short: its first {self.num_rows} of {shape[0]} rows are used"

  @property
  def domains(self) -> np.ndarray:
    return self._table("domain_table")

  @property
  def paths(self) -> np.ndarray:
    return self._table("path_table")

  @property
  def steps(self) -> np.ndarray:
    return self._table("steps")

  @property
  def modules(self) -> Modules | None:
    if "module_contribution" not in self._small:
      return None
    names, domains = self._table("module_names"), self._table("module_domains")
    return Modules(
      tuple(map(str, names)), tuple(map(str, domains)), self._table("module_steps"), self._table("module_contribution")
    )

  def _table(self, name: str) -> np.ndarray:
    try:
      return _load(self._small[name])
    except (KeyError, ValueError, zlib.error, EOFError) as error:
      raise DamagedShard(f"{self.path.name}: {name} is unreadable") from error

  @property
  def first_step(self) -> int:
    return int(self.meta["first_step"])

  @property
  def last_step(self) -> int:
    return int(self.meta["last_step"])

  def blocks(self, block_rows: int = BLOCK_ROWS, columns: frozenset[str] | None = None) -> Iterator[np.ndarray]:
    """The rows in order, at most `block_rows` at a time. All columns are read, whichever are needed."""
    with open(self.path, "rb") as file:
      file.seek(self._start)
      left = self.num_rows
      while left > 0:
        block = np.fromfile(file, self._dtype, min(left, block_rows))
        if not len(block):
          raise DamagedShard(f"{self.path.name}: became shorter while it was read")
        left -= len(block)
        yield block

  def rows(self) -> np.ndarray:
    """All rows at once."""
    blocks = list(self.blocks())
    return np.concatenate(blocks) if blocks else np.zeros((0,), self._dtype)


def drop_covered(shards: list[Shard]) -> list[Shard]:
  """Without the files whose steps all lie inside another file of the same process (an interval flushed early)."""
  ordered = sorted(shards, key=lambda s: (s.process_index, s.first_step, -s.last_step, -s.num_rows))
  kept: list[Shard] = []
  for shard in ordered:
    before = kept[-1] if kept else None
    if before is None or before.process_index != shard.process_index or shard.last_step > before.last_step:
      kept.append(shard)
  return kept


class NewerSchema(Exception):
  """A file written by a later version of maxghost."""

  def __init__(self, path: Path, version):
    super().__init__(
      f"{path}: schema_version={version}, this maxghost reads up to {SCHEMA_VERSION}; update maxghost to read it"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
  """Where an archive member's bytes lie; `end` is clipped to the file's size."""

  path: Path
  start: int
  end: int
  whole: bool
  compressed: bool


def _members(path: Path) -> dict[str, Member]:
  """Members in file order, found through their local headers, so that a file without its end is readable too."""
  size = path.stat().st_size
  found: dict[str, Member] = {}
  with open(path, "rb") as file:
    position = 0
    while position + 30 <= size:
      file.seek(position)
      header = file.read(30)
      if header[:4] != b"PK\x03\x04":
        break
      number = [int.from_bytes(header[a:b], "little") for a, b in ((8, 10), (18, 22), (22, 26), (26, 28), (28, 30))]
      method, packed, _, name_bytes, extra_bytes = number
      name = file.read(name_bytes).decode("utf-8", "replace").removesuffix(".npy")
      extra = file.read(extra_bytes)
      if packed == 0xFFFFFFFF:
        packed = _zip64_size(extra)
      start = position + 30 + name_bytes + extra_bytes
      found[name] = Member(path, start, min(start + packed, size), start + packed <= size, method != 0)
      position = start + packed
  if not found:
    raise ValueError("not a score file (no zip header)" if size else "empty file")
  return found


def _zip64_size(extra: bytes) -> int:
  at = 0
  while at + 4 <= len(extra):
    tag, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
    if tag == 1 and length >= 16:
      return int.from_bytes(extra[at + 12 : at + 20], "little")
    at += 4 + length
  raise ValueError("zip member without its size")


def _load(member: Member) -> np.ndarray:
  if not member.whole:
    raise EOFError("member is cut short")
  with open(member.path, "rb") as file:
    file.seek(member.start)
    data = file.read(member.end - member.start)
  if member.compressed:
    data = zlib.decompress(data, -zlib.MAX_WBITS)
  return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _npy_header(member: Member) -> tuple[tuple, np.dtype, int]:
  if member.compressed:
    raise ValueError("rows are compressed")
  with open(member.path, "rb") as file:
    file.seek(member.start)
    head = io.BytesIO(file.read(min(member.end - member.start, 1 << 16)))
  version = np.lib.format.read_magic(head)
  read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
  shape, _, dtype = read(head)
  return shape, dtype, member.start + head.tell()
