"""Where a plain step on the CPU spends its time: its parts alone, in turns with the same parts in eager PyTorch.

  python benchmarks/cpu_breakdown.py [--rounds 15] [key=value ...]

Each part runs forward and backward on arrays of the step's shapes: the matrix products of a layer, and attention, norm,
activation, head and loss, clipping and AdamW, with the code that the trainer runs. `ms in a step` is the part's time
times how often a step has it. The parts do not add up to a step: XLA joins neighbours, the remat policy computes some
of them again, and embedding, rotary and residuals are left out. Last, the whole step with the pages of its buffers kept
from step to step (`parallel/heap.py`), as the trainer does it, and given back to the kernel after each.
PyTorch's column is left out where torch is not installed.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import _measure
import _steps
import jax
import jax.numpy as jnp
import optax
from _measure import Figure

from maxghost import config as configuration
from maxghost.models.attention import attend
from maxghost.models.dense import dot_general
from maxghost.models.layers import gated
from maxghost.objectives.cross_entropy import token_losses
from maxghost.parallel import heap
from maxghost.training.devices import compiler_options


def main() -> int:
  args = _measure.arguments(__doc__, rounds=15)
  keys = ("ghost_enabled=false", "lr_schedule_type=constant", "warmup_steps_fraction=0")
  cfg = configuration.load(str(_measure.BASE), *keys, *args.overrides)
  step = _steps.make_step(cfg)
  own, counts = parts(cfg), times(cfg)
  contenders = {"step": step, **{f"{name}, ours": run for name, run in own.items()}}
  torch = start_torch(cfg)
  if torch is not None:
    contenders |= {f"{name}, PyTorch": lambda name=name: ask(torch, name) for name in own}
  contenders |= {"kept": lambda: whole(step, True), "given back": lambda: whole(step, False)}
  seconds = _measure.take_turns(contenders, args.rounds, warmup=2)
  if torch is not None:
    torch.stdin.close()
    torch.wait()
  rows, figures = [], []
  total = statistics.median(seconds["step"])
  for name in own:
    ours = statistics.median(seconds[f"{name}, ours"])
    row = {"part": name, "in a step": counts[name], "ms in a step": 1e3 * ours * counts[name]}
    row["of the step"] = ours * counts[name] / total
    if torch is not None:
      row["PyTorch, ms"] = 1e3 * statistics.median(seconds[f"{name}, PyTorch"]) * counts[name]
      rate = 1 / _measure.ratio(seconds, f"{name}, ours", f"{name}, PyTorch")
      figures.append(Figure(f"{name}: speed over PyTorch eager's", rate, form="{:.2f}"))
    rows.append(row)
  rows.append({"part": "the whole step", "in a step": 1, "ms in a step": 1e3 * total, "of the step": 1.0})
  kept = _measure.ratio(seconds, "kept", "given back")
  figures.append(Figure("step with kept memory over one that gives it back", kept, 1.0, form="{:.2f}"))
  return _measure.publish("cpu_breakdown", rows, figures, path=args.json)


def sizes(cfg) -> dict:
  """The step's sizes, by the names that `_torch_parts.py` reads."""
  model, data = cfg.model, cfg.data
  dim, hidden, width = model.base_emb_dim, model.base_mlp_dim, model.head_dim
  heads, kv_heads = model.base_num_query_heads * width, model.base_num_kv_heads * width
  products = [(dim, heads), (dim, kv_heads), (dim, kv_heads), (heads, dim), (dim, hidden), (dim, hidden), (hidden, dim)]
  weights = [*products * model.base_num_decoder_layers, (model.vocab_size, dim), (dim, model.vocab_size)]
  return {
    "rows": data.per_device_batch_size, "length": data.max_target_length, "dim": dim, "hidden": hidden, "width": width,
    "heads": model.base_num_query_heads, "kv_heads": model.base_num_kv_heads, "vocab": model.vocab_size,
    "products": products, "weights": weights,
  }  # fmt: skip


