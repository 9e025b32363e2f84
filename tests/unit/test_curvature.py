"""ghost_curvature: scores against G + weight (G - G'), G' the validation gradient of an earlier step on the same rows.

Against gradients at the parameters of both steps by the model's own derivative, the weight by its definition, and one
gradient per document.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import run_copies
import test_optimizers_plugin as command
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import attribute, config, train
from maxghost.attribution import load
from maxghost.ghost.schedules import Secant, passes
from maxghost.optimizers import learning_rate_schedule
from maxghost.training import console, memory, scoring, step
from maxghost.training import state as state_lib

WIDE = {"dtype": "float64", "weight_dtype": "float64", "remat_policy": "none"}
# Long steps of unequal length, so that the gradient turns, and a weight that is not one half.
DECAY = {"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 1.0}
SECANT = {"ghost_curvature": "secant", "learning_rate": 0.03, **DECAY}
SGD = {"ghost_direction": "sgd", "ghost_val_refresh_steps": 0}
OTHER = tiny.make_batch(((2, 7), (10,), (3,)), seed=201)
COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


class Steps:
  """Some steps of a run, with the parameters and Adam's state around each."""

  def __init__(self, num_steps: int = 3, val_batches=(VALIDATION,), **changes):
    self.run, self.val_batches = Run(num_sets=len(val_batches), **(SECANT | changes)), val_batches
    self.around, self.out = [self.run.snapshot()], []
    for i in range(num_steps):
      self.out.append(self.run.step(TRAIN[i % len(TRAIN)], val_batches))
      self.around.append(self.run.snapshot())

  def change(self, i: int) -> dict:
    return {label: self.around[i + 1].params[label] - v for label, v in self.around[i].params.items()}


@pytest.fixture(scope="module")
def gradients():
  """One gradient per document of a batch, and the batch gradient, at given parameters, in float64."""
  with jax.enable_x64(True):
    examples = oracles.ExampleGradients(tiny.make_model(tiny.make_config(**WIDE)))

  def at(params, rows):
    with jax.enable_x64(True), tiny.cheap_compilation():
      found = examples(rows, params)
    return found, oracles.batch_gradient(found, rows)

  return at


def inner(left: dict, right: dict) -> float:
  return sum(float((left[label] * right[label]).sum()) for label in left)


def expected(steps: Steps, i: int, earlier: int, latest: int, weight: float, gradients, direction="sgd", turn=None):
  """(contributions [B, S, K], K dicts S, K dicts G) of step i, from validation gradients of two steps."""
  before, out = steps.around[i], steps.out[i]
  documents = tiny.documents(TRAIN[i])
  rows = tiny.stack_rows([tiny.alone(TRAIN[i], *document) for document in documents])
  g_N, g = gradients(before.params, rows)
  cfg, scale = steps.run.cfg.optimizer, float(out["learning_rate"]) * float(out["clip_factor"])
  found, curved, plain = np.zeros(out["contribution_BSK"].shape), [], []
  for k, batch in enumerate(steps.val_batches):
    G, old = (gradients(steps.around[j].params, batch)[1] for j in (latest, earlier))
    u = S = {label: G[label] + (turn or {}).get(label, weight * (G[label] - old[label])) for label in G}
    if direction == "adam":
      constants = {"b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
      u = oracles.adam_direction(S, g, before.second, count=before.count, kappa=before.clip_factor, **constants)
    dots_N = sum(oracles.dots(g_N, u).values())
    for (row, segment), dot in zip(documents, dots_N, strict=True):
      found[row, segment - 1, k] = scale * dot / oracles.token_counts(rows).sum()
    curved.append(S)
    plain.append(G)
  return found, curved, plain


CASES = {
  "float64, 2 sets": ({**WIDE, **SGD, "val_batches": (VALIDATION, OTHER)}, "sgd", 1e-12),
  "float32": ({**SGD}, "sgd", 1e-5),
  "reverse_scan": ({**WIDE, "ghost_schedule": "reverse_scan", "val_batches": (VALIDATION, OTHER)}, "adam", 1e-9),
  "reverse_scan in segments, rank": (
    {**WIDE, **SGD, "ghost_schedule": "reverse_scan", "segment_lengths": (1,), "ghost_rank": 5}, "sgd", None,
  ),
  "rank, micro-batches": ({**WIDE, **SGD, "ghost_rank": 5, "gradient_accumulation_steps": 7}, "sgd", None),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if "rank" in n else []) for n in CASES])
