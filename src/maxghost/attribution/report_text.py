"""Sentences and labels of the report, shared by the terminal and the page."""

import dataclasses
import math

from maxghost.attribution.numbers import integer, number, percent
from maxghost.attribution.summary import Ledger, SetSummary

LEDGER_LABELS = {
  "predicted_examples": ("This step's examples", "the contributions that this page divides among documents"),
  "momentum": ("Momentum", "AdamW's part of the step that comes from the examples of earlier batches"),
  "weight_decay": ("Weight decay", "pulling the weights towards zero"),
  "unscored": ("Unscored parameters", "parameters left out with ghost_exclude"),
  "direction_residual": ("Direction residual", "exact minus used direction (stale or low-rank)"),
}


LARGE_REST = 0.2  # share of the prediction beyond which the reader is warned


def headline(part: SetSummary) -> str:
  """The change of the validation loss in one sentence."""
  actual = part.ledger.actual
  if actual is None and part.ledger.columns["predicted_examples"] is None:
    return f"What the training examples were worth for the {part.name} loss."
  if actual is None:
    drop = part.ledger.predicted
    return f"The {part.name} validation loss was predicted to {_moved(drop, 'fall', 'rise')}; no drop was measured."
  return f"The {part.name} validation loss {_moved(actual, 'fell', 'rose')}."


def _moved(drop: float, down: str, up: str) -> str:
  return f"{down if drop >= 0 else up} {number(abs(drop))} nats per token"


def lead(part: SetSummary) -> str:
  """How well the change was predicted, and what each domain contributed."""
  sentences, ledger = [], part.ledger
  if ledger.actual is not None:
    moved = number(ledger.predicted) if ledger.predicted >= 0 else f"a rise of {number(-ledger.predicted)}"
    share = f" ({percent(ledger.predicted / ledger.actual)} of it)" if ledger.actual > 0 else ""
    sentences.append(f"First order predicted {moved}{share}.")
  known = [value for value in part.domains if math.isfinite(value.per_million)]
  if known:
    worth = ", ".join(f"{value.domain} {number(value.per_million, 2, plus=True)}" for value in known[:4])
    more = f" and {len(known) - 4} more" if len(known) > 4 else ""
    sentences.append(f"Per million tokens: {worth}{more} nats.")
  harmful = [v.domain for v in known if v.per_million + v.per_million_half_width < 0]
  if harmful:
    sentences.append(f"{_listed(harmful)} raised the loss by more than the noise.")
  return " ".join(sentences)


def _listed(names: list[str]) -> str:
  shown = names[:3] + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
  text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
  return text[:1].upper() + text[1:]


def ledger_sentence(ledger: Ledger) -> str:
  """How to read the ledger, with notes on large momentum and on a large rest."""
  count = f"{integer(len(ledger.steps))} step{'s' if len(ledger.steps) != 1 else ''}"
  steps = f"{count} ({ledger.steps[0]} to {ledger.steps[-1]})" if len(ledger.steps) else count
  text = f"The predicted drops of the steps, added up over {steps}."
  momentum, examples = ledger.columns.get("momentum"), ledger.columns.get("predicted_examples")
  if momentum and ledger.predicted > 0 and momentum > 0.2 * ledger.predicted:
    text += (
      f" Momentum carries {percent(momentum / ledger.predicted)} of it: AdamW moves mostly along the mean of earlier "
      "gradients, so the examples of a step are credited with the small part that is new in this step"
    )
    text += f" ({number(examples)} nats)." if examples is not None else "."
  if ledger.rest is not None and ledger.predicted > 0 and abs(ledger.rest) > LARGE_REST * ledger.predicted:
    less = "did not happen" if ledger.rest < 0 else "came on top"
    text += (
      f" {percent(abs(ledger.rest) / ledger.predicted)} of the predicted drop {less}: the steps were too long for a "
      "first-order prediction. Read the contributions as a comparison of documents and domains, not as exact nats."
    )
  return text


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerLine:
  """One line of the ledger in nats. start: where its bar begins, so that the bars of the parts form a waterfall."""

  label: str
  words: str
  value: float
  start: float = 0.0
  is_total: bool = False


def ledger_lines(ledger: Ledger) -> list[LedgerLine]:
  """The parts of the prediction, their sum, the measured drop and the rest.

  Parts that are zero are left out, except for examples, momentum and weight decay.
  """
  lines, total = [], 0.0
  for name, value in ledger.columns.items():
    if value or (value == 0 and name in ("predicted_examples", "momentum", "weight_decay")):
      named = (name.replace("_", " ").capitalize(), "a part that this run's optimizer names")
      lines.append(LedgerLine(*LEDGER_LABELS.get(name, named), value, total))
      total += value
  lines.append(LedgerLine("Predicted drop", "the sum of the lines above", ledger.predicted, is_total=True))
  if ledger.actual is not None and ledger.rest is not None:
    measured = "validation loss before minus after each step, on the same rows"
    lines.append(LedgerLine("Measured drop", measured, ledger.actual, is_total=True))
    lines.append(
      LedgerLine("Rest", "curvature: what a first-order prediction cannot see", ledger.rest, ledger.predicted)
    )
  return lines
