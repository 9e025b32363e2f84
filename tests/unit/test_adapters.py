"""Adapters: the values, gradients and scores of a model with them are those of a model with the products added to its
weights; the base is neither trained nor differentiated.

The oracle merges: it differentiates the plain model at W + s a b with respect to a and b, one document at a time, and
knows nothing of `maxghost.adapters`. d inputs, r rank, *O outputs of a layer.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import adapters, config
from maxghost.adapters import lora
from maxghost.config import ConfigError
from maxghost.config.schema import AdapterConfig
from maxghost.models.layers import keys_for_adapters
from maxghost.training.state import trainable

FLOAT64 = {"dtype": "float64", "weight_dtype": "float64"}
LORA = {"lora_rank": 3, "lora_alpha": 5.0, "adam_weight_decay": 0.0, "base_num_decoder_layers": 2}
COLUMNS = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual")


def merged(base: dict, values: dict, scale: float, xp=np) -> dict:
  """{label: W, with s a b added where there is an adapter}. values: {label: array} with those of the adapters."""
  out = dict(base)
  for label, a in values.items():
    if not label.endswith("lora/a") and not label.endswith("_lora_a"):
      continue
    b = values[f"{label[:-1]}b"]
    kernel = label.removesuffix("_lora_a") if label.endswith("_lora_a") else label.replace("lora/a", "kernel")
    delta = xp.matmul(a, b.reshape(*a.shape[:-2], a.shape[-1], -1))
    out[kernel] = out[kernel] + scale * delta.reshape(out[kernel].shape)
  return out


class MergedGradients:
  """As `oracles.ExampleGradients`, of the adapters, through the merged plain model."""

  def __init__(self, cfg):
    self.cfg = config.replace(cfg, lora_rank=0, lora_module_path="", lora_dropout=0.0, lora_weight_qtype="")
    self.scale = cfg.adapter.lora_alpha / cfg.adapter.lora_rank
    graphdef, params, rest = nnx.split(tiny.make_model(self.cfg), nnx.Param, ...)
    base = {label: jnp.asarray(v) for label, v in self.base(tiny.by_label(params)).items()}

    def loss(values, row):
      whole = merged(base, values, self.scale, jnp)
      flat = [(path, v.replace(whole["/".join(map(str, path))])) for path, v in nnx.to_flat_state(params)]
      model = nnx.merge(graphdef, nnx.from_flat_state(flat), rest)
      row = {name: v[None] for name, v in row.items()}
      logits = model(row["inputs"], row["inputs_position"], row["inputs_segmentation"])
      losses = oracles.softmax_losses(logits[0], row["targets"][0])
      return jnp.sum(jnp.where(row["targets_segmentation"][0] != 0, losses, 0))

    self._gradients = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))

  def base(self, base: dict) -> dict:
    """The weights below the adapters."""
    return base

  def __call__(self, rows: dict, values: dict) -> dict:
    values = {label: jnp.asarray(v) for label, v in values.items() if "lora" in label}
    found = self._gradients(values, oracles.with_padding(rows))[1]
    return jax.tree.map(lambda g: np.asarray(g)[: len(rows["inputs"])], found)


def path_direction(G, g, m, v, *, count, kappa, b1, b2, eps):
  """The change that the gradient makes to Adam's whole step, entry by entry, divided by the gradient; times G."""
  t, out = count + 1, {}
  for k in G:

    def step(x, k=k):
      first, second = b1 * m[k] + (1 - b1) * x, b2 * v[k] + (1 - b2) * x**2
      return first / (1 - b1**t) / (np.sqrt(second / (1 - b2**t)) + eps)

    x = kappa * g[k]
    out[k] = (step(x) - step(0 * x)) / x * G[k]
  return out


