"""What a long and deep step needs on one TPU chip, from the TPU compiler ahead of time, on a machine without a TPU.

  python benchmarks/memory.py [--rows NAME,NAME] [--chip v5e] [key=value ...]

bfloat16, 48 layers of width 2048, one row of 65,536 tokens, one chip. Needs libtpu (`pip install '.[tpu]'`): without it
the rows that need the TPU compiler are left out with a word. Bytes in the table are GB = 10^9; the compiler's own
messages count GiB. Figures of different libtpu versions do not compare.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping

import _flops
import _head
import _measure
import _mlp_stack
import _steps
import _tpu
import jax
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost.config.values import divisors
from maxghost.parallel import shardings, topologies
from maxghost.parallel.shardings import Layout
from maxghost.training import aot, host_memory, state
from maxghost.training.memory import estimate
from maxghost.training.memory_report import MemoryEstimate, compiled_sizes, verdict
from maxghost.training.plan import Plan
from maxghost.training.step import make_train_step

SHAPE = (
  "base_emb_dim=2048", "base_mlp_dim=4096", "base_num_decoder_layers=48", "max_target_length=65536",
  "per_device_batch_size=1", "dtype=bfloat16", "weight_dtype=bfloat16", "remat_policy=full",
  "dataset_type=synthetic", "ghost_val_sets=words",
)  # fmt: skip
DECODER = (
  "base_num_query_heads=16", "base_num_kv_heads=16", "head_dim=128", "vocab_size=32768", "attention=flash",
  "num_vocab_tiling=16", "mu_dtype=bfloat16", "ghost_detail=total", "segment_lengths=6",
)  # fmt: skip
PLAIN = ("ghost_enabled=false",)
GHOST = (
  "ghost_schedule=reverse_scan", "ghost_rank=32", "ghost_direction=sgd", "ghost_val_batch_size=1",
  "offload_to_host=carries",
)  # fmt: skip
STREAMED = ("offload_to_host=weights,optimizer",)
ALL_STREAMED = ("offload_to_host=weights,optimizer,carries",)
HEAD = (
  "base_emb_dim=2880", "vocab_size=201088", "max_target_length=32768", "per_device_batch_size=1", "dtype=bfloat16",
  "weight_dtype=bfloat16", "dataset_type=synthetic", "ghost_val_sets=words",
)  # fmt: skip
OWN_RULES = {  # name: keys, on four chips
  "embed on tensor, the rest on fsdp": (
    *PLAIN, "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2",
    "logical_axis_rules=[[embed,[tensor]],[mlp,[fsdp]],[q_heads,[fsdp]],[kv_heads,[fsdp]],[heads,[fsdp]],[vocab,[fsdp]]]",
  ),
  "embed whole, the rest on fsdp, moments over data too, scores by two_pass": (
    "ghost_schedule=two_pass", "ghost_rank=32", "ghost_direction=sgd", "ghost_val_batch_size=4",
    "ici_data_parallelism=2", "ici_fsdp_parallelism=2", "shard_optimizer_over_data=true",
    "logical_axis_rules=[[embed,[]],[mlp,[fsdp]],[q_heads,[fsdp]],[kv_heads,[fsdp]],[heads,[fsdp]],[vocab,[fsdp]]]",
  ),
}  # fmt: skip
SMALL = (  # the recompute cost, on this machine
  "base_emb_dim=256", "base_mlp_dim=768", "base_num_decoder_layers=8", "max_target_length=256",
  "per_device_batch_size=4", "remat_policy=full", "ghost_enabled=false", "dataset_type=synthetic",
  "ghost_val_sets=words",
)  # fmt: skip


@dataclasses.dataclass
class Case:
  """Lines of the printed table, figures with their targets, and notes."""

  rows: list[dict] = dataclasses.field(default_factory=list)
  figures: list[Figure] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  off: list[float] = dataclasses.field(default_factory=list)  # by how much the closed form errs

  def line(self, name: str, compiled: _tpu.Compiled) -> None:
    gigabytes = {
      "temporaries": compiled.temporaries, "arguments": compiled.arguments, "outputs": compiled.outputs,
      "host": compiled.host,
    }  # fmt: skip
    verdict = f"does not fit: needs {compiled.wanted / 1e9:.2f} GB" if compiled.error else "fits"
    row = {"program": name} | {f"{k} GB": v / 1e9 for k, v in gigabytes.items()}
    row |= {"closed form GB": compiled.closed / 1e9, "off": f"{compiled.off:+.1%}"}
    self.rows.append(row | {"verdict": verdict})
    self.off.append(abs(compiled.off))


@dataclasses.dataclass(frozen=True)
class Bench:
  """The chip that is compiled for, and the user's overrides."""

  name: str
  overrides: tuple[str, ...]

  @functools.cached_property
  def device(self):
    return _tpu.chip(self.name)

  @property
  def hbm(self) -> float:
    return _tpu.HBM[self.name]

  def stack(self, *keys: str) -> _tpu.Compiled:
    """The gradient of the feed-forward stack."""
    cfg = _mlp_stack.load(str(_measure.BASE), *SHAPE, *keys, *self.overrides)
    run, params, batch = _mlp_stack.make(cfg)
    compiled = _tpu.compile_for(self.device, run, params, batch, (batch,) if cfg.ghost.ghost_enabled else ())
    inputs = batch["x"].size * 2 * (1 + cfg.ghost.ghost_enabled)
    return compiled.beside(gradient_only(cfg, _mlp_stack.MlpStack), inputs)

  def head(self, *keys: str) -> _tpu.Compiled:
    """The gradient of the output head."""
    cfg = configuration.load(str(_measure.BASE), *HEAD, *keys, *self.overrides)
    function, arguments = _head.make(cfg)
    plain = gradient_only(configuration.replace(cfg, ghost_enabled=False), _head.Head)
    inputs = num_bytes(arguments[2], arguments[4]) if cfg.ghost.ghost_enabled else 0  # scores and the given direction
    return _tpu.compile_for(self.device, function, *arguments).beside(plain, inputs)

  def planned_step(self, *keys: str, chips: int = 4) -> _tpu.Compiled:
    """The whole train step of the decoder on several chips, or on one that the estimate knows as a TPU."""
    cfg = configuration.load(str(_measure.BASE), *SHAPE, *DECODER, *keys, *self.overrides)
    plan = Plan.of(cfg, Layout.of(cfg.parallel, topologies.open_devices(f"{self.name}-{chips}")))
    compiled = aot.compile_step(plan)
    if compiled.executable is None:
      return _tpu.Compiled(error=compiled.problem).beside(plan.memory)
    sizes = compiled_sizes(compiled.executable.memory_analysis())
    return _tpu.Compiled(sizes["temporaries"], sizes["arguments"], 0.0, 0.0).beside(plan.memory)

  def step(self, *keys: str) -> _tpu.Compiled:
    """The whole train step of the decoder."""
    cfg = configuration.load(str(_measure.BASE), *SHAPE, *DECODER, *keys, *self.overrides)
    sets = cfg.data.validation_sets if cfg.ghost.ghost_enabled else ()
    batch, val_batches = batch_shapes(cfg, cfg.data.per_device_batch_size), ()
    val_batches = tuple(batch_shapes(cfg, cfg.ghost.ghost_val_batch_size) for _ in sets)
    graphdef, abstract = state.abstract_split(cfg)
    with shardings.tracing_for("tpu"):
      step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=1, num_sets=max(len(sets), 1))
    compiled = _tpu.compile_for(self.device, step, abstract, batch, val_batches, donate=(0,))
    return compiled.beside(estimate(cfg, split=(graphdef, abstract)))


