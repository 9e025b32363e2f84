"""Runs of the trainer on stages and on one device: their score logs, and the checkpoints of one for the other."""

import meshes
import numpy as np
import pytest
import run_copies
import tiny

from maxghost import train
from maxghost.checkpoint import compare
from maxghost.scorelog import load

KEYS = (
  "steps=3", "checkpoint_period=2", "max_num_checkpoints_to_keep=0", "async_checkpointing=false",
  "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=6", "base_mlp_dim=24",
  "base_num_decoder_layers=4", "max_target_length=32", "dataset_type=synthetic", "ghost_val_sets=words",
  "eval_interval=-1", "run_name=run", "enable_tensorboard=false", "sharding_tolerance=1", "warmup_steps_fraction=0",
  "adam_eps=1e-3",  # else Adam's first step divides gradients that are rounding errors by themselves
)  # fmt: skip
STAGES = ("ici_pipeline_parallelism=2", "num_layers_per_pipeline_stage=1", "per_device_batch_size=1")


def run(folder, on_stages: bool) -> None:
  keys = [*KEYS, f"base_output_directory={folder}", *(STAGES if on_stages else ["per_device_batch_size=8"])]
  with tiny.cheap_compilation():
    if on_stages:
      assert train.main(keys) == 0
    else:
      with tiny.one_device():
        assert train.main(keys) == 0


def assert_alike(one, other) -> None:
  ours, theirs = load(one / "run"), load(other / "run")
  for column in ("path", "offset", "step", "tokens"):
    np.testing.assert_array_equal(ours[column], theirs[column])
  for column in ("contribution", "loss", "dot"):
    assert meshes.relative_error(ours[column], theirs[column]) < 1e-5, column


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  for name in ("stages", "device"):
    run(folder / name, name == "stages")
  return folder


def test_two_stages_write_the_score_log_of_one_device(runs):
  assert_alike(runs / "stages", runs / "device")


@pytest.mark.parametrize("name", ["stages", "device"])
def test_a_checkpoint_of_one_continues_on_the_other(runs, name):
  """Two repeats, so that the layers of a stage are not adjacent. A wrong order of layers would change the scores."""
  run_copies.interrupted(runs / name, runs / f"{name} broken")
  run(runs / f"{name} broken", name != "stages")
  assert_alike(runs / f"{name} broken", runs / name)
  paths = [str(runs / found / "run" / "checkpoints" / "3") for found in (f"{name} broken", name)]
  assert compare.main([*paths, "--atol", "1e-5"]) == 0


def test_a_run_says_that_the_balance_loss_of_experts_changes_with_the_micro_batches(tmp_path, capsys):
  keys = (*KEYS, *STAGES[:2], "per_device_batch_size=2", "decoder_block=mixtral", "num_experts=2",
          "num_experts_per_tok=1", "load_balance_loss_weight=0.1")  # fmt: skip
  with tiny.cheap_compilation():
    assert train.main([*keys, f"base_output_directory={tmp_path / 'whole'}"]) == 0
    run_copies.interrupted(tmp_path / "whole", tmp_path / "broken")
    more = "num_pipeline_microbatches=4"
    assert train.main([*keys, f"base_output_directory={tmp_path / 'broken'}", more]) == 0
  said = "num_pipeline_microbatches is another: the balance loss of experts is computed per micro-batch"
  assert capsys.readouterr().out.count(said) == 1
