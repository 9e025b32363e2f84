"""The inner products behind the ledger's columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxghost.ghost import ledger
from maxghost.parallel import shardings

SHAPES = [(3, 40, 1536), (5,), (7, 9, 11), (6, 64), (37, 41)]  # many rows, one row, and a size that has no rows


def arrays(shape, num, seed, dtype):
  """All positive: the worst for a sum that adds one by one."""
  rng = np.random.default_rng(seed)
  return [jnp.asarray(rng.random(shape), dtype) for _ in range(num)]


def products(left, right):
  return [[jnp.sum(part) for part in parts] for parts in ledger.partial_products(left, right)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 2e-6), ("bfloat16", 2e-6)])
def test_every_pair_is_summed_in_float32_or_wider(shape, platform, dtype, tolerance):
  with jax.enable_x64(dtype == "float64"), shardings.tracing_for(platform):
    left, right = arrays(shape, 3, 1, dtype), arrays(shape, 2, 2, dtype)
    found = np.asarray(jax.jit(lambda *x: products(*x))(left, right))  # traced anew for each platform
  expected = [[np.sum(np.float64(a) * np.float64(b)) for b in right] for a in left]
  np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_one_pass_reads_every_array_once():
  left, right = arrays(SHAPES[0], 3, 1, "float32"), arrays(SHAPES[0], 4, 2, "float32")
  with shardings.tracing_for("cpu"):
    program = jax.jit(lambda *x: products(*x)).lower(left, right).compile()
  assert program.cost_analysis()["bytes accessed"] < 1.2 * 7 * left[0].nbytes
