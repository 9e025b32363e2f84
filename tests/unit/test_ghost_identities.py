"""Identities of the scores that hold whatever the model is; see the reference's list of oracles.

All of them read one compiled engine: float64, tied table, several validation sets at once. K validation sets, n
examples, T positions.
"""

import jax
import numpy as np
import oracles
import pytest
import tiny

from maxghost import ghost

TRAIN = tiny.make_batch(tiny.PACKED, seed=31)
FIRST = tiny.make_batch(tiny.VALIDATION, seed=32)
SECOND = tiny.make_batch(((3, 10), (13,), (2, 2)), seed=33)
BOTH = {name: np.concatenate([FIRST[name], SECOND[name]]) for name in FIRST}


class Engine:
  """score(batch, like=None): validation sets FIRST, SECOND, BOTH and the batch `like` itself (default: the batch)."""

  def __init__(self):
    cfg = tiny.make_config(logits_via_embedding=True, remat_policy="none", dtype="float64", weight_dtype="float64")
    with jax.enable_x64(True):
      self.model = tiny.make_model(cfg)
      self.engine = ghost.GhostEngine(cfg, per_position=True)

  def score(self, batch, like=None):
    with jax.enable_x64(True), tiny.cheap_compilation():
      result = self.engine.score(self.model, batch, [FIRST, SECOND, BOTH, like or batch])
      return jax.tree.map(np.asarray, result)


@pytest.fixture(scope="module")
def engine():
  return Engine()


@pytest.fixture(scope="module")
def result(engine):
  return engine.score(TRAIN)


def close(actual, expected, tolerance=1e-12):
  assert oracles.relative_error(actual, expected) < tolerance


def test_shapes_of_several_validation_sets(result):
  assert result.dot.shape == result.additive.shape == (4, tiny.ROWS)
  assert result.per_position.shape == (4, tiny.ROWS, tiny.POSITIONS)
  assert result.val_loss.shape == (4,)
  assert result.per_param["token_embedder/embedding"].shape == (4, tiny.ROWS)
  assert result.per_param["decoder/layers/mlp/wo/kernel"].shape == (3, 4, tiny.ROWS)


def test_parameters_layers_and_positions_sum_to_the_total(result):
  total = sum(v.sum(0) if v.ndim == 3 else v for v in result.per_param.values())
  close(total, result.dot)
  close(result.per_position.sum(-1), result.additive)


def test_scores_are_linear_in_the_direction(result):
  """The gradient of the mean over two sets is the token-weighted mean of their gradients."""
  first, second = ((b["targets_segmentation"] != 0).sum() for b in (FIRST, SECOND))
  assert first != second
  close(result.dot[2], (first * result.dot[0] + second * result.dot[1]) / (first + second))
  close(result.val_loss[2], (first * result.val_loss[0] + second * result.val_loss[1]) / (first + second))


def test_the_batchs_own_gradient_scores_its_squared_norm(result):
  norm = sum((v.astype(np.float64) ** 2).sum() for v in tiny.by_label(result.grads).values())
  close(result.additive[3].sum(), norm)


def test_the_additive_form_weighs_examples_by_their_tokens(result):
  tokens = oracles.token_counts(TRAIN)
  assert len(set(tokens)) > 4
  close(result.additive, result.dot * tokens / tokens.sum())


def test_a_permutation_of_the_batch_permutes_the_scores(engine, result):
  order = np.random.default_rng(0).permutation(tiny.ROWS)
  permuted = engine.score({name: v[order] for name, v in TRAIN.items()}, like=TRAIN)
  close(permuted.dot, result.dot[:, order])
  close(permuted.per_position, result.per_position[:, order])


def test_another_examples_content_does_not_change_mine(engine, result):
  """Tokens, documents and token counts of the other rows change; `dot` of row 2 does not."""
  other = tiny.make_batch(((13,), (2, 3), (2, 6), (5, 5), (1,), (12,), (7, 7 - 1)), seed=77)
  changed = {name: np.where(np.arange(tiny.ROWS)[:, None] == 2, v, other[name]) for name, v in TRAIN.items()}
  after = engine.score(changed, like=TRAIN)
  close(after.dot[:, 2], result.dot[:, 2])
  assert oracles.relative_error(after.dot[:, 3], result.dot[:, 3]) > 1e-3


def test_tokens_in_padding_and_masked_targets_do_not_matter(engine, result):
  rng = np.random.default_rng(0)
  noise = rng.integers(0, tiny.VOCAB, TRAIN["inputs"].shape).astype(np.int32)
  changed = dict(TRAIN)
  changed["inputs"] = np.where(TRAIN["inputs_segmentation"] == 0, noise, TRAIN["inputs"])
  changed["targets"] = np.where(TRAIN["targets_segmentation"] == 0, noise, TRAIN["targets"])
  after = engine.score(changed, like=TRAIN)
  close(after.dot, result.dot)
  assert (after.dot[:, 4] == 0).all()  # the empty row
  assert (after.per_position[:, TRAIN["inputs_segmentation"] == 0] == 0).all()


def test_a_batch_without_any_counting_token_scores_zero(engine):
  nothing = {**TRAIN, "targets_segmentation": np.zeros_like(TRAIN["targets_segmentation"])}
  result = engine.score(nothing, like=TRAIN)
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
  assert type(engine.model.token_embedder).__name__ == "Embed"
