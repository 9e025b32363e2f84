"""Compares two checkpoints of any layouts: structure, shapes, dtypes and values of parameters and optimizer state.

Both are read into the canonical form first, so stacked layers may equal unstacked ones, and a step of int32 one of
uint32. Values are equal where their bytes are equal or both are NaN. Exit code 0: equal; 1: different; 2: unreadable.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts import Checkpoint, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader, Ref, blocks_of, chunk_of
from maxghost.checkpoint.layouts_store import AnyPath, Opener, open_tree
from maxghost.config.arguments import Parser
from maxghost.config.values import guarded, slash_path

ONLY_LEFT, ONLY_RIGHT, STRUCTURE = "only-left", "only-right", "structure"
SHAPE, DTYPE, VALUE = "shape", "dtype", "value"
_BLOCK_BYTES = 1 << 26

Item = dict[int | None, Ref]  # a logical array by layer; None where it is in no layer


@dataclass
class Row:
  """One difference. layers: those of a stacked array that differ. first_index: within the first such layer."""

  path: str
  kind: str
  left: str = ""
  right: str = ""
  layers: list[int] = field(default_factory=list)
  max_abs: float | None = None
  max_rel: float | None = None
  first_index: list[int] | None = None
  num_different: int = 0

  def text(self) -> str:
    where = self.path + (f" (layers {_ranges(self.layers)})" if self.layers else "")
    if self.kind in (ONLY_LEFT, ONLY_RIGHT):
      return f"{self.kind:<10} {where}  {self.left or self.right}"
    if self.kind != VALUE:
      return f"{self.kind:<10} {where}  {self.left} against {self.right}"
    largest = f"largest difference {self.max_abs:.3g} (relative {self.max_rel:.3g})"
    return f"{self.kind:<10} {where}  {self.num_different} elements, {largest}, first at {self.first_index}"


@dataclass
class Comparison:
  """rows: the differences. num_arrays, num_nans: logical arrays compared, and equal NaNs among their elements."""

  rows: list[Row] = field(default_factory=list)
  num_arrays: int = 0
  num_elements: int = 0
  num_nans: int = 0
  notes: list[str] = field(default_factory=list)

  @property
  def equal(self) -> bool:
    return not self.rows

  def lines(self, max_rows: int) -> Iterator[str]:
    """The comparison as text. max_rows: number of differences shown; 0: all."""
    shown = self.rows[: max_rows or None]
    yield from (row.text() for row in shown)
    if len(self.rows) > len(shown):
      yield f"... and {len(self.rows) - len(shown)} more differences (--max_rows 0 prints all)"
    yield from self.notes
    nans = f", {self.num_nans} equal NaNs among them" if self.num_nans else ""
    yield f"compared {self.num_arrays} arrays, {self.num_elements:,} elements{nans}"
    yield "CHECKPOINTS MATCH" if self.equal else f"CHECKPOINTS DIFFER: {len(self.rows)} differences"


def compare(left: Checkpoint, right: Checkpoint, *, params_only: bool = False, rngs: bool = False, atol: float = 0.0,
            rtol: float = 0.0, ram_bytes: int = 1 << 31) -> Comparison:  # fmt: skip
  """Compares two canonical checkpoints.

  params_only: only parameters. rngs: random state and other non-parameters too. atol: allowed difference as a share of
  the array's largest magnitude, which suits weights and moments alike. rtol: the same as a share of each element of
  `right`. ram_bytes: memory for arrays; larger arrays are compared block by block.
  """
  result = Comparison()
  left_out = set() if left.loop_state and right.loop_state else {"loop_state"}
  if params_only:
    left_out |= {*left.trees(), *right.trees()} - {"params"}
  elif not rngs:
    left_out.add("aux")
  items_left, items_right = (_items(side, left_out) for side in (left, right))
  arrays = _ValueComparer(atol, rtol, ram_bytes, result)
  for path in items_left | items_right:
    a, b = items_left.get(path, {}), items_right.get(path, {})
    for kind, mine, other in ((ONLY_LEFT, a, b), (ONLY_RIGHT, b, a)):
      if missing := [layer for layer in mine if layer not in other]:
        text = _describe(mine[missing[0]])
        layers = [layer for layer in missing if layer is not None]
        result.rows.append(Row(path, kind, *((text, "") if mine is a else ("", text)), layers))
    if both := [layer for layer in a if layer in b]:
      result.num_arrays += 1
      arrays.compare(path, [(layer, a[layer], b[layer]) for layer in both], is_step=path == "step")
  if params_only:
    return result
  odd_left, odd_right = left.odd_moments(), right.odd_moments()
  for place in odd_left | odd_right:
    a, b = (odd.get(place, "as in the parameters") for odd in (odd_left, odd_right))
    if a != b:
      result.rows.append(Row(f"opt_state/{slash_path(place)}", STRUCTURE, a, b))
  for side, checkpoint in (("left", left), ("right", right)):
    count = len({id(ref.array) for ref in checkpoint.aux.leaves.values()})
    if count and not rngs:
      result.notes.append(f"not compared: {count} random-state leaves on the {side} (--rngs compares them)")
  return result


def _describe(ref: Ref) -> str:
  return f"{ref.dtype}[{','.join(map(str, ref.shape))}]"


def _items(checkpoint: Checkpoint, left_out: Collection[str]) -> dict[str, Item]:
  items: dict[str, Item] = {}
  for name, tree in checkpoint.trees().items():
    for (path, layer), ref in tree.leaves.items() if name not in left_out else ():
      items.setdefault(slash_path(path if name in ("kept", "loop_state") else (name, *path)), {})[layer] = ref
  return items


class _ValueComparer:
  """Compares logical arrays block by block and adds the differences to `result`."""

  def __init__(self, atol: float, rtol: float, ram_bytes: int, result: Comparison):
    self._atol, self._rtol, self._result = atol, rtol, result
    self._left, self._right = LayerReader(ram_bytes // 3), LayerReader(ram_bytes // 3)
    self._block_bytes = min(_BLOCK_BYTES, max(ram_bytes // 12, 1))

  def compare(self, path: str, pairs: list[tuple[int | None, Ref, Ref]], *, is_step: bool) -> None:
    """Appends at most one row per kind of difference of one logical array."""
    good = pairs
    for kind, of, text in ((SHAPE, lambda ref: ref.shape, _describe), (DTYPE, _dtype_text, _dtype_text)):
      wrong = [] if is_step and kind == DTYPE else [pair for pair in pairs if of(pair[1]) != of(pair[2])]
      if wrong:
        layers = [layer for layer, _, _ in wrong if layer is not None]
        self._result.rows.append(Row(path, kind, text(wrong[0][1]), text(wrong[0][2]), layers))
        good = [pair for pair in good if pair not in wrong]
    row = Row(path, VALUE, max_abs=0.0, max_rel=0.0)
    refs = [ref for _, _, ref in good if self._atol]
    sizes = (np.abs(_wide(self._right.part(ref, index))) for ref in refs for index in self._blocks(ref))
    scale = max((float(np.max(size, initial=0.0, where=np.isfinite(size))) for size in sizes), default=0.0)
    for layer, a, b in good:
      for index in self._blocks(a):
        self._compare_block(row, layer, index, self._left.part(a, index), self._right.part(b, index), scale)
    if row.num_different:
      self._result.rows.append(row)

  def _blocks(self, ref: Ref) -> Iterator[tuple[slice, ...]]:
    return blocks_of(ref.shape, chunk_of(ref.shape, ref.dtype.itemsize, self._block_bytes))

  def _compare_block(self, row: Row, layer: int | None, index: tuple, x: np.ndarray, y: np.ndarray, scale: float):
    """Adds the differences of one block to the row of its array. scale: largest magnitude of the array."""
    self._result.num_elements += x.size
    tolerant = (self._atol or self._rtol) and x.dtype == y.dtype
    if x.dtype != y.dtype:  # the step only, an integer of either type
      x, y = x.astype(np.int64), y.astype(np.int64)
    both_nan = np.isnan(x) & np.isnan(y) if x.dtype.kind not in "iub" else np.zeros(x.shape, bool)
    self._result.num_nans += int(both_nan.sum())
    different = (_bits(x) != _bits(y)) & ~both_nan
    if tolerant and different.any():
      gap, size = _gap(x, y)
      different &= ~(gap <= self._atol * scale + self._rtol * size)
    if not different.any():
      return
    if layer is not None and layer not in row.layers:
      row.layers.append(layer)
    if row.first_index is None:
      first = np.unravel_index(int(np.argmax(different)), different.shape)
      row.first_index = [int(i) + s.start for i, s in zip(first, index, strict=True)]
    row.num_different += int(different.sum())
    gap, size = _gap(x[different], y[different])
    with np.errstate(divide="ignore", invalid="ignore"):
      relative = np.nan_to_num(np.where(gap == 0, 0.0, gap / size), nan=math.inf, posinf=math.inf)
    row.max_abs = max(row.max_abs or 0.0, float(gap.max()))
    row.max_rel = max(row.max_rel or 0.0, float(relative.max()))


def _dtype_text(ref: Ref) -> str:
  return ref.dtype.name if not ref.array.key_impl else f"{ref.dtype.name} key words"


def _bits(x: np.ndarray) -> np.ndarray:
  """The elements' bits, so that -0.0 differs from 0.0."""
  if x.dtype.kind in "iub" or x.dtype.itemsize not in (1, 2, 4, 8):
    return x
  return np.ascontiguousarray(x).reshape(x.shape).view(f"u{x.dtype.itemsize}")


