"""The train step: the same parameters with and without scores, and every output against its formula.

B rows, S documents in a row, K validation sets, L layers.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from train_steps import TRAIN, TRAINING, VALIDATION, Run

from maxghost import optimizers
from maxghost.ghost import rules
from maxghost.training import step
from maxghost.training.state import TrainStateNNX, trainable

FLOAT64 = {"dtype": "float64", "weight_dtype": "float64", "remat_policy": "none"}
PLAIN = {"loss", "grad_norm", "param_norm", "learning_rate", "tokens", "clip_factor"}
COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")
OTHER_VALIDATION = tiny.make_batch(((2, 7), (10,), (3,)), seed=201)


class TwentySteps:
  """The same 20 steps with ghost on and off."""

  def __init__(self, cheap: bool = False, **changes):
    self.on, self.off = (Run(cheap=cheap, exact=True, ghost_enabled=on, **changes) for on in (True, False))
    self.before, self.after, self.outputs, self.plain = [], [], [], []
    for i in range(20):
      self.before.append(self.on.snapshot())
      self.outputs.append(self.on.step(TRAIN[i % len(TRAIN)]))
      self.after.append(self.on.snapshot())
      self.plain.append(self.off.step(TRAIN[i % len(TRAIN)]))


@pytest.fixture(scope="module")
def twenty():
  """The default kind of model. In every form, and compiled as the trainer compiles it: a long test, below."""
  return TwentySteps(cheap=True, remat_policy="minimal")


def assert_same_bits(twenty):
  on, off = (nnx.to_flat_state(run.state) for run in (twenty.on, twenty.off))
  assert len(on) == len(off) > 3 * 11
  for (path, ours), (_, theirs) in zip(on, off, strict=True):
    np.testing.assert_array_equal(np.asarray(ours[...]), np.asarray(theirs[...]), err_msg=str(path))
  for ours, theirs in zip(twenty.outputs, twenty.plain, strict=True):
    for name in PLAIN:  # what is only reported may round otherwise
      np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, err_msg=name)
  factors = [float(out["clip_factor"]) for out in twenty.outputs]
  assert min(factors) < 0.9
  assert twenty.plain[-1]["loss"] < twenty.plain[0]["loss"] - 0.1  # it does train


def test_twenty_steps_end_in_the_same_bits_with_ghost_on_and_off(twenty):
  assert_same_bits(twenty)


@pytest.mark.slow
def test_the_same_bits_with_a_tied_table_and_dropout():
  assert_same_bits(TwentySteps(cheap=True, logits_via_embedding=True, remat_policy="none", dropout_rate=0.1))


def test_the_same_bits_in_segments_and_tiles():
  layers = {"base_num_decoder_layers": 4, "segment_lengths": (2,), "remat_policy": "full"}
  assert_same_bits(TwentySteps(cheap=True, num_vocab_tiling=3, **layers))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_same_bits_in_every_form(tied, scan, remat):
  assert_same_bits(
    TwentySteps(logits_via_embedding=tied, scan_layers=scan, remat_policy=remat, attention="autoselected")
  )


@pytest.mark.parametrize("remat", ["minimal", "full"])
def test_the_scored_layers_save_what_the_plain_ones_save(remat):
  """A probed layer whose products a remat policy cannot see would recompute them all."""

  def saved(ghost_enabled):
    """Elements stacked over the layers by each scan of the step, the backward ones' gradients included."""
    run = Run(remat_policy=remat, ghost_enabled=ghost_enabled)
    jaxpr = jax.make_jaxpr(run.function)(run.state, TRAIN[0], (VALIDATION,) if ghost_enabled else ())
    scans = [e for e in tiny.equations(jaxpr) if e.primitive.name == "scan"]
    return [sum(v.aval.size for v in e.outvars if v.aval.shape and v.aval.shape[0] == 3) for e in scans]

  plain_forward, plain_backward = saved(ghost_enabled=False)
  validation_forward, validation_backward, forward, backward = saved(ghost_enabled=True)
  assert forward == plain_forward > 3 * tiny.ROWS * tiny.POSITIONS * 20 - 1
  assert validation_forward * tiny.ROWS == forward * tiny.VAL_ROWS
  assert validation_backward == plain_backward < backward


