"""One scoring rule per layer type, in a registry that users extend with `@ghost.rule(LayerType)`.

A rule computes a parameter's score from a layer's arguments, its output's cotangent b and the direction u:
s_it = <b_it, d f(x, W)_it / dW . u>. The default uses one forward-mode derivative in the parameter, which is exact for
every layer whose output keeps the example axis first. Dense layers and tables have cheaper forms.

K validation sets, n examples, T positions.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.directions import Direction

RULES: dict[type, "Rule"] = {}


class Rule:
  """How a layer type is probed.

  methods: the methods that use the parameters; each is called with arrays whose leading axis is the example axis.
  second_uses: those that use a table after its lookup, `__call__`. ranks: {parameter: number of axes in one unstacked
  layer}; layer types that are stacked need it (or `rank`). children: submodules with rules of their own.
  """

  methods: tuple[str, ...] = ("__call__",)
  second_uses: tuple[str, ...] = ()
  ranks: ClassVar[Mapping[str, int]] = {}
  children: tuple[str, ...] = ()

  def rank(self, module: Any, name: str) -> int:
    """Number of axes of parameter `name` in one unstacked layer."""
    return self.ranks.get(name, getattr(module, name).ndim)

  def rows(self, module: Any, name: str) -> int:
    """Number of row axes in the matrix view [I, O] of a parameter; 0 where `score` takes no factors."""
    return 0

  def groups(self, module: Any, name: str) -> int:
    """Number of axes before those of `rows` that number matrices with factors of their own."""
    return 0

  def stock(self, module: Any) -> nnx.Module:
    """The module that this rule scores, without its children."""
    alone: Any = nnx.clone(module) if self.children else module
    for name in self.children:
      if hasattr(alone, name):
        setattr(alone, name, None)
    return alone

  def combine(self, twin: Any, out, *args):
    """The layer's value, from that of the stock module and of the children."""
    return out

  def passes(self, twin: Any, method: str, static: tuple) -> Any:
    """A `LayerPasses` of `method` that scores while it computes gradients; None: its VJP, then `score`."""
    return None

  def score(self, call: "Call", name: str, direction: Direction):
    """Score of parameter `name`: [K, *reduced], by `call.reduce`."""
    value = call.values[name]

    def one(u):
      _, tangent = jax.jvp(lambda value: call.apply({**call.values, name: value}), (value,), (u.astype(value.dtype),))
      return call.reduce(tangent, call.cotangent)

    return jnp.stack([one(u) for u in direction.full])


class Call:
  """One use of a layer in the backward pass. memo: values that a rule computes once for all parameters of the layer."""

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
  first. Subclasses of a registered type need their own rule: they may compute something else. Raises ValueError for
  a class that is no Rule, and for what is no layer type or lacks one of the rule's methods.
  """

  def register(cls):
    if not layer_types or not all(isinstance(one, type) for one in (cls, *layer_types)) or not issubclass(cls, Rule):
      raise ValueError(f"ghost.rule of {layer_types} on {cls}: write @ghost.rule(MyLayer) on a class that extends Rule")
    if lacking := [f"{one.__name__}.{name}" for one in layer_types for name in cls.methods if not hasattr(one, name)]:
      raise ValueError(f"{cls.__name__}: methods names {lacking[0]}, which does not exist")
    RULES.update((layer_type, cls()) for layer_type in layer_types)
    return cls

  return register


def find(module: nnx.Module) -> Rule | None:
  """The rule for this module's exact type, or None."""
  return RULES.get(type(module))
