"""The scoring of the train step: the step as a `Problem`, its ledger, and its outputs for each document.

B rows, S documents in a row, T positions, K validation sets, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost import optimizers
from maxghost.config import plugins
from maxghost.config.schema import Config
from maxghost.ghost import ledger, schedules
from maxghost.ghost.attach import Twin, prepare_twin
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.engine import direction_spec
from maxghost.ghost.schedules import Model, Problem, Scored, Secant, Settings, Stored, passes
from maxghost.ghost.schedules.base import of_each_set
from maxghost.models import autodiff, streaming
from maxghost.objectives import Objective, create, of_validation
from maxghost.parallel.axis_rules import BATCH
from maxghost.parallel.shardings import constrain, slash_path
from maxghost.training.batches import validation_index
from maxghost.training.state import TrainStateNNX, trainable

products = functools.partial(jnp.einsum, precision="highest")  # by default a TPU rounds to bfloat16, a GPU to TF32
# The row axis of outputs that have one; of param_contribution, that of every entry.
ROW_AXIS: dict[str, int] = dict.fromkeys(("token_contribution_KBT", "param_contribution"), 1)
ROW_AXIS |= dict.fromkeys(("score_dot_BSK", "contribution_BSK", "share_BS", "tokens_BS", "loss_BS", "chosen_B"), 0)


def excluded(cfg: Config, model: nnx.Module) -> tuple[str, ...]:
  """Paths and patterns of the Params that are not scored: those of ghost_exclude, and all that are not trained."""
  frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(trainable(cfg, model))))
  return (*cfg.ghost.ghost_exclude, *(slash_path(path) for path, _ in nnx.to_flat_state(frozen)))


@dataclasses.dataclass(frozen=True)
class Scorer:
  """The scored pass of the configured schedule and direction, for batches of one shape. See `make_scorer`. loss: the
  objective, which tells the units. num_slots: S."""

  cfg: Config
  loss: Objective
  rule: optimizers.UpdateRule
  twin: Twin
  num_slots: int

  def problem(self, train_state: TrainStateNNX, split: Model, step_loss, batch, val_batches: tuple) -> Problem:
    """The step as a `Problem`. split: the model. step_loss: the training loss, with dropout."""
    ghost, optimizer, model = self.cfg.ghost, self.cfg.optimizer, self.cfg.model
    state = rule_state(self.cfg, self.rule, train_state)
    stored, secant = self._earlier(train_state, optimizers.by_label(split.params))
    return Problem(
      schedule=ghost.ghost_schedule, model=split, loss=step_loss, batch=batch,
      val_losses=of_each_set(of_validation(self.cfg), val_batches), val_batches=val_batches,
      twin=self.twin, parameters=self.twin.parameters,
      scored=tuple(p.label for p in self.twin.scored), rule=optimizers.direction_rule(optimizer, ghost.direction),
      state=state, update=lambda grads: self._update(train_state, grads, state), validation=stored, secant=secant,
      account=self.rule,
      settings=Settings(num_micro=optimizer.gradient_accumulation_steps, remat_policy=model.remat_policy, in_turn=True,
                        segment_lengths=model.stacked_segments, carries_on_host="carries" in model.offload_to_host,
                        gradients_on_host="val_gradient" in model.offload_to_host),
    )  # fmt: skip

  def _earlier(self, train_state: TrainStateNNX, params: dict) -> tuple[Stored | None, Secant | None]:
    """The validation gradients of earlier steps: those to score against, and those that measure the curvature."""
    ghost, stored, secant = self.cfg.ghost, None, None
    if not ghost.num_stored:
      return None, None
    leaves = [v[...] for v in train_state.stored_gradients]
    latest = leaves[: self.twin.num_sets * len(params)]
    earlier = leaves[-len(latest) :]
    if ghost.ghost_val_every > 1:
      stored = Stored(latest, train_state.step % ghost.ghost_val_every == 0)
      earlier = [jnp.where(stored.refresh, new, old) for new, old in zip(latest, earlier, strict=True)]
    if ghost.curvature == "secant":
      of_sets = [earlier[i : i + len(params)] for i in range(0, len(earlier), len(params))]
      by_label = [dict(zip(params, arrays, strict=True)) for arrays in of_sets]
      carried = jnp.zeros((), float) if train_state.carried is None else train_state.carried[...]
      secant = Secant(by_label, secant_weight(self.cfg, train_state.step, carried), 1 - carried)
    return stored, secant

  def score(self, train_state: TrainStateNNX, split: Model, step_loss, batch, val_batches: tuple) -> Scored:
    """Scores the batch, and stores in the train state the validation gradients for later steps."""
    return run(self.problem(train_state, split, step_loss, batch, val_batches), train_state)

  def _update(self, train_state: TrainStateNNX, grads: nnx.State, state: optimizers.RuleState) -> tuple:
    """`Problem.update` for the gradient `grads`. The train state does not change."""
    _, factor, clipped = optimizers.clip(grads, self.cfg.optimizer.gradient_clipping_threshold)
    delta = None
    if self.cfg.ghost.curvature == "hessian":
      copy: Any = nnx.clone(train_state)
      before = jax.tree.map(lambda x: x, nnx.state(copy.model, copy.optimizer.wrt))
      copy.apply_gradients(clipped)
      delta = jax.tree.map(lambda after, start: after - start, nnx.state(copy.model, copy.optimizer.wrt), before)
    return dataclasses.replace(state, clip_factor=factor), delta

  def gradients(self, scored: Scored) -> list[dict]:
    """The validation gradients for the ledger: K dicts, or 2 K, with and without curvature."""
    assert scored.gradients is not None
    if self.cfg.ghost.curvature == "none":
      return scored.gradients
    assert scored.validation is not None
    return [*scored.gradients, *map(optimizers.by_label, scored.validation.gradients)]

  def columns(self, train_state: TrainStateNNX, params, scored: Scored, learning_rate, norm, clip_factor) -> dict:
    """The ledger's columns, [K] each; empty for schedule concat, which never holds a whole validation gradient. norm:
    of the training gradient."""
    twin, passed, rule = self.twin, scored.passed, self.rule
    grads, sums = optimizers.by_label(passed.grads), scored.sums
    if scored.gradients is not None:
      state = dataclasses.replace(rule_state(self.cfg, self.rule, train_state), clip_factor=clip_factor)
      labels, values = {p.label for p in twin.scored}, optimizers.by_label(params)
      made = functools.partial(ledger.sums, rule, state, twin.parameters, values, grads, scored=labels)
      sums = streaming.read_late(made, self.gradients(scored), norm)
    if sums is None:
      return {}
    if passed.scores:
      totals = ledger.score_sums(twin.scored, passed.scores)
    else:
      score = scored.additive.reshape(scored.additive.shape[0], -1)
      totals = score.sum(-1), jnp.abs(score).sum(-1)
    used = ledger.used(twin.scored, grads, scored.parts, passed.facts) if scored.used is None else scored.used
    out = ledger.columns(rule, sums, totals, used[: twin.num_sets], learning_rate, clip_factor)
    if scored.secant is not None:  # 0 and not rounding, where the step is of first order
      out["predicted_curvature"] = jnp.where(scored.secant.weight == 0, 0, out["predicted_curvature"])
    return out

  def outputs(self, scored: Scored, batch, learning_rate, norm, clip_factor) -> dict:
    """The step's outputs per slot: score_dot_BSK, contribution_BSK, share_BS (of the batch loss), tokens_BS, loss_BS.

    Also param_contribution {path: [L, B, S, K]} by ghost_detail, captured {path: [L, K]} with a rank, and scored_ok:
    whether all scores are finite (else they are 0). Contributions are in the objective's unit (nats); contributions
    and shares can be summed over the slots of a unit. norm: of the whole gradient, before clipping. of_clipping [K], if
    credit counts clipping: total of the contributions minus that of learning rate times clipping factor times score.
    """
    ghost, passed = self.cfg.ghost, scored.passed
    used_BTS, target_BTS, per_share_BS, of_slots = self.slots(batch, passed.losses, passed.weights)
    ok: Any = jnp.all(jnp.isfinite(scored.additive))
    clipping, own_1BT, own_BS1, scale = None, None, None, learning_rate * clip_factor
    if scored.own:
      own_1BT = passes.total(self.twin, scored.own)
      ok &= jnp.all(jnp.isfinite(own_1BT))
      own_1BT = jnp.where(ok, own_1BT, 0)
      own_BS1 = products("kbt,bts->bsk", own_1BT, used_BTS)
    score_KBT, forward_mode = jnp.where(ok, scored.additive, 0), ghost.engine == "jvp"
    score_BSK = products("kbt,bts->bsk", score_KBT, target_BTS if forward_mode else used_BTS)
    if scored.own:
      clipping = self._clipping(score_BSK, own_BS1, norm)

    def credit(score, own, place=lambda x_BSK: x_BSK):
      """Contributions from scores and own scores. place: puts an array by slots where the scores are."""
      if clipping is None:
        return score * scale
      factor_BSK, slope_BSK = clipping
      return learning_rate * (place(factor_BSK) * score + place(slope_BSK) * own)

    out = {"val_loss": scored.val_loss, "score_dot_BSK": score_BSK * per_share_BS[..., None],
           "contribution_BSK": credit(score_BSK, own_BS1), **of_slots, "scored_ok": ok}  # fmt: skip
    if clipping is not None:
      changed_BSK = (clipping[0] != clip_factor) | (clipping[1] != 0)  # elsewhere the difference is rounding
      out["of_clipping"] = jnp.where(changed_BSK, out["contribution_BSK"] - score_BSK * scale, 0).sum((0, 1))
    if ghost.ghost_detail == "token":
      out["token_contribution_KBT"] = credit(score_KBT, own_1BT, lambda x: products("bts,bsk->kbt", used_BTS, x))
    if forward_mode:
      return out
    if ghost.ghost_detail != "total":

      def by_slot(param, score):
        """[L, B, S, K] from one parameter's [*stack, K, B, T]."""
        score_LKBT = score.reshape(-1, *score.shape[len(param.stack_shape) :])
        score_LBSK = products("lkbt,bts->lbsk", score_LKBT, used_BTS)
        return score_LBSK.sum(0, keepdims=True) if ghost.ghost_detail == "module" else score_LBSK

      out["param_contribution"] = {}
      for p in self.twin.scored:
        own = by_slot(p, scored.own[p.label]) if scored.own else None
        out["param_contribution"][p.label] = credit(by_slot(p, passed.scores[p.label]), own, lambda x: x[None])
    if scored.captured:
      out["captured"] = {label: jnp.atleast_2d(c) for label, c in scored.captured.items()}
    out["nonfinite_scores"] = {p.label: ~jnp.all(jnp.isfinite(passed.scores[p.label])) for p in self.twin.scored}
    for label, own in scored.own.items():
      out["nonfinite_scores"][label] |= ~jnp.all(jnp.isfinite(own))
    return out

  def _clipping(self, score_BSK, own_BS1, norm) -> tuple[jax.Array, jax.Array]:
    """([B, S, K], [B, S, K]): factors of each slot's scores, and of its scores along the batch gradient g. The
    products add up to c_i <u, g_i> + (c - c_i) <u, g> (`factor_without`), whose second term is divided among the parts
    of g_i in proportion to their part of <g, g_i>. norm: |g|."""
    inverse = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
    share_BS1 = own_BS1 * inverse * inverse
    factor_BS1, slope_BS1 = optimizers.factor_without(share_BS1, norm, self.cfg.optimizer.gradient_clipping_threshold)
    factor_BSK = jnp.broadcast_to(factor_BS1, score_BSK.shape)
    return factor_BSK, slope_BS1 * inverse * inverse * score_BSK.sum((0, 1), keepdims=True)

  def slots(self, batch, losses_BT, weights_BT) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """(used_BTS, target_BTS, per_share_BS, the outputs share_BS, tokens_BS and loss_BS) of a batch's slots. used_BTS,
    target_BTS: 1 where a position is used in a slot, or predicts one of its targets. per_share_BS: 1 / share of the
    batch loss, 0 for share 0."""
    dtype = jnp.promote_types(losses_BT.dtype, jnp.float32)
    used_BT, target_BT = self.loss.units(batch)
    used_BTS = jax.nn.one_hot(used_BT - 1, self.num_slots, dtype=dtype)
    target_BTS = jax.nn.one_hot(jnp.where(weights_BT != 0, target_BT, 0) - 1, self.num_slots, dtype=dtype)
    weighted_BTS = target_BTS * weights_BT.astype(dtype)[..., None]
    weight_BS = weighted_BTS.sum(1)
    loss_BS = products("bts,bt->bs", weighted_BTS, losses_BT) / jnp.where(weight_BS == 0, 1, weight_BS)
    share_BS = self.loss.shares(batch, weight_BS)
    per_share_BS = jnp.where(share_BS != 0, 1 / jnp.where(share_BS != 0, share_BS, 1), 0)
    out = {"share_BS": share_BS, "tokens_BS": target_BTS.sum(1).astype(jnp.int32), "loss_BS": loss_BS}
    return used_BTS, target_BTS, per_share_BS, out


