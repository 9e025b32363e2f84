"""Checks that an optimizer of the user's own tells its whole step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.numpy.linalg import norm

from maxghost.config import ConfigError
from maxghost.optimizers.base import Response, RuleState, UpdateRule, by_label
from maxghost.parallel.shardings import slash_path

_RATE, _LARGE = 0.1, 1e4
_TOLERANCE = 1e-2  # relative; wide enough for bfloat16 state


def check_account(rule: UpdateRule, ledger: UpdateRule, params: nnx.State, parameters: Mapping, marginal: bool) -> None:
  """Raises ConfigError if what `ledger`, the rule or its `path`, says is not the step of `rule.transformation`.

  The smallest parameter of each rank and `Matrix` takes two steps along random gradients, first from empty state, then
  clipped; again with large values, beside which a small weight decay shows. params: arrays or shapes of the model.
  parameters: {label: Parameter}. marginal: whether the rule's `marginal` must be the step's derivative.
  """
  smallest, credit = {}, rule.marginal() if marginal else None
  for path, variable in sorted(nnx.to_flat_state(params), key=lambda item: item[1].get_value().size):
    smallest.setdefault((variable.get_value().ndim, parameters[slash_path(path)].matrix), (path, variable))

  def random(seed: int, size: float = 1.0) -> nnx.State:
    drawn = np.random.default_rng(seed)  # JAX would compile a program for each shape
    normal = {path: size * drawn.standard_normal(v.get_value().shape) for path, v in smallest.values()}
    return nnx.from_flat_state([(path, v.replace(jnp.asarray(normal[path], float))) for path, v in smallest.values()])

  with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
    for size, clip_factor in ((1.0, 0.5), (_LARGE, 1.0)):
      _check_step(rule, ledger, credit, random(0, size), random(1), random(2), parameters, clip_factor)


def _check_step(rule, ledger, credit, values, before, gradients, parameters, clip_factor: float) -> None:
  """Checks the second of two steps, along `before` and along `gradients`, which are clipped. parameters: by label."""
  step = rule.of_params(values).transformation(optax.constant_schedule(_RATE))
  start, (values, before, gradients) = step.init(values), map(nnx.as_pure, (values, before, gradients))
  _, state = step.update(before, nnx.as_pure(start), values)  # as nnx.Optimizer calls them
  clipped = jax.tree.map(lambda g: clip_factor * g, gradients)
  moved, state_after = step.update(clipped, state, values)
  derivative = by_label(jax.jvp(lambda g: step.update(g, state, values)[0], (clipped,), (before,))[1]) if credit else {}
  kept, scales = ledger.read(state, count=1), ledger.column_scales(_RATE, clip_factor)
  after = RuleState(ledger.read(state_after, count=2).arrays, 2, last_rate=_RATE)
  if {*scales} != {*ledger.columns}:
    given = f"{(*scales,)}, not a factor for each of {ledger.columns}"
    raise ConfigError(f"opt_type={rule.name}: column_scales gives {given}")
  value_of, gradient_of = by_label(values), by_label(gradients)
  for label, delta in by_label(moved).items():
    parameter, g, arrays = parameters[label], gradient_of[label], kept.of(label)
    rules, x = [one for one in (ledger, credit) if one], by_label(before)[label]
    responses: Any = [one.response(parameter, g, arrays, one.scalars(kept.count, clip_factor)) for one in rules]
    for one, response in zip(rules, responses, strict=True):
      _check_response(one, response, x, g)
    columns = ledger.column_arrays(parameter, value_of[label], g, arrays, responses[0])
    if not issubclass(type(columns), Mapping):
      raise ConfigError(f"opt_type={rule.name}: column_arrays gives a {type(columns).__name__}, not a dict")
    if wrong := [name for name, x in columns.items() if name not in scales or jnp.shape(x) != g.shape]:
      given = f"'{wrong[0]}' of shape {jnp.shape(columns[wrong[0]])} for {label}, not {(*scales,)} of shape {g.shape}"
      raise ConfigError(f"opt_type={rule.name}: column_arrays gives {given}")
    told = _RATE * clip_factor * responses[0].whole(g) + sum(scales[name] * x for name, x in columns.items())
    if not norm(told + delta) <= _TOLERANCE * norm(delta):
      problem = f"response and column_arrays do not add up to the step of transformation for {label}"
      raise ConfigError(f"opt_type={rule.name}: {problem}, so scores would be of another optimizer")
    if credit:
      apart = norm(-_RATE * responses[1].apply(x) - derivative[label])
      if not apart <= _TOLERANCE * norm(derivative[label]):
        problem = f"the response of marginal is not the derivative of the step of transformation for {label}"
        raise ConfigError(f"opt_type={rule.name}: {problem}")
    last = np.asarray(ledger.last_update(value_of[label] + delta, after.of(label), after), float)  # of None: NaN
    tells, fits = type(ledger).last_update is not UpdateRule.last_update, last.shape == g.shape
    if tells and not (fits and norm(last - delta) <= _TOLERANCE * norm(delta)):
      raise ConfigError(f"opt_type={rule.name}: last_update is not the step of transformation for {label}")


def _check_response(rule: UpdateRule, response: Any, x, g) -> None:
  """Checks the `transpose` of a response, and what its rule says of it. x, g: random arrays."""
  kind = type(response)
  if not issubclass(kind, Response):
    raise ConfigError(f"opt_type={rule.name}: response gives a {kind.__name__}, not a Response")
  moved_g, odd = response.apply(g), x > 0
  apart = abs(jnp.vdot(response.transpose(x), g) - jnp.vdot(x, moved_g))
  if not apart <= _TOLERANCE * norm(x) * norm(moved_g) / math.sqrt(g.size):  # of a random product's usual size
    raise ConfigError(f"opt_type={rule.name}: {kind.__name__}.transpose is not that of its apply")
  told = response.apply(odd * g) + ~odd * moved_g if rule.elementwise else moved_g
  for flag, told_g in (("identity", g), ("elementwise", told)):
    if getattr(rule, flag) and not norm(told_g - moved_g) <= _TOLERANCE * norm(moved_g):
      raise ConfigError(f"opt_type={rule.name}: {flag}=True, but {kind.__name__}.apply is not; set {flag} = False")
