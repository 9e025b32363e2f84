"""Plants harmful answers among conversations, trains with a configuration, and reports how well scores find them."""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxghost import attribute, config, report, scorelog, train
from maxghost.training import run_directory

KINDS = ("wrong", "foreign", "shuffled")
Foreign = Callable[[str, random.Random], str]


def harmful(kind: str, answer: str, others: list[str], foreign: Foreign, rng: random.Random) -> str:
  """The answer to another question, one in another language, or the answer with its words or letters shuffled."""
  if kind == "wrong":
    return rng.choice([other for other in others if other != answer] or [answer[::-1]])
  if kind == "foreign":
    return foreign(answer, rng)
  gap = " " if " " in answer else ""
  parts = answer.split(" ") if gap else list(answer)
  return gap.join(rng.sample(parts, len(parts)))


def plant(records: list[dict], share: float, seed: int, foreign: Foreign, wrong: list[dict]) -> list[dict]:
  """Returns the records, a share of them with harmful answers; the field `planted` names the kind, "" for a sound one.

  wrong: records whose answers are planted as wrong ones.
  """
  rng, others = random.Random(seed), [record["messages"][-1]["content"] for record in wrong]
  out = []
  for record in records:
    kind, last = rng.choice(KINDS) if rng.random() < share else "", record["messages"][-1]
    changed = harmful(kind, last["content"], others, foreign, rng) if kind else last["content"]
    kind = kind if changed != last["content"] else ""
    out.append(record | {"messages": [*record["messages"][:-1], last | {"content": changed}], "planted": kind})
  return out


def write(path: Path, records: list[dict]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def auroc(planted: np.ndarray, value: np.ndarray) -> float:
  """Chance that a planted example has a lower value than a sound one; equal values count half."""
  if planted.all() or not planted.any():
    return float("nan")
  low, high = value[planted][:, None], value[~planted][None]
  return float((low < high).mean() + 0.5 * (low == high).mean())


def gradient_norms(run: Path, pool: str) -> dict[tuple[str, str, int], float]:
  """{(domain, path, offset): norm of the gradient of an example's mean loss} at the last checkpoint of a run.

  pool: `domain=glob` of the examples.
  """
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from maxghost.attribution.corpus import Corpus
  from maxghost.ghost.schedules import passes
  from maxghost.objectives import create
  from maxghost.training import state

  _, paths = attribute.resolve([Path(run)])
  cfg = attribute.scoring_config(config.load(str(Path(run) / "config.yml")), paths)
  corpus, objective = Corpus((pool,), cfg.data, "--data", cfg.records), create(cfg)
  graphdef = state.abstract_split(cfg)[0]

  @jax.jit
  def norm(train_state, row, slot):
    held = nnx.merge(graphdef, train_state)
    inner, params, rest = nnx.split(held.model, held.optimizer.wrt, ...)

    def loss(params):
      losses, weights = objective(nnx.merge(inner, params, rest), row)
      return passes.mean_loss(losses, jnp.where(objective.units(row)[1] == slot, weights, 0))

    return jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(jax.grad(loss)(params))))

  *_, point = attribute.points(cfg, paths)
  found = {}
  for batch in map(objective.prepare, corpus.batches(8)):
    for row, slot in np.argwhere(batch.document_BS >= 0):
      one = jax.tree.map(lambda x, row=row: jax.lax.dynamic_slice_in_dim(x, row, 1), batch.arrays)
      found[tuple(corpus.document_record(batch.document_BS[row, slot])[:3])] = float(norm(point.state, one, 1 + slot))
  return found


def less(run: Path, pool: str, target: str) -> dict[tuple[str, str, int], float]:
  """{(domain, path, offset): value of an example for the target} by LESS, from the checkpoints of a run."""
  with tempfile.TemporaryDirectory() as folder:
    output = Path(folder) / "less.json"
    code = attribute.main(
      [str(run), "--method", "less", "--data", pool, "--queries", f"target={target}", "--query-rows", "16", "--index",
       f"{folder}/less", "--directions", "64", "--top", "1000000", "--output", str(output)]
    )  # fmt: skip
    if code:
      sys.exit(code)
    chunks = json.loads(output.read_text())["queries"]["target"]
  return {(chunk["domain"], chunk["path"], chunk["offset"]): chunk["contribution"] for chunk in chunks}


