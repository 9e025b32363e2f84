"""The train step as one pure function of (state, batch, validation batches).

B rows, S documents in a row, T positions, K validation sets, L layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost import optimizers
from maxghost.config import Config, ConfigError, plugins
from maxghost.ghost import ledger
from maxghost.ghost.schedules import Model, passes
from maxghost.models import autodiff, qk_clip
from maxghost.objectives import Objective, create, of_validation
from maxghost.objectives.base import refuse_loss
from maxghost.optimizers import by_label, factor_of, learning_rate_schedule, scaled
from maxghost.parallel import shardings
from maxghost.parallel.shardings import constrain, constrain_state
from maxghost.training import host_memory, scoring, selection
from maxghost.training.metrics import OF_SCORES, OWN_METRICS
from maxghost.training.state import referenced


def make_train_step(cfg: Config, graphdef, state, batch, *, num_segments: int, num_sets: int = 1):
  """Returns (`step(state, batch, val_batches) -> (state, out)`, twin or None); jit the step with the state donated.

  out: scalars loss, grad_norm, param_norm, learning_rate, tokens, clip_factor; the objective's metrics, except for
  schedule concat; with ghost also the ledger's columns [K] and `Scorer.outputs`, or with ghost_select
  `Selector.outputs`.

  graphdef, state: a split TrainStateNNX (the state may be abstract). batch: arrays or shapes of one training batch.
  num_segments: S, the largest segment id in a row. num_sets: K, the length of val_batches, which is empty without
  ghost. Raises ValueError for a model that the engine cannot score.
  """
  schedule = learning_rate_schedule(cfg.optimizer, cfg.run.steps)
  objective, val_objective = create(cfg), of_validation(cfg)
  if plugins.OBJECTIVES[cfg.optimizer.objective].is_own:
    jax.eval_shape(functools.partial(_check_objective, objective, graphdef), state, batch)
  scorer: scoring.Scorer | None = None
  if cfg.ghost.ghost_enabled:
    model = nnx.merge(graphdef, state).model
    make = scoring.make_scorer if cfg.ghost.ghost_select == "none" else selection.make_selector
    (batch,) = jax.eval_shape(lambda state, rows: referenced(objective, nnx.merge(graphdef, state), rows), state, batch)
    scorer = make(cfg, model, batch, num_sets=num_sets, num_segments=num_segments)
    if plugins.OPTIMIZERS[cfg.optimizer.opt_type].is_own:
      trained = nnx.state(model, nnx.merge(graphdef, state).optimizer.wrt)
      rules = optimizers.create(cfg.optimizer), scorer.rule
      optimizers.check_account(*rules, trained, scorer.twin.parameters, cfg.ghost.direction == "marginal")

  def step(state, batch, val_batches):
    train_state = nnx.merge(graphdef, state)
    (batch,) = referenced(objective, train_state, batch)
    val_batches = referenced(val_objective, train_state, *val_batches)
    split, key = Model(*nnx.split(train_state.model, train_state.optimizer.wrt, ...)), None
    if cfg.model.dropout_rate or cfg.adapter.lora_dropout:
      # The key depends only on (seed, step), so that a restart draws the same masks without saved RNG state.
      key = jax.random.fold_in(jax.random.key(cfg.run.init_weights_seed), train_state.step)
    step_loss = objective.training(key)
    scored: Any = None  # of the scorer's own type
    if scorer is None:
      passed = passes.accumulated(split, step_loss, batch, cfg.optimizer.gradient_accumulation_steps)
    else:
      scored = scorer.score(train_state, split, step_loss, batch, val_batches)
      passed = scored.passed
    norm, clip_factor, apply = _clipped_update(cfg, passed.grads)
    whole = split.params if cfg.adapter.lora_rank else nnx.state(train_state.model, nnx.Param)
    learning_rate = jnp.asarray(schedule(train_state.step), passed.loss.dtype)
    out = {"loss": passed.loss, "grad_norm": norm, "param_norm": host_memory.norm(whole, cfg.model.stacked_segments),
           "learning_rate": learning_rate, "tokens": passed.weights.sum(), "clip_factor": clip_factor}  # fmt: skip
    reported, columns = step_loss.reported(passed.loss, passed.metrics), {}
    own = {*out, *OF_SCORES, *scoring.ROW_AXIS, *plugins.ledger_columns()}
    if taken := [name for name in reported if name in own or name.startswith(OWN_METRICS)]:
      raise ConfigError(f"the objective's metric {taken[0]} has the name of a step's own; call it own/{taken[0]}")
    if wrong := [name for name, x in reported.items() if "/" in name and getattr(x, "shape", None) != ()]:
      raise ConfigError(f"the objective's metric {wrong[0]} is no array of shape (), a scalar: return its mean")
    out |= reported
    if scorer is not None:
      columns = scorer.columns(train_state, split.params, scored, learning_rate, norm, clip_factor)
      out |= scorer.outputs(scored, batch, learning_rate, norm, clip_factor)
      if (of_clipping := out.pop("of_clipping", None)) is not None and columns:  # [K]
        columns["predicted_examples"] += of_clipping
        columns["direction_residual"] -= of_clipping
      out |= columns
    # Without clipping no factor can carry the dependency, and a factor of 1 would change how the update rounds. XLA's
    # TPU compiler makes the sums and the update one operation, which reads the arrays once: nothing may lie between.
    waits = cfg.optimizer.gradient_clipping_threshold or (columns and cfg.ghost.ghost_schedule == "reverse_scan")
    merged = shardings.platform() == "tpu" and "val_gradient" not in cfg.model.offload_to_host  # which is read late
    apply(train_state, [out["param_norm"], *columns.values()] if waits and not merged else [])
    if cfg.model.use_qk_clip:
      before = qk_clip.clip(train_state.model, passed.metrics["max_logits_LH"], cfg.model.qk_clip_threshold)
      if scorer is not None:
        labelled = by_label(nnx.state(train_state.model, nnx.Param))
        out = ledger.with_clipped(out, before, labelled, scorer.gradients(scored))
    train_state.clip_factor[...] = clip_factor.astype(train_state.clip_factor.dtype)
    return nnx.state(train_state), scoring.placed(out)

  return step, None if scorer is None else scorer.twin


def _check_objective(objective: Objective, graphdef, state, batch) -> None:
  """Raises ConfigError if what `measured` of the user's own objective returns is no (losses, weights, metrics), or
  its weights depend on the parameters."""
  train_state, wanted = nnx.merge(graphdef, state), batch["inputs"].shape
  (batch,) = referenced(objective, train_state, batch)
  found: Any = objective.measured(train_state.model, batch)
  forms = [getattr(x, "shape", type(x).__name__) for x in (found if isinstance(found, tuple) else (found,))]
  if forms != [wanted, wanted, "dict"]:
    said = f"objective={objective.name}: measured returns {', '.join(map(str, forms))}"
    raise ConfigError(f"{said}; return (losses, weights, metrics): arrays of shape {wanted}, and a dict")
  refuse_loss(train_state.model, objective, batch, train_state.optimizer.wrt)


def _clipped_update(cfg: Config, grads):
  """(global norm, clipping factor, update(train state, read), which applies the clipped gradient). read: sums over the
  old state, for which the update waits; may be empty without clipping. Otherwise XLA would copy arrays that are read
  elsewhere before it updates them in place: on CPU, all parameters and moments in a scored step."""
  threshold, segments = cfg.optimizer.gradient_clipping_threshold, cfg.model.stacked_segments
  if not segments:
    grads = jax.lax.optimization_barrier(grads)  # for the bits, as in `clip`; sums by segments have their own
  norm = host_memory.norm(grads, segments)
  clip_factor = factor_of(norm, threshold)

  def update(train_state, read) -> None:
    if host_memory.updates(cfg):
      scale = functools.partial(scaled, clip_factor=clip_factor, threshold=threshold)
      host_memory.apply_gradients(train_state.optimizer, train_state.model, grads, scale, segments[0])
      return
    gradient: Any = grads
    if read:
      late = autodiff.after(clip_factor, read)
      gradient = jax.tree.map(lambda g: g * late.astype(g.dtype), grads)
    train_state.apply_gradients(constrain_state(gradient, moments=True))

  return norm, clip_factor, update


def make_eval_step(cfg: Config, graphdef):
  """`evaluate(state, batch) -> (summed loss, summed weight)` of the first validation set's objective, `evaluation`."""
  loss_fn = create(cfg, cfg.evaluated).evaluation()

  def evaluate(state, batch):
    train_state = nnx.merge(graphdef, state)
    (batch,) = referenced(loss_fn, train_state, batch)
    losses, weights = loss_fn(train_state.model, batch)
    return constrain(jnp.sum(losses * weights), ()), constrain(weights.sum(), ())

  return evaluate


