"""The scored half of the train step: which passes run, and what a step reports about its documents.

B rows, S documents in a row, T positions, K validation sets, L layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost import optimizers
from maxghost.config.schema import Config
from maxghost.ghost import ledger, schedules
from maxghost.ghost.engine import direction_spec, total
from maxghost.ghost.prepare import prepare_twin
from maxghost.ghost.schedules import TrainPass, forward_mode, reverse_scan
from maxghost.ghost.schedules.accumulate import accumulated
from maxghost.objectives import Objective, create
from maxghost.optimizers import RuleState, clip
from maxghost.parallel.shardings import slash_path
from maxghost.training.state import TrainStateNNX, trainable


@dataclasses.dataclass(frozen=True)
class Scored:
  """A scored pass and what its account needs. sums: `ledger.sums`, or None where `gradients` are kept for them.

  score_KBT: additive scores by position, summed over parameters; with engine jvp by the position of the loss.
  """

  passed: TrainPass
  val_loss: jax.Array
  gradients: list[dict] | None
  parts: dict
  sums: dict | None
  captured: dict
  score_KBT: jax.Array


def frozen(cfg: Config, model: nnx.Module) -> tuple[str, ...]:
  """Paths of the Params that are not trained: no update, so nothing to score."""
  if not cfg.optimizer.trainable_parameters_mask:
    return ()
  trained = {path for path, _ in nnx.to_flat_state(nnx.state(model, trainable(cfg, model)))}
  params = nnx.to_flat_state(nnx.state(model, nnx.Param))
  return tuple(slash_path(path) for path, _ in params if path not in trained)


def plain_pass(split, step_loss, batch, num_micro: int) -> TrainPass:
  """The training gradient without scores. split: (graphdef, params, rest) of the model."""
  graphdef, params, rest = split

  def run(micro_batch):
    return schedules.unscored_pass(graphdef, params, rest, step_loss, micro_batch)

  return accumulated(run, batch, num_micro, {})


class Scorer:
  """The scored pass of the configured schedule and direction, for batches of one shape.

  Raises ValueError for a model that cannot be scored. delta(train_state, grads) -> (State of the parameter update,
  its clipping factor) is needed by direction second_order.
  """

  def __init__(self, cfg: Config, model: nnx.Module, batch, *, num_sets: int, delta):
    self.cfg, self.ghost, self.delta = cfg, cfg.ghost, delta
    self.loss = create(cfg).validation()
    self.rule = optimizers.create(cfg.optimizer)
    self.num_micro = cfg.optimizer.gradient_accumulation_steps
    rows = jax.tree.leaves(batch)[0].shape[0] // self.num_micro
    micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), dict(batch))
    direction = self.ghost.ghost_direction
    self.second_order = direction == "second_order"
    self.twin = prepare_twin(
      model,
      micro,
      self.loss,
      num_sets=num_sets,
      num_positions=micro["inputs"].shape[1],
      spec=direction_spec(cfg, direction, self.ghost.ghost_rank),
      exclude=(*self.ghost.ghost_exclude, *frozen(cfg, model)),
      schedule=self.ghost.ghost_schedule,
      num_val=self.ghost.ghost_val_batch_size,
    )

  def __call__(self, train_state: TrainStateNNX, split, step_loss, batch, val_batches) -> Scored:
    """split: (graphdef, params, rest) of the model; step_loss: the training loss, with dropout if there is any."""
    graphdef, params, rest = split
    state = self.rule_state(train_state)
    schedule = self.ghost.ghost_schedule
    if self.ghost.ghost_engine == "jvp":
      return self._forward_mode(train_state, split, step_loss, batch, val_batches, state)
    if schedule == "reverse_scan":
      passed, val_loss, sums, captured = reverse_scan.run(
        self.twin,
        graphdef,
        params,
        rest,
        step_loss,
        batch,
        val_batches,
        state,
        self.rule,
        self.loss,
        self.cfg.model.stacked_segments,
        "carries" in self.cfg.model.offload_to_host,
        self.cfg.model.remat_policy,
      )
      return Scored(passed, val_loss, None, {}, sums, captured, total(self.twin, passed.scores))
    if schedule == "concat":
      return self._concat(split, step_loss, batch, val_batches, state)
    return self._two_pass(train_state, split, step_loss, batch, val_batches, state)

  def rule_state(self, train_state: TrainStateNNX) -> RuleState:
    """The optimizer's state, with the clipping factor of the step before: this step's needs the whole gradient."""
    clips = self.cfg.optimizer.gradient_clipping_threshold
    return self.rule.read(
      train_state.optimizer, clip_factor=train_state.clip_factor[...] if clips else jnp.ones((), float)
    )

  def _two_pass(self, train_state, split, step_loss, batch, val_batches, state) -> Scored:
    graphdef, params, rest = split
    val_loss, gradients = self._validation(train_state, split, val_batches)
    if self.second_order:
      _, _, _, grads = schedules.plain_pass(graphdef, params, rest, step_loss, batch)
      delta, clip_factor = self.delta(train_state, grads)
      gradients = schedules.second_order_gradients(graphdef, params, rest, self.loss, val_batches, gradients, delta)
      labelled = [schedules.by_label(g) for g in gradients]
      state = dataclasses.replace(state, clip_factor=clip_factor)
      respond = functools.partial(schedules.respond, self.rule, state, self.twin.parameters, schedules.by_label(grads))
      parts, captured = schedules.direction_parts(self.twin, [respond(g) for g in labelled])
    else:
      labelled = [schedules.by_label(g) for g in gradients]
      parts, captured = schedules.direction_parts(self.twin, labelled, state)
    # Nothing of the training pass begins before: else its activations may lie beside those of the validation pass.
    parts, batch = jax.lax.optimization_barrier((self.twin.placed(parts), batch))
    directions = self.twin.direction_state(parts)
    stacks = {p.label: p.stack_shape for p in self.twin.scored}

    def run(micro_batch):
      return schedules.train_pass(self.twin, params, rest, step_loss, micro_batch, directions)

    passed = accumulated(run, batch, self.num_micro, stacks)
    return Scored(passed, val_loss, labelled, parts, None, captured, total(self.twin, passed.scores))

  def _forward_mode(self, train_state, split, step_loss, batch, val_batches, state) -> Scored:
    """Engine jvp: the gradient first, then the exact direction of this very step, then one forward-mode pass."""
    graphdef, params, rest = split
    passed = plain_pass(split, step_loss, batch, self.num_micro)
    val_loss, gradients = self._validation(train_state, split, val_batches)
    if self.second_order:
      delta, _ = self.delta(train_state, passed.grads)
      gradients = schedules.second_order_gradients(graphdef, params, rest, self.loss, val_batches, gradients, delta)
    grads = schedules.by_label(passed.grads)
    sets, used = [], []
    rule = self.rule if self.second_order else self.twin.spec.rule
    _, clip_factor, _ = clip(passed.grads, self.cfg.optimizer.gradient_clipping_threshold)
    state = dataclasses.replace(state, clip_factor=clip_factor)
    scored = {p.label for p in self.twin.scored}
    for gradient in gradients:
      masked = {label: g * (label in scored) for label, g in schedules.by_label(gradient).items()}
      u = schedules.respond(rule, state, self.twin.parameters, grads, masked)
      along = schedules.like(gradient, u)
      sets.append(forward_mode.jvp_scores(graphdef, params, rest, step_loss, batch, along))
      used.append(sum(jnp.sum(grads[label] * v) for label, v in u.items()))
    labelled = [schedules.by_label(g) for g in gradients]
    return Scored(passed, val_loss, labelled, {"used": jnp.stack(used)}, None, {}, jnp.stack(sets))

  def _validation(self, train_state, split, val_batches):
    """(losses [K], K gradient States), new ones or, between refreshes, those of an earlier step (losses NaN)."""
    graphdef, params, rest = split
    every = self.ghost.ghost_val_every
    if every == 1:
      return schedules.validation_gradients(graphdef, params, rest, self.loss, val_batches)
    stored = [v[...] for v in train_state.stored_gradients]
    tree = jax.tree.structure([params] * len(val_batches))

    def fresh():
      losses, gradients = schedules.validation_gradients(graphdef, params, rest, self.loss, val_batches)
      return losses, [g.astype(s.dtype) for g, s in zip(jax.tree.leaves(gradients), stored, strict=True)]

    def stale():
      return jnp.full((len(val_batches),), jnp.nan, stored[0].dtype), stored

    losses, leaves = jax.lax.cond(train_state.step % every == 0, fresh, stale)
    for variable, leaf in zip(train_state.stored_gradients, leaves, strict=True):
      variable[...] = leaf
    return losses, jax.tree.unflatten(tree, leaves)

  def _concat(self, split, step_loss, batch, val_batches, state) -> Scored:
    _, params, rest = split
    zeros = {p.label: jnp.zeros((*p.stack_shape, *p.shape), float) for p in self.twin.scored}
    parts, _ = schedules.direction_parts(self.twin, [zeros], state)
    along = self.twin.direction_state(parts)
    passed, val_loss = schedules.concat_pass(self.twin, params, rest, step_loss, batch, val_batches[0], along)
    return Scored(passed, val_loss[None], None, {}, None, {}, total(self.twin, passed.scores))

  def columns(self, train_state, params, scored: Scored, learning_rate, clip_factor) -> dict:
    """The ledger's columns, [K] each; empty for schedule concat, which never holds a whole validation gradient."""
    twin, passed, rule = self.twin, scored.passed, self.rule
    grads = schedules.by_label(passed.grads)
    sums = scored.sums
    if scored.gradients is not None:
      state = dataclasses.replace(self.rule_state(train_state), clip_factor=clip_factor)
      labels, values = {p.label for p in twin.scored}, schedules.by_label(params)
      sums = ledger.sums(rule, state, twin.parameters, values, grads, scored.gradients, labels)
    if sums is None:
      return {}
    if self.ghost.ghost_engine == "jvp":
      score = scored.score_KBT.reshape(scored.score_KBT.shape[0], -1)
      totals = score.sum(-1), jnp.abs(score).sum(-1)
      return ledger.columns(rule, sums, totals, scored.parts["used"], learning_rate, clip_factor)
    if twin.spec.in_backward or scored.parts:
      used = ledger.used(twin.scored, grads, scored.parts, passed.facts)
    else:
      used = sums["used"]
    return ledger.columns(rule, sums, ledger.score_sums(twin.scored, passed.scores), used, learning_rate, clip_factor)


