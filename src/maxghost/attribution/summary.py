"""The numbers of a report, computed once for the terminal, the page and the live view.

K validation sets, D domains, B bins of consecutive steps, M modules, L layers.
"""

import dataclasses
from pathlib import Path

import numpy as np

from maxghost.attribution import aggregate, statistics, token_values
from maxghost.attribution.health import Health, PassSums, duplicates
from maxghost.attribution.metrics import Series, read_facts, read_metrics, read_samples
from maxghost.attribution.numbers import integer, number
from maxghost.attribution.texts import SNIPPET_BYTES, Source, Texts
from maxghost.attribution.token_values import Marked
from maxghost.config import ConfigError
from maxghost.scorelog.reader import ScoreLog

CURVE_BINS = 240
MILLION = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
  """The value of a group of rows. contribution and half_width (95 %) in nats; loss in nats per token.

  relative: contribution over the average contribution of the same shares of the same steps; NaN where that is not
  positive. path, offset, text and marked: of a document.
  """

  domain: str
  exposures: int
  tokens: int
  loss: float
  contribution: float
  half_width: float
  relative: float = float("nan")
  path: str = ""
  offset: int = 0
  text: bytes | None = None
  marked: Marked | None = None

  @property
  def per_million(self) -> float:
    """Nats per million tokens."""
    return self.contribution / self.tokens * MILLION if self.tokens else float("nan")

  @property
  def per_million_half_width(self) -> float:
    return self.half_width / self.tokens * MILLION if self.tokens else float("nan")


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
  """The predicted and the measured drop of the validation loss in nats, over the same steps.

  columns: parts of the prediction by the log's names; None if not logged. actual: None if no step's drop is known.
  """

  columns: dict[str, float | None]
  actual: float | None
  num_steps: int
  first_step: int
  last_step: int

  @property
  def predicted(self) -> float:
    return sum(value for value in self.columns.values() if value is not None)

  @property
  def rest(self) -> float | None:
    """Measured minus predicted drop: curvature, and the rounding of two nearly equal losses."""
    return None if self.actual is None else self.actual - self.predicted


@dataclasses.dataclass(frozen=True, slots=True)
class HeatMap:
  """Nats per million tokens of each domain; rows are layers, then modules outside the stack."""

  rows: tuple[str, ...]
  domains: tuple[str, ...]
  value_RD: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class SetSummary:
  """One validation set.

  predicted_drop, actual_drop: nats of each step that has both. domains: best per token first. edges: B + 1 steps, of
  the curves' bins.
  """

  name: str
  ledger: Ledger
  val_loss: Series
  predicted_drop: Series
  actual_drop: Series
  domains: list[Value]
  top: list[Value]
  bottom: list[Value]
  edges: np.ndarray
  curve_domains: tuple[str, ...]
  contribution_DB: np.ndarray
  tokens_DB: np.ndarray
  heat_map: HeatMap | None
  max_check_error: float


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
  """A run. messages: warnings for the reader (damaged files, changed source, ...)."""

  name: str
  run_dir: Path
  messages: list[str]
  sets: list[SetSummary]
  train_loss: Series
  eval_loss: Series
  num_steps: int
  num_rows: int
  num_documents: int
  num_tokens: int
  facts: dict[str, str]
  config: dict[str, str]
  health: Health
  samples: list[tuple[int, str]]


def summarize(log: ScoreLog, num_documents: int = 20, source: Source | None = None) -> Summary:
  """Reads the log once, and the run's other files.

  Args:
    log: the score log.
    num_documents: best and worst documents per validation set.
    source: of the documents' texts; without it the texts and the search for duplicates are left out.

  Raises:
    ConfigError: if the log holds no scored document.
  """
  steps = log.steps
  if not log.num_rows:
    raise ConfigError(f"run_dir={log.run_dir}: the score log holds {len(steps)} steps but no scored document yet")
  time = aggregate.TimeSums(log, aggregate.step_edges(steps["step"], CURVE_BINS))
  documents = aggregate.GroupSums(log, "document")
  passes = PassSums(log, time.edges)
  left_out = aggregate.scan(log, [time, documents, passes])
  groups = documents.result()
  metrics, messages = read_metrics(log.run_dir / "metrics.jsonl")
  messages = [*log.messages, *messages]
  if left_out:
    messages.append(aggregate.LEFT_OUT.format(left_out))
  texts = None
  if source is not None:
    texts, said = source.texts(log.fingerprints)
    messages += said
  sets = [_set_summary(log, k, time, groups, num_documents, texts) for k in range(len(log.val_sets))]
  messages += _check_sums(log, time, left_out)
  if source is not None:
    sets, said = _with_tokens(log, sets)
    messages += said
  empty = Series(np.zeros(0, np.int64), np.zeros(0))
  return Summary(
    name=log.run_dir.resolve().name,
    run_dir=log.run_dir,
    messages=messages,
    sets=sets,
    train_loss=metrics.get("learning/loss", _logged_loss(steps)),
    eval_loss=metrics.get("eval/avg_loss", empty),
    num_steps=int(np.isfinite(steps["predicted_examples"]).any(-1).sum()) or len(steps),
    num_rows=log.num_rows,
    num_documents=len(groups),
    num_tokens=int(time.tokens_DB.sum()),
    facts=_facts(log, metrics),
    config=_config(log.run_dir),
    health=Health(passes.result(time), duplicates(texts, groups)),
    samples=read_samples(log.run_dir / "metrics.jsonl"),
  )


