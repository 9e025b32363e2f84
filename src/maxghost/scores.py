"""`maxghost scores RUN_DIR --by domain|document|source|step|layer|module`: totals of the score log, best and worst."""

import argparse
import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from maxghost import attribution
from maxghost.attribution import output, query, what_if
from maxghost.attribution.aggregate import GROUPINGS
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
  add("--export", choices=("parquet",), help="the whole log as Parquet files in the folder --output (RUN_DIR/parquet)")
  add("--what-if", default="", metavar="reward=F", help="the effect of sampled answers under another reward function")
  add("--compact", action="store_true", help="merge the score files into fewer, larger ones")
  add("--accept-lost-rows", action="store_true", help=ACCEPT_HELP)
  args = parser.parse(argv)
  for asked, read in _READ_WITH.items():
    parser.read_together(args, {asked: vars(args).keys() - {asked, *read, "run_dir", "accept_lost_rows"}})
  refuse_unknown(f"--format {args.format}: unknown", args.format, FORMATS)
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
  kind = args.output.suffix[1:] if args.output and not ids else ""
  if kind in FORMATS and kind != args.format and not args.export:
    raise ConfigError(f"--output {args.output}: --format {args.format} is not {kind}; add --format {kind}")
  if args.output is None and (args.format == "parquet" or args.drop_below is not None):
    raise ConfigError(f"{'--format parquet' if args.format == 'parquet' else '--drop-below'} needs --output FILE")
  return args


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
  if asks_ids := args.drop_below is not None or args.keep:
    by, top, bottom = "id" if args.by == "id" else "document", None, None
  elif top is None and bottom is None and args.format == "table" and by not in FEW:
    top = bottom = SHOWN
  about = {"val_set": args.set, "scale": args.scale, "text": args.text}
  answer = query.ask(log, query.Query(by=by, where=args.where, top=top, bottom=bottom, sort=args.sort, **about))
  print_notes(answer.notes)
  if asks_ids and args.sort not in query.MEASURES:
    raise ConfigError(f"--sort {args.sort} is no number to choose by; use contribution or per_million_tokens")
  if asks_ids and by == "id" and "" in answer.columns["id"]:
    raise ConfigError("--by id: some records have no id; use --by document, or leave them out: --where 'id~?*'")
  if args.drop_below is not None:
    return _drop(args, answer, by)
  if args.keep:
    return _keep(args, log, answer, by)
  as_text = {"table": output.as_table, "json": lambda found: output.as_json(found, args.by), "csv": output.as_csv}
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


def _ids(answer: attribution.Answer, by: str, chosen: np.ndarray) -> tuple[str, str]:
  """(ids of the chosen groups, one JSON object a line; how many documents and tokens these are)."""
  names = GROUPINGS.get(by, (by,))
  keys = zip(*(np.asarray(answer.columns[name])[chosen].tolist() for name in names), strict=True)
  lines, tokens = [json.dumps(dict(zip(names, key, strict=True))) + "\n" for key in keys], answer.columns["tokens"]
  share = np.asarray(tokens)[chosen].sum() / max(np.sum(tokens), 1)
  return "".join(lines), f"{len(lines):,} of {len(answer):,} scored documents, {share:.1%} of their tokens"


def _drop(args: argparse.Namespace, answer: attribution.Answer, by: str) -> int:
  """Writes the ids of the documents below the bound for `dataset_exclude_file`."""
  dropped = answer.columns[args.sort] < args.drop_below
  lines, said = _ids(answer, by, dropped)
  output.write_output(args.output, lines)
  worth = f"{np.asarray(answer.columns['contribution'])[dropped].sum():+.4g} {answer.units['contribution']}"
  said = f"{said}, {worth}; to train without them: dataset_exclude_file={args.output}"
  empty = f"empty, since none of {len(answer):,} documents is below {args.drop_below:g}"
  print(f"{args.output}: {said if dropped.any() else empty}")
  return 0


def _keep(args: argparse.Namespace, log: attribution.ScoreLog, answer: attribution.Answer, by: str) -> int:
  """Writes the ids of the best documents for `dataset_include_file`; ties and unscored documents go to stderr."""
  values = np.asarray(answer.columns[args.sort])
  if not (count := min(math.ceil(len(answer) * args.percent / 100), int(np.isfinite(values).sum()))):
    raise ConfigError(f"--keep {args.keep}: no document was scored, or none has a known {args.sort}")
  lines, said = _ids(answer, by, np.arange(count))
  source, bound = Source(log.run_dir), values[count - 1]
  notes, more = source.open(log.said_of("fingerprint")), int((values[count:] == bound).sum())
  scored = query.ask(log, query.Query(by="document")) if args.where else answer
  if by != "id" and source.dataset and (unscored := (total := source.dataset.num_train_documents) - len(scored)) > 0:
    notes.append(f"{unscored:,} of {total:,} documents to train on were not scored, and are not kept")
  if more:
    notes.append(f"{more:,} more have the score of the last one kept, {bound:.4g}; the first by id are kept")
  print_notes(notes)
  if args.output is None:
    sys.stdout.write(lines)
    return 0
  output.write_output(args.output, lines)
  way = f"to train on them alone: dataset_include_file={args.output}"
  print(f"{args.output}: {said}, scores from {bound:+.4g} up; {way}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
