"""Online selection: which rows are chosen, and that the step taken is the step of exactly those rows."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import attribute, attribution, config, objectives
from maxghost.config import ConfigError
from maxghost.scorelog import Writer
from maxghost.scorelog import selection as selection_log
from maxghost.training import selection, state

VALUES = np.array([0.3, -0.2, 5.0, 0.1, 0.0, 2.0, -1.0], np.float32)
FULL = np.array([True, True, True, True, False, True, True])


def places(method, k, **extra):
  return np.flatnonzero(selection.choose(method, VALUES, FULL, k, jax.random.key(3), **extra)).tolist()


def test_topk_and_bottomk_take_the_ends_and_never_an_empty_row():
  assert places("topk", 3) == [0, 2, 5]
  assert places("bottomk", 3) == [1, 3, 6]
  assert 4 not in places("bottomk", 6)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_value_is_taken_last(broken):
  pair = jnp.asarray(np.diag(np.arange(7.0)).astype(np.float32))
  for method, k in itertools.product(("topk", "bottomk", "random", "threshold", "greats"), (3, 5, 6)):
    values = np.where(np.arange(7) == 1, np.float32(broken), VALUES)
    chosen = selection.choose(method, values, FULL, k, jax.random.key(3), threshold=-9.0, pair_BB=pair)
    assert not (chosen[1] and k < 6) and chosen.sum() == (5 if method == "threshold" else k)


def test_threshold_compares_with_the_mean_absolute_value():
  # mean |value| of the six full rows: 8.6 / 6 = 1.433
  assert places("threshold", 7, threshold=1.0) == [2, 5]
  assert places("threshold", 7, threshold=0.0) == [0, 2, 3, 5]
  assert places("threshold", 7, threshold=9.0) == [2], "where none passes, the best one is trained on"


def test_random_depends_on_its_key_alone():
  draws = [
    tuple(np.flatnonzero(selection.choose("random", values, FULL, 3, jax.random.key(seed))))
    for values, seed in itertools.product((VALUES, -VALUES), range(4))
  ]
  assert draws[:4] == draws[4:]
  assert len(set(draws[:4])) > 1


def test_greats_takes_one_of_two_copies_and_equals_exhaustive_greedy():
  rng = np.random.default_rng(0)
  sketch = rng.normal(size=(7, 9)).astype(np.float32)
  sketch *= 3 / np.linalg.norm(sketch, axis=1, keepdims=True)
  sketch[5] = sketch[2]
  values = VALUES.copy()
  values[5] = values[2] - 0.01
  pair = sketch @ sketch.T
  got = np.flatnonzero(
    selection.choose("greats", values, FULL, 2, jax.random.key(0), pair_BB=jnp.asarray(pair))
  ).tolist()
  taken = []
  for _ in range(2):
    rest = [i for i in range(7) if FULL[i] and i not in taken]
    gains = [values[i] - pair[i, i] / 2 - sum(pair[i, j] for j in taken) for i in rest]
    taken.append(rest[int(np.argmax(gains))])
  assert got == sorted(taken)
  assert not {2, 5} <= set(got)
  assert {2, 5} <= set(np.flatnonzero(selection.choose("topk", values, FULL, 3, jax.random.key(0))))


def test_greats_sketches_adapters_too_narrow_for_directions_of_rank_one():
  cfg = tiny.make_config(lora_rank=2, ghost_select="greats", ghost_select_fraction=0.43)
  graphdef, abstract = state.abstract_split(cfg)
  model = nnx.merge(graphdef, abstract).model
  made = selection.make_selector(cfg, model, TRAIN[0], num_sets=1, num_segments=tiny.SEGMENTS)
  assert made.sketch is not None and {p.low_rank for p in made.sketch.scored} == {False}


def rows_with_tokens(batch, where):
  return {name: np.where(where[:, None], v, 0) if name == "targets_segmentation" else v for name, v in batch.items()}


def step_with_a_broken_row(run):
  """A step in which row 1 alone has a token whose embedding is not finite."""
  broken = tiny.VOCAB - 1
  batch, val = ({k: np.where(k == "inputs", np.minimum(v, broken - 1), v) for k, v in rows.items()}
                for rows in (TRAIN[0], VALIDATION))  # fmt: skip
  batch["inputs"][1, 1] = broken
  held = nnx.merge(run.graphdef, run.state)
  table = held.model.token_embedder.embedding
  table[...] = table[...].at[broken].set(jnp.nan)
  run.state = nnx.state(held)
  return run.step(batch, (val,))


# Without AdamW, whose first steps turn rounding into sign changes.
SMALL = {"base_num_decoder_layers": 1, "opt_type": "sgd", "ghost_detail": "total", "remat_policy": "none"}


@pytest.fixture(scope="module")
def plain():
  return Run(**SMALL)


@pytest.mark.parametrize(
  ("method", "settings"),
  [
    pytest.param("topk", {"ghost_select_fraction": 0.43}, marks=pytest.mark.slow),
    pytest.param("greats", {"ghost_select_fraction": 0.43}, marks=pytest.mark.slow),
    ("threshold", {"ghost_select_fraction": 0.5}),
  ],
)
def test_the_step_is_that_of_the_chosen_rows_alone(plain, method, settings):
  """Against a run without selection whose batch has no targets outside the chosen rows: the same contributions in nats
  (exact token weights), zero for the others; and the rows seen but not chosen keep their tokens and dot products."""
  picking = Run(ghost_select=method, **SMALL, **settings)
  start, batch = plain.state, TRAIN[0]
  out = jax.device_get(picking.step(batch))
  whole = jax.device_get(plain.step(batch))
  plain.state = start
  where = out["chosen_B"]
  assert 0 < where.sum() < tiny.ROWS
  assert method == "threshold" or where.sum() == 3
  expected = jax.device_get(plain.step(rows_with_tokens(batch, where)))
  after, plain.state = jax.device_get(plain.state), start
  assert np.all(out["contribution_BSK"][~where] == 0)
  scored_BS = out["tokens_BS"] > 0
  assert np.array_equal(out["share_BS"] > 0, scored_BS & where[:, None])  # what `ScoreLog.chosen` reads
  np.testing.assert_allclose(out["contribution_BSK"], expected["contribution_BSK"], rtol=1e-4, atol=1e-8)
  np.testing.assert_allclose(out["score_dot_BSK"][where], expected["score_dot_BSK"][where], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(out["score_dot_BSK"][~where], whole["score_dot_BSK"][~where], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(out["loss_BS"], whole["loss_BS"], rtol=1e-5)
  assert np.array_equal(out["tokens_BS"], whole["tokens_BS"])
  assert out["tokens"] == expected["tokens"] < whole["tokens"]
  assert out["check_rel_err"].max() < 1e-4
  for ours, theirs in zip(jax.tree.leaves(jax.device_get(picking.state)), jax.tree.leaves(after), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
  if method == "topk":
    value = whole["contribution_BSK"].sum((1, 2))
    assert sorted(np.argsort(-value)[:3]) == np.flatnonzero(where).tolist()
  broken = step_with_a_broken_row(picking)
  assert np.isfinite(broken["loss"]) and not broken["chosen_B"][1]
  assert not broken["scored_ok"], "else the log would have NaN for the row"


@pytest.mark.slow
def test_a_row_without_a_finite_score_is_not_trained_on():
  """Of bottomk, whose values otherwise are positive too: 0 in place of NaN would be among the smallest."""
  out = step_with_a_broken_row(Run(ghost_select="bottomk", ghost_select_fraction=0.43, **SMALL))
  assert out["chosen_B"].sum() == 3 and not out["chosen_B"][1]
  assert np.isfinite(out["loss"]) and not out["scored_ok"]


def test_experts_are_balanced_over_the_chosen_rows_alone():
  experts = {"decoder_block": "mixtral", "num_experts": 4, "load_balance_loss_weight": 0.5}
  run = Run(ghost_select="threshold", ghost_select_fraction=0.3, **SMALL, **experts)
  graphdef, state = nnx.split(nnx.merge(run.graphdef, run.state).model)
  out = run.step(TRAIN[0])
  assert 0 < out["chosen_B"].sum() < tiny.ROWS
  chosen = {name: x[out["chosen_B"]] for name, x in TRAIN[0].items()}
  measured = jax.jit(lambda state: objectives.create(run.cfg).measured(nnx.merge(graphdef, state), chosen))
  losses, weights, metrics = measured(state)
  assert out["loss"] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-6)
  np.testing.assert_allclose(out["expert_load_E"], metrics["expert_load_E"], rtol=1e-6)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"ghost_enabled": False}, "ghost_enabled=true"),
    ({"ghost_direction": "second_order"}, "before the step is known"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1"),
    ({"ghost_select_fraction": 0.0}, "leaves no row"),
    ({"ghost_schedule": "reverse_scan"}, "two_pass"),
  ],
)
def test_contradictions_are_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    config.replace(config.load(), ghost_select="topk", **changes)


def test_the_log_tells_which_rows_were_trained_on_and_is_cut_on_restart(tmp_path):
  writer = Writer(tmp_path, period=2)
  writer.restore(None)
  for step, (seen, where) in enumerate(((3, [0, 2]), (4, [1]), (2, [0, 1]), (2, [1]))):
    ones = np.ones(seen)
    share = np.isin(np.arange(seen), where) / len(where)
    rows = {"tokens": ones, "loss": ones, "share": share, "dot": ones[:, None], "contribution": ones[:, None]}
    writer.append({"step": step}, rows, [("code", f"{step}.py", i) for i in range(seen)])
    selection_log.append(tmp_path / "ghost", step, seen, where)
  writer.close()
  with open(tmp_path / "ghost" / selection_log.FILE, "a") as file:
    file.write('{"step": 4, "see')  # cut short by a crash
  selection_log.restore(tmp_path / "ghost", 3)
  lines = (tmp_path / "ghost" / selection_log.FILE).read_text().splitlines()
  assert [json.loads(line)["chosen"] for line in lines] == [[0, 2], [1], [0, 1]]
  assert attribution.load(tmp_path).chosen().tolist() == [i in (0, 2, 4, 7, 8, 10) for i in range(11)]


def test_a_run_without_selection_says_so(tmp_path):
  writer = Writer(tmp_path)
  writer.append({"step": 0}, {}, [])
  writer.close()
  with pytest.raises(ConfigError, match="ghost_select"):
    attribution.load(tmp_path).chosen()


def test_a_step_of_attribute_has_as_many_rows_as_the_run_trained_on(tmp_path, monkeypatch):
  """With ghost_select a document is a larger share of its step than of all rows that were seen."""
  (tmp_path / "checkpoints" / "7").mkdir(parents=True)
  (tmp_path / "a.txt").write_text("text")
  asked = [f"a={tmp_path}/a.txt"]
  arguments = [str(tmp_path), "--data", *asked, "--queries", *asked, "--output", str(tmp_path / "out")]
  monkeypatch.setattr(attribute, "has_optimizer", lambda path: True)
  monkeypatch.setattr(attribute, "_exact", lambda *given: rows.append(given[-2]) or 0)
  for select, count in (("none", 8), ("topk", 2), ("threshold", 8)):
    cfg, rows = config.load(f"ghost_select={select}", "ghost_select_fraction=0.25", "per_device_batch_size=8"), []
    config.save(cfg, tmp_path / "config.yml")
    assert attribute.main(arguments) == 0 and rows == [count]
