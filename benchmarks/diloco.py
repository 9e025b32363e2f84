"""What DiLoCo sends between slices, counted in the compiled programs, and what it costs in held-out loss.

  python benchmarks/diloco.py [--slices 4] [--period 50] [--steps 200] [key=value ...]

Compiles the step of the default model for virtual slices of one device: synchronous training without scores, and
DiLoCo's outer step, whole and in two fragments. Then trains a small model on the same rows, synchronously and in slices
apart. --steps 0 leaves the training out.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import _measure
from _measure import Figure

SMALL = (
  "base_num_decoder_layers=2", "base_emb_dim=64", "base_mlp_dim=128", "base_num_query_heads=4", "head_dim=16",
  "max_target_length=64", "per_device_batch_size=4", "enable_tensorboard=false",
  "ghost_detail=total", "sharding_tolerance=1.0", "checkpoint_period=0",
)  # fmt: skip


def main() -> int:
  args = _measure.arguments(__doc__, slices=4, period=50, steps=200)
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.slices}"
  os.environ["JAX_PLATFORMS"] = "cpu"
  together, whole, parts = sizes(args)
  figures = [
    Figure("bytes between slices per step, synchronous, MB", together / 1e6, form="{:.2f}"),
    Figure(f"bytes in an outer step, every {args.period} steps, MB", whole / 1e6, form="{:.2f}"),
    Figure("bytes per step on average over synchronous", whole / args.period / together, 1 / 40, form="{:.4f}"),
    Figure("most at once with two fragments, of the whole", max(parts) / whole, form="{:.3f}"),
  ]
  streamed = ["num_diloco_fragments=2", "num_communication_overlapping_steps=2"]
  kinds = {"synchronous": None, "DiLoCo": [], "streamed, 2 steps of overlap": streamed}
  rows = [run(name, keys, args) for name, keys in kinds.items()] if args.steps else []
  figures += [Figure(f"held-out loss, {row['run']}", row["held-out loss"], form="{:.3f}") for row in rows]
  return _measure.publish("diloco", rows, figures, [], args.json)


def apart(args, *more: str) -> list[str]:
  return ["enable_diloco=true", f"diloco_sync_period={args.period}", "diloco_outer_lr=0.7", *more]


def sizes(args) -> tuple[int, int, list[int]]:
  """Bytes that a device exchanges between slices in a synchronous step, an outer step, and those of two fragments."""
  import jax

  from maxghost import config
  from maxghost.parallel import collectives
  from maxghost.parallel.shardings import Layout
  from maxghost.training import compiled_steps
  from maxghost.training.outer import Outer
  from maxghost.training.plan import Plan

  def sent(name: str, function, arguments, layout) -> int:
    compiled = compiled_steps.lower(name, function, layout, *arguments).compile()
    found = collectives.read(compiled.as_text() or "", dict(layout.mesh.shape))
    return sum(one.count * one.num_bytes for one in found if {"data", "diloco"} & set(one.axes))

  def plan(*keys: str) -> Plan:
    given = [f"dcn_data_parallelism={args.slices}", "ghost_enabled=false", *args.overrides, *keys]
    cfg = config.load(str(_measure.BASE), *given)
    return Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[: args.slices]))

  one = plan()
  together = sent("train_step", compiled_steps.train_step(one)[0], one.arguments, one.layout)
  found = []
  for keys in ([], ["num_diloco_fragments=2"]):
    one = plan(*apart(args, *keys))
    assert sent("train_step", compiled_steps.train_step(one)[0], one.arguments, one.layout) == 0
    found.append([sent(name, f, given, one.layout) for name, (f, given, _) in Outer(one.apart).programs().items()])
  return together, sum(found[0]), found[1]


def run(name: str, keys: list[str] | None, args) -> dict:
  """One training run of the small model on the same rows; the loss of its last parameters on held-out rows."""
  with tempfile.TemporaryDirectory() as scratch:
    own = [f"dcn_data_parallelism={args.slices}", f"steps={args.steps}", f"eval_interval={args.steps}", "run_name=run"]
    own += [f"base_output_directory={scratch}", *(apart(args, *keys) if keys is not None else [])]
    command = [sys.executable, "-m", "maxghost.train", str(_measure.BASE), *SMALL, *own, *args.overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
  row = {"run": name, "held-out loss": records[-1]["eval/avg_loss"]}
  explained = [record for record in records if "diloco/actual_drop/manual" in record]
  for part in ("predicted_drop", "actual_drop"):
    row[f"outer steps: {part}"] = sum(record[f"diloco/{part}/manual"] for record in explained) if explained else ""
  print(json.dumps(row), flush=True)
  return row


if __name__ == "__main__":
  sys.exit(_measure.run(main))
