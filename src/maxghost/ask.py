"""`maxghost ask RUN "question"`: answers, with the training documents that made this answer more likely.

The documents are those of an index that `maxghost attribute RUN --data run --index RUN/index` wrote. Values are
nats by which one exposure of a document is predicted to lower the loss of the answer, summed over its tokens.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from maxghost import attribute, config, generate, import_module, left_with, load_model
from maxghost.attribution.index import CONTRIBUTION, open_index
from maxghost.attribution.numbers import number
from maxghost.attribution.output import console
from maxghost.attribution.texts import print_notes, snippet
from maxghost.config import Config, ConfigError
from maxghost.config.arguments import SEEDS, Parser
from maxghost.config.values import guarded, printable
from maxghost.interop import model_path

EXAMPLES = """\
examples:
  maxghost ask runs/base "What does os.path.join return?"
  maxghost ask runs/base "The capital of France is" --answer " Paris" --top 5
  maxghost ask runs/base "def main(" --token 3
"""
_EXCERPT = 110  # characters


def parse(argv: list[str] | None) -> argparse.Namespace:
  parser = Parser("maxghost ask", description=__doc__, epilog=EXAMPLES)
  add = parser.add_argument
  add("run", type=Path, metavar="RUN", help="a run, or its checkpoint, whose weights the index was made from")
  add("question", help="the prompt; a user's question for a run on conversations")
  add("--answer", metavar="TEXT", help="the sources of this answer; the model's own is generated otherwise")
  add("--index", type=Path, metavar="DIR", help="index of `maxghost attribute` (RUN/index)")
  add("--top", type=int, default=10, metavar="N", help="documents shown (10; of a token up to 3)")
  add("--token", type=int, metavar="N", help="the sources of the answer's N-th token, from 1")
  add("--max_new_tokens", type=int, default=64, metavar="N", help="maximum number of tokens of an answer (64)")
  add("--temperature", type=float, default=0.0, metavar="X", help="0 = always the likeliest token (0)")
  add("--seed", type=int, default=0, help="of the sampling (0)")
  add("--devices", type=int, default=1, metavar="N", help="devices that the weights are split over (1)")
  add("--json", action="store_true", help="print everything as JSON; docs/asking.md lists the keys")
  args = parser.parse(argv, top=1, token=1, max_new_tokens=1, devices=1)
  parser.check(args, SEEDS[1], seed=SEEDS[0])
  for name, text in (("the question", args.question), ("--answer", args.answer)):
    if text == "":
      raise ConfigError(f"{name} is empty; write something")
  parser.read_together(args, {"answer": ("max_new_tokens", "temperature", "seed"), "json": ("token",)})
  return args


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0, or 2 for wrong input."""
  args = parse(argv)
  run_dir, cfg, paths, index = opened(args.run, args.index)
  shardings = import_module("maxghost.parallel.shardings")
  with shardings.use(load_model.layout_over(cfg, args.devices)):
    sources = open_sources(run_dir, cfg, paths, index)
    prompt_ids, answer_ids = _answer(args, cfg, next(reversed(paths.values())), sources.tokenizer, shardings.current())
  if args.token and args.token > len(answer_ids):
    raise ConfigError(f"--token {args.token}: the answer has {len(answer_ids)} tokens")
  found = sources.of_answer(prompt_ids, answer_ids, args.top)
  if args.json:
    print(json.dumps(found, ensure_ascii=False, indent=1))
    return 0
  print_notes(found["notes"])
  with console() as shown:
    _show(args, found, shown)
  return 0


