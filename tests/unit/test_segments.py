"""Layers in segments: the gradients of the plain stack, and only the boundary carries kept.

B rows, T positions, D embed dim, L layers, k layers in a segment.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import config, models
from maxghost.ghost.schedules.passes import mean_loss
from maxghost.models import segments, stack
from maxghost.objectives import LanguageModelLoss
from maxghost.parallel import shardings

LAYERS = 6
BATCH = tiny.make_batch(((6, 5), (13,), (2, 9)), seed=300)
CARRY = (3, tiny.POSITIONS, 20)  # B, T, D
KEY = jax.random.key(5)


def make_config(**changes):
  return tiny.make_config(base_num_decoder_layers=LAYERS, **changes)


def loss_of(cfg):
  """(loss(params), params) of the tiny model on BATCH."""
  graphdef, params, rest = nnx.split(tiny.make_model(cfg), nnx.Param, ...)
  loss = LanguageModelLoss(dropout_key=KEY if cfg.model.dropout_rate else None)
  return lambda params: mean_loss(*loss(nnx.merge(graphdef, params, rest), BATCH)), params


def gradients(**changes):
  """(loss, {stacked label: gradient})."""
  loss, params = loss_of(make_config(**changes))
  with tiny.cheap_compilation():
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
  return float(value), tiny.stack_layers(tiny.by_label(grads), LAYERS)


@functools.cache
def plain(dropout_rate=0.0):
  return gradients(remat_policy="none", dropout_rate=dropout_rate)


def assert_plain(changes):
  value, grads = gradients(**changes)
  expected_value, expected = plain(changes.get("dropout_rate", 0.0))
  assert value == pytest.approx(expected_value, rel=1e-6)
  assert grads.keys() == expected.keys()
  for label, g in expected.items():
    assert oracles.relative_error(grads[label], g) < 1e-6, label


CASES = {
  "3-full-dropout": {"segment_lengths": (3,), "remat_policy": "full", "dropout_rate": 0.3},
  "6-2-none-dropout": {"segment_lengths": (6, 2), "remat_policy": "none", "dropout_rate": 0.3},
}
CYCLES = {
  "inhomogeneous_layer_cycle_interval": 2, "attention_type": ("local_sliding", "global"), "sliding_window_size": 4,
}  # fmt: skip
SLOW_CASES = {
  f"{lengths}-{remat}": {"segment_lengths": lengths, "remat_policy": remat}
  for lengths in ((1,), (2,), (3,), (6,), (3, 1), (6, 3))
  for remat in ("none", "minimal", "full")
} | {f"unrolled-{remat}": {"scan_layers": False, "remat_policy": remat} for remat in ("minimal", "full")}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_stack(name):
  assert_plain(CASES[name])


def test_segments_of_cycles_of_unlike_layers():
  """Twelve layers in six cycles, in segments of three cycles."""

  def loss(**changes):
    return loss_of(tiny.make_config(base_num_decoder_layers=12, remat_policy="full", **CYCLES, **changes))

  (plain_loss, params), (cut_loss, _) = loss(), loss(segment_lengths=(6,))
  cut, uncut = (jax.jit(jax.value_and_grad(f)).trace(params) for f in (cut_loss, plain_loss))
  assert kept_sizes(next(scans(cut.jaxpr))) == [2 * np.prod(CARRY)]
  with tiny.cheap_compilation():
    (value, grads), (value_0, grads_0) = (traced.lower().compile()(params) for traced in (cut, uncut))
  assert float(value) == pytest.approx(float(value_0), rel=1e-6)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_0), strict=True):
    assert oracles.relative_error(np.asarray(a), np.asarray(b)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_gradients_are_those_of_the_plain_stack_in_every_form(name):
  assert_plain(SLOW_CASES[name])


def scans(jaxpr):
  """The scans of a jaxpr, not those inside other scans."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if equation.primitive.name == "scan":
      yield equation
      continue
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
      if hasattr(inner, "eqns"):
        yield from scans(inner)


def kept_sizes(scan) -> list[int]:
  """Number of elements of every float array that a scan stacks up over its steps."""
  outputs = scan.outvars[tiny.num_carried(scan) :]
  return [v.aval.size for v in outputs if jnp.issubdtype(v.aval.dtype, jnp.floating)]


def forward_scan(**changes):
  loss, params = loss_of(make_config(**changes))
  return next(scans(jax.make_jaxpr(jax.grad(loss))(params)))


