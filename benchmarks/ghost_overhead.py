"""What scoring costs: the same train step with and without scores, in turns, the plain step = 1.00.

  python benchmarks/ghost_overhead.py [--rounds 9] [--agreement-steps 60] [--only TEXT] [key=value ...]

Shapes: GPT-2 small's layer (feed-forward 4 x D, head width 64, one GELU branch) at width 512, 4 layers, 256 positions,
n = 16 training rows, V = 1 validation row and remat_policy=minimal. A row of the table is a line of ROWS: add one to
measure more.
FLOPs are XLA's count of the same step with the layers unrolled; `memory` is the compiler's temporary memory.

The last part trains the default model on its real data twice in lockstep, scored exactly and with rank-32 directions,
and correlates the documents' scores of every step, for both directions.

--only: rows whose name holds one of these texts, separated by |.
"""

import dataclasses
import statistics
import sys

import _measure
import _steps
import jax
import numpy as np
from _measure import Figure
from flax import nnx
from scipy.stats import pearsonr, spearmanr

from maxghost import config as configuration
from maxghost import data
from maxghost.ghost import GhostEngine
from maxghost.ghost.schedules import Model, passes
from maxghost.objectives import LanguageModelLoss
from maxghost.training import state

SHAPE = (
  "base_emb_dim=512", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=2048",
  "mlp_activations=[gelu]", "base_num_decoder_layers=4", "vocab_size=4096", "max_target_length=256",
  "per_device_batch_size=16", "ghost_val_batch_size=1", "dataset_type=synthetic", "remat_policy=minimal",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the table: the keys that make it, and its targets where it has any.

  limit: largest time over that of row `versus`, plus `shares` times V/n for the validation rows' own pass.
  flops: largest FLOPs over the plain step's, without the share V/n. added_flops: largest FLOPs over those of `versus`.
  """

  keys: tuple[str, ...]
  limit: float | None = None
  shares: int = 0
  versus: str = "plain step"
  flops: float | None = None
  added_flops: float | None = None


PLAIN, EXACT, REVERSE = "plain step", "two_pass exact, sgd", "reverse_scan exact, sgd"
RECOMPUTED = "reverse_scan exact, sgd, layers computed again"
RANK_SGD, EVERY = "two_pass rank 32, sgd", "two_pass rank 32, validation every 4"
TARGETS = {EXACT: 1.30, RANK_SGD: 1.10, EVERY: 1.05}  # time over the plain step's, on a GPU or TPU
ADAM, RANK_ADAM = "two_pass exact, adam", "two_pass rank 32, adam"
PATH = ("ghost_direction=path", "ghost_curvature=secant")
UNCLIPPED = "two_pass exact, marginal without clipping"
PLAIN_MICRO = "plain step in 4 micro-batches"
MICRO = ("gradient_accumulation_steps=4", "per_device_batch_size=4")
NUM_ROWS = 16
RANK = "ghost_rank=32"
FOUR_SETS = "ghost_val_sets=[a=words,b=digits,c=brackets,d=noise]"
ROWS = {
  PLAIN: Row(("ghost_enabled=false",)),
  EXACT: Row(("ghost_direction=sgd",), 1.30, flops=1.34),
  ADAM: Row(("ghost_direction=adam",), 1.02, versus=EXACT),
  "two_pass exact, path and secant": Row(PATH, 1.03, versus=ADAM, added_flops=1.005),
  UNCLIPPED: Row(("ghost_direction=marginal", "gradient_clipping_threshold=0.0")),
  "two_pass exact, marginal with clipping": Row(("ghost_direction=marginal",), versus=UNCLIPPED, added_flops=1.26),
  "two_pass exact, sgd, totals only": Row(("ghost_direction=sgd", "ghost_detail=total")),
  "two_pass exact, second order": Row(("ghost_curvature=hessian",)),
  REVERSE: Row(("ghost_schedule=reverse_scan", "ghost_direction=sgd"), 1.00, versus=EXACT),
  RECOMPUTED: Row(("ghost_schedule=reverse_scan", "ghost_direction=sgd", "remat_policy=full")),
  "reverse_scan exact, adam": Row(("ghost_schedule=reverse_scan", "ghost_direction=adam")),
  RANK_SGD: Row((RANK, "ghost_direction=sgd"), 1.03, shares=1),
  RANK_ADAM: Row((RANK, "ghost_direction=adam")),
  "two_pass rank 32, path and secant": Row((RANK, *PATH), 1.03, versus=RANK_ADAM, added_flops=1.005),
  EVERY: Row((RANK, "ghost_direction=sgd", "ghost_val_every=4"), 1.04),
  "two_pass rank 32, 4 validation sets": Row((RANK, "ghost_direction=sgd", FOUR_SETS), 1.10, shares=4),
  PLAIN_MICRO: Row((*MICRO, "ghost_enabled=false")),
  "two_pass exact, path, in 4 micro-batches": Row((*MICRO, "ghost_direction=path"), 2.00, shares=1, versus=PLAIN_MICRO),
  "concat (GhostSuite's form)": Row(("ghost_schedule=concat", "ghost_direction=sgd")),
  "engine jvp": Row(("ghost_schedule=forward_mode", "ghost_direction=sgd")),
}


def main() -> int:
  args = _measure.arguments(__doc__, rounds=9, agreement_steps=60, only="")
  wanted = {PLAIN, EXACT, *(row.versus for name, row in ROWS.items() if _measure.named(name, args.only))}
  chosen = {name: row for name, row in ROWS.items() if name in wanted or _measure.named(name, args.only)}
  steps, flops = {}, {}
  for name, row in chosen.items():
    cfg = config(row.keys, args.overrides)
    steps[name] = _steps.make_step(cfg)
    if counts_flops(cfg):
      flops[name] = _steps.make_step(config((*row.keys, "scan_layers=false"), args.overrides)).flops
  contenders = {name: advance(step, config(chosen[name].keys, args.overrides)) for name, step in steps.items()}
  contenders["validation pass alone"] = validation_pass(steps[PLAIN], args.overrides)
  contenders["gradients and materialised scores"] = materialised(steps[PLAIN], args.overrides)
  seconds = _measure.take_turns(contenders, args.rounds, warmup=2)
  rows = [table_row(name, seconds, steps, flops) for name in contenders]
  share = share_of_validation(config((), args.overrides))
  figures = [figure for name, row in chosen.items() for figure in targets(name, row, share, seconds, flops)]
  figures += [memory_target(name, steps, args.overrides) for name in (REVERSE, RECOMPUTED) if name in steps]
  if args.agreement_steps:
    figures += agreement(args.agreement_steps)
  return _measure.publish("ghost_overhead", rows, figures, path=args.json)


def config(keys, overrides):
  """The configuration of one row."""
  return configuration.load(str(_measure.BASE), *SHAPE, "ghost_val_sets=words", *keys, *overrides)


def counts_flops(cfg) -> bool:
  """XLA's count of a step with a loop or a branch in it is not that of the step."""
  ghost, whole = cfg.ghost, cfg.optimizer.gradient_accumulation_steps == 1
  return whole and (not ghost.ghost_enabled or (ghost.ghost_schedule == "two_pass" and ghost.ghost_val_every == 1))


def advance(step, cfg):
  """A contender: one step or, where the validation gradient serves several, that many, averaged."""
  count = cfg.ghost.ghost_val_every if cfg.ghost.ghost_enabled else 1
  if count == 1:
    return step

  def run() -> float:
    return statistics.fmean(_measure.timed(step) for _ in range(count))

  return run


def validation_pass(plain, overrides):
  """A contender: the gradient of the validation loss alone, on the parameters as the plain step leaves them."""
  cfg = config((), overrides)
  graphdef, _ = state.abstract_split(config(ROWS[PLAIN].keys, overrides))
  batch = jax.device_put(_steps.packed_batch(cfg, cfg.ghost.ghost_val_batch_size, 1))

  @jax.jit
  def gradient(train_state, batch):
    model_graphdef, params, rest = nnx.split(nnx.merge(graphdef, train_state).model, nnx.Param, ...)
    return passes.validation_gradients(Model(model_graphdef, params, rest), LanguageModelLoss(), (batch,))

  def run() -> None:
    jax.block_until_ready(gradient(plain.state, batch))

  return run


def materialised(plain, overrides):
  """A contender: one gradient per row, held in memory, each multiplied with the validation gradient; no update."""
  cfg = config((), overrides)
  graphdef, _ = state.abstract_split(config(ROWS[PLAIN].keys, overrides))
  engine = GhostEngine(cfg, engine="perexample", direction="sgd")
  rows = jax.device_put(_steps.packed_batch(cfg, cfg.ghost.ghost_val_batch_size, 1))

  def run() -> None:
    model = nnx.merge(graphdef, plain.state).model
    jax.block_until_ready(engine.score(model, plain.batch, rows))

  return run


def table_row(name: str, seconds, steps, flops=None) -> dict:
  """flops: {step: FLOPs} where they are counted, else the row has no such column."""
  row = {"step": name, "time / plain": _measure.ratio(seconds, name, PLAIN)}
  if flops is not None:
    row["FLOPs / plain"] = flops[name] / flops[PLAIN] if flops.get(name) else ""
  row["memory / plain"] = steps[name].temporary_bytes / steps[PLAIN].temporary_bytes if name in steps else ""
  row["median seconds"] = statistics.median(seconds[name])
  return row


def share_of_validation(cfg) -> float:
  """V/n."""
  return cfg.ghost.ghost_val_batch_size / cfg.data.per_device_batch_size


def targets(name: str, row: Row, share: float, seconds, flops) -> list[Figure]:
  found = []
  if row.limit is not None:
    times = _measure.ratio(seconds, name, row.versus)
    limit = row.limit + row.shares * share
    found.append(Figure(f"{name}: time over that of {row.versus}", times, limit, form="{:.3f}"))
  if row.flops is not None:
    ratio = flops[name] / flops[PLAIN]
    found.append(Figure(f"{name}: FLOPs over the plain step's", ratio, row.flops + share, form="{:.3f}"))
  if row.added_flops is not None:
    label = f"{name}: FLOPs over those of {row.versus}"
    found.append(Figure(label, flops[name] / flops[row.versus], row.added_flops, form="{:.4f}"))
  return found


def memory_target(name: str, steps, overrides) -> Figure:
  """reverse_scan's temporary memory against the plain step's, one layer's direction and 10 %."""
  cfg = config(ROWS[REVERSE].keys, overrides)
  _, abstract = state.abstract_split(cfg)
  layers = [
    leaf.size * leaf.dtype.itemsize / cfg.model.base_num_decoder_layers
    for path, leaf in nnx.to_flat_state(nnx.filter_state(abstract, nnx.Param))
    if path[:3] == ("model", "decoder", "layers")
  ]
  limit = 1.1 * (steps[PLAIN].temporary_bytes + sum(layers)) / steps[PLAIN].temporary_bytes
  value = steps[name].temporary_bytes / steps[PLAIN].temporary_bytes
  return Figure(f"{name}: temporary memory over the plain step's", value, limit, form="{:.2f}")


def agreement(num_steps: int) -> list[Figure]:
  """Smallest correlation over the steps of a real run between rank-32 and exact scores of a step's documents. Adam's
  first direction, with the signs of the gradient for entries, is the hardest: the steps after it are shown apart."""
  figures = []
  for direction in ("sgd", "adam"):
    keys = (f"ghost_direction={direction}", f"per_device_batch_size={NUM_ROWS}")
    pairs = list(zip(real_scores(num_steps, *keys), real_scores(num_steps, *keys, RANK), strict=True))
    errors = [float(np.linalg.norm(low_rank - exact) / np.linalg.norm(exact)) for exact, low_rank in pairs]
    first = f"rank 32 and exact, {direction}: relative error of the scores in the first step"
    figures.append(Figure(first, errors[0]))
    figures.append(Figure(f"rank 32 and exact, {direction}: largest relative error after it", max(errors[1:])))
    for name, correlate, limit in (("Spearman", spearmanr, 0.99), ("Pearson", pearsonr, None)):
      found = [float(correlate(exact, low_rank).statistic) for exact, low_rank in pairs]
      run = f"{num_steps} steps of the default run, {NUM_ROWS} rows"
      label = f"rank 32 and exact, {direction}: lowest {name} over {run}"
      figures.append(Figure(label, min(found), limit, above=True, form="{:.4f}"))
      if direction == "adam":
        later = f"rank 32 and exact, adam: lowest {name} after the first step"
        figures.append(Figure(later, min(found[1:]), limit, above=True, form="{:.4f}"))
  return figures


def real_scores(num_steps: int, *keys: str):
  """Yields the scores of the documents of each step of the default run, float32[N]; training is the same for all."""
  cfg = configuration.load(str(_measure.BASE), *keys)
  dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed, vocab_size=cfg.model.vocab_size)
  graphdef, train_state = state.create_split(cfg)
  first = next(dataset.train).arrays
  compiled = None
  for step in range(num_steps):
    index = step // cfg.ghost.ghost_val_refresh_steps
    rows = dataset.validation_batch(
      index, cfg.ghost.ghost_val_batch_size, next(iter(cfg.data.validation_sets.values()))
    ).arrays
    batch, val_batches = jax.device_put((first if step == 0 else next(dataset.train).arrays, (rows,)))
    if compiled is None:
      compiled = _steps.compile_step(cfg, graphdef, train_state, batch, val_batches, dataset.layout.max_segments)
    train_state, out = compiled(train_state, batch, val_batches)
    scores, tokens = jax.device_get((out["score_dot_BSK"], out["tokens_BS"]))
    yield scores[..., 0][tokens > 0]


if __name__ == "__main__":
  sys.exit(_measure.run(main))
