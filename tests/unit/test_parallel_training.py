"""The train step on meshes of eight virtual devices: the losses, gradients and scores of one device, and what moves."""

import collections

import meshes
import pytest
from meshes import MESHES

from maxghost.parallel import collectives

QUICK = ("fsdp 4 x tensor 2", "context 4 x data 2")


@pytest.fixture(scope="module")
def one_device():
  made = {}

  def get(**changes):
    key = tuple(sorted(changes.items()))
    if key not in made:
      made[key] = meshes.run({}, **changes)
    return made[key]

  return get


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MESHES]
)
def test_a_mesh_gives_the_numbers_of_one_device(name, one_device):
  meshes.assert_same(meshes.run(MESHES[name]), one_device())


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"ghost_schedule": "reverse_scan", "ghost_direction": "sgd"},
    {"ghost_direction": "second_order"},
    {"gradient_accumulation_steps": 2, "ghost_direction": "sgd"},
    {"shard_optimizer_over_data": True},
    {"logits_via_embedding": True, "num_vocab_tiling": 2},
  ],
  ids=str,
)
def test_schedules_and_accumulation_give_them_too(changes, one_device):
  """Micro-batches hold unequal numbers of tokens, one of them few."""
  batches = None
  if "gradient_accumulation_steps" in changes:
    batches = [{k: v.repeat(2, 0) for k, v in batch.items()} for batch in meshes.BATCHES]
  mesh = {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2}
  one = one_device(**changes) if batches is None else meshes.run({}, batches=batches, **changes)
  meshes.assert_same(meshes.run(mesh, batches=batches, **changes), one)


def test_fsdp_gathers_each_weight_once_a_pass_and_keeps_no_whole_copy():
  """Per layer, forward and backward each gather its seven matrices; one reduction adds up their gradients and the two
  norms'. On CPU a reduction is an all-reduce of which each device keeps its part. Outside the layers: the output table,
  twice at most, and its gradient. Logits stay with their rows."""
  result = meshes.run(MESHES["fsdp 8"], cheap=False, ghost_enabled=False, remat_policy="full")
  text = result.compiled.as_text()
  found = collectives.read(text, dict(result.layout.mesh.shape))
  kinds = collections.Counter((one.kind, one.count) for one in found if one.num_bytes >= 24 * 4)
  layers = 2
  weights = {"f32[24,8,6]", "f32[24,4,6]", "f32[8,6,24]", "f32[24,40]", "f32[40,24]"}
  in_layers = [one for one in found if one.kind == "all-gather" and one.count == layers]
  assert len(in_layers) == 14 and {one.shape for one in in_layers} == weights
  assert kinds["all-reduce", layers] == 1
  outside = {one.shape for one in found if one.kind == "all-gather" and one.count == 1}
  assert outside <= {"f32[24,272]", "s32[8,16,1]"}
  assert {one.axes for one in found} == {("fsdp",)}
  assert "f32[8,16,272]" not in text  # logits of all rows
  for shape in ("f32[2,24,8,6]", "f32[2,24,40]", "f32[2,40,24]"):  # a stack of whole weights
    assert shape not in text


def test_a_plain_step_on_fsdp_is_that_of_one_device():
  changes = {"ghost_enabled": False}
  meshes.assert_same(meshes.run(MESHES["fsdp 8"], **changes), meshes.run({}, **changes))
