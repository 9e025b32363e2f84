"""Scores a corpus against queries at checkpoints of a run, exactly or from sketched gradients. Imports JAX.

TracIn (Pruthi et al., arXiv:2002.08484) with the run's own steps: at each checkpoint the corpus is scored by the train
step that would come next, with its objective, optimizer state, clipping and learning rate.

B rows, S documents in a row, T positions, K queries, M blocks of a sketch, R directions, N chunks.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost import optimizers
from maxghost.attribution.corpus import Corpus
from maxghost.attribution.less import Less, twin_of
from maxghost.config import Config, ConfigError
from maxghost.config.files import check_seal, sealed, write_text
from maxghost.data.hashing import changed_files, sha256
from maxghost.data.types import Batch
from maxghost.ghost.low_rank import rank_one_root
from maxghost.ghost.schedules import Model, passes
from maxghost.ghost.sketch import sketch_gradient, sketch_pass
from maxghost.objectives import create
from maxghost.scorelog import Writer
from maxghost.training import state
from maxghost.training.score_recorder import scored_rows
from maxghost.training.step import make_train_step

_FILES = ("step.npz", "ids.jsonl")  # of an index, besides the sketches
INDEX_VERSION = 3  # 3: sketches along the optimizer's direction, of the summed loss
CONTRIBUTION, LESS = "contribution", "less"
METHODS = {CONTRIBUTION: lambda *args: Sketcher(*args), LESS: Less}
UNIT = "nats by which one exposure in a training step is predicted to lower the query's loss, over the checkpoints"
LESS_UNIT = "cosine of the query's gradient with the document's Adam update, times the learning rate, over checkpoints"
_SEED = 4711
_BLOCK = 1024  # chunks multiplied at a time


class Point(NamedTuple):
  """One checkpoint: the train state after `step` steps, and a digest of it."""

  step: int
  state: nnx.State
  digest: str


def score(
  cfg: Config, points: Iterator[Point], corpus: Corpus, queries: dict[str, Batch], writer: Writer, num_rows: int,
  share: float = 1.0,
) -> int:  # fmt: skip
  """Writes one step per checkpoint to the score log; returns the number of scored chunks per checkpoint.

  Each `num_rows` rows of the corpus are scored as the batch of the run's next step. cfg: of the run, with ghost.
  queries: {name: batch}, as the writer's val_sets. share: of a training step's rows that num_rows are.
  """
  objective, (graphdef, abstract) = create(cfg), state.abstract_split(cfg)
  val = tuple(objective.prepare(batch).arrays for batch in queries.values())
  spec = objective.batch_spec(num_rows, corpus.layout.row_length)
  slots, names = corpus.layout.max_segments, []
  step, _ = make_train_step(cfg, graphdef, abstract, spec, num_segments=slots, num_sets=len(val))
  reach_S = optimizers.reach(cfg.optimizer, cfg.ghost.direction, cfg.run.steps)
  run = jax.jit(lambda *args: {name: value for name, value in step(*args)[1].items() if name in _OUTPUTS})
  for point in points:
    parts, names = [], []
    for batch in map(objective.prepare, corpus.batches(num_rows)):
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


_OUTPUTS = (
  "score_dot_BSK", "contribution_BSK", "share_BS", "tokens_BS", "loss_BS", "scored_ok", "learning_rate", "val_loss",
)  # fmt: skip


def build_index(
  cfg: Config, points: Iterator[Point], corpus: Corpus, folder: Path, num_rows: int, step_rows: int,
  num_directions: int, method: str = CONTRIBUTION,
) -> int:  # fmt: skip
  """Writes a memory-mapped index of sketched gradients; returns the number of chunks.

  `sketch_<step>.npy` f32[N, M, R] of each checkpoint: the gradient of each chunk's summed loss along R random
  directions in each parameter and layer. `ids.jsonl`: [domain, path, offset, chunk, tokens] of each chunk. `step.npz`:
  the corpus's first `step_rows` rows, the batch of the step whose response queries are passed through. `index.json`:
  the rest. method: one of METHODS.
  """
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "index.json").unlink(missing_ok=True)  # written last: without it the index is incomplete
  sketcher = METHODS[method](cfg, corpus, num_rows, num_directions)
  step_batch, ids, checkpoints = sketcher.prepare(next(corpus.batches(step_rows))).arrays, [], []
  for point in points:
    blocks, ids = [], []
    scale = sketcher.respond(point.state, step_batch, ())[0]
    for batch in map(sketcher.prepare, corpus.batches(num_rows)):
      sketch_BSMR, tokens_BS = jax.device_get(sketcher.sketch(point.state, scale, batch.arrays))
      kept_BS = (batch.document_BS >= 0) & (tokens_BS > 0)
      blocks.append(sketch_BSMR[kept_BS])
      places = zip(batch.document_BS[kept_BS], batch.offset_BS[kept_BS], tokens_BS[kept_BS], strict=True)
      ids += [[*corpus.document_id(index), int(chunk), int(tokens)] for index, chunk, tokens in places]
    np.save(folder / f"sketch_{point.step}.npy", np.concatenate(blocks))
    checkpoints.append([point.step, point.digest])
  np.savez(folder / "step.npz", allow_pickle=False, **step_batch)
  with open(folder / "ids.jsonl", "w", encoding="utf-8") as file:
    file.writelines(json.dumps(entry) + "\n" for entry in ids)
  about = {
    "version": INDEX_VERSION, "method": method, "direction": cfg.ghost.ghost_direction, "directions": num_directions,
    "chunks": len(ids), "fingerprint": corpus.source.fingerprint, "checkpoints": checkpoints,
    "files": {name: sha256(folder / name) for name in (*(f"sketch_{point[0]}.npy" for point in checkpoints), *_FILES)},
  }  # fmt: skip
  write_text(folder / "index.json", json.dumps(sealed(about), indent=2))
  return len(ids)


def open_index(folder: Path, steps: Sequence[int]) -> dict:
  """index.json of an index of these checkpoints. Raises ConfigError."""
  path = folder / "index.json"
  if not path.is_file():
    raise ConfigError(f"--index {folder}: no index there; give --data to write one")
  try:
    about = check_seal(json.loads(path.read_text(encoding="utf-8")))
  except ValueError as error:
    raise ConfigError(f"{path}: damaged ({error}); give --data to write the index again") from error
  if about["version"] != INDEX_VERSION:
    way = "update maxghost" if about["version"] > INDEX_VERSION else "give --data to write the index again"
    raise ConfigError(f"{path}: version {about['version']}, this maxghost reads version {INDEX_VERSION}; {way}")
  if (there := [step for step, _ in about["checkpoints"]]) != list(steps):
    raise ConfigError(f"--index {folder}: written for the checkpoints of steps {there}, queried with {list(steps)}")
  for _, sentence in changed_files(folder, about.get("files", {})):
    raise ConfigError(f"{sentence}; give --data to write the index again")
  return about


def nearest(
  cfg: Config, points: Iterator[Point], folder: Path, about: dict, queries: dict[str, Batch], corpus: Corpus, top: int
) -> dict[str, list[dict]]:
  """{query: its `top` best chunks}, without a backward pass over the corpus. about: from `open_index`.

  The product of two sketches along one direction has the contribution as its mean (`ghost.sketch`), so the estimate is
  the mean over R directions, and the spread over them gives its standard error: root of the variance over R. rank: one
  more than the number of chunks that are better by more than 2 standard errors of the difference, which is smaller than
  the errors suggest, as both chunks have the same directions. tied: another chunk, shown or next, is within them.
  """
  with np.load(folder / "step.npz") as file:
    step_batch = dict(file)
  method = METHODS[about.get("method", CONTRIBUTION)]  # indices of earlier versions do not name it
  sketcher = method(cfg, corpus, len(next(iter(queries.values())).epoch_B), about["directions"])
  val = tuple(sketcher.prepare(batch).arrays for batch in queries.values())
  asked, digests = [], dict(about["checkpoints"])
  for point in points:
    if point.digest != digests[point.step]:
      raise ConfigError(f"--index {folder}: step {point.step} had other weights; give --data to write the index again")
    _, rate, sketch_KMR = sketcher.respond(point.state, step_batch, val)
    held_NMR = np.load(folder / f"sketch_{point.step}.npy", mmap_mode="r")
    asked.append((held_NMR, np.asarray(rate * sketch_KMR)))

  def products(chunks) -> np.ndarray:
    return np.sum([np.einsum("nmr,kmr->knr", held_NMR[chunks], sketch_KMR) for held_NMR, sketch_KMR in asked], 0)

  blocks = [slice(start, start + _BLOCK) for start in range(0, about["chunks"], _BLOCK)]
  value_KN = np.concatenate([products(block).mean(-1) for block in blocks], axis=1)
  ids = [json.loads(line) for line in (folder / "ids.jsonl").read_text(encoding="utf-8").splitlines()]
  found = {}
  for k, name in enumerate(queries):
    order = np.argsort(-value_KN[k], kind="stable")[: top + 1]
    product_NR = products(order)[k]
    gap_NNR = product_NR[:, None] - product_NR[None]
    better_NN = gap_NNR.mean(-1) > 2 * standard_error(gap_NNR)
    tied_N = ~(better_NN | better_NN.T | np.eye(len(order), dtype=bool)).all(0)
    rank_N, error_N = np.maximum.accumulate(1 + better_NN.sum(0)), standard_error(product_NR)
    keys = ("domain", "path", "offset", "chunk", "tokens")
    found[name] = [
      {"rank": int(rank_N[i]), "tied": bool(tied_N[i]), "contribution": float(value_KN[k, n]),
       "standard_error": float(error_N[i]), **dict(zip(keys, ids[n], strict=True))}
      for i, n in enumerate(order[:top])
    ]  # fmt: skip
  return found


def standard_error(products) -> np.ndarray:
  """Of the mean over the last axis, of independent products along one direction each."""
  return products.std(-1, ddof=1) / np.sqrt(products.shape[-1])


class Sketcher:
  """Sketches gradients along the same random directions for every checkpoint, in batches of one shape.

  Of <P G, g>, with P the response of the optimizer, g is sketched along s z and P G along z / s. Any s > 0 leaves the
  estimate unbiased; the error is least where both sides are equally large, so s is the root of P. For a direction of
  rank one, so is s.
  """

  def __init__(self, cfg: Config, corpus: Corpus, num_rows: int, num_directions: int):
    graphdef, objective, twin = twin_of(cfg, corpus, num_rows)
    rule = optimizers.direction_rule(cfg.optimizer, cfg.ghost.direction)
    rate = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps)

    def respond(key, train_state, step_batch, val: tuple):
      """(s {label: array}, factor of the products, sketches [K, M, R] of P G / s)."""
      held = nnx.merge(graphdef, train_state)
      parts = Model(*nnx.split(held.model, held.optimizer.wrt, ...))
      passed = passes.accumulated(parts, objective, step_batch, cfg.optimizer.gradient_accumulation_steps)
      _, clip_factor, _ = optimizers.clip(passed.grads, cfg.optimizer.gradient_clipping_threshold)
      before, grads = rule.read(held.optimizer, clip_factor=clip_factor), optimizers.by_label(passed.grads)
      scalars = rule.scalars(before.count, clip_factor)
      response = {p.label: rule.response(p.parameter, grads[p.label], before.of(p.label), scalars) for p in twin.scored}
      scale = {p.label: _root(p, response[p.label].weighting(), grads[p.label]) for p in twin.scored}
      sketches = []
      for rows in val:
        _, (gradient,) = passes.validation_gradients(parts, objective.validation(), (rows,))
        labelled = optimizers.by_label(gradient)
        moved = {label: one.transpose(labelled[label]) / scale[label] for label, one in response.items()}
        sketches.append(sketch_gradient(twin, moved, key, num_directions))
      factor = rate(before.count) * clip_factor / passed.weights.sum()
      return scale, factor, jnp.stack(sketches) if sketches else None

    def sketch(key, train_state, scale, batch):
      """(sketch [B, S, M, R] of each document's gradient times s, tokens [B, S])."""
      trained = nnx.merge(graphdef, train_state).model
      _, weights_BT = objective(trained, batch)
      used_BT, target_BT = objective.units(batch)
      number_BTS = 1 + jnp.arange(corpus.layout.max_segments)[None, None]
      used_BTS, target_BTS = (x[..., None] == number_BTS for x in (used_BT, target_BT))
      _, params, rest = nnx.split(trained, nnx.Param, ...)
      sketch_MRBT = sketch_pass(twin, params, rest, objective, batch, key, num_directions, scale)
      sketch_BSMR = jnp.einsum("mrbt,bts->bsmr", sketch_MRBT, used_BTS.astype(sketch_MRBT.dtype))
      return sketch_BSMR * weights_BT.sum(), (target_BTS & (weights_BT != 0)[..., None]).sum(1)

    key = jax.random.key(_SEED)  # an argument: XLA would compute what depends on a constant one while it compiles
    self.prepare = objective.prepare
    self.respond, self.sketch = (functools.partial(jax.jit(function), key) for function in (respond, sketch))


def _root(param, weighting, like):
  """s of a parameter, [*stack, *parameter]; of rank one where its directions are."""
  if weighting is None:
    return jnp.ones_like(like)
  if not param.low_rank:
    return jnp.sqrt(weighting)
  axis = len(param.stack_shape)
  a, b = rank_one_root(1 / jnp.square(param.parameter.matrices(weighting, axis)))
  return jax.lax.rsqrt(a[..., :, None] * b[..., None, :]).reshape(weighting.shape)
