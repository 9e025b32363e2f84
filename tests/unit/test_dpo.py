"""Preference losses against formulas written here, pair by pair, and their scores against `vmap(grad)` of each pair.

P pairs, B = 2 U rows, T positions, S segments of a row, K validation sets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx
from train_steps import REFERENCE_SEED, Run

from maxghost import adapters, config, objectives
from maxghost.config import ConfigError
from maxghost.data.types import Batch
from maxghost.models import autodiff
from maxghost.parallel.shardings import Layout
from maxghost.training import compiled_steps, metrics
from maxghost.training.plan import Plan

S, V = tiny.SEGMENTS, tiny.VOCAB
# Chosen and rejected rows in turn, with the same number of segments; the last two are empty. No target of row 5's last
# segment counts (`tiny.make_batch`), so the second segments of rows 4 and 5 are no pair.
ROWS = ((4, 5, 3), (2, 6, 4), (13,), (9,), (3, 7), (8, 2), (), ())
PAIRS = [(0, 1), (0, 2), (0, 3), (2, 1), (4, 1)]  # (row of the chosen response, segment)
SIZES = {"objective": "dpo", "per_device_batch_size": len(ROWS), "ghost_val_batch_size": 4, "max_segments_per_seq": S}
LORA = {"lora_rank": 3, "lora_alpha": 5.0, "adam_weight_decay": 0.0}
KEYS = {"dpo_beta": 0.7, "orpo_lambda": 0.6, "simpo_gamma": 0.3}


def preferences(rows, seed: int) -> dict:
  """A batch with a weight of 0 for the first target of each segment, as for a prompt."""
  batch = tiny.make_batch(rows, seed=seed, mask=0.0)
  counts = (batch["targets_segmentation"] > 0) & (batch["targets_position"] > 0)
  return batch | {"targets_weights": counts.astype(np.float32)}


TRAIN = preferences(ROWS, 400)
VALIDATION = preferences(((6, 5), (3, 9), (7,), (12,)), 401)
VAL_PAIRS = [(0, 1), (0, 2), (2, 1)]


def pair_loss(cfg, policy, reference, counts):
  """The loss of one pair. policy, reference, counts: of (chosen, rejected), summed log-probabilities and tokens."""
  keys, algo = cfg.optimizer, cfg.optimizer.dpo_algo
  beta, smoothing = keys.dpo_beta, keys.dpo_label_smoothing
  mean = [p / n for p, n in zip(policy, counts, strict=True)]
  log_ratio = [p - r for p, r in zip(policy, reference, strict=True)]
  softplus = lambda z: jnp.logaddexp(z, 0.0)  # noqa: E731
  z = beta * (log_ratio[0] - log_ratio[1])
  if algo == "sigmoid":
    return (1 - smoothing) * softplus(-z) + smoothing * softplus(z)
  if algo == "robust":
    return ((1 - smoothing) * softplus(-z) - smoothing * softplus(z)) / (1 - 2 * smoothing)
  if algo == "hinge":
    return jnp.maximum(0, 1 - z)
  if algo == "ipo":
    return (log_ratio[0] / counts[0] - log_ratio[1] / counts[1] - 0.5 / beta) ** 2
  if algo == "simpo":
    return softplus(keys.simpo_gamma - beta * (mean[0] - mean[1]))
  odds = [jnp.exp(m) / (1 - jnp.exp(m)) for m in mean]
  return -mean[0] + keys.orpo_lambda * softplus(-jnp.log(odds[0] / odds[1]))


def alone(batch: dict, pairs) -> dict:
  """Each pair as two rows of its own: arrays [P, 2, T]."""
  return tiny.stack_rows([tiny.stack_rows([tiny.alone(batch, r + i, s) for i in (0, 1)]) for r, s in pairs])


class Rows:
  """The rows of each pair, [P, 2]: log-probabilities of a model and of its reference, tokens, the model's gradients."""

  def __init__(self, model, reference, pairs: dict, trained):
    graphdef, params, rest = nnx.split(model, trained, ...)

    def logp(model, row):
      row = {name: v[None] for name, v in row.items()}
      logits = model(row["inputs"], row["inputs_position"], row["inputs_segmentation"]).astype(float)
      own = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), row["targets"][0][:, None], -1)[:, 0]
      return jnp.sum(own * row["targets_weights"][0])

    def of_row(params, row):
      value, grads = jax.value_and_grad(lambda p: logp(nnx.merge(graphdef, p, rest), row))(params)
      return value, logp(reference, row), jax.tree.leaves(grads)

    with tiny.cheap_compilation():
      found = jax.jit(jax.vmap(jax.vmap(of_row, (None, 0)), (None, 0)))(params, pairs)
    self.logps, self.known, self.grads = jax.tree.map(np.asarray, found)
    self.tokens = pairs["targets_weights"].sum(-1)

  def part(self, which: slice) -> tuple:
    return self.logps[which], self.known[which], self.tokens[which], [g[which] for g in self.grads]


