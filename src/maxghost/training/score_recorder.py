"""Writes a step's outputs as rows of the score log, in a separate thread.

B rows of the batch, S slots (segments) a row can hold, K validation sets, N scored slots, U scored units.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from maxghost import optimizers
from maxghost.config import Config, plugins
from maxghost.parallel import distributed
from maxghost.scorelog import Writer, selection, tokens
from maxghost.scorelog.format import STEP_SCALARS, part_columns

QUEUE_LENGTH = 8  # steps that may wait to be written
HELD_DOCUMENTS = 1 << 16  # whose names are held in memory: a long run meets hundreds of millions
# Columns of the score log, from arrays of the step's outputs.
COLUMNS = {"tokens": "tokens_BS", "share": "share_BS", "loss": "loss_BS", "dot": "score_dot_BSK",
           "contribution": "contribution_BSK"}  # fmt: skip


class ScoreLogError(RuntimeError):
  """The scores of a step could not be written."""


def open_recorder(cfg: Config, dataset, path: Path, slice_B: np.ndarray | None = None) -> "ScoreRecorder":
  """A recorder of this process's rows, in the run directory at `path`. slice_B: the slice of each row, with DiLoCo."""
  writer = Writer(path, tuple(cfg.data.validation_sets), process=(distributed.index(), distributed.count()),
                  period=cfg.ghost.ghost_log_period, fingerprint=dataset.fingerprint, objective=cfg.optimizer.objective,
                  ledger=plugins.ledger_columns(cfg.optimizer.opt_type, cfg.model.use_qk_clip),
                  direction=cfg.direction_name,
                  fields=(*dataset.source.fields, *(() if slice_B is None else ("slice",))),
                  parts=plugins.OBJECTIVES[cfg.optimizer.objective].load().parts)  # fmt: skip
  reach_S = optimizers.reach(cfg.optimizer, cfg.ghost.direction, cfg.run.steps)
  return ScoreRecorder(writer, dataset.document_record, dataset.source.domains, reach_S, slice_B)


