"""Schedule 'two_pass': the validation gradients, then the training pass that scores against them."""

import jax

from maxghost.ghost.schedules.accumulate import accumulated
from maxghost.ghost.schedules.base import Problem, Scored
from maxghost.ghost.schedules.passes import (
  by_label,
  captured,
  curved,
  direction_parts,
  plain_pass,
  responded,
  total,
  train_pass,
  validation,
)


def run(problem: Problem) -> Scored:
  twin, model, batch = problem.twin, problem.model, problem.batch
  assert twin is not None
  found = validation(problem)
  if problem.second_order:
    grads = plain_pass(*model, problem.loss, batch).grads
    update = problem.update(grads)
    labelled = [by_label(g) for g in curved(problem, found.gradients, update)]
    parts, share = direction_parts(twin, responded(problem, update, by_label(grads), labelled))
  else:
    labelled = [by_label(g) for g in found.gradients]
    parts, share = direction_parts(twin, labelled, problem.state)
  if problem.settings.in_turn:
    # Otherwise activations of the training pass may exist at the same time as those of the validation pass.
    parts, batch = jax.lax.optimization_barrier((twin.placed(parts), batch))
  directions = twin.direction_state(parts)

  def scored_pass(micro_batch):
    return train_pass(twin, model.params, model.rest, problem.loss, micro_batch, directions)

  passed = accumulated(scored_pass, batch, problem.settings.num_micro, {p.label: p.stack_shape for p in twin.scored})
  additive, share = total(twin, passed.scores), captured(twin, share, passed.facts)
  return Scored(passed, found.losses, additive, share, found, gradients=labelled, parts=parts)
