"""QK-Clip: the largest attention logits, the scaling of queries and keys, and its column of the ledger.

L layers, H query heads, K key heads, G = H / K.
"""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny
import train_steps
from flax import nnx

from maxghost import config
from maxghost.models import attention, qk_clip
from maxghost.objectives import create


def logits_by_hand(q_BTHh, k_BSKh, segment_ids_BT, window):
  """The largest scaled score of each row and head, by loops."""
  rows, length, heads, width = q_BTHh.shape
  group = heads // k_BSKh.shape[2]
  out = np.full((rows, heads), -np.inf)
  for b in range(rows):
    for t in range(length):
      for s in range(t + 1):
        if segment_ids_BT[b, t] != segment_ids_BT[b, s] or not segment_ids_BT[b, t] or (window and t - s >= window):
          continue
        scores = [q_BTHh[b, t, h] @ k_BSKh[b, s, h // group] / width**0.5 for h in range(heads)]
        out[b] = np.maximum(out[b], scores)
  return np.where(np.isfinite(out), out, 0)


@pytest.mark.parametrize("window", [None, 3])
def test_the_largest_logits_are_those_that_attention_sees(window, monkeypatch):
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(3, 11, 6, 5)), rng.normal(size=(3, 11, 2, 5))
  segments = np.array([[1] * 4 + [2] * 7, [1] * 9 + [0] * 2, [0] * 11], np.int32)
  expected = logits_by_hand(q, k, segments, window)
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in (q, k))
  for short in (1024, 8):  # all queries at once, and two at a time
    monkeypatch.setattr(attention, "SHORT", short)
    found = attention.largest_logits(*arrays, jnp.asarray(segments), window)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  alone = attention.largest_logits(*arrays, None, window)
  np.testing.assert_allclose(alone, logits_by_hand(q, k, np.ones_like(segments), window), rtol=1e-5)


def test_queries_and_keys_share_a_head_s_factor():
  """Grouped keys take the root of the smallest factor; nothing else changes where a head is below the threshold."""
  peaks_LH = jnp.asarray(
    [[50.0, 400.0, 100.0, 90.0, 200.0, 20.0], [1, 2, 3, 4, 5, 6], [300, 1, 1, 1, 1, 150], [99] * 6]
  )
  query_LH, key_LK = qk_clip.factors(peaks_LH, 2, 100.0)
  gamma_LH = np.minimum(1, 100 / np.maximum(peaks_LH, 1e-9))
  np.testing.assert_allclose(query_LH * np.repeat(key_LK, 3, axis=1), gamma_LH, rtol=1e-6)
  np.testing.assert_allclose(key_LK[0], [0.5, 0.5**0.5], rtol=1e-6)
  assert np.all(query_LH[1] == 1) and np.all(key_LK[1] == 1)
  every_LH, own_LK = qk_clip.factors(peaks_LH, 6, 100.0)
  np.testing.assert_allclose(every_LH, own_LK, rtol=1e-6)
  np.testing.assert_allclose(own_LK**2, gamma_LH, rtol=1e-6)


