"""Scores of models that multiply rounded operands, against one gradient for each document of the same model.

The oracle takes the model's own straight-through gradient of each document's part of the batch loss, dotted with the
validation gradient. n documents, T positions.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import routed
import tiny
from flax import nnx

from maxghost import ghost
from maxghost.objectives import as_objective, create

PACKED, VALIDATION = tiny.make_batch(tiny.PACKED, seed=21), tiny.make_batch(tiny.VALIDATION, seed=23)
DOCUMENTS = tiny.documents(PACKED)
SEGMENTS = PACKED["inputs_segmentation"]
MASKS = np.stack([(np.arange(tiny.ROWS)[:, None] == row) & (segment == SEGMENTS) for row, segment in DOCUMENTS])
FLOAT64 = {"dtype": "float64", "weight_dtype": "float64"}
TIED, TILED = {"logits_via_embedding": True}, {"num_vocab_tiling": 4}
CASES = {
  "int8 two_pass tied by tiles": TIED | TILED | {"remat_policy": "full"},
  "int8 reverse_scan experts": routed.MIXTRAL | FLOAT64,
  "fp8 concat": FLOAT64 | {"attention_bias": True, "mlp_bias": False},
  "int8_stochastic two_pass by tiles": TIED | TILED | FLOAT64 | {"remat_policy": "full"},
  "fp8_stochastic reverse_scan experts": routed.MIXTRAL | FLOAT64,
}
MORE = {
  "int8 two_pass experts": routed.GPT_OSS,
  "int8 reverse_scan tied by tiles": TIED | TILED,
  "int8 reverse_scan segments": {"segment_lengths": (1,)},
  "int8 two_pass by tiles of vocabulary": TIED | TILED | {"vocab_tiling_axis": "vocab"} | FLOAT64,
  "int8 two_pass unstacked": {"scan_layers": False},
  "int8 concat tied": TIED | FLOAT64,
  "fp8 reverse_scan tied by tiles": TIED | TILED | FLOAT64,
  "fp8 two_pass experts": routed.GPT_OSS | FLOAT64,
  "fp8_stochastic two_pass": {},
  "int8_stochastic two_pass experts": routed.GPT_OSS | FLOAT64,
  "int8_stochastic concat segments": {"segment_lengths": (1,)} | FLOAT64,
  "fp8_stochastic two_pass by tiles of vocabulary": TIED | TILED | {"vocab_tiling_axis": "vocab"} | FLOAT64,
  "int8 two_pass soft cap": TILED | {"final_logits_soft_cap": 5.0},
}


def dot(a, b):
  return functools.reduce(operator.add, (jnp.sum(x * y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)))


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_scores_are_those_of_one_gradient_for_each_document(name):
  quantization, schedule, *_ = name.split()
  changes = (CASES | MORE)[name]
  wide = changes.get("dtype") == "float64"
  with jax.enable_x64(wide), tiny.cheap_compilation():
    cfg = tiny.make_config(quantization=quantization, ghost_schedule=schedule, **changes)
    model = tiny.make_model(cfg)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    objective = as_objective(create(cfg).validation())

    def loss(params, batch, mask):
      losses, weights, _ = objective.measured(nnx.merge(graphdef, params, rest), batch)
      return (losses * weights * mask).sum() / weights.sum()

    @jax.jit
    def expected(params, masks):
      u = jax.grad(loss)(params, VALIDATION, jnp.ones(()))
      return jax.lax.map(lambda mask: dot(jax.grad(loss)(params, PACKED, mask), u), masks), u

    wanted, u = expected(params, jnp.asarray(MASKS))
    engine = ghost.GhostEngine(cfg, direction="sgd", per_position=True)
    result = engine.score(model, PACKED, VALIDATION)
    positions, largest = np.asarray(result.per_position), np.abs(wanted).max()
    found = np.array([positions[mask].sum() for mask in MASKS])
    assert np.abs(found - wanted).max() < (1e-12 if wide else 1e-5) * largest
    assert abs(positions.sum() - dot(result.grads, u)) < (1e-12 if wide else 1e-5) * largest  # the self-check
    plain = tiny.make_config(ghost_schedule=schedule, **changes)
    if name in CASES and not wide:  # rounding is there
      unlike = ghost.GhostEngine(plain, direction="sgd").score(tiny.make_model(plain), PACKED, VALIDATION)
      assert np.abs(np.asarray(unlike.additive) - np.asarray(result.additive)).max() > 1e-3 * largest


def test_schedules_and_runs_take_the_same_draw():
  """Gradients and scores with stochastic rounding: of two schedules, equal; of another run, bit for bit."""
  with jax.enable_x64(True), tiny.cheap_compilation():
    run = lambda schedule, kind="int8_stochastic": ghost.GhostEngine(  # noqa: E731
      cfg := tiny.make_config(quantization=kind, ghost_schedule=schedule, **FLOAT64), direction="sgd"
    ).score(tiny.make_model(cfg), PACKED, VALIDATION)
    one, again, other, plain = run("two_pass"), run("two_pass"), run("reverse_scan"), run("two_pass", "int8")
    for read in (lambda r: r.dot, lambda r: jnp.concatenate([g.ravel() for g in jax.tree.leaves(r.grads)])):
      a, b, c, d = (np.asarray(read(r)) for r in (one, again, other, plain))
      np.testing.assert_array_equal(a, b)
      assert np.abs(a - c).max() < 1e-12 * np.abs(a).max() and np.abs(a - d).max() > 1e-3 * np.abs(a).max()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8", "int8_stochastic"])
@pytest.mark.parametrize("mesh", ["fsdp 4 x tensor 2", "context 4 x data 2"])
def test_a_mesh_trains_and_scores_as_one_device(quantization, mesh):
  """Up to roundings that another order of a sum decides."""
  changes = {"quantization": quantization, "ghost_direction": "sgd", "num_vocab_tiling": 2, "opt_type": "sgd"}
  one, eight = (meshes.run(where, batches=meshes.BATCHES[:1], **changes) for where in ({}, meshes.MESHES[mesh]))
  for name in ("loss", "val_loss"):
    np.testing.assert_allclose(eight.outs[0][name], one.outs[0][name], rtol=1e-5)
  scores = eight.outs[0]["contribution_BSK"], one.outs[0]["contribution_BSK"]
  assert meshes.relative_error(*scores) < 5e-3
  assert max(np.abs(run.outs[0]["check_rel_err"]).max() for run in (one, eight)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8_stochastic"])
def test_micro_batches_pass_the_self_check(quantization):
  """Each has weights of its own, and so other scales of its cotangents than the whole batch."""
  batch = {name: value.repeat(2, 0) for name, value in meshes.BATCHES[0].items()}
  out = meshes.run({}, batches=[batch], quantization=quantization, gradient_accumulation_steps=2).outs[0]
  assert np.abs(out["contribution_BSK"]).max() > 0
  assert np.abs(out["check_rel_err"]).max() < 1e-6
