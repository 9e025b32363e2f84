"""A table used twice, scored exactly under a direction that needs the weight gradient of both uses.

Adam's direction is formed from the whole gradient of a parameter. A tied table gets one half of it at the output, where
the backward pass begins, and the other at the lookup, where it ends. The lookup therefore hands the output three
arrays whose cotangents carry what the output saw back to it: the table itself (its cotangent is the output's half of
the weight gradient) and two zeros, whose cotangents are *defined* to be the output's input h and cotangent delta.

n examples, T positions, D features, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.ghost import directions


def lookup(apply, ids, table_VD, parts, probe, h_shape, score):
  """(rows, link): the gathered rows and what `attend` needs. score(ids, b, h, delta, u_K) -> like probe."""

  @jax.custom_vjp
  def op(table_VD, ids, parts, probe):
    return _forward(table_VD, ids)

  def _forward(table_VD, ids):
    rows = apply(table_VD, ids)
    delta_shape = (*h_shape[:-1], table_VD.shape[0])
    return rows, (table_VD, jnp.zeros(h_shape, rows.dtype), jnp.zeros(delta_shape, rows.dtype))

  def forward(table_VD, ids, parts, probe):
    return _forward(table_VD, ids), (table_VD, ids, parts, probe)

  def backward(residuals, cotangents):
    table_VD, ids, parts, probe = residuals
    b, (d_table_out, h, delta) = cotangents
    (d_table_in,) = jax.vjp(lambda table: apply(table, ids), table_VD)[1](b)
    d_table = d_table_in + d_table_out
    u_K = directions.form(score.spec, parts, d_table)
    scores = score(ids, b, h, delta, u_K).astype(probe.dtype)
    return d_table, np.zeros(ids.shape, jax.dtypes.float0), jax.tree.map(jnp.zeros_like, parts), scores

  op.defvjp(forward, backward)
  return op(table_VD, ids, parts, probe)


def attend(apply, h, link):
  """apply(table, h), whose backward pass sends (table gradient, h, output cotangent) along the link."""

  @jax.custom_vjp
  def op(h, table_VD, h_link, delta_link):
    return apply(table_VD, h)

  def forward(h, table_VD, h_link, delta_link):
    return apply(table_VD, h), (h, table_VD)

  def backward(residuals, delta):
    h, table_VD = residuals
    d_table, d_h = jax.vjp(apply, table_VD, h)[1](delta)
    return d_h, d_table, h.astype(link[1].dtype), delta.astype(link[2].dtype)

  op.defvjp(forward, backward)
  return op(h, *link)
