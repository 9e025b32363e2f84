"""`maxghost attribute CKPT... --data DOMAIN=GLOB --queries NAME=GLOB --output DIR`: scores a corpus for queries.

Scores every document of a corpus against queries at one or several checkpoints of a run, as the training step after
each checkpoint would, and writes a score log for `maxghost scores` and `maxghost report`. More checkpoints approximate
the training better. --index sketches the documents' gradients once, so that later queries need no pass over the corpus.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxghost import config, left_with, load_model
from maxghost.attribution.index import CONTRIBUTION, LESS, NATS, ORDERS, open_index
from maxghost.attribution.texts import print_notes
from maxghost.attribution.where import refuse_unknown
from maxghost.checkpoint.layouts_store import GONE, read_json
from maxghost.config import Config, ConfigError, plugins
from maxghost.config.arguments import Parser
from maxghost.config.values import guarded, nearest_beside, printable, shown
from maxghost.data.sources.files import labelled
from maxghost.interop import model_path
from maxghost.parallel import heap

EXAMPLES = """\
examples:
  maxghost attribute runs/base --data "notes=corpus/**/*.txt" --queries mine=questions.jsonl --output runs/asked
  maxghost scores runs/asked --by document --set mine --top 20
  maxghost attribute runs/base/checkpoints/200 --data "notes=corpus/**/*.txt" --index runs/base/index
  maxghost attribute runs/base/checkpoints/200 --index runs/base/index --queries mine=questions.jsonl
