"""What scoring costs: the same train step with and without scores, in turns, the plain step = 1.00.

  python benchmarks/ghost_overhead.py [--rounds 9] [key=value ...]

Shapes: GPT-2 small's layer (feed-forward 4 x D, head width 64, one GELU branch) at width 512, 4 layers, 256 positions,
16 training rows and 1 validation row. A row of the table is a line of CONFIGURATIONS: add one to measure more.
FLOPs are XLA's count of the same step with the layers unrolled. `memory` is the compiler's temporary memory.
"""

import statistics
import sys

import _measure
import _steps
import jax
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost.ghost import schedules
from maxghost.ghost.losses import language_model_loss
from maxghost.training import state

SHAPE = (
  "base_emb_dim=512", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=2048",
  "mlp_activations=[gelu]", "base_num_decoder_layers=4", "vocab_size=4096", "max_target_length=256",
  "per_device_batch_size=16", "ghost_val_batch_size=1", "dataset_type=synthetic",
)  # fmt: skip

PLAIN = "plain step"

# Row of the table -> the keys that make it. The first one is what the others are divided by.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
  PLAIN: ("ghost_enabled=false",),
  "two_pass exact, sgd": ("ghost_schedule=two_pass", "ghost_direction=sgd"),
  "two_pass exact, adam": ("ghost_schedule=two_pass", "ghost_direction=adam"),
  "two_pass exact, adam, totals only": ("ghost_schedule=two_pass", "ghost_direction=adam", "ghost_detail=total"),
}

# Row -> largest time over the plain step's, and largest FLOPs over the plain step's without the share V/n of the
# validation rows. None: not a target.
TARGETS: dict[str, tuple[float | None, float | None]] = {"two_pass exact, sgd": (1.30, 1.34)}


def main() -> int:
  args = _measure.arguments(__doc__, rounds=9)
  steps, flops = {}, {}
  for name, keys in CONFIGURATIONS.items():
    cfg = config(keys, args.overrides)
    steps[name] = _steps.make_step(cfg)
    flops[name] = _steps.make_step(config((*keys, "scan_layers=false"), args.overrides)).flops
  share = cfg.ghost.ghost_val_batch_size / cfg.data.per_device_batch_size
  contenders = {**steps, "validation pass alone": validation_pass(steps, args.overrides)}
  seconds = _measure.take_turns(contenders, args.rounds, warmup=2)
  rows, figures = [], []
  for name in contenders:
    times, count = _measure.ratio(seconds, name, PLAIN), flops.get(name)
    row = {"step": name, "time / plain": times, "FLOPs / plain": "", "memory / plain": "", "median seconds": ""}
    row["median seconds"] = statistics.median(seconds[name])
    if count:
      row["FLOPs / plain"] = count / flops[PLAIN]
      row["memory / plain"] = steps[name].temporary_bytes / steps[PLAIN].temporary_bytes
    rows.append(row)
    time_limit, flops_limit = TARGETS.get(name, (None, None))
    if time_limit:
      figures.append(Figure(f"{name}: time / plain step", times, time_limit, form="{:.2f}"))
      figures.append(Figure(f"{name}: FLOPs / plain step", count / flops[PLAIN], flops_limit + share, form="{:.2f}"))
  adam = _measure.ratio(seconds, "two_pass exact, adam", "two_pass exact, sgd")
  figures.append(Figure("adam direction: time / sgd direction", adam, 1.02, form="{:.3f}"))
  return _measure.publish("ghost_overhead", rows, figures, path=args.json)


def config(keys, overrides):
  """The configuration of one row."""
  return configuration.load(str(_measure.BASE), *SHAPE, *keys, *overrides)


def validation_pass(steps, overrides):
  """The gradient of the validation loss alone, on the parameters as the plain step leaves them."""
  cfg = config((), overrides)
  graphdef, _ = state.abstract_split(cfg)
  batch = jax.device_put(_steps.packed_batch(cfg, cfg.ghost.ghost_val_batch_size, 1))

  @jax.jit
  def gradient(train_state, batch):
    model_graphdef, params, rest = nnx.split(nnx.merge(graphdef, train_state).model, nnx.Param, ...)
    return schedules.validation_gradients(model_graphdef, params, rest, language_model_loss, (batch,))

  return lambda: jax.block_until_ready(gradient(steps[PLAIN].state, batch)) and None


if __name__ == "__main__":
  sys.exit(main())
