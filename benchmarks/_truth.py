"""Leave out and follow: scores of single documents beside what happens without the document in one step.

A document's share is taken out of the gradient of one step of a run; the run then goes on with the same later batches,
and its validation loss is compared with that of the whole run after this step and after more steps. Beside it, exact
Shapley values of the documents of a small batch in one step. All in float64.

C cells (one step of one run), n documents of a step, H horizons, M scores, S steps of a run, B rows of a batch.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import _byte_lm
import _digits
import _muon_forms
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from _measure import Figure
from flax import nnx

from maxghost import config, models, optimizers
from maxghost.ghost import DirectionSpec, schedules
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.schedules import Model, Problem, Validation, passes, per_example
from maxghost.ghost.schedules.base import Secant
from maxghost.objectives import LanguageModelLoss
from maxghost.optimizers import Muon, Parameter, by_label

HORIZONS = (0, 1, 3, 10, 30, 100)  # further steps after which the validation losses are compared
STEPS = 240
PLAYERS = 8  # documents of a batch whose Shapley values are computed
BENDS = ("", " + secant", " + hessian")  # what the validation gradient is before the optimizer's response
BASELINES = ("gradient product", "TracIn, last checkpoint", "gradient norm", "loss", "random")
ADAM = "gradient product by Adam's factor"  # of a Muon run
MARGINAL = "marginal"  # counts the clipping, as the trainer's does
OPTIMIZERS = {
  "AdamW": {"opt_type": "adamw", "learning_rate": 3e-3},
  "Muon": {"opt_type": "muon", "learning_rate": 0.02},
}


@dataclasses.dataclass(frozen=True)
class World:
  """A task in training. cfg: of the optimizer and the run. at: steps (from 0) from which documents are taken.

  model: seed -> nnx.Module. data: seed -> (batches [S, B, ...], validation batch). weights: name of the array of a
  batch that is 0 in rows that do not count.
  """

  name: str
  cfg: config.Config
  model: Callable[[int], nnx.Module]
  loss: Callable
  data: Callable[[int], tuple[dict, dict]]
  weights: str
  at: tuple[int, ...]


def digits(optimizer: str, at: tuple[int, ...] = (3, 10, 30, 60, 120), rows: int = 32) -> World:
  """The MLP of `_digits` on 1000 images, a tenth with wrong labels; constant learning rate, no decay, no clipping."""
  cfg = config.replace(
    config.load(), steps=STEPS, lr_schedule_type="constant", warmup_steps_fraction=0.0, adam_weight_decay=0.0,
    gradient_clipping_threshold=0.0, **OPTIMIZERS[optimizer],
  )  # fmt: skip

  def data(seed: int):
    problem = _digits.make_problem(seed)
    order_SB = problem.order(STEPS, rows)
    return {name: np.asarray(x)[order_SB] for name, x in problem.train.items()}, problem.val

  def model(seed: int):
    return _digits.DigitsMLP(nnx.Rngs(seed))

  return World(f"digits, {optimizer}", cfg, model, _digits.classification_loss, data, "weight", at)


def language(optimizer: str, at: tuple[int, ...] = (10, 30, 60, 90, 130), rows: int = 14, length: int = 24) -> World:
  """Two layers of width 32 on bytes of six domains, validated on one; schedule, decay and clipping of the trainer."""
  cfg = config.replace(
    config.load(), steps=STEPS, base_emb_dim=32, base_num_query_heads=2, base_num_kv_heads=2, head_dim=16,
    base_mlp_dim=64, base_num_decoder_layers=2, vocab_size=259, max_target_length=length, attention="dot_product",
    per_device_batch_size=rows, remat_policy="none", dtype="float64", weight_dtype="float64", **OPTIMIZERS[optimizer],
  )  # fmt: skip

  def data(seed: int):
    corpus = _corpus()
    chunks_SBT = corpus.mixed(STEPS, seed, rows)[0][..., : length + 1]
    batches = _byte_lm.rows_of(chunks_SBT.reshape(-1, length + 1))
    val = corpus.val[_byte_lm.DOMAINS.index("manual")][:, : length + 1]
    return {name: x.reshape(STEPS, rows, length) for name, x in batches.items()}, _byte_lm.rows_of(val)

  def model(seed: int):
    return models.create(cfg, rngs=nnx.Rngs(seed))

  name = f"language model, {optimizer}"
  return World(name, cfg, model, LanguageModelLoss(), data, "targets_segmentation", at)


@functools.cache
def _corpus():
  return _byte_lm.load_corpus()


def wide(tree):
  """Floating-point arrays of a tree in float64."""
  return jax.tree.map(lambda x: jnp.asarray(x, "float64" if jnp.issubdtype(x.dtype, jnp.floating) else None), tree)


class Steps:
  """The steps of a world's runs and the scores of their documents, each compiled once for all seeds.

  A state is (params, (optimizer state, that of Adam on the same gradients), steps taken). rules: {score: (rule, what
  is done to the validation gradient)}.
  """

  @jax.enable_x64(True)
  def __init__(self, world: World):
    self.world, optimizer = world, world.cfg.optimizer
    model = world.model(0)
    self.graphdef, params, self.rest = nnx.split(model, nnx.Param, ...)
    rule = optimizers.create(optimizer)
    self.rule = rule.of_params(params)
    self.clipping = optimizer.gradient_clipping_threshold
    self.schedule = optimizers.learning_rate_schedule(optimizer, STEPS)
    self.rates_S = np.broadcast_to(np.asarray(self.schedule(jnp.arange(STEPS)), np.float64), STEPS)
    self.tx = self.rule.transformation(self.schedule)
    self.adam = optax.scale_by_adam(optimizer.adam_b1, optimizer.adam_b2, optimizer.adam_eps)
    self.rules = forms(self.rule)
    self.credits = tuple(name + bend for name, (_, bends) in self.rules.items() for bend in bends)
    self.baselines = BASELINES[:1] + (ADAM,) * isinstance(self.rule, Muon) + BASELINES[1:]
    row = jax.tree.map(lambda x: x[0], world.data(0)[0])
    twin = functools.partial(
      prepare_twin, nnx.merge(self.graphdef, wide(params), self.rest), wide(row), world.loss, num_positions=None
    )
    self.twins = {
      name: twin(spec=DirectionSpec(rule, own=self.clipping > 0 and name == MARGINAL), num_sets=len(bends))
      for name, (rule, bends) in self.rules.items()
    }
    self.advance, self.follow = jax.jit(self._advance), jax.jit(self._follow)
    self.scores, self.shapley = jax.jit(self._scores), jax.jit(self._shapley)

  def start(self, seed: int):
    params = wide(nnx.split(self.world.model(seed), nnx.Param, ...)[1])
    pure = nnx.as_pure(params)
    return params, (self.tx.init(pure), self.adam.init(pure)), jnp.zeros((), jnp.int32)

  def model(self, params) -> Model:
    return Model(self.graphdef, params, self.rest)

  def apply(self, state, grads):
    """(new state, update of the parameters, clipping factor)."""
    params, (opt_state, moments), count = state
    _, factor, clipped = optimizers.clip(grads, self.clipping)
    moved, opt_state = self.tx.update(nnx.as_pure(clipped), opt_state, nnx.as_pure(params))
    _, moments = self.adam.update(nnx.as_pure(clipped), moments)
    delta = passes.like(params, by_label(moved))
    return (optax.apply_updates(params, delta), (opt_state, moments), count + 1), delta, factor

  def gradient(self, params, batch) -> nnx.State:
    return passes.train_pass(self.model(params), self.world.loss, batch).grads

  def val_loss(self, params, val):
    return passes.mean_loss(*self.world.loss(nnx.merge(self.graphdef, params, self.rest), val))

  def shares(self, params, batch) -> dict:
    """{label: [n, *parameter]}, each document's share of the batch gradient."""
    return per_example.gradients_of(self.model(params), self.world.loss, batch)

  def _advance(self, state, batches, stop):
    def step(i, state):
      return self.apply(state, self.gradient(state[0], batch_of(batches, i)))[0]

    return jax.lax.fori_loop(state[2], jnp.asarray(stop, jnp.int32), step, state)

  def _follow(self, state, batches, val, horizons_H):
    """[n, H]: validation loss without each document of this step minus that of the whole run, later and later."""
    params, at = state[0], state[2]
    batch = batch_of(batches, at)
    whole, shares = by_label(self.gradient(params, batch)), self.shares(params, batch)
    left_out = {label: jnp.concatenate([share, jnp.zeros_like(share[:1])]) for label, share in shares.items()}
    ends_H = at + 1 + horizons_H

    def one(left_out):
      grads = passes.like(params, {label: g - left_out[label] for label, g in whole.items()})

      def until(state, end):
        state = self._advance(state, batches, end)
        return state, self.val_loss(state[0], val)

      return jax.lax.scan(until, self.apply(state, grads)[0], ends_H)[1]

    losses = jax.vmap(one)(left_out)
    return losses[:-1] - losses[-1:]

  def _scores(self, before, state, last, batch, val):
    """({score: [n]}, {score: [n] in all}). before, last: parameters one step earlier, and at the run's end."""
    params, (opt_state, _), count = state
    model, loss = self.model(params), self.world.loss
    passed = passes.train_pass(model, loss, batch)
    (_, (_, moments), _), delta, factor = self.apply(state, passed.grads)
    norm = optimizers.clip(passed.grads, self.clipping)[0]
    rate = self.schedule(count)
    val_loss, (G,) = passes.validation_gradients(model, loss, (val,))
    _, (G_before,) = passes.validation_gradients(self.model(before), loss, (val,))
    earlier = Secant([by_label(G_before)], weight=jnp.asarray(rate / self.schedule(count - 1) / 2))
    secant = passes.like(G, passes.extrapolated(earlier, [by_label(G)])[0])
    (hessian,) = passes.second_order_gradients(model, loss, (val,), [G], delta)
    directions = dict(zip(BENDS, (G, secant, hessian), strict=True))
    scores, in_all = {}, {}
    for name, (rule, bends) in self.rules.items():
      twin = self.twins[name]
      known = Validation(jnp.tile(val_loss, len(bends)), [directions[bend] for bend in bends])
      found = schedules.score(
        Problem(
          schedule="two_pass", model=model, loss=loss, batch=batch, val_losses=(loss,) * len(bends),
          val_batches=(val,) * len(bends), twin=twin, parameters=twin.parameters,
          scored=tuple(p.label for p in twin.scored), rule=rule,
          state=rule.read(opt_state, count=count, clip_factor=factor), validation=known,
        )
      )  # fmt: skip
      later = {p.label: self.reach(p.parameter)[count] for p in twin.scored}
      lasting = passes.total(twin, {label: reach * found.passed.scores[label] for label, reach in later.items()})
      for k, bend in enumerate(bends):
        kept, of_whole = factor, 0.0
        if found.own:  # what a document changes of the clipping
          share = passes.total(twin, found.own)[0] / norm**2
          kept, slope = optimizers.factor_without(share, norm, self.clipping)
          of_whole = slope * share
        scores[name + bend] = rate * (kept * found.additive[k] + of_whole * found.additive[k].sum())
        in_all[name + bend] = kept * lasting[k] + of_whole * lasting[k].sum()
    shares, ended = self.shares(params, batch), self.shares(last, batch)
    _, (G_last,) = passes.validation_gradients(self.model(last), loss, (val,))
    losses, weights = passed.losses, passed.weights
    per_row = lambda x: x.reshape(x.shape[0], -1).sum(-1)  # noqa: E731
    scores["gradient product"] = rate * factor * products(shares, by_label(G))
    if ADAM in self.baselines:
      scores[ADAM] = rate * factor * products(shares, self.by_adam(G, moments))
    scores["TracIn, last checkpoint"] = products(ended, by_label(G_last))
    scores["gradient norm"] = jnp.sqrt(sum(per_row(jnp.square(share)) for share in shares.values()))
    scores["loss"] = per_row(losses * weights) / jnp.maximum(per_row(weights), 1)
    return scores, in_all

  def by_adam(self, G, moments: optax.ScaleByAdamState) -> dict:
    """The validation gradient times the factor that Adam, with this step's second moment, has for a gradient."""
    cfg, nu = self.world.cfg.optimizer, by_label(moments.nu)
    correction = 1 - cfg.adam_b2**moments.count
    return {label: x / (jnp.sqrt(nu[label] / correction) + cfg.adam_eps) for label, x in by_label(G).items()}

  def reach(self, parameter: Parameter):
    """`UpdateRule.reach` of one parameter."""
    reach_S = self.rule.reach(self.rates_S, parameter)
    return jnp.full(STEPS, jnp.nan) if reach_S is None else jnp.asarray(reach_S)

  def _shapley(self, state, batch, val, subsets_MB):
    """[M]: by how much the step of each subset of documents lowers the validation loss."""
    shares = self.shares(state[0], batch)

    def worth(member_B):
      grads = {label: jnp.tensordot(member_B, g[: len(member_B)], 1) for label, g in shares.items()}
      return -self.val_loss(self.apply(state, passes.like(state[0], grads))[0][0], val)

    return jax.lax.map(worth, subsets_MB, batch_size=32)


