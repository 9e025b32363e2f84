"""The routed feed-forward layer on CPU: its time with 32 experts over that with 8, and over the dense path.

  python benchmarks/moe.py [--rounds 9] [--tokens 4096] [key=value ...]

Forward and backward of one layer, the same tokens and the same number of experts for each. The dense path multiplies
every token with every expert. Where the sorted path is measured with scores, one validation set is scored, exactly.
key=value arguments change the shapes (base_emb_dim, base_moe_mlp_dim, num_experts_per_tok, ...).
"""

import sys

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost.ghost.attach import attach, split
from maxghost.models import moe

ROWS = 8
KEYS = ("decoder_block=mixtral", "base_emb_dim=256", "base_moe_mlp_dim=512", "num_experts_per_tok=2")


def contender(num_experts: int, sparse: bool, scored: bool, tokens: int, overrides) -> callable:
  """A compiled call, done when it returns: all gradients of one layer, and scores where asked for."""
  cfg = configuration.load(*KEYS, *overrides, f"num_experts={num_experts}", f"sparse_matmul={str(sparse).lower()}")
  layer = moe.RoutedMoe(cfg.model, rngs=nnx.Rngs(0))
  length = tokens // ROWS
  x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, length, cfg.model.base_emb_dim)), jnp.float32)
  blank = moe.no_routing(num_experts, (ROWS, length), jnp.float32)
  params, rest = split(layer)

  if not scored:
    graphdef = nnx.split(layer)[0]
    compiled = jax.jit(jax.grad(lambda p, x: _loss(nnx.merge(graphdef, p, rest), x, blank), (0, 1)))
    return lambda: _finish(compiled(params, x_BTD))

  twin = attach(layer, num_examples=ROWS)
  u = twin.direction_state({p.label: (jnp.ones((1, *p.shape)),) for p in twin.scored})
  compiled = jax.jit(jax.grad(lambda p, s, x: _loss(twin.merge(p, s, u, rest), x, blank), (0, 1, 2)))
  return lambda: _finish(compiled(params, twin.zero_probes(), x_BTD))


def _finish(out) -> None:
  jax.block_until_ready(out)


def _loss(layer, x_BTD, blank):
  y_BTD, _ = layer(x_BTD, None, blank)
  return jnp.sum(jnp.square(y_BTD))


def main() -> int:
  given = _measure.arguments(__doc__, rounds=9, tokens=4096)
  contenders = {}
  for num_experts in (8, 32):
    for sparse, scored, name in ((True, False, "sorted"), (True, True, "sorted, scored"), (False, False, "dense")):
      contenders[f"{name}, {num_experts} experts"] = contender(
        num_experts, sparse, scored, given.tokens, given.overrides
      )
  seconds = _measure.take_turns(contenders, given.rounds)
  rows = [{"layer": name, "median s": float(np.median(times))} for name, times in seconds.items()]

  def over(name, base):
    return _measure.ratio(seconds, name, base)

  figures = [
    Figure("time with 32 experts over that with 8", over("sorted, 32 experts", "sorted, 8 experts"), 1.3),
    Figure("time over the dense path, 8 experts", over("sorted, 8 experts", "dense, 8 experts"), 1.0),
    Figure("time over the dense path, 32 experts", over("sorted, 32 experts", "dense, 32 experts"), 1.0),
    Figure("time with scores over that without, 8 experts", over("sorted, scored, 8 experts", "sorted, 8 experts")),
  ]
  return _measure.publish("moe", rows, figures, path=given.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