KEPT = {(2,): 3, (3,): 2, (3, 1): 2}  # carries for these lengths of segments
QUICK = (((2,), "full"), ((3,), "none"), ((3, 1), "minimal"))


@pytest.mark.parametrize(
  ("lengths", "remat"),
  [
    pytest.param(lengths, remat, marks=[] if (lengths, remat) in QUICK else [pytest.mark.slow])
    for lengths in KEPT
    for remat in ("none", "minimal", "full")
  ],
)
def test_the_forward_pass_keeps_as_many_carries_as_there_are_segments(lengths, remat):
  kept = kept_sizes(forward_scan(segment_lengths=lengths, remat_policy=remat))
  assert kept == [KEPT[lengths] * np.prod(CARRY)]


def test_without_segments_it_keeps_one_carry_per_layer():
  """What the count above would find if segments did nothing."""
  assert kept_sizes(forward_scan(remat_policy="full")) == [LAYERS * np.prod(CARRY)]


@pytest.mark.parametrize(
  ("platform", "layers", "remat", "loops"),
  [
    ("cpu", 8, "none", 0), ("cpu", 9, "none", 1), ("cpu", 8, "minimal", 1), ("tpu", 8, "none", 1),
    ("cpu", 8, "auto", 0), ("cpu", 9, "auto", 1), ("tpu", 8, "auto", 1),
  ],
)  # fmt: skip
def test_a_short_stack_that_recomputes_nothing_has_no_loop_on_a_cpu(platform, layers, remat, loops):
  """Under remat it keeps the loop, since XLA would merge the recomputation with the forward pass."""
  loss, params = loss_of(tiny.make_config(base_num_decoder_layers=layers, remat_policy=remat))
  with shardings.tracing_for(platform):
    found = scans(jax.make_jaxpr(loss)(params))
  assert sum(scan.params["unroll"] != layers for scan in found) == loops


@pytest.mark.parametrize(("layers", "lengths", "same"), [(8, (), "none"), (9, (), "minimal"), (8, (2,), "minimal")])
def test_the_automatic_policy_keeps_what_the_named_one_does(layers, lengths, same):
  """Compared by the traced gradient."""

  def kept(remat):
    changes = {"base_num_decoder_layers": layers, "segment_lengths": lengths, "remat_policy": remat}
    loss, params = loss_of(tiny.make_config(**changes))
    return str(jax.make_jaxpr(jax.grad(loss))(params))

  assert kept("auto") == kept(same)
  assert kept(same) != kept("none" if same == "minimal" else "minimal")


def test_inside_a_segment_its_layers_keep_their_inputs():
  """The backward pass holds the boundaries and, one segment at a time, k layer inputs."""
  loss, params = loss_of(make_config(segment_lengths=(3,), remat_policy="full"))
  _, backward = scans(jax.make_jaxpr(jax.grad(loss))(params))
  recomputed = next(scans(backward.params["jaxpr"]))
  assert kept_sizes(recomputed) == [3 * np.prod(CARRY)]


class Adding(nnx.Module):
  """Called with (x, total) as a layer of a model with an auxiliary loss is."""

  def __init__(self, rngs):
    self.inner = nnx.Linear(5, 5, rngs=rngs)

  def __call__(self, carry, shift, key):
    x, total = carry
    x = jnp.tanh(self.inner(x)) + shift
    return x, total + jnp.sum(x**2)


def test_a_pytree_is_carried():
  with tiny.cheap_compilation():
    graphdef, params = nnx.split(nnx.jit(lambda: stack.create(Adding, 4, nnx.Rngs(0)))())

  def loss(params, segment_lengths):
    x, total = stack.run(
      nnx.merge(graphdef, params),
      (jnp.ones((3, 5)), 0.0),
      (0.5,),
      remat_policy="none",
      segment_lengths=segment_lengths,
    )
    return total + x.sum()

  with tiny.cheap_compilation():
    ours, theirs = jax.jit(lambda params: [jax.value_and_grad(loss)(params, lengths) for lengths in ((2,), ())])(params)
  np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
  for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_lengths_that_do_not_divide_are_refused_with_the_divisors():
  with pytest.raises(ValueError, match="a segment of 4 layers does not divide 6 layers; use one of 1, 2, 3, 6"):
    segments.check(6, (4,))
  with pytest.raises(ValueError, match="2 layers does not divide the segment of 3 layers around it; use one of 1, 3"):
    segments.check(6, (3, 2))
  with pytest.raises(ValueError, match="a segment of 0 layers"):
    segments.check(6, (0,))


