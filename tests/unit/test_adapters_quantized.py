"""Frozen matrices in few bits: the codes of an independent numpy implementation, and the scores of what they stand for.

d inputs, p outputs, t inputs of a block.
"""

import re

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx, traverse_util
from test_adapters import FLOAT64, LORA, MergedGradients
from train_steps import TRAIN, VALIDATION, Run

from maxghost import adapters, config
from maxghost.adapters import quantized
from maxghost.config import ConfigError
from maxghost.parallel.shardings import Layout, check_spread
from maxghost.training import state
from maxghost.training.plan import Plan

# The table of QLoRA, appendix E, to five digits.
NF4 = np.array(
  [-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0,
   0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0]
)  # fmt: skip


def restored(w_dp: np.ndarray, qtype: str, block: int | None = None) -> np.ndarray:
  """What a matrix becomes, by loops over blocks, in float64. block: outputs that share a scale of the sizes."""
  d, p = w_dp.shape
  tile = {12: 4, 14: 2, 20: 4, 36: 4, 48: 16}[d]
  sizes = np.array([[np.abs(w_dp[i : i + tile, j]).max() for j in range(p)] for i in range(0, d, tile)])
  kept = sizes.copy()
  if qtype == "nf4":
    block, mean = block or np.gcd(256, p), sizes.mean()
    for i in range(len(sizes)):
      for j in range(0, p, block):
        rest = sizes[i, j : j + block] - mean
        scale = np.abs(rest).max() or 1.0
        kept[i, j : j + block] = mean + np.round(rest / scale * 127) * scale / 127
  out = np.empty((d, p))
  for i in range(d):
    for j in range(p):
      size = sizes[i // tile, j]
      share = w_dp[i, j] / size if size else 0.0
      share = (
        quantized.LEVELS[np.abs(np.array(quantized.LEVELS) - share).argmin()]
        if qtype == "nf4"
        else np.round(share * 127) / 127
      )
      out[i, j] = share * kept[i // tile, j]
  return out


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_a_matrix_comes_back_as_numpy_says(qtype):
  np.testing.assert_allclose(quantized.LEVELS, NF4, atol=6e-6)
  rng = np.random.default_rng(0)
  w = rng.normal(size=(2, 12, 3, 8)).astype(np.float32)
  w[1, :4, 0, 0] = 0  # a block of zeros
  parts = quantized.quantize(jnp.asarray(w), qtype, 1, 1)
  found = quantized.dequantize(parts, qtype, jnp.float32, 1)
  assert found.shape == w.shape
  for layer in range(2):
    expected = restored(w[layer].astype(np.float64).reshape(12, 24), qtype)
    np.testing.assert_allclose(found[layer].reshape(12, 24), expected, atol=2e-6)
  if qtype == "nf4":
    assert parts["codes"].dtype == jnp.uint8 and parts["codes"].shape == (2, 6, 3, 8)
    assert {int(n) for n in np.unique(np.concatenate([parts["codes"] & 15, parts["codes"] >> 4]))} == set(range(16))
    assert 0.02 < np.abs(found - w).mean() < 0.1
  else:
    assert np.abs(found - w).max() <= np.abs(w).max() / 127 / 2 + 1e-6
  again = quantized.quantize(found, qtype, 1, 1)
  np.testing.assert_array_equal(again["codes"], parts["codes"])


def test_bits_of_a_real_matrix():
  """Half a byte for each entry, an eighth of a bit for its block's size, and little else."""
  shapes = jax.eval_shape(lambda w: quantized.quantize(w, "nf4", 0, 1), jax.ShapeDtypeStruct((4096, 14336), "bfloat16"))
  bits = 8 * sum(x.size * x.dtype.itemsize for x in shapes.values()) / (4096 * 14336)
  assert 4.125 < bits < 4.13


class Quantised(MergedGradients):
  """The oracle's base has the matrices that numpy makes of the codes."""

  def __init__(self, cfg, qtype):
    self.qtype = qtype
    super().__init__(cfg)

  def base(self, base):
    out = dict(base)
    for label, w in base.items():
      if re.search("(query|key|value|out|wi_0|wi_1|wo)/kernel", label):
        d = {"out": 48, "wo": 36}.get(label.split("/")[-2], 20)
        layers = np.asarray(w, np.float32).astype(np.float64).reshape(len(w) if "layers/" in label else 1, d, -1)
        out[label] = np.stack([restored(layer, self.qtype) for layer in layers]).reshape(w.shape)
      elif re.search("MoeBlock_0/(wi_0|wi_1|wo)$", label):
        experts = np.asarray(w, np.float32).astype(np.float64).reshape(-1, *w.shape[2:])
        out[label] = np.stack([restored(expert, self.qtype) for expert in experts]).reshape(w.shape)
    return out


NO_CLIPPING = {"gradient_clipping_threshold": 0.0}
EXPERTS = routed.MIXTRAL | NO_CLIPPING | {"lora_module_path": ".*/(out|wi_1|wo)"}


@pytest.mark.parametrize(
  ("qtype", "changes"),
  [
    ("nf4", {}),
    pytest.param("int8", NO_CLIPPING | {"ghost_schedule": "reverse_scan"}, marks=pytest.mark.slow),
    pytest.param("nf4", {"lora_module_path": ".*/(query|wo)", "scan_layers": False}, marks=pytest.mark.slow),
    ("nf4", EXPERTS),
    pytest.param("int8", EXPERTS | {"ghost_schedule": "reverse_scan"}, marks=pytest.mark.slow),
    pytest.param("nf4", EXPERTS | {"ghost_schedule": "forward_mode"}, marks=pytest.mark.slow),
  ],
)
def test_scores_are_those_of_the_matrices_that_the_codes_stand_for(qtype, changes):
  # With the default adam_eps, Adam's quotient would magnify the rounding of small gradients.
  run = Run(**(FLOAT64 | LORA | changes), lora_weight_qtype=qtype, adam_eps=1e-3)
  before = run.snapshot()
  out, after = run.step(TRAIN[0]), run.snapshot()
  documents = tiny.documents(TRAIN[0])
  rows = tiny.stack_rows([tiny.alone(TRAIN[0], *document) for document in documents])
  wide = config.replace(run.cfg, remat_policy="none", lora_weight_qtype="")
  with jax.enable_x64(True), tiny.cheap_compilation():
    gradients = Quantised(wide, qtype)
    g_N, val_N = gradients(rows, before.params), gradients(VALIDATION, before.params)
  g, G = oracles.batch_gradient(g_N, rows), oracles.batch_gradient(val_N, VALIDATION)
  cfg = run.cfg.optimizer
  adam = {"count": 0, "kappa": 1.0, "b1": cfg.adam_b1, "b2": cfg.adam_b2, "eps": cfg.adam_eps}
  u = oracles.adam_direction(G, g, {k: 0 * v for k, v in g.items()}, **adam)
  expected = np.zeros(out["contribution_BSK"].shape[:2])
  scale = float(out["learning_rate"]) * float(out["clip_factor"])
  for (row, segment), dot in zip(documents, sum(oracles.dots(g_N, u).values()), strict=True):
    expected[row, segment - 1] = scale * dot / oracles.token_counts(rows).sum()
  assert oracles.relative_error(out["contribution_BSK"][..., 0], expected) < 1e-12
  assert out["check_rel_err"][0] < 1e-12
  moved = {k for k, v in before.params.items() if not np.array_equal(after.params[k], v)}
  assert moved == {k for k in before.params if "lora" in k}


def test_the_backward_pass_keeps_the_codes():
  """Nothing of a matrix's size is kept for the backward pass, whatever the remat policy."""
  cfg = tiny.make_config(**LORA, lora_weight_qtype="nf4")
  model = nnx.merge(*nnx.split(adapters.create_abstract(cfg)))
  layer = model.decoder.layers.mlp.wi_0
  parts = {
    name: jax.ShapeDtypeStruct(getattr(layer, name).shape[1:], getattr(layer, name).dtype)
    for name in quantized.NAMES["nf4"]
  }
  x = jax.ShapeDtypeStruct((7, 13, 20), "float32")
  _, pull = jax.eval_shape(lambda x, parts: jax.vjp(lambda x: quantized.product("nf4", None, x, parts), x), x, parts)
  assert sorted(leaf.dtype.name for leaf in jax.tree.leaves(pull)) == ["float32", "float32", "float32", "int8", "uint8"]
  assert max(leaf.size for leaf in jax.tree.leaves(pull)) == 10 * 36
  assert not hasattr(layer, "kernel") and layer.codes.get_metadata()["axes"] == ("layers", "embed", "mlp")


def test_the_base_in_bfloat16_and_without_adapters():
  cfg = tiny.make_config(**LORA, lora_weight_qtype="bfloat16")
  dtypes = {"/".join(map(str, p)): v.dtype for p, v in nnx.to_flat_state(nnx.state(adapters.create_abstract(cfg)))}
  assert dtypes["decoder/layers/mlp/wo/kernel"] == jnp.bfloat16
  assert dtypes["decoder/layers/mlp/wo/lora/a"] == dtypes["token_embedder/embedding"] == jnp.float32
  cfg = config.replace(cfg, lora_weight_qtype="nf4")
  model, inputs = (
    tiny.make_model(cfg),
    (TRAIN[0]["inputs"], TRAIN[0]["inputs_position"], TRAIN[0]["inputs_segmentation"]),
  )
  plain = adapters.disabled(model)
  assert oracles.relative_error(plain(*inputs), model(*inputs)) > 1e-3
  assert not [v for _, v in nnx.to_flat_state(nnx.state(plain)) if isinstance(v, nnx.LoRAParam)]


def test_the_frozen_matrices_of_a_seed_do_not_depend_on_the_mesh():
  """A run goes on with them on another mesh, by their checksums. The mean of the sizes is a sum over all devices."""
  wide = {"base_emb_dim": 64, "base_mlp_dim": 192, "base_num_decoder_layers": 1, "lora_weight_qtype": "nf4"}
  found = []
  for mesh, count in (({}, 1), (meshes.MESHES["fsdp 8"], 8)):
    cfg = meshes.make_config(mesh, lora_rank=2, lora_module_path=".*/wo", **wide)
    with tiny.cheap_compilation():
      model = state.create_split(cfg, meshes.make_layout(cfg, count))[1]["model"]
    found.append(dict(nnx.to_flat_state(nnx.filter_state(model, quantized.Frozen))))
  assert any(path[-1] == "size_means" for path in found[0])
  for path, variable in found[0].items():
    np.testing.assert_array_equal(variable[...], found[1][path][...], str(path))


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"base_emb_dim": 21}, "decoder/layers/mlp/wi_0 has 21 inputs, of which no two make a pair"),
    ({"lora_rank": 0}, "lora_weight_qtype=nf4 is read beside adapters"),
    (
      EXPERTS | {"sparse_matmul": False, "lora_module_path": ".*/out"},
      "MoeBlock_0/wi_0 goes with sparse_matmul=true",
    ),
    (EXPERTS | {"base_moe_mlp_dim": 15}, "MoeBlock_0/wo has 15 inputs, of which no two make a pair"),
  ],
)
def test_what_cannot_be_held_in_few_bits_is_refused(changes, text):
  with pytest.raises(ConfigError, match=re.escape(text)):
    adapters.create_abstract(tiny.make_config(**(LORA | {"lora_weight_qtype": "nf4"} | changes)))


