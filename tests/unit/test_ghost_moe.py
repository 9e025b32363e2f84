"""Scores of experts, their biases, routers and sinks against per-example gradients of the dense model in float64.

n examples, T positions, E experts.
"""

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx

from maxghost import ghost
from maxghost.models import autodiff
from maxghost.models.layers import Hidden
from maxghost.objectives import LanguageModelLoss

COUNT, KAPPA = 5, 0.8
TRAIN = tiny.make_batch(tiny.PACKED, seed=31)
VALIDATION = tiny.make_batch(tiny.VALIDATION, seed=32)
ALIKE = {**routed.GPT_OSS, "base_num_decoder_layers": 2, "inhomogeneous_layer_cycle_interval": 1}
ALIKE["attention_type"] = ("local_sliding",)
CASES = {  # schedule, direction, model
  "gpt_oss-reverse_scan-adam": ("reverse_scan", "adam", ALIKE),
}
SLOW_CASES = {
  "gpt_oss-reverse_scan-adam-cycles": ("reverse_scan", "adam", routed.GPT_OSS),
  "mixtral-two_pass-sgd": ("two_pass", "sgd", routed.MIXTRAL),
  "mixtral-reverse_scan-adam": ("reverse_scan", "adam", routed.MIXTRAL),
  "mixtral-concat-adam": ("concat", "adam", routed.MIXTRAL),
  "gpt_oss-two_pass-sgd-unrolled": ("two_pass", "sgd", {**routed.GPT_OSS, "scan_layers": False}),
  "gpt_oss-two_pass-adam-full": ("two_pass", "adam", {**routed.GPT_OSS, "remat_policy": "full"}),
  "gpt_oss-concat-sgd-tied": ("concat", "sgd", {**routed.GPT_OSS, "logits_via_embedding": True}),
  "gpt_oss-dense-two_pass-adam": ("two_pass", "adam", {**routed.GPT_OSS, "sparse_matmul": False}),
}


def make(**changes):
  """(configuration, model) in float64, its routers wide awake: no two logits of a token are close."""
  cfg = tiny.make_config(**{**routed.FLOAT64, **changes})
  model = tiny.make_model(cfg)
  for _, node in nnx.iter_graph(model):
    if type(node).__name__ == "RoutedMoe":
      node.gate.kernel[...] = 20 * node.gate.kernel[...]
  return cfg, model


def assert_case(schedule, direction, changes):
  with jax.enable_x64(True):
    cfg, model = make(**changes)
    _, dense = make(**{**changes, "sparse_matmul": False, "remat_policy": "none"})
    loss = LanguageModelLoss()
    oracle = foreign.Oracle(dense, loss, TRAIN, VALIDATION)
    u, adam = oracle.G[0], None
    if direction == "adam":
      moments = {label: v.astype(np.float64) for label, v in foreign.moments_like(oracle).items()}
      u = oracle.adam(moments, count=COUNT, kappa=KAPPA)
      adam = ghost.AdamState({k: jnp.asarray(v) for k, v in moments.items()}, COUNT, KAPPA)
    engine = ghost.GhostEngine(cfg, schedule=schedule, direction=direction, per_position=True)
    result = foreign.score(engine, model, TRAIN, VALIDATION, state=adam)
  layers = cfg.model.base_num_decoder_layers // cfg.model.inhomogeneous_layer_cycle_interval
  expected = oracle.dots(u, layers if cfg.model.scan_layers else 0)
  foreign.assert_scores(result.per_param, expected, 1e-10)
  assert oracles.relative_error(result.dot, foreign.total(expected)) < 1e-11
  assert oracles.relative_error(result.per_position.sum(-1), result.additive) < 1e-11
  for label, g in oracle.g.items():
    assert oracles.relative_error(tiny.by_label(result.grads)[label], g) < 1e-10, label


