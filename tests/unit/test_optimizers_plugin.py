"""An optimizer that is defined here alone trains, is scored exactly, keeps its ledger, resumes, and is refused by name.

The rule: momentum, seen through a fixed orthogonal mixing of the last axis. m = b m + (1 - b) g;
theta -= rate * (s mix(m) + decay theta), where s = 1 / (1 + mean |m| before the step), one number for each row. So
P_t g = (1 - b) s mix(g): not elementwise, not symmetric, and a function of the optimizer's own state.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import run_copies
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config, ghost, optimizers, train
from maxghost.checkpoint import compare
from maxghost.config import plugins
from maxghost.scorelog import load


def mixing(size: int) -> np.ndarray:
  """An orthogonal matrix [size, size] that is not symmetric: a reflection, then a shift."""
  w = np.arange(1.0, size + 1)
  return np.roll(np.eye(size) - 2 * np.outer(w, w) / (w @ w), 1, axis=0)


def mix(x):
  return x @ jnp.asarray(mixing(x.shape[-1]).T, x.dtype)


def damping(m):
  return 1 / (1 + jnp.abs(m).mean(-1, keepdims=True))


class MixerState(NamedTuple):
  count: jax.Array
  trace: nnx.State


@dataclasses.dataclass(frozen=True)
class Mix(optimizers.Response):
  scale: jax.Array

  def apply(self, x):
    return jnp.expand_dims(self.scale, tuple(range(x.ndim - self.scale.ndim))) * mix(x)


@dataclasses.dataclass(frozen=True)
class Mixer(optimizers.UpdateRule):
  name = "mixer"
  direction = "mixed"
  columns = ("inertia", "shrinkage")
  state_keys: ClassVar = {"inertia": "trace"}
  schedules = ("two_pass", "reverse_scan")

  b: float
  decay: float

  @classmethod
  def from_config(cls, cfg):
    return cls(cfg.adam_b1, cfg.adam_weight_decay)

  def transformation(self, learning_rate):
    def init(params):
      return MixerState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params):
      rate = learning_rate(state.count)
      trace = jax.tree.map(lambda m, g: self.b * m + (1 - self.b) * g, state.trace, grads)

      def step(old, m, p):
        return (-rate * (damping(old) * mix(m) + self.decay * p)).astype(p.dtype)

      return jax.tree.map(step, state.trace, trace, params), MixerState(state.count + 1, trace)

    return optax.GradientTransformation(init, update)

  def reads(self, parameter):
    return ("inertia",)

  def response(self, parameter, gradient, arrays, scalars):
    return Mix((1 - self.b) * damping(arrays["inertia"]))

  def column_arrays(self, parameter, value, gradient, arrays, response):
    m = arrays["inertia"]
    return {"inertia": self.b * damping(m) * mix(m), "shrinkage": value}

  def column_scales(self, learning_rate, clip_factor):
    return {"inertia": learning_rate, "shrinkage": learning_rate * self.decay}


class Silent(Mixer):
  """The same without a direction of its own."""

  name = "silent"
  direction = None


@pytest.fixture(autouse=True)
def registered():
  """The rules' lines in the table, for the tests of this file alone."""
  before = dict(plugins.OPTIMIZERS)
  optimizers.register(Mixer)
  optimizers.register(Silent)
  yield
  for name in plugins.OPTIMIZERS.keys() - before.keys():
    del plugins.OPTIMIZERS[name]


COLUMNS = ("predicted_examples", "inertia", "shrinkage", "unscored", "direction_residual")


DOCUMENTS = tiny.documents(TRAIN[1])
ROWS = tiny.stack_rows([tiny.alone(TRAIN[1], *document) for document in DOCUMENTS])


@functools.cache
def gradients_of() -> oracles.ExampleGradients:
  with jax.enable_x64(True):
    model = tiny.make_model(tiny.make_config(remat_policy="none", dtype="float64", weight_dtype="float64"))
    return oracles.ExampleGradients(model)


