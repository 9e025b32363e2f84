"""Muon: its labels against MaxText's names, its update against optax, its credit against one gradient a document."""

import dataclasses

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import oracles
import pytest
import routed
import run_copies
import tiny
from flax import nnx
from test_path_credit import COLUMNS, assert_contributions, secant
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config, models, optimizers, train
from maxghost.attribution import load
from maxghost.checkpoint import compare
from maxghost.config.files import config_dir
from maxghost.ghost.attach import parameters
from maxghost.optimizers import Matrix, Muon, Parameter

GPT2 = {
  "decoder_block": "gpt2", "mlp_activations": ("gelu",), "mlp_bias": True, "attention_bias": True, "rope_type": "none",
  "trainable_position_size": 17, "logits_via_embedding": True, "base_num_kv_heads": 8,
}  # fmt: skip


def dimensions(label: str) -> tuple[int, int] | None:
  """(rows, columns) of a kernel by its name, as MaxText's rule by names says; None: left to Adam."""
  *_, module, name = label.split("/")
  if module in ("token_embedder", "position_embedder", "logits_dense") or "norm" in module or name == "sinks":
    return None
  if name == "bias" or name.endswith("_bias"):
    return None
  if module in ("query", "key", "value"):
    return 1, 2
  return (2, 1) if module == "out" else (1, 1)


def step_of(label: str, g, m, *, count: int, beta: float, eps: float, rms: float):
  """D of a parameter [..., *rows, *columns], written out for one matrix."""
  rows, columns = dimensions(label)
  first, last = g.ndim - rows - columns, g.ndim - columns
  size = (-1, int(np.prod(g.shape[first:last])), int(np.prod(g.shape[last:])))
  t = count + 1
  scale = rms * max(size[1:]) ** 0.5 if rms else max(1, size[2] / size[1]) ** 0.5

  def polynomial(x):
    a = x.T @ x
    return 3.4445 * x - 4.7750 * x @ a + 2.0315 * x @ a @ a

  def one(g_IO, m_IO):
    after = beta * m_IO + (1 - beta) * g_IO
    x = beta * after / (1 - beta ** (t + 1)) + (1 - beta) * g_IO / (1 - beta**t)
    x = x / (jnp.sqrt((x**2).sum()) + eps)
    x, _ = jax.lax.scan(lambda x, _: (polynomial(x), None), x, None, length=5)
    return scale * x

  return jax.vmap(one)(g.reshape(size), m.reshape(size)).reshape(g.shape)


def path(label: str, G, g, m, *, nodes: int = 2, **constants):
  """The path direction of a gradient g (clipped) by Gauss nodes on [0, 1]."""
  at, weights = np.polynomial.legendre.leggauss(nodes)
  step = lambda g: step_of(label, g, m, **constants)  # noqa: E731
  return sum(w / 2 * jax.vjp(step, (x + 1) / 2 * g)[1](G)[0] for x, w in zip(at, weights, strict=True))


def template(**changes):
  return models.create_abstract(config.replace(config.load(), **(tiny.SIZES | changes)))


# Labels.

CASES = {
  "llama": {}, "unstacked": {"scan_layers": False, "use_qk_norm": True}, "mixtral": routed.MIXTRAL,
  "gpt-oss": routed.GPT_OSS, "gpt2": GPT2,
}  # fmt: skip


FILES = tuple(path.stem for path in sorted((config_dir() / "models").glob("*.yml")))


@pytest.mark.parametrize("case", [*CASES, *FILES])
def test_every_parameter_says_what_maxtexts_names_and_the_scoring_rules_say(case):
  model = template(**CASES[case]) if case in CASES else models.create_abstract(config.load(None, f"model_name={case}"))
  views, found = parameters(model), 0
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    label = "/".join(map(str, path))
    view, matrix, expected = views[label], Matrix.of(variable), dimensions(label)
    assert matrix is not None and view.matrix == matrix, label
    assert ((matrix.rows, matrix.columns) if matrix else None) == expected, label
    if matrix:
      found += 1
      groups = variable.ndim - matrix.stacked - matrix.rows - matrix.columns
      assert (view.rows, view.groups, len(matrix.axes)) == (matrix.rows, groups, variable.ndim - matrix.stacked), label
      assert matrix.stacked == ("/layers/" in label), label
  assert found >= 4


