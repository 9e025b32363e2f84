"""An index of sketched gradients: written chunk by chunk, searched in blocks from memory-mapped files. Imports no JAX.

A chunk's sketch is kept block by block as int8, divided by the block's norm, so that every layer has the same weight
when chunks are ranked: by the mean over blocks of <u, C^-1 v>, with u and v the unit sketches of the chunk and of the
query and C the mean of u uᵀ over the chunks (as TrackStar, Chang et al., arXiv:2410.17413): what all chunks have in
common counts little. Estimates in nats are of the sketches themselves, whose norms are kept too.

N chunks, M blocks, R directions in G groups, Q queries.
"""

import json
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.attribution import words
from maxghost.attribution.words import Words
from maxghost.config import ConfigError
from maxghost.config.files import check_seal, write_whole
from maxghost.data.hashing import changed_files

VERSION = 5  # 5: where chunks end
ENDS = "ends.npy"
KEYS = ("domain", "path", "offset", "chunk", "tokens")  # of a line of ids.jsonl
HYBRID, SIMILARITY, NATS = ORDERS = ("hybrid", "similarity", "nats")  # what chunks are ranked by
CONTRIBUTION, LESS = "contribution", "less"  # methods of an index
_BLOCK = 256  # chunks that are multiplied at a time; as float32 a few MB, which stay in a cache
_DAMPING = 0.1  # of C, in mean eigenvalues


def files_of(step: int) -> tuple[str, str]:
  return f"sketch_{step}.npy", f"blocks_{step}.npz"


def save(path: Path, arrays: Any) -> str:
  """Writes an `.npy` or `.npz` file whole and returns its name. A reader that has mapped an earlier one keeps it."""
  with write_whole(path) as file:
    if isinstance(arrays, dict):
      np.savez(file, **arrays)
    else:
      np.save(file, arrays)
  return path.name


def _peak(num_directions: int) -> float:
  """What 127 stands for: larger entries of a unit vector, 8 standard deviations, are cut off."""
  return min(1.0, 8 / num_directions**0.5)


class Shrunk:
  """Collects the sketches of one checkpoint."""

  def __init__(self):
    self._units: list[np.ndarray] = []
    self._norms: list[np.ndarray] = []
    self._moment_MRR: Any = 0.0

  def add(self, sketch_NMR: np.ndarray) -> None:
    norm_NM, unit_NMR = _parted(sketch_NMR)
    peak = _peak(sketch_NMR.shape[-1])
    self._units.append(np.clip(np.rint(unit_NMR * (127 / peak)), -127, 127).astype(np.int8))
    self._norms.append(norm_NM)
    # Of what is kept: with fewer chunks than directions, C^-1 would raise what int8 rounds outside the chunks' span.
    kept_MNR = self._units[-1].swapaxes(0, 1) * np.float32(peak / 127)
    self._moment_MRR = self._moment_MRR + np.matmul(kept_MNR.swapaxes(1, 2), kept_MNR)

  def save(self, folder: Path, step: int) -> list[str]:
    """Writes the files of a checkpoint; their names."""
    norm_NM, size = np.concatenate(self._norms), self._moment_MRR.shape[-1]
    even_MRR = np.trace(self._moment_MRR, axis1=1, axis2=2)[:, None, None] / size * np.eye(size)
    even_MRR = np.where(even_MRR.any((1, 2), keepdims=True), even_MRR, np.eye(size))  # of a block without gradients
    inverse_MRR = np.linalg.inv((self._moment_MRR + _DAMPING * even_MRR) / len(norm_NM)).astype(np.float32)
    sketches, blocks = (folder / name for name in files_of(step))
    return [save(sketches, np.concatenate(self._units)), save(blocks, {"norm_NM": norm_NM, "inverse_MRR": inverse_MRR})]


