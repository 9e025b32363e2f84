"""Scores of the transformer against per-example gradients, in every form of the model.

The oracle (oracles.ExampleGradients) differentiates each row's loss by itself in float64, always in the scanned model
without remat; its gradients are dotted with a direction formed in numpy. n examples, L layers, T positions.
"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from maxghost import ghost

LAYERS = 3
Z_LOSS = 0.02
PACKED = tiny.make_batch(tiny.PACKED, seed=21)
UNPACKED = tiny.make_batch(tiny.UNPACKED, seed=22)
VALIDATION = tiny.make_batch(tiny.VALIDATION, seed=23)
COUNT, KAPPA = 4, 0.7
BATCHES = {"packed": PACKED, "unpacked": UNPACKED}

FLOAT64 = {"dtype": "float64", "weight_dtype": "float64"}
CASES = {  # every choice at least once; all combinations at the end, marked slow
  "sgd-tied": ("sgd", {"logits_via_embedding": True, "remat_policy": "none", "z_loss_multiplier": Z_LOSS, **FLOAT64}),
  "adam-tied": ("adam", {"logits_via_embedding": True, "remat_policy": "minimal", **FLOAT64}),
  "adam-unrolled": ("adam", {"scan_layers": False, "remat_policy": "full", **FLOAT64}),
  "adam-tied-float32": ("adam", {"logits_via_embedding": True, "remat_policy": "minimal"}),
}
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def standalone_rows(batch: dict) -> dict:
  """Every document of the batch as a row of its own."""
  return tiny.stack_rows([tiny.alone(batch, *document) for document in tiny.documents(batch)])


class Oracle:
  """Per-example gradients of both batches and of every packed document, in float64."""

  def __init__(self, tied: bool, z_loss: float):
    cfg = tiny.make_config(logits_via_embedding=tied, remat_policy="none", **FLOAT64)
    with jax.enable_x64(True), tiny.cheap_compilation():
      gradients = oracles.ExampleGradients(tiny.make_model(cfg), z_loss)
      rows = [PACKED, UNPACKED, VALIDATION, standalone_rows(PACKED)]
      joined = {name: np.concatenate([part[name] for part in rows]) for name in PACKED}
      flat = gradients(joined)
    ends = np.cumsum([len(part["inputs"]) for part in rows])[:-1]
    split = {label: np.split(g, ends) for label, g in flat.items()}
    self.packed, self.unpacked, self.validation, self.documents = (
      {label: parts[i] for label, parts in split.items()} for i in range(4)
    )


@pytest.fixture(scope="module")
def oracle_of():
  made = {}

  def get(tied: bool, z_loss: float) -> Oracle:
    if (tied, z_loss) not in made:
      made[tied, z_loss] = Oracle(tied, z_loss)
    return made[tied, z_loss]

  return get


def second_moments(oracle: Oracle) -> dict:
  """As after some steps: of many sizes, none 0 (see `test_adam_at_the_first_step`)."""
  rng = np.random.default_rng(5)
  return {label: 1e-3 * rng.random(g.shape[1:]) ** 4 + 1e-7 for label, g in oracle.packed.items()}


def unstacked(values: dict, model) -> dict:
  """Values by stacked label, given to the paths of this model."""
  return {label: tiny.stacked_value(values, tuple(label.split("/"))) for label in tiny.by_label(model)}


class Scored:
  """One case: its results {batch: GhostResult as numpy}, its directions {batch: {label: array}}, its oracle."""

  def __init__(self, direction: str, changes: dict, oracle_of):
    self.cfg = tiny.make_config(**changes)
    self.tolerance = TOLERANCE[self.cfg.model.dtype]
    self.oracle = oracle_of(self.cfg.model.logits_via_embedding, self.cfg.model.z_loss_multiplier)
    self.direction = direction
    with self.environment():
      self.model = tiny.make_model(self.cfg)
      self.engine = ghost.GhostEngine(self.cfg, direction=direction, per_position=True)
    moments = second_moments(self.oracle)
    scored = {name: self.score(name, moments, COUNT, KAPPA) for name in BATCHES}
    self.results = {name: result for name, (result, _) in scored.items()}
    self.directions = {name: u for name, (_, u) in scored.items()}

  @contextlib.contextmanager
  def environment(self):
    with jax.enable_x64(self.cfg.model.dtype == "float64"), tiny.cheap_compilation():
      yield

  def score(self, name: str, moments: dict, count: int, kappa: float):
    """(the engine's result, the direction by the formula) for one batch and state of Adam."""
    u, adam, optimizer = oracles.batch_gradient(self.oracle.validation, VALIDATION), None, self.cfg.optimizer
    with self.environment():
      if self.direction == "adam":
        g = oracles.batch_gradient(getattr(self.oracle, name), BATCHES[name])
        constants = {"b1": optimizer.adam_b1, "b2": optimizer.adam_b2, "eps": optimizer.adam_eps}
        u = oracles.adam_direction(u, g, moments, count=count, kappa=kappa, **constants)
        arrays = {k: jnp.asarray(v, self.cfg.model.dtype) for k, v in unstacked(moments, self.model).items()}
        adam = ghost.AdamState(arrays, jnp.asarray(count), jnp.asarray(kappa, self.cfg.model.dtype))
      result = self.engine.score(self.model, BATCHES[name], VALIDATION, state=adam)
      return jax.tree.map(np.asarray, result), u


@pytest.fixture(scope="module", params=CASES)
def case(request, oracle_of):
  return Scored(*CASES[request.param], oracle_of)


@pytest.mark.parametrize("name", BATCHES)
def test_scores_per_parameter_layer_and_total(case, name):
  results, tolerance = case.results, case.tolerance
  tokens = oracles.token_counts(BATCHES[name])
  expected = oracles.dots(getattr(case.oracle, name), case.directions[name], LAYERS)
  per_example = {label: v / np.maximum(tokens, 1) for label, v in expected.items()}
  scores = tiny.stack_layers(results[name].per_param, LAYERS)
  assert scores.keys() == per_example.keys()
  for label, values in per_example.items():
    for layer in range(LAYERS) if values.ndim == 2 else [...]:
      assert np.abs(values[layer]).max() > 0, label
      assert oracles.relative_error(scores[label][layer], values[layer]) < tolerance, (label, layer)
  total = sum(v.reshape(-1, tiny.ROWS).sum(0) for v in per_example.values())
  assert oracles.relative_error(results[name].dot, total) < tolerance
  assert oracles.relative_error(results[name].additive, total * tokens / tokens.sum()) < tolerance


def test_positions_of_a_packed_row_sum_to_its_documents(case):
  """The score of a document in a packed row is that of the document in a row of its own."""
  results, tolerance = case.results, case.tolerance
  expected = sum(oracles.dots(case.oracle.documents, case.directions["packed"]).values())
  expected /= oracles.token_counts(PACKED).sum()
  positions = results["packed"].per_position
  assert positions.shape == (tiny.ROWS, tiny.POSITIONS)
  segments = PACKED["inputs_segmentation"]
  actual = [positions[row][segments[row] == segment].sum() for row, segment in tiny.documents(PACKED)]
  assert oracles.relative_error(actual, expected) < tolerance
  assert np.abs(positions[segments == 0]).max() == 0
  assert oracles.relative_error(positions.sum(1), results["packed"].additive) < tolerance


@pytest.mark.parametrize("name", BATCHES)
def test_rows_without_a_counting_token_have_exactly_zero(case, name):
  result = case.results[name]
  empty = oracles.token_counts(BATCHES[name]) == 0
  assert empty.sum() == (1 if name == "packed" else 2)  # in the packed batch row 5 has a second document that counts
  assert (result.dot[empty] == 0).all()
  assert (result.dot[~empty] != 0).all()


@pytest.mark.parametrize("name", BATCHES)
def test_training_gradient_and_losses(case, name):
  results, tolerance = case.results, case.tolerance
  expected = oracles.batch_gradient(getattr(case.oracle, name), BATCHES[name])
  gradients = tiny.stack_layers(tiny.by_label(results[name].grads), LAYERS)
  assert gradients.keys() == expected.keys()
  for label, value in expected.items():
    assert oracles.relative_error(gradients[label], value) < tolerance, label


def test_adam_at_the_first_step(case):
  """v = 0 before the step: P_t G is nearly G / |g|, and the score of each element a ratio of two sums. A sum over
  examples that cancels to 1e-4 of its terms loses 4 of 16 digits on the way, hence the wider tolerance."""
  if case.direction != "adam" or case.tolerance > 1e-12:
    pytest.skip("direction adam in float64 only")
  zeros = {label: np.zeros(g.shape[1:]) for label, g in case.oracle.packed.items()}
  result, u = case.score("packed", zeros, 0, 1.0)
  expected = sum(v.reshape(-1, tiny.ROWS).sum(0) for v in oracles.dots(case.oracle.packed, u, LAYERS).values())
  assert oracles.relative_error(result.additive, expected / oracles.token_counts(PACKED).sum()) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("direction", ["sgd", "adam"])
def test_every_combination(direction, tied, dtype, oracle_of):
  for scan, remat in itertools.product((True, False), ("none", "minimal", "full")):
    changes = {
      "logits_via_embedding": tied, "scan_layers": scan, "remat_policy": remat, "dtype": dtype, "weight_dtype": dtype,
    }  # fmt: skip
    case = Scored(direction, changes, oracle_of)
    for name in BATCHES:
      test_scores_per_parameter_layer_and_total(case, name)
    test_positions_of_a_packed_row_sum_to_its_documents(case)
