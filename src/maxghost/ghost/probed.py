"""The probed call: a layer's own computation whose backward pass also scores it.

`custom_vjp` *defines* the cotangent of the probe, a zero per example, to be the score <grad_W loss_i, u>. Autodiff
then sums scores over layers, scan steps and tied uses, inside lax.scan and jax.checkpoint, on any mesh.

K validation sets, n examples, T positions.
"""

import contextlib
import contextvars
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.ghost import directions, rules
from maxghost.ghost.directions import ScoredParam, part_name
from maxghost.models import autodiff
from maxghost.parallel.shardings import constrain

SCORES = (None, "activation_batch", "activation_length")  # logical axes of a score [K, n(, T)]


_recorder: contextvars.ContextVar[list | None] = contextvars.ContextVar("maxghost_used", default=None)


@dataclasses.dataclass(frozen=True)
class Use:
  """One call of a probed layer in a trace. layer: the object; each trace of a scan or remat body has its own."""

  layer: Any
  path: str
  method: str
  argument_shapes: tuple
  shape: tuple
  static: tuple  # arguments that are not arrays
  is_second: bool  # the use of a table after its lookup


@contextlib.contextmanager
def record():
  """Collects a `Use` for every probed call traced inside, in their order."""
  used: list[Use] = []
  token = _recorder.set(used)
  try:
    yield used
  finally:
    _recorder.reset(token)


@dataclasses.dataclass(frozen=True)
class SecondUse:
  """The use of a looked-up table at the output: method, shape of its input, static arguments."""

  method: str
  input_shape: tuple[int, ...]
  static: tuple


@dataclasses.dataclass(frozen=True)
class TwinInfo:
  """Static properties of one probed layer: its path, its graph without probes (`stock`), and its scored parameters.

  num_examples, num_positions: leading axes of the layer's output; num_positions None scores whole examples.
  num_val: validation rows at the end of the batch (schedule 'concat'), whose weight gradient is G.
  linked: second use of a table whose direction needs the weight gradient of both uses.
  """

  path: str
  stock: nnx.GraphDef
  scored: tuple[ScoredParam, ...]
  num_examples: int
  num_positions: int | None
  num_val: int = 0
  linked: SecondUse | None = None

  @property
  def resolution(self) -> int:
    """Number of axes of a probe after its sets: 1 for [n], 2 for [n, T]."""
    return 1 if self.num_positions is None else 2

  @property
  def in_backward(self) -> bool:
    return self.scored[0].spec.in_backward


def probed_call(twin: Any, rule: rules.Rule, method: str, args: tuple, kwargs: dict):
  """Calls `method(*args, **kwargs)` of the layer behind `twin`; the backward pass scores into the twin's probes."""
  info: TwinInfo = twin.ghost_info
  values = {
    name: v[...] for name, v in vars(twin).items() if isinstance(v, nnx.Variable) and not name.startswith("ghost_")
  }
  parts = {p.name: tuple(getattr(twin, part_name(p.name, part))[...] for part in p.parts) for p in info.scored}
  kinds = ("probe", "facts") if info.in_backward else ("probe",)
  probes = {p.name: {kind: getattr(twin, part_name(p.name, kind))[...] for kind in kinds} for p in info.scored}
  arrays, static, rebuild = _separate(args, kwargs)
  sweep = rule.sweep(twin, method, static)
  if sweep is not None and info.num_val:
    raise ValueError("num_vocab_tiling > 1 has no ghost_schedule=concat; use two_pass or reverse_scan")
  if info.linked is not None:
    return _linked_call(twin, rule, method, info, values, arrays, parts, probes)

  def apply(values, arrays):
    args, kwargs = rebuild(arrays)
    return getattr(nnx.merge(info.stock, nnx.State(values)), method)(*args, **kwargs)

  op = _make_op(twin, rule, method, apply, rebuild, info) if sweep is None else _sweep_op(sweep, info)
  out = op(values, arrays, parts, probes)
  used = _recorder.get()
  if used is not None:
    shapes = tuple(x.shape for x in arrays)
    used.append(Use(twin, info.path, method, shapes, out.shape, static, method in rule.second_uses))
  return rule.combine(twin, out, *args)


def _separate(args, kwargs):
  """(arrays, static leaves such as strings and flags, rebuild), with rebuild(arrays) -> (args, kwargs)."""
  leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
  is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]

  def rebuild(arrays):
    stream = iter(arrays)
    return jax.tree.unflatten(tree, [next(stream) if a else x for a, x in zip(is_array, leaves, strict=True)])

  arrays, static = ([x for a, x in zip(is_array, leaves, strict=True) if a is kind] for kind in (True, False))
  return arrays, tuple(x for x in static if x is not None), rebuild