"""
DIRECTIONS = 128  # see docs/attribute.md
SKETCHED_ROWS = 8
RUN = "run"  # in place of patterns
COMPILING = "Compiling, which takes seconds to minutes; then the documents are scored at one checkpoint after the other"


def parse(argv: list[str] | None) -> argparse.Namespace:
  parser = Parser("maxghost attribute", description=__doc__, epilog=EXAMPLES)
  add = parser.add_argument
  add("checkpoints", nargs="+", type=Path, metavar="CKPT", help="<run>/checkpoints/<step>, or <run> for all it has")
  add("--data", action="extend", nargs="+", default=[], metavar="DOMAIN=GLOB",
      help=f"the documents to score: text, .jsonl or .parquet; or {RUN}: what the run has trained on")  # fmt: skip
  add("--queries", action="extend", nargs="+", default=[], metavar="NAME=GLOB", help="texts to query with, by name")
  add("--output", type=Path, metavar="PATH", help="new folder for the score log; with --index a JSON file")
  add("--direction", default="", metavar="NAME", help=f"{', '.join(plugins.directions())} (the run's ghost_direction)")
  add("--method", default="", metavar="NAME", help="with --index: contribution, or the baseline less (contribution)")
  add("--index", type=Path, metavar="DIR", help="folder of gradient sketches: written with --data, read for --queries")
  add("--directions", type=int, default=DIRECTIONS, metavar="R",
      help=f"--index: random directions per parameter and layer ({DIRECTIONS}); for less 0 = exact")  # fmt: skip
  add("--rows", type=int, metavar="N", help=f"rows scored together (those of a step; --index: {SKETCHED_ROWS})")
  add("--order", default=ORDERS[0], metavar="NAME", help=f"--index: what ranks, {', '.join(ORDERS)} ({ORDERS[0]})")
  add("--devices", type=int, default=1, metavar="N", help="devices that the weights and the rows are split over (1)")
  add("--query-rows", type=int, default=8, metavar="N", help="rows of each query that are used (8)")
  add("--top", type=int, default=10, metavar="N", help="best documents shown for each query (10)")
  args = parser.parse(argv)
  refuse_unknown(f"--order {args.order}: unknown", args.order, ORDERS)
  refuse_unknown(f"--method {args.method}: unknown", args.method or CONTRIBUTION, (CONTRIBUTION, LESS))
  fewest = 2 if args.method != LESS or args.directions else 0
  parser.check(args, directions=fewest, rows=1, query_rows=1, top=1, devices=1)
  if (missing := [flag for flag in ("data", "queries", "output") if not getattr(args, flag)]) and not args.index:
    raise ConfigError(f"--{missing[0]} is missing: give --data, --queries and --output, or --index")
  if RUN in args.data and len(args.data) > 1:
    raise ConfigError(f"--data {RUN} stands for all that the run has trained on; it takes no patterns beside it")
  if args.index and not (args.data or args.queries):
    raise ConfigError("--index needs --data to write the index, or --queries to query it")
  of_data, of_queries = ("rows", "directions"), ("query_rows", "order", "top")
  parser.read_together(args, {}, index=("method", "order", "directions"), data=of_data, queries=of_queries)
  if args.index and args.output and (args.output.is_dir() or not args.queries):
    raise ConfigError(f"--output {args.output}: with --index, the JSON file for the answer to --queries")
  if args.index and args.data:  # an index would overwrite a run's config.yml
    own = (*args.index.glob("*sketch_*.npy*"), *args.index.glob("step.npz"))  # one kind may be lost
    if args.index.is_file() or (any(args.index.glob("*")) and not own):
      raise ConfigError(f"--index {args.index} holds something else than an index; give a folder of its own")
  if args.output and args.output.is_dir() and (any(args.output.iterdir()) or args.output.samefile(".")):
    raise ConfigError(f"--output {args.output} is not empty, or it is the current folder; give a new folder")
  return args


@guarded("maxghost")
def main(argv: list[str] | None = None) -> int:
  """Exit code 0, or 2 for wrong input; nothing has been written then."""
  args = parse(argv)
  heap.call("mallopt", heap.ARENA_MAX, 1)  # before any library starts threads: theirs would be heaps of XLA's, too
  run_dir, paths = resolve(args.checkpoints)
  cfg = model_path.with_own_tokenizer(config.load(str(run_dir / "config.yml")), run_dir)
  own = plugins.OBJECTIVES[cfg.optimizer.objective]
  refused = {"objective": own.rows_per_unit > 1 or own.reference, "offline_data_dir": cfg.data.offline_data_dir}
  refused["ghost_val_sets"] = {*cfg.val_objectives} - {cfg.optimizer.objective}
  if named := [f"{key}={shown(cfg.flat()[key])}" for key, asks in refused.items() if asks]:
    said = "attribute scores texts and conversations by the run's objective, without pairs or a second model"
    raise ConfigError(f"{run_dir} has {' and '.join(named)}; {said}")
  step_rows = rows_per_step(cfg, run_dir)
  if args.method == LESS:
    check_less(cfg, args, paths)
  run_cfg, cfg = cfg, scoring_config(cfg, paths, args.direction, None if args.index else args.rows)
  import jax

  from maxghost.attribution.corpus import Corpus
  from maxghost.parallel import shardings
  from maxghost.training.devices import configure_jax, num_chosen

  configure_jax(cfg)
  layout = load_model.layout_over(cfg, args.devices)
  step_rows = num_chosen(run_cfg, step_rows)
  if args.data and (rows := args.rows or (SKETCHED_ROWS if args.index else step_rows)) % args.devices:
    near = rows + -rows % args.devices
    print_notes([f"{rows} rows do not divide over --devices {args.devices}: each computes all; use --rows {near}"])
  if jax.default_backend() == "cpu":
    heap.keep()
  corpus = Corpus.of_run(run_cfg, run_dir) if args.data == [RUN] else None
  if corpus is None and args.data:
    corpus = Corpus(tuple(args.data), cfg.data, "--data", cfg.records)
  if corpus is not None and next(corpus.batches(1), None) is None:
    raise ConfigError(f"--data {' '.join(args.data)}: these documents hold no text to score")
  asked: Any = Corpus(tuple(args.queries), cfg.data, "--queries", cfg.records) if args.queries else None
  print_notes(note for one in (corpus, asked) if one for note in one.notes)
  queries = {}
  for name in asked.source.domains if asked else ():
    queries[name], total = asked.sample(name, args.query_rows)
    if total > args.query_rows:
      print_notes([f"query '{name}' has {total} rows, the first {args.query_rows} are used"])
  with shardings.use(layout):
    if args.index:
      return _index(args, cfg, paths, corpus, asked, queries, step_rows, run_cfg)
    return _exact(args, cfg, paths, corpus, queries, step_rows, run_cfg)


def scoring_config(cfg: Config, paths: dict[int, Path], asked: str = "", rows: int | None = None) -> Config:
  """The run's configuration for single scored steps, with the name of the optimizer's direction in place of auto.

  asked: the direction, empty for that of the run. rows: scored together, None for those of a step; others are not
  accumulated. Checkpoints without optimizer state have the learning rate of a warmed-up run.
  """
  direction = asked or cfg.ghost.ghost_direction
  changes: dict[str, Any] = {"gradient_accumulation_steps": 1} if rows else {}
  if cfg.ghost.ghost_schedule == "concat":  # one validation set, and a stale preconditioner
    changes["ghost_schedule"] = "two_pass"
  if bare := [path for path in paths.values() if not has_optimizer(path)]:
    if asked != "sgd":
      raise ConfigError(f"{bare[0]} holds no optimizer state, which the direction needs; give --direction sgd")
    changes |= {"lr_schedule_type": "constant", "warmup_steps_fraction": 0.0}
  if direction == "auto":
    direction = plugins.OPTIMIZERS[cfg.optimizer.opt_type].direction or direction
  if asked or cfg.ghost.curvature == "secant":
    changes["ghost_curvature"] = "none"
    if cfg.ghost.curvature != "none" and asked != "second_order":
      why = f"has no effect with --direction {asked}" if asked else "needs the queries' gradient of the step before"
      print_notes([f"the run's ghost_curvature={cfg.ghost.curvature} {why}: these scores are of first order"])
  return config.replace(
    cfg, ghost_enabled=True, ghost_direction=direction, ghost_select="none", ghost_reweight=(), ghost_every=1,
    ghost_val_every=1, ghost_val_sets=(), ghost_val_fraction=0.5, ghost_detail="total", offload_to_host=(), **changes,
  )  # fmt: skip


def check_less(cfg: Config, args: argparse.Namespace, paths: dict[int, Path]) -> None:
  if cfg.optimizer.opt_type != "adamw":
    raise ConfigError(f"--method less needs the moments of AdamW; the run has opt_type={cfg.optimizer.opt_type}")
  if bare := [path for path in paths.values() if not has_optimizer(path)]:
    raise ConfigError(f"{bare[0]} holds no optimizer state, whose moments --method less needs")
  if args.direction:
    raise ConfigError(f"--direction {args.direction}: --method less has its own direction; leave it out")
  if args.order != ORDERS[0]:
    raise ConfigError(f"--order {args.order}: --method less ranks by its value; leave it out")


def has_optimizer(path: Path) -> bool:
  from maxghost.checkpoint.layouts import read_checkpoint
  from maxghost.interop.huggingface import open_tree

  held = read_checkpoint(open_tree(path))
  return bool(held.moments or held.opt_leaves)


def _exact(args, cfg: Config, paths: dict[int, Path], corpus, queries: dict, step_rows: int, run_cfg: Config) -> int:
  from maxghost import attribution, scorelog
  from maxghost.attribution import offline, output
  from maxghost.attribution.query import Query, ask
  from maxghost.interop.convert import new_folder

  rows = args.rows or step_rows
  with new_folder(args.output) as folder:
    writer = scorelog.Writer(
      folder, tuple(queries), period=1, fingerprint=corpus.fingerprint, objective=cfg.optimizer.objective,
      ledger=plugins.ledger_columns(cfg.optimizer.opt_type, cfg.model.use_qk_clip), direction=cfg.direction_name,
      fields=corpus.source.fields,
    )  # fmt: skip
    writer.restore(None)
    print(COMPILING, flush=True)
    count = offline.score(cfg, points(cfg, paths), corpus, queries, writer, rows, rows / step_rows)
    writer.close()
    config.save(as_run(run_cfg, args.data, corpus.source.domains), folder / "config.yml")
  print(f"scored {count:,} chunks against {len(queries)} {'queries' if len(queries) > 1 else 'query'}: {args.output}")
  print_notes(corpus.left_out)
  log = attribution.load(args.output)
  for name in queries:
    print(f"\nmost helpful for '{name}': {offline.UNIT}")
    with output.console() as console:
      output.show(ask(log, Query(by="document", top=args.top, val_set=name)), console)
  more = ["maxghost", "scores", str(args.output), "--by=document", f"--set={next(iter(queries))}", "--text"]
  print(f"\nmore: {shlex.join(more)}")
  return 0


def rows_per_step(cfg: Config, run_dir: Path) -> int:
  """Rows of a training step over all devices, from the run's `run_facts.json`; else those of one device."""
  path, own = run_dir / "run_facts.json", cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps
  rows = str(read_json(path).get("rows per step", own) if path.is_file() else own).replace(",", "")
  if not rows.isdecimal():
    raise ConfigError(f"{path} is damaged: rows per step={rows}; put it back, or remove it if the run had one device")
  return int(rows)


