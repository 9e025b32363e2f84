"""What scoring costs on a TPU, by its real compiler and without a TPU: the rows of ghost_overhead.py, ahead of time.

  python benchmarks/ghost_overhead_tpu.py [--chip v5p] [key=value ...]

Needs libtpu (`pip install '.[tpu]'`); without it this prints one line and stops. Layers of GPT-2 small, unrolled, since
XLA counts the body of a loop once; bfloat16 compute, 16 x 1024 training tokens and one validation row, one chip.
`estimated` is the compiler's own estimate of the seconds of a step, relative to the plain step: not a timing.
"""

import os
import sys
import time

os.environ |= {  # before JAX starts: libtpu may be loaded by several processes, and no cloud metadata is asked for
  "JAX_PLATFORMS": "cpu",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}

import _measure
import jax
import numpy as np
from _measure import Figure
from ghost_overhead import EXACT, PLAIN, ROWS
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxghost import config as configuration
from maxghost.parallel import shardings
from maxghost.training import state
from maxghost.training.step import make_train_step

CHIPS = {"v5e": ("v5e:1x1", (1, 1, 1)), "v5p": ("v5:2x2x1", (2, 2, 1)), "v6e": ("v6e:1x1", (1, 1, 1))}
SHAPE = (
  "base_emb_dim=768", "base_num_query_heads=12", "base_num_kv_heads=12", "head_dim=64", "base_mlp_dim=3072",
  "mlp_activations=[gelu]", "base_num_decoder_layers=2", "vocab_size=50304", "max_target_length=1024",
  "per_device_batch_size=16", "ghost_val_batch_size=1", "dataset_type=synthetic", "ghost_val_sets=words",
  "dtype=bfloat16", "attention=dot_product", "scan_layers=false", "ghost_detail=total",
)  # fmt: skip
NAMES = (PLAIN, EXACT, "two_pass exact, adam", "two_pass rank 32, sgd", "two_pass rank 32, 4 validation sets")


def main() -> int:
  args = _measure.arguments(__doc__, chip="v5p")
  if args.chip not in CHIPS:
    print(f"--chip {args.chip}: use one of {', '.join(CHIPS)}")
    return 2
  libtpu = _measure.version("libtpu")
  if libtpu is None:
    print("skipped: libtpu is not installed; pip install '.[tpu]' brings the TPU compiler")
    return 0
  device = chip(args.chip)
  compiled = {}
  for name in NAMES:
    begin = time.perf_counter()
    compiled[name] = compile_row(ROWS[name].keys, args.overrides, device)
    print(f"{name}: compiled in {(time.perf_counter() - begin) / 60:.1f} min", file=sys.stderr, flush=True)
  base = compiled[PLAIN]
  rows, figures = [], []
  for name, step in compiled.items():
    flops, seconds = (relative(step, base, counter) for counter in ("flops", "optimal_seconds"))
    temporary = step.memory_analysis().temp_size_in_bytes
    rows.append({"step": name, "FLOPs": flops, "estimated": seconds, "temporaries GB": temporary / 1e9})
    figures.append(Figure(f"{name}, estimated time over plain ({args.chip})", seconds, form="{:.3f}"))
  notes = [f"libtpu {libtpu}; estimates of the compiler, not timings"]
  return _measure.publish("ghost_overhead_tpu", rows, figures, notes, path=args.json)


def chip(name: str):
  """One device of the topology, described by the TPU compiler."""
  from jax.experimental import topologies

  topology, bounds = CHIPS[name]
  found = topologies.get_topology_desc(
    platform="tpu", topology_name=topology, chip_config_name="default", chips_per_host_bounds=bounds, num_slices=1
  )
  return found.devices[0]


def compile_row(keys, overrides, device):
  """The train step of one row, compiled for `device`."""
  cfg = configuration.load(str(_measure.BASE), *SHAPE, *keys, *overrides)
  sharding = NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())

  def placed(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

  def rows(count: int):
    shape = jax.ShapeDtypeStruct((count, cfg.data.max_target_length), np.int32)
    names = ("inputs", "targets")
    return {f"{n}{suffix}": shape for n in names for suffix in ("", "_position", "_segmentation")}

  sets = cfg.val_sets
  batch, val_batches = rows(cfg.data.per_device_batch_size), tuple(rows(cfg.ghost.ghost_val_batch_size) for _ in sets)
  with shardings.tracing_for("tpu"):
    graphdef, abstract = state.abstract_split(cfg)
    step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=3, num_sets=max(len(sets), 1))
    lowered = jax.jit(step, donate_argnums=0).lower(placed(abstract), placed(batch), placed(val_batches))
  return lowered.compile()


def relative(step, base, counter: str) -> float:
  """A counter over the plain step's; NaN where the compiler gives no positive number."""
  value, reference = (c.cost_analysis().get(counter, -1.0) for c in (step, base))
  return value / reference if value > 0 and reference > 0 else float("nan")


if __name__ == "__main__":
  sys.exit(main())
