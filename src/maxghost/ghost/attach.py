"""`attach`: builds a model's probed twin, another graph definition over the same parameter paths.

The user's model is not changed.
"""

import dataclasses
import fnmatch
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import (
  low_rank,
  rules,
  rules_flax,  # noqa: F401  registers the rules of flax's layers
  rules_head,  # noqa: F401  and of this project's layers
  rules_moe,  # noqa: F401
)
from maxghost.ghost.directions import DirectionSpec, ParamSpec
from maxghost.ghost.probed import SecondUse, TwinInfo, probed_call
from maxghost.ghost.variables import GhostDirection, GhostProbe, part_name
from maxghost.optimizers import Parameter
from maxghost.parallel import constrain, constrain_factor
from maxghost.parallel.shardings import slash_path


@dataclasses.dataclass(frozen=True)
class ScoredParam:
  """One scored parameter: its path, its stack axes, and how its direction is stored."""

  path: tuple  # of the Param
  name: str
  stack_shape: tuple[int, ...]
  shape: tuple[int, ...]  # of one unstacked layer
  spec: ParamSpec
  axes: tuple[str, ...] | None = None  # logical axes with those of the stack; None if the Param has none

  @property
  def label(self) -> str:
    return self.spec.label

  def part_path(self, part: str) -> tuple:
    return (*self.path[:-1], part_name(self.name, part))

  def placed(self, direction, stacked: bool = True):
    """Shards a whole direction [*stack, K, *parameter] (or [K, *parameter]) as its parameter."""
    if self.axes is None:
      return direction
    depth = len(self.stack_shape)
    stack, own = self.axes[:depth] if stacked else (), self.axes[depth:]
    return constrain(direction, (*stack, None, *own), f"direction of {self.label}")

  def placed_factor(self, part: str, factor):
    """Shards a factor along its groups, and along I or O.

    factor: the part 'left' [*stack, K, *groups, I, r] or 'right' [*stack, K, *groups, r, O] of a direction.
    """
    if self.axes is None:
      return factor
    depth, left = len(self.stack_shape), part == "left"
    parameter = self.spec.parameter
    inputs = depth + parameter.groups
    place, dim = (inputs, factor.ndim - 2) if left else (inputs + parameter.rows, factor.ndim - 1)
    shape = (*self.stack_shape, *self.shape)
    groups = {depth + 1 + i: depth + i for i in range(parameter.groups)}
    return constrain_factor(factor, dim, self.axes, shape, place, f"direction of {self.label}, {part}", groups)


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
    return {
      param.label: tuple(
        param.placed_factor(name, array) if name in ("left", "right") else array
        for name, array in zip(param.spec.parts, parts[param.label], strict=True)
      )
      for param in self.scored
    }

  def blank_directions(self) -> nnx.State:
    """The GhostDirection State of zeros."""
    shapes = {p.label: p.spec.part_shapes(p.stack_shape, self.num_sets, p.shape) for p in self.scored}
    return self.direction_state(
      {p.label: tuple(jnp.zeros(shapes[p.label][name]) for name in p.spec.parts) for p in self.scored}
    )

  def direction_state(self, parts: dict) -> nnx.State:
    """The twin's GhostDirection State from {label: tuple of arrays}, in the order of `ParamSpec.parts`."""
    flat = {}
    for param in self.scored:
      for name, array in zip(param.spec.parts, parts[param.label], strict=True):
        flat[param.part_path(name)] = GhostDirection(array)
    return nnx.from_flat_state(flat)

  def merge(self, params, probes, directions, rest) -> nnx.Module:
    return nnx.merge(self.graphdef, params, probes, directions, rest)

  def scores_by_label(self, probe_gradients: nnx.State, part: str = "probe") -> dict:
    """{label: [*stack, K, n(, T)]} from the probes' gradients.

    part: 'facts', for directions formed in the backward pass, gives {label: [*stack, K, 2]}; see `directions.form`.
    """
    flat = dict(nnx.to_flat_state(probe_gradients))
    return {p.label: flat[p.part_path(part)][...] for p in self.scored if p.part_path(part) in flat}


