"""Your own training loop with the manager: it scores every step, writes the scores to a log, then reads them back."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import optax
from flax import nnx

from maxghost import attribution, ghost


class Mlp(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.hidden, self.out = nnx.Linear(6, 24, rngs=rngs), nnx.Linear(24, 3, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.hidden(x)))


def loss_fn(model, batch):
  """The loss of each example, and the weight with which it counts."""
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]), np.ones(len(batch["y"]))


def make_batch(rng: np.random.Generator, num: int) -> dict:
  x = rng.normal(size=(num, 6)).astype(np.float32)
  return {"x": x, "y": x[:, :3].argmax(1)}  # the class is the largest of the first three values


if sys.argv[1:2] and sys.argv[1].startswith("-"):
  sys.exit("usage: python examples/own_loop.py [FOLDER]")
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
rng = np.random.default_rng(0)
model, rate = Mlp(nnx.Rngs(0)), 0.1
optimizer = nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)
manager = ghost.GhostEngineManager(
  ghost.GhostEngine(), model, make_batch(rng, 32), output_dir=folder, loss_fn=loss_fn, save_every=20
)
for step in range(40):
  batch = make_batch(rng, 8)
  batch["y"][0] = (batch["y"][0] + 1) % 3  # the first example of every batch has a wrong label
  manager.attach_train_batch(batch, ids=8 * step + np.arange(8))
  optimizer.update(model, manager.prepare_gradients())  # the gradient that training needs anyway
  manager.aggregate_and_log(step, learning_rate=rate)  # with it, contributions are nats
  manager.clear_gradients()
  if manager.should_save_metrics(step):
    print("written", manager.save_metrics(step).name)
manager.cleanup()
log = attribution.load(folder)  # also: maxghost scores FOLDER
scores, is_wrong = log["dot"][:, 0], log["offset"] % 8 == 0  # one row per example, in the order of the steps
print(f"mean score: wrong labels {scores[is_wrong].mean():.3f}, right ones {scores[~is_wrong].mean():.3f}")