def gradient_only(cfg, model_type: Callable[..., nnx.Module]) -> MemoryEstimate:
  """The closed form of a program that gives the gradient of a model's parameters, without moments or an update."""

  def build(cfg):
    train_state = nnx.eval_shape(lambda: state.TrainStateNNX(model_type(cfg.model, rngs=nnx.Rngs(0))))
    graphdef, abstract = nnx.split(train_state)
    return graphdef, host_memory.abstract(cfg, abstract)

  return estimate(cfg, build=build)


def num_bytes(*shapes) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def batch_shapes(cfg, num_rows: int) -> dict:
  shape = jax.ShapeDtypeStruct((num_rows, cfg.data.max_target_length), np.int32)
  return {f"{n}{suffix}": shape for n in ("inputs", "targets") for suffix in ("", "_position", "_segmentation")}


def plain_scan(bench: Bench) -> Case:
  """Every layer's input is kept: 48 x 268 MB before anything is computed."""
  case = Case()
  compiled = bench.stack(*PLAIN)
  case.line("scan + checkpoint, feed-forward stack", compiled)
  case.figures.append(Figure("bytes the plain stack needs over the chip's", compiled.peak / bench.hbm, 1.0, above=True))
  if compiled.error:
    case.notes.append(f"the compiler: {compiled.error.strip()}")
  cfg = _mlp_stack.load(str(_measure.BASE), *SHAPE, *PLAIN, *bench.overrides)
  case.notes += verdict(gradient_only(cfg, _mlp_stack.MlpStack), int(bench.hbm))
  return case


