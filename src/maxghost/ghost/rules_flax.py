"""Rules for the layers of flax.nnx.

K validation sets, n examples, T positions, I inputs and O outputs of a dense layer, V vocabulary, D features, r rank.
"""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from maxghost.ghost.rules import Rule, rule
from maxghost.models import dense, rounding


def matrix_scores(call, x, b, direction, count: int):
  """<b, x u> for every set: x [..., *I], b [..., *O]; factors of all sets share one product with x and one with b."""
  wide, precision = jnp.promote_types(x.dtype, jnp.float32), rounding.plain(getattr(call.module, "precision", None))

  def along(u):
    if math.prod(u.shape[count:]) <= math.prod(u.shape[:count]):
      return call.reduce(dense.contract(x, u, count, precision, wide), b)
    return call.reduce(dense.contract_transposed(b.astype(x.dtype), u, count, precision, wide), x)

  if direction.full is not None:
    return jnp.stack([along(u.astype(x.dtype)) for u in direction.full])
  inputs, outputs = x.shape[x.ndim - count :], b.shape[x.ndim - count :]
  left_IKr = jnp.moveaxis(direction.left.astype(x.dtype), 0, 1).reshape(*inputs, *direction.left.shape[::2])
  right_OKr = jnp.moveaxis(direction.right.astype(x.dtype), 2, 0).reshape(*outputs, *direction.right.shape[:2])
  x_Kr = dense.contract(x, left_IKr, count, precision, wide)
  return _reduce_sets(call, x_Kr, dense.contract(b.astype(x.dtype), right_OKr, len(outputs), precision, wide))


def _reduce_sets(call, x_Kr, b_Kr):
  """[K, n(, T)]: products summed over the factors' rank and over axes beyond the probe's."""
  product = x_Kr * b_Kr
  return jnp.moveaxis(product.sum(axis=(*range(call.resolution, product.ndim - 2), product.ndim - 1)), -1, 0)


def is_plain(module) -> bool:
  """Whether a dense layer or table multiplies by its weights as JAX does, without a function of the user's."""
  dots = (None, lax.dot_general, dense.dot_general, dense.frozen_dot_general)
  plain = getattr(module, "dot_general", None) in dots and not getattr(module, "dot_general_cls", None)
  return plain and module.promote_dtype is promote_dtype


@rule(nnx.Linear)
class LinearRule(Rule):
  """`nnx.Linear`, y = x W + b: uses x u or b uᵀ, whichever is smaller, or x Q and b Rᵀ for factors u = Q R."""

  ranks: ClassVar = {"kernel": 2, "bias": 1}

  def rows(self, module, name):
    return self.num_inputs(module) if name == "kernel" and is_plain(module) else 0

  def score(self, call, name, direction):
    if not self.rows(call.module, name):
      return super().score(call, name, direction)
    x, b = call.args[0], call.cotangent
    x = x.astype(call.module.dtype or jnp.result_type(x, b))
    inputs = self.num_inputs(call.module)
    x, b = rounding.operands(call.module.precision, x, b, inputs, b.ndim - x.ndim + inputs)
    return matrix_scores(call, x, b, direction, inputs)

  def num_inputs(self, module) -> int:
    return 1


@rule(nnx.LinearGeneral)
class LinearGeneralRule(LinearRule):
  """`nnx.LinearGeneral` over trailing axes: kernel [*I, *O], bias [*O]."""

  def rank(self, module: Any, name):
    if tuple(module.axis) != tuple(range(-len(module.axis), 0)) or module.batch_axis:
      given = f"axis={module.axis}, batch_axis={dict(module.batch_axis)}"
      raise ValueError(f"LinearGeneral with {given}: only trailing axes have a rule")
    return len(module.out_features) + (len(module.in_features) if name == "kernel" else 0)

  def num_inputs(self, module):
    return len(module.in_features)


@rule(nnx.Embed)
class EmbedRule(Rule):
  """`nnx.Embed`: gathered rows, and `attend` for a tied output. One direction gives the cross terms of a tied table."""

  methods = ("__call__", "attend")
  second_uses: tuple[str, ...] = ("attend",)
  ranks: ClassVar = {"embedding": 2}

  def rows(self, module, name):
    return int(is_plain(module) and module.num_embeddings > 1)  # a single row is that of every id

  def score(self, call, name, direction):
    if not self.rows(call.module, name):
      return super().score(call, name, direction)
    x, b = call.args[0], call.cotangent
    if call.method == "attend":  # x = h [..., D], cotangent delta [..., V]: the table is the weight of h Eᵀ
      b = b.astype(call.module.dtype)
      x, b = rounding.operands(getattr(call.module, "precision", None), x, b)
      return matrix_scores(call, b, x, direction, 1)
    if direction.full is not None:  # ids outside of the table have no part in its gradient
      return jnp.stack([call.reduce(jnp.take(u_VD, x, axis=0, fill_value=0), b) for u_VD in direction.full])
    # <b, Q[id] R> = <b Rᵀ, Q[id]> for every set: left [K, V, r], right [K, r, D]
    wide = jnp.promote_types(b.dtype, jnp.float32)
    b_Kr = dense.contract(b, jnp.moveaxis(direction.right.astype(b.dtype), 2, 0), 1, "highest", wide)
    left_Kr = jnp.take(jnp.moveaxis(direction.left, 0, 1), x, axis=0, fill_value=0)
    return _reduce_sets(call, left_Kr.astype(wide), b_Kr)


@rule(nnx.RMSNorm, nnx.LayerNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.BatchNorm, nnx.PReLU)
class NormRule(Rule):
  """Scale and bias over the features, [D], a slope []. Statistics never span examples: a BatchNorm that updates its own
  is refused (`probed`)."""

  ranks: ClassVar = {"scale": 1, "bias": 1, "negative_slope": 0}


@rule(nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
class KernelRule(Rule):
  """Einsums and convolutions: linear in the kernel, so the tangent is the same operation with u in its place."""

  def rank(self, module: Any, name):
    return len(module.kernel_shape) if name == "kernel" else len(getattr(module, "bias_shape", "O"))


@rule(nnx.LoRA)
class LoRARule(Rule):
  """The low-rank branch x A B; a wrapped `base_module` has its own rule.

  A: <b Bᵀ, x u_A>, B: <b, (x A) u_B>, both by the tangent of the branch. Source: Hu et al., arXiv:2106.09685.
  """

  ranks: ClassVar = {"lora_a": 2, "lora_b": 2}
  children = ("base_module",)

  def combine(self, twin: Any, out, *args):
    return out if twin.base_module is None else out + twin.base_module(*args)


@rule(nnx.LoRALinear)
class LoRALinearRule(LinearRule):
  """A dense layer plus a LoRA branch, which is a child with its own rule."""

  children = ("lora",)

  def stock(self, module: Any):
    alone: Any = super().stock(module)
    alone.__class__ = nnx.Linear
    return alone

  def combine(self, twin: Any, out, *args):
    return out + twin.lora(*args)
