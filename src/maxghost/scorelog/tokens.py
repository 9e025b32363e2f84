"""Contributions of single tokens (ghost_detail=token): one file per step, `<run>/ghost/tokens/step_<step>.npz`.

A step's file is a function of the step, so writing it again after a restart gives the same file; the score log keeps
its CRC-32. B rows, T positions, S segments of a row, K validation sets.
"""

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.config.files import write_whole
from maxghost.scorelog.shard import DAMAGE, DamagedShard

FOLDER = "tokens"


def write(folder: Path, step: int, contribution_KBT: np.ndarray, batch, name_of: Callable[[int], Sequence]) -> int:
  """Writes the file of a step, whole or not at all; returns its CRC-32 for the step's record.

  The file holds contribution_KBT; inputs, targets, inputs_segmentation int32[B, T]; and domain, path (text), offset,
  chunk int64[B, S] of the document of segment s + 1 (empty text and -1 where there is none). contribution_KBT: nats of
  the token predicted at each position. name_of: document index -> (domain, path, offset).
  """
  folder.mkdir(parents=True, exist_ok=True)
  names = [[name_of(int(index)) if index >= 0 else ("", "", -1) for index in row] for row in batch.document_BS]
  arrays: Mapping[str, Any] = {
    "contribution_KBT": contribution_KBT,
    **{name: batch.arrays[name] for name in ("inputs", "targets", "inputs_segmentation")},
    **{key: np.array([[str(name[i]) for name in row] for row in names]) for i, key in enumerate(("domain", "path"))},
    "offset": np.array([[int(name[2]) for name in row] for row in names], np.int64), "chunk": batch.offset_BS,
  }  # fmt: skip
  buffer = io.BytesIO()
  np.savez_compressed(buffer, **arrays)
  with write_whole(folder / f"step_{step}.npz", durable=False) as file:
    file.write(buffer.getbuffer())
  return zlib.crc32(buffer.getbuffer())


def files(folder: Path) -> dict[int, Path]:
  """{step: file}, ascending."""
  names = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.npz")]
  return dict(sorted((int(step), path) for step, path in names if step.isdecimal()))


def read(path: Path, checksum: int | None) -> dict[str, np.ndarray]:
  """The arrays of a file. checksum: what the score log holds, None where it holds none. Raises DamagedShard."""
  try:
    data = path.read_bytes()
    if checksum is not None and zlib.crc32(data) != checksum:
      raise ValueError("its bytes do not match the checksum in the score log")
    with np.load(io.BytesIO(data)) as arrays:
      return dict(arrays)
  except DAMAGE as error:
    raise DamagedShard(f"{FOLDER}/{path.name}: {error}") from error


def missing(folder: Path, wanted: Mapping[int, int]) -> list[str]:
  """A sentence where files are missing. folder: of the log. wanted: {step: CRC-32 of its file}."""
  have = files(folder / FOLDER)
  lost = [step for step in wanted if step not in have]
  return [f"{len(lost)} files of {FOLDER}/ are missing, step_{lost[0]}.npz first"] if lost else []


def restore(folder: Path, completed_steps: int) -> None:
  """Removes the files of later steps, and the partial files of a killed process."""
  for path in [*(p for step, p in files(folder).items() if step >= completed_steps), *folder.glob("*.tmp")]:
    path.unlink()
