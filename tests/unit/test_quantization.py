"""Products of rounded operands: the integers of an independent numpy implementation, qwix, and what is refused.

N tokens, *I inputs, *O outputs, R rows sorted by G groups, D features, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

from maxghost import config, models
from maxghost.config import ConfigError
from maxghost.models import dense, grouped_matmul
from maxghost.models.rounding import Rounded
from maxghost.objectives.tiled import Head

INT8, FP8 = Rounded("int8"), Rounded("fp8")
RNG = np.random.default_rng(3)


def random(*shape, spread: float = 2.0, dtype=np.float32) -> np.ndarray:
  """Rows and columns of many sizes, with a row of zeros."""
  x = RNG.normal(size=shape) * np.exp(spread * RNG.normal(size=(*shape[:-1], 1))) * np.exp(RNG.normal(size=shape[-1:]))
  x[(1,) * (len(shape) - 1)] = 0
  return x.astype(dtype)


def codes(x: np.ndarray, axis) -> tuple[np.ndarray, np.ndarray]:
  """(int64 codes, scales) of int8, by the formula."""
  scale = np.maximum(np.abs(x).max(axis, keepdims=True) / x.dtype.type(127), np.finfo(x.dtype).tiny)
  return np.rint(x / scale).astype(np.int64), scale


def rounded(x: np.ndarray, axis) -> np.ndarray:
  c, scale = codes(x, axis)
  return c.astype(x.dtype) * scale


def assert_integers(y, scales, sums) -> None:
  """y is `sums` times the scales; the sums are equal, without a difference."""
  np.testing.assert_array_equal(np.rint(np.asarray(y, np.float64) / scales), sums)
  np.testing.assert_allclose(y, sums * scales, rtol=5e-7)


def dims(count: int, ndim: int):
  return ((tuple(range(ndim - count, ndim)), tuple(range(count))), ((), ()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_and_gradients_of_a_dense_layer_are_numpys(dtype):
  with jax.enable_x64(dtype == np.float64):
    x, w, b = random(5, 3, 2, 7, dtype=dtype), random(2, 7, 4, 6, dtype=dtype), random(5, 3, 4, 6, dtype=dtype)
    x[1, 1] = 0
    run = lambda x, w: dense.dot_general(x, w, dims(2, 4), INT8)  # noqa: E731
    y, pull = jax.vjp(run, x, w)
    dx, dw = pull(jnp.asarray(b))
    (cx, sx), (cw, sw) = codes(x, (2, 3)), codes(w, (0, 1))
    assert_integers(y, sx * sw[0, 0], np.einsum("ntij,ijop->ntop", cx, cw))
    (cb, sb), (cw, sw) = codes(b, (2, 3)), codes(w, (2, 3))
    assert_integers(dx, sb * sw[..., 0, 0], np.einsum("ntop,ijop->ntij", cb, cw))
    expected = np.einsum("ntij,ntop->ijop", rounded(x, (2, 3)), rounded(b, (2, 3)))
    np.testing.assert_allclose(dw, expected, rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-6 * np.abs(dw).max())
    assert np.abs(y - np.einsum("ntij,ijop->ntop", x, w)).max() > 0


def test_fp8_has_three_bits_forward_and_two_backward():
  x, w, b = random(5, 9), random(9, 4), random(5, 4)
  y, pull = jax.vjp(lambda x, w: dense.dot_general(x, w, dims(1, 2), FP8), x, w)
  dx, dw = pull(jnp.asarray(b))

  def held(a, axis, kind):
    bound, bits = {"e4m3": (448, 3), "e5m2": (57344, 2)}[kind]
    scale = np.maximum(np.abs(a).max(axis, keepdims=True) / bound, np.finfo(np.float32).tiny).astype(np.float32)
    share = np.clip(a / scale, -bound, bound).astype(np.float64)
    least = {"e4m3": -6, "e5m2": -14}[kind]
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(share), 1e-30))), least) - bits)
    return np.rint(share / step) * step * scale

  np.testing.assert_allclose(y, held(x, 1, "e4m3") @ held(w, 0, "e4m3"), rtol=1e-5, atol=1e-6 * np.abs(y).max())
  np.testing.assert_allclose(dx, held(b, 1, "e5m2") @ held(w, 1, "e4m3").T, rtol=1e-5, atol=1e-6 * np.abs(dx).max())
  expected = held(x, 1, "e4m3").T @ held(b, 1, "e5m2")
  np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-6 * np.abs(dw).max())


def test_experts_multiply_integers():
  x, w, b = random(11, 7), random(3, 7, 5), random(11, 5)
  sizes, group = jnp.asarray([4, 0, 7]), np.repeat([0, 2], [4, 7])
  y, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, INT8), x, w)
  dx, dw = pull(jnp.asarray(b))
  (cx, sx), (cw, sw) = codes(x, 1), codes(w, 1)
  assert_integers(y, sx * sw[group, 0], np.einsum("ri,rio->ro", cx, cw[group]))
  (cb, sb), (cw, sw) = codes(b, 1), codes(w, 2)
  assert_integers(dx, sb * sw[group, :, 0], np.einsum("ro,rio->ri", cb, cw[group]))
  each = np.einsum("ri,ro->rio", rounded(x, 1), rounded(b, 1))
  np.testing.assert_allclose(dw, [each[group == g].sum(0) for g in range(3)], rtol=2e-5, atol=1e-6 * np.abs(dw).max())


@pytest.mark.parametrize("axis", ["tokens", "vocab"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiled_head_has_the_products_of_the_whole_one(axis, tied):
  """With tiles of tokens all of it; with tiles of the vocabulary the losses: a cotangent's scale is then a tile's."""
  x, w = random(2, 13, 6, spread=0.3), random(*((17, 6) if tied else (6, 17)), spread=0.3)
  targets, weights = RNG.integers(0, 17, (2, 13)), RNG.random((2, 13)).astype(np.float32)
  product = (lambda x, w: dense.tied(INT8, x, w)) if tied else (lambda x, w: dense.dot_general(x, w, dims(1, 3), INT8))

  def whole(x, w):
    log_p = jax.nn.log_softmax(product(x, w))
    return -(jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights).sum()

  def tiled(x, w):
    head = Head(4, axis, tied, jnp.dtype(jnp.float32), INT8)
    return (head(x, w, jnp.asarray(targets), jnp.asarray(weights)) * weights).sum()

  (a, (ax, aw)), (b, (bx, bw)) = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (whole, tiled))
  np.testing.assert_allclose(a, b, rtol=1e-6)
  for one, other in ((ax, bx), (aw, bw)):
    error = np.abs(one - other).max() / np.abs(one).max()
    assert error < (1e-5 if axis == "tokens" else 0.02)


def test_the_scale_of_a_divided_sum_is_that_of_the_whole():
  """Weights and activations whose contracted axis lies on eight devices."""
  x, w, b = random(5, 24), random(24, 16), random(5, 16)
  mesh = jax.make_mesh((8,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))

  @jax.jit
  def run(x, w, b):
    y, pull = jax.vjp(lambda x, w: dense.dot_general(x, w, dims(1, 2), INT8), x, w)
    return y, *pull(b)

  for specs in (((None, "all"), ("all",), ()), ((), (None, "all"), (None, "all"))):
    placed = [jax.device_put(a, jax.NamedSharding(mesh, jax.P(*s))) for a, s in zip((x, w, b), specs, strict=True)]
    for found, expected in zip(run(*placed), run(x, w, b), strict=True):
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stochastic_rounding_is_a_neighbour_and_on_average_the_number(kind, dtype):
  """20,000 tokens with eleven equal numbers and further ones, by which their draws differ; bounds of 4.5 deviations."""
  rng, count = np.random.default_rng(5), 20_000
  fixed = np.array([3.0, 0, *rng.normal(size=9) * np.exp(-np.arange(9.0))])  # down to the smallest steps
  g = np.concatenate([np.tile(fixed, (count, 1)), np.clip(rng.normal(size=(count, 8)), -2.9, 2.9)], 1).astype(dtype)
  with jax.enable_x64(dtype == np.float64):
    form = Rounded(kind, stochastic=True)
    codes, scales = form.codes(jnp.asarray(g), (1,), True)
    share = np.asarray(jnp.asarray(g) / scales, np.float64)
    plain = np.asarray(Rounded(kind).rounded(jnp.asarray(g), (1,), True))
    scale = np.asarray(scales)[0]
    assert np.array_equal(form.rounded(jnp.asarray(g), (1,)), Rounded(kind).rounded(jnp.asarray(g), (1,)))
    # Only cotangents; of a token alone and in another order the same draw.
    assert np.array_equal(form.codes(jnp.asarray(g[7:8]), (1,), True)[0], codes[7:8])
    assert np.array_equal(form.codes(jnp.asarray(g[::-1]), (1,), True)[0], codes[::-1])
  octave = np.floor(np.log2(np.maximum(np.abs(share), 2.0**-14)))
  step = np.ones_like(share) if kind == "int8" else 2.0 ** (octave - 2)
  values = np.asarray(codes).astype(np.float64)
  assert (values[:, 0] == (127 if kind == "int8" else 57344)).all() and (values[:, 1] == 0).all()
  assert (np.abs(values - share) < step * (1 + 1e-5)).all()
  assert np.array_equal(np.rint(values / step), values / step)
  off = (values - share)[:, 2:11]
  assert (np.abs(off.mean(0)) < 4.5 * off.std(0) / np.sqrt(count)).all() and (off.std(0) > 0).all()
  assert (np.abs((plain - g)[:, 2:11].mean(0)) > 20 * off.std(0) * scale / np.sqrt(count)).sum() > 4
  correlation = np.corrcoef(off.T) - np.eye(9)
  assert np.abs(correlation).max() < 4.5 / np.sqrt(count)


def test_gradients_of_stochastic_rounding_are_those_of_one_draw():
  """Both gradients of a layer, and experts, take the same codes of the cotangent, whatever recomputes them."""
  form = Rounded("int8", stochastic=True)
  x, w, b = random(5, 7), random(7, 6), random(5, 6)
  codes, scales = form.codes(jnp.asarray(b), (1,), True)
  assert (np.asarray(codes) != np.asarray(INT8.codes(jnp.asarray(b), (1,), True)[0])).any()
  used = np.asarray(codes * scales)
  for remat in (False, True):
    run = lambda x, w: dense.dot_general(x, w, dims(1, 2), form)  # noqa: E731
    _, pull = jax.vjp(jax.checkpoint(run) if remat else run, x, w)
    dx, dw = pull(jnp.asarray(b))
    np.testing.assert_allclose(dx, used @ rounded(w, 1).T, rtol=1e-5, atol=1e-6 * np.abs(dx).max())
    np.testing.assert_allclose(dw, rounded(x, 1).T @ used, rtol=1e-5, atol=1e-6 * np.abs(dw).max())
  sizes = jnp.asarray([2, 3])
  _, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, form), x, jnp.stack([w, w]))
  grouped_dx, grouped_dw = pull(jnp.asarray(b))
  np.testing.assert_allclose(grouped_dx, dx, rtol=1e-5, atol=1e-6 * np.abs(dx).max())
  np.testing.assert_allclose(grouped_dw.sum(0), dw, rtol=1e-5, atol=1e-6 * np.abs(dw).max())


@pytest.mark.parametrize("form", [INT8, Rounded("fp8", stochastic=True)])
def test_a_sum_divided_by_hand_has_the_codes_of_the_whole(form):
  """Inside `shard_map`, as for the width of experts."""
  mesh, axes = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2), ("b", "a")
  g = jnp.asarray(random(5, 24))
  spec = jax.P(None, axes)
  run = lambda g: form.codes(g, (1,), True, axes)  # noqa: E731
  divided = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=(spec, jax.P()), check_vma=False)(g)
  for found, expected in zip(divided, form.codes(g, (1,), True), strict=True):
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.hf
def test_qwix_has_the_same_integers(monkeypatch):
  """qwix ends int8 at 127.5, where every largest entry is a tie; with 127, products and input gradients are equal."""
  pytest.importorskip("qwix")
  from qwix._src.core import dot_general_qt, numerics

  monkeypatch.setattr(numerics, "get_symmetric_bound", lambda qtype: 127.0)
  x, w, b = map(jnp.asarray, (random(6, 9), random(9, 4), random(6, 4)))
  its = dot_general_qt.DotGeneralQtConfig(
    lhs_qtype=jnp.int8, rhs_qtype=jnp.int8, dlhs_grad_qtype=jnp.int8, dlhs_residual_qtype=jnp.int8,
    use_original_residuals=True,
  )  # fmt: skip
  y, pull = jax.vjp(lambda x, w: dot_general_qt.dot_general_qt(x, w, dims(1, 2), its), x, w)
  own, own_pull = jax.vjp(lambda x, w: dense.dot_general(x, w, dims(1, 2), INT8), x, w)
  np.testing.assert_allclose(own, y, rtol=5e-7)
  np.testing.assert_allclose(own_pull(b)[0], pull(jnp.asarray(b))[0], rtol=5e-7)


def test_what_is_not_exact_or_not_possible_is_refused():
  for changes, said in (
    ({"quantization": "int4"}, "did you mean 'int4w'"),
    ({"quantization": "fp8_full"}, "did you mean 'fp8'"),
    ({"quantization": "int8", "ghost_schedule": "forward_mode"}, "no cotangents to round"),
    ({"quantization": "int8", "ghost_curvature": "hessian"}, "second derivatives"),
    ({"quantization": "fp8_stochastic", "ghost_schedule": "forward_mode"}, "no cotangents to round"),
    ({"quantization": "int8_stochastic", "vocab_size": 151_936}, "use num_vocab_tiling=2 with vocab_tiling_axis=vocab"),
    ({"quantization": "fp8", "lora_rank": 4}, "lora_weight_qtype=int8"),
    ({"quantization": "int8", "num_experts": 4, "sparse_matmul": False}, "sparse_matmul=true"),
    ({"quantization": "int8", "vocab_size": 151_936}, "use num_vocab_tiling=2 with vocab_tiling_axis=vocab"),
  ):
    with pytest.raises(ConfigError, match=said):
      tiny.make_config(**changes)
  tiles = {"num_vocab_tiling": 2, "vocab_tiling_axis": "vocab"}
  assert tiny.make_config(quantization="int8", vocab_size=151_936, **tiles).model.quantization == "int8"
  with pytest.raises(ValueError, match="no derivative beside"):
    jax.jvp(lambda x: INT8.rounded(x, (1,)), (jnp.ones((2, 3)),), (jnp.ones((2, 3)),))
  with pytest.raises(ValueError, match="133144"):
    jax.eval_shape(lambda x: dense.contract(x, x.T, 1, INT8), jax.ShapeDtypeStruct((2, 133_145), jnp.float32))
  assert config.load().model.quantization == ""


def test_a_rounded_layer_keeps_the_bytes_of_a_plain_one(capsys):
  """For the backward pass, with remat_policy=minimal: products in the compute dtype, not their wider sums."""

  def kept(quantization: str) -> list[str]:
    cfg = tiny.make_config(quantization=quantization, dtype="bfloat16", base_num_decoder_layers=1, scan_layers=False)
    graphdef, state = nnx.split(models.create_abstract(cfg))
    print_saved_residuals(lambda state: nnx.merge(graphdef, state)(jnp.zeros((2, 13), jnp.int32)).sum(), state)
    lines = capsys.readouterr().out.splitlines()
    return sorted(line.split()[0] for line in lines if "argument" not in line)

  plain = kept("")
  assert kept("int8") == kept("fp8") == plain and any(shape.startswith("bf16[2,13,36]") for shape in plain)
