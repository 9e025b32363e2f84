"""Engine 'jvp': the training gradient, the exact direction of this very step, then one forward-mode pass. No rules.

K validation sets, n examples, T positions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.schedules.accumulate import accumulated_plain
from maxghost.ghost.schedules.base import Problem, Scored
from maxghost.ghost.schedules.passes import by_label, like, validation, whole_directions
from maxghost.models import autodiff


def run(problem: Problem) -> Scored:
  graphdef, params, rest = problem.model
  passed = accumulated_plain(problem.model, problem.loss, problem.batch, problem.settings.num_micro)
  found = validation(problem)
  gradients, directions = whole_directions(problem, found.gradients, passed.grads)
  sets, used, grads = [], [], by_label(passed.grads)
  for u in directions:
    sets.append(jvp_scores(graphdef, params, rest, problem.loss, problem.batch, like(params, u)))
    used.append(sum(jnp.sum(grads[label] * v) for label, v in u.items()))
  labelled = [by_label(g) for g in gradients]
  return Scored(passed, found.losses, jnp.stack(sets), {}, found, gradients=labelled, used=jnp.stack(used))


def jvp_scores(graphdef, params, rest, loss_fn: Callable, batch, direction):
  """<grad of (weight share times loss), u> of every example or position, in losses' shape, by one forward-mode pass.

  direction: State u. Works for any model that supports `jax.jvp`. Scores are per loss token, not per position of use,
  without detail per parameter. Costs about two forward passes.
  """

  def weighted(params):
    losses, weights = loss_fn(nnx.merge(graphdef, params, rest), batch)
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    weights = weights.astype(wide)
    return losses.astype(wide) * weights / jnp.maximum(weights.sum(), jnp.finfo(wide).tiny)

  with autodiff.forward_mode():
    _, tangents = jax.jvp(weighted, (params,), (direction,))
  return tangents