class Steps:
  """Two steps; the oracle's facts are about the second, which has a history."""

  def __init__(self, **changes):
    self.run = Run(opt_type="mixer", remat_policy="none", **changes)
    self.run.step(TRAIN[0])
    self.before, self.arrays = self.run.snapshot(), self.state().arrays["inertia"]
    self.out = self.run.step(TRAIN[1])
    self.after = self.run.snapshot()
    self.tokens = oracles.token_counts(ROWS)
    rows = {name: np.concatenate([v, VALIDATION[name]]) for name, v in ROWS.items()}
    with jax.enable_x64(True), tiny.cheap_compilation():
      gradients = gradients_of()(rows, self.before.params)
    self.g_N = {label: v[: len(DOCUMENTS)] for label, v in gradients.items()}
    self.g = oracles.batch_gradient(self.g_N, ROWS)
    self.G = oracles.batch_gradient({label: v[len(DOCUMENTS) :] for label, v in gradients.items()}, VALIDATION)

  def state(self) -> optimizers.RuleState:
    with jax.enable_x64(self.run.wide):
      optimizer = nnx.merge(self.run.graphdef, self.run.state).optimizer
      return jax.tree.map(np.asarray, optimizers.create(self.run.cfg.optimizer).read(optimizer))

  def damping(self, label):
    return 1 / (1 + np.abs(self.arrays[label].astype(np.float64)).mean(-1, keepdims=True))

  def inner(self, left, right, labels=None):
    return sum(float((left[k] * right[k]).sum()) for k in (left if labels is None else labels))


CASES = {
  "two-pass-float64": ({"dtype": "float64", "weight_dtype": "float64", "ghost_exclude": ("*norm*",)}, 1e-11),
  "two-pass-float32": ({}, 2e-5),
  "reverse-scan-float64": (
    {"ghost_schedule": "reverse_scan", "dtype": "float64", "weight_dtype": "float64", "logits_via_embedding": False},
    1e-11,
  ),
  "forward-mode-float32": ({"ghost_schedule": "forward_mode"}, 2e-5),
}


@pytest.mark.parametrize(
  "case", [pytest.param(case, marks=pytest.mark.slow) if case == "two-pass-float32" else case for case in CASES]
)
def test_it_trains_and_is_scored_as_documents_alone(case):
  changes, tolerance = CASES[case]
  steps = Steps(**changes)
  out, rule = steps.out, optimizers.create(steps.run.cfg.optimizer)
  lr, clip_factor = float(out["learning_rate"]), float(out["clip_factor"])
  assert clip_factor < 1
  scored = [k for k in steps.g if not ("ghost_exclude" in changes and "norm" in k)]
  u = {k: (1 - rule.b) * (steps.damping(k) * G) @ mixing(G.shape[-1]) for k, G in steps.G.items()}
  dots_N = sum(oracles.dots({k: steps.g_N[k] for k in scored}, u).values())
  assert out["check_rel_err"][0] < tolerance
  expected = np.zeros(out["contribution_BSK"].shape[:2])
  for (row, segment), dot in zip(DOCUMENTS, dots_N, strict=True):
    expected[row, segment - 1] = lr * clip_factor * dot / steps.tokens.sum()
  assert oracles.relative_error(out["contribution_BSK"][..., 0], expected) < tolerance
  columns = {
    "predicted_examples": lr * clip_factor * steps.inner(steps.g, u, scored),
    "inertia": lr * sum(
      rule.b * (steps.G[k] * steps.damping(k) * (steps.arrays[k] @ mixing(G.shape[-1]).T)).sum()
      for k, G in steps.G.items()
    ),
    "shrinkage": lr * rule.decay * steps.inner(steps.G, steps.before.params),
    "unscored": lr * clip_factor * steps.inner(steps.g, u, set(steps.g) - set(scored)),
    "direction_residual": 0.0,
  }  # fmt: skip
  change = {k: steps.after.params[k] - v for k, v in steps.before.params.items()}
  size = sum(map(abs, columns.values()))
  for name, value in columns.items():
    assert out[name][0] == pytest.approx(value, abs=tolerance * size), name
  assert out["predicted"][0] == pytest.approx(-steps.inner(steps.G, change), abs=max(tolerance, 1e-6) * size * 10)
  assert "momentum" not in out


