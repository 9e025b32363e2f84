"""Generation: the cache gives the logits of the whole text, sampling cuts where it should, rows do not disturb each
other."""

import functools
import itertools

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost.config import ConfigError
from maxghost.serving import Generator, Sampling, generator, kv_cache
from maxghost.serving.sampling import choose, cut, draw

SIZE = 40
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [200], [17, 3, 99, 4]]


@pytest.fixture(scope="module", autouse=True)
def cheap():
  with tiny.cheap_compilation():
    yield


@pytest.fixture(scope="module")
def model():
  return tiny.make_model(tiny.make_config())


@pytest.fixture(scope="module")
def greedy(model):
  """What each prompt's greedy continuation is, 9 tokens."""
  return Generator(nnx.graphdef(model), SIZE).generate(nnx.state(model), PROMPTS, 9)


@nnx.jit
def whole_logits(model, tokens_BT):
  return model(tokens_BT)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_cached_logits_are_those_of_the_whole_text(model, scan_layers):
  """Each row goes on with fixed tokens; every step's logits against a pass over the whole text."""
  model = model if scan_layers else tiny.make_model(tiny.make_config(scan_layers=False))
  rng = np.random.default_rng(0)
  texts_BT = rng.integers(0, tiny.VOCAB, (3, 18)).astype(np.int32)
  lengths_B = np.array([7, 1, 4], np.int32)
  expected_BTV = np.asarray(whole_logits(model, texts_BT))
  graphdef, state = nnx.split(model)
  padded_BT = np.where(np.arange(11) < lengths_B[:, None], texts_BT[:, :11], 77)
  logits_BV, kept = jax.jit(
    lambda state: generator.read_prompts(nnx.merge(graphdef, state), padded_BT, jnp.asarray(lengths_B), SIZE)
  )(state)
  add = jax.jit(lambda state, *args: generator.add_token(nnx.merge(graphdef, state), *args))
  rows = np.arange(3)
  np.testing.assert_allclose(logits_BV, expected_BTV[rows, lengths_B - 1], atol=1e-5)
  for step in range(10):
    counts_B = lengths_B + step
    logits_BV, kept = add(state, texts_BT[rows, counts_B], counts_B, kept)
    np.testing.assert_allclose(logits_BV, expected_BTV[rows, counts_B], atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "mixtral", "gpt_oss"])
def test_families_have_the_recorded_logits_through_their_caches(name):
  """Learned positions, windows of 5 and 9 positions in ring caches, experts, sinks. Rows begin at 13 and 2 tokens."""
  model, _, tokens_BT, expected_BTV = hf_models.model(name)
  graphdef, state = nnx.split(model)
  lengths_B = np.array([13, 2], np.int32)
  padded_BT = np.where(np.arange(15) < lengths_B[:, None], tokens_BT[:, :15], 3)
  logits_BV, kept = jax.jit(
    lambda state: generator.read_prompts(nnx.merge(graphdef, state), padded_BT, jnp.asarray(lengths_B), 19)
  )(state)
  slots = {x.shape[-2] for x in jax.tree.leaves(kept)}
  assert slots == {"mistral": {5}, "gpt_oss": {9, 19}}.get(name, {19})
  add = jax.jit(lambda state, *args: generator.add_token(nnx.merge(graphdef, state), *args))
  rows = np.arange(2)
  np.testing.assert_allclose(logits_BV, expected_BTV[rows, lengths_B - 1], atol=1e-5)
  for step in range(6):
    counts_B = lengths_B + step
    logits_BV, kept = add(state, tokens_BT[rows, counts_B], counts_B, kept)
    np.testing.assert_allclose(logits_BV, expected_BTV[rows, counts_B], atol=1e-5)


def test_greedy_text_is_the_argmax_of_every_prefix(model, greedy):
  texts_BT = np.zeros((3, 18), np.int32)
  for i, prompt in enumerate(PROMPTS):
    texts_BT[i, : len(prompt) + 9] = [*prompt, *greedy.row(i)]
  best_BT = np.argmax(np.asarray(whole_logits(model, texts_BT)), axis=-1)
  for i, prompt in enumerate(PROMPTS):
    np.testing.assert_array_equal(greedy.row(i), best_BT[i, len(prompt) - 1 : len(prompt) + 8])


