"""Gradients that jit maps over a leading axis (sets, directions, examples): float32 gives what float64 gives.

jaxlib 0.10.2 compiles `jit(jacrev(f))`, a VJP mapped over cotangents, to wrong float32 code for the CPU
(tests/mapped_vjp.py has it alone). maxghost maps no VJP over cotangents; here is each place that maps something
close to it, compiled as in a run.
"""

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import objectives
from maxghost.ghost import DirectionSpec
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.schedules import base, passes, per_example
from maxghost.ghost.sketch import sketch_pass

DOCUMENTS = ((8,), (5, 3), (4, 2), (8,), (7,), (3, 3), (8,), (6,))
SETS = tuple(tiny.make_batch(DOCUMENTS, seed, num_positions=8, mask=0.0) for seed in (1, 2))
BATCH = tiny.make_batch(DOCUMENTS, 3, num_positions=8, mask=0.0)


def several_sets(model, loss, _):
  return passes.validation_gradients(model, loss, SETS)


def curvature_of_sets(model, loss, _):
  zeros = [jax.tree.map(lambda x: 0 * x, model.params)] * 2
  return passes.second_order_gradients(model, loss, SETS, zeros, model.params)


def examples(model, loss, _):
  return per_example.per_example_gradients(model, loss, BATCH)


def sketches(model, loss, twin):
  key = jax.random.key(5)
  return sketch_pass(twin, model.params, model.rest, loss, BATCH, key, 3)


def computed(place, dtype):
  """The place's arrays, jitted over the parameters, as numpy by path."""
  cfg = tiny.make_config(base_num_decoder_layers=1, max_target_length=8, dtype=dtype, weight_dtype=dtype)
  with jax.enable_x64(dtype == "float64"):
    model, loss = tiny.make_model(cfg), objectives.create(cfg)
    twin = prepare_twin(model, BATCH, loss, num_sets=1, num_positions=8, spec=DirectionSpec(rank=1))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    out = jax.jit(lambda params: place(base.Model(graphdef, params, rest), loss, twin))(params)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(out)}


@pytest.mark.slow  # eight compilations
@pytest.mark.parametrize("place", [several_sets, curvature_of_sets, examples, sketches])
def test_float32_is_float64_rounded(place):
  narrow, wide = computed(place, "float32"), computed(place, "float64")
  assert narrow.keys() == wide.keys() and len(wide) >= 1
  for path, expected in wide.items():
    assert expected.dtype == np.float64 and narrow[path].dtype == np.float32
    error = np.linalg.norm(narrow[path] - expected) / max(np.linalg.norm(expected), 1e-12)
    assert error < 1e-4, (place.__name__, path, error)
