"""A long run holds no more memory, threads or open files at its end than soon after its start."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 1000
SETTLED = 300  # by then every program is compiled, and buffers and caches have their size
MOST_GROWTH = 24  # MiB: under 2 KiB for each row that was scored
KEYS = (
  "base_emb_dim=20", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=6", "base_mlp_dim=36",
  "base_num_decoder_layers=2", "max_target_length=32", "per_device_batch_size=4", "dataset_domain_bytes=200000",
  "dropout_rate=0.1", "ghost_detail=token", "ghost_log_period=10", "checkpoint_period=50", "eval_interval=100",
  "eval_steps=1", "sample_every=250",
)  # fmt: skip


def held(pid: int) -> tuple[int, int, int]:
  """(resident memory in KiB, threads, open files) of a process."""
  status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
  return int(status["VmRSS"].split()[0]), int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc is not part of this installation")
def test_memory_threads_and_files_stay_flat(tmp_path):
  output, metrics = tmp_path / "out", tmp_path / "runs" / "long" / "metrics.jsonl"
  keys = (*KEYS, f"steps={STEPS}", "run_name=long", f"base_output_directory={tmp_path / 'runs'}")
  with open(output, "w", encoding="utf-8") as file:
    command = [sys.executable, "-m", "maxghost.train", "configs/base.yml", *keys]
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
  found: list[tuple[int, tuple[int, int, int]]] = []
  try:
    while process.poll() is None:
      step = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
      try:
        found.append((step, held(process.pid)))
      except (FileNotFoundError, ProcessLookupError, KeyError):
        break  # it ends now
      time.sleep(0.1)
    assert process.wait(60) == 0, output.read_text("utf-8")[-3000:]
  finally:
    process.kill()
  early = [what for step, what in found if SETTLED <= step < SETTLED + 200]
  late = [what for step, what in found if STEPS - 200 <= step < STEPS]
  assert len(early) > 5 and len(late) > 5, [step for step, _ in found]
  memory, threads, files = ([max(what[i] for what in part) for part in (early, late)] for i in range(3))
  assert memory[1] - memory[0] <= MOST_GROWTH * 1024, f"{memory[0] >> 10} to {memory[1] >> 10} MiB"
  # A pool may start a thread late; one lost at each of the checkpoints between would be ten or more.
  assert threads[1] <= threads[0] + 3 and files[1] <= files[0] + 3, (threads, files)
  print(f"{memory[0] >> 10} to {memory[1] >> 10} MiB, {threads} threads, {files} files")
