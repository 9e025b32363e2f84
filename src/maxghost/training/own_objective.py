"""Checks the user's own objective before the first step: scores would be wrong if its units read each other.

B rows, T positions, C comparisons.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.config import Config, ConfigError
from maxghost.objectives import Objective, create
from maxghost.parallel.shardings import constrain
from maxghost.training.state import referenced

TOLERANCE = 1e-3  # of the largest loss; a bfloat16 model has four roundings


def make_comparison(cfg: Config, graphdef, num_rows: int):
  """`compare(state, batch) -> (largest change, that within rows, largest loss)` of the losses of `num_rows` rows.

  In each comparison one half of the units stay, and all others become copies of the first that stays. Any two units are
  in different halves at least once, in both ways. Within rows, where each segment is a unit, every other one stays,
  and all tokens of the others become the first of them.
  """
  objective = create(cfg).evaluation()
  row_B, size = np.arange(num_rows), objective.rows_per_unit
  by_segment = size == 1 and type(objective).prepare is Objective.prepare  # another may name other units
  unit_B = row_B // size
  places = range(int(unit_B[-1]).bit_length())
  stays_CB = np.array([unit_B >> place & 1 == one for place in places for one in (0, 1)]).reshape(-1, num_rows)

  def compare_rows(state, batch):
    train_state = nnx.merge(graphdef, state)

    def losses_of(batch):
      losses_BT, weights_BT = objective(train_state.model, *referenced(objective, train_state, batch))
      return jnp.where(weights_BT != 0, losses_BT.astype(jnp.promote_types(losses_BT.dtype, jnp.float32)), 0)

    def change(stays_B):
      index_B = jnp.where(stays_B, row_B, jnp.argmax(stays_B) + row_B % size)
      moved_BT = losses_of(jax.tree.map(lambda x: x[index_B], rows)) - before_BT
      return jnp.abs(jnp.where(stays_B[:, None], moved_BT, 0)).max()

    def change_within_rows(parity):
      stays_BT = jnp.all(jnp.stack([(slot_BT == 0) | (slot_BT % 2 == parity) for slot_BT in objective.units(rows)]), 0)
      from_BT = jnp.where(stays_BT, jnp.arange(stays_BT.shape[1]), jnp.argmin(stays_BT, 1)[:, None])
      taken = jax.vmap(lambda x, index_T: x[index_T])
      moved = {name: taken(x, from_BT) for name, x in rows.items() if x.shape[:2] == stays_BT.shape}
      moved = {name: x for name, x in moved.items() if not name.endswith(("_position", "_segmentation"))}
      return jnp.abs(jnp.where(stays_BT, losses_of(rows | moved) - before_BT, 0)).max()

    rows = jax.tree.map(lambda x: x[:num_rows], batch)
    before_BT = losses_of(rows)
    changes_C = jax.lax.map(change, jnp.asarray(stays_CB))
    within = jax.lax.map(change_within_rows, jnp.arange(2)).max() if by_segment else jnp.zeros(())
    return tuple(constrain(x, ()) for x in (changes_C.max(initial=0), within, jnp.abs(before_BT).max()))

  return compare_rows


def refuse_coupled(cfg: Config, change: float, within: float, loss: float) -> None:
  """Raises ConfigError if a unit's losses change with others: by `change` with rows, by `within` with segments."""
  limit = max(TOLERANCE, 4 * float(jnp.finfo(cfg.model.dtype).eps)) * loss
  for by, whose, others in ((change, "row", "rows"), (within, "segment", "segments of its row")):
    if np.isfinite(loss) and not by <= limit:  # or NaN
      said = f"objective={cfg.optimizer.objective}: losses of a {whose} change with other {others}, by {by:.3g} of"
      raise ConfigError(f"{said} {loss:.3g}, so scores would be wrong: compute the losses of a unit from its own alone")
