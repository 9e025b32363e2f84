"""Contributions of single tokens (ghost_detail=token): one file per step, `<run>/ghost/tokens/step_<step>.npz`.

A step's file is a function of the step, so writing it again after a restart gives the same file.
B rows, T positions, S segments of a row, K validation sets.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NameOf = Callable[[int], Sequence[Any]]


def write(folder: Path, step: int, contribution_KBT: np.ndarray, batch, name_of: NameOf) -> None:
  """Writes the file of a step, whole or not at all.

  contribution_KBT: nats, of the token predicted at each position; sums over a segment to the document's contribution.
  Beside it: inputs, targets, inputs_segmentation int32[B, T]; domain, path (text), offset, chunk int64[B, S] of the
  document of segment s + 1 (empty text and -1 where there is none). name_of: (domain, path, offset) of a document.
  """
  folder.mkdir(parents=True, exist_ok=True)
  names = [[name_of(int(index)) if index >= 0 else ("", "", -1) for index in row] for row in batch.document_BS]
  arrays: Mapping[str, Any] = {
    "contribution_KBT": contribution_KBT,
    **{name: batch.arrays[name] for name in ("inputs", "targets", "inputs_segmentation")},
    "domain": np.array([[str(name[0]) for name in row] for row in names]),
    "path": np.array([[str(name[1]) for name in row] for row in names]),
    "offset": np.array([[int(name[2]) for name in row] for row in names], np.int64),
    "chunk": batch.offset_BS,
  }
  path = folder / f"step_{step}.npz"
  temporary = path.with_suffix(".tmp")
  with open(temporary, "wb") as file:
    np.savez_compressed(file, **arrays)
  os.replace(temporary, path)


def restore(folder: Path, completed_steps: int) -> None:
  """Removes the files of steps that are still to come."""
  for path in folder.glob("step_*.npz") if folder.is_dir() else ():
    if int(path.stem.removeprefix("step_")) >= completed_steps:
      path.unlink()
