"""Scores a corpus against queries at fixed checkpoints (TracIn: Pruthi et al., arXiv:2002.08484), exactly or sketched.

The score of a document for a query is the sum over checkpoints of learning rate times <gradient of the document's mean
loss, gradient of the query's mean loss>. It uses the engine and the score log of training, with checkpoints in place of
steps. Imports JAX, so the package does not import this module.

B rows, S documents in a row, T positions, K queries, M blocks of a sketch, R directions, N chunks.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.attribution.corpus import Corpus
from maxghost.config import ConfigError
from maxghost.data.types import Batch
from maxghost.ghost import DirectionSpec, GhostEngine
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.schedules import Model, passes
from maxghost.ghost.sketch import sketch_gradient, sketch_pass
from maxghost.objectives import create
from maxghost.optimizers import by_label
from maxghost.scorelog import Writer

INDEX_VERSION = 2  # 2: experts have separate random directions
_SEED = 4711


@dataclasses.dataclass(frozen=True)
class Point:
  """One checkpoint: the model after `step` steps, the learning rate at that step, and a digest of the weights."""

  step: int
  model: nnx.Module
  learning_rate: float
  digest: str


def score(
  points: Iterator[Point], corpus: Corpus, queries: dict[str, Batch], writer: Writer, num_rows: int,
  step_tokens: int,
) -> int:  # fmt: skip
  """Writes one step per checkpoint to the score log; returns the number of scored chunks per checkpoint.

  queries: {name: batch}, as the writer's val_sets. step_tokens: tokens of a training step; a contribution is the
  predicted drop of the query's loss due to one exposure of the document in such a step.
  """
  engine, count = GhostEngine(direction="sgd", per_position=True), 0
  val = [jax.tree.map(jnp.asarray, batch.arrays) for batch in queries.values()]
  for point in points:
    columns: dict[str, list] = {name: [] for name in ("tokens", "loss", "dot", "contribution", "chunk")}
    names: list = []
    losses, val_loss = _token_losses(point.model), None
    for batch in corpus.batches(num_rows):
      result = engine.score(point.model, batch.arrays, val)
      val_loss = np.asarray(result.val_loss)
      dot_NK, loss_N, tokens_N, kept_BS = by_document(
        batch, np.asarray(result.per_position), np.asarray(losses(batch.arrays))
      )
      columns["dot"].append(dot_NK)
      columns["contribution"].append(point.learning_rate * (tokens_N / step_tokens)[:, None] * dot_NK)
      columns["loss"].append(loss_N)
      columns["tokens"].append(tokens_N)
      columns["chunk"].append(batch.offset_BS[kept_BS])
      names += [corpus.document_id(index) for index in batch.document_BS[kept_BS]]
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    record: dict[str, Any] = {"step": point.step, "learning_rate": point.learning_rate, "val_loss": val_loss}
    record["predicted_examples"] = rows["contribution"].sum(0, dtype=np.float64)
    writer.append(record, rows, names)
    count = len(names)
  return count


def by_document(batch: Batch, score_KBT: np.ndarray, loss_BT: np.ndarray):
  """(dot [N, K], mean loss [N], tokens [N], bool[B, S] of the segments they belong to) from scores by position."""
  num_segments = batch.document_BS.shape[1]
  segments = np.arange(1, num_segments + 1)
  documents_BTS = (batch.arrays["inputs_segmentation"][..., None] == segments).astype(np.float32)
  targets_BTS = (batch.arrays["targets_segmentation"][..., None] == segments).astype(np.float32)
  tokens_BS = targets_BTS.sum(1)
  kept_BS = (batch.document_BS >= 0) & (tokens_BS > 0)
  share_BS = tokens_BS / max(tokens_BS.sum(), 1)
  additive_BSK = np.einsum("kbt,bts->bsk", score_KBT, documents_BTS)
  loss_BS = np.einsum("bt,bts->bs", loss_BT, targets_BTS) / np.maximum(tokens_BS, 1)
  dot_NK = additive_BSK[kept_BS] / share_BS[kept_BS][:, None]
  return dot_NK, loss_BS[kept_BS], tokens_BS[kept_BS].astype(np.int64), kept_BS


def build_index(points: list[Point], corpus: Corpus, folder: Path, num_rows: int, num_directions: int) -> int:
  """Writes a memory-mapped index of sketched gradients; returns the number of chunks.

  `sketch_<step>.npy` f32[N, M R] of each checkpoint: the gradient of each chunk's mean loss along R random directions
  in each parameter and layer. `ids.jsonl`: [domain, path, offset, chunk, tokens] of each chunk. `index.json`: the rest.
  """
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "index.json").unlink(missing_ok=True)  # written last: without it the index is incomplete
  count = 0
  sketcher = Sketcher(points[0].model, corpus, num_rows, num_directions)
  for point in points:
    blocks, ids = [], []
    for batch in corpus.batches(num_rows):
      sketch_ND, tokens_N, kept_BS = sketcher(point.model, batch)
      blocks.append(sketch_ND)
      places = zip(batch.document_BS[kept_BS], batch.offset_BS[kept_BS], tokens_N, strict=True)
      ids += [[*corpus.document_id(index), int(chunk), int(tokens)] for index, chunk, tokens in places]
    np.save(folder / f"sketch_{point.step}.npy", np.concatenate(blocks))
    count = len(ids)
  with open(folder / "ids.jsonl", "w", encoding="utf-8") as file:
    file.writelines(json.dumps(entry) + "\n" for entry in ids)
  about = {
    "version": INDEX_VERSION, "directions": num_directions, "chunks": count, "fingerprint": corpus.source.fingerprint,
    "checkpoints": [[p.step, p.learning_rate, p.digest] for p in points],
  }  # fmt: skip
  (folder / "index.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
  return count


def open_index(folder: Path, points: list[Point]) -> dict:
  """index.json of an index of exactly these checkpoints. Raises ConfigError for the first difference."""
  path = folder / "index.json"
  if not path.is_file():
    raise ConfigError(f"--index {folder}: no index there; give --data to write one")
  about = json.loads(path.read_text(encoding="utf-8"))
  if about["version"] != INDEX_VERSION:
    way = "update maxghost" if about["version"] > INDEX_VERSION else "give --data to write the index again"
    raise ConfigError(f"{path}: version {about['version']}, this maxghost reads version {INDEX_VERSION}; {way}")
  there, here = {step: digest for step, _, digest in about["checkpoints"]}, {p.step: p.digest for p in points}
  if there != here:
    wrong = sorted({step for step in {*there, *here} if there.get(step) != here.get(step)})
    raise ConfigError(
      f"--index {folder}: written for the checkpoints of steps {sorted(there)}, queried with {sorted(here)}; step "
      f"{wrong[0]} has other weights or is missing. Give the same checkpoints, or --data to write the index again"
    )
  return about


def nearest(folder: Path, points: list[Point], queries: dict[str, Batch], corpus: Corpus, top: int) -> dict[str, list]:
  """{query: the `top` best chunks as (value, id)}; value estimates the sum over checkpoints of lr <g_chunk, g_query>.

  Multiplies the memory-mapped sketches with each query's sketch, without a backward pass over the corpus. corpus: of
  the queries, whose layout makes the rows.
  """
  about = open_index(folder, points)
  value_NK = np.zeros((about["chunks"], len(queries)))
  sketcher = Sketcher(points[0].model, corpus, len(next(iter(queries.values())).epoch_B), about["directions"])
  for point in points:
    sketch_ND = np.load(folder / f"sketch_{point.step}.npy", mmap_mode="r")
    for k, batch in enumerate(queries.values()):
      query_D = sketcher.mean(point.model, batch)
      value_NK[:, k] += point.learning_rate * (sketch_ND @ query_D) / about["directions"]
  with open(folder / "ids.jsonl", encoding="utf-8") as file:
    ids = [json.loads(line) for line in file]
  best = {name: np.argsort(-value_NK[:, k], kind="stable")[:top] for k, name in enumerate(queries)}
  return {name: [(float(value_NK[n, k]), tuple(ids[n])) for n in best[name]] for k, name in enumerate(queries)}


class Sketcher:
  """Sketches the gradients of documents in batches of one shape, along the same directions for every model."""

  def __init__(self, model: nnx.Module, corpus: Corpus, num_rows: int, num_directions: int):
    length = corpus.layout.row_length
    loss = create()
    twin = prepare_twin(
      model, loss.batch_spec(num_rows, length), loss, num_sets=1, num_positions=length,
      spec=DirectionSpec(rank=1),
    )  # fmt: skip

    def run(params, rest, batch):
      return sketch_pass(twin, params, rest, loss, batch, jax.random.key(_SEED), num_directions)

    graphdef = nnx.split(model, nnx.Param, ...)[0]

    def run_mean(params, rest, batch):
      _, (gradient,) = passes.validation_gradients(Model(graphdef, params, rest), loss, (batch,))
      return sketch_gradient(twin, by_label(gradient), jax.random.key(_SEED), num_directions)

    self._run, self._run_mean = jax.jit(run), jax.jit(run_mean)

  def __call__(self, model, batch: Batch):
    """(sketch of the gradient of each document's mean loss [N, M R], tokens [N], their segments bool[B, S])."""
    _, params, rest = nnx.split(model, nnx.Param, ...)
    sketch_MRBT = np.asarray(self._run(params, rest, batch.arrays))
    flat_KBT = sketch_MRBT.reshape(-1, *sketch_MRBT.shape[2:])
    dot_NK, _, tokens_N, kept_BS = by_document(batch, flat_KBT, np.zeros(flat_KBT.shape[1:], np.float32))
    return dot_NK, tokens_N, kept_BS

  def mean(self, model, batch: Batch) -> np.ndarray:
    """Sketch of the gradient of the batch's mean loss, [M R]."""
    _, params, rest = nnx.split(model, nnx.Param, ...)
    return np.asarray(self._run_mean(params, rest, batch.arrays)).ravel()


def _token_losses(model):
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  loss = create()
  function = jax.jit(lambda p, r, batch: loss(nnx.merge(graphdef, p, r), batch)[0])
  return lambda batch: function(params, rest, batch)
