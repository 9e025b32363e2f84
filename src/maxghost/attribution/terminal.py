"""The report on a terminal: the numbers and sentences of the page as rich tables."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from maxghost.attribution import report_text
from maxghost.attribution.numbers import compact, counted, integer, number, percent, plus_minus
from maxghost.attribution.summary import Ledger, SetSummary, Summary, Value
from maxghost.attribution.texts import snippet
from maxghost.config.values import printable

SNIPPET_CHARS = 160  # the terminal cuts lines at its width
SHOWN_DOCUMENTS = 5


def show(summary: Summary, console: Console):
  """Prints the report with the first few documents of each table."""
  steps, documents = counted(summary.num_steps, "step"), counted(summary.num_documents, "document")
  console.print(_text(f"Run {summary.name}: {steps}, {compact(summary.num_tokens)} scored tokens, {documents}"))
  for part in summary.sets:
    console.print()
    console.print(_text(report_text.headline(part), style="bold"))
    console.print(_text(report_text.lead(part)))
    console.print(_domains(part))
    console.print(_text(report_text.OF_AVERAGE, style="dim"))
    if report_text.ledger_lines(part.ledger):
      console.print(_ledger(part.ledger))
    console.print(_text(report_text.ledger_sentence(part.ledger)))
    for title, sentence, values in (
      ("that helped most", report_text.helped_sentence(part), part.helped),
      ("that hurt", report_text.hurt_sentence(part), part.hurt),
      ("with the largest totals", "", part.top),
      ("with the smallest totals", "", part.bottom),
    ):
      if part.top and (sentence or values):  # else no documents are asked for
        console.print(_text(f"\nDocuments {title}", style="bold"))
      if part.top and sentence:
        console.print(_text(sentence))
      if values:
        console.print(_documents(values))
    if report_text.in_all_known(part.top):
      console.print(_text(report_text.IN_ALL, style="dim"))
  for message in summary.messages:
    console.print(_text(f"note: {message}", style="yellow"))


def _text(text: str, style: str = "", cut: bool = False) -> Text:
  """Text of the data, made harmless. cut: lines are cut at the width, so that the columns beside keep theirs."""
  return Text(printable(text), style, no_wrap=cut, overflow="ellipsis" if cut else None)


def make_table(title: str, *columns: str) -> Table:
  """An empty table; a leading > marks a column of numbers."""
  table = Table(title=_text(title, "bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
  for name in columns:
    numbers = name.startswith(">")
    table.add_column(name.removeprefix(">"), justify="right" if numbers else "left", no_wrap=numbers)
  return table


def _domains(part: SetSummary) -> Table:
  head = ("Domain", ">Tokens", ">Total nats", ">Nats per\nmillion tokens", ">Of\naverage", ">Training\nloss")
  table = make_table(f"\nDomains, for the {report_text.loss_of(part.name)}", *head)
  for value in part.domains:
    table.add_row(
      _text(value.domain), compact(value.tokens), number(value.contribution, plus=True) + plus_minus(value.half_width),
      number(value.per_million, plus=True) + plus_minus(value.per_million_half_width), percent(value.relative),
      number(value.loss),
    )  # fmt: skip
  return table


def _ledger(ledger: Ledger) -> Table:
  table = make_table("\nPredicted and measured drop", "", ">Nats", ">Of predicted")
  for line in report_text.ledger_lines(ledger):
    share = percent(line.value / ledger.predicted) if ledger.predicted else ""
    table.add_row(_text(line.label), number(line.value, plus=True), share)
  return table


def _documents(values: list[Value]) -> Table:
  nats = (">Total nats", ">In all") if report_text.in_all_known(values) else (">Total nats",)
  table = make_table("", *nats, ">Per million\ntokens", ">Tokens", ">Chunks", "Document")
  for value in values[:SHOWN_DOCUMENTS]:
    lines = _text(value.place, cut=True)
    if value.text is not None:
      lines.append(printable("\n" + snippet(value.text, SNIPPET_CHARS)), style="dim")
    totals = [number(total, plus=True) for total in (value.contribution, value.in_all)[: len(nats)]]
    per_million = number(value.per_million, plus=True) + plus_minus(value.per_million_half_width)
    table.add_row(*totals, per_million, compact(value.tokens), integer(value.exposures), lines)
  return table
