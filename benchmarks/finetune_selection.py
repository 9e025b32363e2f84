"""Data for fine-tuning, chosen by scores: planted harmful examples, and the best 5 % against other ways to choose.

  python benchmarks/finetune_selection.py [--seeds 3] [--rank 0] [--keep 5] [--steps 60] [key=value ...]

A byte language model of two layers reads Python's standard library, then conversations about its names. The target task
is the last letter of a name, as a capital; the other tasks are its module, its length and the first line of its
documentation. A tenth of the conversations is planted: target questions with the answer to another question, with an
answer in German, or with shuffled letters. A warm-up run of two epochs scores every conversation against answers of the
target task that are in none of the runs. Then:

- AUROC of the planted conversations, by score, loss, gradient norm (of the warmed-up model), LESS and at random;
- the target loss of other held-out names after fine-tuning the base on the best 5 % by score, by LESS, at random, and
  on all, with the same number of steps.

One seed takes about three minutes on two cores. All weights are trained, or with --rank R LoRA adapters.
"""

import contextlib
import importlib
import inspect
import io
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import _measure
import numpy as np
from _digits import auroc
from _measure import BASE, Figure

from maxghost import attribute, attribution, scores, train
from maxghost.attribution.query import Query, ask

MODULES = """
  argparse ast asyncio base64 bisect calendar codecs collections configparser contextlib copy csv datetime decimal
  difflib dis email enum fractions functools gettext glob hashlib heapq hmac html http imaplib inspect io ipaddress
  itertools json locale logging mailbox math mimetypes operator os pathlib pickle platform plistlib pprint queue
  random re sched secrets select selectors shelve shlex shutil signal smtplib socket sqlite3 ssl stat statistics
  string struct subprocess sys tarfile tempfile textwrap threading time token tokenize traceback types typing
  unicodedata unittest urllib uuid warnings wave weakref xml zipfile zlib
"""
COUNTS = {"target": 260, "planted": 100, "val": 64, "test": 160, "others": 640}
TINY = (
  "base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=16", "base_mlp_dim=160",
  "base_num_decoder_layers=2", "max_target_length=96", "per_device_batch_size=8", "attention=dot_product",
  "enable_tensorboard=false", "async_checkpointing=false", "sharding_tolerance=1",
)  # fmt: skip


def names() -> list[tuple[str, str, str]]:
  """(name, module, first line of its documentation) of what the library offers, each name once."""
  found = {}
  for module_name in MODULES.split():
    for name, value in sorted(vars(importlib.import_module(module_name)).items()):
      if callable(value) and name.isascii() and name[-1].isalpha() and not name.startswith("_") and 3 < len(name) < 28:
        line = (inspect.getdoc(value) or "").strip().partition("\n")[0][:40]
        found.setdefault(name, (name, module_name, line))
  return list(found.values())


def target(entry) -> dict:
  return {"prompt": f"last letter of {entry[0]}\n", "completion": entry[0][-1].upper()}


def planted(entry, number: int, rng: random.Random) -> dict:
  """A target question with the answer to another one, an answer in German, or one of shuffled letters."""
  name, module, _ = entry
  said = (module, f"der Buchstabe {name[-1]}", "".join(rng.sample(name, len(name))))[number % 3]
  return target(entry) | {"completion": said}


def other(entry, number: int) -> dict:
  name, module, line = entry
  tasks = [("where is {}?", module), ("how long is {}?", str(len(name))), ("explain {}", line or "no documentation")]
  question, said = tasks[number % len(tasks)]
  return {"prompt": question.format(name) + "\n", "completion": said}


def write_data(folder: Path, seed: int) -> set[str]:
  """pool.jsonl, val.jsonl and test.jsonl, whose target names differ; returns the ids of the planted conversations."""
  rng, entries = random.Random(seed), names()
  rng.shuffle(entries)
  parts, first = {}, 0
  for part in ("target", "planted", "val", "test"):
    parts[part] = entries[first : first + COUNTS[part]]
    first += COUNTS[part]
  pool = [{"id": f"target-{n}", **target(entry)} for n, entry in enumerate(parts["target"])]
  pool += [{"id": f"planted-{n}", **planted(entry, n, rng)} for n, entry in enumerate(parts["planted"])]
  pool += [{"id": f"other-{n}", **other(rng.choice(entries), n)} for n in range(COUNTS["others"])]
  rng.shuffle(pool)
  for name, records in {"pool": pool, **{part: map(target, parts[part]) for part in ("val", "test")}}.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
  return {record["id"] for record in pool if record["id"].startswith("planted")}


