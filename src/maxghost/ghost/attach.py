"""`attach`: a model's probed twin, with the same attribute names and the same Params.

The user's model is not touched: the twin is another graph definition over the same parameter paths.
"""

import dataclasses
import fnmatch
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost import rules
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.probed import TwinInfo, part_name, probed_call
from maxghost.ghost.variables import GhostDirection, GhostProbe


@dataclasses.dataclass(frozen=True)
class ScoredParam:
  """One scored parameter: where it is, how it is stacked."""

  path: tuple  # of the Param
  module_path: tuple
  name: str
  stack_shape: tuple[int, ...]

  @property
  def label(self) -> str:
    return "/".join(map(str, self.path))

  def part_path(self, part: str) -> tuple:
    return (*self.module_path, part_name(self.name, part))


@dataclasses.dataclass(frozen=True)
class Twin:
  """The probed model as pure data: merge `graphdef` with (params, probes, directions, rest)."""

  graphdef: nnx.GraphDef
  scored: tuple[ScoredParam, ...]
  excluded: tuple[str, ...]
  spec: DirectionSpec
  probe_template: nnx.State

  def zero_probes(self) -> nnx.State:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.probe_template)

  def direction_state(self, gradients: dict, second_moments: dict | None = None, scalars=None) -> nnx.State:
    """The twin's GhostDirection State. gradients: {label: [*stack, K, *parameter]}; for kind 'adam' also
    second_moments {label: [*stack, *parameter]} (v of the step before) and scalars, float [3]."""
    flat = {}
    for param in self.scored:
      flat[param.part_path("gradient")] = GhostDirection(gradients[param.label])
      if self.spec.kind == "adam":
        flat[param.part_path("second_moment")] = GhostDirection(second_moments[param.label])
        stacked = jnp.broadcast_to(scalars, (*param.stack_shape, *scalars.shape))
        flat[param.part_path("scalars")] = GhostDirection(stacked)
    return nnx.from_flat_state(flat)

  def merge(self, params, probes, directions, rest) -> nnx.Module:
    return nnx.merge(self.graphdef, params, probes, directions, rest)

  def scores_by_label(self, probe_gradients: nnx.State) -> dict:
    """{label: [*stack, K, n(, T)]} from the probes' gradients."""
    flat = dict(nnx.to_flat_state(probe_gradients))
    return {param.label: flat[param.part_path("probe")][...] for param in self.scored}


def split(model: nnx.Module):
  """(params, rest) of a model, as `Twin.merge` wants them."""
  _, params, rest = nnx.split(model, nnx.Param, ...)
  return params, rest


def attach(
  model: nnx.Module,
  *,
  num_examples: int,
  num_positions: int | None = None,
  num_sets: int = 1,
  spec: DirectionSpec = DirectionSpec(),
  exclude: tuple[str, ...] = (),
  linked: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> Twin:
  """Replaces each supported layer by its probed twin, in a copy of the model's graph.

  num_positions: None scores examples, an int scores every position of every example [n, T].
  exclude: fnmatch patterns over parameter paths that are left unscored on purpose; each must match something.
  linked: (module path, shape of attend's input) of tables used twice under a direction of kind 'adam'; see `tied`.
  Raises ValueError: a Param that no rule covers (its path and the ways out), a Param shared under two names, an
  exclude pattern without a match.
  """
  graphdef, state = nnx.split(model)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  twin = nnx.merge(graphdef, abstract)
  modules = {path: node for path, node in nnx.iter_graph(twin) if isinstance(node, nnx.Module)}
  owners = _owners(modules)
  excluded = _excluded(owners, exclude)
  scored, uncovered = [], []
  for module_path, module in modules.items():
    names = [n for p, n in owners if p == module_path and (p, n) not in excluded]
    if not names:
      continue
    found = rules.find(module)
    if found is None:
      uncovered += [(type(module).__name__, _label((*module_path, n))) for n in names]
      continue
    scored += _probe_module(module, module_path, names, found, num_examples, num_positions, num_sets, spec, linked)
  if uncovered:
    raise ValueError(_uncovered_message(uncovered))
  twin_graphdef, _, probes, _, _ = nnx.split(twin, nnx.Param, GhostProbe, GhostDirection, ...)
  return Twin(
    graphdef=twin_graphdef,
    scored=tuple(sorted(scored, key=lambda s: s.label)),
    excluded=tuple(sorted(_label((*p, n)) for p, n in excluded)),
    spec=spec,
    probe_template=probes,
  )


def _label(path: tuple) -> str:
  return "/".join(map(str, path))


def _owners(modules: dict) -> list[tuple[tuple, str]]:
  """(module path, attribute) of every Param; raises for a Param held under two names."""
  owners, seen = [], {}
  for path, module in modules.items():
    for name, value in vars(module).items():
      if not isinstance(value, nnx.Param):
        continue
      label = _label((*path, name))
      if id(value) in seen:
        raise ValueError(
          f"Param {label} is also {seen[id(value)]}: a shared Param needs one owner whose methods make both uses "
          f"(as nnx.Embed's __call__ and attend)"
        )
      seen[id(value)] = label
      owners.append((path, name))
  return owners


def _excluded(owners, patterns: tuple[str, ...]) -> set:
  labels = {(p, n): _label((*p, n)) for p, n in owners}
  matched = set()
  for pattern in patterns:
    hits = {key for key, label in labels.items() if fnmatch.fnmatch(label, pattern)}
    if not hits:
      raise ValueError(f"ghost_exclude pattern '{pattern}' matches no parameter; paths: {', '.join(labels.values())}")
    matched |= hits
  return matched


def _uncovered_message(uncovered) -> str:
  lines = ", ".join(f"{label} ({kind})" for kind, label in uncovered)
  return (
    f"no scoring rule covers {lines}. Ways out: register one with @ghost.rule(LayerType), name the paths in "
    f"ghost_exclude. Layers with rules: {', '.join(rules.layer_types())}"
  )


def _probe_module(module, path, names, found, num_examples, num_positions, num_sets, spec, linked) -> list[ScoredParam]:
  stock, _ = nnx.split(module)
  reduced = (num_examples,) if num_positions is None else (num_examples, num_positions)
  scored = []
  for name in names:
    param = getattr(module, name)
    shape, dtype = param.shape, jnp.promote_types(param.dtype, jnp.float32)
    stack = shape[: len(shape) - found.rank(module, name)]
    scored.append(ScoredParam((*path, name), path, name, stack))
    setattr(module, part_name(name, "probe"), GhostProbe(jax.ShapeDtypeStruct((*stack, num_sets, *reduced), dtype)))
    shapes = {
      "gradient": (*stack, num_sets, *shape[len(stack) :]),
      "second_moment": shape,
      "scalars": (*stack, 3),
    }
    for part in spec.parts:
      setattr(module, part_name(name, part), GhostDirection(jax.ShapeDtypeStruct(shapes[part], dtype)))
  module.ghost_info = TwinInfo(_label(path), stock, tuple(names), spec, num_examples, num_positions, dict(linked).get(_label(path), ()))
  module.__class__ = _twin_class(type(module))
  return scored


@functools.cache
def _twin_class(layer_type: type) -> type:
  """A subclass of the layer whose parameter-using methods are probed."""
  found = rules._RULES[layer_type]

  def probed_method(method):
    return lambda self, *args: probed_call(self, found, method, *args)

  return type(f"Probed{layer_type.__name__}", (layer_type,), {m: probed_method(m) for m in found.methods})
