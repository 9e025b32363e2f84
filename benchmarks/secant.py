"""What stands for the length of a step that is not taken yet: choices of r in `ghost_curvature=secant`.

  python benchmarks/secant.py [--steps 200] [key=value ...]

Trains the default model on its data, against the validation rows of the first step throughout, and predicts each
step's drop by -<G + r/2 (G - G_before), D> for several r: G is the validation gradient before the step D, G_before that
before the last step. A mean error is that of one step, in nats; what the choice costs is one product over the
parameters.
"""

import json
import sys

import _measure
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost import data, models, optimizers
from maxghost.ghost.schedules import Model, passes
from maxghost.objectives import LanguageModelLoss
from maxghost.optimizers import by_label

USED = "ratio of the learning rates"
CHOICES = {
  "none: first order": lambda seen: 0.0 * seen["rate"],
  USED: lambda seen: over(seen["rate"], before(seen["rate"])),
  "length of momentum's own step over the last step's": lambda seen: over(seen["resting"], before(seen["step"])),
  "momentum's own step along the last step": lambda seen: over(seen["resting along"], before(seen["step"]) ** 2),
  "length of this step over the last step's (not known in time)": lambda seen: over(seen["step"], before(seen["step"])),
}


def main() -> int:
  args = _measure.arguments(__doc__, steps=200)
  cfg = configuration.load(str(_measure.BASE), *args.overrides)
  seen = run(cfg, args.steps)
  measured = seen["loss"][:-1] - seen["loss"][1:]
  predicted = {name: seen["first"] - 0.5 * r(seen) * seen["turned"] for name, r in CHOICES.items()}
  predicted["trapezoid (known one step later)"] = (seen["first"] + before(seen["later"], -1)) / 2
  rows = []
  for name, drops in predicted.items():
    drops = np.where(np.arange(len(drops)) == 0, seen["first"], drops)[:-1]  # the first step has none before it
    errors = drops - measured
    rows.append({"r": name, "predicted / measured": drops.sum() / measured.sum(), "mean error": np.abs(errors).mean()})
  used = next(row for row in rows if row["r"] == USED)
  best = min(row["mean error"] for row in rows[:4])
  figures = [
    Figure(f"r = {USED}: predicted over measured drop", used["predicted / measured"], 1.10, form="{:.3f}"),
    Figure(f"r = {USED}: mean error over that of the best choice known in time", used["mean error"] / best, 1.0),
  ]
  return _measure.publish("secant", rows, figures, path=args.json)


def over(values, others):
  """The ratio, 0 where the last step had no length."""
  return np.where(others > 0, values / np.where(others > 0, others, 1), 0)


def before(values, by: int = 1):
  """The values of the step before (by=1) or after (by=-1); the end that has none keeps its own."""
  moved = np.roll(values, by)
  moved[0 if by > 0 else -1] = values[0 if by > 0 else -1]
  return moved


def run(cfg, num_steps: int) -> dict[str, np.ndarray]:
  """{name: [num_steps]}: loss of the validation rows before each step, and products that the choices need."""
  dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed, vocab_size=cfg.model.vocab_size)
  (name,) = cfg.data.validation_sets.values()
  val = jax.device_put(dataset.validation_batch(0, cfg.ghost.ghost_val_batch_size, name).arrays)
  graphdef, params, rest = nnx.split(models.create(cfg, rngs=nnx.Rngs(cfg.run.init_weights_seed)), nnx.Param, ...)
  schedule = optimizers.learning_rate_schedule(cfg.optimizer, num_steps)
  tx = optimizers.make_optimizer(cfg.optimizer, num_steps, params)
  loss = LanguageModelLoss()

  @jax.jit
  def step(params, opt_state, G_before, last, batch):
    model = Model(graphdef, params, rest)
    val_loss, (G,) = passes.validation_gradients(model, loss, (val,))
    _, _, grads = optimizers.clip(
      passes.train_pass(model, loss, batch).grads, cfg.optimizer.gradient_clipping_threshold
    )
    pure = nnx.as_pure(params)
    resting, _ = tx.update(jax.tree.map(jnp.zeros_like, nnx.as_pure(grads)), opt_state, pure)
    moved, opt_state = tx.update(nnx.as_pure(grads), opt_state, pure)
    G, moved, resting = by_label(G), by_label(moved), by_label(resting)
    out = {
      "loss": val_loss[0], "first": -product(G, moved), "later": -product(G, last), "step": length(moved),
      "turned": product(G, moved) - product(G_before, moved), "resting": length(resting),
      "resting along": product(resting, last),
    }  # fmt: skip
    return optax.apply_updates(params, passes.like(params, moved)), opt_state, G, moved, out

  nothing = {label: jnp.zeros_like(x) for label, x in by_label(params).items()}
  opt_state, G, moved, found = tx.init(nnx.as_pure(params)), nothing, nothing, []
  for number in range(num_steps):
    params, opt_state, G, moved, out = step(params, opt_state, G, moved, jax.device_put(next(dataset.train).arrays))
    out = jax.device_get(out) | {"rate": float(schedule(number))}
    found.append({key: float(value) for key, value in out.items()})
    if number % 20 == 0:
      print(json.dumps({"step": number} | found[-1]), flush=True)
  return {key: np.array([record[key] for record in found]) for key in found[0]}


def product(a: dict, b: dict):
  return sum(jnp.vdot(x, b[label]) for label, x in a.items())


def length(a: dict):
  return jnp.sqrt(product(a, a))


if __name__ == "__main__":
  sys.exit(_measure.run(main))
