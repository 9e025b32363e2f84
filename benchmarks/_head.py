"""The output head alone, and its gradient with and without scores: projection and cross-entropy of given hidden states.

B rows, T positions, D embed dim.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config import Config
from maxghost.ghost.attach import prepare_twin, split
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.schedules.passes import mean_loss
from maxghost.models.layers import Hidden, linear
from maxghost.models.output_head import OutputHead, OutputProjection
from maxghost.objectives import tiled, token_losses


class Head(nnx.Module):
  """The untied projection."""

  def __init__(self, cfg, *, rngs: nnx.Rngs):
    axes = ("embed", "vocab")
    self.logits_dense = linear(
      cfg, cfg.base_emb_dim, cfg.vocab_size, axes, rngs=rngs, std=1.0, layer_type=OutputProjection
    )


@dataclasses.dataclass(frozen=True)
class HeadLoss:
  """(losses [B, T], ones), whole or in tiles as the config says."""

  num_tiles: int
  axis: str

  def __call__(self, model, batch):
    if self.num_tiles > 1:
      head = OutputHead(None, model.logits_dense)
      losses_BT = head.losses(Hidden(batch["x"]), batch["targets"], None, tiled.Head(self.num_tiles, self.axis))
    else:
      logits_BTV = model.logits_dense(batch["x"])
      losses_BT = token_losses(logits_BTV.astype(jnp.float32), batch["targets"])
    return losses_BT, jnp.ones_like(losses_BT)


def make(cfg: Config):
  """(function(*arguments) -> gradients of hidden states and table, and scores, the abstract arguments).

  With ghost_enabled the scores are per token, along a given direction of rank ghost_rank, as `reverse_scan` has it when
  it comes to the head.
  """
  model = nnx.eval_shape(lambda: Head(cfg.model, rngs=nnx.Rngs(0)))
  params, rest = split(model)
  loss = HeadLoss(cfg.model.num_vocab_tiling, cfg.model.vocab_tiling_axis)
  shape = (cfg.data.per_device_batch_size, cfg.data.max_target_length)
  x = jax.ShapeDtypeStruct((*shape, cfg.model.base_emb_dim), jnp.dtype(cfg.model.dtype))
  targets = jax.ShapeDtypeStruct(shape, jnp.int32)
  if not cfg.ghost.ghost_enabled:
    graphdef, _, _ = nnx.split(model, nnx.Param, ...)

    def plain(x, params, targets):
      return mean_loss(*loss(nnx.merge(graphdef, params, rest), {"x": x, "targets": targets}))

    return jax.grad(plain, argnums=(0, 1)), (x, params, targets)
  twin = prepare_twin(
    model, {"x": x, "targets": targets}, loss, num_sets=1, num_positions=shape[1],
    spec=DirectionSpec(rank=cfg.ghost.ghost_rank),
  )  # fmt: skip
  (param,) = twin.scored
  shapes = param.part_shapes(1)
  parts = tuple(jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in param.parts)

  def scored(x, params, probes, targets, parts):
    model = twin.merge(params, probes, twin.direction_state({param.label: parts}), rest)
    return mean_loss(*loss(model, {"x": x, "targets": targets}))

  return jax.grad(scored, argnums=(0, 1, 2)), (x, params, twin.probe_template, targets, parts)
