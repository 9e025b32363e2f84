"""Elimination of Gram matrices, by a loop and by the kernels run as plain operations, against numpy.

r=11 columns, 3 x 2 matrices.
"""

import functools
from unittest import mock

import jax
import numpy as np
import pytest
import tiny

from maxghost import config
from maxghost.ghost import low_rank
from maxghost.parallel import shardings
from maxghost.parallel.shardings import Layout, use

RANK = 11


def for_tpu(gram, floor):
  """In steps of four matrices, so that the last is filled up."""
  with shardings.tracing_for("tpu"), mock.patch.object(low_rank, "_TOGETHER", 4):
    return low_rank.by_kernel(gram, floor, interpret=True)


WAYS = {
  "loop": low_rank.by_loop,
  "kernel": functools.partial(low_rank.by_kernel, interpret=True),
  "TPU's kernel": for_tpu,
}


def grams(seed: int = 0) -> np.ndarray:
  """Positive definite, [3, 2, r, r]; of the last, columns 4 and 7 are sums of earlier ones and column 9 is zero."""
  y = np.random.default_rng(seed).normal(size=(3, 2, 17, RANK))
  y[2, 1, :, 4] = y[2, 1, :, 0] - 2 * y[2, 1, :, 1]
  y[2, 1, :, 7] = y[2, 1, :, 4] + y[2, 1, :, 2]
  y[2, 1, :, 9] = 0
  return np.einsum("abir,abis->abrs", y, y)


def run(way: str, gram, floor, wide: bool = True):
  dtype = np.float64 if wide else np.float32
  with jax.enable_x64(wide), tiny.cheap_compilation():
    return [np.asarray(x) for x in jax.jit(WAYS[way])(gram.astype(dtype), floor.astype(dtype))]


@pytest.mark.parametrize(("wide", "tolerance"), [(True, 1e-12), (False, 1e-4)])
@pytest.mark.parametrize("way", WAYS)
def test_the_triangle_makes_the_matrix_diagonal(way, wide, tolerance):
  gram = grams()
  floor = 1e-5 * np.einsum("abrr->abr", gram).max(-1)
  pivots, triangle = run(way, gram, floor, wide)
  assert (triangle == np.triu(triangle)).all()
  np.testing.assert_array_equal(np.einsum("abrr->abr", triangle), 1)
  full = gram[:2]
  wanted = 1 / np.square(np.einsum("abrr->abr", np.linalg.inv(np.linalg.cholesky(full))))  # pivots of Cholesky
  np.testing.assert_allclose(pivots[:2], wanted, rtol=tolerance)
  product = np.einsum("abrs,abrt,abtu->absu", triangle, gram, triangle)
  scale = np.einsum("abrr->ab", gram)[..., None, None]
  diagonal = np.eye(RANK) * pivots[..., None, :]
  np.testing.assert_allclose(product / scale, diagonal / scale, atol=tolerance)
  assert (np.abs(pivots[2, 1, [4, 7, 9]]) < floor[2, 1]).all()


def test_a_column_below_the_floor_takes_part_in_no_later_one():
  scale = np.where(np.arange(RANK) == 5, 0.1, 1.0)
  gram = grams()[0] * scale * scale[:, None]
  floor = np.array([np.linalg.cholesky(g)[5, 5] ** 2 * 1.0001 for g in gram])
  for pivots, triangle in (run(way, gram, floor) for way in WAYS):
    assert (pivots[:, 5] < floor).all()
    np.testing.assert_array_equal(triangle[:, 5, 6:], 0)
    assert (triangle[:, 4, 6:] != 0).any()


@pytest.mark.parametrize("way", WAYS)
def test_not_a_number_stays_in_its_matrix(way):
  gram = grams()
  gram[1, 0, 3, 3] = np.nan
  pivots, triangle = run(way, gram, np.zeros((3, 2)))
  assert np.isnan(pivots[1, 0]).any()
  others = [i for i in np.ndindex(3, 2) if i != (1, 0)]
  assert all(np.isfinite(pivots[i]).all() and np.isfinite(triangle[i]).all() for i in others)