def segments(bench: Bench) -> Case:
  """The best segment length, and what scores add to it."""
  case = Case()
  found = {}
  for k in divisors(48)[1:-2]:
    found[k] = bench.stack(*PLAIN, f"segment_lengths={k}")
    case.line(f"segments of {k}, feed-forward stack", found[k])
  best = min((k for k in found if not found[k].error), key=lambda k: found[k].temporaries)
  ghost = bench.stack(*GHOST, f"segment_lengths={best}")
  case.line(f"segments of {best} with scores", ghost)
  case.notes.append(f"best segment length: {best}")
  case.figures += [
    Figure(f"temporaries of the feed-forward stack, segments of {best}, GB", found[best].temporaries / 1e9, 5.3),
    Figure(
      f"feed-forward stack, segments of {best}: temporaries scored over plain",
      ghost.temporaries / found[best].temporaries, 1.1, form="{:.3f}",
    ),
  ]  # fmt: skip
  return case


def streamed_stack(bench: Bench) -> Case:
  """Device arguments fall to nothing, and two segments of weights join the temporaries."""
  case = Case()
  here = bench.stack(*PLAIN, "segment_lengths=6")
  there = bench.stack(*PLAIN, "segment_lengths=6", "offload_to_host=weights")
  case.line("segments of 6, weights on the chip", here)
  case.line("segments of 6, weights streamed", there)
  stacked = there.host
  rest = here.arguments - stacked
  case.figures.append(
    Figure("device arguments with streamed weights, GB", there.arguments / 1e9, (stacked / 8 + rest) / 1e9)
  )
  return case


def decoder(bench: Bench) -> Case:
  """The whole train step: embedding, 48 layers, head, loss, AdamW."""
  case = Case()
  plain = bench.step(*PLAIN, *STREAMED)
  ghost = bench.step(*GHOST, *ALL_STREAMED)
  case.line("train step of the decoder, streamed", plain)
  case.line("train step of the decoder, streamed, with scores", ghost)
  case.figures += [
    Figure("train step of the decoder, streamed, over the chip's bytes", plain.peak / bench.hbm, 1.0),
    Figure("train step of the decoder, streamed: bytes scored over plain", ghost.peak / plain.peak, 1.1, form="{:.3f}"),
  ]
  return case


def decoder_segments(bench: Bench) -> Case:
  """The best segment length of the whole step."""
  case, found = Case(), {}
  for k in (4, 6, 8, 12):
    found[k] = bench.step(*PLAIN, *STREAMED, f"segment_lengths={k}")
    case.line(f"train step of the decoder, streamed, segments of {k}", found[k])
  case.notes.append(f"best segment length of the decoder: {min(found, key=lambda k: found[k].peak)}")
  return case


def axis_rules(bench: Bench) -> Case:
  """Weights split by a user's own rules, 16,384 tokens in a row."""
  case = Case()
  for name, keys in OWN_RULES.items():
    case.line(f"4 chips, {name}", bench.planned_step("max_target_length=16384", *keys))
  return case


def float32_weights(bench: Bench) -> Case:
  """float32 weights and moments, bfloat16 products: the step of 8 layers, 2 rows of 2,048 tokens."""
  case, shape = Case(), (
    "base_num_decoder_layers=8", "max_target_length=2048", "per_device_batch_size=2", "segment_lengths=[]",
    "weight_dtype=float32", "mu_dtype=float32",
  )  # fmt: skip
  schedules = {"": PLAIN, ", two_pass": ("ghost_schedule=two_pass",)}
  for table in ("", ", tied table"):
    for name, keys in schedules.items():
      tied = f"logits_via_embedding={bool(table)}".lower()
      compiled = bench.planned_step(*shape, *keys, tied, "ghost_val_batch_size=1", chips=1)
      case.line(f"train step, float32 weights{table}{name}", compiled)
  return case