def forms(rule: optimizers.UpdateRule) -> dict[str, tuple[optimizers.UpdateRule, tuple[str, ...]]]:
  """{score: (rule, its BENDS)}: the path, and what an optimizer could be held fixed to instead."""
  if not isinstance(rule, Muon):
    along, at_end = rule.path(), rule.marginal()
    assert along and at_end
    return {"frozen state": (rule, BENDS), "path": (along, BENDS), MARGINAL: (at_end, BENDS)}
  fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
  frozen = {f"frozen, {form}": _muon_forms.FrozenMuon(**fields, form=form) for form in _muon_forms.FORMS}
  finer = {"path, 4 nodes": dataclasses.replace(rule, nodes=4)}
  of_step: dict[str, tuple[Any, tuple[str, ...]]] = {"path": (rule, BENDS), MARGINAL: (rule.marginal(), BENDS)}
  return of_step | {name: (form, BENDS[:1]) for name, form in (finer | frozen).items()}


def batch_of(batches, i):
  """The batch of one step."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)


def products(shares: dict, direction: dict):
  """[n]: inner product of each document's share with a direction."""
  return sum((g * direction[label][None]).reshape(g.shape[0], -1).sum(-1) for label, g in shares.items())


@dataclasses.dataclass(frozen=True)
class Found:
  """What was predicted and what happened.

  names: of the M scores, the first `num_credits` of which are contributions in nats. scores_MCn, in_all_MCn: by name;
  in_all only of contributions, else NaN. real_CnH: loss without the document minus loss with it. players_MCn,
  shapley_Cn: scores and Shapley values of PLAYERS documents in one step.
  """

  names: tuple[str, ...]
  num_credits: int
  scores_MCn: np.ndarray
  in_all_MCn: np.ndarray
  real_CnH: np.ndarray
  players_MCn: np.ndarray
  shapley_Cn: np.ndarray


