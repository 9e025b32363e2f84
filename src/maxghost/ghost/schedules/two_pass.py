"""Schedule 'two_pass': the validation gradients, then the training pass that scores against them.

Directions that need the whole step or the gradient of all micro-batches (`DirectionSpec.early`) cost one more pass: the
first one forms the gradient, the second one only scores.
"""

import dataclasses

import jax

from maxghost.ghost.directions import direction_parts
from maxghost.ghost.schedules import passes
from maxghost.ghost.schedules.base import Problem, Scored
from maxghost.models import streaming
from maxghost.optimizers import by_label


def run(problem: Problem) -> Scored:
  twin, model, batch = problem.twin, problem.model, problem.batch
  assert twin is not None
  found, early, num_micro, suited = passes.validation(problem), twin.spec.early, problem.settings.num_micro, {}
  if early:
    first = passes.accumulated(model, problem.loss, batch, num_micro)
    labelled, directions, suited = passes.whole_directions(problem, found.gradients, first.grads)
    directions += [by_label(first.grads)] if twin.spec.own else []
  else:
    directions = labelled = passes.extrapolated(problem.secant, [by_label(g) for g in found.gradients])
  parts, share = direction_parts(twin.scored, directions, problem.state, suited=suited)
  if problem.settings.in_turn:
    # Otherwise activations of the training pass may exist at the same time as those of the validation pass.
    parts, batch = jax.lax.optimization_barrier((twin.placed(parts), batch))
  directions = twin.direction_state(parts)
  if problem.settings.gradients_on_host:
    # XLA would finish the copies, and compute what is read only after the training pass, as late as it can.
    labelled = streaming.to_host(labelled)
    labelled, share, directions, batch = jax.lax.optimization_barrier((labelled, share, directions, batch))
  passed = passes.accumulated(model, problem.loss, batch, num_micro, twin, directions)
  if early:
    passed = dataclasses.replace(first, scores=passed.scores)
  return passes.scored_by_rules(twin, passed, found.losses, share, validation=found, gradients=labelled, parts=parts)
