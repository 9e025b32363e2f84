"""The probed call: a layer's own computation whose backward pass also scores it.

`custom_vjp` *defines* the cotangent of the probe, a zero per example, to be the score <grad_W loss_i, u>. Autodiff
then sums scores over layers, scan steps and tied uses, inside lax.scan and jax.checkpoint, on any mesh.

K validation sets, n examples, T positions.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxghost.ghost import directions, rules
from maxghost.ghost.directions import ScoredParam, part_name
from maxghost.models import autodiff
from maxghost.parallel import shardings
from maxghost.parallel.shardings import constrain

ARRAYS = (nnx.Variable, jax.Array, np.ndarray)  # the data of a layer
_OWN = (directions.GhostProbe, directions.GhostDirection)  # what a twin has besides
SCORES = (None, "activation_batch", "activation_length")  # logical axes of a score [K, n(, T)]


@dataclasses.dataclass(frozen=True)
class Use:
  """One call of a probed layer in a trace."""

  path: str
  method: str
  argument_shapes: tuple
  static: tuple  # arguments that are not arrays
  is_second: bool  # the use of a table after its lookup


@dataclasses.dataclass(eq=False)
class Recorder:
  """Calls and arrays {path: array} of a twin that a trace finds. It is a part of the twin's graph, by which nnx.jit and
  nnx.remat keep their traces, so that none is used again."""

  uses: list[Use] = dataclasses.field(default_factory=list)
  arrays: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TwinInfo:
  """Static properties of one probed layer: its path, its graph without probes (`stock`), and its scored parameters.

  reduced: leading axes of the layer's output, and last ones of a probe: (n,) scores examples, (n, T) every position.
  num_val: validation rows at the end of the batch (schedule 'concat'), whose weight gradient is G.
  linked: second use of a table whose direction needs the weight gradient of both. recorder: of a trace for `Use`s.
  """

  path: str
  stock: nnx.GraphDef
  scored: tuple[ScoredParam, ...]
  reduced: tuple[int, ...]
  num_val: int = 0
  linked: Use | None = None
  recorder: Recorder | None = None


def probed_call(twin: Any, rule: rules.Rule, method: str, /, *args, **kwargs):
  """Calls `method(*args, **kwargs)` of the layer behind `twin`; the backward pass scores into the twin's probes."""
  info: TwinInfo = twin.ghost_info
  bound = inspect.signature(getattr(type(twin).__base__, method)).bind(twin, *args, **kwargs)
  args, kwargs = bound.args[1:], bound.kwargs  # rules know arguments by place
  values = {n: v[...] for n, v in vars(twin).items() if isinstance(v, ARRAYS) and type(v) not in _OWN}
  parts = {p.name: tuple(getattr(twin, part_name(p.name, part))[...] for part in p.parts) for p in info.scored}
  kinds = ("probe", "facts") if info.scored[0].spec.in_backward else ("probe",)
  probes = {p.name: {kind: getattr(twin, part_name(p.name, kind))[...] for kind in kinds} for p in info.scored}
  found, others = autodiff.separate((args, kwargs), lambda x: isinstance(x, ARRAYS[1:]))
  arrays, tree = jax.tree.flatten(found)
  static = tuple(jax.tree.leaves(others))  # such as strings and flags
  rebuild = lambda arrays: autodiff.join(jax.tree.unflatten(tree, arrays), others)  # noqa: E731
  passes = _passes(twin, rule, method, static, rebuild)
  if autodiff.for_inputs_only():
    return rule.combine(twin, passes.apply(values, arrays), *args)
  if info.recorder is not None:
    out = passes.apply(_cut_off(twin, values, info.recorder.arrays), arrays)
    use = Use(info.path, method, tuple(x.shape for x in arrays), static, method in rule.second_uses)
    numbers = (x.reshape(-1)[:1].sum() for x in (out, *(values[p.name] for p in info.scored)))
    checkpoint_name(sum(numbers), f"maxghost {use.path} {use.is_second}")  # `attach` counts these
    info.recorder.uses.append(use)
    return rule.combine(twin, out, *args)
  if info.linked is None:
    out = _scored_call(passes, values, arrays, parts, probes)
  elif method == info.linked.method:
    out = _linked_output(passes, arrays)
  else:
    output = _passes(twin, rule, info.linked.method, info.linked.static, lambda arrays: (arrays, {}))
    out = _linked_lookup(passes, output, values, arrays, parts, probes)
  rows = probes[info.scored[0].name]["probe"].shape[1:]  # those of a micro-batch on the stages of a pipeline
  expected = (rows[0] + info.num_val, *rows[1:])
  if out.shape[: len(expected)] != expected:
    axes = " and ".join(("examples", "positions")[: len(expected)])
    raise ValueError(
      f"{info.path}.{method} returns shape {out.shape}, but its leading axes must be the {axes} {expected}: give the "
      f"layer inputs with the batch axis first (broadcast shared inputs to the batch), or name it in ghost_exclude"
    )
  return rule.combine(twin, out, *args)


