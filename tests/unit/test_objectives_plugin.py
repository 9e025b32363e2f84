"""An objective that is defined here alone: it trains, is scored exactly, is logged, resumed, and refused by name.

Its unit is a pair of adjacent rows, and its loss the mean over the pairs of each pair's weighted mean, with float
weights that the host gives. U pairs, B = 2 U rows, T positions, S segments of a row, V vocabulary.
"""

import dataclasses
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import run_copies
import tiny
from flax import nnx
from train_steps import Run

from maxghost import config, objectives, scorelog, train
from maxghost.config import ConfigError, plugins
from maxghost.data.types import Batch
from maxghost.ghost.schedules.reverse_scan import walk
from maxghost.objectives import LanguageModelLoss
from maxghost.parallel.shardings import Layout
from maxghost.training import compiled_steps, own_objective
from maxghost.training.plan import Plan
from maxghost.training.score_recorder import scored_rows

NAME = "pair_mean"


class PairMean(LanguageModelLoss):
  """Mean over pairs of rows of the weighted mean of their tokens."""

  name = NAME
  schedules = ("two_pass", "reverse_scan")
  rows_per_unit = 2

  def batch_spec(self, num_rows, length):
    shape = jax.ShapeDtypeStruct((num_rows, length), np.float32)
    return super().batch_spec(num_rows, length) | {"targets_weights": shape}

  def prepare(self, batch: Batch) -> Batch:
    numbers = np.arange(len(batch.document_BS))[:, None] // 2
    return dataclasses.replace(
      batch,
      arrays=with_weights(batch.arrays),
      unit_BS=np.where(batch.document_BS >= 0, numbers, -1),
    )

  def weights(self, batch):
    weights_BT = super().weights(batch).astype(float)
    sums_U = weights_BT.reshape(len(weights_BT) // 2, -1).sum(-1)
    return weights_BT / jnp.repeat(jnp.where(sums_U > 0, sums_U, 1), 2)[:, None]

  def shares(self, batch, weights_BS):
    """Each pair one part of all; between its slots by their weights, which add up to 1."""
    pairs = jnp.maximum(weights_BS.reshape(len(weights_BS) // 2, -1).any(-1).sum(), 1)
    return weights_BS / pairs


@pytest.fixture(autouse=True)
def registered():
  """The objective's line in the table, for the tests of this file alone."""
  objectives.register(PairMean)
  yield
  del plugins.OBJECTIVES[NAME]


def with_weights(arrays: dict) -> dict:
  """A batch's arrays with weights 0.25, 0.75 and 1.25 by token; 0 for the first two of a segment, as for a prompt."""
  weights_BT = 0.25 + 0.5 * (arrays["targets"] % 3)
  weights_BT = np.where((arrays["targets_position"] < 2) | (arrays["targets_segmentation"] == 0), 0, weights_BT)
  return dict(arrays) | {"targets_weights": weights_BT.astype(np.float32)}


ROWS = (*tiny.PACKED[:4], tiny.PACKED[5], tiny.PACKED[4])  # the last row of the last pair is empty
TRAIN = [with_weights(tiny.make_batch(ROWS, seed=300 + i)) for i in range(2)]
VALIDATION = with_weights(tiny.make_batch(tiny.VALIDATION[:4], seed=310))
U, S, V = 3, tiny.SEGMENTS, tiny.VOCAB


def unit_losses(model, batch):
  """[U] of each pair, without the project's loss, and the gradient of each by `vmap`; `batch`: arrays [U, 2, T]."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def loss(params, pair):
    model = nnx.merge(graphdef, params, rest)
    logits = model(pair["inputs"], pair["inputs_position"], pair["inputs_segmentation"]).astype(float)
    losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * jax.nn.one_hot(pair["targets"], V), -1)
    weights = pair["targets_weights"].astype(float)
    return (losses * weights).sum() / weights.sum()

  pairs = {name: x.reshape(-1, 2, *x.shape[1:]) for name, x in batch.items()}
  return jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, pairs)


def facts(model):
  """(losses [U], <gradient of each pair, validation gradient> [U], validation loss) in float64."""
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, jax.tree.map(lambda x: np.asarray(x, float), state))
    losses, grads = unit_losses(model, {name: np.concatenate([x, VALIDATION[name]]) for name, x in TRAIN[0].items()})
  losses, grads = np.asarray(losses), [np.asarray(g) for g in jax.tree.leaves(grads)]
  dots = sum(g[:U].reshape(U, -1) @ g[U:].mean(0).ravel() for g in grads)
  return losses[:U], dots, losses[U:].mean()


@pytest.mark.parametrize(
  ("schedule", "dtype"),
  [
    ("two_pass", "float64"), ("reverse_scan", "float32"), pytest.param("two_pass", "float32", marks=pytest.mark.slow),
    pytest.param("reverse_scan", "float64", marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_scores_of_units_are_exact(schedule, dtype):
  tolerance = {"float32": 2e-5, "float64": 1e-10}[dtype]
  changes = {"dtype": dtype, "weight_dtype": dtype, "opt_type": "sgd", "ghost_schedule": schedule, "objective": NAME}
  run = Run(batch=TRAIN[0], per_device_batch_size=6, ghost_val_batch_size=4, **changes)
  with jax.enable_x64(True):
    losses_U, dots_U, val_loss = facts(nnx.merge(run.graphdef, run.state).model)
  out = run.step(TRAIN[0], (VALIDATION,))
  assert out["loss"] == pytest.approx(losses_U.mean(), rel=1e-6)
  assert out["val_loss"][0] == pytest.approx(val_loss, rel=1e-6)
  share_BS = out["share_BS"].astype(np.float64)
  np.testing.assert_allclose(share_BS.reshape(U, -1).sum(-1), np.full(U, 1 / 3), rtol=1e-6)
  assert (out["tokens_BS"] == tokens_of(TRAIN[0])).all()
  zeros_BS = np.zeros(share_BS.shape, np.int64)
  rows, _ = scored_rows(out, PairMean().prepare(Batch(TRAIN[0], zeros_BS, zeros_BS, zeros_BS[:, 0])))
  np.testing.assert_allclose(rows["loss"], losses_U, rtol=1e-5)
  score_U = (out["score_dot_BSK"][..., 0] * share_BS).reshape(U, -1).sum(-1)
  assert oracles.relative_error(score_U * 3, dots_U) < tolerance
  contribution_U = out["contribution_BSK"][..., 0].reshape(U, -1).sum(-1)
  scale = out["learning_rate"] * out["clip_factor"]
  assert oracles.relative_error(contribution_U, scale * dots_U / 3) < max(tolerance, 1e-6)
  assert out["predicted_examples"][0] == pytest.approx(contribution_U.sum(), rel=1e-4)


def tokens_of(batch):
  counted = batch["targets_weights"] > 0
  return np.stack([(counted & (batch["targets_segmentation"] == s)).sum(1) for s in range(1, S + 1)], 1)


def test_weights_of_a_document_reach_the_batch_and_the_loss():
  """The default objective: a weight scales its token; weights of 1 change nothing."""
  cfg = tiny.make_config()
  (graphdef, state), batch = nnx.split(tiny.make_model(cfg)), tiny.make_batch(tiny.PACKED, seed=3)
  loss = jax.jit(lambda state, batch: objectives.create(cfg)(nnx.merge(graphdef, state), batch))
  with tiny.cheap_compilation():
    plain, counts = loss(state, batch)
    ones, same = loss(state, batch | {"targets_weights": np.ones(counts.shape, np.float32)})
    _, weights = loss(state, batch | {"targets_weights": np.full(counts.shape, 0.3, np.float32)})
  np.testing.assert_array_equal(plain, ones)
  np.testing.assert_array_equal(counts, same)
  np.testing.assert_array_equal(weights, np.float32(0.3) * counts)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"ghost_schedule": "concat"}, r"objective=pair_mean.*ghost_schedule=concat.*two_pass"),
    ({"per_device_batch_size": 7}, r"objective=pair_mean .*per_device_batch_size=7 .*use per_device_batch_size=8"),
    ({"ghost_val_batch_size": 3}, r"objective=pair_mean .*ghost_val_batch_size=3 .*use ghost_val_batch_size=4"),
    ({"ghost_select": "topk"}, r"objective=pair_mean .*ghost_select=topk chooses single rows; use ghost_select=none"),
  ],
)
def test_what_does_not_go_together_is_refused_by_name(changes, message):
  sound = {"objective": NAME, "per_device_batch_size": 6, "ghost_val_batch_size": 4}
  with pytest.raises(ConfigError, match=message):
    tiny.make_config(**(sound | changes))


def test_an_unknown_objective_names_the_nearest():
  with pytest.raises(ConfigError, match=r"objective=pair_meen.*pair_mean"):
    config.load(None, "objective=pair_meen")


@pytest.mark.parametrize("name", ["head", "__call__"])
def test_a_loss_that_no_step_reads_is_refused(name):
  with pytest.raises(TypeError, match=f"Focal defines {name}, which no step reads; define measured_head"):
    type("Focal", (LanguageModelLoss,), {name: lambda self, *given: None})
  both = {name: lambda self, *given: None, "measured_head": lambda self, *given: None}
  assert type("Focal", (LanguageModelLoss,), both)().measured_head(None, None, None) is None


class Tripled(LanguageModelLoss):
  def embed(self, model, batch):
    hidden = super().embed(model, batch)
    return dataclasses.replace(hidden, x_BTD=3 * hidden.x_BTD)


def test_a_stage_is_that_of_every_schedule():
  """`measured`, which two_pass and evaluations read, runs the stages that reverse_scan runs."""
  model = tiny.make_model(tiny.make_config(scan_layers=True))
  found, _ = Tripled()(model, TRAIN[0])
  model.token_embedder.embedding[...] *= 3
  expected, weights = LanguageModelLoss()(model, TRAIN[0])
  np.testing.assert_allclose(found * weights, expected * weights, rtol=1e-5)


class Doubled(LanguageModelLoss):
  def measured(self, model, batch):
    losses, *rest = super().measured(model, batch)
    return 2 * losses, *rest


def test_a_loss_that_reverse_scan_does_not_read_is_refused():
  problem = types.SimpleNamespace(loss=LanguageModelLoss(), val_losses=(Doubled(),), batch=None, state=None)
  with pytest.raises(
    ValueError, match=r"Doubled defines measured, .*; define measured_head in its place, or use two_p"
  ):
    walk.run(problem)


class Odd(PairMean):
  """One weight for each row, or a metric that has the name of the step's loss."""

  metric = ""

  def measured_head(self, model, x, batch):
    losses, weights, metrics = super().measured_head(model, x, batch)
    return (
      (losses, weights, metrics | {self.metric: losses.sum()}) if self.metric else (losses, weights[:, :1], metrics)
    )


@pytest.mark.parametrize(
  ("metric", "said"),
  [
    ("", r"returns \(6, 13\), \(6, 1\), dict; return"),
    ("loss", "metric loss has the name of a step's"),
    ("val_loss", "metric val_loss has the name of a step's"),
    ("diloco/loss/0", "metric diloco/loss/0 has the name of a step's"),
  ],
)
def test_what_a_step_cannot_use_is_named(metric, said, monkeypatch):
  monkeypatch.setattr(Odd, "metric", metric)
  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(Odd))
  with pytest.raises(ValueError, match=said):
    Run(batch=TRAIN[0], objective=NAME, per_device_batch_size=6, ghost_enabled=False).step(TRAIN[0])


@pytest.mark.parametrize(
  ("wrong", "said"),
  [
    (
      lambda losses, weights, metrics: (losses, weights),
      r"returns \(6, 13\), \(6, 13\); return \(losses, weights,",
    ),
    (lambda losses, weights, metrics: None, "measured returns NoneType; return"),
    (
      lambda losses, weights, metrics: (losses.mean(1), weights.mean(1), metrics),
      r"returns \(6,\), \(6,\), dict; return",
    ),
    (lambda losses, weights, metrics: (losses.astype(int), weights, metrics), "losses of type int32"),
    (lambda losses, weights, metrics: (losses, weights, metrics | {"learning/loss": losses.sum()}), "name of a step's"),
    (lambda losses, weights, metrics: (losses, weights, metrics | {"own/x": losses}), "own/x is no array of shape"),
    (lambda losses, weights, metrics: (losses, weights, metrics | {"own/x": 1}), "own/x is no array of shape"),
    (lambda losses, weights, metrics: (losses, weights * jnp.exp(-losses), metrics), "weights depend on the model's p"),
  ],
)
def test_what_an_objective_returns_in_another_form_is_named(wrong, said, monkeypatch):
  class Wrong(PairMean):
    def measured_head(self, model, x, batch):
      return wrong(*super().measured_head(model, x, batch))

  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(Wrong))
  with pytest.raises(ConfigError, match=said):
    Run(batch=TRAIN[0], objective=NAME, per_device_batch_size=6, ghost_enabled=False).step(TRAIN[0])


@pytest.mark.parametrize(
  ("wrong", "said"),
  [
    ("pair", "objective: 'pair' is no class that extends Objective"),
    (dict, "is no class that extends Objective"),
    (type("Bare", (objectives.Objective,), {"name": "bare"}), "Bare needs __call__"),
    (type("Nameless", (LanguageModelLoss,), {"name": ""}), "Nameless needs a text as its name, not ''"),
    (
      type("One", (LanguageModelLoss,), {"name": "one", "schedules": "two_pass"}),
      "One.schedules is 'two_pass'; give a",
    ),
    (
      type("Two", (LanguageModelLoss,), {"name": "two", "schedules": ("twopass",)}),
      "a tuple of two_pass, reverse_scan",
    ),
    (type("Zero", (LanguageModelLoss,), {"name": "zero", "rows_per_unit": 0}), "Zero.rows_per_unit is 0; give the"),
    (type("Text", (LanguageModelLoss,), {"name": "text", "rows_per_unit": "2"}), "Text.rows_per_unit is '2'; give the"),
    (type("Kind", (LanguageModelLoss,), {"name": "kind", "records": "texts"}), "Kind.records is 'texts'; give one of"),
  ],
)
def test_what_is_no_whole_objective_is_not_registered(wrong, said):
  before = dict(plugins.OBJECTIVES)
  with pytest.raises(ValueError, match=said):
    objectives.register(wrong)
  assert before == plugins.OBJECTIVES


class PlainlyValidated(LanguageModelLoss):
  name = NAME

  def validation(self):
    return dataclasses.replace(super().validation(), z_loss_multiplier=0.5)


def test_concat_refuses_another_loss_for_validation_rows(monkeypatch):
  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(PlainlyValidated))
  keys = {"ghost_schedule": "concat", "ghost_val_batch_size": 6, "per_device_batch_size": 6, "ghost_direction": "sgd"}
  with pytest.raises(ValueError, match=r"one loss for all rows, but PlainlyValidated.validation gives another one"):
    Run(batch=TRAIN[0], objective=NAME, base_num_decoder_layers=1, **keys).step(TRAIN[0], (TRAIN[0],))


