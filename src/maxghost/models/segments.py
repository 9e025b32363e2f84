"""Scans over layers whose backward pass keeps only the carries at the boundaries of segments.

The VJP of `lax.scan` keeps the carry of every step. Here an outer scan runs over segments under `jax.checkpoint`, an
inner one over the k layers of a segment. This keeps L / k + k carries instead of L, for one more forward pass; deeper
nesting keeps fewer (Griewank and Walther, "Evaluating Derivatives", 2008, chapter 12).
"""

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
      fix = f"use one of {', '.join(map(str, divisors(whole)))}"
      raise ValueError(f"a segment of {k} layers does not divide {what}; {fix}")
    whole, what = k, f"the segment of {k} layers around it"


def scan(body: Callable, carry, xs, segment_lengths: tuple[int, ...] = (), unroll: bool = False):
  """`jax.lax.scan(body, carry, xs)`, xs with a leading layer axis; keeps carries only at segment boundaries.

  segment_lengths: layers in a segment, then in a segment of a segment, ...; empty for a plain scan. Values are those of
  the plain scan, gradients too up to rounding. unroll: a plain scan as straight code instead of a loop. Raises
  ValueError for lengths that do not divide.
  """
  check(jax.tree.leaves(xs)[0].shape[0], segment_lengths)
  if not segment_lengths:
    return jax.lax.scan(body, carry, xs, unroll=unroll)
  segment = jax.checkpoint(lambda carry, xs: scan(body, carry, xs, segment_lengths[1:]), prevent_cse=False)
  carry, ys = jax.lax.scan(segment, carry, split(xs, segment_lengths[0]))
  return carry, join(ys)


def split(xs, segment_length: int):
  """[L, ...] -> [L / k, k, ...] in every leaf."""
  return jax.tree.map(lambda x: x.reshape(x.shape[0] // segment_length, segment_length, *x.shape[1:]), xs)


def join(ys):
  """[L / k, k, ...] -> [L, ...] in every leaf."""
  return jax.tree.map(lambda y: y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]), ys)


def remat_scan(f: Callable | None = None, *, segment_lengths: tuple[int, ...] = (), length: int | None = None,
               in_axes: tuple = (nnx.Carry, 0), out_axes: Any = nnx.Carry,
               policy: Callable | None = None) -> Callable:  # fmt: skip
  """`nnx.scan` whose backward pass keeps only the carries at segment boundaries; also a decorator (docs/memory.md).

  Variables that f changes in an object with a layer axis (RNG counts, batch statistics, new ones) are stacked back into
  it; those with axis nnx.Carry pass from layer to layer. An Rngs inside stacked layers has one stream per layer; split
  another with `nnx.split_rngs(splits=L)`, or carry its counts. The recomputed forward pass draws the same numbers.

  Args:
    in_axes, out_axes: as of `nnx.scan`; at most one nnx.Carry, a pytree of floats.
    segment_lengths: as in `scan`. length: L, where no argument has a layer axis.
    policy: a `jax.checkpoint` policy for the inside of each layer; None saves everything of the current segment.

  Raises ValueError for lengths that do not divide or disagree, axes that do not fit, a changed Variable of axis None.
  """
  if f is None:
    axes = {"in_axes": in_axes, "out_axes": out_axes}
    return functools.partial(remat_scan, segment_lengths=segment_lengths, length=length, policy=policy, **axes)
  outputs = out_axes if isinstance(out_axes, tuple) else (out_axes,)
  carries = [sum(axis is nnx.Carry for axis in axes) for axes in (in_axes, outputs)]
  if carries not in ([0, 0], [1, 1]) or None in outputs:
    raise ValueError("give nnx.Carry once in in_axes and once in out_axes, or in neither; other out_axes are numbers")

  def wrapped(*args):
    if len(args) != len(in_axes):
      raise ValueError(f"{len(args)} arguments, but in_axes has {len(in_axes)} entries")
    call = _Call(f, args, in_axes, outputs, isinstance(out_axes, tuple))
    carry, broadcast, scanned = (call.groups[kind] for kind in (nnx.Carry, None, int))
    lengths = {x.shape[0] for x in scanned.values()} | ({length} if length is not None else set())
    if len(lengths) != 1:
      raise ValueError(f"the arguments of remat_scan have {sorted(lengths) or 'no'} layers; give all the same length")
    layer = lambda carry, scanned: call.layer(carry, scanned, broadcast)  # noqa: E731  traced anew each time
    if policy is not None:
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    index = jnp.arange(lengths.pop())
    carry, (changed, out) = scan(lambda c, xs: layer(c, xs[0]), carry, (scanned, index), segment_lengths)
    return call.write_back(carry, changed, out)

  return wrapped