def test_without_ghost_there_are_no_ghost_outputs(twenty):
  assert twenty.plain[0].keys() == PLAIN
  assert twenty.off.twin is None
  assert twenty.outputs[0].keys() > PLAIN


class Facts:
  """What the oracle says about one step: every document by itself, the whole batch, the validation sets."""

  def __init__(self, gradients, before, batch, val_batches):
    self.documents = tiny.documents(batch)
    rows = [tiny.stack_rows([tiny.alone(batch, *d) for d in self.documents]), *val_batches]
    joined = {name: np.concatenate([r[name] for r in rows]) for name in batch}
    with jax.enable_x64(True), tiny.cheap_compilation():
      losses, flat = gradients.with_losses(joined, before.params)
    ends = np.cumsum([len(r["inputs"]) for r in rows])[:-1]
    self.losses = np.split(losses, ends)
    parts = {label: np.split(v, ends) for label, v in flat.items()}
    self.gradients = {label: p[0] for label, p in parts.items()}  # of summed losses, by document
    self.tokens = oracles.token_counts(rows[0])
    self.g = oracles.batch_gradient(self.gradients, rows[0])
    self.G = [
      oracles.batch_gradient({label: p[1 + k] for label, p in parts.items()}, rows[1 + k])
      for k in range(len(val_batches))
    ]
    self.val_loss = [v.sum() / oracles.token_counts(r).sum() for v, r in zip(self.losses[1:], rows[1:], strict=True)]


@pytest.fixture(scope="module")
def gradients():
  """Per-example gradients of the untied model in float64, at any parameters."""
  with jax.enable_x64(True):
    return oracles.ExampleGradients(tiny.make_model(tiny.make_config(**FLOAT64)))


def inner(left: dict, right: dict, labels=None) -> float:
  return sum(float((left[label] * right[label]).sum()) for label in (left if labels is None else labels))


def test_columns_add_up_to_the_predicted_change_in_float32(twenty, gradients):
  """The change of the parameters is read off them: a float32 parameter of size 0.3 rounds an update of 3e-4 by 5e-5."""
  for i in (0, 1, 7, 19):
    facts = Facts(gradients, twenty.before[i], TRAIN[i % len(TRAIN)], [VALIDATION])
    change = {k: twenty.after[i].params[k] - v for k, v in twenty.before[i].params.items()}
    out = twenty.outputs[i]
    columns = [float(out[name][0]) for name in COLUMNS]
    assert sum(columns) == pytest.approx(-inner(facts.G[0], change), abs=1e-4 * sum(map(abs, columns))), i
    assert out["predicted"][0] == pytest.approx(sum(columns), abs=1e-6 * sum(map(abs, columns)))
    assert out["val_loss"][0] == pytest.approx(facts.val_loss[0], rel=1e-5)
    assert out["check_rel_err"][0] < 1e-5


RUNS = {
  "adam": {"ghost_detail": "layer", "num_sets": 2},
  "sgd-direction-excluded": {
    "ghost_direction": "sgd", "ghost_exclude": ("decoder/logits_dense/*", "*norm*"), "ghost_detail": "module",
  },
  "sgd-optimizer": {"opt_type": "sgd", "learning_rate": 1e-5, "ghost_detail": "total"},
}  # fmt: skip


