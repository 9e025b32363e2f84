"""Builds a model's probed twin, another graph definition over the same parameter paths. The model is not changed."""

import collections
import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from maxghost.config import ConfigError
from maxghost.ghost import probed, rules, rules_flax, rules_models  # noqa: F401  the last two register their rules
from maxghost.ghost.directions import DirectionSpec, GhostDirection, GhostProbe, ScoredParam, direction_state, part_name
from maxghost.optimizers import Matrix, Parameter, by_label
from maxghost.parallel import shardings
from maxghost.parallel.shardings import slash_path


@dataclasses.dataclass(frozen=True)
class Twin:
  """The probed model as pure data: merge `graphdef` with (params, probes, directions, rest). parameters: by label."""

  graphdef: nnx.GraphDef
  scored: tuple[ScoredParam, ...]
  excluded: tuple[str, ...]
  spec: DirectionSpec
  num_sets: int
  probe_template: nnx.State
  parameters: dict[str, Parameter]

  def zero_probes(self) -> nnx.State:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.probe_template)

  def placed(self, parts: dict) -> dict:
    """{label: parts} with sharded factors; unsharded, those of all layers would be the largest arrays of the step."""
    return {p.label: tuple(map(p.placed_factor, p.parts, parts[p.label])) for p in self.scored}

  def direction_state(self, parts: dict) -> nnx.State:
    return direction_state(self.scored, parts)

  def blank(self, params, probes, rest) -> nnx.Module:
    """With zero directions."""
    parts = {p.label: tuple(map(jnp.zeros, p.part_shapes(self.num_sets).values())) for p in self.scored}
    return self.merge(params, probes, self.direction_state(parts), rest)

  def merge(self, params, probes, directions, rest) -> nnx.Module:
    return nnx.merge(self.graphdef, params, probes, directions, rest, copy=True)  # at this level of a trace

  def scores(self, probe_gradients: nnx.State) -> tuple[dict, dict]:
    """({label: [*stack, K, n(, T)]}, {label: facts [*stack, K, 2]}); facts, and K + 1 sets: see `directions.form`."""
    flat = dict(nnx.to_flat_state(probe_gradients))

    def part(kind: str) -> dict:
      return {p.label: flat[p.part_path(kind)][...] for p in self.scored}

    return part("probe"), part("facts") if self.spec.in_backward else {}


def split(model: nnx.Module):
  """(params, rest) of a model, for `Twin.merge`."""
  return nnx.split(model, nnx.Param, ...)[1:]