def split(model: nnx.Module):
  """(params, rest) of a model, for `Twin.merge`."""
  _, params, rest = nnx.split(model, nnx.Param, ...)
  return params, rest


def attach(
  model: nnx.Module,
  *,
  num_examples: int,
  num_positions: int | None = None,
  num_sets: int = 1,
  spec: DirectionSpec | None = None,
  exclude: tuple[str, ...] = (),
  num_val: int = 0,
  linked: tuple[tuple[str, SecondUse], ...] = (),
) -> Twin:
  """Replaces each supported layer by its probed twin, in a copy of the model's graph.

  Args:
    num_positions: T, to score every position of every example [n, T]; None scores whole examples [n].
    exclude: fnmatch patterns of parameter paths that are not scored; each must match a path.
    num_val: validation rows at the end of each batch (schedule 'concat'), not counted by num_examples.
    linked: (module path, second use) of tables whose direction needs both uses; see `tied`.

  Raises: ValueError for a Param without a rule, a Param shared under two names, or an exclude pattern without a match.
  """
  spec = spec or DirectionSpec()
  graphdef, state = nnx.split(model)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  twin = nnx.merge(graphdef, abstract)
  modules = {path: node for path, node in nnx.iter_graph(twin) if isinstance(node, nnx.Module)}
  owners = _owners(modules)
  excluded = excluded_labels(list(owners), exclude)
  settings = _Settings(num_examples, num_positions, num_sets, spec, num_val, dict(linked))
  scored, uncovered = [], []
  for module_path, module in modules.items():
    names = [n for label, (p, n) in owners.items() if p == module_path and label not in excluded]
    if not names:
      continue
    found = rules.find(module)
    if found is None:
      uncovered += [(type(module).__name__, slash_path((*module_path, n))) for n in names]
      continue
    scored += _probe_module(module, module_path, names, found, settings)
  if uncovered:
    raise ValueError(_uncovered_message(uncovered))
  _check_rank(spec, scored)
  twin_graphdef, _, probes, _, _ = nnx.split(twin, nnx.Param, GhostProbe, GhostDirection, ...)
  return Twin(
    graphdef=twin_graphdef,
    scored=tuple(sorted(scored, key=lambda s: s.label)),
    excluded=tuple(sorted(excluded)),
    spec=spec,
    num_sets=num_sets,
    probe_template=probes,
    parameters=parameters(model),
  )


@dataclasses.dataclass(frozen=True)
class _Settings:
  num_examples: int
  num_positions: int | None
  num_sets: int
  spec: DirectionSpec
  num_val: int
  linked: dict[str, SecondUse]


def parameters(model: nnx.Module) -> dict[str, Parameter]:
  """{path: Parameter} of a model, with the matrix views of the layers' rules."""
  modules = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
  found = {}
  for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    label, module, name = slash_path(path), modules.get(path[:-1]), str(path[-1])
    rule = None if module is None else rules.find(module)
    found[label] = Parameter(label)
    if module is not None and rule is not None:
      found[label] = Parameter(label, rule.rows(module, name), rule.groups(module, name))
  return found


def _owners(modules: dict) -> dict[str, tuple[tuple, str]]:
  """{label: (module path, attribute)} of every Param; raises ValueError for a Param held under two names."""
  owners, seen = {}, {}
  for path, module in modules.items():
    for name, value in vars(module).items():
      if not isinstance(value, nnx.Param):
        continue
      label = slash_path((*path, name))
      if id(value) in seen:
        raise ValueError(
          f"Param {label} is also {seen[id(value)]}: a shared Param needs one owner whose methods make both uses "
          "(as nnx.Embed's __call__ and attend)"
        )
      seen[id(value)] = label
      owners[label] = path, name
  return owners


