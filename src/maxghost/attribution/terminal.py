"""The report on a terminal: the numbers and sentences of the page as rich tables."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from maxghost.attribution.numbers import compact, integer, number, percent, plus_minus
from maxghost.attribution.report_text import headline, lead, ledger_lines, ledger_sentence
from maxghost.attribution.summary import Ledger, SetSummary, Summary, Value
from maxghost.attribution.texts import snippet

SNIPPET_CHARS = 160  # the terminal cuts lines at its width
SHOWN_DOCUMENTS = 5


def show(summary: Summary, console: Console):
  """Prints the report with the first few documents of each table."""
  counts = f"{compact(summary.num_tokens)} scored tokens, {compact(summary.num_documents)} documents"
  console.print(Text(f"Run {summary.name}: {integer(summary.num_steps)} steps, {counts}"))
  for part in summary.sets:
    console.print()
    console.print(Text(headline(part), style="bold"))
    console.print(Text(lead(part)))
    console.print(_domains(part))
    console.print(_ledger(part.ledger))
    console.print(Text(ledger_sentence(part.ledger)))
    console.print(_documents(part.top, "Documents that helped most"))
    if part.bottom:
      console.print(_documents(part.bottom, "Documents that helped least or hurt"))
  for message in summary.messages:
    console.print(Text(f"note: {message}", style="yellow"))


def _table(title: str, *columns: str) -> Table:
  """An empty table; a leading > marks a column of numbers."""
  table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
  for name in columns:
    numbers = name.startswith(">")
    table.add_column(name.removeprefix(">"), justify="right" if numbers else "left", no_wrap=numbers)
  return table


def _domains(part: SetSummary) -> Table:
  head = ("Domain", ">Tokens", ">Total nats", ">Nats per\nmillion tokens", ">Of\naverage", ">Training\nloss")
  table = _table(f"\nDomains, for the {part.name} validation loss", *head)
  for value in part.domains:
    table.add_row(
      Text(value.domain),
      compact(value.tokens),
      number(value.contribution, plus=True) + plus_minus(value.half_width),
      number(value.per_million, plus=True) + plus_minus(value.per_million_half_width),
      percent(value.relative),
      number(value.loss),
    )
  return table


def _ledger(ledger: Ledger) -> Table:
  table = _table("\nPredicted and measured drop", "", ">Nats", ">Of predicted")
  for line in ledger_lines(ledger):
    share = percent(line.value / ledger.predicted) if ledger.predicted else ""
    table.add_row(line.label, number(line.value, plus=True), share)
  return table


def _documents(values: list[Value], title: str) -> Table:
  table = _table(f"\n{title}", ">Total nats", ">Per million\ntokens", ">Tokens", ">Chunks", "Document")
  for value in values[:SHOWN_DOCUMENTS]:
    lines = Text(value.place, no_wrap=True, overflow="ellipsis")  # the column shrinks, not the numbers beside it
    if value.text is not None:
      lines.append("\n" + snippet(value.text, SNIPPET_CHARS), style="dim")
    table.add_row(
      number(value.contribution, plus=True),
      number(value.per_million, plus=True),
      compact(value.tokens),
      integer(value.exposures),
      lines,
    )
  return table
