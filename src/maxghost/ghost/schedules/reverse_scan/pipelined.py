"""The walk on the stages of a pipeline (`models.pipeline`), exact for every direction.

Micro-batches of training and of validation rows pass through the stages one after another: forward, where every stage
keeps the inputs of its layers, and back, where it keeps the cotangents of its chunks' outputs. Then each stage walks
over its own chunks with all rows of both, without waiting for another stage. If a set of validation rows does not
divide into micro-batches of the training rows' size, every batch passes through the stages separately.
"""

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxghost.config import ConfigError
from maxghost.ghost.schedules.base import Secant
from maxghost.ghost.schedules.reverse_scan import layer as layer_lib
from maxghost.ghost.schedules.reverse_scan.layer import Kept, Layers, Pair, Rows
from maxghost.models import moe
from maxghost.models.pipeline import SHARED, STACKED, Pipe
from maxghost.optimizers import RuleState


class Passage(NamedTuple):
  """Adjacent batches that pass through the stages together. first: the first one's index among all batches. pipes: one
  for each, all with the same number of rows per micro-batch; `whole` is the pipe of all their micro-batches."""

  first: int
  pipes: tuple[Pipe, ...]

  @property
  def whole(self) -> Pipe:
    return self.pipes[0]._replace(num_micro=sum(pipe.num_micro for pipe in self.pipes))

  def of(self, items: Sequence) -> list:
    return list(items[self.first : self.first + len(self.pipes)])

  def join(self, batches: Sequence) -> Any:
    """One tree of all their rows, from one tree [B, ...] for each batch; inside `Pipe.map`."""

    def joined(*leaves):
      cut = [x.reshape(-1, pipe.num_micro, *x.shape[1:]) for x, pipe in zip(leaves, self.pipes, strict=True)]
      return jnp.concatenate(cut, 1).reshape(-1, *leaves[0].shape[1:])

    return jax.tree.map(joined, *batches)

  def part(self, tree) -> list:
    """The inverse of `join`."""

    def own(x, start: int, stop: int):
      return x.reshape(-1, self.whole.num_micro, *x.shape[1:])[:, start:stop].reshape(-1, *x.shape[1:])

    ends = itertools.accumulate((pipe.num_micro for pipe in self.pipes), initial=0)
    return [jax.tree.map(lambda x, at=at: own(x, *at), tree) for at in itertools.pairwise(ends)]


