"""A pipeline of stages against one device: losses, gradients and scores of a train step.

S stages, R repeats, M micro-batches, L layers.
"""

from typing import Any

import meshes
import pytest

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


@pytest.fixture(scope="module")
def expected():
  return meshes.run({}, **LAYERS)


@pytest.mark.parametrize("name", PIPES)
def test_a_scored_step_equals_that_of_one_device(name, expected):
  found = meshes.run(PIPES[name], **LAYERS)
  meshes.assert_same(found, expected)
  assert meshes.relative_error(found.outs[0]["loss"], expected.outs[0]["loss"]) < 1e-6
