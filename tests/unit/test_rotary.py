"""Rotary embedding on a CPU, where many sines are formed in a loop of their own."""

import jax
import numpy as np
import pytest
import tiny

from maxghost.models.rotary import Rotary
from maxghost.parallel import shardings

ROWS, HEADS, WIDTH = 4, 3, 32


@pytest.mark.parametrize(
  ("platform", "positions", "loop"), [("cpu", 300, True), ("cpu", 200, False), ("tpu", 300, False)]
)
def test_a_loop_forms_many_sines_with_the_same_bits(platform, positions, loop):
  """Also those of the gradient, and of a forward derivative."""
  keys = jax.random.split(jax.random.key(0), 3)
  x, g = (jax.random.normal(key, (ROWS, positions, HEADS, WIDTH)) for key in keys[:2])
  positions_BT = jax.random.randint(keys[2], (ROWS, positions), 0, 5000)

  def run(x, g):
    turn = lambda x: Rotary(tiny.make_config().model)(x, positions_BT)  # noqa: E731
    out, pull = jax.vjp(turn, x)
    return out, pull(g), jax.jvp(turn, (x,), (g,))[1]

  def on(platform):
    traced = lambda x, g: run(x, g)  # noqa: E731  new, or jit would take the trace of the other platform
    with shardings.tracing_for(platform):
      return jax.jit(traced)(x, g), str(jax.make_jaxpr(traced)(x, g)).count("scan[")

  found, count = on(platform)
  expected, _ = on("tpu")
  assert (count > 0) == loop
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  angle = np.asarray(positions_BT)[:, :, None, None] * tiny.SIZES["rope_max_timescale"] ** -(np.arange(16) / 16)
  first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
  turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
  np.testing.assert_allclose(found[0], np.concatenate(turned, -1), atol=5000 * 3e-7)  # of angles in float32
