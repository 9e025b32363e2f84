"""Weights and moments in host memory: the same bits, and where everything lives.

L layers, k layers in a segment.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from train_steps import TRAIN, Run

from maxghost import config
from maxghost.checkpoint.checksum import checksums
from maxghost.ghost.schedules.passes import mean_loss
from maxghost.models import streaming
from maxghost.objectives import LanguageModelLoss
from maxghost.training import host_memory
from maxghost.training import state as train_state

LAYERS = 6
BATCH = tiny.make_batch(((6, 5), (13,), (2, 9)), seed=300)
HOST = jax.memory.Space.Host


def test_a_loop_brings_every_segment_in_once_and_in_order():
  stacked = {"w": jax.device_put(jnp.arange(5.0), HOST), "i": jnp.arange(5)}

  def run(stacked, reverse):
    def step(carry, x, here):
      assert not streaming.any_on_host(here)
      return carry * 2 + here["w"], (here["w"] * x, here["i"])

    return streaming.loop(step, 0.0, jnp.ones(5) * 3, stacked, reverse=reverse)

  for reverse in (False, True):
    ours = jax.jit(run, static_argnums=1)(stacked, reverse)
    order = np.arange(5)[::-1] if reverse else np.arange(5)
    carry = 0.0
    for i in order:
      carry = carry * 2 + i
    assert float(ours[0]) == carry
    np.testing.assert_array_equal(ours[1][0], 3.0 * np.arange(5))
    np.testing.assert_array_equal(ours[1][1], np.arange(5))


def gradients(host: bool, **changes):
  """(loss, gradient State) of the tiny model, its stacked layers on the host or not."""
  cfg = tiny.make_config(base_num_decoder_layers=LAYERS, **changes)
  graphdef, params, rest = nnx.split(tiny.make_model(cfg), nnx.Param, ...)
  if host:
    params = on_host(params)
  loss_fn = LanguageModelLoss(dropout_key=jax.random.key(5) if cfg.model.dropout_rate else None)

  def loss(params):
    return mean_loss(*loss_fn(nnx.merge(graphdef, params, rest), BATCH))

  with tiny.cheap_compilation():
    return jax.jit(jax.value_and_grad(loss))(params)


def on_host(params: nnx.State) -> nnx.State:
  flat = nnx.to_flat_state(params)
  return nnx.from_flat_state([(p, v.replace(jax.device_put(v[...], HOST)) if "layers" in p else v) for p, v in flat])


CASES = {
  "3-full-dropout": {"segment_lengths": (3,), "remat_policy": "full", "dropout_rate": 0.3},
}
SLOW_CASES = {
  f"{lengths}-{remat}": {"segment_lengths": lengths, "remat_policy": remat}
  for lengths in ((1,), (2,), (6,), (3, 1), (6, 3))
  for remat in ("none", "minimal", "full")
}


def assert_same_gradients(changes):
  (loss, grads), (loss_0, grads_0) = gradients(True, **changes), gradients(False, **changes)
  assert float(loss) == float(loss_0)
  for (path, ours), (_, theirs) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(grads_0), strict=True):
    assert ours[...].sharding.memory_kind == ("pinned_host" if "layers" in path else "device"), path
    np.testing.assert_array_equal(np.asarray(ours[...]), np.asarray(theirs[...]), err_msg=str(path))


@pytest.mark.parametrize("name", CASES)
def test_streamed_gradients_have_the_bits_of_segments(name):
  assert_same_gradients(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_streamed_gradients_have_the_bits_of_segments_in_every_form(name):
  assert_same_gradients(SLOW_CASES[name])


class StreamedRun(Run):
  """A `Run` of four layers in two segments."""

  def __init__(self, **changes):
    super().__init__(exact=True, batch=TRAIN[0], base_num_decoder_layers=4, segment_lengths=(2,), **changes)

  def kinds(self) -> dict:
    return {path: v[...].sharding.memory_kind for path, v in nnx.to_flat_state(self.state)}


STREAMS = {
  "both": {"offload_to_host": ("weights", "optimizer")},
  "weights": {"offload_to_host": ("weights",)},
  "optimizer": {"offload_to_host": ("optimizer",)},
}
PLAIN = {"ghost_enabled": False, "remat_policy": "full"}
GHOST = {"ghost_schedule": "reverse_scan", "remat_policy": "full", "ghost_rank": 5, "ghost_direction": "adam"}


def three_steps(**changes):
  run = StreamedRun(**changes)
  before = run.kinds()
  outputs = [run.step(TRAIN[i]) for i in range(3)]
  return types.SimpleNamespace(run=run, before=before, outputs=outputs)


@pytest.fixture(scope="module")
def unstreamed():
  made = {}

  def get(changes):
    key = tuple(changes.items())
    if key not in made:
      made[key] = three_steps(**changes)
    return made[key]

  return get


def assert_same_bits(ours, theirs):
  on, off = nnx.to_flat_state(ours.run.state), nnx.to_flat_state(theirs.run.state)
  for (path, a), (_, b) in zip(on, off, strict=True):
    np.testing.assert_array_equal(np.asarray(a[...]), np.asarray(b[...]), err_msg=str(path))
  assert min(float(out["clip_factor"]) for out in theirs.outputs) < 1
  for a, b in zip(ours.outputs, theirs.outputs, strict=True):
    assert a.keys() == b.keys()
    for name in ("loss", "grad_norm", "param_norm", "clip_factor", *(["score_dot_BSK"] if "val_loss" in b else [])):
      np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(
  "name",
  ["both", pytest.param("weights", marks=pytest.mark.slow), pytest.param("optimizer", marks=pytest.mark.slow)],
)
def test_streamed_steps_have_the_bits_of_unstreamed_ones(name, unstreamed):
  ours = three_steps(**PLAIN, **STREAMS[name])
  assert_same_bits(ours, unstreamed(PLAIN))
  assert ours.run.kinds() == ours.before
  on_host = {path for path, kind in ours.before.items() if kind == "pinned_host"}
  wanted = {"weights": {"model"}, "optimizer": {"optimizer"}, "both": {"model", "optimizer"}}[name]
  assert {path[0] for path in on_host} == wanted
  assert all("layers" in path for path in on_host)
  stacked = [path for path in ours.before if "layers" in path and path[0] in wanted]
  assert on_host == set(stacked)


def test_streamed_weights_are_scored():
  shape = {"base_num_decoder_layers": 2, "segment_lengths": (1,), "ghost_schedule": "reverse_scan"}
  ours, theirs = (Run(exact=True, **shape, **where).step(TRAIN[0]) for where in (STREAMS["both"], {}))
  np.testing.assert_array_equal(ours["score_dot_BSK"], theirs["score_dot_BSK"])
  assert np.abs(theirs["score_dot_BSK"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"ghost_curvature": "secant", "ghost_val_refresh_steps": 0}], ids=str)
def test_streamed_scores_have_the_bits_of_unstreamed_ones(changes, unstreamed):
  """reverse_scan with low-rank directions through Adam: weights and moments of a segment come in once for both, and so
  does the stored validation gradient."""
  ours, theirs = three_steps(**GHOST, **changes, **STREAMS["both"]), unstreamed(GHOST | changes)
  assert_same_bits(ours, theirs)
  assert {path[0] for path, kind in ours.before.items() if kind == "pinned_host"} >= (
    {"stored_gradients"} if changes else set()
  )
  assert ours.run.kinds() == ours.before


def test_a_fresh_state_is_where_its_abstract_one_says():
  cfg = tiny.make_config(base_num_decoder_layers=4, segment_lengths=(2,), ghost_enabled=False, **STREAMS["both"])
  _, abstract = train_state.abstract_split(cfg)
  with tiny.cheap_compilation():
    _, fresh = train_state.create_split(cfg)
  on_host = 0
  for (path, x), (_, shape) in zip(nnx.to_flat_state(fresh), nnx.to_flat_state(abstract), strict=True):
    kind = "device" if shape.get_value().sharding is None else shape.get_value().sharding.memory_kind
    assert x[...].sharding.memory_kind == kind, path
    on_host += kind == "pinned_host"
  assert on_host == 3 * 9  # parameters of a layer, and two moments of each


def test_abstract_states_lower_to_a_step_with_host_arguments():
  cfg = tiny.make_config(base_num_decoder_layers=4, segment_lengths=(2,), ghost_enabled=False, **STREAMS["both"])
  _, abstract = train_state.abstract_split(cfg)
  seen = {}

  def look(state):
    seen.update({path: streaming.on_host(v[...]) for path, v in nnx.to_flat_state(state)})

  jax.jit(look).lower(abstract)
  assert {path for path, host in seen.items() if host} == {p for p in seen if "layers" in p}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_checksum_does_not_depend_on_the_memory(dtype):
  x = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (3, 5, 4)), dtype)
  there = jax.device_put(x, HOST)
  assert there.sharding.memory_kind == "pinned_host"
  assert checksums([there]) == checksums([x]) != checksums([x[::-1]])


def test_without_host_memory_it_says_so():
  device = types.SimpleNamespace(
    addressable_memories=lambda: [types.SimpleNamespace(kind="device")], device_kind="Toy chip"
  )
  asked = config.load(
    config.config_dir() / "base.yml", "offload_to_host=[val_gradient]", "ghost_direction=sgd", "ghost_rank=4"
  )
  told = "offload_to_host needs pinned host memory, but Toy chip has only device; leave offload_to_host empty"
  with pytest.raises(config.ConfigError, match=told):
    host_memory.check(asked, device)
  host_memory.check(config.load(config.config_dir() / "base.yml"), device)
  host_memory.check(asked, jax.devices()[0])


@pytest.mark.parametrize(
  ("overrides", "told"),
  [
    ("offload_to_host=weights ghost_enabled=false", "one segment of layers at a time; give segment_lengths, such as 2"),
    ("offload_to_host=optimizer scan_layers=false ghost_enabled=false", "use scan_layers=true and segment_lengths"),
    (
      "offload_to_host=weights segment_lengths=2",
      "use ghost_schedule=reverse_scan, not two_pass, or ghost_enabled=false",
    ),
    (
      "offload_to_host=weights segment_lengths=2 ghost_enabled=false gradient_accumulation_steps=3",
      "use gradient_accumulation_steps=1, not 3",
    ),
    ("offload_to_host=weigths segment_lengths=2", "did you mean 'weights'?"),
  ],
)
def test_streams_that_cannot_be_are_refused(overrides, told):
  with pytest.raises(config.ConfigError) as caught:
    config.load(*overrides.split())
  (problem,) = caught.value.problems
  assert told in problem


def test_streamed_layers_without_segments_are_refused():
  w = jax.device_put(jnp.ones((4, 5)), HOST)
  with pytest.raises(ValueError, match="streamed layers need segments: give segment_lengths"):
    streaming.scan(lambda c, w, s: c, jnp.ones(5), w, (), ())


def test_gradients_of_what_every_layer_sees_are_summed():
  """Shared floats (not only the positions and segment ids of the project's models) get their gradient, too."""
  w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 5)), jnp.float32) / 3
  x, shift = jnp.ones((2, 5)), jnp.linspace(0, 1, 5)

  def loss(w, shift):
    step = lambda x, w, s: jnp.tanh(x @ w[0] + s[0][None]) * (w[1] + 1)  # noqa: E731
    return streaming.scan(step, x, (w, jnp.arange(4)), (shift, jnp.arange(3)), (2,)).sum()

  def plain(w, shift):
    y = x
    for i in range(4):
      y = jnp.tanh(y @ w[i] + shift[None]) * (i + 1)
    return y.sum()

  with tiny.cheap_compilation():
    ours = jax.jit(jax.grad(loss, (0, 1)))(jax.device_put(w, HOST), shift)
    theirs = jax.jit(jax.grad(plain, (0, 1)))(w, shift)
  for a, b in zip(ours, theirs, strict=True):
    assert oracles.relative_error(np.asarray(a), np.asarray(b)) < 1e-5