CASES = {
  "adam": {},
  "reverse_scan": {"ghost_schedule": "reverse_scan"},
  "adam-float32": {"dtype": "float32", "weight_dtype": "float32"},
  "sgd": {"ghost_direction": "sgd", "lora_module_path": ".*/(query|wi_0|wo)", "scan_layers": False},
  "path": {"ghost_direction": "path", "lora_alpha": 7.0, "adam_weight_decay": 0.3},
  "forward_mode": {"ghost_schedule": "forward_mode", "remat_policy": "none"},
  "experts": {**routed.MIXTRAL, "lora_module_path": ".*/(key|out|gate|wi_[01]|wo)"},
  "biases-tied": {
    "decoder_block": "gpt2", "logits_via_embedding": True, "base_num_kv_heads": 8, "trainable_position_size": 17,
    "rope_type": "none", "attention_bias": True, "mlp_bias": True, "mlp_activations": ("gelu",),
  },
  "opt-sgd": {"opt_type": "sgd", "learning_rate": 1e-3},
  "muon": {"opt_type": "muon", "learning_rate": 1e-3},
}  # fmt: skip
SLOW = ("adam-float32", "opt-sgd", "forward_mode", "biases-tied", "experts", "muon")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_scores_are_those_of_the_merged_model_and_the_base_stays(case):
  """The second step has a history, and a clipping factor of the step before."""
  changes = FLOAT64 | LORA | CASES[case]
  tolerance = 1e-5 if "float32" in case else 1e-12
  run = Run(ghost_detail="total", **changes)
  run.step(TRAIN[0])
  before = run.snapshot()
  out, after = run.step(TRAIN[1]), run.snapshot()
  wide = config.replace(run.cfg, **FLOAT64, remat_policy="none", sparse_matmul=True)
  documents = tiny.documents(TRAIN[1])
  rows = tiny.stack_rows([tiny.alone(TRAIN[1], *document) for document in documents])
  with jax.enable_x64(True), tiny.cheap_compilation():
    gradients = MergedGradients(wide)
    g_N, val_N = gradients(rows, before.params), gradients(VALIDATION, before.params)
  g, G = oracles.batch_gradient(g_N, rows), oracles.batch_gradient(val_N, VALIDATION)
  assert {label for label in g if not np.array_equal(before.params[label], after.params[label])} == set(g)
  assert all(np.array_equal(after.params[k], v) for k, v in before.params.items() if k not in g)
  assert out["grad_norm"] == pytest.approx(np.sqrt(sum((x**2).sum() for x in g.values())), rel=tolerance)
  scale, cfg = float(out["learning_rate"]) * float(out["clip_factor"]), run.cfg.optimizer
  adam = {"count": 1, "kappa": before.clip_factor, "b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
  if case in ("adam", "reverse_scan", "adam-float32", "forward_mode", "experts", "biases-tied"):
    u = oracles.adam_direction(G, g, before.second, **adam)
  elif case == "path":
    u = path_direction(G, g, before.first, before.second, **adam)
  else:
    u = G
  if case != "muon":
    expected = np.zeros(out["contribution_BSK"].shape[:2])
    for (row, segment), dot in zip(documents, sum(oracles.dots(g_N, u).values()), strict=True):
      expected[row, segment - 1] = scale * dot / oracles.token_counts(rows).sum()
    # The first moment, which a path reads, is kept in float32.
    assert oracles.relative_error(out["contribution_BSK"][..., 0], expected) < tolerance
  drop = -sum(float((G[k] * (after.params[k] - before.params[k])).sum()) for k in G)
  columns = [float(out[name][0]) for name in COLUMNS]
  size = sum(map(abs, columns))
  assert sum(columns) == pytest.approx(drop, abs=max(1e-7, 10 * tolerance) * size)
  assert columns[3] == 0 and out["check_rel_err"][0] < tolerance
  decay = sum(float((G[k] * before.params[k]).sum()) for k in G) * cfg.adam_weight_decay * float(out["learning_rate"])
  assert columns[2] == pytest.approx(decay, rel=1e-9) and (columns[2] != 0) == (case == "path")


def test_logits_are_those_of_the_merged_model_and_those_of_the_base_without_adapters():
  cfg = tiny.make_config(**LORA, base_num_kv_heads=4, qk_clip_threshold=9.0)
  model, base = tiny.make_model(cfg), tiny.make_model(config.replace(cfg, lora_rank=0))
  batch, values = TRAIN[0], tiny.by_label(tiny.make_model(cfg))
  whole = merged(tiny.by_label(base), values, 5 / 3)
  graphdef, params, rest = nnx.split(base, nnx.Param, ...)
  flat = [(path, v.replace(jnp.asarray(whole["/".join(map(str, path))]))) for path, v in nnx.to_flat_state(params)]
  expected = tiny.logits(nnx.merge(graphdef, nnx.from_flat_state(flat), rest), batch)
  plain = tiny.logits(base, batch)
  assert oracles.relative_error(tiny.logits(model, batch), expected) < 2e-6
  assert oracles.relative_error(plain, expected) > 1e-3
  np.testing.assert_array_equal(tiny.logits(adapters.disabled(model), batch), plain)
  assert oracles.relative_error(tiny.logits(model, batch), expected) < 2e-6  # `disabled` left it as it was
  assert {type(v) for label, v in _params(adapters.disabled(model)).items()} == {nnx.Param}


def _params(model) -> dict:
  return {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def created(cfg):
  """`adapters.create(cfg)`, compiled."""
  with tiny.cheap_compilation():
    return nnx.jit(lambda: adapters.create(cfg))()


def test_adapters_begin_as_in_peft_and_say_what_they_are():
  cfg = tiny.make_config(**LORA, weight_dtype="bfloat16")
  variables = _params(created(cfg))
  base = _params(created(config.replace(cfg, lora_rank=0)))
  assert {k for k in variables if "lora" not in k} == set(base)
  for label, v in base.items():
    np.testing.assert_array_equal(variables[label][...], v[...])
  found = {k: v for k, v in variables.items() if "lora" in k}
  layers = {k.rpartition("/lora/")[0].rpartition("layers/")[2] for k in found}
  assert layers == {f"self_attention/{n}" for n in ("query", "key", "value", "out")} | {
    f"mlp/{n}" for n in ("wi_0", "wi_1", "wo")
  }
  for label, v in found.items():
    a = v if label.endswith("a") else found[f"{label[:-1]}a"]
    assert v.dtype == jnp.float32 and v.shape[0] == 2
    if label.endswith("/b"):
      assert not v[...].any()
    else:
      bound = a.shape[1] ** -0.5
      assert 0.8 * bound < np.abs(a[...]).max() <= bound and abs(np.std(a[...]) - bound / 3**0.5) < 0.15 * bound
  out = found["decoder/layers/self_attention/out/lora/a"]
  assert out.shape == (2, 48, 3) and out.get_metadata()["axes"] == ("layers", "heads", None)
  query = found["decoder/layers/self_attention/query/lora/b"]
  assert query.shape == (2, 3, 8, 6) and query.get_metadata()["axes"] == ("layers", None, "q_heads", "kv")
  assert query.get_metadata()["matrix"] == (1, 2)
  again = _params(created(cfg))
  assert all(np.array_equal(again[k][...], v[...]) for k, v in found.items())


class Mixed(nnx.Module):
  """Layers of flax: dense ones, and an einsum whose output has the new axes first."""

  def __init__(self, rngs):
    self.first = nnx.Linear(5, 7, rngs=rngs)
    self.second = nnx.LinearGeneral(7, (2, 3), use_bias=True, rngs=rngs)
    self.third = nnx.Einsum("nthk,hko->otn", (2, 3, 4), (4, 1, 1), rngs=rngs)

  def __call__(self, x):
    return self.third(self.second(jnp.tanh(self.first(x))))


def test_layers_of_flax_take_adapters():
  model = Mixed(nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(11, 6, 5)).astype(np.float32)
  base, plain = tiny.by_label(model), model(x)
  cfg = AdapterConfig(lora_rank=2, lora_alpha=3.0)
  adapters.attach(model, cfg)
  np.testing.assert_array_equal(model(x), plain)
  for i, (_, v) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
    v[...] = jnp.asarray(np.random.default_rng(i).normal(size=v.shape), jnp.float32)
  whole = merged(base, {k: v for k, v in tiny.by_label(model).items() if "lora" in k}, 1.5)
  h = np.tanh(x @ whole["first/kernel"] + whole["first/bias"])
  h = np.einsum("nti,ihk->nthk", h, whole["second/kernel"]) + whole["second/bias"]
  expected = np.einsum("nthk,hko->otn", h, whole["third/kernel"]) + whole["third/bias"]
  assert oracles.relative_error(model(x), expected) < 2e-6


def test_dropout_is_of_the_layer_and_the_key_and_only_in_training():
  changes = LORA | {"lora_dropout": 0.4}
  cfg = tiny.make_config(**changes)
  model, batch = tiny.make_model(cfg), TRAIN[0]
  still, key = tiny.logits(model, batch), jax.random.key(3)
  moved = tiny.logits(model, batch, key)
  assert oracles.relative_error(moved, still) > 1e-3
  np.testing.assert_array_equal(moved, tiny.logits(model, batch, key))
  with keys_for_adapters(key):
    first, second = (np.asarray(lora.dropped(jnp.ones((50, 40)), 0.4)) for _ in range(2))
  assert set(np.unique(first)) == {0, np.float32(1 / 0.6)} and abs((first == 0).mean() - 0.4) < 0.03
  assert 0.2 < (first != second).mean() < 0.8
  # A step with scores has the bits of one without, and scores the masked pass.
  runs = [Run(exact=True, ghost_enabled=on, **changes) for on in (False, True)]
  for run in runs:
    out = run.step(TRAIN[1])
  assert out["check_rel_err"][0] < 1e-5
  off, on = (run.snapshot().params for run in runs)
  assert all(np.array_equal(on[k], v) for k, v in off.items())


def dot_shapes(hlo: str) -> list[tuple[int, ...]]:
  """The sorted sizes, without those of 1, of every product's result in an optimized program."""
  found = re.findall(r"= \w+\[([\d,]*)\][^ ]* (?:dot|custom-call)\(", hlo)
  return [tuple(sorted(int(n) for n in text.split(",") if n not in ("", "1"))) for text in found]


def weight_gradients(**changes) -> set[str]:
  """The kernels of whose shape, or that of the matrix, a product of the compiled step is."""
  run = Run(remat_policy="none", **changes)
  lowered = jax.jit(run.function).lower(run.state, TRAIN[0], (VALIDATION,) if run.cfg.ghost.ghost_enabled else ())
  shapes = set(dot_shapes(lowered.compile().as_text()))
  found = set()
  for label, v in tiny.abstract_by_label(nnx.merge(run.graphdef, run.state).model).items():
    if label.endswith("kernel"):
      sizes = v.shape[1:] if "layers" in label else v.shape
      flat = {sizes, (sizes[0], int(np.prod(sizes[1:]))), (int(np.prod(sizes[:-1])), sizes[-1])}
      found |= {label for shape in flat if tuple(sorted(shape)) in shapes}
  return found


@pytest.mark.parametrize("scored", [False, True])
def test_no_gradient_of_a_frozen_matrix_is_formed(scored):
  """Sizes differ pairwise, so that a product of a kernel's shape is its gradient."""
  assert weight_gradients(ghost_enabled=scored, **LORA, lora_module_path=".*/(query|wi_0)") == set()


def test_the_search_for_weight_gradients_finds_those_of_a_trained_model():
  assert len(weight_gradients(ghost_enabled=False, base_num_decoder_layers=2)) == 8


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"trainable_parameters_mask": ("*",)}, "lora_module_path for their layers"),
    ({"use_qk_clip": True}, "which use_qk_clip=true scales"),
    ({"lora_module_path": "(query"}, "is not a regular expression"),
  ],
)
def test_keys_that_contradict_adapters_are_refused(changes, text):
  with pytest.raises(ConfigError, match=re.escape(text)):
    tiny.make_config(**(LORA | changes))


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"lora_module_path": "query"}, "matches no layer that can have an adapter: decoder/layers/mlp/wi_0, "),
    ({"lora_module_path": ".*/logits_dense"}, "matches no layer"),
    ({**routed.MIXTRAL, "lora_module_path": ".*/wi_0", "lora_dropout": 0.1}, "lora_dropout=0.1 does not go with"),
    ({**routed.MIXTRAL, "lora_module_path": ".*/wo", "sparse_matmul": False}, "sparse_matmul=false does not go with"),
  ],
)
def test_layers_without_adapters_are_refused(changes, text):
  cfg = tiny.make_config(**(LORA | changes))
  with pytest.raises(ConfigError, match=re.escape(text)):
    adapters.create_abstract(cfg)