def _parted(sketch_NMR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(norm [N, M] of each block, the blocks with norm 1), float32."""
  norm_NM = np.sqrt(np.square(sketch_NMR, dtype=np.float64).sum(-1))
  return norm_NM.astype(np.float32), (sketch_NMR / np.where(norm_NM > 0, norm_NM, 1)[..., None]).astype(np.float32)


class Whole(list[np.ndarray]):
  """As `Shrunk`, of sketches that are kept as they are."""

  add = list.append

  def save(self, folder: Path, step: int) -> list[str]:
    return [save(folder / files_of(step)[0], np.concatenate(self))]


class Index:
  """An index that is open. about: from `open_index`; ids: of its chunks, as KEYS.

  `asked` is a list with the queries' sketches f32[Q, M, R] at each checkpoint, in nats.
  """

  def __init__(self, folder: Path, about: dict):
    self.folder, self._digests = folder, dict(about["checkpoints"])
    lines = map(json.loads, (folder / "ids.jsonl").read_text(encoding="utf-8").splitlines())
    self.ids = [[sys.intern(domain), sys.intern(path), *rest] for domain, path, *rest in lines]
    self._held: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
    for step in self._digests:
      sketches, whitening = (folder / name for name in files_of(step))
      more = dict(np.load(whitening)) if whitening.is_file() else {}
      self._held.append((np.load(sketches, mmap_mode="r"), more))
    self._words = Words(folder, len(self.ids)) if (folder / words.FILE).is_file() else None
    num = self._held[0][0].shape[-1]
    self.groups = num // side_of(num) ** 2 if self._held[0][1] else num

  def check(self, step: int, digest: str) -> None:
    """Raises ConfigError for the digest of other weights than the index was made from."""
    if digest != self._digests[step]:
      raise ConfigError(f"--index {self.folder}: step {step} had other weights; give --data to write the index again")

  def hybrid(self, score_N: np.ndarray, text: str) -> np.ndarray:
    """f32[N]: the scores fused with those of the words of the query's text."""
    return words.fused(score_N, self._words.scores(text)) if self._words else score_N

  def scores(self, asked: list[np.ndarray], by: str = SIMILARITY, among: np.ndarray | None = None) -> np.ndarray:
    """f32[Q, N]: the contributions with NATS, else the mean over blocks and checkpoints. among: only these chunks."""
    count = len(self.ids) if among is None else len(among)
    plain, found_QN = by == NATS or not self._held[0][1], np.zeros((len(asked[0]), count), np.float32)
    for sketch_QMR, (held_NMR, more) in zip(asked, self._held, strict=True):
      _, blocks, size = held_NMR.shape
      if plain:
        weight_QMR = sketch_QMR * (_peak(size) / 127 / size if more else 1 / size)
      else:
        weight_QMR = np.einsum("qmr,mrs->qms", _parted(sketch_QMR)[1], more["inverse_MRR"])
        weight_QMR *= _peak(size) / 127 / blocks / len(asked)
      wide = np.float32 if more else held_NMR.dtype  # kept whole, also the precision is
      weight_QD = weight_QMR.reshape(len(weight_QMR), -1).astype(wide)
      for start in range(0, count, _BLOCK):
        place = slice(start, start + _BLOCK)
        here = place if among is None else among[place]
        part_NMR = held_NMR[here].astype(wide)
        if plain and more:
          part_NMR *= more["norm_NM"][here, :, None]
        # Not a product of matrices: for few queries the threads of a BLAS mostly wait for each other, block by block.
        found_QN[:, place] += np.vecdot(part_NMR.reshape(len(part_NMR), 1, -1), weight_QD).T
        _give_back(held_NMR)
    return found_QN

  def products(self, asked: list[np.ndarray], chunks) -> np.ndarray:
    """f32[Q, n, G]: estimates of the contributions of some chunks by each group, summed over the checkpoints."""
    total: Any = 0.0
    for sketch_QMR, (held_NMR, more) in zip(asked, self._held, strict=True):
      part_NMR, size = held_NMR[chunks], held_NMR.shape[-1]
      _give_back(held_NMR)
      if more:
        part_NMR = part_NMR * (more["norm_NM"][chunks, :, None] * np.float32(_peak(size) / 127))
      part_GND, sketch_GQD = self._grouped(part_NMR), self._grouped(sketch_QMR)
      total = total + (sketch_GQD @ part_GND.swapaxes(1, 2)) * (self.groups / size)
    if not np.isfinite(total).all():
      raise ConfigError("the gradient of the query is not finite; the checkpoint's weights may have diverged")
    return np.moveaxis(total, 0, -1)

  def _grouped(self, sketch_NMR: np.ndarray) -> np.ndarray:
    """[G, N, M R / G]."""
    split_NMGr = sketch_NMR.reshape(*sketch_NMR.shape[:2], self.groups, -1)
    return np.moveaxis(split_NMGr, 2, 0).reshape(self.groups, len(sketch_NMR), -1)


def _give_back(held_NMR: Any) -> None:
  """The pages of a memory-mapped file that have been read count as resident until the system is told to drop them."""
  held_NMR.base.madvise(mmap.MADV_DONTNEED)


def side_of(num_directions: int) -> int:
  """Of `ghost.sketch.sketch_pass`: the largest of 1, 2, 4 that leaves a multiple of 32 groups, which tell the error."""
  return max(side for side in (1, 2, 4) if side == 1 or num_directions % (32 * side**2) == 0)


def standard_error(products) -> np.ndarray:
  """Of the mean over the last axis, of independent estimates."""
  return products.std(-1, ddof=1) / np.sqrt(products.shape[-1])


def open_index(folder: Path, steps: Sequence[int] | None = None) -> dict:
  """index.json of an index, of these checkpoints if they are given. Raises ConfigError."""
  path = folder / "index.json"
  if not path.is_file():
    said = "its index was not finished" if any(folder.glob("*sketch_*")) else "no index there"
    raise ConfigError(f"--index {folder}: {said}; give --data to write one")
  try:
    about = check_seal(json.loads(path.read_text(encoding="utf-8")))
    version = int(about["version"])
  except (ValueError, KeyError, TypeError) as error:
    raise ConfigError(f"{path}: damaged ({error}); give --data to write the index again") from error
  if version != VERSION:
    way = "update maxghost" if version > VERSION else "give --data to write the index again"
    raise ConfigError(f"{path}: version {version}, this maxghost reads version {VERSION}; {way}")
  if steps is not None and (there := [step for step, _ in about["checkpoints"]]) != list(steps):
    raise ConfigError(f"--index {folder}: written for the checkpoints of steps {there}, queried with {list(steps)}")
  for _, sentence in changed_files(folder, about.get("files", {})):
    raise ConfigError(f"{sentence}; give --data to write the index again")
  return about