def test_factors_of_its_direction_leave_their_rest_in_the_ledger():
  """Without a weighting of its own the factors are made in the plain norm."""
  steps = Steps(ghost_rank=3, ghost_exclude=("*norm*", "*self_attention*"))
  change = {k: steps.after.params[k] - v for k, v in steps.before.params.items()}
  columns = [float(steps.out[name][0]) for name in COLUMNS]
  assert abs(columns[-1]) > 1e-3 * abs(columns[0])
  assert sum(columns) == pytest.approx(-steps.inner(steps.G, change), abs=1e-4 * sum(map(abs, columns)))
  captured = np.concatenate([c.ravel() for c in steps.out["captured"].values()])
  assert captured.min() > 0.2 and captured.max() < 1.001


class Mlp(nnx.Module):
  def __init__(self, rngs):
    self.first, self.second = nnx.Linear(5, 7, rngs=rngs), nnx.Linear(7, 3, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def squares(model, batch):
  return jnp.square(model(batch["x"])).sum(-1), batch["w"]


def test_the_library_engine_takes_its_state():
  cfg = tiny.make_config(opt_type="mixer", adam_b1=0.8)
  rng, model = np.random.default_rng(0), foreign.randomized(Mlp)
  rows, val = ({"x": rng.normal(size=(n, 5)).astype("f"), "w": rng.random(n).astype("f")} for n in (6, 4))
  with tiny.cheap_compilation():  # one step, for a momentum
    optimizer = nnx.Optimizer(model, optimizers.make_optimizer(cfg.optimizer, 5), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.sin, nnx.state(model, nnx.Param)))
  state = optimizers.create(cfg.optimizer).read(optimizer)
  engine = ghost.GhostEngine(cfg, direction="auto")
  first = foreign.score(engine, model, rows, val, state=state, loss_fn=squares)
  oracle = foreign.Oracle(model, squares, rows, val)
  damped = {label: damping(state.arrays["inertia"][label]) * G for label, G in oracle.G[0].items()}
  u = {label: (1 - cfg.optimizer.adam_b1) * np.asarray(G) @ mixing(G.shape[-1]) for label, G in damped.items()}
  assert oracles.relative_error(first.dot, foreign.total(oracle.dots(u))) < 1e-5
  for label, g in tiny.by_label(first.grads).items():
    assert oracles.relative_error(g, oracle.g[label]) < 1e-5, label
  plain = foreign.total(oracle.dots(oracle.G[0]))
  assert np.abs(first.dot - plain).max() > 0.1 * np.abs(plain).max()
  with pytest.raises(ValueError, match="direction 'mixed' needs state="):
    engine.score(model, rows, val, loss_fn=squares)


KEYS = (
  "opt_type=mixer", "adam_b1=0.8", "steps=6", "checkpoint_period=3", "max_num_checkpoints_to_keep=0",
  "async_checkpointing=false", "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8",
  "base_mlp_dim=24", "base_num_decoder_layers=1", "max_target_length=32", "per_device_batch_size=4",
  "dataset_type=synthetic", "ghost_val_sets=words", "eval_interval=-1", "run_name=run",
  "enable_tensorboard=false",
)  # fmt: skip


def test_the_command_trains_logs_and_resumes_bit_for_bit(tmp_path):
  """The second run loses all behind its third step, as an interruption there would."""
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*KEYS, f"base_output_directory={whole}"]) == 0
  last = run_copies.interrupted(whole, broken)
  assert len(list((broken / "run" / "checkpoints").iterdir())) == 1
  log, columns = load(whole / "run"), {}
  for name in COLUMNS:
    columns[name] = np.array(log.steps[name])[:6]  # behind them stands the validation loss after the last step
    assert np.isfinite(columns[name]).all(), name
  assert (columns["inertia"][1:] != 0).all() and (columns["shrinkage"][1:] != 0).all()
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*KEYS, f"base_output_directory={broken}"]) == 0
  again = load(broken / "run")
  for name in COLUMNS:
    np.testing.assert_array_equal(columns[name], again.steps[name][:6])
  np.testing.assert_array_equal(log["contribution"], again["contribution"])
  ends = [str(folder / "run" / "checkpoints" / last) for folder in (whole, broken)]
  assert compare.main(ends) == 0