def test_an_objective_that_prepares_nothing_is_named():
  wrong = type("Wrong", (PairMean,), {"prepare": lambda self, batch: None})
  with pytest.raises(ConfigError, match=f"objective={NAME}: prepare returns None, not a Batch"):
    wrong().prepared(TRAIN[0])


def test_weights_that_are_nothing_are_named():
  wrong = type("Wrong", (PairMean,), {"weights": lambda self, batch: None})
  with pytest.raises(ConfigError, match=f"objective={NAME}: weights returns None, not an array"):
    wrong().measured_head(None, None, TRAIN[0])


def test_of_gives_an_objective(monkeypatch):
  nothing = type("Nothing", (LanguageModelLoss,), {"name": NAME, "of": classmethod(lambda cls, cfg: None)})
  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(nothing))
  with pytest.raises(ConfigError, match=f"objective={NAME}: of gives a NoneType, not an Objective"):
    objectives.create(name=NAME)


def test_a_name_is_taken_once():
  with pytest.raises(ValueError, match="objective=pair_mean is already"):
    objectives.register(type("Other", (LanguageModelLoss,), {"name": NAME}))


RUN = {
  "objective": NAME, "opt_type": "adamw", "per_device_batch_size": 2, "ghost_val_batch_size": 2,
  "max_target_length": 48, "ici_data_parallelism": 8, "ici_fsdp_parallelism": 1,
  "base_emb_dim": 20, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 6, "base_mlp_dim": 36,
  "base_num_decoder_layers": 2, "lr_schedule_type": "constant", "warmup_steps_fraction": 0.0, "eval_interval": -1,
  "steps": 4, "checkpoint_period": 2, "max_num_checkpoints_to_keep": 0, "async_checkpointing": False,
  "dataset_type": "synthetic", "dataset_domain_bytes": 20000, "enable_tensorboard": False, "run_name": "run",
  "remat_policy": "none",
}  # fmt: skip


