"""One dispatcher and one table: engine and trainer run a step by `schedules.score`, and refuse by the same facts."""

import dataclasses
import functools
import itertools

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ghost_schedules as by_schedule
import tiny
from flax import nnx
from train_steps import NO_FMA, TRAIN, VALIDATION, Run

from maxghost import config, ghost
from maxghost.config import plugins
from maxghost.ghost import schedules
from maxghost.optimizers import by_label
from maxghost.training import scoring

SMALL = {"base_num_decoder_layers": 2}
ASKED = list(itertools.product(plugins.ENGINES, plugins.SCHEDULES, ("sgd", "adam", "second_order"), (0, 5), (1, 2)))
DIRECTIONS = {"sgd": "opt_type=sgd", "adam": "opt_type=adamw", "second_order": "opt_type=adamw"}


def refused_by_engine(engine, schedule, direction, rank, sets) -> str:
  """What the engine says; empty for a combination that it takes. Nothing is run."""
  try:
    made = ghost.GhostEngine(tiny.make_config(), engine=engine, schedule=schedule, direction=direction, rank=rank)
    adam = ghost.AdamState({}, 0).rule_state() if direction == "adam" else None
    made._check_inputs((VALIDATION,) * sets, adam, {} if direction == "second_order" else None)
  except ValueError as error:
    return str(error)
  return ""


def refused_by_config(engine, schedule, direction, rank, sets) -> str:
  """The lines of the configuration's checks, with the engine's names of arguments."""
  names = "ghost_val_sets=[a=x,b=y]" if sets == 2 else "ghost_val_sets=[a=x]"
  changes = [f"ghost_direction={direction}", DIRECTIONS[direction], f"ghost_rank={rank}", names]
  try:
    config.load(f"ghost_schedule={'forward_mode' if engine == 'jvp' else schedule}", *changes)
  except config.ConfigError as error:
    return str(error)
  return ""


@pytest.mark.parametrize("schedule", plugins.SCHEDULES)
def test_config_and_engine_refuse_the_same_with_the_same_words(schedule):
  refused = 0
  for asked in ASKED:
    engine = asked[0]  # the trainer has no perexample, and jvp is its schedule forward_mode
    if asked[1] != schedule or engine == "perexample" or (engine == "jvp" and schedule != "two_pass"):
      continue
    by_engine, by_config = refused_by_engine(*asked), refused_by_config(*asked)
    assert bool(by_engine) == bool(by_config), (asked, by_engine, by_config)
    if by_engine and "sets" not in by_engine:
      words = by_engine.split("; use ")[0].replace("engine=jvp", "schedule=forward_mode")
      assert words in by_config.replace("ghost_", ""), asked
    refused += bool(by_engine)
  assert refused


TOWER, TOWER_BATCH = foreign.randomized(by_schedule.Tower), by_schedule.tower_batch(by_schedule.N, 1)


def score_shapes(engine, schedule, direction, rank, sets):
  """Shapes of a result of a small model with stacked layers, from tracing alone."""
  model, loss, val_batches = TOWER, by_schedule.TowerLoss(), (by_schedule.tower_batch(by_schedule.N_VAL, 2),) * sets
  made = ghost.GhostEngine(engine=engine, schedule=schedule, direction=direction, rank=min(rank, 3))  # 5 saves nothing
  _, params, rest = nnx.split(model, nnx.Param, ...)
  state = delta = None
  if direction == "adam":
    moments = {label: jnp.ones(v.shape) for label, v in tiny.by_label(model).items()}
    state = ghost.AdamState(moments, 3).rule_state()
  if direction == "second_order":
    delta = params
  function = made._compile(model, nnx.graphdef(model), loss, TOWER_BATCH, val_batches)
  counted = np.ones(by_schedule.N, bool)
  return jax.eval_shape(function, params, rest, TOWER_BATCH, val_batches, state, delta, counted)[0]


@pytest.mark.parametrize(
  ("engine", "schedule"),
  [*(("graddotprod", schedule) for schedule in plugins.SCHEDULES), ("jvp", "two_pass"), ("perexample", "two_pass")],
)
def test_what_is_not_refused_runs(engine, schedule):
  ran = 0
  for asked in ASKED:
    if asked[:2] != (engine, schedule) or asked[4] == 2 or refused_by_engine(*asked):
      continue
    result = score_shapes(*asked)
    assert result.dot.shape == (1, by_schedule.N), asked
    ran += 1
  assert ran >= 3