def as_run(cfg: Config, patterns: list[str], domains: tuple[str, ...]) -> Config:
  """The configuration that reads this corpus, by which `maxghost scores --text` and the report find documents."""
  if patterns == [RUN]:
    return cfg
  pairs = labelled("--data", patterns, (), lambda _: "text", "text")  # as `expand`
  files = tuple(f"{name}={Path(os.path.expanduser(glob)).absolute()}" for name, glob in pairs)
  return config.replace(
    cfg, dataset_type="text", dataset_files=files, dataset_domains=(), dataset_domain_bytes=-1, dataset_shards=1,
    dataset_path="", train_split="train", dataset_mixture=(), dataset_exclude_file="", dataset_include_file="",
    document_fields=(), ghost_val_fraction=0.0, ghost_enabled=False, ghost_select="none", ghost_reweight=(),
    ghost_val_sets=(domains[0] + (f"@{cfg.optimizer.objective}" if "@" in domains[0] else ""),), offload_to_host=(),
  )  # fmt: skip


def _index(args, cfg: Config, paths: dict[int, Path], corpus, asked, queries: dict, step_rows: int, run_cfg) -> int:
  from maxghost.attribution import offline
  from maxghost.attribution.numbers import number
  from maxghost.attribution.output import write_output

  about = None if corpus is not None else open_index(args.index, list(paths))
  method = about["method"] if about else args.method or CONTRIBUTION
  if args.method not in ("", method):
    raise ConfigError(f"--method {args.method}: the index was written with --method {method}; leave it out")
  if about and method == LESS:
    check_less(cfg, args, paths)
  if cfg.ghost.curvature == "hessian" and method == CONTRIBUTION:
    raise ConfigError("--index: ghost_curvature=hessian needs the curvature of each step; give --direction auto")
  if cfg.counts_clipping and method == CONTRIBUTION:
    problem = "ghost_direction=marginal counts what a document changes of the clipping, which no sketch tells"
    raise ConfigError(f"--index: {problem}; give --direction path, and --data for an index that was written without")
  if corpus is not None:
    rows, at = args.rows or SKETCHED_ROWS, points(cfg, paths, method)
    own = as_run(run_cfg, args.data, corpus.source.domains)
    print(COMPILING, flush=True)
    count = offline.build_index(cfg, at, corpus, args.index, rows, step_rows, args.directions, method, own)
    print(f"indexed {count:,} chunks at {len(paths)} checkpoint{'s' if len(paths) > 1 else ''}: {args.index}")
    print_notes(corpus.left_out)
  if not queries:
    return 0
  about = about or open_index(args.index, list(paths))
  unit, way = (offline.LESS_UNIT, "LESS") if method == LESS else (offline.UNIT, f"direction {about['direction']}")
  way += f", estimated from {about['directions']} random directions" if about["directions"] else ", of whole gradients"
  if not args.direction:
    cfg = config.replace(cfg, ghost_direction=about["direction"])
  elif cfg.ghost.ghost_direction != about["direction"]:
    raise ConfigError(f"--direction {args.direction}: the index was written for {about['direction']}; leave it out")
  print("Compiling the query's pass, which takes seconds to minutes", flush=True)
  found = offline.nearest(cfg, points(cfg, paths, method), args.index, about, queries, asked, args.top, args.order)
  for name, chunks in found.items():
    print(f"\nnearest to '{name}': {unit}\n({way})")
    for chunk in chunks:
      value, error = chunk["contribution"], chunk["standard_error"]
      rank = f"{chunk['rank']}{'=' if chunk['tied'] else ' '}"
      place = f"{chunk['domain']}:{chunk['path']}:{chunk['offset']}+{chunk['chunk']} ({chunk['tokens']} tokens)"
      print(f"{rank:>6} {number(value, plus=True):>11} ± {number(error, 2):<8} {printable(place)}")
  by = "its value" if method == LESS else args.order
  ties = "; = marks ranks that it does not tell apart" if method == LESS or by == NATS else ""
  print(f"\nranked by {by}; ± is the standard error{ties}")
  print("place: domain:path:where the document begins in the file + where the chunk begins in the document, in bytes")
  if args.output:
    said = {key: about[key] for key in ("direction", "directions", "checkpoints", "method")} | {"unit": unit}
    write_output(args.output, json.dumps(said | {"queries": found}, ensure_ascii=False, indent=1) + "\n")
  return 0


