"""What the ledger needs of a layer, taken where its validation gradients still exist.

K validation sets.
"""

import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import directions, ledger
from maxghost.ghost.schedules.passes import by_label
from maxghost.ghost.schedules.reverse_scan.state import Layers, parts_of
from maxghost.models import autodiff, streaming


def layer_moments(layers: Layers, index) -> dict:
  """The optimizer's state of one layer, on the device: {"first" | "second": {label inside the layer: array}}."""
  # Vectors come whole: a TPU cannot cut a single row out of a packed matrix in host memory.
  return {
    name: {k: streaming.fetch(streaming.to_device(v) if v.ndim <= 2 else v, index) for k, v in inside.items()}
    for name, inside in _moments(layers).items()
  }


def late_moments(layers: Layers, moments: dict, index, probes: nnx.State) -> dict:
  """`moments` of one layer, each taken from the device's stack when its parameter's probe is there; those that have
  come from the host stay."""
  there = dict(nnx.to_flat_state(probes))
  place = {}
  for p in layers.inner:
    probe = there.get(p.part_path("probe")[len(layers.prefix) :])
    if probe is not None:
      place[layers.local(p.label)] = autodiff.after(index, probe)
  return {
    name: {
      k: streaming.fetch(v, place[k]) if k in place and not streaming.on_host(v) else moments[name][k]
      for k, v in inside.items()
    }
    for name, inside in _moments(layers).items()
  }


def layer_sums(layers: Layers, layer_params, grads, gradients, moments: dict, parts: dict) -> dict:
  """`ledger.sums` of one layer and `used`, <g, u> [K]; empty without an account."""
  account = layers.problem.account
  if account is None:
    return {}
  scored = {layers.local(p.label) for p in layers.inner}
  state = ledger.Moments(moments.get("first"), moments.get("second"), account.moments.count)
  params, grads = by_label(layer_params), by_label(grads)
  used_K = _used(layers, layers.inner, grads, parts)
  labelled = [by_label(g) for g in gradients]
  found = ledger.sums(account.optimizer, state, account.kappa, params, grads, labelled, scored)
  return found | {"used": used_K}


def whole_sums(layers: Layers, inner_sums: dict, outer_grads, outer_gradients) -> dict | None:
  """`ledger.sums` of the whole model, and `used`. inner_sums: [L, K]. None without an account."""
  account = layers.problem.account
  if account is None:
    return None
  grads, params = by_label(outer_grads), by_label(layers.outer_params)
  labelled = [by_label(g) for g in outer_gradients]
  parts, _ = parts_of(layers, layers.outer, outer_gradients, layers.problem.second_moments)
  used_K = _used(layers, layers.outer, grads, parts)
  scored = {p.label for p in layers.outer}
  found = ledger.sums(account.optimizer, account.moments, account.kappa, params, grads, labelled, scored)
  found["used"] = used_K
  return {name: inner_sums[name].sum(0) + found[name] for name in found}


def _moments(layers: Layers) -> dict:
  """{"first" | "second": {label inside the layer: stacked array}}; empty without moments."""
  account, prefix = layers.problem.account, layers.label_prefix
  first = account.moments.first if account else None
  return {
    name: {layers.local(k): v for k, v in moments.items() if k.startswith(prefix)}
    for name, moments in (("first", first), ("second", layers.problem.second_moments))
    if moments is not None
  }


def _used(layers: Layers, scored, grads: dict, parts: dict):
  """<g, u> [K] over scored parameters of one layer (or outside the stack); 0 for kind 'adam', whose facts hold it."""
  used_K = jnp.zeros(layers.twin.num_sets, float)
  for p in scored if layers.twin.spec.kind == "sgd" else ():
    label = layers.local(p.label)
    direction, _ = directions.form(p.spec, parts[label], grads[label])
    used_K += directions.along(p.spec, direction, grads[label])
  return used_K
