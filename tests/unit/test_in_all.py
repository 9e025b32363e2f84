"""The second reading of contributions: with what momentum does with a gradient in later steps.

Against optax's running mean of gradients, followed to the end of the run with and without a document's gradient, at a
fixed preconditioner; and from the log to every answer.
"""

import numpy as np
import optax
import pytest
from attribution_runs import make_run
from test_report import write_log

from maxghost import attribution, config, optimizers, report
from maxghost.attribution.query import Query, ask
from maxghost.attribution.summary import summarize

STEPS, AT, RATES = 23, 4, 0.3 * np.cos(np.linspace(0.1, 1.4, 23)) ** 2
RULE = optimizers.AdamW(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1, mu_dtype="float64")


def followed(gradients_S, preconditioner):
  """Where the parameters end, from step AT on: the debiased running mean of all gradients, by optax."""
  mean = optax.ema(RULE.b1, debias=True)
  state, place = mean.init(gradients_S[0]), 0.0
  for step, g in enumerate(gradients_S):
    moved, state = mean.update(g, state)
    if step >= AT:
      place = place - RATES[step] * preconditioner * moved
  return place


@pytest.mark.parametrize("clip_factor", [1.0, 0.7])
def test_a_gradients_reach_is_what_it_moves_until_the_run_ends(clip_factor):
  import jax

  rng = np.random.default_rng(5)
  with jax.enable_x64(True):
    tx, gradients = RULE.transformation(optax.constant_schedule(0.1)), rng.normal(size=(STEPS, 5, 7))
    params = {"w": rng.normal(size=(5, 7))}
    opt_state = tx.init(params)
    for g in gradients[:AT]:
      _, opt_state = tx.update({"w": g}, opt_state, params)
    own, G, parameter = rng.normal(size=(5, 7)), rng.normal(size=(5, 7)), optimizers.Parameter("w")
    state = RULE.read(opt_state, clip_factor=clip_factor)
    arrays, scalars = state.of("w"), RULE.scalars(AT, clip_factor)
    frozen = RULE.response(parameter, gradients[AT] / clip_factor, arrays, scalars)
    dot = clip_factor * np.sum(G * np.asarray(frozen.apply(own)))
    preconditioner = np.asarray(frozen.factor) * (1 - RULE.b1 ** (AT + 1)) / (1 - RULE.b1)
    without = gradients.copy()
    without[AT] -= clip_factor * own
    change = followed(without, preconditioner) - followed(gradients, preconditioner)
    expected = float(np.sum(G * change))  # by how much the loss would end higher without the document
    reach = RULE.reach(RATES)
    assert reach[AT] * dot == pytest.approx(expected, rel=1e-12)
    assert abs(RATES[AT] * dot / expected - 1) > 0.5

    path = RULE.path()  # no gradient after this one, and the preconditioner of this step, with and without its batch
    response = path.response(parameter, gradients[AT] / clip_factor, arrays, scalars)
    alone, none = np.zeros_like(gradients), np.zeros_like(gradients)
    alone[:AT] = none[:AT] = gradients[:AT]
    alone[AT] = gradients[AT]
    resting = np.sqrt(RULE.b2 * np.asarray(arrays["second_moment"]) / (1 - RULE.b2 ** (AT + 1))) + RULE.eps
    expected = float(np.sum(G * (followed(none, 1 / resting) - followed(alone, preconditioner))))
    credit = float(np.sum(G * np.asarray(response.apply(gradients[AT]))))
    assert path.reach(RATES)[AT] * credit == pytest.approx(expected, rel=1e-12)


def test_the_last_step_has_no_later_one_and_sgd_keeps_nothing():
  reach = RULE.reach(RATES)
  assert reach[-1] == pytest.approx(RATES[-1], rel=1e-14)
  np.testing.assert_array_equal(optimizers.Sgd().reach(RATES), RATES)
  np.testing.assert_allclose(optimizers.AdamW(b1=0.0).reach(RATES), RATES, rtol=1e-14)
  late = optimizers.AdamW(b1=0.9).reach(np.full(900, 0.5))
  assert late[500] == pytest.approx(5.0, rel=1e-12)  # sum of 0.9^k
  cfg = config.load(None, "warmup_steps_fraction=0.1", "lr_schedule_type=cosine").optimizer
  reached = optimizers.reach(cfg, "auto", 100)
  assert reached is not None and reached.shape == (100,) and reached[0] > 0  # step 0 itself has learning rate 0
  np.testing.assert_array_equal(reached, optimizers.reach(cfg, "path", 100))
  assert optimizers.reach(cfg, "sgd", 100)[0] == 0


def test_a_gradient_under_sgd_with_momentum_by_following_its_trace():
  rule = optimizers.Sgd.from_config(config.load(None, "opt_type=sgd", "sgd_momentum=0.8").optimizer)
  trace, moved = optax.trace(0.8), 0.0
  state = trace.init(0.0)
  for step in range(AT, STEPS):
    update, state = trace.update(float(step == AT), state)
    moved += RATES[step] * update
  assert rule.reach(RATES)[AT] == pytest.approx(float(moved), rel=1e-6)  # the trace is kept in float32