def measure(steps: Steps, seeds: tuple[int, ...], horizons: tuple[int, ...] = HORIZONS) -> Found:
  """Runs the world once for each seed, and again without each document of the chosen steps."""
  with jax.enable_x64(True):
    world, cells = steps.world, []
    for seed in seeds:
      batches, val = wide(world.data(seed))
      state, moments = steps.start(seed), []
      for at in world.at:
        before = steps.advance(state, batches, at - 1)
        state = steps.advance(before, batches, at)
        moments.append((before[0], state))
      last = steps.advance(state, batches, STEPS)[0]
      rng = np.random.default_rng((seed, 8))
      ends = last, batches, val, np.array(horizons)
      cells += [_cell(steps, moment, ends, rng) for moment in moments]
  stacked = (np.stack(parts, axis) for axis, parts in zip((1, 1, 0, 1, 0), zip(*cells, strict=True), strict=True))
  return Found((*steps.credits, *steps.baselines), len(steps.credits), *stacked)


def _cell(steps: Steps, moment, ends, rng):
  """The fields of `Found` for one step. moment: parameters one step earlier, state. ends: of the whole run."""
  (before, state), (last, batches, val, horizons_H) = moment, ends
  batch = batch_of(batches, state[2])
  real_nH = np.asarray(steps.follow(state, batches, val, horizons_H))
  rows = len(real_nH)
  small = batch | {steps.world.weights: _first_rows(batch[steps.world.weights], PLAYERS)}
  subsets_MB = np.array(list(itertools.product((0.0, 1.0), repeat=PLAYERS)))
  worth_M = np.asarray(steps.shapley(state, small, val, subsets_MB))
  out = []
  for rows_of in (batch, small):
    scores, in_all = (jax.device_get(x) for x in steps.scores(before, state, last, rows_of, val))
    scores["random"], nothing = rng.random(rows), np.full(rows, np.nan)
    names = (*steps.credits, *steps.baselines)
    out.append((np.stack([scores[name] for name in names]), np.stack([in_all.get(name, nothing) for name in names])))
  return *out[0], real_nH, out[1][0][:, :PLAYERS], _digits.shapley_values(worth_M, subsets_MB)


