"""Fine-tunes runs/base on tasks made from Python's own library, some with harmful answers: which hurt the target?

  python examples/finetune_base.py     # base model if there is none yet, tasks, training, report, planted examples

Settings of configs/finetune-base.yml may follow, and --baselines for the gradient norm and LESS. Every answer can be
checked against the file and line in its id.
"""

import ast
import codecs
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import planting

from maxghost.training import run_directory

BASE = Path("runs/base")
FOLDER = Path("corpora/library-tasks")
TARGET = "statement"
PLANTED = 0.2  # share of the target task's examples with harmful answers
SIZES = {"statement": 240, "parameters": 40, "summary": 40, "body": 40, "module": 40}
HELD_OUT = 100  # examples of the target
LONGEST = 60  # characters of a question or an answer
KINDS = {
  ast.Return: "return", ast.Assign: "assignment", ast.Import: "import", ast.ImportFrom: "import", ast.Raise: "raise",
  ast.AugAssign: "update", ast.Assert: "assertion", ast.Delete: "deletion", ast.Global: "global",
}  # fmt: skip
SKIPPED = {
  "test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "encodings", "pydoc_data",
}  # fmt: skip


def tasks(path: str, text: str) -> Iterator[tuple[str, int, str, str]]:
  """(task, line, question, answer) of a module."""
  lines = text.splitlines()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.stmt) and node.lineno == node.end_lineno:
      line = lines[node.lineno - 1].strip()
      kind = "call" if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else KINDS.get(type(node))
      if kind:
        yield "statement", node.lineno, f"What is it? {line}", kind
    if not isinstance(node, ast.FunctionDef):
      continue
    head = lines[node.lineno - 1].strip()
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    if head.endswith(":") and names:
      yield "parameters", node.lineno, f"Parameters of {head}", ", ".join(names)
    if (said := ast.get_docstring(node)) and len(said.splitlines()) > 1:
      yield (
        "summary",
        node.lineno,
        f"Summary of {node.name}: {' '.join(said.split())[: LONGEST // 2]}",
        said.splitlines()[0],
      )
    if len(node.body) == 1 and node.body[0].lineno == node.body[0].end_lineno == node.lineno + 1:
      yield "body", node.lineno, f"Body of {head}", lines[node.lineno].strip()
    if not node.name.startswith("_") and "/" not in path:
      yield "module", node.lineno, f"Module of {node.name}?", path.removesuffix(".py")


def make() -> None:
  """Writes train.jsonl, a share of it planted, and target.jsonl, other questions of the target task."""
  library, found, rng = Path(sysconfig.get_path("stdlib")), {name: [] for name in SIZES}, random.Random(0)
  files = sorted(library.rglob("*.py"))
  for file in rng.sample(files, len(files)):
    if all(len(found[task]) > 3 * size for task, size in SIZES.items()):
      break
    path = file.relative_to(library).as_posix()
    if SKIPPED & set(path.split("/")):
      continue
    try:
      made = list(tasks(path, file.read_text("utf-8")))
    except (SyntaxError, UnicodeDecodeError):
      continue
    for task, line, question, answer in made:
      if len(question) <= LONGEST and 0 < len(answer) <= LONGEST:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found[task].append({"id": f"{path}:{line}", "domain": task, "messages": turns})
  chosen = {}
  for task, size in SIZES.items():
    one_each = {record["messages"][0]["content"]: record for record in found[task]}  # no question twice
    chosen[task] = rng.sample(sorted(one_each.values(), key=lambda one: one["id"]), size + HELD_OUT * (task == TARGET))
  aim, others = chosen[TARGET], [one for task in SIZES if task != TARGET for one in chosen[task]]
  rot13 = lambda answer, _: codecs.encode(answer, "rot13")  # noqa: E731
  records = planting.plant(aim[HELD_OUT:], PLANTED, 1, rot13, wrong=others)
  planting.write(FOLDER / "train.jsonl", records + [one | {"planted": ""} for one in others])
  planting.write(FOLDER / "target.jsonl", aim[:HELD_OUT])


def prepare() -> None:
  """Makes the tasks, and trains the base model if it does not exist or its run is unfinished."""
  make()
  if not BASE.exists() or (BASE / run_directory.LOCK_FILE).exists():
    own = BASE / run_directory.CONFIG_FILE
    place = f"base_output_directory={BASE.parent}", f"run_name={BASE.name}"
    planting.finish([str(own) if own.exists() else "configs/base.yml", *place])


if __name__ == "__main__":
  sys.exit(planting.main("configs/finetune-base.yml", prepare, sys.argv[1:]))
