"""The report as one self-contained HTML page: no network, no fonts to load, drawings as inline SVG.

The templates beside this file say what the page shows; this module computes what they need beyond the Summary.
"""

import itertools
from pathlib import Path

import jinja2
import numpy as np

from maxghost.attribution import numbers, report_text, statistics
from maxghost.attribution.html.charts import NUM_COLORS, Line, bars, line_chart
from maxghost.attribution.metrics import thin
from maxghost.attribution.numbers import number
from maxghost.attribution.summary import CURVE_BINS, SetSummary, Summary, unit_of
from maxghost.attribution.texts import snippet
from maxghost.attribution.token_values import Marked
from maxghost.config.values import printable

SHOWN_DOMAINS = 40
FIRST_CURVE, SECOND_CURVE = 8, 9  # colours of curves that are no domain; no domain has them
MARK_LEVELS = 4  # shades of a token's value; shared.css has one rule for each


def render(summary: Summary, live_version: str = "") -> str:
  """The whole page as HTML. live_version: of the live view; its page reloads when the version changes."""
  words = {"title": f"{summary.name} · maxghost report", "panels": [_panel(summary, part) for part in summary.sets]}
  words |= {"in_all": report_text.IN_ALL, "of_average": report_text.OF_AVERAGE}
  return _templates.get_template("report.html").render(**words, live_version=live_version, summary=summary)


def notice(title: str, text: str, live_version: str) -> str:
  """A page that says why there is no report yet."""
  return _templates.get_template("page.html").render(title=title, text=text, live_version=live_version)


def _panel(summary: Summary, part: SetSummary) -> dict:
  shown, lines = part.domains[:SHOWN_DOMAINS], report_text.ledger_lines(part.ledger)
  order = sorted(part.domains, key=lambda value: -abs(value.contribution))
  colors = dict.fromkeys(part.time.domains, NUM_COLORS - 1)  # of all that are not among the first
  colors |= {value.domain: i for i, value in enumerate(order[: NUM_COLORS - 1])}
  return {
    "part": part,
    "colors": colors,
    "domains": bars(shown, [v.per_million for v in shown], [v.per_million_half_width for v in shown]),
    "charts": _charts(summary, part, colors),
    "heat_scale": float(np.nanmax(np.abs(part.heat_map.value_RD), initial=0)) or 1.0 if part.heat_map else 1.0,
    "ledger": bars(lines, [line.value for line in lines], starts=[line.start for line in lines]),
  }


def _charts(summary: Summary, part: SetSummary, colors: dict[str, int]) -> list[dict]:
  train, validation, reward = (thin(s, CURVE_BINS) for s in (summary.train_loss, part.val_loss, summary.reward))
  losses, ledger, drops = [Line("validation", validation.steps, validation.values, FIRST_CURVE)], part.ledger, []
  if not len(summary.reward) and unit_of(summary.facts["objective"]) == ledger.unit:  # else it is another kind of loss
    losses.insert(0, Line("training", train.steps, train.values, NUM_COLORS - 1, faint=True))
  if len(summary.eval_loss) and part.index == 0:
    losses.append(Line("evaluation", summary.eval_loss.steps, summary.eval_loss.values, SECOND_CURVE, dots=True))
  if ledger.actual_S is not None:
    picked = statistics.block_edges(len(ledger.steps) - 1, CURVE_BINS)
    curves = (("predicted", ledger.predicted_S, FIRST_CURVE), ("measured", ledger.actual_S, SECOND_CURVE))
    drops = [Line(name, ledger.steps[picked], np.cumsum(drop)[picked], color) for name, drop, color in curves]
  cumulative, value = _domain_lines(part, colors)
  steps = (int(part.time.edges[0]), int(part.time.edges[-1]))  # to the measurement behind the last one
  rewards = [Line("reward", reward.steps, reward.values, FIRST_CURVE)]
  return [
    *([line_chart("Mean reward of the answers", rewards, steps, "reward", zero=True)] if len(reward) else []),
    line_chart("Loss", losses, steps, f"nats per {ledger.unit}"),
    line_chart("Cumulative contribution of each domain", cumulative, steps, "nats", zero=True),
    line_chart("Value of a domain over time", value, steps, "nats per million tokens", zero=True),
    line_chart("Cumulative predicted and measured drop", drops, steps, f"nats per {ledger.unit}", zero=True),
  ]


def _domain_lines(part: SetSummary, colors: dict[str, int]) -> tuple[list[Line], list[Line]]:
  """(cumulative contribution, value per million tokens over blocks); domains without a colour share one line."""
  time = part.time
  contribution_DB, tokens_DB = time.sums_DB("contribution", part.index), time.sums_DB("tokens")
  color_D = np.array([colors[name] for name in time.domains])
  ends = time.edges[1:] - 1
  block_ends = ends[statistics.block_edges(len(ends))[1:] - 1]
  cumulative, value = [], []
  for color in np.unique(color_D).tolist():
    members = np.flatnonzero(color_D == color)
    name = time.domains[members[0]] if len(members) == 1 else f"{len(members)} others"
    contribution, tokens = contribution_DB[members].sum(0), tokens_DB[members].sum(0)
    cumulative.append(Line(name, np.append(time.edges[0], ends), np.append(0.0, np.cumsum(contribution)), color))
    block, weight = statistics.to_blocks(contribution), statistics.to_blocks(tokens)
    value.append(Line(name, block_ends, block / np.where(weight > 0, weight, np.nan) * 1e6, color))
  return cumulative, value


def _spans(marked: Marked) -> list[tuple[str, str, str]]:
  """(text, class, worth) of stretches of one colour; pieces worth little have no class."""
  largest = float(np.abs(marked.values).max()) or 1.0
  levels = (np.sign(marked.values) * np.ceil(np.abs(marked.values) / largest * MARK_LEVELS - 0.5)).astype(int)
  spans = []
  pieces = zip(levels.tolist(), marked.pieces, marked.values.tolist(), strict=True)
  for level, stretch in itertools.groupby(pieces, key=lambda piece: piece[0]):
    _, texts, values = zip(*stretch, strict=True)
    kind = f"{'up' if level > 0 else 'down'}{abs(level)}" if level else ""
    spans.append(("".join(texts), kind, f"{number(sum(values), 2, plus=True)} nats"))
  return spans


_templates = jinja2.Environment(
  loader=jinja2.FileSystemLoader([Path(__file__).parent, Path(__file__).parents[2] / "serving/page"]), autoescape=True,
  finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
  undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_templates.filters |= vars(numbers) | vars(report_text)  # their functions
_templates.filters |= {"snippet": lambda text: snippet(text, 140) or "(no visible characters)", "spans": _spans}
