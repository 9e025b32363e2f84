"""Stacked layers on the stages of a pipeline: rows pass the stages in micro-batches.

S stages, R repeats, M micro-batches of b rows, B = b M rows, L layers, of which a stage has R chunks of k. Row i M + m
of a batch is row i of micro-batch m, so that devices which share the rows of a batch share those of each micro-batch.
In M R + S - 1 iterations every stage applies one chunk to one micro-batch and passes the result on; the first stage
keeps what comes back to it for the next repeat. A stage that waits computes finite numbers that are not used.

`run` has two backward passes of equal values. Autodiff's goes back through the iterations, and gives the weights'
gradients micro-batch by micro-batch. Inside `whole_rows` it has two parts: first the pipeline computes only the
cotangents of the layers' inputs; then every stage repeats the backward pass of its own chunks, without waiting for
another stage, for the gradients of their layers from all rows at once. The gradient of a layer's Variable may then be
any function of all rows of the batch.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxghost.models import autodiff, moe
from maxghost.models.autodiff import join
from maxghost.models.streaming import fetch, separate_floats
from maxghost.parallel import shardings
from maxghost.parallel.axis_rules import BATCH
from maxghost.parallel.stages import AXIS, Stages, ring, to_run, to_store

_whole_rows = contextvars.ContextVar("maxghost_whole_rows", default=False)
# whole_rows(True or False): takes the gradients of a layer from all rows of the batch at once, or not.
whole_rows = functools.partial(shardings.setting, _whole_rows)
STACKED, SHARED = PartitionSpec(AXIS), PartitionSpec()  # split over the stages, or whole on each


class RowVariable(nnx.Variable):
  """A layer's Variable [N, rows of the batch, ...], of which a micro-batch has the part of its own rows."""


def current() -> Stages | None:
  """The stages that stacked layers are to run on."""
  layout = shardings.current()
  return None if layout is None else layout.stages


def micro_batches(num_rows: int) -> int:
  """Number of micro-batches of so many rows; 1 without stages."""
  layout: Any = shardings.current()
  if current() is None:
    return 1
  parts = layout.rules.parts([axis for axis in layout.rules.batch_axes if axis != AXIS])
  return layout.stages.micro_batches(num_rows, parts)


def run(body: Callable, x, scanned, inputs):
  """As a scan of x = body(x, layer, inputs) over the layers `scanned`.

  x, inputs: pytrees of arrays with a leading row axis; gradients flow to x, not to inputs.
  """
  pipe = Pipe.of(jax.tree.leaves(scanned)[0].shape[0], jax.tree.leaves(x)[0].shape[0])
  if not _whole_rows.get():
    like = jax.tree.map(lambda x: x.dtype, x)

    def local(x, scanned, inputs):
      x = jax.tree.map(lambda x, dtype: x.astype(dtype), x, like)
      return pipe.forward(body, x, pipe.chunks(scanned), inputs)[0]

    return pipe.map(local, (SHARED, STACKED, SHARED), SHARED)(jax.tree.map(_summable, x), scanned, inputs)
  floats, others = separate_floats(scanned)
  layered = lambda floats, others: pipe.chunks(join(floats, others))  # noqa: E731

  def forward(x, floats, others, inputs):
    def local(x, floats, others, inputs):
      with autodiff.inputs_only():
        return pipe.forward(body, x, layered(floats, others), inputs, keep=True)

    specs = (SHARED, STACKED, STACKED, SHARED), (SHARED, STACKED)
    y, kept = pipe.map(local, *specs)(x, floats, others, inputs)
    return y, (kept, floats, others, inputs)

  def backward(saved, cotangent):
    def local(kept, cotangent, floats, others, inputs):
      layers = layered(floats, others)
      with autodiff.inputs_only():
        below, cotangents = pipe.backward(body, cotangent, kept, layers, inputs)
      return below, pipe.stored(pipe.gradients(body, kept, cotangents, layers, inputs))

    kept, floats, others, inputs = saved
    specs = (STACKED, SHARED, STACKED, STACKED, SHARED), (SHARED, STACKED)
    below, gradients = pipe.map(local, *specs)(kept, cotangent, floats, others, inputs)
    return below, gradients, *(jax.tree.map(autodiff.zero_cotangent, tree) for tree in (others, inputs))

  function = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
  function.defvjp(forward, backward)
  return function(x, floats, others, inputs)


def _summable(x):
  """x in a dtype that can be summed over the stages: XLA's CPU compiler ends the process at sums of bfloat16."""
  narrow = shardings.platform() == "cpu" and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
  return x.astype(jnp.float32) if narrow else x


