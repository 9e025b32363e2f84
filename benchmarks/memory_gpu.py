"""What a long and deep step takes on a GPU, run for real: memory and time of segments, streamed weights and scores.

  python benchmarks/memory_gpu.py [--steps 3] [--only TEXT] [key=value ...]

The decoder of memory.py (48 layers of width 2048, 2.1 billion parameters, bfloat16, tiled head) on one row of 16,384
tokens with cuDNN's attention. `temporaries`, `arguments` and `host` are XLA's count of the compiled step; `in use` is
what the device's allocator has handed out between two steps. Without a GPU this prints one line and stops.
"""

import gc
import statistics
import sys

import _measure
import _steps
import jax
from _measure import Figure

from maxghost import config as configuration

SHAPE = (
  "base_emb_dim=2048", "base_mlp_dim=4096", "base_num_decoder_layers=48", "base_num_query_heads=16",
  "base_num_kv_heads=16", "head_dim=128", "vocab_size=32768", "max_target_length=16384", "per_device_batch_size=1",
  "ghost_val_batch_size=1", "dtype=bfloat16", "weight_dtype=bfloat16", "mu_dtype=bfloat16", "attention=flash",
  "num_vocab_tiling=16", "remat_policy=full", "ghost_detail=total", "dataset_type=synthetic", "ghost_val_sets=words",
)  # fmt: skip
PLAIN = ("ghost_enabled=false",)
GHOST = ("ghost_schedule=reverse_scan", "ghost_rank=32", "ghost_direction=sgd")
SEGMENTS = ("segment_lengths=6",)
STREAMED = ("offload_to_host=weights,optimizer",)
ROWS = {
  "plain scan": PLAIN,
  "plain scan, with scores": GHOST,
  "segments of 6": (*PLAIN, *SEGMENTS),
  "segments of 6, with scores": (*GHOST, *SEGMENTS),
  "segments of 6, weights and moments streamed": (*PLAIN, *SEGMENTS, *STREAMED),
  "segments of 6, weights and moments streamed, with scores": (*GHOST, *SEGMENTS, *STREAMED),
}


def main() -> int:
  args = _measure.arguments(__doc__, steps=3, only="")
  if jax.default_backend() != "gpu":
    print(f"skipped: JAX sees no GPU, only {jax.default_backend()}; pip install '.[gpu]' on a machine that has one")
    return 0
  names = [name for name in ROWS if _measure.named(name, args.only)]
  rows = [measure(name, args) for name in names]
  found = {row["step"]: row for row in rows}
  pairs = [(found[name], found[base]) for name in names for base in names if name == f"{base}, with scores"]
  figures = [figure for pair in pairs for figure in scored_over_plain(*pair)]
  device = jax.devices()[0]
  notes = [f"{device.device_kind}; {' '.join(device.client.platform_version.split())}"]
  return _measure.publish("memory_gpu", rows, figures, notes, path=args.json)


def measure(name: str, args) -> dict:
  """Compiles one row, runs a few steps and lets go of it."""
  print(f"compiling: {name}", file=sys.stderr, flush=True)
  cfg = configuration.load(str(_measure.BASE), *SHAPE, *ROWS[name], *args.overrides)
  step = _steps.make_step(cfg)
  step()
  seconds = statistics.median(_measure.timed(step) for _ in range(args.steps))
  analysis, memory = step.compiled.memory_analysis(), jax.devices()[0].memory_stats()
  row = {
    "step": name,
    "temporaries GB": analysis.temp_size_in_bytes / 1e9,
    "arguments GB": analysis.argument_size_in_bytes / 1e9,
    "host GB": analysis.host_argument_size_in_bytes / 1e9,
    "in use GB": memory["bytes_in_use"] / 1e9,
    "seconds per step": seconds,
    "tokens/s": cfg.data.max_target_length / seconds,
  }
  del step
  gc.collect()
  return row


def scored_over_plain(scored: dict, plain: dict) -> list[Figure]:
  """Bytes of the device and time with scores over those without."""
  label = plain["step"]
  total = [row["temporaries GB"] + row["arguments GB"] for row in (scored, plain)]
  time = scored["seconds per step"] / plain["seconds per step"]
  return [
    Figure(f"GPU, {label}: device bytes scored over plain", total[0] / total[1], 1.1, form="{:.3f}"),
    Figure(f"GPU, {label}: time scored over plain", time, form="{:.3f}"),
  ]


if __name__ == "__main__":
  sys.exit(_measure.run(main))
