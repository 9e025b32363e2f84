"""The ledger's sums of a layer, computed while its validation gradients exist.

K validation sets. `arrays`: {name: {label inside the layer: array}} of the optimizer's state.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import directions, ledger
from maxghost.ghost.schedules.passes import by_label
from maxghost.ghost.schedules.reverse_scan.state import Layers, parts_of
from maxghost.models import autodiff, streaming


def layer_arrays(layers: Layers, index) -> dict:
  """`arrays` of one layer, on the device."""
  # Vectors are fetched whole: a TPU cannot cut a single row out of a packed matrix in host memory.
  return {
    name: {k: streaming.fetch(streaming.to_device(v) if v.ndim <= 2 else v, index) for k, v in inside.items()}
    for name, inside in _stacked_arrays(layers).items()
  }


def late_arrays(layers: Layers, arrays: dict, index, probes: nnx.State) -> dict:
  """`arrays` of one layer, each cut from the device's stack only after its parameter's probe is computed. Arrays
  fetched from the host are reused."""
  there = dict(nnx.to_flat_state(probes))
  place = {}
  for p in layers.inner:
    probe = there.get(p.part_path("probe")[len(layers.prefix) :])
    if probe is not None:
      place[layers.local(p.label)] = autodiff.after(index, probe)
  return {
    name: {
      k: streaming.fetch(v, place[k]) if k in place and not streaming.on_host(v) else arrays[name][k]
      for k, v in inside.items()
    }
    for name, inside in _stacked_arrays(layers).items()
  }


def layer_sums(layers: Layers, layer_params, grads, gradients, arrays: dict, parts: dict) -> dict:
  """`ledger.sums` of one layer and `used`, <g, u> [K]; empty without a ledger."""
  rule, state = layers.problem.account, layers.problem.state
  if rule is None or state is None:
    return {}
  scored = {layers.local(p.label) for p in layers.inner}
  state = dataclasses.replace(state, arrays=arrays)
  parameters = {layers.local(label): p for label, p in layers.twin.parameters.items()}
  params, grads = by_label(layer_params), by_label(grads)
  used_K = _used(layers, layers.inner, grads, parts)
  labelled = [by_label(g) for g in gradients]
  return ledger.sums(rule, state, parameters, params, grads, labelled, scored) | {"used": used_K}


def whole_sums(layers: Layers, inner_sums: dict, outer_grads, outer_gradients) -> dict | None:
  """`ledger.sums` of the whole model, and `used`. inner_sums: [L, K]. None without a ledger."""
  rule, state = layers.problem.account, layers.problem.state
  if rule is None or state is None:
    return None
  grads, params = by_label(outer_grads), by_label(layers.outer_params)
  scored = {p.label for p in layers.outer}
  labelled = [by_label(g) for g in outer_gradients]
  parts, _ = parts_of(layers, layers.outer, outer_gradients, layers.outer_arrays())
  used_K = _used(layers, layers.outer, grads, parts)
  found = ledger.sums(rule, state, layers.twin.parameters, params, grads, labelled, scored) | {"used": used_K}
  return {name: inner_sums[name].sum(0) + found[name] for name in found}


def _stacked_arrays(layers: Layers) -> dict:
  """`arrays` of all layers that the ledger or the directions read."""
  problem, rule = layers.problem, layers.twin.spec.rule
  read = {name for p in layers.inner for name in rule.reads(p.spec.parameter)}
  return {
    name: {layers.local(k): v for k, v in arrays.items() if k.startswith(layers.label_prefix)}
    for name, arrays in layers.outer_arrays().items()
    if problem.account or name in read
  }


def _used(layers: Layers, scored, grads: dict, parts: dict):
  """<g, u> [K] over scored parameters of one layer (or outside the stack); 0 if the facts contain it."""
  used_K = jnp.zeros(layers.twin.num_sets, float)
  for p in () if layers.twin.spec.in_backward else scored:
    label = layers.local(p.label)
    direction, _ = directions.form(p.spec, parts[label], grads[label])
    used_K += directions.along(p.spec, direction, grads[label])
  return used_K