REFUSED = {
  "ghost_schedule=concat": r"opt_type=mixer.* and ghost_schedule=concat do not go together.*ghost_schedule=two_pass",
  "ghost_select=greats": "ghost_select=greats .* opt_type=mixer has not",
  "ghost_direction=adam": "ghost_direction=adam contradicts opt_type=mixer.*opt_type=adamw",
  "ghost_direction=mixd": "ghost_direction=mixd .*did you mean 'mixed'",
  "opt_type=mixr": "opt_type=mixr .*did you mean 'mixer'",
  "opt_type=silent": "ghost_direction=auto means the optimizer's own direction, but opt_type=silent offers none",
  "opt_type=adamw ghost_direction=mixed": "ghost_direction=mixed contradicts opt_type=adamw.*opt_type=mixer",
  "offload_to_host=[optimizer] segment_lengths=[2] ghost_schedule=reverse_scan": "opt_type=mixer cannot",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_go_together_is_named(keys):
  with pytest.raises(config.ConfigError, match=REFUSED[keys]):
    config.load(None, "opt_type=mixer", *keys.split())


def test_without_a_direction_the_plain_gradient_is_a_choice_and_no_fallback():
  cfg = config.load(None, "opt_type=silent", "ghost_direction=sgd")
  assert optimizers.direction_rule(cfg.optimizer, "sgd") == optimizers.Sgd()
  with pytest.raises(ValueError, match="opt_type=silent offers none; use ghost_direction=sgd"):
    optimizers.direction_rule(cfg.optimizer, "auto")
  assert config.load(None, "opt_type=silent", "ghost_enabled=false").optimizer.opt_type == "silent"


def test_names_and_directions_are_taken_once():
  @dataclasses.dataclass(frozen=True)
  class Other(Mixer):
    name = "other"

  with pytest.raises(ValueError, match="ghost_direction=mixed is already that of opt_type=mixer"):
    optimizers.register(Other)
  Other.name, Other.direction = "adamw", None
  with pytest.raises(ValueError, match="opt_type=adamw is already"):
    optimizers.register(Other)
  assert optimizers.register(Mixer) is Mixer


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"columns": "inertia"}, "Wrong.columns is 'inertia'; give a tuple"),
    ({"columns": ("unscored",)}, "a tuple of names that no step has"),
    ({"schedules": ("twopass",)}, "give a tuple of two_pass"),
    ({"direction": "second_order"}, "ghost_direction=second_order is already"),
    ({"response": optimizers.UpdateRule.response}, "Wrong needs response"),
  ],
)
def test_what_is_no_whole_rule_is_not_registered(changes, said):
  """A column of a name that the ledger has would take the place of its number."""
  with pytest.raises(ValueError, match=said):
    optimizers.register(type("Wrong", (Mixer,), {"name": "wrong", "direction": "wronged", **changes}))
  with pytest.raises(ValueError, match="7 is no class that extends UpdateRule"):
    optimizers.register(7)
  assert "wrong" not in plugins.OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Through(optimizers.Response):
  function: Callable

  def apply(self, x):
    return self.function(x)


class Doubled(Mixer):
  """A path that says twice what the batch changes in the step."""

  def response(self, parameter, gradient, arrays, scalars):
    return Mix(2 * (1 - self.b) * damping(arrays["inertia"]))