def test_a_model_in_float64_generates():
  """A run with dtype=float64 has 64-bit integers too; it draws samples and answers like any other."""
  with jax.enable_x64(True):
    model = tiny.make_model(tiny.make_config(dtype="float64", weight_dtype="float64"))
    found = Generator(nnx.graphdef(model), SIZE).generate(nnx.state(model), PROMPTS, 3)
    for i, prompt in enumerate(PROMPTS):
      logits_TV = whole_logits(model, np.array([[*prompt, *found.row(i)]], np.int32))[0]
      np.testing.assert_array_equal(found.row(i), np.argmax(np.asarray(logits_TV), -1)[len(prompt) - 1 : -1])


def test_a_row_ends_at_its_stop_token_and_the_others_go_on(model, greedy):
  graphdef, state = nnx.split(model)
  stop = int(greedy.row(0)[2])
  made = Generator(graphdef, SIZE, stop_ids=[stop])
  progress = made.generate(state, PROMPTS, 9)
  for i in range(3):
    ids = greedy.row(i)
    end = np.flatnonzero(ids == stop)
    np.testing.assert_array_equal(progress.row(i), ids[: end[0] + 1] if len(end) else ids)
    assert progress.done_B[i] == bool(len(end))
  assert progress.counts_B[0] == 1 + list(greedy.row(0)).index(stop)
  assert made.seconds.tokens == progress.counts_B.sum() - 3 < 3 * 8  # the first ones are of reading the prompts


def test_streamed_pieces_are_the_whole_and_rows_do_not_see_each_other(model):
  graphdef, state = nnx.split(model)
  sampler = Generator(graphdef, SIZE, sampling=Sampling(temperature=1.5, top_k=50))
  pieces = list(sampler.stream(state, PROMPTS, 8, every=3, seed=4))
  assert [list(p.counts_B) for p in pieces] == [[1] * 3, [4] * 3, [7] * 3, [8] * 3]
  for before, after in itertools.pairwise(pieces):
    np.testing.assert_array_equal(before.ids_BN[:, : before.counts_B[0]], after.ids_BN[:, : before.counts_B[0]])
  other = [*PROMPTS[:1], [1, 2, 3], [44] * 9]
  again = sampler.generate(state, other, 8, seed=4)
  np.testing.assert_array_equal(again.row(0), pieces[-1].row(0))
  assert not np.array_equal(again.row(1), pieces[-1].row(1))
  assert not np.array_equal(sampler.generate(state, other, 8, seed=5).row(0), again.row(0))


@pytest.mark.parametrize(
  ("prompts", "num_new", "message"),
  [([], 3, "at least one token"), ([[1], []], 3, "at least one token"), ([[1] * 30], 11, "more than the 40 positions"),
   ([[1], [2, tiny.VOCAB]], 3, "token id 263: the vocabulary of the model has the ids 0 to 262"), ([[-1]], 3, "id -1"),
   ([[2**40]], 3, f"id {2**40}")],
)  # fmt: skip
def test_prompts_that_cannot_be_served(model, prompts, num_new, message):
  with pytest.raises(ValueError, match=message):
    Generator(nnx.graphdef(model), SIZE).generate(nnx.state(model), prompts, num_new)


def softmax(x):
  x = np.exp(x - x.max())
  return x / x.sum()


