"""Identities of the scores that hold whatever the model is; see the reference's list of oracles.

All of them read one compiled engine: float64, tied table, one shape of batch. n examples, T positions.
"""

import jax
import numpy as np
import oracles
import pytest
import tiny

from maxghost import ghost

TRAIN = tiny.make_batch(tiny.PACKED, seed=31)
VALIDATION = tiny.make_batch(tiny.PACKED[::-1], seed=32)


class Engine:
  """score(batch, validation batch of the same shape)."""

  def __init__(self):
    cfg = tiny.make_config(logits_via_embedding=True, remat_policy="none", dtype="float64", weight_dtype="float64")
    with jax.enable_x64(True):
      self.model = tiny.make_model(cfg)
      self.engine = ghost.GhostEngine(cfg, per_position=True)

  def score(self, batch, validation=VALIDATION):
    with jax.enable_x64(True), tiny.cheap_compilation():
      return jax.tree.map(np.asarray, self.engine.score(self.model, batch, validation))


@pytest.fixture(scope="module")
def engine():
  return Engine()


@pytest.fixture(scope="module")
def result(engine):
  return engine.score(TRAIN)


def close(actual, expected, tolerance=1e-12):
  assert oracles.relative_error(actual, expected) < tolerance


def test_shapes(result):
  assert result.dot.shape == result.additive.shape == (tiny.ROWS,)
  assert result.per_position.shape == (tiny.ROWS, tiny.POSITIONS)
  assert result.val_loss.shape == ()
  assert result.per_param["token_embedder/embedding"].shape == (tiny.ROWS,)
  assert result.per_param["decoder/layers/mlp/wo/kernel"].shape == (3, tiny.ROWS)


def test_parameters_layers_and_positions_sum_to_the_total(result):
  total = sum(v.sum(0) if v.ndim == 2 else v for v in result.per_param.values())
  close(total, result.dot)
  close(result.per_position.sum(-1), result.additive)


def test_scores_are_linear_in_the_direction(engine, result):
  """The gradient of the mean over all validation tokens is the token-weighted mean of those of two parts of them."""
  first = np.arange(tiny.ROWS)[:, None] < 3
  segments = VALIDATION["targets_segmentation"]
  parts = [{**VALIDATION, "targets_segmentation": np.where(mask, segments, 0)} for mask in (first, ~first)]
  weights = [(part["targets_segmentation"] != 0).sum() for part in parts]
  assert weights[0] != weights[1]
  scores = [engine.score(TRAIN, part) for part in parts]
  assert oracles.relative_error(scores[0].dot, scores[1].dot) > 0.1
  close(result.dot, sum(w * s.dot for w, s in zip(weights, scores, strict=True)) / sum(weights))
  close(result.val_loss, sum(w * s.val_loss for w, s in zip(weights, scores, strict=True)) / sum(weights))


def test_the_batchs_own_gradient_scores_its_squared_norm(engine):
  own = engine.score(TRAIN, TRAIN)
  norm = sum((v.astype(np.float64) ** 2).sum() for v in tiny.by_label(own.grads).values())
  close(own.additive.sum(), norm)


def test_the_additive_form_weighs_examples_by_their_tokens(result):
  tokens = oracles.token_counts(TRAIN)
  assert len(set(tokens)) > 4
  close(result.additive, result.dot * tokens / tokens.sum())


def test_a_permutation_of_the_batch_permutes_the_scores(engine, result):
  order = np.random.default_rng(0).permutation(tiny.ROWS)
  permuted = engine.score({name: v[order] for name, v in TRAIN.items()})
  close(permuted.dot, result.dot[order])
  close(permuted.per_position, result.per_position[order])


def test_another_examples_content_does_not_change_mine(engine, result):
  """Tokens, documents and token counts of the other rows change; `dot` of row 2 does not."""
  other = tiny.make_batch(((13,), (2, 3), (2, 6), (5, 5), (1,), (12,), (7, 7 - 1)), seed=77)
  changed = {name: np.where(np.arange(tiny.ROWS)[:, None] == 2, v, other[name]) for name, v in TRAIN.items()}
  after = engine.score(changed)
  close(after.dot[2], result.dot[2])
  assert oracles.relative_error(after.dot[3], result.dot[3]) > 1e-3


def test_tokens_in_padding_and_masked_targets_do_not_matter(engine, result):
  rng = np.random.default_rng(0)
  noise = rng.integers(0, tiny.VOCAB, TRAIN["inputs"].shape).astype(np.int32)
  changed = dict(TRAIN)
  changed["inputs"] = np.where(TRAIN["inputs_segmentation"] == 0, noise, TRAIN["inputs"])
  changed["targets"] = np.where(TRAIN["targets_segmentation"] == 0, noise, TRAIN["targets"])
  after = engine.score(changed)
  close(after.dot, result.dot)
  assert after.dot[4] == 0  # the empty row
  assert (after.per_position[TRAIN["inputs_segmentation"] == 0] == 0).all()


def test_a_batch_without_any_counting_token_scores_zero(engine):
  nothing = {**TRAIN, "targets_segmentation": np.zeros_like(TRAIN["targets_segmentation"])}
  result = engine.score(nothing)
  assert result.loss == 0
  assert (result.dot == 0).all()
  assert (result.additive == 0).all()


def test_the_model_is_not_changed(engine, result):
  with jax.enable_x64(True):
    fresh = tiny.by_label(tiny.make_model(tiny.make_config(logits_via_embedding=True, weight_dtype="float64")))
  now = tiny.by_label(engine.model)
  assert now.keys() == fresh.keys()
  for label, value in fresh.items():
    np.testing.assert_array_equal(now[label], value)
  assert type(engine.model.token_embedder).__name__ == "TiedTable"  # not its probed twin
