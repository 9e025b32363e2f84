"""The numbers of a report, computed once for the terminal, the page and the live view.

K validation sets, D domains, E passes, B bins of consecutive steps, S steps, R rows of the heat map.
"""

import dataclasses
import hashlib
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxghost import config
from maxghost.attribution import aggregate, statistics, token_values
from maxghost.attribution.aggregate import Groups, TimeSums
from maxghost.attribution.metrics import Series, read_mapping, read_metrics
from maxghost.attribution.numbers import THIN, counted, integer, number
from maxghost.attribution.texts import SHOWN_CHARS, DocumentKey, Source
from maxghost.config import ConfigError, plugins
from maxghost.scorelog.reader import ScoreLog

CURVE_BINS = 240
MIN_CHUNKS = 3  # of a document, for its interval to rank it: that of two chunks is narrow by chance too often
MILLION = 1e6
NAN = math.nan
MAX_HASHED_DOCUMENTS = 200_000


class Value(NamedTuple):
  """The value of a group of rows. contribution and half_width (95 %) in nats; loss in nats per token.

  relative: contribution over the average of the same shares of the same steps; NaN where that is not positive. path,
  offset, text, marked and in_all (as `ScoreLog.in_all`, NaN where unknown): of a document.
  """

  domain: str
  exposures: int
  tokens: int
  loss: float
  contribution: float
  half_width: float
  relative: float = NAN
  path: str = ""
  offset: int = 0
  text: str | None = None
  marked: token_values.Marked | None = None
  in_all: float = NAN

  @property
  def per_million(self) -> float:
    """Nats per million tokens."""
    return self.contribution / self.tokens * MILLION if self.tokens else NAN

  @property
  def per_million_half_width(self) -> float:
    return self.half_width / self.tokens * MILLION if self.tokens else NAN

  @property
  def place(self) -> str:
    return f"{self.domain} · {self.path}" + (f" @ {self.offset}" if self.offset else "")


class Ledger(NamedTuple):
  """The predicted and the measured drop of the validation loss in nats, over the same steps.

  columns: parts of the prediction by the log's names; None if not logged. steps: those counted. predicted_S: per step,
  with curvature. actual_S: per step; None if no drop is known. curvature: what the trapezoid rule adds to the columns;
  None if unknown. ahead: curvature that they contain, because the steps expected it; None: they are of first order.
  unit: what the loss is a mean of, as `unit_of`.
  """

  columns: dict[str, float | None]
  steps: np.ndarray
  predicted_S: np.ndarray
  actual_S: np.ndarray | None
  curvature: float | None = None
  ahead: float | None = None
  unit: str = "token"

  @property
  def columns_sum(self) -> float:
    return sum(value for value in self.columns.values() if value is not None)

  @property
  def first_order(self) -> float:
    return self.columns_sum - (self.ahead or 0.0)

  @property
  def predicted(self) -> float:
    """First order and curvature."""
    return self.columns_sum + (self.curvature or 0.0)

  @property
  def actual(self) -> float | None:
    return None if self.actual_S is None else float(self.actual_S.sum())

  @property
  def rest(self) -> float | None:
    """Measured minus predicted drop: what remains of the curvature, and the rounding of two nearly equal losses."""
    return None if self.actual is None else self.actual - self.predicted


class HeatMap(NamedTuple):
  """Nats per million tokens of each domain; rows are layers, then modules outside the stack."""

  rows: tuple[str, ...]
  domains: tuple[str, ...]
  value_RD: np.ndarray


class PassTable(NamedTuple):
  """Value by pass over the data, from entry 0; the last entry also holds all later passes. contribution_EK: nats.

  expected_EK: nats of the same shares of the batch losses at the average value of their domain in the same part of the
  run, so that a falling learning rate does not look like falling value.
  """

  rows: np.ndarray
  tokens: np.ndarray
  contribution_EK: np.ndarray
  expected_EK: np.ndarray


class Duplicates(NamedTuple):
  """Texts with more than one id among the num_compared scored documents whose text was found.

  tokens: of all copies; extra_tokens: of all but one copy of each text. contribution_K: nats of all copies.
  """

  num_compared: int
  num_texts: int
  num_documents: int
  tokens: int
  extra_tokens: int
  contribution_K: np.ndarray
  examples: list[list[DocumentKey]]


@dataclasses.dataclass(frozen=True, slots=True)
class SetSummary:
  """Validation set number `index`.

  num_renewals: how often other validation rows were taken. domains: best per token first. top, bottom: documents with
  the largest and the smallest totals. helped, hurt: documents whose interval lies above or below zero, surest first;
  num_judged documents have enough chunks for that. time: sums over the run, of all sets.
  """

  name: str
  index: int
  ledger: Ledger
  val_loss: Series
  num_renewals: int
  domains: list[Value]
  helped: list[Value]
  hurt: list[Value]
  top: list[Value]
  bottom: list[Value]
  num_judged: int
  time: TimeSums
  heat_map: HeatMap | None