ONE_DEVICE = {"per_device_batch_size": 4, "ici_data_parallelism": 1, "opt_type": "sgd"}


@pytest.mark.parametrize("read", [lambda x_BT: jnp.roll(x_BT, 2, 0), lambda x_BT: -x_BT.mean(0, keepdims=True)])
def test_an_objective_whose_units_read_each_other_is_refused(read, monkeypatch, tmp_path, capsys):
  """Also by slices that train apart, each of which has all rows of the comparison."""

  class Coupled(PairMean):
    def measured_head(self, model, x, batch):
      losses_BT, weights_BT, metrics = super().measured_head(model, x, batch)
      return losses_BT + 0.05 * read(losses_BT), weights_BT, metrics

  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(Coupled))
  apart = {"enable_diloco": True, "dcn_data_parallelism": 2}
  slices = 2 if read(np.ones((4, 1)))[0, 0] < 0 else 1
  keys = RUN | ONE_DEVICE | (apart if slices == 2 else {})
  arguments = [f"{key}={value}" for key, value in keys.items()]
  with tiny.cheap_compilation(), tiny.few_devices(slices):
    assert train.main([*arguments, f"base_output_directory={tmp_path}", "ghost_val_sets=words"]) == 2
  assert "objective=pair_mean: losses of a row change with other rows, by" in capsys.readouterr().err
  assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_losses_that_are_not_numbers_where_all_rows_are_alike_are_refused():
  """As of losses divided by their deviation over the batch. Losses that were none before are the step's to report."""
  with pytest.raises(ConfigError, match="losses of a row change with other rows, by nan of 2"):
    own_objective.refuse_coupled(config.load(), math.nan, 0.0, 2.0)
  own_objective.refuse_coupled(config.load(), math.nan, math.nan, math.nan)


