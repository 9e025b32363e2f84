"""`maxghost generate MODEL --prompt TEXT`: continues texts with a trained or imported model.

MODEL is a run, a checkpoint of it, a checkpoint of another layout, an imported folder or a Hugging Face folder. The
text is streamed to stdout; times go to stderr.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxghost import import_module, left_with
from maxghost.config import Config, ConfigError, did_you_mean
from maxghost.config.arguments import SEEDS, Parser
from maxghost.config.schema import WEIGHTS_ONLY
from maxghost.config.values import guarded, printable, reading

EXAMPLES = """\
examples:
  maxghost generate runs/base --prompt "def main(" --max_new_tokens 100 --temperature 0.8 --top_p 0.95
  maxghost generate models/smollm2 --prompt "What is the capital of France?" --chat
  maxghost generate runs/base/checkpoints/200 --prompts prompts.txt --stop "</s>"
  maxghost generate configs/base.yml load_parameters_path=runs/base prompt="def main("
"""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # flags that are fields of Sampling
# key that may follow a configuration -> its flag
KEYS = {name: f"--{name}" for name in ("prompt", "max_new_tokens", *SAMPLING, "seed", "dtype", "quantization")}
KEYS["lora_restore_path"] = "--adapter"


def from_keys(arguments: list[str]) -> list[str]:
  """`[config.yml] load_parameters_path=MODEL prompt=TEXT [key=value ...]` as flags; others as they are."""
  typed = arguments[:1] if arguments[:1] and Path(arguments[0]).suffix in (".yml", ".yaml") else []
  pairs = [text.partition("=") for text in arguments[len(typed) :]]
  if not typed and not any(name == "load_parameters_path" and equals for name, equals, _ in pairs):
    return arguments
  given = {name: value for name, equals, value in pairs if equals}
  known = ("load_parameters_path", *KEYS)
  for name in (name for name, equals, _ in pairs if not equals or name not in known):
    raise ConfigError(f"{name!r} is not a key of generate{did_you_mean(name, known)}; it reads {', '.join(known)}")
  if not given.get("load_parameters_path"):
    raise ConfigError("load_parameters_path is missing: the run, checkpoint or folder of the model to generate with")
  flags = [f"{KEYS[name]}={value}" for name, _, value in pairs if name in KEYS]
  return [given["load_parameters_path"], *flags, *(f"--otherwise={path}" for path in typed)]


def parse(argv: list[str] | None) -> argparse.Namespace:
  """The command line. Raises ConfigError."""
  parser = Parser("maxghost generate", description=__doc__, epilog=EXAMPLES)
  add = parser.add_argument
  add("model", metavar="MODEL", help="run, checkpoint, imported folder, or Hugging Face folder")
  add("--prompt", action="extend", nargs="+", default=[], metavar="TEXT", help="texts, which are continued together")
  add("--prompts", type=Path, metavar="FILE", help="more prompts, one per line")
  add("--max_new_tokens", type=int, default=64, metavar="N", help="maximum number of new tokens (64)")
  add("--temperature", type=float, default=0.0, metavar="X", help="0 = always the likeliest token (0)")
  add("--top_k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0 = all (0)")
  add("--top_p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens of share P (1)")
  add("--min_p", type=float, default=0.0, metavar="P", help="least probability, as a share of the highest (0)")
  add("--repetition_penalty", type=float, default=1.0, metavar="X", help="above 1: fewer repetitions (1)")
  add("--stop", action="extend", nargs="+", default=[], metavar="TEXT",
      help="stop before these texts; the end token always stops")  # fmt: skip
  add("--seed", type=int, default=0, help="of the sampling (0)")
  add("--cache", type=int, default=0, metavar="N", help="positions of the cache; 0 = as needed (0)")
  add("--adapter", default="", metavar="FOLDER", help="LoRA adapter to merge in: folder of PEFT, or a run")
  add("--chat", action="store_true", help="each prompt is the question of a user, in the model's chat template")
  add("--config", metavar="FILE", help="config.yml of a model that has none beside it")
  add("--dtype", choices=("float32", "bfloat16"), help="compute dtype (the configuration's)")
  add("--quantization", choices=WEIGHTS_ONLY, help="weights in few bits, made as they are read (the checkpoint's)")
  add("--quantize_kvcache", action="store_true", help="keep keys and values in int8 (the configuration's)")
  add("--otherwise", metavar="FILE", help=argparse.SUPPRESS)  # as --config, for a model that has none
  typed = list(sys.argv[1:] if argv is None else argv)
  args = parser.parse(flags := from_keys(typed), max_new_tokens=1, cache=0)
  parser.check(args, SEEDS[1], seed=SEEDS[0])
  if "" in args.stop:
    parser.error("--stop '' would stop at once; leave it out, or give the text to stop at")
  args.key = "" if flags is typed else "load_parameters_path"
  return args


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0, or 2 for wrong input."""
  args = parse(argv)
  load_model = import_module("maxghost.load_model")
  from maxghost.data.tokenizers import load_tokenizer
  from maxghost.parallel import shardings
  from maxghost.serving import Generator, Sampling
  from maxghost.serving.batcher import Row

  sampling = Sampling(**{name: getattr(args, name) for name in SAMPLING})
  changes = {key: given for key in ("dtype", "quantization", "quantize_kvcache") if (given := getattr(args, key))}
  place, cfg = load_model.find(args.model, args.config, args.otherwise, args.key, **changes)
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  texts = _prompts(args)
  prompts, stop_ids = encoded(texts, args.chat, cfg, tokenizer)
  num_slots = cache_size(cfg, max(map(len, prompts)), args.max_new_tokens, args.cache)
  layout = load_model.layout_of(cfg)
  graphdef, state = load_model.load(place, cfg, lambda line: print(line, file=sys.stderr), args.adapter, layout)
  rows = [Row(tokenizer, stop_ids, args.stop, prompt) for prompt in prompts]
  generator = Generator(graphdef, num_slots, sampling=sampling, stop_ids=sorted(rows[0].stop_ids))
  asked = [f"{text}\n" for text in texts] if args.chat else texts
  with shardings.use(layout):
    _show(asked, rows, generator.stream(state, prompts, args.max_new_tokens, seed=args.seed))
  seconds, count = generator.seconds, sum(row.num_tokens for row in rows)
  rate = f", {seconds.tokens / seconds.loop:.1f} tokens/s" if seconds.tokens else ""
  times = f"compiled in {seconds.compiling:.1f} s, prompts read in {seconds.prompt:.3f} s{rate}"
  print(f"{count} tokens for {len(rows)} prompt{'s' if len(rows) > 1 else ''}; {times}", file=sys.stderr)
  return 0


