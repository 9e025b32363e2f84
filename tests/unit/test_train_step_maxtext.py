"""Parity with MaxText itself: logits and one training step from a checkpoint of its trainer.

tests/fixtures/maxtext/next_step.npz (see the README there): parameters, logits, and one real step of maxtext 0.2.4.
MaxText has no 1/sqrt(h) in its attention, it lives in the query kernel: W_ours = c W_maxtext with c = sqrt(h). So the
query gradient is g / c, Adam's moments m / c and v / c**2, and its normalised update the same number, in units of our
kernel. L layers (MaxText: axis 1, ours: axis 0).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import config, models
from maxghost.objectives import LanguageModelLoss
from maxghost.optimizers import make_optimizer
from maxghost.training import step
from maxghost.training.state import TrainStateNNX

STRIDE, STEPS_TAKEN, SCALE = 17, 3, 4.0
QUERY = "decoder/layers/self_attention/query/kernel"
SETTINGS = {
  "base_emb_dim": 40,
  "base_num_query_heads": 20,
  "base_num_kv_heads": 4,
  "head_dim": 16,
  "base_mlp_dim": 72,
  "base_num_decoder_layers": 3,
  "vocab_size": 131,
  "max_target_length": 21,
  "per_device_batch_size": 2,
  "rope_max_timescale": 700.0,
  "normalization_layer_epsilon": 3e-4,
  "matmul_precision": "highest",
  "tokenizer_type": "huggingface",  # a vocabulary below the byte tokenizer's; no text is read here
  "tokenizer_path": "none",
  "learning_rate": 0.025,
  "lr_schedule_type": "constant",
  "warmup_steps_fraction": 0.0,
  "adam_b1": 0.9,
  "adam_b2": 0.95,
  "adam_eps": 1e-8,
  "adam_weight_decay": 0.1,
  "ghost_enabled": False,
}


@pytest.fixture(scope="module")
def maxtext():
  """{name: array}; groups params/, mu/, nu/, after/ by label, batch/, parity/."""
  path = Path(__file__).parents[1] / "fixtures" / "maxtext" / "next_step.npz"
  with np.load(path) as archive:
    return dict(archive)


def group(arrays: dict, name: str) -> dict:
  return {key.removeprefix(name + "/"): v for key, v in arrays.items() if key.startswith(name + "/")}


def ours(label: str, value, query_factor: float):
  """MaxText's array in our layout, a query kernel's times the factor."""
  value = value * np.float32(query_factor if label == QUERY else 1)
  return np.moveaxis(value, 1, 0) if "/layers/" in label else value


def theirs(label: str, value):
  """The stored elements of one of our arrays, in MaxText's layout."""
  return (np.moveaxis(value, 0, 1) if "/layers/" in label else value).reshape(-1)[::STRIDE]


def sampled(values, shape):
  """Zeros but for the stored elements."""
  full = np.zeros(np.prod(shape), np.float32)
  full[::STRIDE] = values
  return full.reshape(shape)


@pytest.fixture(scope="module")
def model(maxtext):
  values = {label: ours(label, v, SCALE) for label, v in group(maxtext, "params").items()}
  return tiny.with_values(models.create_abstract(config.replace(config.load(), **SETTINGS)), values)


@pytest.mark.parametrize("attention", ["dot_product", "blockwise"])
def test_logits(maxtext, model, attention):
  cfg = config.replace(config.load(), attention=attention, **SETTINGS)
  graphdef = nnx.graphdef(models.create_abstract(cfg))
  parity = group(maxtext, "parity")
  with tiny.cheap_compilation():
    logits = jax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args))(
      nnx.state(model), parity["tokens"], parity["positions"], parity["segment_ids"]
    )
  real = parity["segment_ids"] > 0
  assert 0 < real.sum() < real.size
  assert np.abs(np.asarray(logits)[real] - parity["logits"][real]).max() < 5e-5


def test_one_training_step(maxtext, model):
  batch, params = group(maxtext, "batch"), group(maxtext, "params")
  graphdef, state = nnx.split(model)

  def mean_loss(state):
    losses, weights = LanguageModelLoss()(nnx.merge(graphdef, state), batch)
    return (losses * weights).sum() / weights.sum()

  with tiny.cheap_compilation():
    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(state)
  squares = {label: (g.astype(np.float64) ** 2).sum() for label, g in tiny.by_label(gradients).items()}
  norm = np.sqrt(sum(squares.values()))
  their_norm = np.sqrt(sum(v * (SCALE**2 if label == QUERY else 1) for label, v in squares.items()))
  assert float(loss) == pytest.approx(float(maxtext["loss"]), abs=1e-5)
  assert their_norm == pytest.approx(float(maxtext["raw_grad_norm"]), abs=1e-5)
  assert norm < their_norm - 1e-3  # the factor matters

  # The norms differ, so the threshold is ours that clips as much as MaxText's threshold of 1.
  cfg = config.replace(config.load(), gradient_clipping_threshold=float(norm / their_norm), **SETTINGS)
  train_state = TrainStateNNX(model, make_optimizer(cfg.optimizer, cfg.run.steps))
  set_adam(train_state, maxtext, {label: v.shape for label, v in params.items()})
  graphdef, state = nnx.split(train_state)
  function, _ = step.make_train_step(cfg, graphdef, state, batch, num_segments=1)
  with tiny.cheap_compilation():
    state, out = jax.jit(function)(state, batch, ())
  assert float(out["loss"]) == pytest.approx(float(maxtext["loss"]), abs=1e-5)
  assert float(out["clip_factor"]) == pytest.approx(1 / float(maxtext["raw_grad_norm"]), rel=1e-5)
  after = tiny.by_label(nnx.merge(graphdef, state).model)
  assert after.keys() == params.keys()
  for label, expected in group(maxtext, "after").items():
    before = params[label].reshape(-1)[::STRIDE]
    assert np.abs(expected - before).max() > 1e-2, label
    if label == QUERY:
      decay = 0.025 * 0.1
      expected = SCALE * before + (expected - before) + decay * before - decay * SCALE * before
    assert np.abs(theirs(label, after[label]) - expected).max() < 1e-5, label


def set_adam(train_state, maxtext, shapes) -> None:
  """Adam's moments (where they are stored) and the counts of the checkpoint."""
  adam, _, schedule = train_state.optimizer.opt_state
  for moments, name, factor in ((adam.mu, "mu", 1 / SCALE), (adam.nu, "nu", 1 / SCALE**2)):
    stored = group(maxtext, name)
    for path, variable in nnx.to_flat_state(moments):
      label = "/".join(map(str, path))
      variable[...] = jnp.asarray(ours(label, sampled(stored[label], shapes[label]), factor))
  for count in (adam.count, schedule.count, train_state.optimizer.step):
    count[...] = jnp.asarray(STEPS_TAKEN, count.dtype)
