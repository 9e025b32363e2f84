"""Sentences and labels of the report, shared by the terminal and the page."""

import math

import numpy as np

from maxghost.attribution.numbers import integer, number, percent
from maxghost.attribution.summary import Ledger, SetSummary

LEDGER_LABELS = {
  "predicted_examples": ("This step's examples", "the contributions that this page divides among documents"),
  "momentum": ("Momentum", "AdamW's part of the step that comes from the examples of earlier batches"),
  "weight_decay": ("Weight decay", "pulling the weights towards zero"),
  "unscored": ("Unscored parameters", "parameters left out with ghost_exclude"),
  "direction_residual": ("Direction residual", "exact minus used direction (stale or low-rank)"),
}


def ledger_label(name: str) -> tuple[str, str]:
  """(label, explanation) of a column of the ledger; optimizers may name their own columns."""
  return LEDGER_LABELS.get(name) or (name.replace("_", " ").capitalize(), "a part that this run's optimizer names")


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
  harmful = [v.domain for v in known if v.per_million + float(np.nan_to_num(v.per_million_half_width)) < 0]
  if harmful:
    sentences.append(f"{_listed(harmful)} raised the loss by more than the noise.")
  return " ".join(sentences)


def _listed(names: list[str]) -> str:
  shown = names[:3] + ([f"{len(names) - 3} more"] if len(names) > 3 else [])
  text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
  return text[:1].upper() + text[1:]


def plus_minus(half_width: float) -> str:
  """The 95 % interval behind a number; empty if it is unknown."""
  return f" ± {number(half_width, 2)}" if math.isfinite(half_width) else ""


def ledger_sentence(ledger: Ledger) -> str:
  """How to read the ledger, with notes on large momentum and on a large rest."""
  count = f"{integer(ledger.num_steps)} step{'s' if ledger.num_steps != 1 else ''}"
  steps = f"{count} ({ledger.first_step} to {ledger.last_step})"
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


def shown_columns(ledger: Ledger) -> list[tuple[str, float]]:
  """The logged columns in order, without columns that are zero; examples, momentum and weight decay always appear."""
  known = [(name, value) for name, value in ledger.columns.items() if value is not None]
  return [(n, v) for n, v in known if v != 0 or n in ("predicted_examples", "momentum", "weight_decay")]
