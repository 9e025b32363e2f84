"""Schedule 'reverse_scan': one backward walk over the stacked layers that gives direction, gradient and scores of each.

The validation VJP of a layer gives its validation gradient G_l, which becomes its direction. Its training VJP then
gives cotangent, parameter gradient and scores against that direction, and G_l is dropped. The whole direction never
exists at once, and streamed weights are fetched once for both VJPs.

K validation sets, n examples, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.directions import direction_parts, direction_state
from maxghost.ghost.schedules.base import Problem, Scored, TrainPass
from maxghost.ghost.schedules.passes import captured, mean_loss, total, validation_mean
from maxghost.ghost.schedules.reverse_scan import layer, segments
from maxghost.ghost.schedules.reverse_scan.layer import Layers, Pair, Rows, submodule
from maxghost.models.segments import check
from maxghost.objectives import StagedLoss
from maxghost.optimizers import by_label
from maxghost.parallel.shardings import constrain_state


def run(problem: Problem) -> Scored:
  """Runs the walk; scores equal those of 'two_pass', also for tied tables.

  Raises ValueError for a loss without stages or a model without stacked layers.
  """
  loss, val_loss, batch, state = problem.loss, problem.val_loss, problem.batch, problem.state
  if not isinstance(loss, StagedLoss) or not isinstance(val_loss, StagedLoss):
    raise ValueError(
      "ghost_schedule=reverse_scan needs a StagedLoss (embed, layers, head); use two_pass for other losses"
    )
  layers = Layers(problem, tuple(loss.layers_path))
  twin, lengths = layers.twin, problem.settings.segment_lengths
  check(layers.count, lengths)
  vals = [_validation_forward(Rows(layers, val_loss, b)) for b in problem.val_batches]
  val_heads = [_validation_head(rows, hidden) for rows, _, hidden in vals]
  head_gradients = [pull(jnp.ones_like(value)) for value, pull in val_heads]
  train, boundaries, hidden, links = _train_forward(Rows(layers, loss, batch))
  parts, _ = direction_parts(layers.outer, [by_label(g) for g, _ in head_gradients], state, layers.scalars)
  value, pull, (losses, weights) = _train_head(train, hidden, links, parts)
  head_grads, head_probes, cotangent, links = pull(jnp.ones_like(value))
  found, cotangents = segments.back(
    Pair(tuple(rows for rows, _, _ in vals), train),
    Pair(tuple(kept for _, kept, _ in vals), boundaries),
    Pair(tuple(ct for _, ct in head_gradients), cotangent),
    layers.stacked(),
    lengths,
  )
  outer_gradients = [
    by_label(jax.tree.map(jnp.add, g, _embed_gradient(rows, ct)))
    for (g, _), (rows, _, _), ct in zip(head_gradients, vals, cotangents.val, strict=True)
  ]
  parts, shares = direction_parts(layers.outer, outer_gradients, state, layers.scalars)
  embed_grads, embed_probes = _train_embed(train, cotangents.train, links, parts)
  outer_grads = jax.tree.map(jnp.add, head_grads, embed_grads)
  probe_grads = layers.join(found["probes"], jax.tree.map(jnp.add, head_probes, embed_probes))
  grads = constrain_state(layers.join(found["grads"], outer_grads))
  scores, facts = twin.scores(probe_grads)
  passed = TrainPass(value, losses, weights, grads, scores, facts, loss.metrics(hidden, batch))
  outer_params = by_label(layers.outer_params)
  outer = layer.ledger_sums(layers, layers.outer, outer_params, by_label(outer_grads), outer_gradients, state, parts)
  sums = {name: found["sums"][name].sum(0) + outer[name] for name in outer}
  return Scored(
    passed,
    jnp.stack([value for value, _ in val_heads]),
    total(twin, scores),
    captured(twin, found["captured"] | shares, facts),
    sums=sums or None,
    used=sums.get("used"),
  )


# The plain model, for validation.


def _plain(layers: Layers, outer_params: nnx.State) -> nnx.Module:
  return layers.problem.model.merge(layers.join(layers.params, outer_params))


def _validation_forward(rows: Rows):
  """(rows, kept inputs of layers or segments, hidden states for the head)."""
  layers, lengths = rows.layers, rows.layers.problem.settings.segment_lengths
  x = rows.loss.embed(_plain(layers, layers.outer_params), rows.batch)
  if lengths:
    keep = lambda x: segments.aside(layers, x)  # noqa: E731
    return rows, *segments.inputs(rows, x, layers.stacked(), lengths, keep)
  rows = rows.saving(layers.graphdef)
  return rows, *segments.saving(rows, x)


def _validation_head(rows: Rows, x):
  def head(outer_params, x):
    return validation_mean(*rows.loss.head(_plain(rows.layers, outer_params), x, rows.batch))

  return jax.vjp(head, rows.layers.outer_params, x)


def _embed_gradient(rows: Rows, cotangent) -> nnx.State:
  layers = rows.layers
  _, pull = jax.vjp(lambda p: rows.loss.embed(_plain(layers, p), rows.batch), layers.outer_params)
  return pull(cotangent)[0]


# The twin, for training.


def _probed(layers: Layers, outer_params: nnx.State, outer_probes: nnx.State, parts: dict) -> nnx.Module:
  """The twin with these parts of the outer directions; those of the layers are blank."""
  twin = layers.twin
  pairs = (twin.zero_probes(), outer_probes), (twin.blank_directions(), direction_state(layers.outer, parts))
  flat = ((dict(nnx.to_flat_state(blank)), dict(nnx.to_flat_state(own))) for blank, own in pairs)
  probes, directions = (nnx.from_flat_state(blank | own) for blank, own in flat)
  return twin.merge(layers.join(layers.params, outer_params), probes, directions, layers.problem.model.rest)


def _train_forward(rows: Rows):
  """As `_validation_forward`, with the links of tied tables."""
  layers, lengths, num_sets = rows.layers, rows.layers.problem.settings.segment_lengths, rows.layers.twin.num_sets
  # The directions are not known yet; the forward pass does not depend on them.
  zeros = [by_label(jax.tree.map(jnp.zeros_like, layers.outer_params))] * num_sets
  parts, _ = direction_parts(layers.outer, zeros, layers.problem.state, layers.scalars)
  model = _probed(layers, layers.outer_params, layers.outer_probes, parts)
  x = rows.loss.embed(model, rows.batch)
  links = _links(model)
  if lengths:
    return rows, *segments.inputs(rows, x, layers.stacked(), lengths), links
  one = jax.tree.map(lambda x: x[0], layers.params)
  shapes, _ = jax.eval_shape(layers.directions, (one,) * num_sets, layer.layer_state(layers, 0))
  blank = direction_state(layers.inner, jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes))
  rows = rows.saving(layers.twin_graphdef)
  return rows, *segments.saving(rows, x, (layers.probes, blank)), links


def _train_head(rows: Rows, x, links: dict, parts: dict):
  """`jax.vjp` of the loss in (outer parameters, outer probes, x, links)."""

  def head(outer_params, outer_probes, x, links):
    model = _probed(rows.layers, outer_params, outer_probes, parts)
    for path, arrays in links.items():
      node: Any = submodule(model, path)
      node.ghost_link = nnx.List([nnx.Intermediate(array) for array in arrays])
    losses, weights = rows.loss.head(model, x, rows.batch)
    return mean_loss(losses, weights), (losses, weights)

  return jax.vjp(head, rows.layers.outer_params, rows.layers.outer_probes, x, links, has_aux=True)


def _train_embed(rows: Rows, cotangent, link_cotangents: dict, parts: dict):
  """(gradients, probe gradients) of the lookup."""

  def embed(outer_params, outer_probes):
    model = _probed(rows.layers, outer_params, outer_probes, parts)
    return rows.loss.embed(model, rows.batch), _links(model)

  _, pull = jax.vjp(embed, rows.layers.outer_params, rows.layers.outer_probes)
  return pull((cotangent, link_cotangents))


def _links(model) -> dict:
  """{module path: arrays} that linked tables pass to their second use."""
  return {
    path: tuple(v[...] for v in link)
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.Module) and (link := getattr(node, "ghost_link", None)) is not None
  }