@dataclasses.dataclass(frozen=True)
class Slots:
  """The slots of a batch. used_BTS, target_BTS: 1 where a position is used in a slot, or predicts one of its targets
  that count; of each slot tokens (targets), mean loss, share of the batch loss, and 1 / share (0 where that is 0)."""

  used_BTS: jax.Array
  target_BTS: jax.Array
  tokens_BS: jax.Array
  loss_BS: jax.Array
  share_BS: jax.Array
  per_share_BS: jax.Array

  @classmethod
  def of(cls, objective: Objective, batch, losses_BT, weights_BT, num_slots: int) -> "Slots":
    dtype = jnp.promote_types(losses_BT.dtype, jnp.float32)
    used_BT, target_BT = objective.units(batch)
    used_BTS = jax.nn.one_hot(used_BT - 1, num_slots, dtype=dtype)
    target_BTS = jax.nn.one_hot(jnp.where(weights_BT != 0, target_BT, 0) - 1, num_slots, dtype=dtype)
    weighted_BTS = target_BTS * weights_BT.astype(dtype)[..., None]
    weight_BS = weighted_BTS.sum(1)
    loss_BS = jnp.einsum("bts,bt->bs", weighted_BTS, losses_BT) / jnp.where(weight_BS == 0, 1, weight_BS)
    share_BS = objective.shares(batch, weight_BS)
    per_share_BS = jnp.where(share_BS != 0, 1 / jnp.where(share_BS != 0, share_BS, 1), 0)
    return cls(used_BTS, target_BTS, target_BTS.sum(1), loss_BS, share_BS, per_share_BS)


