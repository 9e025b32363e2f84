"""Scores a corpus against queries at checkpoints of a run, exactly or from sketched gradients. Imports JAX.

TracIn (Pruthi et al., arXiv:2002.08484) with the run's own steps: at each checkpoint the corpus is scored by the train
step that would come next, with its objective, optimizer state, clipping and learning rate.

B rows, S documents in a row, T positions, K queries, M blocks of a sketch, R directions, N chunks.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost import optimizers
from maxghost.attribution import index, words
from maxghost.attribution.corpus import Corpus
from maxghost.attribution.less import Less, twin_of
from maxghost.config import Config, ConfigError, save
from maxghost.config.files import locked, sealed, write_text
from maxghost.data.hashing import sha256
from maxghost.data.packing import Layout
from maxghost.data.types import Batch
from maxghost.ghost.low_rank import rank_one_root
from maxghost.ghost.schedules import passes
from maxghost.ghost.sketch import sketch_gradient, sketch_pass
from maxghost.objectives import LanguageModelLoss, create
from maxghost.scorelog import Writer
from maxghost.training import devices, scoring, state
from maxghost.training.score_recorder import COLUMNS, scored_rows
from maxghost.training.step import make_train_step

UNIT = "nats by which one exposure in a training step is predicted to lower the query's loss, over the checkpoints"
LESS_UNIT = "cosine of the query's gradient with the document's Adam update, times the learning rate, over checkpoints"
_SEED = 4711


class Point(NamedTuple):
  """One checkpoint: the train state after `step` steps, and a digest of it."""

  step: int
  state: nnx.State
  digest: str


def score(cfg: Config, points: Iterator[Point], corpus: Corpus, queries: dict[str, Batch], writer: Writer,
          num_rows: int, share: float = 1.0) -> int:  # fmt: skip
  """Writes one step per checkpoint to the score log; returns the number of scored chunks per checkpoint.

  Each `num_rows` rows of the corpus are scored as the batch of the run's next step. cfg: of the run, with ghost.
  queries: {name: batch}, as the writer's val_sets. share: of a training step's rows that num_rows are.
  """
  objective, (graphdef, abstract) = create(cfg), state.abstract_split(cfg)
  val = tuple(objective.prepared(batch).arrays for batch in queries.values())
  spec = objective.batch_spec(num_rows, corpus.layout.row_length)
  slots, names = corpus.layout.max_segments, []
  step, _ = make_train_step(cfg, graphdef, abstract, spec, num_segments=slots, num_sets=len(val))
  reach_S = optimizers.reach(cfg.optimizer, cfg.ghost.direction, cfg.run.steps)
  kept = lambda *args: {name: value for name, value in step(*args)[1].items() if name in _OUTPUTS}  # noqa: E731
  run = jax.jit(kept, compiler_options=devices.compiler_options())
  for point in points:
    parts, names = [], []
    for batch in map(objective.prepared, corpus.batches(num_rows)):
      out = jax.device_get(run(point.state, batch.arrays, val))
      if not out["scored_ok"]:
        raise ConfigError(f"step {point.step}: a score is not finite; the checkpoint's weights may have diverged")
      columns, documents = scored_rows(out, batch)
      parts.append(columns)
      names += [corpus.document_record(index) for index in documents]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows["contribution"] *= share
    rows["share"] /= rows["share"].sum()
    record = {name: out[name] for name in ("learning_rate", "val_loss")} | {"step": point.step}
    if reach_S is not None:  # a step after the run's end would be its last
      record["learning_rate_in_all"] = reach_S[point.step] if point.step < len(reach_S) else out["learning_rate"]
    writer.append(record | {"predicted_examples": rows["contribution"].sum(0, dtype=np.float64)}, rows, names)
  return len(names)


_OUTPUTS = (*COLUMNS.values(), "scored_ok", "learning_rate", "val_loss")


def build_index(cfg: Config, points: Iterator[Point], corpus: Corpus, folder: Path, num_rows: int, step_rows: int,
                num_directions: int, method: str = index.CONTRIBUTION, own: Config | None = None) -> int:  # fmt: skip
  """Writes a memory-mapped index of sketched gradients; returns the number of chunks.

  `sketch_<step>.npy` [N, M, R] of each checkpoint: the gradient of each chunk's summed loss along R random directions
  in each parameter and layer, as `index.py` says; float32 for LESS. `ids.jsonl`: [domain, path, offset, chunk, tokens]
  of each chunk; `ends.npy`: the byte behind it. `step.npz`: the corpus's first `step_rows` rows, the batch of the step
  whose response queries are passed through. `index.json`: the rest. method: one of METHODS. own: becomes `config.yml`,
  by which the texts of the chunks are found.
  """
  with locked(folder, "--index"):
    for path in folder.glob(".*.tmp"):
      path.unlink()
    sketcher = METHODS[method](cfg, corpus.layout, num_rows, num_directions)
    step_batch, names, checkpoints = sketcher.prepare(next(corpus.batches(step_rows))).arrays, [], []
    for point in points:
      held, parts = (index.Shrunk() if method == index.CONTRIBUTION else index.Whole()), []
      scale = sketcher.respond(point.state, step_batch, ())[0]
      for batch in map(sketcher.prepare, corpus.batches(num_rows)):
        sketch_BSMR, tokens_BS = jax.device_get(sketcher.sketch(point.state, scale, batch.arrays))
        kept_BS = (batch.document_BS >= 0) & (tokens_BS > 0)
        if not np.isfinite(sketch_NMR := sketch_BSMR[kept_BS]).all():
          raise ConfigError("a gradient of the corpus is not finite; the checkpoint's weights may have diverged")
        held.add(sketch_NMR)
        parts.append([x[kept_BS] for x in (batch.document_BS, batch.offset_BS, batch.end_BS, tokens_BS)])
      if not (chunks := np.concatenate(parts, 1).T.tolist()):  # document, begin, end and tokens of each
        raise ConfigError("the documents hold no token whose loss counts, so there is nothing to index")
      (folder / "index.json").unlink(missing_ok=True)  # written last: without it the index is incomplete
      names += held.save(folder, point.step)
      checkpoints.append([point.step, point.digest])
    ids = ([*corpus.source.document_id(number), begin, tokens] for number, begin, _, tokens in chunks)
    write_text(folder / "ids.jsonl", "".join(json.dumps(entry) + "\n" for entry in ids))
    names += ["ids.jsonl", index.save(folder / "step.npz", step_batch)]
    if method == index.CONTRIBUTION:
      cut = functools.lru_cache(maxsize=64)(corpus.units.cutter)  # chunks of one document follow each other
      texts = (cut(number)(begin, end) for number, begin, end, _ in chunks)
      names.append(index.save(folder / index.ENDS, np.array([end for _, _, end, _ in chunks])))
      names.append(words.write(folder, enumerate(texts), len(chunks)))
    about = {
      "version": index.VERSION, "method": method, "direction": cfg.ghost.ghost_direction, "directions": num_directions,
      "chunks": len(chunks), "fingerprint": corpus.fingerprint, "checkpoints": checkpoints,
      "files": {name: sha256(folder / name) for name in names},
    }  # fmt: skip
    if own is not None:
      save(own, folder / "config.yml")
    write_text(folder / "index.json", json.dumps(sealed(about), indent=2))
    for path in (*folder.glob("sketch_*.npy"), *folder.glob("blocks_*.npz")):
      if path.name not in names:  # of an earlier index here, with other checkpoints
        path.unlink()
  return len(chunks)


def nearest(cfg: Config, points: Iterator[Point], folder: Path, about: dict, queries: dict[str, Batch], corpus: Corpus,
            top: int, by: str = index.HYBRID) -> dict[str, list[dict]]:  # fmt: skip
  """{query: its `top` best chunks}, without a backward pass over the corpus. about: from `open_index`.

  The product of two sketches along one direction has the contribution as its mean (`ghost.sketch`), so the estimate is
  the mean over R directions, and the spread over their G groups gives its standard error: root of the variance over G.
  by: one of `index.ORDERS`; LESS knows only its value. rank: with NATS, one more than the number of chunks that are
  better by more than 2 standard errors of the difference, which is smaller than the errors suggest, as both chunks have
  the same directions. tied: another chunk, shown or next, is within them.
  """
  by, method = index.NATS if about["method"] == index.LESS else by, METHODS[about["method"]]
  sketcher = method(cfg, corpus.layout, len(next(iter(queries.values())).epoch_B), about["directions"])
  val = tuple(sketcher.prepare(batch).arrays for batch in queries.values())
  asked, step_batch, held = [], step_of(folder), index.Index(folder, about)
  for point in points:
    held.check(point.step, point.digest)
    _, rate, sketch_KMR = sketcher.respond(point.state, step_batch, val)
    asked.append(np.asarray(rate * sketch_KMR))
  found = {}
  for k, name in enumerate(queries):
    own = [sketch_KMR[k : k + 1] for sketch_KMR in asked]
    (score_N,) = held.scores(own, by)
    if by == index.HYBRID:
      score_N = held.hybrid(score_N, corpus.words_of(queries[name]))
    order = np.argsort(-score_N, kind="stable")[: top + 1]
    (product_NG,) = held.products(own, order)
    error_N, num = index.standard_error(product_NG), len(order)
    rank_N, tied_N = 1 + np.arange(num), np.zeros(num, bool)
    if by == index.NATS:
      gap_NNG = product_NG[:, None] - product_NG[None]
      better_NN = gap_NNG.mean(-1) > 2 * index.standard_error(gap_NNG)
      tied_N = ~(better_NN | better_NN.T | np.eye(num, dtype=bool)).all(0)
      rank_N = np.maximum.accumulate(1 + better_NN.sum(0))
    found[name] = [
      {"rank": int(rank_N[i]), "tied": bool(tied_N[i]), "contribution": float(product_NG[i].mean()),
       "standard_error": float(error_N[i]), "score": float(score_N[n]),
       **dict(zip(index.KEYS, held.ids[n], strict=True))}
      for i, n in enumerate(order[:top])
    ]  # fmt: skip
  return found


def step_of(folder: Path) -> dict[str, np.ndarray]:
  """The batch of the step whose response queries are passed through."""
  with np.load(folder / "step.npz") as file:
    return dict(file)


class Step(NamedTuple):
  """What a query needs of a step at a checkpoint: s {label: array}, gradients, clipping factor, factor of products."""

  scale: dict
  grads: dict
  clip_factor: Any
  factor: Any


class Sketcher:
  """Sketches gradients along the same random directions for every checkpoint, in batches of one shape.

  Of <P G, g>, with P the response of the optimizer, g is sketched along s z and P G along z / s. Any s > 0 leaves the
  estimate unbiased; the error is least where both sides are equally large, so s is the root of P. For a direction of
  rank one, so is s.
  """

  def __init__(self, cfg: Config, layout: Layout, num_rows: int, num_directions: int):
    parts_of, objective, twin = twin_of(cfg, layout, num_rows)
    rule = optimizers.direction_rule(cfg.optimizer, cfg.ghost.direction)
    rate = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps)
    answer_loss = dataclasses.replace(LanguageModelLoss.of(cfg).evaluation(), num_tiles=1)
    side = index.side_of(num_directions)

    def response_of(optimizer, grads: dict, clip_factor) -> dict:
      before = rule.read(optimizer, clip_factor=clip_factor)
      scalars = rule.scalars(before.count, clip_factor)
      return {p.label: rule.response(p.parameter, grads[p.label], before.of(p.label), scalars) for p in twin.scored}

    def step(train_state, step_batch) -> Step:
      parts, optimizer = parts_of(train_state)
      passed = passes.accumulated(parts, objective, step_batch, cfg.optimizer.gradient_accumulation_steps)
      _, clip_factor, _ = optimizers.clip(passed.grads, cfg.optimizer.gradient_clipping_threshold)
      grads = optimizers.by_label(passed.grads)
      response = response_of(optimizer, grads, clip_factor)
      scale = {p.label: _root(p, response[p.label].weighting(), grads[p.label]) for p in twin.scored}
      factor = rate(rule.read(optimizer).count) * clip_factor / passed.weights.sum()
      return Step(scale, grads, clip_factor, factor)

    def projected(key, response: dict, scale: dict, gradient: nnx.State):
      labelled = optimizers.by_label(gradient)
      moved = {label: one.transpose(labelled[label]) / scale[label] for label, one in response.items()}
      return sketch_gradient(twin, moved, key, num_directions, side=side)

    def respond(key, train_state, step_batch, val: tuple):
      """(s {label: array}, factor of the products, sketches [K, M, R] of P G / s)."""
      (parts, optimizer), taken = parts_of(train_state), step(train_state, step_batch)
      response, sketches = response_of(optimizer, taken.grads, taken.clip_factor), []
      for rows in val:
        _, (gradient,) = passes.validation_gradients(parts, objective.validation(), (rows,))
        sketches.append(projected(key, response, taken.scale, gradient))
      return taken.scale, taken.factor, jnp.stack(sketches) if sketches else None

    def ask(key, train_state, taken: Step, row, places_A):
      """(losses [A], sketches [A, M, R] of P G / s times the factor) of the targets at some places of one row [1, T].

      One backward pass for each; places < 0 have none, and no gradient.
      """
      parts, optimizer = parts_of(train_state)
      response = response_of(optimizer, taken.grads, taken.clip_factor)
      losses_T, pull = jax.vjp(lambda params: answer_loss(parts.merge(params), row)[0][0], parts.params)
      project = functools.partial(projected, key, response, taken.scale)
      like_MR, linear = jax.linearize(project, jax.tree.map(jnp.zeros_like, parts.params))  # draws the directions once

      def one(place):
        (gradient,) = pull(jnp.where(jnp.arange(len(losses_T)) == place, 1, 0).astype(losses_T.dtype))
        return taken.factor * linear(gradient)

      # One by one: a gradient of each of several tokens is an array that CPUs transpose for longer than they multiply.
      return losses_T[places_A], jax.lax.map(
        lambda place: jax.lax.cond(place < 0, lambda _: jnp.zeros_like(like_MR), one, place), places_A
      )

    def sketch(key, train_state, scale, batch):
      """(sketch [B, S, M, R] of each document's gradient times s, tokens [B, S])."""
      parts, _ = parts_of(train_state)
      trained = parts.merge(parts.params)
      _, weights_BT = objective(trained, batch)
      used_BT, target_BT = objective.units(batch)
      number_BTS = 1 + jnp.arange(layout.max_segments)[None, None]
      used_BTS, target_BTS = (x[..., None] == number_BTS for x in (used_BT, target_BT))
      _, params, rest = nnx.split(trained, nnx.Param, ...)
      sketch_MRBT = sketch_pass(twin, params, rest, objective, batch, key, num_directions, scale, side)
      sketch_BSMR = scoring.products("mrbt,bts->bsmr", sketch_MRBT, used_BTS.astype(sketch_MRBT.dtype))
      return sketch_BSMR * weights_BT.sum(), (target_BTS & (weights_BT != 0)[..., None]).sum(1)

    key = jax.random.key(_SEED)  # an argument: XLA would compute what depends on a constant one while it compiles
    compiled: Any = functools.partial(jax.jit, compiler_options=devices.compiler_options())
    self.prepare, self.step = objective.prepared, compiled(step)
    self.respond, self.ask, self.sketch = (functools.partial(compiled(f), key) for f in (respond, ask, sketch))


METHODS = {index.CONTRIBUTION: Sketcher, index.LESS: Less}


def _root(param, weighting, like):
  """s of a parameter, [*stack, *parameter]; of rank one where its directions are."""
  if weighting is None:
    return jnp.ones_like(like)
  if not param.low_rank:
    return jnp.sqrt(weighting)
  a, b = rank_one_root(1 / jnp.square(param.parameter.matrices(weighting, len(param.stack_shape))))
  return jax.lax.rsqrt(a[..., :, None] * b[..., None, :]).reshape(weighting.shape)
