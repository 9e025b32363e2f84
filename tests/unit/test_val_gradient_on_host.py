"""offload_to_host=[val_gradient]: the validation gradient waits in host memory while the training pass scores."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest

from maxghost import config
from maxghost.models import streaming
from maxghost.parallel import shardings
from maxghost.training.memory import estimate
from maxghost.training.memory_report import num_bytes

RANKED = {"ghost_direction": "sgd", "ghost_rank": 4}
HOST = {"offload_to_host": ("val_gradient",)}
MESHES = {
  "one device": {},
  "fsdp 4 x data 2": {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
  "2 stages": {"ici_stage_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_data_parallelism": 2,
               "num_pipeline_microbatches": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ["one device", "fsdp 4 x data 2", pytest.param("2 stages", marks=pytest.mark.slow)])
def test_no_bit_of_a_step_changes(name):
  there, here = (meshes.run(MESHES[name], **RANKED, **keys) for keys in (HOST, {}))
  for ours, theirs in zip(there.outs, here.outs, strict=True):
    assert float(ours["predicted"][0]) != 0 and ours.keys() == theirs.keys()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  jax.tree.map(np.testing.assert_array_equal, there.params, here.params)


def test_on_an_accelerator_it_is_fetched_in_a_branch_that_needs_the_training_gradient():
  def function(x_D, norm):
    return streaming.read_late(lambda tree: {"sum": tree[0].sum()}, [streaming.to_host(x_D)], norm)

  x_D = jnp.arange(5.0)
  with shardings.tracing_for("tpu"):
    assert jax.jit(function)(x_D, jnp.float32(2))["sum"] == 10
    assert np.isnan(jax.jit(function)(x_D, jnp.float32(np.inf))["sum"])
    (branch,) = [eqn for eqn in jax.make_jaxpr(function)(x_D, jnp.float32(2)).eqns if eqn.primitive.name == "cond"]
  fetching = [[eqn.primitive.name for eqn in one.eqns].count("device_put") for one in branch.params["branches"]]
  assert sorted(fetching) == [0, 1]


def test_the_estimate_has_it_on_the_host():
  base = {"vocab_size": 4096, "base_emb_dim": 256, "max_target_length": 1024, "num_vocab_tiling": 8, **RANKED}
  here, there = (estimate(config.replace(config.load(), **base, **keys)) for keys in ({}, HOST))
  rows = [{name: num_bytes(held) for name, held in one.rows.items()} for one in (here, there)]
  gradient = rows[0]["ghost directions and probes"] - rows[1]["ghost directions and probes"]
  assert gradient == rows[0]["parameters"] == there.host == here.total - there.total and here.host == 0


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (["ghost_direction=adam", "ghost_rank=4"], "ghost_direction=adam.*use ghost_direction=sgd"),
    (["ghost_direction=sgd"], "ghost_rank=0.*use ghost_rank=32"),
    (["ghost_direction=sgd", "ghost_rank=4", "ghost_val_every=4"], "ghost_val_every=4.*use ghost_val_every=1"),
    (["ghost_direction=sgd", "ghost_rank=4", "ghost_schedule=reverse_scan"], "use ghost_schedule=two_pass"),
    (["ghost_direction=sgd", "ghost_rank=4", "ghost_curvature=secant"], "use ghost_curvature=none"),
    (["ghost_enabled=false"], "ghost_enabled=false"),
  ],
)
def test_what_does_not_go_with_it_is_named(keys, said):
  with pytest.raises(
    config.ConfigError, match=r"offload_to_host=\[?val_gradient.*needs val_gradient on the device.*" + said
  ):
    config.load(config.config_dir() / "base.yml", "offload_to_host=[val_gradient]", *keys)