def _make_op(twin, rule, method, apply, rebuild, info: TwinInfo):
  @jax.custom_vjp
  def op(values, arrays, parts, probes):
    return apply(values, arrays)

  def forward(values, arrays, parts, probes):
    out, pull = jax.vjp(apply, values, arrays)
    _check_axes(info, method, out)
    return out, (values, arrays, parts, pull)

  def backward(residuals, cotangent):
    # The layer's own VJP gives the training gradients, so that they equal those of a run without scores.
    values, arrays, parts, pull = residuals
    if info.num_val:
      train, gradients, parts = _split_rows(info, apply, values, arrays, cotangent, parts)
      return finish(residuals, gradients, scores_of(values, *train, parts, gradients[0]))
    if not info.in_backward:
      # These directions do not depend on the gradient. With the scores first, the cotangent of the layer's input can be
      # formed where it is used.
      scores = scores_of(values, arrays, cotangent, parts, dict.fromkeys(values))
      cotangent, scores = autodiff.barrier(cotangent, scores)
      return finish(residuals, pull(cotangent), scores)
    gradients = pull(cotangent)
    scores = scores_of(values, arrays, cotangent, parts, gradients[0])
    return finish(residuals, *autodiff.barrier(gradients, scores))

  def scores_of(values, arrays, cotangent, parts, weight_gradients):
    args, _ = rebuild(arrays)
    call = rules.Call(twin, method, values, args, cotangent, lambda v: apply(v, arrays), info.resolution)
    scores = {}
    for param in info.scored:
      name = param.name
      direction, facts = directions.form(param, parts[name], weight_gradients[name])
      with jax.named_scope("ghost_score"):
        score = constrain(rule.score(call, name, direction), SCORES[: 1 + info.resolution])
      scores[name] = {"probe": score.astype(jnp.promote_types(values[name].dtype, jnp.float32))}
      if facts is not None:
        scores[name]["facts"] = facts
    return scores

  def finish(residuals, gradients, scores):
    return *gradients, jax.tree.map(_zero_cotangent, residuals[2]), scores

  op.defvjp(forward, backward)
  return op


def _sweep_op(sweep, info: TwinInfo):
  """As `_make_op`, for a method with its own passes."""
  (param,) = info.scored
  name = param.name

  @jax.custom_vjp
  def op(values, arrays, parts, probes):
    return sweep.forward(values, arrays)[0]

  def forward(values, arrays, parts, probes):
    out, residuals = sweep.forward(values, arrays)
    _check_axes(info, name, out)
    return out, (values, arrays, residuals, parts, probes)

  def backward(saved, cotangent):
    values, arrays, residuals, parts, probes = saved
    if not info.in_backward:
      direction, facts = directions.form(param, parts[name], values[name])
      d_value, d_first, score = sweep.backward(values, arrays, residuals, cotangent, direction)
    else:
      d_value, d_first, _ = sweep.backward(values, arrays, residuals, cotangent, None)
      direction, facts = directions.form(param, parts[name], d_value)
      _, _, score = sweep.backward(values, arrays, residuals, cotangent, direction, gradients=False)
    scores = {"probe": score} | ({} if facts is None else {"facts": facts})
    scores = {name: {part: x.astype(probes[name][part].dtype) for part, x in scores.items()}}
    d_arrays = [d_first, *map(_zero_cotangent, arrays[1:])]
    return {name: d_value}, d_arrays, jax.tree.map(jnp.zeros_like, parts), scores

  op.defvjp(forward, backward)
  return op


def _split_rows(info: TwinInfo, apply, values, arrays, cotangent, parts):
  """Separates training and validation rows for schedule 'concat'.

  Returns the training rows' (arrays, cotangent), (d_values of the training rows, d_arrays of all rows), and the parts
  with the validation rows' weight gradient.
  """
  n = info.num_examples
  shared = [x.ndim == 0 or x.shape[0] != n + info.num_val for x in arrays]
  if any(shared):
    raise ValueError(f"{info.path}: schedule 'concat' needs the batch axis first in every input of the layer")
  pulls = []
  for rows in (slice(None, n), slice(n, None)):
    _, pull = jax.vjp(apply, values, [x[rows] for x in arrays])
    pulls.append(pull(cotangent[rows]))
  (d_values, d_train), (gradients, d_val) = pulls
  d_arrays = [
    autodiff.no_cotangent(x) if a.dtype == jax.dtypes.float0 else jnp.concatenate([a, b])
    for x, a, b in zip(arrays, d_train, d_val, strict=True)
  ]
  parts = {name: (gradients[name][None].astype(p[0].dtype), *p[1:]) for name, p in parts.items()}
  return ([x[:n] for x in arrays], cotangent[:n]), (d_values, d_arrays), parts