@functools.cache
def rows_of(with_adapters: bool) -> tuple:
  """`Rows.part` of the training pairs and of the validation pairs, in float64. A loss reads nothing else of a model."""
  with jax.enable_x64(True):
    cfg = tiny.make_config(dtype="float64", weight_dtype="float64", **SIZES, **(LORA if with_adapters else {}))
    model = tiny.make_model(cfg)
    reference = adapters.disabled(model) if with_adapters else tiny.make_model(cfg, seed=REFERENCE_SEED)
    both = [alone(TRAIN, PAIRS), alone(VALIDATION, VAL_PAIRS)]
    rows = {name: np.concatenate([part[name] for part in both]) for name in both[0]}
    found = Rows(model, reference, rows, nnx.LoRAParam if with_adapters else nnx.Param)
  return found.part(slice(len(PAIRS))), found.part(slice(len(PAIRS), None))


class Oracle:
  """Losses [P], log-probabilities [P, 2], and the gradients of a pair's loss through each of its rows, [P, 2, ...].

  loss: of (policy, reference, counts), as `pair_loss`; the chain rule leads from it to each row's log-probability.
  """

  def __init__(self, cfg, loss, logps, known, tokens, grads):
    with tiny.cheap_compilation():
      slope = jax.jit(jax.vmap(jax.value_and_grad(lambda policy, *given: loss(cfg, policy, *given))))
      self.losses, slopes = map(np.asarray, slope(logps, known, tokens))
    self.logps, self.known = logps, known
    self.grads = [[np.einsum("p,p...->p...", slopes[:, i], g[:, i]) for g in grads] for i in (0, 1)]

  def along(self, direction: list) -> np.ndarray:
    """[P, 2]: <gradient through each row, direction>."""
    dots = [[g.reshape(len(g), -1) @ u.ravel() for g, u in zip(side, direction, strict=True)] for side in self.grads]
    return np.stack([np.sum(side, 0) for side in dots], 1)

  @property
  def mean(self) -> list:
    """The gradient of the mean loss."""
    return [(chosen + rejected).mean(0) for chosen, rejected in zip(*self.grads, strict=True)]


def run_of(dtype: str, **changes) -> Run:
  return Run(batch=TRAIN, opt_type="sgd", dtype=dtype, weight_dtype=dtype, **(SIZES | KEYS | changes))