def outputs(cfg: Config, scorer: Scorer, scored: Scored, batch, scale, columns: dict, num_segments: int) -> dict:
  """Per slot: score_dot_BSK, contribution_BSK, share_BS (of the batch loss), tokens_BS, loss_BS; by ghost_detail
  param_contribution {path: [L, B, S, K]}; with a rank captured {path: [L, K]}; scored_ok: whether all scores are finite
  (else they are 0). Contributions are in the objective's unit (nats) and, as shares, add up over the slots of a unit.

  scale: learning rate times clipping factor.
  """
  passed, twin = scored.passed, scorer.twin
  slots = Slots.of(scorer.loss, batch, passed.losses, passed.weights, num_segments)
  score_KBT = scored.score_KBT
  ok = jnp.all(jnp.isfinite(score_KBT))
  score_KBT = jnp.where(ok, score_KBT, 0)
  forward_mode = cfg.ghost.ghost_engine == "jvp"
  score_BSK = jnp.einsum("kbt,bts->bsk", score_KBT, slots.target_BTS if forward_mode else slots.used_BTS)
  out = {
    "val_loss": scored.val_loss,
    "score_dot_BSK": score_BSK * slots.per_share_BS[..., None],
    "contribution_BSK": score_BSK * scale,
    "share_BS": slots.share_BS,
    "tokens_BS": slots.tokens_BS.astype(jnp.int32),
    "loss_BS": slots.loss_BS,
    "scored_ok": ok,
    **columns,
  }
  if cfg.ghost.ghost_detail == "token":
    out["token_contribution_KBT"] = score_KBT * scale
  if forward_mode:
    return out
  if cfg.ghost.ghost_detail != "total":
    out["param_contribution"] = {
      p.label: _by_slot(p, passed.scores[p.label], slots.used_BTS, cfg.ghost.ghost_detail == "module") * scale
      for p in twin.scored
    }
  captured = dict(scored.captured)
  if twin.spec.in_backward and twin.spec.rank:
    captured = {p.label: passed.facts[p.label][..., 0] for p in twin.scored if p.spec.low_rank}
  if captured:
    out["captured"] = {label: jnp.atleast_2d(c) for label, c in captured.items()}
  out["nonfinite_scores"] = {p.label: ~jnp.all(jnp.isfinite(passed.scores[p.label])) for p in twin.scored}
  return out


def _by_slot(param, score, used_BTS, sum_layers: bool):
  """[L, B, S, K] from one parameter's [*stack, K, B, T]."""
  score_LKBT = score.reshape(-1, *score.shape[len(param.stack_shape) :])
  score_LBSK = jnp.einsum("lkbt,bts->lbsk", score_LKBT, used_BTS)
  return score_LBSK.sum(0, keepdims=True) if sum_layers else score_LBSK
