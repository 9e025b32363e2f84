"""A pipeline of stages against one device: losses, gradients and scores of a train step; stages alone in float64.

S stages, R repeats, M micro-batches, L layers, B rows, D features.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest

from maxghost import config, load_model
from maxghost.config import ConfigError
from maxghost.ghost.schedules.reverse_scan import pipelined
from maxghost.interop import model_path
from maxghost.models import attention_flash, pipeline, segments
from maxghost.objectives import LanguageModelLoss
from maxghost.parallel import collectives, stages
from maxghost.parallel.shardings import Layout, setting, use
from maxghost.training.plan import Plan

LAYERS: dict[str, Any] = {"base_num_decoder_layers": 8, "ghost_val_batch_size": 4}
PIPES = {
  "2 stages": {"ici_stage_parallelism": 2, "ici_fsdp_parallelism": 4, "num_pipeline_microbatches": 2},
  "2 x 2 repeats": {
    "ici_stage_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2,
    "num_pipeline_microbatches": 4, "num_pipeline_repeats": 2,
  },
  "4 stages": {"ici_stage_parallelism": 4, "ici_tensor_parallelism": 2, "num_pipeline_microbatches": 8},
  "4 x 2 repeats": {
    "ici_stage_parallelism": 4, "ici_data_parallelism": 2, "num_pipeline_microbatches": 4, "num_pipeline_repeats": 2
  },
}  # fmt: skip
SGD = {"ghost_direction": "sgd"}


@pytest.fixture(scope="module")
def expected():
  return meshes.run({}, **LAYERS)


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("2 stages", {}),
    ("2 x 2 repeats", {"ghost_schedule": "reverse_scan"}),
    ("4 stages", {"ghost_schedule": "reverse_scan"}),
    ("4 x 2 repeats", {}),
    pytest.param("2 x 2 repeats", {}, marks=pytest.mark.slow),
    pytest.param("4 x 2 repeats", {"ghost_schedule": "reverse_scan"}, marks=pytest.mark.slow),
  ],
)
def test_a_scored_step_equals_that_of_one_device(name, changes, expected):
  """AdamW's own direction, which needs the whole gradient of each weight."""
  found = meshes.run(PIPES[name], **LAYERS, **changes)
  meshes.assert_same(found, expected)
  for ours, theirs in zip(found.outs, expected.outs, strict=True):
    assert meshes.relative_error(ours["loss"], theirs["loss"]) < 1e-6
    assert abs(ours["check_rel_err"]).max() < 1e-5


@pytest.mark.slow
def test_forward_mode_on_stages_knows_the_clipping_factor_of_the_step():
  changes = LAYERS | {"ghost_schedule": "forward_mode"}
  meshes.assert_same(meshes.run(PIPES["4 stages"], **changes), meshes.run({}, **changes))


def test_directions_known_before_are_scored_in_the_pipeline():
  """Each micro-batch against the validation gradient: without a second pass over the layers."""
  found = meshes.run(PIPES["2 x 2 repeats"], **LAYERS, **SGD, ghost_detail="token")
  one = meshes.run({}, **LAYERS, **SGD, ghost_detail="token")
  meshes.assert_same(found, one)
  assert (np.asarray(found.outs[0]["token_contribution_KBT"]) != 0).any()
  assert meshes.relative_error(*(x.outs[0]["token_contribution_KBT"] for x in (found, one))) < 1e-5


@pytest.mark.parametrize("name", ["2 x 2 repeats", pytest.param("4 stages", marks=pytest.mark.slow)])
def test_a_plain_step_equals_that_of_one_device(name, expected):
  found = meshes.run(PIPES[name], **LAYERS, ghost_enabled=False)
  for label, value in expected.moments.items():
    assert meshes.relative_error(found.moments[label], value) < 1e-5, label
  assert meshes.relative_error(found.outs[1]["loss"], expected.outs[1]["loss"]) < 1e-6
  if name == "2 x 2 repeats":
    moved = collectives.read(found.compiled.as_text(), dict(found.layout.mesh.shape))
    assert_little_crosses_stages([one for one in moved if one.axes == ("stage",)])