def scored_units(outputs: Mapping[str, np.ndarray], batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(slots with a document and a token that counts bool[B, S], first slot of each unit int[U], unit of each int[N])."""
  scored_BS = (batch.document_BS >= 0) & (outputs["tokens_BS"] > 0)
  ids_N = np.arange(scored_BS.sum()) if batch.unit_BS is None else batch.unit_BS[scored_BS]
  _, first_U, unit_N = np.unique(ids_N, return_index=True, return_inverse=True)
  return scored_BS, np.sort(first_U), np.argsort(np.argsort(first_U))[unit_N]


def scored_rows(outputs: Mapping, batch, parts: Sequence[str] = ()) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """(columns of the U scored units, their document indices). Tokens, shares and contributions of a unit's slots are
  summed; loss and dot are of the unit's mean loss. parts: names of the adjacent rows of a unit, each of which has a
  column with its part of the contribution."""
  scored_BS, first_U, unit_N = scored_units(outputs, batch)
  slots = {name: outputs[array] for name, array in COLUMNS.items() if array in outputs}
  slots |= {"chunk": batch.offset_BS, "epoch": np.broadcast_to(batch.epoch_B[:, None], scored_BS.shape)}
  for number, name in enumerate(part_columns(parts)):
    of_part_B11 = np.arange(len(scored_BS))[:, None, None] % len(parts) == number
    slots[name] = np.where(of_part_B11, outputs["contribution_BSK"], 0)
  columns = {name: value_BS[scored_BS] for name, value_BS in slots.items()}
  if len(first_U) < len(unit_N):
    columns = _by_unit(columns, first_U, unit_N)
  return columns, batch.document_BS[scored_BS][first_U]


def _by_unit(columns: Mapping[str, np.ndarray], first_U: np.ndarray, unit_N: np.ndarray) -> dict[str, np.ndarray]:
  """Combines columns of slots into columns of units."""
  weights = dict.fromkeys(["loss", "dot"], columns.get("share", columns["tokens"]))
  out = {name: columns[name][first_U] for name in ("chunk", "epoch")}
  for name in columns.keys() - out.keys():
    value_N = columns[name]
    weight_N = np.asarray(weights.get(name, np.ones(len(value_N))), np.float64)
    total_U = np.bincount(unit_N, weight_N) if name in weights else np.ones(len(first_U))
    sums = np.zeros((len(first_U), *value_N.shape[1:]))
    np.add.at(sums, unit_N, (value_N.T * weight_N).T)
    out[name] = (sums.T / np.where(total_U != 0, total_U, 1)).T.astype(value_N.dtype)
  return out


def module_contributions(by_module: Mapping, scored_BS: np.ndarray, domain_N: np.ndarray, num_domains: int):
  """f32[M, L, D, K], nats: sums of {label: [L, B, S, K]} over the scored documents of each domain. L: the largest
  number of layers; missing layers are NaN."""
  num_layers, num_sets = max(map(len, by_module.values())), next(iter(by_module.values())).shape[-1]
  sums_MLDK = np.full((len(by_module), num_layers, num_domains, num_sets), np.nan, np.float32)
  for sums_LDK, value_LBSK in zip(sums_MLDK, by_module.values(), strict=True):
    value_LNK = value_LBSK[:, scored_BS]
    for d in range(num_domains):
      sums_LDK[: len(value_LNK), d] = value_LNK[:, domain_N == d].sum(1)
  return sums_MLDK


def domain_numbers(batch, scored_BS: np.ndarray, name: Callable[[int], Sequence], domains: Sequence[str]) -> np.ndarray:
  """int64[N]: index in `domains` of each scored slot's document. name: maps a document's index to (domain, ...)."""
  return np.array([domains.index(name(index)[0]) for index in batch.document_BS[scored_BS].tolist()], np.int64)


class DomainSums:
  """The contributions of each step by domain, over the rows of all processes. document: maps a document's index to
  (domain, ...). writes: whether this process adds its rows; another process may have the same rows."""

  def __init__(self, val_sets: Sequence[str], domains: Sequence[str], document: Callable, writes: bool = True):
    self._domains, self._name, self._writes = tuple(domains), functools.lru_cache(HELD_DOCUMENTS)(document), writes
    self._metrics = [f"ghost/contribution/{name}/{domain}" for name in val_sets for domain in domains]
    self._exchange = distributed.Exchange()

  def __call__(self, outputs: Mapping[str, np.ndarray], batch) -> Callable[[], dict[str, float]]:
    """Starts to sum a step. The returned function waits for the other processes and returns {metric: nats}, empty for a
    step without scores. Every process must call this in every step that has scores."""
    if not outputs["scored_ok"]:
      return dict
    scored_BS = scored_units(outputs, batch)[0] & self._writes
    domain_N = domain_numbers(batch, scored_BS, self._name, self._domains)
    columns = outputs["contribution_BSK"][scored_BS].T
    sent = self._exchange.send(np.concatenate([np.bincount(domain_N, c, len(self._domains)) for c in columns]))
    return lambda: dict(zip(self._metrics, sent().sum(0).tolist(), strict=True))


class ScoreRecorder:
  """Feeds a Writer. An error of the writer (such as a full disk) is raised as ScoreLogError by the next call.

  document: maps a document's index to (domain, path, offset, the writer's fields). domains: all domains, an axis of the
  contributions by parameter. reach_S: learning_rate_in_all of every step of the run; None if unknown. slice_B: the
  slice of each row, the last field.
  """

  def __init__(self, writer, document: Callable[[int], Sequence[Any]], domains: Sequence[str],
               reach_S: np.ndarray | None = None, slice_B: np.ndarray | None = None):  # fmt: skip
    self._writer, self._reach_S, self._slice_B = writer, reach_S, slice_B
    self._domains, self._name = tuple(domains), functools.lru_cache(HELD_DOCUMENTS)(document)
    self._error: BaseException | None = None
    self._pool = ThreadPoolExecutor(1, "score-recorder")
    self._waiting: deque[Future] = deque(maxlen=QUEUE_LENGTH)

  def record(self, step: int, outputs: Mapping | None, closing: Mapping | None, batch) -> None:
    """Records one step. outputs: host copies; None: no scores. closing: prev_val_loss and, if known, prev_predicted,
    f32[K], of the step before; None for the first step. batch: the batch trained on."""
    self._raise_error()
    if len(self._waiting) == QUEUE_LENGTH:
      self._waiting[0].result()
    self._waiting.append(self._pool.submit(self._work, step, outputs, closing, batch))

  def position(self) -> dict:
    """The writer's position after every recorded step; these steps are then on disk."""
    wait(self._waiting)
    self._raise_error()
    return self._writer.position()

  def restore(self, position: dict | None, completed_steps: int) -> None:
    """Removes the records after a checkpoint; None empties the log."""
    self._writer.restore(position)
    tokens.restore(self._writer.folder / tokens.FOLDER, completed_steps)
    selection.restore(self._writer.folder, completed_steps)

  def close(self) -> None:
    """Writes all recorded steps to disk."""
    self._pool.shutdown()
    self._writer.close()
    self._raise_error()

  def _work(self, *step) -> None:
    try:
      if self._error is None:
        self._append(*step)
    except BaseException as error:
      self._error = error

  def _append(self, step: int, outputs, closing, batch) -> None:
    record: dict[str, Any] = {"step": step, **(closing or {})}
    if outputs is not None:
      names = (*STEP_SCALARS, "val_loss", "check_rel_err", "predicted_curvature", *self._writer.ledger)
      record |= {name: outputs[name] for name in names if name in outputs}
      if self._reach_S is not None:
        record["learning_rate_in_all"] = self._reach_S[step]
    if outputs is None or not outputs["scored_ok"]:  # no score rather than a wrong one
      self._writer.append(record, {}, [])
      return
    columns, documents = scored_rows(outputs, batch, self._writer.parts)
    ids = [self._name(int(index)) for index in documents]
    scored_BS, first_U, _ = scored_units(outputs, batch)
    row_U = scored_BS.nonzero()[0][first_U]
    if self._slice_B is not None:
      ids = [(*name, str(number)) for name, number in zip(ids, self._slice_B[row_U], strict=True)]
    modules = None
    if "param_contribution" in outputs:
      domain_N = domain_numbers(batch, scored_BS, self._name, self._domains)
      by_module = outputs["param_contribution"]
      sums_MLDK = module_contributions(by_module, scored_BS, domain_N, len(self._domains))
      modules = {"names": tuple(by_module), "domains": self._domains, "contribution": sums_MLDK}
    if "token_contribution_KBT" in outputs:
      folder, token_KBT = self._writer.folder / tokens.FOLDER, outputs["token_contribution_KBT"]
      record["tokens_crc"] = tokens.write(folder, step, token_KBT, batch, self._name)
    if "chosen_B" in outputs:
      chosen = np.flatnonzero(outputs["chosen_B"][row_U]).tolist()
      record["selection_crc"] = selection.append(self._writer.folder, step, len(ids), chosen)
    self._writer.append(record, columns, ids, modules=modules)

  def _raise_error(self) -> None:
    if self._error is not None:
      raise ScoreLogError(str(self._error)) from self._error
