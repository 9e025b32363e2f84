"""The tables of the report: domains, ledger, documents, heat map, data health, facts."""

import numpy as np

from maxghost.attribution.html.charts import NUM_COLORS, bar, bar_range
from maxghost.attribution.html.markup import Markup, tag
from maxghost.attribution.numbers import compact, integer, number, percent
from maxghost.attribution.report_text import ledger_label, plus_minus, shown_columns
from maxghost.attribution.summary import HeatMap, Ledger, SetSummary, Value
from maxghost.attribution.texts import SNIPPET_BYTES, snippet
from maxghost.attribution.token_values import Marked

SHOWN_DOMAINS = 40
OPEN_DOCUMENTS = 10
MARK_LEVELS = 4  # shades of a token's value; style.css has one rule for each


def _table(head: list, rows: list, class_: str | None = None) -> Markup:
  table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_=class_)
  return tag("div", table, class_="scroll")


def _head(*names: str) -> list[Markup]:
  """Column heads; a leading > marks a column of numbers."""
  return [tag("th", n.removeprefix(">"), scope="col", class_="num" if n.startswith(">") else None) for n in names]


def _num(text, small: str = "") -> Markup:
  return tag("td", text, tag("small", small) if small else None, class_="num")


def _row(label, *cells, class_: str | None = None) -> Markup:
  return tag("tr", tag("th", label, scope="row"), *cells, class_=class_)


def _swatch(domain: str, colors: dict[str, int]) -> Markup:
  return tag("span", class_=f"swatch c{colors.get(domain, NUM_COLORS - 1)}", aria_hidden="true")


def _details(text: bytes, *content) -> Markup:
  """A snippet of the text that opens the content on a click."""
  return tag("details", tag("summary", snippet(text, 140) or "(no visible characters)"), *content)


def domain_table(values: list[Value], colors: dict[str, int]) -> Markup:
  """One row per domain, best per token first, with bars and 95 % intervals."""
  shown = values[:SHOWN_DOMAINS]
  low, high = bar_range([v.per_million for v in shown], [v.per_million_half_width for v in shown])
  all_tokens = sum(v.tokens for v in values)
  rows = []
  for value in shown:
    color = f"c{colors.get(value.domain, NUM_COLORS - 1)}"
    rows.append(
      _row(
        [_swatch(value.domain, colors), value.domain],
        tag("td", bar(value.per_million, value.per_million_half_width, low, high, color=color), class_="bar-td"),
        _num(number(value.per_million, plus=True), plus_minus(value.per_million_half_width)),
        _num(number(value.contribution, plus=True), plus_minus(value.half_width)),
        _num(compact(value.tokens), f" {percent(value.tokens / all_tokens)}" if all_tokens else ""),
        _num(percent(value.relative)),
        _num(number(value.loss)),
      )
    )
  if len(values) > len(shown):
    rest, empty = values[SHOWN_DOMAINS:], tag("td")
    sums = _num(number(sum(v.contribution for v in rest), plus=True)), _num(compact(sum(v.tokens for v in rest)))
    rows.append(_row(f"{len(rest)} more", empty, empty, *sums, empty, empty))
  head = _head("Domain", "", ">Nats per million tokens", ">Total nats", ">Tokens", ">Of average", ">Training loss")
  return _table(head, rows)


def ledger_table(ledger: Ledger) -> Markup:
  """A waterfall of the columns up to the predicted drop, then the measured drop and the rest."""
  columns = shown_columns(ledger)
  starts = np.cumsum([0.0, *(value for _, value in columns)])
  extremes = [*starts, ledger.predicted, ledger.actual or 0.0]
  low, high = min(0.0, *extremes), max(0.0, *extremes)
  total = ledger.predicted
  lines = [(*ledger_label(name), value, start, "") for (name, value), start in zip(columns, starts, strict=False)]
  lines.append(("Predicted drop", "the sum of the lines above", total, 0.0, "neutral"))
  if ledger.actual is not None and ledger.rest is not None:
    measured = "validation loss before minus after each step, on the same rows"
    lines.append(("Measured drop", measured, ledger.actual, 0.0, "neutral"))
    lines.append(("Rest", "curvature: what a first-order prediction cannot see", ledger.rest, total, ""))
  rows = [
    _row(
      label,
      tag("td", bar(value, float("nan"), low, high, start=start, color=color), class_="bar-td"),
      _num(number(value, plus=True)),
      _num(percent(value / total) if total else ""),
      tag("td", tag("small", words)),
      class_="sum" if label == "Predicted drop" else None,
    )
    for label, words, value, start, color in lines
  ]
  return _table(_head("", "", ">Nats", ">Of predicted", ""), rows)


def document_tables(values: list[Value], colors: dict[str, int]) -> list[Markup]:
  """Documents with their value; a click opens a text, and the documents after the first ten."""
  tables = [_document_table(values[:OPEN_DOCUMENTS], colors, 1)]
  if more := values[OPEN_DOCUMENTS:]:
    table = _document_table(more, colors, OPEN_DOCUMENTS + 1)
    tables.append(tag("details", tag("summary", f"Show {len(more)} more"), table, class_="more"))
  return tables


