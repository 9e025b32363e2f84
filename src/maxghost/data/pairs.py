"""Pairs of responses as documents: each is rendered as a conversation, and only the response has weight.

The text of such a document is a JSON object: `chosen` and `rejected`, texts or messages, with the `prompt` of both.
Without one, the prompt is what the tokens of both begin with.
"""

import dataclasses
import json
import math

import numpy as np

from maxghost.config.plugins import REFERENCE_COLUMNS
from maxghost.data.conversations import ConversationUnits
from maxghost.data.packing import Encoded

SIDES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PairUnits(ConversationUnits):
  """The pairs of a source. has_reference: whether records have the log-probabilities of the reference too."""

  has_reference: bool = False

  def sides(self, text: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    record = json.loads(text)
    prompt, most, found = record.get("prompt"), self.layout.row_length + 1, []
    for name in SIDES:
      response = record.get(name)
      if not response:
        raise ValueError(f"it has no {name} response")
      whole = {"messages": response} if isinstance(response, list) else {"prompt": "", "completion": response}
      whole = whole if prompt is None else {"prompt": prompt, "completion": response}
      tools = {"tools": record["tools"]} if "tools" in record else {}
      found.append(self.rendering.encode(json.dumps(whole | tools, ensure_ascii=False).encode()))
    (chosen, _), (rejected, _) = found
    if np.array_equal(chosen[:most], rejected[:most]):
      where = "" if np.array_equal(chosen, rejected) else f" up to max_target_length={most - 1}"
      raise ValueError(f"its chosen and rejected responses are the same{where}")
    if prompt is None:
      size = min(len(chosen), len(rejected))
      differ = np.flatnonzero(chosen[:size] != rejected[:size])
      shared = int(differ[0]) if len(differ) else size
      found = [(ids, np.where(np.arange(len(ids)) < shared, 0, weight)) for ids, weight in found]
    for name in REFERENCE_COLUMNS if self.has_reference else ():
      if not isinstance(value := record.get(name), int | float) or not math.isfinite(value):
        raise ValueError(f"its {name} is {value!r}, no finite number")
    for name, (_, weight) in zip(SIDES, found, strict=True):
      if not weight[1:].any():
        raise ValueError(f"its {name} response is only how the other one begins; end responses with add_eos=true")
    return found

  def joined(self, documents, found, side: int = 0) -> Encoded:
    chosen, rejected = (super(PairUnits, self).joined(documents, found, number) for number in (0, 1))
    if not self.has_reference:
      return dataclasses.replace(chosen, partner=rejected)
    records = [json.loads(text or b"{}") for text in self.read(documents)]
    known = [np.array([record[name] for record in records], np.float32) for name in REFERENCE_COLUMNS]
    rejected = dataclasses.replace(rejected, reference=known[1])
    return dataclasses.replace(chosen, partner=rejected, reference=known[0])