@pytest.mark.parametrize("name", CASES)
def test_scores_of_experts_routers_and_sinks(name):
  assert_case(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_scores_of_experts_routers_and_sinks_in_every_other_form(name):
  assert_case(*SLOW_CASES[name])


WEIGHT = 0.7


@pytest.fixture(scope="module")
def balanced():
  """(model, its scores under a loss with the load-balancing term)."""
  with jax.enable_x64(True):
    _, model = make(**routed.MIXTRAL)
    loss = LanguageModelLoss(load_balance_loss_weight=WEIGHT)
    engine = ghost.GhostEngine(schedule="two_pass", direction="sgd")
    result = foreign.score(engine, model, TRAIN, VALIDATION, loss_fn=loss)
  return model, result


def losses_by_formula(model, batch):
  """Losses [n, T] with the term of the paper, from the routers' outputs; the load is held constant."""
  x = model.embed(batch["inputs"], batch["inputs_position"]).x_BTD
  where = batch["inputs_position"], batch["inputs_segmentation"]
  real, total = where[1] > 0, 0.0
  for i in range(2):
    layer = jax.tree.map(lambda v, i=i: v[i], nnx.state(model.decoder.layers))
    layer = nnx.merge(nnx.graphdef(model.decoder.layers), layer)
    blank = {"load_balance_BT": 0.0, "entropy_BT": 0.0, "chosen_BE": 0.0}
    y, _ = layer.attention(layer.pre_self_attention_layer_norm(x), *where)
    p = jax.nn.softmax(layer.feed_forward.gate(layer.post_self_attention_layer_norm(x + y)))
    chosen = jnp.zeros_like(p)
    for _ in range(3):
      best = jnp.where(chosen > 0, -1.0, p).argmax(-1)
      chosen = chosen + jax.nn.one_hot(best, 5)
    f = (chosen * real[..., None]).sum((0, 1)) / real.sum()
    total = total + 5 * p @ jax.lax.stop_gradient(f) / 2
    x = layer(Hidden(x, blank), *where).x_BTD
  logits = model.logits(Hidden(x))
  return oracles.softmax_losses(logits, batch["targets"]) + WEIGHT * total


@pytest.mark.slow
def test_load_balancing_loss_in_loss_and_scores(balanced):
  model, result = balanced
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, params = nnx.split(model)
    counts = TRAIN["targets_segmentation"] != 0

    def rows(params, batch, counts):
      return (losses_by_formula(nnx.merge(graphdef, params), batch) * counts).sum(1)

    G = jax.grad(lambda p: rows(p, VALIDATION, VALIDATION["targets_segmentation"] != 0).sum())(params)
    scale = 1 / (VALIDATION["targets_segmentation"] != 0).sum()
    # One forward derivative gives every row's slope along G, with f of the whole batch.
    run = jax.jit(lambda p, u: jax.jvp(lambda p: rows(p, TRAIN, counts), (p,), (u,)))
    with autodiff.forward_mode():
      values, slopes = jax.tree.map(np.asarray, run(params, jax.tree.map(lambda g: scale * g, G)))
  tokens = np.maximum(counts.sum(1), 1)
  assert result.loss == pytest.approx(values.sum() / counts.sum(), rel=1e-12)
  assert oracles.relative_error(result.dot, slopes / tokens) < 1e-10


@pytest.mark.slow  # test_train_step_moe has it in the train step
def test_weight_zero_leaves_the_load_balancing_loss_out(balanced):
  model, _ = balanced
  with jax.enable_x64(True), tiny.cheap_compilation():
    without, _ = LanguageModelLoss()(model, TRAIN)
    with_it, _ = LanguageModelLoss(load_balance_loss_weight=WEIGHT)(model, TRAIN)
    assert float(jnp.abs(with_it - without).min()) > 0.5


@pytest.mark.slow
def test_forward_mode_passes_through_experts(balanced):
  """Engine jvp needs no rules and no hand-written backward pass."""
  model, result = balanced
  with jax.enable_x64(True):
    loss = LanguageModelLoss(load_balance_loss_weight=WEIGHT)
    again = foreign.score(ghost.GhostEngine(engine="jvp"), model, TRAIN, VALIDATION, loss_fn=loss)
  assert oracles.relative_error(again.dot, result.dot) < 1e-11
