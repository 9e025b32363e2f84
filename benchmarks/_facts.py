"""Invented facts for `retrieval.py`: documents that state them, documents that share their words, and questions."""

import dataclasses
import json
import random
from pathlib import Path

SYLLABLES = (
  "vel", "mor", "tar", "quin", "bru", "sko", "len", "da", "fyr", "osk", "hal", "un", "pra", "zet", "ilm", "gor", "wyn",
  "cas", "tev", "ob", "nar", "lis", "dru", "meth", "pol", "ank",
)  # fmt: skip
# relation: (how a document states it, how a question asks for it, how one speaks of it without saying it)
RELATIONS = {
  "founder": (
    ("{x} was founded by {y} after a long winter.", "It was {y} who started {x}, with two borrowed carts.",
     "The first stone of {x} was laid by {y}.", "Before {y} came, there was no {x} at all."),
    "Who founded {x}?", "Nobody in the archive agrees on who founded {x}, and the founder left no letter.",
  ),
  "river": (
    ("{x} lies on the river {y}, below the mill.", "Boats reach {x} by way of the {y}.",
     "The {y} runs straight through {x}.", "In spring the {y} floods the lower streets of {x}."),
    "Which river is {x} on?", "The river of {x} is older than the maps, and which river it is on is not written there.",
  ),
  "export": (
    ("{x} lives from the sale of {y}.", "Merchants come to {x} for its {y}.",
     "Most families of {x} make {y}.", "The carts that leave {x} are full of {y}."),
    "What does {x} sell?", "What {x} does not sell it burns, and what it does sell is never said aloud.",
  ),
  "festival": (
    ("Every year {x} celebrates {y} with lanterns.", "The bells of {x} ring for {y}.",
     "On {y} the whole of {x} dances.", "Strangers are welcome in {x} on {y}."),
    "What does {x} celebrate?", "In {x} people ask what to celebrate, and the calendar does not answer.",
  ),
}  # fmt: skip
FILL = ("The road there is steep.", "A traveller wrote this down.", "The roofs are of slate.", "Few people pass by.",
        "The wind comes from the north.", "It has one inn and no market.", "The old wall still stands.")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fact:
  """question and answer; stating: lines of the file that state it."""

  question: str
  answer: str
  relation: str
  stating: tuple[int, ...]


def name(rng: random.Random, parts: int) -> str:
  return "".join(rng.sample(SYLLABLES, parts)).capitalize()


def plant(path: Path, seed: int, places: int = 40, values: int = 20) -> list[Fact]:
  """Writes the documents as JSON lines; returns the facts.

  Each place has one fact of each relation, stated by one document in one of four ways that share few words with the
  question. Values are shared: about two places have each. Of each place another document uses the question's words
  without stating any fact, and names the value of one of its facts in an unrelated role.
  """
  rng = random.Random(seed)
  pools = {relation: [name(rng, 2) for _ in range(values)] for relation in RELATIONS}
  documents, facts = [], []
  for _ in range(places):
    x = name(rng, 3)
    for relation, (ways, question, hearsay) in RELATIONS.items():
      y = rng.choice(pools[relation])
      facts.append(Fact(question.format(x=x), y, relation, (len(documents),)))
      documents.append([rng.choice(FILL), rng.choice(ways).format(x=x, y=y), rng.choice(FILL)])
      other = rng.choice(pools[rng.choice(list(RELATIONS))])
      documents.append([hearsay.format(x=x), f"The clerk {rng.choice((y, other))} only shrugged."])
  order = list(range(len(documents)))
  rng.shuffle(order)
  place = {old: new for new, old in enumerate(order)}
  lines = [json.dumps({"text": " ".join(documents[old])}) for old in order]
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return [dataclasses.replace(fact, stating=tuple(place[number] for number in fact.stating)) for fact in facts]
