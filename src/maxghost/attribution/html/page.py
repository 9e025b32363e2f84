"""The report page: headline, tiles, one panel per validation set, facts of the run."""

import importlib.resources

import numpy as np

from maxghost.attribution import statistics
from maxghost.attribution.html import tables
from maxghost.attribution.html.charts import NUM_COLORS, Line, line_chart
from maxghost.attribution.html.markup import Markup, join, tag
from maxghost.attribution.metrics import Series, thin
from maxghost.attribution.numbers import compact, integer, number, percent
from maxghost.attribution.report_text import headline, lead, ledger_sentence, plus_minus
from maxghost.attribution.summary import SetSummary, Summary

CURVE_POINTS = 240
SHOWN_SAMPLES = 8
DOMAIN_NOTE = (
  "Predicted drop of the {} validation loss due to the examples of each domain. Lines on the bars are 95 % intervals "
  "over blocks of steps. Of average: relative to the same share of the same steps, because early steps move the loss "
  "most."
)


def render(summary: Summary, live_version: str = "") -> str:
  """The whole page as HTML. live_version: of the live view; its page reloads when the version changes."""
  first = summary.sets[0]
  panels = [_panel(summary, k) for k in range(len(summary.sets))]
  title = [tag("p", f"maxghost report · {summary.name}", class_="eyebrow"), tag("h1", headline(first))]
  opening = [tag("p", lead(first), class_="lead"), _messages(summary.messages), _tiles(summary)]
  note = (
    f"Scores from {summary.run_dir}; query them with: maxghost scores {summary.run_dir} --by domain. A contribution is "
    "a first-order prediction for this run and this validation set, not a statement about what another run would have "
    "done without the document."
  )
  body = [
    tag("header", *title, *opening),
    tag("main", _tabs(summary), *panels, _samples(summary), _facts(summary)),
    tag("footer", tag("p", note)),
    _script(),
  ]
  return _document(f"{summary.name} · maxghost report", body, live_version)


def notice(title: str, text: str, live_version: str) -> str:
  """A page that says why there is no report yet."""
  return _document(title, [tag("header", tag("h1", title), tag("p", text, class_="lead")), _script()], live_version)


def _document(title: str, body: list, live_version: str) -> str:
  head = [
    tag("meta", charset="utf-8"),
    tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
    tag("title", title),
    tag("style", Markup(_asset("style.css"))),
  ]
  page = tag("html", tag("head", *head), tag("body", *body), lang="en", data_live=live_version or None)
  return f"<!doctype html>\n{page}\n"


def _script() -> Markup:
  return tag("script", Markup(_asset("page.js")))


def _asset(name: str) -> str:
  return importlib.resources.files("maxghost.attribution.html").joinpath(name).read_text("utf-8")


def _messages(messages: list[str]) -> Markup | None:
  if not messages:
    return None
  items = tag("ul", *[tag("li", text) for text in messages])
  return tag("div", tag("b", "Please note"), items, class_="messages", role="note")


def _tiles(summary: Summary) -> Markup:
  first = summary.sets[0]
  ledger = first.ledger
  tiles = []  # (label, value, small print)
  if len(first.val_loss):
    change = f"{number(first.val_loss.values[0])} → {number(first.val_loss.values[-1])}"
    tiles.append((f"Validation loss ({first.name})", change, "nats per token, first and last scored step"))
  if ledger.actual:
    of = f"{number(ledger.predicted)} of {number(ledger.actual)} nats, {integer(ledger.num_steps)} steps"
    tiles.append(("Predicted of measured drop", percent(ledger.predicted / ledger.actual), of))
  if first.domains:
    best = first.domains[0]
    worth = number(best.per_million, plus=True) + plus_minus(best.per_million_half_width)
    tiles.append(("Best domain per token", best.domain, f"{worth} nats per million tokens"))
  documents = f"{compact(summary.num_documents)} documents in {integer(summary.num_steps)} steps"
  tiles.append(("Scored", f"{compact(summary.num_tokens)} tokens", documents))
  parts = [
    tag("div", tag("dt", label), tag("dd", value, tag("small", small)), class_="tile") for label, value, small in tiles
  ]
  return tag("dl", *parts, class_="tiles")


def _tabs(summary: Summary) -> Markup | None:
  if len(summary.sets) < 2:
    return None
  buttons = [
    tag("button", s.name, type="button", role="tab", id=f"tab-{k}", aria_controls=f"set-{k}")
    for k, s in enumerate(summary.sets)
  ]
  return tag("div", *buttons, role="tablist", aria_label="Validation set")


def _panel(summary: Summary, k: int) -> Markup:
  part = summary.sets[k]
  colors = tables.palette(part)
  several = len(summary.sets) > 1
  opening = [tag("p", headline(part), " ", lead(part), class_="note", style="margin-top:16px")] if several and k else []
  sections = [
    *opening,
    tag("h2", "What each domain was worth"),
    tag("p", DOMAIN_NOTE.format(part.name), class_="note"),
    tables.domain_table(part.domains, colors),
    _curves(summary, part, colors),
    tag("h2", "Where the drop came from"),
    tag("p", ledger_sentence(part.ledger), class_="note"),
    tables.ledger_table(part.ledger),
    *_documents(part, colors),
    *_heat(part),
    *_health(summary, k),
  ]
  return tag(
    "section",
    *sections,
    id=f"set-{k}",
    class_="panel",
    role="tabpanel" if several else None,
    aria_labelledby=f"tab-{k}" if several else None,
  )


