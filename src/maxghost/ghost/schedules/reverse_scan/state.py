"""The model as seen by the walk: the stacked layers, and everything outside of them ("outer").

K validation sets, n examples, L layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.ghost.attach import ScoredParam, Twin
from maxghost.ghost.schedules.base import Problem
from maxghost.ghost.schedules.passes import by_label
from maxghost.ghost.variables import GhostDirection, GhostProbe
from maxghost.parallel.shardings import slash_path


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
  """A value for each validation set, and one for the training rows."""

  val: tuple
  train: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
  """Input of a layer and residuals of its VJP, kept from the forward pass; None: recomputes the residuals."""

  x: Any
  saved: list | None = None


@dataclasses.dataclass(frozen=True)
class Layers:
  """A model and its twin, split at the stacked layers.

  prefix: path of the layers. params, rest: of all layers, with a leading layer axis. graphdef, twin_graphdef, probes:
  of one layer. inner, outer: the scored parameters of the layers, and those outside. scalars: of the twin's rule.
  """

  problem: Problem
  twin: Twin
  prefix: tuple
  graphdef: nnx.GraphDef
  params: nnx.State
  rest: nnx.State
  twin_graphdef: nnx.GraphDef
  probes: nnx.State
  outer_params: nnx.State
  outer_probes: nnx.State
  inner: tuple[ScoredParam, ...]
  outer: tuple[ScoredParam, ...]
  scalars: jax.Array | None

  @classmethod
  def of(cls, problem: Problem) -> "Layers":
    """Raises ValueError for a model without stacked layers."""
    twin, state, (graphdef, params, rest) = problem.twin, problem.state, problem.model
    assert twin is not None
    prefix = tuple(problem.loss.layers_path)
    layer_graphdef, layer_params, layer_rest = nnx.split(
      submodule(nnx.merge(graphdef, params, rest), prefix), nnx.Param, ...
    )
    probed = submodule(twin.merge(params, twin.zero_probes(), twin.blank_directions(), rest), prefix)
    twin_graphdef, _, probes, _, _ = nnx.split(probed, nnx.Param, GhostProbe, GhostDirection, ...)
    return cls(
      problem=problem,
      twin=twin,
      prefix=prefix,
      graphdef=layer_graphdef,
      params=layer_params,
      rest=layer_rest,
      twin_graphdef=twin_graphdef,
      probes=jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), probes),
      outer_params=_outside(prefix, params),
      outer_probes=_outside(prefix, twin.zero_probes()),
      inner=tuple(p for p in twin.scored if p.path[: len(prefix)] == prefix),
      outer=tuple(p for p in twin.scored if p.path[: len(prefix)] != prefix),
      scalars=None if state is None else twin.spec.rule.scalars(state.count, state.clip_factor),
    )

  @property
  def count(self) -> int:
    """L."""
    return jax.tree.leaves(self.params)[0].shape[0]

  @property
  def label_prefix(self) -> str:
    return f"{slash_path(self.prefix)}/"

  def local(self, label: str) -> str:
    """The label inside a layer."""
    return label.removeprefix(self.label_prefix)

  def stacked(self):
    """Arguments of a layer, with a leading layer axis: parameters, rest, index."""
    return self.params, self.rest, jnp.arange(self.count)

  def outer_arrays(self) -> dict:
    """{name: {label: array}} of the optimizer's state."""
    return {} if self.problem.state is None else self.problem.state.arrays


@dataclasses.dataclass(frozen=True)
class Walk:
  """State shared by all layers of the walk. vjps: with a finished forward half; None: layers are recomputed."""

  layers: Layers
  vjps: Pair


def parts_of(layers: Layers, scored, gradients, arrays: dict):
  """({label: parts}, {label: captured [K]}) of parameters of one layer, or outside of the stack.

  gradients: K States. arrays: {name: {label: array}} of the optimizer's state. Labels are those inside the layer.
  """
  labelled = [by_label(g) for g in gradients]
  parts, captured = {}, {}
  for p in scored:
    label, direction = layers.local(p.label), p.spec.direction
    gradient_K = p.placed(jnp.stack([g[label] for g in labelled]), stacked=False)
    if direction.in_backward:
      kept = (arrays[name][label] for name in direction.rule.reads(p.spec.parameter))
      parts[label] = (gradient_K, *kept, layers.scalars)
    elif p.spec.low_rank:
      left, right, captured[label] = p.spec.factor(gradient_K, 1)
      parts[label] = (left, right)
    else:
      parts[label] = (gradient_K,)
  return parts, captured


def submodule(model: nnx.Module, path: tuple) -> nnx.Module:
  """The module at `path`; raises ValueError if there is none."""
  node = model
  for name in path:
    if not hasattr(node, str(name)):
      raise ValueError(f"the model has no stacked layers at {slash_path(path)}; set scan_layers=true")
    node = getattr(node, str(name))
  return node


def _outside(prefix: tuple, state: nnx.State) -> nnx.State:
  return nnx.from_flat_state({path: v for path, v in nnx.to_flat_state(state) if path[: len(prefix)] != prefix})


def join(prefix: tuple, inner: nnx.State, outer: nnx.State) -> nnx.State:
  """The State of the whole model from that of the layers and that outside."""
  flat = {(*prefix, *path): v for path, v in nnx.to_flat_state(inner)}
  return nnx.from_flat_state(flat | dict(nnx.to_flat_state(outer)))