def rule_state(cfg: Config, rule: optimizers.UpdateRule, train_state: TrainStateNNX) -> optimizers.RuleState:
  """The optimizer's state with the previous step's clipping factor; this step's would need the whole gradient."""
  factor = train_state.clip_factor[...] if cfg.optimizer.gradient_clipping_threshold else jnp.ones((), float)
  state = rule.read(train_state.optimizer, clip_factor=factor)
  if cfg.ghost.ghost_every > 1 or cfg.ghost.ghost_val_every > 1 or cfg.model.use_qk_clip:
    return state  # the gradients of two steps in a row are not at hand, or QK-Clip moved parameters too
  rate = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps)
  return dataclasses.replace(state, last_rate=rate(jnp.maximum(train_state.step, 1) - 1))


def scoring_spec(cfg: Config) -> DirectionSpec:
  """The directions of the run's scores."""
  spec = direction_spec(cfg, cfg.ghost.direction, cfg.ghost.ghost_rank, cfg.ghost.curvature)
  spec = dataclasses.replace(spec, own=cfg.counts_clipping)
  # A direction that depends on the gradient needs that of all micro-batches.
  return dataclasses.replace(spec, early=cfg.optimizer.gradient_accumulation_steps > 1) if spec.in_backward else spec


def secant_weight(cfg: Config, step, carried: Any = 0) -> jax.Array:
  """`Secant.weight`, with distances as sums of learning rates; 0 without an earlier gradient of the same rows. With
  ghost_every=1 and ghost_val_every=1, half of this step's learning rate over that of the step before.

  carried: 1 if the earlier gradient is of the rows before, together with its change (`state.carry`).
  """
  ghost, kind, step = cfg.ghost, step.dtype, step.astype(jnp.int32)
  every = max(ghost.ghost_every, ghost.ghost_val_every)
  latest = step - step % every
  rate = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps)
  steps = latest - every + jnp.arange(2 * every)  # from the earlier gradient to the latest and beyond
  rates = jnp.where(steps < 0, 0.0, jnp.asarray(rate(jnp.maximum(steps, 0).astype(kind)), float))
  ahead = jnp.where(steps < step, rates, jnp.where(steps == step, rates / 2, 0))[every:].sum()
  between = rates[:every].sum()
  same_rows = validation_index(ghost, latest) == validation_index(ghost, latest - every)
  known = (latest >= every) & (same_rows | (jnp.asarray(carried) > 0))
  return jnp.where(known & (between > 0), ahead / jnp.where(between > 0, between, 1), 0)


