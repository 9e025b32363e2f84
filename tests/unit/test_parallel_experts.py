"""Experts on meshes of eight virtual devices: what one device gives. B=8 rows, T=16 positions; see `meshes`."""

import foreign
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import adapters
from maxghost.config.schema import AdapterConfig
from maxghost.ghost.attach import attach, split
from maxghost.ghost.directions import DirectionSpec
from maxghost.models import moe
from maxghost.parallel.shardings import use

EXPERTS = {
  "decoder_block": "mixtral", "num_experts": 12, "num_experts_per_tok": 3, "base_moe_mlp_dim": 10,
  "load_balance_loss_weight": 0.1, "base_num_decoder_layers": 1, "remat_policy": "none", "mlp_bias": True,
}  # fmt: skip
MESHES = {
  "expert 4 x data 2": {"ici_expert_parallelism": 4, "ici_data_parallelism": 2},
  "expert 2 x fsdp 2 x tensor 2": {
    "ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2,
  },
  "expert 2 x context 4": {"ici_expert_parallelism": 2, "ici_context_parallelism": 4},
}  # fmt: skip


def layer_results(mesh: dict, rank: int = 0, qtype: str = "", **changes):
  """(y, gradients, scores of every Param by token, compiled text) of one routed layer with random Params, along random
  directions or, with a rank, factors. qtype: the matrices are in few bits, below adapters."""
  cfg = meshes.make_config(mesh, **EXPERTS, **changes)
  layout = meshes.make_layout(cfg, 8 if mesh else 1)
  rng = np.random.default_rng(3)
  layer = foreign.randomized(lambda rngs: moe.RoutedMoe(cfg.model, rngs=rngs), scale=1.0)
  if qtype:
    adapters.attach(layer, AdapterConfig(lora_rank=2, lora_module_path=".*/w.*", lora_weight_qtype=qtype))
    for _, variable in nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam)):
      variable[...] = jnp.asarray(rng.normal(size=variable.shape), variable.dtype)
  x, weight = (rng.normal(size=(8, meshes.POSITIONS, 24)).astype(np.float32) for _ in range(2))
  twin = attach(layer, num_examples=8, num_positions=meshes.POSITIONS, spec=DirectionSpec(rank=rank))
  params, rest = split(layer)
  params, rest = (jax.tree.map(jax.device_put, state, layout.shardings(state)) for state in (params, rest))
  sizes = {p.label: p.part_shapes(1).values() for p in twin.scored}
  u = {label: tuple(rng.normal(size=size).astype(np.float32) for size in parts) for label, parts in sizes.items()}
  assert qtype or [len(u[name]) for name in ("wi_0", "wi_1", "wo")] == [2 if rank else 1] * 3

  def run(params, probes, directions, x, rest):
    blank = moe.no_routing(12, (8, meshes.POSITIONS), np.dtype("float32"))
    y, _ = twin.merge(params, probes, directions, rest)(x, None, blank)
    return (y * weight).sum(), y

  def graded(*arguments):
    with use(layout):  # around the backward pass as well
      return jax.grad(run, (0, 1, 3), has_aux=True)(*arguments)

  with use(layout):
    u = twin.placed({label: tuple(map(jnp.asarray, parts)) for label, parts in u.items()})
  if "ici_tensor_parallelism" in mesh and rank:  # a side of 24 divides over the rule of `direction` as well
    specs = {name: [tuple(part.sharding.spec) for part in u[name]] for name in ("wi_0", "wo")}
    assert specs["wi_0"] == [(None, "expert", "fsdp"), (None, "expert", None, "tensor")]
    assert specs["wo"] == [(None, "expert", "tensor"), (None, "expert", None, "fsdp")]
  arguments = params, twin.zero_probes(), twin.direction_state(u), x, rest
  with tiny.cheap_compilation():
    compiled = jax.jit(graded).lower(*arguments).compile()
  (grads, probes, dx), y = compiled(*arguments)
  named = {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(grads)}
  return {"y": y, "x": dx, **named, **{f"scores of {k}": v for k, v in twin.scores(probes)[0].items()}}, compiled


@pytest.fixture(scope="module")
def one_device_layer():
  return layer_results({})[0]


SLOW = [name if "tensor" in name else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]


@pytest.mark.parametrize("name", SLOW)
def test_a_layer_on_a_mesh_gives_the_numbers_of_one_device(name, one_device_layer):
  results, compiled = layer_results(MESHES[name])
  assert results.keys() == one_device_layer.keys() and len(results) == 2 + 2 * 8
  for label, value in one_device_layer.items():
    assert np.abs(value).max() > 0, label
    assert meshes.relative_error(results[label], value) < 2e-6, label
  # Experts stay where they are: no device holds the matrices of all.
  assert "f32[12,24,10]" not in compiled.as_text()


