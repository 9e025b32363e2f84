"""A wrong float32 gradient on CPU, in JAX alone: `jit(jacrev(f))` with jaxlib 0.10.2. Run: python tests/mapped_vjp.py

f: log-probabilities [8, 8] of the next tokens of a one-layer transformer, as a function of the first factor A of a
low-rank addition to its query weights. `jacrev` maps the VJP of f over all cotangents. Relative errors against float64,
measured with jax 0.10.2:

  jit(jacrev(f)) 0.8 to 1.4    jacrev(f) without jit 6e-07    jit(jacfwd(f)) 5e-07
  jit(jacrev(f)) without attention 0.9, without the feed-forward layer 0.8, and without the norms besides 2e-07

So it takes the norm, x / rms(x), and 64 cotangents (with 16 the result is right). The cause is XLA's YNNPACK fusions on
CPU: compiled with xla_cpu_experimental_ynn_fusion_type="" (a compiler option, or an XLA flag) the error is 7e-07. XLA's
fusion emitters, fast math, oneDNN, XNNPACK and Eigen's threads make no difference, and in float64 all agree to 1e-15.
maxghost maps no VJP over cotangents; tests/unit/test_mapped_gradients.py compares what comes closest.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROWS, LENGTH, WIDTH, HEADS, HEAD, HIDDEN, WORDS, RANK = 8, 8, 20, 4, 6, 36, 50, 3


def make(dtype, without=""):
  """(f, A) with the same numbers in every dtype. without: a part that is left out."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3, dtype)  # noqa: E731
  table, head = draw(WORDS, WIDTH), draw(WIDTH, WORDS)
  query, key, value = (draw(WIDTH, HEADS, HEAD) for _ in range(3))
  out, up, gate, down = draw(HEADS, HEAD, WIDTH), draw(WIDTH, HIDDEN), draw(WIDTH, HIDDEN), draw(HIDDEN, WIDTH)
  a, b = draw(WIDTH, RANK), draw(RANK, HEADS * HEAD)
  inputs, targets = (jnp.asarray(rng.integers(0, WORDS, (ROWS, LENGTH))) for _ in range(2))

  def norm(x):
    return x if without == "norms" else x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

  def f(a):
    x = table[inputs]
    n = norm(x)
    low_rank = (n @ a @ b).reshape(ROWS, LENGTH, HEADS, HEAD)
    if without == "attention":
      x = x + jnp.einsum("bthk,hkd->btd", low_rank, out)
    else:
      q = jnp.einsum("btd,dhk->bthk", n, query) + low_rank
      scores = jnp.einsum("bthk,bshk->bhts", q, jnp.einsum("btd,dhk->bthk", n, key)) / HEAD**0.5
      scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
      mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), jnp.einsum("btd,dhk->bthk", n, value))
      x = x + jnp.einsum("bthk,hkd->btd", mixed, out)
    if without != "feed-forward layer":
      n = norm(x)
      x = x + (jax.nn.silu(n @ up) * (n @ gate)) @ down
    logits = norm(x) @ head
    return jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[..., None], -1)[..., 0]

  return f, a


def main():
  ways = {"jit(jacrev(f))": lambda f: jax.jit(jax.jacrev(f)), "jacrev(f)": jax.jacrev,
          "jit(jacfwd(f))": lambda f: jax.jit(jax.jacfwd(f))}  # fmt: skip
  for without in ("", "attention", "feed-forward layer", "norms"):
    with jax.enable_x64(True):
      f, a = make(jnp.float64, without)
      exact = np.asarray(jax.jacfwd(f)(a))
    for name, way in ways.items() if not without else [("jit(jacrev(f))", ways["jit(jacrev(f))"])]:
      f, a = make(jnp.float32, without)
      error = np.linalg.norm(np.asarray(way(f)(a)) - exact) / np.linalg.norm(exact)
      print(f"{name:15} {'without the ' + without if without else '':30} relative error {error:.1e}")


if __name__ == "__main__":
  main()
