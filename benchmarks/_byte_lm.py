"""The small language model of the quality suite: bytes of six domains, rows cut to one length, the trainer's own step.

D domains, N chunks of a domain, B rows, T positions, K validation sets, S steps.
"""

import collections
import dataclasses
import functools
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _digits import spearman
from flax import nnx

from maxghost import config
from maxghost.attribution.words import fused
from maxghost.data.sources import stdlib, synthetic, text
from maxghost.data.sources.files import expand
from maxghost.ghost import GhostEngine
from maxghost.ghost.schedules import Model, passes
from maxghost.objectives import LanguageModelLoss
from maxghost.optimizers import make_optimizer
from maxghost.training import state as state_lib
from maxghost.training.devices import compiler_options
from maxghost.training.step import make_train_step

LENGTH, ROWS, VAL_ROWS = 128, 16, 16
PASSAGE = 8  # consecutive chunks that one asked-for passage of the fetched corpus has
NUM_TRAIN, NUM_POOL = 400, 100  # chunks of each domain: trained on; asked for (never trained on)
DOMAINS = (*stdlib.DOMAINS, "words", "brackets")
SIZES = {
  "base_emb_dim": 48, "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 24, "base_mlp_dim": 128,
  "base_num_decoder_layers": 2, "vocab_size": 259, "max_target_length": LENGTH, "per_device_batch_size": ROWS,
  "attention": "dot_product", "ghost_detail": "total", "lr_schedule_type": "constant", "ghost_val_refresh_steps": 0,
  "ghost_val_batch_size": VAL_ROWS, "adam_weight_decay": 0.01, "steps": 240,
}  # fmt: skip
QUERIES = ("code", "manual", "tables")  # the K sets that a run is scored against