def _curves(summary: Summary, part: SetSummary, colors: dict[str, int]) -> Markup:
  train, validation = thin(summary.train_loss, CURVE_POINTS), thin(part.val_loss, CURVE_POINTS)
  losses = [
    Line("training", train.steps, train.values, NUM_COLORS - 1, faint=True),
    Line("validation", validation.steps, validation.values, 0),
  ]
  if len(summary.eval_loss) and part is summary.sets[0]:
    losses.append(Line("evaluation", summary.eval_loss.steps, summary.eval_loss.values, 1, dots=True))
  cumulative, value = _domain_lines(part, colors)
  charts = (
    ("Loss", "Loss", losses, "nats per token"),
    ("Cumulative contribution", "Cumulative contribution per domain", cumulative, "nats"),
    ("Value of a domain over time", "Value of a domain over time", value, "nats per million tokens"),
    ("Cumulative predicted and measured drop", "Predicted and measured drop", _drop_lines(part), "nats per token"),
  )
  drawn = [
    tag("div", tag("h3", head), line_chart(lines, title=title, x_label="step", y_label=unit, zero=lines is not losses))
    for head, title, lines, unit in charts
  ]
  return tag("div", *drawn, class_="two")


def _drop_lines(part: SetSummary) -> list[Line]:
  lines = []
  for name, series, color in (("predicted", part.predicted_drop, 0), ("measured", part.actual_drop, 1)):
    total = Series(series.steps, np.cumsum(series.values))
    if len(total):
      picked = np.unique(np.linspace(0, len(total) - 1, min(CURVE_POINTS, len(total))).round().astype(int))
      lines.append(Line(name, total.steps[picked], total.values[picked], color))
  return lines


def _domain_lines(part: SetSummary, colors: dict[str, int]) -> tuple[list[Line], list[Line]]:
  """(cumulative contribution, value per million tokens over blocks); domains without a colour share one line."""
  groups = [
    (name, [d for d, other in enumerate(part.curve_domains) if other == name], color)
    for name, color in sorted(colors.items(), key=lambda item: item[1])
  ]
  rest = [d for d, name in enumerate(part.curve_domains) if name not in colors]
  if rest:
    groups.append((f"{len(rest)} others", rest, NUM_COLORS - 1))
  ends = part.edges[1:] - 1
  starts = np.linspace(0, len(ends), min(statistics.NUM_BLOCKS, len(ends)) + 1).round().astype(int)
  cumulative, value = [], []
  for name, members, color in groups:
    contribution, tokens = part.contribution_DB[members].sum(0), part.tokens_DB[members].sum(0)
    cumulative.append(Line(name, np.append(part.edges[0], ends), np.append(0.0, np.cumsum(contribution)), color))
    block, weight = statistics.to_blocks(contribution), statistics.to_blocks(tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
      value.append(Line(name, ends[starts[1:] - 1], np.where(weight > 0, block / weight * 1e6, np.nan), color))
  return cumulative, value


def _documents(part: SetSummary, colors: dict[str, int]) -> list[Markup]:
  parts = [
    tag("h2", "Documents that helped most"),
    tag("p", "By total contribution; click a text to open it.", class_="note"),
    *tables.document_tables(part.top, colors),
  ]
  if part.bottom:
    parts += [tag("h2", "Documents that helped least or hurt"), *tables.document_tables(part.bottom, colors)]
  return parts


def _heat(part: SetSummary) -> list[Markup]:
  if part.heat_map is None or not len(part.heat_map.domains):
    return []
  words = "Nats per million tokens of the domain; blue lowers the validation loss, orange raises it."
  heat = tables.heat_table(part.heat_map)
  return [tag("h2", "Which layers learned from which domain"), tag("p", words, class_="note"), heat]


def _health(summary: Summary, k: int) -> list[Markup]:
  table = summary.health.passes
  parts = [tag("h2", "Data health")]
  if table.has_repeats:
    words = "Passes over the data: 100\u202f% means worth as much as the domain's average at that point of the run."
    parts += [tag("p", words, class_="note"), tables.pass_table(summary, k)]
  else:
    parts.append(tag("p", "No document was trained on twice: the run did not go beyond its first pass over the data."))
  copies = summary.health.duplicates
  if copies is None:
    words = "There was no search for duplicates: the texts are not available, or there are too many."
    parts.append(tag("p", words, class_="note"))
  elif not copies.num_texts:
    parts.append(tag("p", "No two scored documents have the same text."))
  else:
    worth = number(float(copies.contribution_K[k]), plus=True)
    words = (
      f"{integer(copies.num_texts)} texts occur under {integer(copies.num_documents)} ids. "
      f"{compact(copies.extra_tokens)} of their {compact(copies.tokens)} tokens were further copies; "
      f"all copies together contributed {worth} nats."
    )
    largest = tables.duplicate_list(copies.examples)
    parts += [tag("p", words), tag("details", tag("summary", "Show the largest"), largest, class_="more")]
  return parts


def _samples(summary: Summary) -> Markup | None:
  if not summary.samples:
    return None
  note = tag("p", "The same prompt and random draws each time; the newest text is last.", class_="note")
  last = summary.samples[-SHOWN_SAMPLES:]
  items = [tag("li", tag("b", f"step {integer(step)}"), " ", text) for step, text in last]
  return join([tag("h2", "What the model wrote"), note, tag("ul", *items)])


def _facts(summary: Summary) -> Markup:
  facts = {
    "score rows": integer(summary.num_rows),
    "scored documents": integer(summary.num_documents),
    "scored tokens": integer(summary.num_tokens),
    **summary.facts,
  }
  parts = [tag("h2", "The run"), tables.facts(facts)]
  if summary.config:
    keys = tables.facts(summary.config)
    parts.append(tag("details", tag("summary", "Show the whole configuration"), keys, class_="more"))
  return join(parts)
