"""Online selection: scores every row of the candidate batch, and trains on the chosen rows alone.

Rows are chosen, not documents: all rows have the same number of positions, so the second backward pass has a fixed
shape. The configured batch holds the candidates, and `ghost_select_fraction` of its rows are trained on. The chosen
rows are scored again with their own token weights and, under AdamW, the preconditioner of the actual step, so that
contributions still sum to the step (`ghost.ledger`). Other rows have contribution 0 and the dot product of the
candidate pass.

n candidate rows, k chosen, B rows, S documents in a row, T positions, K validation sets, R sketch directions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxghost.config.schema import Config
from maxghost.ghost import schedules, sketch
from maxghost.ghost.attach import Twin, prepare_twin
from maxghost.ghost.schedules import Model, Problem, Scored, passes
from maxghost.objectives import create
from maxghost.optimizers import by_label, learning_rate_schedule
from maxghost.training import scoring
from maxghost.training.devices import num_chosen
from maxghost.training.scoring import Scorer
from maxghost.training.state import TrainStateNNX

NUM_SKETCHES = 32
SEED = 20_240  # of ghost_select=random and, plus 1, of the sketch directions


def choose(method: str, value_B, has_tokens_B, k: int, key, *, threshold: float = 0.0, pair_BB=None):
  """bool[B]: the rows to train on. Rows without tokens or a finite value come last; ties go to the earlier row.

  value_B: value of a row's step (nats per unit of learning rate; larger is better). topk, bottomk: the k largest,
  smallest. random: k rows drawn by `key`. threshold: rows with values above `threshold` times the mean absolute value,
  or else the best row. greats: repeatedly the row that adds most to those chosen, by value_i - sum over chosen j of
  pair_ij - pair_ii / 2 (Wang et al., GREATS, 2024).
  """
  usable_B = has_tokens_B & jnp.isfinite(value_B)
  value_B = jnp.where(usable_B, value_B, 0)
  if method == "threshold":
    above = (value_B > threshold * jnp.sum(jnp.abs(value_B)) / jnp.maximum(usable_B.sum(), 1)) & usable_B
    best = jnp.arange(len(value_B)) == jnp.argmax(jnp.where(usable_B, value_B, -jnp.inf))
    return jnp.where(above.any(), above, best)
  if method == "greats":
    return _greedy(value_B, usable_B, k, pair_BB)
  rank = {"topk": value_B, "bottomk": -value_B, "random": jax.random.uniform(key, value_B.shape)}[method]
  order = jnp.argsort(-jnp.where(usable_B, rank, -jnp.inf), stable=True)
  return jnp.zeros(value_B.shape, bool).at[order[:k]].set(True)


def _greedy(value_B, usable_B, k: int, pair_BB):
  gain = value_B - 0.5 * jnp.diagonal(pair_BB)

  def add(_, carry):
    chosen, gain = carry
    best = jnp.argmax(jnp.where(chosen, -jnp.inf, jnp.where(usable_B, gain, jnp.finfo(gain.dtype).min)))
    return chosen.at[best].set(True), gain - pair_BB[best]

  return jax.lax.fori_loop(0, k, add, (jnp.zeros(value_B.shape, bool), gain))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected(Scored):
  """The scored pass of the chosen rows, after that of all candidates. batch: the chosen rows. index_k: their indices
  among the candidates; None if all rows are kept, others masked. chosen_B: bool. candidates: the candidate pass."""

  batch: dict
  index_k: jax.Array | None
  chosen_B: jax.Array
  candidates: Scored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector(Scorer):
  """A Scorer of the chosen rows: it scores all rows of the batch, then scores the chosen ones and trains on them.
  candidates: the scorer of all rows. sketch: another twin of all rows, for ghost_select=greats."""

  candidates: Scorer
  sketch: Twin | None

  def score(self, train_state: TrainStateNNX, split: Model, step_loss, batch, val_batches: tuple) -> Selected:
    """As `Scorer.score`, for the chosen rows."""
    ghost = self.cfg.ghost
    problem = self.candidates.problem(train_state, split, step_loss, batch, val_batches)
    settings = dataclasses.replace(problem.settings, in_turn=False)
    first = scoring.run(dataclasses.replace(problem, account=None, settings=settings), train_state)
    value_B = first.additive.mean(0).sum(-1)
    k = num_chosen(self.cfg, len(value_B))
    pair_BB = self.sketch and self._interactions(problem, self.sketch, first.passed.grads, train_state.step)
    chosen_B = choose(ghost.ghost_select, value_B, (first.passed.weights != 0).any(-1), k,
                      jax.random.fold_in(jax.random.key(SEED), train_state.step), threshold=ghost.ghost_select_fraction,
                      pair_BB=pair_BB)  # fmt: skip
    picked, index_k = take(dict(batch), chosen_B, k)
    # The validation gradient is computed once for both passes.
    second = dataclasses.replace(problem, twin=self.twin, batch=picked, validation=first.validation)
    return Selected(**vars(schedules.score(second)), batch=picked, index_k=index_k, chosen_B=chosen_B, candidates=first)

  def outputs(self, scored: Selected, batch, learning_rate, norm, clip_factor) -> dict:
    """As `Scorer.outputs`, for all candidates, with chosen_B bool. Rows that were not chosen have contribution 0, and
    the dot product, loss and tokens of the candidate pass."""
    out, first = super().outputs(scored, scored.batch, learning_rate, norm, clip_factor), scored.candidates
    out["scored_ok"] &= jnp.all(jnp.isfinite(first.additive))  # else the log would have NaN for a row not chosen
    used_BTS, _, per_share_BS, seen = self.slots(dict(batch), first.passed.losses, first.passed.weights)
    seen_dot = scoring.products("kbt,bts->bsk", first.additive, used_BTS) * per_share_BS[..., None]

    def spread(value, axis: int, fill=None):
      """Puts values of the chosen rows at their indices among the candidates, `fill` (0) elsewhere."""
      shape = (*value.shape[:axis], len(scored.chosen_B), *value.shape[axis + 1 :])
      whole = jnp.zeros(shape, value.dtype) if fill is None else fill.astype(value.dtype)
      if scored.index_k is not None:
        return whole.at[(slice(None),) * axis + (scored.index_k,)].set(value)
      return jnp.where(jnp.expand_dims(scored.chosen_B, tuple(range(1, len(shape) - axis))), value, whole)

    fills = {"score_dot_BSK": seen_dot, "tokens_BS": seen["tokens_BS"], "loss_BS": seen["loss_BS"]}
    for name, axis in scoring.ROW_AXIS.items():
      if name in out:
        out[name] = jax.tree.map(functools.partial(spread, axis=axis, fill=fills.get(name)), out[name])
    return out | {"chosen_B": scored.chosen_B}

  def _interactions(self, problem: Problem, twin: Twin, grads: nnx.State, step):
    """pair_BB: how much less the rows of a pair gain together than separately, in the units of `choose`'s values.

    It is lr (n / k) c <P g_i, P g_j>. One Hessian-vector product measures the curvature of the validation loss along
    the candidates' step P g (c = <Pg, H Pg> / |Pg|^2, at least 0), which is used for all directions. The inner products
    are estimated from R rank-one directions, with the elementwise P factored into rows and columns (Shazeer and Stern,
    arXiv:1804.04235).
    """
    (graphdef, params, rest), state, views = problem.model, problem.state, problem.parameters
    assert state is not None
    scalars, labelled = self.rule.scalars(state.count, state.clip_factor), by_label(grads)
    responses = {name: self.rule.response(views[name], g, state.of(name), scalars) for name, g in labelled.items()}
    weightings = {name: response.weighting() for name, response in responses.items()}
    scale = {name: jnp.ones_like(labelled[name]) if w is None else w for name, w in weightings.items()}
    moved = passes.like(grads, {name: responses[name].apply(g) for name, g in labelled.items()})

    def val_loss(p):
      model, pairs = nnx.merge(graphdef, p, rest), zip(problem.val_losses, problem.val_batches, strict=True)
      return sum(passes.mean_loss(*loss(model, rows)) for loss, rows in pairs) / len(problem.val_batches)

    _, curved = jax.jvp(jax.grad(val_loss), (params,), (moved,))
    along, size = (jnp.asarray(optax.tree_utils.tree_vdot(moved, x)) for x in (curved, moved))
    curvature = jnp.maximum(along / jnp.maximum(size, jnp.finfo(size.dtype).tiny), 0)
    key = jax.random.fold_in(jax.random.key(SEED + 1), step)
    sketch_MRB = sketch.sketch_pass(twin, params, rest, problem.loss, problem.batch, key, NUM_SKETCHES, scale)
    gram_BB = scoring.products("mra,mrb->ab", sketch_MRB, sketch_MRB) / NUM_SKETCHES
    learning_rate = learning_rate_schedule(self.cfg.optimizer, self.cfg.run.steps)(step)
    return learning_rate * len(gram_BB) / num_chosen(self.cfg, len(gram_BB)) * curvature * gram_BB


def make_selector(cfg: Config, model: nnx.Module, batch, *, num_sets: int, num_segments: int) -> Selector:
  """As `scoring.make_scorer`, with twins for the candidates. Raises ValueError for a model that cannot be scored."""
  rows = jax.tree.leaves(batch)[0].shape[0]
  of = lambda n: {name: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for name, x in dict(batch).items()}  # noqa: E731
  sizes, twin = {"num_sets": num_sets, "num_segments": num_segments}, None
  scorer, candidates = (scoring.make_scorer(cfg, model, of(n), **sizes) for n in (num_chosen(cfg, rows), rows))
  if cfg.ghost.ghost_select == "greats":
    options = {"num_sets": 1, "num_positions": None, "spec": sketch.SPEC, "exclude": scoring.excluded(cfg, model)}
    twin = prepare_twin(model, of(rows), create(cfg), **options)
  return Selector(**vars(scorer), candidates=candidates, sketch=twin)


def take(batch: dict, chosen_B, k: int):
  """(the chosen rows [k, ...], their indices [k] ascending). If k is the whole batch, all rows stay, rows that are not
  chosen become padding, and the indices are None."""
  if k == chosen_B.shape[0]:
    segments = [name for name in batch if name.endswith("_segmentation")]
    return batch | {name: jnp.where(chosen_B[:, None], batch[name], 0) for name in segments}, None
  index_k = jnp.sort(jnp.argsort(~chosen_B, stable=True)[:k])
  return {name: x[index_k] for name, x in batch.items()}, index_k