def _first_rows(x, count: int):
  return jnp.where((jnp.arange(len(x)) < count).reshape(-1, *([1] * (x.ndim - 1))), x, 0)


def statistics(scores, real) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(correlation, rank correlation, slope of real on score), [..., M, H]: means over cells of each cell's own.

  scores: [..., M, C, n]. real: [..., C, n, H].
  """
  pearson, slope = _moments(scores, real)
  ranks = (scipy.stats.rankdata(scores, axis=-1), scipy.stats.rankdata(real, axis=-2))
  return pearson, _moments(*ranks)[0], slope


def _moments(scores, real):
  a, b = scores - scores.mean(-1, keepdims=True), real - real.mean(-2, keepdims=True)
  both = np.einsum("...mcn,...cnh->...mch", a, b)
  a2, b2 = np.square(a).sum(-1)[..., None], np.square(b).sum(-2)[..., None, :, :]
  with np.errstate(divide="ignore", invalid="ignore"):
    return (both / np.sqrt(a2 * b2)).mean(-2), (both / a2).mean(-2)


def resampled(scores_MCn, real_CnH, num: int = 400, seed: int = 0):
  """`statistics` of `num` samples, in which each cell's documents are drawn with replacement: [num, M, H] each."""
  rng, (cells, size) = np.random.default_rng(seed), real_CnH.shape[:2]
  found = []
  for _ in range(num):
    drawn_Cn = rng.integers(size, size=(cells, size))
    taken = np.take_along_axis(scores_MCn, drawn_Cn[None], 2), np.take_along_axis(real_CnH, drawn_Cn[..., None], 1)
    found.append(statistics(*taken))
  return tuple(np.stack(part) for part in zip(*found, strict=True))


