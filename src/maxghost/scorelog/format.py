"""The format of the score log: columns, units and file names.

K validation sets, S steps, M modules, L layers, D domains.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import recfunctions

from maxghost.config import ConfigError
from maxghost.config.files import read_table

# 2: share of each row, objective, ledger and direction in the header, a checksum at the file's end. 3: the same with
# contributions of the parts of a row; written where an objective has parts.
SCHEMA_VERSION = 3
BLOCK_ROWS = 1 << 18

TABLE = read_table("score_log.yml")  # what columns mean
UNITS: dict[str, str] = TABLE["units"]
STEP_SCALARS = ("learning_rate", "clip_factor", "tokens", "loss")
STEP_OTHERS = ("tokens_crc", "selection_crc", "learning_rate_in_all")
LEDGER = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")
NEXT_TOKEN = "next_token"

ROW_COLUMNS = ("step", "domain", "path", "offset", "chunk", "epoch", "tokens", "share", "loss", "dot", "contribution")
TEXTS = ("domain", "path")  # columns that are indices into a table of texts; fields of the documents are too
_ROW_TYPES = ("<i8", "<i4", "<i4", "<i8", "<i8", "<i4", "<i4", "<f4", "<f4", "<f4", "<f4")


# Names that a field of documents cannot have: columns of the log and of answers, and what answers are grouped by.
TAKEN = frozenset((*ROW_COLUMNS, *TABLE["measures"], "document", "source", "layer", "module", "text"))


def units(ledger: Sequence[str]) -> dict[str, str]:
  """Unit of every column, including those that only this run's optimizer names."""
  return UNITS | {name: TABLE["other_ledger"] for name in ledger if name not in UNITS}


def version_of(parts: Sequence[str]) -> int:
  """The lowest schema that holds these parts."""
  return SCHEMA_VERSION if parts else SCHEMA_VERSION - 1


def part_columns(parts: Sequence[str]) -> tuple[str, ...]:
  """The columns of the parts of a row, such as contribution_chosen; they add up to its contribution."""
  return tuple(f"contribution_{part}" for part in parts)


def row_dtype(num_sets: int, fields: Sequence[str] = (), parts: Sequence[str] = ()) -> np.dtype:
  """One scored chunk; `dot` and contributions are f32[K]. fields: of the documents."""
  shapes = {"dot": (num_sets,), "contribution": (num_sets,)}
  columns = [(n, t, shapes.get(n, ())) for n, t in zip(ROW_COLUMNS, _ROW_TYPES, strict=True)]
  columns += [(name, "<f4", (num_sets,)) for name in part_columns(parts)]
  return np.dtype([*columns, *((name, "<i4") for name in fields)])


def step_dtype(num_sets: int, ledger: Sequence[str] = LEDGER) -> np.dtype:
  """One training step; what was not measured is NaN. ledger: the optimizer's columns, f64[K] each, in their order."""
  per_set = ("val_loss", "prev_val_loss", "prev_predicted", "predicted_curvature", *ledger, "check_rel_err")
  fields = [("step", "<i8"), *((n, "<f8") for n in STEP_SCALARS), *((n, "<f8", (num_sets,)) for n in per_set)]
  return np.dtype([*fields, *((n, "<f8") for n in STEP_OTHERS)])


def unmeasured_steps(step, num_sets: int, ledger: Sequence[str] = LEDGER) -> np.ndarray:
  """Records of the given steps in which every measurement is NaN."""
  array = np.zeros((len(step),), step_dtype(num_sets, ledger))
  for name in (array.dtype.names or ())[1:]:
    array[name] = np.nan
  array["step"] = step
  return array


def with_ledger(steps: np.ndarray, num_sets: int, ledger: Sequence[str]) -> np.ndarray:
  """Step records in the layout of this schema with this ledger; columns they do not have are NaN."""
  array = unmeasured_steps(steps["step"], num_sets, ledger)
  recfunctions.assign_fields_by_name(array, steps, zero_unassigned=False)
  return array


def columns_of(arrays: Mapping[str, np.ndarray], val_sets: Sequence[str]) -> dict[str, np.ndarray]:
  """The columns, [N] or [N, K]; those of K > 1 validation sets one by one, as `contribution[name]`."""
  columns = {}
  for name, values in arrays.items():
    names = [f"{name}[{val_set}]" for val_set in val_sets] if values.ndim > 1 and len(val_sets) > 1 else [name]
    values = np.reshape(values, (len(values), len(names)))
    columns |= {one: np.ascontiguousarray(values[:, k]) for k, one in enumerate(names)}
  return columns


def for_others(texts: Iterable) -> list:
  """Texts as valid UTF-8, for other programs: bytes of file names that are not UTF-8 become `?`; None stays."""
  return [text if text is None else str(text).encode("utf-8", errors="replace").decode() for text in texts]


class Frame:
  """A table that other libraries can take; `for_others` gives its columns."""

  for_others: Callable[[], Mapping[str, Any]]

  def to_pandas(self) -> Any:
    """A pandas.DataFrame of all rows. A log has one column for each validation set: `contribution[name]`."""
    return self._made("pandas")

  def to_polars(self) -> Any:
    """As `to_pandas`, a polars.DataFrame."""
    return self._made("polars")

  def _made(self, library: str) -> Any:
    try:
      return importlib.import_module(library).DataFrame(dict(self.for_others()))
    except ImportError as error:
      raise ConfigError(f"to_{library}() needs {library}: pip install {library}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Modules:
  """Contribution in nats by module, layer and domain: contribution_SMLDK f32 over the S steps of `steps`. A module
  outside the layer stack has its value in layer 0 and NaN in the others."""

  names: tuple[str, ...]
  domains: tuple[str, ...]
  steps: np.ndarray
  contribution_SMLDK: np.ndarray

  @property
  def layout(self) -> tuple:
    """What must be the same in all files of a run."""
    return self.names, self.domains, self.contribution_SMLDK.shape[1:]

  @classmethod
  def joined(cls, parts: "Sequence[Modules]") -> "Modules | None":
    """Parts of one layout as one, in order of steps; None for none."""
    if not parts:
      return None
    steps, values = zip(*((part.steps, part.contribution_SMLDK) for part in parts), strict=True)
    return cls(parts[0].names, parts[0].domains, np.concatenate(steps), np.concatenate(values))


def shard_name(step: int, process_index: int) -> str:
  """File name of the interval that ends with `step`."""
  return f"dot_prod_log_iter_{step}{f'_p{process_index}' if process_index else ''}.npz"


def position_name(process_index: int) -> str:
  """File name of what a process has written so far: the last step, and how many steps and rows."""
  return f"position{f'_p{process_index}' if process_index else ''}.json"


def process_of(name: str) -> int:
  """The process that writes a file of this name, whole or partial."""
  found = re.search(r"_p(\d+)\.(?:npz|json)", name)
  return int(found[1]) if found else 0


def parse_shard_name(name: str) -> tuple[int, int] | None:
  """(last step, process index) of a file name, None for a foreign name."""
  found = re.fullmatch(r"dot_prod_log_iter_(\d+)(?:_p(\d+))?\.npz", name)
  return (int(found[1]), int(found[2] or 0)) if found else None
