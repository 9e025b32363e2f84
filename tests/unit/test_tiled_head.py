"""The tiled output head: values, gradients and scores of the whole logits, with a tile of them at a time.

B=7 rows, T=13 positions, D=20 features, V=263 vocabulary; n tiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import test_ghost_schedules as by_schedule
import tiny
from flax import nnx

from maxghost import config, ghost
from maxghost.config import ConfigError
from maxghost.ghost.schedules.passes import mean_loss
from maxghost.models import autodiff
from maxghost.models.layers import Hidden
from maxghost.objectives import LanguageModelLoss, tiled, tiled_losses
from maxghost.objectives.cross_entropy import mean_cotangent

B, T, D, V = 7, 13, 20, 263
Z = 0.03
BATCH = tiny.make_batch(tiny.PACKED, seed=7)
HALF_PADDED = np.concatenate([np.ones((B, 6)), np.zeros((B, T - 6))], axis=1)


def sample(dtype="float32", tied=False, seed=0):
  """(x, table, targets, weights): the weights are half zeros."""
  rng = np.random.default_rng(seed)
  x, w = rng.normal(size=(B, T, D)), 0.3 * rng.normal(size=(V, D) if tied else (D, V))
  targets = rng.integers(0, V, (B, T))
  weights = HALF_PADDED.astype("float64" if dtype == "float64" else "float32")
  return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(targets, jnp.int32), weights


def make_head(n, axis="tokens", *, tied=False, dtype="float32", z=Z, cap=None):
  return tiled.Head(n, axis, tied, jnp.dtype(dtype), z_loss=z, soft_cap=cap)


def whole(head, x, w, targets):
  """The losses from all logits, in float64 and without the project's code."""
  x, w = x.astype(float), w.astype(float)
  logits = x @ (w.T if head.tied else w)
  logits = logits if head.soft_cap is None else head.soft_cap * jnp.tanh(logits / head.soft_cap)
  return oracles.softmax_losses(logits, targets, z_loss=head.z_loss)


def pass_(losses, *arguments, weights):
  """A compiled f(scale, *arguments) -> (loss, gradients of x and w) of scale * sum(losses * weights) / sum(weights).

  losses: of the arguments, which begin with x and w; their values come with the loss.
  """

  def total(x, w, scale, *others):
    value = losses(x, w, *others)
    return scale * jnp.sum(value * weights) / weights.sum(), value

  run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))

  def call(scale, *others):
    with tiny.cheap_compilation():
      return run(*arguments, scale, *others)

  return call


@functools.cache
def exact_pass(tied):
  """The pass over whole logits in float64, with a soft cap."""
  x, w, targets, weights = sample("float64", tied)
  head = make_head(1, tied=tied, cap=2.5)
  return pass_(lambda x, w: whole(head, x, w, targets), x, w, weights=weights)


def assert_close(ours, exact, tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
    assert oracles.relative_error(a, b) < tolerance


@pytest.mark.parametrize("axis", tiled.AXES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_losses_and_gradients_under_any_outer_scale(axis, tied):
  """13 positions in 4 tiles and 263 entries in 4 blocks: the last one is ragged on both axes."""
  head = make_head(4, axis, tied=tied, dtype="float64", cap=2.5)
  with jax.enable_x64(True):
    x, w, targets, weights = sample("float64", tied)
    run = pass_(lambda x, w: tiled_losses(head, x, w, targets), x, w, weights=weights)
    for scale in (2.0, -40.0):
      ours, exact = run(scale), exact_pass(tied)(scale)
      assert oracles.relative_error(ours[0][1], exact[0][1]) < 1e-13
      assert_close(ours, exact, 1e-12)
      assert not np.asarray(ours[1][0])[:, 6:].any()  # padding


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_cotangent_known_beforehand_changes_no_bit_of_a_gradient(tied):
  """The forward pass's gradients are used where the cotangent is the expected one, and formed anew where it is not."""
  head = make_head(4, tied=tied)
  x, w, targets, weights = sample(tied=tied)
  expected = np.asarray(jax.jit(lambda weights: mean_cotangent(weights, jnp.float32))(weights))
  told = {"the same": expected, "a multiple": 2 * expected, "others": expected * np.arange(T, dtype=np.float32)}
  run = pass_(lambda x, w, told: tiled_losses(head, x, w, targets, told), x, w, weights=weights)
  none = pass_(lambda x, w: tiled_losses(head, x, w, targets), x, w, weights=weights)(1.0)
  for name, known in told.items():
    jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), run(1.0, known), none)