def test_what_is_not_labelled_is_an_error_and_never_left_to_adam():
  class Bare(nnx.Module):
    def __init__(self, metadata):
      self.kernel, self.scale = nnx.Param(jnp.ones((3, 5)), **metadata), nnx.Param(jnp.ones(5))

  make = lambda **metadata: optimizers.make_optimizer(MUON, 3, nnx.state(Bare(metadata), nnx.Param))  # noqa: E731
  unlabelled = r"^opt_type=muon: kernel \[3, 5\] does not say whether it is a matrix.*matrix=\(1, 1\)[^\n]*$"
  with pytest.raises(config.ConfigError, match=unlabelled):
    make()
  with pytest.raises(config.ConfigError, match="none of the parameters to train is one: kernel, scale; use opt_type="):
    make(matrix=())
  assert make(matrix=(1, 1))
  rule = optimizers.create(MUON)
  with pytest.raises(config.ConfigError, match=unlabelled):
    rule.response(Parameter("kernel"), jnp.ones((3, 5)), {}, rule.scalars(1, 1.0))


def test_all_parameters_may_be_matrices():
  """As adapters are: AdamW then has none, and no moments."""
  adapter = nnx.Module()
  adapter.a = nnx.LoRAParam(jnp.ones((3, 5)), matrix=(1, 1))
  optimizer = nnx.Optimizer(adapter, optimizers.make_optimizer(MUON, 3, nnx.state(adapter)), wrt=nnx.LoRAParam)
  found = optimizers.create(MUON).read(optimizer).arrays
  assert [*found["first_moment"]] == ["a"] and found["second_moment"] == {}


# The update.

MUON = config.load(
  None, "opt_type=muon", "muon_beta=0.8", "muon_weight_decay=0.2", "adam_b1=0.7", "adam_b2=0.9", "adam_eps=1e-6",
  "adam_weight_decay=0.3", "learning_rate=0.1", "lr_schedule_type=constant", "warmup_steps_fraction=0",
).optimizer  # fmt: skip


@pytest.mark.parametrize(("case", "rms"), [("gpt-oss", 0.0), ("unstacked", 0.2)])
def test_the_update_is_that_of_optax(case, rms):
  """Three steps of random gradients; what Muon leaves over, by optax's AdamW."""
  model, cfg = template(**CASES[case]), dataclasses.replace(MUON, muon_consistent_rms=rms)
  rng = np.random.default_rng(0)
  draw = lambda: {k: jnp.asarray(rng.normal(size=v.shape), "float32") for k, v in tiny.abstract_by_label(model).items()}  # noqa: E731
  matrices = {label: dimensions(label) for label in tiny.abstract_by_label(model) if dimensions(label)}
  number = lambda n: optax.contrib.MuonDimensionNumbers(tuple(range(-sum(n), -n[1])), tuple(range(-n[1], 0)))  # noqa: E731
  theirs = optax.contrib.muon(
    0.1, beta=0.8, eps=1e-6, weight_decay=0.2, consistent_rms=rms or None,
    muon_weight_dimension_numbers={label: number(n) for label, n in matrices.items()},
  )  # fmt: skip
  rest = optax.adamw(0.1, 0.7, 0.9, 1e-6, weight_decay=0.3)
  ours = optimizers.make_optimizer(cfg, 3, nnx.state(model, nnx.Param))
  params = draw()

  def part(tree, is_matrix):
    return {label: x for label, x in tree.items() if (label in matrices) == is_matrix}

  @jax.jit
  def step(g, states):
    mine, own = ours.update(g, states[0], params)
    both, after = {}, [own]
    for tx, state, kind in ((theirs, states[1], True), (rest, states[2], False)):
      found, state = tx.update(part(g, kind), state, part(params, kind))
      both, after = both | found, [*after, state]
    return mine, both, after

  states = [ours.init(params), theirs.init(part(params, True)), rest.init(part(params, False))]
  kept = optimizers.create(cfg).read(states[0], count=0).arrays
  assert set(kept["first_moment"]) == set(params) and set(kept["second_moment"]) == set(params) - set(matrices)
  for _ in range(3):
    with tiny.cheap_compilation():
      mine, both, states = step(draw(), states)
    for label, expected in both.items():
      assert oracles.relative_error(mine[label], expected) < 1e-5, label


# Path credit of one parameter.

RATE, KAPPA, BETA, EPS = 0.3, 0.7, 0.8, 1e-6
SHAPES = {  # as in models: [*stack, *groups, *rows, *columns]
  "decoder/layers/mlp/wo/kernel": ((2, 7, 5), Matrix(1, 1, None, 1)),
  "decoder/layers/self_attention/query/kernel": ((3, 5, 2, 4), Matrix(1, 2, None, 1)),
  "decoder/layers_0/self_attention/out/kernel": ((3, 2, 7), Matrix(2, 1)),
  "decoder/layers/MoeBlock_0/wi_0": ((2, 3, 4, 7), Matrix(1, 1, None, 1)),
}


