"""What scoring costs on a TPU, by its real compiler and without a TPU: the rows of ghost_overhead.py, ahead of time.

  python benchmarks/ghost_overhead_tpu.py [--chip v5p] [--shape gpt2-small,llama-1b] [--rows TEXT] [key=value ...]

Needs libtpu (`pip install '.[tpu]'`); without it this prints one line and stops. bfloat16 compute, 16,384 training
tokens and one validation row, one chip; that row is a sixteenth of the rows of gpt2-small, an eighth of those of
llama-1b. The plain step with the validation row in its batch is the least that new validation rows in every step can
cost. Two estimates of the compiler, relative to the plain step; neither is a timing. `estimated` is XLA's roofline:
seconds from the FLOPs and bytes of each operation, before it is scheduled. `cycles` are those of the scheduled
operations, without copies and gathers that run beside them and without Pallas kernels (`_tpu.compiled_with_cycles`).
XLA counts the body of a loop once, so layers are unrolled; steps of 1 and of 2 layers are compiled, and what the second
one adds is counted once for each layer of the model. With ghost_val_every=4 one step of four has the validation pass,
and three do not: both are compiled. --rows: rows whose name holds one of these texts, separated by |.
"""

import math
import sys
import time

import _measure
import _steps
import _tpu
import jax
import numpy as np
from _measure import Figure
from ghost_overhead import EVERY, EXACT, PLAIN, RANK_SGD, ROWS, TARGETS
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxghost import config as configuration
from maxghost.ghost.schedules import base
from maxghost.parallel import shardings
from maxghost.training import scoring, state
from maxghost.training.step import make_train_step

COMMON = (
  "ghost_val_batch_size=1", "dataset_type=synthetic", "ghost_val_sets=words", "dtype=bfloat16",
  "attention=dot_product", "scan_layers=false", "ghost_detail=total",
)  # fmt: skip
SHAPES = {  # layers, keys
  "gpt2-small": (12, (
    "base_emb_dim=768", "base_num_query_heads=12", "base_num_kv_heads=12", "head_dim=64", "base_mlp_dim=3072",
    "mlp_activations=[gelu]", "vocab_size=50304", "max_target_length=1024", "per_device_batch_size=16",
  )),
  "llama-1b": (16, _steps.LLAMA_1B),
}  # fmt: skip
LEAST = "plain step with the validation rows"
NAMES = (PLAIN, LEAST, EXACT, RANK_SGD, EVERY, "two_pass exact, adam", "two_pass rank 32, 4 validation sets")


def main() -> int:
  args = _measure.arguments(__doc__, chip="v5p", shape=",".join(SHAPES), rows="")
  shapes = args.shape.split(",")
  for option, values, known in (("chip", [args.chip], _tpu.CHIPS), ("shape", shapes, SHAPES)):
    if wrong := [value for value in values if value not in known]:
      print(f"--{option} {wrong[0]}: use one of {', '.join(known)}")
      return 2
  libtpu = _measure.version("libtpu")
  if libtpu is None:
    print("skipped: libtpu is not installed; pip install '.[tpu]' brings the TPU compiler")
    return 0
  rows, figures = [], []
  for shape in shapes:
    found = counted_steps(shape, args)
    for name, step in found.items():
      flops, seconds, moved, cycles = (step[counter] / found[PLAIN][counter] for counter in COUNTERS)
      row = {"shape": shape, "step": name, "FLOPs": flops, "estimated": seconds, "cycles": cycles, "bytes": moved}
      rows.append(row | {"seconds": step[COUNTERS[1]]})
      said = f"{shape}, {name}, estimated time over plain ({args.chip})"
      figures.append(Figure(said, seconds, limit=TARGETS.get(name), form="{:.3f}"))
  notes = [f"libtpu {libtpu}; estimates of the compiler for whole models, not timings"]
  return _measure.publish("ghost_overhead_tpu", rows, figures, notes, path=args.json)


def counted_steps(shape: str, args) -> dict[str, dict[str, float]]:
  """{row: the compiler's counters of its step}."""
  device, (num_layers, keys) = _tpu.chip(args.chip), SHAPES[shape]
  found: dict[str, dict[str, float]] = {}
  for name in NAMES:
    if name not in (PLAIN, RANK_SGD) and not _measure.named(name, args.rows):
      continue
    begin, row = time.perf_counter(), ROWS[PLAIN if name == LEAST else name]
    overrides, kind = (*COMMON, *keys, *row.keys, *args.overrides), {"refresh": False if name == EVERY else None}
    found[name] = step = counted(overrides, device, num_layers, joined=name == LEAST, **kind)
    if name == EVERY:  # the first of four steps is that of the row before
      found[name] = {counter: (found[RANK_SGD][counter] + 3 * step[counter]) / 4 for counter in step}
    print(f"{shape}, {name}: compiled in {(time.perf_counter() - begin) / 60:.1f} min", file=sys.stderr, flush=True)
  return found


COUNTERS = ("flops", "optimal_seconds", "bytes accessed", "cycles")


def counted(keys, device, num_layers: int, **kind) -> dict[str, float]:
  """The compiler's counters of a step of `num_layers`, from those of 1 and of 2 layers; NaN where it has none. kind: as
  in `compile_row`."""
  costs = []
  for layers in (1, 2):
    cost = compile_row((*keys, f"base_num_decoder_layers={layers}"), device, **kind)
    costs.append([value if (value := cost.get(name, -1.0)) > 0 else math.nan for name in COUNTERS])
  return {name: one + (num_layers - 1) * (two - one) for name, one, two in zip(COUNTERS, *costs, strict=True)}


def compile_row(keys, device, refresh: bool | None = None, joined: bool = False) -> dict[str, float]:
  """The compiler's counters of a row's train step. refresh: whether a step with ghost_val_every is a fresh one. joined:
  the validation rows are rows of the batch."""
  cfg = configuration.load(str(_measure.BASE), *keys)

  class Known(base.Stored):
    """In place of the step's own answer, so that XLA leaves out the other branch."""

    def __init__(self, leaves, step_answer):
      super().__init__(leaves, step_answer if refresh is None else np.bool_(refresh))

  scoring.Stored = Known
  sharding = NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())

  def placed(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

  def rows(count: int):
    shape = jax.ShapeDtypeStruct((count, cfg.data.max_target_length), np.int32)
    names = ("inputs", "targets")
    return {f"{n}{suffix}": shape for n in names for suffix in ("", "_position", "_segmentation")}

  sets = cfg.val_sets
  num, num_val = cfg.data.per_device_batch_size, cfg.ghost.ghost_val_batch_size
  batch, val_batches = rows(num + num_val if joined else num), tuple(rows(num_val) for _ in sets)
  with shardings.tracing_for("tpu"):
    graphdef, abstract = state.abstract_split(cfg)
    step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=3, num_sets=max(len(sets), 1))
    lowered = jax.jit(step, donate_argnums=0).lower(placed(abstract), placed(batch), placed(val_batches))
  compiled, cycles = _tpu.compiled_with_cycles(lowered)
  return compiled.cost_analysis() | {"cycles": cycles}


if __name__ == "__main__":
  sys.exit(_measure.run(main))
