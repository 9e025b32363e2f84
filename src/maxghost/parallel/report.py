"""Is the state split as widely as the mesh allows, and does every rule that was given say something about it?"""

import difflib
import math

from flax import nnx

from maxghost.config import ConfigError, did_you_mean
from maxghost.parallel.axis_rules import DEFAULT_RULES
from maxghost.parallel.shardings import AXES, Layout, local_size, slash_path


def check_rules(abstract: nnx.State, layout: Layout) -> None:
  """Raises ConfigError for a row that names a mesh axis that does not exist, and for one of a logical axis that nothing
  of this model has: it would have no effect.

  abstract: a train state. Activations tell their axes only when they are traced: an axis activation_* that is no
  neighbour of a known one is left to them.
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
  """`a device holds 12.7 % of the parameters, an even split 12.5 %`.

  abstract: a train state with shardings. The even split is over all mesh axes that rules of weights name. Raises
  ConfigError where a device holds more than (1 + tolerance) times that, naming the largest parameter kept whole.
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
