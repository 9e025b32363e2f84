"""Adapters in every form of a run: the walk back, segments, weights in host memory, meshes, micro-batches.

Schedule two_pass on one device, which test_adapters.py compares with independent gradients, is the reference.
"""

import meshes
import numpy as np
import oracles
import pytest
import routed
from flax import nnx
from test_adapters import FLOAT64, LORA
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config
from maxghost.adapters.quantized import NAMES
from maxghost.config import ConfigError
from maxghost.training import host_memory

BASE = {**FLOAT64, **LORA, "base_num_decoder_layers": 4, "gradient_clipping_threshold": 0.0, "ghost_detail": "layer"}


def two_steps(**changes) -> tuple[Run, list[dict]]:
  run = Run(**(BASE | changes))
  run.state = host_memory.put(run.cfg, run.state)
  return run, [run.step(TRAIN[i], (VALIDATION,)) for i in range(2)]


@pytest.fixture(scope="module")
def reference():
  made = {}

  def get(**changes):
    key = str(changes)
    if key not in made:
      made[key] = two_steps(**changes)
    return made[key]

  return get


def assert_same(ours, theirs, tolerance=1e-10):
  (run, outs), (other, expected) = ours, theirs
  for out, wanted in zip(outs, expected, strict=True):
    for name in ("loss", "grad_norm", "val_loss", "contribution_BSK", "predicted"):
      assert oracles.relative_error(out[name], wanted[name]) < tolerance, name
    for label, scores in wanted.get("param_contribution", {}).items():
      assert oracles.relative_error(out["param_contribution"][label], scores) < tolerance, label
    assert out["check_rel_err"][0] < tolerance
  params = run.snapshot().params
  for label, value in other.snapshot().params.items():
    assert oracles.relative_error(params[label], value) < tolerance, label


WALKS = {
  "layers": {},
  "segments": {"segment_lengths": (2,), "remat_policy": "full"},
  "nested": {"segment_lengths": (2, 1), "remat_policy": "full"},
  "streamed": {"segment_lengths": (2,), "remat_policy": "full", "offload_to_host": ("weights", "carries")},
  "all-streamed": {"segment_lengths": (2,), "remat_policy": "full", "offload_to_host": ("weights", "optimizer")},
}
SLOW = ("nested", "all-streamed")


@pytest.mark.parametrize("walk", [pytest.param(w, marks=[pytest.mark.slow] if w in SLOW else []) for w in WALKS])
def test_the_walk_back_scores_and_trains_as_two_passes(walk, reference):
  ours = two_steps(ghost_schedule="reverse_scan", **WALKS[walk])
  assert_same(ours, reference())
  kinds = {"/".join(map(str, p)): v[...].sharding.memory_kind for p, v in nnx.to_flat_state(ours[0].state)}
  on_host = {label for label, kind in kinds.items() if kind == "pinned_host"}
  assert ("model/decoder/layers/mlp/wo/kernel" in on_host) == ("streamed" in walk)
  assert not [label for label in on_host if label.startswith("model/") and "lora" in label]
  assert bool([label for label in on_host if label.startswith("optimizer")]) == (walk == "all-streamed")


@pytest.mark.parametrize("segments", [(), (2,)], ids=["layers", "segments"])
def test_the_walk_back_leaves_out_what_the_mask_freezes(segments, reference):
  """Some in the layers, some outside; a layer's bias-free matrix may be frozen beside a trained one."""
  mask = ("*mlp*", "*query*", "decoder/logits_dense/*")
  changes = {"lora_rank": 0, "trainable_parameters_mask": mask, "ghost_exclude": ("*wi_0*",)}
  ours = two_steps(ghost_schedule="reverse_scan", remat_policy="full", segment_lengths=segments, **changes)
  assert_same(ours, reference(**changes))
  assert ours[1][0]["unscored"][0] != 0


@pytest.mark.parametrize(
  "changes",
  [
    {"ghost_curvature": "secant", "ghost_val_refresh_steps": 0},
    pytest.param({"ghost_rank": 1, "ghost_direction": "sgd"}, marks=pytest.mark.slow),
    pytest.param({**routed.MIXTRAL, "lora_module_path": ".*/(wi_0|wo|out)"}, marks=pytest.mark.slow),
    pytest.param({**routed.GPT_OSS, "lora_module_path": ".*/(wi_1|wo|out)"}, marks=pytest.mark.slow),
    pytest.param(
      {
        **routed.MIXTRAL,
        "lora_module_path": ".*/(wi_0|wo|out)",
        "lora_weight_qtype": "nf4",
        "segment_lengths": (1,),
        "remat_policy": "full",
        "offload_to_host": ("weights",),
      },
      marks=pytest.mark.slow,
    ),
  ],
  ids=["secant", "rank", "experts", "cycles", "experts-nf4-streamed"],
)
def test_the_walk_back_in_other_forms(changes, reference):
  ours = two_steps(ghost_schedule="reverse_scan", **changes)
  assert_same(ours, reference(**changes), 1e-9)


