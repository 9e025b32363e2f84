"""Ring attention on virtual devices against attention of whole rows on one device, in a layer and in a train step.

B=2 rows, H=6 query heads, K=3 key/value heads, h=5 head width, values 4 wide; T positions over C devices.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny

from maxghost import config
from maxghost.models import attention, attention_blockwise, attention_ring, autodiff
from maxghost.parallel.shardings import Layout, use

B, H, K, WIDTH, VALUES = 2, 6, 3, 5, 4
ALL = {"window": 9, "soft_cap": 1.3, "scale": 0.7}
# Three heads of keys are whole while two devices have parts of the queries; positions take their second mesh axis.
KEYS_WHOLE = (("activation_kv_heads", ()),)
SECOND = (("activation_batch", ("data",)), ("activation_length", ("data",)), ("activation_length", ("context",)))
# (devices, positions, options, other mesh axes): balanced, windows that keys cross in one round or in several, an odd
# number of positions on a device, and rules.
CASES = {
  "plain": (4, 16, {}, {}),
  "eight": (8, 32, {"soft_cap": 1.3}, {}),
  "one round": (4, 24, {"window": 3}, {}),
  "two rounds": (4, 24, ALL, {}),
  "no round": (2, 12, {"window": 1}, {}),
  "wide window": (4, 24, {"window": 20}, {}),
  "odd": (4, 12, {}, {}),
  "rows": (4, 16, {"window": 14}, {"ici_data_parallelism": 2}),
  "heads": (2, 20, {}, {"ici_tensor_parallelism": 3}),
  "keys whole": (2, 20, {}, {"ici_tensor_parallelism": 2, "logical_axis_rules": KEYS_WHOLE}),
  "second choice": (4, 24, {"window": 3}, {"ici_data_parallelism": 2, "logical_axis_rules": SECOND}),
}


def arrays(length: int, dtype=np.float64, heads=(H, K)):
  """q, k, v, sinks; and segment ids, of which some documents lie on several devices."""
  rng = np.random.default_rng(length)
  shapes = (B, length, heads[0], WIDTH), (B, length, heads[1], WIDTH), (B, length, heads[1], VALUES), (heads[0],)
  segments = np.sort(rng.integers(1, 4, (B, length)), 1).astype(np.int32)
  segments[0, -3:] = 0
  return [rng.normal(size=shape).astype(dtype) for shape in shapes], segments


def ring_of(size: int, others: dict | None = None) -> Layout:
  keys = {"ici_context_parallelism": size, "ici_fsdp_parallelism": 1, **(others or {})}
  cfg = config.replace(config.load(), **keys)
  sizes = [n for name, n in keys.items() if name.startswith("ici")]
  return Layout.of(cfg.parallel, jax.devices()[: int(np.prod(sizes))])


def with_gradients(kernel: str, segments, options: dict):
  """(values, gradients in q, k, v and the sinks) of a weighted sum of the output."""

  def run(q, k, v, sinks):
    weights = np.random.default_rng(5).normal(size=(*q.shape[:3], VALUES))

    def total(q, k, v, sinks):
      out = attention.attend(q, k, v, segments, kernel=kernel, sinks_H=sinks, **options)
      return jnp.sum(out * weights.astype(out.dtype)), out

    return jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)

  return jax.jit(run)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name):
  size, length, options, others = CASES[name]
  with jax.enable_x64(True), tiny.cheap_compilation():
    operands, segments = arrays(length)
    (_, expected), expected_gradients = with_gradients("dot_product", segments, options)(*operands)
    with use(ring_of(size, others)):
      (_, found), gradients = with_gradients("blockwise", segments, options)(*operands)
  for ours, exact in zip((found, *gradients), (expected, *expected_gradients), strict=True):
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, exact, rtol=1e-12, atol=1e-12)


def test_forward_mode():
  (operands, segments), (tangents, _) = arrays(16), arrays(24)
  with jax.enable_x64(True), tiny.cheap_compilation(), autodiff.forward_mode():
    tangents = [x[tuple(slice(n) for n in like.shape)] for x, like in zip(tangents, operands, strict=True)]

    def along(kernel):
      run = lambda q, k, v, sinks: attention.attend(q, k, v, segments, kernel=kernel, sinks_H=sinks, window=14)  # noqa: E731
      return jax.jit(lambda x, dx: jax.jvp(run, x, dx))(operands, tangents)

    expected = along("dot_product")
    with use(ring_of(4)):
      found = along("blockwise")
  np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_device_multiplies_as_much_in_every_round(size):
  """Pairs of chunks that see each other, the diagonal as half a pair."""
  ring = attention_ring.Ring.of(("context",), size, 12, None)
  starts = [np.asarray(ring.starts(device, 6)) // 6 for device in range(size)]
  assert sorted(itertools.chain(*starts)) == list(range(2 * size))
  for number in range(size):
    work = []
    for device in range(size):
      pairs = itertools.product(starts[device], starts[(device - number) % size])
      work.append(sum(0.5 if query == key else float(query > key) for query, key in pairs))
    assert len(set(work)) == 1


def test_a_window_stops_the_keys_where_nobody_sees_them():
  ring = lambda window: attention_ring.Ring.of(("context",), 8, 16, window)  # noqa: E731
  assert [ring(window).rounds for window in (1, 2, 17, 18, 112, None)] == [0, 1, 1, 2, 7, 7]
  assert [ring(window).chunks for window in (1, 2, 17, 18, 97, 98, None)] == [1, 1, 1, 1, 1, 2, 2]


def test_a_device_holds_its_part_of_the_rows_and_a_block_of_the_scores(monkeypatch):
  """No array of a device is larger than its queries; only permutations of keys and values communicate."""
  monkeypatch.setattr(attention_blockwise, "BLOCK", 8)
  operands, segments = arrays(length := 512, np.float32, (2, 1))
  layout = ring_of(size := 8)
  rows = layout.sharding(jax.sharding.PartitionSpec(None, "context"))
  placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for x in operands[:3]]
  with use(layout), tiny.cheap_compilation():
    run = with_gradients("blockwise", jnp.zeros_like(segments), {})
    hlo = run.lower(*placed, jax.ShapeDtypeStruct((2,), np.float32)).compile().as_text()
  sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"f32\[([0-9,]+)\]", hlo)]
  weights = B * length * 2 * VALUES  # the constant of `with_gradients`
  assert max(n for n in sizes if n != weights) == B * length // size * 2 * WIDTH
  kinds = set(re.findall(r"= [^=]*? (all-[a-z-]+|reduce-scatter|collective-permute)", hlo))
  assert kinds == {"collective-permute", "all-reduce"}  # the reduction is that of the total


CHANGES = {"attention": "blockwise", "remat_policy": "full"}


@pytest.mark.parametrize(
  "changes",
  [
    {},
    pytest.param({"ghost_schedule": "reverse_scan", "ghost_detail": "token"}, marks=pytest.mark.slow),
    pytest.param({"ghost_schedule": "forward_mode"}, marks=pytest.mark.slow),
    pytest.param({"ghost_direction": "second_order"}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_step_gives_the_losses_and_scores_of_one_device(changes):
  """Documents lie on several devices; on one device attention holds all scores at once."""
  expected = meshes.run({}, **CHANGES | changes | {"attention": "dot_product"})
  meshes.assert_same(meshes.run(meshes.MESHES["context 4 x data 2"], **CHANGES | changes), expected)
