"""DiLoCo with real processes: two of them, a slice each of four devices, are one process with both slices."""

import numpy as np
from test_processes import Processes, assert_same_run, losses

from maxghost import attribution

DILOCO = (
  "enable_diloco=true", "dcn_data_parallelism=2", "diloco_sync_period=3", "num_diloco_fragments=2",
  "num_communication_overlapping_steps=1",
)  # fmt: skip


def test_two_processes_with_a_slice_each_are_one_with_both(tmp_path):
  Processes(tmp_path, 1, "run_name=one", *DILOCO).succeed()
  processes = Processes(tmp_path, 2, "run_name=two", *DILOCO)
  processes.succeed()
  assert "DiLoCo: 2 slices train apart" in processes.text(0)
  assert_same_run(tmp_path / "two", tmp_path / "one")
  for ours, theirs in zip(*(losses(tmp_path / name) for name in ("two", "one")), strict=True):
    own = {name: value for name, value in theirs.items() if name.startswith("diloco/")}
    assert own.keys() == {name for name in ours if name.startswith("diloco/")} and len(own) >= 2
    assert np.allclose([ours[name] for name in own], list(own.values()), rtol=1e-4, atol=1e-6)
  log = attribution.load(tmp_path / "two")
  assert set(log["slice"]) == {"0", "1"}
  assert {path.name.endswith("_p1.npz") for path in (tmp_path / "two" / "ghost").glob("*.npz")} == {False, True}
