"""One scoring rule per layer type, in a registry that users extend with `@ghost.rule(LayerType)`.

A rule says which of a layer's methods use its parameters and how one parameter's score is computed from the
arguments, the output's cotangent b and the direction u: s_it = <b_it, d f(x, W)_it / dW . u>. The default does that by
one forward-mode derivative of the layer in the parameter, exact for every layer whose output keeps the example axis
first; dense layers and tables have cheaper forms of the same number.

K validation sets, n examples, T positions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.directions import Direction

_RULES: dict[type, "Rule"] = {}


class Rule:
  """How a layer type is probed.

  methods: the methods that use the parameters; each is called with arrays whose leading axis is the example axis.
  """

  methods: tuple[str, ...] = ("__call__",)

  def rank(self, module: nnx.Module, name: str) -> int:
    """Number of axes of parameter `name` in one unstacked layer. Layer types that are stacked must say it."""
    return getattr(module, name).ndim

  def rows(self, module: nnx.Module, name: str) -> int:
    """Axes of the rows of the matrix view [I, O] of a parameter whose `score` takes factors; 0 where it does not."""
    return 0

  def groups(self, module: nnx.Module, name: str) -> int:
    """Axes before those of `rows` that number matrices of their own, each with factors of its own."""
    return 0

  def stock(self, module: nnx.Module) -> nnx.Module:
    """The module that computes what this rule scores, without children that are scored on their own."""
    return module

  def combine(self, twin: nnx.Module, out, *args):
    """The layer's value from the stock module's and the children's."""
    return out

  def score(self, call: "Call", name: str, direction: Direction):
    """Score of parameter `name`: [K, *reduced], by `call.reduce`."""
    value = call.values[name]

    def one(u):
      _, tangent = jax.jvp(lambda value: call.apply({**call.values, name: value}), (value,), (u.astype(value.dtype),))
      return call.reduce(tangent, call.cotangent)

    return jnp.stack([one(u) for u in direction.full])


class Call:
  """One use of a layer in the backward pass: its arguments, its output's cotangent, and how scores are reduced.

  memo: what a rule computes once for all parameters of the layer.
  """

  def __init__(self, module, method, values, args, cotangent, apply, resolution):
    self.module, self.method, self.values, self.args = module, method, values, args
    self.cotangent, self.apply, self.resolution = cotangent, apply, resolution
    self.memo: dict = {}

  def reduce(self, left, right):
    """Elementwise product summed to the probe's axes, [n] or [n, T], accumulated in float32 or wider."""
    wide = jnp.promote_types(jnp.result_type(left, right), jnp.float32)
    product = left.astype(wide) * right.astype(wide)
    return product.sum(axis=tuple(range(self.resolution, product.ndim)))


def rule(*layer_types: type) -> Callable:
  """Registers a `Rule` class for layer types: `@ghost.rule(MyLayer) class MyRule(ghost.Rule): ...`.

  An empty class body is a complete rule for a layer whose `__call__(x)` takes and returns arrays with the example axis
  first. Subclasses of a registered type need their own rule: they may compute something else.
  """

  def register(cls):
    for layer_type in layer_types:
      _RULES[layer_type] = cls()
    return cls

  return register


def of(layer_type: type) -> "Rule":
  """The rule registered for exactly this type; KeyError without one."""
  return _RULES[layer_type]


def find(module: nnx.Module) -> Rule | None:
  """The rule for this module's exact type, or None."""
  return _RULES.get(type(module))


def layer_types() -> list[str]:
  return sorted(t.__name__ for t in _RULES)