def test_streamed_two_passes_and_plain_steps_are_those_without_streams(reference):
  streams = {"segment_lengths": (2,), "remat_policy": "full", "offload_to_host": ("weights",)}
  assert_same(two_steps(**streams), reference())
  run, outs = two_steps(ghost_enabled=False, **streams)
  params = run.snapshot().params
  for label, value in reference()[0].snapshot().params.items():
    assert oracles.relative_error(params[label], value) < 1e-10, label
  assert outs[1]["loss"] == pytest.approx(float(reference()[1][1]["loss"]), rel=1e-12)


def test_micro_batches_of_unequal_weight():
  """Adam's directions are those of the gradient of all."""
  changes = {"gradient_clipping_threshold": 0.0, "per_device_batch_size": 1}
  whole, parts = (
    Run(**(BASE | changes), gradient_accumulation_steps=count, batch={k: v[:6] for k, v in TRAIN[0].items()})
    for count in (1, 3)
  )
  batch = {k: v[:6] for k, v in TRAIN[0].items()}
  out, expected = parts.step(batch), whole.step(batch)
  for name in ("loss", "grad_norm", "contribution_BSK"):
    assert oracles.relative_error(out[name], expected[name]) < 1e-10, name


@pytest.mark.parametrize(
  ("mesh", "changes"),
  [
    ("fsdp 4 x tensor 2", {}),
    pytest.param("fsdp 8", {"ghost_schedule": "reverse_scan"}, marks=pytest.mark.slow),
    pytest.param("context 4 x data 2", {}, marks=pytest.mark.slow),
  ],
)
def test_a_mesh_changes_no_score(mesh, changes):
  changes = {"lora_rank": 3, "adam_weight_decay": 0.0, "ghost_detail": "module"} | changes
  expected = meshes.run({}, **changes)
  meshes.assert_same(meshes.run(meshes.MESHES[mesh], **changes), expected, 2e-5)


ROUTED = {
  "lora_rank": 3, "adam_weight_decay": 0.0, "ghost_detail": "module", "decoder_block": "mixtral", "num_experts": 4,
  "num_experts_per_tok": 3, "base_moe_mlp_dim": 12, "norm_topk_prob": False, "lora_module_path": ".*/(wi_[01]|wo)",
}  # fmt: skip
WIDTH = {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 2}


@pytest.mark.slow
def test_a_mesh_of_experts_and_their_width_changes_no_score():
  expected = meshes.run({}, **ROUTED)
  meshes.assert_same(meshes.run(WIDTH, **ROUTED), expected, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("qtype", "mesh"),
  [
    ("nf4", {"ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_data_parallelism": 2}),
    ("int8", {"ici_expert_parallelism": 2, "ici_data_parallelism": 4}),
    ("nf4", {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2}),
  ],
)
def test_experts_in_few_bits_on_a_mesh_change_no_score_and_stay_on_their_devices(qtype, mesh):
  changes = ROUTED | {"num_experts": 6, "base_moe_mlp_dim": 20, "lora_weight_qtype": qtype}
  expected, actual = meshes.run({}, **changes), meshes.run(mesh, **changes)
  meshes.assert_same(actual, expected, 2e-5)
  assert {label.split("/")[-1] for label in expected.moments} >= {"wi_0_lora_b", "wo_lora_a"}
  held = {str(path[-1]): v.get_value() for path, v in nnx.to_flat_state(actual.state)}
  experts, fsdp = (mesh.get(f"ici_{name}_parallelism", 1) for name in ("expert", "fsdp"))
  for name in ("wi_0", "wi_1", "wo"):
    for part in NAMES[qtype]:
      x = held[f"{name}_{part}"]
      shard = x.sharding.shard_shape(x.shape)
      assert x.shape[:2] == (2, 6) and shard[1] == 6 // experts, (name, part)
      assert part != "codes" or np.prod(shard) == x.size // experts // fsdp, name


def test_experts_in_few_bits_keep_their_width():
  with pytest.raises(ConfigError, match=r"int8 keeps .* divides their width over tensor; use"):
    meshes.run(WIDTH, **ROUTED, lora_weight_qtype="int8")


def test_what_does_not_go_together_is_refused():
  keys = {"lora_rank": 3, "adam_weight_decay": 0.0}
  with pytest.raises(ConfigError, match="lora_rank=3 does not go with ghost_schedule=concat"):
    config.replace(config.load(), **keys, ghost_schedule="concat")


def test_a_selected_step_trains_adapters():
  run = Run(**(LORA | {"ghost_select": "topk", "ghost_select_fraction": 0.5, "lora_dropout": 0.1}))
  before = run.snapshot().params
  out = run.step(TRAIN[0])
  moved = {label for label, value in run.snapshot().params.items() if (value != before[label]).any()}
  assert moved == {label for label in before if "lora" in label} and 0 < np.sum(out["chosen_B"]) < len(out["chosen_B"])
