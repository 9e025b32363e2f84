"""`python -m maxghost.data`: prepare a corpus, check a prepared one, show what a run reads, look for duplicates."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from maxghost import config
from maxghost.config.arguments import Parser
from maxghost.config.values import guard, printable, shown
from maxghost.data import duplicates
from maxghost.data import prepare as preparing
from maxghost.data.build import load_dataset
from maxghost.data.prepared import INDEX_FILE
from maxghost.data.sources import open_source
from maxghost.data.tokenizers import HUGGINGFACE, load_tokenizer


def main(arguments: list[str] | None = None) -> int:
  """Runs one command; returns the exit code (0 done, 1 damage found, 2 wrong input, 130 Ctrl-C)."""
  again = "; the same command continues where this one stopped"
  arguments = sys.argv[1:] if arguments is None else arguments
  return guard(lambda: _run(arguments), stopped=f"interrupted{again if arguments[:1] == ['prepare'] else ''}")


def _run(arguments: list[str]) -> int:
  parser = Parser(prog="maxghost data", description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  prepare = _command(commands, "prepare", "tokenize a configuration's data once, into ArrayRecord shards and an index")
  prepare.add_argument("--output", required=True, type=os.path.expanduser, help="folder to write, or to continue")
  prepare.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
  prepare.add_argument("--train_bpe", type=int, metavar="V", help="first train a byte-level BPE of V ids on the data")
  prepare.add_argument("--part_bytes", type=int, default=preparing.PART_BYTES, help="text per shard, in bytes")
  verify = commands.add_parser("verify", help="compare the shards of a prepared folder with their checksums")
  verify.add_argument("folder")
  verify.set_defaults(config=None)
  _command(commands, "show", "what a run of a configuration reads: domains, held-out documents, packing")
  repeats = _command(commands, "duplicates", "training documents that repeat held-out ones, or each other")
  about = "also near-copies of held-out documents: those that share this much of their 8-word shingles, 0 to 1"
  repeats.add_argument("--near", type=float, metavar="SHARE", help=about)
  repeats.add_argument("--output", help="write the ids of copies of held-out documents, for dataset_exclude_file")
  parsed, more = parser.parse_known_args(arguments)  # settings may come after the options too
  if wrong := [item for item in more if item.startswith("-") or parsed.config is None]:
    commands.choices[parsed.command].refuse(wrong[0])
  parsed.config = [*(parsed.config or ()), *more]
  if parsed.command == "prepare":
    prepare.check(parsed, workers=1, part_bytes=1, train_bpe=0)
  return {"prepare": _prepare, "verify": _verify, "show": _show, "duplicates": _duplicates}[parsed.command](parsed)


def _command(commands, name: str, help: str) -> Parser:
  command = commands.add_parser(name, help=help)
  command.add_argument("config", nargs="*", help="a YAML file and key=value settings, as for training")
  return command


def _prepare(parsed: argparse.Namespace) -> int:
  cfg = config.load(*parsed.config)
  if cfg.records != "text":
    said = f"objective={cfg.optimizer.objective} reads {cfg.records}, which a run renders itself"
    raise config.ConfigError(f"{said}; nothing to prepare")
  source = open_source(cfg.data, cfg.run.data_shuffle_seed, whole=False)
  for note in source.notes:
    print(printable(note))
  data = cfg.data
  if parsed.train_bpe is not None:
    path = Path(parsed.output) / "tokenizer.json"
    if path.is_file():  # of the command that is continued; of little text, fewer ids can be learnt than were asked for
      size = load_tokenizer(HUGGINGFACE, str(path)).vocab_size
      if size > parsed.train_bpe:
        said = f"{path} has {size} ids already, not --train_bpe {parsed.train_bpe}"
        raise config.ConfigError(f"{said}; give another --output")
      print(f"keeps the {size} ids of {path}")
    else:
      preparing.check_folder(path.parent)
      print(f"training a BPE of {parsed.train_bpe} ids")
      preparing.train_bpe(source, parsed.train_bpe, str(path))
    data = config.replace(cfg, tokenizer_type=HUGGINGFACE, tokenizer_path=str(path)).data
  with _progress(source.num_bytes) as progress:
    options = {"num_workers": parsed.workers, "part_bytes": parsed.part_bytes, "progress": progress}
    meta = preparing.prepare(source, data, parsed.output, **options)
  documents = f"{sum(meta['domain_documents'].values()):,} documents of {len(meta['domains'])} domains"
  left_out = f"{meta['empty']} empty and {meta['corrupt']} corrupt documents left out"
  print(f"{parsed.output}: {documents}, {meta['tokens']:,} tokens in {len(meta['shards'])} shards; {left_out}")
  made, sets = meta["tokenizer"], data.ghost_val_sets and shown(data.ghost_val_sets)
  path = Path(parsed.output) / made["path"] if made["copied"] else made["path"]
  settings = {"dataset_type": "grain", "dataset_files": shown((parsed.output,)), "tokenizer_path": path,
              "tokenizer_type": made["type"], "vocab_size": made["vocab_size"], "ghost_val_sets": sets}  # fmt: skip
  print("train on it with:", shlex.join(f"{key}={value}" for key, value in settings.items() if value))
  return 0


@contextlib.contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[dict], None]]:
  """What `prepare` calls after each shard: advances a bar over the bytes on a terminal, else prints a line."""
  from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

  columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
  with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
    task = bar.add_task("tokenizing", total=total_bytes)

    def advance(manifest: dict) -> None:
      bar.advance(task, manifest["bytes"])
      if bar.disable:
        print(f"{manifest['name']}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens", flush=True)

    yield advance


def _verify(parsed: argparse.Namespace) -> int:
  if not (Path(parsed.folder) / INDEX_FILE).is_file():
    raise config.ConfigError(f"{parsed.folder} holds no {INDEX_FILE}; give a folder that `prepare` has written")
  problems = preparing.verify(parsed.folder)
  print("\n".join(problems or [f"{parsed.folder}: every shard is as it was written"]))
  return 1 if problems else 0


def _show(parsed: argparse.Namespace) -> int:
  cfg = config.load(*parsed.config)
  dataset = load_dataset(cfg.data, cfg.run.data_shuffle_seed, records=cfg.records)
  print(*map(printable, [*(entry.line for entry in dataset.summary()), *dataset.notes()]), sep="\n")
  next(dataset.train)
  print(dataset.train.describe("first window"))
  if cfg.val_sets or cfg.run.eval_interval > 0:
    print(f"validation '{dataset.val_domain}': {sum(map(len, dataset.validation_rows().sides)):,} rows")
  return 0


def _duplicates(parsed: argparse.Namespace) -> int:
  cfg = config.load(*parsed.config)
  if parsed.near is not None and not 0 < parsed.near <= 1:
    raise config.ConfigError(f"--near {parsed.near} is not a share; use for example 0.8")
  data = config.replace(cfg, ghost_val_copies="keep").data  # to list them, even where they end a run
  dataset = load_dataset(data, cfg.run.data_shuffle_seed, records=cfg.records)
  pairs = duplicates.exact(duplicates.documents_of(dataset))
  exact = sum(pair.held_out for pair in pairs)
  if parsed.near is not None:
    found = {(pair.copy, pair.original) for pair in pairs}
    near = duplicates.near(duplicates.documents_of(dataset), parsed.near)
    pairs += [pair for pair in near if (pair.copy, pair.original) not in found]
  for pair in pairs:
    kind = "held-out" if pair.held_out else "training"
    print(printable(f"{pair.similarity:.2f}  {pair.copy.shown}  repeats {kind} {pair.original.shown}"))
  of_held_out = [pair.copy for pair in pairs if pair.held_out]
  said = f"{len(set(of_held_out))} training documents repeat held-out ones ({exact} exactly)"
  print(f"{said}; {sum(not pair.held_out for pair in pairs)} repeat other training documents")
  if parsed.output:
    print(f"{parsed.output}: {duplicates.write_ids(parsed.output, of_held_out)} ids; use it as dataset_exclude_file")
  return 0


if __name__ == "__main__":
  sys.exit(main())
