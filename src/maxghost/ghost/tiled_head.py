"""The tiled output head with scores: each tile's logits and cotangents are scored while they exist.

Cost beyond the plain tiled head, in products of the head's size (the plain one takes four: logits, logits again, both
gradients): one for the scores where the direction is known beforehand (kind 'sgd'); kind 'adam', and a tied table whose
direction needs the whole gradient, form it first and sweep the tiles once more: two.

K validation sets, B rows (n examples), T positions, D features, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.ghost import directions, rules, usage
from maxghost.ghost.variables import part_name
from maxghost.losses.tiled import Head, backward, forward, tiled_losses
from maxghost.models import platforms


def head_losses(model, hidden_BTD, targets_BT, weights_BT, *, num_tiles: int, axis: str, z_loss: float):
  """Loss of each position, [B, T], of a model or of its probed twin, as `token_losses(model.logits(hidden), ...)`.

  weights_BT: as `tiled_losses`; used on CPU, where arithmetic is dearer than holding one gradient of the table.
  model: has `head_input(hidden)`, what the projection sees, and `output_layer() -> (layer, name)`: an `nnx.Embed` used
  by `attend`, or a dense layer without bias, and the name of its table.
  """
  layer, name = model.output_layer()
  x_BTD = model.head_input(hidden_BTD)
  head = Head(
    num_tiles,
    axis,
    tied=isinstance(layer, nnx.Embed),
    dtype=jnp.dtype(layer.dtype),
    precision=getattr(layer, "precision", None),
    z_loss=z_loss,
    soft_cap=model.logits_soft_cap,
  )
  if hasattr(layer, "ghost_info"):
    return _probed_losses(layer, name, head, x_BTD, targets_BT)
  known = weights_BT if platforms.target() == "cpu" else None
  return tiled_losses(head, x_BTD, getattr(layer, name)[...], targets_BT, known)


def _probed_losses(twin: nnx.Module, name: str, head: Head, x_BTD, targets_BT):
  info, table = twin.ghost_info, getattr(twin, name)[...]
  spec, rule = dict(info.scored)[name], rules.of(type(twin).__bases__[0])
  if info.num_val:
    raise ValueError("num_vocab_tiling > 1 has no ghost_schedule=concat; use two_pass or reverse_scan")
  method = "attend" if head.tied else "__call__"
  output_shape = (*x_BTD.shape[:-1], table.shape[head.vocab_axis])
  usage.note(twin, info.path, method, (x_BTD.shape,), output_shape, head)
  if info.linked:
    return _linked_losses(twin, info, head, x_BTD, targets_BT)

  @jax.custom_vjp
  def op(x, table, targets, parts, probes):
    return forward(head, x, table, targets)[0]

  def op_forward(x, table, targets, parts, probes):
    losses, log_sum = forward(head, x, table, targets)
    return losses, (x, table, targets, log_sum, parts, probes)

  def op_backward(residuals, g):
    *inputs, parts, probes = residuals
    _, table, targets, _ = inputs
    if not spec.direction.in_backward:
      direction, facts = directions.form(spec, parts, table)
      visits = _visits(head, twin, rule, name, direction)
      d_x, d_table, score_KBT = backward(head, *inputs, g, **visits)
    else:
      d_x, d_table, _ = backward(head, *inputs, g)
      direction, facts = directions.form(spec, parts, d_table)
      visits = _visits(head, twin, rule, name, direction)
      _, _, score_KBT = backward(head, *inputs, g, gradients=False, **visits)
    scores = {"probe": _at_resolution(score_KBT, info.resolution).astype(probes["probe"].dtype)}
    if facts is not None:
      scores["facts"] = facts.astype(probes["facts"].dtype)
    return d_x, d_table, np.zeros(targets.shape, jax.dtypes.float0), jax.tree.map(jnp.zeros_like, parts), scores

  op.defvjp(op_forward, op_backward)
  parts = tuple(getattr(twin, part_name(name, p))[...] for p in spec.parts)
  probes = {"probe": getattr(twin, part_name(name, "probe"))[...]}
  if spec.direction.in_backward:
    probes["facts"] = getattr(twin, part_name(name, "facts"))[...]
  return op(x_BTD, table, targets_BT, parts, probes)


def _visits(head: Head, twin, rule, name: str, direction: directions.Direction) -> dict:
  """What `backward` needs to score the tiles by the layer's own rule, one score per token: [K, B, c]."""

  def visit(x, delta, direction):
    method = "attend" if head.tied else "__call__"
    return rule.score(rules.Call(twin, method, {}, (x,), delta, None, 2), name, direction)

  if head.axis == "tokens":
    return {"visit": visit, "extra": direction}

  def whole(array):
    return jnp.broadcast_to(array, (head.num_tiles, *array.shape))

  axis = 1 + head.vocab_axis  # behind the sets
  if direction.full is not None:
    blocks = directions.Direction(head.split_vocab(direction.full, axis))
  elif head.tied:
    blocks = directions.Direction(None, head.split_vocab(direction.left, axis), whole(direction.right))
  else:
    blocks = directions.Direction(None, whole(direction.left), head.split_vocab(direction.right, axis))
  return {"visit": visit, "extra": blocks}


def _at_resolution(score_KBT, resolution: int):
  return score_KBT if resolution == 2 else score_KBT.sum(-1)


# A tied table whose direction needs the gradient of both its uses. The untiled link (`tied`) carries the cotangent of
# all logits; this one carries, for each token, what makes them again: x, the loss's cotangent, log-sum-exp and label.


def blank_link(head: Head, x_shape: tuple[int, ...], dtype) -> tuple:
  """The arrays that the lookup hands to the output beside the table: [B, T, D] and [B, T, 3]."""
  return jnp.zeros(x_shape, dtype), jnp.zeros((*x_shape[:-1], 3), head.wide)


def _linked_losses(twin, info, head: Head, x_BTD, targets_BT):
  if not hasattr(twin, "ghost_link"):
    raise ValueError(f"{info.path} is used as output before it is looked up; a tied table is looked up first")

  @jax.custom_vjp
  def op(x, targets, table, x_link, facts_link):
    return forward(head, x, table, targets)[0]

  def op_forward(x, targets, table, x_link, facts_link):
    losses, log_sum = forward(head, x, table, targets)
    return losses, (x, table, targets, log_sum)

  def op_backward(residuals, g):
    x, _, targets, log_sum = residuals
    d_x, d_table, _ = backward(head, *residuals, g)
    facts = jnp.stack([a.astype(head.wide) for a in (g, log_sum, targets)], axis=-1)  # labels are exact below 2**24
    return d_x, np.zeros(targets.shape, jax.dtypes.float0), d_table, x, facts

  op.defvjp(op_forward, op_backward)
  table, x_link, facts_link = (v[...] for v in twin.ghost_link)
  return op(x_BTD, targets_BT, table, x_link.astype(x_BTD.dtype), facts_link)


def linked_score(head: Head, twin, rule, name: str, table, carried, direction, resolution: int):
  """The output's share of a tied table's scores, from what came back along the link."""
  x, facts = carried
  g, log_sum, targets = facts[..., 0], facts[..., 1], facts[..., 2].astype(jnp.int32)
  visits = _visits(head, twin, rule, name, direction)
  _, _, score_KBT = backward(head, x, table, targets, log_sum, g, gradients=False, **visits)
  return _at_resolution(score_KBT, resolution)