def over_steps(scores_MCn, real_CnH, num_seeds: int):
  """Both with the documents of all steps of a run in one cell."""
  num, size = real_CnH.shape[0] // num_seeds, real_CnH.shape[1]
  cells = (num_seeds, num * size)
  return scores_MCn.reshape(len(scores_MCn), *cells), real_CnH.reshape(*cells, -1)


def table(world: World, found: Found, num_seeds: int, horizons: tuple[int, ...] = HORIZONS) -> list[dict]:
  """Rows of text: each score's agreement with reality, with 95 % intervals over the documents."""
  rows, ends = [], [f"{h} steps later" if h else "the step itself" for h in horizons]
  parts = {"as of the step": found.scores_MCn, "in all": found.in_all_MCn}
  whole = over_steps(found.scores_MCn, found.real_CnH, num_seeds)
  whole_later = over_steps(found.in_all_MCn, found.real_CnH, num_seeds)
  for figure, index, pairs in (
    ("correlation", 0, {"as of the step": (found.scores_MCn, found.real_CnH)}),
    ("Spearman", 1, {"as of the step": (found.scores_MCn, found.real_CnH)}),
    ("slope", 2, {name: (part, found.real_CnH) for name, part in parts.items()}),
    ("Spearman over all steps of a run", 1, {"as of the step": whole, "in all": whole_later}),
  ):
    for reading, pair in pairs.items():
      value_MH, drawn_RMH = statistics(*pair)[index], resampled(*pair)[index]
      low_MH, high_MH = np.percentile(drawn_RMH, (2.5, 97.5), axis=0)
      only_credits = figure == "slope" or reading == "in all"
      for m, name in enumerate(found.names[: found.num_credits] if only_credits else found.names):
        cells = [interval(*x) for x in zip(value_MH[m], low_MH[m], high_MH[m], strict=True)]
        rows.append({"world": world.name, "figure": figure, "reading": reading, "score": name}
                    | dict(zip(ends, cells, strict=True)))  # fmt: skip
  return rows


