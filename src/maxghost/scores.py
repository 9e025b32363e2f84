"""`maxghost scores RUN_DIR --by domain|document|source|step|layer|module`: totals of the score log, best and worst."""

import argparse
import functools
import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from maxghost import attribution
from maxghost.attribution import output, query, what_if
from maxghost.attribution.texts import Source, print_notes
from maxghost.attribution.where import refuse_unknown
from maxghost.config import ConfigError
from maxghost.config.arguments import ACCEPT_HELP, Parser
from maxghost.config.values import guarded, printable
from maxghost.scorelog.compact import compact
from maxghost.scorelog.export import to_parquet

FORMATS = ("table", "json", "csv", "parquet", "ids")
FEW = ("domain", "step", "layer", "module")  # of other groupings, a table shows only the best and worst by default
SHOWN = 20
DOCUMENT = ("domain", "path", "offset")
_KEYS = {"id": ("id",), "document": DOCUMENT}  # by which dataset_exclude_file and dataset_include_file know documents
_GROUPS = ("by", "where", "sort", "set", "scale", "output")
# What else is read with an argument that asks for something else than a table.
_READ_WITH = {
  "compact": (), "what_if": ("set",), "export": ("output",), "drop_below": _GROUPS, "keep": (*_GROUPS, "format"),
}  # fmt: skip

EXAMPLES = """\
examples:
  maxghost scores runs/base --by document --top 20 --bottom 20 --text
  maxghost scores runs/base --by domain --where "step>=100" --format json
  maxghost scores runs/base --by source --where "domain=code,path~asyncio/*" --sort per_million_tokens
  maxghost scores runs/base --by id --where "lang=en"
  maxghost scores runs/base --drop-below 0 --output exclude.jsonl      # for dataset_exclude_file
  maxghost scores runs/base --keep 5% --format ids --output best.jsonl   # for dataset_include_file
  maxghost scores runs/rl --what-if reward=rewards.py:shorter
  maxghost scores runs/base --export parquet --output base-parquet
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
  parser = Parser("maxghost scores", description=__doc__, epilog=EXAMPLES)
  add = parser.add_argument
  add("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run")
  add("--by", default="domain", help="group by domain, document, source, step, layer, module or a field (domain)")
  add("--where", default="", help='conditions on rows, joined by commas: "domain=code,step>=100,path~asyncio/*"')
  add("--top", type=int, metavar="N", help="the N best; all when neither --top nor --bottom is given (20 documents)")
  add("--bottom", type=int, metavar="N", help="the N worst")
  add("--sort", default="contribution", help="column to sort by (contribution)")
  add("--set", default="", metavar="NAME", help="validation set (the first)")
  add("--scale", default="nats", help="nats; per_lr: over the learning rate; share: of each step's absolute sum")
  add("--text", action="store_true", help="with --by document: the text of each document")
  add("--format", default="table", help="table, json, csv, parquet or, with --keep, ids (table)")
  add("--drop-below", type=float, metavar="X", help="write to --output the ids of documents whose --sort is below X")
  add("--keep", default="", metavar="P%", help="with --format ids: the ids of the best P %% of the scored documents")
  add("--output", type=Path, metavar="FILE", help="output file; needed for parquet")
  add("--export", metavar="parquet", help="the whole log as Parquet files in the folder --output (RUN_DIR/parquet)")
  add("--what-if", default="", metavar="reward=F", help="the effect of sampled answers under another reward function")
  add("--compact", action="store_true", help="merge the score files into fewer, larger ones")
  add("--accept-lost-rows", action="store_true", help=ACCEPT_HELP)
  args = parser.parse(argv)
  _check_together(parser, args)
  refuse_unknown(f"--format {args.format}: unknown", args.format, FORMATS)
  if args.export not in (None, "parquet"):
    raise ConfigError(f"--export {args.export}: the log is exported as parquet")
  if bool(args.keep) != (args.format == "ids"):
    raise ConfigError("--keep and --format ids go together: maxghost scores RUN --keep 5% --format ids --output FILE")
  share = re.fullmatch(r"(\d+\.?\d*|\.\d+)%", args.keep)
  args.percent = Fraction(share[1]) if share else 0  # of a float, 16.1 % of 1000 would be 162
  if args.keep and not 0 < args.percent <= 100:
    raise ConfigError(f"--keep {args.keep}: a share of the documents above 0% and up to 100%, such as 5%")
  if args.drop_below != args.drop_below:
    raise ConfigError("--drop-below nan: nothing is below it; give a number")
  ids = "--keep" if args.keep else "--drop-below" if args.drop_below is not None else ""
  if ids and args.by not in ("domain", "document", "id"):
    raise ConfigError(f"--by {args.by}: {ids} writes the ids of documents, or with --by id those of records")
  if args.output is None and (args.format == "parquet" or args.drop_below is not None):
    raise ConfigError(f"{'--format parquet' if args.format == 'parquet' else '--drop-below'} needs --output FILE")
  return args


def _check_together(parser: Parser, args: argparse.Namespace) -> None:
  """Raises ConfigError for an argument that would have no effect beside another."""
  given = parser.given(args)
  for asked in (name for name in _READ_WITH if name in given):
    read = (asked, *_READ_WITH[asked], "run_dir", "accept_lost_rows")
    if idle := [name for name in given if name not in read]:
      raise ConfigError(f"{parser.flag(idle[0])} has no effect with {parser.flag(asked)}; leave one of them out")


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0, or 2 for wrong input; nothing has been written then."""
  args = parse(argv)
  if args.compact:
    print("\n".join(compact(args.run_dir, accept_lost_rows=args.accept_lost_rows)))
    return 0
  log = attribution.load(args.run_dir, accept_lost_rows=args.accept_lost_rows)
  if args.what_if:
    found = what_if.ask(log, args.what_if, args.set)
    print("\n".join(what_if.show(found, args.what_if, args.set or log.val_sets[0])))
    return 0
  if args.export:
    print(*to_parquet(log, args.output or args.run_dir / "parquet"), sep="\n")
    return 0
  by, top, bottom = args.by, args.top, args.bottom
  if args.drop_below is not None or args.keep:
    by, top, bottom = "id" if args.by == "id" else "document", None, None
  elif top is None and bottom is None and args.format == "table" and by not in FEW:
    top = bottom = SHOWN
  about = {"val_set": args.set, "scale": args.scale, "text": args.text}
  answer = query.ask(log, query.Query(by=by, where=args.where, top=top, bottom=bottom, sort=args.sort, **about))
  print_notes(answer.notes)
  if by == "id" and (args.drop_below is not None or args.keep) and "" in answer.columns["id"]:
    raise ConfigError("--by id: some records have no id; use --by document, or leave them out: --where 'id~?*'")
  if args.drop_below is not None:
    return _drop(args, answer, by)
  if args.keep:
    return _keep(args, log, answer, by)
  as_text = {"table": output.as_table, "json": functools.partial(output.as_json, by=args.by), "csv": output.as_csv}
  if args.format == "parquet":
    output.write_parquet(answer, args.output)
  elif args.output is not None:
    output.write_output(args.output, as_text[args.format](answer))
  elif args.format == "table":
    with output.console() as console:
      output.show(answer, console)
  else:  # what another program gets stays exact
    text = as_text[args.format](answer)
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
  return 0