def resolve(given: list[Path]) -> tuple[Path, dict[int, Path]]:
  """(run, {step: checkpoint}, ascending); an imported model is step 0 of itself. Raises ConfigError."""
  paths: dict[int, Path] = {}
  runs = set()
  for path in given:
    run, folder = path.resolve(), path / "checkpoints"
    if folder.is_dir():
      if not (found := {int(entry.name): entry for entry in folder.iterdir() if entry.name.isdecimal()}):
        raise ConfigError(f"{path}: no checkpoint in {folder}")
    elif (path / "config.yml").is_file():
      found = {0: path}
    elif path.is_dir() and run.name.isdecimal():
      run, found = run.parent.parent, {int(run.name): path}
    else:
      what = "is not a checkpoint (<run>/checkpoints/<step>) or a run"
      raise ConfigError(f"{path} {what if path.exists() else f'does not exist{nearest_beside(path)}'}")
    paths |= found
    runs.add(run)
  if len(runs) > 1:
    raise ConfigError(f"the checkpoints are of different runs: {', '.join(sorted(map(str, runs)))}; give those of one")
  run_dir = runs.pop()
  if not (run_dir / "config.yml").is_file():
    raise ConfigError(f"{run_dir} has no config.yml, which says what model the checkpoints are of")
  return run_dir, dict(sorted(paths.items()))


