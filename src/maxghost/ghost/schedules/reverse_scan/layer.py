"""The model as seen by the walk: the stacked layers, everything outside of them ("outer"), and the VJPs of one layer.

`layer` everywhere below: the layer's (parameters, rest, index). K validation sets, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import ledger
from maxghost.ghost.directions import GhostDirection, GhostProbe, direction_parts, direction_state
from maxghost.ghost.schedules.base import Problem
from maxghost.ghost.schedules.passes import extrapolated
from maxghost.models import autodiff, pipeline, stack, streaming
from maxghost.objectives import StagedLoss
from maxghost.optimizers import RuleState, by_label
from maxghost.parallel.shardings import slash_path

_SMALL = 8  # a saved array this many times smaller than the cotangent is a statistic, not an activation


class Pair(NamedTuple):
  """A value for each validation set, and one for the training rows."""

  val: tuple
  train: Any


class Kept(NamedTuple):
  """Input of a layer and residuals of its VJP, kept from the forward pass; None: recomputes the residuals."""

  x: Any
  saved: list | None = None


class Layers:
  """A model and its twin, split at the stacked layers.

  prefix: path of the layers. plain, probed: the whole model, and its twin with blank directions. params, rest: of all
  layers, with a leading layer axis. graphdef, twin_graphdef, probes: of one layer. inner, outer: the scored parameters
  of one layer, and those outside. state: the optimizer's, of the layers. scalars: of the twin's rule.
  """

  def __init__(self, problem: Problem, prefix: tuple):
    """Raises ValueError for a model without stacked layers."""
    assert problem.twin is not None
    self.problem, self.twin, self.prefix, depth = problem, problem.twin, prefix, len(prefix)
    twin, state, (graphdef, params, rest) = problem.twin, problem.state, problem.model
    self.plain = nnx.merge(graphdef, params, rest)
    inside = [path[depth:] for path, _ in nnx.to_flat_state(params) if path[:depth] == prefix]
    trained = nnx.filterlib.PathIn(*inside)
    self.graphdef, self.params, self.rest = nnx.split(submodule(self.plain, prefix), trained, ...)
    self.probed = twin.blank(params, twin.zero_probes(), rest)
    split = nnx.split(submodule(self.probed, prefix), trained, GhostProbe, GhostDirection, ...)
    self.twin_graphdef, _, *self.blank, _ = split  # probes, directions
    self.probes = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), self.blank[0])
    outside = lambda path, _: path[:depth] != prefix  # noqa: E731
    self.outer_params, self.outer_probes = (nnx.filter_state(x, outside) for x in (params, twin.zero_probes()))
    self.inner = tuple(p.inside(prefix) for p in twin.scored if p.path[:depth] == prefix)
    self.outer = tuple(p for p in twin.scored if p.path[:depth] != prefix)
    self.scalars = None if state is None else twin.spec.rule.scalars(state.count, state.clip_factor)
    self.state = state
    if state is not None:
      read, start = {name for p in self.inner for name in p.spec.rule.reads(p.parameter)}, f"{slash_path(prefix)}/"
      kept = {name: arrays for name, arrays in state.arrays.items() if problem.account or name in read}
      own = {name: {at: x for at, x in arrays.items() if at.startswith(start)} for name, arrays in kept.items()}
      self.state = dataclasses.replace(state, arrays=own)

  def stacked(self):
    """Arguments of a layer, with a leading layer axis: parameters, rest, index."""
    return self.params, self.rest, jnp.arange(jax.tree.leaves((self.params, self.rest))[0].shape[0])

  def labelled(self, state: nnx.State) -> dict:
    """{label in the model: array} of a State of one layer, or of all."""
    return {f"{slash_path(self.prefix)}/{label}": x for label, x in by_label(state).items()}

  def directions(self, gradients: list[dict], state: RuleState | None):
    """`direction_parts` of one layer, from what `against` returns."""
    return direction_parts(self.inner, gradients, state, self.scalars)

  def against(self, gradients: tuple, index) -> list[dict]:
    """K dicts {label: G, with its curvature} of one layer, from its validation gradients (K States)."""
    labelled, secant = [self.labelled(g) for g in gradients], self.problem.secant
    if secant is None:
      return labelled
    here = [{label: _cut(earlier[label], index) for label in labelled[0]} for earlier in secant.earlier]
    return extrapolated(dataclasses.replace(secant, earlier=here), labelled)

  def join(self, inner: nnx.State, outer: nnx.State) -> nnx.State:
    """The State of the whole model from that of the layers and that outside."""
    flat = {(*self.prefix, *path): v for path, v in nnx.to_flat_state(inner)}
    return nnx.from_flat_state(flat | dict(nnx.to_flat_state(outer)))


class SavedVjp:
  """The VJP of `function(*arguments)`, a pytree of arrays, in two halves that may run in different loops.

  `jax.vjp` separates residuals that are arguments (`args_res`) from computed ones (`opaque_residuals`); only the latter
  must be stored. The backward half gets the arguments again; one that the value does not depend on, such as a
  direction, may then differ. `forward` must be traced before `backward`, each with arguments of the same shapes. A
  jax.checkpoint around `function` decides what is saved.
  """

  _pull: Any = None

  def __init__(self, function: Callable):
    self._function = function

  def forward(self, *arguments):
    """(value, saved): `saved` is a list of arrays."""
    value, self._pull = jax.vjp(self._function, *arguments)
    return value, self._pull.opaque_residuals

  def backward(self, saved, cotangent, *arguments):
    """Cotangents of the arguments, from what `forward` saved for the same ones."""
    return dataclasses.replace(self._pull, args_res=list(arguments), opaque_residuals=saved)(cotangent)


def pull_in_order(function: Callable, arguments: tuple, cotangent):
  """`jax.vjp(function, *arguments)[1](cotangent)`, inside `autodiff.gradients_in_order`.

  The statistics of the forward pass (log-sum-exps, inverse norms) are computed before the backward pass starts.
  Otherwise the TPU compiler would keep their inputs, which may be 100 times as large.
  """
  vjp = SavedVjp(function)
  _, saved = vjp.forward(*arguments)
  limit = max(x.nbytes for x in jax.tree.leaves(cotangent)) // _SMALL
  small, others = autodiff.separate(saved, lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.nbytes <= limit)
  small, cotangent = jax.lax.optimization_barrier((small, cotangent))
  with autodiff.gradients_in_order():
    return vjp.backward(autodiff.join(small, others), cotangent, *arguments)


class Rows:
  """One batch on its way through the plain or the probed model. vjp: of a layer, None with segments or on stages."""

  def __init__(self, layers: Layers, loss: StagedLoss, batch: Any, probed: bool = False):
    self.layers, self.loss, self.batch, self.probed = layers, loss, batch, probed
    self.outer_probes = layers.outer_probes if probed else None
    self.function = functools.partial(apply, layers.twin_graphdef if probed else layers.graphdef)
    settings = layers.problem.settings
    recomputed = settings.segment_lengths or pipeline.current() is not None
    self.vjp = None if recomputed else SavedVjp(stack.remat(self.function, settings.remat_policy))

  def model(self, outer_params: nnx.State, outer_probes: nnx.State | None, parts: Any) -> nnx.Module:
    """The whole model with these parameters outside the layers. parts: of the outer directions of a probed model."""
    layers, model = self.layers, self.layers.problem.model
    params = layers.join(layers.params, outer_params)
    if outer_probes is None:
      return model.merge(params)
    probes, directions = map(layers.join, layers.blank, (outer_probes, direction_state(layers.outer, parts)))
    return layers.twin.merge(params, probes, directions, model.rest)

  def arguments(self, x, layer, ghost: tuple = ()) -> tuple:
    """The arguments of `apply` after the graph. ghost: the twin's (probes, directions)."""
    params, rest, index = layer
    return params, ghost, x, rest, self.loss.layer_inputs(self.batch), self.loss.layer_key(index)

  def pull(self, kept: Kept, cotangent, arguments: tuple):
    """Cotangents of the arguments, from the saved arrays of the forward pass, or by a new pass."""
    if self.vjp is None:
      return pull_in_order(self.function, arguments, cotangent)
    return self.vjp.backward(kept.saved, cotangent, *arguments)


