"""Schedule reverse_scan over segments: the scores of two_pass, with only the segments' inputs kept.

K validation sets, L layers, k layers in a segment.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config, ghost
from maxghost.ghost.schedules.reverse_scan import walk
from maxghost.training import host_memory

FLOAT64 = {"dtype": "float64", "weight_dtype": "float64"}
LAYERS = 6
BATCH = tiny.make_batch(((6, 5), (13,), (2, 9)), seed=51)
VALS = [tiny.make_batch(((7,), (4, 4)), seed=52), tiny.make_batch(((13,), (3, 3), (5,), (9,)), seed=53)]
CASES = {  # lengths, direction, rank, whether the validation VJPs of a segment come first
  "2-adam-in-turn": ((2,), "adam", 0, True),
}
SLOW_CASES = {
  "3-rank-layerwise": ((3,), "sgd", 5, False),
  "2-adam-layerwise": ((2,), "adam", 0, False),
  "3-rank-in-turn": ((3,), "sgd", 5, True),
  "6-2-adam-rank-in-turn": ((6, 2), "adam", 5, True),
  "3-1-sgd-layerwise": ((3, 1), "sgd", 0, False),
  "1-sgd-in-turn": ((1,), "sgd", 0, True),
}


def score(schedule, direction, rank, **changes):
  cfg = tiny.make_config(base_num_decoder_layers=LAYERS, remat_policy="full", **FLOAT64, **changes)
  with jax.enable_x64(True), tiny.cheap_compilation():
    model = tiny.make_model(cfg)
    adam = None
    if direction == "adam":
      rng = np.random.default_rng(5)
      moments = {k: jnp.asarray(1e-3 * rng.random(v.shape) ** 4 + 1e-7) for k, v in tiny.by_label(model).items()}
      adam = ghost.AdamState(moments, 6, 0.8)
    engine = ghost.GhostEngine(cfg, schedule=schedule, direction=direction, rank=rank, per_position=True)
    return jax.tree.map(np.asarray, engine.score(model, BATCH, VALS, state=adam))


@pytest.fixture(scope="module")
def two_pass():
  made = {}

  def get(direction, rank):
    if (direction, rank) not in made:
      made[direction, rank] = score("two_pass", direction, rank)
    return made[direction, rank]

  return get


def assert_case(lengths, direction, rank, in_turn, two_pass, monkeypatch):
  asked = []
  monkeypatch.setattr(walk, "smaller_gradients", lambda *args: asked.append(args) or in_turn)
  ours, theirs = score("reverse_scan", direction, rank, segment_lengths=lengths), two_pass(direction, rank)
  assert asked
  for field in dataclasses.fields(ours):
    left, right = getattr(ours, field.name), getattr(theirs, field.name)
    if field.name == "grads":
      left, right = tiny.by_label(left), tiny.by_label(right)
    assert jax.tree.structure(left) == jax.tree.structure(right), field.name
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
      assert oracles.relative_error(a, b) < (1e-9 if rank else 1e-11), field.name


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_two_pass(name, two_pass, monkeypatch):
  assert_case(*CASES[name], two_pass, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_scores_are_those_of_two_pass_in_every_form(name, two_pass, monkeypatch):
  assert_case(*SLOW_CASES[name], two_pass, monkeypatch)


# The scores of attention in segments are those of two_pass, above: a step without them is compiled faster.
STEP = {
  "base_num_decoder_layers": 4, "ghost_schedule": "reverse_scan", "remat_policy": "full",
  "ghost_exclude": ("*self_attention*",), **FLOAT64,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_outputs():
  """Of two train steps without segments."""
  run = Run(**STEP)
  return [run.step(TRAIN[i]) for i in range(2)]


@pytest.mark.parametrize(
  ("carries", "in_turn"), [pytest.param((), False, marks=pytest.mark.slow), (("carries",), True)]
)
def test_the_train_step_accounts_as_without_segments(carries, in_turn, plain_outputs, monkeypatch):
  """All outputs, in float64; the validation rows' segment inputs on the host or not; a segment's validation gradients
  kept until its training gradients take their places, or not."""
  monkeypatch.setattr(walk, "smaller_gradients", lambda *args: in_turn)
  run = Run(segment_lengths=(2,), offload_to_host=carries, **STEP)
  for i, theirs in enumerate(plain_outputs):
    ours = run.step(TRAIN[i])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
      for a, b in zip(jax.tree.leaves(ours[name]), jax.tree.leaves(value), strict=True):
        # A residual or a check of rounding has no digits to compare.
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13, err_msg=name)


@functools.cache
def traced(in_turn: bool, **changes):
  """The step's jaxpr."""
  run = Run(**STEP | {"dtype": "float32", "weight_dtype": "float32"} | changes)
  run.state = host_memory.put(run.cfg, run.state)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(walk, "smaller_gradients", lambda *args: in_turn)
    return jax.make_jaxpr(run.function)(run.state, TRAIN[0], (VALIDATION,))


def kept(**changes) -> list[int]:
  """Sizes of the activations that the forward passes and the walk back stack up, outermost scans only."""
  jaxpr = traced(in_turn=True, **changes)
  sizes = []
  for equation in jaxpr.jaxpr.eqns:
    if equation.primitive.name == "scan":
      outputs = [v.aval for v in equation.outvars[tiny.num_carried(equation) :]]
      sizes += [v.shape for v in outputs if v.shape[-2:] == (tiny.POSITIONS, 20)]
  return sizes


@pytest.mark.parametrize("streams", [{}, {"offload_to_host": ("weights", "optimizer")}], ids=["device", "streamed"])
def test_the_forward_passes_keep_as_many_carries_as_there_are_segments(streams):
  wanted = [(2, 5, tiny.POSITIONS, 20), (2, 7, tiny.POSITIONS, 20)]
  assert kept(segment_lengths=(2,), **streams) == wanted


def test_without_segments_they_keep_one_per_layer():
  assert kept() == [(4, 5, tiny.POSITIONS, 20), (4, 7, tiny.POSITIONS, 20)]


@pytest.mark.parametrize(("carries", "wanted"), [(("carries",), True), ((), False)])
def test_the_validation_cotangent_waits_on_the_host(carries, wanted):
  """Between its segments: it is what the loop over segments carries there."""
  jaxpr = traced(in_turn=True, segment_lengths=(2,), **({"offload_to_host": carries} if carries else {}))
  carried = []
  for equation in jaxpr.jaxpr.eqns:
    if equation.primitive.name == "scan" and equation.params["reverse"]:
      carried += [v.aval for v in equation.outvars[: tiny.num_carried(equation)]]
  found = {v.shape: v.memory_space == jax.memory.Space.Host for v in carried if v.shape[1:] == (tiny.POSITIONS, 20)}
  assert found == {(5, tiny.POSITIONS, 20): wanted, (7, tiny.POSITIONS, 20): False}


def test_carries_on_the_host_need_segments():
  for overrides in ("ghost_schedule=reverse_scan", "segment_lengths=2"):
    with pytest.raises(config.ConfigError, match="carries needs ghost_schedule=reverse_scan and segment_lengths"):
      config.load("offload_to_host=carries", overrides)
