"""Ring attention of long packed rows on 8 virtual devices beside blockwise attention on one: errors, bytes, memory.

  python benchmarks/ring_attention.py [--positions 32768] [--devices 8] [--json FILE]

One row of documents of 100 to 8,000 tokens, 2 query heads on 1 key/value head of width 16, float32. The error of the
output and of the gradients in q, k, v is the largest difference over the largest size.
"""

import sys

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Figure
from jax.sharding import PartitionSpec

from maxghost import config
from maxghost.models import attention
from maxghost.parallel import collectives
from maxghost.parallel.shardings import Layout, use


def row(positions: int):
  rng = np.random.default_rng(0)
  q, k, v, weights = (rng.standard_normal((1, positions, heads, 16), np.float32) for heads in (2, 1, 1, 2))
  ends = np.cumsum(rng.integers(100, 8000, positions // 100))
  return (q, k, v, weights), np.searchsorted(ends, np.arange(positions), "right").astype(np.int32)[None]


def gradients(q, k, v, weights, segments):
  def total(q, k, v):
    out = attention.attend(q, k, v, segments, kernel="blockwise")
    return jnp.sum(out * weights), out

  (_, out), found = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
  return out, *found


def main() -> int:
  args = _measure.arguments(__doc__ or "", False, positions=32768, devices=8)
  jax.config.update("jax_num_cpu_devices", args.devices)
  arrays, segments = row(args.positions)
  expected = jax.jit(gradients)(*arrays, segments)
  cfg = config.replace(config.load(), ici_context_parallelism=args.devices, ici_fsdp_parallelism=1)
  layout = Layout.of(cfg.parallel)
  split = layout.sharding(PartitionSpec(None, "context"))
  with use(layout):
    compiled = jax.jit(gradients, out_shardings=split).lower(*jax.device_put((*arrays, segments), split)).compile()
  found = compiled(*jax.device_put((*arrays, segments), split))
  figures = [Figure("documents", int(segments.max()) + 1)]
  for name, ours, exact in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
    figures.append(
      Figure(f"error of {name}", float(np.abs(ours - np.asarray(exact)).max() / np.abs(exact).max()), 1e-6)
    )
  moved = collectives.read(compiled.as_text(), dict(layout.mesh.shape))
  for kind in sorted({one.kind for one in moved}):
    size = sum(one.num_bytes * one.count for one in moved if one.kind == kind)
    figures.append(Figure(f"{kind} of a device, MB", size / 1e6))
  figures.append(Figure("temporary memory of a device, MB", compiled.memory_analysis().temp_size_in_bytes / 1e6))
  return _measure.publish("ring_attention", [], figures, [], args.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
