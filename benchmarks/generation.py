"""Generation: a token's time behind short and long prompts, and against a pass over the whole text for each token.

  python benchmarks/generation.py [--rounds 7] [--cache 1024] [--tokens 64] [key=value ...]

A model with random weights (configs/base.yml; key=value arguments change it) adds tokens to prompts of several lengths,
one row and eight rows, with the same cache. Times are the decoding loop's alone, without reading the prompt.
"""

import sys

import _measure
import jax
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost import models
from maxghost.serving import Generator


def contender(graphdef, state, prompt: int, rows: int, given) -> callable:
  """Seconds per step of the loop."""
  rng = np.random.default_rng(prompt)
  prompts = rng.integers(0, 256, (rows, prompt)).tolist()
  generator = Generator(graphdef, given.cache)

  def run() -> float:
    generator.generate(state, prompts, given.tokens)
    return generator.seconds.loop / generator.seconds.steps

  return run


def whole_pass(graphdef, state, length: int) -> callable:
  """Seconds of the logits of a whole text, which a token costs without a cache."""
  forward = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)[:, -1])
  tokens = np.zeros((1, length), np.int32)
  return lambda: _measure.timed(lambda: jax.block_until_ready(forward(state, tokens)))


def main() -> int:
  given = _measure.arguments(__doc__, rounds=7, cache=1024, tokens=64)
  cfg = configuration.load(str(_measure.BASE), *given.overrides)
  graphdef, state = nnx.split(models.create(cfg, rngs=nnx.Rngs(0)))
  longest = given.cache - given.tokens
  lengths = sorted({16, longest // 4, longest})
  contenders = {
    f"prompt of {length}, rows {rows}": contender(graphdef, state, length, rows, given)
    for rows in (1, 8) for length in lengths
  }  # fmt: skip
  contenders["whole pass for each token, rows 1"] = whole_pass(graphdef, state, given.cache)
  seconds = _measure.take_turns(contenders, given.rounds)
  table = []
  for name, times in seconds.items():
    median = float(np.median(times))
    table.append({"loop": name, "ms per step": 1e3 * median, "tokens/s": int(name.rsplit(" ", 1)[1]) / median})
  long, short = (f"prompt of {length}, rows " for length in (lengths[-1], lengths[0]))
  figures = [
    Figure(f"step behind a prompt of {longest} over one behind 16, rows {rows}",
           _measure.ratio(seconds, f"{long}{rows}", f"{short}{rows}"), 1.1)
    for rows in (1, 8)
  ]  # fmt: skip
  figures.append(
    Figure(
      f"step through the cache over a whole pass of {given.cache} positions",
      _measure.ratio(seconds, f"{long}1", "whole pass for each token, rows 1"), 1.0,
    )
  )  # fmt: skip
  return _measure.publish("generation", table, figures, path=given.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
