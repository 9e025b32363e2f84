"""The train step on meshes of eight virtual devices: the losses, gradients and scores of one device, and what moves."""

import collections
import types

import meshes
import pytest
import tiny
from meshes import MESHES

from maxghost.parallel import shardings
from maxghost.training import aot
from maxghost.training.plan import Plan

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
  changes = {"remat_policy": "none"}
  meshes.assert_same(meshes.run(MESHES[name], **changes), one_device(**changes))


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"ghost_schedule": "reverse_scan", "ghost_direction": "sgd"},
    {"ghost_direction": "second_order"},
    {"ghost_direction": "marginal", "ghost_detail": "layer"},
    {"ghost_curvature": "secant", "ghost_rank": 5},
    {"gradient_accumulation_steps": 2},
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


# Matrices of one layer by their shapes, and how many numbers they and its two norms have.
LAYER = {"f32[24,8,6]": 1, "f32[24,4,6]": 2, "f32[8,6,24]": 1, "f32[24,40]": 2, "f32[40,24]": 1}
LAYER_SIZE = 2 * 24 * 8 * 6 + 2 * 24 * 4 * 6 + 3 * 24 * 40 + 2 * 24
TABLE, LAYERS = "f32[24,272]", 2


def moved(**changes):
  """The collectives of the step on fsdp 8, compiled as for a run."""
  cfg = meshes.make_config(meshes.MESHES["fsdp 8"], remat_policy="full", **changes)
  with tiny.cheap_compilation():
    compiled = aot.compile_step(Plan.of(cfg, meshes.make_layout(cfg, 8)))
  found = compiled.collectives()
  assert {one.axes for one in found} == {("fsdp",)}
  # No logits of all rows, and no stack of whole weights.
  for shape in ("f32[8,16,272]", *(f"f32[{LAYERS},{shape[4:]}" for shape in LAYER)):
    assert shape not in compiled.hlo
  return found


def gathers(found, count: int) -> collections.Counter:
  """{shape: how many} of the all-gathers that run so often."""
  return collections.Counter(one.shape for one in found if one.kind == "all-gather" and one.count == count)


def reductions(found) -> list[int]:
  """Bytes of those in the layers. On CPU a reduction is an all-reduce of which each device keeps its part."""
  return [one.num_bytes for one in found if one.kind in ("all-reduce", "reduce-scatter") and one.count == LAYERS]


def test_fsdp_gathers_each_weight_once_a_pass_and_keeps_no_whole_copy():
  """Per layer, forward and backward each gather its seven matrices; one reduction adds up their gradients and the two
  norms'. Outside the layers: the output table, once, and what tells which embeddings the rows need. Logits stay."""
  found = moved(ghost_enabled=False)
  assert gathers(found, LAYERS) == {shape: 2 * number for shape, number in LAYER.items()}
  assert reductions(found) == [4 * LAYER_SIZE]
  assert gathers(found, 1) == {TABLE: 1, "s32[8,16,1]": 1}
  assert {one.shape for one in found if "all-to-all" in one.kind} == {"f32[1,1,16,3]", "f32[1,16,1,3]"}  # embeddings
  assert {one.kind for one in found} == {"all-gather", "all-reduce", "all-to-all"}


def test_scores_move_weights_and_directions_once_more_and_no_row():
  """The validation pass gathers and reduces as the training pass does; beyond that each matrix' direction is gathered
  once. No activation, no logits and no scores leave their rows."""
  found = moved(ghost_direction="sgd", ghost_val_batch_size=8)
  assert gathers(found, LAYERS) == {shape: (2 + 2 + 1) * number for shape, number in LAYER.items()}
  assert reductions(found) == [4 * LAYER_SIZE] * 2
  outside = gathers(found, 1)
  assert outside.keys() == {TABLE, "s32[8,16,1]"} and outside[TABLE] <= 3
  assert {one.shape for one in found if "all-to-all" in one.kind} == {"f32[1,1,16,3]", "f32[1,16,1,3]"}
  assert {one.kind for one in found} == {"all-gather", "all-reduce", "all-to-all"}
  rows = 8 * meshes.POSITIONS
  sums = [one.num_bytes for one in found if one.kind == "all-reduce" and one.count == 1]
  assert sum(sums) < 4 * (2 * 24 * 272 + 4 * rows)  # the tables' gradients, and a few numbers for each parameter


@pytest.mark.slow
def test_a_plain_step_on_fsdp_is_that_of_one_device():
  changes = {"ghost_enabled": False}
  meshes.assert_same(meshes.run(MESHES["fsdp 8"], **changes), meshes.run({}, **changes))


def test_only_several_devices_of_one_process_need_programs_in_order():
  """With one in each process the order ends the processes, which only the launchers' tests see; they are slow."""
  own, other = (types.SimpleNamespace(platform="cpu", process_index=index) for index in (0, 1))
  assert shardings.in_order([own, other]) == {}
  assert shardings.in_order([own, own, other]) == shardings.IN_ORDER
