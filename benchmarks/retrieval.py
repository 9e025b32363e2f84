"""Which document states the fact? Mean reciprocal rank of ours and of others, on facts planted in the default corpus.

  python benchmarks/retrieval.py [--folder DIR] [--seed 0] [--places 40] [--steps 300] [--every 2] [key=value ...]

`_facts.py` invents places and facts; a run of the default configuration trains on them (40 % of its rows) and on a part
of the default corpus. Then every second fact is asked for: a query is the loss of the answer given the question, as in
`maxghost ask`. Candidates are all documents of facts and 40 kB of the corpus. A folder with a run is used again.
"words": without the documents that only use a question's words. Needs the `dev` extra.
"""

import json
import sys
from pathlib import Path

import _facts
import _measure
import jax
import numpy as np
from flax import nnx

from maxghost import ask, attribute, config, data, train
from maxghost.attribution import words
from maxghost.attribution.index import NATS, Index
from maxghost.attribution.sources import Sources

DOMAINS = ("code", "docstrings", "manual", "tables")
ASKED_BYTES = 10_000  # of each domain of the default corpus among the candidates


def prepare(folder: Path, seed: int, places: int) -> list[_facts.Fact]:
  """Writes the corpus: facts, and parts of the default corpus to train on and to search."""
  facts = _facts.plant(folder / "facts.jsonl", seed, places)
  source = data.load_dataset(config.replace(config.load(), dataset_domain_bytes=60_000).data).source
  for number, domain in enumerate(source.domains):
    texts = source.texts(np.flatnonzero(source.domain_numbers(np.arange(len(source))) == number))
    lines = [json.dumps({"text": text.decode("utf-8", "replace")}) for text in texts]
    (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n")
    size = np.cumsum([min(len(text), 6000) for text in texts])
    few = [json.dumps({"text": text[:6000].decode("utf-8", "replace")}) for text in texts]
    (folder / f"{domain}_asked.jsonl").write_text("\n".join(few[: 1 + int(np.searchsorted(size, ASKED_BYTES))]) + "\n")
  return facts


def trained(folder: Path, seed: int, steps: int, overrides: list[str]) -> Path:
  if not (folder / "run" / "checkpoints").is_dir():
    files = ",".join(f"{name}={folder}/{name}.jsonl" for name in ("facts", *DOMAINS))
    shares = "facts=0.4,code=0.15,docstrings=0.15,manual=0.15,tables=0.15"
    made = [
      "run_name=run", f"base_output_directory={folder}", f"steps={steps}", f"init_weights_seed={seed}",
      "dataset_type=text", f"dataset_files=[{files}]", f"dataset_mixture=[{shares}]", "ghost_val_sets=manual",
      "eval_interval=-1", f"checkpoint_period={steps}", "enable_tensorboard=false",
    ]  # fmt: skip
    code = train.main([*made, *overrides])
    if code:
      sys.exit(code)
  return folder / "run"


def indexed(folder: Path, run: Path, direction: str) -> Path:
  """An index along the optimizer's direction, or along the plain gradient."""
  place = folder / f"index_{direction}"
  if not (place / "index.json").is_file():
    files = [f"facts={folder}/facts.jsonl", *(f"{name}={folder}/{name}_asked.jsonl" for name in DOMAINS)]
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    if attribute.main([str(newest), "--data", *files, "--index", str(place), "--direction", direction]):
      sys.exit(2)
  return place


def opened(run: Path, place: Path) -> Sources:
  newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
  run_dir, cfg, paths, place = ask.opened(newest, place)
  return ask.open_sources(run_dir, cfg, paths, place)


def embeddings(sources: Sources, texts: list[str], length: int = 256) -> np.ndarray:
  """Unit mean of the final hidden states of each text, [n, D]; the model's own."""
  held = nnx.merge(*_graph(sources))
  run = jax.jit(lambda *batch: held.model.hidden(*batch).x_BTD)
  found = []
  for start in range(0, len(texts), 16):
    ids = [sources.tokenizer.encode([text.encode()])[0][:length] for text in texts[start : start + 16]]
    tokens, mask = np.zeros((16, length), np.int32), np.zeros((16, length), np.int32)
    for row, own in enumerate(ids):
      tokens[row, : len(own)], mask[row, : len(own)] = own, 1
    hidden = np.asarray(run(tokens, np.tile(np.arange(length, dtype=np.int32), (16, 1)), mask))
    found.append((hidden * mask[..., None]).sum(1)[: len(ids)] / mask.sum(1)[: len(ids), None])
  mean = np.concatenate(found)
  return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def _graph(sources: Sources):
  from maxghost.training import state

  return state.abstract_split(sources.cfg)[0], sources._held[-1][0]


def rank(score_N: np.ndarray, right: np.ndarray) -> int:
  """Of the best right one; ties count against it."""
  return int(1 + ((score_N >= score_N[right].max()) & ~right).sum())


def main() -> int:
  args = _measure.arguments(__doc__, folder="runs/retrieval", seed=0, places=40, steps=300, every=2)
  folder = Path(args.folder) / f"seed{args.seed}"
  folder.mkdir(parents=True, exist_ok=True)
  facts = prepare(folder, args.seed, args.places)
  run = trained(folder, args.seed, args.steps, args.overrides)
  lines = (folder / "facts.jsonl").read_bytes().split(b"\n")
  starts = dict(zip(np.cumsum([0, *(len(line) + 1 for line in lines[:-1])]).tolist(), range(len(lines)), strict=True))
  asked, scores = facts[:: args.every], {}
  for direction in ("auto", "sgd"):
    sources = opened(run, indexed(folder, run, direction))
    held: Index = sources.index
    encode = lambda text: sources.tokenizer.encode([text.encode()])[0].tolist()  # noqa: B023, E731
    texts = sources._texts_of(list(range(len(held.ids))))
    sketches = []
    for fact in asked:
      prompt, answer = encode(fact.question + " "), encode(fact.answer)
      sketches.append(sources._asked(np.array([sources.tokenizer.bos_id, *prompt, *answer]), len(answer))[1][0].sum(0))
    queries = [np.stack(sketches)]
    if direction == "sgd":
      scores["TracIn: product of gradients"] = held.scores(queries, NATS)
      scores["similarity, plain gradients"] = held.scores(queries)
      continue
    lexical = np.stack([words.Words(held.folder, len(texts)).scores(f"{f.question} {f.answer}") for f in asked])
    own = held.scores(queries)
    scores["nats: product through the optimizer"] = held.scores(queries, NATS)
    scores["similarity (whitened unit blocks)"] = own
    scores["BM25"] = lexical
    scores["hybrid of both (the default)"] = np.stack([words.fused(a, b) for a, b in zip(own, lexical, strict=True)])
    hidden_nD = embeddings(sources, texts)
    asked_QD = embeddings(sources, [f"{f.question} {f.answer}" for f in asked])
    scores["embedding: mean hidden state"] = asked_QD @ hidden_nD.T
    scores["random"] = np.random.default_rng(0).random(own.shape)
    line_N = np.array([starts[i[2]] if i[0] == "facts" else -1 for i in held.ids])
  only_words = np.array(["only shrugged" in text for text in texts])
  rows = []
  for name, score_QN in scores.items():
    ranks = [[], []]
    for fact, score_N in zip(asked, score_QN, strict=True):
      right = np.isin(line_N, fact.stating)
      ranks[0].append(rank(score_N, right))
      ranks[1].append(rank(np.where(only_words, -np.inf, score_N), right))
    row = {f"MRR {kind}": float(np.mean(1 / np.array(own))) for kind, own in zip(("all", "words"), ranks, strict=True)}
    rows.append({"method": name} | row | {"first": float(np.mean(np.array(ranks[0]) == 1))})
  print(f"{len(asked)} facts, {len(line_N)} candidates, {only_words.sum()} of which only use the questions' words")
  for row in rows:
    print("  ".join(f"{row['method']:40s}" if k == "method" else f"{k} {v:.3f}" for k, v in row.items()))
  if args.json:
    with args.json.open("a") as file:
      file.write(json.dumps({"benchmark": "retrieval", "seed": args.seed, "rows": rows} | _measure.machine()) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
