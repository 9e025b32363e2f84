"""Checks that the state is split as widely as the mesh allows, and that every rule applies to something."""

import difflib
import math

from flax import nnx

from maxghost.config import ConfigError, did_you_mean
from maxghost.parallel.axis_rules import DEFAULT_RULES
from maxghost.parallel.shardings import AXES, Layout, local_size, slash_path


def check_rules(abstract: nnx.State, layout: Layout) -> None:
  """Raises ConfigError for a rule that names an unknown mesh axis, or a logical axis that this model does not have.

  abstract: a train state. The axes of activations are known only when they are traced, so an axis activation_* is
  accepted unless it resembles a known one.
  """
  layout.rules.check()
  states = [v.get_metadata().get(AXES) or () for _, v in nnx.to_flat_state(abstract)]
  known = {name for name, _ in DEFAULT_RULES}.union(*states) - {None}
  for name in layout.rules.names:
    foreign = name.startswith("activation_") and not difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if name not in known and not foreign:
      raise ConfigError(
        f"logical_axis_rules: no tensor has axis '{name}'{did_you_mean(name, sorted(known))}; the axes of this model's "
        f"weights are {', '.join(sorted({axis for axes in states for axis in axes if axis}))}"
      )


def check_spread(abstract: nnx.State, layout: Layout, tolerance: float) -> str:
  """Returns a line that compares a device's share of the parameters with an even split over the weights' mesh axes.

  abstract: a train state with shardings. Raises ConfigError, naming the largest parameter that is not split, if the
  excess is above `tolerance`.
  """
  total = held = 0
  whole: list[tuple[int, str]] = []
  axes: set[str] = set()
  for path, variable in nnx.to_flat_state(nnx.filter_state(abstract, nnx.Param)):
    leaf = variable.get_value()
    own = local_size(leaf.shape, leaf.sharding)
    total, held = total + leaf.size, held + own
    if own == leaf.size:
      whole.append((leaf.size, slash_path(path)))
    for name, row in layout.rules.rows:
      if name in (variable.get_metadata().get(AXES) or ()):
        axes.update(layout.rules.active(row))
  parts = math.prod(layout.rules.sizes[axis] for axis in axes)
  excess = held * parts / total - 1
  if excess > tolerance:
    size, label = max(whole, default=(0, "none"))
    raise ConfigError(
      f"sharding_tolerance={tolerance:g}: a device holds {held / total:.2%} of the parameters, {excess:.1%} more than "
      f"an even split over {', '.join(sorted(axes))} (1/{parts}); the largest parameter kept whole is {label} "
      f"({size:,}): add a row for its axes to logical_axis_rules, or set "
      f"sharding_tolerance={math.ceil(excess * 100) / 100:g}"
    )
  return f"a device holds {held / total:.2%} of the parameters, an even split is {1 / parts:.2%}"