def times(cfg) -> dict[str, int]:
  """How often a step has each part."""
  layers = cfg.model.base_num_decoder_layers
  return {"matrix products": layers, "attention": layers, "norm": 2 * layers, "activation": layers,
          "head and loss": 1, "clipping and AdamW": 1}  # fmt: skip


def parts(cfg) -> dict:
  """{name: function that runs it once, to its end}."""
  size, keys = sizes(cfg), iter(jax.random.split(jax.random.key(0), 200))
  rows, length, dim, hidden, width = (size[name] for name in ("rows", "length", "dim", "hidden", "width"))
  tokens = rows * length
  normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731

  def timed(function, *operands, cotangent=None):
    """A call of the function and its pullback."""

    def both(operands, cotangent):
      out, pull = jax.vjp(function, *operands)
      return out, pull(cotangent)

    given = jnp.ones_like(jax.eval_shape(function, *operands)) if cotangent is None else cotangent
    run = jax.jit(both).lower(operands, given).compile(compiler_options=compiler_options())
    return lambda: (jax.block_until_ready(run(operands, given)), None)[1]

  product = lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ())))  # noqa: E731
  products = [timed(product, normal(tokens, i), normal(i, o), cotangent=normal(tokens, o)) for i, o in size["products"]]
  of_heads = lambda count: normal(rows, length, count, width)  # noqa: E731
  query, key, value = (of_heads(size[name]) for name in ("heads", "kv_heads", "kv_heads"))
  segments = jnp.ones((rows, length), jnp.int32)
  norm = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale  # noqa: E731
  x, scale, targets = normal(rows, length, dim), normal(dim), jnp.arange(tokens).reshape(rows, length) % size["vocab"]

  def head(x, scale, table):
    logits = dot_general(norm(x, scale), table, (((2,), (0,)), ((), ())))
    return token_losses(logits, targets).mean()

  return {
    "matrix products": lambda: [run() for run in products] and None,
    "attention": timed(
      lambda q, k, v: attend(q, k, v, segments, kernel=cfg.model.attention), query, key, value, cotangent=query
    ),
    "norm": timed(norm, x, scale, cotangent=normal(rows, length, dim)),
    "activation": timed(
      lambda a, b: gated([a, b], ("silu", "linear"), 0.0), normal(tokens, hidden), normal(tokens, hidden)
    ),
    "head and loss": timed(head, x, scale, normal(dim, size["vocab"])),
    "clipping and AdamW": update([normal(*shape) * 0.02 for shape in size["weights"]]),
  }


def update(weights: list):
  """Clipping and AdamW on these weights, which are updated in place."""
  rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  held = {"weights": weights, "state": rule.init(weights)}
  gradients = [weight * 0.05 for weight in weights]

  def apply(weights, state, gradients):
    updates, state = rule.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state

  lowered = jax.jit(apply, donate_argnums=(0, 1)).lower(weights, held["state"], gradients)
  run = lowered.compile(compiler_options=compiler_options())

  def call():
    held["weights"], held["state"] = jax.block_until_ready(run(held["weights"], held["state"], gradients))

  return call


def whole(step, kept: bool) -> float:
  """Seconds of a step, after one that fills the heap or leaves it empty."""
  if not kept:
    heap.call("mallopt", -1, 128 * 1024)  # what the C library begins with: M_TRIM_THRESHOLD, and below M_MMAP_MAX
    heap.call("mallopt", -4, 65536)
    heap.call("malloc_trim", 0)
  step()
  seconds = _measure.timed(step)
  heap.keep()
  return seconds


def start_torch(cfg) -> subprocess.Popen | None:
  """The process that runs PyTorch's parts; None where torch is not installed."""
  if _measure.version("torch") is None:
    return None
  command = [sys.executable, str(Path(__file__).with_name("_torch_parts.py")), json.dumps(sizes(cfg))]
  process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
  if process.stdout is None or not process.stdout.readline().startswith("ready"):
    raise RuntimeError("the PyTorch process did not start")
  return process


def ask(process, name: str) -> float:
  """Seconds of one of PyTorch's parts."""
  process.stdin.write(name + "\n")
  return float(process.stdout.readline())


if __name__ == "__main__":
  sys.exit(_measure.run(main))