def assert_little_crosses_stages(moved: list) -> None:
  """Nine iterations send one micro-batch each, forward and back; each chunk of weights and of gradients is sent once.

  Beside that the hidden states of the batch, half of which are on a stage, are gathered and summed, but no weights.
  """
  hidden = 8 // 2 * meshes.POSITIONS * 24 * 4
  sent = [one for one in moved if one.kind == "collective-permute"]
  assert [one.num_bytes for one in sent if one.count > 1] == [hidden // 4] * 2
  assert {one.count for one in sent} == {1, 4 * 2 + 2 - 1}
  assert {one.count for one in moved if one not in sent} == {1}
  assert max(one.num_bytes for one in moved if one.kind == "all-gather") <= hidden


def test_the_way_through_the_stages_is_told():
  cfg = meshes.make_config(PIPES["2 x 2 repeats"], **LAYERS)
  (line,) = [text for text in Plan.of(cfg, meshes.make_layout(cfg, 8)).lines() if "bubble" in text]
  assert line.startswith("pipeline: 2 stages x 2 layers x 2 repeats, 4 micro-batches in 9 iterations; each passes on")
  assert line.endswith("bubble 11.1% (1 of 9)")


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"opt_type": "muon"},
    {"ghost_direction": "second_order"},
    {"ghost_curvature": "secant", "ghost_rank": 4},
    {"ghost_schedule": "reverse_scan", "ghost_curvature": "secant", "ghost_rank": 4},
    {"ghost_schedule": "reverse_scan", "opt_type": "muon", "logits_via_embedding": True},
    {"ghost_direction": "marginal", "gradient_clipping_threshold": 0.1},
    {"gradient_accumulation_steps": 2},
    {"ghost_schedule": "reverse_scan", **SGD},
    {"ghost_schedule": "concat", **SGD},
    {"inhomogeneous_layer_cycle_interval": 2, **SGD},
    {"use_qk_clip": True},
    {"ghost_schedule": "concat", "ghost_direction": "path"},
    {"mtp_num_layers": 1},
    {"inhomogeneous_layer_cycle_interval": 2, "attention_type": ("local_sliding", "global"), "sliding_window_size": 5},
    {"ghost_schedule": "reverse_scan", "mtp_num_layers": 2},
    {"ghost_schedule": "reverse_scan", "trainable_parameters_mask": ("*token_embedder*",)},
    {"ghost_val_every": 2, "ghost_curvature": "secant"},
    {"ghost_select": "topk", "ghost_select_fraction": 0.5},
  ],
  ids=str,
)
def test_what_goes_with_a_pipeline_gives_the_numbers_of_one_device(changes):
  sizes = LAYERS | {"base_num_decoder_layers": 8 if "inhomogeneous_layer_cycle_interval" in changes else 4}
  meshes.assert_same(meshes.run(PIPES["2 x 2 repeats"], **sizes, **changes), meshes.run({}, **sizes, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan"])
@pytest.mark.parametrize("mesh", [PIPES["2 x 2 repeats"], {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}])
def test_the_tpu_kernel_of_attention_gives_the_numbers_of_one_device(mesh, schedule, monkeypatch):
  """Each device runs it on its own rows and heads, inside the stages too; here as plain operations."""

  def splash(q, k, v, segments, sinks, shape, platform):
    return attention_flash.splash(q, k, v, segments, sinks, shape, interpret=True)

  one = meshes.run({}, **LAYERS, ghost_schedule=schedule)
  monkeypatch.setattr(attention_flash, "attend", splash)
  meshes.assert_same(meshes.run(mesh, **LAYERS, ghost_schedule=schedule, attention="flash"), one)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"quantization": "int8_stochastic", "ghost_schedule": "reverse_scan"},
    {"quantization": "fp8"},
    {"lora_rank": 3, "adam_weight_decay": 0.0, "ghost_schedule": "reverse_scan"},
  ],
  ids=str,
)
def test_what_float32_rounds_is_that_of_one_device_in_float64(changes):
  """In float32, the order of a sum decides now and then how an operand of a product is rounded."""
  with jax.enable_x64(True):
    changes = LAYERS | {"base_num_decoder_layers": 4, "dtype": "float64", "weight_dtype": "float64"} | changes
    found, one = (meshes.run(mesh, **changes) for mesh in (PIPES["2 x 2 repeats"], {}))
  meshes.assert_same(found, one, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "further_tokens"), [("two_pass", 0), ("reverse_scan", 0), ("reverse_scan", 1)])