def quantized(bench: Bench) -> Case:
  """The step of 8 layers with products of rounded operands, 16,384 tokens in a row."""
  case, shape = Case(), ("base_num_decoder_layers=8", "max_target_length=16384", "segment_lengths=[]")
  scored = ("ghost_rank=32", "ghost_direction=sgd", "ghost_val_batch_size=1")
  peaks = {}
  for kind in ("", "int8", "fp8"):
    for keys, name in ((PLAIN, ""), (scored, " with scores")):
      found = bench.step(*shape, *keys, f"quantization={kind}")
      case.line(f"train step, quantization={kind or repr('')}{name}", found)
      peaks[kind, name] = found.peak
  for kind in ("int8", "fp8"):
    case.figures += [
      Figure(f"{kind}: bytes of the step{name} over bfloat16's", peaks[kind, name] / peaks["", name], form="{:.3f}")
      for name in ("", " with scores")
    ]
  return case


def head(bench: Bench) -> Case:
  """Output projection and cross-entropy of a large vocabulary: whole, in tiles, and in tiles with scores."""
  case = Case()
  shape = {name: int(value) for name, value in (key.split("=") for key in HEAD if key.split("=")[1].isdigit())}
  tokens, vocab, width = shape["max_target_length"], shape["vocab_size"], shape["base_emb_dim"]
  logits, table = 4 * tokens * vocab, 4 * vocab * width
  case.line("output head, whole logits", bench.head(*PLAIN))
  for n in (4, 8, 16):
    tiled = bench.head(*PLAIN, f"num_vocab_tiling={n}")
    scored = bench.head("ghost_rank=32", "ghost_direction=sgd", f"num_vocab_tiling={n}")
    case.line(f"output head, {n} tiles", tiled)
    case.line(f"output head, {n} tiles, with scores", scored)
    case.figures += [
      Figure(
        f"temporaries of the head in {n} tiles, GB", tiled.temporaries / 1e9, (logits / n + 2 * table) / 1e9,
      ),
      Figure(
        f"head in {n} tiles: temporaries scored over plain",
        scored.temporaries / tiled.temporaries, 1.1, form="{:.3f}",
      ),
    ]  # fmt: skip
  blocks = bench.head(*PLAIN, "num_vocab_tiling=8", "vocab_tiling_axis=vocab")
  case.line("output head, 8 blocks of the vocabulary", blocks)
  return case


def recompute(bench: Bench) -> Case:
  """One more forward pass: FLOPs of the matrix products of the step, and time on this machine's CPU."""
  case = Case()
  configs = {
    name: configuration.load(str(_measure.BASE), *SMALL, *keys)
    for name, keys in {"plain": (), "segments": ("segment_lengths=2",)}.items()
  }
  flops = {name: _flops.of_step(cfg) for name, cfg in configs.items()}
  steps: Mapping[str, Callable] = {name: _steps.make_step(cfg) for name, cfg in configs.items()}
  seconds = _measure.take_turns(steps, rounds=7)
  case.figures += [
    Figure("FLOPs of segments over plain remat", flops["segments"] / flops["plain"], 1.34),
    Figure("CPU time of segments over plain remat", _measure.ratio(seconds, "segments", "plain"), 1.40),
  ]
  return case


ROWS: dict[str, Callable[[Bench], Case]] = {
  "plain_scan": plain_scan,
  "segments": segments,
  "streamed_stack": streamed_stack,
  "decoder": decoder,
  "decoder_segments": decoder_segments,
  "axis_rules": axis_rules,
  "head": head,
  "float32_weights": float32_weights,
  "quantized": quantized,
  "recompute": recompute,
}
ON_THIS_MACHINE = {"recompute"}  # need no libtpu


def main() -> int:
  args = _measure.arguments(__doc__, chip="v5e", rows=",".join(ROWS))
  names = args.rows.split(",")
  unknown = [name for name in names if name not in ROWS]
  if unknown or args.chip not in _tpu.HBM:
    print(f"--rows takes {', '.join(ROWS)}; --chip takes {', '.join(_tpu.HBM)}")
    return 2
  libtpu = _measure.version("libtpu")
  if libtpu is None:
    print("libtpu is not installed, so what needs the TPU compiler is skipped; pip install '.[tpu]' brings it")
    names = [name for name in names if name in ON_THIS_MACHINE]
  bench, total = Bench(args.chip, tuple(args.overrides)), Case()
  for name in names:
    case = ROWS[name](bench)
    total.rows += case.rows
    total.figures += case.figures
    total.notes += case.notes
    total.off += case.off
  if total.off:
    total.figures.append(Figure("closed form of the worst row, off the compiler's", max(total.off), 0.1, form="{:.1%}"))
  notes = [f"libtpu {libtpu}, {args.chip}: {bench.hbm / 1e9:.2f} GB usable", *total.notes]
  return _measure.publish("memory", total.rows, total.figures, notes, path=args.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