def test_rank_0_is_named():
  with pytest.raises(ConfigError, match="lora_rank=0 means no adapters"):
    adapters.attach(nnx.Dict(only=nnx.Linear(3, 3, rngs=nnx.Rngs(0))), config.load().adapter)


@pytest.mark.parametrize("axes", ["btd,dh->bh", "btd,dh->bt", "...d,dh->...h", "btd,hd->bth"])
def test_an_einsum_that_is_no_product_with_a_matrix_takes_no_adapter(axes):
  """Nor one that also sums over other axes, which an adapter's products do not."""
  shape = (5, 3) if "dh" in axes else (3, 5)
  layer = nnx.Dict(only=nnx.Einsum(axes, shape, rngs=nnx.Rngs(0)))
  with pytest.raises(ConfigError, match=re.escape(f"Einsum '{axes}' takes no adapter")):
    adapters.attach(layer, config.load("lora_rank=2").adapter)


def test_the_router_and_experts_are_adapted_only_by_name():
  model = adapters.create_abstract(tiny.make_config(**(LORA | routed.MIXTRAL)))
  assert not [k for k in _params(model) if "lora" in k and "self_attention" not in k]
  cfg = tiny.make_config(**(LORA | routed.MIXTRAL), lora_module_path=".*/wo")
  model = tiny.make_model(cfg)
  assert [k for k in _params(model) if "lora" in k] == [f"decoder/layers/MoeBlock_0/wo_lora_{x}" for x in "ab"]
  assert not [k for k in _params(adapters.disabled(model)) if "lora" in k]
  assert set(_params_of(model, trainable(cfg, model))) == {k for k in _params(model) if "lora" in k}


