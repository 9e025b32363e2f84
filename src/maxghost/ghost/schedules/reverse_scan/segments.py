"""The forward passes through the stacked layers, and the backward walk, segment by segment.

Without segments the forward passes save arrays of every layer by the remat policy. With segments they save the input of
every segment, from which the walk recomputes the layers' inputs. L layers.
"""

import jax
import jax.numpy as jnp

from maxghost.ghost.schedules.reverse_scan import layer as layer_lib
from maxghost.ghost.schedules.reverse_scan.layer import Kept, Layers, Pair, Rows
from maxghost.models import autodiff, segments, streaming


def inputs(rows: Rows, x, scanned, segment_lengths: tuple, keep=lambda x: x):
  """(inputs of these layers, or of their segments, with a leading axis; output of the last layer).

  scanned: `Layers.stacked` of these layers. keep: moves a segment's input to its memory.
  """
  apply = layer_lib.function(rows.layers.graphdef)

  def body(x, layer):
    return apply(*rows.arguments(x, layer)), None if segment_lengths else Kept(x)

  if not segment_lengths:
    x, kept = jax.lax.scan(body, x, scanned)
  else:

    def through(x, _, segment):
      return jax.lax.scan(body, x, segment)[0], keep(x)

    x, kept = streaming.loop(through, x, None, segments.split(scanned, segment_lengths[0]))
  return kept, x


def saving(rows: Rows, x, ghost: tuple = ()):
  """(`Kept` of all layers, output of the last), by the forward half of the rows' VJP. ghost: as in `Rows.arguments`."""

  def body(x, layer):
    assert rows.vjp is not None
    value, saved = rows.vjp.forward(*rows.arguments(x, layer, ghost))
    return value, Kept(x, saved)

  x, kept = jax.lax.scan(body, x, rows.layers.stacked())
  return kept, x


def back(batches: Pair, boundaries: Pair, cotangents: Pair, scanned, segment_lengths: tuple):
  """({grads, probes, sums, captured} with a leading layer axis, cotangents of the first layer's inputs).

  batches: `Rows`. boundaries: kept by `inputs` or `saving`. scanned: `Layers.stacked` of these layers.
  """
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
    return cotangents, out | {"grads": streaming.like(out["grads"], scanned[0])}

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
  """`back` for the layers of one segment: first all validation VJPs, then all training VJPs.

  Layer inputs then exist for one batch at a time, and validation gradients (or only their factors, if these suffice)
  for all layers of the segment.
  """
  layers = batches.train.layers
  factored = not layers.twin.spec.in_backward and layers.twin.spec.rank

  def validation(cts, scanned):
    x_K, layer = scanned
    gradients, cts = layer_lib.validation_back(batches, cts, x_K, layer)
    made = layers.directions(gradients, None) if factored else None
    return cts, (() if factored and layers.problem.account is None else gradients, made)

  inputs_K = _inputs_K(batches, x_val, scanned, ())
  val_cotangents, kept = jax.lax.scan(
    validation, streaming.to_device(cotangents.val), (inputs_K, scanned), reverse=True
  )
  # After this barrier the cotangent has moved, and the validation inputs are free before training inputs are computed.
  state = (number, kept, aside(layers, val_cotangents))
  number, (gradients, directions), val_cotangents = jax.lax.optimization_barrier(state)
  x_train = streaming.fetch(train_boundaries, number)
  held = gradients[0] if gradients else jax.tree.map(jnp.zeros_like, scanned[0])

  def training(state, scanned):
    ct, held = state
    place, x, others, made, layer = scanned
    first = jax.tree.map(lambda h: jax.lax.dynamic_index_in_dim(h, place, keepdims=False), held)
    ct, out = layer_lib.training_back(batches.train, ct, x, (first, *others) if gradients else (), made, layer)
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
