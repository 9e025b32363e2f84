"""The columns that add up to a step's predicted change of the validation loss.

With AdamW, -<G, Delta> = examples + momentum + weight decay + unscored + direction residual, where Delta is the update
of the parameters and G the validation gradient. Each column is in nats; positive lowers the validation loss.

K validation sets. Trees are dicts {label: array}.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from maxghost.ghost import directions
from maxghost.ghost.directions import AdamScalars, DirectionSpec
from maxghost.models import platforms
from maxghost.parallel import shardings

COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
  """Adam's state of the step before: m and v as {label: [*parameter]} (None for SGD), and the steps taken."""

  first: dict | None
  second: dict | None
  count: jax.Array


def sums(optimizer: DirectionSpec, moments: Moments, kappa, params: dict, grads: dict, gradients: list, scored) -> dict:
  """Inner products with each validation set's gradient over some parameters, to be added up and passed to `columns`.

  optimizer: what the trainer applies, kind 'adam' or 'sgd'. kappa: the clipping factor inside v_t. gradients: K dicts.
  scored: labels.
  Returns float arrays [K] exact and unscored (<g, P_t G> over the scored and the other parameters), momentum
  (<G, b1 m P_t> / (1 - b1)) and weight_decay (<G, theta>), before the learning rate and the outer clipping factor.
  """
  parts = {"exact": [], "unscored": [], "momentum": [], "weight_decay": []}
  scalars = AdamScalars.at(optimizer, moments.count, kappa).stacked() if optimizer.kind == "adam" else None
  for label, g in grads.items():
    column, arrays = "exact" if label in scored else "unscored", {"weight_decay": params[label]}
    if optimizer.kind == "adam":
      step = directions.preconditioner(optimizer, moments.second[label], scalars, g)
      arrays |= {column: step * g, "momentum": optimizer.b1 / (1 - optimizer.b1) * step * moments.first[label]}
    else:
      arrays[column] = g
    products = partial_products(list(arrays.values()), [gradient[label] for gradient in gradients])
    for name, sums_KP in zip(arrays, products, strict=True):
      parts[name].append(sums_KP)
  # Added up at the end: one small loop for each column and set, not for each parameter.
  whole = lambda found_KP: jnp.stack([jnp.sum(jnp.concatenate(x)) for x in zip(*found_KP, strict=True)])  # noqa: E731
  return {name: whole(found) if found else jnp.zeros(len(gradients), float) for name, found in parts.items()}


def partial_products(left: list, right: list) -> list[list]:
  """[len(left)][len(right)] arrays [P]: parts of the sums over left[i] * right[j], arrays of one shape, in float32 or
  wider."""
  wide = jnp.promote_types(jnp.result_type(*left, *right), jnp.float32)
  pairs = [x.astype(wide) * y.astype(wide) for x in left for y in right]
  layout = shardings.current()
  alone = layout is None or layout.num_devices == 1
  found = _in_one_pass(pairs) if alone and platforms.target() == "cpu" else [jnp.sum(x)[None] for x in pairs]
  return [found[i : i + len(right)] for i in range(0, len(found), len(right))]


def _in_one_pass(arrays: list) -> list:
  """Sums of rows of each array, [P]. XLA's CPU compiler gives every sum a loop of its own, which reads and computes
  again what several have in common; a reduction of several operands is one loop. It adds one by one, so only within
  short rows; and on a mesh it gathers."""
  size = arrays[0].size
  length = size if size <= 1024 else math.gcd(size, 1024)
  if length < 16 < size:
    return [jnp.sum(x)[None] for x in arrays]
  rows = tuple(x.reshape(size // length, length) for x in arrays)
  zeros = tuple(jnp.zeros((), x.dtype) for x in rows)
  add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
  return list(jax.lax.reduce(rows, zeros, add, (1,)))


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


def columns(sums_K: dict, totals, used_K, learning_rate, kappa, weight_decay: float) -> dict:
  """{column: [K]} for one step, in nats.

  sums_K: `sums`. totals: `score_sums`; used_K: <g, u> of each set.
  check_rel_err compares the sum of all scores with <g, u>: 0 up to rounding.
  """
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