@pytest.mark.parametrize(
  ("algo", "schedule", "dtype", "more"),
  [
    ("sigmoid", "two_pass", "float64", {"dpo_label_smoothing": 0.2}),
    ("ipo", "reverse_scan", "float32", {"num_vocab_tiling": 3, "vocab_tiling_axis": "vocab"}),
    ("orpo", "forward_mode", "float64", {}),
    ("sigmoid", "two_pass", "float64", LORA),
    pytest.param("ipo", "reverse_scan", "float32", LORA | {"segment_lengths": (1,)}, marks=pytest.mark.slow),
    pytest.param("robust", "two_pass", "float32", {"dpo_label_smoothing": 0.2}, marks=pytest.mark.slow),
    pytest.param("hinge", "reverse_scan", "float64", {}, marks=pytest.mark.slow),
    pytest.param("simpo", "two_pass", "float64", {"num_vocab_tiling": 4}, marks=pytest.mark.slow),
    pytest.param("sigmoid", "forward_mode", "float32", {"num_vocab_tiling": 2}, marks=pytest.mark.slow),
    pytest.param("orpo", "reverse_scan", "float64", {"segment_lengths": (1,)}, marks=pytest.mark.slow),
  ],
)
def test_scores_of_pairs_and_of_their_parts(algo, schedule, dtype, more):
  """Loss, metrics, gradients and scores against three validation sets with objectives of their own."""
  sets = ("a=words", "b=words@margin", "c=x/*.jsonl@next_token")
  run = run_of(dtype, dpo_algo=algo, ghost_schedule=schedule, ghost_val_sets=sets, num_sets=3, **more)
  cfg, tolerance = run.cfg, {"float32": 1e-5, "float64": 1e-12}[dtype]
  assert (cfg.reference == "base") == bool(cfg.adapter.lora_rank)
  with jax.enable_x64(True):
    rows, val_rows = rows_of(bool(cfg.adapter.lora_rank))
    train = Oracle(cfg, pair_loss, *rows)
    own, margin, mean = (
      Oracle(cfg, loss, *val_rows)
      for loss in (
        pair_loss,
        lambda _, policy, *__: policy[1] - policy[0],
        lambda _, policy, *__: -(policy[0] + policy[1]) * len(VAL_PAIRS) / VALIDATION["targets_weights"].sum(),
      )
    )
  out = run.step(TRAIN, (VALIDATION,) * 3)
  assert out["loss"] == pytest.approx(train.losses.mean(), rel=tolerance)
  np.testing.assert_allclose(out["val_loss"], [x.losses.mean() for x in (own, margin, mean)], rtol=tolerance)
  part_PK2 = np.stack([train.along(x.mean) for x in (own, margin, mean)], 1) / len(PAIRS)
  scale = out["learning_rate"] * out["clip_factor"]
  for part in (0, 1):
    found_PK = np.stack([out["contribution_BSK"][r + part, s - 1] for r, s in PAIRS])
    assert oracles.relative_error(found_PK, scale * part_PK2[..., part]) < tolerance
  share_P = np.array([out["share_BS"][r : r + 2, s - 1].sum() for r, s in PAIRS])
  np.testing.assert_allclose(share_P, 1 / len(PAIRS), rtol=1e-6)
  assert out["share_BS"].sum() == pytest.approx(1, rel=1e-6)
  assert np.abs(out["contribution_BSK"][6:]).max() == np.abs(out["contribution_BSK"][4:, 1:]).max() == 0
  np.testing.assert_allclose(out["predicted"], out["contribution_BSK"].sum((0, 1)), rtol=1e-4, atol=1e-9)
  check_metrics(cfg, out, train, tolerance)
  assert_reference_is_as_it_was(run)


def check_metrics(cfg, out, train, tolerance) -> None:
  own, free = TRAIN["targets_segmentation"], cfg.optimizer.dpo_algo in ("simpo", "orpo")
  logps, beta = train.logps, cfg.optimizer.dpo_beta
  if free:
    sizes = [[TRAIN["targets_weights"][r + i, own[r + i] == s].sum() for i in (0, 1)] for r, s in PAIRS]
    logps = logps / np.array(sizes)
    beta = cfg.optimizer.orpo_lambda if cfg.optimizer.dpo_algo == "orpo" else beta
  reward = beta * (logps - (0 if free else train.known))
  wanted = {
    "rewards/chosen": reward[:, 0], "rewards/rejected": reward[:, 1], "rewards/margins": reward[:, 0] - reward[:, 1],
    "rewards/accuracies": reward[:, 0] > reward[:, 1], "logps/chosen": logps[:, 0], "logps/rejected": logps[:, 1],
  }  # fmt: skip
  for name, value in wanted.items():
    assert out[name] == pytest.approx(value.mean(), rel=10 * tolerance, abs=tolerance), name


def assert_reference_is_as_it_was(run: Run) -> None:
  """Bit by bit, and not the policy, which has moved."""
  train_state = nnx.merge(run.graphdef, run.state)
  assert (train_state.reference_model is None) == (run.cfg.reference != "start")
  if train_state.reference_model is None:
    return
  with jax.enable_x64(run.wide):
    before = tiny.by_label(tiny.make_model(run.cfg, seed=REFERENCE_SEED))
  for label, value in tiny.by_label(train_state.reference_model).items():
    np.testing.assert_array_equal(value, before[label], err_msg=label)