def passages(num_layers: int, num_rows: Sequence[int]) -> list[Passage]:
  """One if the micro-batches of the last batch, of training rows, can be those of all; else one for each batch."""
  pipes = [Pipe.of(num_layers, rows) for rows in num_rows]
  size = num_rows[-1] // pipes[-1].num_micro
  if any(rows % size for rows in num_rows):
    return [Passage(i, (pipe,)) for i, pipe in enumerate(pipes)]
  together = tuple(pipe._replace(num_micro=rows // size) for pipe, rows in zip(pipes, num_rows, strict=True))
  return [Passage(0, together)]


class Passed:
  """The forward pass of all batches, training rows last: `outputs` of the last layer, one for each batch.

  Raises ConfigError if the loss gives its layers keys, such as of dropout.
  """

  def __init__(self, batches: Sequence[Rows], embedded: Sequence):
    if keyed := [type(rows.loss).__name__ for rows in batches if rows.loss.layer_key(0) is not None]:
      said = f"objective {keyed[0]} gives its layers keys (layer_key), which micro-batches of a pipeline would share"
      raise ConfigError(f"{said}; use ici_stage_parallelism=1")
    self.batches, self.layers = batches, batches[0].layers
    rows = [jax.tree.leaves(x)[0].shape[0] for x in embedded]
    self.passages = passages(self.layers.stacked()[2].shape[0], rows)
    self.outputs, self.kept = [], []
    self._inputs = [rows.loss.layer_inputs(rows.batch) for rows in batches]
    for passage in self.passages:
      own = passage.of(embedded), passage.of(self._inputs)

      def local(x, inputs, stacked, passage=passage):
        pipe, layers = passage.whole, passage.whole.chunks(stacked)
        x, kept = pipe.forward(self._body, passage.join(x), layers, passage.join(inputs), keep=True)
        return passage.part(x), kept

      specs = (SHARED, SHARED, STACKED), (SHARED, STACKED)
      outputs, kept = passage.whole.map(local, *specs)(*own, self.layers.stacked())
      self.outputs += outputs
      self.kept.append(kept)

  def _body(self, x, layer, inputs):
    params, rest, _ = layer
    return layer_lib.apply(self.layers.graphdef, params, (), x, rest, inputs, None)

  def back(self, cotangents: Pair) -> tuple[Any, Pair]:
    """As `walk.back`, from the cotangents of the outputs."""
    given, below, kept = [*cotangents.val, cotangents.train], [], []
    for passage, inputs_kept in zip(self.passages, self.kept, strict=True):

      def local(cotangents, inputs, kept, stacked, passage=passage):
        pipe, layers = passage.whole, passage.whole.chunks(stacked)
        joined = passage.join(cotangents), kept, layers, passage.join(inputs)
        below, found = pipe.backward(self._body, *joined)
        return passage.part(below), found

      own = passage.of(given), passage.of(self._inputs), inputs_kept, self.layers.stacked()
      specs = (SHARED, SHARED, STACKED, STACKED), (SHARED, STACKED)
      cotangents_below, found = passage.whole.map(local, *specs)(*own)
      below += cotangents_below
      kept.append((inputs_kept, found))
    return self._walk(kept), Pair(tuple(below[:-1]), below[-1])

  def _walk(self, kept: list) -> dict:
    """What `layer.training_back` returns, of all layers. kept: what `forward` and `backward` of each passage keep."""
    layers, pipe = self.layers, self.passages[0].whole
    state, secant, labels = layers.state, layers.problem.secant, layers.labelled(layers.params)
    secant = secant and dataclasses.replace(secant, earlier=[{k: x[k] for k in labels} for x in secant.earlier])

    def local(kept, stacked, state, secant, small, batches):
      flat = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pipe.chunks(tree))  # noqa: E731
      own = copy.copy(layers)  # of this stage
      own.scalars, own.probes = small
      if state is not None:
        own.state = dataclasses.replace(state, arrays=flat(state.arrays))
      if secant is not None:
        secant = dataclasses.replace(secant, earlier=flat(secant.earlier))
        own.problem = dataclasses.replace(layers.problem, secant=secant)
      params, rest, numbers = pipe.chunks(stacked)
      here = params, rest, jnp.arange(numbers.size).reshape(numbers.shape)
      rows = [_with(rows, own, batch) for rows, batch in zip(self.batches, batches, strict=True)]

      def chunk(_, scanned):
        inputs, cotangents, layers = scanned
        back = lambda below, scanned: self._layer(own, rows, below, *scanned)  # noqa: E731
        return None, jax.lax.scan(back, self._parted(cotangents), (inputs, layers), reverse=True)[1]

      inputs, cotangents = zip(*kept, strict=True)
      _, out = jax.lax.scan(chunk, None, (inputs, cotangents, here))
      return pipe.stored(out)

    batches, small = [rows.batch for rows in self.batches], (layers.scalars, layers.probes)
    arrays: Any = STACKED  # of the layers; the rest is whole on every stage
    of_state, of_secant = state and RuleState(arrays, *[SHARED] * 3), secant and Secant(arrays, SHARED, SHARED)
    specs = (STACKED, STACKED, of_state, of_secant, SHARED, SHARED), STACKED
    return pipe.map(local, *specs)(kept, layers.stacked(), state, secant, small, batches)

  def _parted(self, trees: Sequence) -> list:
    """One tree for each batch, from one for each passage."""
    return [part for passage, tree in zip(self.passages, trees, strict=True) for part in passage.part(tree)]

  def _layer(self, layers: Layers, rows: list[Rows], cotangents: list, inputs, layer) -> tuple[list, dict]:
    """(cotangents of a layer's inputs, what `layer.training_back` returns), from all rows."""
    pipes = [pipe for passage in self.passages for pipe in passage.pipes]
    kept = [Kept(x) for x in self._parted(inputs)]
    below, gradients = [], []
    for i in range(len(rows) - 1):
      with moe.counted_by(pipes[i].num_micro):
        of_set, (cotangent,) = layer_lib.validation_back(Pair((rows[i],), None), (cotangents[i],), (kept[i],), layer)
      below.append(cotangent)
      gradients += of_set
    with moe.counted_by(pipes[-1].num_micro):
      cotangent, out = layer_lib.training_back(rows[-1], cotangents[-1], kept[-1], tuple(gradients), None, layer)
    return [*below, cotangent], out


def _with(rows: Rows, layers: Layers, batch) -> Rows:
  own = copy.copy(rows)
  own.layers, own.batch = layers, batch
  return own
