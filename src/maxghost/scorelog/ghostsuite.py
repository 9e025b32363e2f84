"""Reads GhostSuite's logs (`grad_dotprods/dot_prod_log_iter_*.pt`) as a score log; needs torch.

GhostSuite (https://github.com/Jiachen-T-Wang/GhostSuite) logs, for the concatenated batch with mean loss,
`tokens_i * tokens_val / tokens_all**2 * <grad ell_i, grad L_val>`; here that becomes `dot = <grad ell_i, grad L_val>`.
It logs no learning rate, so `contribution` is `tokens_i / tokens_train * dot`: nats per unit of plain SGD's learning
rate. Runs with gradient accumulation over A micro-batches or a loss scaler S need a scale of A**2 / S**2.

N examples of a logged step.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxghost.config import ConfigError
from maxghost.scorelog import format as fmt

VAL_SET = "valset.pt"


def find_folder(run_dir: Path) -> Path | None:
  """The folder of `.pt` logs: `run_dir`, its `grad_dotprods`, or that of a folder inside; None without any."""
  candidates = [run_dir, run_dir / "grad_dotprods", *sorted(run_dir.glob("*/grad_dotprods"))]
  return next((folder for folder in candidates if folder.is_dir() and log_files(folder)), None)


def log_files(folder: Path) -> list[Path]:
  """Log files in the order of their iteration."""
  pattern = r"dot_prod_log_iter_(-?\d+)\.pt"
  found = [(int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(pattern, path.name))]
  return [path for _, path in sorted(found)]


def read(folder: Path, scale: float) -> tuple[list["LogFile"], list[str]]:
  """(files, sentences to show). Raises ConfigError without torch."""
  try:
    import torch  # pyright: ignore[reportMissingImports]  # used if it is there, part of no extra
  except ImportError as error:
    raise ConfigError(f"{folder} holds GhostSuite's .pt logs; reading them needs torch: pip install torch") from error
  messages = ["GhostSuite logs no learning rate: contributions are nats per unit of learning rate, for plain SGD"]
  read_one = functools.partial(torch.load, map_location="cpu", weights_only=True)
  val_tokens, files = None, []
  if (folder / VAL_SET).is_file():
    val_tokens = int((read_one(folder / VAL_SET)["Y_val"] >= 0).sum())
  else:
    messages.append(f"{VAL_SET} is missing: the validation batch is taken to be one row as long as a training row")
  for path in log_files(folder):
    try:
      files.append(LogFile(path, read_one(path), val_tokens, scale))
    except Exception as error:  # torch.load raises many kinds for a damaged file
      messages.append(f"skipped {path.name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
  if any(not file.has_tokens for file in files):
    messages.append("logs without token ids: every example is counted as one token")
  return files, messages


class LogFile:
  """One `.pt` file converted to the interface of shard.Shard; GhostSuite's tokens are not kept."""

  process_index = 0
  modules = None
  val_sets = ("validation",)
  objective = fmt.NEXT_TOKEN
  ledger = fmt.LEDGER
  fields = ()

  def __init__(self, path: Path, entries, val_tokens: int | None, scale: float):
    self.path, self.meta, self.has_tokens = path, {}, True
    last = int(path.stem.rpartition("_")[2])
    self._paths = {"batch_idx": 0, "order in the run": 1}
    converted = []
    for i, entry in enumerate(entries):
      if not isinstance(entry, dict):  # early versions logged the bare numbers of consecutive iterations
        entry = {"dot_product": entry, "iter_num": last - len(entries) + 1 + i}
      converted.append(self._convert(entry, val_tokens, scale))
    self._rows = np.concatenate(converted)
    steps, self.num_rows = np.unique(self._rows["step"]), len(self._rows)
    self.steps = fmt.unmeasured_steps(steps, 1)
    self.first_step, self.last_step = int(steps[0]), int(steps[-1])

  def _convert(self, entry: dict, val_tokens: int | None, scale: float) -> np.ndarray:
    logged_N = np.asarray(entry["dot_product"].float().numpy(), np.float64).reshape(-1)
    step, num = int(entry["iter_num"]), len(logged_N)
    labels, place = entry.get("Y_train"), entry.get("batch_idx")
    self.has_tokens &= labels is not None
    tokens_N = np.ones(num) if labels is None else (labels.reshape(num, -1) >= 0).sum(1).numpy().astype(np.float64)
    num_val = tokens_N.max() if val_tokens is None or labels is None else val_tokens
    rows = np.zeros(num, fmt.row_dtype(1))
    rows["step"], rows["tokens"], rows["loss"] = step, tokens_N, np.nan
    places_N = step * num + np.arange(num) if place is None else np.asarray(place).reshape(-1)
    path = "order in the run" if place is None else "batch_idx"
    if len(places_N) == 1 < num:  # the number of a batch, not of its rows
      path, places_N = f"batch_idx {int(places_N[0])}", np.arange(num)
    elif len(places_N) != num:
      raise ValueError(f"iter_num {step} has {num} scores, but a batch_idx of {len(places_N)} entries")
    rows["path"], rows["offset"] = self._paths.setdefault(path, len(self._paths)), places_N
    dot_N = scale * logged_N * (tokens_N.sum() + num_val) ** 2 / np.maximum(tokens_N * num_val, 1)
    rows["dot"][:, 0], rows["share"] = dot_N, tokens_N / tokens_N.sum()
    rows["contribution"][:, 0] = dot_N * tokens_N / tokens_N.sum()
    return rows

  def texts(self, name: str) -> np.ndarray:
    return np.array(["train"] if name == "domain" else list(self._paths))

  def blocks(self, block_rows: int = fmt.BLOCK_ROWS) -> Iterator[np.ndarray]:
    for start in range(0, len(self._rows), block_rows):
      yield self._rows[start : start + block_rows]
