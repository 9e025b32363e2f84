"""`TrainStateNNX`: what a training step changes, as one nnx module."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxghost import models
from maxghost.config.schema import Config
from maxghost.training.compiling import compiler_options
from maxghost.training.optimizers import make_optimizer


class TrainCounter(nnx.Variable):
  """State of the loop that is neither a parameter nor an optimizer moment."""


class StoredGradient(nnx.Variable):
  """A leaf of a validation gradient that later steps score against (ghost_val_every > 1)."""


class TrainStateNNX(nnx.Module):
  """Model, optimizer and the clipping factor of the step before.

  apply_gradients(grads) updates the parameters in place; without an optimizer it raises RuntimeError.
  """

  def __init__(self, model: nnx.Module, tx: optax.GradientTransformation | None = None, *, num_stored: int = 0):
    """num_stored: validation gradients to keep between steps, one per validation set."""
    self.model = model
    self.optimizer = None if tx is None else nnx.Optimizer(model, tx, wrt=nnx.Param)
    self.clip_factor = TrainCounter(jnp.ones((), float))
    if num_stored:
      leaves = jax.tree.leaves([nnx.state(model, nnx.Param)] * num_stored)
      self.stored_gradients = nnx.List([StoredGradient(jnp.zeros(x.shape, x.dtype)) for x in leaves])

  def apply_gradients(self, grads, **kwargs) -> None:
    """grads: State with the paths of the model's Params. kwargs go to the optax transformation."""
    if self.optimizer is None:
      raise RuntimeError("this train state was made without an optimizer; it cannot apply gradients")
    self.optimizer.update(self.model, grads, **kwargs)

  @property
  def step(self):
    """Steps taken, uint32."""
    return self.optimizer.step[...]


def create(cfg: Config) -> TrainStateNNX:
  """A fresh state: weights from init_weights_seed, zero moments, step 0."""
  model = models.create(cfg, rngs=nnx.Rngs(cfg.run.init_weights_seed))
  stores = cfg.ghost.ghost_enabled and cfg.ghost.ghost_val_every > 1
  return TrainStateNNX(model, make_optimizer(cfg.optimizer, cfg.run.steps), num_stored=num_sets(cfg) if stores else 0)


def num_sets(cfg: Config) -> int:
  """K, the number of validation sets."""
  return len(cfg.data.validation_sets)


def create_split(cfg: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """(graphdef, state) of a fresh train state; the weights are made in one compiled call."""
  graphdef, _ = abstract_split(cfg)

  def init():
    return nnx.state(create(cfg))

  return graphdef, jax.jit(init, compiler_options=compiler_options())()


def abstract_split(cfg: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """(graphdef, state) with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""
  return nnx.split(nnx.eval_shape(lambda: create(cfg)))


def adam_moments(optimizer: nnx.Optimizer) -> tuple[dict | None, dict | None]:
  """Adam's (first, second) moments as {path: array}, or (None, None) for an optimizer without them."""
  moments = []
  for name in ("mu", "nu"):
    tree = optax.tree_utils.tree_get(optimizer.opt_state, name)
    if tree is None:
      return None, None
    moments.append({"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(tree)})
  return moments[0], moments[1]
