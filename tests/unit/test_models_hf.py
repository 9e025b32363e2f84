"""Every family against `transformers`: logits recorded by tests/fixtures/make_hf_fixtures.py on random weights."""

import hf_models
import jax
import numpy as np
import pytest
import tiny
from flax import nnx


def logits_of(model, tokens):
  graphdef, state = nnx.split(model)
  with tiny.cheap_compilation():
    return np.asarray(jax.jit(lambda s, t: nnx.merge(graphdef, s)(t))(state, tokens))


@pytest.mark.parametrize("name", hf_models.NAMES)
def test_logits_are_those_of_transformers(name):
  model, _, tokens, expected = hf_models.model(name)
  np.testing.assert_allclose(logits_of(model, tokens), expected, rtol=0, atol=2e-5)
