"""LESS (Xia et al., arXiv:2402.04333): the cosine of a query's gradient with what Adam makes of each document's own.

A baseline for the selection of data: at warm-up checkpoints c, the sum over c of rate_c cos(G_c, A_c(g_i)), with G the
gradient of the query's mean loss and g_i that of the document's, both of the trained parameters; A the Adam update of a
step on g_i alone, from the moments of the checkpoint; rate the mean learning rate since the checkpoint before. Every
document takes a backward pass of its own. Cosines are those of random projections, block by block, or with 0 directions
those of whole gradients.

B rows, S documents in a row, n = B S, K queries, M blocks of a sketch, R directions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost import optimizers
from maxghost.config import Config
from maxghost.data.packing import Layout
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.schedules import Model, passes
from maxghost.ghost.sketch import SPEC, sketch_gradient
from maxghost.objectives import create
from maxghost.optimizers import by_label
from maxghost.training import devices, state
from maxghost.training.scoring import excluded

_SEED = 1402


def twin_of(cfg: Config, layout: Layout, num_rows: int):
  """(what splits a train state into the model's parts and the optimizer, objective, twin of the model that sketches
  batches of this layout)."""
  graphdef, abstract = state.abstract_split(cfg)

  def parts_of(train_state) -> tuple[Model, nnx.Optimizer]:
    held = nnx.merge(graphdef, train_state)
    return Model(*nnx.split(held.model, held.optimizer.wrt, ...)), held.optimizer

  model, objective, length = nnx.merge(graphdef, abstract).model, create(cfg), layout.row_length
  twin = prepare_twin(
    model, objective.batch_spec(num_rows, length), objective, num_sets=1, num_positions=length,
    spec=SPEC, exclude=excluded(cfg, model),
  )  # fmt: skip
  return parts_of, objective, twin


class Less:
  """Has the methods of `offline.Sketcher`. The mean over R of the products of its sketches is the cosine.

  Ask it for the checkpoints in ascending order, since learning rates are averaged from one to the next.
  """

  def __init__(self, cfg: Config, layout: Layout, num_rows: int, num_directions: int):
    parts_of, objective, twin = twin_of(cfg, layout, num_rows)
    rule, num_slots = optimizers.AdamW.from_config(cfg.optimizer), layout.max_segments
    labels = [param.label for param in twin.scored]

    def projected(key, gradients: dict):
      """[n, M, R] of {label: [n, ...]}, of norm sqrt(R)."""
      if num_directions:
        sketch_nMR = jax.vmap(lambda one: sketch_gradient(twin, one, key, num_directions))(gradients)
      else:  # twice the same, so that products have no spread over R
        whole_nP = jnp.concatenate([gradients[label].reshape(len(gradients[label]), -1) for label in labels], 1)
        sketch_nMR = jnp.stack([whole_nP, whole_nP], -1)
      norm_n = jnp.sqrt(jnp.square(sketch_nMR).sum((1, 2), keepdims=True))
      return sketch_nMR * (sketch_nMR.shape[-1] ** 0.5 / jnp.maximum(norm_n, jnp.finfo(norm_n.dtype).tiny))

    def ask(key, train_state, val: tuple):
      """(steps taken, sketches [K, M, R] of the queries' gradients)."""
      parts, optimizer = parts_of(train_state)
      found = [by_label(x) for x in passes.validation_gradients(parts, objective.validation(), val)[1]]
      gradients = {label: jnp.stack([g[label] for g in found]) for label in labels}
      return rule.read(optimizer).count, projected(key, gradients)

    def sketch(key, train_state, _, batch):
      """(sketch [B, S, M, R] of each document's Adam update, tokens [B, S])."""
      parts, optimizer = parts_of(train_state)
      before = rule.read(optimizer)
      corrections = rule.scalars(before.count, 1.0)[1:]

      def loss(params, row, slot):
        losses, weights = objective(parts.merge(params), row)
        return passes.mean_loss(losses, jnp.where(objective.units(row)[1] == slot, weights, 0))

      def update(of):
        row, slot = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, of[0], 1), batch), of[1]
        gradient = functools.partial(jax.grad(loss), parts.params, row, slot)
        nothing = functools.partial(jax.tree.map, jnp.zeros_like, parts.params)
        grads = by_label(jax.lax.cond((objective.units(row)[1] == slot).any(), gradient, nothing))
        return {label: adam(grads[label], **before.of(label)) for label in labels}

      def adam(g, first_moment, second_moment):
        m, v = first_moment.astype(g.dtype), second_moment.astype(g.dtype)
        m, v = rule.b1 * m + (1 - rule.b1) * g, rule.b2 * v + (1 - rule.b2) * jnp.square(g)
        return m / corrections[0] / (jnp.sqrt(v / corrections[1]) + rule.eps)

      target_BT, weights_BT = objective.units(batch)[1], objective(parts.merge(parts.params), batch)[1]
      rows_BS, slots_BS = jnp.meshgrid(jnp.arange(len(target_BT)), 1 + jnp.arange(num_slots), indexing="ij")
      sketch_nMR = projected(key, jax.lax.map(update, (rows_BS.ravel(), slots_BS.ravel())))
      tokens_BS = (jnp.where(weights_BT != 0, target_BT, 0)[..., None] == slots_BS[:, None]).sum(1)
      return sketch_nMR.reshape(*slots_BS.shape, *sketch_nMR.shape[1:]), tokens_BS

    key = jax.random.key(_SEED)
    self.prepare, self._last = objective.prepared, 0
    self._rate = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps)
    compiled: Any = functools.partial(jax.jit, compiler_options=devices.compiler_options())
    self._ask, self.sketch = (functools.partial(compiled(function), key) for function in (ask, sketch))

  def respond(self, train_state, _, val: tuple):
    """(None, mean learning rate since the checkpoint before, sketches [K, M, R])."""
    if not val:
      return None, 0.0, None
    count, sketch_KMR = self._ask(train_state, val)
    steps = jnp.arange(self._last, max(int(count), self._last + 1))
    self._last = int(count)
    return None, float(jnp.broadcast_to(self._rate(steps), steps.shape).mean()), sketch_KMR