class _Call:
  """One call of `remat_scan`. Its state are the arrays of all arguments: {(argument number, *path): array}."""

  def __init__(self, f: Callable, args: tuple, in_axes: tuple, out_axes: tuple, several: bool):
    self.f, self.args, self.out_axes, self.several = f, args, out_axes, several
    self.carry_at = in_axes.index(nnx.Carry) if nnx.Carry in self.out_axes else -1
    plain = tuple(arg if nnx.graph.is_graph_node(arg) else jax.tree.map(jnp.asarray, arg) for arg in args)
    self.graphdef, state = nnx.split(plain)
    self.leaves: dict[tuple, Any] = dict(nnx.to_flat_state(state))  # arrays and Variables, later also new ones
    self.given, self.axes = dict(self.leaves), {}
    self.groups: dict[Any, dict[tuple, jax.Array]] = {nnx.Carry: {}, None: {}, int: {}}  # arrays by kind of axis
    for path, leaf in self.given.items():
      axis = in_axes[path[0]]
      axis = self.axes[path] = axis.map_prefix(path[1:], leaf) if isinstance(axis, nnx.StateAxes) else axis
      kind, array = (int, jnp.moveaxis(_array(leaf), axis, 0)) if isinstance(axis, int) else (axis, _array(leaf))
      self.groups[kind][path] = array

  def build(self, arrays: Mapping[tuple, Any]) -> tuple:
    """The arguments with these arrays."""
    flat = [(path, _with_array(leaf, arrays[path])) for path, leaf in self.given.items()]
    return nnx.merge(self.graphdef, nnx.from_flat_state(flat))

  def layer(self, carry: Mapping, scanned: Mapping, broadcast: Mapping):
    """f on one layer. Returns (carry, (arrays that it changed or added, {position: output}))."""
    given = {**carry, **scanned, **broadcast}
    values = list(self.build(given))
    out, carry, changed = self.f(*values), {}, {}
    if self.several and (not isinstance(out, tuple) or len(out) != len(self.out_axes)):
      found = f"a tuple of {len(out)}" if isinstance(out, tuple) else "no tuple"
      raise ValueError(f"remat_scan has {len(self.out_axes)} out_axes, but the function returns {found}")
    out = dict(enumerate(out if self.several else (out,)))
    for position, axis in enumerate(self.out_axes):
      if axis is nnx.Carry:
        values[self.carry_at] = out.pop(position)
    for path, leaf in nnx.to_flat_state(nnx.split(tuple(values))[1]):
      array, axis = _array(leaf), self.axes.get(path, 0)
      if axis is nnx.Carry:
        carry[path] = array
      elif array is not given.get(path):
        if axis is None:
          given = f"{slash_path(path[1:])} ({type(leaf).__name__}) has axis None in remat_scan"
          raise ValueError(f"{given}, but the layer changes it; give it nnx.Carry or a layer axis by nnx.StateAxes")
        changed[path], self.leaves[path] = array, leaf
    return carry, (changed, out)

  def write_back(self, carry: Mapping, changed: Mapping, out: Mapping):
    """Puts the new arrays into the nnx objects among the arguments; returns the outputs."""
    stacked = {path: jnp.moveaxis(x, 0, self.axes.get(path, 0)) for path, x in changed.items()}
    for i, arg in enumerate(self.args):
      own = {p[1:]: _with_array(self.leaves[p], x) for p, x in {**carry, **stacked}.items() if p[0] == i}
      if own and nnx.graph.is_graph_node(arg):
        nnx.update(arg, nnx.from_flat_state(own))
    final = self.build({path: carry.get(path, _array(leaf)) for path, leaf in self.given.items()})
    moved = {i: jax.tree.map(lambda x, i=i: jnp.moveaxis(x, 0, self.out_axes[i]), x) for i, x in out.items()}
    outputs = tuple(moved.get(i, final[self.carry_at]) for i in range(len(self.out_axes)))
    return outputs if self.several else outputs[0]


def _array(leaf):
  return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _with_array(leaf, x):
  return leaf.replace(x) if isinstance(leaf, nnx.Variable) else x