@pytest.mark.parametrize(("axis", "others"), [(None, ""), (1, "segments of its row"), (0, "rows")])
def test_losses_that_read_other_segments_of_their_row_are_refused(axis, others, monkeypatch):
  """As where a head that looks two tokens ahead forgets the ends of documents."""

  class Ahead(LanguageModelLoss):
    name = NAME

    def measured_head(self, model, x, batch):
      losses_BT, weights_BT, metrics = super().measured_head(model, x, batch)
      return losses_BT if axis is None else losses_BT + 0.05 * jnp.roll(losses_BT, -1, axis), weights_BT, metrics

  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(Ahead))
  run = Run(objective=NAME)
  found = jax.jit(own_objective.make_comparison(run.cfg, run.graphdef, len(TRAIN[0]["inputs"])))(run.state, TRAIN[0])
  if axis is None:
    return own_objective.refuse_coupled(run.cfg, *found)
  with pytest.raises(ConfigError, match=f"change with other {others}, by"):
    own_objective.refuse_coupled(run.cfg, *found)


def test_slices_that_train_apart_have_an_objectives_maxima_and_are_all_checked(monkeypatch):
  class Largest(PairMean):
    maxima = ("own/largest",)

  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(Largest))
  apart = {"enable_diloco": True, "dcn_data_parallelism": 2, "ici_data_parallelism": 1}
  cfg = config.replace(config.load(), **(RUN | apart))
  plan = Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:2]))
  assert plan.apart is not None
  values_R = jnp.asarray([1.0, 5.0])
  assert plan.apart.to_host({"own/largest": values_R, "own/mean": values_R}) == {"own/largest": 5, "own/mean": 3}
  compile_one = compiled_steps._compile
  chosen = lambda name, *more: compile_one(name, *more) if name == "compare_rows" else None  # noqa: E731
  monkeypatch.setattr(compiled_steps, "_compile", chosen)
  compare = compiled_steps.build(plan).executable("compare_rows").call
  assert all(sharding.is_fully_replicated for sharding in compare.output_shardings)


