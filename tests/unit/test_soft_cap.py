"""Soft caps of logits and attention scores: in every head, in generation and in the scores, by the plain formula.

B=7 rows, T=13 positions, V=263 vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import config, ghost, objectives
from maxghost.generation.generator import Generator
from maxghost.models import create

CAP = 0.4  # far below the largest logit of the model
CAPS = {"final_logits_soft_cap": CAP, "attn_logits_soft_cap": 0.3}
BATCH = tiny.make_batch(tiny.PACKED, seed=7)
VALIDATION = tiny.make_batch(tiny.VALIDATION, seed=8)
HEADS = {
  "whole": {},
  "tokens": {"num_vocab_tiling": 4},
  "vocab": {"num_vocab_tiling": 4, "vocab_tiling_axis": "vocab"},
  "tied": {"num_vocab_tiling": 4, "logits_via_embedding": True},
}


def capped_losses(model, batch):
  """(losses, weights) from the logits of a model without a cap of its own, capped here."""
  logits = model(*(batch[f"inputs{part}"] for part in ("", "_position", "_segmentation"))).astype(float)
  logits = CAP * jnp.tanh(logits / CAP)
  losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
  return losses, (batch["targets_segmentation"] != 0).astype(float)


def mean(losses, weights):
  return (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize(
  ("schedule", "head"),
  [
    ("two_pass", "whole"), ("reverse_scan", "whole"), ("two_pass", "tokens"), ("reverse_scan", "vocab"),
    ("reverse_scan", "tied"),
  ],
)  # fmt: skip
def test_gradients_and_scores_of_a_capped_head(head, schedule):
  """Against one gradient per row of the formula, in float64."""
  wide = {"dtype": "float64", "weight_dtype": "float64"} | HEADS[head]
  with jax.enable_x64(True), tiny.cheap_compilation():
    cfg = tiny.make_config(final_logits_soft_cap=CAP, **wide)
    model, plain = tiny.make_model(cfg), tiny.make_model(config.replace(cfg, final_logits_soft_cap=0.0))
    graphdef, params = nnx.split(plain)

    def loss(params, batch):
      return mean(*capped_losses(nnx.merge(graphdef, params), batch))

    def row_loss(params, row):
      return loss(params, jax.tree.map(lambda x: x[None], row))

    rows = {name: x[[0, 1, 2, 3, 5, 6]] for name, x in BATCH.items()}  # row 4 is empty
    value, gradient = jax.jit(jax.value_and_grad(loss))(params, rows)
    along = jax.jit(jax.grad(loss))(params, VALIDATION)
    each = jax.jit(jax.vmap(jax.grad(row_loss), (None, 0)))(params, rows)
    dots = sum(
      np.asarray(g).reshape(6, -1) @ np.asarray(u).ravel()
      for g, u in zip(jax.tree.leaves(each), jax.tree.leaves(along), strict=True)
    )
    result = ghost.GhostEngine(cfg, schedule=schedule).score(model, rows, VALIDATION)
  assert result.loss == pytest.approx(float(value), rel=1e-12)
  assert oracles.relative_error(result.dot, dots) < 1e-10
  expected = tiny.by_label(gradient)
  for label, g in tiny.by_label(result.grads).items():
    assert oracles.relative_error(g, expected[label]) < 1e-10, label


def test_logits_are_capped_and_a_cap_of_0_changes_nothing():
  cfg = tiny.make_config()
  capped = tiny.make_model(config.replace(cfg, final_logits_soft_cap=CAP))
  inputs = [BATCH[f"inputs{part}"] for part in ("", "_position", "_segmentation")]
  logits = tiny.make_model(cfg)(*inputs)
  assert float(jnp.abs(logits).max()) > 2 * CAP
  np.testing.assert_allclose(capped(*inputs), CAP * jnp.tanh(logits / CAP), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["dot_product", "blockwise"])
def test_generation_with_caps_is_the_whole_models(attention):
  """Each token is the likeliest of the model that reads all before it at once; the caps change the text."""
  cfg = tiny.make_config(attention=attention, **CAPS)
  model = tiny.make_model(cfg)
  graphdef, state = nnx.split(model)
  prompt = [5, 9, 77]
  made = Generator(graphdef, 16).generate(state, [prompt], 6).ids_BN[0].tolist()
  text = prompt + made
  logits = model(np.array([text[:-1]], np.int32))[0]
  assert made == np.asarray(logits[2:].argmax(-1)).tolist()


def test_the_attention_cap_acts_in_every_kernel():
  wide = {"dtype": "float64", "weight_dtype": "float64"}
  losses = {}
  with jax.enable_x64(True), tiny.cheap_compilation():
    for attention in ("dot_product", "blockwise"):
      for cap in (0.0, 0.3):
        cfg = tiny.make_config(attention=attention, attn_logits_soft_cap=cap, **wide)
        losses[attention, cap] = float(mean(*objectives.create(cfg)(tiny.make_model(cfg), BATCH)))
  assert losses["dot_product", 0.3] == pytest.approx(losses["blockwise", 0.3], rel=1e-12)
  assert abs(losses["dot_product", 0.3] / losses["dot_product", 0.0] - 1) > 1e-6


def test_a_negative_cap_is_refused():
  with pytest.raises(config.ConfigError, match="final_logits_soft_cap=-1"):
    create(tiny.make_config(final_logits_soft_cap=-1.0), rngs=nnx.Rngs(0))