def encoded(texts: Sequence[str], chat: bool, cfg: Config, tokenizer) -> tuple[list[list[int]], frozenset[int]]:
  """(ids of each prompt, ids that end what is generated). chat: they are questions of a user. Raises ConfigError."""
  from maxghost.data.conversations import Rendering
  from maxghost.serving.samples import encode, utf8

  if not chat:
    return encode(texts, tokenizer, cfg), tokenizer.stop_ids
  rendering = Rendering.of(cfg.data, tokenizer)
  try:
    return [rendering.prompt(utf8(text).decode()) for text in texts], tokenizer.stop_ids | rendering.end_ids()
  except ValueError as error:  # of the template
    raise ConfigError(str(error)) from error


def _prompts(args: argparse.Namespace) -> list[str]:
  with reading(args.prompts, "--prompts "):
    text = args.prompts.read_text(encoding="utf-8-sig") if args.prompts else ""
  if not (texts := [*args.prompt, *(text.removesuffix("\n").split("\n") if text else [])]):
    raise ConfigError('no prompt: give --prompt "some text", or --prompts FILE')
  return texts


def cache_size(cfg: Config, longest: int, more: int, given: int = 0) -> int:
  """Positions for the longest prompt and `more` tokens: as many as given, 0 = as needed. Raises ConfigError."""
  needed = longest + more
  if given and given < needed:
    raise ConfigError(f"--cache {given}: the longest prompt and --max_new_tokens need {needed}")
  most = cfg.model.trainable_position_size if cfg.model.trainable_position_size > 0 else sys.maxsize
  if needed > most:
    raise ConfigError(f"a prompt of {longest} tokens and {more} more: the model has {most} positions")
  return min(given or needed, most)


def _show(texts: Sequence[str], rows: Sequence, stream: Iterator) -> None:
  """Streams one text; prints several at the end, one below the other."""
  alone = len(texts) == 1
  progress: Any = None
  shown = printable if sys.stdout.isatty() else str  # a file or another program gets the text as it is

  def take(progress, last: bool) -> None:
    if any(logp != logp for logp in progress.logps_BN.ravel()):
      raise ConfigError("the log-probability of a token is NaN: the weights of the model may have diverged")
    for i, row in enumerate(rows):
      new = row.take(progress.row(i), last)
      if alone and new:
        print(shown(new), end="", flush=True)

  if alone:
    sys.stdout.write(shown(texts[0]))
  for progress in stream:
    take(progress, last=False)
    if all(row.ended for row in rows):
      break
  take(progress, last=True)
  ends = ["\n"] if alone else [f"{text}{row.text}\n\n" for text, row in zip(texts, rows, strict=True)]
  sys.stdout.writelines(map(shown, ends))
  sys.stdout.flush()


if __name__ == "__main__":
  sys.exit(left_with(main()))