@pytest.mark.parametrize("shape", [(48, 20), (3, 48, 20), (2, 3, 36, 20)])
@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_layers_narrowed_one_by_one_are_those_of_the_stack(qtype, shape):
  kernel, depth = np.random.default_rng(4).standard_normal(shape, np.float32), len(shape) - 2
  parts = jax.tree.map(jnp.asarray, quantized.quantize_layers(kernel, qtype, depth, 1))
  whole = quantized.quantize(jnp.asarray(kernel), qtype, depth, 1)
  assert jax.tree.map(jnp.shape, parts) == jax.tree.map(jnp.shape, whole)
  held, expected = (quantized.dequantize(x, qtype, jnp.float32, depth) for x in (parts, whole))
  np.testing.assert_allclose(held, expected, rtol=2e-7)


def test_what_a_run_reads_is_not_computed_first():
  """The start of QLoRA on a large model would need more memory than its steps."""
  cfg = config.replace(tiny.make_config(), **LORA, lora_weight_qtype="nf4")
  whole = traverse_util.flatten_dict(state.to_tree(state.create_split(cfg)[1]))
  read = {path: None for path in whole if path[0] == "model" and "lora" not in path}
  _, fresh = state.create_split(cfg, without=read.__contains__)
  made = traverse_util.flatten_dict(state.to_tree(fresh))
  assert made.keys() == whole.keys() - read.keys() and len(read) > 8
  for path, x in made.items():
    assert np.asarray(x).tobytes() == np.asarray(whole[path]).tobytes(), path
  completed = traverse_util.flatten_dict(state.completed(traverse_util.unflatten_dict(read), cfg))
  assert completed.keys() == whole.keys() and not any(completed[path] is not None for path in read)


@pytest.mark.parametrize("model", [{}, routed.MIXTRAL])
def test_a_quantised_base_counts_among_the_weights_of_a_device(model):
  """`sharding_tolerance` judges the same model alike, however few bits its frozen matrices have."""

  def share(qtype: str) -> str:
    cfg = meshes.make_config({"ici_fsdp_parallelism": 2}, lora_rank=2, lora_weight_qtype=qtype, **model)
    layout = meshes.make_layout(cfg, 2)
    return check_spread(layout.abstract(state.abstract_split(cfg)[1]), layout, 10.0)

  assert share("nf4") == share("int8") == share("")


@pytest.mark.parametrize("changes", [{}, routed.MIXTRAL])
@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_a_run_counts_parameters_not_codes(qtype, changes):
  """Two codes of nf4 are in a byte, and both forms have sizes besides."""
  counts = []
  for held in ("", qtype):
    cfg = tiny.make_config(**(LORA | changes), lora_weight_qtype=held)
    counts.append(Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:1])).num_params)
  assert counts[0] == counts[1]
