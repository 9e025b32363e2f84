"""Parameter paths, metadata, dtypes, the abstract twin, and every key of the model's config.

B rows, T positions, D embed dim, H query heads, K key/value heads, h head width, F feed-forward width, L layers,
V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import models
from maxghost.config.schema import ModelConfig
from maxghost.models import attention, autodiff, dense
from maxghost.objectives import LanguageModelLoss

LAYER = {
  "pre_self_attention_layer_norm/scale": ((20,), ("norm",)),
  "self_attention/query/kernel": ((20, 8, 6), ("embed", "q_heads", "kv")),
  "self_attention/key/kernel": ((20, 2, 6), ("embed", "kv_heads", "kv")),
  "self_attention/value/kernel": ((20, 2, 6), ("embed", "kv_heads", "kv")),
  "self_attention/out/kernel": ((8, 6, 20), ("heads", "kv", "embed")),
  "post_self_attention_layer_norm/scale": ((20,), ("norm",)),
  "mlp/wi_0/kernel": ((20, 36), ("embed", "mlp")),
  "mlp/wi_1/kernel": ((20, 36), ("embed", "mlp")),
  "mlp/wo/kernel": ((36, 20), ("mlp", "embed")),
}
OUTSIDE = {
  "token_embedder/embedding": ((263, 20), ("vocab", "embed")),
  "decoder/decoder_norm/scale": ((20,), ("norm",)),
  "decoder/logits_dense/kernel": ((20, 263), ("embed", "vocab")),
}


def shapes_and_axes(model) -> dict:
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  return {"/".join(map(str, path)): (v.shape, v.get_metadata()["axes"]) for path, v in flat}


def test_scanned_paths_shapes_and_logical_axes():
  stacked = {f"decoder/layers/{name}": ((3, *shape), ("layers", *axes)) for name, (shape, axes) in LAYER.items()}
  assert shapes_and_axes(models.create_abstract(tiny.make_config())) == OUTSIDE | stacked


def test_unrolled_paths_shapes_and_logical_axes():
  unrolled = {f"decoder/layers_{i}/{name}": spec for i in range(3) for name, spec in LAYER.items()}
  assert shapes_and_axes(models.create_abstract(tiny.make_config(scan_layers=False))) == OUTSIDE | unrolled


def test_tied_output_and_single_activation_leave_their_kernels_out():
  cfg = tiny.make_config(logits_via_embedding=True, mlp_activations=("gelu",))
  labels = shapes_and_axes(models.create_abstract(cfg)).keys()
  full = shapes_and_axes(models.create_abstract(tiny.make_config())).keys()
  assert full - labels == {"decoder/logits_dense/kernel", *(f"decoder/layers/mlp/wi_{i}/kernel" for i in range(2))}
  assert labels - full == {"decoder/layers/mlp/wi/kernel"}


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_abstract_twin_is_the_real_tree_without_arrays(scan_layers):
  cfg = tiny.make_config(base_num_decoder_layers=2, base_mlp_dim=9, scan_layers=scan_layers)
  abstract_graph, abstract_state = nnx.split(models.create_abstract(cfg))
  with tiny.cheap_compilation():
    real_graph, real_state = nnx.split(nnx.jit(lambda: models.create(cfg, rngs=nnx.Rngs(0)))())
  leaves = jax.tree.leaves(abstract_state)
  assert leaves
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(real_state))
  assert abstract_graph == real_graph

  def described(state):
    return {path: (type(v), v.shape, v.dtype, v.get_metadata()["axes"]) for path, v in nnx.to_flat_state(state)}

  assert described(abstract_state) == described(real_state)


def test_the_abstract_twin_of_a_huge_model_allocates_nothing():
  sizes = {"base_emb_dim": 2**17, "base_mlp_dim": 2**19, "vocab_size": 2**20, "base_num_decoder_layers": 1000}
  before = {id(x) for x in jax.live_arrays()}
  model = models.create_abstract(tiny.make_config(**sizes))
  assert model.decoder.layers.mlp.wo.kernel.shape == (1000, 2**19, 2**17)
  assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 1000


def test_a_model_with_dropout_holds_parameters_and_nothing_else():
  """No RNG state: a restart needs the step number only."""
  state = nnx.state(models.create_abstract(tiny.make_config(dropout_rate=0.3)))
  assert {type(v) for _, v in nnx.to_flat_state(state)} == {nnx.Param}


def test_initial_weights_have_the_stated_scale_and_follow_the_seed():
  cfg = tiny.make_config(base_emb_dim=50, base_num_decoder_layers=2, base_mlp_dim=90)
  with tiny.cheap_compilation():
    fresh = jax.jit(lambda key: nnx.state(models.create(cfg, rngs=nnx.Rngs(key))))
    first, other = (tiny.by_label(fresh(jax.random.key(seed))) for seed in (0, 1))
  expected = {
    "token_embedder/embedding": 1.0,
    "decoder/logits_dense/kernel": 50**-0.5,
    "decoder/layers/self_attention/query/kernel": 50**-0.5,
    "decoder/layers/self_attention/out/kernel": (48 * 4) ** -0.5,
    "decoder/layers/mlp/wi_0/kernel": 50**-0.5,
    "decoder/layers/mlp/wo/kernel": (90 * 4) ** -0.5,
  }
  for label, std in expected.items():
    assert abs(first[label].std() / std - 1) < 0.1, label
    assert np.abs(first[label] - other[label]).max() > std / 2, label
    assert np.abs(first[label][0] - first[label][1]).max() > std / 2, label  # layers differ, too
  assert (first["decoder/layers/pre_self_attention_layer_norm/scale"] == 1).all()


@pytest.mark.parametrize(
  ("dtypes", "param_dtype", "logits_dtype"),
  [
    ({}, "float32", "float32"),
    ({"dtype": "bfloat16"}, "float32", "float32"),
    ({"dtype": "bfloat16", "weight_dtype": "bfloat16"}, "bfloat16", "float32"),
    ({"dtype": "float64", "weight_dtype": "float64"}, "float64", "float64"),
  ],
)
def test_dtypes(dtypes, param_dtype, logits_dtype):
  with jax.enable_x64("float64" in dtypes.values()):
    model = models.create_abstract(tiny.make_config(**dtypes))
    assert {str(v.dtype) for _, v in nnx.to_flat_state(nnx.state(model))} == {param_dtype}
    tokens = jax.ShapeDtypeStruct((7, 13), jnp.int32)
    graphdef, state = nnx.split(model)
    hidden = jax.eval_shape(lambda s, x: nnx.merge(graphdef, s).hidden(x), state, tokens).x_BTD
    logits = jax.eval_shape(lambda s, x: nnx.merge(graphdef, s)(x), state, tokens)
  assert (hidden.shape, str(hidden.dtype)) == ((7, 13, 20), dtypes.get("dtype", "float32"))
  assert (logits.shape, str(logits.dtype)) == ((7, 13, 263), logits_dtype)


def test_bfloat16_compute_with_float32_weights_computes_in_bfloat16():
  graphdef, state = nnx.split(models.create_abstract(tiny.make_config(dtype="bfloat16")))
  jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, np.zeros((7, 13), np.int32))
  inputs = {v.aval.dtype.name for e in tiny.equations(jaxpr) if e.primitive.name == "dot_general" for v in e.invars}
  assert inputs == {"bfloat16"}


# One other value for each key of the section; a key that is added needs a line here.
OTHER = {
  "mtp_num_layers": 2,
  "mtp_loss_scaling_factor": 0.3,
  "attn_logits_soft_cap": 3.0,
  "final_logits_soft_cap": 30.0,
  "base_emb_dim": 22,
  "base_num_query_heads": 10,
  "base_num_kv_heads": 4,
  "head_dim": 10,
  "base_mlp_dim": 38,
  "base_num_decoder_layers": 5,
  "vocab_size": 269,
  "mlp_activations": ("gelu", "linear"),
  "logits_via_embedding": True,
  "normalization_layer_epsilon": 1e-6,
  "rope_max_timescale": 31.0,
  "dropout_rate": 0.2,
  "dtype": "bfloat16",
  "weight_dtype": "bfloat16",
  "matmul_precision": "highest",
  "attention": "blockwise",
  "scan_layers": False,
  "remat_policy": "full",
  "segment_lengths": (3, 1),
  "z_loss_multiplier": 1e-3,
  "decoder_block": "qwen3_moe",
  "mlp_activations_limit": 0.5,
  "mlp_bias": True,
  "trainable_position_size": 17,
  "rope_type": "none",
  "rope_factor": 3.0,
  "original_max_position_embeddings": 50,
  "rope_low_freq_factor": 1.5,
  "rope_high_freq_factor": 3.0,
  "beta_fast": 16.0,
  "beta_slow": 2.0,
  "rope_truncate": False,
  "rope_attention_scaling": False,
  "attention_bias": True,
  "attention_sink": True,
  "attention_type": ("local_sliding",),
  "sliding_window_size": 6,
  "inhomogeneous_layer_cycle_interval": 3,
  "use_qk_norm": True,
  "use_qk_clip": True,
  "num_experts": 7,
  "num_experts_per_tok": 3,
  "base_moe_mlp_dim": 10,
  "norm_topk_prob": False,
  "sparse_matmul": False,
  "num_vocab_tiling": 2,
  "quantization": "int8",
}
YARN = {"rope_type": "yarn", "rope_factor": 2.0, "original_max_position_embeddings": 640, "beta_fast": 8.0}
LLAMA3 = {"rope_type": "llama3.1", "rope_factor": 2.0, "original_max_position_embeddings": 40}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "use_qk_norm": True}
# What has to be set for a key to be read.
NEEDS = {
  "decoder_block": EXPERTS, "rope_factor": YARN, "original_max_position_embeddings": LLAMA3,
  "rope_low_freq_factor": LLAMA3, "rope_high_freq_factor": LLAMA3, "beta_fast": YARN, "beta_slow": YARN,
  "rope_truncate": YARN, "rope_attention_scaling": YARN, "num_experts_per_tok": EXPERTS, "base_moe_mlp_dim": EXPERTS,
  "attention_type": {"sliding_window_size": 4, "attention_type": ("local_sliding", "global", "global"),
                     "inhomogeneous_layer_cycle_interval": 3},
  "sliding_window_size": {"attention_type": ("local_sliding",), "sliding_window_size": 4},
  "norm_topk_prob": EXPERTS, "sparse_matmul": EXPERTS, "mtp_loss_scaling_factor": {"mtp_num_layers": 1},
}  # fmt: skip
# Read by config.load: a file laid over the base; by the train state: where the weights live; by the loss
# of training; by a tiled head; by the train step; by the caches of generation.
ELSEWHERE = {
  "model_name", "offload_to_host", "load_balance_loss_weight", "vocab_tiling_axis", "qk_clip_threshold",
  "quantize_kvcache",
}  # fmt: skip


def program_of(cfg, transform=jax.grad) -> str:
  """Parameter tree and the jaxpr of the training gradient, dropout on: all that a key of the model can change.

  transform=forward: of the loss alone, which is traced in half the time.
  """
  graphdef, state = nnx.split(models.create_abstract(cfg))
  batch = tiny.make_batch(tiny.PACKED, seed=1)

  def loss(state, key):
    losses = LanguageModelLoss.of(cfg).training(key if cfg.model.dropout_rate else None)
    return losses(nnx.merge(graphdef, state), batch)[0].sum()

  equations = tiny.equations(jax.make_jaxpr(transform(loss))(state, jax.random.key(0)))
  simple = (int, float, str, bool, tuple)
  lines = [
    f"{e.primitive} {[v.aval.str_short() for v in e.invars]} {[getattr(v, 'val', None) for v in e.invars]} "
    f"{ {k: v for k, v in e.params.items() if isinstance(v, simple)} } {e.params.get('precision')}"
    for e in equations
  ]
  return "\n".join([str(shapes_and_axes(nnx.merge(graphdef, state))), *lines])


def forward(loss):
  return loss


@functools.cache
def program_with(needs: tuple = (), transform=jax.grad) -> str:
  return program_of(tiny.make_config(**dict(needs)), transform)


def test_the_program_depends_on_the_config_alone():
  assert program_of(tiny.make_config()) == program_with()


FIELDS = [field for field in dataclasses.fields(ModelConfig) if field.name not in ELSEWHERE]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_key_of_the_model_changes_the_program(field):
  choices = field.metadata["choices"]
  if len(choices) == 1:
    pytest.skip(f"{field.name} has the one value {choices[0]}")
  assert field.name in OTHER, f"name another value of {field.name} in OTHER"
  needs = NEEDS.get(field.name, {})
  cfg = tiny.make_config(**needs | {field.name: OTHER[field.name]})
  if program_of(cfg, forward) == program_with(tuple(needs.items()), forward):
    assert program_of(cfg) != program_with(tuple(needs.items()))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_dense_dot_general_is_lax_dot_general(count, dtypes):
  rng = np.random.default_rng(0)
  inputs = (5, 4)[-count:]
  x = jnp.asarray(rng.normal(size=(7, 3, *inputs)), dtypes[0])
  w = jnp.asarray(rng.normal(size=(*inputs, 2, 6)), dtypes[1]).astype(dtypes[0])
  g = jnp.asarray(rng.normal(size=(7, 3, 2, 6)), dtypes[1])
  dims = ((tuple(range(x.ndim - count, x.ndim)), tuple(range(count))), ((), ()))

  def run(product, x, w, g):
    out, pull = jax.vjp(lambda x, w: product(x, w, dims, None, jnp.dtype(dtypes[1])), x, w)
    return out, *pull(g)

  tolerance = 1e-5 if dtypes[0] == "float32" else 2e-2
  with tiny.cheap_compilation():
    both = jax.jit(lambda *xs: [run(product, *xs) for product in (dense.dot_general, jax.lax.dot_general)])(x, w, g)
  for ours, theirs in zip(*both, strict=True):
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=tolerance, atol=tolerance)


def test_dense_dot_general_keeps_the_requested_precision():
  dims = (((2,), (0,)), ((), ()))
  x, w = np.ones((7, 3, 5), np.float32), np.ones((5, 2), np.float32)
  jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: dense.dot_general(x, w, dims, jax.lax.Precision.HIGHEST).sum(), (0, 1)))
  products = [e for e in tiny.equations(jaxpr(x, w)) if e.primitive.name == "dot_general"]
  assert len(products) >= 2
  assert {e.params["precision"] for e in products} == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize(
  "dims", [(((0,), (0,)), ((), ())), (((2,), (1,)), ((), ())), (((2,), (0,)), ((0,), (1,)))], ids=str
)
def test_dense_dot_general_refuses_other_contractions(dims):
  with pytest.raises(ValueError, match="trailing with leading"):
    dense.dot_general(np.ones((4, 4, 4)), np.ones((4, 4)), dims)


def test_dense_dot_general_has_a_forward_mode():
  dims = (((2,), (0,)), ((), ()))
  rng = np.random.default_rng(0)
  x, w, v = (rng.normal(size=s).astype(np.float32) for s in ((7, 3, 5), (5, 2), (5, 2)))
  with pytest.raises(TypeError):
    jax.jvp(lambda w: dense.dot_general(x, w, dims), (w,), (v,))
  with autodiff.forward_mode():
    out, tangent = jax.jvp(lambda w: dense.dot_general(autodiff.split_residual(x), w, dims), (w,), (v,))
  np.testing.assert_allclose(out, x @ w, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(tangent, x @ v, rtol=1e-5, atol=1e-6)


def pulled_in_order(function, *arguments):
  """(values and cotangents, equations of the backward pass) of function inside `gradients_in_order`."""

  def run(*arguments):
    out, pull = jax.vjp(function, *arguments)
    with autodiff.gradients_in_order():
      return out, pull(jnp.ones_like(out))

  return run(*arguments), list(tiny.equations(jax.make_jaxpr(run)(*arguments)))


def test_in_order_the_weight_gradient_is_there_before_the_cotangent_goes_on():
  """Same values; and what the product for the inputs reads comes out of a barrier that holds the weight gradient."""
  dims = (((2,), (0,)), ((), ()))
  rng = np.random.default_rng(0)
  x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((7, 3, 5), (5, 2)))
  product = lambda x, w: dense.dot_general(x, w, dims)  # noqa: E731
  (out, grads), equations = pulled_in_order(product, x, w)
  plain, pull = jax.vjp(product, x, w)
  for ours, theirs in zip((out, *grads), (plain, *pull(jnp.ones_like(plain))), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  (barrier,) = (e for e in equations if e.primitive.name == "optimization_barrier")
  by_shape = {e.outvars[0].aval.shape: e for e in equations if e.primitive.name == "dot_general"}
  assert by_shape[5, 2].outvars[0] in barrier.invars
  assert any(v in barrier.outvars for v in by_shape[7, 3, 5].invars)


def test_cotangents_of_branches_meet():
  """Same values, a forward mode, and in order one barrier for all branches."""
  rng = np.random.default_rng(0)
  a, b, v = (jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for _ in range(3))

  def joined(a, b):
    a, b = autodiff.join_cotangents([a, b])
    return jnp.tanh(a) * b

  (out, grads), equations = pulled_in_order(joined, a, b)
  np.testing.assert_allclose(out, np.tanh(a) * b, rtol=1e-6)
  expected = jax.grad(lambda a, b: (jnp.tanh(a) * b).sum(), argnums=(0, 1))(a, b)
  for ours, theirs in zip(grads, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
  assert [len(e.invars) for e in equations if e.primitive.name == "optimization_barrier"] == [2]
  with autodiff.forward_mode():
    _, tangent = jax.jvp(lambda a: joined(a, b), (a,), (v,))
  np.testing.assert_allclose(tangent, v * b / np.cosh(a) ** 2, rtol=1e-5, atol=1e-6)


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match="remat_policy=some"):
    models.stack.remat(lambda x: x, "some")


def test_blockwise_attention_multiplies_fewer_keys():
  """It would give the same values, too, if every block saw every key."""

  def score_size(kernel):
    q, k = np.ones((2, 13, 8, 6), np.float32), np.ones((2, 13, 4, 6), np.float32)
    jaxpr = jax.make_jaxpr(lambda q, k: attention.attend(q, k, k, kernel=kernel))(q, k)
    return sum(e.outvars[0].aval.size for e in jaxpr.eqns if e.primitive.name == "exp")

  full = 2 * 8 * 13 * 13
  assert score_size("dot_product") == full
  assert score_size("blockwise") == 2 * 8 * (4 * 4 + 4 * 8 + 4 * 12 + 1 * 13) < 0.65 * full
