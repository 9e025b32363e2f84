"""Marginal credit with gradient clipping: what a step loses with a document, its change of the clipping factor counted.

Against one gradient a document, at the parameters of the second step: learning rate times c_i <u, g_i> + (c - c_i)
<u, g>, with c_i the clipping factor without the document. Sizes are pairwise different (`tiny`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import test_muon as muon
import tiny
from test_path_credit import gradients  # noqa: F401  a fixture
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config, optimizers

VALS = (VALIDATION, tiny.make_batch(tiny.VALIDATION, seed=201))


def direction(run: Run, before, g: dict, G: dict, factor: float) -> dict:
  """u = D'(c g)ᵀ G of AdamW's, Muon's or SGD's second step, by JAX's derivative of the step written out, in float64.
  factor: c."""
  cfg, t = run.cfg.optimizer, 2

  def adamw(g, m, v):
    square = (cfg.adam_b2 * v + (1 - cfg.adam_b2) * g**2) / (1 - cfg.adam_b2**t)
    root = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)  # the root of 0 has no derivative
    return (cfg.adam_b1 * m + (1 - cfg.adam_b1) * g) / (1 - cfg.adam_b1**t) / (root + cfg.adam_eps)

  def responses(g: dict, G: dict) -> dict:
    u = {}
    for label in G:
      m = before.first[label]
      if cfg.opt_type == "muon" and muon.dimensions(label):
        constants = {"count": 1, "beta": cfg.muon_beta, "eps": cfg.adam_eps, "rms": cfg.muon_consistent_rms}
        step = functools.partial(muon.step_of, label, m=jnp.asarray(m), **constants)
      else:
        step = functools.partial(adamw, m=m, v=before.second[label])
      u[label] = jax.vjp(step, factor * g[label])[1](G[label])[0]
    return u

  if cfg.opt_type == "sgd":
    return G
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, jax.jit(responses)({label: g[label] for label in G}, G))


class Truth:
  """A run's second step beside one gradient a document. chosen: bool of each document, whether it is trained on.

  c, norm: of the batch. c_N, w_N: of its documents, the clipping factor without them and <g, g_i> / |g|². dots_N: {set:
  {label: <u, g_i>, [L, N] of stacked layers}}. own: {label: <g, g_i>}.
  """

  def __init__(self, run: Run, gradients, vals=VALS[:1], scored=lambda label: True, batch=TRAIN[1]):  # noqa: F811
    start = run.snapshot()
    run.step(TRAIN[3 if batch is TRAIN[0] else 0], vals)
    before = run.snapshot()
    self.run, self.out = run, run.step(batch, vals)
    places = tiny.documents(batch)
    chosen = self.out.get("chosen_B", np.ones(tiny.ROWS, bool))
    self.places = [(row, segment) for row, segment in places if chosen[row]]
    rows = tiny.stack_rows([tiny.alone(batch, *place) for place in self.places])
    found, whole = gradients(before.params, rows)
    tokens, layers = oracles.token_counts(rows).sum(), run.cfg.model.base_num_decoder_layers
    self.tokens, self.parts, self.whole = tokens, {label: x / tokens for label, x in found.items()}, whole
    self.norm = np.sqrt(sum(float((x**2).sum()) for x in whole.values()))
    self.threshold = run.cfg.optimizer.gradient_clipping_threshold
    self.c, self.rate = min(1.0, self.threshold / self.norm), float(self.out["learning_rate"])
    kept = {label: x for label, x in self.parts.items() if scored(label)}
    self.own = oracles.dots(kept, whole, stacked=layers)
    self.w_N = self.summed(self.own) / self.norm**2
    self.c_N = np.minimum(1, self.threshold / (self.norm * np.abs(1 - self.w_N)))
    self.dots = []
    for val in vals:
      stale = run.cfg.ghost.ghost_val_every > 1
      _, G = gradients((start if stale else before).params, val)
      known = run.cfg.optimizer.gradient_accumulation_steps > 1  # the whole gradient, before there are scores
      u = direction(run, before, whole, {label: G[label] for label in kept}, self.c if known else before.clip_factor)
      self.dots.append(oracles.dots(kept, u, stacked=layers))

  @staticmethod
  def summed(parts: dict) -> np.ndarray:
    return sum(x.reshape(-1, x.shape[-1]).sum(0) for x in parts.values())

  def expected(self, k: int = 0, label: str | None = None, clipping: bool = True) -> np.ndarray:
    """Contributions [N] to a set, or [L, N] of one parameter. clipping: whether its change is counted."""
    whole_N = self.summed(self.dots[k])
    dots, shares = whole_N, 1.0
    if label is not None:
      dots, shares = self.dots[k][label], self.own[label] / self.norm**2 / np.where(self.w_N == 0, 1, self.w_N)
    if not clipping:
      return self.rate * self.c * dots
    return self.rate * (self.c_N * dots + (self.c - self.c_N) * whole_N.sum() * shares)

  def size(self, k: int) -> float:
    """The largest sum of the formula's two terms without signs: they nearly cancel, but each is rounded."""
    whole_N = self.summed(self.dots[k])
    return float((self.rate * (self.c_N * np.abs(whole_N) + np.abs((self.c - self.c_N) * whole_N.sum()))).max())

  def at_documents(self, x_BS) -> np.ndarray:
    return np.stack([x_BS[..., row, segment - 1] for row, segment in self.places], -1)

  def assert_slots(self, tolerance: float):
    contribution = self.out["contribution_BSK"]
    for k in range(len(self.dots)):
      found, expected = self.at_documents(contribution[..., k]), self.expected(k)
      assert np.abs(found - expected).max() < tolerance * self.size(k)
      assert contribution[..., k].sum() == pytest.approx(expected.sum(), abs=tolerance * len(expected) * self.size(k))
      dot = self.at_documents(self.out["score_dot_BSK"][..., k] * self.out["share_BS"])
      assert oracles.relative_error(dot, self.summed(self.dots[k])) < tolerance