def test_experts_balance_each_micro_batch_as_accumulation_does(schedule, further_tokens):
  """The load of the experts counts one micro-batch, in one step of a pipeline as in two of accumulated gradients, also
  that of the experts behind the pipeline, in a module that predicts a further token."""
  sizes = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}
  sizes |= LAYERS | SGD | {"base_num_decoder_layers": 4, "load_balance_loss_weight": 0.1}
  sizes |= {"mtp_num_layers": further_tokens}
  mesh = {"ici_stage_parallelism": 2, "ici_expert_parallelism": 4, "num_pipeline_microbatches": 2}
  found = meshes.run(mesh, **sizes, ghost_schedule=schedule)
  one = meshes.run({}, **sizes, gradient_accumulation_steps=2)
  meshes.assert_same(found, one)
  np.testing.assert_allclose(found.outs[0]["moe_lb_loss"], one.outs[0]["moe_lb_loss"], rtol=1e-5)


def make_layout(num_stages: int, others: int = 1, **keys) -> Layout:
  """Stages of `others` devices each, which share the rows of a micro-batch."""
  mesh = {"ici_stage_parallelism": num_stages, "ici_fsdp_parallelism": others}
  parallel = config.replace(config.load(), **mesh, **keys).parallel
  return Layout.of(parallel, jax.devices()[: num_stages * others])


def stack(num_layers: int, width: int, rows: int):
  """(x, layers, inputs) of a stack in float64 with pairwise different sizes."""
  rng = np.random.default_rng(3)
  layers = {"w": rng.normal(size=(num_layers, width, width)) / 2, "bias": rng.normal(size=(num_layers, width))}
  layers |= {"count": np.zeros(num_layers), "index": np.arange(num_layers)}
  x = {"h": rng.normal(size=(rows, width)), "visits": np.zeros((rows,))}
  return jax.tree.map(jnp.asarray, (x, layers, rng.integers(0, 9, (rows,))))


def body(x, layer, rows):
  """Layers differ by their index, rows by their number. visits: counts rows, by a weight of its own."""
  h = x["h"] + jnp.tanh(x["h"] @ layer["w"] + layer["bias"][None]) * jnp.cos(rows + layer["index"])[:, None]
  return {"h": h, "visits": x["visits"] + layer["count"]}


def loss(x, layers, inputs, layout: Layout | None, whole: bool):
  with use(layout), setting(pipeline._whole_rows, whole):
    if layout is None:
      x, _ = segments.scan(lambda x, layer: (body(x, layer, inputs), None), x, layers)
    else:
      x = pipeline.run(body, x, layers, inputs)
  return jnp.sum(jnp.sin(x["h"])) + jnp.sum(x["visits"])


