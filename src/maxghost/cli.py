"""The console script `maxghost`, and how its commands read arguments and report mistakes in one line each.

A command is a module with `main(argv: list[str] | None = None) -> int`. A command with a configuration calls
`cli.run_command(_run, argv, "train")` there and imports JAX inside `_run`: wrong keys are reported before JAX starts.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from maxghost import __version__, import_module
from maxghost.config import ConfigError, did_you_mean, fields, load_with_origins
from maxghost.config.help import list_values, print_help
from maxghost.config.schema import WEIGHTS_ONLY
from maxghost.config.values import guarded

# verb -> (module, description); a module is imported when its verb runs.
VERBS = {
  "train": ("maxghost.train", "train a model and score every training example"),
  "report": ("maxghost.report", "tables and report.html of a run"),
  "scores": ("maxghost.scores", "query the scores of a run"),
  "generate": ("maxghost.generate", "continue a prompt with a trained model"),
  "ask": ("maxghost.ask", "answer a question, with the documents that made the answer more likely"),
  "serve": ("maxghost.serve", "answer OpenAI's API over HTTP, with a page that shows an answer's sources"),
  "attribute": ("maxghost.attribute", "score a corpus against queries at fixed checkpoints"),
  "data": ("maxghost.data.__main__", "prepare a corpus for training"),
  "distill-logits": ("maxghost.distill_logits", "write a teacher's logits once, for distillation without the teacher"),
  "checkpoint": ("maxghost.interop.__main__", "convert, compare, inspect checkpoints: MaxText Linen, NNX, maxghost"),
  "train_compile": ("maxghost.train_compile", "compile the step for a topology: memory and shardings, without devices"),
}

WITHIN = {
  "checkpoint": ("convert", "compare", "inspect", "rescale", "quantize", "hf"),
  "data": ("prepare", "verify", "show", "duplicates"),
}
USAGE = """\
usage: maxghost {verb} [config.yml] [key=value ...]
       maxghost {verb} --help [key]      all keys, or one in full
       maxghost {verb} [...] --print_config   every value and where it comes from; nothing runs"""


@guarded("maxghost")
def run_command(work: Callable[..., int | None], argv: Sequence[str] | None = None, verb: str = "train",
                switches: Mapping[str, str] | None = None) -> int | None:  # fmt: skip
  """Parses `[config.yml] [key=value ...] [--print_config] [--help [key]]` and runs `work(cfg)`.

  Args:
    work: the command; it gets the configuration, and each switch as name=True or False.
    argv: the arguments after the program's name; None = those of sys.argv.
    verb: of the command, for its usage.
    switches: {name: description} of the command's own flags `--name`.

  Returns:
    The exit code of `work` (None = 0), or 2 for wrong input; nothing has been written then.
  """
  arguments, switches = list(sys.argv[1:] if argv is None else argv), switches or {}
  for position, text in enumerate(arguments):
    flag, _, key = text.partition("=")
    if flag in ("--help", "-h") or text == arguments[0] == "help":
      key = key or next(iter(arguments[position + 1 :]), "").partition("=")[0]
      more = "".join(f"\n       maxghost {verb} [...] --{name}   {purpose}" for name, purpose in switches.items())
      print_help(key or None, usage=USAGE.format(verb=verb) + more)
      return 0
  flags = {"--print_config", "--print-config"}
  own = flags | {f"--{name}" for name in switches}
  path, overrides = split_arguments([text for text in arguments if text not in own])
  loaded = load_with_origins(path, *overrides)
  if (held := loaded.config.model.quantization) in WEIGHTS_ONLY:
    raise ConfigError(f"quantization={held} is for maxghost generate, not for {verb}; use quantization=int8, fp8 or ''")
  for note in loaded.notes:
    print(f"maxghost: note: {note}", file=sys.stderr)
  if flags.intersection(arguments):
    print(list_values(loaded))
    return 0
  return work(loaded.config, **{name: f"--{name}" in arguments for name in switches})


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
  """(path of the YAML file or None, key=value texts). Raises ConfigError for a flag or a second path."""
  paths, overrides, problems = [], [], []
  for text in arguments:
    if text.startswith("-"):
      key, equals, value = text.lstrip("-").partition("=")
      key = key.replace("-", "_")
      hint = did_you_mean(key, ["help", "print_config", *fields()])
      plain = f"'{text}': keys are written without dashes: {key}={value if equals else 'VALUE'}"
      problems.append(plain if key in fields() else f"unknown flag '{text}'{hint}")
    elif "=" in text and not os.path.isfile(text):
      overrides.append(text)
    else:
      paths.append(text)
  if len(paths) > 1:
    problems.append(f"more than one config file: {', '.join(paths)}; give one, and key=value for the rest")
  if problems:
    raise ConfigError(*problems)
  return (paths[0] if paths else None), overrides


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """`maxghost VERB ...`: passes the remaining arguments to the verb's module."""
  arguments = list(sys.argv[1:] if argv is None else argv)
  if not arguments or arguments[0] in ("-h", "--help", "help"):
    lines = (f"  {verb:<{max(map(len, VERBS))}}  {about}" for verb, (_, about) in VERBS.items())
    print("usage: maxghost COMMAND [...]", "", *lines, sep="\n")
    print("\nmaxghost COMMAND --help explains a command; maxghost train --help lists every key; maxghost --version.")
    return 0 if arguments else ConfigError.exit_code
  if arguments[0] in ("-V", "--version"):
    print(f"maxghost {__version__}")
    return 0
  verb, rest = arguments[0], arguments[1:]
  if verb not in VERBS:
    within = [f"; it is {outer} {verb}" for outer, inner in WITHIN.items() if verb in inner]
    raise ConfigError(f"unknown command '{verb}'{(within or [did_you_mean(verb, VERBS, 'there are')])[0]}")
  return import_module(VERBS[verb][0]).main(rest)


if __name__ == "__main__":
  sys.exit(main())
