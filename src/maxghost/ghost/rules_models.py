"""Rules for the layer types of `models` and `adapters`: experts, attention sinks, output projections and adapters.

K validation sets, n examples, T positions, N = n T tokens, E experts, R rows (tokens sorted by expert, once for each of
their experts), I inputs and O outputs of an expert's matrix, r rank, H heads, h head width, D features, V vocabulary.
"""

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxghost.adapters import Lora
from maxghost.adapters.quantized import QuantizedMoe
from maxghost.ghost.directions import Direction
from maxghost.ghost.probed import LayerPasses, filled
from maxghost.ghost.rules import Call, Rule, rule
from maxghost.ghost.rules_flax import EmbedRule, LinearGeneralRule, matrix_scores
from maxghost.models import attention, autodiff, dense, moe, rounding
from maxghost.models.grouped_matmul import product
from maxghost.models.layers import gated
from maxghost.models.output_head import OutputProjection, TiedTable
from maxghost.objectives.tiled import Head, backward, forward


@rule(Lora)
class LoraRule(Rule):
  """An adapter y = s (x a) b: a has the input x and the output cotangent s g bᵀ, b has s x a and g.

  With the layer's own backward pass, which forms both, this takes r (d + p) multiplications per token and set.
  """

  def rank(self, module: Any, name):
    return 2 if name == "a" else 1 + module.out_axes

  def rows(self, module, name):
    return 1

  def score(self, call, name, direction):
    module, g = call.module, call.cotangent
    x, a, b = module.cast(call.args[0], call.values["a"], call.values["b"])
    scale, precision = jnp.asarray(module.scale, x.dtype), module.precision
    if name == "a":
      g = dense.contract_transposed(g.astype(x.dtype), b, 1, precision, x.dtype) * scale
    else:
      x = dense.contract(x, a, 1, precision) * scale
    return matrix_scores(call, x, g, direction, 1)


@rule(moe.RoutedMoe, QuantizedMoe)
class RoutedMoeRule(Rule):
  """Expert matrices and biases.

  A row's share of <grad_W loss_i, u> is <g_R, x_R u_e> with e its expert, or <g_R R_eᵀ, x_R Q_e> for factors
  u_e = Q_e R_e. Rows are mapped back to their tokens. The router is a dense layer with its own rule.
  """

  methods = ("experts",)
  children = ("gate",)

  def rank(self, module: Any, name):
    return 2 if name.endswith("_bias") else 3  # also of an adapter's `_lora_a` and `_lora_b`

  def rows(self, module, name):
    return 0 if name.endswith("_bias") else 1

  groups = rows  # one axis numbers the experts, the next is a matrix's rows

  def score(self, call, name, direction):
    if not call.module.sparse:
      if direction.left is not None:
        direction = Direction(jnp.matmul(direction.left, direction.right, precision=jax.lax.Precision.HIGHEST))
      return super().score(call, name, direction)
    split = moe.find_split(call.module, call.args[0].shape)
    if "use" not in call.memo:
      call.memo["use"] = _use(call.module, split, call.values, *call.args, call.cotangent)
    rows, used = call.memo["use"]
    x_RI, g_RO = used[name.removesuffix("_bias")]
    score_KnT = _scores(call.module, name, call.cotangent.shape[1], split, rows, x_RI, g_RO, direction)
    return score_KnT if call.resolution == 2 else score_KnT.sum(2)


def _use_of_device(module, params: dict, x_nTD, index_nTk, weight_nTk, b_nTD, first_expert):
  """(rows, {matrix: (its input x_RI, the cotangent of its output g_RO)}), by the layer's own pass and its backward."""
  rows = moe.Rows.sort(index_nTk, moe.num_held(params), first_expert)
  x_RD = rows.take(x_nTD.reshape(-1, x_nTD.shape[-1])).astype(module.dtype)
  branches = module.branch_rows(params, x_RD, rows)
  h_RF, pull = jax.vjp(lambda branches: gated(branches, module.activations, module.limit), branches)
  weight_R = weight_nTk.reshape(-1)[rows.order_R].astype(h_RF.dtype)
  g_RD = rows.own(rows.take(b_nTD.reshape(-1, b_nTD.shape[-1]).astype(h_RF.dtype)) * weight_R[:, None])

  def back(name: str, g_RO):
    precision = rounding.back(module.precision_of(name))
    return product(g_RO, module.matrix(params, name), rows.sizes_E, precision, contract=2)

  def narrow(name: str, g_RO):  # the cotangent of an adapter's x a
    return back(f"{name}_lora_b", g_RO) * jnp.asarray(module.lora_scale, g_RO.dtype)

  g_RF = back("wo", g_RD)
  if "wo_lora_a" in params:
    g_RF = g_RF + back("wo_lora_a", narrow("wo", g_RD))
  (g_branches,) = pull(rows.own(g_RF))
  used = {name: (x_RD, g_RF) for name, g_RF in zip(module.branches, g_branches, strict=True)} | {"wo": (h_RF, g_RD)}
  for name in [name for name in used if f"{name}_lora_a" in params]:
    x_RI, g_RO = used[name]
    used[f"{name}_lora_a"] = (x_RI, narrow(name, g_RO))
    used[f"{name}_lora_b"] = (module.narrow(params, name, x_RI, rows), g_RO)
  return rows, used


