"""Schedule 'reverse_scan': one backward walk over the stacked layers that gives direction, gradient and scores of each.

The validation VJP of a layer gives its validation gradient G_l, which becomes its direction. Its training VJP then
gives cotangent, parameter gradient and scores against that direction, and G_l is dropped. The whole direction never
exists at once, and streamed weights are fetched once for both VJPs.

K validation sets, n examples, L layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.saved_vjp import SavedVjp
from maxghost.ghost.schedules.base import Problem, Scored, TrainPass
from maxghost.ghost.schedules.passes import captured as captured_of
from maxghost.ghost.schedules.passes import mean_loss, total, validation_mean
from maxghost.ghost.schedules.reverse_scan import account, layer, segments
from maxghost.ghost.schedules.reverse_scan.state import Layers, Pair, Walk, join, parts_of, submodule
from maxghost.ghost.variables import GhostDirection
from maxghost.models.segments import check
from maxghost.objectives import StagedLoss
from maxghost.parallel import constrain_state


def run(problem: Problem) -> Scored:
  """Runs the walk; scores equal those of 'two_pass', also for tied tables.

  Raises ValueError for a loss without stages or a model without stacked layers.
  """
  loss, batch, val_batches = problem.loss, problem.batch, problem.val_batches
  if not isinstance(loss, StagedLoss):
    raise ValueError(
      "ghost_schedule=reverse_scan needs a StagedLoss (embed, layers, head); use two_pass for other losses"
    )
  layers = Layers.of(problem)
  check(layers.count, problem.settings.segment_lengths)
  vals = [_validation_forward(layers, b) for b in val_batches]
  val_heads = [_validation_head(layers, val.hidden, b) for val, b in zip(vals, val_batches, strict=True)]
  head_gradients = [pull(jnp.ones_like(value)) for value, pull in val_heads]
  train = _train_forward(layers, batch)
  head = _train_head(layers, batch, train, [g for g, _ in head_gradients])
  walk = Walk(layers, Pair(tuple(val.vjp for val in vals), train.vjp))
  found, cotangents = segments.back(
    walk,
    Pair(tuple(val.boundaries for val in vals), train.boundaries),
    Pair(tuple(ct for _, ct in head_gradients), head.cotangent),
    layers.stacked(),
    problem.settings.segment_lengths,
  )
  outer_gradients = [
    jax.tree.map(jnp.add, g, _embed_gradient(layers, b, ct))
    for (g, _), b, ct in zip(head_gradients, val_batches, cotangents.val, strict=True)
  ]
  embedded = _train_embed(layers, batch, cotangents.train, head.links, outer_gradients)
  outer_grads = jax.tree.map(jnp.add, head.grads, embedded[0])
  probe_grads = join(layers.prefix, found["probes"], jax.tree.map(jnp.add, head.probes, embedded[1]))
  grads = constrain_state(join(layers.prefix, found["grads"], outer_grads))
  captured = {f"{layers.label_prefix}{k}": v for k, v in found["captured"].items()} | embedded[2]
  twin = layers.twin
  passed = TrainPass(
    head.loss,
    head.losses,
    head.weights,
    grads,
    twin.scores_by_label(probe_grads),
    twin.scores_by_label(probe_grads, "facts"),
    loss.metrics(train.hidden, batch),
  )
  sums = account.whole_sums(layers, found["sums"], outer_grads, outer_gradients)
  return Scored(
    passed,
    jnp.stack([value for value, _ in val_heads]),
    total(twin, passed.scores),
    captured_of(twin, captured, passed.facts),
    sums=sums,
    used=sums["used"] if sums and not twin.spec.in_backward else None,
  )


@dataclasses.dataclass(frozen=True)
class _Forward:
  """A forward pass up to the head. boundaries: kept inputs of layers or segments. vjp: with a finished forward half."""

  boundaries: Any
  hidden: jax.Array
  vjp: SavedVjp | None
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


# The plain model, for validation.


def _plain(layers: Layers, outer_params: nnx.State) -> nnx.Module:
  model = layers.problem.model
  return nnx.merge(model.graphdef, join(layers.prefix, layers.params, outer_params), model.rest)


def _validation_forward(layers: Layers, batch) -> _Forward:
  loss, lengths = layers.problem.val_loss, layers.problem.settings.segment_lengths
  x = loss.embed(_plain(layers, layers.outer_params), batch)
  if lengths:
    keep = lambda x: segments.aside(layers, x)  # noqa: E731
    boundaries, hidden = segments.inputs(layers, loss, x, batch, layers.stacked(), lengths, keep)
    return _Forward(boundaries, hidden, None, {})
  vjp = layer.saved_vjp(layers, layer.plain(layers))
  boundaries, hidden = segments.saving(layers, vjp, lambda x, one: layer.plain_arguments(loss, x, batch, one), x)
  return _Forward(boundaries, hidden, vjp, {})


def _validation_head(layers: Layers, x, batch):
  loss = layers.problem.val_loss
  return jax.vjp(lambda p, x: validation_mean(*loss.head(_plain(layers, p), x, batch)), layers.outer_params, x)


def _embed_gradient(layers: Layers, batch, cotangent) -> nnx.State:
  _, pull = jax.vjp(lambda p: layers.problem.val_loss.embed(_plain(layers, p), batch), layers.outer_params)
  return pull(cotangent)[0]


# The twin, for training.


def _probed(layers: Layers, outer_params: nnx.State, outer_probes: nnx.State, gradients: list):
  """(twin model, captured), with outer directions formed from K States of outer gradients."""
  parts, captured = parts_of(layers, layers.outer, gradients, layers.outer_arrays())
  twin = layers.twin
  flat = dict(nnx.to_flat_state(twin.blank_directions()))
  for p in layers.outer:
    for name, array in zip(p.spec.parts, parts[p.label], strict=True):
      flat[p.part_path(name)] = GhostDirection(array)
  params = join(layers.prefix, layers.params, outer_params)
  probes = dict(nnx.to_flat_state(twin.zero_probes())) | dict(nnx.to_flat_state(outer_probes))
  state = nnx.from_flat_state(flat)
  return twin.merge(params, nnx.from_flat_state(probes), state, layers.problem.model.rest), captured


def _train_forward(layers: Layers, batch) -> _Forward:
  loss, lengths = layers.problem.loss, layers.problem.settings.segment_lengths
  zeros = [jax.tree.map(jnp.zeros_like, layers.outer_params)] * layers.twin.num_sets
  model, _ = _probed(layers, layers.outer_params, layers.outer_probes, zeros)
  x = loss.embed(model, batch)
  links = _links(model)
  if lengths:
    boundaries, hidden = segments.inputs(layers, loss, x, batch, layers.stacked(), lengths)
    return _Forward(boundaries, hidden, None, links)
  # The directions are not known yet; the forward pass does not depend on them.
  one = jax.tree.map(lambda x: x[0], layers.params)
  gradients = (one,) * layers.twin.num_sets
  shapes, _ = jax.eval_shape(lambda *a: layer.directions(layers, *a), gradients, account.layer_arrays(layers, 0))
  blank = layer.direction_state(layers, jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes))
  vjp = layer.saved_vjp(layers, layer.probed(layers))
  arguments = lambda x, one: layer.probed_arguments(layers, x, blank, one)  # noqa: E731
  boundaries, hidden = segments.saving(layers, vjp, arguments, x)
  return _Forward(boundaries, hidden, vjp, links)


def _train_head(layers: Layers, batch, train: _Forward, gradients: list) -> _Head:
  def head(outer_params, outer_probes, x, links):
    model, _ = _probed(layers, outer_params, outer_probes, gradients)
    _set_links(model, links)
    losses, weights = layers.problem.loss.head(model, x, batch)
    return mean_loss(losses, weights), (losses, weights)

  value, pull, (losses, weights) = jax.vjp(
    head, layers.outer_params, layers.outer_probes, train.hidden, train.links, has_aux=True
  )
  grads, probes, cotangent, links = pull(jnp.ones_like(value))
  return _Head(value, losses, weights, grads, probes, cotangent, links)


def _train_embed(layers: Layers, batch, cotangent, link_cotangents: dict, gradients: list):
  """(gradients, probe gradients, captured) of the lookup."""

  def embed(outer_params, outer_probes):
    model, captured = _probed(layers, outer_params, outer_probes, gradients)
    x = layers.problem.loss.embed(model, batch)
    return (x, _links(model)), captured

  _, pull, captured = jax.vjp(embed, layers.outer_params, layers.outer_probes, has_aux=True)
  return (*pull((cotangent, link_cotangents)), captured)


def _links(model) -> dict:
  """{module path: arrays} that linked tables pass to their second use."""
  return {
    path: tuple(v[...] for v in link)
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.Module) and (link := getattr(node, "ghost_link", None)) is not None
  }


def _set_links(model, links: dict) -> None:
  for path, arrays in links.items():
    node: Any = submodule(model, path)
    node.ghost_link = nnx.List([nnx.Intermediate(x) for x in arrays])