def attach(model: nnx.Module, *, num_examples: int, num_positions: int | None = None, num_sets: int = 1,
           spec: DirectionSpec | None = None, exclude: tuple[str, ...] = (), num_val: int = 0,
           linked: dict[str, probed.Use] | None = None, recorder: probed.Recorder | None = None) -> Twin:  # fmt: skip
  """Replaces each supported layer by its probed twin, in a copy of the model's graph.

  num_positions: T, to score every position of every example [n, T]; None scores whole examples [n]. exclude: fnmatch
  patterns of parameter paths that are not scored; each must match a path. num_val: validation rows at the end of each
  batch (schedule 'concat'), not counted by num_examples. linked: {module path: second use} of tables whose direction
  needs both uses. recorder: see `probed`. Raises ValueError for a Param without a rule, a Param shared under two names,
  an exclude pattern without a match, or a rank that saves nothing on any parameter.
  """
  spec, linked, views = spec or DirectionSpec(), linked or {}, parameters(model)
  twin = nnx.clone(model)
  modules: dict[tuple, Any] = {path: node for path, node in nnx.iter_graph(twin) if isinstance(node, nnx.Module)}
  excluded = matching(views, exclude)
  reduced = (num_examples,) if num_positions is None else (num_examples, num_positions)
  scored: list[ScoredParam] = []
  uncovered, labels = [], {}
  for path, module in modules.items():
    names, found = [], rules.find(module)
    for name in (name for name, value in vars(module).items() if isinstance(value, nnx.Param)):
      where, own = slash_path((*path, name)), id(vars(module)[name])
      if labels.setdefault(own, where) != where:
        said = f"Param {where} is also {labels[own]}: a shared Param needs one owner whose methods make both"
        raise ValueError(f"{said} uses (as nnx.Embed's __call__ and attend)")
      names += [] if where in excluded else [name]
    if found is None:
      uncovered += [f"{slash_path((*path, n))} ({type(module).__name__})" for n in names]
    if found is None or not names:
      continue
    stock, state = nnx.split(found.stock(module))
    label, paths = slash_path(path), [(*path, name) for name in names]
    if inner := {slash_path((*path, place[0])) for place, _ in nnx.to_flat_state(state) if len(place) > 1}:
      said = f"{label} ({type(module).__name__}) has a rule, which scores what is in the layer itself, not in"
      raise ValueError(f"{said} {', '.join(sorted(inner))}: move its own parameters into a layer of their own")
    own = tuple(_probe(module, path, found, views[slash_path(path)], spec, num_sets, reduced) for path in paths)
    module.ghost_info = probed.TwinInfo(label, stock, own, reduced, num_val, linked.get(label), recorder)
    module.__class__ = _twin_class(type(module), found)
    scored += own
  if uncovered:
    said = f"no scoring rule covers {', '.join(uncovered)}. Ways out: register one with @ghost.rule(LayerType), name "
    said += "the paths in ghost_exclude, or use ghost_schedule=forward_mode, which needs no rules. Layers with rules: "
    raise ValueError(said + ", ".join(sorted(layer.__name__ for layer in rules.RULES)))
  if spec.rank and spec.must_gain and not any(p.low_rank for p in scored):
    matrices = [p.parameter.matrix_shape(p.shape) for p in scored if p.parameter.rows]
    most = max((i * o // (2 * (i + o)) for i, o in matrices), default=0)
    use = f"use at most {most}, or 0" if most else "use 0"
    raise ValueError(f"ghost_rank={spec.rank} saves nothing on any parameter of this model: {use} for exact scores")
  twin_graphdef, _, probes, _, _ = nnx.split(twin, nnx.Param, GhostProbe, GhostDirection, ...)
  ordered = tuple(sorted(scored, key=lambda param: param.label))
  return Twin(twin_graphdef, ordered, tuple(sorted(excluded)), spec, num_sets, probes, views)


def parameters(model: nnx.Module) -> dict[str, Parameter]:
  """{path: Parameter} of a model, with the matrix views of the layers' rules and of the Params."""
  modules = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
  found = {}
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    label, module, name = slash_path(path), modules.get(path[:-1]), str(path[-1])
    rule = None if module is None else rules.find(module)
    view = (0, 0) if rule is None else (rule.rows(module, name), rule.groups(module, name))
    found[label] = Parameter(label, *view, Matrix.of(variable))
  return found


def matching(labels: Collection[str], patterns: tuple[str, ...], key: str = "ghost_exclude") -> set[str]:
  """The parameter paths that match fnmatch patterns, those of `key`. Raises ConfigError for one without a match."""
  hits = {pattern: fnmatch.filter(labels, pattern) for pattern in patterns}
  if missed := [pattern for pattern in patterns if not hits[pattern]]:
    raise ConfigError(f"{key} pattern '{missed[0]}' matches no parameter (* is any text); paths: {', '.join(labels)}")
  found = set[str]().union(*hits.values())
  if key == "ghost_exclude" and len(found) == len(labels):
    given = [x for x in patterns if x not in labels] or patterns  # without the paths of untrained parameters
    left = [x for x in labels if x not in patterns] or labels
    raise ConfigError(f"{key}={','.join(given)} leaves no parameter to score; paths: {', '.join(left) or 'none'}")
  return found


def _probe(module, path, found: rules.Rule, view: Parameter, spec: DirectionSpec, num_sets, reduced) -> ScoredParam:
  """Adds the probe and the direction of a Param to its module. reduced: axes of a score, [n] or [n, T]."""
  param = getattr(module, path[-1])
  depth, dtype = param.ndim - found.rank(module, path[-1]), jnp.promote_types(param.dtype, jnp.float32)
  axes = param.get_metadata().get("axes")
  axes = tuple(axes) if axes is not None and len(axes) == param.ndim else None
  scored = ScoredParam(path, param.shape[:depth], param.shape[depth:], view, spec, axes)
  scores = num_sets + spec.own
  probes = {"probe": (*scored.stack_shape, scores, *reduced)}
  if spec.in_backward:
    probes["facts"] = (*scored.stack_shape, scores, 2)
  for kind, shapes in ((GhostProbe, probes), (GhostDirection, scored.part_shapes(num_sets))):
    for part, shape in shapes.items():
      setattr(module, part_name(scored.name, part), kind(jax.ShapeDtypeStruct(shape, dtype)))
  return scored


@functools.cache
def _twin_class(layer_type: type, found: rules.Rule) -> type:
  """A subclass of the layer whose methods that use parameters are probed."""
  methods = {method: functools.partialmethod(probed.probed_call, found, method) for method in found.methods}
  return type(f"Probed{layer_type.__name__}", (layer_type,), methods)


def prepare_twin(model, batch, loss_fn: Callable, *, num_sets: int, num_positions: int | None, spec: DirectionSpec,
                 exclude: tuple[str, ...] = (), schedule: str = "two_pass", num_val: int = 0) -> Twin:  # fmt: skip
  """Builds the twin for batches of this shape.

  A direction may need the whole gradient of a parameter (AdamW's, or a schedule other than two_pass). Then an abstract
  trace finds tables that are used twice, and these are linked (`probed`). batch: arrays or shapes with the example axis
  first. num_val: validation rows that schedule 'concat' appends to it. Raises ValueError as `attach`; for a parameter
  used outside its layer; for a layer that runs several times where its direction needs the whole gradient; and for
  unscored parameters with schedule 'concat'.
  """
  num_examples = jax.tree.leaves(batch)[0].shape[0]
  num_val = num_val if schedule == "concat" else 0
  sizes = {"num_examples": num_examples, "num_positions": num_positions, "num_sets": num_sets, "num_val": num_val}
  attached = functools.partial(attach, model, spec=spec, exclude=exclude, **sizes)
  twin = attached()
  if schedule == "concat" and twin.excluded:
    said = f"ghost_schedule=concat cannot leave {', '.join(twin.excluded)} unscored: only a scored layer keeps the "
    said += "validation rows out of its training gradient"
    raise ValueError(f"{said}. Use two_pass or reverse_scan, or an empty ghost_exclude")
  one_call = spec.in_backward or schedule != "two_pass"
  uses, apart, runs = _calls(attached, model, loss_fn, batch, num_examples + num_val, one_call)
  if apart:
    said = f"{', '.join(apart)}: used outside its layer's methods, or set by the model, where no rule scores it. Call"
    raise ValueError(f"{said} the layer (a tied output: nnx.Embed.attend), or use ghost_schedule=forward_mode")
  if not one_call:
    return twin
  layers = {slash_path(p.path[:-1]): math.prod(p.stack_shape) for p in twin.scored}
  # First and second uses: a table may have one lookup and one other use.
  calls = {path: [runs[f"maxghost {path} {is_second}"] for is_second in (False, True)] for path in layers}
  often = {path: sum(counts) for path, counts in calls.items() if not {0, layers[path]}.issuperset(counts)}
  if where := ", ".join(f"{path} ({count} calls)" for path, count in often.items()):
    said = f"{where}: ghost_direction={spec.rule.direction} with ghost_schedule={schedule} needs the whole gradient of"
    use = "Use ghost_direction=sgd with two_pass, or name the paths in ghost_exclude"
    raise ValueError(f"{said} a parameter at one call. {use}")
  linked = {use.path: use for use in uses if use.is_second and all(calls[use.path])}
  return attached(linked=linked) if linked else twin


def _calls(attached: Callable[..., Twin], model: nnx.Module, loss_fn: Callable, batch, rows: int, counted: bool):
  """(probed calls, labels of Params used besides, if `counted` `_runs` of the loss), in abstract traces."""
  given = jax.eval_shape(lambda batch: batch, batch)  # in dtypes that JAX has
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), given)
  (params, rest), recorder = split(model), probed.Recorder()
  twin = attached(recorder=recorder)
  arguments = (params, twin.probe_template), rest, shapes

  def loss(variables, rest, batch):
    built = twin.blank(variables[0], variables[1], rest)
    recorder.arrays.update({p: v[...] for p, v in nnx.to_flat_state(nnx.state(built, (nnx.Param, GhostProbe)))})
    return loss_fn(built, batch)[0]

  def gradients(scale, variables, rest, batch):  # of probes too, which a transform then copies where it copies Params
    return by_label(jax.grad(lambda variables: jnp.sum(scale * loss(variables, rest, batch)))(variables)[0])

  jaxpr, labels = jax.make_jaxpr(gradients)(1.0, *arguments).jaxpr, sorted(twin.parameters)
  has_gradient = lambda kept: dce_jaxpr(jaxpr, [label in kept for label in labels])[1][0]  # noqa: E731  reads `scale`
  wanted = set(labels).difference(twin.excluded)
  apart = [label for label in labels if has_gradient(wanted & {label})] if has_gradient(wanted) else []
  runs = collections.Counter()
  if counted:
    with shardings.use(None):  # the stages of a pipeline would call a layer once for each micro-batch
      runs = _runs(jax.make_jaxpr(loss)(*arguments).jaxpr)
  recorder.arrays.clear()  # the caches of nnx.jit keep the recorder
  return recorder.uses, apart, runs


def _runs(jaxpr) -> collections.Counter:
  """{name of a value that a jaxpr marks: how often it is computed}; under vmap several at once."""
  found = collections.Counter()
  for equation in jaxpr.eqns:
    params, kind = equation.params, equation.primitive.name
    if kind == "name":
      found[params["name"]] += equation.outvars[0].aval.size
    for inner in jax.tree.leaves([*params.values()], is_leaf=lambda x: hasattr(x, "eqns")):
      for name, num in _runs(inner).items() if hasattr(inner, "eqns") else ():
        found[name] += num * (params["length"] if kind == "scan" else 1)
  return found