def test_scores_are_those_of_two_gradients_of_the_same_rows(name, gradients):
  changes, direction, tolerance = CASES[name]
  steps = Steps(2, **changes)
  first, out = steps.out
  weight = float(out["learning_rate"]) / float(first["learning_rate"]) / 2
  assert weight != 0.5 and (first["predicted_curvature"] == 0).all()
  value, curved, plain = expected(steps, 1, 0, 1, weight, gradients, direction)
  if tolerance:
    assert oracles.relative_error(out["contribution_BSK"], value) < tolerance
    without = expected(steps, 1, 0, 1, 0.0, gradients, direction)[0]
    assert oracles.relative_error(without, value) > 0.05
  loose = tolerance or 1e-9
  for k, (S, G) in enumerate(zip(curved, plain, strict=True)):
    columns = [float(out[column][k]) for column in COLUMNS]
    size = sum(map(abs, columns))
    if "reverse_scan" not in name:  # whose columns have the clipping factor of the step before
      assert sum(columns) == pytest.approx(-inner(S, steps.change(1)), abs=max(loose, 1e-7) * size)  # m is in float32
      ahead = -inner(S, steps.change(1)) + inner(G, steps.change(1))
      assert out["predicted_curvature"][k] == pytest.approx(ahead, abs=max(loose, 1e-7) * size)
    assert out["prev_predicted"][k] == pytest.approx(-inner(G, steps.change(0)), abs=max(loose, 1e-7) * size)
    assert out["check_rel_err"][k] < max(loose, 1e-10)
    if "rank" in name:
      assert abs(columns[-1]) > 1e-4 * abs(columns[0])


@pytest.mark.slow
def test_a_gradient_that_serves_several_steps_is_followed_along_them(gradients):
  """ghost_val_every=2: from the middle of this step back to the latest gradient, over the way between the last two."""
  steps = Steps(4, **WIDE, **SGD, ghost_val_every=2)
  rates = [float(out["learning_rate"]) for out in steps.out]
  for i, way in ((0, 0.0), (1, 0.0), (2, rates[2] / 2), (3, rates[2] + rates[3] / 2)):
    value, _, _ = expected(steps, i, 0, i - i % 2, way / (rates[0] + rates[1]), gradients)
    assert oracles.relative_error(steps.out[i]["contribution_BSK"], value) < 1e-10, i


def test_new_rows_follow_the_turn_of_the_old_ones_or_are_of_first_order(gradients):
  """Where the loop has closed the old rows' account (`carry`), their change stands for that of the new rows. The state
  may have been saved and restored before; the step after is as ever."""
  steps = Steps(2, **WIDE, **{**SGD, "ghost_val_refresh_steps": 2})
  run, weight = steps.run, [float(out["learning_rate"]) for out in steps.out]
  before, saved = run.snapshot(), state_lib.from_tree(state_lib.to_tree(run.state), run.state)
  with jax.enable_x64(True), tiny.cheap_compilation():
    closing = jax.jit(step.make_closing(run.cfg, run.graphdef))(run.state, (VALIDATION,))
  alone = run.step(TRAIN[2], (OTHER,))
  assert alone["predicted_curvature"][0] == 0 != steps.out[1]["predicted_curvature"][0]
  steps.around.append(before)
  steps.val_batches, steps.around = (OTHER,), [*steps.around[:2], before]
  steps.out.append(alone)
  assert oracles.relative_error(alone["contribution_BSK"], expected(steps, 2, 2, 2, 0.0, gradients)[0]) < 1e-12
  with jax.enable_x64(True):
    run.state = state_lib.carry(saved, closing["turned"])
  steps.out[2] = out = run.step(TRAIN[2], (OTHER,))
  last = -inner(gradients(before.params, VALIDATION)[1], steps.change(1))
  assert float(closing["prev_predicted"][0]) == pytest.approx(last, rel=1e-6)
  rate = float(out["learning_rate"]) / weight[1] / 2
  now, old = (gradients(steps.around[i].params, VALIDATION)[1] for i in (2, 1))
  turn = {label: rate * (now[label] - old[label]) for label in now}
  value, _, _ = expected(steps, 2, 2, 2, 0.0, gradients, turn=turn)
  assert oracles.relative_error(out["contribution_BSK"], value) < 1e-12
  assert oracles.relative_error(alone["contribution_BSK"], value) > 0.05
  assert float(nnx.merge(run.graphdef, run.state).carried[...]) == 0


