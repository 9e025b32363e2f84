"""A rule for your own layer type: a hand-written rule is exact and cheap, an empty one is exact too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxghost import ghost


class Scale(nnx.Module):
  """y = x * w: a layer that flax does not have, so no rule covers it."""

  def __init__(self, size: int, rngs: nnx.Rngs):
    self.weight = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (size,)))

  def __call__(self, x):
    return x * self.weight[...]


class Model(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.first, self.scale, self.out = nnx.Linear(5, 7, rngs=rngs), Scale(7, rngs), nnx.Linear(7, 3, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.tanh(self.scale(self.first(x))))


def loss_fn(model, batch):
  """The loss of each example, and the weight with which it counts."""
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]), np.ones(len(batch["y"]))


@ghost.rule(Scale)
class ScaleRule(ghost.Rule):
  """With an empty body the score is one forward-mode derivative of the layer; this rule computes the score itself."""

  def score(self, call, name, direction):
    x = call.args[0]  # [n, ..., size], the layer's input
    return jnp.stack([call.reduce(x * u, call.cotangent) for u in direction.full])  # d(x * w) along u is x * u


rng = np.random.default_rng(0)
train, val = ({"x": rng.normal(size=(n, 5)).astype(np.float32), "y": rng.integers(0, 3, n)} for n in (6, 4))
model = Model(nnx.Rngs(0))
result = ghost.GhostEngine().score(model, train, val, loss_fn=loss_fn)

# The same by its definition: the gradient of each example alone, and its product with the validation gradient.
graphdef, params = nnx.split(model)


def mean_loss(params, batch):
  return loss_fn(nnx.merge(graphdef, params), batch)[0].mean()


val_gradient = jax.grad(mean_loss)(params, val)
expected = []
for i in range(6):
  gradient = jax.grad(mean_loss)(params, {name: value[i : i + 1] for name, value in train.items()})
  expected.append(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, val_gradient))))
difference = float(np.abs(np.asarray(result.dot) - np.asarray(expected)).max())
print("scores", np.asarray(result.dot).round(4).tolist())
print(f"largest difference to per-example gradients {difference:.1e}")
