"""Queries of the score log: totals by domain, document, source, step, layer or module, best and worst first.

K validation sets, G groups, B blocks of steps, S steps.
"""

import dataclasses
from typing import Any

import numpy as np

from maxghost.attribution import aggregate, statistics
from maxghost.attribution.texts import Source
from maxghost.attribution.where import Where, refuse_unknown
from maxghost.config import ConfigError
from maxghost.scorelog.format import TABLE, Frame, for_others
from maxghost.scorelog.reader import ScoreLog

BY = ("domain", "document", "source", "step", "layer", "module")
REPR_GROUPS = 20
SCALES: dict[str, str] = TABLE["scales"]
MEASURES: dict[str, str] = TABLE["measures"]  # column: its unit, {unit} being that of the scale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Query:
  """A question to the score log.

  by: one of BY, or a field of the documents. where: conditions on rows. top, bottom: number of best and worst groups;
  None = all groups. sort: the column to sort by. val_set: name of a validation set; "" = the first. scale: one of
  SCALES. text: adds the text of each document.
  """

  by: str = "domain"
  where: str = ""
  top: int | None = None
  bottom: int | None = None
  sort: str = "contribution"
  val_set: str = ""
  scale: str = "nats"
  text: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Answer(Frame):
  """The result of a query.

  columns: name -> values of the shown groups, keys first. num_groups: found. num_top: number of best groups among the
  shown; the worst follow, worst first. units: of the columns. notes: for the reader. direction: of the scores, or "".
  """

  columns: dict[str, list | np.ndarray]
  num_groups: int
  num_top: int
  units: dict[str, str]
  notes: list[str]
  val_set: str
  direction: str

  def __len__(self) -> int:
    return len(next(iter(self.columns.values())))

  def __repr__(self) -> str:
    columns = [[name, *map(_cell, values[:REPR_GROUPS])] for name, values in self.columns.items() if name != "text"]
    widths = [max(map(len, column)) for column in columns]
    rows = ["  ".join(map(str.rjust, row, widths)) for row in zip(*columns, strict=True)]
    about = f"{len(self)} of {self.num_groups} groups; {self.units['contribution']}, for {self.val_set}"
    return "\n".join([*rows, about])

  def for_others(self) -> dict[str, Any]:
    return {name: for_others(v) if isinstance(v, list) else v for name, v in self.columns.items()}


def _cell(value) -> str:
  if isinstance(value, str):
    return value
  return f"{value:,}" if isinstance(value, int | np.integer) else f"{value:.4g}"


def _check(query: Query, fields: tuple[str, ...]):
  more = ", and what document_fields named before the training"
  refuse_unknown(f"--by {query.by}: unknown", query.by, (*BY, *fields), more)
  refuse_unknown(f"--scale {query.scale}: unknown", query.scale, SCALES)
  for name, count in (("top", query.top), ("bottom", query.bottom)):
    if count is not None and count < 0:
      raise ConfigError(f"--{name} {count}: at least 0")
  if query.text and query.by != "document":
    raise ConfigError(f"--text shows the text of documents, but --by is {query.by}; use --by document")


def ask(log: ScoreLog, query: Query) -> Answer:
  """Answers a query. Raises ConfigError for unknown names and for combinations that have no answer."""
  _check(query, log.fields)
  val_set = query.val_set or log.val_sets[0]
  refuse_unknown(f"--set {val_set}: no validation set of this run", val_set, log.val_sets)
  k, notes = log.val_sets.index(val_set), list(log.messages)
  where = Where(query.where, k, log.fields)
  columns = (_by_layer if query.by in ("layer", "module") else _by_rows)(log, query, where, k, notes)
  tokens, num_groups = np.where(columns["tokens"] > 0, columns["tokens"], np.nan), len(columns["contribution"])
  columns["per_million_tokens"] = columns["contribution"] / tokens * 1e6
  columns["per_million_half_width"] = columns["half_width"] / tokens * 1e6
  if "chunks" in columns:
    columns["per_chunk"] = columns["contribution"] / np.maximum(columns["chunks"], 1)
  if not num_groups or not np.any(columns.get("chunks", columns["tokens"])):
    none = f"no scored document satisfies --where {query.where}{where.hints(log)}"
    notes.append(none if query.where else "no document was scored yet")
  if query.scale == "per_lr" and np.isnan(columns["contribution"]).any():
    raise ConfigError("--scale per_lr: of some steps no learning rate was logged; leave them out: --where step<100")
  order, num_top = _order(columns, query)
  columns = {name: values[order] for name, values in columns.items()}
  columns = {name: values.tolist() if values.dtype == object else values for name, values in columns.items()}
  if query.text:
    source = Source(log.run_dir)
    notes += source.open(log.said_of("fingerprint"))
    keys = list(zip(columns["domain"], columns["path"], np.asarray(columns["offset"]).tolist(), strict=True))
    found = source.find(keys)
    if source.dataset is not None and len(found) < len(keys):
      notes.append(f"{len(keys) - len(found)} of {len(keys)} documents are no longer in the source")
    columns["text"] = [found.get(key) for key in keys]
  units = {name: text.format(unit=SCALES[query.scale]) for name, text in MEASURES.items()}
  return Answer(columns, num_groups, num_top, units, notes, val_set, ", ".join(log.said_of("direction")))