SHAPES = [  # stages, devices of each, micro-batches, repeats, rows
  (2, 1, 2, 1, 6), (2, 4, 3, 3, 12), (4, 2, 4, 3, 8), (4, 1, 7, 1, 14), (3, 1, 5, 2, 10), (4, 1, 4, 3, 2)
]  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stages_compute_what_a_scan_does_in_float64(shape, whole):
  """Also with fewer rows than micro-batches, and with more micro-batches than stages. What waits adds nothing: the
  gradient of a layer's count is the number of rows that passed it."""
  num_stages, others, num_micro, repeats, rows = shape
  with jax.enable_x64(True):
    keys = {"num_pipeline_microbatches": num_micro, "num_pipeline_repeats": repeats, "base_num_decoder_layers": 12}
    layout = make_layout(num_stages, others, per_device_batch_size=num_micro, **keys)
    x, layers, inputs = stack(12, 5, rows)
    floats = {name: v for name, v in layers.items() if name != "index"}

    def run(x, floats, layout):
      return loss(x, floats | {"index": layers["index"]}, inputs, layout, whole)

    both = [jax.jit(jax.value_and_grad(lambda x, f, la=la: run(x, f, la), argnums=(0, 1))) for la in (layout, None)]
    found, expected = (function(x, floats) for function in both)
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
  np.testing.assert_array_equal(found[1][1]["count"], np.full(12, float(rows)))


def test_forward_mode_passes_the_stages():
  with jax.enable_x64(True):
    layout = make_layout(2, num_pipeline_microbatches=3, num_pipeline_repeats=2, per_device_batch_size=3,
                         base_num_decoder_layers=4)  # fmt: skip
    x, layers, inputs = stack(4, 5, 6)

    def tangent(h, layout):
      return jax.jvp(lambda h: loss(x | {"h": h}, layers, inputs, layout, False), (h,), (h**2,))

    found, expected = (jax.jit(lambda h, la=la: tangent(h, la))(x["h"]) for la in (layout, None))
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 8])
def test_each_chunk_travels_once(num_stages, repeats):
  """Chunk c is stored on stage c // R and runs on stage c % S, as its chunk c // S."""
  seen = set()
  for one in stages._exchanges(num_stages, repeats):
    assert sorted(to for _, to, _ in one) == list(range(num_stages))
    for stage, (kept, to, slot) in enumerate(one):
      assert stage * repeats + kept == slot * num_stages + to
      seen.add((stage, kept))
  assert len(seen) == num_stages * repeats