def _wide(x: np.ndarray) -> np.ndarray:
  return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _gap(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(|x - y|, |y|) in float64. The difference is infinite where exactly one is NaN, or infinities differ."""
  a, b = _wide(x), _wide(y)
  with np.errstate(invalid="ignore", over="ignore"):
    gap = np.abs(a - b)
  return np.where(np.isnan(gap), math.inf, gap), np.nan_to_num(np.abs(b), nan=0.0)


def _ranges(numbers: Sequence[int]) -> str:
  """Numbers as text, such as "0-3, 5"."""
  runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
  ends = [(members[0][1], members[-1][1]) for members in (list(run) for _, run in runs)]
  return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def compare_checkpoints(a: AnyPath, b: AnyPath, opener: Opener = open_tree, **options: Any) -> Comparison:
  """Compares two checkpoint folders; options as in `compare`. Raises LayoutError if a folder cannot be read.

  opener: opens a folder; `interop.huggingface.open_tree` knows Hugging Face folders too.
  """
  left, right = (read_checkpoint(opener(path)) for path in (a, b))
  return compare(left, right, **options)


@guarded("compare_checkpoints")
def main(argv: Sequence[str] | None = None, opener: Opener = open_tree) -> int:
  parser = Parser(prog="maxghost checkpoint compare", description=(__doc__ or "").split("\n")[0])
  add = parser.add_argument
  add("a", metavar="A")
  add("b", metavar="B")
  add("--params_only", "--params-only", action="store_true", help="leave optimizer state and step out")
  add("--rngs", action="store_true", help="compare random state too")
  add("--atol", type=float, default=0.0, help="allowed difference, as a share of the array's largest magnitude")
  add("--rtol", type=float, default=0.0, help="allowed difference, as a share of each element of B")
  add("--json", action="store_true", help="print one JSON object")
  add("--max_rows", "--max-rows", type=int, default=20, help="differences printed; 0 = all")
  options = vars(parser.parse(argv, atol=0, rtol=0, max_rows=0))
  as_json, max_rows = options.pop("json"), options.pop("max_rows")
  result = compare_checkpoints(**options, opener=opener)
  content = {"equal": result.equal, "left": options["a"], "right": options["b"], **dataclasses.asdict(result)}
  for row in content["rows"]:  # JSON has no infinity
    row |= {name: None for name in ("max_abs", "max_rel") if row[name] == math.inf}
  for line in [json.dumps(content, allow_nan=False)] if as_json else result.lines(max_rows):
    print(line)
  return 0 if result.equal else 1