def make_scorer(cfg: Config, model: nnx.Module, batch, *, num_sets: int, num_segments: int = 1) -> Scorer:
  """batch: arrays or shapes. Raises ValueError for a model that cannot be scored."""
  ghost, objective = cfg.ghost, create(cfg)
  rows = jax.tree.leaves(batch)[0].shape[0] // cfg.optimizer.gradient_accumulation_steps
  micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), dict(batch))
  twin = prepare_twin(model, micro, objective, num_sets=num_sets, num_positions=micro["inputs"].shape[1],
                      spec=scoring_spec(cfg), exclude=excluded(cfg, model), schedule=ghost.passes,
                      num_val=ghost.ghost_val_batch_size)  # fmt: skip
  # The account divides the step along the path or into parts with the state held fixed, as its scores do; what marginal
  # scores leave of the path is in the direction residual.
  along = ghost.direction in plugins.OF_STEP
  rule = optimizers.direction_rule(cfg.optimizer, "path") if along else optimizers.create(cfg.optimizer)
  return Scorer(cfg, objective.validation(), rule, twin, num_segments)


def run(problem: Problem, train_state: TrainStateNNX) -> Scored:
  """Scores the problem, and stores the validation gradients that the next steps need (`_earlier`)."""
  scored = schedules.score(problem)
  if (isinstance(problem.validation, Stored) or problem.secant) and scored.validation is not None:
    leaves = jax.tree.leaves(scored.validation.gradients)
    if isinstance(problem.validation, Stored) and problem.secant:
      leaves += [gradient for of_set in problem.secant.earlier for gradient in of_set.values()]
    for variable, leaf in zip(train_state.stored_gradients, leaves, strict=True):
      # Written after the old values are read: otherwise XLA would copy these, since they are replaced in place.
      variable[...] = leaf if streaming.on_host(leaf) else autodiff.after(leaf, scored.additive)
    if train_state.carried is not None:
      train_state.carried[...] = jnp.zeros_like(train_state.carried[...])
  return scored


def place(x, axis: int | None):
  """Inside a step, shards one of its outputs like the rows along this axis; None: replicates it."""
  return constrain(x, [BATCH if i == axis else None for i in range(x.ndim)], "an output of the step")


def placed(out: Mapping[str, Any]) -> dict[str, Any]:
  """Inside a step, shards outputs with a row axis like the rows, and replicates all others."""
  return _each(place, out)


def to_host(out: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Waits for host copies. Outputs with a row axis have only the rows of this process, in their order."""

  def own_rows(x, axis: int | None):
    if axis is None or x.is_fully_addressable or x.is_fully_replicated:
      return x
    pieces = {shard.index[axis].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)], axis)

  return jax.device_get(_each(own_rows, out))


def _each(function: Callable, out: Mapping[str, Any]) -> dict[str, Any]:
  """Applies function(array, its row axis or None) to every output."""
  return {name: jax.tree.map(functools.partial(function, axis=ROW_AXIS.get(name)), x) for name, x in out.items()}