@pytest.mark.parametrize("axis", tiled.AXES)
def test_the_number_of_tiles_changes_nothing_but_rounding(axis):
  x, w, targets, weights = sample()
  exact = pass_(lambda x, w: whole(make_head(1), x, w, targets), x, w, weights=weights)(1.0)
  for n in (2, 8):
    losses = functools.partial(tiled_losses, make_head(n, axis), targets_BT=targets)
    assert_close(pass_(losses, x, w, weights=weights)(1.0), exact, 2e-6)


def test_the_z_loss_has_its_own_value():
  x, w, targets, _ = sample()
  with tiny.cheap_compilation():
    with_z, without, forward = jax.jit(
      lambda x, w: [
        *(tiled_losses(make_head(3, z=z), x, w, targets) for z in (Z, 0.0)),
        tiled.forward(make_head(3, z=0.0), x, w, targets)[0],
      ]
    )(x, w)
  log_sum = jax.nn.logsumexp(x @ w, axis=-1)
  np.testing.assert_allclose(with_z - without, Z * log_sum**2, rtol=1e-4)
  np.testing.assert_array_equal(forward, without)


@pytest.mark.parametrize("axis", tiled.AXES)
def test_bfloat16_hidden_states_and_weights(axis):
  """Gradients come back in bfloat16, from sums over tiles in float32: each is one rounding away from the exact one."""
  x, w, targets, weights = sample("bfloat16")
  head = make_head(8, axis, dtype="bfloat16")
  (_, losses), (d_x, d_w) = pass_(lambda x, w: tiled_losses(head, x, w, targets), x, w, weights=weights)(1.0)
  assert losses.dtype == jnp.float32
  assert d_x.dtype == d_w.dtype == jnp.bfloat16
  with jax.enable_x64(True):
    wide = (np.asarray(a).astype(float) for a in (x, w))
    _, exact = pass_(lambda x, w: whole(head, x, w, targets), *wide, weights=weights)(1.0)
  for a, b in zip((d_x, d_w), exact, strict=True):
    assert oracles.relative_error(np.float64(a), b) < 1e-2


def test_bfloat16_gradients_of_the_table_are_summed_in_float32():
  """257 equal tokens: a sum over one-token tiles in bfloat16 would stop growing at 256 times its first term."""
  length = 300
  x, w = jnp.ones((1, length, 2), jnp.bfloat16), jnp.zeros((2, 3), jnp.bfloat16)
  targets = jnp.zeros((1, length), jnp.int32)
  head = make_head(length, dtype="bfloat16", z=0.0)
  with tiny.cheap_compilation():
    both = jax.jit(
      lambda w: [
        jax.grad(lambda w: tiled_losses(head, x, w, targets, weights).sum())(w)  # noqa: B023
        for weights in (None, jnp.ones((1, length)))
      ]
    )(w)
  for d_w in both:
    np.testing.assert_allclose(np.float32(d_w[0]), [-2 / 3 * length, length / 3, length / 3], rtol=6e-3)


@pytest.mark.parametrize(("axis", "known"), [("tokens", False), ("tokens", True), ("vocab", False)])
def test_no_array_of_the_size_of_the_logits(axis, known):
  """Neither pass makes the logits, a one-hot array of them, or a second table of the wrong use."""
  n, length, vocab = 8, 64, 512
  shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, length, 4), (4, vocab))]
  targets = jnp.zeros((3, length), jnp.int32)
  weights = jnp.ones(targets.shape) if known else None
  total = jax.grad(lambda x, w: tiled_losses(make_head(n, axis), x, w, targets, weights).sum(), argnums=(0, 1))
  jaxpr = jax.make_jaxpr(total)(*shapes)
  assert max(v.aval.size for e in tiny.equations(jaxpr) for v in e.outvars) == 3 * length * vocab // n


