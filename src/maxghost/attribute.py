"""`maxghost attribute CKPT... --data DOMAIN=GLOB --queries NAME=GLOB --output DIR`: scores a corpus for queries.

Scores every document of a corpus against queries at one or several checkpoints of a run, and writes a score log for
`maxghost scores` and `maxghost report`. More checkpoints approximate the training better. --index sketches the
documents' gradients once, so that later queries need no pass over the corpus.
"""

import argparse
import json
import sys
from pathlib import Path

from maxghost import config
from maxghost.arguments import Parser, run_command
from maxghost.config import Config, ConfigError
from maxghost.interop import model_path

EXAMPLES = """\
examples:
  maxghost attribute runs/base --data notes=corpus/**/*.txt --queries mine=questions.jsonl --output runs/asked
  maxghost scores runs/asked --by document --set mine --top 20
  maxghost attribute runs/base/checkpoints/240 --data notes=corpus/**/*.txt --index runs/base/index
  maxghost attribute runs/base/checkpoints/240 --index runs/base/index --queries mine=questions.jsonl
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
  """The command line."""
  parser = Parser("attribute", __doc__, EXAMPLES)
  add = parser.add_argument
  add("checkpoints", nargs="+", type=Path, metavar="CKPT", help="<run>/checkpoints/<step>, or <run> for all it has")
  add("--data", nargs="+", default=[], metavar="DOMAIN=GLOB", help="the documents to score: text, .jsonl or .parquet")
  add("--queries", nargs="+", default=[], metavar="NAME=GLOB", help="texts to query with, by name")
  add("--output", type=Path, metavar="DIR", help="new folder for the score log")
  add("--index", type=Path, metavar="DIR", help="folder of gradient sketches: written with --data, read for --queries")
  add("--directions", type=int, default=16, metavar="R", help="--index: random directions per parameter and layer (16)")
  add("--rows", type=int, default=8, metavar="N", help="rows scored together (8)")
  add("--query-rows", type=int, default=8, metavar="N", help="rows of each query that are used (8)")
  add("--top", type=int, default=10, metavar="N", help="best documents shown for each query (10)")
  args = parser.parse(argv)
  _check(args)
  return args


def _check(args: argparse.Namespace) -> None:
  for name in ("directions", "rows", "query_rows", "top"):
    if getattr(args, name) < 1:
      raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
  if not args.index and not (args.data and args.queries and args.output):
    missing = [flag for flag in ("data", "queries", "output") if not getattr(args, flag)]
    raise ConfigError(f"--{missing[0]} is missing: give --data, --queries and --output, or --index")
  if args.index and args.output:
    raise ConfigError("--output is for exact scores and --index for sketches; give one of them")
  if args.index and not (args.data or args.queries):
    raise ConfigError("--index needs --data to write the index, or --queries to query it")
  if args.output and args.output.exists() and any(args.output.iterdir()):
    raise ConfigError(f"--output {args.output} is not empty; give a new folder")


def main(argv: list[str] | None = None) -> int:
  """Exit code 0, or 2 for wrong input; nothing has been written then."""
  return run_command(lambda: _run(parse(argv)))


def _run(args: argparse.Namespace) -> int:
  run_dir, paths = resolve(args.checkpoints)
  cfg = model_path.with_own_tokenizer(config.load(str(run_dir / "config.yml")), run_dir)
  from maxghost.attribution.corpus import Corpus

  corpus = Corpus(tuple(args.data), cfg.data, "--data") if args.data else None
  asked = Corpus(tuple(args.queries), cfg.data, "--queries") if args.queries else None
  queries = {}
  if asked:
    for name in asked.domains:
      queries[name], total = asked.sample(name, args.query_rows)
      if total > args.query_rows:
        print(f"maxghost: note: query '{name}' has {total} rows, the first {args.query_rows} are used", file=sys.stderr)
  if args.index:
    return _index(args, cfg, paths, corpus, asked, queries)
  return _exact(args, cfg, paths, corpus, queries)


def _exact(args, cfg: Config, paths: dict[int, Path], corpus, queries: dict) -> int:
  from maxghost import attribution, scorelog
  from maxghost.attribution import offline
  from maxghost.attribution.query import Query, ask

  writer = scorelog.Writer(args.output, tuple(queries), period=1, fingerprint=corpus.source.fingerprint)
  writer.restore(None)
  step_tokens = rows_per_step(cfg, next(iter(paths.values())).resolve().parents[1]) * cfg.data.max_target_length
  points = (load_point(cfg, step, path) for step, path in paths.items())
  count = offline.score(points, corpus, queries, writer, args.rows, step_tokens)
  writer.close()
  config.save(as_run(cfg, args.data, corpus.domains), args.output / "config.yml")
  print(f"scored {count:,} chunks against {len(queries)} queries at {len(paths)} checkpoints: {args.output}")
  log = attribution.load(args.output)
  for name in queries:
    answer = ask(log, Query(by="document", top=args.top, val_set=name))
    columns = answer.columns
    print(f"\nmost helpful for '{name}' (nats per exposure, summed over the checkpoints)")
    rows = zip(*(columns[c] for c in ("contribution", "domain", "path", "offset")), strict=True)
    for value, domain, path, offset in rows:
      print(f"  {value:+.3e}  {domain}:{path}:{offset}")
  print(f"\nmore: maxghost scores {args.output} --by document --set {next(iter(queries))}")
  return 0


def rows_per_step(cfg: Config, run_dir: Path) -> int:
  """Rows of a training step over all devices, from the run's `run_facts.json`; else those of one device."""
  path = run_dir / "run_facts.json"
  facts = json.loads(path.read_text("utf-8")) if path.is_file() else {}
  own = cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps
  return int(facts["rows per step"].replace(",", "")) if "rows per step" in facts else own


