"""Every attention kernel against one written out in NumPy, and every combination it does not support.

B=2 rows, T=13 positions, H=6 query heads, K=3 key/value heads, h=5 head width, values 4 wide.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from maxghost import config
from maxghost.config import ConfigError
from maxghost.models import attention, attention_blockwise, attention_flash, autodiff
from maxghost.parallel import shardings
from maxghost.parallel.shardings import Layout, use

B, T, H, K, WIDTH, VALUES = 2, 13, 6, 3, 5, 4
SEGMENTS = np.array([[1] * 4 + [2] * 6 + [0] * 3, [1] * 9 + [2] * 4], np.int32)
OPTIONS = {
  "plain": {},
  "window": {"window": 3},
  "soft_cap": {"soft_cap": 0.8},
  "sinks": {"sinks_H": True},
  "all": {"window": 6, "soft_cap": 1.3, "sinks_H": True, "scale": 0.7},
}


def arrays(dtype=np.float32, length=T, width=WIDTH, values=VALUES, seed=0):
  rng = np.random.default_rng(seed)
  shapes = ((B, length, H, width), (B, length, K, width), (B, length, K, values))
  return [rng.normal(size=s).astype(dtype) for s in shapes], rng.normal(size=H).astype(dtype)


def reference(q, k, v, segments, sinks=None, window=None, soft_cap=None, scale=None):
  """One query at a time, float64."""
  out = np.zeros((*q.shape[:3], v.shape[-1]))
  for b in range(q.shape[0]):
    for t in range(q.shape[1]):
      seen = [
        s for s in range(t + 1)
        if (segments is None or segments[b, s] == segments[b, t]) and (window is None or t - s < window)
      ]  # fmt: skip
      for h in range(q.shape[2]):
        group = h // (q.shape[2] // k.shape[2])
        score = k[b, seen, group] @ q[b, t, h] * (q.shape[-1] ** -0.5 if scale is None else scale)
        score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
        weight = np.exp(score)
        total = weight.sum() + (0 if sinks is None else np.exp(sinks[h]))
        out[b, t, h] = weight @ v[b, seen, group] / total
  return out


def numerical(function, x, direction, step=1e-4):
  return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


def splash(q, k, v, segments, *, sinks_H=None, window=None, soft_cap=None, scale=None):
  shape = attention.Shape(q.shape[-1] ** -0.5 if scale is None else scale, window, soft_cap)
  return attention_flash.splash(q, k, v, segments, sinks_H, shape, interpret=True)


def online(monkeypatch):
  """Long sequences' path on short ones: blocks of 5, so that 13 positions end in a ragged one."""
  monkeypatch.setattr(attention, "SHORT", 3)
  monkeypatch.setattr(attention_blockwise, "BLOCK", 5)


def call(kernel, monkeypatch):
  """attend(q, k, v, segments, **options) of a kernel, of which 'online' and 'splash' are the long and the TPU one."""
  if kernel == "splash":
    return splash
  if kernel == "online":
    online(monkeypatch)
  return functools.partial(attention.attend, kernel="blockwise" if kernel == "online" else kernel)


def chosen(options, sinks):
  return options | ({"sinks_H": sinks} if "sinks_H" in options else {})


def gradients(attend, q, k, v, segments, options, weights):
  """Values, and gradients of <attend, weights> in q, k, v and, where there are any, the sinks."""
  others = {name: value for name, value in options.items() if name != "sinks_H"}

  def total(q, k, v, sinks):
    out = attend(q, k, v, segments, **others, **({} if sinks is None else {"sinks_H": sinks}))
    return jnp.sum(out * weights), out

  argnums = (0, 1, 2, 3) if "sinks_H" in options else (0, 1, 2)
  with tiny.cheap_compilation():
    grads, out = jax.jit(jax.grad(total, argnums, has_aux=True))(q, k, v, options.get("sinks_H"))
  return [np.asarray(x) for x in (out, *grads)]