def _token_scores(module, name: str, length: int, rows: moe.Rows, x_RI, g_RO, direction: Direction) -> list:
  """Scores of one Param by token, K x [n, length]; the factors of all sets share one product with x and one with g."""
  wide, precision = jnp.promote_types(g_RO.dtype, jnp.float32), rounding.plain(module.precision)
  if not name.endswith("_bias"):
    x_RI, g_RO = rounding.operands(module.precision_of(name), x_RI, g_RO)

  def along(u):
    along_RO = rows.of_expert(u) if name.endswith("_bias") else product(x_RI, u, rows.sizes_E, precision)
    return (rows.own(along_RO).astype(wide) * g_RO.astype(wide)).sum(-1)

  if direction.full is not None:
    rows_KR = map(along, direction.full.astype(g_RO.dtype))
  else:
    sets, experts, inputs, rank = direction.left.shape
    left_EIq = jnp.moveaxis(direction.left.astype(x_RI.dtype), 0, 2).reshape(experts, inputs, sets * rank)
    right_EqO = jnp.moveaxis(direction.right.astype(g_RO.dtype), 0, 1).reshape(experts, sets * rank, -1)
    x_Rq = rows.own(product(x_RI, left_EIq, rows.sizes_E, precision, wide))
    g_Rq = rows.own(product(g_RO, right_EqO, rows.sizes_E, precision, wide, contract=2))
    rows_KR = (x_Rq * g_Rq).reshape(-1, sets, rank).sum(-1).T
  return [rows.sums(row_R).reshape(-1, length) for row_R in rows_KR]


# On a mesh each device scores the rows of its own experts, as in `moe.Split`. Where it holds a part of their width, the
# narrow arrays of adapters are summed over the parts, like the layer's output.
def _use(module, split: moe.Split, values: dict, *arrays):
  def local(params, *tokens):
    x, index, weight, b = split.gather(*tokens)
    rows, used = _use_of_device(module, params, x, index, weight, b, split.first_expert(params))
    for name in used:
      if split.width and "_lora_" in name and not any(moe.is_wide(name)):
        x_R, g_R = used[name]
        partly = name == "wo_lora_b"  # the input; of other adapters the cotangent
        used[name] = (jax.lax.psum(x_R, split.width), g_R) if partly else (x_R, jax.lax.psum(g_R, split.width))
    return rows, used

  whole, wide = PartitionSpec(split.sorted_rows), PartitionSpec(split.sorted_rows, split.width or None)
  names = [*module.branches, "wo", *(name for name in values if "_lora_" in name)]
  used = {name: tuple(wide if flag else whole for flag in moe.is_wide(name)) for name in names}
  params = {name: split.param(name) for name in values}
  return split.map(local, (params, *[split.tokens] * 4), (whole, used))(values, *arrays)


