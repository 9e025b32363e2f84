"""Schedule 'reverse_scan': one walk back over the stacked layers that gives direction, gradient and scores of each.

The forward passes keep what the remat policy says of every layer, or with segments the input of every segment, from
which the walk computes the layers' inputs again. Walking back, a layer's validation VJP yields its validation gradient
G_l, which becomes that layer's direction; its training VJP then yields cotangent, parameter gradient and scores against
it; then G_l is dropped. The whole direction never exists at once, and streamed weights come in once for both.

K validation sets, n examples, L layers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import directions, ledger
from maxghost.ghost.attach import Twin
from maxghost.ghost.saved_vjp import SavedVjp, pull_in_order
from maxghost.ghost.schedules import passes
from maxghost.ghost.schedules.passes import TrainPass, mean_loss, validation_mean
from maxghost.ghost.variables import GhostDirection, GhostProbe
from maxghost.models import autodiff, segments, stack, streaming
from maxghost.objectives import StagedLoss
from maxghost.optimizers import RuleState, UpdateRule
from maxghost.parallel import constrain_state


def run(
  twin: Twin,
  graphdef,
  params,
  rest,
  loss: StagedLoss,
  batch,
  val_batches: tuple,
  state: RuleState | None = None,
  optimizer: UpdateRule | None = None,
  val_loss: StagedLoss | None = None,
  segment_lengths: tuple[int, ...] = (),
  carries_on_host: bool = False,
  remat_policy: str = "full",
):
  """(TrainPass, val_loss [K], `ledger.sums` with `used` or None, captured).

  loss: a `StagedLoss`; val_loss: that of the validation rows, where it differs (no dropout). state: the optimizer's, as
  `passes.direction_parts` wants it. optimizer: the trainer's rule, whose ledger is kept; None: no ledger. This step's
  clipping factor is known when the walk is over; where that of `state` differs, the columns that hold P_t do too, and
  their sum misses -<G, Delta> by as much. segment_lengths: as `segments.scan`. carries_on_host: the segment inputs of
  the validation rows, and their cotangents between segments, wait in pinned host memory. remat_policy: none | minimal |
  full, what of a layer's forward pass is kept for the walk back; with segments a segment's layers are recomputed
  instead.
  Scores equal those of 'two_pass', tied tables included.
  Raises ValueError for a loss without stages or a model without stacked layers.
  """
  if not isinstance(loss, StagedLoss):
    raise ValueError(
      "ghost_schedule=reverse_scan needs a StagedLoss (embed, layers, head); use two_pass for other losses"
    )
  walk = _Walk(twin, graphdef, params, rest, loss, val_loss or loss, state, optimizer)
  walk.segment_lengths, walk.carries_on_host = tuple(segment_lengths), carries_on_host
  walk.remat_policy = remat_policy
  segments.check(walk.num_layers, walk.segment_lengths)
  vals = [walk.forward_plain(b) for b in val_batches]
  val_heads = [walk.head_plain(x, b) for (_, x), b in zip(vals, val_batches, strict=True)]
  head_gradients = [pull(jnp.ones_like(value)) for value, pull in val_heads]
  train = walk.train_forward(batch)
  head = walk.train_head(batch, train, [g for g, _ in head_gradients])
  layers, cotangents = walk.back(
    _Pair(tuple(boundaries for boundaries, _ in vals), train.boundaries),
    _Pair(tuple(ct for _, ct in head_gradients), head.cotangent),
    _Pair(val_batches, batch),
  )
  outer_gradients = [
    jax.tree.map(jnp.add, g, walk.embed_gradient(b, ct))
    for (g, _), b, ct in zip(head_gradients, val_batches, cotangents.val, strict=True)
  ]
  embedded = walk.train_embed(batch, cotangents.train, head.links, outer_gradients)
  outer_grads = jax.tree.map(jnp.add, head.grads, embedded[0])
  probe_grads = _join(walk.prefix, layers["probes"], jax.tree.map(jnp.add, head.probes, embedded[1]))
  grads = constrain_state(_join(walk.prefix, layers["grads"], outer_grads))
  captured = {f"{walk.label_prefix}{k}": v for k, v in layers["captured"].items()} | embedded[2]
  passed = TrainPass(
    head.loss,
    head.losses,
    head.weights,
    grads,
    twin.scores_by_label(probe_grads),
    twin.scores_by_label(probe_grads, "facts"),
    loss.metrics(train.hidden, batch),
  )
  sums = walk.sums(layers["sums"], outer_grads, outer_gradients) if optimizer else None
  return passed, jnp.stack([value for value, _ in val_heads]), sums, captured


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pair:
  """The same thing of every validation set and of the training rows."""

  val: tuple
  train: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
  """What the walk back finds of a layer's forward pass: its input, and residuals of its VJP; None: recompute them."""

  x: Any
  saved: list | None = None


