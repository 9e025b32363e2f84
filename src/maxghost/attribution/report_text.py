"""Sentences and labels of the report, shared by the terminal and the page."""

import math
from typing import NamedTuple

from maxghost.attribution.numbers import counted, integer, number, percent
from maxghost.attribution.summary import MIN_CHUNKS, Ledger, SetSummary, Value
from maxghost.attribution.texts import snippet
from maxghost.scorelog.format import TABLE

LEDGER_LABELS: dict[str, tuple[str, str]] = TABLE["ledger"]  # (label, words) by column
IN_ALL = "In all: the total with what momentum still does with the document's gradients in later steps, if the "
IN_ALL += "validation gradient and the optimizer's preconditioner stay as they are."
OF_AVERAGE = "Of average: nats per token, as a share of those of an average token in the same steps."
LARGE_REST = 0.2  # share of the prediction beyond which the reader is warned


def loss_of(val_set: str) -> str:
  """The validation loss in words; the set of a loop of one's own is called `validation`."""
  return "validation loss" if val_set == "validation" else f"{val_set} validation loss"


def headline(part: SetSummary) -> str:
  """The change of the validation loss in one sentence."""
  actual = part.ledger.actual
  if actual is None and part.ledger.columns["predicted_examples"] is None:
    return f"What the training examples were worth for the {loss_of(part.name)}."
  if actual is None:
    moved = _moved(part.ledger, part.ledger.predicted, "fall", "rise", "stay as it is")
    return f"The {loss_of(part.name)} was predicted to {moved}; no drop was measured."
  return f"The {loss_of(part.name)} {_moved(part.ledger, actual, 'fell', 'rose', 'did not change')}."


def _moved(ledger: Ledger, drop: float, down: str, up: str, still: str) -> str:
  return f"{down if drop > 0 else up} {number(abs(drop))} nats per {ledger.unit}" if drop else still


def lead(part: SetSummary, behind: str = "") -> str:
  """How well the change was predicted, and what each domain contributed. behind: stands behind each domain's name."""
  sentences, ledger = [], part.ledger
  if ledger.actual is not None:
    moved = number(ledger.predicted) if ledger.predicted >= 0 else f"a rise of {number(-ledger.predicted)}"
    share = f" ({percent(ledger.predicted / ledger.actual)} of it)" if ledger.predicted * ledger.actual > 0 else ""
    how = "First order predicted" if ledger.curvature is None else "First order and curvature explain"
    if ledger.curvature is None and ledger.ahead is not None:
      how = "First order and the expected curvature predicted"
    sentences.append(f"{how} {moved}{share}.")
  if known := [(snippet(v.domain, 60) + behind, v) for v in part.domains if math.isfinite(v.per_million)]:
    worth = ", ".join(f"{name} {number(value.per_million, 2, plus=True)}" for name, value in known[:4])
    more = f" and {len(known) - 4} more below" if len(known) > 4 else ""
    sentences.append(f"Nats per million tokens: {worth}{more}.")
  if harmful := [name for name, value in known if value.contribution + value.half_width < 0]:
    *shown, last = harmful[:3] + ([f"{len(harmful) - 3} more"] if len(harmful) > 3 else [])
    names = f"{', '.join(shown)} and {last}" if shown else last
    sentences.append(f"By more than the noise, the loss was raised by {names}.")
  return " ".join(sentences)