class Untransposed(Mix):
  def transpose(self, x):
    return self.apply(x)


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"column_arrays": lambda *_: {"inertai": jnp.ones(3)}}, r"opt_type=wrong: column_arrays gives 'inertai' of shape"),
    (
      {"column_arrays": lambda *_: {"inertia": jnp.ones(())}},
      r"gives 'inertia' of shape \(\) for decoder/.* not \('iner",
    ),
    ({"response": lambda *_: None}, "opt_type=wrong: response gives a NoneType, not a Response"),
    ({"column_arrays": lambda *_: None}, "opt_type=wrong: column_arrays gives a NoneType, not a dict"),
    ({"response": lambda *_: Through(jnp.square)}, "Through.apply is not linear, or changes the shape: "),
    ({"response": lambda *_: Through(jnp.sum)}, "Through.apply is not linear, or changes the shape: cotangent"),
    ({"response": lambda *_: Untransposed(jnp.full((), 1e-5))}, "Untransposed.transpose is not that of its apply"),
    ({"state_keys": {"inertia": "mu"}}, "state_keys names 'mu', which no state of its step has"),
    ({"from_config": classmethod(lambda cls, cfg: None)}, "opt_type=wrong: from_config gives a NoneType"),
    ({"column_scales": lambda *_: {"inertia": 0.1}}, r"column_scales gives \('inertia',\), not a factor for each of"),
    ({"response": lambda *_: optimizers.Identity()}, "do not add up to the step of transformation for decoder/"),
    ({"column_arrays": lambda *_: {}}, "do not add up to the step of transformation for decoder/"),
    ({"column_scales": lambda *_: {"inertia": 0.1, "shrinkage": 0}}, "do not add up to the step of transformation for"),
    (
      {"column_scales": lambda self, rate, clip: {"inertia": clip * rate, "shrinkage": rate * self.decay}},
      "do not add up to the step of transformation for decoder/",
    ),
    ({"path": lambda self: Doubled(self.b, self.decay)}, "do not add up to the step of transformation for decoder/"),
    (
      {"last_update": lambda self, value, arrays, state: arrays["inertia"]},
      "opt_type=wrong: last_update is not the step of transformation for decoder/",
    ),
    ({"last_update": lambda *_: jnp.zeros(())}, "opt_type=wrong: last_update is not the step of transformation for"),
    ({"last_update": lambda *_: None}, "opt_type=wrong: last_update is not the step of transformation for"),
    (
      {"path": lambda self: self, "marginal": lambda self: Doubled(self.b, self.decay)},
      "opt_type=wrong: the response of marginal is not the derivative of the step of transformation for decoder/",
    ),
  ],
)
def test_what_a_rule_gives_in_another_form_is_named(changes, said):
  """A column of another shape would be broadcast, and scores of another step than the optimizer's be wrong; also where
  only a clipped step is another, the path that `ghost_direction=path` takes, or the update of the step before."""
  optimizers.register(type("Wrong", (Mixer,), {"name": "wrong", "direction": "wronged", **changes}))
  with pytest.raises(config.ConfigError, match=said):
    direction = next((name for name in ("marginal", "path") if name in changes), "auto")
    run = Run(opt_type="wrong", base_num_decoder_layers=1, adam_weight_decay=1e-4, ghost_direction=direction)
    jax.eval_shape(run.function, run.state, TRAIN[0], (VALIDATION,))


def test_the_table_says_what_the_rules_say():
  """`config.plugins` is read without JAX; what its lines do not set (such as the offers) is told by the methods."""
  for name in ("adamw", "sgd", "muon"):
    rule = type(optimizers.create(dataclasses.replace(config.load().optimizer, opt_type=name)))
    assert plugins.OPTIMIZERS[name] == dataclasses.replace(
      plugins.Optimizer.of(rule), target=plugins.OPTIMIZERS[name].target
    )


def test_the_optimizer_of_the_docs_has_the_ledger_it_promises():
  """One step in plain optax: gradient and momentum columns add up to -<G, Delta>."""
  page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text("utf-8")
  exec(re.search(r"```python\n(import dataclasses\nfrom typing.*?)```", page, re.S)[1], {"__name__": "docs"})
  rule = optimizers.create(config.load(None, "opt_type=momentum", "adam_b1=0.7").optimizer)
  tx, params = rule.transformation(optax.constant_schedule(0.1)), {"w": jnp.arange(6.0).reshape(2, 3)}
  g, G, place = params["w"] - 2.5, jnp.cos(params["w"]), optimizers.Parameter("w")
  _, opt_state = tx.update({"w": g * g}, tx.init(params), params)
  state = rule.read(opt_state, count=1)
  delta, _ = tx.update({"w": g}, opt_state, params)
  response = rule.response(place, g, state.of("w"), rule.scalars(1, 1.0))
  columns = rule.column_arrays(place, params["w"], g, state.of("w"), response)
  scales = rule.column_scales(0.1, 1.0)
  predicted = 0.1 * jnp.vdot(response.transpose(G), g) + sum(scales[k] * jnp.vdot(G, v) for k, v in columns.items())
  assert tuple(columns) == rule.columns and float(predicted) == pytest.approx(-float(jnp.vdot(G, delta["w"])), rel=1e-6)