class Pipe(NamedTuple):
  """A pipeline for batches of one size. All methods but `map` are for use inside it.

  Layers inside: trees [R, k, ...] of `chunks`; `kept`: inputs of a stage's layers, [R, k, B, ...].
  """

  layout: Any
  num_stages: int
  repeats: int
  num_micro: int

  @classmethod
  def of(cls, num_layers: int, num_rows: int) -> "Pipe":
    layout: Any = shardings.current()
    return cls(layout, layout.stages.num, layout.stages.rounds(num_layers), micro_batches(num_rows))

  def map(self, function: Callable, in_specs, out_specs) -> Callable:
    """`function` on every stage; the other mesh axes stay automatic."""

    def local(*arguments):
      with shardings.use(self.layout.inside(AXIS)):
        return function(*arguments)

    options: Any = {"axis_names": {AXIS}, "check_vma": False, "in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(local, mesh=self.layout.mesh, **options)

  def chunks(self, stacked):
    """This stage's layers, [R, k, ...], from those that it stores."""
    return to_run(stacked, self.num_stages, self.repeats)

  def stored(self, chunks):
    """The inverse of `chunks`."""
    return to_store(chunks, self.num_stages, self.repeats)

  @property
  def slots(self) -> int:
    """Micro-batches with those that only fill a repeat, in which a stage must not wait for the last one."""
    return max(self.num_micro, self.num_stages) if self.repeats > 1 else self.num_micro

  def forward(self, body: Callable, x, layers, inputs, keep: bool = False):
    """(output of the last layer, `kept` or None), whole on every stage."""
    x, inputs, pick = self._micro(x), self._micro(inputs), self._picked(layers)

    def visited(x, layers, visit, micro, own_inputs):
      one = lambda x, layer: (body(x, layer, own_inputs), x if keep else None)  # noqa: E731
      here = pick(layers, visit)
      return jax.lax.scan(one, x, here if keep else self._own_rows(here, micro))

    if self.repeats > 1:  # autodiff would keep each iteration's slices of the stacked weights, which it can cut again
      all_but_slices = lambda primitive, *_, **__: primitive.name not in ("dynamic_slice", "squeeze")  # noqa: E731
      visited = jax.checkpoint(visited, policy=all_but_slices, prevent_cse=False)

    def chunk(x, visit, micro, kept):
      x, seen = visited(x, layers, visit, micro, _take(inputs, micro))
      return x, _put_chunk(kept, seen, visit, micro) if keep else None

    kept = self._blank(x, jax.tree.leaves(layers)[0].shape[1]) if keep else None
    x, kept = self._drive(chunk, x, kept, jax.lax.axis_index(AXIS), 1)
    return self._rows(x, 0), self._kept(kept) if keep else None

  def backward(self, body: Callable, cotangent, kept, layers, inputs):
    """(cotangent of x, cotangents of the outputs of this stage's chunks, [R, B, ...]), from what `forward` kept."""
    cotangent, inputs, kept = self._micro(cotangent), self._micro(inputs), self._micro_kept(kept)
    pick = self._picked(layers)

    def chunk(cotangent, visit, micro, found):
      visit, own_inputs = self.repeats - 1 - visit, _take(inputs, micro)

      def one(cotangent, scanned):
        x, layer = scanned
        _, pull = jax.vjp(lambda x: body(x, layer, own_inputs), x)
        return pull(cotangent)[0], None

      scanned = _take_chunk(kept, visit, micro), pick(layers, visit)
      below, _ = jax.lax.scan(one, cotangent, scanned, reverse=True)
      return below, _put_chunk(found, jax.tree.map(lambda x: x[None], cotangent), visit, micro)

    place = self.num_stages - 1 - jax.lax.axis_index(AXIS)
    below, found = self._drive(chunk, cotangent, self._blank(cotangent, 1), place, -1)
    return self._rows(below, self.num_stages - 1), jax.tree.map(lambda x: x.squeeze(1), self._kept(found))

  def gradients(self, body: Callable, kept, cotangents, layers, inputs):
    """Gradients of the floats of this stage's layers, [R, k, ...], from all rows."""

    def one(cotangent, scanned):
      x, (floats, others) = scanned
      _, pull = jax.vjp(lambda x, floats: body(x, join(floats, others), inputs), x, floats)
      return pull(cotangent)

    def chunk(_, scanned):
      x, cotangent, layers = scanned
      return None, jax.lax.scan(one, cotangent, (x, separate_floats(layers)), reverse=True)[1]

    with moe.counted_by(self.num_micro):
      _, found = jax.lax.scan(chunk, None, (kept, cotangents, layers))
    return found

  def _drive(self, chunk: Callable, x, kept, place, step: int):
    """Sends every micro-batch R times around: (what came back to the stage of place 0, [b, M, ...]; kept).

    chunk(x, visit, micro-batch, kept) -> (y, kept). place: number of stages before this one.

    A stage that waits computes its first turn, whose kept arrays it will overwrite, or repeats its last one, with the
    same rows and so the same values.
    """
    slots, last = self.slots, self.num_stages - 1
    turns = slots * self.repeats

    def iteration(carry, t):
      arriving, buffer, kept = carry
      turn = jnp.clip(t - place, 0, turns - 1)
      visit, micro = turn // slots, turn % slots
      x = jax.tree.map(lambda own, other: jnp.where(place == 0, own, other), _take(buffer, micro), arriving)
      y, kept = chunk(x, visit, micro, kept)
      arriving = jax.tree.map(lambda y: jax.lax.ppermute(y, AXIS, ring(self.num_stages, step)), y)
      slot = (t - last) % slots
      new = jax.tree.map(lambda new, old: jnp.where(t >= last, new, old), arriving, _take(buffer, slot))
      put = lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, slot, 1)  # noqa: E731
      return (arriving, jax.tree.map(put, buffer, new), kept), None

    start = _take(x, 0), x, kept  # while a stage waits it computes a copy of real rows, never anything infinite
    (_, buffer, kept), _ = jax.lax.scan(iteration, start, jnp.arange(turns + last))
    return buffer, kept

  def _picked(self, layers) -> Callable:
    """pick([R, k, ...], visit) -> [k, ...]; of a single chunk the loop over iterations makes no copy."""
    if self.repeats > 1:
      return fetch
    single = jax.tree.map(lambda x: x.squeeze(0), layers)
    return lambda layers, visit: single

  def _micro(self, tree):
    """[B, ...] -> [b, slots, ...]; slots that only fill a repeat hold copies."""

    def cut(x):
      x = x.reshape(x.shape[0] // self.num_micro, self.num_micro, *x.shape[1:])
      fill = self.slots - self.num_micro
      x = jnp.concatenate([x, *[x[:, :1]] * fill], 1) if fill else x
      return shardings.constrain(x, (BATCH, *[None] * (x.ndim - 1)), "micro-batches")

    return jax.tree.map(cut, tree)

  def _own_rows(self, layers, micro):
    """The layers with the part of each `RowVariable`, [k, N, B, ...], that belongs to a micro-batch."""

    def cut(v):
      if not isinstance(v, RowVariable):
        return v
      x = v[...].reshape(*v.shape[:2], -1, self.num_micro, *v.shape[3:])
      return v.replace(jax.lax.dynamic_index_in_dim(x, micro, 3, keepdims=False))

    return jax.tree.map(cut, layers, is_leaf=lambda v: isinstance(v, nnx.Variable))

  def _rows(self, tree, owner: int):
    """[b, slots, ...] of stage `owner` -> [B, ...], whole on every stage."""
    own = jax.lax.axis_index(AXIS) == owner

    def join(x):
      x = x[:, : self.num_micro].reshape(-1, *x.shape[2:])
      return jax.lax.psum(_summable(jnp.where(own, x, jnp.zeros_like(x))), AXIS).astype(x.dtype)

    return jax.tree.map(join, tree)

  def _blank(self, x, length: int):
    """Zeros [R, length, b, slots, ...] for an x [b, slots, ...]."""

    def zeros(x):
      blank = jnp.zeros((self.repeats, length, *x.shape), x.dtype)
      return shardings.constrain(blank, (None, None, BATCH, *[None] * (x.ndim - 1)), "inputs of layers")

    return jax.tree.map(zeros, x)

  def _kept(self, tree):
    """[R, k, b, slots, ...] -> [R, k, B, ...]"""
    return jax.tree.map(lambda x: x[:, :, :, : self.num_micro].reshape(*x.shape[:2], -1, *x.shape[4:]), tree)

  def _micro_kept(self, tree):
    """The inverse of `_kept`."""
    fill = [(0, 0)] * 3 + [(0, self.slots - self.num_micro)]

    def cut(x):
      x = x.reshape(*x.shape[:2], -1, self.num_micro, *x.shape[3:])
      return jnp.pad(x, fill + [(0, 0)] * (x.ndim - 4), mode="edge") if fill[3][1] else x

    return jax.tree.map(cut, tree)


def _take(tree, micro):
  """[b, slots, ...] -> [b, ...]"""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, micro, 1, keepdims=False), tree)


def _starts(x, visit, micro) -> Sequence[Any]:
  return [visit, 0, 0, micro, *[0] * (x.ndim - 4)]


def _take_chunk(tree, visit, micro):
  """[R, k, b, slots, ...] -> [k, b, ...]"""
  cut = lambda x: jax.lax.dynamic_slice(x, _starts(x, visit, micro), (1, *x.shape[1:3], 1, *x.shape[4:]))  # noqa: E731
  return jax.tree.map(lambda x: cut(x).squeeze((0, 3)), tree)


def _put_chunk(tree, new, visit, micro):
  """The tree with `new` [k, b, ...] in one place."""
  put = lambda x, y: jax.lax.dynamic_update_slice(x, jnp.expand_dims(y, (0, 3)), _starts(x, visit, micro))  # noqa: E731
  return jax.tree.map(put, tree, new)
