"""A table used twice, scored exactly along a direction that is known only at the end of the backward pass.

A tied table gets one part of its gradient at the output, where the backward pass begins, and the other at the lookup,
where it ends. Adam's direction needs the whole gradient, and the schedules 'reverse_scan' and 'concat' know the whole
validation gradient only at the end. The lookup therefore passes three arrays to the output, whose cotangents carry data
back: the table itself (its cotangent is the output's part of the weight gradient) and two zeros, whose cotangents are
*defined* to be the output's input h and cotangent delta (`rules_head` has a smaller pair).

n examples, T positions, D features, V vocabulary.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxghost.models import autodiff


@dataclasses.dataclass(frozen=True)
class TableUse:
  """Both uses of a table: gather(table, ids), attend(table, h), and
  score(table, ids, b, carried, weight_gradient, parts) -> like the probe; b: cotangents of the rows; carried: arrays
  sent back by the output, (h, delta) unless it is tiled. blank(table, dtype of the rows): zeros shaped like `carried`.

  num_val > 0: the last rows of the batch are validation examples, whose gradient replaces parts[0].
  """

  gather: Callable
  attend: Callable
  score: Callable
  blank: Callable
  num_examples: int
  num_val: int


def lookup(use: TableUse, ids, table_VD, parts, probe):
  """(rows, link): the gathered rows and the link for `attend`."""

  @jax.custom_vjp
  def op(table_VD, ids, parts, probe):
    return _forward(table_VD, ids)

  def _forward(table_VD, ids):
    rows = use.gather(table_VD, ids)
    return rows, (table_VD, *use.blank(table_VD, rows.dtype))

  def forward(table_VD, ids, parts, probe):
    return _forward(table_VD, ids), (table_VD, ids, parts, probe)

  def backward(residuals, cotangents):
    table_VD, ids, parts, probe = residuals
    b, (d_table_out, *carried) = cotangents
    train, val = slice(None, use.num_examples), slice(use.num_examples, None)
    if use.num_val:
      h, delta = carried
      _, pull = jax.vjp(lambda table: (use.gather(table, ids[val]), use.attend(table, h[val])), table_VD)
      (gradient,) = pull((b[val], delta[val]))
      used_parts = (gradient[None].astype(parts[0].dtype), *parts[1:])
    else:
      used_parts = parts
    (d_table_in,) = jax.vjp(lambda table: use.gather(table, ids[train]), table_VD)[1](b[train])
    d_table = d_table_in + d_table_out
    carried = [array[train] for array in carried]
    scores = use.score(table_VD, ids[train], b[train], carried, d_table, used_parts)
    scores = jax.tree.map(lambda s, p: s.astype(p.dtype), scores, probe)
    return d_table, autodiff.no_cotangent(ids), jax.tree.map(jnp.zeros_like, parts), scores

  op.defvjp(forward, backward)
  return op(table_VD, ids, parts, probe)


def attend(apply, h, link, num_examples: int | None = None):
  """apply(table, h), whose backward pass sends (table gradient, h, output cotangent) along the link.

  num_examples: rows that count in the table gradient; None: all.
  """

  @jax.custom_vjp
  def op(h, table_VD, h_link, delta_link):
    return apply(table_VD, h)

  def forward(h, table_VD, h_link, delta_link):
    return apply(table_VD, h), (h, table_VD)

  def backward(residuals, delta):
    h, table_VD = residuals
    d_table, d_h = jax.vjp(apply, table_VD, h)[1](delta)
    if num_examples is not None:
      (d_table,) = jax.vjp(lambda table: apply(table, h[:num_examples]), table_VD)[1](delta[:num_examples])
    return d_h, d_table, h.astype(link[1].dtype), delta.astype(link[2].dtype)

  op.defvjp(forward, backward)
  return op(h, *link)
