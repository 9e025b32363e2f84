"""The whole transformer against a numpy model in float64, and against itself in other forms.

B rows, T positions, V vocabulary, L layers.
"""

import jax
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost.models import stack
from maxghost.models.layers import Hidden
from maxghost.objectives import token_losses

PACKED = tiny.make_batch(tiny.PACKED, seed=11)


def forward(model, batch):
  """Compiled logits, [B, T, V]."""
  graphdef, state = nnx.split(model)

  @jax.jit
  def run(state, batch):
    return nnx.merge(graphdef, state)(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])

  with tiny.cheap_compilation():
    return np.asarray(run(state, batch))


def loss_and_gradients(model, batch):
  """(logits, {label: gradient of the summed loss of the counting tokens})."""
  graphdef, state = nnx.split(model)

  @jax.jit
  def run(state, batch):
    def loss(state):
      logits = nnx.merge(graphdef, state)(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
      return (token_losses(logits, batch["targets"]) * (batch["targets_segmentation"] != 0)).sum(), logits

    return jax.grad(loss, has_aux=True)(state)

  with tiny.cheap_compilation():
    gradients, logits = run(state, batch)
  return np.asarray(logits), tiny.by_label(gradients)


@pytest.mark.parametrize(
  "changes",
  [
    {"attention": "dot_product"},
    {"attention": "blockwise", "logits_via_embedding": True},
    {"mlp_activations": ("gelu",), "scan_layers": False, "rope_max_timescale": 31.0},
    {"mlp_activations": ("relu", "gelu"), "normalization_layer_epsilon": 0.4},
  ],
  ids=["llama", "tied-blockwise", "gelu-unrolled", "relu-gelu"],
)
def test_logits_of_packed_rows_match_the_numpy_model_in_float64(changes):
  cfg = tiny.make_config(**changes)
  with jax.enable_x64(True):
    cfg = tiny.make_config(dtype="float64", weight_dtype="float64", **changes)
    model = tiny.make_model(cfg)
    logits = forward(model, PACKED)
    values = tiny.stack_layers(tiny.by_label(model), cfg.model.base_num_decoder_layers)
  expected = oracles.reference_logits(
    values, cfg.model, PACKED["inputs"], PACKED["inputs_position"], PACKED["inputs_segmentation"]
  )
  real = PACKED["inputs_segmentation"] > 0
  assert logits.dtype == np.float64
  assert oracles.relative_error(logits[real], expected[real]) < 1e-12


def test_no_segments_means_one_document_with_positions_from_zero():
  cfg = tiny.make_config()
  model = tiny.make_model(cfg)
  tokens = tiny.make_batch([(13,)] * tiny.ROWS, seed=3)
  graphdef, state = nnx.split(model)
  with tiny.cheap_compilation():
    implicit = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, tokens["inputs"])
  np.testing.assert_allclose(implicit, forward(model, tokens), atol=1e-6)
  assert implicit.shape == (tiny.ROWS, tiny.POSITIONS, tiny.VOCAB)


def test_a_document_does_not_see_its_neighbours_in_the_row():
  model = tiny.make_model(tiny.make_config())
  batch = tiny.make_batch(tiny.PACKED, seed=5)
  before = forward(model, batch)
  row, segment = 3, 3
  own = batch["inputs_segmentation"] == 0
  own[row] = batch["inputs_segmentation"][row] == segment
  other = tiny.make_batch(tiny.PACKED, seed=6)
  changed = {name: np.where(own, v, other[name]) if name == "inputs" else v for name, v in batch.items()}
  after = forward(model, changed)
  np.testing.assert_array_equal(after[row][own[row]], before[row][own[row]])
  assert np.abs(after[row][~own[row]] - before[row][~own[row]]).max() > 1e-2


def test_a_document_has_the_same_logits_in_a_row_of_its_own():
  model = tiny.make_model(tiny.make_config())
  packed = forward(model, PACKED)
  chosen = [d for d in tiny.documents(PACKED) if d[1] >= 2][: tiny.ROWS]
  single = forward(model, tiny.stack_rows([tiny.alone(PACKED, *d) for d in chosen]))
  for i, (row, segment) in enumerate(chosen):
    at = PACKED["inputs_segmentation"][row] == segment
    np.testing.assert_allclose(single[i, : at.sum()], packed[row, at], atol=2e-5, err_msg=f"row {row}, {segment}")


@pytest.fixture(scope="module")
def plain_gradients():
  return loss_and_gradients(tiny.make_model(tiny.make_config(remat_policy="none")), PACKED)


@pytest.mark.parametrize(
  "changes",
  [
    {"remat_policy": "minimal"},
    {"remat_policy": "full"},
    {"attention": "blockwise", "remat_policy": "none"},
    {"scan_layers": False, "remat_policy": "none"},
    {"scan_layers": False, "remat_policy": "full"},
  ],
  ids=str,
)
def test_same_logits_and_gradients_in_every_form(changes, plain_gradients):
  logits, gradients = loss_and_gradients(tiny.make_model(tiny.make_config(**changes)), PACKED)
  real = PACKED["inputs_segmentation"] > 0
  assert oracles.relative_error(logits[real], plain_gradients[0][real]) < 1e-5
  stacked = tiny.stack_layers(gradients, 3)
  assert stacked.keys() == plain_gradients[1].keys()
  for label, expected in plain_gradients[1].items():
    assert np.abs(expected).max() > 0, label
    assert oracles.relative_error(stacked[label], expected) < 1e-5, label


