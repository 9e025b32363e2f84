"""On a real GPU: cuDNN's attention, exact scores, the schedules, weights streamed from pinned host memory, experts.

  JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -n 4 --run-gpu -m gpu

B=2 rows, T=40 positions, H=6 query heads, K=3 key/value heads, h=16 head width, n examples.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from train_steps import TRAIN, VALIDATION, Run

from maxghost import ghost
from maxghost.ghost import low_rank
from maxghost.models import attention, grouped_matmul
from maxghost.training import host_memory

pytestmark = pytest.mark.gpu

B, T, H, K, WIDTH = 2, 40, 6, 3, 16
SEGMENTS = np.repeat(np.array([[1] * 4 + [2] * 6 + [3] * 10, [1] * 9 + [2] * 11], np.int32), 2, axis=1)
EXACT = functools.partial(jax.default_matmul_precision, "highest")  # a GPU's default for float32 is TF32
LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def on_gpu():
  if jax.default_backend() != "gpu":
    pytest.fail(f"JAX computes on {jax.default_backend()}: set JAX_PLATFORMS=cuda,cpu on a machine with a GPU")


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize("window", [None, 7])
def test_flash_is_the_attention_of_dot_product(segments, window):
  """Values and gradients in q, k, v: cuDNN in bfloat16 against all scores at once in float32."""
  rng = np.random.default_rng(0)
  q, k, v, weights = (
    rng.normal(size=(B, T, heads, WIDTH)).astype(jnp.bfloat16).astype(np.float32) for heads in (H, K, K, H)
  )

  def run(kernel, dtype):
    def total(q, k, v):
      q, k, v = (x.astype(dtype) for x in (q, k, v))
      out = attention.attend(q, k, v, segments, kernel=kernel, window=window).astype(jnp.float32)
      return jnp.sum(out * weights), out

    grads, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x) for x in (out, *grads)]

  with EXACT():
    exact = run("dot_product", jnp.float32)
  for ours, wanted in zip(run("flash", jnp.bfloat16), exact, strict=True):
    assert oracles.relative_error(ours, wanted) < 2e-2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scores_are_those_of_gradients_taken_one_by_one(schedule, tied, dtype):
  wide = dtype == "float64"
  cfg = tiny.make_config(dtype=dtype, weight_dtype=dtype, logits_via_embedding=tied, remat_policy="minimal")
  validation = tiny.make_batch(tiny.VALIDATION, seed=42)
  with jax.enable_x64(wide), EXACT():
    model = tiny.make_model(cfg)
    gradients = oracles.ExampleGradients(model)
    train, val = gradients(TRAIN[0]), gradients(validation)
    result = ghost.GhostEngine(cfg, schedule=schedule, direction="sgd").score(model, TRAIN[0], [validation])
    scores = {label: np.take(np.asarray(v), 0, axis=-2) for label, v in result.per_param.items()}
  tokens = np.maximum(oracles.token_counts(TRAIN[0]), 1)
  expected = oracles.dots(train, oracles.batch_gradient(val, validation), LAYERS)
  assert scores.keys() == expected.keys()
  for label, dots in expected.items():
    assert oracles.relative_error(scores[label], dots / tokens) < (1e-12 if wide else 1e-5), label


@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan"])
def test_a_bfloat16_step_with_flash_agrees_with_itself(schedule):
  """The self-check of real train steps, rows of 14 positions: the last of each is padding."""
  changes = {"dtype": "bfloat16", "attention": "flash", "head_dim": 8, "ghost_schedule": schedule}
  batches = [{name: np.pad(x, ((0, 0), (0, 1))) for name, x in batch.items()} for batch in (*TRAIN, VALIDATION)]
  run = Run(cheap=False, batch=batches[0], max_target_length=14, ghost_direction="adam", **changes)
  for batch in batches[:-1]:
    out = run.step(batch, (batches[-1],))
    assert np.isfinite(out["score_dot_BSK"]).all()
    assert float(np.max(out["check_rel_err"])) < 2e-2


@pytest.mark.parametrize("rank", [5, 32, 100])
def test_the_kernel_of_the_factors_gives_an_orthonormal_basis(rank):
  u = np.random.default_rng(rank).normal(size=(3, 150, 130)).astype(np.float32)
  left, right, _ = jax.jit(low_rank.factor, static_argnums=(1, 2))(u, rank, "u")
  text = jax.jit(low_rank.factor, static_argnums=(1, 2)).lower(u, rank, "u").as_text()
  assert "ghost_eliminate" in text
  left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
  np.testing.assert_allclose(left.swapaxes(1, 2) @ left, np.broadcast_to(np.eye(rank), (3, rank, rank)), atol=1e-5)
  np.testing.assert_allclose(left.swapaxes(1, 2) @ u, right, atol=1e-4 * np.abs(right).max())


def test_streamed_weights_and_moments_train_as_those_on_the_device():
  changes = {"base_num_decoder_layers": 4, "segment_lengths": (2,), "remat_policy": "full", "ghost_enabled": False}
  streams = {"offload_to_host": ("weights", "optimizer")}
  runs = [Run(cheap=False, **changes, **s) for s in ({}, streams)]
  runs[1].state = host_memory.put(runs[1].cfg, runs[1].state)
  with EXACT():
    for batch in TRAIN[:3]:
      theirs, ours = (run.step(batch) for run in runs)
      np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
  before, after = (run.snapshot().params for run in runs)
  for label in before:
    np.testing.assert_allclose(after[label], before[label], atol=1e-6, err_msg=label)
  kinds = {v.sharding.memory_kind for v in jax.tree.leaves(runs[1].state)}
  assert "pinned_host" in kinds


def test_products_of_experts_against_a_loop():
  """`ragged_dot` as a GPU runs it, and both its gradients."""
  rng = np.random.default_rng(3)
  sizes = np.array([3, 70, 0, 13, 64], np.int32)
  x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((150, 6), (5, 6, 11), (150, 11)))
  group = np.repeat(np.arange(5), sizes)
  expected = np.einsum("ri,rio->ro", x, w[group]), np.einsum("ro,rio->ri", g, w[group]), np.zeros_like(w)
  np.add.at(expected[2], group, x[:, :, None] * g[:, None])

  @jax.jit
  def run(x, w, g, sizes):
    y, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes), x, w)
    return y, *pull(g)

  with EXACT():
    actual = run(x, w, g, sizes)
  for a, e in zip(actual, expected, strict=True):
    assert oracles.relative_error(a, e) < 1e-5