WIDE = {"dtype": "float64", "weight_dtype": "float64"}
CASES = {
  "adamw": {}, "adamw, reverse": {"ghost_schedule": "reverse_scan"}, "muon": {"opt_type": "muon"},
  "muon, reverse": {"opt_type": "muon", "ghost_schedule": "reverse_scan"}, "tied": {"logits_via_embedding": True},
}  # fmt: skip


@pytest.mark.parametrize(
  ("case", "wide"), [(case, True) for case in CASES] + [("adamw", False), ("muon, reverse", False)]
)
def test_contributions_count_the_clipping_factor_without_the_document(case, wide, gradients):  # noqa: F811
  """Two validation sets; also layer by layer, and token by token. The account closes."""
  sizes = {"ghost_detail": "token", "ghost_val_sets": ("a=x", "b=y"), "remat_policy": "full"}
  # In float32, the derivatives of both steps magnify the rounding of gradients, by a factor that depends on the
  # processor: Adam's where entries are near `adam_eps`, Muon's where singular values are near 0.
  sizes |= WIDE if wide else {"adam_eps": 1e-4} if case == "adamw" else {}
  run = Run(ghost_direction="marginal", num_sets=2, **CASES[case], **sizes)
  tolerance = 1e-12 if wide else 1e-5 if case == "adamw" else 2e-5
  truth = Truth(run, gradients_of(case, gradients), VALS)
  assert truth.c < 0.7
  out = truth.out
  truth.assert_slots(tolerance)
  assert np.abs(truth.expected() - truth.expected(clipping=False)).max() > 0.1 * truth.size(0)  # or it tells nothing
  for k in range(2):
    size = truth.size(k)
    total = np.zeros_like(out["contribution_BSK"][..., k])
    for label, found in out["param_contribution"].items():
      expected = truth.expected(k, label).reshape(found.shape[0], -1)
      assert np.abs(truth.at_documents(found[..., k]) - expected).max() < tolerance * size, label
      total += found[..., k].sum(0)
    assert np.abs(total - out["contribution_BSK"][..., k]).max() < tolerance * size
    by_slot = sums_by_slot(out["token_contribution_KBT"][k])
    assert np.abs(by_slot - out["contribution_BSK"][..., k]).max() < tolerance * size
    assert out["predicted_examples"][k] == pytest.approx(total.sum(), abs=tolerance * float(np.abs(total).sum()))
  assert out["check_rel_err"].max() < tolerance and "of_clipping" not in out


def gradients_of(case: str, gradients):  # noqa: F811
  """The fixture's, or those of the model of this case."""
  if case != "tied":
    return gradients
  with jax.enable_x64(True):
    model = tiny.make_model(tiny.make_config(remat_policy="none", **CASES[case], **WIDE))
    examples = oracles.ExampleGradients(model)

  def at(params, rows):
    with jax.enable_x64(True), tiny.cheap_compilation():
      found = examples(rows, params)
    return found, oracles.batch_gradient(found, rows)

  return at


def sums_by_slot(x_BT) -> np.ndarray:
  """[B, S] of TRAIN[1]."""
  number_BT = TRAIN[1]["inputs_segmentation"]
  return np.stack([np.where(number_BT == s + 1, x_BT, 0).sum(1) for s in range(tiny.SEGMENTS)], -1)


@pytest.mark.parametrize("over", [0.985, 1.001])
def test_near_the_threshold_some_documents_end_or_begin_the_clipping(over, gradients):  # noqa: F811
  """SGD in float64, scores of the layers alone: |g| just above the threshold, some g - g_i below; or the reverse."""
  keys = {"opt_type": "sgd", "learning_rate": 1e-6, **WIDE}  # so slow that the second step's |g| does not depend on it
  start = Run(ghost_enabled=False, gradient_clipping_threshold=0.0, **keys)
  norm = float([start.step(batch) for batch in (TRAIN[3], TRAIN[0])][1]["grad_norm"])
  outside = ("token_embedder/*", "decoder/logits_dense/*")
  run = Run(ghost_direction="marginal", gradient_clipping_threshold=over * norm, ghost_exclude=outside, **keys)
  truth = Truth(run, gradients, scored=lambda label: "/layers/" in label or "norm" in label, batch=TRAIN[0])
  clipped_N = truth.c_N < 1
  assert (truth.c < 1) == (over < 1) and clipped_N.any() and not clipped_N.all()
  truth.assert_slots(1e-12)
  if over > 1:  # as without a threshold where nothing is clipped, with or without the document
    assert (truth.expected() == truth.expected(clipping=False))[~clipped_N].all()