def test_mesh_axes_of_both_tokens_and_experts_mix_no_tokens(one_device_layer):
  """Rules that give experts, or their width, the mesh axis of positions or of rows."""
  rules = (("exp", ("context",)), ("mlp", ("fsdp",)), ("embed", ()))
  mesh = {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 4, "logical_axis_rules": rules}
  results, _ = layer_results(mesh)
  for label, value in one_device_layer.items():
    assert meshes.relative_error(results[label], value) < 2e-6, label


@pytest.mark.parametrize("quantization", ["int8", pytest.param("fp8_stochastic", marks=pytest.mark.slow)])
def test_products_of_codes_take_the_scale_of_an_experts_whole_width(quantization):
  """With the width on two devices: outputs, gradients and scores are those of one."""
  changes: dict = {"quantization": quantization}
  (results, _), (expected, _) = (layer_results(m, **changes) for m in (MESHES["expert 2 x fsdp 2 x tensor 2"], {}))
  plain, _ = layer_results({})
  for label, value in expected.items():
    assert meshes.relative_error(results[label], value) < 2e-6, label
    if label in ("y", "x", "wo", "scores of wi_0", "scores of wo"):
      assert meshes.relative_error(plain[label], value) > 2e-3, label  # rounding is there


@pytest.mark.parametrize(
  ("qtype", "mesh"),
  [
    ("nf4", {"ici_expert_parallelism": 2, "ici_fsdp_parallelism": 4}),
    pytest.param("int8", {"ici_expert_parallelism": 4, "ici_data_parallelism": 2}, marks=pytest.mark.slow),
  ],
)
def test_experts_in_few_bits_on_a_mesh_give_the_numbers_of_one_device(qtype, mesh):
  expected, (results, compiled) = layer_results({}, 0, qtype)[0], layer_results(mesh, 0, qtype)
  assert results.keys() == expected.keys() and len(results) == 2 + 2 * 11
  for label, value in expected.items():
    assert np.abs(value).max() > 0 or label == "gate/kernel", label  # below adapters, dense layers form no gradient
    assert meshes.relative_error(results[label], value) < 2e-6, label
  text, num_experts = compiled.as_text(), 12 // mesh["ici_expert_parallelism"]
  codes = ("u8[{},12,10]", "u8[{},5,24]") if qtype == "nf4" else ("s8[{},24,10]", "s8[{},10,24]")
  for shape in (*codes, "f32[{},24,10]"):
    assert shape.format(num_experts) in text and shape.format(12) not in text


@pytest.mark.parametrize("name", SLOW)
def test_scores_along_the_factors_of_experts_on_a_mesh_are_those_of_one_device(name):
  expected, (results, compiled) = layer_results({}, 2)[0], layer_results(MESHES[name], 2)
  for label, value in expected.items():
    assert np.abs(value).max() > 0, label
    assert meshes.relative_error(results[label], value) < 2e-6, label
  for whole in ("f32[1,12,24,2]", "f32[1,12,2,10]", "f32[12,24,2]", "f32[12,2,10]"):
    assert whole not in compiled.as_text()


@pytest.fixture(scope="module")
def one_device():
  return meshes.run({}, **EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_train_step_on_a_mesh_gives_the_numbers_of_one_device(name, one_device):
  meshes.assert_same(meshes.run(MESHES[name], **EXPERTS), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["sgd", "adam"])
@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan"])
def test_a_train_step_along_factors_of_experts_on_a_mesh(schedule, direction):
  settings = {"ghost_rank": 3, "ghost_schedule": schedule, "ghost_direction": direction, **EXPERTS}
  expected, actual = (meshes.run(mesh, **settings) for mesh in ({}, MESHES["expert 2 x fsdp 2 x tensor 2"]))
  meshes.assert_same(actual, expected, 1e-4)
  for ours, theirs in zip(actual.outs, expected.outs, strict=True):
    assert ours["captured"].keys() == theirs["captured"].keys()
    assert sum(label.split("/")[-1] in ("wi_0", "wi_1", "wo") for label in ours["captured"]) == 3
    for label, share in theirs["captured"].items():
      assert 0 < share.max() <= 1 + 1e-6
      np.testing.assert_allclose(ours["captured"][label], share, rtol=1e-4)