def values_of(run: str | Path) -> dict[str, np.ndarray]:
  """Of each example of a run: domain, path, offset, planted, and the values to sort by; low values are bad."""
  log = scorelog.load(run)
  key = np.stack([log["domain"], log["path"], log["offset"].astype(str)])
  (domain, path, offset), place = np.unique(key, axis=1, return_inverse=True)
  place = place.ravel()
  count = np.bincount(place)
  planted = np.empty(len(count), object)
  planted[place] = np.array(log["planted"])
  total = lambda values: np.bincount(place, np.asarray(values, float).reshape(len(place), -1)[:, 0])  # noqa: E731
  return {
    "domain": domain, "path": path, "offset": offset.astype(int), "planted": planted,
    "score": total(log["contribution"]), "score, mean of its tokens": total(log["dot"]) / count,
    "loss, highest first": -total(log["loss"]) / count, "length, longest first": -total(log["tokens"]) / count,
    "random": np.random.default_rng(0).random(len(count)),
  }  # fmt: skip


def tell(run: str, pool: str = "", target: str = "") -> dict[str, float]:
  """Prints the AUROC of planted examples against sound ones of their task and against all; returns the latter two.

  pool: `domain=file` of the examples and target: file of the target, for the baselines that need gradients; or none.
  """
  values = values_of(run)
  domain, path, offset, planted = (values.pop(name) for name in ("domain", "path", "offset", "planted"))
  if pool:
    for name, found in (
      ("gradient norm, largest first", {key: -value for key, value in gradient_norms(Path(run), pool).items()}),
      ("LESS", less(Path(run), pool, target)),
    ):
      values[name] = np.array([found[key] for key in zip(domain.tolist(), path.tolist(), offset.tolist(), strict=True)])
  is_planted = planted != ""
  task = np.isin(domain, np.unique(domain[is_planted]))
  score, worst = values["score"], np.argsort(values["score"])[: len(domain) // 10]
  print(
    f"\n{len(domain):,} examples, {task.sum():,} of the target's task, {is_planted.sum():,} of them planted. Of the "
    f"tenth of all with the lowest scores, {is_planted[worst].mean():.0%} are planted; of all, {is_planted.mean():.0%}."
    f"\nAUROC, 0.5 = chance: planted against all others, and against sound ones of their task; there also by kind"
  )
  print(f"{'':30}{'all':>8}{'task':>8}" + "".join(f"{kind:>10}" for kind in KINDS))
  for name, value in values.items():
    parts = [(~is_planted & task) | (planted == kind) for kind in KINDS]
    row = [auroc(is_planted, value), auroc(is_planted[task], value[task])]
    row += [auroc(is_planted[part], value[part]) for part in parts]
    print(f"{name:30}{row[0]:>8.3f}{row[1]:>8.3f}" + "".join(f"{part:>10.3f}" for part in row[2:]))
  return {"all": auroc(is_planted, score), "task": auroc(is_planted[task], score[task])}


def check(arguments: list[str]) -> None:
  """Ends the program if training would refuse these arguments, before anything is made or trained for it."""
  try:
    config.load(*arguments)
  except config.ConfigError:
    sys.exit(train.main(arguments))  # which says what is wrong


def finish(arguments: list[str]) -> config.Config:
  """Trains with these arguments, or continues the run, and returns the configuration.

  Ends the program with the run's exit code if the run failed or was stopped before its last step.
  """
  if code := train.main(arguments):
    sys.exit(code)
  cfg = config.load(*arguments)
  existing = run_directory.inspect(cfg)
  if existing.completed_steps != cfg.run.steps:
    print(f"{existing.path} was stopped before its last step; what follows needs all of it", file=sys.stderr)
    sys.exit(0)
  return cfg


def main(config_file: str, prepare: Callable[[], None], argv: list[str]) -> int:
  """Makes the data, trains, writes the report, and reports how well the planted examples are found.

  argv: `key=value` settings of the run, and --baselines for those that need gradients of each example.
  """
  parser = argparse.ArgumentParser(usage="%(prog)s [--baselines] [key=value ...]", allow_abbrev=False)
  parser.add_argument("--baselines", action="store_true", help="also the gradient norm and LESS")
  options, changes = parser.parse_known_args(argv)
  check([config_file, *changes])
  begin = time.perf_counter()
  prepare()
  cfg = finish([config_file, *changes])
  run = str(Path(cfg.run.base_output_directory) / cfg.run.run_name)
  if code := report.main([run]):
    return code
  used = resource.getrusage(resource.RUSAGE_SELF)
  print(f"\n{time.perf_counter() - begin:.0f} s, {used.ru_utime:.0f} s of processor time")
  target, *_ = cfg.data.ghost_val_sets
  tell(run, *((cfg.data.dataset_files[0], target.partition("=")[2]) if options.baselines else ()))
  return 0
