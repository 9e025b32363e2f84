"""The train step of a model with experts: load-balancing loss, what is logged of the router, micro-batches."""

import dataclasses

import numpy as np
import oracles
import pytest
import routed
import tiny
from train_steps import TRAIN, VALIDATION, Run

from maxghost.training import metrics

WEIGHT = 0.3
MODEL = {**routed.MIXTRAL, "base_num_decoder_layers": 1, "load_balance_loss_weight": WEIGHT, "remat_policy": "none"}


@pytest.fixture(scope="module")
def scored():
  run = Run(**MODEL)
  return run, run.step(TRAIN[0])


def test_scores_add_up_and_validation_leaves_the_balance_out(scored):
  run, out = scored
  assert out["check_rel_err"].max() < 1e-5
  model = tiny.make_model(run.cfg)
  with tiny.cheap_compilation():
    x_BTD = model.logits(model.hidden(*(VALIDATION[f"inputs{name}"] for name in ("", "_position", "_segmentation"))))
    losses = np.asarray(oracles.softmax_losses(x_BTD, VALIDATION["targets"]))
  counts = VALIDATION["targets_segmentation"] != 0
  assert out["val_loss"][0] == pytest.approx((losses * counts).sum() / counts.sum(), rel=1e-6)


def test_a_run_without_scores_has_the_same_bits(scored):
  run, out = scored
  plain = Run(**MODEL, ghost_enabled=False)
  again = plain.step(TRAIN[0])
  for name in ("loss", "lm_loss", "moe_lb_loss", "router_entropy", "grad_norm"):
    assert again[name] == out[name], name
  before, after = dataclasses.asdict(run.snapshot()), dataclasses.asdict(plain.snapshot())
  for label, value in before["params"].items():
    np.testing.assert_array_equal(after["params"][label], value, err_msg=label)


def test_what_is_logged(scored):
  _, out = scored
  record = metrics.learning_metrics(out)
  assert out["moe_lb_loss"] >= 0.9 * 3  # 3 where all is balanced: the shares of 3 choices
  assert record["learning/loss"] == pytest.approx(record["learning/lm_loss"] + WEIGHT * record["learning/moe_lb_loss"])
  assert sum(record["moe/expert_load"]) == pytest.approx(1, rel=1e-6) and len(record["moe/expert_load"]) == 5
  assert record["moe/max_expert_load"] == pytest.approx(5 * max(record["moe/expert_load"]))
  assert 0 < record["moe/router_entropy"] < np.log(5)


@pytest.mark.slow
def test_micro_batches_are_weighted_by_their_tokens():
  """A step over two micro-batches is the mean of both steps, each with the load of its own tokens: what is logged, and
  the gradient, that of the load-balancing loss included."""
  halves = [{name: v[i:6:2] for name, v in TRAIN[0].items()} for i in range(2)]
  batch = {name: v[:6] for name, v in TRAIN[0].items()}
  model = MODEL | {"gradient_clipping_threshold": 0.0, "adam_b1": 0.8}
  both = Run(**model, gradient_accumulation_steps=2, per_device_batch_size=3, batch=batch)
  out = both.step(batch)
  outs, gradients = [], []
  for half in halves:
    single = Run(**model, batch=half, per_device_batch_size=3)
    outs.append(single.step(half))
    gradients.append({label: moment / 0.2 for label, moment in single.snapshot().first.items()})
  tokens = np.array([o["tokens"] for o in outs])
  assert tokens[0] != tokens[1]
  for label, moment in both.snapshot().first.items():
    expected = np.average([gradient[label] for gradient in gradients], axis=0, weights=tokens)
    assert oracles.relative_error(moment / 0.2, expected) < 1e-5, label
  for name in ("loss", "lm_loss", "moe_lb_loss", "router_entropy", "expert_load_E"):
    expected = np.average([o[name] for o in outs], axis=0, weights=tokens)
    np.testing.assert_allclose(out[name], expected, rtol=1e-5, err_msg=name)
