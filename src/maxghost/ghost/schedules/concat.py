"""Schedule 'concat': one batch of training and validation rows, the form of GhostSuite's GradDotProd engine."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.attach import Twin
from maxghost.ghost.schedules.base import Problem, Scored, TrainPass
from maxghost.ghost.schedules.passes import captured, direction_parts, mean_loss, total, validation_mean
from maxghost.parallel import constrain_state


def run(problem: Problem) -> Scored:
  twin, model = problem.twin, problem.model
  assert twin is not None
  zeros = {p.label: jnp.zeros((*p.stack_shape, *p.shape), float) for p in twin.scored}
  parts, _ = direction_parts(twin, [zeros], problem.state)
  state = twin.direction_state(parts)
  passed, val_loss = concat_pass(
    twin, model.params, model.rest, problem.loss, problem.batch, problem.val_batches[0], state
  )
  return Scored(passed, val_loss[None], total(twin, passed.scores), captured(twin, {}, passed.facts))


def concat_pass(twin: Twin, params, rest, loss_fn: Callable, batch, val_batch, directions: nnx.State):
  """(TrainPass, validation loss) of one batch train | validation.

  Each op's backward pass forms the validation gradient from its validation rows. Unlike in GhostSuite, both halves
  keep their own mean, so scores are <grad l_i, G> without the factor V / (n + V)^2, and the parameter gradient is that
  of the training rows alone. directions: parts whose gradients are ignored. Needs one validation set and rows of equal
  length.
  """
  both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, val_batch)
  rows = jax.tree.leaves(batch)[0].shape[0]

  def loss(params, probes):
    losses, weights = loss_fn(twin.merge(params, probes, directions, rest), both)
    train, val = mean_loss(losses[:rows], weights[:rows]), validation_mean(losses[rows:], weights[rows:])
    return train + val, (train, val, losses[:rows], weights[:rows])

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (_, (train, val, losses, weights)), (grads, probe_grads) = value_and_grad(params, twin.zero_probes())
  facts = twin.scores_by_label(probe_grads, "facts")
  grads = constrain_state(grads)
  return TrainPass(train, losses, weights, grads, twin.scores_by_label(probe_grads), facts), val
