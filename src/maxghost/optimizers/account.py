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
from maxghost.optimizers.base import Parameter, Response, RuleState, UpdateRule, by_label
from maxghost.parallel.shardings import slash_path

_RATE, _LARGE = 0.1, 1e4
_TOLERANCE = 1e-2  # relative; wide enough for bfloat16 state


def check_account(rule: UpdateRule, params: nnx.State, parameters: Mapping[str, Parameter], ledger: UpdateRule) -> None:
  """Raises ConfigError if what `ledger`, the rule or its `path`, says is not the step of `rule.transformation`.

  The smallest parameter of each rank and `Matrix` takes two steps along random gradients, first from empty state, then
  clipped; again with large values, beside which a small weight decay shows. params: arrays or shapes of the model.
  """
  smallest = {}
  for path, variable in sorted(nnx.to_flat_state(params), key=lambda item: item[1].get_value().size):
    smallest.setdefault((variable.get_value().ndim, parameters[slash_path(path)].matrix), (path, variable))

  def random(seed: int, size: float = 1.0) -> nnx.State:
    drawn = np.random.default_rng(seed)  # JAX would compile a program for each shape
    normal = {path: size * drawn.standard_normal(v.get_value().shape) for path, v in smallest.values()}
    return nnx.from_flat_state([(path, v.replace(jnp.asarray(normal[path], float))) for path, v in smallest.values()])

  with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
    for size, clip_factor in ((1.0, 0.5), (_LARGE, 1.0)):
      _check_step(rule, ledger, random(0, size), random(1), random(2), parameters, clip_factor)


def _check_step(rule: UpdateRule, ledger: UpdateRule, values, before, gradients, parameters, clip_factor: float):
  """Checks the second of two steps, along `before` and along `gradients`, which are clipped. parameters: by label."""
  step = rule.of_params(values).transformation(optax.constant_schedule(_RATE))
  _, state = step.update(before, step.init(values), values)
  moved, state_after = step.update(jax.tree.map(lambda g: clip_factor * g, gradients), state, values)
  kept, scales = ledger.read(state, count=1), ledger.column_scales(_RATE, clip_factor)
  after = RuleState(ledger.read(state_after, count=2).arrays, 2, last_rate=_RATE)
  if {*scales} != {*ledger.columns}:
    given = f"{(*scales,)}, not a factor for each of {ledger.columns}"
    raise ConfigError(f"opt_type={rule.name}: column_scales gives {given}")
  value_of, gradient_of = by_label(values), by_label(gradients)
  for label, delta in by_label(moved).items():
    parameter, g, arrays = parameters[label], gradient_of[label], kept.of(label)
    response: Any = ledger.response(parameter, g, arrays, ledger.scalars(kept.count, clip_factor))
    if not issubclass(type(response), Response):
      raise ConfigError(f"opt_type={rule.name}: response gives a {type(response).__name__}, not a Response")
    x, moved_g = by_label(before)[label], response.apply(g)
    apart = abs(jnp.vdot(response.transpose(x), g) - jnp.vdot(x, moved_g))
    if not apart <= _TOLERANCE * norm(x) * norm(moved_g) / math.sqrt(g.size):  # of a random product's usual size
      raise ConfigError(f"opt_type={rule.name}: {type(response).__name__}.transpose is not that of its apply")
    columns = ledger.column_arrays(parameter, value_of[label], g, arrays, response)
    if not issubclass(type(columns), Mapping):
      raise ConfigError(f"opt_type={rule.name}: column_arrays gives a {type(columns).__name__}, not a dict")
    if wrong := [name for name, x in columns.items() if name not in scales or jnp.shape(x) != g.shape]:
      given = f"'{wrong[0]}' of shape {jnp.shape(columns[wrong[0]])} for {label}, not {(*scales,)} of shape {g.shape}"
      raise ConfigError(f"opt_type={rule.name}: column_arrays gives {given}")
    told = _RATE * clip_factor * response.whole(g) + sum(scales[name] * x for name, x in columns.items())
    if not norm(told + delta) <= _TOLERANCE * norm(delta):
      problem = f"response and column_arrays do not add up to the step of transformation for {label}"
      raise ConfigError(f"opt_type={rule.name}: {problem}, so scores would be of another optimizer")
    last = np.asarray(ledger.last_update(value_of[label] + delta, after.of(label), after), float)  # of None: NaN
    tells, fits = type(ledger).last_update is not UpdateRule.last_update, last.shape == g.shape
    if tells and not (fits and norm(last - delta) <= _TOLERANCE * norm(delta)):
      raise ConfigError(f"opt_type={rule.name}: last_update is not the step of transformation for {label}")