def test_remat_policies_save_less_and_recompute_more():
  """The policies above would agree just as well if all of them saved everything."""

  def saved_and_products(policy):
    graphdef, state = nnx.split(tiny.models.create_abstract(tiny.make_config(remat_policy=policy)))

    def loss(state):
      return nnx.merge(graphdef, state)(PACKED["inputs"], None, PACKED["inputs_segmentation"]).sum()

    equations = list(tiny.equations(jax.make_jaxpr(jax.grad(loss))(state)))
    forward = next(e for e in equations if e.primitive.name == "scan")
    saved = sum(v.aval.size for v in forward.outvars if v.aval.shape[0] == 3)  # stacked over the layers
    return saved, sum(e.primitive.name == "dot_general" for e in equations)

  none, minimal, full = (saved_and_products(policy) for policy in ("none", "minimal", "full"))
  assert none[0] > minimal[0] > full[0] >= 3 * 7 * 13 * 20
  assert none[1] < minimal[1] < full[1]


def test_tied_output_uses_the_embedding_table():
  cfg = tiny.make_config(logits_via_embedding=True)
  labels = tiny.abstract_by_label(tiny.models.create_abstract(cfg))
  assert "decoder/logits_dense/kernel" not in labels
  gradients = loss_and_gradients(tiny.make_model(cfg), PACKED)[1]["token_embedder/embedding"]
  unused = np.setdiff1d(np.arange(tiny.VOCAB), PACKED["inputs"][PACKED["inputs_segmentation"] > 0])
  assert np.abs(gradients[unused]).max(-1).min() > 0  # only the output's use reaches the rows of unseen tokens


def test_dropout_depends_on_the_key_and_is_off_without():
  cfg = tiny.make_config(dropout_rate=0.5)
  model = tiny.make_model(cfg)
  graphdef, state = nnx.split(model)

  @jax.jit
  def dropped(state, key):
    return nnx.merge(graphdef, state)(PACKED["inputs"], dropout_key=key)

  with tiny.cheap_compilation():
    first, again, other = (np.asarray(dropped(state, jax.random.key(seed))) for seed in (1, 1, 2))
    off = np.asarray(jax.jit(lambda s: nnx.merge(graphdef, s)(PACKED["inputs"]))(state))
    never = np.asarray(
      jax.jit(lambda s: nnx.merge(nnx.graphdef(tiny.make_model(tiny.make_config())), s)(PACKED["inputs"]))(state)
    )
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - other).max() > 0.1
  np.testing.assert_array_equal(off, never)
  assert np.abs(first - off).max() > 0.1


def test_each_branch_and_each_layer_draws_its_own_dropout_mask():
  """With one branch silenced, a layer's output differs from its input where the other branch was kept."""
  cfg = tiny.make_config(dropout_rate=0.4, scan_layers=False)
  layer = tiny.make_model(cfg).decoder.layers_1
  x_BTD = np.random.default_rng(0).normal(size=(2, 13, 20)).astype(np.float32)
  positions = np.tile(np.arange(13), (2, 1))

  @jax.jit
  def masks(layer_state, key):
    layer = nnx.merge(graphdef, layer_state)
    out = []
    for silent in (layer.mlp.wo, layer.self_attention.out):
      kernel = silent.kernel[...]
      silent.kernel[...] = 0 * kernel
      out.append(layer(Hidden(x_BTD), positions, None, key).x_BTD != x_BTD)
      silent.kernel[...] = kernel
    return out

  graphdef, state = nnx.split(layer)
  attention, mlp = masks(state, jax.random.key(0))
  assert 0.5 < attention.mean() < 0.7
  assert 0.5 < mlp.mean() < 0.7
  assert 0.4 < (attention == mlp).mean() < 0.64  # 0.6**2 + 0.4**2 for independent masks


def test_the_stack_runs_layers_in_order_with_their_own_keys():
  class Layer(nnx.Module):
    def __init__(self, rngs):
      self.w = nnx.Param(jax.random.normal(rngs.params(), (4,)))

    def __call__(self, x, shift, key):
      return 3 * x + self.w + shift + jax.random.normal(key, (4,))

  layers = stack.create(Layer, 5, nnx.Rngs(0))
  key = jax.random.key(9)
  x = stack.run(layers, np.zeros(4, np.float32), (0.5,), remat_policy="none", dropout_key=key)
  expected = np.zeros(4)
  for i in range(5):
    noise = jax.random.normal(jax.random.fold_in(key, i), (4,))
    expected = 3 * expected + np.asarray(layers.w[i]) + 0.5 + np.asarray(noise)
  np.testing.assert_allclose(x, expected, rtol=1e-5)
  assert len(np.unique(np.asarray(layers.w[...]))) == 20  # every layer has weights of its own