def _token_share(answer: attribution.Answer, chosen) -> float:
  tokens = np.asarray(answer.columns["tokens"])
  return tokens[chosen].sum() / max(tokens.sum(), 1)


def _ids(answer: attribution.Answer, names: tuple[str, ...], chosen) -> str:
  """Those of the chosen groups, one JSON object a line."""
  keys = zip(*(np.asarray(answer.columns[name])[chosen].tolist() for name in names), strict=True)
  return "".join(json.dumps(dict(zip(names, key, strict=True))) + "\n" for key in keys)


def _drop(args: argparse.Namespace, answer: attribution.Answer, by: str) -> int:
  """Writes the ids of the documents below the bound for `dataset_exclude_file`."""
  if not isinstance(values := answer.columns[args.sort], np.ndarray):
    raise ConfigError(f"--drop-below: --sort {args.sort} is no number; use contribution or per_million_tokens")
  dropped = values < args.drop_below
  output.write_output(args.output, _ids(answer, _KEYS[by], dropped))
  if not dropped.any():
    print(f"{args.output}: empty, since none of {len(answer):,} documents is below {args.drop_below:g}")
    return 0
  share, nats = _token_share(answer, dropped), np.asarray(answer.columns["contribution"])[dropped].sum()
  said = f"{args.output}: {dropped.sum():,} of {len(answer):,} documents, {share:.1%} of the tokens, {nats:+.4g} nats"
  print(f"{said}; to train without them: dataset_exclude_file={args.output}")
  return 0


def _keep(args: argparse.Namespace, log: attribution.ScoreLog, answer: attribution.Answer, by: str) -> int:
  """Writes the ids of the best documents for `dataset_include_file`; ties and unscored documents go to stderr."""
  if not len(answer) or not isinstance(values := answer.columns[args.sort], np.ndarray):
    raise ConfigError(f"--keep {args.keep}: no document was scored, or --sort {args.sort} is no number")
  count = math.ceil(len(answer) * args.percent / 100)
  lines = _ids(answer, _KEYS[by], slice(count))
  source, bound = Source(log.run_dir), values[count - 1]
  notes, more = source.open(log.said_of("fingerprint")), int((values[count:] == bound).sum())
  if by != "id" and source.dataset and (unscored := (total := source.dataset.num_train_documents) - len(answer)) > 0:
    notes.append(f"{unscored:,} of {total:,} documents to train on were not scored, and are not kept")
  if more:
    notes.append(f"{more:,} more have the score of the last one kept, {bound:.4g}; the first by id are kept")
  print_notes(notes)
  if args.output is None:
    sys.stdout.write(lines)
    return 0
  output.write_output(args.output, lines)
  share = _token_share(answer, slice(count))
  said = f"{args.output}: {count:,} of {len(answer):,} scored documents, {share:.1%} of their tokens"
  print(f"{said}, scores from {bound:+.4g} up; to train on them alone: dataset_include_file={args.output}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
