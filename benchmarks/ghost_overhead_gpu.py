"""What scoring costs on a GPU: a model's train step with and without scores, in turns, the plain step = 1.00.

  python benchmarks/ghost_overhead_gpu.py [--shape gpt2-small] [--rounds 7] [--steps 12] [--only TEXT] [key=value ...]

Whole models, their output head tied: gpt2-small (12 layers of width 768, 50,304 tokens of vocabulary, n = 16 training
rows of 1,024 tokens) or llama-1b (16 layers of width 2048, 128,256 tokens of vocabulary, n = 8 rows of 2,048; with
four rows of the table it needs a GPU of 140 GB). bfloat16 compute, cuDNN's attention, three documents a row, V = 1
validation row. The rows of the table are those of ghost_overhead.py. Rates are tokens per second and the share of the
rate that a large bfloat16 matrix product reached in the same run. Without a GPU this prints one line and stops.
--only: rows whose name holds one of these texts, separated by |.
"""

import functools
import statistics
import sys
from collections.abc import Callable

import _measure
import _steps
import jax
from _measure import Figure
from ghost_overhead import EXACT, PLAIN, ROWS, TARGETS, table_row

from maxghost import config as configuration
from maxghost.training.plan import step_flops

COMMON = (
  "ghost_val_batch_size=1", "dtype=bfloat16", "attention=flash", "dataset_type=synthetic", "ghost_val_sets=words",
)  # fmt: skip
SHAPES = {
  "gpt2-small": ("model_name=gpt2-small", "vocab_size=50304", "max_target_length=1024", "per_device_batch_size=16"),
  "llama-1b": ("base_num_decoder_layers=16", *_steps.LLAMA_1B),
}
LEFT_OUT = ("engine jvp",)  # cuDNN's kernel has no forward mode: it would run another model
MATRIX = (8192, 8192, 8192)


def main() -> int:
  args = _measure.arguments(__doc__, shape="gpt2-small", rounds=7, steps=12, only="")
  if args.shape not in SHAPES:
    print(f"--shape {args.shape}: use one of {', '.join(SHAPES)}")
    return 2
  if jax.default_backend() != "gpu":
    print(f"skipped: JAX sees no GPU, only {jax.default_backend()}; pip install '.[gpu]' on a machine that has one")
    return 0
  wanted = [name for name in ROWS if name not in LEFT_OUT and _measure.named(name, args.only)]
  chosen = {name: row for name, row in ROWS.items() if name in (PLAIN, EXACT, *wanted)}
  steps = {}
  for name, row in chosen.items():
    print(f"compiling: {name}", file=sys.stderr, flush=True)
    steps[name] = _steps.make_step(config(args.shape, row.keys, args.overrides))
  contenders: dict[str, Callable] = {n: functools.partial(several, s, args.steps) for n, s in steps.items()}
  product, product_flops = _steps.matmul_rate(MATRIX, "bfloat16", repeats=8)
  contenders["matrix product"] = product
  seconds = _measure.take_turns(contenders, args.rounds, warmup=2)
  rate = product_flops / statistics.median(seconds.pop("matrix product"))
  cfg = config(args.shape, (), args.overrides)
  # Without FLOPs: on a GPU XLA's count leaves out what it gives to libraries, which depends on its tuning.
  rows = [{"shape": args.shape} | table_row(n, seconds, steps) | speed(cfg, seconds[n], rate) for n in steps]
  said, plain = f"{args.shape} on a GPU", statistics.median(seconds[PLAIN])
  figures = [
    Figure(f"{said}, {name}: time over plain", _measure.ratio(seconds, name, PLAIN), TARGETS.get(name), form="{:.3f}")
    for name in chosen
    if name != PLAIN
  ]
  figures.append(Figure(f"{said}, plain step: rows per second", cfg.data.per_device_batch_size / plain))
  notes = [f"bfloat16 matrix product of {MATRIX[0]}: {rate / 1e12:.0f} TFLOP/s; " + platform_line()]
  return _measure.publish("ghost_overhead_gpu", rows, figures, notes, path=args.json)


def config(shape: str, keys, overrides):
  """The configuration of one row."""
  return configuration.load(str(_measure.BASE), *COMMON, *SHAPES[shape], *keys, *overrides)


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


def platform_line() -> str:
  """The device and the versions below JAX."""
  device = jax.devices()[0]
  return f"{device.device_kind}; {' '.join(device.client.platform_version.split())}"


if __name__ == "__main__":
  sys.exit(_measure.run(main))