def _by_rows(log: ScoreLog, query: Query, where: Where, k: int, notes: list[str]) -> dict:
  groups = aggregate.GroupSums(log, query.by)
  steps = aggregate.scored_steps(log)
  time = aggregate.TimeSums(log, aggregate.step_edges(steps[where.holds("step", steps)], statistics.NUM_BLOCKS))
  accumulators = [groups, time] if query.by == "domain" else [groups]
  notes += aggregate.scan(log, accumulators, where if where.conditions else None, _scaling(log, query.scale))
  result = groups.result()
  half_width = result.half_width_GK[:, k]
  if query.by == "domain":
    present = np.isin(log.domains, result.keys["domain"].tolist())
    half_width = statistics.block_half_width(time.sums_DB("contribution", k)[present])
  elif query.by == "step":
    half_width = np.full(len(result), np.nan)
  return {
    **result.keys, "chunks": result.exposures, "tokens": result.tokens, "share": result.share,
    "loss": result.loss, "contribution": result.contribution_GK[:, k],
    **({"in_all": result.in_all_GK[:, k]} if log.knows_in_all else {}), "half_width": half_width,
  }  # fmt: skip


def _scaling(log: ScoreLog, scale: str):
  """(steps, factor [S, K]) for aggregate.scan, None for nats."""
  if scale == "nats":
    return None
  steps, size_SK = log.steps["step"], np.zeros((len(log.steps), len(log.val_sets)))
  if scale == "per_lr":
    size_SK += log.steps["learning_rate"][:, None]
  else:
    for _, rows in log.blocks():
      size_NK = np.abs(rows["contribution"])
      counted = np.isfinite(size_NK).all(-1)
      np.add.at(size_SK, np.searchsorted(steps, rows["step"][counted]), size_NK[counted])
  return steps, np.where(size_SK > 0, 1 / np.where(size_SK > 0, size_SK, 1), 0.0 * size_SK)  # NaN stays NaN


def _by_layer(log: ScoreLog, query: Query, where: Where, k: int, _notes: list[str]) -> dict:
  """Answers from the contributions by module, where only steps and domains can be selected."""
  if wrong := sorted({condition.column for condition in where.conditions} - {"step", "domain"}):
    raise ConfigError(f"--where {', '.join(wrong)}: with --by {query.by} only step and domain can be selected")
  if query.scale != "nats":
    raise ConfigError(f"--scale {query.scale}: with --by {query.by} contributions are in nats only")
  names, steps, parts = (), [], []
  for modules in log.modules():
    selected = where.holds("step", modules.steps)
    value_SMLD = modules.contribution_SMLDK[selected][..., k]
    value_SML = value_SMLD[..., where.holds("domain", modules.domains)].astype(np.float64).sum(-1)
    by_module = modules.names, np.nansum(value_SML, 2)
    names, value_SG = by_module if query.by == "module" else aggregate.layer_rows(modules, value_SML)
    steps.append(modules.steps[selected])
    parts.append(value_SG)
  if not parts:
    raise ConfigError(f"--by {query.by}: this run did not log contributions by module")
  rows = aggregate.GroupSums(log, "step")
  aggregate.scan(log, [rows], where if where.conditions else None)
  tokens = int(rows.result().tokens.sum())
  place = np.unique(np.concatenate(steps), return_inverse=True)[1]  # each process logs its part of a step
  sums_GS = np.array([np.bincount(place, values) for values in np.concatenate(parts).T])
  half_width = statistics.block_half_width(statistics.to_blocks(sums_GS))
  columns = {query.by: np.array(names, dtype=np.str_), "tokens": np.full(len(names), tokens)}
  return columns | {"contribution": sums_GS.sum(-1), "half_width": half_width}


def _order(columns: dict, query: Query) -> tuple[np.ndarray, int]:
  """(indices of the groups to show, number of best groups among them)."""
  refuse_unknown(f"--sort {query.sort}: no column of --by {query.by}", query.sort, columns)
  values, measured = columns[query.sort], query.sort in MEASURES
  known = np.isfinite(values) if measured else np.ones(len(values), bool)
  order = np.argsort(-np.where(known, values, -np.inf) if measured else values, kind="stable")
  if query.top is None and query.bottom is None:
    return order, len(order)
  top = min(query.top or 0, len(order))
  worst = order[top:][::-1]  # unknown values are neither best nor worst
  worst = np.concatenate([worst[known[worst]], worst[~known[worst]]])[: query.bottom or 0]
  return np.concatenate([order[:top], worst]), top