class Credit:
  """The response of one parameter and an independent account of the same step. steps: taken before.

  direction, moved, without: the oracle's direction, its step, and its step without this gradient. Made by one compiled
  program, with `more(response, g, G)`.
  """

  def __init__(self, label: str, dtype: str, steps: int, rms: float = 0.0, nodes: int = 2, more=lambda *_: ()):
    shape, matrix = SHAPES[label]
    groups, rng = int("Moe" in label), np.random.default_rng(5)
    draw = lambda: rng.normal(size=shape).astype(np.float32)  # noqa: E731  exact in both dtypes
    g, G, drift, m = draw(), draw(), draw(), np.zeros(shape, np.float32)
    for _ in range(steps):
      m = np.float32(BETA) * m + np.float32(1 - BETA) * (drift + draw())
    arrays = [jnp.asarray(x, dtype) for x in (g, G, m)]
    adam = optimizers.AdamW(0.7, 0.9, EPS, 0.1, "float64")
    rule = Muon(BETA, 0.2, rms, adam, nodes)
    parameter, scalars = Parameter(label, matrix.rows, groups, matrix), rule.scalars(steps, KAPPA)
    constants = {"count": steps, "beta": BETA, "eps": EPS, "rms": rms}

    @jax.jit
    def account(g, G, m):
      response = rule.response(parameter, g, {"first_moment": m}, scalars)
      direction = path(label, G, KAPPA * g, m, **constants) if steps and nodes == 2 else ()
      moved, without = (step_of(label, x * g, m, **constants) for x in (KAPPA, 0))
      columns = rule.column_arrays(parameter, g, g, {"first_moment": m}, response)
      return direction, moved, without, columns, response.transpose(G), more(response, g, G)

    self.g, self.G, self.m = arrays
    with tiny.cheap_compilation():
      self.direction, self.step, self.without, self.columns, self.found, self.more = account(*arrays)


@pytest.mark.parametrize("label", SHAPES)
def test_the_direction_is_the_steps_derivative_along_the_path(label):
  """float64 to 1e-12 and float32 to 1e-5, against the step written out; the rest of the step is the momentum column."""

  def more(response, g, G):
    return response.transpose(jnp.stack([G, 2 * G, -g])), response.whole(g), response.apply(g)

  for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
    with jax.enable_x64(dtype == "float64"):
      made = Credit(label, dtype, 3, 0.2 if "query" in label else 0.0, more=more)
    if dtype == "float64":
      u, step, without = map(np.asarray, (made.direction, made.step, made.without))
    sets, whole, applied = map(np.asarray, made.more)
    assert oracles.relative_error(made.found, u) < tolerance
    assert oracles.relative_error(sets[0], u) < tolerance
    assert oracles.relative_error(sets[1], 2 * u) < tolerance
    assert oracles.relative_error(KAPPA * whole, step - without) < tolerance
    assert oracles.relative_error(made.columns["momentum"], without) < tolerance
    assert np.vdot(applied, made.G) == pytest.approx(float(np.vdot(sets[0], made.g)), rel=20 * tolerance)


def test_more_nodes_add_up_to_what_the_batch_changed_of_the_step(capsys):
  label, errors = "decoder/layers/mlp/wo/kernel", {}
  with jax.enable_x64(True):
    for nodes in (2, 4, 200):
      made = Credit(label, "float64", 3, nodes=nodes)
      credit = KAPPA * float(np.vdot(made.found, made.g))
      moved = np.asarray(made.step) - np.asarray(made.without)
      size = float(np.linalg.norm(made.G) * np.linalg.norm(moved))
      errors[nodes] = abs(credit - float(np.vdot(made.G, moved))) / size
  with capsys.disabled():
    print(f"quadrature error of a matrix's credit over |G| |step|: {errors}")
  assert errors[200] < 1e-5 and errors[4] < errors[2] < 0.5