def apply(graphdef: nnx.GraphDef, params, ghost, x, rest, inputs, key):
  """A layer, plain or probed. The arguments after the graph: see `Rows.arguments`."""
  return nnx.merge(graphdef, params, *ghost, rest)(x, *inputs, key)


def validation_back(batches: Pair, cotangents: tuple, kept_K: tuple, layer):
  """(validation gradients, cotangents of the layer's inputs) of each set."""
  rows_K = zip(batches.val, kept_K, cotangents, strict=True)
  pulled = [rows.pull(kept, cotangent, rows.arguments(kept.x, layer)) for rows, kept, cotangent in rows_K]
  return tuple(gradient for gradient, *_ in pulled), tuple(below for _, _, below, *_ in pulled)


def training_back(rows: Rows, cotangent, kept: Kept, gradients: tuple, made, layer):
  """(cotangent of the layer's input, {grads, probes, sums, captured[, validation]}). made: of `Layers.directions`."""
  layers, (params, _, index) = rows.layers, layer
  state, against = layer_state(layers, index), layers.against(gradients, index)
  parts, captured = made or layers.directions(against, state)
  arguments = rows.arguments(kept.x, layer, (layers.probes, direction_state(layers.inner, parts)))
  grads, (probes, _), cotangent, *_ = rows.pull(kept, cotangent, arguments)
  state = _late_state(layers, state, index, probes)
  out = {"grads": grads, "probes": probes, "captured": captured}
  if layers.problem.secant:
    out["validation"] = gradients
    against = [*against, *(layers.labelled(g) for g in gradients)]
  labelled = layers.labelled(params), layers.labelled(grads)
  return cotangent, out | {"sums": ledger_sums(layers, layers.inner, *labelled, against, state, parts)}


