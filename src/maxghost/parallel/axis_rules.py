"""Logical axis rules: the mesh axes that a named dimension is split over.

A rule is (logical axis, mesh axes). The rules are applied to a tensor in order: a rule assigns its mesh axes to its
dimension unless another dimension of the tensor has one of them; a later rule of the same name is then the second
choice. A name without a rule, an unknown mesh axis, two dimensions that need the same mesh axis and a size that does
not divide are errors that name the tensor.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from maxghost.config import ConfigError, did_you_mean
from maxghost.config.files import read_table

Rule = tuple[str, tuple[str, ...]]

DEFAULT_RULES: tuple[Rule, ...] = tuple((name, tuple(axes)) for name, axes in read_table("axis_rules.yml"))
BATCH = "activation_batch"
FACTOR = "direction"
APART = "diloco"  # mesh axis of slices that train apart, and the logical axis that numbers them


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRules:
  """Rules for one mesh. sizes: {mesh axis: devices along it}.

  Raises ConfigError for a rule that names a mesh axis twice. An unknown mesh axis is an error of the first tensor that
  needs it.
  """

  rows: tuple[Rule, ...]
  sizes: Mapping[str, int]

  def __post_init__(self):
    for name, axes in self.rows:
      if len(set(axes)) < len(axes):
        raise ConfigError(f"logical_axis_rules: the row of '{name}' names a mesh axis twice: {', '.join(axes)}")

  def check(self, names: Collection[str | None] | None = None, label: str = "") -> None:
    """Raises ConfigError if a rule of these logical axes (default: any) names an unknown mesh axis."""
    for name, axes in self.rows:
      for axis in axes if names is None or name in names else ():
        if axis not in self.sizes:
          needed = f", which {label} needs," if label else ""
          said = f"logical_axis_rules: the row of '{name}'{needed} names mesh axis"
          raise ConfigError(f"{said} '{axis}'{did_you_mean(axis, self.sizes)}; mesh axes are {', '.join(self.sizes)}")

  @property
  def names(self) -> tuple[str, ...]:
    """The logical axes that have a rule."""
    return tuple(dict.fromkeys(name for name, _ in self.rows))

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """Mesh axes of several devices that rows are split over."""
    self.check((BATCH,), "every batch")
    return self.active(self.first(BATCH))

  def first(self, name: str) -> tuple[str, ...]:
    """The mesh axes of the first rule of a logical axis; none without one."""
    return next((axes for known, axes in self.rows if known == name), ())

  def active(self, axes: Sequence[str]) -> tuple[str, ...]:
    """The mesh axes among these that have more than one device."""
    return tuple(axis for axis in axes if self.sizes[axis] > 1)

  def parts(self, axes: Sequence[str]) -> int:
    """Number of parts of a dimension that is split over these mesh axes."""
    return math.prod(self.sizes[axis] for axis in axes)

  def assign(self, axes: Sequence[str | None], shape: Sequence[int], label: str) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension of a tensor; of the batch dimension, as many leading ones as divide it.

    axes: logical names; None for a dimension that is never split. label: the tensor's path, for messages. Raises
    ConfigError, see the module docstring.
    """
    if len(axes) != len(shape):
      raise ConfigError(f"{label} has shape {tuple(shape)}, but {len(axes)} logical axes: {_listed(axes)}")
    known = self.names
    for name in axes:
      if name is not None and name not in known:
        said = f"axis '{name}' of {label} has no rule{did_you_mean(name, known)}"
        raise ConfigError(f"{said}; add [{name}, [MESH AXIS]] to logical_axis_rules, or [{name}, []] to keep it whole")
    self.check(axes, label)
    found: dict[int, tuple[str, ...]] = {}
    spent: set[str] = set()
    for name, wanted in self.rows:
      for i, axis in enumerate(axes):
        if axis == name and i not in found and not spent.intersection(wanted):
          found[i] = self._dividing(name, self.active(wanted), shape[i], label)
          spent.update(wanted)
    for i, axis in enumerate(axes):
      if axis is not None and i not in found:
        wanted = " or ".join(", ".join(row) for name, row in self.rows if name == axis)
        said = f"{label} with axes {_listed(axes)}: axis '{axis}' wants mesh axes {wanted}, which another dimension has"
        raise ConfigError(f"{said}; add a row for '{axis}' to logical_axis_rules with other mesh axes, or with []")
    return tuple(found.get(i, ()) for i in range(len(axes)))

  def _dividing(self, name: str, axes: tuple[str, ...], size: int, label: str) -> tuple[str, ...]:
    if size % self.parts(axes) == 0:
      return axes
    if name == BATCH:  # for few validation rows: the mesh axes that do not divide them hold copies
      return self.leading(axes, size)
    meshes, parts = " x ".join(f"{axis} {self.sizes[axis]}" for axis in axes), self.parts(axes)
    said = f"{label}: axis '{name}' of size {size} does not divide over {meshes} = {parts} devices"
    wider = f"vocab_size={size + -size % parts}, " if name == "vocab" else ""  # the tokenizer never uses the added ids
    use = f"use {wider}at most {math.gcd(size, parts)} of them there, or give it other mesh axes"
    raise ConfigError(f"{said}; {use}, such as logical_axis_rules=[[{name}, []]]")

  def leading(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The most leading mesh axes whose sizes together divide `size`."""
    while axes and size % self.parts(axes):
      axes = axes[:-1]
    return axes


def make_rules(own: Sequence[Rule], override: bool, sizes: Mapping[str, int]) -> AxisRules:
  """The user's rules, then the default rules of other names (not with `override`), with DiLoCo also its axis's own."""
  named = {name for name, _ in own}
  defaults = () if override else tuple(row for row in DEFAULT_RULES if row[0] not in named)
  apart = ((APART, (APART,)),) if APART in sizes else ()
  return AxisRules((*((name, tuple(axes)) for name, axes in own), *defaults, *apart), dict(sizes))


def unused_axes(rules: AxisRules) -> list[str]:
  """Mesh axes of several devices that no rule names; these devices would all do the same work."""
  used = {axis for _, axes in rules.rows for axis in axes}
  return [axis for axis, size in rules.sizes.items() if size > 1 and axis not in used]


def _listed(axes: Sequence[str | None]) -> str:
  return "(" + ", ".join("-" if axis is None else axis for axis in axes) + ")"