def _params_of(model, wanted) -> list[str]:
  return ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, wanted))]


def test_maxtexts_groups_of_keys_are_read(tmp_path):
  path = tmp_path / "a.yml"
  path.write_text("lora: {lora_rank: 4, lora_alpha: 2}\nadam_weight_decay: 0\n")
  assert config.load(path).adapter.lora_rank == 4
  loaded = config.load_with_origins(path, "lora.lora_rank=6")
  assert (loaded.config.adapter.lora_rank, loaded.config.adapter.lora_alpha) == (6, 2.0)
  assert loaded.origins["lora_alpha"] == f"{path}:1"
  assert config.load(path, "lora.enable_lora=false").adapter.lora_rank == 0
  assert config.load("enable_lora=true", "adam_weight_decay=0").adapter.lora_rank == 8
  assert config.load(path, "lora_use_rslora=true", "lora_rank=9").adapter.lora_alpha == 6  # 2 times the root of 9
  path.write_text("lora: {lora_rank: 9, lora_use_rslora: true}\n")
  assert config.load(path, "lora_alpha=4").adapter.lora_alpha == 12
  with pytest.raises(ConfigError, match="unknown key 'lora_rnak'"):
    config.load("lora.lora_rnak=6")
  path.write_text("lora: {lora_rnak: 4}")
  with pytest.raises(ConfigError, match=r"unknown key 'lora_rnak' \(.*a.yml:1\)"):
    config.load(path)