REFUSED = [
  (
    {"base_num_decoder_layers": 6, "ici_stage_parallelism": 4},
    "ici_stage_parallelism=4, base_num_decoder_layers=6: 6 stacked layers do not divide over 4 stages; "
    "use 2 or 3 or 6 stages, or base_num_decoder_layers=4 or 8",
  ),
  (
    {"base_num_decoder_layers": 1, "ici_stage_parallelism": 2},
    "1 stacked layers do not divide over 2 stages; use one stage",
  ),
  (
    {"base_num_decoder_layers": 12, "ici_stage_parallelism": 5, "num_pipeline_repeats": 3},
    "do not divide over 5 stages; use 2 or 4 stages, or",
  ),
  (
    {"base_num_decoder_layers": 8, "ici_stage_parallelism": 3, "num_layers_per_pipeline_stage": 3},
    "do not divide over 3 stages; use 2 or 4 or 8 stages without num_layers_per_pipeline_stage, or",
  ),
  ({"num_layers_per_pipeline_stage": 3}, "8 stacked layers are not 2 stages x num_layers_per_pipeline_stage=3; use"),
  (
    {"ici_stage_parallelism": 8, "num_pipeline_microbatches": 6, "per_device_batch_size": 1},
    "use 8 or more, such as 8",
  ),
  (
    {"inhomogeneous_layer_cycle_interval": 8},
    "base_num_decoder_layers=8 in cycles of 8: 1 stacked layers do not divide",
  ),
  ({"num_pipeline_repeats": 3}, "8 stacked layers are not 2 stages x num_pipeline_repeats=3; use num_layers_per_pip"),
  (
    {"num_layers_per_pipeline_stage": 3},
    "num_layers_per_pipeline_stage with num_pipeline_repeats: 1 with 4",
  ),
  ({"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 4}, "base_num_decoder_layers=16$"),
  ({"num_pipeline_microbatches": 1}, "num_pipeline_microbatches=1 is less than the 2 stages"),
  ({"num_pipeline_microbatches": 0}, "num_pipeline_microbatches=0 is no number; use -1 for as many as stages"),
  ({"num_pipeline_microbatches": 3}, "makes 8 rows for 2 devices .* do not divide into 3 micro-batches; use num_pip"),
  ({"ici_stage_parallelism": -1}, "ici_stage_parallelism=-1 leaves open how layers are cut into stages"),
  ({"ici_stage_parallelism": 1, "num_pipeline_repeats": 2}, "num_pipeline_repeats=2 is for a pipeline; set ici_stage"),
  ({"ici_stage_parallelism": 1, "dcn_stage_parallelism": 2, "dropout_rate": 0.1}, "and dcn_stage_parallelism makes 2"),
  ({"scan_layers": False}, "scan_layers=false has no stack that stages could share"),
  ({"segment_lengths": (2,)}, "segment_lengths=.* cuts the layers into segments of one device"),
  ({"dropout_rate": 0.1}, "dropout_rate=0.1 would draw other masks for each micro-batch"),
  ({"lora_rank": 4, "load_parameters_path": "x", "lora_dropout": 0.1}, "lora_dropout=0.1 would draw other masks"),
  ({"enable_diloco": True, "dcn_data_parallelism": 2}, "enable_diloco=true trains slices apart"),
  ({"offload_to_host": ("optimizer",), "segment_lengths": (2,)}, "offload_to_host=.* moves segments of layers"),
  ({"offload_to_host": ("carries",), "segment_lengths": (2,)}, "offload_to_host=.* moves segments of layers"),
  ({"offload_to_host": ("optimizer", "val_gradient"), "ghost_direction": "sgd", "ghost_rank": 2}, "moves segments of"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_a_pipeline_cannot_do_is_refused_before_jax(changes, message):
  keys = {"ici_stage_parallelism": 2, "base_num_decoder_layers": 8, "per_device_batch_size": 4}
  with pytest.raises(ConfigError, match=message) as refused:
    config.replace(config.load(), **(keys | changes))
  if "offload_to_host" in changes:  # stages refuse it as a whole: no advice on what it needs without them
    assert "ghost_schedule" not in str(refused.value)


def test_keys_of_layers_are_refused_where_stages_would_not_pass_them():
  rows = types.SimpleNamespace(loss=LanguageModelLoss(dropout_key=jax.random.key(0)))
  with pytest.raises(ConfigError, match=r"LanguageModelLoss gives its layers keys .*; use ici_stage_parallelism=1"):
    pipelined.Passed([rows], [])


@pytest.mark.parametrize(
  ("its", "message"),
  [
    (
      {"base_num_decoder_layers": 3},
      "over 2 stages; use 3 stages without num_pipeline_repeats, or offline",
    ),
    ({"base_num_decoder_layers": 2}, "2 stacked layers are not 2 stages x num_pipeline_repeats=2; .*, or offline_data"),
    ({"base_num_decoder_layers": 8}, ""),
    ({"base_num_decoder_layers": 3, "scan_layers": False, "ghost_schedule": "two_pass"}, ""),
  ],
  ids=str,
)
def test_a_teacher_whose_layers_the_stages_cannot_share_is_refused_before_jax(its, message, monkeypatch):
  """It passes the stages of the student, which may have another number of layers."""
  keys: dict[str, Any] = {"ici_stage_parallelism": 2, "num_pipeline_repeats": 2, "base_num_decoder_layers": 4}
  cfg = config.replace(config.load(), objective="distill", distill_teacher="there", **keys)
  monkeypatch.setattr(load_model, "find", lambda path, key: (None, config.replace(config.load(), **its)))
  monkeypatch.setattr(model_path, "check_whole", lambda place, what: None)
  if not message:
    assert load_model.teacher(cfg)
    return
  with pytest.raises(ConfigError, match=f"distill_teacher=there passes the stages of the run: .*{message}"):
    load_model.teacher(cfg)
