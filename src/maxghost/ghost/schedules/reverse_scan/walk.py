"""Schedule 'reverse_scan': one backward walk over the stacked layers that gives direction, gradient and scores of each.

The validation VJP of a layer gives its validation gradient G_l, which becomes its direction. Its training VJP then
gives cotangent, parameter gradient and scores against that direction, and G_l is dropped.

Without segments the forward passes save arrays of every layer by the remat policy. With segments they save the input of
every segment, from which the walk recomputes the layers' inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.directions import direction_parts, direction_state
from maxghost.ghost.schedules.base import Problem, Scored, TrainPass, Validation
from maxghost.ghost.schedules.passes import extrapolated, mean_loss, scored_by_rules, validation_mean
from maxghost.ghost.schedules.reverse_scan import layer as layer_lib
from maxghost.ghost.schedules.reverse_scan import pipelined
from maxghost.ghost.schedules.reverse_scan.layer import Kept, Layers, Pair, Rows, submodule
from maxghost.models import autodiff, pipeline, segments, streaming
from maxghost.objectives import StagedLoss
from maxghost.optimizers import by_label
from maxghost.parallel.shardings import constrain_state


def run(problem: Problem) -> Scored:
  """The walk; scores equal those of 'two_pass', also for tied tables. Raises ValueError without stages or a stack."""
  loss, val_losses, batch, state = problem.loss, problem.val_losses, problem.batch, problem.state
  if not isinstance(loss, StagedLoss) or not all(isinstance(one, StagedLoss) for one in val_losses):
    needs = "ghost_schedule=reverse_scan needs a StagedLoss (embed, layers, head)"
    raise ValueError(f"{needs}; use two_pass for other losses")
  for kind in map(type, (loss, *val_losses)):
    whole, staged = (next(c for c in kind.__mro__ if name in vars(c)) for name in ("measured", "measured_head"))
    if whole is not staged and issubclass(whole, staged):
      said = f"{whole.__name__} defines measured, which ghost_schedule=reverse_scan does not read"
      raise ValueError(f"{said}; define measured_head in its place, or use two_pass")
  layers = Layers(problem, tuple(loss.layers_path))
  twin, lengths = layers.twin, problem.settings.segment_lengths
  segments.check(layers.stacked()[2].shape[0], lengths)
  on_stages = pipeline.current() is not None
  vals = tuple(Rows(layers, *rows) for rows in zip(val_losses, problem.val_batches, strict=True))
  train = Rows(layers, loss, batch, probed=True)
  passed = pipelined.Passed([*vals, train], [_embedded(rows)[0] for rows in (*vals, train)]) if on_stages else None
  kept_K, hidden_K, _, part_K = zip(*(_forward(rows, passed, i) for i, rows in enumerate(vals)), strict=True)
  val_heads = [_head(rows, validation_mean, hidden) for rows, hidden in zip(vals, hidden_K, strict=True)]
  head_gradients = [pull(jnp.ones_like(value)) for value, pull, _ in val_heads]
  boundaries, hidden, links, part = _forward(train, passed, -1)
  against = extrapolated(problem.secant, [by_label(g) for g, *_ in head_gradients])
  parts, _ = direction_parts(layers.outer, against, state, layers.scalars)
  value, pull, (losses, weights, metrics) = _head(train, mean_loss, hidden, links, parts)
  head_grads, head_probes, cotangent, links = pull(jnp.ones_like(value))
  pairs = zip((*part_K, part), (*(ct for _, _, ct, _ in head_gradients), cotangent), strict=True)
  beside, below = (Pair(found[:-1], found[-1]) for found in zip(*(part(ct) for part, ct in pairs), strict=True))
  if passed is not None:
    found, cotangents = passed.back(below)
  else:
    found, cotangents = back(Pair(vals, train), Pair(kept_K, boundaries), below, layers.stacked(), lengths)
  pieces = zip(head_gradients, vals, cotangents.val, beside.val, strict=True)
  outer_gradients = [jax.tree.map(jnp.add, g, _embed(rows, *cts)[0]) for (g, *_), rows, *cts in pieces]
  against = extrapolated(problem.secant, [by_label(g) for g in outer_gradients])
  parts, shares = direction_parts(layers.outer, against, state, layers.scalars)
  embed_grads, embed_probes = _embed(train, cotangents.train, beside.train, links, parts)
  outer_grads = jax.tree.map(jnp.add, head_grads, embed_grads)
  probe_grads = layers.join(found["probes"], jax.tree.map(jnp.add, head_probes, embed_probes))
  grads = constrain_state(layers.join(found["grads"], outer_grads))
  passed = TrainPass(value, losses, weights, grads, *twin.scores(probe_grads), metrics)
  val_losses, shares = jnp.stack([value for value, *_ in val_heads]), found["captured"] | shares
  validation = None
  if problem.secant:
    against += [by_label(g) for g in outer_gradients]
    whole = [layers.join(*pair) for pair in zip(found["validation"], outer_gradients, strict=True)]
    validation = Validation(val_losses, whole)
  labelled = by_label(layers.outer_params), by_label(outer_grads)
  outer = layer_lib.ledger_sums(layers, layers.outer, *labelled, against, state, parts)
  sums = {name: found["sums"][name].sum(0) + outer[name] for name in outer}
  rest = {"sums": sums or None, "used": sums.get("used"), "validation": validation}
  return scored_by_rules(twin, passed, val_losses, shares, **rest)


def _embedded(rows: Rows):
  """(input of the first layer, links of tied tables)"""
  # The directions are not known yet; the forward pass does not depend on them.
  model = rows.layers.probed if rows.probed else rows.layers.plain
  return rows.loss.embed(model, rows.batch), _links(model)


def _forward(rows: Rows, passed: pipelined.Passed | None, place: int):
  """(`Kept` of all layers, or the inputs of all segments; input of the head; links of tied tables; part).

  passed, place: all batches on stages, and this one's index among them. part: splits the cotangent of the head's input
  into those of the outputs of `embed`, or None, and of the last layer.
  """
  layers, vjp, ghost = rows.layers, rows.vjp, ()
  embedded, links = _embedded(rows)
  if passed is not None:
    kept, x = None, passed.outputs[place]
  elif vjp is None:
    keep = (lambda x: x) if rows.probed else functools.partial(aside, layers)
    kept, x = inputs(rows, embedded, layers.stacked(), layers.problem.settings.segment_lengths, keep)
  else:
    if rows.probed:
      one = [layers.labelled(jax.tree.map(lambda x: x[0], layers.params))] * layers.twin.num_sets
      shapes, _ = jax.eval_shape(layers.directions, one, layer_lib.layer_state(layers, 0))
      blank = direction_state(layers.inner, jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes))
      ghost = layers.probes, blank

    def body(x, layer):
      value, saved = vjp.forward(*rows.arguments(x, layer, ghost))
      return value, Kept(x, saved)

    x, kept = jax.lax.scan(body, embedded, layers.stacked())
  if not rows.loss.passes_embedded:
    return kept, x, links, lambda cotangent: (None, cotangent)
  x, part = jax.vjp(rows.loss.joined, embedded, x)
  return kept, x, links, part


def _head(rows: Rows, mean: Callable, x, links: dict | None = None, parts: dict | None = None):
  """`jax.vjp` of the loss in (outer parameters, outer probes, x, links), and (losses, weights, metrics)."""

  def head(outer_params, outer_probes, x, links):
    model = rows.model(outer_params, outer_probes, parts)
    for path, arrays in links.items():
      node: Any = submodule(model, path)
      node.ghost_link = nnx.List([nnx.Intermediate(array) for array in arrays])
    losses, weights, metrics = rows.loss.measured_head(model, x, rows.batch)
    return mean(losses, weights), (losses, weights, metrics)

  return jax.vjp(head, rows.layers.outer_params, rows.outer_probes, x, links or {}, has_aux=True)


def _embed(rows: Rows, cotangent, beside, link_cotangents: dict | None = None, parts: dict | None = None):
  """(gradients, probe gradients) of the lookup. beside: the cotangent of its output that `_forward`'s part gives."""

  def embed(outer_params, outer_probes):
    model = rows.model(outer_params, outer_probes, parts)
    return rows.loss.embed(model, rows.batch), _links(model)

  _, pull = jax.vjp(embed, rows.layers.outer_params, rows.outer_probes)
  whole = cotangent if beside is None else jax.tree.map(jnp.add, cotangent, beside)
  return pull((whole, link_cotangents or {}))


