"""A stack of feed-forward layers alone, and its gradient with and without scores: the smallest program in which layers
compete for memory.

B rows, T positions, D embed dim, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost import config as configuration
from maxghost.config import Config
from maxghost.ghost import schedules
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.schedules import passes
from maxghost.models import stack
from maxghost.models.decoder_layer import GatedMlp
from maxghost.objectives import StagedLoss
from maxghost.training import host_memory


class Layer(nnx.Module):
  """x + wo(gelu(wi x)). x_BTD -> [B, T, D]."""

  def __init__(self, cfg, *, rngs: nnx.Rngs):
    self.mlp = GatedMlp(cfg, rngs=rngs)

  def __call__(self, x_BTD, key=None):
    return x_BTD + self.mlp(x_BTD)


class MlpStack(nnx.Module):
  """L layers, run as the trainer's decoder runs its own."""

  def __init__(self, cfg, *, rngs: nnx.Rngs):
    self.cfg = cfg
    self.layers = stack.create(lambda rngs: Layer(cfg, rngs=rngs), cfg.base_num_decoder_layers, rngs)

  def __call__(self, x_BTD):
    cfg = self.cfg
    return stack.run(self.layers, x_BTD, (), remat_policy=cfg.remat_policy, segment_lengths=cfg.segment_lengths)


@dataclasses.dataclass(frozen=True)
class MeanSquare(StagedLoss):
  """(mean square of the outputs [B, T], ones): a staged loss without parameters of its own."""

  layers_path: tuple = ("layers",)

  def __call__(self, model, batch):
    return self.head(model, model(batch["x"]), batch)

  def embed(self, model, batch):
    return batch["x"]

  def layer_inputs(self, batch):
    return ()

  def layer_key(self, index):
    return None

  def head(self, model, x_BTD, batch):
    losses_BT = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), -1)
    return losses_BT, jnp.ones_like(losses_BT)


def load(base: str, *overrides: str) -> Config:
  return configuration.load(base, "mlp_activations=[gelu]", *overrides)


def make(cfg: Config):
  """(function(params, batch, val_batches) -> gradients and scores, abstract params, abstract batch).

  With ghost_enabled the gradient comes from schedule reverse_scan, along directions of rank ghost_rank.
  """
  model = nnx.eval_shape(lambda: MlpStack(cfg.model, rngs=nnx.Rngs(0)))
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  shape = (cfg.data.per_device_batch_size, cfg.data.max_target_length, cfg.model.base_emb_dim)
  batch = {"x": jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.model.dtype))}
  if cfg.ghost.ghost_enabled:
    spec = DirectionSpec(rank=cfg.ghost.ghost_rank)
    twin = prepare_twin(
      model, batch, MeanSquare(), num_sets=1, num_positions=shape[1], spec=spec, schedule="reverse_scan"
    )

  def run(params, batch, val_batches):
    if not cfg.ghost.ghost_enabled:
      return passes.train_pass(schedules.Model(graphdef, params, rest), MeanSquare(), batch).grads
    problem = schedules.Problem(
      schedule="reverse_scan",
      model=schedules.Model(graphdef, params, rest),
      loss=MeanSquare(),
      val_losses=(MeanSquare(),),
      batch=batch,
      val_batches=val_batches,
      twin=twin,
      parameters=twin.parameters,
      scored=tuple(p.label for p in twin.scored),
      settings=schedules.Settings(
        segment_lengths=cfg.model.segment_lengths, carries_on_host="carries" in cfg.model.offload_to_host
      ),
    )
    passed = schedules.score(problem).passed
    return passed.grads, passed.scores

  # A train state calls the model's part of itself "model".
  placed = host_memory.abstract(cfg, nnx.State({"model": params}))
  return run, placed["model"], batch