# A table used twice, scored exactly along a direction that is known only at the end of the backward pass.
#
# A tied table gets one part of its gradient at the output, where the backward pass begins, and the other at the lookup,
# where it ends. Adam's direction needs the whole gradient, and the schedules 'reverse_scan' and 'concat' know the whole
# validation gradient only at the end. So the lookup passes three arrays to the output, the link. Their cotangents carry
# data back: that of the table is the output's part of the weight gradient, and those of two zeros are *defined* to be
# the output's input h and cotangent delta (`rules_models` has a smaller pair).
#
# D features, V vocabulary.


def _linked_call(twin, rule, method, info: TwinInfo, values, arrays, parts, probes):
  """A call of a table that is used by `__call__`, and then by one other method."""
  ((name, table),) = values.items()
  use = info.linked
  assert use is not None
  sweep = rule.sweep(twin, use.method, use.static)

  def on_table(method):
    return lambda table, x: getattr(nnx.merge(info.stock, nnx.State({name: table})), method)(x)

  if method == use.method:
    if not hasattr(twin, "ghost_link"):
      raise ValueError(f"{info.path} is used as output before it is looked up; a tied table is looked up first")
    link = tuple(v[...] for v in twin.ghost_link)
    if sweep is not None:
      return sweep.linked_call(arrays, link)
    return _linked_attend(on_table(method), arrays[0], link, info.num_examples if info.num_val else None)
  op = _linked_lookup(twin, rule, info, sweep, on_table("__call__"), on_table("attend"))
  rows, link = op(table, arrays[0], parts[name], probes[name])
  _check_axes(info, method, rows)
  twin.ghost_link = nnx.List([nnx.Intermediate(x) for x in link])
  return rows


def _linked_lookup(twin, rule, info: TwinInfo, sweep, gather, attend):
  """op(table, ids, parts, probe) -> (the gathered rows, the link). gather(table, ids); attend(table, h)."""
  (param,), use = info.scored, info.linked
  assert use is not None
  train, val = slice(None, info.num_examples), slice(info.num_examples, None)

  def run(table_VD, ids):
    rows, shape = gather(table_VD, ids), use.input_shape
    if sweep is not None:
      return rows, (table_VD, *sweep.blank_link(shape, rows.dtype))
    return rows, (table_VD, jnp.zeros(shape, rows.dtype), jnp.zeros((*shape[:-1], table_VD.shape[0]), rows.dtype))

  @jax.named_scope("ghost_score")
  def score(table, ids, b, carried, weight_gradient, parts):
    direction, facts = directions.form(param, parts, weight_gradient)
    values = {param.name: table}
    lookup = rules.Call(twin, "__call__", values, (ids,), b, None, info.resolution)
    if sweep is not None:
      output_score = sweep.linked_score(table, carried, direction)
    else:
      h, delta = carried
      output = rules.Call(twin, use.method, values, (h,), delta, None, info.resolution)
      output_score = rule.score(output, param.name, direction)
    whole = rule.score(lookup, param.name, direction) + output_score
    scores = {"probe": constrain(whole, SCORES[: 1 + info.resolution])}
    return scores if facts is None else {**scores, "facts": facts}

  @jax.custom_vjp
  def op(table_VD, ids, parts, probe):
    return run(table_VD, ids)

  def forward(table_VD, ids, parts, probe):
    return run(table_VD, ids), (table_VD, ids, parts, probe)

  def backward(residuals, cotangents):
    table_VD, ids, parts, probe = residuals
    b, (d_table_out, *carried) = cotangents
    used = parts
    if info.num_val:  # the gradient of the validation rows, which come last, replaces parts[0]
      h, delta = carried
      _, pull = jax.vjp(lambda table: (gather(table, ids[val]), attend(table, h[val])), table_VD)
      (gradient,) = pull((b[val], delta[val]))
      used = (gradient[None].astype(parts[0].dtype), *parts[1:])
    (d_table_in,) = jax.vjp(lambda table: gather(table, ids[train]), table_VD)[1](b[train])
    d_table = d_table_in + d_table_out
    scores = score(table_VD, ids[train], b[train], [array[train] for array in carried], d_table, used)
    scores = jax.tree.map(lambda s, p: s.astype(p.dtype), scores, probe)
    return d_table, autodiff.no_cotangent(ids), jax.tree.map(jnp.zeros_like, parts), scores

  op.defvjp(forward, backward)
  return op


def _linked_attend(apply, h, link, num_examples: int | None):
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


def _zero_cotangent(x):
  return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else autodiff.no_cotangent(x)


def _check_axes(info: TwinInfo, method: str, out):
  rows = info.num_examples + info.num_val
  expected = (rows,) if info.num_positions is None else (rows, info.num_positions)
  if out.shape[: len(expected)] != expected:
    axes = "examples" if info.num_positions is None else "examples and positions"
    raise ValueError(
      f"{info.path}.{method} returns shape {out.shape}, but its leading axes must be the {axes} {expected}: give the "
      f"layer inputs with the batch axis first (broadcast shared inputs to the batch), or name it in ghost_exclude"
    )
