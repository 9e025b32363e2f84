"""The train step as one pure function of (state, batch, validation batches).

B rows, S documents in a row, T positions, K validation sets, L layers.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxghost.config.schema import Config
from maxghost.ghost import GhostEngine, ledger, schedules
from maxghost.ghost.directions import AdamScalars
from maxghost.ghost.engine import direction_state, prepare_twin, total
from maxghost.ghost.losses import language_model_loss
from maxghost.training.optimizers import learning_rate_schedule, optimizer_spec
from maxghost.training.state import adam_moments


def make_train_step(cfg: Config, graphdef, state, batch, *, num_segments: int):
  """`step(state, batch, val_batches) -> (state, out)`, to be jitted with the state donated.

  graphdef, state: a split TrainStateNNX (the state may be abstract). batch: arrays or shapes of one training batch;
  num_segments: S, the largest segment id a row may hold. val_batches: a tuple of K batches (empty when ghost is off).
  out: scalars loss, grad_norm, param_norm, learning_rate, tokens, clip_factor; with ghost also val_loss [K], the
  ledger's columns [K], score_dot_BSK, contribution_BSK (nats), tokens_BS, loss_BS and, by ghost_detail,
  param_contribution {path: [L, B, S, K]} (L = 1 for a parameter outside the stack or with detail 'module').
  Raises ValueError for a model that the engine cannot score.
  """
  schedule = learning_rate_schedule(cfg.optimizer, cfg.run.steps)
  loss_fn = functools.partial(language_model_loss, z_loss_multiplier=cfg.model.z_loss_multiplier)
  twin = None
  if cfg.ghost.ghost_enabled:
    model = nnx.merge(graphdef, state).model
    engine = GhostEngine(cfg, direction=cfg.ghost.ghost_direction, per_position=True)
    twin = prepare_twin(engine, model, batch, loss_fn, num_sets=1)

  def step(state, batch, val_batches):
    train_state = nnx.merge(graphdef, state)
    model_graphdef, params, rest = nnx.split(train_state.model, nnx.Param, ...)
    step_loss = _with_dropout(cfg, loss_fn, train_state.step)
    if twin is None:
      loss, losses_BT, weights_BT, grads = schedules.plain_pass(model_graphdef, params, rest, step_loss, batch)
    else:
      ghost = _ghost_pass(twin, train_state, model_graphdef, params, rest, loss_fn, step_loss, batch, val_batches)
      passed = ghost["pass"]
      loss, losses_BT, weights_BT, grads = passed.loss, passed.losses, passed.weights, passed.grads
    norm, factor, clipped = clip(grads, cfg.optimizer.gradient_clipping_threshold)
    learning_rate = schedule(train_state.step)
    out = {
      "loss": loss,
      "grad_norm": norm,
      "param_norm": optax.tree_utils.tree_norm(params),
      "learning_rate": jnp.asarray(learning_rate, loss.dtype),
      "tokens": weights_BT.sum(),
      "clip_factor": factor,
    }
    if twin is not None:
      out |= _score_outputs(cfg, twin, train_state, params, grads, ghost, batch, losses_BT, weights_BT, out, num_segments)
    train_state.apply_gradients(clipped)
    train_state.clip_factor[...] = factor.astype(train_state.clip_factor.dtype)
    return nnx.state(train_state), out

  return step, twin


def make_eval_step(cfg: Config, graphdef):
  """`evaluate(state, batch) -> (summed loss in nats, number of target tokens)`; dropout off, z-loss not included."""

  def evaluate(state, batch):
    losses, weights = language_model_loss(nnx.merge(graphdef, state).model, batch)
    return jnp.sum(losses * weights), weights.sum()

  return evaluate


def make_validation_loss(cfg: Config, graphdef):
  """`losses(state, val_batches) -> [K]`: what the train step calls val_loss, for rows of an earlier step."""

  def losses(state, val_batches):
    model = nnx.merge(graphdef, state).model
    z_loss = cfg.model.z_loss_multiplier
    return jnp.stack([schedules.mean_loss(*language_model_loss(model, batch, z_loss)) for batch in val_batches])

  return losses


def clip(grads, threshold: float):
  """(global norm, factor, grads * factor) with factor = min(1, threshold / norm); threshold 0 leaves grads alone."""
  norm = optax.tree_utils.tree_norm(grads)
  if threshold == 0:
    return norm, jnp.ones_like(norm), grads
  factor = jnp.minimum(1.0, threshold / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
  return norm, factor, jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


def _with_dropout(cfg: Config, loss_fn, step):
  if cfg.model.dropout_rate == 0:
    return loss_fn
  # The key is a function of (seed, step): a restart draws the same masks without any RNG state to save.
  key = jax.random.fold_in(jax.random.key(cfg.run.init_weights_seed), step)
  return functools.partial(loss_fn, dropout_key=key)


def _ghost_pass(twin, train_state, graphdef, params, rest, loss_fn, step_loss, batch, val_batches):
  """Validation gradients (without dropout), then the scored training pass."""
  val_loss, gradients = schedules.validation_gradients(graphdef, params, rest, loss_fn, val_batches)
  gradients = [schedules.by_label(g) for g in gradients]
  moments1, moments2 = adam_moments(train_state.optimizer)
  count, kappa = train_state.step, train_state.clip_factor[...]
  directions = direction_state(twin, schedules.stack_sets(twin, gradients), (moments2, count, kappa))
  return {
    "pass": schedules.train_pass(twin, params, rest, step_loss, batch, directions),
    "val_loss": val_loss,
    "gradients": gradients,
    "moments": (moments1, moments2),
    "scalars": AdamScalars.at(twin.spec, count, kappa).stacked() if twin.spec.kind == "adam" else None,
  }


def _score_outputs(cfg, twin, train_state, params, grads, ghost, batch, losses_BT, weights_BT, out, num_segments):
  moments1, moments2 = ghost["moments"]
  decay = cfg.optimizer.adam_weight_decay if cfg.optimizer.opt_type == "adamw" else 0.0
  facts = ledger.StepFacts(
    learning_rate=out["learning_rate"],
    clip_factor=out["clip_factor"],
    weight_decay=decay,
    count=train_state.step,
    moments1=moments1,
    moments2=moments2,
  )
  scores = ghost["pass"].scores
  columns = ledger.columns(
    twin, optimizer_spec(cfg.optimizer), facts, schedules.by_label(params), schedules.by_label(grads),
    ghost["gradients"], scores, ghost["scalars"],
  )
  scale = out["learning_rate"] * out["clip_factor"]
  documents_BTS = jax.nn.one_hot(batch["inputs_segmentation"] - 1, num_segments, dtype=losses_BT.dtype)
  targets_BTS = jax.nn.one_hot(batch["targets_segmentation"] - 1, num_segments, dtype=losses_BT.dtype)
  tokens_BS = targets_BTS.sum(1)
  loss_BS = jnp.einsum("bts,bt->bs", targets_BTS, losses_BT) / jnp.maximum(tokens_BS, 1)
  score_BSK = jnp.einsum("kbt,bts->bsk", total(twin, scores), documents_BTS)
  share_BS = tokens_BS / jnp.maximum(out["tokens"], 1)
  per_share_BS = jnp.where(tokens_BS > 0, 1 / jnp.where(tokens_BS > 0, share_BS, 1), 0)
  extra = {
    "val_loss": ghost["val_loss"],
    "score_dot_BSK": score_BSK * per_share_BS[..., None],
    "contribution_BSK": score_BSK * scale,
    "tokens_BS": tokens_BS.astype(jnp.int32),
    "loss_BS": loss_BS,
    **columns,
  }
  if cfg.ghost.ghost_detail != "total":
    extra["param_contribution"] = {
      p.label: _by_document(p, scores[p.label], documents_BTS, cfg.ghost.ghost_detail == "module") * scale
      for p in twin.scored
    }
  return extra


def _by_document(param, score, documents_BTS, sum_layers: bool):
  """[L, B, S, K] from one parameter's [*stack, K, B, T]."""
  score_LKBT = score.reshape(-1, *score.shape[len(param.stack_shape) :])
  score_LBSK = jnp.einsum("lkbt,bts->lbsk", score_LKBT, documents_BTS)
  return score_LBSK.sum(0, keepdims=True) if sum_layers else score_LBSK
