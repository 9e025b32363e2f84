"""Score every training image of a small CNN in a hand-written loop: which labels are wrong?"""

import numpy as np
import optax
from flax import nnx

from maxghost import ghost


class Cnn(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
    self.out = nnx.Linear(8 * 4 * 4, 4, rngs=rngs)

  def __call__(self, images):
    return self.out(nnx.relu(self.conv(images)).reshape(len(images), -1))


def loss_fn(model, batch):
  """The loss of each example, and the weight with which it counts."""
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]), np.ones(len(batch["y"]))


rng = np.random.default_rng(0)
x, y = rng.normal(size=(320, 8, 8, 1)).astype(np.float32), rng.integers(0, 4, 320)  # 256 to train on, 64 held out
for image, quarter in zip(x, y, strict=True):  # the class is the brighter quarter
  image[4 * (quarter // 2) :][:4, 4 * (quarter % 2) :][:, :4] += 1
wrong = rng.permutation(256)[:32]
y[wrong] = (y[wrong] + rng.integers(1, 4, 32)) % 4
model, engine, nats = Cnn(nnx.Rngs(0)), ghost.GhostEngine(), np.zeros(256)
optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
for step in range(96):
  rows = np.arange(16) + 16 * (step % 16)
  result = engine.score(model, {"x": x[rows], "y": y[rows]}, {"x": x[256:], "y": y[256:]}, loss_fn=loss_fn)
  optimizer.update(model, result.grads)
  nats[rows] += 0.05 * np.asarray(result.additive)  # learning rate x share of the batch x <gradient, direction>
found = np.isin(np.argsort(nats)[:32], wrong).sum()
print(f"validation loss {result.val_loss:.3f}; {found} of the 32 lowest scores have wrong labels (4 by chance)")