def _cut_off(twin, values: dict, given: dict) -> dict:
  """`values` with zeros for scored Params, but for those that the model has set since, other than by a cast. Where a
  transform such as nnx.jit copied the probe too, that is unknown, and they are zero."""
  cut = dict(values)
  for param in twin.ghost_info.scored:
    old, new, probe = given[param.path], values[param.name], param.part_path("probe")
    is_set = getattr(twin, probe[-1])[...] is given[probe] and new is not old and new.dtype == old.dtype
    cut[param.name] = new if is_set else jnp.zeros_like(new)
  return cut


class LayerPasses:
  """The forward and the backward pass of a method of a probed layer; `rules_models.TiledPasses` has its own.

  The layer's own VJP gives the training gradients. values: {name: array} of the layer's Variables. arrays: of the
  arguments; rebuild(arrays) -> (args, kwargs).
  """

  def __init__(self, rule: rules.Rule, twin: Any, method: str, rebuild: Any = None):
    self.rule, self.twin, self.method, self.rebuild = rule, twin, method, rebuild
    self.info: TwinInfo = twin.ghost_info

  def apply(self, values: dict, arrays):
    """The method's output. Raises ValueError for one that is not an array, and for a method that changes its layer."""
    args, kwargs = self.rebuild(arrays)
    layer = nnx.merge(self.info.stock, nnx.State(values))
    before = _held(layer)
    out, after = getattr(layer, self.method)(*args, **kwargs), _held(layer)
    changed = ", ".join(name for name, value in after.items() if value is not before.get(name))
    if changed or not isinstance(out, jax.Array):
      done = f"changes {changed}" if changed else f"returns a {type(out).__name__}"
      said = f"{self.info.path}.{self.method} {done}, but a layer with a rule keeps what it holds (BatchNorm: call"
      said += " model.eval() first) and returns one array"
      raise ValueError(f"{said}: change it, name its parameters in ghost_exclude, or use ghost_schedule=forward_mode")
    return out

  def forward(self, values: dict, arrays):
    """(output, residuals)."""
    return jax.vjp(self.apply, values, arrays)

  def backward(self, values: dict, arrays, residuals, cotangent, form: Any = None, gradients=True) -> tuple:
    """((gradients of values, of arrays), {name: cotangents of its probes}), None if not asked. form: see `form`."""
    scores: dict | None = None
    if form is not None:
      call, scores = self._call(values, arrays, cotangent), {}
      for param in self.info.scored:
        direction, facts = form(param)
        with jax.named_scope("ghost_score"):
          score, leading = self.rule.score(call, param.name, direction), cotangent.shape[: len(self.info.reduced)]
          given = getattr(score, "shape", (type(score),))
          if given[1:] != leading:
            raise ValueError(f"{param.label}: {type(self.rule).__name__}.score gives {given}, not {('K', *leading)}")
          score = constrain(score, SCORES[: 1 + len(self.info.reduced)])
        scores[param.name] = filled(score, facts, values[param.name])
      if gradients:  # With the scores first, the cotangent of the layer's input can be formed where it is used.
        cotangent, scores = autodiff.barrier(cotangent, scores)
    return residuals(cotangent) if gradients else None, scores

  def _call(self, values: dict, arrays, cotangent) -> rules.Call:
    args, _ = self.rebuild(arrays)
    apply = lambda values: self.apply(values, arrays)  # noqa: E731
    return rules.Call(self.twin, self.method, values, args, cotangent, apply, len(self.info.reduced))

  # For a table that is used twice, see below.

  def blank_link(self, table, dtype) -> tuple:
    """Zeros, whose cotangents become what is `carried`. dtype: of the looked-up rows."""
    use: Any = self.info.linked
    shape = use.argument_shapes[0]
    return jnp.zeros(shape, dtype), jnp.zeros((*shape[:-1], table.shape[0]), dtype)

  def carried(self, arrays, residuals, cotangent) -> tuple:
    """The arrays that `carried_score` needs."""
    return arrays[0], cotangent

  def carried_score(self, values: dict, carried, direction):
    """The score of this use, [K, *reduced]."""
    (name,), (array, cotangent) = values, carried
    return self.rule.score(self._call(values, [array], cotangent), name, direction)