def ledger_sentence(ledger: Ledger) -> str:
  """How to read the ledger, with notes on large momentum and on a large rest; or that there is none."""
  if not ledger_lines(ledger):
    return "This log holds no predicted drops of its steps, only the contributions of examples."
  steps = f"{counted(len(ledger.steps), 'step')} ({ledger.steps[0]} to {ledger.steps[-1]})"
  text = f"The predicted drops of the steps, added up over {steps}."
  momentum, examples, ahead = ledger.columns.get("momentum"), ledger.columns.get("predicted_examples"), ledger.ahead
  predicted, actual, rest, said = ledger.predicted, ledger.actual, ledger.rest, ledger.columns_sum
  first, curvature = ledger.first_order, ledger.curvature
  if momentum and examples is not None and said > 0 and momentum > 0.2 * said:
    part = "it" if curvature is None else "its first-order part" if ahead is None else "what the steps predicted"
    text += f" Momentum carries {percent(momentum / said)} of {part}, the examples of the steps themselves "
    text += f"{percent(examples / said)} ({number(examples)} nats): the optimizer moves along a running mean of "
    text += "gradients; what comes from the gradients of earlier steps counts as momentum."
  if ahead is not None:
    text += f" They contain {number(ahead, plus=True)} nats of curvature that the steps expected, divided among "
    text += f"documents as the rest; first order alone predicts {number(first)} nats."
  if curvature is not None and first and abs(curvature) > LARGE_REST * abs(first):
    kind = "Curvature" if ahead is None else "Further curvature"
    text += f" {kind} {'takes back' if curvature * first < 0 else 'adds'} {percent(abs(curvature / first))} of what "
    text += "first order predicts; it belongs to the step as a whole and is not divided among documents."
  if actual is None or rest is None or abs(rest) <= LARGE_REST * abs(predicted):
    return text
  direction, moved = "drop" if predicted > 0 else "rise", _moved(ledger, actual, "fell", "rose", "did not change")
  if predicted * actual > 0:
    share = percent(abs(rest / predicted))
    text += f" {share} of the predicted {direction} {'did not happen' if rest * predicted < 0 else 'came on top'}:"
  elif predicted:
    text += f" The measured loss {moved}, against a predicted {direction}:"
  else:
    text += f" No change was predicted, but the measured loss {moved}:"
  text += " the prediction does not explain these steps. Read the contributions as a comparison of documents and "
  return f"{text}domains, not as exact nats."


def in_all_known(values: list[Value]) -> bool:
  return any(math.isfinite(value.in_all) for value in values)


def helped_sentence(part: SetSummary) -> str:
  """How the documents that helped were ranked, or why there are none."""
  if not part.num_judged:
    return f"No document was scored in {MIN_CHUNKS} or more chunks, so that none has an interval to rank it by."
  judged = f"{counted(part.num_judged, 'document')} with {MIN_CHUNKS} or more chunks"
  judged += " (parts of a document that were scored in one row)"
  if not part.helped:
    return f"None of the {judged} has a 95 % interval above zero."
  return f"By nats per token at the lower end of the 95 % interval, among the {judged}."


def hurt_sentence(part: SetSummary) -> str:
  """Which documents hurt more than by chance, or that none did."""
  if not part.hurt:
    return f"No document with {MIN_CHUNKS} or more chunks has a 95 % interval below zero."
  chance = part.num_judged * 0.025
  by_chance = f"{f'about {integer(round(chance))}' if chance >= 1 else 'less than one'} would get there by chance."
  return f"Their 95 % interval lies below zero. Of {integer(part.num_judged)} documents without any effect, {by_chance}"


class LedgerLine(NamedTuple):
  """One line of the ledger in nats. start: where its bar begins, so that the bars of the parts form a waterfall."""

  label: str
  words: str
  value: float
  start: float = 0.0
  is_total: bool = False


def ledger_lines(ledger: Ledger) -> list[LedgerLine]:
  """The parts of the prediction, zero only where every run has them, their sum, the measured drop, the rest."""
  if ledger.actual is None and all(value is None for value in ledger.columns.values()):
    return []
  lines, total = [], 0.0
  for name, value in ledger.columns.items():
    if value or (value == 0 and name in ("predicted_examples", "momentum", "weight_decay")):
      named = (name.replace("_", " ").capitalize(), "a part that this run's optimizer names")
      lines.append(LedgerLine(*LEDGER_LABELS.get(name, named), value, total))
      total += value
  if ledger.curvature is not None:
    label, words = LEDGER_LABELS["curvature"]
    if ledger.ahead is not None:
      words += ", less the curvature that the steps expected, which the lines above contain"
    lines.append(LedgerLine(label, words, ledger.curvature, total))
  lines.append(LedgerLine("Predicted drop", "the sum of the lines above", ledger.predicted, is_total=True))
  if ledger.actual is not None and ledger.rest is not None:
    measured = "validation loss before minus after each step, on the same rows"
    lines.append(LedgerLine("Measured drop", measured, ledger.actual, is_total=True))
    rest = "measured minus predicted drop: what neither first order nor curvature explains, and rounding"
    if ledger.curvature is None:
      rest = "curvature and rounding: what first order cannot see"
    lines.append(LedgerLine("Rest", rest, ledger.rest, ledger.predicted))
  return lines
