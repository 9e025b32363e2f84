"""Checks that an optimizer of the user's own tells its whole step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxghost.config import ConfigError
from maxghost.optimizers.base import Parameter, Response, UpdateRule, by_label
from maxghost.parallel.shardings import slash_path

_RATE, _LARGE = 0.1, 1e4
_TOLERANCE = 1e-2  # relative; wide enough for bfloat16 state


def check_account(rule: UpdateRule, params: nnx.State, parameters: Mapping[str, Parameter]) -> None:
  """Raises ConfigError if `response` and `column_arrays` do not add up to the step of `transformation`.

  The smallest parameter of each rank and `Matrix` takes two steps along random gradients, since the first one starts
  with empty state; a second time with large values, beside which a small weight decay shows. params: of the model,
  arrays or shapes. parameters: by label.
  """
  smallest = {}
  for path, variable in sorted(nnx.to_flat_state(params), key=lambda item: item[1].get_value().size):
    smallest.setdefault((variable.get_value().ndim, parameters[slash_path(path)].matrix), (path, variable))

  def random(seed: int, size: float = 1.0) -> nnx.State:
    drawn, made = np.random.default_rng(seed), []  # JAX would compile a program for each shape
    for path, variable in smallest.values():
      normal = size * drawn.standard_normal(variable.get_value().shape)
      made.append((path, variable.replace(jnp.asarray(normal, float))))
    return nnx.from_flat_state(made)

  with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
    for size in (1.0, _LARGE):
      _check_step(rule, random(0, size), random(1), random(2), parameters)


def _check_step(rule: UpdateRule, values, before, gradients, parameters: Mapping[str, Parameter]) -> None:
  """Checks the step along `gradients` that follows one along `before`."""
  rule = rule.of_params(values)
  step = rule.transformation(optax.constant_schedule(_RATE))
  _, state = step.update(before, step.init(values), values)
  moved, _ = step.update(gradients, state, values)
  kept, scales = rule.read(state, count=1), rule.column_scales(_RATE, 1.0)
  if {*scales} != {*rule.columns}:
    given = f"{(*scales,)}, not a factor for each of {rule.columns}"
    raise ConfigError(f"opt_type={rule.name}: column_scales gives {given}")
  value_of, gradient_of = by_label(values), by_label(gradients)
  for label, delta in by_label(moved).items():
    parameter, g, arrays = parameters[label], gradient_of[label], kept.of(label)
    response: Any = rule.response(parameter, g, arrays, rule.scalars(kept.count, 1.0))
    if not issubclass(type(response), Response):
      raise ConfigError(f"opt_type={rule.name}: response gives a {type(response).__name__}, not a Response")
    x, moved_g = by_label(before)[label], response.apply(g)
    apart = abs(jnp.vdot(response.transpose(x), g) - jnp.vdot(x, moved_g))
    if not apart <= _TOLERANCE * _norm(x) * _norm(moved_g) / math.sqrt(g.size):  # of a random product's usual size
      raise ConfigError(f"opt_type={rule.name}: {type(response).__name__}.transpose is not that of its apply")
    columns = rule.column_arrays(parameter, value_of[label], g, arrays, response)
    if not issubclass(type(columns), Mapping):
      raise ConfigError(f"opt_type={rule.name}: column_arrays gives a {type(columns).__name__}, not a dict")
    if wrong := [name for name, x in columns.items() if name not in scales or jnp.shape(x) != g.shape]:
      given = f"'{wrong[0]}' of shape {jnp.shape(columns[wrong[0]])} for {label}, not {(*scales,)} of shape {g.shape}"
      raise ConfigError(f"opt_type={rule.name}: column_arrays gives {given}")
    told = _RATE * response.whole(g) + sum(scales[name] * x for name, x in columns.items())
    if not _norm(told + delta) <= _TOLERANCE * _norm(delta):
      problem = f"response and column_arrays do not add up to the step of transformation for {label}"
      raise ConfigError(f"opt_type={rule.name}: {problem}, so scores would be of another optimizer")


def _norm(x) -> float:
  return float(jnp.linalg.norm(jnp.ravel(x)))
