"""`attach`: which models are refused, with which words, and that the twin is another graph over the same parameters.

n examples, T positions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import ghost, models
from maxghost.ghost.attach import matching, parameters
from maxghost.training.scoring import excluded

N, IN, OUT = 7, 6, 4


def abstract(make):
  return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


class Own(nnx.Module):
  """A layer without a rule."""

  def __init__(self, rngs):
    self.gain = nnx.Param(jnp.ones((OUT,)))

  def __call__(self, x):
    return x * jnp.expand_dims(self.gain[...], range(x.ndim - 1))


class Net(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(IN, OUT, rngs=rngs)
    self.own = Own(rngs)

  def __call__(self, x):
    return self.own(self.dense(x))


def test_an_uncovered_param_names_its_path_its_layer_and_the_ways_out():
  with pytest.raises(ValueError) as error:
    ghost.attach(abstract(Net), num_examples=N)
  text = str(error.value)
  for part in ("own/gain (Own)", "@ghost.rule", "ghost_exclude", "Embed", "LinearGeneral", "RMSNorm"):
    assert part in text
  assert "dense/kernel" not in text  # covered
  assert "\n" not in text


def test_a_subclass_needs_a_rule_of_its_own():
  class Squared(nnx.Linear):
    def __call__(self, x):
      return super().__call__(x) ** 2

  with pytest.raises(ValueError, match=r"bias \(Squared\)"):
    ghost.attach(abstract(lambda rngs: Squared(IN, OUT, rngs=rngs)), num_examples=N)


def test_nothing_to_score_is_told_by_the_keys_and_the_trained_parameters():
  """The paths of all parameters that a mask keeps as they are would hide both."""
  cfg = tiny.make_config(trainable_parameters_mask=("*norm*",), ghost_exclude=("*norm*",))
  model = nnx.merge(*tiny.abstract_split(cfg))
  with pytest.raises(ValueError, match=r"^ghost_exclude=\*norm\* leaves no parameter to score; paths: \S+") as error:
    matching(parameters(model), excluded(cfg, model))
  assert "mlp" not in str(error.value)


def test_an_exclude_pattern_covers_what_has_no_rule():
  twin = ghost.attach(abstract(Net), num_examples=N, exclude=("own/*",))
  assert [p.label for p in twin.scored] == ["dense/bias", "dense/kernel"]
  assert twin.excluded == ("own/gain",)


def test_an_exclude_pattern_that_matches_nothing_is_an_error():
  with pytest.raises(ValueError, match=r"'odn/\*' matches no parameter.*dense/kernel.*own/gain"):
    ghost.attach(abstract(Net), num_examples=N, exclude=("own/*", "odn/*"))


def test_a_param_under_two_names_is_an_error_that_names_both():
  class Shared(nnx.Module):
    def __init__(self, rngs):
      self.first, self.second = (nnx.Linear(IN, IN, use_bias=False, rngs=rngs) for _ in range(2))
      self.second.kernel = self.first.kernel

  with pytest.raises(ValueError, match=r"second/kernel is also first/kernel"):
    ghost.attach(Shared(nnx.Rngs(0)), num_examples=N)


class Container(nnx.Module):
  """Params that no layer owns, in each kind of container that flax offers."""

  def __init__(self, rngs, kind):
    self.dense = nnx.Linear(IN, OUT, rngs=rngs)
    param = nnx.Param(jnp.ones((OUT,)))
    self.gains = nnx.List([param]) if kind == "list" else nnx.Dict(only=param)

  def __call__(self, x):
    (gain,) = jax.tree.leaves(nnx.state(self.gains))
    return self.dense(x) * gain


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_param_in_a_container_is_not_skipped(kind):
  with pytest.raises(ValueError, match="gains/"):
    ghost.attach(abstract(lambda rngs: Container(rngs, kind)), num_examples=N)


def loss(model, batch):
  return model(batch).sum(-1), jnp.ones(len(batch))


def test_a_layer_whose_output_does_not_start_with_the_examples_is_an_error():
  class FeaturesFirst(nnx.Module):
    def __init__(self, rngs):
      self.dense = nnx.Linear(IN, OUT, rngs=rngs)

    def __call__(self, x):
      return self.dense(jnp.broadcast_to(x, (3, *x.shape))).mean(0)

  model = nnx.merge(*jax.tree.map(lambda x: jnp.ones(x.shape), nnx.split(abstract(FeaturesFirst))))
  batch = np.ones((N, IN), np.float32)
  with pytest.raises(ValueError, match=r"dense\.__call__ returns.*\(3, 7, 4\).*(example|batch).*[^_]exclude"):
    ghost.GhostEngine().score(model, batch, batch, loss_fn=loss)


def test_a_loss_may_be_for_one_number_of_rows_only():
  def fixed(model, batch):
    return model(batch.reshape(N, IN)).sum(-1), jnp.ones(N)

  model = nnx.merge(*jax.tree.map(lambda x: jnp.ones(x.shape), nnx.split(abstract(Net))))
  batch = np.ones((N, IN), np.float32)
  engines = (ghost.GhostEngine(exclude=("own/*",)), ghost.GhostEngine(exclude=("own/*",), engine="jvp"))
  rules, forward = (engine.score(model, batch, batch, loss_fn=fixed).dot for engine in engines)
  np.testing.assert_allclose(rules, forward, rtol=1e-5)


def test_a_layer_that_sees_no_batch_axis_is_an_error():
  """A table of positions, looked up once for all rows: its cotangent is a sum over examples."""

  class WithPositions(nnx.Module):
    def __init__(self, rngs):
      self.positions = nnx.Embed(IN, OUT, rngs=rngs)

    def __call__(self, x):
      return x @ self.positions(jnp.arange(IN))

  model = nnx.merge(*jax.tree.map(lambda x: jnp.ones(x.shape), nnx.split(abstract(WithPositions))))
  batch = np.ones((N, IN), np.float32)
  with pytest.raises(ValueError, match=r"positions\.__call__ returns.*(example|batch).*[^_]exclude"):
    ghost.GhostEngine().score(model, batch, batch, loss_fn=loss)


@pytest.mark.parametrize("mask", [np.ones((1, IN), bool), np.ones((), bool), None], ids=["shared", "scalar", "none"])
def test_schedule_concat_parts_every_input_of_a_layer_into_rows(mask):
  class Masked(nnx.Module):
    def __init__(self, rngs):
      self.norm = nnx.LayerNorm(IN, rngs=rngs)

    def __call__(self, x):
      return self.norm(x, mask=None if mask is None else jnp.asarray(mask))

  model, rows = Masked(nnx.Rngs(0)), np.random.default_rng(0).normal(size=(N, IN)).astype(np.float32)
  score = lambda schedule: ghost.GhostEngine(schedule=schedule).score(model, rows, rows[:3], loss_fn=loss)  # noqa: E731
  expected = score("two_pass").dot
  if mask is None:
    return np.testing.assert_allclose(score("concat").dot, expected, rtol=1e-5, atol=1e-6)
  with pytest.raises(ValueError, match=r"^norm: schedule 'concat' needs the batch axis first in every input"):
    score("concat")


def test_no_batch_axis_is_an_error_even_where_the_sizes_agree():
  """As above with as many positions as rows."""

  class WithPositions(nnx.Module):
    def __init__(self, rngs):
      self.positions = nnx.Embed(N, OUT, rngs=rngs)

    def __call__(self, x):
      return x @ self.positions(jnp.arange(N))

  model = nnx.merge(*jax.tree.map(lambda x: jnp.ones(x.shape), nnx.split(abstract(WithPositions))))
  batch = np.ones((N, N), np.float32)
  with pytest.raises(ValueError, match=r"^positions/embedding: .* batch axis first.*[^_]exclude"):
    ghost.GhostEngine().score(model, batch, batch, loss_fn=loss)


def test_the_twin_has_the_models_parameters_and_the_model_stays_as_it_was():
  model = tiny.make_model(tiny.make_config())
  graph_before, state_before = nnx.split(model)
  twin = ghost.attach(model, num_examples=tiny.ROWS, num_positions=tiny.POSITIONS)
  graph_after, state_after = nnx.split(model)
  assert graph_after == graph_before
  assert jax.tree.structure(state_after) == jax.tree.structure(state_before)
  assert all(a is b for a, b in zip(jax.tree.leaves(state_after), jax.tree.leaves(state_before), strict=True))
  assert {p.label for p in twin.scored} == tiny.by_label(model).keys()
  probes = [v for _, v in nnx.to_flat_state(twin.zero_probes())]
  assert {type(v) for v in probes} == {ghost.GhostProbe}
  assert not any(issubclass(kind, nnx.Param) for kind in (ghost.GhostProbe, ghost.GhostDirection))


def test_the_twin_of_an_abstract_model_allocates_nothing():
  sizes = {"base_emb_dim": 2**14, "base_mlp_dim": 2**16, "base_num_decoder_layers": 500}
  before = {id(x) for x in jax.live_arrays()}
  ghost.attach(models.create_abstract(tiny.make_config(**sizes)), num_examples=N)
  assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 1000


def test_direction_adam_wants_its_state_and_only_it():
  model, batch = abstract(lambda rngs: nnx.Linear(IN, OUT, rngs=rngs)), np.ones((N, IN), np.float32)
  with pytest.raises(ValueError, match="AdamState"):
    ghost.GhostEngine(direction="adam").score(model, batch, batch, loss_fn=loss)
  with pytest.raises(ValueError, match="AdamState"):
    ghost.GhostEngine().score(model, batch, batch, loss_fn=loss, state=ghost.AdamState({}, 0))


def test_unknown_schedule_and_direction_are_refused():
  with pytest.raises(ValueError, match=r"schedule=two_passes.*two_pass"):
    ghost.GhostEngine(schedule="two_passes")
  with pytest.raises(ValueError, match=r"direction=adan.*adam"):
    ghost.GhostEngine(direction="adan")
