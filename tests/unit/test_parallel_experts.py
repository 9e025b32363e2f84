"""Models with experts on meshes of eight virtual devices: the losses, gradients and scores of one device."""

import meshes
import pytest

EXPERTS = {
  "decoder_block": "mixtral", "num_experts": 12, "num_experts_per_tok": 3, "base_moe_mlp_dim": 10,
  "load_balance_loss_weight": 0.1, "base_num_decoder_layers": 1, "remat_policy": "none", "mlp_bias": True,
  "routed_bias": True,
}  # fmt: skip
MESHES = {
  "expert 4 x data 2": {"ici_expert_parallelism": 4, "ici_data_parallelism": 2},
  "expert 2 x fsdp 2 x tensor 2": {
    "ici_expert_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2,
  },
}  # fmt: skip


@pytest.fixture(scope="module")
def one_device():
  return meshes.run({}, **EXPERTS)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_numbers_of_one_device(name, one_device):
  meshes.assert_same(meshes.run(MESHES[name], **EXPERTS), one_device)
