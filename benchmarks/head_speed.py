"""Output projection and cross-entropy, forward and backward: whole, in tiles, and the matrix products alone.

  python benchmarks/head_speed.py [--rounds 15] [key=value ...]

The three products (logits, and the gradients of hidden states and of the table) are the limit for logits that are kept;
a tiled head forms the logits twice. All contenders take turns; ratios are medians over rounds.
"""

import statistics
import sys

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Figure

from maxghost import config as configuration
from maxghost.models import dense
from maxghost.objectives import tiled, tiled_losses, token_losses
from maxghost.training.devices import compiler_options

WIDTH = ("base_emb_dim=512", "vocab_size=4096", "max_target_length=256", "per_device_batch_size=16")
TILES = (4, 8, 16)


def main() -> int:
  args = _measure.arguments(__doc__, rounds=15)
  cfg = configuration.load(str(_measure.BASE), *WIDTH, *args.overrides)
  x, w, targets = inputs(cfg)
  dtype = jnp.dtype(cfg.model.dtype)
  contenders = {
    "three products": compiled(products, x, w, targets),
    "whole logits": compiled(gradient(whole), x, w, targets),
  }
  expected = jnp.full(targets.shape, 1 / targets.size)  # of the mean
  for axis in tiled.AXES:
    for n in TILES:
      head = tiled.Head(n, axis, tied=False, dtype=dtype)
      losses = gradient(lambda x, w, targets, head=head: tiled_losses(head, x, w, targets, expected))
      contenders[f"{n} tiles of {axis}"] = compiled(losses, x, w, targets)
  seconds = _measure.take_turns(contenders, args.rounds, warmup=2)
  rows = [
    {
      "head": name,
      "milliseconds": 1e3 * statistics.median(taken),
      "of the three products": _measure.ratio(seconds, name, "three products"),
      "of whole logits": _measure.ratio(seconds, name, "whole logits"),
    }
    for name, taken in seconds.items()
  ]
  best = min((row for row in rows if " of tokens" in row["head"]), key=lambda row: row["of whole logits"])
  figures = [
    Figure("whole logits over the three products", rows[1]["of the three products"], form="{:.2f}"),
    Figure(f"{best['head']} over the three products", best["of the three products"], rows[1]["of the three products"],
           form="{:.2f}"),
    Figure(f"{best['head']} over whole logits", best["of whole logits"], 1.0, form="{:.2f}"),
  ]  # fmt: skip
  batch, length, embed = x.shape
  note = f"{batch} x {length} tokens, width {embed}, vocabulary {w.shape[1]:,}, {dtype.name}"
  return _measure.publish("head_speed", rows, figures, [note], args.json)


def inputs(cfg):
  rng = np.random.default_rng(0)
  m, shape = cfg.model, (cfg.data.per_device_batch_size, cfg.data.max_target_length)
  x = rng.normal(size=(*shape, m.base_emb_dim)).astype(np.float32)
  w = rng.normal(size=(m.base_emb_dim, m.vocab_size)).astype(np.float32) * m.base_emb_dim**-0.5
  dtype = jnp.dtype(m.dtype)
  return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(rng.integers(0, m.vocab_size, shape), jnp.int32)


def products(x, w, targets):
  """Each once, none of which can be left out; the logits stand for their own cotangent."""
  logits = dense.contract(x, w, 1)
  return dense.contract_transposed(logits, w, 1), dense.outer_sum(x, logits, 1, 1)


def whole(x, w, targets):
  return token_losses(dense.dot_general(x, w, (((2,), (0,)), ((), ()))).astype(jnp.float32), targets)


def gradient(losses):
  return jax.value_and_grad(lambda x, w, targets: losses(x, w, targets).mean(), argnums=(0, 1))


def compiled(function, *arguments):
  call = jax.jit(function).lower(*arguments).compile(compiler_options=compiler_options())
  return lambda: (jax.block_until_ready(call(*arguments)), None)[1]


if __name__ == "__main__":
  sys.exit(_measure.run(main))
