"""What scoring costs on a GPU: GPT-2 small's train step with and without scores, in turns, the plain step = 1.00.

  python benchmarks/ghost_overhead_gpu.py [--rounds 7] [--steps 12] [--only WORD] [key=value ...]

The whole model (12 layers of width 768, 50,304 tokens of vocabulary, the output head tied), bfloat16 compute, cuDNN's
attention, n = 16 training rows of 1,024 tokens in three documents each, V = 1 validation row. The rows of the table are
those of ghost_overhead.py. Rates are tokens per second and the share of the rate that a large bfloat16 matrix product
reached in the same run. Without a GPU this prints one line and stops. --only leaves out the rows that do not contain
the word.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable

import _measure
import _steps
import jax
from _measure import Figure
from ghost_overhead import EXACT, PLAIN, ROWS, Row, counts_flops, share_of_validation, table_row

from maxghost import config as configuration
from maxghost.training.plan import step_flops

SHAPE = (
  "model_name=gpt2-small", "vocab_size=50304", "max_target_length=1024", "per_device_batch_size=16",
  "ghost_val_batch_size=1", "dtype=bfloat16", "attention=flash", "dataset_type=synthetic", "ghost_val_sets=words",
)  # fmt: skip
LEFT_OUT = ("engine jvp",)  # cuDNN's kernel has no forward mode: it would run another model
MATRIX = (8192, 8192, 8192)


def main() -> int:
  args = _measure.arguments(__doc__, rounds=7, steps=12, only="")
  if jax.default_backend() != "gpu":
    print(f"skipped: JAX sees no GPU, only {jax.default_backend()}; pip install '.[gpu]' on a machine that has one")
    return 0
  chosen = {name: on_gpu(name, row) for name, row in ROWS.items() if name not in LEFT_OUT}
  chosen = {name: row for name, row in chosen.items() if name in (PLAIN, EXACT) or args.only in name}
  steps, flops = {}, {}
  for name, row in chosen.items():
    print(f"compiling: {name}", file=sys.stderr, flush=True)
    cfg = config(row.keys, args.overrides)
    steps[name] = _steps.make_step(cfg)
    if counts_flops(cfg) and name in (PLAIN, EXACT):
      flops[name] = unrolled_flops(row.keys, args.overrides)
  contenders: dict[str, Callable] = {n: functools.partial(several, s, args.steps) for n, s in steps.items()}
  product, product_flops = _steps.matmul_rate(MATRIX, "bfloat16", repeats=8)
  contenders["matrix product"] = product
  seconds = _measure.take_turns(contenders, args.rounds, warmup=2)
  rate = product_flops / statistics.median(seconds.pop("matrix product"))
  cfg = config((), args.overrides)
  rows = [table_row(name, seconds, steps, flops) | speed(cfg, seconds[name], rate) for name in steps]
  figures = [f for name, row in chosen.items() for f in targets(name, row, share_of_validation(cfg), seconds)]
  figures += [Figure(f"GPU, {EXACT}: FLOPs over the plain step's", flops[EXACT] / flops[PLAIN], form="{:.3f}")]
  plain = statistics.median(seconds[PLAIN])
  figures.append(Figure("GPU, plain step: training rows per second", cfg.data.per_device_batch_size / plain))
  notes = [f"bfloat16 matrix product of {MATRIX[0]}: {rate / 1e12:.0f} TFLOP/s; " + platform_line()]
  return _measure.publish("ghost_overhead_gpu", rows, figures, notes, path=args.json)


def on_gpu(name: str, row: Row) -> Row:
  """The limit of the exact row is one for CPU."""
  return dataclasses.replace(row, limit=None) if name == EXACT else row


def config(keys, overrides):
  """The configuration of one row."""
  return configuration.load(str(_measure.BASE), *SHAPE, *keys, *overrides)


def unrolled_flops(keys, overrides) -> float:
  """XLA's count of the step with its layers unrolled, two of them: a loop's body counts once."""
  cfg = config((*keys, "scan_layers=false", "base_num_decoder_layers=2", "attention=dot_product"), overrides)
  return _steps.make_step(cfg).flops


def several(step, count: int) -> float:
  """Seconds per step of `count` steps sent off one behind the other, as the trainer does."""

  def run() -> None:
    for _ in range(count):
      step.state, step.outputs = step.compiled(step.state, step.batch, step.val_batches)
    jax.block_until_ready((step.state, step.outputs))

  return _measure.timed(run) / count


def speed(cfg, seconds, rate: float) -> dict:
  """Tokens per second and, of the plain step's arithmetic, the share of a matrix product's rate."""
  tokens = cfg.data.per_device_batch_size * cfg.data.max_target_length
  median = statistics.median(seconds)
  work = step_flops(cfg.model, cfg.data.per_device_batch_size, cfg.data.max_target_length).total
  return {"tokens/s": tokens / median, "of a matrix product's rate": work / median / rate}


def targets(name: str, row: Row, share: float, seconds) -> list[Figure]:
  """Time over that of the row it is compared with; over the plain step where it has no limit."""
  if name == PLAIN:
    return []
  limit = None if row.limit is None else row.limit + row.shares * share
  time = _measure.ratio(seconds, name, row.versus)
  return [Figure(f"GPU, {name}: time over that of {row.versus}", time, limit, form="{:.3f}")]


def platform_line() -> str:
  """The device and the versions below JAX."""
  device = jax.devices()[0]
  return f"{device.device_kind}; {' '.join(device.client.platform_version.split())}"


if __name__ == "__main__":
  sys.exit(main())