class Summary(NamedTuple):
  """A run. messages: warnings for the reader. duplicates: None without texts, or with too many to compare."""

  name: str
  run_dir: Path
  messages: list[str]
  sets: list[SetSummary]
  train_loss: Series
  eval_loss: Series
  reward: Series
  num_steps: int
  num_documents: int
  num_tokens: int
  facts: dict[str, str]
  config: dict[str, str]
  passes: PassTable
  duplicates: Duplicates | None
  samples: list[tuple[int, str]]


def summarize(log: ScoreLog, num_documents: int = 20, source: Source | None = None) -> Summary:
  """Reads the log once, and the run's other files. Raises ConfigError if the log holds no scored document.

  num_documents: length of each list. source: of texts; without it texts and the search for duplicates are left out.
  """
  steps = log.steps
  if not log.num_rows:
    raise ConfigError(f"run_dir={log.run_dir} holds {counted(len(steps), 'step')} but no scored document yet")
  scored = aggregate.scored_steps(log)
  edges = aggregate.step_edges(scored, CURVE_BINS)
  time = TimeSums(log, edges)
  documents = aggregate.GroupSums(log, "document")
  left_out = aggregate.scan(log, [time, documents])
  groups = documents.result()
  metrics, samples, messages = read_metrics(log.run_dir / "metrics.jsonl")
  messages = [*log.messages, *messages, *(left_out or _check_sums(log, time))]
  judged_G = (groups.exposures >= MIN_CHUNKS) & (groups.tokens > 0)
  picked = [_pick(groups, judged_G, k, num_documents) for k in range(len(log.val_sets))]
  keys = [groups.take(np.unique(np.concatenate(list(lists.values())))).document_ids() for lists in picked]
  texts, marked, sets = {}, {}, []
  if source is not None:
    messages += source.open(log.said_of("fingerprint"))
    texts = source.find({key for some in keys for key in some})
    marked, said = token_values.find(log.run_dir, keys, log.checksums("tokens_crc"), log.accept_lost_rows)
    messages += said
  for k, lists in enumerate(picked):
    loss_S, before_S = steps["val_loss"][:, k], steps["prev_val_loss"][:, k]
    known = np.isfinite(loss_S)
    num_renewals = int((known & np.isfinite(before_S) & (loss_S != before_S)).sum())
    shown = {name: _documents(groups.take(index), k, texts, marked) for name, index in lists.items()}
    sets.append(SetSummary(
      name=log.val_sets[k], index=k, ledger=_ledger(log, k), val_loss=Series(steps["step"][known], loss_S[known]),
      num_renewals=num_renewals, domains=_domains(time, k), num_judged=int(judged_G.sum()), time=time,
      heat_map=_heat_map(log, time, k), **shown,
    ))  # fmt: skip
  num_tokens = int(time.sums_DB("tokens").sum())
  counts = {"score rows": log.num_rows, "scored documents": len(groups), "scored tokens": num_tokens}
  known, empty = steps[np.isfinite(steps["loss"])], Series(*np.zeros((2, 0), np.int64))
  return Summary(
    name=log.run_dir.resolve().name, run_dir=log.run_dir, messages=messages, sets=sets,
    train_loss=metrics.get("learning/loss", Series(known["step"], known["loss"])),
    eval_loss=metrics.get("eval/avg_loss", empty), reward=metrics.get("rollout/reward", empty),
    num_steps=len(scored), num_documents=len(groups), num_tokens=num_tokens,
    facts=_facts(log, metrics, counts), config=read_mapping(log.run_dir / "config.yml"), passes=_passes(time),
    duplicates=_duplicates(source and source.dataset, groups), samples=samples,
  )  # fmt: skip


