"""Rules for the own layer types of `models`: experts and attention sinks.

K validation sets, n examples, T positions, N = n T tokens, E experts, R rows (tokens sorted by expert, once for each of
their experts), I inputs and O outputs of an expert's matrix, H heads, h head width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.rules import Rule, rule
from maxghost.models import attention_ops, moe
from maxghost.models.attention import SelfAttention
from maxghost.models.grouped_matmul import product, product_transposed
from maxghost.models.parts import gated


@rule(moe.RoutedMoe)
class RoutedMoeRule(Rule):
  """Expert matrices and biases. A row's share of <grad_W loss_i, u> is <g_R, x_R u_e> with e its expert; rows are
  followed back to their token. The router is a dense layer with the rule of one.

  A direction of any rank is used in full here: factors of a stack of small matrices would save little.
  """

  methods = ("experts",)

  def rank(self, module, name):
    return 2 if name.endswith("_bias") else 3

  def stock(self, module):
    alone = nnx.clone(module)
    alone.gate = None
    return alone

  def score(self, call, name, direction):
    if not call.module.sparse:
      return super().score(call, name, direction)
    if "use" not in call.memo:
      call.memo["use"] = _use(call)
    rows, used = call.memo["use"]
    x_RI, g_RO = used[name.removesuffix("_bias")]
    scores = []
    for u in direction.full:
      u = u.astype(g_RO.dtype)
      along_RO = rows.of_expert(u) if name.endswith("_bias") else _along(call, x_RI, u, rows)
      wide = jnp.promote_types(g_RO.dtype, jnp.float32)
      token_N = rows.sums((along_RO.astype(wide) * g_RO.astype(wide)).sum(-1))
      score_nT = token_N.reshape(call.cotangent.shape[:2])
      scores.append(score_nT if call.resolution == 2 else score_nT.sum(1))
    return jnp.stack(scores)


def _along(call, x_RI, u_EIO, rows):
  return product(x_RI, u_EIO, rows.sizes_E, call.module.precision)


def _use(call):
  """(rows, {matrix: (its input x_RI, the cotangent of its output g_RO)}): the layer's own pass once more, up to the
  last product, and back."""
  module, (x_nTD, index_nTk, weight_nTk), params = call.module, call.args, call.values
  rows = moe.Rows.sort(index_nTk, module.num_experts)
  x_RD = rows.take(x_nTD.reshape(-1, x_nTD.shape[-1])).astype(module.dtype)
  branches = module.branch_rows(params, x_RD, rows)
  h_RF, pull = jax.vjp(lambda branches: gated(branches, module.activations, module.limit), branches)
  weight_R = weight_nTk.reshape(-1)[rows.order_R].astype(h_RF.dtype)
  b_ND = call.cotangent.reshape(-1, call.cotangent.shape[-1]).astype(h_RF.dtype)
  g_RD = rows.take(b_ND) * weight_R[:, None]
  (g_branches,) = pull(product_transposed(g_RD, params["wo"].astype(module.dtype), rows.sizes_E, module.precision))
  used = {name: (x_RD, g_RF) for name, g_RF in zip(module.branches, g_branches, strict=True)}
  return rows, used | {"wo": (h_RF, g_RD)}


@rule(SelfAttention)
class AttentionSinkRule(Rule):
  """`sinks` [H]: the gradient of a copy of them at every position. The projections have rules of their own."""

  methods = ("attend",)

  def rank(self, module, name):
    return 1

  def stock(self, module):
    alone = nnx.clone(module)
    for name in ("query", "key", "value", "out", "query_norm", "key_norm"):
      if hasattr(alone, name):
        setattr(alone, name, None)
    return alone

  def score(self, call, name, direction):
    q_nTHh, k_nTKh, v_nTKh, segments = call.args
    settings = {"kernel": call.module.kernel, "window": call.module.window}
    sinks_H = call.values["sinks"]
    sinks_nTH = jnp.broadcast_to(sinks_H.astype(jnp.promote_types(sinks_H.dtype, jnp.float32)), q_nTHh.shape[:3])
    _, pull = jax.vjp(
      lambda sinks: attention_ops.attend(q_nTHh, k_nTKh, v_nTKh, segments, sinks_H=sinks, **settings), sinks_nTH
    )
    (gradient_nTH,) = pull(call.cotangent)
    return jnp.stack([call.reduce(gradient_nTH, jnp.broadcast_to(u_H, sinks_nTH.shape)) for u_H in direction.full])