def test_a_policy_that_is_its_reference_has_loss_log_2():
  """And accuracy 0, since no pair is preferred, and the same with the log-probabilities computed beforehand."""
  cfg = tiny.make_config(**SIZES)
  loss, model = objectives.create(cfg), tiny.make_model(cfg)
  graphdef, state = nnx.split(model)

  @jax.jit
  def measured(state, batch):
    model = nnx.merge(graphdef, state)
    batch = loss.from_reference(model, batch)
    known = batch["reference_logps"]
    losses, weights, metrics = loss.measured(model, batch | {"reference_logps": known})
    return (losses * weights).sum() / weights.sum(), weights.sum(), metrics, known

  with tiny.cheap_compilation():
    value, num_pairs, metrics, known = measured(state, TRAIN)
  assert float(value) == pytest.approx(np.log(2), rel=1e-6)
  assert float(num_pairs) == pytest.approx(len(PAIRS), rel=1e-6)
  assert metrics["rewards/accuracies"] == 0
  assert loss.from_reference(None, TRAIN | {"reference_logps": known})["reference_logps"] is known


def test_rows_that_are_no_pairs_are_refused():
  loss, ids = objectives.create(tiny.make_config(**SIZES)), np.array([[3, 0, -1], [3, 0, -1], [4, -1, -1], [4, -1, -1]])
  arrays = {"targets": np.zeros((4, 9), np.int32)}
  batch = loss.prepare(Batch(arrays, ids, np.zeros_like(ids), np.zeros(4, np.int64)))
  np.testing.assert_array_equal(batch.unit_BS, [[0, 1, -1], [0, 1, -1], [3, -1, -1], [3, -1, -1]])
  assert batch.arrays["targets_weights"].min() == 1
  with pytest.raises(ValueError, match="chosen and rejected responses of the same pairs"):
    loss.prepare(Batch(arrays, ids[::-1][[0, 2, 1, 3]], np.zeros_like(ids), np.zeros(4, np.int64)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"ghost_schedule": "concat"}, r"objective=dpo.*ghost_schedule=concat.*two_pass"),
    ({"per_device_batch_size": 7}, r"objective=dpo .*per_device_batch_size=7 .*use per_device_batch_size=8"),
    ({"z_loss_multiplier": 1e-4}, r"z_loss_multiplier=0.0001 .*log-probabilities.*z_loss_multiplier=0.0"),
    ({"dpo_algo": "hinge", "dpo_label_smoothing": 0.1}, r"dpo_label_smoothing=0.1 .*dpo_algo=hinge; use 0.0"),
    ({"train_data_columns": ("ref_chosen_logps",)}, r"has ref_chosen_logps alone"),
    ({"load_full_state_path": "runs/a"}, r"load_full_state_path .*reference.*dpo_algo=simpo"),
    ({"objective": "margin"}, r"objective=margin .*validation sets alone"),
    ({"ghost_val_sets": ("words@ppo",)}, r"ghost_val_sets=\S* asks for the objective ppo"),
    (
      {"objective": "next_token", "ghost_schedule": "concat", "ghost_val_sets": ("m=m/*.jsonl@margin",)},
      r"objective margin works with two_pass",
    ),
    (
      {"objective": "next_token", "ghost_val_batch_size": 3, "ghost_val_sets": ("m=m/*.jsonl@margin",)},
      r"use ghost_val_batch_size=4",
    ),
  ],
)
def test_what_does_not_go_together_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    tiny.make_config(**(SIZES | changes))


def test_the_margin_compares_without_a_reference():
  cfg = tiny.make_config(**SIZES, ghost_val_sets=("words", "m=words@margin"))
  assert cfg.reference == "start"
  assert cfg.val_objectives == ("dpo", "margin")
  assert config.replace(cfg, dpo_algo="simpo").reference == ""
  plain = tiny.make_config(ghost_val_sets=("words", "m=pairs/*.jsonl@margin"))
  assert plain.reference == "" and plain.data.validation_sets == {"words": "words", "m": "m"}
  assert plain.data.validation_files("text") == {"pairs": ("m=pairs/*.jsonl",)}