def _document_table(values: list[Value], colors: dict[str, int], first_rank: int) -> Markup:
  rows = []
  for rank, value in enumerate(values, first_rank):
    place = f"{value.domain} · {value.path}{f' @ {integer(value.offset)}' if value.offset else ''}"
    if value.marked is not None:
      text = _marked_text(value, value.marked)
    elif value.text is None:
      text = tag("span", "text not available", class_="muted")
    else:
      cut = "\n…" if len(value.text) == SNIPPET_BYTES else ""
      text = _details(value.text, tag("pre", value.text.decode("utf-8", "replace") + cut))
    rows.append(
      tag(
        "tr",
        tag("td", rank, class_="num muted"),
        tag("td", tag("span", _swatch(value.domain, colors), place, class_="where"), text, class_="doc"),
        _num(number(value.contribution, plus=True), plus_minus(value.half_width)),
        _num(number(value.per_million, plus=True)),
        _num(compact(value.tokens)),
        _num(integer(value.exposures)),
        _num(number(value.loss)),
      )
    )
  head = _head(">", "Document", ">Total nats", ">Per million tokens", ">Tokens", ">Chunks", ">Training loss")
  return _table(head, rows)


def _marked_text(value: Value, marked: Marked) -> Markup:
  """The text of one exposure; the colour of each piece shows its contribution."""
  largest = float(np.abs(marked.values).max()) or 1.0
  levels = np.sign(marked.values) * np.ceil(np.abs(marked.values) / largest * MARK_LEVELS - 0.5)
  spans, start = [], 0
  for end in range(1, len(levels) + 1):
    if end == len(levels) or levels[end] != levels[start]:
      level, text = int(levels[start]), "".join(marked.pieces[start:end])
      worth = f"{number(float(marked.values[start:end].sum()), 2, plus=True)} nats"
      name = f"{'up' if level > 0 else 'down'}{abs(level)}" if level else None
      spans.append(tag("mark", text, class_=name, title=worth) if level else text)
      start = end
  total = number(float(marked.values.sum()), plus=True)
  words = f"step {integer(marked.step)}: {total} nats; blue lowers the validation loss, orange raises it"
  first = value.text if value.text is not None else "".join(marked.pieces).encode()
  return _details(first, tag("p", words, class_="note"), tag("pre", *spans))


def heat_table(heat: HeatMap) -> Markup:
  """Numbers in cells coloured by sign and size."""
  largest = float(np.nanmax(np.abs(heat.value_RD))) or 1.0
  rows = []
  for name, value_D in zip(heat.rows, heat.value_RD, strict=True):
    cells = []
    for value in value_D:
      share = round(62 * (abs(float(value)) / largest) ** 0.8)
      color = "helps" if value >= 0 else "hurts"
      style = f"background:color-mix(in srgb,var(--{color}) {share}%,var(--bg))" if np.isfinite(value) else None
      cells.append(tag("td", number(float(value), 2, plus=True), style=style))
    rows.append(_row(name, *cells))
  return _table(_head("", *(f">{name}" for name in heat.domains)), rows, class_="heat")


def pass_table(summary, k: int) -> Markup:
  """The value of each pass over the data, and its ratio to the domain's average at that time."""
  table = summary.health.passes
  rows = []
  for e in np.flatnonzero(table.rows):
    value, expected, tokens = table.contribution_EK[e, k], table.expected_EK[e, k], int(table.tokens[e])
    rows.append(
      _row(
        f"{e + 1}" + (" and later" if e + 1 == len(table.rows) else ""),
        _num(integer(int(table.rows[e]))),
        _num(compact(tokens)),
        _num(number(value / tokens * 1e6 if tokens else None, plus=True)),
        _num(percent(value / expected) if expected > 0 else "–"),
      )
    )
  head = _head("Pass", ">Rows", ">Tokens", ">Nats per million tokens", ">Of the domain's average at that time")
  return _table(head, rows)


def duplicate_list(examples: list) -> Markup:
  items = []
  for keys in examples:
    shown = " = ".join(f"{domain} · {path}{f' @ {offset}' if offset else ''}" for domain, path, offset in keys[:4])
    items.append(tag("li", shown, f" and {len(keys) - 4} more" if len(keys) > 4 else None))
  return tag("ul", *items)


def facts(pairs: dict[str, str]) -> Markup:
  return tag("dl", *[tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items()], class_="facts")


def palette(summary: SetSummary) -> dict[str, int]:
  """Colours of the domains with the largest absolute contributions; the others share the last colour."""
  order = sorted(summary.domains, key=lambda value: -abs(value.contribution))
  return {value.domain: i for i, value in enumerate(order[: NUM_COLORS - 1])}