def _pick(groups: Groups, judged_G: np.ndarray, k: int, num_documents: int) -> dict[str, np.ndarray]:
  """{list of SetSummary: indices of its documents}. judged_G: whether a document's interval may rank it."""
  total, half_width = groups.contribution_GK[:, k], groups.half_width_GK[:, k]
  picked = {
    "top": np.argsort(-total, kind="stable")[: min(num_documents, (len(groups) + 1) // 2)],
    "bottom": np.argsort(total, kind="stable")[: min(num_documents, len(groups) // 2)],
  }
  for name, sign in (("helped", 1), ("hurt", -1)):
    sure = np.where(judged_G, (sign * total - half_width) / np.maximum(groups.tokens, 1), 0.0)
    order = np.argsort(-sure, kind="stable")[:num_documents]
    picked[name] = order[sure[order] > 0]
  return picked


def _domains(time: TimeSums, k: int) -> list[Value]:
  value_DB, share_DB = time.sums_DB("contribution", k), time.sums_DB("share")
  share_B = share_DB.sum(0)
  columns = [time.sums_DB(name).sum(1) for name in ("exposures", "tokens", "loss_tokens")]
  columns += [value_DB.sum(1), statistics.block_half_width(statistics.to_blocks(value_DB))]
  columns.append(share_DB @ (value_DB.sum(0) / np.where(share_B > 0, share_B, 1)))
  values = [
    Value(name, int(rows), int(tokens), loss / (tokens or NAN), total, half, total / expected if expected > 0 else NAN)
    for name, (rows, tokens, loss, total, half, expected) in zip(time.domains, np.transpose(columns), strict=True)
    if rows
  ]
  return sorted(values, key=lambda value: -value.per_million if value.tokens else float("inf"))


def _documents(groups: Groups, k: int, texts: dict, marked: dict) -> list[Value]:
  per_set = (values_GK[:, k] for values_GK in (groups.contribution_GK, groups.half_width_GK, groups.in_all_GK))
  columns = (groups.exposures, groups.tokens, groups.loss, *per_set)
  rows, values = zip(*(column.tolist() for column in columns), strict=True), []
  for key, (*numbers, in_all) in zip(groups.document_ids(), rows, strict=True):
    if (text := texts.get(key)) is not None and len(text) > SHOWN_CHARS:
      text = text[:SHOWN_CHARS] + "\n…"
    more = {"text": text, "marked": marked.get((k, key)), "in_all": in_all}
    values.append(Value(key[0], *numbers, path=key[1], offset=key[2], **more))
  return values


def actual_drops(steps: np.ndarray, k: int) -> np.ndarray:
  """f64[S]: the measured drop of each step; NaN where unknown.

  A measurement starts at a step with val_loss and ends at the next step with prev_val_loss: one step later, or several
  where a validation gradient is reused (ghost_val_every). The first of its steps gets the drop, the others get 0.
  """
  drop = np.full(len(steps), np.nan)
  number, opened, closed = steps["step"], steps["val_loss"][:, k], steps["prev_val_loss"][:, k]
  closing = np.flatnonzero(np.isfinite(closed))
  for start in np.flatnonzero(np.isfinite(opened)):
    if (place := np.searchsorted(closing, start, side="right")) == len(closing):
      continue
    end = closing[place]
    if number[end] - number[start] == end - start and not np.isfinite(opened[start + 1 : end]).any():
      drop[start:end] = 0.0
      drop[start] = opened[start] - closed[end]
  return drop


def _ledger(log: ScoreLog, k: int) -> Ledger:
  """Sums both sides over the steps with a known measured drop, or over all steps if there is none."""
  scored, drops = np.isfinite(log.steps["predicted_examples"][:, k]), actual_drops(log.steps, k)
  measured = scored & np.isfinite(drops)
  counted = measured if measured.any() else scored
  steps, curvature_S = log.steps[counted], curvatures(log, k)[counted]
  columns = {name: steps[name][:, k] for name in log.ledger}
  predicted_S = np.nansum([*columns.values(), curvature_S], axis=0)
  parts = (*columns.values(), curvature_S, steps["predicted_curvature"][:, k])
  *totals, curvature, ahead = (float(np.nansum(v)) if np.isfinite(v).any() else None for v in parts)
  actual_S = drops[measured] if measured.any() else None
  sums = dict(zip(columns, totals, strict=True))
  return Ledger(sums, steps["step"], predicted_S, actual_S, curvature, ahead, _set_unit(log, log.val_sets[k]))


def unit_of(objective: str) -> str:
  """What a loss of this objective is a mean of: "token", or "pair" of responses."""
  return "pair" if objective in plugins.OBJECTIVES and plugins.OBJECTIVES[objective].records == "pairs" else "token"


def _set_unit(log: ScoreLog, name: str) -> str:
  """`unit_of` a validation set's objective; of the run's, where no configuration names the set."""
  try:
    cfg = config.load(log.run_dir / "config.yml")
    named = dict(zip(cfg.data.validation_sets, cfg.set_objectives, strict=False))
  except ConfigError:
    named = {}
  return unit_of(named.get(name, log.objective))


def curvatures(log: ScoreLog, k: int) -> np.ndarray:
  """f64[S]: by how much each step's drop differs from its columns because the gradient turned; NaN where unknown.

  By the trapezoid rule: half of what the gradient after the step predicts minus what the one before it does, less the
  curvature that the columns contain already.
  """
  number, after = log.steps["step"], log.steps["prev_predicted"][:, k]
  curvature = np.full(len(number), np.nan)
  before = np.nansum([log.steps[name][:, k] for name in log.ledger], axis=0)
  before[np.isnan(log.steps["predicted_examples"][:, k])] = np.nan
  ahead = np.nan_to_num(log.steps["predicted_curvature"][:, k])
  curvature[:-1] = np.where(np.diff(number) == 1, (after[1:] - before[:-1] - ahead[:-1]) / 2, np.nan)
  return curvature


def _heat_map(log: ScoreLog, time: TimeSums, k: int) -> HeatMap | None:
  rows, domains, total_RD = (), (), np.zeros(())
  for modules in log.modules():
    value_DML = np.moveaxis(modules.contribution_SMLDK[..., k].astype(np.float64).sum(0), 2, 0)
    rows, value_DR = aggregate.layer_rows(modules, value_DML)
    domains, total_RD = modules.domains, total_RD + value_DR.T
  tokens = dict(zip(time.domains, time.sums_DB("tokens").sum(1), strict=True))
  if not (shown := [d for d, name in enumerate(domains) if tokens.get(name)]):
    return None
  scale = np.array([MILLION / tokens[domains[d]] for d in shown])
  return HeatMap(tuple(rows), tuple(domains[d] for d in shown), total_RD[:, shown] * scale)


def _check_sums(log: ScoreLog, time: TimeSums) -> list[str]:
  """Compares the sum of the rows with the steps' own sums; a difference means missing or doubled scores."""
  messages = []
  for k, name in enumerate(log.val_sets):
    logged_S = log.steps["predicted_examples"][:, k]
    said, scale = np.nansum(logged_S), np.nansum(np.abs(logged_S))
    found = time.sums_DB("contribution", k).sum()
    if np.isfinite(logged_S).any() and abs(said - found) > 1e-2 * scale + 1e-9:
      sums = f"add up to {found:.4g} nats, the steps' own sums to {said:.4g}: rows are missing or doubled"
      messages.append(f"the rows for validation set {name} {sums}")
  return messages


def _facts(log: ScoreLog, metrics: dict[str, Series], counts: dict[str, int]) -> dict[str, str]:
  run = {k: re.sub(r"(?<=\d),(?=\d)", THIN, v) for k, v in read_mapping(log.run_dir / "run_facts.json").items()}
  facts = {name: integer(count) for name, count in counts.items()} | run | {"objective": log.objective}
  if directions := log.said_of("direction"):
    facts["direction of the scores"] = ", ".join(directions)
  for name, metric, shown in (
    ("median step time", "perf/step_time_seconds", lambda value: f"{number(value)} s"),
    ("median tokens per second and device", "perf/per_device_tokens_per_sec", lambda value: integer(round(value))),
    ("median TFLOP/s per device", "perf/per_device_tflops_per_sec", number),
  ):
    if metric in metrics:
      facts[name] = shown(np.median(metrics[metric].values))
  errors = np.abs(log.steps["check_rel_err"])
  if np.isfinite(errors).any():
    facts["largest error of the score self-check"] = number(np.nanmax(errors), 2)
  return facts


def _passes(time: TimeSums) -> PassTable:
  rows_EDB, tokens_EDB, share_EDB, _, *value_KEDB = time.sums_CEDB
  share_DB = share_EDB.sum(0)
  expected = [share_EDB * (value_EDB.sum(0) / np.where(share_DB > 0, share_DB, 1)) for value_EDB in value_KEDB]
  total_EK, expected_EK = (np.sum(values, (2, 3)).T for values in (value_KEDB, expected))
  return PassTable(rows_EDB.sum((1, 2)).astype(int), tokens_EDB.sum((1, 2)).astype(int), total_EK, expected_EK)


def _duplicates(dataset, groups: Groups) -> Duplicates | None:
  """Exact duplicates among the scored documents, by a hash of their text; None without texts, or with too many."""
  if dataset is None or max(len(groups), len(documents := dataset.source)) > MAX_HASHED_DOCUMENTS:
    return None
  from maxghost.data.sources.base import read_or_skip

  place = {key: i for i, key in enumerate(groups.document_ids())}
  by_text: dict[bytes, list[DocumentKey]] = {}
  for index in range(len(documents)):
    key = tuple(documents.document_id(index))
    if key in place and (text := read_or_skip(documents.texts, np.array([index]))[0]) is not None:
      by_text.setdefault(hashlib.blake2b(bytes(text).strip(), digest_size=16).digest(), []).append(key)
  copies = [(groups.tokens[[place[key] for key in keys]], keys) for keys in by_text.values() if len(keys) > 1]
  copies.sort(key=lambda copy: -copy[0].sum())
  members = [place[key] for _, keys in copies for key in keys]
  return Duplicates(
    num_compared=sum(map(len, by_text.values())), num_texts=len(copies), num_documents=len(members),
    tokens=int(groups.tokens[members].sum()), extra_tokens=int(sum(copy.sum() - copy.max() for copy, _ in copies)),
    contribution_K=groups.contribution_GK[members].sum(0), examples=[keys for _, keys in copies[:10]],
  )  # fmt: skip