class ThreeSteps:
  """Three steps in float64, and the oracle's facts about the third, which has a history."""

  def __init__(self, gradients, num_sets=1, **changes):
    self.run = Run(num_sets=num_sets, **FLOAT64, **changes)
    self.cfg = self.run.cfg
    self.val_batches = (VALIDATION, OTHER_VALIDATION)[:num_sets]
    self.outputs = [self.run.step(TRAIN[i], self.val_batches) for i in range(2)]
    self.before = self.run.snapshot()
    self.outputs.append(self.run.step(TRAIN[2], self.val_batches))
    self.out = self.outputs[-1]
    self.after = self.run.snapshot()
    self.facts = Facts(gradients, self.before, TRAIN[2], self.val_batches)
    self.scored = [label for label in self.facts.g if not self.is_excluded(label)]

  def is_excluded(self, label):
    return bool(self.cfg.ghost.ghost_exclude) and ("logits_dense" in label or "norm" in label)

  def preconditioned(self, G, kappa):
    """P_t G with the clipping factor `kappa` inside v_t."""
    optimizer = self.cfg.optimizer
    if optimizer.opt_type == "sgd":
      return G
    constants = {"b1": optimizer.adam_b1, "b2": optimizer.adam_b2, "eps": optimizer.adam_eps}
    before = self.before
    return oracles.adam_direction(G, self.facts.g, before.second, count=before.count, kappa=kappa, **constants)

  def direction(self, k):
    """u of validation set k: in v_t stands the clipping factor of the step before."""
    if self.cfg.ghost.ghost_direction == "sgd":
      return self.facts.G[k]
    return self.preconditioned(self.facts.G[k], self.before.clip_factor)


@pytest.fixture(scope="module", params=RUNS)
def three(request, gradients):
  return ThreeSteps(gradients, **RUNS[request.param])


def test_scalars(three):
  out, facts, optimizer = three.out, three.facts, three.cfg.optimizer
  norm = np.sqrt(inner(facts.g, facts.g))
  assert out["grad_norm"] == pytest.approx(norm, rel=1e-12)
  assert out["clip_factor"] == pytest.approx(min(1, optimizer.gradient_clipping_threshold / norm), rel=1e-12)
  assert three.after.clip_factor == pytest.approx(out["clip_factor"], rel=1e-12)
  assert out["param_norm"] == pytest.approx(np.sqrt(inner(three.before.params, three.before.params)), rel=1e-12)
  assert out["tokens"] == facts.tokens.sum()
  assert out["loss"] == pytest.approx(facts.losses[0].sum() / facts.tokens.sum(), rel=1e-12)
  np.testing.assert_allclose(out["val_loss"], facts.val_loss, rtol=1e-12)
  cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * 2 / 19)) / 2
  assert out["learning_rate"] == pytest.approx(optimizer.learning_rate * cosine, rel=1e-7)


def test_columns_follow_their_formulas_and_add_up_in_float64(three):
  """Tolerance: the first moment is kept in float32."""
  out, facts, optimizer = three.out, three.facts, three.cfg.optimizer
  lr, kappa = float(out["learning_rate"]), float(out["clip_factor"])
  change = {k: three.after.params[k] - v for k, v in three.before.params.items()}
  for k, G in enumerate(facts.G):
    full = three.preconditioned(G, kappa)
    expected = {
      "predicted_examples": lr * kappa * inner(facts.g, three.direction(k), three.scored),
      "momentum": 0.0,
      "weight_decay": 0.0,
      "unscored": lr * kappa * inner(facts.g, full, set(facts.g) - set(three.scored)),
    }
    exact = lr * kappa * inner(facts.g, full, three.scored)
    expected["direction_residual"] = exact - expected["predicted_examples"]
    if optimizer.opt_type == "adamw":
      momentum = optimizer.adam_b1 / (1 - optimizer.adam_b1)
      expected["momentum"] = lr * momentum * inner(three.before.first, full)
      expected["weight_decay"] = lr * optimizer.adam_weight_decay * inner(G, three.before.params)
    size = sum(map(abs, expected.values()))
    for name in COLUMNS:
      assert out[name][k] == pytest.approx(expected[name], abs=1e-10 * size), name
    total = -inner(G, change)
    assert sum(out[name][k] for name in COLUMNS) == pytest.approx(total, abs=1e-7 * size)
    assert out["predicted"][k] == pytest.approx(total, abs=1e-7 * size)
    assert out["check_rel_err"][k] < 1e-12
  assert out["predicted"].shape == (three.run.num_sets,)


