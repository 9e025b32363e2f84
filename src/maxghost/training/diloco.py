"""DiLoCo (Douillard et al., arXiv:2311.08105): slices train apart, each with a train state of its own.

A step is the ordinary one, mapped over slices, which send nothing to each other. Outer steps (`outer.py`) join them.

R slices, K validation sets, B rows of a batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.config import Config
from maxghost.objectives import create
from maxghost.parallel import distributed
from maxghost.parallel.axis_rules import APART, BATCH
from maxghost.parallel.shardings import AXES, Layout, constrain, map_state, use
from maxghost.training import scoring
from maxghost.training.host_memory import is_stacked

# Parts of the train state: global model (as in any checkpoint), states of the slices [R, ...], state of the outer step.
GLOBAL, INNER, OUTER = "model", "inner_state", "outer_state"
# Outputs by row, of which a slice's are parts of the mean over slices. `_JOIN`: how others are joined, if not by mean
# or, if the objective says so, by their maximum.
_SHARED_OUT = ("contribution_BSK", "share_BS", "param_contribution", "token_contribution_KBT")
_JOIN = {"tokens": np.sum, "scored_ok": np.all, "nonfinite_scores": np.any, "check_rel_err": np.max}


@dataclasses.dataclass(frozen=True)
class Diloco:
  """The slices of a run. graphdef, inner: abstract state of a slice. trained: {path of a parameter: fragments}."""

  cfg: Config
  layout: Layout
  graphdef: nnx.GraphDef
  inner: nnx.State
  trained: dict[tuple, tuple[int, ...]]

  @classmethod
  def of(cls, cfg: Config, layout: Layout, graphdef: nnx.GraphDef, inner: nnx.State) -> "Diloco":
    held = nnx.merge(graphdef, inner)
    params = [*nnx.to_flat_state(nnx.state(held.model, held.optimizer.wrt))]
    return cls(cfg, layout, graphdef, inner, _fragments(params, cfg.parallel.num_diloco_fragments))

  # The state.

  @functools.cached_property
  def state(self) -> nnx.State:
    """The abstract train state of all slices, with shardings."""
    flat = dict(nnx.to_flat_state(self.inner))
    whole = [(path, v) for path, v in flat.items() if path[0] == GLOBAL]
    for path, v in flat.items():
      x, axes = v.get_value(), v.get_metadata().get(AXES) or (None,) * len(v.shape)
      if not _is_common(x):
        v = v.replace(jax.ShapeDtypeStruct((self.layout.apart, *x.shape), x.dtype), axes=(APART, *axes))
      whole.append(((INNER, *path), v))
    kinds = ("momentum", "pseudo_gradient") if self.late else ("momentum",)
    for path in self.trained:
      v = flat[GLOBAL, *path]
      wide = jax.ShapeDtypeStruct(v.shape, jnp.promote_types(v.dtype, jnp.float32))
      whole += [((OUTER, kind, *path), nnx.OptState(wide, axes=v.get_metadata().get(AXES))) for kind in kinds]
    if self.late:  # whether a fragment's pseudo-gradient is in flight
      sent = jax.ShapeDtypeStruct((self.cfg.parallel.num_diloco_fragments,), jnp.int32)
      whole.append(((OUTER, "sent"), nnx.OptState(sent)))
    return self.layout.abstract(nnx.from_flat_state(whole))

  def begin(self, inner: nnx.State) -> nnx.State:
    """The initial state, in which every slice has the same train state."""
    like = self.state

    def spread(inner):
      values = {path: v.get_value() for path, v in nnx.to_flat_state(inner)}
      values |= {(INNER, *path): x for path, x in values.items()}
      return map_state(like, lambda path, v: jnp.broadcast_to(values.get(path, jnp.zeros((), v.dtype)), v.shape))

    return jax.jit(spread, out_shardings=self.layout.shardings(like))(inner)

  @property
  def late(self) -> int:
    """Steps from the pseudo-gradient of a fragment to its outer step."""
    return self.cfg.parallel.num_communication_overlapping_steps

  def _inner(self, whole: nnx.State) -> nnx.State:
    """The states of the slices as one State with the paths of a single one."""
    flat = dict(nnx.to_flat_state(whole))
    return map_state(self.inner, lambda path, _: flat[INNER, *path].get_value())

  @property
  def _axes(self) -> Any:
    """The slice axis of each leaf of `_inner`; None: all slices share the leaf."""
    return jax.tree.map(lambda x: None if _is_common(x) else 0, self.inner)

  # What each slice computes on its own.

  def train_step(self, step: Callable) -> Callable:
    """The train step of one slice as a step of all: `step(state, batch, val_batches) -> (state, out)`.

    Slice r has rows r B/R to (r + 1) B/R; all slices have the same validation rows. Outputs by row have all rows;
    contributions and shares are parts of the mean over slices, 1 / R of those in their own slice. All other outputs
    have a leading slice axis, which `to_host` reduces.
    """
    count = self.layout.apart

    def apart(whole, batch, val_batches):
      rows = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
      mapped = jax.vmap(step, (self._axes, 0, None), (self._axes, 0), spmd_axis_name=APART)
      inner, out = mapped(self._inner(whole), rows, val_batches)
      new = {(INNER, *path): v.get_value() for path, v in nnx.to_flat_state(inner)}
      out = {name: jax.tree.map(functools.partial(self._of_all_rows, name), x) for name, x in out.items()}
      return replaced(whole, new), out

    return apart

  def _of_all_rows(self, name: str, x):
    if (axis := scoring.ROW_AXIS.get(name)) is None:
      return x
    x = jnp.moveaxis(x / len(x) if name in _SHARED_OUT else x, 0, axis)
    with use(self.layout.together):
      return scoring.place(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), axis)

  def each(self, function: Callable, join: Callable = lambda x_R: x_R) -> Callable:
    """function(state, rows) in every slice, all on the same rows: outputs [R, ...], or what `join` makes of each."""
    mapped = jax.vmap(function, (self._axes, None), spmd_axis_name=APART)
    return lambda whole, rows: jax.tree.map(join, mapped(self._inner(whole), rows))

  def to_host(self, out: Mapping[str, Any]) -> dict[str, Any]:
    """Host copies of outputs: those by row as `scoring.to_host`, all others joined over the slices of all processes, by
    the mean or as `_JOIN` says. diloco/loss/<r>: the loss of slice r. Outputs on the host are returned unchanged. Every
    process must call this in the same order."""
    by_row = {name: x for name, x in out.items() if name in scoring.ROW_AXIS}
    rest = {name: x for name, x in out.items() if name not in by_row}
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(rest)):
      return dict(out)
    found, joins = {}, _JOIN | dict.fromkeys(create(self.cfg).maxima, np.max)
    for name, value in of_slices(rest).items():
      found[name] = jax.tree.map(functools.partial(joins.get(name, np.mean), axis=0), value)
      if name == "loss":
        found |= {f"diloco/loss/{r}": x for r, x in enumerate(value)}
    return scoring.to_host(by_row) | found

  def evaluation(self, evaluate: Callable) -> Callable:
    """`step.make_eval_step` at the global parameters; every slice evaluates a part of the rows."""

    def part(x):
      x = x.reshape(self.layout.apart, -1, *x.shape[1:])
      return constrain(x, (APART, BATCH, *(None,) * (x.ndim - 2)), "the rows of an evaluation")

    def evaluated(whole, batch):
      return jax.tree.map(lambda sums_R: sums_R.sum(0), self.at_global(evaluate, whole, jax.tree.map(part, batch), 0))

    return evaluated

  def at_global(self, function: Callable, whole: nnx.State, batches, axis: int | None = None):
    """Calls function(train state of a slice with the global parameters, batches) in every slice, without sending
    parameters. axis: the slice axis of `batches`; None: all slices have the same batches."""
    flat, copies = {path: v.get_value() for path, v in nnx.to_flat_state(whole)}, {}
    for path, v in nnx.to_flat_state(self.state):
      if path[:2] == (INNER, GLOBAL) and v.shape != flat[path[1:]].shape:
        copy = jnp.broadcast_to(flat[path[1:]], v.shape)
        copies[path] = jax.lax.with_sharding_constraint(copy, v.get_value().sharding)
    return jax.vmap(function, (self._axes, axis), spmd_axis_name=APART)(self._inner(replaced(whole, copies)), batches)


def of_slices(tree: Any) -> Any:
  """Host copies [R, ...] of arrays with a leading slice axis, gathered from all processes."""
  leaves, structure = jax.tree.flatten(tree)
  # Of each leaf, {first slice: values}.
  parts = [{shard.index[0].start or 0: np.asarray(shard.data) for shard in x.addressable_shards} for x in leaves]
  if not all(x.is_fully_addressable or x.is_fully_replicated for x in leaves):
    said = distributed.gather([{start: x.tolist() for start, x in own.items()} for own in parts])
    for i, like in enumerate(leaves):
      parts[i] = {int(start): np.asarray(x, like.dtype) for one in said for start, x in one[i].items()}
  return jax.tree.unflatten(structure, [np.concatenate([own[start] for start in sorted(own)]) for own in parts])


def _fragments(params: list, count: int) -> dict[tuple, tuple[int, ...]]:
  """{path: fragments of the parameter}: all for stacked layers, else one, chosen so that fragments have like sizes."""
  sizes, found = np.zeros(count), {}
  for path, v in sorted(params, key=lambda item: (not is_stacked(item[1]), -item[1].size)):
    if count > 1 and is_stacked(v):
      found[path] = tuple(range(count))
      sizes += [v.size * len(range(fragment, v.shape[0], count)) / v.shape[0] for fragment in range(count)]
    else:
      found[path] = (int(sizes.argmin()),)
      sizes[found[path]] += v.size
  return {path: found[path] for path, _ in params}


def _is_common(x) -> bool:
  """Whether all slices share a leaf of the train state: it is a count of steps."""
  return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def replaced(whole: nnx.State, new: Mapping[tuple, Any]) -> nnx.State:
  return map_state(whole, lambda path, v: new.get(path, v.get_value()))
