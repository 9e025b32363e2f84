"""The columns that add up to a step's predicted change of the validation loss.

-<G, Delta> = examples + the optimizer's own columns (AdamW: momentum, weight decay) + unscored + direction residual,
where Delta is the update of the parameters and G the validation gradient. Columns are in nats; a positive column lowers
the validation loss.

With `ghost_curvature`, G contains curvature as in the scores. Then the products with G alone are computed too: they
tell which part of the prediction is curvature (`predicted_curvature`), and what G predicts for the step before.

K validation sets. Trees are dicts {label: array}.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.ghost import directions
from maxghost.optimizers import RuleState, UpdateRule
from maxghost.parallel import shardings


def sums(rule: UpdateRule, state: RuleState, parameters: dict, params: dict, grads: dict, gradients, scored) -> dict:
  """Inner products of some parameters with each validation set's gradient, to be summed and passed to `columns`.

  rule, state: of the trainer, before the step. gradients: K dicts, or 2 K: with and without curvature. scored: labels.
  Returns float arrays, one entry per gradient: exact and unscored (<G, P_t g> over the scored and the other
  parameters), each of the rule's own columns, before the learning rate and the outer clipping factor, and last (<G,
  update of the step before>) where the state tells that update.
  """
  recalled = recalls(rule, state)
  names = ("exact", "unscored", *rule.columns, *(("last",) if recalled else ()))
  parts: dict[str, list] = {name: [] for name in names}
  scalars = rule.scalars(state.count, state.clip_factor)
  for label, g in grads.items():
    parameter, kept = parameters[label], state.of(label)
    response = rule.response(parameter, g, kept, scalars)
    arrays: dict[str, Any] = {"exact" if label in scored else "unscored": response.whole(g)}
    arrays |= rule.column_arrays(parameter, params[label], g, kept, response)
    if recalled:
      arrays["last"] = rule.last_update(params[label], kept, state)
    products = partial_products(list(arrays.values()), [gradient[label] for gradient in gradients])
    for name, sums_KP in zip(arrays, products, strict=True):
      parts[name].append(sums_KP)
  # Summed at the end: one small loop for each column and set, not for each parameter.
  whole = lambda found_KP: jnp.stack([jnp.sum(jnp.concatenate(x)) for x in zip(*found_KP, strict=True)])  # noqa: E731
  return {name: whole(found) if found else jnp.zeros(len(gradients), float) for name, found in parts.items()}


def recalls(rule: UpdateRule, state: RuleState) -> bool:
  """Whether the state before a step tells the update of the step before."""
  return state.last_rate is not None and type(rule).last_update is not UpdateRule.last_update


def inner_products(arrays: dict, gradients: list[dict]) -> Any:
  """The inner product with each gradient, summed over the labels of `arrays`."""
  found = [partial_products([x], [gradient[label] for gradient in gradients])[0] for label, x in arrays.items()]
  return sum(jnp.stack([sums_P.sum() for sums_P in of_label]) for of_label in found)


def partial_products(left: list, right: list) -> list[list]:
  """Partial sums [P] of left[i] * right[j], in float32 or wider; all arrays have one shape."""
  wide = jnp.promote_types(jnp.result_type(*left, *right), jnp.float32)
  pairs = [x.astype(wide) * y.astype(wide) for x in left for y in right]
  at_once = shardings.across_devices() is None and shardings.platform() == "cpu"
  found = _in_one_pass(pairs) if at_once else [jnp.sum(x)[None] for x in pairs]
  return [found[i : i + len(right)] for i in range(0, len(found), len(right))]


def _in_one_pass(arrays: list) -> list:
  """Sums of rows of each array, [P], by one reduction with several operands, which XLA's CPU compiler makes one loop.

  Separate sums would be separate loops that repeat common reads and computations. The reduction adds one by one, so
  rows are short. On a mesh it would gather.
  """
  size = arrays[0].size
  length = size if size <= 1024 else math.gcd(size, 1024)
  if length < 16 < size:
    return [jnp.sum(x)[None] for x in arrays]
  rows = tuple(x.reshape(size // length, length) for x in arrays)
  zeros = tuple(jnp.zeros((), x.dtype) for x in rows)
  add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
  return list(jax.lax.reduce(rows, zeros, add, (1,)))


def with_clipped(out: dict, before: dict, after: dict, gradients: list[dict]) -> dict:
  """Adds the column qk_clip [K]: <G, before - after> of the parameters that QK-Clip scaled; gradients as in `sums`."""
  whole = inner_products({label: value - after[label] for label, value in before.items()}, gradients)
  column = whole[: len(out["predicted"])]
  out = out | {"qk_clip": column, "predicted": out["predicted"] + column}
  if "predicted_curvature" in out:
    out["predicted_curvature"] += column - whole[len(column) :]
  return out


def used(scored_params, grads: dict, parts: dict, facts: dict) -> Any:
  """<g, u> over the scored parameters, [K], from the whole gradient or from facts (see `directions.form`)."""
  total = 0.0
  for p in scored_params:
    found = facts[p.label][..., 1] if p.spec.in_backward else directions.products(p, grads[p.label], parts[p.label])
    total = total + found.reshape(-1, found.shape[-1]).sum(0)
  return total


def score_sums(scored_params, scores: dict):
  """(sum, sum of absolute values) of additive scores {label: [*stack, K, n(, T)]}, [K] each."""
  total, size = 0.0, 0.0
  scores = jax.lax.optimization_barrier(scores)  # or XLA sums the scores' own terms once more, in a product's epilogue
  for param in scored_params:
    score = scores[param.label]
    # No reshape to [K, everything]: with layers before rows it would gather the rows of all devices.
    axes = tuple(axis for axis in range(score.ndim) if axis != len(param.stack_shape))
    total, size = total + score.sum(axes), size + jnp.abs(score).sum(axes)
  return total, size


def columns(rule: UpdateRule, sums_K: dict, totals, used_K, learning_rate, clip_factor) -> dict:
  """{column: [K]} of one step in nats, with their sum `predicted`, check_rel_err and prev_predicted.

  check_rel_err compares the sum of all scores with <g, u> and is 0 up to rounding. prev_predicted, if the state tells:
  the drop that this step's gradient predicts for the update of the step before. predicted_curvature: the part of the
  sum that is curvature, if the gradients contain any. sums_K: from `sums`. totals: from `score_sums`. used_K: <g, u> of
  each set.
  """
  score_sum, score_size = totals
  scales = rule.column_scales(learning_rate, clip_factor)
  whole, num_sets = sums_K, len(score_sum)
  sums_K = {name: value[:num_sets] for name, value in whole.items()}
  out = {
    "predicted_examples": learning_rate * clip_factor * score_sum,
    **{name: scales[name] * sums_K[name] for name in rule.columns},
    "unscored": learning_rate * clip_factor * sums_K["unscored"],
    "direction_residual": learning_rate * clip_factor * (sums_K["exact"] - score_sum),
  }
  out["predicted"] = sum(out.values())
  if len(whole["exact"]) > num_sets:
    turned = {name: value - whole[name][-num_sets:] for name, value in sums_K.items()}
    out["predicted_curvature"] = learning_rate * clip_factor * (turned["exact"] + turned["unscored"])
    out["predicted_curvature"] += sum(scales[name] * turned[name] for name in rule.columns)
  if "last" in sums_K:
    out["prev_predicted"] = -whole["last"][-num_sets:]
  out["check_rel_err"] = jnp.abs(score_sum - used_K) / jnp.maximum(score_size, jnp.finfo(score_size.dtype).tiny)
  return out