@pytest.mark.parametrize("axis", tiled.AXES)
def test_forward_mode(axis):
  x, w, targets, _ = sample()
  dx, dw, _, _ = sample(seed=1)
  head = make_head(4, axis)
  with autodiff.forward_mode(), tiny.cheap_compilation():
    ours, exact = jax.jit(
      lambda *pairs: [
        jax.jvp(losses, *pairs)
        for losses in (lambda x, w: tiled_losses(head, x, w, targets), lambda x, w: whole(head, x, w, targets))
      ]
    )((x, w), (dx, dw))
  assert_close(ours, exact, 1e-5)


# The whole model.


def model_pass(cfg, scale, segments=None):
  """(loss, gradients by label) of scale * loss / total weights, with the padding of `segments`."""
  batch = BATCH if segments is None else BATCH | {"targets_segmentation": segments.astype(np.int32)}
  graphdef, params = nnx.split(tiny.make_model(cfg))
  loss = LanguageModelLoss.of(cfg)

  def total(params):
    losses, weights = loss(nnx.merge(graphdef, params), batch)
    return scale * jnp.sum(losses * weights) / weights.sum()

  with tiny.cheap_compilation():
    value, grads = jax.jit(jax.value_and_grad(total))(params)
  return float(value), tiny.by_label(grads)


@pytest.mark.parametrize("depths", [0, 2])
def test_the_cotangent_of_a_batch_is_known_to_the_bit(depths, monkeypatch):
  """Else a plain step on CPU would take six products of the head's size in place of three. 42 tokens of 91 count."""
  cfg = tiny.make_config(num_vocab_tiling=4, mtp_num_layers=depths, mtp_loss_scaling_factor=0.3, remat_policy="none")
  batch, model = BATCH | {"targets_segmentation": HALF_PADDED.astype(np.int32)}, tiny.make_model(cfg)
  zeros, said = jnp.zeros((B, T, *([1 + depths] if depths else []))), []

  def mean(zeros):
    monkeypatch.setattr(tiled.Head, "__call__", lambda self, x, w, targets, expected: said.append(expected) or zeros)
    return mean_loss(*LanguageModelLoss.of(cfg)(model, batch)), said.pop()

  with tiny.cheap_compilation():
    actual, expected = jax.jit(jax.grad(mean, has_aux=True))(zeros)
  np.testing.assert_array_equal(actual, expected)
  assert len(np.unique(actual)) == (3 if depths else 2)