@pytest.mark.parametrize("label", SHAPES)
def test_from_rest_it_is_shampoo_which_adds_up_exactly(label):
  """P_t = c s / |N| sqrt(H) . sqrt(K) by eigenvectors; one matrix without a gradient has no direction."""

  def more(response, g, G):  # without the gradient of one matrix
    return dataclasses.replace(response, g=response.g.at[0].set(0)).transpose(G) if response.depth else ()

  with jax.enable_x64(True):
    made = Credit(label, "float64", 0, more=more)
    u, still = np.asarray(made.found), np.asarray(made.more)
    assert KAPPA * np.vdot(u, made.g) == pytest.approx(float(np.vdot(made.G, made.step)), rel=1e-12)
    rows, columns = dimensions(label)
    size = (-1, int(np.prod(made.g.shape[-rows - columns : -columns])), int(np.prod(made.g.shape[-columns:])))
    scale = max(1, size[2] / size[1]) ** 0.5

    def root(s):
      w, v = np.linalg.eigh(s)
      f = r = np.sqrt(np.maximum(w, 0))
      for _ in range(5):
        f = 3.4445 * f - 4.7750 * f**3 + 2.0315 * f**5
      return (v * np.sqrt(np.where(r > 1e-7, f / np.where(r > 1e-7, r, 1), 3.4445**5))) @ v.T

    for g, G, found in zip(*(np.asarray(x).reshape(size) for x in (made.g, made.G, u)), strict=True):
      n = (1 + BETA / (1 + BETA)) * KAPPA * g
      x = n / (np.linalg.norm(n) + EPS)
      expected = scale * np.linalg.norm(x) / np.linalg.norm(KAPPA * g) * root(x @ x.T) @ G @ root(x.T @ x)
      assert oracles.relative_error(found, expected) < 1e-11
    if still.size:
      assert (still[0] == 0).all() and np.isfinite(still).all()


def test_without_momentum_every_step_is_one_from_rest():
  """With muon_beta=0 the state holds the last gradient, of which the step knows nothing; nor is there 0 / 0."""
  label, matrix = "decoder/layers/mlp/wo/kernel", Matrix(1, 1)
  rng = np.random.default_rng(3)
  with jax.enable_x64(True):
    g, G, m = (jnp.asarray(rng.normal(size=(2, 5, 7))) for _ in range(3))
    g = g.at[1].set(0)
    for rule in (Muon(0.0), Muon(0.0).marginal()):
      response = rule.response(Parameter(label, 1, 0, matrix), g, {"first_moment": m}, rule.scalars(3, KAPPA))
      u = np.asarray(response.transpose(G))
      assert np.isfinite(u).all() and (u[1] == 0).all() and (u[0] != 0).any()
      from_rest = rule.response(Parameter(label, 1, 0, matrix), g, {"first_moment": 0 * m}, rule.scalars(3, KAPPA))
      np.testing.assert_array_equal(u, from_rest.transpose(G))
      if rule.direction != "marginal":
        step = step_of(label, KAPPA * g, m, count=3, beta=0.0, eps=1e-8, rms=0.0)
        assert KAPPA * np.vdot(u, g) == pytest.approx(float(np.vdot(G, step)), rel=1e-12)


def test_weights_may_be_narrower_than_what_is_computed():
  """With dtype=float64 and float32 weights, the constants of a step from rest are in float64."""
  rule, label = Muon(BETA), "decoder/layers/mlp/wo/kernel"
  rng = np.random.default_rng(4)
  with jax.enable_x64(True):
    g, G = rng.normal(size=(2, 5, 7))
    narrow, wide = (
      rule.response(
        Parameter(label, 1, 0, Matrix(1, 1)), jnp.asarray(g, dtype), {"first_moment": jnp.zeros((5, 7), "float32")},
        rule.scalars(jnp.uint32(3), KAPPA),
      ).transpose(jnp.asarray(G, dtype)) for dtype in ("float32", "float64")
    )  # fmt: skip
  assert narrow.dtype == np.float32
  assert oracles.relative_error(narrow, wide) < 1e-5


# The train step.

STEP = {"opt_type": "muon", "muon_beta": 0.8, "muon_weight_decay": 0.2, "learning_rate": 3e-3, "adam_b2": 0.9}
PLAIN = {"sparse_matmul": False, "remat_policy": "none"}
WIDE = {"dtype": "float64", "weight_dtype": "float64"}
RUNS = {
  "experts-two_pass-float64": ({**routed.MIXTRAL, **WIDE, "ghost_exclude": ("*norm*", "*value*")}, 1e-10),
  "dense-reverse_scan-float32": ({"ghost_schedule": "reverse_scan", "muon_consistent_rms": 0.2}, 1e-5),
}