@pytest.mark.parametrize("way", ["kernel", "TPU's kernel"])
def test_the_kernel_on_a_mesh(way):
  """Every device eliminates all matrices, whatever the mesh."""
  cfg = config.replace(config.load(), ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
  gram = grams()
  floor = 1e-5 * np.einsum("abrr->abr", gram).max(-1)
  alone = run(way, gram, floor)
  with use(Layout.of(cfg.parallel, jax.devices()[:4])):
    on_mesh = run(way, gram, floor)
  for a, b in zip(on_mesh, alone, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-13)


def test_a_gpu_and_a_tpu_take_the_kernel(monkeypatch):
  monkeypatch.setattr(low_rank, "by_kernel", lambda gram, floor: "kernel")
  monkeypatch.setattr(low_rank, "by_loop", lambda gram, floor: "loop")
  chosen = {"gpu": ("kernel", "kernel", "loop"), "tpu": ("kernel", "loop", "loop"), "cpu": ("loop", "loop", "loop")}
  for platform, wanted in chosen.items():
    found = []
    for rank, wide in ((32, False), (32, True), (200, False)):
      with shardings.tracing_for(platform), jax.enable_x64(wide):
        found.append(low_rank.eliminate(np.ones((rank, rank), np.float32), np.ones((), np.float32)))
    assert tuple(found) == wanted, platform


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # since JAX 0.12
@pytest.mark.parametrize("rank", [11, 32, 128])
def test_the_kernel_lowers_for_a_gpu_without_one(rank):
  """To Triton's own code, in float32 and float64; running it needs a GPU (test_gpu.py)."""
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
  mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
  for dtype in (np.float32, np.float64):
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh):
      shapes = jax.ShapeDtypeStruct((3, rank, rank), dtype), jax.ShapeDtypeStruct((3,), dtype)
      lowered = jax.jit(low_rank.by_kernel).trace(*shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert "ghost_eliminate" in text


@pytest.mark.parametrize(("num", "rank"), [(1, 32), (12, 11), (3, 128)])
def test_the_kernel_lowers_for_a_tpu_without_one(num, rank):
  """To Mosaic's code; test_tpu_aot.py compiles it."""
  shapes = jax.ShapeDtypeStruct((num, rank, rank), np.float32), jax.ShapeDtypeStruct((num,), np.float32)
  with shardings.tracing_for("tpu"):
    text = jax.jit(low_rank.eliminate).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
  assert "tpu_custom_call" in text
  assert "ghost_eliminate" in text


MATRICES = {"a": (3, 2, 23, 37), "b": (1, 40, 29), "c": (2, 31, 26)}  # [..., I, O]


@pytest.mark.parametrize("wide", [True, False])
def test_matrices_of_several_parameters_have_the_factors_that_each_has_alone(wide):
  rng, dtype = np.random.default_rng(3), np.float64 if wide else np.float32
  with jax.enable_x64(wide), tiny.cheap_compilation():
    us = [rng.normal(size=shape).astype(dtype) for shape in MATRICES.values()]
    arguments = lambda us: [(u, RANK, label) for u, label in zip(us, MATRICES, strict=True)]  # noqa: E731
    together = jax.jit(lambda us: low_rank.factor_all(arguments(us)))(us)
    alone = jax.jit(lambda us: [low_rank.factor(*one) for one in arguments(us)])(us)
    for one, found in zip(alone, together, strict=True):
      for a, b in zip(one, found, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-10 if wide else 1e-3, atol=1e-11 if wide else 1e-4)


def test_matrices_of_several_parameters_are_eliminated_at_once():
  """By one kernel for each of the three orthonormalisations, here of 3 * 2 + 1 + 2 matrices."""

  def run(us):
    return low_rank.factor_all((u, RANK, label) for label, u in us.items())

  shapes = {label: jax.ShapeDtypeStruct(shape, np.float32) for label, shape in MATRICES.items()}
  with shardings.tracing_for("tpu"), mock.patch.object(low_rank, "by_kernel", wraps=low_rank.by_kernel) as kernel:
    jax.eval_shape(run, shapes)
  assert [call.args[0].shape for call in kernel.call_args_list] == 3 * [(9, RANK, RANK)]