LAYOUTS = {
  "scanned": {},
  "unscanned": {"scan_layers": False, "attention_bias": True},
  "cycle": {"attention_type": ("local_sliding", "global"), "sliding_window_size": 4,
            "inhomogeneous_layer_cycle_interval": 2},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_is_scaled_by_its_own_logits(layout):
  """The logits after clipping are the ones before times the factors, for every layer and head."""
  cfg = tiny.make_config(use_qk_clip=True, base_num_decoder_layers=4, base_num_query_heads=6, **LAYOUTS[layout])
  model, batch = tiny.make_model(cfg), tiny.make_batch(tiny.PACKED, seed=1)

  def measured(model):
    """max_logits_LH, and the queries and keys of the first layer in the stack's order."""
    return create(cfg).measured(model, batch)[2]["max_logits_LH"]

  peaks_LH = jax.jit(measured)(model)
  assert peaks_LH.shape == (4, 6) and len(np.unique(peaks_LH)) == 24
  # Only the first layer's input stays the same once weights change: one layer is clipped in each turn.
  for layer in range(4):
    one_LH = jnp.where(jnp.arange(4)[:, None] == layer, peaks_LH, 0)
    threshold = float(np.median(peaks_LH[layer]))
    clipped = nnx.clone(model)
    before = qk_clip.clip(clipped, one_LH, threshold)
    assert len(before) == (16 if layout == "unscanned" else 4 if layout == "cycle" else 2)
    after_LH = jax.jit(measured)(clipped)
    np.testing.assert_array_equal(after_LH[:layer], peaks_LH[:layer])
    np.testing.assert_allclose(after_LH[layer], np.minimum(peaks_LH[layer], threshold), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_clips_after_its_update_and_accounts_for_it(dtype):
  keys = {"dtype": dtype, "weight_dtype": dtype, "qk_clip_threshold": 0.65}
  val_batches = (train_steps.VALIDATION,)
  run, plain = (train_steps.Run(**keys, use_qk_clip=clip) for clip in (True, False))
  before = run.snapshot().params
  out, plain_out = (r.step(train_steps.TRAIN[0], val_batches) for r in (run, plain))
  np.testing.assert_array_equal(out["loss"], plain_out["loss"])
  np.testing.assert_array_equal(out["score_dot_BSK"], plain_out["score_dot_BSK"])
  peaks_LH, after, without = out["max_logits_LH"], run.snapshot().params, plain.snapshot().params
  assert (peaks_LH > 0.65).any() and (peaks_LH < 0.65).any()

  tolerance = 1e-5 if dtype == "float32" else 1e-12
  gamma_LKG = np.minimum(1, 0.65 / peaks_LH.astype(np.float64)).reshape(3, 2, 4)
  key = np.sqrt(gamma_LKG.min(-1))
  query = (gamma_LKG / key[..., None]).reshape(3, 8)
  for label, value in after.items():
    factor = 1.0
    if "/query/" in label or "/key/" in label:
      factor = (query if "/query/" in label else key)[:, None, :, None]
    np.testing.assert_allclose(value, without[label] * factor, rtol=tolerance if np.ndim(factor) else 0)

  with jax.enable_x64(dtype == "float64"):
    model, loss = tiny.make_model(run.cfg), create(run.cfg).validation()
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
      np.testing.assert_array_equal(variable[...], before["/".join(map(str, path))])

    def mean(model):
      losses, weights = loss(model, val_batches[0])
      return (losses * weights).sum() / weights.sum()

    gradient = tiny.by_label(nnx.jit(nnx.grad(mean))(model))
  expected = sum(np.sum(gradient[label] * (without[label] - after[label])) for label in after)
  np.testing.assert_allclose(out["qk_clip"], [expected], rtol=30 * tolerance)
  assert abs(expected) > 1e-4
  np.testing.assert_allclose(out["predicted"] - out["qk_clip"], plain_out["predicted"], rtol=30 * tolerance)


def test_micro_batches_clip_by_the_largest_of_all():
  runs = [train_steps.Run(use_qk_clip=True, ghost_enabled=False, gradient_accumulation_steps=count) for count in (1, 7)]
  whole, parts = (run.step(train_steps.TRAIN[0])["max_logits_LH"] for run in runs)
  np.testing.assert_allclose(parts, whole, rtol=1e-6)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"use_qk_norm": True}, "use_qk_norm=true normalizes afterwards"),
    ({"attn_logits_soft_cap": 30.0}, "attn_logits_soft_cap=30.0 does already"),
    ({"ghost_schedule": "reverse_scan"}, "use_qk_clip=true does not go with ghost_schedule=reverse_scan"),
    ({"trainable_parameters_mask": ("embed",)}, "would scale weights that"),
  ],
)
def test_what_does_not_go_with_it_is_refused(changes, words):
  with pytest.raises(config.ConfigError, match=words):
    config.replace(config.load(), use_qk_clip=True, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp 4 x tensor 2", "context 4 x data 2"])
def test_a_mesh_clips_as_one_device(mesh):
  keys = {"use_qk_clip": True, "qk_clip_threshold": 0.5}
  expected = meshes.run({}, **keys)
  peaks_LH = expected.outs[0]["max_logits_LH"]
  assert (peaks_LH > 0.5).any() and (peaks_LH < 0.5).any()
  found = meshes.run(meshes.MESHES[mesh], **keys)
  np.testing.assert_allclose(found.outs[0]["max_logits_LH"], peaks_LH, rtol=1e-5)
  meshes.assert_same(found, expected, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "keys",
  [
    {"ghost_select": "topk"},
    {"ghost_direction": "path", "ghost_curvature": "secant"},
    {"ghost_curvature": "hessian"},
    {"ghost_schedule": "forward_mode"},
    {"gradient_accumulation_steps": 7},
    {"opt_type": "muon"},
  ],
  ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items()),
)
def test_its_column_is_there_and_counted_once(keys):
  """With everything that it may be combined with; the other columns are those of the same step without it."""
  clipped, plain = (
    train_steps.Run(**keys, qk_clip_threshold=0.65, use_qk_clip=clip).step(train_steps.TRAIN[0])
    for clip in (True, False)
  )
  assert np.isfinite(clipped["qk_clip"]).all() and (clipped["qk_clip"] != 0).all() and "qk_clip" not in plain
  np.testing.assert_allclose(clipped["predicted"] - clipped["qk_clip"], plain["predicted"], rtol=1e-4, atol=1e-7)
  np.testing.assert_allclose(clipped["contribution_BSK"], plain["contribution_BSK"], rtol=1e-4, atol=1e-8)