def _links(model) -> dict:
  """{module path: arrays} that linked tables pass to their second use."""
  linked = [(path, node) for path, node in nnx.iter_graph(model) if hasattr(node, "ghost_link")]
  return {path: tuple(v[...] for v in node.ghost_link) for path, node in linked}


def inputs(rows: Rows, x, scanned, segment_lengths: tuple, keep=lambda x: x):
  """(inputs of these layers, or of their segments; output of the last). keep: moves a segment's input to memory."""

  def body(x, layer):
    value = layer_lib.apply(rows.layers.graphdef, *rows.arguments(x, layer))
    return value, None if segment_lengths else Kept(x)

  if segment_lengths:
    through = lambda x, _, segment: (jax.lax.scan(body, x, segment)[0], keep(x))  # noqa: E731
    x, kept = streaming.loop(through, x, None, segments.split(scanned, segment_lengths[0]))
  else:
    x, kept = jax.lax.scan(body, x, scanned)
  return kept, x


def back(batches: Pair, boundaries: Pair, cotangents: Pair, scanned, segment_lengths: tuple) -> tuple[Any, Pair]:
  """({grads, probes, ...} of all layers, cotangents of their inputs), from what `_forward` or `inputs` kept."""
  if not segment_lengths:
    return _layers_back(batches, boundaries, cotangents, scanned)
  layers, inner = batches.train.layers, segment_lengths[1:]
  in_turn = not inner and smaller_gradients(layers, boundaries.val, scanned[0])

  def segment(cotangents, outside, here):
    x_val, number = outside
    if in_turn:
      out, cotangents = _segment_back(batches, x_val, boundaries.train, number, cotangents, here)
    else:
      x_train = streaming.fetch(boundaries.train, number)
      x = Pair(_inputs_K(batches, x_val, here, inner), inputs(batches.train, x_train, here, inner)[0])
      out, cotangents = back(batches, x, cotangents, here, inner)
    of_weights = {name: out[name] for name in ("grads", "validation") if name in out}
    memory = {"grads": scanned[0], "validation": (scanned[0],) * layers.twin.num_sets}
    return cotangents, out | {name: streaming.like(x, memory[name]) for name, x in of_weights.items()}

  stacked = segments.split(scanned, segment_lengths[0])
  outside = (boundaries.val, jnp.arange(scanned[2].shape[0] // segment_lengths[0]))
  if in_turn:
    cotangents = Pair(aside(layers, cotangents.val), cotangents.train)
  cotangents, out = streaming.loop(segment, cotangents, outside, stacked, reverse=True)
  return segments.join(out), streaming.to_device(cotangents)


def aside(layers: Layers, x):
  """Moves x of the validation rows to the memory where it stays during the training rows of a segment."""
  return streaming.to_host(x) if layers.problem.settings.carries_on_host else x


def smaller_gradients(layers: Layers, boundaries_K, layer_params) -> bool:
  """Whether a layer's validation gradients are smaller than its validation inputs, for arrays with a leading axis."""
  one = lambda tree: sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(tree))  # noqa: E731
  return layers.twin.num_sets * one(layer_params) < one(boundaries_K)


def _layers_back(batches: Pair, boundaries: Pair, cotangents: Pair, scanned):
  """`back` layer by layer: first the validation VJPs of a layer, then its training VJP."""

  def layer_back(cotangents, scanned):
    x_val, place, layer = scanned
    gradients, val_cotangents = layer_lib.validation_back(batches, cotangents.val, x_val, layer)
    # Fetched only now; otherwise arrays computed from it would exist together with those above.
    kept = streaming.fetch(boundaries.train, autodiff.after(place, val_cotangents))
    cotangent, out = layer_lib.training_back(batches.train, cotangents.train, kept, gradients, None, layer)
    return Pair(val_cotangents, cotangent), out

  places = jnp.arange(scanned[2].shape[0])
  cotangents, out = jax.lax.scan(layer_back, cotangents, (boundaries.val, places, scanned), reverse=True)
  return out, cotangents


def _segment_back(batches: Pair, x_val, train_boundaries, number, cotangents: Pair, scanned):
  """`back` for a segment: all validation VJPs, then all training VJPs, so that inputs exist for one batch at a time."""
  layers = batches.train.layers
  factored = not layers.twin.spec.in_backward and layers.twin.spec.rank

  def validation(cts, scanned):
    x_K, layer = scanned
    gradients, cts = layer_lib.validation_back(batches, cts, x_K, layer)
    made = layers.directions(layers.against(gradients, layer[2]), None) if factored else None
    return cts, (() if factored and layers.problem.account is None else gradients, made)

  val_inputs, cts = _inputs_K(batches, x_val, scanned, ()), streaming.to_device(cotangents.val)
  val_cotangents, kept = jax.lax.scan(validation, cts, (val_inputs, scanned), reverse=True)
  # After this barrier the cotangent has moved, and the validation inputs are free before training inputs are computed.
  state = (number, kept, aside(layers, val_cotangents))
  number, (gradients, directions), val_cotangents = jax.lax.optimization_barrier(state)
  x_train = streaming.fetch(train_boundaries, number)
  held = gradients[0] if gradients else jax.tree.map(jnp.zeros_like, scanned[0])

  def training(state, scanned):
    ct, held = state
    place, x, others, made, layer = scanned
    of_layer = (streaming.fetch(held, place), *others) if gradients else ()
    ct, out = layer_lib.training_back(batches.train, ct, x, of_layer, made, layer)
    # A layer's training gradient replaces its validation gradient, which has been used.
    grads = out.pop("grads")
    held = jax.tree.map(lambda h, g: jax.lax.dynamic_update_index_in_dim(h, g, place, 0), held, grads)
    return (ct, held), out

  train_inputs, _ = inputs(batches.train, x_train, scanned, ())
  outside = (jnp.arange(scanned[2].shape[0]), train_inputs, gradients[1:], directions, scanned)
  (cotangent, held), out = jax.lax.scan(training, (cotangents.train, held), outside, reverse=True)
  return out | {"grads": held}, Pair(val_cotangents, cotangent)


def _inputs_K(batches: Pair, x_K, scanned, segment_lengths: tuple) -> tuple:
  """`inputs` of each validation set, without the last output."""
  return tuple(inputs(rows, x, scanned, segment_lengths)[0] for rows, x in zip(batches.val, x_K, strict=True))