def test_the_count_is_that_of_the_state_and_not_of_skipped_steps():
  """optax.apply_if_finite skips a step whose gradient is not finite; nnx.Optimizer counts it, Adam does not."""
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.apply_if_finite(optax.adamw(1e-3), 5), wrt=nnx.Param)
  for value in (0.1, jnp.nan, 0.1):
    optimizer.update(model, jax.tree.map(lambda x, v=value: jnp.full_like(x, v), nnx.state(model, nnx.Param)))
  assert int(optimizer.step[...]) == 3 and int(ghost.AdamState.from_optax(optimizer).count) == 2
  assert int(ghost.AdamState.from_optax(optimizer.opt_state).count) == 2


def groups(params):
  return jax.tree.map(lambda x: "first" if x.ndim > 1 else "rest", params)


def own_step():
  def doubled(updates, state, params=None):
    return jax.tree.map(lambda x: 2 * x, updates), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), doubled)


def state_of(transformation, **options):
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  return ghost.AdamState.from_optax(nnx.Optimizer(model, transformation, wrt=nnx.Param), **options)


@pytest.mark.parametrize(
  ("made", "named"),
  [
    (optax.radam(1e-3), "scale_by_radam"),
    (optax.adamax(1e-3), "scale_by_adamax"),
    (optax.nadamw(1e-3), "scale_by_adam with nesterov"),
    (optax.adam(1e-3, eps_root=1e-6), "scale_by_adam with eps_root"),
    (optax.lamb(1e-3), "scale_by_trust_ratio"),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.yogi(1e-3)), "scale_by_yogi"),
    (optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)), "add_decayed_weights"),
    (optax.chain(optax.clip(1.0), optax.masked(optax.adamw(1e-3), lambda p: jax.tree.map(jnp.ndim, p))), "clip"),
    (optax.amsgrad(1e-3), "ScaleByAmsgradState, scale_by_amsgrad"),
    (optax.chain(optax.scale(0.1), optax.adam(1e-3)), "scale"),
    (optax.chain(optax.adam(1e-3), optax.ema(0.9)), "ema"),
    (optax.chain(optax.adam(1e-3), optax.trace(0.9)), "trace"),
    (optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0), optax.scale(-1.0)), "clip_by_global_norm"),
    (
      optax.multi_transform(
        {"first": optax.adam(1e-3), "rest": optax.chain(optax.scale(2.0), optax.adam(1e-2))}, groups
      ),
      "scale",
    ),
    (optax.lookahead(optax.adam(1e-3), 3, 0.5), "lookahead"),
    (optax.chain(own_step(), optax.adam(1e-3)), "own_step"),
    (optax.chain(optax.scale_by_adam(), own_step()), "own_step"),
  ],
)
def test_the_state_of_an_optimizer_that_is_not_adam_is_refused_by_name(made, named):
  """Most of them keep their moments in a state of Adam's type, but their step responds otherwise."""
  with pytest.raises(ValueError, match=f"the optimizer has {named}"):
    state_of(made)
  if named.startswith("Scale"):
    with pytest.raises(ValueError, match="the optimizer has ScaleByAmsgradState, which is not Adam"):
      ghost.AdamState.from_optax(made.init({"w": jnp.ones(2)}))


def test_an_optimizer_with_two_adams_is_refused():
  """The moments of the second are those of the first one's steps."""
  twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam(), optax.scale(-1e-3))
  with pytest.raises(ValueError, match=r"several 'mu' of a parameter: opt_type=adamw keeps one"):
    state_of(twice)
  groups_apart = optax.multi_transform({"first": optax.adam(1e-3), "rest": optax.adam(1e-2)}, groups)
  assert set(state_of(groups_apart).second_moments) == {"bias", "kernel"}