def test_documents_have_the_scores_of_documents_alone(three):
  out, facts = three.out, three.facts
  shape = (tiny.ROWS, tiny.SEGMENTS)
  tokens, losses = np.zeros(shape), np.zeros(shape)
  dot, contribution = np.zeros((*shape, three.run.num_sets)), np.zeros((*shape, three.run.num_sets))
  scale = out["learning_rate"] * out["clip_factor"]
  for k in range(three.run.num_sets):
    scored = {label: facts.gradients[label] for label in three.scored}
    sums = sum(oracles.dots(scored, three.direction(k)).values())
    for d, (row, segment) in enumerate(facts.documents):
      count = facts.tokens[d]
      tokens[row, segment - 1] = count
      losses[row, segment - 1] = facts.losses[0][d] / max(count, 1)
      dot[row, segment - 1, k] = sums[d] / max(count, 1)
      contribution[row, segment - 1, k] = scale * sums[d] / facts.tokens.sum()
  np.testing.assert_array_equal(out["tokens_BS"], tokens)
  assert out["tokens_BS"].dtype == np.int32
  assert oracles.relative_error(out["loss_BS"], losses) < 1e-12
  assert oracles.relative_error(out["score_dot_BSK"], dot) < 1e-11
  assert oracles.relative_error(out["contribution_BSK"], contribution) < 1e-11


def test_contributions_sum_to_predicted_examples(three):
  size = np.abs(three.out["contribution_BSK"]).sum()
  np.testing.assert_allclose(
    three.out["contribution_BSK"].sum((0, 1)), three.out["predicted_examples"], rtol=0, atol=1e-13 * size
  )


def test_contributions_by_parameter_sum_to_the_documents(three):
  detail = three.cfg.ghost.ghost_detail
  if detail == "total":
    assert "param_contribution" not in three.out
    return
  parts = three.out["param_contribution"]
  assert set(parts) == set(three.scored)
  for label, value in parts.items():
    layers = 3 if detail == "layer" and "/layers/" in label else 1
    assert value.shape == (layers, tiny.ROWS, tiny.SEGMENTS, three.run.num_sets), label
  assert oracles.relative_error(sum(v.sum(0) for v in parts.values()), three.out["contribution_BSK"]) < 1e-12
  scale = three.out["learning_rate"] * three.out["clip_factor"] / three.facts.tokens.sum()
  for label in ("decoder/layers/mlp/wo/kernel", "token_embedder/embedding"):
    expected = oracles.dots({label: three.facts.gradients[label]}, three.direction(0), stacked=3)[label] * scale
    for d, (row, segment) in enumerate(three.facts.documents):
      actual = parts[label][:, row, segment - 1, 0]
      wanted = np.atleast_2d(expected)[:, d] if detail == "layer" else [np.atleast_2d(expected)[:, d].sum()]
      np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_the_prediction_is_the_drop_of_the_loss_where_the_rate_is_tiny(three):
  """Sign and scale of the whole account: the loss of the same rows at the next step."""
  if three.cfg.optimizer.learning_rate > 1e-4:
    pytest.skip("the rate is not tiny")
  for now, then in itertools.pairwise(three.outputs):
    drop = now["val_loss"][0] - then["val_loss"][0]
    assert abs(drop) > 1e-7
    assert now["predicted"][0] == pytest.approx(drop, rel=1e-3)