def layer_state(layers: Layers, index) -> RuleState | None:
  """The optimizer's state of one layer, on the device."""
  if (state := layers.state) is None:
    return None
  return dataclasses.replace(state, arrays=jax.tree.map(lambda x: _cut(x, index), state.arrays))


def _cut(stacked, index):
  """A layer's part of a stacked array, on the device."""
  # Vectors are fetched whole: a TPU cannot cut a single row out of a packed matrix in host memory.
  return streaming.fetch(streaming.to_device(stacked) if stacked.ndim <= 2 else stacked, index)


def _late_state(layers: Layers, state: RuleState | None, index, probes: nnx.State) -> RuleState | None:
  """`layer_state`, but arrays on the device are cut from their stack only after their parameter's probe is computed."""
  if layers.state is None or state is None:
    return None
  there = dict(nnx.to_flat_state(probes))
  place = {p.label: autodiff.after(index, there[p.part_path("probe")]) for p in layers.inner}

  def cut(label: str, x, fetched):
    return streaming.fetch(x, place[label]) if label in place and not streaming.on_host(x) else fetched

  pairs = {name: (stacked, state.arrays[name]) for name, stacked in layers.state.arrays.items()}
  arrays = {name: {at: cut(at, x, own[at]) for at, x in stacked.items()} for name, (stacked, own) in pairs.items()}
  return dataclasses.replace(state, arrays=arrays)


def ledger_sums(layers: Layers, scored, params: dict, grads: dict, gradients, state: RuleState | None, parts) -> dict:
  """`ledger.sums` of a layer or of the outside, and `used` [K] unless facts have it; empty without a ledger."""
  rule = layers.problem.account
  if rule is None or state is None:
    return {}
  found = ledger.sums(rule, state, layers.twin.parameters, params, grads, gradients, {p.label for p in scored})
  return found if layers.twin.spec.in_backward else found | {"used": ledger.used(scored, grads, parts, {})}


def submodule(model: nnx.Module, path: tuple) -> nnx.Module:
  """The module at `path`; raises ValueError if there is none."""
  for name in path:
    if not hasattr(model, str(name)):
      raise ValueError(f"the model has no stacked layers at {slash_path(path)}; set scan_layers=true")
    model = getattr(model, str(name))
  return model
