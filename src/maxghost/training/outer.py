"""The outer steps of DiLoCo, which join slices that train apart (`diloco.py`), and their account.

Sources: Douillard et al., arXiv:2311.08105; fragments and overlap: Streaming DiLoCo, arXiv:2501.18512.

A parameter has the global value g, the values x_r in the slices, and outer momentum m:

    D = mean over r of (g - x_r);   m' = momentum * m + D;   g' = g - rate * (D + momentum * m');   x_r' = g'

With overlap, D is formed first, and g' and m' some steps later; then x_r' = alpha * x_r + (1 - alpha) * g'.

R slices, H steps between two outer steps of a parameter, F fragments, K validation sets.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.ghost.schedules import Model, passes
from maxghost.objectives import of_validation
from maxghost.optimizers import by_label
from maxghost.parallel.shardings import constrain, slash_path
from maxghost.training import devices
from maxghost.training.batches import ValidationRows
from maxghost.training.diloco import GLOBAL, INNER, OUTER, Diloco, of_slices, replaced
from maxghost.training.memory_report import shown

SEND, MERGE, SYNC = "send", "merge", "sync"
OUTER_STEP = "outer_step"  # prefix of the programs that change the state


class Outer:
  """The outer steps of the slices of a run, as functions of the state of all slices."""

  def __init__(self, slices: Diloco):
    self.slices, self._parallel, self._state = slices, slices.cfg.parallel, slices.state

  def lines(self) -> list[str]:
    """Lines that a run prints at its start."""
    given, count = self._parallel, self._parallel.num_diloco_fragments
    sizes = [self.bytes_sent(fragment) for fragment in range(count)]
    parts = f" of each of {count} fragments" if count > 1 else ""
    late = f", {self.slices.late} steps after its pseudo-gradient" if self.slices.late else ""
    most = f", {shown(max(sizes))} at once" if count > 1 else ""
    rule = f"(Nesterov, rate {given.diloco_outer_lr:g}, momentum {given.diloco_outer_momentum:g})"
    meets = f"an outer step{parts} every {given.diloco_sync_period} steps{late} {rule}"
    sends = f"{shown(sum(sizes))} between slices on each device in {given.diloco_sync_period} steps{most}"
    lines = [f"DiLoCo: {self.slices.layout.apart} slices train apart; {meets}"]
    lines.append(f"DiLoCo: outer steps send {sends}; the steps themselves send nothing there")
    if self.slices.cfg.val_sets:
      lines.append("scores: against the validation loss of the row's own slice, as parts of the mean over slices")
    return lines

  def bytes_sent(self, fragment: int) -> int:
    """Bytes of the pseudo-gradient of a fragment on one device, in float32 or wider."""
    flat, total = dict(nnx.to_flat_state(self._state)), 0
    for path, fragments in self.slices.trained.items():
      x = flat[OUTER, "momentum", *path].get_value()
      size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      if fragments == (fragment,):
        total += size
      elif fragment in fragments:  # some layers of a stack
        total += size * len(range(fragment, x.shape[0], len(fragments))) // x.shape[0]
    return total

  def due(self, done: int) -> list[tuple[str, int]]:
    """The moves after step number `done` (from 1): pairs of SEND, MERGE or SYNC and a fragment, in order. Fragment f is
    due after f H / F + i H steps. The last step of a run is followed by an outer step of every fragment, without
    overlap, so that the global parameters contain all steps."""
    parallel = self._parallel
    period, count, late = parallel.diloco_sync_period, parallel.num_diloco_fragments, self.slices.late
    last, moves = done == self.slices.cfg.run.steps, []
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
    """{name: (function, abstract arguments, shardings of its results)} of what `after` runs."""
    inner = {path[2:]: v for path, v in nnx.to_flat_state(self._state) if path[:2] == (INNER, GLOBAL)}
    trained = {slash_path(path): inner[path].get_value() for path in self.slices.trained}
    val_batches = devices.validation_shapes(self.slices.cfg, self.slices.layout)
    gradients, programs = (trained,) * len(val_batches), {}
    if val_batches:  # partial: `lower` names a function, and a bound method takes no name
      placed = (None, jax.tree.map(lambda x: x.sharding, gradients))
      programs["outer_gradients"] = functools.partial(self.gradients), (self._state, val_batches), placed
      programs["outer_losses"] = functools.partial(self.losses), (self._state, val_batches), None
    for kind in (SEND, MERGE, SYNC) if self.slices.late else (SYNC,):
      for fragment in range(self._parallel.num_diloco_fragments):
        arguments = self._state, () if kind == SEND else gradients
        programs[f"{OUTER_STEP}_{kind}_{fragment}"] = functools.partial(self.move, kind, fragment), arguments, None
    return programs

  def gradients(self, whole: nnx.State, val_batches: tuple):
    """(losses [R, K], K dicts {label: gradient [R, ...]}) at the global parameters, the same in every slice."""

    def of_slice(inner, val_batches):
      held = nnx.merge(self.slices.graphdef, inner)
      split = Model(*nnx.split(held.model, held.optimizer.wrt, ...))
      losses, gradients = passes.validation_gradients(split, of_validation(self.slices.cfg), val_batches)
      return constrain(losses, (None,)), tuple(map(by_label, gradients))

    return self.slices.at_global(of_slice, whole, val_batches)

  def losses(self, whole: nnx.State, val_batches: tuple):
    """Losses [R, K] of the validation rows at the global parameters, the same in every slice."""

    def of_slice(inner, val_batches):
      model = nnx.merge(self.slices.graphdef, inner).model
      return constrain(passes.validation_losses(model, of_validation(self.slices.cfg), val_batches), (None,))

    return self.slices.at_global(of_slice, whole, val_batches)

  def move(self, kind: str, fragment: int, whole: nnx.State, gradients: tuple):
    """(state after a move of `due`, its account). gradients: those of `gradients`; empty: no account. The account has
    the nats by which the move lowers the validation loss at the global parameters to first order, by cause: momentum
    and pseudo_gradient, [R, K], the same in every slice, and without overlap the part of each slice."""
    flat, new, products = {path: v.get_value() for path, v in nnx.to_flat_state(whole)}, {}, []
    for path, fragments in self.slices.trained.items():
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
      if kind == MERGE:  # in a run continued after its end, nothing is in flight
        sent = flat[OUTER, "sent"][fragment] > 0
        after, moved, x_after = (jnp.where(sent, y, x) for y, x in ((after, m), (moved, g), (x_after, x_R)))
      for name, value, lead in (("g", moved, 0), ("x", x_after, 1), ("m", after, 0)):
        new[names[name]] = part.put(flat[names[name]], value, lead)
      along = [part.of(gradient[slash_path(path)], 1).astype(m.dtype) for gradient in gradients]
      products.append([self._products(G, m, pseudo, g[None] - x_R if kind == SYNC else None) for G in along])
    if self.slices.late:
      new[OUTER, "sent"] = flat[OUTER, "sent"].at[fragment].set(int(kind == SEND))
    account = {}
    if gradients and kind != SEND:
      sums = [jax.tree.map(lambda *x: sum(x), *of_set) for of_set in zip(*products, strict=True)]
      account = jax.tree.map(lambda *x: jnp.stack(x, -1), *sums)
      if kind == MERGE:
        account = jax.tree.map(lambda x: jnp.where(flat[OUTER, "sent"][fragment] > 0, x, 0), account)
    return replaced(whole, new), account

  def _outer(self, kind: str, g, m, pseudo, x_R) -> tuple:
    """(m', g', x_R') of one parameter, as in the module docstring."""
    beta, alpha = self._parallel.diloco_outer_momentum, self._parallel.communication_overlapping_alpha
    after = beta * m + pseudo
    moved = g - self._parallel.diloco_outer_lr * (pseudo + beta * after)
    x_after = jnp.broadcast_to(moved, x_R.shape)
    if kind == MERGE and alpha:
      x_after = alpha * x_R + (1 - alpha) * x_after
    return after, moved, x_after

  def _products(self, gradient_R, m, pseudo, apart_R) -> dict:
    """The account [R] of one parameter and set; apart_R: the pseudo-gradient of each slice, if known."""
    rate, beta = self._parallel.diloco_outer_lr, self._parallel.diloco_outer_momentum
    along = lambda x_R: (gradient_R * x_R).reshape(len(gradient_R), -1).sum(1)  # noqa: E731
    out = {"momentum": rate * beta**2 * along(m[None]), "pseudo_gradient": rate * (1 + beta) * along(pseudo[None])}
    return out if apart_R is None else out | {"slice": rate * (1 + beta) / len(apart_R) * along(apart_R)}

  def after(self, program: Callable[[str], Callable], state: nnx.State, step: int,
            validation: ValidationRows) -> tuple[nnx.State, dict | None, dict]:  # fmt: skip
    """(state, closing, record) after step number `step` (from 0). The state is donated. program: the compiled function
    of a name in `programs`, or of closing. closing: outputs of `step.make_closing`, measured before an outer step
    changes the parameters; None without a change. record: the diloco/* part of the step's record."""
    moves, sets = self.due(step + 1), tuple(self.slices.cfg.val_sets)
    changes = any(kind != SEND for kind, _ in moves)
    rows, closing = validation.batches(step) if sets and changes else (), None
    if rows and validation.closes(step + 1):
      closing = self.slices.to_host(program("closing")(state, rows))
    state, account = self.moved(program, state, moves, rows)
    return state, closing, account_metrics(account, sets)

  def moved(self, program: Callable, state: nnx.State, moves: list, val_batches: tuple) -> tuple[nnx.State, dict]:
    """(state, account) after these moves. The account has, in nats at the global parameters, predicted_drop,
    actual_drop, momentum and pseudo_gradient [K], and without overlap slice [R, K], if that is known of every move; it
    is empty without val_batches."""
    accounts, gradients = [], ()
    if val_batches:
      before, gradients = program("outer_gradients")(state, val_batches)
    for kind, fragment in moves:
      state, account = program(f"{OUTER_STEP}_{kind}_{fragment}")(state, () if kind == SEND else gradients)
      accounts += [account] if account else []
    if not accounts:
      return state, {}
    after = program("outer_losses")(state, val_batches)
    moved = [{name: x if name == "slice" else x[0] for name, x in of_slices(account).items()} for account in accounts]
    of_all = [name for name in moved[0] if all(name in own for own in moved)]
    found: dict[str, Any] = {name: sum(own[name] for own in moved) for name in of_all}
    found["predicted_drop"] = found["momentum"] + found["pseudo_gradient"]
    before, after = of_slices((before, after))
    found["actual_drop"] = before[0].astype(np.float64) - after[0]
    return state, found


def account_metrics(account: Mapping[str, np.ndarray], val_sets: tuple[str, ...]) -> dict[str, float]:
  """The diloco/* part of a record, from the account of `Outer.after`."""
  record = {}
  for name, value in account.items():
    for k, of_set in enumerate(val_sets):
      if name == "slice":
        record |= {f"diloco/pseudo_gradient/{of_set}/{r}": float(x) for r, x in enumerate(value[:, k])}
      else:
        record[f"diloco/{name}/{of_set}"] = float(value[k])
  return record


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
