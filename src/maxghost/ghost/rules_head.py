"""Rules for the output projections of `models`: a loss by tiles scores each tile while its logits exist.

The plain tiled head takes four products of the head's size: logits, logits again, both gradients. Scores add one where
the direction is known beforehand. They add two where it is formed in the backward pass, or for a tied table whose
direction needs the whole gradient: the tiles are then swept again after the gradient is known.

K validation sets, B rows (n examples), T positions, D features, V vocabulary.
"""

import jax
import jax.numpy as jnp

from maxghost.ghost.directions import Direction
from maxghost.ghost.rules import Call, Rule, rule
from maxghost.ghost.rules_flax import EmbedRule, LinearGeneralRule
from maxghost.models import autodiff
from maxghost.models.output_head import OutputProjection, TiedTable
from maxghost.objectives.tiled import Head, backward, forward


class TiledSweep:
  """The passes of `losses(head, x, targets, weights)`, which scores each tile of `head` while it exists.

  name: of the table, the layer's one parameter. arrays: the call's arguments that are arrays.
  """

  def __init__(self, rule: Rule, twin, name: str, head: Head):
    self.rule, self.twin, self.name, self.head = rule, twin, name, head

  def forward(self, values, arrays):
    """(losses, residuals)."""
    x_BTD, targets_BT, *_ = arrays
    return forward(self.head, x_BTD, values[self.name], targets_BT)

  def backward(self, values, arrays, residuals, cotangent, direction: Direction | None, gradients=True):
    """(gradient of the table, of x, score [K, *reduced]); None for those not requested."""
    x_BTD, targets_BT, *_ = arrays
    inputs = (x_BTD, values[self.name], targets_BT, residuals, cotangent)
    visits = {} if direction is None else self._visits(direction)
    d_x, d_table, score_KBT = backward(self.head, *inputs, gradients=gradients, **visits)
    score = None if score_KBT is None else self._reduced(score_KBT)
    return d_table, d_x, score

  def _visits(self, direction: Direction) -> dict:
    """Arguments with which `backward` scores the tiles by the layer's own rule, one score per token: [K, B, c]."""
    head = self.head

    def visit(x, delta, direction):
      method = "attend" if head.tied else "__call__"
      return self.rule.score(Call(self.twin, method, {}, (x,), delta, None, 2), self.name, direction)

    if head.axis == "tokens":
      return {"visit": visit, "extra": direction}

    def whole(array):
      return jnp.broadcast_to(array, (head.num_tiles, *array.shape))

    axis = 1 + head.vocab_axis  # after the sets
    if direction.full is not None:
      blocks = Direction(head.split_vocab(direction.full, axis))
    elif head.tied:
      blocks = Direction(None, head.split_vocab(direction.left, axis), whole(direction.right))
    else:
      blocks = Direction(None, whole(direction.left), head.split_vocab(direction.right, axis))
    return {"visit": visit, "extra": blocks}

  def _reduced(self, score_KBT):
    return score_KBT if self.twin.ghost_info.resolution == 2 else score_KBT.sum(-1)

  # A tied table whose direction needs the gradient of both uses. The untiled link (`probed`) carries the cotangent of
  # all logits. This one carries the inputs to recompute them for each token: x, the loss's cotangent, log-sum-exp and
  # label.

  def blank_link(self, x_shape, dtype):
    """Zeros, whose cotangents become the `carried` of `linked_score`. dtype: of the looked-up rows."""
    return jnp.zeros(x_shape, dtype), jnp.zeros((*x_shape[:-1], 3), self.head.wide)

  def linked_call(self, arrays, link):
    head = self.head
    x_BTD, targets_BT, *_ = arrays

    @jax.custom_vjp
    def op(x, targets, table, x_link, facts_link):
      return forward(head, x, table, targets)[0]

    def op_forward(x, targets, table, x_link, facts_link):
      losses, log_sum = forward(head, x, table, targets)
      return losses, (x, table, targets, log_sum)

    def op_backward(residuals, g):
      x, table, targets, log_sum = residuals
      d_x, d_table, _ = backward(head, x, table, targets, log_sum, g)
      facts = jnp.stack([a.astype(head.wide) for a in (g, log_sum, targets)], axis=-1)  # labels are exact below 2**24
      return d_x, autodiff.no_cotangent(targets), d_table, x, facts

    op.defvjp(op_forward, op_backward)
    table, x_link, facts_link = link
    return op(x_BTD, targets_BT, table, x_link.astype(x_BTD.dtype), facts_link)

  def linked_score(self, table, carried, direction):
    """The output's part of the score, from the arrays sent along the link."""
    x, facts = carried
    g, log_sum, targets = facts[..., 0], facts[..., 1], facts[..., 2].astype(jnp.int32)
    _, _, score_KBT = backward(self.head, x, table, targets, log_sum, g, gradients=False, **self._visits(direction))
    return self._reduced(score_KBT)


@rule(TiedTable)
class TiedTableRule(EmbedRule):
  """`models.output_head.TiedTable`: a table with a lookup and an output, whole or by tiles."""

  methods = ("__call__", "attend", "losses")
  second_uses = ("attend", "losses")

  def sweep(self, twin, method, static):
    return TiledSweep(self, twin, "embedding", *static) if method == "losses" else None


@rule(OutputProjection)
class OutputProjectionRule(LinearGeneralRule):
  """`models.output_head.OutputProjection`: a dense layer, or its losses by tiles."""

  methods = ("__call__", "losses")

  def sweep(self, twin, method, static):
    return TiledSweep(self, twin, "kernel", *static) if method == "losses" else None