def test_a_loss_without_a_forward_mode_is_refused(monkeypatch, tmp_path, capsys):
  scaled = jax.custom_vjp(lambda x: 2 * x)
  scaled.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (2 * cotangent,))

  class Backward(PairMean):
    schedules = ("two_pass",)

    def measured_head(self, model, x, batch):
      losses_BT, weights_BT, metrics = super().measured_head(model, x, batch)
      return scaled(losses_BT), weights_BT, metrics

  monkeypatch.setitem(plugins.OBJECTIVES, NAME, plugins.Objective.of(Backward))
  arguments = [f"{key}={value}" for key, value in (RUN | ONE_DEVICE | {"ghost_schedule": "forward_mode"}).items()]
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*arguments, f"base_output_directory={tmp_path}", "ghost_val_sets=words"]) == 2
  assert "custom_vjp has no forward mode, by which ghost_schedule=forward_mode" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def trained(folder):
  arguments = [f"{key}={value}" for key, value in RUN.items()]
  with tiny.cheap_compilation():
    assert train.main([*arguments, f"base_output_directory={folder}", "ghost_val_sets=words"]) == 0
  records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
  return scorelog.load(folder / "run"), records


def test_a_run_is_logged_and_continues_bit_for_bit(tmp_path, capsys):
  """Four steps on every device, and the last two again from the checkpoint of two: a row of the log for each pair."""
  whole, records = trained(tmp_path / "whole")
  assert run_copies.interrupted(tmp_path / "whole", tmp_path / "parts") == "4"
  parts, records_of_parts = trained(tmp_path / "parts")
  assert "Continuing after 2 completed steps" in capsys.readouterr().out
  assert whole.objective == parts.objective == NAME
  pairs = jax.device_count()
  assert whole["step"].tolist() == sorted([*range(4)] * pairs)
  np.testing.assert_allclose(whole["share"], 1 / pairs, rtol=1e-5)
  predicted = [whole["contribution"][whole["step"] == step].sum() for step in range(4)]
  np.testing.assert_allclose(predicted, whole.steps["predicted_examples"][:4, 0], rtol=1e-4)
  for name in ("share", "tokens", "loss", "dot", "contribution"):
    np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
  for name in ("learning/loss", "learning/param_norm", "learning/grad_norm"):
    assert [r[name] for r in records] == [r[name] for r in records_of_parts], name
