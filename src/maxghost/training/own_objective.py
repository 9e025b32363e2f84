"""Checks the user's own objective before the first step: scores would be wrong if its rows read each other.

B rows, T positions, C comparisons.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.config import Config, ConfigError
from maxghost.objectives import create
from maxghost.parallel.shardings import constrain
from maxghost.training.state import referenced

TOLERANCE = 1e-3  # of the largest loss; a bfloat16 model has four roundings


def make_comparison(cfg: Config, graphdef, num_rows: int):
  """`compare(state, batch) -> (largest change, largest loss)` of the losses of the batch's first `num_rows` rows.

  In each comparison one half of the units stay, and all others become copies of the first that stays. Any two units are
  in different halves at least once, in both ways.
  """
  objective = create(cfg).evaluation()
  row_B, size = np.arange(num_rows), objective.rows_per_unit
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

    rows = jax.tree.map(lambda x: x[:num_rows], batch)
    before_BT = losses_of(rows)
    changes_C = jax.lax.map(change, jnp.asarray(stays_CB))
    return constrain(changes_C.max(initial=0), ()), constrain(jnp.abs(before_BT).max(), ())

  return compare_rows


def refuse_coupled(cfg: Config, change: float, loss: float) -> None:
  """Raises ConfigError if a unit's losses change with the rows of others."""
  if np.isfinite(loss) and not change <= max(TOLERANCE, 4 * float(jnp.finfo(cfg.model.dtype).eps)) * loss:  # or NaN
    said = f"objective={cfg.optimizer.objective}: losses of a row change with other rows, by {change:.3g} of {loss:.3g}"
    raise ConfigError(f"{said}, so scores would be wrong: compute the losses of a unit from its own rows alone")