def test_an_evaluation_reads_whole_pairs():
  """Though a batch of the run, whose rows are single ones, would part a pair."""
  sets = ("m=m/*.jsonl@margin", "words")
  cfg = tiny.make_config(per_device_batch_size=3, ghost_val_sets=sets, ghost_enabled=False)
  with tiny.cheap_compilation():
    program = compiled_steps.build(Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:1])))
    assert cfg.eval_rows == 4 and program.executable("evaluate")
  assert config.replace(cfg, ghost_val_sets=sets[::-1]).eval_rows == 3


def test_micro_batches_hold_whole_pairs():
  """Of unequal numbers; the step, its scores and its metrics are those of the whole batch."""
  changes = SIZES | KEYS | {"dtype": "float64", "weight_dtype": "float64", "gradient_clipping_threshold": 0.0}
  whole, parts = (
    Run(**(changes | {"per_device_batch_size": 8 // count}), gradient_accumulation_steps=count, batch=TRAIN)
    for count in (1, 2)
  )
  expected, out = (run.step(TRAIN, (VALIDATION,)) for run in (whole, parts))
  for name in ("loss", "grad_norm", "contribution_BSK", "share_BS", "rewards/margins", "logps/rejected", "loss_BS"):
    assert oracles.relative_error(out[name], expected[name]) < 1e-11, name
  assert np.abs(out["contribution_BSK"][[1, 2, 4]]).max() > 0
  before, after = (run.snapshot().params for run in (whole, parts))
  assert all(oracles.relative_error(after[label], before[label]) < 1e-12 for label in before)


def test_what_is_logged_of_experts_has_the_weights_of_pairs():
  """lm_loss is the loss without the balance, and the load that of all tokens, with micro-batches too."""
  experts = routed.MIXTRAL | {"base_num_decoder_layers": 1, "ghost_enabled": False, "remat_policy": "none"}
  plain, whole, parts = (
    Run(**(SIZES | KEYS | experts | {"per_device_batch_size": 8 // count}), gradient_accumulation_steps=count,
        load_balance_loss_weight=weight, batch=TRAIN).step(TRAIN)
    for count, weight in ((1, 0.0), (1, 0.5), (2, 0.5))
  )  # fmt: skip
  load = metrics.learning_metrics(plain)["moe/expert_load"]
  assert sum(load) == pytest.approx(1)
  for out in (whole, parts):
    assert out["lm_loss"] == pytest.approx(plain["loss"], rel=1e-5) and out["loss"] > 1.5 * plain["loss"]
    assert metrics.learning_metrics(out)["moe/expert_load"] == pytest.approx(load, rel=1e-5)


def test_forward_mode_has_each_part_at_its_own_tokens():
  """The derivative of a pair's loss is the same; it is spread over the tokens that it comes from."""
  cfg = tiny.make_config(**SIZES, **KEYS)
  loss, (graphdef, state) = objectives.create(cfg), nnx.split(tiny.make_model(cfg))
  known = {"reference_logps": np.linspace(-60, -40, len(ROWS) * S).reshape(-1, S).astype(np.float32)}

  def weighted(state):
    losses, weights = loss(nnx.merge(graphdef, state), TRAIN | known)
    return losses * weights

  with tiny.cheap_compilation():
    tangent = jax.tree.map(jnp.ones_like, state)
    plain, grads = jax.jit(jax.value_and_grad(lambda s: weighted(s).sum()))(state)
    along = sum(float(g.sum()) for g in jax.tree.leaves(grads))
    with autodiff.forward_mode():
      value_BT, along_BT = map(np.asarray, jax.jit(lambda s: jax.jvp(weighted, (s,), (tangent,)))(state))
  assert value_BT.sum() == pytest.approx(float(plain), rel=1e-6)
  assert along_BT.sum() == pytest.approx(along, rel=1e-4)
  assert np.ptp(along_BT[0, TRAIN["targets_weights"][0] > 0]) > 0
  assert (np.asarray(along_BT)[TRAIN["targets_weights"] == 0] == 0).all()