@pytest.mark.parametrize(
  ("tied", "axis"),
  [
    pytest.param(False, "tokens", marks=pytest.mark.slow), (False, "vocab"),
    (True, "tokens"), pytest.param(True, "vocab", marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_gradients_of_the_whole_model(tied, axis):
  """Body and head, with the outer loss divided by the number of tokens and multiplied by 2."""
  cfg = tiny.make_config(logits_via_embedding=tied, z_loss_multiplier=Z, remat_policy="none")
  changed = config.replace(cfg, num_vocab_tiling=4, vocab_tiling_axis=axis)
  plain, ours = (model_pass(c, 2.0, HALF_PADDED) for c in (cfg, changed))
  assert ours[0] == pytest.approx(plain[0], rel=1e-6)
  assert ours[1].keys() == plain[1].keys()
  for label, gradient in plain[1].items():
    assert oracles.relative_error(ours[1][label], gradient) < 5e-6, label


@pytest.mark.parametrize("axis", tiled.AXES)
def test_only_the_head_and_the_hidden_states_have_gradients(axis):
  cfg = tiny.make_config(num_vocab_tiling=4, vocab_tiling_axis=axis)
  graphdef, params = nnx.split(tiny.make_model(cfg))
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
  loss = LanguageModelLoss.of(cfg)

  def total(params, hidden):
    return jnp.sum(loss.head(nnx.merge(graphdef, params), Hidden(hidden), BATCH)[0] * HALF_PADDED.astype("float32"))

  with tiny.cheap_compilation():
    grads, d_hidden = jax.jit(jax.grad(total, argnums=(0, 1)))(params, hidden)
  touched = {label for label, g in tiny.by_label(grads).items() if g.any()}
  assert touched == {"decoder/decoder_norm/scale", "decoder/logits_dense/kernel"}
  assert np.asarray(d_hidden)[:, :6].any() and not np.asarray(d_hidden)[:, 6:].any()


TIED = {"logits_via_embedding": True}
CASES = {  # schedule, direction, rank, changes of the model
  "two_pass-adam-tied": ("two_pass", "adam", 0, TIED),
  "reverse_scan-adam-tied-vocab": ("reverse_scan", "adam", 0, TIED | {"vocab_tiling_axis": "vocab"}),
}
SLOW_CASES = {
  "two_pass-sgd-rank": ("two_pass", "sgd", 5, {"num_vocab_tiling": 4}),
  "two_pass-sgd-tied-vocab": ("two_pass", "sgd", 0, TIED | {"vocab_tiling_axis": "vocab"}),
  "two_pass-adam": ("two_pass", "adam", 0, {}),
  "reverse_scan-adam-vocab": ("reverse_scan", "adam", 0, {"vocab_tiling_axis": "vocab"}),
  "reverse_scan-sgd-tied-rank": ("reverse_scan", "sgd", 5, TIED),
  "two_pass-adam-tied-vocab-rank": ("two_pass", "adam", 5, TIED | {"vocab_tiling_axis": "vocab"}),
  "two_pass-sgd-vocab-rank": ("two_pass", "sgd", 5, {"vocab_tiling_axis": "vocab"}),
  "reverse_scan-sgd": ("reverse_scan", "sgd", 0, {}),
  "reverse_scan-adam-tied": ("reverse_scan", "adam", 0, TIED),
  "reverse_scan-adam-rank": ("reverse_scan", "adam", 5, {}),
}
oracle_of = by_schedule.oracle_of


@pytest.mark.parametrize("name", CASES)
def test_scores(name, oracle_of):
  """Against per-example gradients in float64, every parameter and the total, with two validation sets."""
  schedule, direction, rank, changes = CASES[name]
  changes = {"num_vocab_tiling": 3, "remat_policy": "none"} | changes
  by_schedule.assert_case(schedule, direction, rank, changes, oracle_of)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_scores_of_the_other_combinations(name, oracle_of):
  schedule, direction, rank, changes = SLOW_CASES[name]
  changes = {"num_vocab_tiling": 3, "remat_policy": "none"} | changes
  by_schedule.assert_case(schedule, direction, rank, changes, oracle_of)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jvp", "perexample"])
def test_the_other_engines(engine):
  cfg = tiny.make_config(num_vocab_tiling=3)
  model, val = tiny.make_model(cfg), tiny.make_batch(tiny.VALIDATION, seed=8)
  with tiny.cheap_compilation():
    ours = ghost.GhostEngine(cfg, engine=engine).score(model, BATCH, val)
    plain = ghost.GhostEngine(config.replace(cfg, num_vocab_tiling=1), engine="graddotprod").score(model, BATCH, val)
  assert oracles.relative_error(ours.dot, plain.dot) < 1e-5


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_vocab_tiling": T + 1}, "num_vocab_tiling=14 .* is more than max_target_length=13; use at most 13"),
    ({"num_vocab_tiling": V + 1, "vocab_tiling_axis": "vocab"}, "more than vocab_size=263; use at most 263"),
    (
      {"num_vocab_tiling": 2, "ghost_schedule": "concat"},
      "use num_vocab_tiling=1, or ghost_schedule=two_pass or",
    ),
    ({"num_vocab_tiling": 0}, "num_vocab_tiling=0"),
    ({"vocab_tiling_axis": "token"}, "tokens"),
  ],
)
def test_bad_settings(changes, message):
  with pytest.raises(ConfigError, match=message):
    tiny.make_config(**changes)
