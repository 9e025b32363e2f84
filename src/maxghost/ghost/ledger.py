"""The columns that add up to a step's predicted change of the validation loss.

With AdamW, -<G, Delta> = examples + momentum + weight decay + unscored + direction residual, where Delta is the update
of the parameters and G the validation gradient. Each column is in nats; positive lowers the validation loss.

K validation sets. Trees are dicts {label: array}.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxghost.ghost import directions
from maxghost.ghost.directions import AdamScalars, DirectionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepFacts:
  """What the optimizer does in this step. clip_factor: kappa; weight_decay 0 for SGD.

  moments1, moments2: Adam's m and v of the step before, {label: [*parameter]}; None for SGD.
  """

  learning_rate: jax.Array
  clip_factor: jax.Array
  weight_decay: float = dataclasses.field(metadata={"static": True})
  count: jax.Array
  moments1: dict | None
  moments2: dict | None


def columns(twin, optimizer: DirectionSpec, facts: StepFacts, params: dict, grads: dict, gradients: list[dict], scores, scalars):
  """{column: [K]} for one step.

  optimizer: kind 'adam' or 'sgd' with its constants, what the trainer really applies (twin.spec may differ from it).
  scores: {label: [*stack, K, n(, T)]} additive scores; gradients: K dicts of validation gradients over all parameters;
  scalars: AdamScalars assumed in the directions, or None.
  check_rel_err compares the sum of all scores with <g, u>, formed again from the whole gradient: 0 up to rounding.
  """
  lr, kappa = facts.learning_rate, facts.clip_factor
  scored = {p.label for p in twin.scored}
  rows = [_one_set(twin.spec, optimizer, facts, params, grads, g, scored, scalars) for g in gradients]
  out = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
  scale = 1e-30
  score_sum, score_size = 0.0, 0.0
  for param in twin.scored:
    per_set = jnp.moveaxis(scores[param.label], len(param.stack_shape), 0).reshape(len(gradients), -1)
    score_sum = score_sum + per_set.sum(-1)
    score_size = score_size + jnp.abs(per_set).sum(-1)
  out["check_rel_err"] = jnp.abs(score_sum - out.pop("used")) / jnp.maximum(score_size, scale)
  out["predicted_examples"] = lr * kappa * score_sum
  out["direction_residual"] = out.pop("exact") - out["predicted_examples"]
  out["predicted"] = sum(
    out[name] for name in ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")
  )
  return out


def _one_set(used_spec, optimizer, facts: StepFacts, params, grads, gradient, scored, scalars) -> dict:
  """Columns of one validation set; `used` is <g, u> and `exact` lr <g, P_t G>, both over the scored parameters."""
  lr, kappa = facts.learning_rate, facts.clip_factor
  out = dict.fromkeys(("used", "exact", "unscored", "momentum", "weight_decay"), jnp.float32(0))
  true_scalars = None
  if optimizer.kind == "adam":
    true_scalars = AdamScalars.at(optimizer, facts.count, kappa).stacked()
  for label, g in grads.items():
    val = gradient[label]
    if optimizer.kind == "adam":
      p = directions.preconditioner(optimizer, facts.moments2[label], true_scalars, g)
      momentum = optimizer.b1 / (1 - optimizer.b1) * jnp.sum(facts.moments1[label] * p * val)
      out["momentum"] += lr * momentum
      exact = lr * kappa * jnp.sum(g * p * val)
    else:
      exact = lr * kappa * jnp.sum(g * val)
    out["weight_decay"] += lr * facts.weight_decay * jnp.sum(params[label] * val)
    out["exact" if label in scored else "unscored"] += exact
    if label in scored:
      parts = (val[None], facts.moments2[label], scalars) if used_spec.kind == "adam" else (val[None],)
      out["used"] += jnp.sum(g * directions.form(used_spec, parts, g)[0])
  return out