@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (5, True)])
def test_one_token_against_plain_attention(window, with_sinks):
  """Rows of 9 and 3 earlier tokens; H=6, K=2, h=4; a window's cache has no more slots than the window."""
  rng = np.random.default_rng(1)
  heads, num_kv, width, total = 6, 2, 4, 13
  q, k, v = (rng.normal(size=(2, total, n, width)).astype(np.float32) for n in (heads, num_kv, num_kv))
  sinks, cap = rng.normal(size=heads).astype(np.float32) if with_sinks else None, 1.5
  lengths_B = jnp.array([9, 3], jnp.int32)
  size = window or 12
  kept = [tuple(kv_cache._slots(jnp.asarray(x[:, :10]).swapaxes(1, 2), lengths_B, size) for x in (k, v))]
  assert kept[0][0].shape == (2, num_kv, window or 12, width)
  for step in range(3):
    counts_B = lengths_B + step
    rows = np.arange(2)
    cache = kv_cache.Continuation(kept, counts_B)
    at = np.asarray(counts_B)
    new = (jnp.asarray(x[rows, at][:, None]) for x in (q, k, v))
    out = cache.attend(*new, kernel="dot_product", window=window, sinks_H=sinks, soft_cap=cap, scale=0.7)
    for row, position in enumerate(at):
      first = max(0, position - window + 1) if window else 0
      for head in range(heads):
        keys, values = (x[row, first : position + 1, head // 3] for x in (k, v))
        scores = cap * np.tanh(keys @ q[row, position, head] * 0.7 / cap)
        weights = softmax(scores if sinks is None else np.append(scores, sinks[head]))[: len(scores)]
        np.testing.assert_allclose(out[row, 0, head], weights @ values, atol=1e-6)
    kept = kv_cache.append(kept, cache.entries, counts_B)
  precise = functools.partial(kv_cache.Continuation(kept, counts_B).attend, precision="highest")
  assert not tiny.rounded_products(jax.make_jaxpr(precise)(q[:, :1], k[:, :1], v[:, :1]))


def test_cut_keeps_the_likeliest():
  probabilities = np.array([[0.4, 0.05, 0.3, 0.15, 0.1], [0.05, 0.1, 0.15, 0.3, 0.4]])
  logits_BV = jnp.log(probabilities)
  kept = {
    name: np.isfinite(np.asarray(cut(logits_BV, Sampling(1.0, **options)))).tolist()
    for name, options in {"k": {"top_k": 2}, "p": {"top_p": 0.75}, "both": {"top_k": 2, "top_p": 0.5}}.items()
  }
  assert kept["k"] == [[True, False, True, False, False], [False, False, False, True, True]]
  assert kept["p"] == [[True, False, True, True, False], [False, False, True, True, True]]
  # The two best have 4/7 and 3/7 after the cut, so half the probability is reached by the best alone.
  assert kept["both"] == [[True, False, False, False, False], [False, False, False, False, True]]
  # float32 has no such share, and the likeliest still stays.
  tiny_share = Sampling(1.0, top_p=1e-50)
  assert np.isfinite(np.asarray(cut(logits_BV, tiny_share))).tolist() == kept["both"]
  rows = {"temperature": 1.0, "top_k": 0, "top_p": 1e-50, "min_p": 0.0, "repetition_penalty": 1.0}
  rows = {name: np.full(2, value, np.int32 if name == "top_k" else np.float32) for name, value in rows.items()}
  rows |= {"key": np.zeros((2, 2), np.uint32), "step": np.zeros(2, np.int32), "top": np.zeros(2, np.int32)}
  assert draw(logits_BV, jnp.zeros((2, 5), bool), rows)[0].tolist() == [0, 4]


def test_draws_follow_the_distribution_at_the_temperature():
  probabilities = np.array([0.5, 0.3, 0.15, 0.05])
  count = 4000
  keys = jax.random.split(jax.random.key(0), count)
  logits = jnp.broadcast_to(jnp.log(probabilities), (count, 4))
  for temperature in (1.0, 0.5):
    drawn = np.asarray(choose(logits, keys, Sampling(temperature))[0])
    expected = probabilities ** (1 / temperature) / (probabilities ** (1 / temperature)).sum()
    logps = np.asarray(choose(logits, keys, Sampling(temperature))[1])
    np.testing.assert_allclose(np.exp(logps), expected[drawn], rtol=1e-5)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / count, expected, atol=0.03)
  assert set(np.asarray(choose(logits, keys, Sampling(1.0, top_k=2))[0])) == {0, 1}
  assert set(np.asarray(choose(logits, keys, Sampling())[0])) == {0}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": 1e-50}, "temperature=1e-50: 0 .the likeliest token., or 1e-06 or more"),
    ({"temperature": 1.0, "top_k": -2}, "top_k=-2"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
    ({"top_k": 3}, "no meaning at temperature=0"),
  ],
)
def test_sampling_out_of_bounds(options, message):
  with pytest.raises(ConfigError, match=message):
    Sampling(**options)


def test_a_cache_in_int8_does_not_depend_on_when_a_token_was_kept():
  """Logits after tokens one by one are those of one prompt, near those of the plain cache."""
  plain, model = (tiny.make_model(tiny.make_config(quantize_kvcache=flag)) for flag in (False, True))
  texts_BT = np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 12)).astype(np.int32)

  @nnx.jit(static_argnums=(1,))
  def read(model, count: int):
    logits_BV, kept = generator.read_prompts(model, texts_BT[:, :count], jnp.full(2, count), SIZE)
    for at in range(count, 12):
      logits_BV, kept = generator.add_token(model, texts_BT[:, at], jnp.full(2, at), kept)
    return logits_BV, kept

  (whole, kept), (by_one, _), (expected, wide) = read(model, 12), read(model, 9), read(plain, 9)
  assert oracles.relative_error(by_one, whole) < 1e-5 < oracles.relative_error(by_one, expected) < 0.05
  sizes = [sum(x.nbytes for x in jax.tree.leaves(held)) for held in (kept, wide)]
  assert sizes[0] == sizes[1] * (6 + 4) // (6 * 4)  # heads of 6 numbers, and a scale for each
