"""One layer: its VJPs over validation and training rows, and its direction between the two.

`layer` everywhere below: the layer's (parameters, rest, index). K validation sets.
"""

from flax import nnx

from maxghost.ghost.saved_vjp import SavedVjp, pull_in_order
from maxghost.ghost.schedules.reverse_scan import account
from maxghost.ghost.schedules.reverse_scan.state import Kept, Layers, Walk, parts_of
from maxghost.ghost.variables import GhostDirection
from maxghost.models import stack


def plain(layers: Layers):
  """The plain layer, a function of `plain_arguments`."""

  def function(params, x, rest, inputs, key):
    return nnx.merge(layers.graphdef, params, rest)(x, *inputs, key)

  return function


def plain_arguments(loss, x, batch, layer) -> tuple:
  params, rest, index = layer
  return params, x, rest, loss.layer_inputs(batch), loss.layer_key(index)


def probed(layers: Layers):
  """The twin's layer, a function of `probed_arguments`."""

  def function(params, probes, x, state, rest, inputs, key):
    return nnx.merge(layers.twin_graphdef, params, probes, state, rest)(x, *inputs, key)

  return function


def probed_arguments(layers: Layers, x, state: nnx.State, layer) -> tuple:
  problem, (params, rest, index) = layers.problem, layer
  inputs, key = problem.loss.layer_inputs(problem.batch), problem.loss.layer_key(index)
  return params, layers.probes, x, state, rest, inputs, key


def saved_vjp(layers: Layers, function) -> SavedVjp:
  """A VJP that saves arrays by the remat policy."""
  return SavedVjp(stack.remat(function, layers.problem.settings.remat_policy))


def validation_back(walk: Walk, cotangents: tuple, kept_K: tuple, layer):
  """(validation gradients, cotangents of the layer's inputs) of each set."""
  problem, pairs = walk.layers.problem, []
  for k, (kept, ct, batch) in enumerate(zip(kept_K, cotangents, problem.val_batches, strict=True)):
    arguments = plain_arguments(problem.val_loss, kept.x, batch, layer)
    pairs.append(_pulled(plain(walk.layers), walk.vjps.val[k], kept, ct, arguments)[:2])
  return tuple(g for g, _ in pairs), tuple(ct for _, ct in pairs)


def training_back(walk: Walk, cotangent, kept: Kept, gradients: tuple, made, layer):
  """(cotangent of the layer's input, {grads, probes, sums, captured} of the layer).

  made: result of `directions`; None: computes it from the gradients.
  """
  layers, (params, _, index) = walk.layers, layer
  arrays = account.layer_arrays(layers, index)
  parts, captured = made or directions(layers, gradients, arrays)
  arguments = probed_arguments(layers, kept.x, direction_state(layers, parts), layer)
  grads, probes, cotangent, *_ = _pulled(probed(layers), walk.vjps.train, kept, cotangent, arguments)
  late = account.late_arrays(layers, arrays, index, probes)
  sums = account.layer_sums(layers, params, grads, gradients, late, parts)
  return cotangent, {"grads": grads, "probes": probes, "sums": sums, "captured": captured}


def directions(layers: Layers, gradients: tuple, arrays: dict):
  """({label inside the layer: parts}, {label: captured [K]}) of one layer."""
  return parts_of(layers, layers.inner, gradients, arrays)


def direction_state(layers: Layers, parts: dict) -> nnx.State:
  """The GhostDirection State of one layer's twin."""
  flat = {}
  for p in layers.inner:
    for name, array in zip(p.spec.parts, parts[layers.local(p.label)], strict=True):
      flat[p.part_path(name)[len(layers.prefix) :]] = GhostDirection(array)
  return nnx.from_flat_state(flat)


def _pulled(function, vjp: SavedVjp | None, kept: Kept, cotangent, arguments: tuple):
  """Cotangents of the arguments, from the saved arrays of the forward pass, or by a new pass."""
  if vjp is None or kept.saved is None:
    return pull_in_order(function, arguments, cotangent)
  return vjp.backward(kept.saved, cotangent, *arguments)
