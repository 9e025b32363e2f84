"""Gradients that jit maps over a leading axis: float32 gives what float64 gives.

jaxlib 0.10.2 compiles `jit(jacrev(f))`, a VJP mapped over many cotangents, to wrong float32 code for the CPU
(tests/mapped_vjp.py has it alone). maxghost maps no VJP over cotangents; here are the gradients of several validation
sets and of single examples, compiled as in a run. test_ghost_sketch compares sketches with products of such gradients.
"""

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import objectives
from maxghost.ghost.schedules import base, passes, per_example

DOCUMENTS = ((8,), (5, 3), (4, 2), (8,), (7,), (3, 3), (8,), (6,))
BATCHES = tuple(tiny.make_batch(DOCUMENTS, seed, num_positions=8, mask=0.0) for seed in (1, 2))


def several_sets(model, loss):
  return passes.validation_gradients(model, loss, BATCHES)


def examples(model, loss):
  return per_example.gradients_of(model, loss, BATCHES[0])


def computed(place, dtype):
  """The place's arrays, jitted over the parameters, as numpy by path."""
  cfg = tiny.make_config(base_num_decoder_layers=1, max_target_length=8, dtype=dtype, weight_dtype=dtype)
  with jax.enable_x64(dtype == "float64"), tiny.cheap_compilation(False):
    loss, (graphdef, params, rest) = objectives.create(cfg), nnx.split(tiny.make_model(cfg), nnx.Param, ...)
    out = jax.jit(lambda params: place(base.Model(graphdef, params, rest), loss))(params)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(out)}


@pytest.mark.parametrize("place", [several_sets, examples])
def test_float32_is_float64_rounded(place):
  narrow, wide = computed(place, "float32"), computed(place, "float64")
  assert narrow.keys() == wide.keys() and len(wide) > 1
  for path, expected in wide.items():
    assert expected.dtype == np.float64 and narrow[path].dtype == np.float32
    assert np.linalg.norm(narrow[path] - expected) < 1e-4 * np.linalg.norm(expected), path
