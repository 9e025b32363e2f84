"""`TrainStateNNX`: everything that a training step changes, as one nnx module."""

import fnmatch

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxghost import models
from maxghost.config.schema import Config
from maxghost.optimizers import make_optimizer
from maxghost.parallel.shardings import Layout, slash_path
from maxghost.training.devices import compiler_options
from maxghost.training.host_memory import HostMemory


class TrainCounter(nnx.Variable):
  """State of the loop that is neither a parameter nor an optimizer moment."""


class StoredGradient(nnx.Variable):
  """A leaf of a validation gradient that later steps score against (ghost_val_every > 1)."""


class TrainStateNNX(nnx.Module):
  """Model, optimizer and the clipping factor of the previous step.

  apply_gradients(grads) updates the parameters in place; without an optimizer it raises RuntimeError.
  """

  def __init__(
    self,
    model: nnx.Module,
    tx: optax.GradientTransformation | None = None,
    *,
    trainable: nnx.filterlib.Filter = nnx.Param,
    num_stored: int = 0,
  ):
    """trainable: the Params that the optimizer changes. num_stored: validation gradients to keep between steps."""
    self.model = model
    self.optimizer = None if tx is None else nnx.Optimizer(model, tx, wrt=trainable)
    self.clip_factor = TrainCounter(jnp.ones((), float))
    if num_stored:
      params = [v for _, v in nnx.to_flat_state(nnx.state(model, trainable))] * num_stored
      zeros = [StoredGradient(jnp.zeros(v.shape, v.dtype), axes=v.get_metadata().get("axes")) for v in params]
      self.stored_gradients = nnx.List(zeros)

  def apply_gradients(self, grads) -> None:
    """grads: State with the paths of the model's Params."""
    if self.optimizer is None:
      raise RuntimeError("this train state was made without an optimizer; it cannot apply gradients")
    self.optimizer.update(self.model, grads)

  @property
  def step(self):
    """Steps taken, uint32."""
    assert self.optimizer is not None, "only a state that is trained counts steps"
    return self.optimizer.step[...]


def create(cfg: Config) -> TrainStateNNX:
  """A fresh state: weights from init_weights_seed, zero moments, step 0."""
  model = models.create(cfg, rngs=nnx.Rngs(cfg.run.init_weights_seed))
  stores = cfg.ghost.ghost_enabled and cfg.ghost.ghost_val_every > 1
  return TrainStateNNX(
    model,
    make_optimizer(cfg.optimizer, cfg.run.steps),
    trainable=trainable(cfg, model),
    num_stored=len(cfg.data.validation_sets) if stores else 0,
  )


def trainable(cfg: Config, model: nnx.Module) -> nnx.filterlib.Filter:
  """The filter of `trainable_parameters_mask`. Raises ValueError for a pattern without a match."""
  if not cfg.optimizer.trainable_parameters_mask:
    return nnx.Param
  paths = {slash_path(path): path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  found = set()
  for pattern in cfg.optimizer.trainable_parameters_mask:
    matching = fnmatch.filter(paths, pattern)
    if not matching:
      raise ValueError(f"trainable_parameters_mask={pattern} matches no parameter; paths: {', '.join(paths)}")
    found.update(matching)
  return nnx.filterlib.PathIn(*(paths[label] for label in found))


def create_split(cfg: Config, layout: Layout | None = None) -> tuple[nnx.GraphDef, nnx.State]:
  """(graphdef, state) of a fresh train state; one compiled call makes each device's part of the weights.

  Values depend only on the seed, not on the layout.
  """
  graphdef, abstract = abstract_split(cfg)

  def init():
    return HostMemory.of(cfg).put(nnx.state(create(cfg)))

  shardings = None if layout is None else layout.shardings(abstract)
  return graphdef, jax.jit(init, compiler_options=compiler_options(), out_shardings=shardings)()


def abstract_split(cfg: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """(graphdef, state) with `jax.ShapeDtypeStruct` leaves, without allocation."""
  graphdef, state = nnx.split(nnx.eval_shape(lambda: create(cfg)))
  return graphdef, HostMemory.of(cfg).abstract(state)
