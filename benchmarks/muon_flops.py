"""FLOPs of a scored step under Muon beside those of a plain one, from the shapes of the model.

  python benchmarks/muon_flops.py [key=value ...]

A Newton-Schulz call on a matrix [m, n], m <= n, is 20 m² n + 10 m³. The update makes one, the ledger two (the step with
and without the gradient), and the direction one with its derivative at each node of the path, the work of 1 + 2 K calls
for K validation sets. Exact scores add a product with each direction, and the validation rows their own passes.
"""

import math
import sys

import _measure
from flax import nnx

from maxghost import config, models, optimizers
from maxghost.optimizers import Matrix
from maxghost.training.plan import step_flops


def newton_schulz(model: nnx.Module) -> float:
  """FLOPs of one call on every matrix of the model."""
  total = 0.0
  for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if matrix := Matrix.of(variable):
      first, last = variable.ndim - matrix.rows - matrix.columns, variable.ndim - matrix.columns
      sides = sorted((math.prod(variable.shape[first:last]), math.prod(variable.shape[last:])))
      total += math.prod(variable.shape[:first]) * (20 * sides[0] ** 2 * sides[1] + 10 * sides[0] ** 3)
  return total


def main(arguments: list[str]) -> None:
  cfg = config.load(None, "opt_type=muon", *arguments)
  rows, val_rows, length = (
    cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps,
    cfg.ghost.ghost_val_batch_size,
    cfg.data.max_target_length,
  )
  model, sets = models.create_abstract(cfg), len(cfg.val_sets)
  plain, validation = (step_flops(cfg.model, n, length) for n in (rows, val_rows))
  call, nodes = newton_schulz(model), optimizers.create(cfg.optimizer).nodes
  own = nodes * (1 + 2 * sets)
  step = plain.total + call
  parts = {
    "model, forward and backward": plain.total,
    "update (1 Newton-Schulz)": call,
    f"validation rows ({sets} x {val_rows})": sets * validation.total,
    "scores (a product with each exact direction)": sets * plain.weights / 3,
    f"direction along the path ({nodes} nodes = {own} Newton-Schulz)": own * call,
    "ledger (2 Newton-Schulz)": 2 * call,
  }
  for name, flops in parts.items():
    print(f"{name:60s} {flops / 1e9:12.2f} GFLOP {flops / step:8.1%} of a plain step")
  print(f"{'scored over plain':60s} {sum(parts.values()) / step:12.2f}")


if __name__ == "__main__":
  sys.exit(_measure.run(lambda: main(sys.argv[1:])))
