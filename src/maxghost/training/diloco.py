"""DiLoCo: slices train apart, each with a train state of its own, and meet in an outer step every few steps.

Sources: Douillard et al., arXiv:2311.08105; fragments and overlap: Streaming DiLoCo, arXiv:2501.18512.

A step is the ordinary one, mapped over slices: nothing is sent between them. The outer step of a parameter with global
value g, values x_r in the slices and outer momentum m:

    D = mean over r of (g - x_r);   m' = momentum * m + D;   g' = g - rate * (D + momentum * m');   x_r' = g'

With overlap, D is formed first, and g' and m' some steps later; then x_r' = alpha * x_r + (1 - alpha) * g'.

R slices, H steps between two outer steps of a parameter, F fragments, K validation sets, B rows of a batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.config import Config
from maxghost.ghost.schedules import Model, passes
from maxghost.ghost.schedules.base import of_each_set
from maxghost.objectives import of_validation
from maxghost.optimizers import by_label
from maxghost.parallel import distributed
from maxghost.parallel.axis_rules import APART, BATCH
from maxghost.parallel.shardings import AXES, Layout, constrain, slash_path, use
from maxghost.training import devices, scoring
from maxghost.training.memory_report import shown

# Parts of the train state: global model (as in any checkpoint), states of the slices [R, ...], state of the outer step.
GLOBAL, INNER, OUTER = "model", "inner_state", "outer_state"
SEND, MERGE, SYNC = "send", "merge", "sync"
OUTER_STEP = "outer_step"  # what the names of programs begin with that change the state
# Outputs of a step that are parts of the mean over slices; of the others not listed in `_JOIN` the mean is taken.
_SHARED_OUT = ("contribution_BSK", "share_BS", "param_contribution", "token_contribution_KBT")
_JOIN: dict[str, Callable] = {
  "tokens": np.sum, "scored_ok": np.all, "nonfinite_scores": np.any, "max_logits_LH": np.max, "check_rel_err": np.max,
}  # fmt: skip


class OuterState(nnx.OptState):
  """Momentum of the outer step, or a pseudo-gradient on its way; float32 or wider."""


@dataclasses.dataclass(frozen=True)
class Diloco:
  """The slices of a run. graphdef, inner: of the train state of one slice, abstract. trained: the paths of the
  parameters that are trained, with their fragments."""

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
    flat = {path: v for path, v in nnx.to_flat_state(self.inner)}
    whole = [(path, v) for path, v in flat.items() if path[0] == GLOBAL]
    for path, v in flat.items():
      x, axes = v.get_value(), v.get_metadata().get(AXES) or (None,) * len(v.shape)
      if not _is_common(x):
        v = v.replace(jax.ShapeDtypeStruct((self.layout.apart, *x.shape), x.dtype), axes=(APART, *axes))
      whole.append(((INNER, *path), v))
    kinds = ("momentum", "pseudo_gradient") if self._late else ("momentum",)
    for path in self.trained:
      v = flat[GLOBAL, *path]
      wide = jax.ShapeDtypeStruct(v.shape, jnp.promote_types(v.dtype, jnp.float32))
      whole += [((OUTER, kind, *path), OuterState(wide, axes=v.get_metadata().get(AXES))) for kind in kinds]
    if self._late:  # whether a fragment's pseudo-gradient is on its way
      sent = jax.ShapeDtypeStruct((self.cfg.parallel.num_diloco_fragments,), jnp.int32)
      whole.append(((OUTER, "sent"), OuterState(sent)))
    return self.layout.abstract(nnx.from_flat_state(whole))

  def begin(self, inner: nnx.State) -> nnx.State:
    """The state in which every slice begins with the same train state."""
    like = self.state

    def spread(inner):
      values = {path: v.get_value() for path, v in nnx.to_flat_state(inner)}
      made = []
      for path, v in nnx.to_flat_state(like):
        x = values.get(path[1:] if path[0] == INNER else path, jnp.zeros((), v.dtype))
        made.append((path, v.replace(jnp.broadcast_to(x, v.shape))))
      return nnx.from_flat_state(made)

    return jax.jit(spread, out_shardings=self.layout.shardings(like))(inner)

  @property
  def _late(self) -> int:
    """Steps from the pseudo-gradient of a fragment to its outer step."""
    return self.cfg.parallel.num_communication_overlapping_steps

  @property
  def _params(self) -> list[tuple]:
    """(path, Variable) of every Variable of the model of one slice."""
    return [(path[1:], v) for path, v in nnx.to_flat_state(self.inner) if path[0] == GLOBAL]

  def _inner(self, whole: nnx.State) -> nnx.State:
    """The states of the slices as one State with the paths of a single one."""
    flat = dict(nnx.to_flat_state(whole))
    return nnx.from_flat_state([(p, v.replace(flat[INNER, *p].get_value())) for p, v in nnx.to_flat_state(self.inner)])

  @property
  def _axes(self) -> Any:
    """The slice axis of each leaf of `_inner`; None: common to all."""
    return jax.tree.map(lambda x: None if _is_common(x) else 0, self.inner)

  def lines(self) -> list[str]:
    """What a run says at its start."""
    parallel, count = self.cfg.parallel, self.cfg.parallel.num_diloco_fragments
    parts = f" of each of {count} fragments" if count > 1 else ""
    late = f", {self._late} steps after its pseudo-gradient" if self._late else ""
    lines = [
      f"DiLoCo: {self.layout.apart} slices train apart; an outer step{parts} every {parallel.diloco_sync_period} steps"
      f"{late} (Nesterov, rate {parallel.diloco_outer_lr:g}, momentum {parallel.diloco_outer_momentum:g})"
    ]
    sizes = [self.bytes_sent(fragment) for fragment in range(count)]
    largest = f", {shown(max(sizes))} at once" if count > 1 else ""
    lines.append(
      f"DiLoCo: outer steps send {shown(sum(sizes))} between slices on each device in {parallel.diloco_sync_period} "
      f"steps{largest}; the steps themselves send nothing there"
    )
    if self.cfg.val_sets:
      lines.append("scores: against the validation loss of the row's own slice, as parts of the mean over slices")
    return lines

  def bytes_sent(self, fragment: int) -> int:
    """Bytes of the pseudo-gradient of a fragment on one device, in float32 or wider."""
    flat, total = dict(nnx.to_flat_state(self.state)), 0
    for path, fragments in self.trained.items():
      x = flat[OUTER, "momentum", *path].get_value()
      size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      if fragment in fragments:
        entries = x.shape[0] if len(fragments) > 1 else 1
        total += size * len(range(fragment if entries > 1 else 0, entries, len(fragments))) // entries
    return total

  # What slices do apart.

  def train_step(self, step: Callable) -> Callable:
    """The train step of one slice as a step of all: `step(state, batch, val_batches) -> (state, out)`.

    Slice r has rows r B/R to (r + 1) B/R, and the same validation rows as the others. Outputs of rows have all rows;
    contributions and shares are parts of the mean over slices, 1 / R of those in their own slice. All other outputs
    have a leading slice axis: `to_host` joins them.
    """
    count = self.layout.apart

    def apart(whole, batch, val_batches):
      rows = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
      mapped = jax.vmap(step, (self._axes, 0, None), (self._axes, 0), spmd_axis_name=APART)
      inner, out = mapped(self._inner(whole), rows, val_batches)
      new = {(INNER, *path): v.get_value() for path, v in nnx.to_flat_state(inner)}
      out = {name: jax.tree.map(functools.partial(self._of_all_rows, name), x) for name, x in out.items()}
      return _replaced(whole, new), out

    return apart

  def _of_all_rows(self, name: str, x):
    if (axis := scoring.ROW_AXIS.get(name)) is None:
      return x
    x = jnp.moveaxis(x / len(x) if name in _SHARED_OUT else x, 0, axis)
    with use(self.layout.together):
      names: list[str | None] = [None] * (x.ndim - 1)
      names[axis] = BATCH
      return constrain(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), names, "an output of the step")

  def closing(self, close: Callable) -> Callable:
    """`step.make_closing` for every slice: outputs [R, K]."""
    mapped = jax.vmap(close, (self._axes, None), spmd_axis_name=APART)
    return lambda whole, val_batches: mapped(self._inner(whole), val_batches)

  def to_host(self, out: Mapping[str, Any]) -> dict[str, Any]:
    """Host copies of outputs: rows as `scoring.to_host`; of all others, one value for the slices of all processes.

    It is the mean over slices, or what `_JOIN` says. diloco/loss/<r>: the loss of slice r. Values on the host are
    returned as they are. Every process must call it in the same order.
    """
    by_row = {name: x for name, x in out.items() if name in scoring.ROW_AXIS}
    rest = {name: x for name, x in out.items() if name not in by_row}
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(rest)):
      return dict(out)
    found = {}
    for name, value in of_slices(rest).items():
      found[name] = jax.tree.map(functools.partial(_JOIN.get(name, np.mean), axis=0), value)
      if name == "loss":
        found |= {f"diloco/loss/{r}": x for r, x in enumerate(value)}
    return scoring.to_host(by_row) | found

  def evaluation(self, evaluate: Callable) -> Callable:
    """`step.make_eval_step` at the global parameters; every slice has a part of the rows."""

    def part(x):
      x = x.reshape(self.layout.apart, -1, *x.shape[1:])
      return constrain(x, (APART, BATCH, *(None,) * (x.ndim - 2)), "the rows of an evaluation")

    def evaluated(whole, batch):
      rows = jax.tree.map(part, batch)
      return jax.tree.map(lambda sums_R: sums_R.sum(0), self._at_global(evaluate, whole, rows, 0))

    return evaluated

  def _at_global(self, function: Callable, whole: nnx.State, batches, axis: int | None = None):
    """function(train state of a slice with the global parameters, batches) in every slice, so that none sends them.

    axis: of the slices in batches; None: all slices have the same.
    """
    flat, copies = {path: v.get_value() for path, v in nnx.to_flat_state(whole)}, {}
    for path, v in nnx.to_flat_state(self.state):
      if path[:2] == (INNER, GLOBAL) and v.shape != flat[path[1:]].shape:
        copy = jnp.broadcast_to(flat[path[1:]], v.shape)
        copies[path] = jax.lax.with_sharding_constraint(copy, v.get_value().sharding)
    mapped = jax.vmap(function, (self._axes, axis), spmd_axis_name=APART)
    return mapped(self._inner(_replaced(whole, copies)), batches)

  # The outer step.

  def due(self, done: int) -> list[tuple[str, int]]:
    """What follows step number `done` (from 1): pairs of SEND, MERGE or SYNC and a fragment, in order.

    Fragment f meets after f H / F + i H steps; the last step of a run is followed by an outer step of every fragment,
    without overlap, so that the global parameters contain all steps.
    """
    parallel = self.cfg.parallel
    period, count, late = parallel.diloco_sync_period, parallel.num_diloco_fragments, self._late
    last, moves = done == self.cfg.run.steps, []
    for fragment in range(count):
      behind = (done - fragment * period // count) % period  # steps since the fragment was sent
      if late and done > behind and (behind == late or (last and 0 < behind < late)):
        moves.append((MERGE, fragment))
      if last or (behind == 0 and not late):
        moves.append((SYNC, fragment))
      elif behind == 0:
        moves.append((SEND, fragment))
    return moves

  def programs(self) -> dict[str, tuple[Callable, tuple, Any]]:
    """{name: (function, abstract arguments, shardings of its results)} of what `OuterSteps` runs."""
    inner = {path[2:]: v for path, v in nnx.to_flat_state(self.state) if path[:2] == (INNER, GLOBAL)}
    trained = {slash_path(path): inner[path].get_value() for path in self.trained}
    val_batches = devices.validation_shapes(self.cfg, self.layout)
    gradients, programs = (trained,) * len(val_batches), {}
    if val_batches:
      placed = (None, jax.tree.map(lambda x: x.sharding, gradients))
      programs["outer_gradients"] = functools.partial(self.gradients), (self.state, val_batches), placed
      programs["outer_losses"] = functools.partial(self.losses), (self.state, val_batches), None
    for kind in (SEND, MERGE, SYNC) if self._late else (SYNC,):
      for fragment in range(self.cfg.parallel.num_diloco_fragments):
        function = functools.partial(self.move, kind, fragment)
        given = () if kind == SEND else gradients
        programs[f"{OUTER_STEP}_{kind}_{fragment}"] = function, (self.state, given), None
    return programs

  def gradients(self, whole: nnx.State, val_batches: tuple):
    """(losses [R, K], K dicts {label: gradient [R, ...]}) at the global parameters, the same in every slice."""

    def of_slice(inner, val_batches):
      held = nnx.merge(self.graphdef, inner)
      split = Model(*nnx.split(held.model, held.optimizer.wrt, ...))
      losses, gradients = passes.validation_gradients(split, of_validation(self.cfg), val_batches)
      return constrain(losses, (None,)), tuple(map(by_label, gradients))

    return self._at_global(of_slice, whole, val_batches)

  def losses(self, whole: nnx.State, val_batches: tuple):
    """Losses [R, K] of the validation rows at the global parameters, the same in every slice."""

    def of_slice(inner, val_batches):
      model = nnx.merge(self.graphdef, inner).model
      pairs = zip(of_each_set(of_validation(self.cfg), val_batches), val_batches, strict=True)
      return constrain(jnp.stack([passes.validation_mean(*loss(model, rows)) for loss, rows in pairs]), (None,))

    return self._at_global(of_slice, whole, val_batches)

  def move(self, kind: str, fragment: int, whole: nnx.State, gradients: tuple):
    """(state after an entry of `due`, its account); gradients: from `gradients`; without them no account.

    The account has the nats by which the move lowers the validation loss at the global parameters to first order, by
    cause: momentum and pseudo_gradient, [R, K] alike in every slice, and without overlap the part of each slice.
    """
    flat = {path: v.get_value() for path, v in nnx.to_flat_state(whole)}
    new, products = {}, []
    for path, fragments in self.trained.items():
      if fragment not in fragments:
        continue
      part = _Part(fragment, len(fragments))
      names = {"g": (GLOBAL, *path), "x": (INNER, GLOBAL, *path), "m": (OUTER, "momentum", *path)}
      m = part.of(flat[names["m"]])
      g, x_R = part.of(flat[names["g"]]).astype(m.dtype), part.of(flat[names["x"]], 1).astype(m.dtype)
      way = (OUTER, "pseudo_gradient", *path)
      if kind == SEND:
        new[way] = part.put(flat[way], g - x_R.mean(0))
        continue
      pseudo = part.of(flat[way]) if kind == MERGE else g - x_R.mean(0)
      after, moved, x_after = self._outer(kind, g, m, pseudo, x_R)
      if kind == MERGE:  # after the end of a run that was continued, nothing is on its way
        sent = flat[OUTER, "sent"][fragment] > 0
        after, moved, x_after = (jnp.where(sent, y, x) for y, x in ((after, m), (moved, g), (x_after, x_R)))
      for name, value, lead in (("g", moved, 0), ("x", x_after, 1), ("m", after, 0)):
        new[names[name]] = part.put(flat[names[name]], value, lead)
      along = [part.of(gradient[slash_path(path)], 1).astype(m.dtype) for gradient in gradients]
      products.append([self._products(G, m, pseudo, g[None] - x_R if kind == SYNC else None) for G in along])
    if self._late:
      new[OUTER, "sent"] = flat[OUTER, "sent"].at[fragment].set(int(kind == SEND))
    account = {}
    if gradients and kind != SEND:
      sums = [jax.tree.map(lambda *x: sum(x), *of_set) for of_set in zip(*products, strict=True)]
      account = jax.tree.map(lambda *x: jnp.stack(x, -1), *sums)
      if kind == MERGE:
        account = jax.tree.map(lambda x: jnp.where(flat[OUTER, "sent"][fragment] > 0, x, 0), account)
    return _replaced(whole, new), account

  def _outer(self, kind: str, g, m, pseudo, x_R) -> tuple:
    """(m', g', x_R') of one parameter, as in the module docstring."""
    parallel = self.cfg.parallel
    beta, alpha = parallel.diloco_outer_momentum, parallel.communication_overlapping_alpha if kind == MERGE else 0.0
    after = beta * m + pseudo
    moved = g - parallel.diloco_outer_lr * (pseudo + beta * after)
    whole_R = jnp.broadcast_to(moved, x_R.shape)
    return after, moved, alpha * x_R + (1 - alpha) * whole_R if alpha else whole_R

  def _products(self, gradient_R, m, pseudo, apart_R) -> dict:
    """The account [R] of one parameter and set; apart_R: the pseudo-gradient of each slice, if known."""
    rate, beta = self.cfg.parallel.diloco_outer_lr, self.cfg.parallel.diloco_outer_momentum
    along = lambda x_R: (gradient_R * x_R).reshape(len(gradient_R), -1).sum(1)  # noqa: E731
    out = {"momentum": rate * beta**2 * along(m[None]), "pseudo_gradient": rate * (1 + beta) * along(pseudo[None])}
    return out if apart_R is None else out | {"slice": rate * (1 + beta) / len(apart_R) * along(apart_R)}


class OuterSteps:
  """Runs the outer steps of a run. program: the compiled function of a name in `Diloco.programs`."""

  def __init__(self, apart: Diloco, program: Callable[[str], Callable]):
    self._apart, self._program = apart, program

  def moves(self, done: int) -> bool:
    """Whether parameters change after step number `done` (from 1)."""
    return any(kind != SEND for kind, _ in self._apart.due(done))

  def __call__(self, state: nnx.State, done: int, val_batches: tuple) -> tuple[nnx.State, dict[str, np.ndarray]]:
    """(state, account) after step number `done`. The state is donated; the account is empty where nothing moves.

    The account, in nats at the global parameters: predicted_drop, actual_drop, momentum, pseudo_gradient [K], and
    without overlap slice [R, K].
    """
    moves, accounts, gradients = self._apart.due(done), [], ()
    measures = bool(val_batches) and self.moves(done)
    if measures:
      before, gradients = self._program("outer_gradients")(state, val_batches)
    for kind, fragment in moves:
      state, account = self._program(f"{OUTER_STEP}_{kind}_{fragment}")(state, () if kind == SEND else gradients)
      accounts += [account] if account else []
    if not measures:
      return state, {}
    after = self._program("outer_losses")(state, val_batches)
    found: dict[str, Any] = {}
    for account in accounts:
      own = {name: x if name == "slice" else x[0] for name, x in of_slices(account).items()}
      found = {name: found.get(name, 0.0) + own.get(name, 0.0) for name in found | own}
    found["predicted_drop"] = found["momentum"] + found["pseudo_gradient"]
    before, after = of_slices((before, after))
    found["actual_drop"] = before[0].astype(np.float64) - after[0]
    return state, found


def account_metrics(account: Mapping[str, np.ndarray], val_sets: tuple[str, ...]) -> dict[str, float]:
  """The diloco/* part of a record, from the account of `OuterSteps`."""
  record = {}
  for name, value in account.items():
    for k, of_set in enumerate(val_sets):
      if name == "slice":
        record |= {f"diloco/pseudo_gradient/{of_set}/{r}": float(x) for r, x in enumerate(value[:, k])}
      else:
        record[f"diloco/{name}/{of_set}"] = float(value[k])
  return record


def of_slices(tree: Any) -> Any:
  """Host copies [R, ...] of arrays with a leading slice axis, also of the slices of other processes."""
  leaves, structure = jax.tree.flatten(tree)
  own = [{shard.index[0].start or 0: np.asarray(shard.data) for shard in x.addressable_shards} for x in leaves]
  if not all(x.is_fully_addressable or x.is_fully_replicated for x in leaves):
    said = distributed.gather([{start: x.tolist() for start, x in shards.items()} for shards in own])
    merged = [{int(start): x for one in said for start, x in one[i].items()} for i in range(len(leaves))]
    own = [{start: np.asarray(x, like.dtype) for start, x in m.items()} for m, like in zip(merged, leaves, strict=True)]
  whole = [np.concatenate([shards[start] for start in sorted(shards)]) for shards in own]
  return jax.tree.unflatten(structure, whole)


class _Part(NamedTuple):
  """The entries `first`, `first + every`, ... of the layer axis of a stacked parameter; all if `every` is 1."""

  first: int
  every: int

  def of(self, x, axis: int = 0):
    return x if self.every == 1 else x[(slice(None),) * axis + (slice(self.first, None, self.every),)]

  def put(self, x, value, axis: int = 0):
    """x with these entries replaced. Padding and selection stay on each device, where a scatter might not."""
    value = value.astype(x.dtype)
    if self.every == 1:
      return value
    behind = x.shape[axis] - 1 - self.first - (value.shape[axis] - 1) * self.every
    padding = [(self.first, behind, self.every - 1) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    number = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(number % self.every == self.first, jax.lax.pad(value, jnp.zeros((), x.dtype), padding), x)


def _fragments(params: list, count: int) -> dict[tuple, tuple[int, ...]]:
  """{path: fragments that have a part of the parameter}: of stacked layers all, others one, so that sizes are alike."""
  sizes, found = [0.0] * count, {}
  stacked = [(path, v) for path, v in params if count > 1 and (v.get_metadata().get(AXES) or ("",))[0] == "layers"]
  for path, v in stacked:
    found[path] = tuple(range(count))
    for fragment in range(count):
      sizes[fragment] += v.size * len(range(fragment, v.shape[0], count)) / v.shape[0]
  for path, v in sorted(params, key=lambda item: -item[1].size):
    if path not in found:
      fragment = sizes.index(min(sizes))
      found[path] = (fragment,)
      sizes[fragment] += v.size
  return {path: found[path] for path, _ in params}


def _is_common(x) -> bool:
  """Whether a leaf of a train state is the same in all slices: a count of steps."""
  return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)


def _replaced(whole: nnx.State, new: Mapping[tuple, Any]) -> nnx.State:
  return nnx.from_flat_state(
    [(path, v.replace(new[path]) if path in new else v) for path, v in nnx.to_flat_state(whole)]
  )