@pytest.mark.parametrize(("wide", "tolerance"), [(True, 1e-12), (False, 1e-5)])
def test_the_factor_without_a_part_is_finite_everywhere(wide, tolerance):
  """c_i and (c - c_i) / share, by their definition; at share 0 by its limit, and 0 where nothing is clipped."""
  with jax.enable_x64(wide):
    for norm in (0.7, 1.0, 1.003, 2.5):
      share = np.array([-1.3, -0.2, -0.003, 0.002, 0.1, 0.6, 1.0, 1.4, 2.2, 5.0])
      factor, slope = map(np.asarray, optimizers.factor_without(jnp.asarray(share), jnp.asarray(norm), 1.0))
      whole, c_N = min(1, 1 / norm), 1 / np.maximum(norm * np.abs(1 - share), 1)
      np.testing.assert_allclose(factor, c_N, rtol=tolerance)
      np.testing.assert_allclose(slope * share, whole - c_N, atol=tolerance)
      _, limit = optimizers.factor_without(jnp.zeros(1), jnp.asarray(norm), 1.0)
      assert float(limit[0]) == (-float(factor_at(norm)) if norm > 1 else 0)


def factor_at(norm: float):
  return optimizers.factor_of(jnp.asarray(norm), 1.0)


SGD = {"opt_type": "sgd", **WIDE}


@pytest.mark.parametrize(
  "changes",
  [
    {**SGD, "ghost_schedule": "concat", "ghost_val_batch_size": tiny.VAL_ROWS},
    {**SGD, "sgd_momentum": 0.7, "ghost_select": "random", "ghost_select_fraction": 0.5},
    {**SGD, "ghost_schedule": "reverse_scan", "segment_lengths": (1,)},
    {**SGD, "ghost_val_every": 2},
  ],
  ids=str,
)
def test_other_schedules_and_selection(changes, gradients):  # noqa: F811
  """Contributions of a selection are those in the batch of the chosen rows; all others are 0."""
  truth = Truth(Run(ghost_direction="marginal", **changes), gradients)
  assert truth.c < 0.7
  truth.assert_slots(1e-12)


@pytest.mark.parametrize("changes", [SGD, {**WIDE, "remat_policy": "full"}], ids=["sgd", "adamw"])
def test_micro_batches_count_the_gradient_of_all(changes, gradients):  # noqa: F811
  """A row in each micro-batch; by layer, too. AdamW's response is at this step's clipped gradient, which is known."""
  run = Run(ghost_direction="marginal", gradient_accumulation_steps=tiny.ROWS, ghost_detail="layer", **changes)
  truth = Truth(run, gradients)
  assert truth.c < 0.7
  truth.assert_slots(1e-12)
  for label, found in truth.out["param_contribution"].items():
    expected = truth.expected(0, label).reshape(found.shape[0], -1)
    assert np.abs(truth.at_documents(found[..., 0]) - expected).max() < 1e-12 * truth.size(0), label


def test_low_rank_shares_are_near_the_exact_ones_and_parts_add_up():
  found = []
  for rank in (0, 3):
    run = Run(ghost_direction="marginal", ghost_rank=rank, ghost_detail="layer")
    found.append([run.step(batch) for batch in TRAIN[:2]][1])
  exact, low = (out["contribution_BSK"][..., 0] for out in found)
  assert np.corrcoef(exact[exact != 0], low[exact != 0])[0, 1] > 0.9 and (exact != low).any()
  total = sum(x[..., 0].sum(0) for x in found[1]["param_contribution"].values())
  assert np.abs(total - low).max() < 1e-5 * np.abs(low).max()
  assert {x.shape[-1] for x in found[1]["captured"].values()} == {1}  # of the validation set alone


def test_what_cannot_count_the_clipping_is_refused():
  with pytest.raises(
    config.ConfigError, match=r"marginal does not go with .*=forward_mode, .* use ghost_direction=path"
  ):
    config.load(None, "ghost_direction=marginal", "ghost_schedule=forward_mode")
  free = ("ghost_direction=marginal", "ghost_schedule=forward_mode", "gradient_clipping_threshold=0.0")
  assert not config.load(None, *free).counts_clipping


def test_where_nothing_is_clipped_the_bits_are_those_without_a_threshold():
  """With a threshold that no gradient reaches, whose program has the further score; all outputs of two steps."""
  far, none = (
    Run(ghost_direction="marginal", exact=True, gradient_clipping_threshold=threshold) for threshold in (1e4, 0.0)
  )
  assert (far.twin.spec.own, none.twin.spec.own) == (True, False)
  for batch in TRAIN[:2]:
    found, expected = far.step(batch), none.step(batch)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
