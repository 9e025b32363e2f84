"""Rules for the layer types of `models`: experts and attention sinks.

K validation sets, n examples, T positions, N = n T tokens, E experts, R rows (tokens sorted by expert, once for each of
their experts), I inputs and O outputs of an expert's matrix, r rank, H heads, h head width.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxghost.ghost.directions import Direction
from maxghost.ghost.rules import Rule, rule
from maxghost.models import attention_ops, expert_parallel, moe
from maxghost.models.attention import SelfAttention
from maxghost.models.grouped_matmul import product, product_transposed
from maxghost.models.layers import gated


@rule(moe.RoutedMoe)
class RoutedMoeRule(Rule):
  """Expert matrices and biases.

  A row's share of <grad_W loss_i, u> is <g_R, x_R u_e> with e its expert, or <g_R R_eᵀ, x_R Q_e> for factors
  u_e = Q_e R_e. Rows are mapped back to their tokens. The router is a dense layer with its own rule.
  """

  methods = ("experts",)

  def rank(self, module: Any, name):
    return 2 if name.endswith("_bias") else 3

  def rows(self, module, name):
    return 0 if name.endswith("_bias") else 1

  def groups(self, module, name):
    return 0 if name.endswith("_bias") else 1

  def stock(self, module: Any):
    alone: Any = nnx.clone(module)
    alone.gate = None
    return alone

  def score(self, call, name, direction):
    if not call.module.sparse:
      return super().score(call, name, direction if direction.left is None else _whole(direction))
    split = expert_parallel.find(call.module, call.args[0].shape)
    if "use" not in call.memo:
      x, index, weight = call.args
      whole = (call.module, call.values, x, index, weight, call.cotangent)
      call.memo["use"] = _use(*whole) if split is None else _use_on_mesh(call, split)
    rows, used = call.memo["use"]
    x_RI, g_RO = used[name.removesuffix("_bias")]
    length = call.cotangent.shape[1]
    if split is None:
      score_KnT = _token_scores(call.module, name, length, rows, x_RI, g_RO, direction)
    else:
      score_KnT = _scores_on_mesh(call.module, name, length, split, (rows, x_RI, g_RO, direction))
    return score_KnT if call.resolution == 2 else score_KnT.sum(2)


def _whole(direction: Direction) -> Direction:
  return Direction(jnp.matmul(direction.left, direction.right, precision=jax.lax.Precision.HIGHEST))


def _use(module, params: dict, x_nTD, index_nTk, weight_nTk, b_nTD, first_expert=None):
  """(rows, {matrix: (its input x_RI, the cotangent of its output g_RO)}).

  Repeats the layer's own pass up to the last product, and its backward pass.
  """
  rows = moe.Rows.sort(index_nTk, params["wo"].shape[0], first_expert)
  x_RD = rows.take(x_nTD.reshape(-1, x_nTD.shape[-1])).astype(module.dtype)
  branches = module.branch_rows(params, x_RD, rows)
  h_RF, pull = jax.vjp(lambda branches: gated(branches, module.activations, module.limit), branches)
  weight_R = weight_nTk.reshape(-1)[rows.order_R].astype(h_RF.dtype)
  g_RD = rows.own(rows.take(b_nTD.reshape(-1, b_nTD.shape[-1]).astype(h_RF.dtype)) * weight_R[:, None])
  g_RF = product_transposed(g_RD, params["wo"].astype(module.dtype), rows.sizes_E, module.precision)
  (g_branches,) = pull(rows.own(g_RF))
  used = {name: (x_RD, g_RF) for name, g_RF in zip(module.branches, g_branches, strict=True)}
  return rows, used | {"wo": (h_RF, g_RD)}


def _token_scores(module, name: str, length: int, rows: moe.Rows, x_RI, g_RO, direction: Direction) -> jax.Array:
  """Scores of one Param by token: [K, n, length]."""
  wide = jnp.promote_types(g_RO.dtype, jnp.float32)
  if direction.full is None:
    row_RK = _factored_rows(module, rows, x_RI, g_RO, direction, wide)
    return jnp.stack([rows.sums(row_R).reshape(-1, length) for row_R in row_RK.T])
  scores = []
  for u in direction.full.astype(g_RO.dtype):
    along_RO = rows.of_expert(u) if name.endswith("_bias") else product(x_RI, u, rows.sizes_E, module.precision)
    row_R = (rows.own(along_RO).astype(wide) * g_RO.astype(wide)).sum(-1)
    scores.append(rows.sums(row_R).reshape(-1, length))
  return jnp.stack(scores)


def _factored_rows(module, rows: moe.Rows, x_RI, g_RO, direction: Direction, wide):
  """<x Q, g Rᵀ> of each row and set, [R, K], with left Q [K, E, I, r] and right R [K, E, r, O]. Sets share one product
  with x and one with g."""
  sets, experts, inputs, rank = direction.left.shape
  left_EIq = jnp.moveaxis(direction.left.astype(x_RI.dtype), 0, 2).reshape(experts, inputs, sets * rank)
  right_EqO = jnp.moveaxis(direction.right.astype(g_RO.dtype), 0, 1).reshape(experts, sets * rank, -1)
  x_Rq = rows.own(product(x_RI, left_EIq, rows.sizes_E, module.precision, wide))
  g_Rq = rows.own(product_transposed(g_RO, right_EqO, rows.sizes_E, module.precision, wide))
  return (x_Rq * g_Rq).reshape(-1, sets, rank).sum(-1)


# On a mesh each device scores the rows of its own experts, as in `expert_parallel`.


def _use_on_mesh(call, split: expert_parallel.Split):
  module = call.module

  def local(params, x, index, weight, b):
    x, index, weight, b = split.gather(x, index, weight, b)
    return _use(module, params, x, index, weight, b, split.first_expert(params))

  whole, wide = PartitionSpec(split.sorted_rows), PartitionSpec(split.sorted_rows, split.width or None)
  used = {name: (whole, wide) for name in module.branches} | {"wo": (wide, whole)}
  params = {name: split.param(name) for name in call.values}
  run = split.map(local, (params, *[split.tokens] * 4), (whole, used))
  return run(call.values, *call.args, call.cotangent)


def _scores_on_mesh(module, name: str, length: int, split: expert_parallel.Split, arrays):
  parts = math.prod(split.mesh.shape[axis] for axis in split.length)

  def local(*arrays):
    score_KnT = _token_scores(module, name, length // parts, *arrays)
    if name == "wo_bias" and split.width:
      score_KnT = jnp.where(split.is_first, score_KnT, 0)
    return jnp.stack([split.sum(score_nT) for score_nT in score_KnT])

  whole, wide = PartitionSpec(split.sorted_rows), PartitionSpec(split.sorted_rows, split.width or None)
  inputs = (wide, whole) if name.startswith("wo") else (whole, wide)
  specs = (whole, *inputs, _direction_specs(name, split, arrays[-1]))
  return split.map(local, specs, PartitionSpec(None, *split.tokens))(*arrays)


def _direction_specs(name: str, split: expert_parallel.Split, direction: Direction) -> Direction:
  """The PartitionSpecs of a direction's parts, as those of the Param."""
  if direction.full is not None:
    return Direction(split.param(name, leading=1))
  expert, inputs, outputs = (*split.param(name), None)[:3]
  return Direction(None, PartitionSpec(None, expert, inputs), PartitionSpec(None, expert, None, outputs))


@rule(SelfAttention)
class AttentionSinkRule(Rule):
  """`sinks` [H], scored by the gradient of a copy at every position. The projections have their own rules."""

  methods = ("attend",)

  def rank(self, module: Any, name):
    return 1

  def stock(self, module: Any):
    alone: Any = nnx.clone(module)
    for name in ("query", "key", "value", "out", "query_norm", "key_norm"):
      if hasattr(alone, name):
        setattr(alone, name, None)
    return alone

  def score(self, call, name, direction):
    q_nTHh, k_nTKh, v_nTKh, segments = call.args
    sinks_H = call.values["sinks"]
    sinks_nTH = jnp.broadcast_to(sinks_H.astype(jnp.promote_types(sinks_H.dtype, jnp.float32)), q_nTHh.shape[:3])
    _, pull = jax.vjp(
      lambda sinks: attention_ops.attend(q_nTHh, k_nTKh, v_nTKh, segments, sinks_H=sinks, **call.module.options),
      sinks_nTH,
    )
    (gradient_nTH,) = pull(call.cotangent)
    return jnp.stack([call.reduce(gradient_nTH, jnp.broadcast_to(u_H, sinks_nTH.shape)) for u_H in direction.full])
