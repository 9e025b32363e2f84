"""Domain reweighting: the domains' shares of the rows follow the nats per token of their documents.

At a fixed interval of steps (`ghost_reweight`), with v the nats per token of each domain in the interval (mean over the
validation sets), shares become w ∝ w exp(step v / mean |v|), then floor + (1 - D floor) w. This is exponentiated
gradient on the measured value, as in DoReMi (Xie et al., arXiv:2305.10429, equation 2), which uses an excess loss.

Batches are drawn ahead of the training, so a change decided after step s takes effect at batch s + LAG, independent of
the timing of threads: a resumed run draws the same rows.

D domains, B rows, S documents in a row, K validation sets.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maxghost.config import GhostConfig
from maxghost.parallel import distributed
from maxghost.training.batches import NUM_AHEAD
from maxghost.training.score_recorder import HELD_DOCUMENTS, domain_numbers, scored_units

LAG = NUM_AHEAD + 4  # when step s is read, step s + 1 runs and NUM_AHEAD + 1 batches are drawn ahead


class Reweighter:
  """Watches the scores of each step and schedules changes of the mixture. shares: {domain: share of the rows} to start
  from. reader: has `mixture_domains` and `schedule_mixture(changes)`. document_id: (domain, path, offset) of a document
  by its index. writes: whether this process adds its rows; another process may have the same rows."""

  def __init__(self, ghost: GhostConfig, shares: Mapping[str, float], reader: Any, document_id: Callable, writes=True):
    self._reader, self._names, self._writes = reader, tuple(reader.mixture_domains), writes
    self._every, self._size, self._floor = ghost.reweighting
    self._document = functools.lru_cache(HELD_DOCUMENTS)(document_id)
    self._shares_D = np.array([shares[name] for name in self._names], np.float64)
    self._sums_2D = np.zeros((2, len(self._names)))  # nats and tokens of the interval
    self._changes: list[tuple[int, dict[str, float]]] = []

  def observe(self, step: int, outputs: Mapping[str, np.ndarray], batch) -> dict[str, float]:
    """Adds a step's scores; returns ghost/share/<domain> of its batch. Rows not scored or not chosen do not count."""
    if self._writes and "contribution_BSK" in outputs and outputs["scored_ok"]:
      counted_BS = scored_units(outputs, batch)[0]
      if "chosen_B" in outputs:
        counted_BS = counted_BS & outputs["chosen_B"][:, None]
      domain_N = domain_numbers(batch, counted_BS, self._document, self._names)
      values = outputs["contribution_BSK"][counted_BS].mean(-1, dtype=np.float64), outputs["tokens_BS"][counted_BS]
      self._sums_2D += [np.bincount(domain_N, value_N, len(self._names)) for value_N in values]
    past = sum(first <= step for first, _ in self._changes)  # of which later steps need the last alone
    due, self._changes = self._changes[past - 1][1] if past else {}, self._changes[max(past - 1, 0) :]
    if (step + 1) % self._every == 0:
      nats_D, tokens_D = np.sum(distributed.gather(self._sums_2D.tolist()), 0)
      seen_D = tokens_D > 0
      value_D = np.divide(nats_D, tokens_D, out=np.zeros_like(nats_D), where=seen_D)
      self._sums_2D = np.zeros_like(self._sums_2D)
      self._shares_D = reweighted(self._shares_D, value_D, seen_D, self._size, self._floor)
      self._changes.append((step + LAG, dict(zip(self._names, self._shares_D.tolist(), strict=True))))
      self._reader.schedule_mixture(self._changes)
    return {f"ghost/share/{name}": share for name, share in due.items()}

  def state(self) -> dict:
    """The state for a resumed run, as JSON values, with the sums of every process; all must call it."""
    shares, sums = self._shares_D.tolist(), distributed.gather(self._sums_2D.tolist())
    return {"shares": shares, "sums": sums, "changes": list(map(list, self._changes))}

  def restore(self, state: Mapping | None) -> None:
    """Restores a `state()`; None: the start of a run. Must be called before the next batch is drawn."""
    if state is not None:
      sums = state.get("sums") or [[state["nats"], state["tokens"]]]  # of one process, in an earlier version
      same = len(sums) == distributed.count()  # else process 0 goes on with the sums of all
      self._sums_2D = np.array(sums[distributed.index()]) if same else np.sum(sums, 0) * distributed.is_first()
      self._shares_D = np.array(state["shares"])
      self._changes = [(int(batch), dict(shares)) for batch, shares in state["changes"]]
      self._reader.schedule_mixture(self._changes)


def reweighted(shares_D, value_D, seen_D, step: float, floor: float) -> np.ndarray:
  """The next shares. value_D: nats per token; a domain without tokens gets the mean of the others."""
  size = np.abs(value_D[seen_D]).mean() if seen_D.any() else 0.0
  if not size > 0 or not math.isfinite(size):
    return shares_D
  value_D = np.where(seen_D, value_D, value_D[seen_D].mean())
  with np.errstate(divide="ignore"):  # a share that a large step made 0 stays 0
    log_D = np.log(shares_D) + step * np.clip(value_D / size, -5, 5)
  shares_D = np.exp(log_D - log_D.max())  # or a large step would overflow
  return floor + (1 - len(shares_D) * floor) * shares_D / shares_D.sum()