def excluded_labels(labels: list[str], patterns: tuple[str, ...]) -> set[str]:
  """The parameter paths that match fnmatch patterns; raises ValueError for a pattern without a match."""
  left_out = set()
  for pattern in patterns:
    hits = fnmatch.filter(labels, pattern)
    if not hits:
      raise ValueError(f"ghost_exclude pattern '{pattern}' matches no parameter; paths: {', '.join(labels)}")
    left_out.update(hits)
  return left_out


def _uncovered_message(uncovered) -> str:
  lines = ", ".join(f"{label} ({kind})" for kind, label in uncovered)
  return (
    f"no scoring rule covers {lines}. Ways out: register one with @ghost.rule(LayerType), name the paths in "
    "ghost_exclude (GhostEngine: exclude=), or use ghost_schedule=forward_mode (GhostEngine: engine='jvp'), which "
    f"needs no rules. Layers with rules: {', '.join(rules.layer_types())}"
  )


def _check_rank(spec: DirectionSpec, scored: list[ScoredParam]) -> None:
  if spec.rank and not any(p.spec.low_rank for p in scored):
    matrices = [p.spec.parameter.matrix_shape(p.shape) for p in scored if p.spec.parameter.rows]
    useful = max((i * o // (2 * (i + o)) for i, o in matrices), default=0)
    raise ValueError(
      f"ghost_rank={spec.rank} saves nothing on any parameter of this model: use at most {useful}, or 0 for exact "
      f"scores"
    )


def _probe_module(module, path, names, found, settings: _Settings) -> list[ScoredParam]:
  stock, _ = nnx.split(found.stock(module))
  label = slash_path(path)
  reduced = (settings.num_examples,) + (() if settings.num_positions is None else (settings.num_positions,))
  scored = []
  for name in names:
    param = getattr(module, name)
    shape, dtype = param.shape, jnp.promote_types(param.dtype, jnp.float32)
    split_at = len(shape) - found.rank(module, name)
    stack, shape = shape[:split_at], shape[split_at:]
    parameter = Parameter(slash_path((*path, name)), found.rows(module, name), found.groups(module, name))
    gains = bool(parameter.rows) and low_rank.gains(settings.spec.rank, *parameter.matrix_shape(shape))
    spec = ParamSpec(parameter, settings.spec, gains)
    axes = param.get_metadata().get("axes")
    axes = tuple(axes) if axes is not None and len(axes) == len(stack) + len(shape) else None
    scored.append(ScoredParam((*path, name), name, stack, shape, spec, axes))
    probes = {"probe": (*stack, settings.num_sets, *reduced)}
    if settings.spec.in_backward:
      probes["facts"] = (*stack, settings.num_sets, 2)
    for part, probe_shape in probes.items():
      setattr(module, part_name(name, part), GhostProbe(jax.ShapeDtypeStruct(probe_shape, dtype)))
    for part, part_shape in spec.part_shapes(stack, settings.num_sets, shape).items():
      setattr(module, part_name(name, part), GhostDirection(jax.ShapeDtypeStruct(part_shape, dtype)))
  module.ghost_info = TwinInfo(
    path=label,
    stock=stock,
    scored=tuple((p.name, p.spec) for p in scored),
    num_examples=settings.num_examples,
    num_positions=settings.num_positions,
    num_val=settings.num_val,
    linked=settings.linked.get(label),
  )
  module.__class__ = _twin_class(type(module), found)
  return scored


@functools.cache
def _twin_class(layer_type: type, found: rules.Rule) -> type:
  """A subclass of the layer whose methods that use parameters are probed."""

  def probed_method(method):
    return lambda self, *args, **kwargs: probed_call(self, found, method, args, kwargs)

  return type(f"Probed{layer_type.__name__}", (layer_type,), {m: probed_method(m) for m in found.methods})