def points(cfg: Config, paths: dict[int, Path], method: str = CONTRIBUTION) -> Iterator:
  """The checkpoints' Points, one in memory at a time, in the current layout; without optimizer state its moments are 0.
  Raises ConfigError, also where no step after them has a learning rate; `method` LESS needs none."""
  import jax
  import numpy as np

  from maxghost import optimizers
  from maxghost.attribution.offline import Point
  from maxghost.checkpoint.checksum import checksums
  from maxghost.data.hashing import text_hash
  from maxghost.interop.load_tree import load_tree
  from maxghost.parallel import shardings
  from maxghost.training import state

  layout, (_, abstract) = shardings.current(), state.abstract_split(cfg)
  wanted, frozen = state.saved_parts(state.abstract_arrays(layout.abstract(abstract) if layout else abstract))
  base = load_model.frozen(cfg, frozen) if frozen else {}
  rate_of, moved = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps), method == LESS
  for step, path in paths.items():
    if not path.is_dir():  # it was there when the command began
      raise ConfigError(f"{path} {GONE}")
    whole = has_optimizer(path)
    tree = state.merged(base, load_tree(path, wanted if whole else {"model": wanted["model"]}))
    tree = tree if whole else state.completed(tree, cfg, layout)
    moved = moved or bool(rate_of(tree["optimizer"]["step"]))
    if not moved and path == paths[max(paths)]:
      raise ConfigError(f"{path}: the step after it has learning rate 0, so every value is 0; name earlier checkpoints")
    digest = "-".join(map(str, checksums([np.asarray(leaf) for leaf in jax.tree.leaves(tree)])))
    yield Point(step, state.from_tree(tree, abstract), f"{int(text_hash(digest)):016x}")


if __name__ == "__main__":
  sys.exit(left_with(main()))