def _held(layer: nnx.Module) -> dict:
  """{name: value} of a layer's attributes."""
  own = {name: v for name, v in vars(layer).items() if not name.startswith("_pytree__")}
  return {name: v.get_value() if isinstance(v, nnx.Variable) else v for name, v in own.items()}


def _passes(twin, rule: rules.Rule, method: str, static: tuple, rebuild: Callable) -> LayerPasses:
  tiled = rule.passes(twin, method, static)
  if tiled is not None and twin.ghost_info.num_val:
    raise ValueError("num_vocab_tiling > 1 has no ghost_schedule=concat; use two_pass or reverse_scan")
  return tiled or LayerPasses(rule, twin, method, rebuild)


def filled(score, facts, value) -> dict:
  """The cotangents of a Param's probes; see `directions.form`."""
  found = {"probe": score} if facts is None else {"probe": score, "facts": facts}
  return {part: x.astype(jnp.promote_types(value.dtype, jnp.float32)) for part, x in found.items()}


def _scored_call(passes: LayerPasses, values, arrays, parts, probes):
  """The method, whose backward pass fills the probes."""
  info = passes.info
  op = jax.custom_vjp(lambda values, arrays, parts, probes: passes.apply(values, arrays))

  def forward(values, arrays, parts, probes):
    out, residuals = passes.forward(values, arrays)
    return out, (values, arrays, parts, residuals)

  @shardings.use(shardings.current())  # autodiff may go back after the block in which the method was called
  def backward(saved, cotangent):
    values, arrays, parts, residuals = saved
    zeros, known = jax.tree.map(autodiff.zero_cotangent, parts), None
    if info.num_val:
      (arrays, cotangent), known, parts = _split_rows(passes, values, arrays, cotangent, parts)
    elif info.scored[0].spec.in_backward:
      known, _ = passes.backward(values, arrays, residuals, cotangent)

    def form(param: ScoredParam):
      return directions.form(param, parts[param.name], None if known is None else known[0][param.name])

    found, scores = passes.backward(values, arrays, residuals, cotangent, form, gradients=known is None)
    gradients, scores = (found, scores) if known is None else autodiff.barrier(known, scores)
    return *gradients, zeros, scores

  op.defvjp(forward, backward)
  return op(values, arrays, parts, probes)