@pytest.mark.parametrize(
  ("kernel", "name"),
  [*(("dot_product", name) for name in OPTIONS), *((k, n) for k in ("blockwise", "online") for n in ("window", "all"))],
)
def test_values(kernel, name, monkeypatch):
  (q, k, v), sinks = arrays()
  options = chosen(OPTIONS[name], sinks)
  attend = call(kernel, monkeypatch)
  expected = reference(q, k, v, SEGMENTS, **{"sinks" if n == "sinks_H" else n: x for n, x in options.items()})
  with tiny.cheap_compilation():
    out = jax.jit(lambda q, k, v: attend(q, k, v, SEGMENTS, **options))(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    if name == "window":
      out = jax.jit(lambda q, k, v: attend(q, k, v, None, window=3))(q, k, v)
      np.testing.assert_allclose(out, reference(q, k, v, None, window=3), rtol=2e-5, atol=2e-6)


def test_gradients_of_dot_product_are_differences_of_its_values():
  (q, k, v), sinks = arrays(np.float64)
  weights = np.random.default_rng(5).normal(size=(B, T, H, VALUES))
  options = chosen(OPTIONS["all"], sinks)
  attend = functools.partial(attention.attend, kernel="dot_product")
  with jax.enable_x64(True):
    _, *ours = gradients(attend, q, k, v, SEGMENTS, options, weights)
  values = [q, k, v, sinks]
  for i, gradient in enumerate(ours):
    direction = np.random.default_rng(i).normal(size=values[i].shape)

    def moved(x, i=i):
      q, k, v, sinks = (*values[:i], x, *values[i + 1 :])
      return (reference(q, k, v, SEGMENTS, sinks, 6, 1.3, 0.7) * weights).sum()

    assert np.isclose((gradient * direction).sum(), numerical(moved, values[i], direction), rtol=1e-6)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("kernel", ["blockwise", "online", "splash"])
def test_gradients(kernel, name, monkeypatch):
  (q, k, v), sinks = arrays()
  options = chosen(OPTIONS[name], sinks)
  weights = np.random.default_rng(5).normal(size=(B, T, H, VALUES)).astype(np.float32)
  exact = gradients(functools.partial(attention.attend, kernel="dot_product"), q, k, v, SEGMENTS, options, weights)
  ours = gradients(call(kernel, monkeypatch), q, k, v, SEGMENTS, options, weights)
  assert len(ours) == len(exact) == 4 + ("sinks_H" in options)
  for a, b in zip(ours, exact, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kernel", ["online", pytest.param("splash", marks=pytest.mark.slow)])
def test_sinks_per_position_have_a_gradient_per_position(kernel, monkeypatch):
  """What scores a sink per token: the same values, and gradients that add up to those of the head's one sink."""
  (q, k, v), sinks = arrays()
  spread = np.broadcast_to(sinks, (B, T, H)).copy()
  weights = np.random.default_rng(5).normal(size=(B, T, H, VALUES)).astype(np.float32)
  dot_product = functools.partial(attention.attend, kernel="dot_product")
  expected = gradients(dot_product, q, k, v, SEGMENTS, {"window": 6, "sinks_H": spread}, weights)
  per_head = gradients(dot_product, q, k, v, SEGMENTS, {"window": 6, "sinks_H": sinks}, weights)
  np.testing.assert_allclose(expected[4].sum((0, 1)), per_head[4], rtol=1e-4, atol=1e-5)
  ours = gradients(call(kernel, monkeypatch), q, k, v, SEGMENTS, {"window": 6, "sinks_H": spread}, weights)
  for a, b in zip(ours, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kernel", ["online", "splash"])
def test_bfloat16_keeps_its_dtype_and_a_softmax_in_float32(kernel, monkeypatch):
  (q, k, v), _ = arrays(jnp.bfloat16, length=40)
  attend = call(kernel, monkeypatch)
  with tiny.cheap_compilation():
    out = jax.jit(lambda q, k, v: attend(q, k, v, None))(q, k, v)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.float32(out), reference(*(np.float64(x) for x in (q, k, v)), None), rtol=2e-2, atol=2e-2
  )


@pytest.mark.parametrize("kernel", ["dot_product", "online", "flash"])
def test_forward_mode(kernel, monkeypatch):
  (q, k, v), sinks = arrays()
  (dq, dk, dv), ds = arrays(seed=1)
  options = chosen(OPTIONS["all"], sinks)
  attend = call(kernel, monkeypatch)
  others = {n: x for n, x in options.items() if n != "sinks_H"}

  def f(kernel):
    return lambda q, k, v, s: kernel(q, k, v, SEGMENTS, sinks_H=s, **others)

  plain = functools.partial(attention.attend, kernel="dot_product")
  primals, tangents = (q, k, v, sinks), (dq, dk, dv, ds)
  with tiny.cheap_compilation(), autodiff.forward_mode():
    expected, ours = jax.jit(lambda x, dx: [jax.jvp(f(kernel), x, dx) for kernel in (plain, attend)])(primals, tangents)
  for a, b in zip(ours, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mesh", ["tensor 2 x data 2", "fsdp 2"])
def test_splash_on_a_mesh(mesh):
  """Each device runs the kernel on its rows and heads; the gradient of the sinks is summed over the rows' devices."""
  (q, k, v), sinks = arrays()
  q, k, v = q[:, :, :4], k[:, :, :2], v[:, :, :2]
  sizes = {f"ici_{name}_parallelism": int(size) for name, size in (part.split() for part in mesh.split(" x "))}
  cfg = config.replace(config.load(), **({"ici_fsdp_parallelism": 1} | sizes))
  layout = Layout.of(cfg.parallel, jax.devices()[: np.prod(list(sizes.values()))])
  weights = np.random.default_rng(5).normal(size=(B, T, 4, VALUES)).astype(np.float32)
  options = {"window": 6, "sinks_H": sinks[:4]}
  dot_product = functools.partial(attention.attend, kernel="dot_product")
  exact = gradients(dot_product, q, k, v, SEGMENTS, options, weights)
  with use(layout):
    ours = gradients(splash, q, k, v, SEGMENTS, options, weights)
  for a, b in zip(ours, exact, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_splash_wants_whole_rows():
  (q, k, v), _ = arrays(length=16)
  cfg = config.replace(config.load(), ici_context_parallelism=2, ici_fsdp_parallelism=1)
  layout = Layout.of(cfg.parallel, jax.devices()[:2])
  with use(layout), pytest.raises(ConfigError, match="use attention=blockwise, or ici_context_parallelism=1"):
    splash(q, k, v, None)


def test_blockwise_holds_nothing_of_the_size_of_all_scores():
  length = 2048
  shapes = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (4, 2, 2)]

  def largest(kernel):
    total = jax.grad(lambda q, k, v: attention.attend(q, k, v, kernel=kernel).sum(), argnums=(0, 1, 2))
    return max(v.aval.size for e in tiny.equations(jax.make_jaxpr(total)(*shapes)) for v in e.outvars)

  assert largest("dot_product") == 4 * length**2
  assert largest("blockwise") == 4 * attention_blockwise.BLOCK**2  # whatever the length


@pytest.mark.parametrize("kernel", ["blockwise", "online"])
def test_every_product_has_the_precision_asked_for(kernel, monkeypatch):
  (q, k, v), _ = arrays()
  attend = call(kernel, monkeypatch)
  total = lambda *x: attend(*x, precision="highest").sum()  # noqa: E731
  assert not tiny.rounded_products(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, v))


def test_blockwise_skips_the_blocks_that_a_window_hides(monkeypatch):
  """Values far outside the window may be anything, infinities included: they are never read."""
  online(monkeypatch)
  (q, k, v), _ = arrays(length=40)
  k[:, :20], v[:, :20] = np.nan, np.nan
  with tiny.cheap_compilation():
    out = np.asarray(jax.jit(lambda q, k, v: attention.attend(q, k, v, kernel="blockwise", window=4))(q, k, v))
  assert np.isfinite(out[:, 28:]).all()  # blocks of 5: the first block that sees only finite keys starts at 25


def test_the_choice_of_a_kernel_follows_length_and_platform():
  assert attention.resolve_kernel("autoselected", 64) == "blockwise"
  with shardings.tracing_for("tpu"):
    assert attention.resolve_kernel("autoselected", 1024) == "dot_product"
    assert attention.resolve_kernel("autoselected", 1025) == "blockwise"
    assert attention.resolve_kernel("dot_product", 1025) == "dot_product"


def test_cudnn_is_asked_for_the_same_attention():
  """Its arguments, run through XLA's implementation of the same interface."""
  (q, k, v), _ = arrays(jnp.bfloat16, length=14, width=16, values=16)
  shape, segments = attention.Shape(0.3, window=4), np.pad(SEGMENTS, ((0, 0), (0, 1)))
  with tiny.cheap_compilation():
    ours = jax.jit(lambda q, k, v: attention_flash.cudnn(q, k, v, segments, None, shape, implementation="xla"))(q, k, v)
  exact = reference(*(np.float64(x) for x in (q, k, v)), segments, window=4, scale=0.3)
  np.testing.assert_allclose(np.float32(ours), exact, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
  ("platform", "changes", "message"),
  [
    ("cpu", {}, "no kernel on cpu, only on tpu and gpu; use attention=blockwise"),
    ("tpu", {"dtype": np.float64}, "no float64 on tpu; use attention=blockwise"),
    ("gpu", {"dtype": np.float32}, "bfloat16 on gpu, not float32; use dtype=bfloat16"),
    ("gpu", {"width": 12}, "head_dim=12: use head_dim=16, or attention=blockwise"),
    ("gpu", {"width": 300}, "head_dim=300: use head_dim=256, or"),
    ("gpu", {"length": 13}, "max_target_length=13: use max_target_length=14, or attention=blockwise"),
    ("gpu", {"soft_cap": 3.0}, "no soft cap on gpu; use attention=blockwise"),
    ("gpu", {"sinks_H": True}, "no sinks on gpu; use attention=blockwise"),
    ("gpu", {"length": 14}, "attention=flash: .*; use attention=blockwise"),  # no cuDNN here
  ],
)
def test_what_flash_cannot_do_is_an_error(platform, changes, message):
  changes = dict(changes)
  dtype, width, length = (changes.pop(n, x) for n, x in (("dtype", jnp.bfloat16), ("width", 16), ("length", 14)))
  segments = np.resize(SEGMENTS, (B, length))
  with jax.enable_x64(True), shardings.tracing_for(platform):
    (q, k, v), sinks = arrays(dtype, length=length, width=width, values=width)
    with pytest.raises(ConfigError, match=message):
      attention.attend(q, k, v, segments, kernel="flash", **chosen(changes, sinks))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"kernel": "flush"}, "attention=flush: use dot_product, blockwise, flash or autoselected"),
    ({"kernel": "dot_product", "window": 0}, "window=0"),
    ({"kernel": "dot_product", "soft_cap": 0.0}, "soft_cap=0"),
  ],
)
def test_bad_arguments(options, message):
  (q, k, v), _ = arrays()
  with pytest.raises(ValueError, match=message):
    attention.attend(q, k, v, **options)


def test_keys_for_other_positions_or_heads_are_refused():
  (q, k, v), _ = arrays()
  with pytest.raises(ValueError, match="positions differ"):
    attention.attend(q, k[:, 1:], v[:, 1:], kernel="dot_product")
  with pytest.raises(ValueError, match="6 query heads are no multiple of 4"):
    attention.attend(q, *np.ones((2, B, T, 4, WIDTH), np.float32), kernel="dot_product")