def own_functions():
  """Adam with a schedule and a mask that call functions of two arguments, which are no steps."""

  def keep(path, x):
    return x.ndim > 1

  def rising(step, peak):
    return peak * step

  return optax.adamw(
    lambda step: rising(step, 1e-3), b1=0.8, mask=lambda params: jax.tree_util.tree_map_with_path(keep, params)
  )


@pytest.mark.parametrize(
  "made",
  [
    own_functions(),
    optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100), b1=0.8, mask=lambda p: jax.tree.map(jnp.ndim, p)),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b1=0.8), optax.scale(0.5)),
    optax.apply_if_finite(optax.MultiSteps(optax.adamw(1e-3, b1=0.8), 2).gradient_transformation(), 3),
  ],
)
def test_adam_inside_of_other_transformations_is_found_with_its_constants(made):
  assert state_of(made).constants == {(0.8, 0.999, 1e-8)}


def test_the_state_of_adam_is_refused_for_another_optimizer():
  """Its first moments would be taken for the momentum of Muon's matrices."""
  state = state_of(optax.adamw(1e-3))
  for rule in (optimizers.Muon(), optimizers.Muon().marginal()):
    with pytest.raises(ValueError, match="the optimizer is Adam, but the engine's cfg has opt_type=muon: give state="):
      state.rule_state(rule)
  assert state.rule_state(optimizers.AdamW(b2=0.999)).arrays["first_moment"] is state.first_moments


@pytest.mark.parametrize(
  "made",
  [
    optax.inject_hyperparams(optax.adamw)(1e-3),
    optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(1e-3, nesterov=True)),
    optax.GradientTransformation(optax.adam(1e-3).init, jax.jit(optax.adam(1e-3).update)),
  ],
)
def test_hidden_constants_of_an_optimizer_are_refused(made):
  """They may be others than the engine's, which would score along another direction; of a state none are known."""
  with pytest.raises(ValueError, match=r"constants of the optimizer are hidden .*give its opt_state, and set adam_b1"):
    state_of(made)
  assert ghost.AdamState.from_optax(made.init({"w": jnp.ones(2)})).constants == frozenset()


def test_groups_of_parameters_are_read_and_what_is_left_out_is_named():
  model, batch = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), np.ones((4, 2), np.float32)

  def scores(optimizer, **options):
    engine = ghost.GhostEngine(config.load(None, "adam_b2=0.999"), direction="adam", **options)
    state = ghost.AdamState.from_optax(nnx.Optimizer(model, optimizer, wrt=nnx.Param))
    return engine.score(model, batch, batch, loss_fn=lambda m, x: jnp.square(m(x)).sum(-1), state=state).dot

  adam = optax.adam(1e-3)
  whole = scores(optax.multi_transform({"first": adam, "rest": optax.adamw(1e-2)}, groups))
  np.testing.assert_array_equal(whole, scores(adam))
  other = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
  beside = optax.multi_transform({"rest": other, "first": adam}, groups)
  np.testing.assert_array_equal(scores(beside, exclude=("bias",)), scores(adam, exclude=("bias",)))
  kernels = optax.masked(adam, lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
  np.testing.assert_array_equal(scores(kernels, exclude=("bias",)), scores(adam, exclude=("bias",)))
  with pytest.raises(
    ValueError, match=r"needs fitting second_moment in state=.* leave out with exclude what its optimizer does: bias$"
  ):
    scores(kernels)


@pytest.mark.parametrize(
  ("made", "others"),
  [
    (optax.adam(1e-3), r"\(0.9, 0.999, 1e-08\)"),
    (
      optax.multi_transform({"first": optax.adam(1e-3, b2=0.95), "rest": optax.adam(1e-3, 0.8)}, groups),
      r"\(0.8, 0.999,",
    ),
  ],
)
def test_constants_that_are_not_those_of_the_optimizer_are_refused(made, others):
  """optax.adam has b2=0.999, the default configuration 0.95."""
  model, batch = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), np.ones((4, 2), np.float32)
  with pytest.raises(
    ValueError, match=rf"of the optimizer are {others}.* but those of the engine \(0.9, 0.95, 1e-08\)"
  ):
    ghost.GhostEngine(direction="adam").score(model, batch, batch, loss_fn=None, state=state_of(made))