@dataclasses.dataclass(frozen=True)
class _Train:
  boundaries: jax.Array
  hidden: jax.Array
  links: dict


@dataclasses.dataclass(frozen=True)
class _Head:
  loss: jax.Array
  losses: jax.Array
  weights: jax.Array
  grads: nnx.State
  probes: nnx.State
  cotangent: jax.Array
  links: dict


class _Walk:
  """The stages of one step over split pytrees. `outer`: everything outside the stacked layers."""

  segment_lengths: tuple[int, ...] = ()
  carries_on_host = False
  remat_policy = "full"

  def __init__(self, twin, graphdef, params, rest, loss, val_loss, state, optimizer):
    self.twin, self.graphdef, self.params, self.rest = twin, graphdef, params, rest
    self.loss, self.val_loss = loss, val_loss
    self.state, self.optimizer = state, optimizer
    self.scalars = None if state is None else twin.spec.rule.scalars(state.count, state.clip_factor)
    self.prefix = tuple(loss.layers_path)
    self.label_prefix = "/".join(map(str, self.prefix)) + "/"
    model = nnx.merge(graphdef, params, rest)
    layer = submodule(model, self.prefix)
    self.layer_graphdef, self.layer_params, self.layer_rest = nnx.split(layer, nnx.Param, ...)
    probed = submodule(twin.merge(params, twin.zero_probes(), self._blank_directions(), rest), self.prefix)
    self.layer_twin, _, probes, _, _ = nnx.split(probed, nnx.Param, GhostProbe, GhostDirection, ...)
    self.layer_probes = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), probes)
    self.outer_params = _outside(self.prefix, params)
    self.outer_probes = _outside(self.prefix, twin.zero_probes())
    self.num_layers = jax.tree.leaves(self.layer_params)[0].shape[0]
    self.inner = [p for p in twin.scored if p.path[: len(self.prefix)] == self.prefix]
    self.outer = [p for p in twin.scored if p.path[: len(self.prefix)] != self.prefix]
    self.val_vjps: list[SavedVjp] = []

  @functools.cached_property
  def train_vjp(self) -> SavedVjp:
    return SavedVjp(stack.remat(self._probed_layer, self.remat_policy))

  def _blank_directions(self):
    parts = {}
    for p in self.twin.scored:
      shapes = p.spec.part_shapes(p.stack_shape, self.twin.num_sets, p.shape)
      parts[p.label] = tuple(jnp.zeros(shapes[name]) for name in p.spec.parts)
    return self.twin.direction_state(parts)

  # Stages of the plain model, for validation.

  def plain(self, outer_params):
    return nnx.merge(self.graphdef, _join(self.prefix, self.layer_params, outer_params), self.rest)

  def layer(self, loss, layer_params, layer_rest, x, index, batch):
    module = nnx.merge(self.layer_graphdef, layer_params, layer_rest)
    return module(x, *loss.layer_inputs(batch), loss.layer_key(index))

  def stacked(self):
    """What a layer needs to run, with a leading layer axis."""
    return self.layer_params, self.layer_rest, jnp.arange(self.num_layers)

  def inputs(self, loss, x, batch, layers, segment_lengths, keep=lambda x: x):
    """(inputs of these layers, or of their segments, with a leading axis; output of the last layer).

    keep: where a segment's input goes.
    """

    def layer(x, scanned):
      return self.layer(loss, *scanned[:2], x, scanned[2], batch)

    if not segment_lengths:
      x, kept = jax.lax.scan(lambda x, scanned: (layer(x, scanned), _Kept(x)), x, layers)
    else:

      def through(x, _, segment):
        out, _ = jax.lax.scan(lambda x, scanned: (layer(x, scanned), None), x, segment)
        return out, keep(x)

      x, kept = streaming.loop(through, x, None, segments.split(layers, segment_lengths[0]))
    return kept, x

  def forward_plain(self, batch):
    """What `inputs` returns, of validation rows; without segments the layers' residuals are kept too."""
    x = self.val_loss.embed(self.plain(self.outer_params), batch)
    if not self.segment_lengths:
      vjp = SavedVjp(stack.remat(self._plain_layer, self.remat_policy))
      self.val_vjps.append(vjp)
      return self._saving(vjp, lambda x, *layer: self._plain_arguments(x, batch, *layer), x)
    return self.inputs(self.val_loss, x, batch, self.stacked(), self.segment_lengths, self._aside)

  def _saving(self, vjp, arguments, x):
    """(`_Kept` of all layers, output of the last). arguments(x, layer_params, layer_rest, index): those of `vjp`."""

    def body(x, layer):
      value, saved = vjp.forward(*arguments(x, *layer))
      return value, _Kept(x, saved)

    x, kept = jax.lax.scan(body, x, self.stacked())
    return kept, x

  def _plain_layer(self, layer_params, x, layer_rest, inputs, key):
    return nnx.merge(self.layer_graphdef, layer_params, layer_rest)(x, *inputs, key)

  def _plain_arguments(self, x, batch, layer_params, layer_rest, index):
    return layer_params, x, layer_rest, self.val_loss.layer_inputs(batch), self.val_loss.layer_key(index)

  def _probed_layer(self, layer_params, probes, x, state, layer_rest, inputs, key):
    return nnx.merge(self.layer_twin, layer_params, probes, state, layer_rest)(x, *inputs, key)

  def _probed_arguments(self, x, state, batch, layer_params, layer_rest, index):
    inputs, key = self.loss.layer_inputs(batch), self.loss.layer_key(index)
    return layer_params, self.layer_probes, x, state, layer_rest, inputs, key

  def head_plain(self, x, batch):
    return jax.vjp(lambda p, x: validation_mean(*self.val_loss.head(self.plain(p), x, batch)), self.outer_params, x)

  def embed_gradient(self, batch, cotangent):
    _, pull = jax.vjp(lambda p: self.val_loss.embed(self.plain(p), batch), self.outer_params)
    return pull(cotangent)[0]

  # Stages of the twin, for training.

  def probed(self, outer_params, outer_probes, gradients):
    """(twin model, captured) whose outer directions are made from K States of outer gradients."""
    labelled = [passes.by_label(g) for g in gradients]
    parts, captured = _parts(self.twin, self.outer, labelled, self.state, self.scalars)
    blank = self._blank_directions()
    flat = dict(nnx.to_flat_state(blank))
    for p in self.outer:
      for name, array in zip(p.spec.parts, parts[p.label], strict=True):
        flat[p.part_path(name)] = GhostDirection(array)
    params = _join(self.prefix, self.layer_params, outer_params)
    probes = dict(nnx.to_flat_state(self.twin.zero_probes())) | dict(nnx.to_flat_state(outer_probes))
    return self.twin.merge(params, nnx.from_flat_state(probes), nnx.from_flat_state(flat), self.rest), captured

  def train_forward(self, batch) -> _Train:
    zeros = [jax.tree.map(jnp.zeros_like, self.outer_params)] * self.twin.num_sets
    model, _ = self.probed(self.outer_params, self.outer_probes, zeros)
    x = self.loss.embed(model, batch)
    links = _links(model)
    if self.segment_lengths:
      boundaries, hidden = self.inputs(self.loss, x, batch, self.stacked(), self.segment_lengths)
    else:
      # The forward pass does not depend on the directions, which are not known yet.
      one = jax.tree.map(lambda x: x[0], self.layer_params)
      shapes, _ = jax.eval_shape(self._layer_directions, (one,) * self.twin.num_sets, self._layer_arrays(0))
      blank = self._layer_state(jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes))
      arguments = lambda x, *layer: self._probed_arguments(x, blank, batch, *layer)  # noqa: E731
      boundaries, hidden = self._saving(self.train_vjp, arguments, x)
    return _Train(boundaries, hidden, links)

  def train_head(self, batch, train: _Train, gradients) -> _Head:
    def head(outer_params, outer_probes, x, links):
      model, _ = self.probed(outer_params, outer_probes, gradients)
      _set_links(model, links)
      losses, weights = self.loss.head(model, x, batch)
      return mean_loss(losses, weights), (losses, weights)

    value, pull, (losses, weights) = jax.vjp(
      head, self.outer_params, self.outer_probes, train.hidden, train.links, has_aux=True
    )
    grads, probes, cotangent, links = pull(jnp.ones_like(value))
    return _Head(value, losses, weights, grads, probes, cotangent, links)

  def train_embed(self, batch, cotangent, link_cotangents, gradients):
    """(gradients, probe gradients) of the lookup, and what the outer factors capture."""

    def embed(outer_params, outer_probes):
      model, captured = self.probed(outer_params, outer_probes, gradients)
      x = self.loss.embed(model, batch)
      return (x, _links(model)), captured

    _, pull, captured = jax.vjp(embed, self.outer_params, self.outer_probes, has_aux=True)
    return (*pull((cotangent, link_cotangents)), captured)

  # The walk back.

  def back(self, boundaries: _Pair, cotangents: _Pair, batches: _Pair):
    """({grads, probes, sums, captured} with a leading layer axis, cotangents of the first layer's inputs)."""
    return self._back(boundaries, cotangents, batches, self.stacked(), self.segment_lengths)

  def _back(self, boundaries, cotangents, batches, layers, segment_lengths):
    if not segment_lengths:

      def layer_back(cotangents, scanned):
        x_val, place, layer = scanned
        gradients, val_cotangents = self._layer_validation(cotangents.val, x_val, batches, *layer)
        # What the training rows saved is taken out only now, or what is computed from it lies beside the above.
        kept = streaming.fetch(boundaries.train, autodiff.after(place, val_cotangents))
        cotangent, out = self._layer_training(cotangents.train, kept, batches, gradients, None, *layer)
        return _Pair(val_cotangents, cotangent), out

      cotangents, out = jax.lax.scan(
        layer_back, cotangents, (boundaries.val, jnp.arange(layers[2].shape[0]), layers), reverse=True
      )
      return out, cotangents
    inner = segment_lengths[1:]
    in_turn = not inner and self._smaller_gradients(boundaries.val, layers[0])

    def segment(cotangents, scanned, here):
      x_val, number = scanned
      if in_turn:
        out, cotangents = self._segment_back(x_val, boundaries.train, number, cotangents, batches, here)
      else:
        x_train = streaming.fetch(boundaries.train, number)
        x = _Pair(self._inputs_K(x_val, batches, here, inner), self._train_inputs(x_train, batches, here, inner))
        out, cotangents = self._back(x, cotangents, batches, here, inner)
      return cotangents, out | {"grads": streaming.like(out["grads"], layers[0])}

    stacked = segments.split(layers, segment_lengths[0])
    scanned = (boundaries.val, jnp.arange(layers[2].shape[0] // segment_lengths[0]))
    if in_turn:
      cotangents = _Pair(self._aside(cotangents.val), cotangents.train)
    cotangents, out = streaming.loop(segment, cotangents, scanned, stacked, reverse=True)
    return segments.join(out), streaming.to_device(cotangents)

  def _aside(self, x):
    """x of the validation rows where it waits while the training rows of a segment have their turn."""
    return streaming.to_host(x) if self.carries_on_host else x

  def _inputs_K(self, x_K, batches, layers, segment_lengths) -> tuple:
    """`inputs` of each validation set, without the last output."""
    pairs = zip(x_K, batches.val, strict=True)
    return tuple(self.inputs(self.val_loss, x, b, layers, segment_lengths)[0] for x, b in pairs)

  def _train_inputs(self, x, batches, layers, segment_lengths):
    return self.inputs(self.loss, x, batches.train, layers, segment_lengths)[0]

  def _smaller_gradients(self, boundaries_K, layer_params) -> bool:
    """Whether the validation gradients of a layer take less room than its validation inputs. Both arguments have a
    leading axis."""
    one = lambda tree: sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(tree))  # noqa: E731
    return self.twin.num_sets * one(layer_params) < one(boundaries_K)

  def _segment_back(self, x_val, train_boundaries, number, cotangents: _Pair, batches: _Pair, layers):
    """The layers of one segment, first all validation VJPs, then all training ones: the inputs of its layers then exist
    for one batch at a time, and for all its layers the validation gradients, or just their factors where only these
    are used."""
    factored = not self.twin.spec.in_backward and self.twin.spec.rank

    def validation(cts, scanned):
      x_K, layer = scanned
      gradients, cts = self._layer_validation(cts, x_K, batches, *layer)
      directions = self._layer_directions(gradients, {}) if factored else None
      return cts, (() if factored and self.optimizer is None else gradients, directions)

    inputs_K = self._inputs_K(x_val, batches, layers, ())
    val_cotangents, kept = jax.lax.scan(
      validation, streaming.to_device(cotangents.val), (inputs_K, layers), reverse=True
    )
    # The barrier: the cotangent has left, and the training inputs are not computed while the validation inputs exist.
    state = (number, kept, self._aside(val_cotangents))
    number, (gradients, directions), val_cotangents = jax.lax.optimization_barrier(state)
    x_train = streaming.fetch(train_boundaries, number)
    held = gradients[0] if gradients else jax.tree.map(jnp.zeros_like, layers[0])

    def training(state, scanned):
      ct, held = state
      place, x, others, parts, layer = scanned
      first = jax.tree.map(lambda h: jax.lax.dynamic_index_in_dim(h, place, keepdims=False), held)
      ct, out = self._layer_training(ct, x, batches, (first, *others) if gradients else (), parts, *layer)
      # A layer's training gradient takes the place of its validation gradient, which has been used.
      grads = out.pop("grads")
      held = jax.tree.map(lambda h, g: jax.lax.dynamic_update_index_in_dim(h, g, place, 0), held, grads)
      return (ct, held), out

    inputs = self._train_inputs(x_train, batches, layers, ())
    scanned = (jnp.arange(layers[2].shape[0]), inputs, gradients[1:], directions, layers)
    (cotangent, held), out = jax.lax.scan(training, (cotangents.train, held), scanned, reverse=True)
    return out | {"grads": held}, _Pair(val_cotangents, cotangent)

  def _layer_validation(self, cotangents, kept_K, batches, layer_params, layer_rest, index):
    """(validation gradients, cotangents of the layer's inputs) of each set."""
    pairs = []
    for k, (kept, ct, batch) in enumerate(zip(kept_K, cotangents, batches.val, strict=True)):
      arguments = self._plain_arguments(kept.x, batch, layer_params, layer_rest, index)
      if kept.saved is None:
        pairs.append(pull_in_order(self._plain_layer, arguments, ct)[:2])
      else:
        pairs.append(self.val_vjps[k].backward(kept.saved, ct, *arguments)[:2])
    return tuple(g for g, _ in pairs), tuple(ct for _, ct in pairs)

  def _layer_training(self, cotangent, kept, batches, gradients, directions, layer_params, layer_rest, index):
    """(cotangent of the layer's input, its part of what `back` returns). directions: None = of the gradients."""
    arrays = self._layer_arrays(index)
    parts, captured = directions or self._layer_directions(gradients, arrays)
    state = self._layer_state(parts)
    arguments = self._probed_arguments(kept.x, state, batches.train, layer_params, layer_rest, index)
    if kept.saved is None:
      grads, probes, cotangent, *_ = pull_in_order(self._probed_layer, arguments, cotangent)
    else:
      grads, probes, cotangent, *_ = self.train_vjp.backward(kept.saved, cotangent, *arguments)
    sums = self._layer_sums(layer_params, grads, gradients, self._late_arrays(arrays, index, probes), parts)
    return cotangent, {"grads": grads, "probes": probes, "sums": sums, "captured": captured}

  @functools.cached_property
  def arrays(self) -> dict:
    """{name: {label inside the layer: stacked array}} of the state: what is read."""
    if self.state is None:
      return {}
    read = {name for p in self.inner for name in self.twin.spec.rule.reads(p.spec.parameter)}
    return {
      name: {k.removeprefix(self.label_prefix): v for k, v in arrays.items() if k.startswith(self.label_prefix)}
      for name, arrays in self.state.arrays.items()
      if self.optimizer or name in read
    }

  def _layer_arrays(self, index) -> dict:
    """`arrays` of one layer, on the device."""
    # Vectors come whole: a TPU cannot cut a single row out of a packed matrix in host memory.
    return {
      name: {k: streaming.fetch(streaming.to_device(v) if v.ndim <= 2 else v, index) for k, v in inside.items()}
      for name, inside in self.arrays.items()
    }

  def _late_arrays(self, arrays: dict, index, probes: nnx.State) -> dict:
    """`arrays` of one layer, each taken from the device's stack when its parameter's probe is there; those that have
    come from the host stay."""
    there = dict(nnx.to_flat_state(probes))
    place = {}
    for p in self.inner:
      probe = there.get(p.part_path("probe")[len(self.prefix) :])
      if probe is not None:
        place[p.label.removeprefix(self.label_prefix)] = autodiff.after(index, probe)
    return {
      name: {
        k: streaming.fetch(v, place[k]) if k in place and not streaming.on_host(v) else arrays[name][k]
        for k, v in inside.items()
      }
      for name, inside in self.arrays.items()
    }

  def _layer_directions(self, gradients, arrays):
    """({label inside the layer: parts}, what factors capture) of one layer."""
    labelled = [passes.by_label(g) for g in gradients]
    parts, captured = {}, {}
    for p in self.inner:
      label = p.label.removeprefix(self.label_prefix)
      kept = {name: inside[label] for name, inside in arrays.items() if label in inside}
      parts[label], energy = _unstacked_parts(p, jnp.stack([g[label] for g in labelled]), kept, self.scalars)
      if energy is not None:
        captured[label] = energy
    return parts, captured

  def _layer_state(self, parts: dict) -> nnx.State:
    """The GhostDirection State of one layer's twin."""
    flat = {}
    for p in self.inner:
      for name, array in zip(p.spec.parts, parts[p.label.removeprefix(self.label_prefix)], strict=True):
        flat[p.part_path(name)[len(self.prefix) :]] = GhostDirection(array)
    return nnx.from_flat_state(flat)

  def _layer_sums(self, layer_params, grads, gradients, arrays, parts):
    if self.optimizer is None:
      return {}
    scored = {p.label.removeprefix(self.label_prefix) for p in self.inner}
    state = dataclasses.replace(self.state, arrays=arrays)
    parameters = {label.removeprefix(self.label_prefix): p for label, p in self.twin.parameters.items()}
    params, grads = passes.by_label(layer_params), passes.by_label(grads)
    used_K = self._used(self.inner, grads, parts, self.label_prefix)
    labelled = [passes.by_label(g) for g in gradients]
    found = ledger.sums(self.optimizer, state, parameters, params, grads, labelled, scored)
    return found | {"used": used_K}

  def sums(self, layer_sums: dict, outer_grads, outer_gradients) -> dict:
    """`ledger.sums` of the whole model, and `used`, <g, u> over the scored parameters. layer_sums: [layers, K]."""
    grads, params = passes.by_label(outer_grads), passes.by_label(self.outer_params)
    scored = {p.label for p in self.outer}
    labelled = [passes.by_label(g) for g in outer_gradients]
    parts, _ = _parts(self.twin, self.outer, labelled, self.state, self.scalars)
    used_K = self._used(self.outer, grads, parts, "")
    outer = ledger.sums(self.optimizer, self.state, self.twin.parameters, params, grads, labelled, scored)
    outer["used"] = used_K
    return {name: layer_sums[name].sum(0) + outer[name] for name in outer}

  def _used(self, scored, grads, parts, prefix: str):
    """<g, u> [K] over scored parameters of one layer (or outside the stack); 0 where facts hold it."""
    used_K = jnp.zeros(self.twin.num_sets, float)
    for p in () if self.twin.spec.in_backward else scored:
      label = p.label.removeprefix(prefix)
      direction, _ = directions.form(p.spec, parts[label], grads[label])
      used_K += directions.along(p.spec, direction, grads[label])
    return used_K


def _parts(twin, scored, labelled, state, scalars):
  """(parts, captured) of unstacked parameters from K dicts of gradients."""
  parts, captured = {}, {}
  for p in scored:
    kept = {} if state is None else state.of(p.label)
    stacked = jnp.stack([g[p.label] for g in labelled])
    parts[p.label], energy = _unstacked_parts(p, stacked, kept, scalars)
    if energy is not None:
      captured[p.label] = energy
  return parts, captured


def _unstacked_parts(param, gradient_K, arrays, scalars):
  """(parts of one layer's parameter, captured [K] or None). gradient_K: [K, *parameter]."""
  gradient_K = param.placed(gradient_K, stacked=False)
  if param.spec.direction.in_backward:
    names = param.spec.direction.rule.reads(param.spec.parameter)
    return (gradient_K, *(arrays[name] for name in names), scalars), None
  if not param.spec.low_rank:
    return (gradient_K,), None
  left, right, captured = param.spec.factor(gradient_K, 1)
  return (left, right), captured


def submodule(model: nnx.Module, path: tuple) -> nnx.Module:
  """The module at `path`; ValueError naming the path if there is none."""
  node = model
  for name in path:
    if not hasattr(node, str(name)):
      raise ValueError(f"the model has no stacked layers at {'/'.join(map(str, path))}; set scan_layers=true")
    node = getattr(node, str(name))
  return node


def _outside(prefix: tuple, state: nnx.State) -> nnx.State:
  return nnx.from_flat_state({path: v for path, v in nnx.to_flat_state(state) if path[: len(prefix)] != prefix})


def _join(prefix: tuple, layers: nnx.State, outer: nnx.State) -> nnx.State:
  flat = {(*prefix, *path): v for path, v in nnx.to_flat_state(layers)}
  return nnx.from_flat_state(flat | dict(nnx.to_flat_state(outer)))


def _links(model) -> dict:
  """{module path: arrays} that linked tables hand to their second use."""
  return {
    path: tuple(v[...] for v in node.ghost_link)
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.Module) and hasattr(node, "ghost_link")
  }


def _set_links(model, links: dict) -> None:
  for path, arrays in links.items():
    submodule(model, path).ghost_link = nnx.List([nnx.Intermediate(x) for x in arrays])
