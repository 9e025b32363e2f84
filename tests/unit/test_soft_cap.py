"""Soft caps of logits and attention scores: in every head, in generation and in the scores, by the plain formula.

B=7 rows, T=13 positions, V=263 vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import config, ghost, objectives
from maxghost.models import create
from maxghost.serving.generator import Generator

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


ROWS = {name: x[[0, 1, 2, 3, 5, 6]] for name, x in BATCH.items()}  # row 4 is empty
WIDE = {"dtype": "float64", "weight_dtype": "float64"}


@functools.cache
def by_formula(tied: bool):
  """(loss, gradients by label, scores [6] along the validation gradient), from one gradient per row in float64."""
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, params = nnx.split(tiny.make_model(tiny.make_config(logits_via_embedding=tied, **WIDE)))

    def total(params, row):
      losses, weights = capped_losses(nnx.merge(graphdef, params), jax.tree.map(lambda x: x[None], row))
      return (losses * weights).sum(), weights.sum()

    rows = {name: np.concatenate([x, VALIDATION[name]]) for name, x in ROWS.items()}
    each = jax.jit(jax.vmap(jax.value_and_grad(total, has_aux=True), (None, 0)))
    (losses, weights), grads = each(params, rows)
  losses, weights, grads = np.asarray(losses), np.asarray(weights), tiny.by_label(grads)
  along = {label: g[6:].sum(0) / weights[6:].sum() for label, g in grads.items()}
  dots = sum(g[:6].reshape(6, -1) @ along[label].ravel() for label, g in grads.items()) / weights[:6]
  whole = {label: g[:6].sum(0) / weights[:6].sum() for label, g in grads.items()}
  return losses[:6].sum() / weights[:6].sum(), whole, dots


@pytest.mark.parametrize(
  ("schedule", "head"),
  [
    ("two_pass", "whole"), ("reverse_scan", "vocab"), ("two_pass", "tied"),
    pytest.param("reverse_scan", "whole", marks=pytest.mark.slow),
    pytest.param("two_pass", "tokens", marks=pytest.mark.slow),
    pytest.param("reverse_scan", "tied", marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_gradients_and_scores_of_a_capped_head(head, schedule):
  """Against one gradient per row of the formula, in float64."""
  loss, gradient, dots = by_formula(head == "tied")
  with jax.enable_x64(True), tiny.cheap_compilation():
    cfg = tiny.make_config(final_logits_soft_cap=CAP, **WIDE | HEADS[head])
    result = ghost.GhostEngine(cfg, schedule=schedule).score(tiny.make_model(cfg), ROWS, VALIDATION)
  assert result.loss == pytest.approx(float(loss), rel=1e-12)
  assert oracles.relative_error(result.dot, dots) < 1e-10
  for label, g in tiny.by_label(result.grads).items():
    assert oracles.relative_error(g, gradient[label]) < 1e-10, label


def test_logits_are_capped_and_a_cap_of_0_changes_nothing():
  cfg = tiny.make_config()
  capped = tiny.make_model(config.replace(cfg, final_logits_soft_cap=CAP))
  inputs = [BATCH[f"inputs{part}"] for part in ("", "_position", "_segmentation")]
  with tiny.cheap_compilation():
    logits, ours = nnx.jit(lambda *models: [model(*inputs) for model in models])(tiny.make_model(cfg), capped)
  assert float(jnp.abs(logits).max()) > 2 * CAP
  np.testing.assert_allclose(ours, CAP * jnp.tanh(logits / CAP), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["dot_product", "blockwise"])
def test_generation_with_caps_is_the_whole_models(attention):
  """Each token is the likeliest of the model that reads all before it at once; the caps change the text."""
  cfg = tiny.make_config(attention=attention, **CAPS)
  graphdef, state = nnx.split(tiny.make_model(cfg))
  prompt = [5, 9, 77]
  with tiny.cheap_compilation():
    made = Generator(graphdef, 16).generate(state, [prompt], 6).ids_BN[0].tolist()
    text = prompt + made
    logits = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids))(state, np.array([text[:-1]], np.int32))[0]
  assert made == np.asarray(logits[2:].argmax(-1)).tolist()


def test_the_attention_cap_acts_in_every_kernel():
  kernels = (("dot_product", 0.0), ("dot_product", 0.3), ("blockwise", 0.3))
  with jax.enable_x64(True), tiny.cheap_compilation():
    cfgs = [tiny.make_config(attention=kernel, attn_logits_soft_cap=cap, **WIDE) for kernel, cap in kernels]
    models = [nnx.split(tiny.make_model(cfg)) for cfg in cfgs]

    @jax.jit
    def all_losses(state):
      parts = zip(cfgs, models, strict=True)
      return [mean(*objectives.create(cfg)(nnx.merge(graphdef, state), BATCH)) for cfg, (graphdef, _) in parts]

    without, dot_product, blockwise = map(float, all_losses(models[0][1]))
  assert dot_product == pytest.approx(blockwise, rel=1e-12)
  assert abs(dot_product / without - 1) > 1e-6


def test_a_negative_cap_is_refused():
  with pytest.raises(config.ConfigError, match="final_logits_soft_cap=-1"):
    create(tiny.make_config(final_logits_soft_cap=-1.0), rngs=nnx.Rngs(0))