def test_a_matrix_of_muon_by_following_its_momentum():
  """N of every later step with and without a gradient; all other parameters are AdamW's."""
  b, rule = 0.8, optimizers.Muon(beta=0.8, adam=RULE)
  without, m = [], np.zeros(2)
  for step in range(AT, STEPS):
    g = np.array([1.0, 0.0]) if step == AT else np.zeros(2)
    m, t = b * m + (1 - b) * g, step + 1
    n = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
    without.append(n[0] - n[1])
  matrix = optimizers.Parameter("w", 1, matrix=optimizers.Matrix(1, 1))
  expected = RATES[AT:] @ np.array(without) / without[0]
  assert rule.reach(RATES, matrix)[AT] == pytest.approx(expected, rel=1e-12)
  np.testing.assert_array_equal(rule.reach(RATES, optimizers.Parameter("b")), RULE.reach(RATES))
  assert rule.reach(RATES) is None  # parameters differ


def test_the_log_and_its_answers_have_both_readings(tmp_path, capsys):
  """Two steps by hand; the first has learning rate 0, so that all of its effect comes later."""
  pytest.importorskip("pandas")
  row = lambda path, value: ("a", path, 0, 0, 10, value)  # noqa: E731  tokens 10 of 20; dot = 2 value
  run_dir = write_log(
    tmp_path,
    [
      ({"learning_rate": 0.0, "clip_factor": 0.5, "learning_rate_in_all": 0.75}, [row("x", 0.0), row("y", 0.0)]),
      ({"learning_rate": 0.25, "clip_factor": 1.0, "learning_rate_in_all": 1.0}, [row("x", 0.5), row("y", -2.0)]),
    ],
  )
  log = attribution.load(run_dir)
  assert log.knows_in_all
  np.testing.assert_array_equal(log["in_all"][:, 0], [0, 0, 2.0, -8.0])
  # A row of the first step with dot 8 has 8 x its share 0.5 x clipping 0.5 x 0.75.
  rows = next(rows for _, rows in log.blocks()).copy()
  rows["dot"][:2] = 8
  np.testing.assert_allclose(log.in_all(rows)[:, 0], [1.5, 1.5, 2.0, -8.0], rtol=1e-6)
  np.testing.assert_array_equal(log.to_pandas()["in_all"], log["in_all"][:, 0])
  answer = ask(log, Query(by="document", scale="per_lr"))
  assert dict(zip(answer.columns["path"], answer.columns["in_all"], strict=True)) == {"x": 8.0, "y": -32.0}
  assert "later steps" in answer.units["in_all"] and "in_all" in answer.to_pandas()
  values = {v.path: (v.contribution, v.in_all) for v in summarize(log).sets[0].top}
  assert values == {"x": (0.5, 2.0)}
  assert report.main([str(run_dir)]) == 0
  shown, page = capsys.readouterr().out, (run_dir / "report.html").read_text("utf-8")
  assert "In all" in shown and "stay as they are" in " ".join(shown.split())
  assert ">In all<" in page and "stay as they are" in page


def test_a_step_after_a_schedule_that_ends_at_0_adds_nothing(tmp_path):
  """As `maxghost attribute` writes it for the last checkpoint: many batches, so no one clipping factor."""
  steps = [
    ({"learning_rate": rate, "learning_rate_in_all": rate}, [("a", "x", 0, 0, 10, rate)]) for rate in (0.25, 0.0)
  ]
  answer = ask(attribution.load(write_log(tmp_path, steps)), Query(by="document"))
  np.testing.assert_array_equal(answer.columns["in_all"], [0.25])


def test_a_log_without_it_is_read_as_before(tmp_path, capsys):
  run_dir = write_log(tmp_path, [({"learning_rate": 0.25}, [("a", "x", 0, 0, 10, 0.5)])])
  log = attribution.load(run_dir)
  assert not log.knows_in_all and "in_all" not in ask(log, Query(by="document")).columns
  assert "in_all" not in log.for_others()
  with pytest.raises(config.ConfigError, match="unknown score column 'in_all'"):
    log["in_all"]
  assert report.main([str(run_dir)]) == 0
  assert "In all" not in capsys.readouterr().out
  assert ">In all<" not in (run_dir / "report.html").read_text("utf-8")


def test_sums_over_rows_agree(tmp_path):
  run_dir = make_run(tmp_path / "run", "dataset_type=synthetic", "ghost_val_sets=words", val_sets=("a", "b"), steps=9)
  log = attribution.load(run_dir)
  for k, name in enumerate(log.val_sets):
    for by in ("domain", "document"):
      answer = ask(log, Query(by=by, val_set=name))
      np.testing.assert_allclose(answer.columns["in_all"].sum(), log["in_all"][:, k].sum(), rtol=1e-6)