@dataclasses.dataclass(frozen=True)
class Corpus:
  """train_DN, val_DN, pool_DN: int32[D, N, T + 1] chunks of each domain."""

  train: np.ndarray
  val: np.ndarray
  pool: np.ndarray

  def mixed(self, steps: int, seed: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """(chunks [S, B, T + 1], domain of each [S, B]): the same number of every domain in expectation."""
    rng = np.random.default_rng((seed, 4))
    domain = rng.integers(len(self.train), size=(steps, rows))
    return self.train[domain, rng.integers(NUM_TRAIN, size=(steps, rows))], domain


def load_corpus() -> Corpus:
  """Chunks spread evenly over each domain's text: four domains of the standard library, two made-up ones."""
  documents = [*stdlib.load(domain_bytes=400_000), *synthetic.load(("words", "brackets"))]
  need = NUM_TRAIN + VAL_ROWS + NUM_POOL
  parts = []
  for number, domain in enumerate(DOMAINS):
    raw = np.frombuffer(b"".join(d.text for d in documents if d.domain == domain), np.uint8)
    chunks = raw[: len(raw) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1).astype(np.int32)
    parts.append(np.random.default_rng((number, 5)).permutation(chunks)[:need])
  chunks = np.stack(parts)
  ends = (NUM_TRAIN, NUM_TRAIN + VAL_ROWS)
  return Corpus(chunks[:, : ends[0]], chunks[:, ends[0] : ends[1]], chunks[:, ends[1] :])


def load_fetched(folder: str) -> Corpus:
  """Chunks of the six domains that `tools/fetch_corpora.py` has put into `folder`, split by document: training,
  validation and pool chunks are of different documents; the pool holds NUM_POOL passages of PASSAGE chunks a domain."""
  names = sorted(p.name for p in pathlib.Path(folder).iterdir() if p.is_dir() and p.name != "downloads")
  kinds = ("txt", "jsonl")
  files = tuple(f"{n}={folder}/{n}/*.{k}" for n in names for k in kinds if list(pathlib.Path(folder, n).glob(f"*.{k}")))
  source = text.load(expand("files", files), config.load().data)
  parts = [_chunks_of(source, number) for number in range(len(source.domains))]
  return Corpus(*(np.stack(part) for part in zip(*parts, strict=True)))


def _chunks_of(source, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(train, val, pool) chunks of one domain: a fifth of its documents each for val and pool. Short documents of a part
  are joined, so that every domain has enough chunks."""
  rng = np.random.default_rng((number, 6))
  members = np.flatnonzero(source.domain_numbers(np.arange(len(source))) == number)
  val, pool, train = np.split(rng.permutation(members), (len(members) // 5, 2 * len(members) // 5))
  out = []
  for part, need, group in ((train, NUM_TRAIN, 1), (val, VAL_ROWS, 1), (pool, NUM_POOL, PASSAGE)):
    raw = np.frombuffer(b"\n".join(source.texts(part)), np.uint8)
    chunks = raw[: len(raw) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1).astype(np.int32)
    if len(chunks) < need * group:
      raise SystemExit(f"domain {source.domains[number]} has {len(chunks)} chunks, not {need * group}: too little text")
    passages = chunks[: len(chunks) // group * group].reshape(-1, group, LENGTH + 1)
    out.append(rng.permutation(passages)[:need].reshape(-1, LENGTH + 1))
  return tuple(out)


def rows_of(chunks) -> dict:
  """A MaxText-style batch of chunks [B, T + 1]."""
  ones = np.ones((len(chunks), chunks.shape[1] - 1), np.int32)
  place = np.broadcast_to(np.arange(ones.shape[1], dtype=np.int32), ones.shape)
  return {
    "inputs": chunks[:, :-1], "inputs_position": place, "inputs_segmentation": ones,
    "targets": chunks[:, 1:], "targets_position": place, "targets_segmentation": ones,
  }  # fmt: skip


def make_config(**changes):
  return config.replace(config.load(), **(SIZES | changes))


class Run:
  """The trainer's step on given chunks. `advance` runs steps and returns their outputs on the host."""

  def __init__(self, cfg, val_chunks: list, rows: int = ROWS):
    self.cfg = cfg
    self.graphdef, self.state = state_lib.create_split(cfg)
    self.val = tuple(jax.device_put(rows_of(chunks)) for chunks in val_chunks) if cfg.ghost.ghost_enabled else ()
    shapes = rows_of(np.zeros((rows, LENGTH + 1), np.int32))
    step, _ = make_train_step(cfg, self.graphdef, self.state, shapes, num_segments=1, num_sets=max(len(val_chunks), 1))
    lowered = jax.jit(step, donate_argnums=0).lower(self.state, shapes, self.val)
    self.step = lowered.compile(compiler_options=compiler_options())

  def advance(self, chunks_SBT) -> list[dict]:
    out = []
    for chunks in chunks_SBT:
      self.state, outputs = self.step(self.state, jax.device_put(rows_of(chunks)), self.val)
      out.append(outputs)
    return jax.device_get(out)

  @property
  def model(self) -> nnx.Module:
    return nnx.merge(self.graphdef, jax.tree.map(jnp.copy, self.state)).model


def mean_losses(model, chunk_sets) -> np.ndarray:
  """Mean loss in nats per token of each set of chunks, [K]."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  return np.array([float(_mean_loss(graphdef)(params, rest, rows_of(chunks))) for chunks in chunk_sets])


@functools.cache
def _mean_loss(graphdef):
  return jax.jit(lambda p, r, b: passes.mean_loss(*LanguageModelLoss()(nnx.merge(graphdef, p, r), b)))


def telescoping(corpus: Corpus, queries: tuple[str, ...], *, steps: int, seed: int = 0, **changes) -> dict:
  """A run scored against K domains: predicted and measured drop of each, and contributions by training domain.

  The first moment of AdamW owes part of each step to earlier batches: `predicted` holds that part too.
  Returns predicted_K, drop_K and by_domain_DK.
  """
  val = [corpus.val[DOMAINS.index(name)] for name in queries]
  run = Run(make_config(ghost_val_sets=tuple(f"{name}=manual" for name in queries), **changes), val)
  chunks, domain = corpus.mixed(steps, seed)
  before = mean_losses(run.model, val)
  outputs = run.advance(chunks)
  drop_K = before - mean_losses(run.model, val)
  columns = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")
  predicted_K = np.sum([[o[name] for name in columns] for o in outputs], (0, 1), dtype=np.float64)
  by_domain = np.zeros((len(DOMAINS), len(queries)))
  for o, d in zip(outputs, domain, strict=True):
    np.add.at(by_domain, d, o["contribution_BSK"][:, 0])
  return {"predicted_K": predicted_K, "drop_K": drop_K, "by_domain_DK": by_domain}


def snapshots(corpus: Corpus, steps: tuple[int, ...], seed: int = 0) -> list[nnx.Module]:
  """Models of one unscored run after so many steps each."""
  run = Run(make_config(ghost_enabled=False), [])
  chunks, _ = corpus.mixed(max(steps), seed)
  models, done = [], 0
  for step in steps:
    run.advance(chunks[done:step])
    done = step
    models.append(run.model)
  return models


def retrieval(corpus: Corpus, models: list) -> dict:
  """{method: normalised recall@100 averaged over the domains}: of 600 passages, the 100 of the domain asked for.

  A passage is one chunk or several consecutive ones, whose scores are averaged. Sums over the models (TracIn). "dot":
  <gradient of the chunk, gradient of the domain's held-out rows>. "cosine": over the chunk's gradient norm. "centred":
  minus the mean over the other domains' gradients, what helps this domain more than the others.
  """
  pool = corpus.pool.reshape(-1, LENGTH + 1)
  domain_N = np.repeat(np.arange(len(corpus.pool)), NUM_POOL)
  engine, dot_KN, cosine_KN, loss_N, norm_N = GhostEngine(direction="sgd"), 0.0, 0.0, 0.0, 0.0
  for model in models:
    val = [rows_of(chunks) for chunks in corpus.val]
    parts = [rows_of(part) for part in np.split(pool, len(pool) // NUM_POOL)]
    dot = np.concatenate([np.asarray(engine.score(model, part, val).dot) for part in parts], 1)
    norms, losses = gradient_norms(model, parts)
    dot_KN, cosine_KN = dot_KN + dot, cosine_KN + dot / norms
    loss_N, norm_N = loss_N + losses, norm_N + norms
  passages = pool.reshape(len(domain_N), -1)
  size = passages.shape[1] // pool.shape[1]
  dot_KN, cosine_KN, loss_N, norm_N = (
    x.reshape(*x.shape[:-1], -1, size).mean(-1) for x in (dot_KN, cosine_KN, loss_N, norm_N)
  )
  methods = {
    "dot": dot_KN, "dot, centred": dot_KN - dot_KN.mean(0), "cosine": cosine_KN,
    "cosine, centred": cosine_KN - cosine_KN.mean(0),
    "BM25 over byte 3-grams": (lexical := bm25(passages, corpus.val)),
    "cosine, centred, fused with BM25": np.stack([*map(fused, cosine_KN - cosine_KN.mean(0), lexical)]),
    "loss (low first)": np.tile(-loss_N, (len(corpus.pool), 1)),
    "gradient norm": np.tile(norm_N, (len(corpus.pool), 1)),
    "random": np.random.default_rng(0).random((len(corpus.pool), len(passages))),
  }  # fmt: skip
  return {name: recall(score, domain_N) for name, score in methods.items()}


def recall(score_KN, domain_N) -> float:
  """Mean over domains k of the share of domain k among its first NUM_POOL by score (all it has)."""
  first = np.argsort(-np.asarray(score_KN), axis=1, kind="stable")[:, :NUM_POOL]
  return float(np.mean([np.mean(domain_N[row] == k) for k, row in enumerate(first)]))


def gradient_norms(model, batches: list) -> tuple[np.ndarray, np.ndarray]:
  """(norm of the gradient, loss) of every row's mean loss."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  one = _row_gradients(graphdef)
  out = [one(params, rest, jax.tree.map(jnp.asarray, batch)) for batch in batches]
  return tuple(np.concatenate([np.asarray(pair[i]) for pair in out]) for i in range(2))


@functools.cache
def _row_gradients(graphdef):
  """Compiled once for all models of a kind."""

  @jax.jit
  def one(params, rest, batch):
    def row(example):
      example = jax.tree.map(lambda x: x[None], example)
      out = passes.train_pass(Model(graphdef, params, rest), LanguageModelLoss(), example)
      return optax.tree_utils.tree_norm(out.grads), out.loss

    return jax.lax.map(row, batch, batch_size=10)

  return one


def bm25(pool, val, k1: float = 1.2, b: float = 0.75) -> np.ndarray:
  """[K, N] BM25 (Robertson and Zaragoza 2009) of every chunk for the held-out rows of each domain, byte 3-grams."""

  def grams(chunk):
    text = bytes(chunk.astype(np.uint8))
    return collections.Counter(text[i : i + 3] for i in range(len(text) - 2))

  documents = [grams(chunk) for chunk in pool]
  frequency = collections.Counter(itertools.chain.from_iterable(documents))
  weight = {g: math.log(1 + (len(pool) - n + 0.5) / (n + 0.5)) for g, n in frequency.items()}
  length = np.array([sum(d.values()) for d in documents])
  norm = k1 * (1 - b + b * length / length.mean())
  queries = [sum((grams(chunk) for chunk in chunks), collections.Counter()) for chunks in val]
  score = np.zeros((len(val), len(pool)))
  for n, document in enumerate(documents):
    for gram, count in document.items():
      value = weight[gram] * count * (k1 + 1) / (count + norm[n])
      score[:, n] += [value * query[gram] for query in queries]
  return score


def duplicates(corpus: Corpus, model, learning_rate: float, copies: tuple[int, ...] = (1, 2, 4, 8)) -> list[dict]:
  """Value per copy of one planted row in an SGD step, by first and second order, beside what taking all copies' share
  out of the step really costs per copy. Nats on the row's domain."""
  val = rows_of(corpus.val[DOMAINS.index("manual")])
  planted, others = corpus.pool[DOMAINS.index("manual")][:1], corpus.mixed(1, 7)[0][0]
  first, second = GhostEngine(direction="sgd"), GhostEngine(direction="second_order")
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  loss = jax.jit(lambda p: passes.mean_loss(*LanguageModelLoss()(nnx.merge(graphdef, p, rest), val)))
  gradient = jax.jit(lambda b: passes.train_pass(Model(graphdef, params, rest), LanguageModelLoss(), b).grads)
  rows = []
  for count in copies:
    batch = rows_of(np.concatenate([np.repeat(planted, count, 0), others[count:]]))
    grads, own = gradient(batch), gradient(rows_of(np.repeat(planted, len(others), 0)))
    delta = jax.tree.map(lambda g: -learning_rate * g, grads)
    share = learning_rate * count / len(others)
    without = jax.tree.map(lambda p, d, g, share=share: p + d + share * g, params, delta, own)
    real = (loss(without) - loss(jax.tree.map(jnp.add, params, delta))) / count
    scores = first.score(model, batch, val), second.score(model, batch, val, delta=delta)
    values = [float(learning_rate * s.additive[:count].mean()) for s in scores]
    rows.append({"copies": count, "first": values[0], "second": values[1], "real": float(real)})
  return rows


def low_rank(corpus: Corpus, models: list, ranks: tuple[int, ...]) -> dict:
  """{rank: [Spearman with the exact scores at each model]} over 96 rows of all domains, validation domain manual."""
  val = rows_of(corpus.val[DOMAINS.index("manual")])
  train = rows_of(corpus.pool[:, :16].reshape(-1, LENGTH + 1))
  exact = [np.asarray(GhostEngine(direction="sgd").score(model, train, val).dot) for model in models]
  out = {}
  for rank in ranks:
    engine = GhostEngine(direction="sgd", rank=rank)
    pairs = zip(models, exact, strict=True)
    out[rank] = [spearman(np.asarray(engine.score(model, train, val).dot), score) for model, score in pairs]
  return out


def group_truth(
  corpus: Corpus, by_domain_DK, queries: tuple[str, ...], *, steps: int, seed: int = 0, size: int = 3
) -> dict:
  """{method: mean over validation sets of Spearman over all subsets of `size` domains} between what a method predicts
  for training on the subset and the drop of a retraining in which the other domains' rows count nothing."""
  cfg = make_config(ghost_enabled=False)
  chunks, domain = corpus.mixed(steps, seed)
  train_state = state_lib.create(cfg)
  graphdef, params, rest = nnx.split(train_state.model, nnx.Param, ...)
  tx = make_optimizer(cfg.optimizer, cfg.run.steps, params)
  numbers = [DOMAINS.index(name) for name in queries]
  val = jax.tree.map(lambda *x: jnp.stack(x), *[rows_of(corpus.val[number]) for number in numbers])

  def loss_of(params, batch):
    return passes.mean_loss(*LanguageModelLoss()(nnx.merge(graphdef, params, rest), batch))

  @jax.jit
  def drops(member_D):
    def step(carry, item):
      params, opt_state = carry
      chunks, domain = item
      batch = rows_of(chunks)
      batch["targets_segmentation"] = jnp.where(member_D[domain][:, None], batch["targets_segmentation"], 0)
      grads = jax.grad(loss_of)(params, batch)
      norm = optax.tree_utils.tree_norm(grads)
      grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
      delta, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, delta), opt_state), None

    (after, _), _ = jax.lax.scan(step, (params, tx.init(params)), (jnp.asarray(chunks), jnp.asarray(domain)))
    return jax.lax.map(lambda batch: loss_of(params, batch) - loss_of(after, batch), val)

  subsets = np.array([s for s in itertools.product((0, 1), repeat=len(DOMAINS)) if sum(s) == size], bool)
  drop_MK = np.stack([np.asarray(drops(jnp.asarray(member))) for member in subsets])
  overlap = bm25(corpus.train[:, :NUM_POOL].reshape(-1, LENGTH + 1), corpus.val[numbers])
  predictions = {
    "contributions": by_domain_DK,
    "BM25 over byte 3-grams": overlap.reshape(len(queries), len(DOMAINS), -1).mean(-1).T,
    "own domain present": np.eye(len(DOMAINS))[:, numbers],
    "random": np.random.default_rng(1).random((len(DOMAINS), len(queries))),
  }
  return {
    name: float(np.mean([spearman(subsets @ value_DK[:, k], drop_MK[:, k]) for k in range(len(queries))]))
    for name, value_DK in predictions.items()
  }


def selection(corpus: Corpus, method: str, seed: int, *, steps: int, query: str = "manual") -> float:
  """Loss on fresh rows of `query` after equal steps, half of each candidate batch trained on (all for none)."""
  number = DOMAINS.index(query)
  changes = {"ghost_select": method, "init_weights_seed": seed}
  run = _selection_run(method)
  run.state = state_lib.create_split(make_config(**changes))[1]
  run.advance(corpus.mixed(steps, seed + 10)[0])
  return float(mean_losses(run.model, [corpus.pool[number]])[0])


@functools.cache
def _selection_run(method: str) -> Run:
  corpus = load_corpus()
  return Run(make_config(ghost_select=method), [corpus.val[DOMAINS.index("manual")]])
