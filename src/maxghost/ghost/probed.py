"""The probed call: a layer's own computation whose backward pass also scores it.

`custom_vjp` *defines* the cotangent of the probe, a zero per example, to be the score <grad_W loss_i, u>. Autodiff
does the rest: it adds scores over layers, scan steps and tied uses, inside lax.scan and jax.checkpoint, on any mesh.

K validation sets, n examples, T positions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.ghost import directions, rules, tied, usage
from maxghost.ghost.directions import DirectionSpec


@dataclasses.dataclass(frozen=True)
class TwinInfo:
  """Static facts of one probed layer: its path for messages, its stock graph, what is scored and how.

  linked: for a table whose direction needs the weight gradient of both its uses, the shape of `attend`'s input.
  """

  path: str
  stock: nnx.GraphDef
  scored: tuple[str, ...]
  spec: DirectionSpec
  num_examples: int
  num_positions: int | None
  linked: tuple[int, ...] = ()


def part_name(name: str, part: str) -> str:
  """Attribute of the twin that holds a part of parameter `name`'s direction, or its probe."""
  return f"ghost_{name}_{part}"


def probed_call(twin: nnx.Module, rule: rules.Rule, method: str, *args):
  """The value of `method(*args)` of the layer that `twin` stands for; its backward pass fills the twin's probes."""
  info: TwinInfo = twin.ghost_info
  usage.note(info.path, method, tuple(x.shape for x in args))
  values = {name: v[...] for name, v in vars(twin).items() if isinstance(v, nnx.Variable) and not name.startswith("ghost_")}
  parts = {name: tuple(getattr(twin, part_name(name, p))[...] for p in info.spec.parts) for name in info.scored}
  probes = {name: getattr(twin, part_name(name, "probe"))[...] for name in info.scored}

  def apply(values, *args):
    return getattr(nnx.merge(info.stock, nnx.State(values)), method)(*args)

  if info.linked:
    return _linked_call(twin, rule, method, apply, info, values, args, parts, probes)
  op = _make_op(twin, rule, method, apply, info)
  return op(values, args, parts, probes)


def _make_op(twin, rule, method, apply, info: TwinInfo):
  resolution = 1 if info.num_positions is None else 2

  @jax.custom_vjp
  def op(values, args, parts, probes):
    return apply(values, *args)

  def forward(values, args, parts, probes):
    out = apply(values, *args)
    _check_axes(info, method, out)
    return out, (values, args, parts)

  def backward(residuals, cotangent):
    values, args, parts = residuals
    # The layer's own rule gives the training gradients, so that they are those of a run without scores.
    _, pull = jax.vjp(apply, values, *args)
    d_values, *d_args = pull(cotangent)
    call = rules.Call(
      twin, method, values, args, cotangent, lambda v: apply(v, *args), resolution
    )
    scores = {}
    for name in info.scored:
      u_K = directions.form(info.spec, parts[name], d_values[name])
      scores[name] = rule.score(call, name, u_K).astype(_probe_dtype(values[name].dtype))
    return d_values, tuple(d_args), jax.tree.map(_zero_cotangent, parts), scores

  op.defvjp(forward, backward)
  return op


def _linked_call(twin, rule, method, apply, info: TwinInfo, values, args, parts, probes):
  """A table used by `__call__` first and `attend` later; see `tied`."""
  ((name, table),) = values.items()

  def on_table(method):
    return lambda table, x: getattr(nnx.merge(info.stock, nnx.State({name: table})), method)(x)

  if method == "attend":
    if not hasattr(twin, "ghost_link"):
      raise ValueError(f"{info.path}.attend is called before {info.path}.__call__; a tied table is looked up first")
    return tied.attend(on_table(method), args[0], tuple(v[...] for v in twin.ghost_link))
  resolution = 1 if info.num_positions is None else 2

  def score(ids, b, h, delta, u_K):
    lookup = rules.Call(twin, "__call__", values, (ids,), b, None, resolution)
    output = rules.Call(twin, "attend", values, (h,), delta, None, resolution)
    return rule.score(lookup, name, u_K) + rule.score(output, name, u_K)

  score.spec = info.spec
  rows, link = tied.lookup(on_table(method), args[0], table, parts[name], probes[name], info.linked, score)
  _check_axes(info, method, rows)
  twin.ghost_link = nnx.List([nnx.Intermediate(x) for x in link])
  return rows


def _probe_dtype(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _zero_cotangent(x):
  return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)


def _check_axes(info: TwinInfo, method: str, out):
  expected = (info.num_examples,) if info.num_positions is None else (info.num_examples, info.num_positions)
  if out.shape[: len(expected)] != expected:
    axes = "examples" if info.num_positions is None else "examples and positions"
    raise ValueError(
      f"{info.path}.{method} returns shape {out.shape}, but its leading axes must be the {axes} {expected}: give the "
      f"layer inputs with the batch axis first (broadcast shared inputs to the batch), or name it in ghost_exclude"
    )