def shapley_table(world: World, found: Found) -> list[dict]:
  """Rows of text: each score's agreement with exact Shapley values of one step."""
  pair = found.players_MCn, found.shapley_Cn[..., None]
  values = statistics(*pair)
  ends = [np.percentile(drawn, (2.5, 97.5), axis=0) for drawn in resampled(*pair)]
  total_M = found.players_MCn.sum((1, 2)) / found.shapley_Cn.sum()
  rows = []
  for m, name in enumerate(found.names):
    cells = [interval(v[m, 0], e[0][m, 0], e[1][m, 0]) for v, e in zip(values, ends, strict=True)]
    of_credit = {"slope": cells[2], "sum of scores over sum of values": f"{total_M[m]:.2f}"}
    rest = of_credit if m < found.num_credits else dict.fromkeys(of_credit, "")
    rows.append({"world": world.name, "score": name, "correlation": cells[0], "Spearman": cells[1]} | rest)
  return rows


def interval(value: float, low: float, high: float) -> str:
  """`.97 (.95-.98)`."""
  return f"{value:.2f} ({low:.2f} to {high:.2f})"


def figures(world: World, found: Found, num_seeds: int) -> list[Figure]:
  """The slopes and correlations that should be reached, and where path + secant falls behind the frozen state."""
  pearson, _, slope = statistics(found.scores_MCn, found.real_CnH)
  out = []
  for name in (kind + bend for kind in ("path", "marginal") for bend in BENDS):
    m = found.names.index(name)
    out.append(
      Figure(f"{world.name}, {name}: |slope of real on predicted - 1|, the step itself", abs(slope[m, 0] - 1), 0.1)
    )
    out.append(Figure(f"{world.name}, {name}: correlation, the step itself", pearson[m, 0], 0.95, True))
  out.append(Figure(f"{world.name}: documents left out", float(found.real_CnH[..., 0].size), 200, True))
  if "frozen state" in found.names:
    pairs = compared(found, num_seeds)
    worse = sum(int((gain < 0).sum()) for gain, _, _ in pairs.values())
    surely = sum(int((high < 0).sum()) for _, _, high in pairs.values())
    better = sum(int((low > 0).sum()) for _, low, _ in pairs.values())
    count = sum(gain.size for gain, _, _ in pairs.values())
    title = f"{world.name}, path + secant against frozen state: of {count} figures"
    out.append(Figure(f"{title}, lower", worse, 0))
    out.append(Figure(f"{title}, lower beyond the 95 % interval of the difference", surely, 0))
    out.append(Figure(f"{title}, higher beyond it", better))
  return out


def compared(found: Found, num_seeds: int) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """{row: (path + secant minus frozen state, low, high)}, [H] each: 95 % intervals of the paired difference.

  Of the correlations, and of how far the slope of the step itself is from 1, counted so that more is better.
  """
  old, new = (found.names.index(name) for name in ("frozen state", "path + secant"))
  pair = found.scores_MCn, found.real_CnH
  shapley = found.players_MCn, found.shapley_Cn[..., None]
  out = {}
  for title, one in (("", pair), ("over all steps, ", over_steps(*pair, num_seeds)), ("Shapley, ", shapley)):
    values, drawn = statistics(*one), resampled(*one)
    for index, name in enumerate(("correlation", "Spearman", "slope")):
      better = (lambda x: -np.abs(x - 1)) if name == "slope" else (lambda x: x)
      columns = slice(0, 1) if name == "slope" else slice(None)
      gain = (better(values[index][new]) - better(values[index][old]))[columns]
      gains = (better(drawn[index][:, new]) - better(drawn[index][:, old]))[:, columns]
      low, high = np.percentile(gains, (2.5, 97.5), axis=0)
      out[title + name] = gain, low, high
  return out