@pytest.mark.parametrize("case", RUNS)
def test_the_train_step_scores_documents_alone_and_its_account_closes(case):
  """The second step has a history; the clipping factor inside the step is that of the step before."""
  changes, tolerance = RUNS[case]
  run = Run(**(STEP | changes))
  run.step(TRAIN[0])
  before = run.snapshot()
  out, after = run.step(TRAIN[1]), run.snapshot()
  documents = tiny.documents(TRAIN[1])
  rows = tiny.stack_rows([tiny.alone(TRAIN[1], *document) for document in documents])
  with jax.enable_x64(True), tiny.cheap_compilation():
    examples = oracles.ExampleGradients(tiny.make_model(tiny.make_config(**(STEP | changes | WIDE | PLAIN))))
    g_N, val_N = examples(rows, before.params), examples(VALIDATION, before.params)
    g, G = oracles.batch_gradient(g_N, rows), oracles.batch_gradient(val_N, VALIDATION)
    cfg, lr = run.cfg.optimizer, float(out["learning_rate"])
    adam = {"count": 1, "kappa": before.clip_factor, "b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
    muon = {"count": 1, "beta": cfg.muon_beta, "eps": cfg.adam_eps, "rms": cfg.muon_consistent_rms}

    @jax.jit
    def of_matrices(G, g, m):
      u = {k: path(k, G[k], before.clip_factor * g[k], m[k], **muon) for k in G}
      return u, {k: step_of(k, 0 * g[k], m[k], **muon) for k in G}

    matrices = [k for k in g if dimensions(k)]
    u, resting = jax.tree.map(np.asarray, of_matrices(*({k: x[k] for k in matrices} for x in (G, g, before.first))))
    for k in g.keys() - set(matrices):
      u[k], resting[k] = secant(G[k], g[k], before.first[k], before.second[k], **adam)
  scored = [k for k in g if not any(part in k for part in ("norm", "value") if "ghost_exclude" in changes)]
  dots_N = sum(oracles.dots({k: g_N[k] for k in scored}, u).values())
  assert_contributions(out, documents, rows, dots_N, tolerance)
  drop = -sum(float((G[k] * (after.params[k] - v)).sum()) for k, v in before.params.items())
  columns = [float(out[name][0]) for name in COLUMNS]
  size = sum(map(abs, columns))
  if "two_pass" in case:  # the other assumes the clipping factor in its account, too
    assert sum(columns) == pytest.approx(drop, abs=1e-7 * size)
  assert columns[1] == pytest.approx(
    lr * sum(float((G[k] * x).sum()) for k, x in resting.items()), abs=tolerance * size
  )
  assert out["check_rel_err"][0] < tolerance and "prev_predicted" not in out


def test_a_mesh_changes_no_score():
  """A step from rest, and one with momentum."""
  changes = {"opt_type": "muon", "ghost_detail": "module", "muon_consistent_rms": 0.2}
  expected = meshes.run({}, **changes)
  meshes.assert_same(meshes.run(meshes.MESHES["fsdp 4 x tensor 2"], **changes), expected, 2e-5)


KEYS = (
  "opt_type=muon", "steps=4", "checkpoint_period=2", "max_num_checkpoints_to_keep=0", "async_checkpointing=false",
  "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8", "base_mlp_dim=24",
  "base_num_decoder_layers=1", "max_target_length=32", "per_device_batch_size=4",
  "dataset_type=synthetic", "ghost_val_sets=words", "eval_interval=-1", "run_name=run", "enable_tensorboard=false",
)  # fmt: skip


def test_the_command_trains_logs_and_resumes_bit_for_bit(tmp_path):
  """The second run loses all behind its second step, as an interruption there would."""
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*KEYS, f"base_output_directory={whole}"]) == 0
  last = run_copies.interrupted(whole, broken)
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*KEYS, f"base_output_directory={broken}"]) == 0
  log, again = load(whole / "run"), load(broken / "run")
  for name in COLUMNS:
    assert np.isfinite(np.array(log.steps[name])[:4]).all(), name
    np.testing.assert_array_equal(np.array(log.steps[name])[:4], np.array(again.steps[name])[:4])
  np.testing.assert_array_equal(log["contribution"], again["contribution"])
  assert list(log.said_of("direction")) == ["path"]
  assert compare.main([str(folder / "run" / "checkpoints" / last) for folder in (whole, broken)]) == 0


REFUSED = {
  "ghost_direction=adam": "ghost_direction=adam contradicts opt_type=muon",
  "ghost_select=greats": "ghost_select=greats .* opt_type=muon has not",
  "opt_type=muonn": "opt_type=muonn .*did you mean 'muon'",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_what_does_not_go_together_is_named(keys):
  with pytest.raises(config.ConfigError, match=REFUSED[keys]):
    config.load(None, "opt_type=muon", *keys.split())


def test_its_keys_are_maxtexts():
  cfg = config.load(None, "opt_type=muon", "muon_consistent_rms=None").optimizer
  rule = optimizers.create(cfg)
  assert rule == Muon(0.95, 0.0, 0.0, optimizers.AdamW(weight_decay=0.1)) == optimizers.direction_rule(cfg, "path")
  assert optimizers.direction_rule(cfg, "auto") == rule