def as_run(cfg: Config, patterns: list[str], domains: tuple[str, ...]) -> Config:
  """The configuration that reads this corpus, by which `maxghost scores --text` and the report find documents."""
  files = tuple("=".join((name, str(Path(glob).absolute()))) for name, _, glob in (p.partition("=") for p in patterns))
  return config.replace(
    cfg, dataset_type="text", dataset_files=files, dataset_domains=(), dataset_domain_bytes=-1, dataset_shards=1,
    dataset_mixture=(), dataset_exclude_file="", ghost_val_sets=(domains[0],),
    ghost_val_fraction=0.0, ghost_enabled=False, ghost_select="none", ghost_reweight=(),
  )  # fmt: skip


def _index(args, cfg: Config, paths: dict[int, Path], corpus, asked, queries: dict) -> int:
  from maxghost.attribution import offline

  points = [load_point(cfg, step, path) for step, path in paths.items()]
  if corpus is not None:
    count = offline.build_index(points, corpus, args.index, args.rows, args.directions)
    print(f"indexed {count:,} chunks at {len(points)} checkpoints: {args.index}")
  if not queries:
    return 0
  for name, found in offline.nearest(args.index, points, queries, asked, args.top).items():
    print(f"\nnearest to '{name}' (estimated learning rate x product of gradients)")
    for value, (domain, path, offset, chunk, tokens) in found:
      print(f"  {value:+.3e}  {domain}:{path}:{offset}+{chunk} ({tokens} tokens)")
  return 0


def resolve(given: list[Path]) -> tuple[Path, dict[int, Path]]:
  """(run, {step: checkpoint}, ascending). Raises ConfigError for other paths, and for checkpoints of two runs."""
  paths: dict[int, Path] = {}
  runs = set()
  for path in given:
    folder = path / "checkpoints"
    if folder.is_dir():
      found = [entry for entry in folder.iterdir() if entry.name.isdecimal()]
      if not found:
        raise ConfigError(f"{path}: no checkpoint in {folder}")
    elif path.is_dir() and path.name.isdecimal():
      found = [path]
    else:
      what = "is not a checkpoint (<run>/checkpoints/<step>) or a run" if path.exists() else "does not exist"
      raise ConfigError(f"{path} {what}")
    for entry in found:
      paths[int(entry.name)] = entry
      runs.add(entry.resolve().parent.parent)
  if len(runs) > 1:
    raise ConfigError(f"the checkpoints are of different runs: {', '.join(sorted(map(str, runs)))}; give those of one")
  run_dir = runs.pop()
  if not (run_dir / "config.yml").is_file():
    raise ConfigError(f"{run_dir} has no config.yml, which says what model the checkpoints are of")
  return run_dir, dict(sorted(paths.items()))


def load_point(cfg: Config, step: int, path: Path):
  """The Point of a checkpoint. JAX is imported here. Raises ConfigError if it does not fit the configuration."""
  import jax
  import numpy as np
  from flax import nnx

  from maxghost.attribution.offline import Point
  from maxghost.checkpoint.checksum import checksums
  from maxghost.data.hashing import text_hash
  from maxghost.interop.load_tree import load_tree
  from maxghost.optimizers import learning_rate_schedule
  from maxghost.training import resume, state
  from maxghost.training.devices import configure_jax

  configure_jax(cfg)
  graphdef, abstract = nnx.split(nnx.eval_shape(lambda: state.create(cfg).model))
  wanted = resume.to_tree(resume.abstract_arrays(abstract))
  tree = load_tree(path, {"model": wanted})["model"]
  model = nnx.merge(graphdef, resume.from_tree(tree, abstract))
  rate = np.asarray(learning_rate_schedule(cfg.optimizer, cfg.run.steps)(step)).item()
  digest = "-".join(map(str, checksums([np.asarray(leaf) for leaf in jax.tree.leaves(tree)])))
  return Point(step, model, rate, f"{int(text_hash(digest)):016x}")


if __name__ == "__main__":
  sys.exit(main())