def test_every_schedule_has_its_facts():
  assert schedules.SCHEDULES.keys() == plugins.SCHEDULE_LACKS.keys()
  assert {*plugins.RUN_SCHEDULES, *plugins.ENGINES.values()} == schedules.SCHEDULES.keys()


@pytest.mark.parametrize(
  ("schedule", "traced"),
  [("two_pass", True), ("reverse_scan", False), pytest.param("two_pass", False, marks=pytest.mark.slow)],
)
def test_engine_and_trainer_give_the_same_bits(schedule, traced, monkeypatch):
  """The trainer's problem, with the one setting in which the engine's differs, run by the engine's way.

  traced: the problems alone, which are the same as well.
  """
  seen = []
  real = schedules.score
  monkeypatch.setattr(schedules, "score", lambda problem: seen.append(problem) or real(problem))
  run = Run(ghost_schedule=schedule, ghost_direction="sgd", **SMALL)
  train_state = nnx.merge(run.graphdef, run.state)
  scorer = scoring.make_scorer(run.cfg, train_state.model, TRAIN[0], num_sets=1)

  def by_trainer(state):
    train_state = nnx.merge(run.graphdef, state)
    split = schedules.Model(*nnx.split(train_state.model, nnx.Param, ...))
    scored = schedules.score(scorer.problem(train_state, split, scorer.loss, TRAIN[0], (VALIDATION,)))
    return scored.additive, scored.val_loss, scored.passed.loss, by_label(scored.passed.grads)

  engine = ghost.GhostEngine(run.cfg, direction="sgd", per_position=True)
  if traced:
    jax.eval_shape(by_trainer, run.state)
    graphdef, params, rest = nnx.split(train_state.model, nnx.Param, ...)
    function = engine._compile(train_state.model, graphdef, engine.default_loss, TRAIN[0], (VALIDATION,))
    counted = np.ones(len(TRAIN[0]["inputs"]), bool)
    jax.eval_shape(function, params, rest, TRAIN[0], (VALIDATION,), None, None, counted)
  else:
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=NO_FMA))
    with tiny.cheap_compilation():
      theirs = jax.jit(by_trainer)(run.state)
      ours = engine.score(train_state.model, TRAIN[0], VALIDATION)
  assert [problem.schedule for problem in seen] == [schedule, schedule]
  assert seen[0].settings == dataclasses.replace(seen[1].settings, in_turn=True)
  if traced:
    return
  np.testing.assert_array_equal(ours.per_position, theirs[0][0])
  np.testing.assert_array_equal(ours.val_loss, theirs[1][0])
  np.testing.assert_array_equal(ours.loss, theirs[2])
  for label, gradient in by_label(ours.grads).items():
    np.testing.assert_array_equal(gradient, theirs[3][label], err_msg=label)


def test_selection_scores_twice_and_makes_the_validation_gradient_once(monkeypatch):
  seen = []
  real = schedules.score
  monkeypatch.setattr(schedules, "score", lambda problem: seen.append(problem) or real(problem))
  run = Run(ghost_select="topk", ghost_select_fraction=0.5, **SMALL)
  jax.eval_shape(run.function, run.state, TRAIN[0], (VALIDATION,))
  candidates, chosen = seen
  assert candidates.validation is None and isinstance(chosen.validation, schedules.Validation)
  assert len(chosen.batch["inputs"]) < len(candidates.batch["inputs"])


def plain_loss(model, batch):
  return jnp.square(model(batch["x"])).sum(-1), jnp.ones(len(batch["x"]))


def test_an_engine_compiles_equal_functions_once_and_keeps_so_many_programs(monkeypatch):
  monkeypatch.setattr("maxghost.ghost.engine.MAX_COMPILED", 2)
  model, batch = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), {"x": np.ones((4, 5), np.float32)}
  engine, factors = ghost.GhostEngine(), [2.5, 3.5, 4.5]
  dots = {}
  for factor in (*factors, *factors[1:]):
    for _ in range(2):

      def loss(model, batch, factor=factor):
        losses, weights = plain_loss(model, batch)
        return factor * losses, weights

      dots.setdefault(factor, []).append(np.asarray(engine.score(model, batch, batch, loss_fn=loss).dot))
    assert len(engine._compiled) <= 2
  for factor, values in dots.items():
    for value in values:
      np.testing.assert_allclose(value, dots[2.5][0] * (factor / 2.5) ** 2, rtol=1e-5)
  before = set(engine._compiled)
  engine.score(model, batch, batch, loss_fn=loss)
  assert set(engine._compiled) == before
