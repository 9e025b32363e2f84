"""Scans over layers whose backward pass keeps only the carries at the boundaries of segments.

The VJP of `lax.scan` keeps the carry of every step, whatever its body's remat policy. Here an outer scan runs over
segments under `jax.checkpoint`, and an inner scan over the layers of one segment. This keeps L / k + k carries instead
of L, for one more forward pass; deeper nesting keeps fewer (Griewank and Walther, "Evaluating Derivatives", 2008,
chapter 12).

L layers, k layers in a segment.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.values import divisors
from maxghost.parallel.shardings import slash_path


def check(length: int, segment_lengths: tuple[int, ...]) -> None:
  """Raises ValueError, naming the divisors, unless each segment length divides the one before it, and `length`."""
  whole, what = length, f"{length} layers"
  for k in segment_lengths:
    if k < 1 or whole % k:
      raise ValueError(
        f"a segment of {k} layers does not divide {what}; use one of {', '.join(map(str, divisors(whole)))}"
      )
    whole, what = k, f"the segment of {k} layers around it"


def scan(body: Callable, carry, xs, segment_lengths: tuple[int, ...] = ()):
  """`jax.lax.scan(body, carry, xs)` whose backward pass keeps carries only at segment boundaries.

  segment_lengths: layers in a segment, then in a segment of a segment, ...; empty for a plain scan. carry, xs: pytrees,
  xs with a leading layer axis. Values are those of the plain scan, gradients too up to rounding.
  Raises ValueError for lengths that do not divide.
  """
  check(jax.tree.leaves(xs)[0].shape[0], segment_lengths)
  if not segment_lengths:
    return jax.lax.scan(body, carry, xs)
  segment = jax.checkpoint(lambda carry, xs: scan(body, carry, xs, segment_lengths[1:]), prevent_cse=False)
  carry, ys = jax.lax.scan(segment, carry, split(xs, segment_lengths[0]))
  return carry, join(ys)


def split(xs, segment_length: int):
  """[L, ...] -> [L / k, k, ...] in every leaf."""
  return jax.tree.map(lambda x: x.reshape(x.shape[0] // segment_length, segment_length, *x.shape[1:]), xs)


def join(ys):
  """[L / k, k, ...] -> [L, ...] in every leaf."""
  return jax.tree.map(lambda y: y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]), ys)


def remat_scan(
  f: Callable | None = None,
  *,
  segment_lengths: tuple[int, ...] = (),
  length: int | None = None,
  in_axes: tuple = (nnx.Carry, 0),
  out_axes: Any = nnx.Carry,
  policy: Callable | None = None,
) -> Callable:
  """`nnx.scan` whose backward pass keeps only the carries at segment boundaries; also a decorator.

    @remat_scan(segment_lengths=(8,))
    def forward(x, layer):  # layer: one of the stacked layers
      return layer(x)

    x = forward(x, layers)

  Variables that f changes in an object with a layer axis (RNG counts, batch statistics, new ones) are stacked back into
  it; those with axis nnx.Carry pass from layer to layer. An Rngs inside stacked layers has one stream per layer; split
  another with `nnx.split_rngs(splits=L)`, or carry its counts. The recomputed forward pass draws the same numbers.

  Args:
    f: called as f(*args) once per layer.
    segment_lengths: as in `scan`.
    length: L, where no argument has a layer axis.
    in_axes: one entry per argument: an int (the layer axis of its arrays), None (the same for every layer), nnx.Carry
      (at most one: a pytree of floats that passes from layer to layer) or, for an nnx object, `nnx.StateAxes` with
      these per filter.
    out_axes: nnx.Carry (returned as of the last layer) or an int (stacked along that axis); a tuple for several.
    policy: a `jax.checkpoint` policy for the inside of each layer; None saves everything of the current segment.

  Raises: ValueError for lengths that do not divide, arguments that disagree in L, or a changed Variable of axis None.
  """
  if f is None:
    return functools.partial(
      remat_scan, segment_lengths=segment_lengths, length=length, in_axes=in_axes, out_axes=out_axes, policy=policy
    )

  def wrapped(*args):
    if len(args) != len(in_axes):
      raise ValueError(f"{len(args)} arguments, but in_axes has {len(in_axes)} entries")
    return _LiftedScan(f, args, in_axes, out_axes, policy).run(length, segment_lengths)

  return wrapped


@dataclasses.dataclass(frozen=True)
class _Argument:
  """An argument taken apart. leaves: {path: array or Variable}, axes: {path: int | None | nnx.Carry}.

  graphdef: of an nnx object; else tree, of a pytree.
  """

  leaves: Mapping
  axes: Mapping
  graphdef: Any = None
  tree: Any = None

  @classmethod
  def of(cls, value, axis) -> "_Argument":
    if nnx.graph.is_graph_node(value):
      graphdef, state = nnx.split(value)
      flat = dict(nnx.to_flat_state(state))
      find = axis.map_prefix if isinstance(axis, nnx.StateAxes) else lambda path, variable: axis
      return cls(flat, {path: find(path, v) for path, v in flat.items()}, graphdef=graphdef)
    if isinstance(axis, nnx.StateAxes):
      raise ValueError("nnx.StateAxes in in_axes is for an nnx object; give an int, None or nnx.Carry")
    leaves, tree = jax.tree.flatten(value)
    return cls(dict(enumerate(leaves)), dict.fromkeys(range(len(leaves)), axis), tree=tree)

  def select(self, kind) -> dict:
    """{path: array} of the leaves whose axis is `kind`: int (any), None or nnx.Carry."""
    return {p: _array(v) for p, v in self.leaves.items() if _kind(self.axes[p]) is kind}

  def build(self, arrays: Mapping):
    """The value with these arrays as leaves."""
    if self.graphdef is None:
      return jax.tree.unflatten(self.tree, [arrays[i] for i in range(len(arrays))])
    return nnx.merge(self.graphdef, nnx.from_flat_state({p: v.replace(arrays[p]) for p, v in self.leaves.items()}))


def _array(leaf):
  return leaf.get_value() if isinstance(leaf, nnx.Variable) else jnp.asarray(leaf)


def _kind(axis):
  return int if isinstance(axis, int) else axis


class _LiftedScan:
  """One call of `remat_scan`. State passes through the scan as {argument number: {path: array}}."""

  def __init__(self, f, args, in_axes, out_axes, policy):
    self.f, self.args, self.out_axes, self.policy = f, args, out_axes, policy
    self.in_axes = in_axes
    if sum(axis is nnx.Carry for axis in in_axes) > 1:
      raise ValueError("in_axes has several nnx.Carry; put what is carried into one pytree")
    self.parts = [_Argument.of(a, axis) for a, axis in zip(args, in_axes, strict=True)]
    self.templates: dict = {}  # (argument, path) -> a Variable of what f changes or adds

  def run(self, length: int | None, segment_lengths: tuple[int, ...]):
    carry, broadcast = ({i: p.select(kind) for i, p in enumerate(self.parts)} for kind in (nnx.Carry, None))
    scanned = {
      i: {path: jnp.moveaxis(x, p.axes[path], 0) for path, x in p.select(int).items()} for i, p in enumerate(self.parts)
    }
    lengths = {x.shape[0] for x in jax.tree.leaves(scanned)} | ({length} if length is not None else set())
    if len(lengths) != 1:
      raise ValueError(f"the arguments of remat_scan have {sorted(lengths) or 'no'} layers; give all the same length")
    layer = lambda carry, scanned, broadcast: self.layer(carry, scanned, broadcast)  # noqa: E731  traced anew each time
    if self.policy is not None:
      layer = jax.checkpoint(layer, policy=self.policy, prevent_cse=False)
    index = jnp.arange(lengths.pop())
    carry, ys = scan(lambda c, xs: layer(c, xs[0], broadcast), carry, (scanned, index), segment_lengths)
    self.write_back(carry, ys["states"])
    return self.outputs(carry, ys["outputs"])

  def layer(self, carry, scanned, broadcast):
    """f on one layer. Returns (carry, {"states": what it changed, "outputs": {position: output}})."""
    given = [{**carry[i], **scanned[i], **broadcast[i]} for i in range(len(self.parts))]
    values = [p.build(arrays) for p, arrays in zip(self.parts, given, strict=True)]
    out = self.f(*values)
    states, carry = {}, {i: dict(c) for i, c in carry.items()}
    for i, (p, value) in enumerate(zip(self.parts, values, strict=True)):
      states[i] = {} if p.graphdef is None else self.changes(i, p, nnx.state(value), given[i], carry[i])
    outputs = {}
    axes, out = (self.out_axes, out) if isinstance(self.out_axes, tuple) else ((self.out_axes,), (out,))
    for position, (axis, value) in enumerate(zip(axes, out, strict=True)):
      if axis is nnx.Carry:
        at = self.in_axes.index(nnx.Carry)
        carry[at] = dict(enumerate(jax.tree.leaves(value)))
      else:
        outputs[position] = value
    return carry, {"states": states, "outputs": outputs}

  def changes(self, i: int, part: _Argument, state, given: Mapping, carry: dict) -> dict:
    """{path: array} of the layer's new or changed Variables; carried ones go into `carry`."""
    out = {}
    for path, variable in nnx.to_flat_state(state):
      array = variable.get_value()
      axis = part.axes.get(path, 0)
      if axis is nnx.Carry:
        carry[path] = array
      elif path not in given or array is not given[path]:
        if axis is None:
          raise ValueError(
            f"{slash_path(path)} ({type(variable).__name__}) has axis None in remat_scan, but the layer "
            f"changes it; give it nnx.Carry or a layer axis by nnx.StateAxes"
          )
        out[path] = array
        self.templates[i, path] = variable
    return out

  def write_back(self, carry, states) -> None:
    for i, part in enumerate(self.parts):
      if part.graphdef is None:
        continue
      flat = {path: part.leaves[path].replace(x) for path, x in carry[i].items()}
      for path, stacked in states[i].items():
        axis = part.axes.get(path, 0)
        flat[path] = self.templates[i, path].replace(jax.tree.map(lambda x, a=axis: jnp.moveaxis(x, 0, a), stacked))
      if flat:
        nnx.update(self.args[i], nnx.from_flat_state(flat))

  def outputs(self, carry, stacked: Mapping):
    axes = self.out_axes if isinstance(self.out_axes, tuple) else (self.out_axes,)
    out = []
    for position, axis in enumerate(axes):
      if axis is nnx.Carry:
        at = self.in_axes.index(nnx.Carry)
        out.append(self.parts[at].build(carry[at]))
      else:
        out.append(jax.tree.map(lambda x, a=axis: jnp.moveaxis(x, 0, a), stacked[position]))
    return tuple(out) if isinstance(self.out_axes, tuple) else out[0]
