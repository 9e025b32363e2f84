"""Schedule 'forward_mode' (engine 'jvp'): one forward-mode pass along the direction, without scoring rules."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config import ConfigError
from maxghost.ghost.schedules import passes
from maxghost.ghost.schedules.base import Model, Problem, Scored
from maxghost.models import autodiff
from maxghost.objectives import as_objective
from maxghost.optimizers import by_label


def run(problem: Problem) -> Scored:
  """The training gradient, the exact direction of this step in the parameters' dtypes, then one forward-mode pass."""
  model, rows = problem.model, (problem.loss, problem.batch, problem.settings.num_micro)
  passed = passes.accumulated(model, *rows)
  found = passes.validation(problem)
  gradients, labelled, _ = passes.whole_directions(problem, found.gradients, passed.grads)
  directions, grads = [passes.like(model.params, u) for u in labelled], by_label(passed.grads)
  sets = [jvp_scores(model, *rows, u) for u in directions]
  used = [sum(jnp.sum(grads[label] * v.astype(float)) for label, v in by_label(u).items()) for u in directions]
  return Scored(passed, found.losses, jnp.stack(sets), {}, found, gradients=gradients, used=jnp.stack(used))


def jvp_scores(model: Model, loss_fn: Callable, batch, num_micro: int, direction: nnx.State):
  """<grad of (weight share times loss), u> of every example or position of the loss, at about two forward passes.

  In the micro-batches of `passes.accumulated`: rows of one may have a part in each other's losses (a load balance).
  """

  def along(loss_fn, rows):
    """(derivatives of losses times weights, weights)"""

    def weighted(params):
      losses, weights = loss_fn(model.merge(params), rows)
      weights = passes.wide_weights(losses, weights)
      return losses.astype(weights.dtype) * weights, weights

    with autodiff.forward_mode():
      return jax.jvp(weighted, (model.params,), (direction,), has_aux=True)[1:]

  if num_micro == 1:
    products, weights = along(loss_fn, batch)
  else:
    objective = as_objective(loss_fn)
    parts = passes.MicroBatches(num_micro, objective.rows_per_unit)
    own = lambda numbered: along(objective.of_micro_batch(numbered[0]), numbered[1])  # noqa: E731
    products, weights = map(parts.joined, jax.lax.map(own, (jnp.arange(num_micro), parts.cut(batch))))
  return products / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)


@contextlib.contextmanager
def refuse_custom_vjp():
  """Raises ConfigError where JAX has a TypeError for a `jax.custom_vjp` of the user's."""
  try:
    yield
  except TypeError as error:
    if "custom_vjp" not in str(error):
      raise
    said = "a jax.custom_vjp has no forward mode, by which ghost_schedule=forward_mode and rules without a `score`"
    raise ConfigError(f"{said} of their own score: write it, or use ghost_schedule=two_pass") from error