def _scores(module, name: str, length: int, split: moe.Split, *arrays):
  parts = math.prod(split.mesh.shape[axis] for axis in split.length)

  def local(*arrays):
    scores = _token_scores(module, name, length // parts, *arrays)
    if not any(moe.is_wide(name)) and split.width:
      scores = [jnp.where(split.is_first, score_nT, 0) for score_nT in scores]
    return jnp.stack([split.sum(score_nT) for score_nT in scores])

  whole, wide = PartitionSpec(split.sorted_rows), PartitionSpec(split.sorted_rows, split.width or None)
  inputs = [wide if flag else whole for flag in moe.is_wide(name.removesuffix("_bias"))]
  if arrays[-1].full is not None:
    direction = Direction(split.param(name, leading=1))
  else:
    expert, rows, columns = split.param(name)
    direction = Direction(None, PartitionSpec(None, expert, rows), PartitionSpec(None, expert, None, columns))
  return split.map(local, (whole, *inputs, direction), PartitionSpec(None, *split.tokens))(*arrays)


@rule(attention.SelfAttention)
class AttentionSinkRule(Rule):
  """`sinks` [H], scored by the gradient of a copy at every position. The projections have their own rules."""

  methods = ("attend",)
  ranks: ClassVar = {"sinks": 1}
  children = ("query", "key", "value", "out", "query_norm", "key_norm")

  def score(self, call, name, direction):
    sinks_H = call.values["sinks"]
    sinks_nTH = jnp.broadcast_to(sinks_H.astype(jnp.promote_types(sinks_H.dtype, jnp.float32)), call.args[0].shape[:3])
    run = functools.partial(attention.attend, *call.args, **call.module.options)
    _, pull = jax.vjp(lambda sinks: run(sinks_H=sinks), sinks_nTH)
    (gradient_nTH,) = pull(call.cotangent)
    return jnp.stack([call.reduce(gradient_nTH, jnp.broadcast_to(u_H, sinks_nTH.shape)) for u_H in direction.full])


class TiledPasses(LayerPasses):
  """The passes of `losses(head, x, targets, weights)`, which score each tile of `head` while its logits exist.

  The plain tiled head takes four products of the head's size: logits, logits again, both gradients. Scores add one, or
  two where the direction needs this very gradient: the tiles are then swept again after it is known.
  """

  def __init__(self, rule: Rule, twin, method: str, head: Head):
    super().__init__(rule, twin, method)
    self.head = head

  def apply(self, values, arrays):
    return self.forward(values, arrays)[0]

  def forward(self, values, arrays):
    (table,), (x_BTD, targets_BT, *_) = values.values(), arrays
    return forward(self.head, x_BTD, table, targets_BT)

  def backward(self, values, arrays, residuals, cotangent, form=None, gradients=True):
    ((name, table),), (x_BTD, targets_BT, *rest), (param,) = values.items(), arrays, self.info.scored
    direction, facts = (None, None) if form is None else form(param)
    inputs = x_BTD, table, targets_BT, residuals, cotangent
    d_x, d_table, score_KBT = backward(self.head, *inputs, gradients=gradients, **self._visits(direction))
    found = ({name: d_table}, [d_x, *map(autodiff.zero_cotangent, (targets_BT, *rest))]) if gradients else None
    return found, None if form is None else {name: filled(self._reduced(score_KBT), facts, table)}

  def _visits(self, direction: Direction | None) -> dict:
    """Arguments with which `backward` scores the tiles by the layer's own rule, one score per token: [K, B, c]."""
    if direction is None:
      return {}
    head = self.head

    def visit(x, delta, direction):
      method = "attend" if head.tied else "__call__"
      return self.rule.score(Call(self.twin, method, {}, (x,), delta, None, 2), self.info.scored[0].name, direction)

    if head.axis == "tokens":
      return {"visit": visit, "extra": direction}

    whole = lambda array: jnp.broadcast_to(array, (head.num_tiles, *array.shape))  # noqa: E731
    axis = 1 + head.vocab_axis  # after the sets
    if direction.full is not None:
      blocks = Direction(head.split_vocab(direction.full, axis))
    elif head.tied:
      blocks = Direction(None, head.split_vocab(direction.left, axis), whole(direction.right))
    else:
      blocks = Direction(None, whole(direction.left), head.split_vocab(direction.right, axis))
    return {"visit": visit, "extra": blocks}

  def _reduced(self, score_KBT):
    return score_KBT if len(self.info.reduced) == 2 else score_KBT.sum(-1)

  # The link of a tied table (`probed`) carries what recomputes the cotangent of the logits for each token: x, and the
  # loss's cotangent, log-sum-exp and label.

  def blank_link(self, table, dtype):
    x_BTD, _ = super().blank_link(table, dtype)
    return x_BTD, jnp.zeros((*x_BTD.shape[:-1], 3), self.head.wide)

  def carried(self, arrays, residuals, cotangent):
    labelled = cotangent, residuals, arrays[1]  # labels are exact below 2**24
    return arrays[0], jnp.stack([a.astype(self.head.wide) for a in labelled], axis=-1)

  def carried_score(self, values, carried, direction):
    (table,), (x_BTD, facts) = values.values(), carried
    g, log_sum, targets = facts[..., 0], facts[..., 1], facts[..., 2].astype(jnp.int32)
    visits = self._visits(direction)
    _, _, score_KBT = backward(self.head, x_BTD, table, targets, log_sum, g, gradients=False, **visits)
    return self._reduced(score_KBT)


@rule(TiedTable)
class TiedTableRule(EmbedRule):
  """`models.output_head.TiedTable`: a table with a lookup and an output, whole or by tiles."""

  methods = ("__call__", "attend", "losses")
  second_uses = ("attend", "losses")

  def passes(self, twin, method, static):
    return TiledPasses(self, twin, method, *static) if method == "losses" else None


@rule(OutputProjection)
class OutputProjectionRule(LinearGeneralRule):
  """`models.output_head.OutputProjection`: a dense layer, or its losses by tiles."""

  methods = ("__call__", "losses")
  passes = TiedTableRule.passes