def _split_rows(passes: LayerPasses, values, arrays, cotangent, parts):
  """((arrays, cotangent) of training rows, (their d_values, d_arrays of all rows), parts with G of validation rows)."""
  info, n = passes.info, passes.info.reduced[0]
  if any(x.ndim == 0 or x.shape[0] != n + info.num_val for x in arrays):
    raise ValueError(f"{info.path}: schedule 'concat' needs the batch axis first in every input of the layer")
  halves = slice(None, n), slice(n, None)
  pulls = [jax.vjp(passes.apply, values, [x[rows] for x in arrays])[1](cotangent[rows]) for rows in halves]
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
# the output's input h and cotangent delta (a tiled output has a smaller pair).
def _linked_lookup(lookup: LayerPasses, output: LayerPasses, values, arrays, parts, probes):
  """The gathered rows; keeps the link in the twin. output: the passes of the second use."""
  info, ((name, table),), (ids,) = lookup.info, values.items(), arrays
  (param,) = info.scored
  train, val = slice(None, info.reduced[0]), slice(info.reduced[0], None)

  gather = lambda table, ids: lookup.apply({name: table}, [ids])  # noqa: E731

  def run(table, ids, parts, probe):
    rows = gather(table, ids)
    return rows, (table, *output.blank_link(table, rows.dtype))

  @jax.named_scope("ghost_score")
  def score(table, ids, b, carried, weight_gradient, parts):
    direction, facts = directions.form(param, parts, weight_gradient)
    output_score = output.carried_score({name: table}, carried, direction)
    whole = lookup.carried_score({name: table}, (ids, b), direction) + output_score
    return filled(constrain(whole, SCORES[: 1 + len(info.reduced)]), facts, table)

  def forward(table, ids, parts, probe):
    return run(table, ids, parts, probe), (table, ids, parts)

  def backward(residuals, cotangents):
    table, ids, parts = residuals
    b, (d_table_out, *carried) = cotangents
    used = parts
    if info.num_val:  # the gradient of the validation rows, which come last, replaces parts[0]
      h, delta = carried
      _, pull = jax.vjp(lambda table: (gather(table, ids[val]), output.apply({name: table}, [h[val]])), table)
      used = (pull((b[val], delta[val]))[0][None].astype(parts[0].dtype), *parts[1:])
    d_table = jax.vjp(lambda table: gather(table, ids[train]), table)[1](b[train])[0] + d_table_out
    scores = score(table, ids[train], b[train], [array[train] for array in carried], d_table, used)
    return d_table, autodiff.no_cotangent(ids), jax.tree.map(autodiff.zero_cotangent, parts), scores

  op = jax.custom_vjp(run)
  op.defvjp(forward, backward)
  rows, link = op(table, ids, parts[name], probes[name])
  lookup.twin.ghost_link = nnx.List([nnx.Intermediate(x) for x in link])
  return rows


def _linked_output(passes: LayerPasses, arrays):
  """The second use, whose backward pass sends (gradient of the table, *`carried`) along the link."""
  info, twin = passes.info, passes.twin
  if not hasattr(twin, "ghost_link"):
    raise ValueError(f"{info.path} is used as output before it is looked up; a tied table is looked up first")
  (param,), link = info.scored, tuple(v[...] for v in twin.ghost_link)
  op = jax.custom_vjp(lambda arrays, table, *blank: passes.apply({param.name: table}, arrays))

  def forward(arrays, table, *blank):
    out, residuals = passes.forward({param.name: table}, arrays)
    return out, (arrays, table, residuals)

  def backward(saved, cotangent):
    arrays, table, residuals = saved
    (d_values, d_arrays), _ = passes.backward({param.name: table}, arrays, residuals, cotangent)
    if info.num_val:  # the validation rows, which come last, do not count
      train = slice(None, info.reduced[0])
      _, pull = jax.vjp(lambda values: passes.apply(values, [x[train] for x in arrays]), {param.name: table})
      (d_values,) = pull(cotangent[train])
    carried = passes.carried(arrays, residuals, cotangent)
    return d_arrays, d_values[param.name], *(x.astype(zeros.dtype) for x, zeros in zip(carried, link[1:], strict=True))

  op.defvjp(forward, backward)
  return op(arrays, *link)
