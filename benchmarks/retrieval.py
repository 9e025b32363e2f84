"""Which document states the fact? Mean reciprocal rank of ours and of others, on facts planted in the default corpus.

  python benchmarks/retrieval.py [--folder DIR] [--seeds 0,1,2] [--places 40] [--steps 300] [--every 2] [key=value ...]

For each seed `_facts.py` invents places and facts; a run of the default configuration trains on them (40 % of its rows)
and on a part of the default corpus, and keeps three checkpoints. Then every second fact is asked for: a query is the
loss of the answer given the question, as in `maxghost ask`. Candidates are all documents of facts and 40 kB of the
corpus. A folder with a run is used again. "words": without the documents that only use a question's words; ± is the
standard error of the mean over the seeds. Scores of each method are kept in SEED/scores.npz. Needs the `dev` extra.
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
from maxghost.attribution.index import NATS, Index, open_index
from maxghost.attribution.sources import Sources

DOMAINS = ("code", "docstrings", "manual", "tables")
ASKED_BYTES = 10_000  # of each domain of the default corpus among the candidates
CHECKPOINTS = 3


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
      "dataset_type=text", f"dataset_files=[{files}]", f"dataset_mixture=[{shares}]", "ghost_enabled=false",
      "eval_interval=-1", f"checkpoint_period={steps // CHECKPOINTS}", "max_num_checkpoints_to_keep=0",
      "enable_tensorboard=false",
    ]  # fmt: skip
    code = train.main([*made, *overrides])
    if code:
      sys.exit(code)
  return folder / "run"


def opened(folder: Path, run: Path, direction: str) -> Sources:
  """With an index of all checkpoints along the optimizer's direction, or of the newest along the plain gradient."""
  place, newest = folder / f"index_{direction}", max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
  if not (place / "index.json").is_file():
    files = [f"facts={folder}/facts.jsonl", *(f"{name}={folder}/{name}_asked.jsonl" for name in DOMAINS)]
    asks = ["--data", *files, "--index", str(place), "--direction", direction]
    if attribute.main([str(newest if direction == "sgd" else run), *asks]):
      sys.exit(2)
  return ask.open_sources(*ask.opened(newest, place))


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


def measured(folder: Path, asked: list[_facts.Fact], run: Path) -> tuple[dict, list[str], list]:
  """({method: scores [Q, N]}, text and id of each candidate)."""
  scores, texts, ids = {}, [], []
  for direction in ("auto", "sgd"):
    sources = opened(folder, run, direction)
    held: Index = sources.index
    encode = lambda text: sources.tokenizer.encode([text.encode()])[0].tolist()  # noqa: B023, E731
    sketches = []
    for fact in asked:
      prompt, answer = encode(fact.question + " "), encode(fact.answer)
      found = sources._asked(np.array([sources.tokenizer.bos_id, *prompt, *answer]), len(answer))[1]
      sketches.append([token_AMR.sum(0) for token_AMR in found])
    queries = [np.stack(own) for own in zip(*sketches, strict=True)]
    if direction == "sgd":
      scores["TracIn: product of gradients"] = held.scores(queries, NATS)
      scores["similarity, plain gradients"] = held.scores(queries)
      continue
    texts, ids, about = sources._texts_of(list(range(len(held.ids)))), held.ids, open_index(held.folder)
    lexical = np.stack([words.Words(held.folder, len(texts)).scores(f"{f.question} {f.answer}") for f in asked])
    last = Index(held.folder, about | {"checkpoints": about["checkpoints"][-1:]})
    for name, index, own in (("", last, queries[-1:]), (f", {len(queries)} checkpoints", held, queries)):
      similar = index.scores(own)
      scores[f"nats: product through the optimizer{name}"] = index.scores(own, NATS)
      scores[f"similarity (whitened unit blocks){name}"] = similar
      fused = [words.fused(a, b) for a, b in zip(similar, lexical, strict=True)]
      scores[f"hybrid of both (the default){name}"] = np.stack(fused)
    scores["BM25"] = lexical
    hidden_nD = embeddings(sources, texts)
    asked_QD = embeddings(sources, [f"{f.question} {f.answer}" for f in asked])
    scores["embedding: mean hidden state"] = asked_QD @ hidden_nD.T
    scores["random"] = np.random.default_rng(0).random(lexical.shape)
  return scores, texts, ids


def table(folder: Path, seed: int, args) -> dict[str, dict[str, float]]:
  """{method: {figure: value}} of a seed."""
  folder = folder / f"seed{seed}"
  folder.mkdir(parents=True, exist_ok=True)
  facts = prepare(folder, seed, args.places)
  run = trained(folder, seed, args.steps, args.overrides)
  lines = (folder / "facts.jsonl").read_bytes().split(b"\n")
  starts = dict(zip(np.cumsum([0, *(len(line) + 1 for line in lines[:-1])]).tolist(), range(len(lines)), strict=True))
  asked = facts[:: args.every]
  scores, texts, ids = measured(folder, asked, run)
  line_N = np.array([starts[i[2]] if i[0] == "facts" else -1 for i in ids])
  only_words = np.array(["only shrugged" in text for text in texts])
  right_QN = np.stack([np.isin(line_N, fact.stating) for fact in asked])
  np.savez(folder / "scores.npz", right_QN=right_QN, only_words=only_words, **scores)
  print(f"seed {seed}: {len(asked)} facts, {len(ids)} candidates, {only_words.sum()} of which only use the words")
  rows = {}
  for name, score_QN in scores.items():
    pairs = list(zip(score_QN, right_QN, strict=True))
    ranks = np.array([rank(score_N, right_N) for score_N, right_N in pairs])
    without = np.array([rank(np.where(only_words, -np.inf, score_N), right_N) for score_N, right_N in pairs])
    rows[name] = {"MRR all": np.mean(1 / ranks), "MRR words": np.mean(1 / without), "first": np.mean(ranks == 1)}
    rows[name] = {figure: float(value) for figure, value in rows[name].items()}
  return rows


def main() -> int:
  args = _measure.arguments(__doc__, folder="runs/retrieval", seeds="0,1,2", places=40, steps=300, every=2)
  seeds = [int(seed) for seed in args.seeds.split(",")]
  tables = [table(Path(args.folder), seed, args) for seed in seeds]
  rows = []
  for name in tables[0]:
    row: dict = {"method": name}
    for figure in tables[0][name]:
      values = np.array([one[name][figure] for one in tables])
      error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
      row[figure], row[f"{figure} ±"] = float(values.mean()), float(error)
    rows.append(row)
    shown = [f"{figure} {row[figure]:.3f} ± {row[figure + ' ±']:.3f}" for figure in tables[0][name]]
    print(f"{name:55s}", *shown, sep="  ")
  if args.json:
    with args.json.open("a") as file:
      line = {"benchmark": "retrieval", "seeds": seeds, "rows": rows, "tables": tables}
      file.write(json.dumps(line | _measure.machine()) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(_measure.run(main))