EXACT = {"matmul_precision": "highest", "logits_via_embedding": True, "use_qk_clip": True}
EXACT |= {"num_experts": 3, "num_experts_per_tok": 2, "mlp_bias": True}
PRODUCTS = {
  "token": {"ghost_detail": "token", "ghost_direction": "marginal", "dtype": "bfloat16"},
  "greats": {"ghost_select": "greats", "dtype": "bfloat16"},
  "model": EXACT,
}
LATER = {
  "factors": {"ghost_rank": 3, "logits_via_embedding": True, "dtype": "bfloat16"},
  "model_factors": EXACT | {"ghost_rank": 3, "num_vocab_tiling": 2},
  "all_experts": EXACT | {"sparse_matmul": False},
}
PRODUCTS |= {name: pytest.param(changes, marks=pytest.mark.slow) for name, changes in LATER.items()}


@pytest.mark.parametrize("changes", PRODUCTS.values(), ids=PRODUCTS)
def test_no_device_rounds_the_operands_of_a_product_unasked(changes):
  """It is for the model, by its keys: not for products of gradients and scores, which are float32 if the model computes
  in bfloat16."""
  run = Run(base_num_decoder_layers=1, num_sets=2, **changes)
  jaxpr = jax.make_jaxpr(run.function)(run.state, TRAIN[0], (VALIDATION, OTHER_VALIDATION))
  assert not tiny.rounded_products(jaxpr)


def dense(rngs):
  return nnx.LinearGeneral(5, 3, rngs=rngs)


def table(rngs):
  return nnx.Embed(5, 3, rngs=rngs)


@pytest.mark.parametrize(
  ("layer", "changes"), [(dense, {}), pytest.param(table, {"ghost_direction": "sgd"}, marks=pytest.mark.slow)]
)
def test_the_self_check_notices_a_broken_rule(layer, changes, monkeypatch):
  """5 percent too much for one kind of layer; whole, the check stays below 1e-5 (above)."""
  rule = type(rules.find(layer(nnx.Rngs(0))))
  right = rule.score
  monkeypatch.setattr(rule, "score", lambda self, *args: 1.05 * right(self, *args))
  run = Run(base_num_decoder_layers=1, remat_policy="none", ghost_exclude=("*self_attention*", "*norm*"), **changes)
  assert run.step(TRAIN[0])["check_rel_err"][0] > 1e-4


def test_evaluation_sums_the_loss_without_z_loss_and_validation_loss_has_it():
  cfg = tiny.make_config(z_loss_multiplier=0.1, dropout_rate=0.5, **TRAINING)
  model = tiny.make_model(cfg)
  tx = optimizers.make_optimizer(cfg.optimizer, cfg.run.steps)
  graphdef, state = nnx.split(TrainStateNNX(model, tx, trainable=trainable(cfg, model)))
  logits = oracles.reference_logits(
    tiny.by_label(model), cfg.model, *(VALIDATION[f"inputs{name}"] for name in ("", "_position", "_segmentation"))
  )
  logits = np.nan_to_num(logits)
  normalizer = np.log(np.exp(logits).sum(-1))
  losses = normalizer - np.take_along_axis(logits, VALIDATION["targets"][..., None], -1)[..., 0]
  counts = VALIDATION["targets_segmentation"] != 0
  with tiny.cheap_compilation():
    total, tokens = jax.jit(step.make_eval_step(cfg, graphdef))(state, VALIDATION)
    means = jax.jit(step.make_closing(cfg, graphdef))(state, (VALIDATION,))["prev_val_loss"]
  assert int(tokens) == counts.sum()
  assert float(total) == pytest.approx(losses[counts].sum(), rel=1e-6)
  assert means.shape == (1,)
  assert float(means[0]) == pytest.approx((losses + 0.1 * normalizer**2)[counts].mean(), rel=1e-6)


def test_a_state_without_an_optimizer_says_so():
  train_state = TrainStateNNX(tiny.make_model(tiny.make_config()))
  with pytest.raises(RuntimeError, match="without an optimizer"):
    train_state.apply_gradients(jax.tree.map(jnp.zeros_like, nnx.state(train_state.model, nnx.Param)))
