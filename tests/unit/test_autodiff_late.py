"""What waits for something else: same bits, and no copies of a state that is read before it is updated in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from train_steps import TRAIN, VALIDATION, Run

from maxghost.models import autodiff


@pytest.mark.parametrize("read", [1.5, -np.inf, np.nan, 1e30])
def test_nothing_is_changed_whatever_is_read(read):
  tree = {
    "floats": jnp.asarray([1.1, -0.0, np.inf, np.nan, 1e-42]),
    "index": jnp.asarray(7),
    "half": jnp.ones(2, jnp.bfloat16),
  }
  reads = (jnp.full(3, read), jnp.arange(2), jnp.zeros(2, jax.dtypes.float0))
  out = autodiff.after(tree, reads)
  for name, value in tree.items():
    assert out[name].dtype == value.dtype
    np.testing.assert_array_equal(np.signbit(out[name]), np.signbit(value))
    np.testing.assert_array_equal(out[name], value)


def test_a_sum_over_what_is_updated_in_place_costs_no_copy():
  """Without `late` XLA copies x first: the sum may come after the update."""

  def step(x, g):
    norm = jnp.sum(jnp.square(x))
    return 0.9 * x + autodiff.after(g, norm), norm

  x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
  compiled = jax.jit(step, donate_argnums=0).lower(x, x).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < x.size * x.dtype.itemsize / 2


@pytest.mark.parametrize(
  "changes",
  [
    {"ghost_schedule": "reverse_scan"},
    {"ghost_direction": "path", "ghost_curvature": "secant"},
    {"ghost_enabled": False},
  ],
)
def test_a_step_copies_nothing_of_its_state(changes):
  """The norm of the parameters and the ledger's sums read what the optimizer then updates in place."""
  run = Run(**changes)
  step = jax.jit(run.function, donate_argnums=0)
  with tiny.cheap_compilation():
    text = step.lower(run.state, TRAIN[0], (VALIDATION,) if run.twin else ()).compile().as_text()
  copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(%(state\w+)", text)
  assert "state__optimizer" in text
  assert not [name for shape, name in copied if shape.count(",")], copied