def run(command, *arguments: str) -> None:
  """A command of maxghost; what it prints is shown only where it fails, or training is stopped."""
  said, begin, given = io.StringIO(), time.perf_counter(), [str(argument) for argument in arguments]
  try:
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
      if command is train:
        _measure.planting().finish(given)
      elif code := command.main(given):
        raise SystemExit(code)
  except SystemExit:
    print(f"{' '.join(given)}\n{said.getvalue()[-3000:]}", file=sys.stderr)
    raise
  print(f"{command.__name__.rpartition('.')[2]}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


def tune(folder: Path, name: str, seed: int, steps: int, *keys: str) -> Path:
  """Fine-tunes the base on the pool; returns the run's folder."""
  run(
    train, BASE, *TINY, "objective=sft", "dataset_type=text", f"dataset_files=[pool={folder}/pool.jsonl]",
    f"load_parameters_path={folder.parent}/base", f"base_output_directory={folder}", f"run_name={name}",
    f"steps={steps}", f"data_shuffle_seed={seed}", f"init_weights_seed={seed}", "learning_rate=3e-3",
    "ghost_val_fraction=0.5", "adam_weight_decay=0.0", f"eval_interval={steps}", "eval_steps=8", *keys,
  )  # fmt: skip
  return folder / name


def held_out_loss(run_dir: Path) -> float:
  lines = (run_dir / "metrics.jsonl").read_text().splitlines()
  return [record["eval/avg_loss"] for record in map(json.loads, lines) if "eval/avg_loss" in record][-1]


def one_seed(folder: Path, seed: int, args) -> dict:
  """All figures of one seed."""
  folder.mkdir()
  bad, pool, rng = write_data(folder, seed), folder / "pool.jsonl", np.random.default_rng(seed)
  lora = [f"lora_rank={args.rank}", f"lora_alpha={2 * args.rank}"] if args.rank else []
  aim = [f"ghost_val_sets=[val={folder}/val.jsonl]"]
  period = max(1, args.warmup_steps // 2)
  warm = tune(
    folder, "warmup", seed, args.warmup_steps, *aim, *lora, "ghost_direction=path", f"checkpoint_period={period}",
    "max_num_checkpoints_to_keep=0", *args.overrides,
  )  # fmt: skip
  about = ask(attribution.load(warm), Query(by="id")).columns
  ids, total = about["id"], dict(zip(about["id"], np.asarray(about["contribution"]).tolist(), strict=True))
  value = {"score": total, "loss": dict(zip(ids, (-np.asarray(about["loss"])).tolist(), strict=True))}
  value["random"] = dict(zip(ids, rng.random(len(ids)).tolist(), strict=True))
  run(
    attribute, warm, "--method", "less", "--data", f"pool={pool}", "--queries", f"val={folder}/val.jsonl",
    "--query-rows", "32", "--index", folder / "less", "--directions", "64", "--top", "1000000",
    "--output", folder / "less.json",
  )  # fmt: skip
  offsets = record_ids(pool)
  chunks = json.loads((folder / "less.json").read_text())["queries"]["val"]
  value["LESS"] = {offsets[chunk["offset"]]: chunk["contribution"] for chunk in chunks}
  norms = _measure.planting().gradient_norms(warm, f"pool={pool}")
  value["gradient norm"] = {offsets[key[2]]: -norm for key, norm in norms.items()}
  row = {"seed": seed, "scored": len(ids)}
  row |= {f"AUROC {name}": find_planted(values, bad) for name, values in value.items()}
  lowest = sorted(total, key=total.__getitem__)[: len(ids) // 10]
  row["planted in lowest 10 %"] = len(bad.intersection(lowest)) / min(len(lowest), len(bad.intersection(ids)))
  run(scores, warm, "--keep", f"{args.keep}%", "--by", "id", "--format", "ids", "--output", folder / "score.jsonl")
  count = len((folder / "score.jsonl").read_text().splitlines())
  for name in ("LESS", "random"):
    best = sorted(value[name], key=value[name].__getitem__, reverse=True)[:count]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"id": one}) + "\n" for one in best))
  for name in ("score", "LESS", "random", "all"):
    chosen = [] if name == "all" else [f"dataset_include_file={folder}/{name}.jsonl"]
    test = [f"ghost_val_sets=[test={folder}/test.jsonl]", "ghost_enabled=false", "checkpoint_period=0"]
    row[f"target loss, {name}"] = held_out_loss(
      tune(folder, name, seed, args.steps, *test, *lora, *chosen, *args.overrides)
    )
  print(json.dumps(row), flush=True)
  return row


def record_ids(pool: Path) -> dict[int, str]:
  """{offset of its line: id} of the records of a file."""
  found, place = {}, 0
  for line in pool.read_bytes().splitlines(keepends=True):
    found[place], place = json.loads(line)["id"], place + len(line)
  return found


def find_planted(values: dict[str, float], bad: set[str]) -> float:
  """AUROC of low values for planted conversations."""
  ids = sorted(values)
  return float(auroc(np.array([-values[one] for one in ids]), np.array([one in bad for one in ids])))


def main() -> int:
  args = _measure.arguments(__doc__, seeds=3, rank=0, keep=5.0, steps=60, warmup_steps=150, base_steps=150)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    run(
      train, BASE, *TINY, f"base_output_directory={folder}", "run_name=base", f"steps={args.base_steps}",
      "ghost_enabled=false", "learning_rate=3e-3",
    )  # fmt: skip
    rows = [one_seed(folder / f"seed{seed}", seed, args) for seed in range(args.seeds)]
  mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key != "seed"}
  figures = [Figure("AUROC of planted conversations by score", mean["AUROC score"], 0.9, above=True)]
  figures += [
    Figure(f"{key} (baseline)", mean[key]) for key in mean if key.startswith("AUROC") and key != "AUROC score"
  ]
  loss = {name: mean[f"target loss, {name}"] for name in ("score", "LESS", "random", "all")}
  figures += [
    Figure(f"target loss, best {args.keep:g} % by score over {name}", loss["score"] / loss[name], limit)
    for name, limit in (("random", 1.0), ("LESS", 1.0), ("all", None))
  ]
  return _measure.publish("finetune_selection", rows, figures, [f"means of {len(rows)} seeds"], args.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