def make_closing(cfg: Config, graphdef):
  """`close(state, val_batches) -> {prev_val_loss, prev_predicted}`, [K] each, of the step before, for validation rows
  that the next train step does not have. There is no prev_predicted where the train step has none, or the schedule
  never holds a whole gradient. With `carries_curvature` also turned, for `state.carry`."""
  loss_fn, rule = of_validation(cfg), optimizers.create(cfg.optimizer)
  whole = cfg.ghost.ghost_schedule in ("two_pass", "forward_mode")

  def close(state, val_batches):
    train_state = nnx.merge(graphdef, state)
    val_batches = referenced(loss_fn, train_state, *val_batches)
    before, carries = scoring.rule_state(cfg, rule, train_state), cfg.ghost.carries_curvature
    if not whole or not (ledger.recalls(rule, before) or carries):
      return {"prev_val_loss": constrain(passes.validation_losses(train_state.model, loss_fn, val_batches), (None,))}
    split = Model(*nnx.split(train_state.model, train_state.optimizer.wrt, ...))
    losses, gradients = passes.validation_gradients(split, loss_fn, val_batches)
    out: dict[str, Any] = {"prev_val_loss": constrain(losses, (None,))}
    if ledger.recalls(rule, before):
      moved = {label: rule.last_update(x, before.of(label), before) for label, x in by_label(split.params).items()}
      last = ledger.inner_products(moved, [by_label(g) for g in gradients])
      out["prev_predicted"] = constrain(-last, (None,))
    if carries:
      pairs = zip(train_state.stored_gradients, jax.tree.leaves(gradients), strict=True)
      out["turned"] = [earlier[...] - now for earlier, now in pairs]
    return out

  return close
