"""One scoring rule per layer type, in a registry that users extend with `@ghost.rule(LayerType)`.

A rule says which of a layer's methods use its parameters and how one parameter's score is computed from the
arguments, the output's cotangent b and the direction u: s_it = <b_it, d f(x, W)_it / dW . u>. The default does that by
one forward-mode derivative of the layer in the parameter, exact for every layer whose output keeps the example axis
first; dense layers and tables have cheaper forms of the same number.

K validation sets, n examples, T positions, I inputs and O outputs of a dense layer, V vocabulary, D features.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.models import dense

_RULES: dict[type, "Rule"] = {}


class Rule:
  """How a layer type is probed.

  methods: the methods that use the parameters; each is called with arrays whose leading axis is the example axis.
  """

  methods: tuple[str, ...] = ("__call__",)

  def rank(self, module: nnx.Module, name: str) -> int:
    """Number of axes of parameter `name` in one unstacked layer. Layer types that are stacked must say it."""
    return getattr(module, name).ndim

  def score(self, call: "Call", name: str, u_K):
    """Score of parameter `name`: [K, *reduced] with `call.reduce`. u_K: [K, *parameter]."""

    def one(u):
      _, tangent = jax.jvp(lambda value: call.apply({**call.values, name: value}), (call.values[name],), (u,))
      return call.reduce(tangent, call.cotangent)

    return jax.lax.map(one, u_K.astype(call.values[name].dtype)) if u_K.shape[0] > 1 else one(u_K[0].astype(call.values[name].dtype))[None]


class Call:
  """One use of a layer in the backward pass: its arguments, its output's cotangent, and how scores are reduced."""

  def __init__(self, module, method, values, args, cotangent, apply, resolution):
    self.module, self.method, self.values, self.args = module, method, values, args
    self.cotangent, self.apply, self.resolution = cotangent, apply, resolution

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


def find(module: nnx.Module) -> Rule | None:
  """The rule for this module's exact type, or None."""
  return _RULES.get(type(module))


def layer_types() -> list[str]:
  return sorted(t.__name__ for t in _RULES)


class _DenseRule(Rule):
  """y = x W + b over trailing axes: the product with u that has the smaller result, x u or b uᵀ."""

  def score(self, call, name, u_K):
    if name != "kernel":
      return super().score(call, name, u_K)
    (x,) = call.args
    b, count = call.cotangent, self.num_inputs(call.module)
    dtype = call.module.dtype or jnp.result_type(x, u_K)
    x, u_K = x.astype(dtype), u_K.astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    inputs, outputs = math.prod(u_K.shape[1 : 1 + count]), math.prod(u_K.shape[1 + count :])
    scores = []
    for u in u_K:
      if outputs <= inputs:
        scores.append(call.reduce(dense.contract(x, u, count, out_dtype=wide), b))
      else:
        scores.append(call.reduce(dense.contract_transposed(b, u, count, out_dtype=wide), x))
    return jnp.stack(scores)

  def num_inputs(self, module) -> int:
    return 1


@rule(nnx.Linear)
class LinearRule(_DenseRule):
  """`nnx.Linear`: kernel [I, O], bias [O]."""

  def rank(self, module, name):
    return 2 if name == "kernel" else 1


@rule(nnx.LinearGeneral)
class LinearGeneralRule(_DenseRule):
  """`nnx.LinearGeneral` over trailing axes: kernel [*I, *O], bias [*O]."""

  def rank(self, module, name):
    if tuple(module.axis) != tuple(range(-len(module.axis), 0)) or module.batch_axis:
      raise ValueError(f"LinearGeneral with axis={module.axis}, batch_axis={dict(module.batch_axis)}: only trailing axes have a rule")
    return len(module.out_features) + (len(module.in_features) if name == "kernel" else 0)

  def num_inputs(self, module):
    return len(module.in_features)


@rule(nnx.Embed)
class EmbedRule(Rule):
  """`nnx.Embed`: gathered rows, and `attend` for a tied output. Both uses share one direction, so that the cross terms
  of a tied table come out by themselves."""

  methods = ("__call__", "attend")

  def rank(self, module, name):
    return 2

  def score(self, call, name, u_K):
    (x,) = call.args
    if call.method == "attend":
      wide = jnp.promote_types(u_K.dtype, jnp.float32)
      u_K = u_K.astype(call.module.dtype)
      return jnp.stack([
        call.reduce(dense.contract(call.cotangent, u_VD, 1, out_dtype=wide), x) for u_VD in u_K
      ])
    return jnp.stack([call.reduce(jnp.take(u_VD, x, axis=0), call.cotangent) for u_VD in u_K])


@rule(nnx.RMSNorm, nnx.LayerNorm)
class NormRule(Rule):
  """Scale and bias over the features, [D]."""

  def rank(self, module, name):
    return 1
