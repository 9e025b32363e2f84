"""Schedule 'concat': one batch of training and validation rows, the form of GhostSuite's GradDotProd engine.

Each op's backward pass forms the validation gradient from its validation rows. Unlike in GhostSuite, both halves keep
their own mean, so scores are <grad l_i, G> without the factor V / (n + V)^2, and the parameter gradient is that of the
training rows alone. Needs one validation set, rows of equal length and one loss.
"""

import jax
import jax.numpy as jnp

from maxghost.ghost.directions import direction_parts
from maxghost.ghost.schedules import passes
from maxghost.ghost.schedules.base import Problem, Scored, TrainPass
from maxghost.models import pipeline
from maxghost.objectives import as_objective
from maxghost.parallel.shardings import constrain_state


def run(problem: Problem) -> Scored:
  twin, (_, params, rest), batch, (val_batch,) = problem.twin, problem.model, problem.batch, problem.val_batches
  assert twin is not None
  loss_fn, val_loss = as_objective(problem.loss), as_objective(problem.val_losses[0])
  if type(loss_fn) is not type(val_loss) or not vars(val_loss).items() <= vars(loss_fn).items():
    said = f"ghost_schedule=concat has one loss for all rows, but {type(loss_fn).__name__}.validation gives another one"
    raise ValueError(f"{said}; use ghost_schedule=two_pass")
  ignored = {p.label: jnp.zeros((*p.stack_shape, *p.shape), float) for p in twin.scored}
  directions = twin.direction_state(direction_parts(twin.scored, [ignored], problem.state)[0])
  both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, val_batch)
  # Weights may read all rows of their batch, but no parameters: XLA computes nothing else of these calls.
  plain = problem.model.merge(params)
  weights, val_weights = loss_fn.measured(plain, batch)[1], val_loss.measured(plain, val_batch)[1]

  def loss(params, probes):
    with pipeline.whole_rows(True):
      losses, *_ = loss_fn.measured(twin.merge(params, probes, directions, rest), both)
    losses, val_losses = losses[: len(weights)], losses[len(weights) :]
    train, val = passes.mean_loss(losses, weights), passes.validation_mean(val_losses, val_weights)
    return train + val, (train, val, losses, passes.wide_weights(losses, weights))

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (_, (train, val, losses, weights)), (grads, probe_grads) = value_and_grad(params, twin.zero_probes())
  passed = TrainPass(train, losses, weights, constrain_state(grads), *twin.scores(probe_grads))
  return passes.scored_by_rules(twin, passed, val[None], {})
