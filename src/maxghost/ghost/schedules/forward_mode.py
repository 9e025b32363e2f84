"""Schedule 'forward_mode' (engine 'jvp'): one forward-mode pass along the direction, without scoring rules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.schedules.base import Model, Problem, Scored
from maxghost.ghost.schedules.passes import accumulated, like, validation, whole_directions
from maxghost.models import autodiff
from maxghost.optimizers import by_label


def run(problem: Problem) -> Scored:
  """The training gradient, the exact direction of this very step, then one forward-mode pass."""
  model = problem.model
  passed = accumulated(model, problem.loss, problem.batch, problem.settings.num_micro)
  found = validation(problem)
  gradients, directions = whole_directions(problem, found.gradients, passed.grads)
  grads = by_label(passed.grads)
  sets = [jvp_scores(model, problem.loss, problem.batch, like(model.params, u)) for u in directions]
  used = [sum(jnp.sum(grads[label] * v) for label, v in u.items()) for u in directions]
  return Scored(passed, found.losses, jnp.stack(sets), {}, found, gradients=gradients, used=jnp.stack(used))


def jvp_scores(model: Model, loss_fn: Callable, batch, direction: nnx.State):
  """<grad of (weight share times loss), u> of every example or position of the loss, at about two forward passes."""

  def weighted(params):
    losses, weights = loss_fn(model.merge(params), batch)
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    weights = weights.astype(wide)
    return losses.astype(wide) * weights / jnp.maximum(weights.sum(), jnp.finfo(wide).tiny)

  with autodiff.forward_mode():
    return jax.jvp(weighted, (model.params,), (direction,))[1]