@pytest.mark.parametrize(
  ("overrides", "told"),
  [
    ("segment_lengths=3", "segment_lengths=3 does not divide base_num_decoder_layers=4; use one of 1, 2, 4"),
    ("segment_lengths=4,3", "segment_lengths=[4, 3]: 3 does not divide the segment of 4 around it; use one of 1, 2, 4"),
    (
      "segment_lengths=2 base_num_decoder_layers=12 inhomogeneous_layer_cycle_interval=3",
      "does not divide base_num_decoder_layers=12 into whole cycles of 3 unlike layers; use one of 3, 6, 12",
    ),
    (
      "segment_lengths=2 scan_layers=false",
      "segment_lengths=2 cuts stacked layers into segments; use scan_layers=true",
    ),
  ],
)
def test_segments_that_cannot_be_are_refused(overrides, told):
  with pytest.raises(config.ConfigError) as caught:
    config.load(*overrides.split())
  (problem,) = caught.value.problems
  assert told in problem


class Block(nnx.Module):
  """Linear, batch norm, dropout and a noted value: every kind of Variable a layer may change or add."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(5, 5, rngs=rngs)
    self.norm = nnx.BatchNorm(5, rngs=rngs)
    self.dropout = nnx.Dropout(0.4, rngs=rngs)

  def __call__(self, x_BD):
    y_BD = self.dropout(jnp.tanh(self.norm(self.linear(x_BD))))
    self.mean = nnx.Intermediate(y_BD.mean())
    return x_BD + y_BD


@functools.cache
def split_blocks():
  with tiny.cheap_compilation():
    return nnx.split(nnx.jit(lambda: stack.create(lambda rngs: Block(rngs), 4, nnx.Rngs(0, dropout=1)))())


def make_blocks():
  return nnx.merge(*split_blocks(), copy=True)


X_BD = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)


def run_blocks(forward):
  """(loss, gradients, everything the layers changed) of `forward(x, blocks)`."""
  blocks = make_blocks()

  def loss(blocks):
    return jnp.sum(forward(X_BD, blocks) ** 3)

  with tiny.cheap_compilation():
    value, grads = nnx.jit(nnx.value_and_grad(loss))(blocks)
  return value, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(blocks, nnx.Not(nnx.Param)))


NOTHING = jax.checkpoint_policies.nothing_saveable


def as_numbers(tree):
  return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


@functools.cache
def by_nnx():
  """`run_blocks` by Flax's own scan."""

  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
  def theirs(x, block):
    return block(x)

  return run_blocks(theirs)


@pytest.mark.parametrize(
  ("lengths", "policy"),
  [
    pytest.param({"segment_lengths": (2,)}, None, id="2-saved"),
    pytest.param({"segment_lengths": (2,)}, NOTHING, id="2-remat", marks=pytest.mark.slow),
    pytest.param({"segment_lengths": (4, 2)}, None, id="4-2-saved", marks=pytest.mark.slow),
    pytest.param({"segment_lengths": (4, 2)}, NOTHING, id="4-2-remat"),
  ],
)
def test_remat_scan_is_nnx_scan(lengths, policy):
  """Values, gradients, batch statistics, RNG counts and noted values."""

  @models.remat_scan(policy=policy, **lengths)
  def ours(x, block):
    return block(x)

  (value, grads, state), (value_0, grads_0, state_0) = run_blocks(ours), by_nnx()
  np.testing.assert_allclose(value, value_0, rtol=1e-6)
  for left, right in ((grads, grads_0), (state, state_0)):
    left, right = as_numbers(left), as_numbers(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), left, right)
  assert state["dropout"]["rngs"]["count"].tolist() == [1] * 4
  assert np.unique(state["mean"]).size == 4


def test_remat_scan_keeps_boundaries_only():
  graphdef, params, rest = nnx.split(make_blocks(), nnx.Param, ...)

  def loss(params):
    blocks = nnx.merge(graphdef, params, rest, copy=True)
    return jnp.sum(models.remat_scan(lambda x, b: b(x), segment_lengths=(2,))(X_BD, blocks))

  forward = next(scans(jax.make_jaxpr(jax.grad(loss))(params)))
  carries = [v for v in forward.outvars[tiny.num_carried(forward) :] if v.aval.shape == (2, *X_BD.shape)]
  assert len(carries) == 1  # and the batch statistics and noted values, which the caller gets
  assert max(v.aval.size for v in forward.outvars if v not in carries) < carries[0].aval.size