def test_the_weight_is_a_ratio_of_ways():
  for refresh, changes in ((0, {}), (7, {"ghost_every": 3}), (9, {"ghost_val_every": 4})):
    cfg = tiny.make_config(ghost_curvature="secant", steps=40, ghost_val_refresh_steps=refresh, **changes)
    rate, every = learning_rate_schedule(cfg.optimizer, 40), next(iter(changes.values()), 1)
    rates = [float(rate(i)) for i in range(40)]
    for number in range(0, 40, cfg.ghost.ghost_every):
      latest = number // every * every
      between = sum(rates[max(latest - every, 0) : latest])
      same = latest >= every and (not refresh or latest // refresh == (latest - every) // refresh)
      value = (sum(rates[latest:number]) + rates[number] / 2) / between if same and between else 0.0
      assert float(scoring.secant_weight(cfg, np.uint32(number))) == pytest.approx(value, rel=1e-5), number


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_in_the_middle_of_a_step(dtype):
  """It is G alone where the weight is 0, whatever is stored, and follows a known turn where rows are new (own 0)."""
  gradient, earlier = (jnp.array(x, dtype) for x in ([3.0, -1.0, 0.5], [1.0, -2.0, 0.5]))
  for weight, own, stored, expected in (
    (0.0, 1, jnp.full(3, jnp.nan, dtype), gradient),
    (0.5, 1, earlier, [4.0, -0.5, 0.5]),
    (0.5, 0, earlier, [2.5, 0.0, 0.25]),
  ):
    (found,) = passes.extrapolated(Secant([{"w": stored, "b": stored}], jnp.float32(weight), own), [{"w": gradient}])
    assert found["w"].dtype == dtype and [*found] == ["w"]
    np.testing.assert_array_equal(found["w"], jnp.array(expected, dtype))


def lowered(**changes) -> str:
  run = Run(**WIDE, **changes)
  with jax.enable_x64(True):
    return jax.jit(run.function).lower(run.state, TRAIN[0], (VALIDATION,)).as_text()


def test_second_order_is_another_name_for_hessian():
  names = [
    config.load(None, *keys).direction_name
    for keys in (["ghost_direction=second_order"], ["ghost_curvature=hessian"], ["ghost_curvature=secant"])
  ]
  assert names == ["adam+hessian", "adam+hessian", "adam+secant"]
  text = lowered(ghost_direction="second_order")
  assert text == lowered(ghost_curvature="hessian")
  assert text != lowered(ghost_curvature="hessian", ghost_direction="path")


REFUSED = {
  "ghost_curvature=secnt": "ghost_curvature=secnt .*did you mean 'secant'",
  "ghost_curvature=secant ghost_schedule=concat": "ghost_curvature=secant does not go with ghost_schedule=concat.*none",
  "ghost_curvature=secant ghost_direction=second_order": "second_order means ghost_curvature=hessian",
  "ghost_curvature=hessian ghost_schedule=reverse_scan": "hessian does not go with ghost_schedule=reverse_scan.*none",
  "ghost_curvature=hessian ghost_val_every=2": "ghost_curvature=hessian needs this step's curvature",
  "ghost_curvature=hessian ghost_select=topk": "chooses before the step is known; use ghost_curvature=secant or none",
}  # fmt: skip


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_go_together_is_named(keys):
  with pytest.raises(config.ConfigError, match=REFUSED[keys]):
    config.load(None, *keys.split())


def test_the_estimate_of_memory_counts_the_stored_gradient():
  plain, secant, rarely = (
    memory.estimate(tiny.make_config(**changes)).arguments
    for changes in ({}, {"ghost_curvature": "secant"}, {"ghost_curvature": "secant", "ghost_val_every": 2})
  )
  size = sum(v.size for v in tiny.abstract_by_label(tiny.make_model(tiny.make_config())).values()) * 4
  carried = 4  # bytes of the flag that a gradient of the old rows waits
  assert (secant - plain, rarely - plain) == (size + carried, 2 * size)


KEYS = (*command.KEYS[1:], "ghost_curvature=secant", "ghost_direction=path", "ghost_val_refresh_steps=5")


@pytest.mark.parametrize("keys, first_order, said", [
  ("ghost_val_refresh_steps=0", [0], "step 0 is scored to first order"),
  ("ghost_val_every=3 ghost_val_refresh_steps=6", [0, 1, 2, 6, 7, 8],
   "steps 0 to 2 are scored to first order, and so are the first 3 steps with new .* rows .ghost_val_refresh_steps=6."),
  ("ghost_every=2 ghost_val_refresh_steps=5", [0, 6, 10], "step 0 is .* and so is the first step with new .*=5."),
  ("ghost_val_every=3 ghost_val_refresh_steps=2", range(12), "all steps are .* first order: .*=2 draws new rows"),
])  # fmt: skip
def test_a_run_says_which_steps_are_of_first_order(keys, first_order, said):
  cfg = config.load(None, "ghost_curvature=secant", "warmup_steps_fraction=0", *keys.split())
  scored = range(0, 12, cfg.ghost.ghost_every)
  assert [n for n in scored if scoring.secant_weight(cfg, jnp.uint32(n)) == 0] == list(first_order)
  assert re.match(said, console.of_first_order(cfg.ghost))


@pytest.mark.slow
def test_the_command_logs_its_direction_and_resumes_bit_for_bit(tmp_path, capsys):
  """The second run loses all behind its third step; its fourth step needs the gradient of the third."""
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*KEYS, f"base_output_directory={whole}"]) == 0
    said = capsys.readouterr()
    assert "ghost_curvature=secant: step 0 is scored to first order\n" in said.out
    run_copies.interrupted(whole, broken)
    assert train.main([*KEYS, f"base_output_directory={broken}"]) == 0
  log, again = load(whole / "run"), load(broken / "run")
  assert log.said_of("direction") == again.said_of("direction") == ("path+secant",)
  ahead = log.steps["predicted_curvature"][:6, 0]
  assert [value != 0 for value in ahead] == [False, False, True, True, True, True]  # the first learning rate is 0
  for name in log.steps.dtype.names:
    np.testing.assert_array_equal(log.steps[name], again.steps[name], err_msg=name)
  np.testing.assert_array_equal(log["contribution"], again["contribution"])


def test_queries_of_a_run_with_a_secant_are_scored_to_first_order(capsys):
  cfg = attribute.scoring_config(config.load(None, "ghost_curvature=secant", "ghost_direction=path"), {})
  assert cfg.direction_name == "path" and "these scores are of first order" in capsys.readouterr().err
  cfg = attribute.scoring_config(config.load(None, "ghost_curvature=hessian"), {})
  assert cfg.direction_name == "adam+hessian" and not capsys.readouterr().err


@pytest.mark.parametrize("keys", ["ghost_curvature=secant", "ghost_curvature=hessian", "ghost_direction=second_order"])
def test_a_direction_of_its_own_leaves_the_curvature_of_the_run_out_and_says_so(keys, capsys):
  cfg = attribute.scoring_config(config.load(None, keys), {}, "adam")
  said = f"ghost_curvature={'secant' if 'secant' in keys else 'hessian'} has no effect with --direction adam: "
  assert cfg.direction_name == "adam" and said in capsys.readouterr().err
  cfg = attribute.scoring_config(config.load(None, keys), {}, "second_order")
  assert cfg.direction_name == "adam+hessian" and not capsys.readouterr().err