def _set_summary(log, k: int, time, groups, num_documents: int, texts: Texts | None) -> SetSummary:
  steps = log.steps
  known = np.isfinite(steps["val_loss"][:, k])
  order = np.argsort(-groups.contribution_GK[:, k], kind="stable")
  num_shown = min(num_documents, (len(groups) + 1) // 2)
  top = _documents(groups.take(order[:num_shown]), k, texts)
  bottom = _documents(groups.take(order[::-1][: min(num_shown, len(groups) - num_shown)]), k, texts)
  errors = np.abs(steps["check_rel_err"][:, k])
  predicted, actual = _drops(log, k)
  return SetSummary(
    name=log.val_sets[k],
    ledger=_ledger(log, k),
    val_loss=Series(steps["step"][known], steps["val_loss"][known, k]),
    predicted_drop=predicted,
    actual_drop=actual,
    domains=_domains(time, k),
    top=top,
    bottom=bottom,
    edges=time.edges,
    curve_domains=time.domains,
    contribution_DB=time.contribution_DBK[:, :, k],
    tokens_DB=time.tokens_DB,
    heat_map=_heat_map(log, time, k),
    max_check_error=float(np.nanmax(errors)) if np.isfinite(errors).any() else float("nan"),
  )


def _with_tokens(log: ScoreLog, sets: list[SetSummary]) -> tuple[list[SetSummary], list[str]]:
  """Adds the values of tokens to the shown documents, if the run logged them."""
  wanted = [[(v.domain, v.path, v.offset) for v in (*part.top, *part.bottom)] for part in sets]
  marked, messages = token_values.find(log.run_dir, wanted, log.checksums("tokens_crc"), log.accept_lost_rows)

  def with_marks(values: list[Value], k: int) -> list[Value]:
    return [dataclasses.replace(v, marked=marked.get((k, (v.domain, v.path, v.offset)))) for v in values]

  return [
    dataclasses.replace(part, top=with_marks(part.top, k), bottom=with_marks(part.bottom, k))
    for k, part in enumerate(sets)
  ], messages


def _domains(time, k: int) -> list[Value]:
  total = time.contribution_DBK[:, :, k].sum(1)
  all_share_B = time.share_DB.sum(0)
  expected = time.share_DB @ (time.contribution_DBK[:, :, k].sum(0) / np.where(all_share_B > 0, all_share_B, 1))
  half_width = statistics.block_half_width(statistics.to_blocks(time.contribution_DBK[:, :, k]))
  values = []
  for d, name in enumerate(time.domains):
    tokens = float(time.tokens_DB[d].sum())
    loss = float(time.loss_tokens_DB[d].sum() / tokens) if tokens else float("nan")
    exposures = int(time.exposures_DB[d].sum())
    if exposures:
      relative = float(total[d] / expected[d]) if expected[d] > 0 else float("nan")
      values.append(Value(name, exposures, int(tokens), loss, float(total[d]), float(half_width[d]), relative))
  return sorted(values, key=lambda value: -value.per_million if value.tokens else float("inf"))


def _documents(groups, k: int, texts: Texts | None) -> list[Value]:
  keys = groups.document_ids()
  found = texts.find(keys) if texts is not None else {}
  total, square = groups.contribution_GK[:, k], groups.square_GK[:, k]
  half_width = statistics.exposure_half_width(groups.exposures, total, square)
  loss = groups.loss_tokens / np.maximum(groups.tokens, 1)
  numbers = zip(*(a.tolist() for a in (groups.exposures, groups.tokens, loss, total, half_width)), strict=True)
  return [
    Value(key[0], *values, path=key[1], offset=key[2], text=found[key][:SNIPPET_BYTES] if key in found else None)
    for key, values in zip(keys, numbers, strict=True)
  ]


def actual_drops(steps: np.ndarray, k: int) -> np.ndarray:
  """f64[S]: the measured drop of each step; NaN where unknown.

  A measurement starts at a step with val_loss and ends at the next step with prev_val_loss: one step later, or several
  where a validation gradient is reused (ghost_val_every). The first of its steps gets the drop, the others get 0.
  """
  drop = np.full(len(steps), np.nan)
  number, opened, closed = steps["step"], steps["val_loss"][:, k], steps["prev_val_loss"][:, k]
  closing = np.flatnonzero(np.isfinite(closed))
  for start in np.flatnonzero(np.isfinite(opened)):
    place = np.searchsorted(closing, start, side="right")
    if place == len(closing):
      continue
    end = closing[place]
    if number[end] - number[start] == end - start and not np.isfinite(opened[start + 1 : end]).any():
      drop[start:end] = 0.0
      drop[start] = opened[start] - closed[end]
  return drop


def _drops(log: ScoreLog, k: int) -> tuple[Series, Series]:
  """Predicted and measured drop of the steps that have both."""
  steps, actual = log.steps, actual_drops(log.steps, k)
  predicted = np.nansum([steps[name][:, k] for name in log.ledger], axis=0)
  both = np.isfinite(actual) & np.isfinite(steps["predicted_examples"][:, k])
  return Series(steps["step"][both], predicted[both]), Series(steps["step"][both], actual[both])


def _ledger(log: ScoreLog, k: int) -> Ledger:
  """Sums both sides over the steps with a known measured drop, or over all steps if there is none."""
  steps = log.steps
  drops = actual_drops(steps, k)
  counted = np.isfinite(drops) & np.isfinite(steps["predicted_examples"][:, k])
  actual = float(drops[counted].sum()) if counted.any() else None
  if actual is None:
    counted = np.isfinite(steps["predicted_examples"][:, k])
  columns: dict[str, float | None] = {}
  for name in log.ledger:
    values = steps[name][counted, k]
    columns[name] = float(np.nansum(values)) if np.isfinite(values).any() else None
  numbers = steps["step"][counted]
  first, last = (int(numbers[0]), int(numbers[-1])) if len(numbers) else (0, 0)
  return Ledger(columns, actual, int(counted.sum()), first, last)


def _heat_map(log: ScoreLog, time, k: int) -> HeatMap | None:
  rows, domains, total_RD = (), (), None
  for modules in log.modules():
    value_DML = np.moveaxis(modules.contribution_SMLDK[..., k].astype(np.float64).sum(0), 2, 0)
    rows, value_DR = aggregate.layer_rows(modules, value_DML)
    domains = modules.domains
    total_RD = value_DR.T if total_RD is None else total_RD + value_DR.T
  if total_RD is None:
    return None
  tokens = {name: time.tokens_DB[d].sum() for d, name in enumerate(time.domains)}
  shown = [d for d, name in enumerate(domains) if tokens.get(name)]
  scale = np.array([MILLION / tokens[domains[d]] for d in shown])
  return HeatMap(tuple(rows), tuple(domains[d] for d in shown), total_RD[:, shown] * scale)


def _logged_loss(steps: np.ndarray) -> Series:
  known = np.isfinite(steps["loss"])
  return Series(steps["step"][known], steps["loss"][known])


def _check_sums(log: ScoreLog, time, left_out: int) -> list[str]:
  """Compares the sum of the rows with the steps' own sums; a difference means missing or doubled scores."""
  if left_out:
    return []
  messages = []
  for k, name in enumerate(log.val_sets):
    logged_S = log.steps["predicted_examples"][:, k]
    said, scale = np.nansum(logged_S), np.nansum(np.abs(logged_S))
    found = time.contribution_DBK[:, :, k].sum()
    if np.isfinite(logged_S).any() and abs(said - found) > 1e-2 * scale + 1e-9:
      messages.append(
        f"the rows for validation set {name} add up to {found:.4g} nats, the steps' own sums to {said:.4g}: "
        "rows are missing or doubled"
      )
  return messages


def _facts(log: ScoreLog, metrics: dict[str, Series]) -> dict[str, str]:
  facts = read_facts(log.run_dir) | {"objective": log.objective}
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


def _config(run_dir: Path) -> dict[str, str]:
  """The keys of config.yml as text, uninterpreted, so that runs of other versions can be reported too."""
  path = run_dir / "config.yml"
  if not path.is_file():
    return {}
  import yaml

  try:
    loaded = yaml.safe_load(path.read_text("utf-8"))
  except (yaml.YAMLError, OSError, UnicodeDecodeError):
    return {}
  return {str(k): "" if v is None else str(v) for k, v in loaded.items()} if isinstance(loaded, dict) else {}
