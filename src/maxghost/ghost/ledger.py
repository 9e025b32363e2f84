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

COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
  """Adam's state of the step before: m and v as {label: [*parameter]} (None for SGD), and the steps taken."""

  first: dict | None
  second: dict | None
  count: jax.Array


def sums(optimizer: DirectionSpec, moments: Moments, kappa, params: dict, grads: dict, gradient: dict, scored) -> dict:
  """Inner products of one validation set over some parameters, to be added up and passed to `columns`.

  optimizer: what the trainer applies, kind 'adam' or 'sgd'. kappa: the clipping factor inside v_t. scored: labels.
  Returns float scalars exact and unscored (<g, P_t G> over the scored and the other parameters), momentum
  (<G, b1 m P_t> / (1 - b1)) and weight_decay (<G, theta>), before the learning rate and the outer clipping factor.
  """
  out = dict.fromkeys(("exact", "unscored", "momentum", "weight_decay"), jnp.zeros((), float))
  scalars = AdamScalars.at(optimizer, moments.count, kappa).stacked() if optimizer.kind == "adam" else None
  for label, g in grads.items():
    val = gradient[label].astype(jnp.promote_types(g.dtype, jnp.float32))
    if optimizer.kind == "adam":
      val_step = directions.preconditioner(optimizer, moments.second[label], scalars, g) * val
      out["momentum"] += optimizer.b1 / (1 - optimizer.b1) * jnp.sum(moments.first[label] * val_step)
    else:
      val_step = val
    out["exact" if label in scored else "unscored"] += jnp.sum(g * val_step)
    out["weight_decay"] += jnp.sum(params[label] * val)
  return out


def used(scored_params, grads: dict, parts: dict, facts: dict):
  """<g, u> over the scored parameters, [K]: from the whole gradient, or from the facts that kind 'adam' reports."""
  total = 0.0
  for param in scored_params:
    if param.spec.direction.kind == "adam":
      total = total + facts[param.label][..., 1].reshape(-1, facts[param.label].shape[-2]).sum(0)
      continue
    if len(param.stack_shape) > 1:
      raise ValueError(f"{param.label} is stacked {len(param.stack_shape)} times; one layer axis is supported")

    def one(arrays, spec=param.spec):
      g, *arrays = arrays
      direction, _ = directions.form(spec, arrays, g)
      return directions.along(spec, direction, g)

    arrays = (grads[param.label], *parts[param.label])
    if param.stack_shape and param.spec.groups:  # layer by layer: a device needs the whole factors of all its experts
      value = jax.lax.map(one, arrays).sum(0)
    else:
      value = jax.vmap(one)(arrays).sum(0) if param.stack_shape else one(arrays)
    total = total + value
  return total


def score_sums(scored_params, scores: dict):
  """(sum, sum of absolute values) of all additive scores {label: [*stack, K, n(, T)]} for every set, [K] each."""
  total, size = 0.0, 0.0
  for param in scored_params:
    score = scores[param.label]
    # Not by way of [K, everything]: layers before rows, that would gather the rows of all devices.
    axes = tuple(axis for axis in range(score.ndim) if axis != len(param.stack_shape))
    total, size = total + score.sum(axes), size + jnp.abs(score).sum(axes)
  return total, size


def columns(set_sums: list[dict], totals, used_K, learning_rate, kappa, weight_decay: float) -> dict:
  """{column: [K]} for one step, in nats.

  set_sums: `sums` of each validation set. totals: `score_sums`; used_K: <g, u> of each set.
  check_rel_err compares the sum of all scores with <g, u>: 0 up to rounding.
  """
  sums_K = {name: jnp.stack([s[name] for s in set_sums]) for name in set_sums[0]}
  score_sum, score_size = totals
  out = {
    "predicted_examples": learning_rate * kappa * score_sum,
    "momentum": learning_rate * sums_K["momentum"],
    "weight_decay": learning_rate * weight_decay * sums_K["weight_decay"],
    "unscored": learning_rate * kappa * sums_K["unscored"],
    "direction_residual": learning_rate * kappa * (sums_K["exact"] - score_sum),
  }
  out["predicted"] = sum(out[name] for name in COLUMNS)
  out["check_rel_err"] = jnp.abs(score_sum - used_K) / jnp.maximum(score_size, jnp.finfo(score_size.dtype).tiny)
  return out