class Shared(nnx.Module):
  """Weights with the layer axis behind the others, one shared shift, and a count of the calls."""

  def __init__(self):
    self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(1).normal(size=(5, 4, 5)), jnp.float32))
    self.shift = nnx.BatchStat(jnp.arange(5.0))
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, x_BD, scale):
    self.calls[...] += 1
    x_BD = jnp.tanh(x_BD @ self.kernel[...] * scale + self.shift[...][None])
    return x_BD, x_BD[0] * self.calls[...]


def test_remat_scan_axes():
  """A layer axis that is not the first, Variables shared and carried, scanned and shared arrays, stacked outputs."""
  module = Shared()
  axes = nnx.StateAxes({nnx.Param: 1, nnx.BatchStat: None, ...: nnx.Carry})
  scales = jnp.linspace(0.5, 2.0, 4)

  @models.remat_scan(segment_lengths=(2,), in_axes=(axes, nnx.Carry, 0, None), out_axes=(nnx.Carry, 1))
  def forward(module, x, scale, factor):
    return module(x, scale * factor)

  out, firsts = forward(module, X_BD, scales, 1.5)
  x, expected = X_BD, []
  for i in range(4):
    x = jnp.tanh(x @ module.kernel[...][:, i] * scales[i] * 1.5 + jnp.arange(5.0)[None])
    expected.append(x[0] * (i + 1))
  np.testing.assert_allclose(out, x, rtol=1e-5)
  np.testing.assert_allclose(firsts, np.stack(expected, 1), rtol=1e-5)
  assert firsts.shape == (5, 4)
  assert int(module.calls[...]) == 4
  assert module.kernel.shape == (5, 4, 5)


def test_remat_scan_splits_rng_streams():
  rngs = nnx.Rngs(dropout=3)

  @nnx.split_rngs(splits=6)
  @models.remat_scan(segment_lengths=(3,), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
  def draw(x, rngs):
    noise = jax.random.normal(rngs.dropout())
    return x + noise, noise

  total, noises = draw(0.0, rngs)
  assert np.unique(noises).size == 6
  assert float(total) == pytest.approx(float(noises.sum()), rel=1e-5)


def test_remat_scan_refuses_what_it_cannot_do():
  module = Shared()
  step = lambda x, m: m(x, 1.0)[0]  # noqa: E731
  axes = nnx.StateAxes({nnx.Param: 1, ...: None})
  with pytest.raises(ValueError, match=r"calls \(Variable\) has axis None in remat_scan, but the layer changes it"):
    models.remat_scan(step, segment_lengths=(2,), in_axes=(nnx.Carry, axes))(X_BD, module)
  with pytest.raises(ValueError, match="a segment of 3 layers does not divide 4 layers; use one of 1, 2, 4"):
    models.remat_scan(lambda x, b: b(x), segment_lengths=(3,))(X_BD, make_blocks())
  with pytest.raises(ValueError, match=r"have \[4, 6\] layers"):
    models.remat_scan(lambda x, a, b: x, segment_lengths=(2,), in_axes=(nnx.Carry, 0, 0))(0.0, jnp.ones(4), jnp.ones(6))
  with pytest.raises(ValueError, match="have no layers"):
    models.remat_scan(lambda x: x, segment_lengths=(2,), in_axes=(nnx.Carry,))(0.0)
  with pytest.raises(ValueError, match="or in neither"):
    models.remat_scan(lambda x, y: x, in_axes=(nnx.Carry, nnx.Carry))(0.0, 0.0)
  with pytest.raises(ValueError, match=r"give nnx.Carry once in in_axes and once in out_axes"):
    models.remat_scan(lambda x, b: b(x), out_axes=0)(X_BD, make_blocks())  # every layer would get the first input
  with pytest.raises(ValueError, match="has 2 out_axes, but the function returns a tuple of 3"):
    models.remat_scan(lambda x, b: (b(x), x, x), out_axes=(nnx.Carry, 0))(X_BD, make_blocks())
  with pytest.raises(ValueError, match="1 arguments, but in_axes has 2 entries"):
    models.remat_scan(step, segment_lengths=(2,))(X_BD)