def opened(run: Path, index: Path | None) -> tuple[Path, Config, dict[int, Path], Path]:
  """(folder of the run, configuration, checkpoints, folder) of an index of this run. Raises ConfigError."""
  run_dir, given = attribute.resolve([run])
  folder, last = index or run_dir / "index", max(given)
  if not (folder / "index.json").is_file():
    data = "run" if (run_dir / "ghost").is_dir() else "NAME=GLOB"
    write = shlex.join(["maxghost", "attribute", str(given[last]), "--data", data, "--index", str(folder)])
    raise ConfigError(f"{folder}: no index there; write one: {write}")
  about = open_index(folder)
  if (method := about["method"]) != CONTRIBUTION:
    raise ConfigError(f"--index {folder}: of --method {method}, which knows no nats; write it without --method")
  paths = {step: given.get(step, run_dir / "checkpoints" / str(step)) for step, _ in about["checkpoints"]}
  if missing := [step for step, path in paths.items() if not path.is_dir()]:
    raise ConfigError(f"--index {folder}: made from step {missing[0]}, of which {run_dir} has no checkpoint")
  if last != (newest := next(reversed(paths))):
    way = f"give {run_dir}/checkpoints/{newest}, or write an index of step {last}"
    raise ConfigError(f"--index {folder}: made from step {newest}, not from step {last} of {run}; {way}")
  cfg = model_path.with_own_tokenizer(config.load(str(run_dir / "config.yml")), run_dir)
  return run_dir, attribute.scoring_config(cfg, paths, about["direction"]), paths, folder


def open_sources(run_dir: Path, cfg: Config, paths: dict[int, Path], index: Path) -> Any:
  """The `attribution.sources.Sources` of what `opened` found, in the current layout. Imports JAX."""
  sources = import_module("maxghost.attribution.sources")
  from maxghost.training.devices import configure_jax

  configure_jax(cfg)
  return sources.Sources(run_dir, index, cfg, attribute.points(cfg, paths))


def _answer(args: argparse.Namespace, cfg: Config, path: Path, tokenizer, layout) -> tuple[list[int], list[int]]:
  """Ids of the prompt and of the answer, which is generated unless it is given."""
  from maxghost.serving import Generator, Sampling
  from maxghost.serving.samples import utf8

  place, _ = load_model.find(path)
  (prompt_ids,), stop_ids = generate.encoded([args.question], cfg.records == "conversations", cfg, tokenizer)
  if args.answer is not None:
    return prompt_ids, tokenizer.encode_behind(utf8(args.answer, "--answer")).tolist()
  graphdef, state = load_model.load(place, cfg, lambda line: print(line, file=sys.stderr), layout=layout)
  size, sampling = generate.cache_size(cfg, len(prompt_ids), args.max_new_tokens), Sampling(args.temperature)
  generator = Generator(graphdef, size, sampling=sampling, stop_ids=sorted(stop_ids))
  return prompt_ids, generator.generate(state, [prompt_ids], args.max_new_tokens, seed=args.seed).row(0).tolist()


def _show(args: argparse.Namespace, found: dict, console) -> None:
  """The answer, and a table of its sources, or of those of one of its tokens."""
  from rich.text import Text

  from maxghost.attribution.terminal import make_table

  tokens, documents = found["tokens"], found["documents"][: args.top]
  if args.token:
    documents = [found["documents"][i] for i in found["token_top"][args.token - 1][: args.top]]
  answer = Text(printable(args.question + " "), "dim")
  for i, token in enumerate(tokens):
    answer.append(printable(token["text"]), "bold reverse" if args.token == i + 1 else "bold")
  console.print(answer)
  table = make_table("", ">nats", ">±", "tokens it helped most", ">trained", "document")
  for one in documents:
    nats = one["token_nats"][args.token - 1] if args.token else one["nats"]
    error = "" if args.token else number(one["standard_error"], 2)
    most = sorted(range(len(tokens)), key=lambda i, one=one: -one["token_nats"][i])[:3]
    helped = " ".join(repr(tokens[i]["text"]) for i in most if one["token_nats"][i] > 0)
    excerpt = Text(printable(one["id"])).append(f"\n{snippet(printable(one['text']), _EXCERPT)}", "dim")
    times = f"{len(one['trained'])}×" if found["trained_for"] else "?"
    table.add_row(number(nats, plus=True), error, Text(printable(helped)), times, excerpt)
  console.print(table)
  of = f"token {args.token}" if args.token else "the answer"
  about = f"{found['unit']}, here of {of}; {found['method']}; ± is the standard error; {found['seconds']:.2f} s"
  console.print(Text(about, "dim"))


if __name__ == "__main__":
  sys.exit(left_with(main()))
